"""Option groups: dataclasses whose fields have their `typer.Option`.

    @dataclass(frozen=True)
    class SampleOptions(OptionGroup):
        seed: Annotated[int, whole(least=0), typer.Option(help="Seed of the sample.")] = 0

Commands with a parameter of the class have its options (see `cli/app.py`), and recipes have them
as keys. The format before `typer.Option` (see `values`) reads and checks values; without one the
type decides. `{}` in a help text stands for the choices. A field without `typer.Option` is set by
code only. What goes together is a table of conditions with messages: `Rule`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import cache
from inspect import get_annotations
from numbers import Real
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from typer.models import OptionInfo

from packer_cli.errors import UsageError, cut, one_of
from packer_cli.options.values import (
    FLAG,
    NUMBER,
    TEXT,
    TEXTS,
    ValueFormat,
    as_written,
    json_or_text,
)

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
        choices |= _by_name(self.format.aliases)
        for spelled in (value, value.lower().replace("_", "-")):
            if spelled in choices:
                return choices[spelled]
        near = choices | _by_name(self.format.suggested_for)
        raise one_of(name, value, self.format.choices, near)

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


def _by_name(names_of: Mapping[str, Sequence[str]]) -> dict[str, str]:
    return {name: choice for choice, names in names_of.items() for name in names}


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
