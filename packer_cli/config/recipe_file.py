"""Reads a recipe: TOML to tables, each key checked, with paths that begin at the recipe's folder.

    read_recipe("mix.toml") -> RecipeFile      what the file says
    order_of(["mix.toml"], given) -> Order     together with the command line: orders.py

Every error names the recipe, and the table where it is not the top: "mix.toml, source 'web': ...".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packer_cli.config.mixture import Amount, Mixture, Stage
from packer_cli.config.recipe_keys import (
    SOURCE,
    STAGE,
    TABLES,
    TOP,
    VALIDATION,
    Inputs,
    MixtureKeys,
    SourceKeys,
    keys_of,
)
from packer_cli.config.recipe_paths import Paths
from packer_cli.config.recipe_tables import SOURCE_TIP, Given, Table, Values, parsed, tables_of
from packer_cli.errors import UsageError


@dataclass(frozen=True)
class SourceTable:
    """A source as the recipe has it. `documents`: its own options, by fields of DocumentConfig."""

    name: str
    inputs: tuple[str, ...]
    documents: Values


@dataclass(frozen=True)
class RecipeFile:
    """What a recipe says. Without sources it is a configuration, for `inputs`."""

    path: str
    inputs: tuple[str, ...]
    given: Given
    sources: tuple[SourceTable, ...] = ()
    mixture: Mixture | None = None
    tokenized: str | None = None


def read_recipe(path: str) -> RecipeFile:
    """What a recipe says. UsageError for what cannot work, with the place; DataError for a file
    that cannot be read.
    """
    content = parsed(path)
    paths = Paths(path)
    tables = {name: content.pop(name, None) for name in TABLES}
    top = Table(path, content, keys_of(*TOP), paths)
    given = top.given()
    if tables["source"] is None:
        return RecipeFile(path, _inputs_at_top(top, tables), given)
    if "inputs" in top.values:
        raise top.error("inputs: are those of sources, where there are any", SOURCE_TIP)
    sources = [
        Table(f"{path}, {_which(number, one)}", one, keys_of(*SOURCE), paths)
        for number, one in enumerate(tables_of(path, "source", tables["source"]), 1)
    ]
    return RecipeFile(
        path,
        (),
        given,
        tuple(_source(one, given) for one in sources),
        _mixture(top, sources, tables),
        top.values.get("tokenized"),
    )


def _which(number: int, table: Values) -> str:
    name = table.get("name")
    return f"source {name!r}" if isinstance(name, str) and name else f"source {number}"


def _inputs_at_top(top: Table, tables: Values) -> tuple[str, ...]:
    for name in (*(key.name for key in top.keys.values() if key.owner is MixtureKeys),
                 *(name for name, table in tables.items() if table is not None)):  # fmt: skip
        raise top.error(f"{name}: is for recipes with sources, and there is none", SOURCE_TIP)
    return _named_inputs(top, every="input_format" in top.values)


def _named_inputs(table: Table, *, every: bool) -> tuple[str, ...]:
    """The inputs of a table. `every`: whether all files of folders are."""
    inputs: tuple[str, ...] = table.of(Inputs, SourceKeys).get("inputs", ())
    if not inputs or "" in inputs:
        what = "an input is empty" if inputs else "has no inputs"
        raise table.error(what, 'name files: inputs = ["web/*.parquet"]')
    table.paths.refuse_itself(table.place, inputs, every=every)
    return inputs


def _source(table: Table, top: Given) -> SourceTable:
    name = table.values["name"]
    if not name.strip() or name.startswith(".") or re.search(r"[/\\\x00-\x1f\x7f]", name):
        raise table.error(
            f"name: {name!r} cannot be the name of a directory",
            "tokens of a source are kept under its name: use letters, digits and dashes",
        )
    documents = table.given().config
    every = "input_format" in top.config | documents
    return SourceTable(name, _named_inputs(table, every=every), documents)


def _mixture(top: Table, sources: list[Table], tables: Values) -> Mixture:
    of_all = top.of(MixtureKeys)
    of_all.pop("tokenized", None)
    most = of_all.pop("max_epochs", None)
    names = [one.values["name"] for one in sources]
    validation = _validation(top, tables["validation"], names)
    held_out = validation.pop("sources", None) or names
    amounts = []
    for one in sources:
        of_one = one.of(SourceKeys)
        del of_one["inputs"]
        if most is not None:
            of_one.setdefault("max_epochs", most)
        amounts.append(Amount(**of_one, held_out=of_one["name"] in held_out))
    stages = _stages(top, tables["stage"])
    held = {f"validation_{name}": value for name, value in validation.items()}
    try:
        return Mixture(tuple(amounts), stages, **of_all, **held)
    except UsageError as error:
        between = ", " if error.message.startswith(("source ", "stage ")) else ": "
        raise UsageError(f"{top.place}{between}{error.message}", error.tip) from None


def _stages(top: Table, content: Any) -> tuple[Stage, ...]:
    if content is None:
        return ()
    stages = []
    for number, one in enumerate(tables_of(top.place, "stage", content), 1):
        name = one.get("name") if isinstance(one.get("name"), str) else None
        place = f"{top.place}, stage {name or number}"
        stages.append(Stage(**Table(place, one, keys_of(*STAGE), top.paths).values))
    return tuple(stages)


def _validation(top: Table, content: Any, names: list[str]) -> Values:
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise top.error("validation: expected a table that begins with [validation]",
                        'for example [validation] and below it share = "0.5%"')  # fmt: skip
    table = Table(f"{top.place}, validation", dict(content), keys_of(*VALIDATION), top.paths)
    values = table.values
    if ("share" in values) == ("documents" in values):
        what = "both share and documents" if "share" in values else "neither share nor documents"
        raise table.error(f"has {what}", 'say one of them: share = "0.5%", or documents = 500')
    share = values.get("share")
    if share is not None and not 0 < share < 1:
        raise table.error(f"share: {share:g} is not between 0 and 1", 'for example share = "0.5%"')
    for name in values.get("sources", ()):
        if name not in names:
            raise table.error(
                f"sources: there is no source {name!r}", f"sources are {', '.join(names)}"
            )
    if "sources" in values and not values["sources"]:
        raise table.error("sources: names no source", "leave it out for all of them")
    return values
