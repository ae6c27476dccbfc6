"""Values of a recipe: numbers as on the command line, or as TOML has them; lists and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from packer_cli.config.recipe_keys import Key
from packer_cli.config.values import as_arguments, read
from packer_cli.errors import UsageError

# how a value is written: see `Option.value`
_EXPECTED = {
    "count": 'a whole number like 4096 or "4k"',
    "tokens": 'a number of tokens like 200_000_000 or "200M"',
    "size": 'a number of bytes, or a size like "256M"',
    "share": 'a number like 0.01, or "1%"',
    "count or share": 'a number like 100 or 0.01, or "1%"',
    "list": "a list of names",
    "fields": 'a table like {messages = "chosen"}',
    "arguments": "a table like {enable_thinking = false}",
    "weights": "a table like {web = 0.7, code = 0.3}",
}
_WHOLE = ("count", "tokens", "size")


def value_of(key: Key, given: Any) -> Any:
    """What a configuration takes for a value of TOML. UsageError names the key, what is found and
    what is expected.
    """
    value = _typed(key, given)
    option = key.option
    if option.choices:
        if isinstance(value, tuple):
            return tuple(option.chosen(key.name, one) for one in value)
        return option.chosen(key.name, value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        option.check_number(key.name, value)
    return value


def _typed(key: Key, given: Any) -> Any:
    kind = key.option.value
    if kind == "fields":
        return _fields(key, given)
    if kind == "weights":
        return _weights(key, given)
    if kind == "arguments":
        if not isinstance(given, Mapping):
            _refuse(key, given, _EXPECTED[kind])
        return as_arguments(key.name, given)
    if kind == "list" or key.is_list:
        return _texts(key, given)
    if kind:
        return _number(key, given)
    if bool in key.kinds:
        return given if isinstance(given, bool) else _refuse(key, given, "true or false")
    if float in key.kinds:
        return _float(key, given)
    return given if isinstance(given, str) else _refuse(key, given, "text in quotes")


def _number(key: Key, given: Any) -> int | float:
    kind = key.option.value
    if isinstance(given, str):
        value: int | float = read(kind, key.name, given)
    elif not _is_number(given):
        value = _refuse(key, given, _EXPECTED[kind])
    elif kind in _WHOLE:
        value = int(given) if given == int(given) else _refuse(key, given, _EXPECTED[kind])
    else:
        value = float(given) if kind == "share" else given
    return value


def _float(key: Key, given: Any) -> float:
    return float(given) if _is_number(given) else _refuse(key, given, "a number")


def _texts(key: Key, given: Any) -> tuple[str, ...]:
    if isinstance(given, str):
        return read("list", key.name, given) if key.option.value else (given,)
    if not isinstance(given, list):
        _refuse(key, given, "a list of texts")
    for one in given:
        if not isinstance(one, str):
            _refuse(key, one, "a list of texts", "a list with ")
    return tuple(given)


def _fields(key: Key, given: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(given, Mapping):
        of_roles = key.name == "role"
        _refuse(key, given, 'a table like {human = "user"}' if of_roles else _EXPECTED["fields"])
    for own, name in given.items():
        if not isinstance(name, str):
            _refuse(key, name, "the name of a field", f"for {own} ")
    return tuple(sorted(given.items()))


def _weights(key: Key, given: Any) -> tuple[tuple[str, float], ...]:
    if not isinstance(given, Mapping):
        _refuse(key, given, _EXPECTED["weights"])
    weights = []
    for name, weight in given.items():
        if isinstance(weight, str):
            weights.append((name, read("share", f"{key.name}.{name}", weight)))
        else:
            number = (
                weight if _is_number(weight) else _refuse(key, weight, "a number", f"{name} = ")
            )
            weights.append((name, float(number)))
    return tuple(weights)


def _is_number(given: Any) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given)


def _refuse(key: Key, given: Any, expected: str, before: str = "") -> Any:
    raise UsageError(
        f"{key.name}: found {before}{_shown(given)}, expected {expected}", key.option.help
    )


def _shown(given: Any) -> str:
    """A value as TOML has it, or what it is."""
    if isinstance(given, bool):
        return str(given).lower()
    if isinstance(given, str):
        return f"the text {given!r}"
    if isinstance(given, int | float):
        return str(given)
    if isinstance(given, list):
        return "a list"
    return "a table" if isinstance(given, Mapping) else f"the date {given}"
