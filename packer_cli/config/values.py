"""Values as users write them: numbers, sizes, shares, lists, fields."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from packer_cli.errors import UsageError

_SUFFIXES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
# Amounts of tokens in recipes: nobody counts those in powers of two.
_THOUSANDS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


def read(kind: str, option: str, given: Any) -> Any:
    """The value of an option declared to be of this kind; without a kind, as given."""
    if isinstance(given, list) and kind not in ("fields", "arguments"):
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
    digits = text.strip().upper().removesuffix("B")
    if digits.endswith(("KI", "MI", "GI", "TI")):
        digits = digits[:-1]
    number = _scaled(digits)
    if number is None:
        raise UsageError(f"{option}: {text!r} is not a size like 256M or 1G")
    return round(number)


def parse_count(option: str, text: str) -> int:
    """4096, or 4k, which is the same; a whole number."""
    number = _scaled(text.strip().upper())
    if number is None or number != int(number):
        raise UsageError(f"{option}: {text!r} is not a whole number like 4096 or 4k")
    return int(number)


def parse_tokens(option: str, text: str) -> int:
    """200k, 200M, 1.5B or a number of tokens: 1.5 * 10**9."""
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
    """Names separated by commas; () for none. UsageError where one of several is empty."""
    names = tuple(name.strip() for name in text.split(","))
    if not any(names):
        return ()
    if "" in names:
        raise UsageError(
            f"{option}: {text!r} has nothing before or after a comma",
            f"leave that comma out: {','.join(name for name in names if name)}",
        )
    return names


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
    form, example = "NAME=COLUMN", "messages=chosen"
    if option == "--role":
        form, example = "NAME=ROLE", "human=user"
    pairs = {}
    for item in mapped:
        own, separator, name = item.partition("=")
        if not (own and separator and name):
            raise UsageError(f"{option}: {item!r} is not {form}", f"for example {example}")
        pairs[own] = name
    return tuple(sorted(pairs.items()))


def parse_arguments(option: str, given: list[str]) -> tuple[tuple[str, str], ...]:
    """NAME=VALUE options as pairs of a name and JSON text, sorted by name; of a name given twice,
    the last. A value that is no JSON is a text.
    """
    values: dict[str, object] = {}
    for item in given:
        name, separator, text = item.partition("=")
        if not (name and separator):
            raise UsageError(
                f"{option}: {item!r} is not NAME=VALUE", "for example enable_thinking=false"
            )
        values[name] = _json_or_text(f"{option}: {name}", text)
    return as_arguments(option, values)


def _json_or_text(place: str, text: str) -> object:
    try:
        return json.loads(text, parse_constant=_no_json)
    except RecursionError:
        raise UsageError(f"{place}: is nested too deeply", "put it into the template") from None
    except ValueError:
        spelled = text.lower().replace("none", "null")
        if spelled in ("true", "false", "null"):
            raise UsageError(
                f"{place}: found {text}, expected {spelled} as JSON writes it",
                f'write {spelled}, or "{text}" in double quotes for a text',
            ) from None
        return text


def _no_json(constant: str) -> NoReturn:
    raise ValueError(constant)


def as_arguments(option: str, values: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    """Values by name as a configuration holds them: JSON text, which tells true from 1. UsageError
    for what JSON cannot hold.
    """
    pairs = []
    for name, value in sorted(values.items()):
        try:
            pairs.append((name, json.dumps(value, ensure_ascii=False, allow_nan=False)))
        except (TypeError, ValueError, RecursionError):
            raise UsageError(
                f"{option}: {name} = {value} is no JSON value",
                "expected true, false, a number, a text, null, a list or an object of these",
            ) from None
    return tuple(pairs)


def arguments_of(pairs: tuple[tuple[str, str], ...]) -> dict[str, object]:
    """The values that `as_arguments` wrote. UsageError for anything else."""
    values: dict[str, object] = {}
    for name, text in pairs:
        try:
            values[name] = json.loads(text)
        except (ValueError, RecursionError):
            raise UsageError(f"--template-arg: {name}: {text!r} is not JSON") from None
    return values


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "count": parse_count,
    "tokens": parse_tokens,
    "counts": parse_counts,
    "size": parse_size,
    "share": parse_share,
    "count or share": parse_count_or_share,
    "list": parse_list,
    "fields": parse_fields,
    "arguments": parse_arguments,
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
