"""What to pack, and how: a recipe and the command line together, which wins over it."""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass, fields, replace
from typing import Generic, TypeVar

from packer_cli.config.documents import DocumentConfig
from packer_cli.config.option import options_of, refuse_missing
from packer_cli.config.options import PackConfig
from packer_cli.config.recipe import Recipe, Source
from packer_cli.config.recipe_file import RecipeFile, read_recipe
from packer_cli.config.recipe_keys import key_name
from packer_cli.config.recipe_tables import Given, Values, merged
from packer_cli.config.run_options import EncodingOptions
from packer_cli.errors import UsageError

_Options = TypeVar("_Options", bound=EncodingOptions)
_Kind = TypeVar("_Kind")
_OF_BOTH = ("unit_bytes", "shard_bytes")  # options of documents that are of rows, too
# What becomes of an earlier result: one word on the command line takes the place of all others.
_EARLIER = {"overwrite", "update", "add", "prune", "checksum"}


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
    tokenizer: str | None = None
    output: str | None = None
    staging: str | None = None
    max_share_error: float | None = None
    recipe: Recipe | None = None


def is_recipe(name: str) -> bool:
    """Whether an INPUT of the command line is a recipe, rather than a pattern or a folder."""
    is_pattern = glob.has_magic(name) and not os.path.isfile(name)
    return name.lower().endswith(".toml") and not is_pattern and not os.path.isdir(name)


def order_of(inputs: list[str], given: Given, kind: type[_Options]) -> Order[_Options]:
    """The order of a command line: `inputs` and what is `given` beside them. An input that is a
    recipe is read. `kind`: of the options of the run; others in the recipe are passed over.

    Raises UsageError for what cannot work, in the terms of where it is said.
    """
    file = RecipeFile("", tuple(inputs), Given())
    recipes = [one for one in inputs if is_recipe(one)]
    if recipes and len(inputs) == 1:
        file = read_recipe(inputs[0])
    elif recipes and "input_format" not in given.config:
        raise UsageError(
            f"{recipes[0]}: a recipe stands alone, and there are {len(inputs) - 1} other inputs",
            "name them in the recipe: inputs = [...]; or, for files of text, give --input-format",
        )
    values = merged(file.given.config, given.config)
    if file.sources:
        values = {k: v for k, v in values.items() if k in _of_rows()} | {"mixture": file.mixture}
    config = _made(PackConfig, values, given.config, file.path)
    command = file.given.command | given.command
    if command.pop("position_ids", False):
        config = replace(config, columns=(*config.columns, "position_ids"))
    if command.get("max_share_error") is not None and not file.sources:
        raise UsageError("--max-share-error: is for recipes with sources", "leave it out")
    tokenizer = command.get("tokenizer")
    return Order(
        list(file.inputs),
        config,
        _made(kind, _of_run(file, given, kind), given.options, file.path),
        **command,
        recipe=_recipe(file, given, config, tokenizer) if file.sources else None,
    )


def _of_rows() -> set[str]:
    documents = {one.name for one in fields(DocumentConfig)}
    return ({one.name for one in fields(PackConfig)} - documents) | set(_OF_BOTH)


def _of_run(file: RecipeFile, given: Given, kind: type[_Options]) -> Values:
    before = file.given.options
    if _EARLIER & given.options.keys():
        before = {name: value for name, value in before.items() if name not in _EARLIER}
    known = {one.name for one in fields(kind)}
    return {name: v for name, v in (before | given.options).items() if name in known}


def _recipe(file: RecipeFile, given: Given, config: PackConfig, tokenizer: str | None) -> Recipe:
    known = {one.name for one in fields(DocumentConfig)}
    sources = []
    for one in file.sources:
        values = merged(merged(file.given.config, one.documents), given.config)
        of_documents = {name: value for name, value in values.items() if name in known}
        place = f"{file.path}, source {one.name!r}"
        made = _made(DocumentConfig, of_documents, given.config, place)
        inherited = frozenset(of_documents.keys() - one.documents.keys())
        sources.append(Source(one.name, one.inputs, made, inherited))
    return Recipe(file.path, tokenizer, tuple(sources), config, file.tokenized)


def _made(kind: type[_Kind], values: Values, given: Values, place: str) -> _Kind:
    """A configuration. Errors that come of the recipe are told in its terms, with the place."""
    refuse_missing(kind, values, f", or max_length to {place}" if place else "")
    try:
        return kind(**values)
    except UsageError as error:
        options = options_of(kind)
        names = {option.name(name): name for name, option in options.items()}
        blamed = names.get(error.message.split(":")[0].split(" ")[0])
        if not place or blamed in given:
            raise
        keys = {option.name(name): key_name(option, name) for name, option in options.items()}
        raise UsageError(
            f"{place}: {_as_keys(error.message, keys)}", _as_keys(error.tip, keys)
        ) from None


def _as_keys(message: str, keys: dict[str, str]) -> str:
    """A message with the names that options have in a recipe: max_length for --max-length."""
    return re.sub(r"--[a-z][a-z-]*", lambda found: keys.get(found[0], found[0]), message)
