"""What to pack, and how: a recipe, which is a TOML file, and the command line, which wins over it.

    order_of(["mix.toml"], given, RunOptions) -> Order

Paths in a recipe begin at its folder. Every error names the recipe, and the table where it is not
the top: "mix.toml, source 'web': ...".
"""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from packer_cli.errors import UsageError, from_os_error, nearest
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.formats import format_of
from packer_cli.options.mixture import Amount, Mixture, Stage
from packer_cli.options.option import (
    Owner,
    Values,
    in_terms_of_fields,
    normal,
    options_of,
    refuse_missing,
)
from packer_cli.options.options import PackConfig
from packer_cli.options.recipe_schema import SOURCE, STAGE, TABLES, TOP, VALIDATION, Key, keys_of
from packer_cli.options.run_options import EncodingOptions, OneRun, PackOptions
from packer_cli.storage import is_url, local

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_Options = TypeVar("_Options", bound=EncodingOptions)
_Kind = TypeVar("_Kind")
_ROWS = {one.name for one in fields(PackConfig)} - {one.name for one in fields(DocumentConfig)}
_ROWS |= {"unit_bytes", "shard_bytes"}  # of rows, too
# What becomes of an earlier result: one word on the command line takes the place of all others.
_EARLIER = {"overwrite", "update", "add", "prune", "checksum"}
_SOURCE = 'a source is a table [[source]] with name = "web" and inputs = ["web/*.parquet"]'
_STDIN = "-"
_LIST = "@"  # before the name of a file of names


@dataclass(frozen=True)
class Source:
    """A source of a recipe: what is read, and with which options it is tokenized.

    inputs     as on the command line; relative ones start at the current directory
    inherited  options that all sources have from the recipe's top or the command line: one that
               this source's records have no use for is passed over
    """

    name: str
    inputs: tuple[str, ...]
    config: DocumentConfig
    inherited: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Recipe:
    """Several sources and one result.

    path       of the recipe
    config     of the rows; its `mixture` has an amount for every source, in the same order
    tokenized  the directory that holds a tokenized directory for each source; None: beside the
               output
    """

    path: str
    tokenizer: str | None
    sources: tuple[Source, ...]
    config: PackConfig
    tokenized: str | None = None


@dataclass(frozen=True)
class Order(Generic[_Options]):
    """What to pack, and how.

    inputs  as on the command line; those of a recipe without sources
    config  of the rows
    recipe  where there are sources, in place of inputs
    """

    inputs: list[str]
    config: PackConfig
    options: _Options
    command: PackOptions
    recipe: Recipe | None = None


@dataclass(frozen=True)
class _File:
    """What a recipe says. Without sources it is a configuration, for `inputs`."""

    path: str
    inputs: list[str]
    values: Values
    sources: Sequence[Values] = ()
    mixture: Mixture | None = None
    tokenized: str | None = None


def is_recipe(name: str) -> bool:
    """Whether an INPUT of the command line is a recipe, rather than a pattern or a folder."""
    is_pattern = glob.has_magic(name) and not os.path.isfile(name)
    return name.lower().endswith(".toml") and not is_pattern and not os.path.isdir(name)


def order_of(inputs: list[str], given: Values, kind: type[_Options]) -> Order[_Options]:
    """The order of a command line: `inputs` and what is `given` beside them. An input that is a
    recipe is read. `kind`: of the options of the run; others in the recipe are passed over.

    Raises UsageError for what cannot work, in the terms of where it is said.
    """
    file, given = _file_of(inputs, given), with_text_field(given)
    kept = file.values
    if _EARLIER & given.keys():
        kept = {name: value for name, value in kept.items() if name not in _EARLIER}
    values = _merged(kept, given)
    of_rows = _of(PackConfig, values)
    if file.sources:
        of_rows = {name: value for name, value in of_rows.items() if name in _ROWS}
        of_rows["mixture"] = file.mixture
    config = _made(PackConfig, of_rows, given, file.path)
    command = PackOptions(**_of(PackOptions, values))
    if command.position_ids:
        config = replace(config, columns=(*config.columns, "position_ids"))
    if command.max_share_error is not None and not file.sources:
        raise UsageError("--max-share-error needs a recipe with sources", "leave it out")
    recipe = Recipe(file.path, command.tokenizer, _sources(file, given), config, file.tokenized)
    return Order(
        file.inputs,
        config,
        _made(kind, _of(kind, values), given, file.path),
        command,
        recipe if file.sources else None,
    )


