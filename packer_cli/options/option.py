"""How an option is declared: once, as a field of the configuration that holds its value.

    sample_by: str = option("line", "What a document is:", choices=PARTS)
    max_loss: Share | None = option(None, "Exit 1 when more is lost.")

The command line with its help and completion, the keys of recipes, and all checks are made from
that. The type says how a value is written, on the command line and in recipes alike:
see `KINDS`. A field declared otherwise is no option.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, replace
from functools import cache
from inspect import get_annotations
from numbers import Real
from operator import index
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from packer_cli.errors import UsageError, cut, one_of

# How values are written, where the type alone does not say it: one of `KINDS`.
Count = Annotated[int, "count"]  # from 1
Whole = Annotated[int, "whole"]
Size = Annotated[int, "size"]
Tokens = Annotated[int, "tokens"]
Share = Annotated[float, "share"]
Weight = Annotated[float, "weight"]
Names = Annotated[tuple[str, ...], "list"]
Pairs = Annotated[tuple[tuple[str, str], ...], "pairs"]
Arguments = Annotated[tuple[tuple[str, str], ...], "arguments"]

# Where the first is true: what is wrong, and what to do.
Rule = tuple[object, str, str]
Values = dict[str, Any]  # field of a configuration -> value
# A dataclass of options, or (dataclass, names of those of its fields that are meant).
Owner = Any


class Need(NamedTuple):
    """`what` records must be, and whether they are, by their shape and the configuration."""

    what: str
    is_met: Callable[[Any, Any], bool]


@dataclass(frozen=True)
class Option:
    """What is shown of a field, and which values the field takes.

    help        one or two sentences; choices and the default are added to them
    flag        "--name", or "--name/--no-name"; "": made of the field's name
    short       "-n", or ""
    metavar     what stands for the value in --help; "": by the kind of value
    choices     allowed value -> what it means, or "" where the name says it
    aliases     choice -> its other names
    meant       choice -> names that are none, for which it is suggested
    unset       what None means, where the help does not say
    value       how it is written, one of `KINDS`: by the type of the field
    key         its name in recipes; "": as on the command line
    least, most  limits of a number, both allowed; None: those of its kind
    needs       what the records must be for the option to mean anything
    goes_with   (field, value): another option, without which this one means nothing; value None:
                any but its default
    elsewhere   names of the option in other tools, to suggest this one
    default     of the field; MISSING: it must be given
    """

    help: str
    flag: str = ""
    short: str = ""
    metavar: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    meant: Mapping[str, Sequence[str]] = field(default_factory=dict)
    unset: str = ""
    value: str = ""
    key: str = ""
    least: float | None = None
    most: float | None = None
    needs: Need | None = None
    goes_with: tuple[str, Any] | None = None
    elsewhere: Sequence[str] = ()
    default: Any = None

    @property
    def kind(self) -> Kind:
        """How values are written."""
        return KINDS[self.value]

    def name(self, of: str, value: object = None) -> str:
        """The name that its user writes: `--max-length` for the field `max_length`, and `--no-eos`
        for a `value` that is False.
        """
        yes, _, no = self.flag.partition("/")
        return no if no and value is False else yes

    @property
    def described(self) -> str:
        """The help, with the choices and the default."""
        text = self.help
        if self.choices:
            names = [f"{name} ({note})" if note else name for name, note in self.choices.items()]
            text += f" {', '.join(names[:-1])} or {names[-1]}."
        if self.unset:
            return f"{text} Default: {self.unset}."
        if self.default in (MISSING, None, False, (), "") or "efault" in text:
            return text
        return f"{text} Default: {_written(self.value, self.default)}."

    def missing(self, elsewhere: str = "") -> UsageError:
        """The error where it is not given. `elsewhere`: goes into the tip."""
        flags = [self.flag, self.short] if self.short else [self.flag]
        return UsageError(
            f"Missing option {' / '.join(map(repr, flags))}.",
            f"add {self.flag} {self.metavar or self.kind.metavar}{elsewhere}. {self.described}",
        )

    def typed(self, given: Any) -> Any:
        """The value that a command line gives. UsageError for what is none."""
        name, is_json = self.name(""), self.value == "arguments"
        if not is_json and self.value != "pairs":
            return self.read(name, given)
        pairs = dict[str, object]()  # of a name given twice, the last
        for one in given:
            own, _, text = one.partition("=")
            if "=" not in one or not own or not (text or is_json):
                raise UsageError(f"{name}: {one!r} is not {self.metavar}", self.help)
            pairs[own] = _json_or_text(f"{name}: {own}", text) if is_json else text
        return self.read(name, pairs)

    def read(self, name: str, given: Any) -> Any:
        """The value that is given as text, or as TOML has it. UsageError: the option `name`."""
        value = self.kind.read(given)
        if value is None:
            is_text = isinstance(given, str | list | Mapping)
            shown = repr(given) if is_text else str(given).lower()
            raise UsageError(f"{name}: {cut(shown, 500)} is not {self.kind.expected}", self.help)
        return self.checked(name, value)

    def checked(self, name: str, value: Any) -> Any:
        """A value by the name of its choice. UsageError for one that is not allowed."""
        if self.choices and isinstance(value, tuple):
            return tuple(self._chosen(name, one) for one in value)
        if self.choices and isinstance(value, str):
            return self._chosen(name, value)
        if isinstance(value, Real) and not isinstance(value, bool):
            number: Any = value
            least, most = self.least, self.most
            figure = f"{number:g}" if isinstance(value, float) else str(value)
            if (least is not None and number < least) or (most is not None and number > most):
                what = "not positive" if least else "negative"
                what = what if most is None else f"not between {least or 0} and {most}"
                raise UsageError(f"{name}: {figure} is {what}", self.help)
        return value

    def _chosen(self, name: str, value: str) -> str:
        choices = {other: one for one, others in self.aliases.items() for other in others}
        choices |= {one: one for one in self.choices}
        for spelled in (value, value.lower().replace("_", "-")):
            if spelled in choices:
                return choices[spelled]
        meant = {other: one for one, others in self.meant.items() for other in others}
        raise one_of(name, value, self.choices, choices | meant)


def option(default: Any, help: str, **more: Any) -> Any:  # noqa: A002
    """A field of a dataclass that is an option, declared as an `Option` is; `choices` may be names
    alone, `elsewhere` a text of names. `default`: MISSING for a value that must be given.
    """
    choices = more.get("choices", ())
    if not isinstance(choices, Mapping):
        more["choices"] = dict.fromkeys(choices, "")
    if "elsewhere" in more:
        more["elsewhere"] = more["elsewhere"].split()
    return field(default=default, metadata={"option": Option(help, **more)})


@dataclass(frozen=True)
class Options:
    """A configuration of which the fields are options. Raises UsageError from the constructor for a
    value that is not allowed, and for an option without the one that it goes with.
    """

    def __post_init__(self) -> None:
        options = options_of(type(self))
        for name, one in options.items():
            value = one.checked(one.name(name), getattr(self, name))
            object.__setattr__(self, name, value)
        refuse(_alone(options, vars(self)))
        refuse(self._rules())

    def _rules(self) -> Iterable[Rule]:
        """What values cannot be, or cannot be together."""
        return ()


def options_of(*owners: Owner) -> dict[str, Option]:
    """Field -> its declaration: of a dataclass its own first, then those that it inherits; of
    several the first that has the field.
    """
    return _options_of(owners)


@cache
def _options_of(owners: tuple[Owner, ...]) -> dict[str, Option]:
    found: dict[str, Option] = {}
    for owner in owners:
        kind, *some = owner if isinstance(owner, tuple) else (owner,)
        hints, declared = get_type_hints(kind, include_extras=True), kind.__dataclass_fields__
        for name in some or (name for one in kind.__mro__ for name in get_annotations(one)):
            if name in declared and "option" in declared[name].metadata and name not in found:
                one = declared[name]
                found[name] = _with_type(name, one.metadata["option"], hints[name], one.default)
    return found


def _with_type(name: str, declared: Option, hint: Any, default: Any) -> Option:
    """A declaration with what the type and the default of its field say."""
    members = [hint] if get_origin(hint) in (Annotated, tuple, None) else get_args(hint)
    told = [str(mark) for one in members for mark in getattr(one, "__metadata__", ())]
    is_texts = any(get_origin(one) is tuple for one in members)
    by_type = "texts" if is_texts else "flag" if bool in members else "text"
    kind = KINDS[value := " or ".join(told) or ("number" if float in members else by_type)]
    no = f"/--no-{as_option(name)[2:]}" if bool in members and default is None else ""
    return replace(
        declared,
        value=value,
        flag=declared.flag or as_option(name) + no,
        least=kind.least if declared.least is None else declared.least,
        most=kind.most if declared.most is None else declared.most,
        default=default,
    )


def _alone(options: Mapping[str, Option], values: Mapping[str, Any]) -> Iterable[Rule]:
    """Options that mean nothing without another one."""
    for name, one in options.items():
        if one.goes_with and values[name] != one.default:
            other, needed = one.goes_with
            found, unset = values[other], options[other].default
            value = "" if needed is None or needed is True else f" {needed}"
            flag, wanted = one.name(name), options[other].name(other) + value
            yield (
                found == unset if needed is None else found != needed,
                f"{flag} needs {wanted}",
                f"add {wanted}, or leave {flag} out",
            )


def refuse_missing(configuration: Any, values: Mapping[str, Any], elsewhere: str = "") -> None:
    """UsageError for a field that has no default and no value. `elsewhere`: goes into the tip."""
    for name, one in options_of(configuration).items():
        if one.default is MISSING and name not in values:
            raise one.missing(elsewhere)


def refuse(rules: Iterable[Rule]) -> None:
    """UsageError by the first rule of what cannot be."""
    for is_wrong, message, tip in rules:
        if is_wrong:
            raise UsageError(message, tip)


def apart(first: str, is_first: object, second: str, is_second: object) -> Rule:
    """Two options that exclude each other, where both are given."""
    tip = "leave one of them out, or choose another"
    return is_first and is_second, f"{first} does not go with {second}", tip


def plain_int(name: str, value: object) -> int:
    """A whole number as a plain int. UsageError for anything else, the option `name`."""
    try:
        if not isinstance(value, bool):
            return index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise UsageError(f"{name}: {cut(repr(value), 500)} is not a whole number", "give an int")


def as_option(name: str) -> str:
    """`--max-length` for `max_length`."""
    return f"--{name.replace('_', '-')}"


def normal(name: str) -> str:
    """`max_length` for --max-length, max-length and max_length."""
    return name.lstrip("-").replace("-", "_")


def in_terms_of_fields(error: UsageError, place: str = "") -> UsageError:
    """The error with `max_length` for --max-length, as recipes and Python have it."""
    message, tip = (
        re.sub(r"--[a-z][a-z-]*", lambda found: normal(found[0]), text)
        for text in (error.message, error.tip)
    )
    return UsageError(f"{place}: {message}" if place else message, tip)


# How values are written

_BINARY = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
# Amounts of tokens in recipes: nobody counts those in powers of two.
_THOUSANDS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_DIGITS = r"[+-]?[\d._]+(?:[eE][+-]?\d+)?"


class Kind(NamedTuple):
    """A way to write values.

    expected     what a value is, for messages
    read         text, or what TOML has -> value; None for what is none
    metavar      what stands for the value in --help
    least, most  limits of a number, both allowed
    """

    expected: str
    read: Callable[[Any], Any]
    metavar: str | None = None
    least: float | None = None
    most: float | None = None


def _written(kind: str, value: Any) -> str:
    """A value as it is read: 256M for 1 << 28."""
    if kind == "list":
        return ",".join(value)
    if kind == "size":
        for suffix in ("t", "g", "m", "k"):
            if value >= _BINARY[suffix] and value % _BINARY[suffix] == 0:
                return f"{value // _BINARY[suffix]}{suffix.upper()}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _json_or_text(place: str, text: str) -> object:
    """A value as JSON, or else text. UsageError for True, None and the like."""
    with suppress(ValueError, RecursionError):
        return msgspec.json.decode(text)
    spelled = text.lower().replace("none", "null")
    if spelled not in ("true", "false", "null"):
        return text
    tip = f'write {spelled}, or "{text}" in double quotes for a text'
    raise UsageError(f"{place}: found {text}, expected {spelled} as JSON writes it", tip)


def _number(
    expected: str,
    units: str,
    made: Callable[[Any], Any],
    metavar: str | None = None,
    scale: Mapping[str, int] = _BINARY,
    **limits: float,
) -> Kind:
    """Numbers with a unit, of the pattern `units`. `made`: what makes a number one of these."""

    def read(given: Any) -> Any:
        found = re.fullmatch(f"({_DIGITS})({units})", str(given).strip())
        if not found:
            return None
        digits, unit = found[1], found[2].lower()
        try:
            number = int(digits) if digits.lstrip("+-").isdecimal() else float(digits)
            if unit == "%":
                number = float(number) / 100
            else:
                number *= scale.get(unit) or scale[unit.rstrip("ib")]
            return made(number) if math.isfinite(number) else None
        except (ValueError, OverflowError):  # the latter for hundreds of digits
            return None

    return Kind(expected, read, metavar, **limits)


def _exactly(number: int | float) -> int | None:
    return int(number) if number == int(number) else None


def _of_type(kind: type) -> Callable[[Any], Any]:
    return lambda given: given if isinstance(given, kind) else None


def _texts(given: Any) -> tuple[str, ...] | None:
    given = [given] if isinstance(given, str) else given
    is_texts = isinstance(given, list) and all(isinstance(one, str) for one in given)
    return tuple(given) if is_texts else None


def _list(given: Any) -> tuple[str, ...] | None:
    """A list, or names with commas between; () for none."""
    if not isinstance(given, str):
        return _texts(given)
    names = tuple(one.strip() for one in given.split(","))
    return names if all(names) else None if any(names) else ()


def _table(expected: str, read: Callable[[Any], Any]) -> Kind:
    """Tables of values that `read` takes, as pairs by name."""

    def read_table(given: Any) -> tuple[tuple[str, Any], ...] | None:
        if not isinstance(given, Mapping):
            return None
        pairs = tuple((own, read(value)) for own, value in sorted(given.items()))
        return None if any(value is None for _, value in pairs) else pairs

    return Kind(expected, read_table)


def _as_json(value: Any) -> str | None:
    """JSON text, which tells true from 1."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None


