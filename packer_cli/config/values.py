"""Values as users write them: numbers, sizes, shares, lists, fields."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from packer_cli.errors import UsageError

_SUFFIXES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
# Of amounts, which nobody counts in powers of two.
_THOUSANDS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


def read(kind: str, option: str, given: Any) -> Any:
    """The value of an option declared to be of this kind; without a kind, as given."""
    if isinstance(given, list) and kind != "fields":
        return tuple(given)
    return _READERS[kind](option, given) if kind else given


def written(kind: str, value: Any) -> str:
    """A value as `read` takes it: 256M for 1 << 28."""
    if kind == "list":
        return ",".join(value)
    if kind == "size":
        for suffix in ("T", "G", "M", "K"):
            if value >= _SUFFIXES[suffix] and value % _SUFFIXES[suffix] == 0:
                return f"{value // _SUFFIXES[suffix]}{suffix}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def parse_size(option: str, text: str) -> int:
    """64M, 1GiB, 512kb or a number of bytes."""
    number = _scaled(text.strip().upper().removesuffix("B").removesuffix("I"))
    if number is None:
        raise UsageError(f"{option}: {text!r} is not a size like 256M or 1G")
    return round(number)


def parse_count(option: str, text: str) -> int:
    """4096, or 4k; a whole number."""
    number = _scaled(text.strip().upper())
    if number is None or number != int(number):
        raise UsageError(f"{option}: {text!r} is not a whole number like 4096 or 4k")
    return int(number)


def parse_tokens(option: str, text: str) -> int:
    """200M, 1.5B or a number of tokens: 1.5 * 10**9."""
    number = _scaled(text.strip().upper(), _THOUSANDS)
    if number is None:
        raise UsageError(f"{option}: {text!r} is not a number of tokens like 2B or 200M")
    return round(number)


def parse_share(option: str, text: str) -> float:
    """0.01, or 1%."""
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = math.nan
    if not math.isfinite(share):
        raise UsageError(f"{option}: {text!r} is not a share", "1% is 0.01")
    return share


def parse_count_or_share(option: str, text: str) -> int | float:
    """100 or 4k: a count; 1% or 0.01: a share of all."""
    if "%" not in text and "." not in text and _scaled(text.strip().upper()) is not None:
        return parse_count(option, text)
    return parse_share(option, text)


def parse_list(option: str, text: str) -> tuple[str, ...]:
    """Names separated by commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def parse_counts(option: str, text: str) -> tuple[int, ...]:
    """2048,4096,8k: whole numbers separated by commas, each once."""
    counts = tuple(parse_count(option, one) for one in parse_list(option, text))
    if not counts:
        raise UsageError(f"{option}: {text!r} names no number", "for example 2048,4096,8k")
    refuse_twice(option, counts)
    return counts


def refuse_twice(option: str, values: Sequence[object]) -> None:
    """UsageError for a value that a list has twice."""
    for place, value in enumerate(values):
        if value in values[:place]:
            raise UsageError(f"{option}: {value} is given twice", "name each once")


def parse_fields(option: str, mapped: list[str]) -> tuple[tuple[str, str], ...]:
    """NAME=COLUMN options as pairs, sorted by name; of a name given twice, the last."""
    pairs = {}
    for item in mapped:
        own, separator, name = item.partition("=")
        if not (own and separator and name):
            raise UsageError(
                f"{option}: {item!r} is not NAME=COLUMN", "for example messages=chosen"
            )
        pairs[own] = name
    return tuple(sorted(pairs.items()))


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "count": parse_count,
    "tokens": parse_tokens,
    "counts": parse_counts,
    "size": parse_size,
    "share": parse_share,
    "count or share": parse_count_or_share,
    "list": parse_list,
    "fields": parse_fields,
}


def _scaled(text: str, suffixes: Mapping[str, int] = _SUFFIXES) -> int | float | None:
    """The value of an upper-case number with its suffix; None if it is not a number."""
    unit = text[-1:] if text[-1:] in suffixes else ""
    digits = text.removesuffix(unit)
    try:
        number = int(digits) if digits.lstrip("+-").isdecimal() else float(digits)
        return number * suffixes[unit] if math.isfinite(number) else None
    except (ValueError, OverflowError):  # the latter for hundreds of digits
        return None