def with_text_field(values: Values) -> Values:
    """The name of the text among the names of fields."""
    values = dict(values)
    text_field = values.pop("text_field", None)
    if text_field is not None:
        renamed = {"text": text_field} | dict(values.get("fields", ()))
        values["fields"] = tuple(sorted(renamed.items()))
    return values


def _file_of(inputs: list[str], given: Values) -> _File:
    recipes = [one for one in inputs if is_recipe(one)]
    if recipes and len(inputs) == 1:
        return _read(inputs[0])
    if recipes and "input_format" not in given:
        raise UsageError(
            f"{recipes[0]}: a recipe stands alone, and there are {len(inputs) - 1} other inputs",
            "name them in the recipe: inputs = [...]; or, for files of text, give --input-format",
        )
    return _File("", inputs, {})


def _merged(before: Values, after: Values) -> Values:
    """Values of which `after` wins; names of fields, and arguments of the template, that it lacks
    are kept.
    """
    values = before | after
    for name in ("fields", "roles", "template_args"):
        if name in before and name in after:
            values[name] = tuple(sorted((dict(before[name]) | dict(after[name])).items()))
    return values


def _of(kind: Any, values: Values) -> Values:
    known = {one.name for one in fields(kind)}
    return {name: value for name, value in values.items() if name in known}


def _sources(file: _File, given: Values) -> tuple[Source, ...]:
    sources = []
    for table in file.sources:
        own = _of(DocumentConfig, table)
        values = _of(DocumentConfig, _merged(_merged(file.values, own), given))
        config = _made(DocumentConfig, values, given, f"{file.path}, source {table['name']!r}")
        inherited = frozenset(values.keys() - own.keys())
        sources.append(Source(table["name"], table["inputs"], config, inherited))
    return tuple(sources)


def _made(kind: type[_Kind], values: Values, given: Values, place: str) -> _Kind:
    """A configuration. Errors that come of the recipe are told in its terms, with the place."""
    refuse_missing(kind, values, f", or max_length to {place}" if place else "")
    try:
        return kind(**values)
    except UsageError as error:
        blamed = re.split("[: ]", error.message)[0]
        is_given = any(one.name(name) == blamed and name in given
                       for name, one in options_of(kind).items())  # fmt: skip
        if is_given or not place:
            raise
        raise in_terms_of_fields(error, place) from None


def _read(path: str) -> _File:
    """What a recipe says. UsageError for what cannot work, with the place; DataError for a file
    that cannot be read.
    """
    content = _parsed(path)
    tables = {name: content.pop(name) for name in TABLES if name in content}
    top = _Table(path, path, content, TOP)
    values = with_text_field(top.values)
    if "source" not in tables:
        of_sources = {*options_of(Mixture), "max_epochs", "tokenized"} & top.values.keys()
        for name in (*of_sources, *tables):
            raise top.error(f"{name}: is for recipes with sources, and there is none", _SOURCE)
        return _File(path, list(top.inputs()), values)
    if "inputs" in values:
        raise top.error("inputs: are those of sources, where there are any", _SOURCE)
    sources = []
    for number, one in enumerate(_tables(path, "source", tables["source"]), 1):
        table = _Table(path, f"{path}, source {_which(one, number)!r}", one, SOURCE)
        _check_name(table)
        table.inputs(every="input_format" in values)
        sources.append(with_text_field(table.values))
    mixture = _mixture(top, sources, tables)
    return _File(path, [], values, sources, mixture, values.get("tokenized"))


def _which(table: Values, number: int) -> str | int:
    name = table.get("name")
    return name if isinstance(name, str) and name else number


