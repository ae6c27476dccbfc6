"""Values of carried columns as arrays: how they are stored, and what is counted of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from packer_cli.errors import UsageError
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.value_columns import ValueColumn


def check_defaults(columns: Mapping[str, ValueColumn], config: DocumentConfig) -> None:
    """Raise UsageError for a `--carry-default` without a column, and for an invalid value."""
    for name, text in config.carry_default:
        if name not in columns:
            raise UsageError(f"--carry-default: nothing carries {name!r}", "leave it out")
        _default(columns[name], text)


def default_of(column: ValueColumn) -> Any:
    """Return the value that `--carry-default` gives a column, as it is stored; None without one.

    Raises UsageError for an invalid value.
    """
    return None if column.default is None else _default(column, column.default)


@lru_cache  # asked for at each span, and for each batch of rows
def _default(column: ValueColumn, text: str) -> Any:
    try:
        value = np.asarray(json.loads(text))
        if value.shape != column.dtype.shape:
            value = np.broadcast_to(value[()], column.dtype.shape)  # of a number, all K
        return stored(column, value)
    except (ValueError, TypeError, OverflowError) as error:
        raise UsageError(
            f"--carry-default: {column.name}: {text} is not a value of {column.type}",
            f"give a number: --carry-default {column.name}=0",
        ) from error


def stored(column: ValueColumn, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Values as they are stored. Raises ValueError, with a reason, for those that the type cannot
    hold: not finite, out of range, or not whole.
    """
    kind = values.dtype.kind
    if column.type == "bool":
        if kind != "b":
            raise ValueError(f"{column.name} is not true or false")
        return values.astype(np.uint8)
    if kind not in ("iuf" if column.is_float else "iu"):
        expected = "numbers" if column.is_float else "whole numbers"
        raise ValueError(f"{column.name} does not hold {expected}")
    if column.is_float and kind != "f":  # alike, whatever else is read with it
        values = values.astype(np.float64)
    if column.type == "bfloat16":
        made = _bfloat16(values)
        _check(column, values, np.isfinite(values) & ((made & 0x7F80) != 0x7F80))
        return made
    with np.errstate(over="ignore"):
        made = values.astype(column.dtype.base, copy=False)
    _check(column, values, np.isfinite(made) if column.is_float else made == values)
    return made


def _check(column: ValueColumn, values: npt.NDArray[Any], holds: npt.NDArray[np.bool_]) -> None:
    if not holds.all():
        wrong = values[~holds].flat[0]
        raise ValueError(f"{column.name} holds {wrong}, which no {column.type} is")


def _bfloat16(values: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """The upper halves of float32, rounded to the nearest, ties to even."""
    with np.errstate(over="ignore"):
        bits = values.astype(np.float32).reshape(-1).view(np.uint32).astype(np.uint64)
    upper = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    halves: npt.NDArray[np.uint16] = upper.astype(np.uint16).reshape(values.shape)
    return halves


def measured(
    column: ValueColumn, values: npt.NDArray[Any], begin: Any = None, length: Any = None
) -> tuple[int, Any, Any, float]:
    """Count, minimum, maximum and sum of stored values [n], or [n, K]: the same on every machine.

    begin, length  int64[s], ascending: where there are values, and 0 elsewhere; None: everywhere
    """
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


def as_numbers(column: ValueColumn, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Stored values as numbers that numpy knows: bfloat16 as float32, a bool as bool."""
    if column.type == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(bool) if column.type == "bool" else values
