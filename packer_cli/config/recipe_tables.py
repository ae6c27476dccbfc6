"""The tables of a recipe: TOML parsed, each key of a table checked, errors with their place."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packer_cli.config.command_options import CommandOptions
from packer_cli.config.documents import DocumentConfig
from packer_cli.config.options import PackConfig
from packer_cli.config.recipe_keys import (
    OF_ONE_RUN,
    SOURCE,
    TABLES,
    TOP,
    Key,
    SourceKeys,
    SourceText,
    is_required,
    keys_of,
    normal,
)
from packer_cli.config.recipe_paths import Paths
from packer_cli.config.run_options import RunOptions
from packer_cli.config.toml_values import value_of
from packer_cli.errors import UsageError, from_os_error, nearest
from packer_cli.storage import local

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Values = dict[str, Any]
SOURCE_TIP = 'a source is a table [[source]] with name = "web" and inputs = ["web/*.parquet"]'


@dataclass(frozen=True)
class Given:
    """Options as a recipe or the command line gives them: field -> value, of those given.

    config   of PackConfig; `fields` has what `text_field` says, too
    options  of RunOptions
    command  of CommandOptions, but for text_field
    """

    config: Values = field(default_factory=dict)
    options: Values = field(default_factory=dict)
    command: Values = field(default_factory=dict)


class Table:
    """A table of the recipe, its keys checked. `place` is how errors begin."""

    def __init__(self, place: str, content: Values, keys: dict[str, Key], paths: Paths) -> None:
        self.place, self.paths = place, paths
        self.keys: dict[str, Key] = {}  # those that it has
        self.values: Values = {}  # by field
        for spelled, value in content.items():
            name = normal(spelled)
            key = keys.get(name)
            if key is None:
                raise self._unknown(spelled, keys)
            if name in self.keys:
                raise self.error(f"{name}: is there twice, once as {spelled}", "leave one out")
            self.keys[name] = key
            try:
                self.values[key.field] = paths.resolved(key.field, value_of(key, value))
            except UsageError as error:
                raise self.error(error.message, error.tip) from None
        for name, key in keys.items():
            if is_required(key) and key.owner is not PackConfig and name not in self.keys:
                raise self.error(f"has no {name}", f"{name}: {key.option.help}")

    def error(self, message: str, tip: str) -> UsageError:
        return UsageError(f"{self.place}: {message}", tip)

    def of(self, *owners: type) -> Values:
        """The values whose keys these declare."""
        return {k.field: self.values[k.field] for k in self.keys.values() if k.owner in owners}

    def given(self) -> Given:
        """The options of the table."""
        command = self.of(CommandOptions, SourceText)
        config = self.of(PackConfig, DocumentConfig)
        text_field = command.pop("text_field", None)
        return Given(with_text(config, text_field), self.of(RunOptions), command)

    def _unknown(self, spelled: str, keys: dict[str, Key]) -> UsageError:
        name = normal(spelled)
        top = keys_of(*TOP)
        if name in OF_ONE_RUN:
            return self.error(
                f"{spelled}: is for one run, not for a recipe",
                f"give it on the command line: --{name.replace('_', '-')}",
            )
        if name in top and keys is keys_of(*SOURCE):
            return self.error(
                f"{spelled}: is an option of rows and runs, which all sources share",
                "move it to the top of the recipe, before the first [[source]]",
            )
        if keys is top and name in keys_of(SourceKeys):
            return self.error(f"{spelled}: is for sources", f"move it into one: {SOURCE_TIP}")
        return self.error(f"there is no key {spelled!r}", _nearest(name, keys))


def with_text(config: Values, text_field: str | None) -> Values:
    """Values of a DocumentConfig, with the name of the text among the names of fields."""
    if text_field is None:
        return config
    renamed = {"text": text_field} | dict(config.get("fields", ()))
    return config | {"fields": tuple(sorted(renamed.items()))}


def merged(before: Values, after: Values) -> Values:
    """Values of a configuration where `after` wins; names of fields, and arguments of the template,
    that it lacks are kept.
    """
    values = before | after
    for name in ("fields", "roles", "template_args"):
        if name in before and name in after:
            values[name] = tuple(sorted((dict(before[name]) | dict(after[name])).items()))
    return values


def parsed(path: str) -> Values:
    try:
        data = Path(local(path, "which recipes are not read from")).read_bytes()
    except FileNotFoundError:
        tip = "check the spelling; relative paths start at the current directory"
        raise UsageError(f"{path}: no such recipe", tip) from None
    except OSError as error:
        raise from_os_error(error, path, "read") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}: line {line}: not UTF-8", "save the recipe as UTF-8") from None
    try:
        content: Values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise _not_toml(path, text, str(error)) from None
    return content


def _not_toml(path: str, text: str, message: str) -> UsageError:
    """The error of the parser, with its place in front."""
    found = re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", message, re.S)
    lines = text.split("\n")
    what, line, column = found.groups() if found else (
        message.replace(" (at end of document)", ""), len(lines), len(lines[-1]) + 1
    )  # fmt: skip
    return UsageError(
        f"{path}: line {line}, column {column}: {what}",
        'a recipe is TOML: name = "text", number = 4096, list = ["a", "b"], [[source]]',
    )


def tables_of(path: str, name: str, content: Any) -> list[Values]:
    if isinstance(content, list) and all(isinstance(one, Mapping) for one in content) and content:
        return content
    raise UsageError(
        f"{path}: {name}: found {'a table' if isinstance(content, Mapping) else 'no tables'}, "
        f"expected tables that begin with [[{name}]]",
        "double brackets, as there may be several",
    )


def _nearest(name: str, keys: Mapping[str, Key]) -> str:
    """A tip for a key that there is not: the nearest, by its name here or in other tools."""
    names = {one: one for one in keys} | {
        normal(other): one.name for one in keys.values() for other in one.option.elsewhere
    }
    if keys is keys_of(*TOP):
        names |= {one: one for one in TABLES} | {"sources": "source", "stages": "stage"}
    near = nearest(name, names)
    if not near:
        return f"keys here are {', '.join(names[one] for one in keys)}"
    meant = names[near]
    brackets = "[{}]" if meant == "validation" else "[[{}]]" if meant in TABLES else "{}"
    return f"did you mean {brackets.format(meant)}?"
