"""How an option is declared: once, beside the field of the configuration that holds its value.

    sample_by: Annotated[str, Option("What a document is:", INPUT, choices=PARTS)] = "line"

The command line, its help, its completion and its checks are made from that. A field
without an `Option` is not on the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from typing import Any, get_type_hints

from packer_cli.errors import UsageError, one_of

FIRST = "Used most"
INPUT = "Input"
DOCUMENTS = "Documents"
SUPERVISED = "Supervised data"
ROWS = "Rows"
OUTPUT = "Output"
RUNNING = "Running"
GROUPS = (FIRST, INPUT, DOCUMENTS, SUPERVISED, ROWS, OUTPUT, RUNNING)


@dataclass(frozen=True)
class Option:
    """What the command line shows of a field, and which values the field takes.

    help        one or two sentences; choices and the default are added to them
    group       the section of --help
    first       its place in the first section, with the options used most; 0: not there
    flag        "--name", or "--name/--no-name"; "": made of the field's name
    short       "-n", or ""
    metavar     what stands for the value in --help; "": by the kind of value
    choices     allowed value -> what it means, or "" where the name says it
    aliases     other names of the choices -> the choice
    unset       what None means, where the help does not say
    value       how a number is written: "count" (4096, 4k), "size" (64M), "share" (0.01, 1%), or
                "count or share"; or "counts": some with commas, "list": names with commas,
                "fields": NAME=COLUMN, "arguments": NAME=VALUE
    key         its name in recipes; "": as on the command line
    least, most  limits of a number, both allowed
    needs       what the records must be for the option to mean anything; see `Need`
    elsewhere   names of the option in other tools, to suggest this one
    """

    help: str
    group: str = ""
    first: int = 0
    flag: str = ""
    short: str = ""
    metavar: str = ""
    choices: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    unset: str = ""
    value: str = ""
    key: str = ""
    least: float | None = None
    most: float | None = None
    needs: Need | None = None
    elsewhere: tuple[str, ...] = ()

    def name(self, of: str, value: object = None) -> str:
        """As its user writes it: `--max-length` for the field `max_length`, and `--no-eos` for a
        `value` that is False.
        """
        yes, _, no = (self.flag or as_option(of)).partition("/")
        return no if no and value is False else yes

    def chosen(self, name: str, value: str) -> str:
        """The choice that a value means, by whatever name. UsageError: the option `name`."""
        for spelled in (value, value.lower().replace("_", "-")):
            if spelled in self.choices:
                return spelled
            if spelled in self.aliases:
                return self.aliases[spelled]
        raise one_of(name, value, self.choices, self.aliases)

    def check_number(self, name: str, value: float) -> None:
        """UsageError outside of `least` and `most`."""
        if (self.least is None or value >= self.least) and (
            self.most is None or value <= self.most
        ):
            return
        if self.most is not None:
            raise UsageError(
                f"{name}: {_figure(value)} is not between {_figure(self.least or 0)} and "
                f"{_figure(self.most)}",
                _as_share(value) if self.most == 1 else "",
            )
        what = "negative" if self.least == 0 else "not positive"
        raise UsageError(f"{name}: {_figure(value)} is {what}")


@dataclass(frozen=True)
class Need:
    """`what` records must be, and whether they are, by their shape and the configuration."""

    what: str
    is_met: Callable[[Any, Any], bool]


def as_option(name: str) -> str:
    """`--max-length` for `max_length`."""
    return f"--{name.replace('_', '-')}"


def _as_share(value: float) -> str:
    """A tip on writing shares, for one that was given without its percent sign."""
    return f"did you mean {value:g}%?" if 1 < value <= 100 else "1% is 0.01"


def _figure(number: float) -> str:
    return f"{number:g}" if isinstance(number, float) else str(number)


def options_of(configuration: Any) -> dict[str, Option]:
    """Field -> its declaration, in the order of the fields."""
    return {name: declared_in(hint) for name, hint in declarations_of(configuration).items()}


def declarations_of(configuration: Any) -> dict[str, Any]:
    """Field -> its Annotated type, of those that are declared, in the order of the fields."""
    return _declarations_of(configuration)


@lru_cache
def _declarations_of(configuration: Any) -> dict[str, Any]:
    hints = get_type_hints(configuration, include_extras=True)
    names = (one.name for one in fields(configuration))
    return {name: hints[name] for name in names if is_declared(hints[name])}


def refuse_missing(configuration: Any, values: Mapping[str, Any], elsewhere: str = "") -> None:
    """UsageError for a field that has no default and no value. `elsewhere`: goes into the tip."""
    defaults = {one.name: one.default for one in fields(configuration)}
    for name, option in options_of(configuration).items():
        if defaults[name] is MISSING and name not in values:
            flags = [option.name(name), *([option.short] if option.short else [])]
            raise UsageError(
                f"Missing option {' / '.join(map(repr, flags))}.",
                f"add {flags[0]} {option.metavar or 'N'}{elsewhere}. {option.help}",
            )


def is_declared(hint: Any) -> bool:
    """Whether an annotation has an `Option`."""
    return any(isinstance(one, Option) for one in getattr(hint, "__metadata__", ()))


def declared_in(hint: Any) -> Option:
    """The `Option` of an annotation that has one."""
    return next(one for one in hint.__metadata__ if isinstance(one, Option))


def settle(configuration: Any) -> None:
    """Replace aliases by the names of choices. UsageError for a value that is not allowed."""
    for name, option in options_of(type(configuration)).items():
        value, spelled = getattr(configuration, name), option.name(name)
        if option.choices and isinstance(value, str):
            object.__setattr__(configuration, name, option.chosen(spelled, value))
        elif option.choices and isinstance(value, tuple):
            chosen = tuple(option.chosen(spelled, one) for one in value)
            object.__setattr__(configuration, name, chosen)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            option.check_number(spelled, value)


def plain(names: Iterable[str]) -> dict[str, str]:
    """Choices that need no explanation."""
    return dict.fromkeys(names, "")
