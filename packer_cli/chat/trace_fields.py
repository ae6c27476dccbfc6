"""Read fields of traces, which are Python objects, or JSON that is decoded when it is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any

import msgspec
import numpy as np

from packer_cli._kernels.inputs import read_lists
from packer_cli.options.shapes import ABSENT, may_hold, value_at
from packer_cli.records import HIGHEST_ID, Int64, UInt32

FIX = "fix the record, or use --on-error skip"
Fields = Mapping[str, Any]  # of a record, or of an object in it
Ids = list[Annotated[int, msgspec.Meta(ge=0, le=HIGHEST_ID)]]
Mask = list[bool | Annotated[int, msgspec.Meta(ge=0, le=1)]]
_NULL = b"null"
_OBJECT: tuple[Any, Any] = dict[str, Any], dict[str, msgspec.Raw]


class TraceError(ValueError):
    """A record is not a trace. `tip`: what to do."""

    def __init__(self, message: str, tip: str = FIX) -> None:
        super().__init__(message)
        self.tip = tip


def plain(value: Any) -> Any:
    """Decode a value that is JSON."""
    return _decode(value) if isinstance(value, msgspec.Raw) else value


def is_null(value: Any) -> bool:
    """Tell if a value is missing, or null."""
    is_json = isinstance(value, msgspec.Raw)
    return value is None or (is_json and len(value) == len(_NULL) and bytes(value) == _NULL)


def length_of(values: Any) -> int:
    """Count the items of a list of numbers, perhaps JSON."""
    if isinstance(values, msgspec.Raw):
        text = bytes(values)
        return text.count(b",") + (text.strip(b"[] \t\r\n") != b"")
    return 0 if values is None else len(values)


def typed(value: Any, kind: Any, what: str) -> Any:
    """Return a value as this type; `what`: for errors. Raises TraceError."""
    try:
        is_json = isinstance(value, msgspec.Raw)
        return _decoder(kind)(value) if is_json else msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise TraceError(f"{what}: {error}") from error


def object_of(value: Any, what: str) -> dict[str, Any]:
    """Return an object, whose values are not decoded yet. Raises TraceError."""
    return typed(value, _OBJECT[isinstance(value, msgspec.Raw)], what)  # type: ignore[no-any-return]


def objects(value: Any, what: str) -> list[dict[str, Any]]:
    """Return a list of objects, whose values are not decoded yet. Raises TraceError."""
    kind: Any = list[_OBJECT[isinstance(value, msgspec.Raw)]]  # type: ignore[misc]
    return typed(value, kind, what)  # type: ignore[no-any-return]


@lru_cache
def _decoder(kind: Any) -> Callable[[Any], Any]:
    return msgspec.json.Decoder(kind).decode


_decode = msgspec.json.Decoder().decode


def field_at(fields: Fields, column: str) -> Any:
    """Return the value of a column, or of a field within it if dots lead there; else None."""
    if column in fields or "." not in column:
        return fields.get(column)
    outer = {name: plain(one) for name, one in fields.items() if may_hold((name,), column)}
    value = value_at(outer, column)
    return None if value is ABSENT else value


def first_field(fields: Fields, columns: Sequence[str]) -> Any:
    """Return the first value that these columns have; else None."""
    return next((value for name in columns if not is_null(value := field_at(fields, name))), None)


def number_lists(
    values: Sequence[Any], kind: Any, what: Callable[[int], str]
) -> tuple[UInt32, Int64]:
    """Return the numbers of n lists end to end, and how many each has. Raises TraceError.

    kind  Ids or Mask
    what  describes a list, by its index
    """
    if all(type(value) is msgspec.Raw for value in values):
        text, sizes = b"".join(values), np.empty(len(values), np.int64)
        numbers = np.empty(len(text) // 2 + 1, np.uint32)
        count = read_lists(np.frombuffer(text, np.uint8), numbers, sizes)
        # a true is not an id, and a 2 is not a flag
        is_right = b"e" not in text if kind is Ids else numbers[: max(count, 0)].max(initial=0) < 2
        if count >= 0 and is_right:
            return numbers[:count], sizes
    arrays = [
        value
        if isinstance(value, np.ndarray)
        else np.array(typed(plain(value) or [], kind, what(index)), np.uint32)
        for index, value in enumerate(values)
    ]
    numbers = np.concatenate(arrays) if arrays else np.empty(0, np.uint32)
    return numbers, np.array([*map(len, arrays)], np.int64)