def _check_name(table: _Table) -> None:
    name = table.values["name"]
    if not name.strip() or name.startswith(".") or re.search(r"[/\\\x00-\x1f\x7f]", name):
        raise table.error(
            f"name: {name!r} cannot be the name of a directory",
            "tokens of a source are kept under its name: use letters, digits and dashes",
        )


def _mixture(top: _Table, sources: list[Values], tables: Values) -> Mixture:
    names = [one["name"] for one in sources]
    held = _validation(top, tables["validation"], names) if "validation" in tables else {}
    held_out = held.pop("sources", None) or names
    most = {k: v for k, v in top.values.items() if k == "max_epochs"}
    amounts = tuple(
        Amount(**most | {k: v for k, v in _of(Amount, one).items() if k != "inputs"},
               held_out=one["name"] in held_out)
        for one in sources
    )  # fmt: skip
    of_all = _of(Mixture, top.values)
    stages = _tables(top.place, "stage", tables["stage"]) if "stage" in tables else []
    of_all["stages"] = tuple(
        Stage(**_Table(top.recipe, f"{top.place}, stage {_which(one, number)}", one, STAGE).values)
        for number, one in enumerate(stages, 1)
    )
    of_all |= {f"validation_{name}": value for name, value in held.items()}
    try:
        return Mixture(amounts, **of_all)
    except UsageError as error:
        between = ", " if error.message.startswith(("source ", "stage ")) else ": "
        raise UsageError(f"{top.place}{between}{error.message}", error.tip) from None


def _validation(top: _Table, content: Any, names: list[str]) -> Values:
    if not isinstance(content, Mapping):
        raise top.error("validation: expected a table that begins with [validation]",
                        'for example [validation] and below it share = "0.5%"')  # fmt: skip
    table = _Table(top.recipe, f"{top.place}, validation", dict(content), VALIDATION)
    values = table.values
    if ("share" in values) == ("documents" in values):
        what = "both share and documents" if "share" in values else "neither share nor documents"
        raise table.error(f"has {what}", 'say one of them: share = "0.5%", or documents = 500')
    if values.get("share") in (0, 1):
        raise table.error(
            f"share: {values['share']:g} is not between 0 and 1", 'for example "0.5%"'
        )
    for name in values.get("sources", ()):
        if name not in names:
            there_are = f"sources are {', '.join(names)}"
            raise table.error(f"sources: there is no source {name!r}", there_are)
    if values.get("sources") == ():
        raise table.error("sources: names no source", "leave it out for all of them")
    return values


class _Table:
    """A table of a recipe, with the values of its keys by field. `place` is how errors begin."""

    def __init__(self, recipe: str, place: str, content: Values, owners: tuple[Owner, ...]) -> None:
        self.recipe, self.place = recipe, place
        self.values: Values = {}
        keys = keys_of(*owners)
        for spelled, given in content.items():
            name = normal(spelled)
            if name not in keys:
                raise self._unknown(spelled, keys)
            field, option = keys[name]
            if field in self.values:
                raise self.error(f"{name}: is there twice, once as {spelled}", "leave one out")
            try:
                value = option.read(name, given)
            except UsageError as error:
                raise self.error(error.message, error.tip) from None
            self.values[field] = _resolved(os.path.dirname(recipe), field, value)
        for name, key in keys.items():
            if key.is_required and key.field not in self.values:
                raise self.error(f"has no {name}", f"{name}: {key.option.help}")

    def error(self, message: str, tip: str) -> UsageError:
        return UsageError(f"{self.place}: {message}", tip)

    def inputs(self, *, every: bool = False) -> tuple[str, ...]:
        """UsageError for none, and where the recipe is among them. `every`: whether all files of
        folders are inputs, not only those that are by their names.
        """
        inputs: tuple[str, ...] = self.values.get("inputs", ())
        if not inputs or "" in inputs:
            what = "an input is empty" if inputs else "has no inputs"
            raise self.error(what, 'name files: inputs = ["web/*.parquet"]')
        own = os.path.realpath(self.recipe)
        read = every or "input_format" in self.values or format_of(own)[0] is not None
        for name in inputs:
            if name != _STDIN and not is_url(name) and _holds(name, own, read=read):
                what = "is" if os.path.isfile(name) else "holds"
                raise self.error(
                    f"inputs: {name!r} {what} the recipe itself",
                    "name the data only, or keep the recipe elsewhere",
                )
        return inputs

    def _unknown(self, spelled: str, keys: Mapping[str, Key]) -> UsageError:
        name = normal(spelled)
        top = keys_of(*TOP)
        if name in keys_of(OneRun):
            return self.error(
                f"{spelled}: is for one run, not for a recipe",
                f"give it on the command line: --{name.replace('_', '-')}",
            )
        if name in top and keys is keys_of(*SOURCE):
            return self.error(
                f"{spelled}: is an option of rows and runs, which all sources share",
                "move it to the top of the recipe, before the first [[source]]",
            )
        if keys is top and name in keys_of(*SOURCE):
            return self.error(f"{spelled}: is for sources", f"move it into one: {_SOURCE}")
        return self.error(f"there is no key {spelled!r}", _nearest(name, keys))


