"""Formats of values: how options are written, on the command line and in recipes alike.

    seed: Annotated[int, whole(0), typer.Option(help="Seed of the sample.")] = 0

A `ValueFormat` stands in the type of a field of an option group: see `option`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any

import msgspec

from packer_cli.errors import UsageError, cut

Pairs = tuple[tuple[str, str], ...]
_BINARY = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
# Amounts of tokens in recipes are never counted in powers of two.
_THOUSANDS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_DIGITS = r"[+-]?[\d._]+(?:[eE][+-]?\d+)?"


@dataclass(frozen=True)
class ValueFormat:
    """A way to write values of an option.

    expected       describes a value, for messages
    parse          text, or what TOML has -> value; None if it is not a value of this format
    metavar        stands for the value in --help
    kind           "flag", "single", "list" (may be given several times), "pairs" (NAME=VALUE, may
                   be given several times) or "arguments" (pairs whose values are JSON)
    least, most    limits of a number, both allowed
    choices        allowed value -> its meaning, or "" if the name is clear
    aliases        choice -> its other names
    suggested_for  choice -> names that are not allowed, for which it is suggested
    """

    expected: str
    parse: Callable[[Any], Any]
    metavar: str | None = None
    kind: str = "single"
    least: float | None = None
    most: float | None = None
    choices: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    suggested_for: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def is_repeated(self) -> bool:
        """Tell whether the option may be given several times."""
        return self.kind in ("list", "pairs", "arguments")

    @property
    def described_choices(self) -> str:
        """The choices with their meanings, for --help."""
        names = [f"{name} ({note})" if note else name for name, note in self.choices.items()]
        return f"{', '.join(names[:-1])} or {names[-1]}" if names else ""


def plain_int(name: str, value: object) -> int:
    """Return a whole number as a plain int. Raises UsageError for anything else."""
    try:
        if not isinstance(value, bool):
            return index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise UsageError(f"{name}: {cut(repr(value), 500)} is not a whole number", "give an int")


# Numbers


def _number(
    units: str, convert: Callable[[Any], Any], scale: Mapping[str, int] = _BINARY
) -> Callable[[Any], Any]:
    """Return a function that parses numbers with a unit of the pattern `units`."""

    def parse(value: Any) -> Any:
        match = re.fullmatch(f"({_DIGITS})({units})", str(value).strip())
        if not match:
            return None
        digits, unit = match[1], match[2].lower()
        try:
            number = int(digits) if digits.lstrip("+-").isdecimal() else float(digits)
            if unit == "%":
                number = float(number) / 100
            else:
                number *= scale.get(unit) or scale[unit.rstrip("ib")]
            return convert(number) if math.isfinite(number) else None
        except (ValueError, OverflowError):  # the latter for hundreds of digits
            return None

    return parse


def _exactly(number: int | float) -> int | None:
    return int(number) if number == int(number) else None


WHOLE = ValueFormat("a whole number like 4096 or 4k", _number("[kKmMgGtT]?", _exactly), "N")
COUNT = replace(WHOLE, least=1)
TOKENS = ValueFormat(
    "a number of tokens like 200M or 2B", _number("[kKmMbBgGtT]?", round, _THOUSANDS), least=1
)
SIZE = ValueFormat(
    "a size like 256M or 1G", _number("([kKmMgGtT][iI]?)?[bB]?", round), "SIZE", least=1
)
NUMBER = ValueFormat("a number", _number("", float))
SHARE = ValueFormat("a share like 0.01 or 1%", _number("%?", float), "SHARE", least=0, most=1)
WEIGHT = ValueFormat("a number like 0.7 or 70%", _number("%?", float), least=0)
COUNT_OR_SHARE = ValueFormat(
    "a number like 100, or a share like 1%", _number("[kKmMgGtT%]?", lambda number: number)
)


def whole(least: int, most: int | None = None) -> ValueFormat:
    """Return the format of whole numbers within limits."""
    return replace(WHOLE, least=least, most=most)


# Texts


def _of_type(kind: type) -> Callable[[Any], Any]:
    return lambda value: value if isinstance(value, kind) else None


FLAG = ValueFormat("true or false", _of_type(bool), kind="flag")
TEXT = ValueFormat("text in quotes", _of_type(str))


def choice(
    choices: Mapping[str, str] | Iterable[str],
    aliases: Mapping[str, Sequence[str]] | None = None,
    suggested_for: Mapping[str, Sequence[str]] | None = None,
) -> ValueFormat:
    """Return the format of a text that is one of several; they may come with their meanings."""
    meanings = choices if isinstance(choices, Mapping) else dict.fromkeys(choices, "")
    return replace(
        TEXT,
        metavar="NAME",
        choices=meanings,
        aliases=aliases or {},
        suggested_for=suggested_for or {},
    )


def names(
    choices: Iterable[str] = (), aliases: Mapping[str, Sequence[str]] | None = None
) -> ValueFormat:
    """Return the format of names with commas between them."""
    return ValueFormat(
        "a list like a,b",
        _names,
        "NAMES",
        choices=dict.fromkeys(choices, ""),
        aliases=aliases or {},
    )


def _texts(value: Any) -> tuple[str, ...] | None:
    value = [value] if isinstance(value, str) else value
    is_texts = isinstance(value, list) and all(isinstance(text, str) for text in value)
    return tuple(value) if is_texts else None


def _names(value: Any) -> tuple[str, ...] | None:
    """Parse a list, or names with commas between them; an empty text has no names."""
    if not isinstance(value, str):
        return _texts(value)
    names = tuple(name.strip() for name in value.split(","))
    return names if all(names) else None if any(names) else ()


TEXTS = ValueFormat("a list of texts", _texts, kind="list")


# Tables


def _table(parse: Callable[[Any], Any]) -> Callable[[Any], Pairs | None]:
    """Return a function that parses tables of values as pairs, ordered by name."""

    def parse_table(value: Any) -> Pairs | None:
        if not isinstance(value, Mapping):
            return None
        pairs = tuple((name, parse(value)) for name, value in sorted(value.items()))
        return None if any(value is None for _, value in pairs) else pairs

    return parse_table


def _as_json(value: Any) -> str | None:
    """Return JSON text, in which true and 1 differ."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None


def json_or_text(place: str, text: str) -> object:
    """Parse JSON, or return the text. Raises UsageError for True, None and the like."""
    with suppress(ValueError, RecursionError):
        return msgspec.json.decode(text)
    spelled = text.lower().replace("none", "null")
    if spelled not in ("true", "false", "null"):
        return text
    tip = f'write {spelled}, or "{text}" in double quotes for a text'
    raise UsageError(f"{place}: found {text}, expected {spelled} as JSON writes it", tip)


PAIRS = ValueFormat(
    'a table of texts like {messages = "chosen"}', _table(_of_type(str)), kind="pairs"
)
ARGUMENTS = ValueFormat(
    "a table of JSON values like {enable_thinking = false}", _table(_as_json), kind="arguments"
)


def as_written(value: Any) -> str:
    """Return a default as it is written: 1G for 1 << 30."""
    if isinstance(value, tuple):
        return ",".join(value)
    if isinstance(value, int) and value >= _BINARY["g"] and value % _BINARY["g"] == 0:
        return f"{value // _BINARY['g']}G"
    return f"{value:g}" if isinstance(value, float) else str(value)
