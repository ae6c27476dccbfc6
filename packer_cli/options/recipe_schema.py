"""The keys of recipes, which are the names of declared options, and their JSON schema for editors.

`python -m packer_cli.options.recipe_schema` writes the file that is shipped.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from packer_cli.options.documents import DocumentConfig
from packer_cli.options.mixture import Amount, Mixture, Stage, max_epochs
from packer_cli.options.option import Count, Option, Owner, Share, normal, option, options_of
from packer_cli.options.options import PackConfig
from packer_cli.options.run_options import PackOptions, RunOptions

SCHEMA = Path(__file__).with_name("recipe.schema.json")
_INPUTS = "Files, directories, globs and URLs of these. Relative ones begin at the recipe."
_Schema = dict[str, Any]


@dataclass(frozen=True)
class RecipeKeys:
    """What stands at the top of recipes besides options: `inputs` where there are no sources, the
    others, and those of `Mixture`, where there are.
    """

    inputs: tuple[str, ...] = option((), _INPUTS)
    max_epochs: float | None = max_epochs(None)
    tokenized: str | None = option(
        None,
        "Directory that holds a tokenized directory for each source, to be used again. "
        "Default: beside the output.",
    )


@dataclass(frozen=True)
class SourceKeys:
    """What a [[source]] has besides its `Amount` and options of documents."""

    inputs: tuple[str, ...] = option(MISSING, _INPUTS)


@dataclass(frozen=True)
class ValidationKeys:
    """What [validation] has: documents that are held out, chosen by their content."""

    share: Share | None = option(None, "Share of the documents of each source: 0.5%.")
    documents: Count | None = option(None, "Or as many documents of each source.")
    sources: tuple[str, ...] = option((), "Names of the sources that give documents. Default: all.")


TOP = (RecipeKeys, PackConfig, PackOptions, RunOptions, Mixture)
SOURCE = (SourceKeys, (PackOptions, "text_field"), Amount, DocumentConfig)
VALIDATION = (ValidationKeys,)
STAGE = (Stage,)
# keys at the top that hold tables
TABLES = {
    "source": "Inputs that belong together, with their options and how much of them is taken.",
    "validation": "Documents that are held out: the result is two directories.",
    "stage": "Parts of the training, one after the other, with weights of their own.",
}


class Key(NamedTuple):
    """The field of a configuration that a key of a recipe is for, and how it is declared."""

    field: str
    option: Option

    @property
    def is_required(self) -> bool:
        return self.option.default is MISSING and self.field != "max_length"  # or given beside it


@cache
def keys_of(*owners: Owner) -> dict[str, Key]:
    """Name -> key, of all options that are declared in these dataclasses."""
    return {
        one.key or normal(one.name(name)): Key(name, one)
        for name, one in options_of(*owners).items()
    }


def schema() -> _Schema:
    """The schema as an object; draft 7, which editors know."""
    pairs = (["weight", "epochs"], ["weight", "tokens"], ["epochs", "tokens"])
    one_amount = {"not": {"anyOf": [{"required": pair} for pair in pairs]}}
    one_size = {"oneOf": [{"required": ["share"]}, {"required": ["documents"]}]}
    tables = {
        "source": _several(_table(SOURCE) | one_amount),
        "validation": _table(VALIDATION) | one_size,
        "stage": _several(_table(STAGE)),
    }
    top = _table(TOP)
    described = {name: {"description": TABLES[name]} | table for name, table in tables.items()}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A recipe of packer",
        "description": "What packer pack packs, and how. Paths begin at the recipe's folder.",
        **top,
        "properties": top["properties"] | described,
        "oneOf": [{"required": ["inputs"]}, {"required": ["source"]}],
    }


def text() -> str:
    """The schema as it is shipped."""
    return json.dumps(schema(), indent=1) + "\n"


def _table(owners: tuple[Owner, ...]) -> _Schema:
    keys = keys_of(*owners)
    dashed = [name.replace("_", "-") for name in keys if "_" in name]
    required = [name for name, key in keys.items() if key.is_required]
    return {
        "type": "object",
        "properties": {name: _property(key.option) for name, key in keys.items()},
        "additionalProperties": False,
        **({"patternProperties": {f"^({'|'.join(dashed)})$": {}}} if dashed else {}),  # not offered
        **({"required": required} if required else {}),
    }


def _several(table: _Schema) -> _Schema:
    return {"type": "array", "minItems": 1, "items": table}


def _property(one: Option) -> _Schema:
    """The schema of a value, with what choices mean and what the default is."""
    meanings = [f"{name}: {note}" for name, note in one.choices.items() if note]
    about = one.help.replace(" May be repeated.", "").rstrip(".:")
    about += f" ({'; '.join(meanings)})." if meanings else "."
    made = {"description": f"{about} Default: {one.unset}." if one.unset else about} | _type(one)
    is_told = one.unset or "efault" in one.help or one.default in (None, (), MISSING)
    return made if is_told else made | {"default": one.default}


def _type(one: Option) -> _Schema:
    made = dict(one.kind.schema)
    if one.choices:
        choice: _Schema = {
            "enum": list(dict.fromkeys((*one.choices, *chain(*one.aliases.values()))))
        }
        is_list = one.value == "list"
        return (
            {"anyOf": [{"type": "array", "items": choice}, made["anyOf"][1]]} if is_list else choice
        )
    limits = {"minimum": one.least, "maximum": one.most}
    limits = {name: limit for name, limit in limits.items() if limit is not None}
    if "anyOf" in made:
        return {"anyOf": [made["anyOf"][0] | limits, made["anyOf"][1]]}
    return made | limits


if __name__ == "__main__":
    SCHEMA.write_text(text())
