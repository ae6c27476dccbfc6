"""Columns of values that `--carry` names: values of a record, or of each of its tokens, that
follow it into rows.

    logprobs:float32            a value for each token
    reward:float32/record       one for the record, and in rows one for each segment of it
    weight:float32/message      one for each message, and so for each of its trained tokens
    teacher_ids:int32[32]       32 for each token

`--carry` names and types them; whether the values are of tokens, messages or records is written
after them once the first records are read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from packer_cli.errors import UsageError, named

if TYPE_CHECKING:  # --help and stats need no arrays
    import numpy as np

# Storage of each type. A bool has a byte, which is 0 or 1; bfloat16 the upper half of a float32.
TYPES = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "uint16",
    "int32": "int32",
    "int64": "int64",
    "uint16": "uint16",
    "uint8": "uint8",
    "bool": "uint8",
}
TOKEN, MESSAGE, RECORD = "token", "message", "record"
OF_MESSAGES = "--carry of messages"  # as an option, in errors
# In traces, columns of sampled tokens, and the weights of all tokens.
SAMPLED, LOSS_WEIGHTS = ("logprobs", "advantages", "reference_logprobs"), "loss_weights"
_FORM = re.compile(r"(.+):([a-z0-9]+)(?:\[([0-9]+)\])?(?:/(token|message|record))?", re.DOTALL)
_TIP = "write NAME:TYPE, such as logprobs:float32, or NAME:TYPE[K] for K values a token"
_MOST_VALUES = 1 << 12
# What else is called so, in rows, documents and batches.
_TAKEN = frozenset((
    "input_ids", "labels", "shift_labels", "attention_mask", "position_ids", "seq_idx",
    "cu_seqlens", "cu_seqlens_padded", "segments", "source", "file", "position",
    "start", "trained", "text", "messages", "seq_lengths",
))  # fmt: skip


@dataclass(frozen=True)
class ValueColumn:
    """One carried column.

    name     of the field of records, and of the column
    type     one of TYPES
    count    how many values there are where others have one; None: one, not in a list
    of       what has a value: TOKEN, MESSAGE or RECORD; "" until the first records are read
    default  JSON text of the value where a record or source has none; None: it must have one
    """

    name: str
    type: str
    count: int | None = None
    of: str = ""
    default: str | None = field(default=None, compare=False)

    def __str__(self) -> str:
        count = "" if self.count is None else f"[{self.count}]"
        return f"{self.name}:{self.type}{count}{self.of and '/'}{self.of}"

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy type of a value, or of `count` values."""
        import numpy as np  # noqa: PLC0415

        return np.dtype((TYPES[self.type], () if self.count is None else (self.count,)))

    @property
    def arrow_type(self) -> Any:
        """The Arrow type of a value, or of `count` values."""
        import pyarrow as pa  # noqa: PLC0415

        kind = pa.from_numpy_dtype(self.dtype.base)
        if self.count is None:
            return kind
        return pa.list_(pa.field("item", kind, nullable=False), self.count)

    @property
    def bytes(self) -> int:
        """The size in bytes of a value, or of `count` values."""
        sizes = {"float32": 4, "int32": 4, "int64": 8, "uint8": 1, "bool": 1}
        return sizes.get(self.type, 2) * (self.count or 1)

    @property
    def is_float(self) -> bool:
        return "float" in self.type

    @property
    def is_of_segments(self) -> bool:
        """True if rows have a value for each segment, rather than for each token."""
        return self.of == RECORD


def is_of_loss(name: str) -> bool:
    """Tell if a column of traces has weights of the loss, alone or as one of several streams."""
    return name.partition(".")[0] == LOSS_WEIGHTS


@lru_cache
def value_columns_of(
    texts: Sequence[str], defaults: Sequence[tuple[str, str]] = ()
) -> dict[str, ValueColumn]:
    """Return the columns that `--carry` names, by name, with their `--carry-default`.

    texts, defaults  tuples. Raises UsageError.
    """
    columns = dict[str, ValueColumn]()
    for text in texts:
        form = _FORM.fullmatch(text)
        if form is None:
            raise UsageError(f"--carry: {text!r} is not NAME:TYPE", _TIP)
        name, kind, count, of = form.groups()
        if kind not in TYPES:
            raise UsageError(f"--carry: {text!r}: {kind!r} is not a type", f"use {named(TYPES)}")
        number = None if count is None else int(count)
        if number is not None and not 1 <= number <= _MOST_VALUES:
            raise UsageError(f"--carry: {text!r}: not 1 to {_MOST_VALUES} values a token", _TIP)
        if name in columns or name in _TAKEN:
            why = "named twice" if name in columns else "a column that rows have already"
            raise UsageError(f"--carry: {name!r} is {why}", "leave it out, or rename the field")
        columns[name] = ValueColumn(name, kind, number, of or "", dict(defaults).get(name))
    return columns
