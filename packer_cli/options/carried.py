"""Carried columns: values of a record, or of each of its tokens, that follow it into rows.

    logprobs:float32            a value for each token
    reward:float32/record       one for the record, and in rows one for each segment of it
    weight:float32/message      one for each message, and so for each of its trained tokens
    teacher_ids:int32[32]       32 for each token

`--carry` names and types them; whether the values are of tokens, messages or records is written
after them once the first records have told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from packer_cli.errors import UsageError, named
from packer_cli.records import Values

if TYPE_CHECKING:  # --help and stats need no arrays
    import numpy as np
    import numpy.typing as npt

# How values are stored. A bool has a byte, which is 0 or 1; bfloat16 the upper half of a float32.
TYPES = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "uint16",
    "int32": "int32",
    "int64": "int64",
    "uint8": "uint8",
    "bool": "uint8",
}
TOKEN, MESSAGE, RECORD = "token", "message", "record"
_FORM = re.compile(r"(.+):([a-z0-9]+)(?:\[(\d+)\])?(?:/(token|message|record))?", re.DOTALL)
_TIP = "write NAME:TYPE, such as logprobs:float32, or NAME:TYPE[K] for K values a token"
_MOST_VALUES = 1 << 12
# What else is called so, in rows, documents and batches.
_TAKEN = frozenset((
    "input_ids", "labels", "shift_labels", "attention_mask", "position_ids", "seq_idx",
    "cu_seqlens", "cu_seqlens_padded", "segments", "pair", "side", "source", "file", "position",
    "start", "trained", "chosen", "text", "messages", "seq_lengths",
))  # fmt: skip


@dataclass(frozen=True)
class Carried:
    """One carried column.

    name   of the field of records, and of the column
    type   one of TYPES
    count  how many values there are where others have one; None: one, not in a list
    of     what has a value: TOKEN, MESSAGE or RECORD; "" until records have told
    """

    name: str
    type: str
    count: int | None = None
    of: str = ""

    def __str__(self) -> str:
        count = "" if self.count is None else f"[{self.count}]"
        return f"{self.name}:{self.type}{count}{self.of and '/'}{self.of}"

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of a value, or of its `count` values."""
        import numpy as np  # noqa: PLC0415

        return np.dtype((TYPES[self.type], () if self.count is None else (self.count,)))

    @property
    def arrow_type(self) -> Any:
        """As `dtype`, of Arrow."""
        import pyarrow as pa  # noqa: PLC0415

        kind = pa.from_numpy_dtype(self.dtype.base)
        if self.count is None:
            return kind
        return pa.list_(pa.field("item", kind, nullable=False), self.count)

    @property
    def is_float(self) -> bool:
        return "float" in self.type

    @property
    def is_of_segments(self) -> bool:
        """Whether rows have a value for each segment, rather than for each token."""
        return self.of == RECORD


@lru_cache
def carried_columns(texts: Sequence[str]) -> dict[str, Carried]:
    """The columns that `--carry` names, by name. `texts`: a tuple. Raises UsageError."""
    found = dict[str, Carried]()
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
        if name in found or name in _TAKEN:
            why = "named twice" if name in found else "a column that rows have already"
            raise UsageError(f"--carry: {name!r} is {why}", "leave it out, or rename the field")
        found[name] = Carried(name, kind, number, of or "")
    return found


def row_type(columns: Sequence[Carried]) -> np.dtype[Any]:
    """Of the values of a token: a field for each column."""
    import numpy as np  # noqa: PLC0415

    return np.dtype([(one.name, one.dtype) for one in columns])


def together(fields: npt.NDArray[Any]) -> Values:
    """An array of `row_type` as what is moved about: numpy copies fields one by one, and takes 20
    times as long for it.
    """
    return fields.view(f"V{fields.itemsize}")


def fields_of(values: Values, columns: Iterable[Carried]) -> npt.NDArray[Any]:
    """The array of `row_type` that was put together."""
    return values.view(row_type([*columns]))


def default_of(column: Carried, text: str) -> Any:
    """The value that `--carry-default` gives a column. Raises UsageError."""
    import numpy as np  # noqa: PLC0415

    try:
        value = json.loads(text)
        return stored(column, np.asarray(value))
    except (ValueError, TypeError, OverflowError) as error:
        raise UsageError(
            f"--carry-default: {column.name}: {text} is not a value of {column.type}",
            f"give a number: --carry-default {column.name}=0",
        ) from error


def stored(column: Carried, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Values as they are stored. Raises ValueError, with a reason, for those that the type cannot
    hold: not finite, out of range, or not whole.
    """
    import numpy as np  # noqa: PLC0415

    kind = values.dtype.kind
    if column.type == "bool":
        if kind != "b":
            raise ValueError(f"{column.name} is not true or false")
        return values.astype(np.uint8)
    if kind not in ("iuf" if column.is_float else "iu"):
        expected = "numbers" if column.is_float else "whole numbers"
        raise ValueError(f"{column.name} does not hold {expected}")
    if column.type == "bfloat16":
        made = _bfloat16(values)
        _check(column, values, np.isfinite(values) & ((made & 0x7F80) != 0x7F80))
        return made
    with np.errstate(over="ignore"):
        made = values.astype(column.dtype.base)
    _check(column, values, np.isfinite(made) if column.is_float else made == values)
    return made


def _check(column: Carried, values: npt.NDArray[Any], holds: npt.NDArray[np.bool_]) -> None:
    if not holds.all():
        wrong = values[~holds].flat[0]
        raise ValueError(f"{column.name} holds {wrong}, which no {column.type} is")


def _bfloat16(values: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """The upper halves of float32, rounded to the nearest, ties to even."""
    import numpy as np  # noqa: PLC0415

    with np.errstate(over="ignore"):
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    upper = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    halves: npt.NDArray[np.uint16] = upper.astype(np.uint16)
    return halves


def measured(
    column: Carried, values: npt.NDArray[Any], begin: Any = None, length: Any = None
) -> tuple[int, Any, Any, float]:
    """Count, minimum, maximum and sum of stored values [n], or [n, K]: the same on every machine.

    begin, length  int64[s], ascending: where there are values, and 0 elsewhere; None: everywhere
    """
    import numpy as np  # noqa: PLC0415

    numbers = (as_numbers(column, values) if column.is_float else values).reshape(-1)
    if numbers.dtype == np.float16:  # slow
        numbers = numbers.astype(np.float32)
    low, high, number = numbers, numbers, len(numbers)
    if begin is not None:
        width = column.count or 1
        edges = np.stack([begin, begin + length], axis=1).reshape(-1) * width
        edges = edges[: len(edges) - (edges[-1] == len(numbers))]
        low, high = (one.reduceat(numbers, edges)[::2] for one in (np.minimum, np.maximum))
        number = int(length.sum()) * width
    return number, low.min().item(), high.max().item(), float(numbers.sum(dtype=np.float64))


def as_numbers(column: Carried, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Stored values as numbers that numpy knows: bfloat16 as float32, a bool as bool."""
    import numpy as np  # noqa: PLC0415

    if column.type == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(bool) if column.type == "bool" else values
