"""Recipes, which are TOML files, and requests: a recipe and the command line, which wins over it.

    request_of(["mix.toml"], given, RunOptions) -> PackRequest

Paths in a recipe are relative to its folder. Every error names the recipe, and the table inside it:
"mix.toml, source 'web': ...".
"""

from __future__ import annotations

import glob
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Annotated, Any, Generic, TypeVar

from typer import Option

from packer_cli.errors import UsageError, from_os_error, nearest
from packer_cli.options.documents import BY_NAME, DEFAULTS, OF_ROWS_TOO, DocumentConfig
from packer_cli.options.formats import format_of
from packer_cli.options.option import (
    COUNT,
    SHARE,
    DeclaredOption,
    OptionGroup,
    Rule,
    Values,
    in_terms_of_fields,
    normal,
    options_of,
    refuse,
    refuse_missing,
)
from packer_cli.options.options import ABOUT_MAX_EPOCHS, MAX_EPOCHS, Amount, Mixture, PackConfig
from packer_cli.options.run_options import EncodingOptions, PackOptions, RunOptions, TextField
from packer_cli.options.shapes import KINDS
from packer_cli.storage import is_url, local, read_bytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_Options = TypeVar("_Options", bound=EncodingOptions)
_Kind = TypeVar("_Kind")
_ROWS = {item.name for item in fields(PackConfig)} - {item.name for item in fields(DocumentConfig)}
_ROWS |= OF_ROWS_TOO
# Options for an earlier result: one on the command line replaces all of the recipe.
_EARLIER = {"overwrite", "add"}
_SOURCE = 'a source is a table [[source]] with name = "web" and inputs = ["web/*.parquet"]'
_INPUTS = "Files, directories, globs and URLs of these. Relative ones begin at the recipe."
_STDIN = "-"
_LIST = "@"  # before the name of a file of names


