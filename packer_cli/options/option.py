"""Option groups: dataclasses whose fields have their `typer.Option`.

    @dataclass(frozen=True)
    class SampleOptions(OptionGroup):
        seed: Annotated[int, whole(least=0), typer.Option(help="Seed of the sample.")] = 0

Commands with a parameter of the class have its options (see `cli/app.py`), and recipes have them
as keys. The `ValueFormat` before `typer.Option` reads and checks values; without one the
type decides. `{}` in a help text stands for the choices. A field without `typer.Option` is set by
code only. What goes together is a table of conditions with messages: `Rule`.
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
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from typer.models import OptionInfo

from packer_cli.errors import UsageError, cut, one_of

Pairs = tuple[tuple[str, str], ...]
_BINARY = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
# Amounts of tokens in recipes are never counted in powers of two.
_THOUSANDS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_DIGITS = r"[+-]?[\d._]+(?:[eE][+-]?\d+)?"
# choice -> names that other tools have for it, for which it is suggested
_ELSEWHERE = {
    "jsonl": "jsonlines ndjson", "text": "txt", "arrow": "feather", "document": "file whole",
    "last-assistant": "last last-turn", "completion": "response", "all": "full one",
    "each": "every", "input": "file",
}  # fmt: skip
# Condition, message, tip: raises UsageError if the condition is true.
Rule = tuple[object, str, str]
Values = dict[str, Any]  # field of an option group -> value

# Names that other tools have for an option, by its field.
OTHER_TOOLS = {
    "shape": "--dataset-type --data-format",
    "roles": "--roles",
    "template_args": "--chat-template-kwargs --template-kwargs",
    "train_on": "--loss-on --train-on-inputs --assistant-only-loss",
    "add_bos": "--add-bos --add-bos-token",
    "add_eos": "--add-eos --append-eod --append-eos --add-eos-token",
    "max_length": "--seq-len --seq-length --sequence-length --max-seq-len --max-seq-length "
    "--block-size --context-length --cutoff-len",
    "strategy": "--packing-strategy --packing --algorithm",
    "overlong": "--truncation --truncate --on-overlong",
    "truncate_side": "--truncation-side",
    "where": "--filter --filters",
    "workers": "--num-workers --num-proc --jobs --threads",
    "overwrite": "--force",
    "add": "--append --update --resume",
    "tokenizer": "--model --tokenizer-path --tokenizer-name --tokenizer-model",
    "text_field": "--text-column --text-key --json-keys",
    "output": "--out --output-dir --save-dir --output-path --output-prefix",
    "ranks": "--world-size --gpus --num-gpus --nproc --dp-size",
    "micro_batches": "--gradient-accumulation-steps --accumulate",
    "batch_size": "--micro-batch-size --per-device-train-batch-size",
}


class DeclaredOption(NamedTuple):
    """An option as a field of an option group declares it. `default`: MISSING if required."""

    field: str
    info: OptionInfo
    format: ValueFormat
    default: Any

    @property
    def flags(self) -> list[str]:
        """Its spellings: "--name" or "--name/--no-name", then "-n" if it has a short one."""
        # inside Annotated, the first argument of typer.Option is taken for its default
        declared = [self.info.default, *(self.info.param_decls or ())]
        flags = [text for text in declared if isinstance(text, str)]
        name = as_option(self.field)
        has_negative = self.format is FLAG and self.default is None
        return flags or [f"{name}/--no-{name[2:]}" if has_negative else name]

    @property
    def flag(self) -> str:
        """Its name as users write it: `--max-length` for the field `max_length`."""
        return self.flags[0].partition("/")[0]

    def flag_for(self, value: object) -> str:
        """Its name as users write it for a value: `--no-eos` for False."""
        negative = self.flags[0].partition("/")[2]
        return negative if negative and value is False else self.flag

    @property
    def metavar(self) -> str | None:
        """The word that stands for a value in --help."""
        return self.info.metavar or self.format.metavar

    @property
    def help(self) -> str:
        """The help text, with the choices and the default."""
        text = (self.info.help or "").replace("{}", self.format.described_choices)
        if self.default in (MISSING, None, False, (), "") or "efault" in text:
            return text
        return f"{text} Default: {as_written(self.default)}."

    @property
    def names_elsewhere(self) -> list[str]:
        """The names that other tools have for it."""
        return OTHER_TOOLS.get(self.field, "").split()

    def read_argument(self, argument: Any) -> Any:
        """Read what a command line gives. Raises UsageError if it is not a value."""
        name, is_json = self.flag, self.format.kind == "arguments"
        if not is_json and self.format.kind != "pairs":
            return self.read(name, argument)
        pairs = dict[str, object]()  # the last value of a name counts
        for pair in argument:
            key, equals, text = pair.partition("=")
            if not equals or not key or not (text or is_json):
                raise UsageError(f"{name}: {pair!r} is not {self.metavar}", self.help)
            pairs[key] = json_or_text(f"{name}: {key}", text) if is_json else text
        return self.read(name, pairs)

    def read(self, name: str, value: Any) -> Any:
        """Read text, or what TOML has under `name`. Raises UsageError if it is not a value."""
        parsed = self.format.parse(value)
        if parsed is None:
            is_text = isinstance(value, str | list | Mapping)
            shown = repr(value) if is_text else str(value).lower()
            raise UsageError(f"{name}: {cut(shown, 500)} is not {self.format.expected}", self.help)
        return self.check(name, parsed)

    def check(self, name: str, value: Any) -> Any:
        """Return a value, by the name of its choice. Raises UsageError if it is not allowed."""
        if self.format.choices and isinstance(value, tuple):
            return tuple(self._choice(name, item) for item in value)
        if self.format.choices and isinstance(value, str):
            return self._choice(name, value)
        if isinstance(value, Real) and not isinstance(value, bool):
            number: Any = value
            least, most = self.format.least, self.format.most
            if (least is not None and number < least) or (most is not None and number > most):
                figure = f"{number:g}" if isinstance(value, float) else str(value)
                problem = "not positive" if least else "negative"
                problem = problem if most is None else f"not between {least or 0} and {most}"
                raise UsageError(f"{name}: {figure} is {problem}", self.help)
        return value

    def _choice(self, name: str, value: str) -> str:
        choices = {choice: choice for choice in self.format.choices}
        choices |= {
            other: choice for choice, names in self.format.aliases.items() for other in names
        }
        for spelled in (value, value.lower().replace("_", "-")):
            if spelled in choices:
                return choices[spelled]
        known = {other: name for name in choices for other in _ELSEWHERE.get(name, "").split()}
        raise one_of(name, value, self.format.choices, known | choices)

    def missing(self, elsewhere: str = "") -> UsageError:
        """Return the error for a required option. `elsewhere`: goes into the tip."""
        tip = f"add {self.flag} {self.metavar}{elsewhere}. {self.help}"
        return UsageError(f"Missing option {' / '.join(map(repr, self.flags))}.", tip)


@dataclass(frozen=True)
class OptionGroup:
    """A dataclass of options. The constructor raises UsageError for a value that is not allowed,
    and for values that do not go together.
    """

    def __post_init__(self) -> None:
        for name, option in options_of(type(self)).items():
            object.__setattr__(self, name, option.check(option.flag, getattr(self, name)))
        refuse(self._rules())

    def _rules(self) -> Iterable[Rule]:
        return ()


def options_of(*groups: type) -> dict[str, DeclaredOption]:
    """Return the options of groups by field. A class has its own fields first, then those that it
    inherits. If several classes have a field, the first one counts.
    """
    declared: dict[str, DeclaredOption] = {}
    for group in groups:
        for name, option in _options_of(group).items():
            declared.setdefault(name, option)
    return declared


@cache
def _options_of(group: Any) -> dict[str, DeclaredOption]:
    hints = get_type_hints(group, include_extras=True)
    names = dict.fromkeys(name for base in group.__mro__ for name in get_annotations(base))
    declared = {}
    for name in names:
        marks = getattr(hints.get(name), "__metadata__", ())
        if marks and isinstance(marks[-1], OptionInfo):
            hint, default = hints[name].__origin__, group.__dataclass_fields__[name].default
            value_format = marks[0] if len(marks) > 1 else _format_of(hint)
            declared[name] = DeclaredOption(name, marks[-1], value_format, default)
    return declared


def _format_of(hint: Any) -> ValueFormat:
    members = {hint, *get_args(hint)}  # of a union, such as `bool | None`
    if any(get_origin(member) is tuple for member in members):
        return TEXTS
    return FLAG if bool in members else NUMBER if float in members else TEXT


def refuse_missing(group: type, values: Mapping[str, Any], elsewhere: str = "") -> None:
    """Raise UsageError if a required option has no value. `elsewhere`: goes into the tip."""
    for name, option in options_of(group).items():
        if option.default is MISSING and name not in values:
            raise option.missing(elsewhere)


def refuse(rules: Iterable[Rule]) -> None:
    """Raise UsageError for the first rule whose condition is true."""
    for is_wrong, message, tip in rules:
        if is_wrong:
            raise UsageError(message, tip)


def mutually_exclusive(first: str, is_first: object, second: str, is_second: object) -> Rule:
    """Return the rule of two options that exclude each other if both are given."""
    tip = "leave one of them out, or choose another"
    return is_first and is_second, f"{first} does not go with {second}", tip


def needs(option: str, is_given: object, needed: str, is_there: object) -> Rule:
    """Return the rule of an option that means nothing without another one."""
    tip = f"add {needed}, or leave {option} out"
    return is_given and not is_there, f"{option} needs {needed}", tip


def as_option(name: str) -> str:
    """Return `--max-length` for `max_length`."""
    return f"--{name.replace('_', '-')}"


def normal(name: str) -> str:
    """Return `max_length` for --max-length, max-length and max_length."""
    return name.lstrip("-").replace("-", "_")


def in_terms_of_fields(error: UsageError, place: str = "") -> UsageError:
    """Return the error with `max_length` for --max-length, as recipes and Python have it."""
    message, tip = (
        re.sub(r"--[a-z][a-z-]*", lambda match: normal(match[0]), text)
        for text in (error.message, error.tip)
    )
    return UsageError(f"{place}: {message}" if place else message, tip)


# --- formats of values: how they are written, on the command line and in recipes alike


@dataclass(frozen=True)
class ValueFormat:
    """A way to write values of an option.

    expected     describes a value, for messages
    parse        text, or what TOML has -> value; None if it is not a value of this format
    metavar      stands for the value in --help
    kind         "flag", "single", "list" (may be given several times), "pairs" (NAME=VALUE, may be
                 given several times) or "arguments" (pairs whose values are JSON)
    least, most  limits of a number, both allowed
    choices      allowed value -> its meaning, or "" if the name is clear
    aliases      choice -> its other names
    """

    expected: str
    parse: Callable[[Any], Any]
    metavar: str | None = None
    kind: str = "single"
    least: float | None = None
    most: float | None = None
    choices: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)

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
COUNT_OR_ALL = replace(  # all is more than there is of anything
    COUNT, expected="a number like 1000, or all", metavar="N|all",
    parse=lambda value: 1 << 62 if value == "all" else WHOLE.parse(value),
)  # fmt: skip
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
    choices: Mapping[str, str] | Iterable[str], aliases: Mapping[str, Sequence[str]] | None = None
) -> ValueFormat:
    """Return the format of a text that is one of several; they may come with their meanings."""
    meanings = choices if isinstance(choices, Mapping) else dict.fromkeys(choices, "")
    return replace(TEXT, metavar="NAME", choices=meanings, aliases=aliases or {})


def names(
    choices: Iterable[str] = (), aliases: Mapping[str, Sequence[str]] | None = None
) -> ValueFormat:
    """Return the format of names with commas between them."""
    meanings = dict.fromkeys(choices, "")
    return ValueFormat("a list like a,b", _names, "NAMES", choices=meanings, aliases=aliases or {})


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