def _nearest(name: str, keys: Mapping[str, Key]) -> str:
    """A tip for a key that there is not: the nearest, by its name here or in other tools."""
    names = {one: one for one in keys} | {
        normal(other): one for one, key in keys.items() for other in key.option.elsewhere
    }
    if keys is keys_of(*TOP):
        names |= {one: one for one in TABLES} | {"sources": "source", "stages": "stage"}
    near = nearest(name, names)
    if not near:
        return f"keys here are {', '.join(names[one] for one in keys)}"
    meant = names[near]
    brackets = "[{}]" if meant == "validation" else "[[{}]]" if meant in TABLES else "{}"
    return f"did you mean {brackets.format(meant)}?"


def _tables(path: str, name: str, content: Any) -> list[Values]:
    if isinstance(content, list) and all(isinstance(one, Mapping) for one in content) and content:
        return content
    raise UsageError(
        f"{path}: {name}: found {'a table' if isinstance(content, Mapping) else 'no tables'}, "
        f"expected tables that begin with [[{name}]]",
        "double brackets, as there may be several",
    )


def _resolved(folder: str, field: str, value: Any) -> Any:
    """The value of a field, made a path from the current directory where it is one."""
    if field == "inputs":
        return tuple(_input(folder, one) for one in value)
    if field in ("output", "tokenized", "staging"):
        return _path(folder, value)
    if field not in ("tokenizer", "chat_template") or value == "bytes":
        return value
    # or a name: of the hub, or of one of the tokenizer's templates
    marks = "./" if field == "chat_template" else ""
    is_path = value.startswith((".", "/")) or any(mark in value for mark in marks)
    path = _path(folder, value)
    return path if is_path or os.path.exists(path) else value


def _path(folder: str, name: str) -> str:
    """From the current directory; what does not depend on a folder stays as it is."""
    if not name or name == _STDIN or is_url(name) or name.startswith("~"):
        return name
    return os.path.join(folder, name)


def _input(folder: str, name: str) -> str:
    if name.startswith(_LIST):
        return _LIST + _path(folder, name[1:])
    path = _path(folder, name)
    if path != name and glob.has_magic(folder) and not os.path.exists(path):
        return os.path.join(glob.escape(folder), name)  # only the name is a pattern
    return path


def _holds(name: str, recipe: str, *, read: bool) -> bool:
    """Whether the recipe is among what is named. `read`: whether it would be, in a folder."""
    if os.path.isdir(name):
        folder = os.path.realpath(name)
        return read and os.path.commonpath([folder, recipe]) == folder
    matches = [name] if os.path.exists(name) else glob.glob(name, recursive=True)
    return any(os.path.realpath(one) == recipe for one in matches)


def _parsed(path: str) -> Values:
    try:
        file = Path(local(path, "which recipes are not read from"))
        if file.exists() and not file.is_file():
            raise UsageError(f"{path}: not a regular file", "a recipe is a TOML file")
        data = file.read_bytes()
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