@dataclass(frozen=True)
class RecipeSource:
    """A source of a recipe: its inputs, and the options with which it is tokenized.

    inputs     as on the command line; relative ones start at the current directory
    inherited  options from the recipe's top or the command line: they are ignored if the records of
               this source have no use for them
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
    sources: tuple[RecipeSource, ...]
    config: PackConfig
    tokenized: str | None = None


@dataclass(frozen=True)
class PackRequest(Generic[_Options]):
    """Inputs and options of a run.

    inputs  as on the command line; those of a recipe without sources
    config  of the rows
    recipe  in place of inputs if there are sources
    """

    inputs: list[str]
    config: PackConfig
    options: _Options
    command: PackOptions
    recipe: Recipe | None = None


def is_recipe(name: str) -> bool:
    """Tell if an INPUT of the command line is a recipe, rather than a pattern or a folder."""
    is_pattern = glob.has_magic(name) and not os.path.isfile(name)
    return name.lower().endswith(".toml") and not is_pattern and not os.path.isdir(name)


def request_of(inputs: list[str], given: Values, kind: type[_Options]) -> PackRequest[_Options]:
    """Return the request of a command line: its `inputs`, and values that are `given` beside them.
    A recipe among the inputs is read. `kind`: class of the options of the run; other options in the
    recipe are ignored.

    Raises UsageError for what cannot work, in the terms of the command line or of the recipe.
    """
    recipes = [name for name in inputs if is_recipe(name)]
    if recipes and len(inputs) > 1 and "input_format" not in given:
        raise UsageError(
            f"{recipes[0]}: a recipe stands alone, and there are {len(inputs) - 1} other inputs",
            "name them in the recipe: inputs = [...]; or, for files of text, give --input-format",
        )
    file = _read(inputs[0]) if recipes and len(inputs) == 1 else _File("", {"inputs": inputs})
    given = with_text_field(given)
    earlier = _EARLIER if _EARLIER & given.keys() else set[str]()
    kept = {name: value for name, value in file.values.items() if name not in earlier}
    values = _merged(kept, given)
    of_rows = _of(PackConfig, values)
    if file.mixture:
        of_rows = {name: value for name, value in of_rows.items() if name in _ROWS}
        of_rows["mixture"] = file.mixture
    config = _made(PackConfig, of_rows, given, file.path)
    command = PackOptions(**_of(PackOptions, values))
    options = _made(kind, _of(kind, values), given, file.path)
    if not file.mixture:
        if file.path:
            _refuse_itself(file.path, file.path, values["inputs"], config)
        return PackRequest(list(values["inputs"]), config, options, command)
    amounts = zip(file.sources, file.mixture.sources, strict=True)
    sources = tuple(_source(file, table, amount, given) for table, amount in amounts)
    tokenized = file.values.get("tokenized")
    recipe = Recipe(file.path, command.tokenizer, sources, config, tokenized)
    return PackRequest([], config, options, command, recipe)


def with_text_field(values: Values) -> Values:
    """Return values with the name of the text among the names of fields."""
    values = dict(values)
    text_field = values.pop("text_field", None)
    if text_field is not None:
        renamed = {"text": text_field} | dict(values.get("fields", ()))
        values["fields"] = tuple(sorted(renamed.items()))
    return values


def _merged(before: Values, after: Values) -> Values:
    """Merge values, of which `after` wins; names of fields and arguments are joined."""
    values = before | after
    for name in BY_NAME:
        if name in before and name in after:
            values[name] = tuple(sorted((dict(before[name]) | dict(after[name])).items()))
    return values


def _of(kind: Any, values: Values) -> Values:
    known = {item.name for item in fields(kind)}
    return {name: value for name, value in values.items() if name in known}


def _source(file: _File, table: Values, amount: Amount, given: Values) -> RecipeSource:
    of_source = _of(DocumentConfig, table) | {"tiers": tuple(tier.where for tier in amount.tiers)}
    values = _of(DocumentConfig, _merged(_merged(file.values, of_source), given))
    place = f"{file.path}, source {table['name']!r}"
    config = _made(DocumentConfig, values, given, place)
    if DEFAULTS not in of_source:  # only rows need those of columns of other sources
        config = config.without_other_defaults()
    _refuse_itself(file.path, place, table["inputs"], config)
    inherited = frozenset(values.keys() - of_source.keys())
    return RecipeSource(table["name"], table["inputs"], config, inherited)


def _refuse_itself(recipe: str, place: str, inputs: Sequence[str], config: DocumentConfig) -> None:
    """Raise UsageError if a recipe is among its inputs, since its text would become documents."""
    itself = os.path.realpath(recipe)
    in_folders = config.input_format or format_of(recipe, documents=config.whole_files)[0]
    for name in inputs:
        if os.path.isdir(name):
            folder = os.path.realpath(name)
            is_held = in_folders and os.path.commonpath([folder, itself]) == folder
        else:
            matches = [name] if os.path.exists(name) else glob.glob(name, recursive=True)
            is_held = itself in map(os.path.realpath, matches)
        if is_held:
            raise UsageError(
                f"{place}: inputs: {name!r} {'is' if os.path.isfile(name) else 'holds'} the recipe "
                "itself",
                "name the data only, or keep the recipe elsewhere",
            )


def _made(kind: type[_Kind], values: Values, given: Values, place: str) -> _Kind:
    """Return a configuration. Errors from the recipe are in its terms, with the place."""
    refuse_missing(kind, values, f", or max_length to {place}" if place else "")
    try:
        return kind(**values)
    except UsageError as error:
        blamed = re.split("[: ]", error.message)[0]
        flags = [option.flag for name, option in options_of(kind).items() if name in given]
        if not place or blamed in flags:
            raise
        raise in_terms_of_fields(error, place) from None


# The content of a recipe


@dataclass(frozen=True)
class RecipeKeys:
    """Keys at the top of recipes besides options: `inputs` of recipes without sources, and others
    of recipes with sources, as are those of `Mixture`.
    """

    inputs: Annotated[tuple[str, ...], Option(help=_INPUTS)] = ()
    max_epochs: Annotated[float | None, MAX_EPOCHS, ABOUT_MAX_EPOCHS] = None
    tokenized: Annotated[
        str | None,
        Option(
            help="Directory that holds a tokenized directory for each source, to be used again. "
            "Default: beside the output."
        ),
    ] = None


@dataclass(frozen=True)
class SourceKeys:
    """Keys of a [[source]] besides its `Amount` and options of documents."""

    name: Annotated[str, Option(help="What the source is called in all reports.")]
    inputs: Annotated[tuple[str, ...], Option(help=_INPUTS)]


@dataclass(frozen=True)
class TierKeys:
    """Keys of a [[source.tier]] besides its `Amount`."""

    where: Annotated[
        tuple[str, ...],
        Option(help="Conditions that its documents meet; [] if all that are in no tier before it."),
    ]


@dataclass(frozen=True)
class ValidationKeys(OptionGroup):
    """Keys of [validation]: documents that are held out, chosen by their content."""

    share: Annotated[
        float | None, SHARE, Option(help="Share of the documents of each source: 0.5%.")
    ] = None
    documents: Annotated[int | None, COUNT, Option(help="Or as many documents of each source.")] = (
        None
    )
    sources: Annotated[
        tuple[str, ...], Option(help="Names of the sources that give documents. Default: all.")
    ] = ()

    def _rules(self) -> Iterator[Rule]:
        yield (
            (self.share is None) == (self.documents is None),
            "needs one of share and documents",
            'for example share = "0.5%", or documents = 500',
        )
        problem = f"share: {self.share} is not between 0 and 1"
        yield self.share in (0, 1), problem, 'for example "0.5%"'


TOP = (RecipeKeys, PackConfig, PackOptions, RunOptions, Mixture)
SOURCE = (SourceKeys, TextField, Amount, DocumentConfig)
TIER = (TierKeys, Amount)
VALIDATION = (ValidationKeys,)
# Tables within a recipe: their first line, and the groups of their keys.
_TABLES: dict[str, tuple[str, tuple[type, ...]]] = {
    "source": ("[[source]]", SOURCE),
    "tier": ("[[source.tier]]", TIER),
    "validation": ("[validation]", VALIDATION),
}


@cache
def keys_of(*groups: type) -> dict[str, DeclaredOption]:
    """Return the options of some groups by their names in recipes."""
    names = {"--template-arg": "template_args"}  # one table has them all
    options = options_of(*groups).values()
    return {names.get(option.flag, normal(option.flag)): option for option in options}


_TYPED = re.compile(
    r"(?:--(?:(?:field|role) (?:'[^']*=[^']*'|[^\s,;']+=[^\s,;]+)"
    rf"|shape (?:{'|'.join(KINDS)})\b|prompt-template (?:none|alpaca|chat)\b) ?)+"
)


def in_terms_of_keys(text: str) -> str:
    """Return a tip with the keys of a source in place of options that are typed."""

    def quoted(text: str) -> str:
        return json.dumps(text, ensure_ascii=False)

    def keys(match: re.Match[str]) -> str:
        words, tables = shlex.split(match[0]), dict[str, list[str]]()
        for flag, value in zip(words[::2], words[1::2], strict=True):
            name, is_pair, column = value.rpartition("=")
            key = name if re.fullmatch(r"[\w-]+", name, re.ASCII) else quoted(name)
            written = f"{key} = {quoted(column)}" if is_pair else quoted(value)
            tables.setdefault(normal(flag), []).append(written)
        keys = [
            f"{key} = " + (f"{{{', '.join(values)}}}" if key in ("field", "role") else values[0])
            for key, values in tables.items()
        ]
        return f"{' and '.join(keys)} in the source{' ' * match[0].endswith(' ')}"

    return _TYPED.sub(keys, text)


@dataclass(frozen=True)
class _File:
    """Values of a recipe, by the fields of option groups. `sources`: the values of each source,
    with `tiers`, the values of each of its tiers.
    """

    path: str
    values: Values
    sources: Sequence[Values] = ()
    mixture: Mixture | None = None


def _read(path: str) -> _File:
    """Read a recipe. Raises UsageError with the place, or DataError."""
    content = _parsed(path)
    names = ("source", "validation")
    tables: Values = {name: content.pop(name) for name in names if name in content}
    top = _values(path, path, content, TOP)
    of_sources = {*options_of(Mixture), "max_epochs", "tokenized"} & top.keys() | tables.keys()
    has_sources, first = "source" in tables, min(of_sources, default="")
    no_source = f"{path}: {first}: is for recipes with sources, and there is none"
    no_inputs = f"{path}: inputs: are those of sources, where there are any"
    refuse([
        (of_sources and not has_sources, no_source, _SOURCE),
        (has_sources and "inputs" in top, no_inputs, _SOURCE),
    ])  # fmt: skip
    if not has_sources:
        _refuse_none(path, top)
        return _File(path, top)
    sources = []
    for number, table in enumerate(_tables_in(path, "source", tables), 1):
        name = table.get("name")
        which = name if isinstance(name, str) and name else number
        place = f"{path}, source {which!r}"
        tiers = [
            _values(path, f"{place}, tier {number}", tier, TIER)
            for number, tier in enumerate(_tables_in(place, "tier", table), 1)
        ]
        sources.append(_values(path, place, table, SOURCE) | {"tiers": tiers})
        _refuse_none(place, sources[-1])
    return _File(path, top, sources, _mixture(path, top, sources, tables))


def _tables_in(place: str, name: str, content: Values) -> list[Values]:
    """Take the tables of a name out of `content`; [] if there are none. Raises UsageError for
    anything else.
    """
    if name not in content:
        return []
    tables = content.pop(name)
    is_tables = isinstance(tables, list) and all(isinstance(table, dict) for table in tables)
    if not is_tables or not tables:
        problem = f"{place}: {name}: expected tables that begin with {_TABLES[name][0]}"
        raise UsageError(problem, "double brackets, as there may be several")
    return list(tables)


def _mixture(path: str, top: Values, sources: list[Values], tables: Values) -> Mixture:
    values, place = _of(Mixture, top), f"{path}, validation"
    names = held_out = [source["name"] for source in sources]
    if "validation" in tables:
        if not isinstance(tables["validation"], Mapping):
            raise UsageError(f"{place}: is no table", "a table begins with [validation]")
        table = _values(path, place, tables["validation"], VALIDATION)
        held = _made(ValidationKeys, table, {}, place)
        unknown = [name for name in held.sources if name not in names]
        refuse([
            (table.get("sources") == (), f"{place}: sources: names none", "leave it out"),
            (
                unknown,
                f"{place}: sources: there is no source {''.join(unknown[:1])!r}",
                f"sources are {', '.join(names)}",
            ),
        ])  # fmt: skip
        values |= {"validation_share": held.share, "validation_documents": held.documents}
        held_out = list(held.sources) or names
    most = {name: value for name, value in top.items() if name == "max_epochs"}
    values["sources"] = tuple(
        _amount(
            f"{path}, source {source['name']!r}",
            most | source | {"held_out": source["name"] in held_out},
        )
        for source in sources
    )
    return _made(Mixture, values, {}, path)


def _amount(place: str, source: Values) -> Amount:
    """Return the amount of a source, with those of its tiers."""
    own = _of(Amount, source) | {"inputs": 1, "where": ()}
    common = {name: own[name] for name in ("name", "held_out", "max_epochs") if name in own}
    tiers = list[Amount]()
    for number, tier in enumerate(source["tiers"], 1):
        of_tier = f"{place}, tier {number}"
        _made(DocumentConfig, {"where": tier["where"]}, {}, of_tier)  # raises for a wrong condition
        tiers.append(_made(Amount, common | tier | {"tier": number}, {}, of_tier))
    return _made(Amount, own | {"tiers": tuple(tiers)}, {}, place)


def _values(path: str, place: str, table: Mapping[str, Any], groups: tuple[type, ...]) -> Values:
    """Return the values of a table's keys, by field."""
    values: Values = {}
    keys = keys_of(*groups)
    for spelled, written in table.items():
        name = normal(spelled)
        if name not in keys:
            raise UsageError(f"{place}: there is no key {spelled!r}", _meant(name, groups))
        option = keys[name]
        if option.field in values:
            raise UsageError(f"{place}: {name}: is there twice, once as {spelled}", "leave one out")
        try:
            value = option.read(name, written)
        except UsageError as error:
            raise UsageError(f"{place}: {error.message}", error.tip) from None
        values[option.field] = _resolved(os.path.dirname(path), option.field, value)
    for name, option in keys.items():
        # max_length may be given beside the recipe
        is_required = option.default is MISSING and option.field != "max_length"
        if is_required and option.field not in values:
            raise UsageError(f"{place}: has no {name}", f"{name}: {option.help}")
    return with_text_field(values)


