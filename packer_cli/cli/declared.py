"""Makes the options of a command from their declarations: see `config/option.py`.

A command is a function. Of its parameters,

    size: Annotated[int, Option(...)] = 0    becomes an option of the command line
    config: PackConfig                       becomes an option for every field that is declared
    config: Partly[PackConfig]               the same but for the fields that the command declares
                                             itself; it gets the values that are given, and makes
                                             the configuration

and what Typer itself knows (arguments, the context) stays as it is.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial
from operator import itemgetter
from types import NoneType
from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import typer

from packer_cli.config.option import (
    FIRST,
    Option,
    as_option,
    declarations_of,
    declared_in,
    is_declared,
    options_of,
    refuse_missing,
)
from packer_cli.config.values import read, written

_Kind = TypeVar("_Kind")
_METAVARS = {"count": "N", "counts": "N[,N]", "size": "SIZE", "share": "SHARE", "list": "NAMES"}
_LISTS = ("list", "counts")  # in one value
_REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True)
class Partly(Generic[_Kind]):
    """The values of a configuration that are given, while others may be missing."""

    kind: type[_Kind]
    values: dict[str, Any]

    def completed(self, **values: Any) -> _Kind:
        """The configuration with the values that were missing. UsageError, as from its kind."""
        refuse_missing(self.kind, self.values | values)
        return self.kind(**self.values, **values)


def command(run: Callable[..., None]) -> Callable[..., None]:
    """`run` in the form that Typer takes, with a parameter for each option that it declares."""
    hints = get_type_hints(run, include_extras=True)
    parameters: list[tuple[int, inspect.Parameter]] = []
    readers: dict[str, Callable[[dict[str, Any]], Any]] = {}
    for name, parameter in inspect.signature(run).parameters.items():
        hint = hints[name]
        if get_origin(hint) is Partly:
            (kind,) = get_args(hint)
            of_kind = _of_fields(kind, required=False)
            parameters += [one for one in of_kind if one[1].name not in hints]
            readers[name] = partial(_part, kind, hints.keys())
        elif is_dataclass(hint):
            parameters += _of_fields(hint)
            readers[name] = partial(_configuration, hint)
        elif is_declared(hint):
            option, default = declared_in(hint), parameter.default
            parameters.append((_place(option), _parameter(name, hint, default)))
            readers[name] = partial(_own, name, option, default)
        else:
            parameters.append((0, _keyword(name, hint, parameter.default)))
            readers[name] = itemgetter(name)

    def filled(**given: Any) -> None:
        run(**{name: reader(given) for name, reader in readers.items()})

    taken: Any = filled
    taken.__name__, taken.__doc__ = run.__name__, run.__doc__
    taken.__signature__ = inspect.Signature(  # in the order of --help
        [parameter for _, parameter in sorted(parameters, key=itemgetter(0))]
    )
    return filled


def other_names(run: Callable[..., None]) -> dict[str, str]:
    """What other tools call the options of a command -> their names here."""
    names: dict[str, str] = {}
    for name, hint in get_type_hints(run, include_extras=True).items():
        kind = get_args(hint)[0] if get_origin(hint) is Partly else hint
        hints = declarations_of(kind) if is_dataclass(kind) else {name: hint}
        for own, one in hints.items():
            if is_declared(one):
                option = declared_in(one)
                names |= dict.fromkeys(option.elsewhere, option.name(own))
    return names


def _place(option: Option) -> int:
    """The sort key: options that most people use come first, the others as declared."""
    return option.first or sys.maxsize


def _of_fields(
    configuration: Any, *, required: bool = True
) -> Iterator[tuple[int, inspect.Parameter]]:
    """`required`: whether the parser asks for what has no default."""
    defaults = {one.name: one.default for one in fields(configuration)}
    for name, hint in declarations_of(configuration).items():
        default = _REQUIRED if defaults[name] is MISSING else defaults[name]
        yield _place(declared_in(hint)), _parameter(name, hint, default, required=required)


def _configuration(kind: Any, given: dict[str, Any]) -> Any:
    """The configuration that the given options make."""
    return _part(kind, (), given).completed()


def _part(kind: Any, missing: Collection[str], given: dict[str, Any]) -> Partly[Any]:
    defaults = {one.name: one.default for one in fields(kind)}
    values = {
        name: read(option.value, option.name(name), given[name])
        for name, option in options_of(kind).items()
        if name not in missing and _is_given(given[name], defaults[name])
    }
    return Partly(kind, values)


def _is_given(value: Any, default: Any) -> bool:
    """Whether an option is on the command line; a switch that is not arrives as False."""
    return value is not None and value != [] and not (value is False and default is False)


def _own(name: str, option: Option, default: Any, given: dict[str, Any]) -> Any:
    """The value of an option of the command itself."""
    value = given[name]
    if value is None or value == []:
        return default
    value = read(option.value, option.name(name), value)
    if option.choices and isinstance(value, tuple):
        return tuple(option.chosen(option.name(name), one) for one in value)
    if option.choices:
        return option.chosen(option.name(name), value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        option.check_number(option.name(name), value)
    return value


def _parameter(name: str, hint: Any, default: Any, *, required: bool = True) -> inspect.Parameter:
    """The parameter that becomes an option. Numbers arrive as text, options not given as None."""
    option = declared_in(hint)
    kinds = {one for one in _members(get_args(hint)[0]) if one is not NoneType}
    flags = [option.flag or as_option(name), *([option.short] if option.short else [])]
    is_flag, many = bool in kinds, any(get_origin(one) is tuple for one in kinds)
    if is_flag:
        kind: Any = bool | None if default is None else bool
    elif many and option.value not in _LISTS:
        kind = list[str] | None
    else:
        kind = float | None if kinds == {float} and not option.value else str | None
    metavar = option.metavar or _METAVARS.get(option.value)
    needed = " Required." if default is _REQUIRED and not required else ""
    about = typer.Option(
        *flags,
        help=described(option, default) + needed,
        metavar=None if is_flag else metavar,
        rich_help_panel=FIRST if option.first else option.group or None,
        autocompletion=_completion(option) if option.choices else None,
        show_default=False,
    )
    if default is _REQUIRED and required:
        return _keyword(name, Annotated[str, about], _REQUIRED)
    return _keyword(name, Annotated[kind, about], False if kind is bool else None)


def _keyword(name: str, hint: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, annotation=hint, default=default)


def _members(hint: Any) -> tuple[Any, ...]:
    """The members of a union; a type alone is its only member."""
    return (hint,) if isinstance(hint, type) or get_origin(hint) is tuple else get_args(hint)


def _completion(option: Option) -> Callable[[str], list[tuple[str, str]]]:
    """A function that gives Typer the choices that begin with the text typed so far."""

    def completed(incomplete: str) -> list[tuple[str, str]]:
        return [
            (name, note) for name, note in option.choices.items() if name.startswith(incomplete)
        ]

    return completed


def described(option: Option, default: Any) -> str:
    """The help of an option, with its choices and its default."""
    text = option.help
    if option.choices:
        names = [f"{name} ({note})" if note else name for name, note in option.choices.items()]
        text += f" {', '.join(names[:-1])} or {names[-1]}."
    if option.unset:
        return f"{text} Default: {option.unset}."
    if default in (_REQUIRED, None, False, (), "") or "efault" in text:
        return text
    return f"{text} Default: {written(option.value, default)}."