_COUNT, _UNITS = "a whole number like 4096 or 4k", "[kKmMgGtT]?"
KINDS = {
    "flag": Kind("true or false", _of_type(bool)),
    "text": Kind("text in quotes", _of_type(str)),
    "texts": Kind("a list of texts", _texts),
    "list": Kind("a list like a,b", _list, "NAMES"),
    "count": _number(_COUNT, _UNITS, _exactly, "N", least=1),
    "whole": _number(_COUNT, _UNITS, _exactly, "N"),
    "tokens": _number(
        "a number of tokens like 200M or 2B", "[kKmMbBgGtT]?", round, None, _THOUSANDS, least=1
    ),
    "size": _number("a size like 256M or 1G", "([kKmMgGtT][iI]?)?[bB]?", round, "SIZE", least=1),
    "number": _number("a number", "", float),
    "share": _number("a share like 0.01 or 1%", "%?", float, "SHARE", least=0, most=1),
    "weight": _number("a number like 0.7 or 70%", "%?", float, least=0),
    "count or share": _number(
        "a number like 100, or a share like 1%", "[kKmMgGtT%]?", lambda number: number
    ),
    "pairs": _table('a table of texts like {messages = "chosen"}', _of_type(str)),
    "arguments": _table("a table of JSON values like {enable_thinking = false}", _as_json),
}