def _refuse_none(place: str, values: Values) -> None:
    inputs = values.get("inputs", ())
    if not inputs or "" in inputs:
        problem = "an input is empty" if inputs else "has no inputs"
        raise UsageError(f"{place}: {problem}", 'name files: inputs = ["web/*.parquet"]')


def _meant(name: str, groups: tuple[type, ...]) -> str:
    """Return a tip for a key that there is not: where it belongs, or the nearest that there is."""
    if groups in (TOP, SOURCE) and (near := nearest(name, _TABLES)):
        return f"did you mean {_TABLES[near][0]}?"
    places = [begin for begin, groups_there in _TABLES.values() if name in keys_of(*groups_there)]
    if name in keys_of(*TOP):
        places.insert(0, "the top of the recipe")
    if places:
        return f"it is a key of {' and of '.join(places)}"
    keys = keys_of(*groups)
    names = {normal(other): key for key, option in keys.items() for other in option.names_elsewhere}
    names |= {key: key for key in keys}
    near = nearest(name, names)
    return f"did you mean {names[near]}?" if near else f"keys here are {', '.join(keys)}"


def _resolved(folder: str, field: str, value: Any) -> Any:
    """Return the value of a field; a path becomes relative to the current directory."""
    if field == "inputs":
        return tuple(_input(folder, name) for name in value)
    if field in ("output", "tokenized"):
        return _path(folder, value)
    if field not in ("tokenizer", "chat_template") or value == "bytes":
        return value
    # or a name: of the hub, or of one of the tokenizer's templates
    marks = "./" if field == "chat_template" else ""
    is_path = value.startswith((".", "/")) or any(mark in value for mark in marks)
    path = _path(folder, value)
    return path if is_path or os.path.exists(path) else value


def _path(folder: str, name: str) -> str:
    """Return a path from the current directory. Names that do not depend on a folder stay."""
    if name in ("", _STDIN) or is_url(name) or name.startswith("~"):
        return name
    return os.path.join(folder, name)


def _input(folder: str, name: str) -> str:
    if name.startswith(_LIST):
        return _LIST + _path(folder, name[1:])
    path = _path(folder, name)
    if path == name or os.path.exists(path):
        return path
    return os.path.join(glob.escape(folder), name)  # only the name is a pattern


def _parsed(path: str) -> Values:
    text = ""
    try:
        text = read_bytes(local(path, "which recipes are not read from")).decode("utf-8-sig")
        content: Values = tomllib.loads(text)
    except FileNotFoundError:
        tip = "check the spelling; relative paths start at the current directory"
        raise UsageError(f"{path}: no such recipe", tip) from None
    except OSError as error:
        raise from_os_error(error, path, "read") from error
    except (ValueError, RecursionError) as error:
        lines = text.split("\n")
        place = f"at line {len(lines)}, column {len(lines[-1]) + 1}, the end"
        raise UsageError(
            f"{path}: {str(error).replace('at end of document', place)}",
            'a recipe is TOML in UTF-8: name = "text", number = 4096, list = ["a"], [[source]]',
        ) from None
    if _holds_nul(content):
        raise UsageError(f"{path}: holds a NUL", "no name or value has one: leave it out")
    return content


def _holds_nul(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_nul, [*value, *value.values()]))
    if isinstance(value, list):
        return any(map(_holds_nul, value))
    return isinstance(value, str) and "\0" in value
