"""The JSON schema of recipes, made of the declarations of their keys; for editors.

`python -m packer_cli.config.recipe_schema` writes the file that is shipped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packer_cli.config.option import Option
from packer_cli.config.recipe_keys import (
    SOURCE,
    STAGE,
    TABLES,
    TOP,
    VALIDATION,
    Key,
    is_required,
    keys_of,
)

SCHEMA = Path(__file__).with_name("recipe.schema.json")
_Schema = dict[str, Any]
# how a number is written as text
_WRITTEN = {
    "count": r"^[+-]?[\d.]+[kKmMgGtT]?$",
    "tokens": r"^[+-]?[\d.]+[kKmMbBgGtT]?$",
    "size": r"^[\d.]+([kKmMgGtT]?[iI]?[bB]?)?$",
    "share": r"^[\d.]+%?$",
    "count or share": r"^[\d.]+[kKmMgGtT%]?$",
}
_WHOLE = ("count", "tokens", "size")
_TEXT: _Schema = {"type": "string"}
_OF_TEXTS: _Schema = {"type": "object", "additionalProperties": _TEXT}


def schema() -> _Schema:
    """The schema as an object; draft 7, which editors know."""
    tables = {
        "source": _several(_table(keys_of(*SOURCE)) | _one_amount()),
        "validation": _table(keys_of(*VALIDATION))
        | {"oneOf": [{"required": ["share"]}, {"required": ["documents"]}]},
        "stage": _several(_table(keys_of(*STAGE))),
    }
    top = _table(keys_of(*TOP))
    del top["required"]  # the command line may give it
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


def _table(keys: Mapping[str, Key]) -> _Schema:
    required = [name for name, key in keys.items() if is_required(key)]
    dashed = [name.replace("_", "-") for name in keys if "_" in name]
    table: _Schema = {
        "type": "object",
        "properties": {name: _property(key) for name, key in keys.items()},
        "additionalProperties": False,
    }
    if dashed:
        table["patternProperties"] = {f"^({'|'.join(dashed)})$": {}}  # as good, but not offered
    return table | ({"required": required} if required else {})


def _several(table: _Schema) -> _Schema:
    return {"type": "array", "minItems": 1, "items": table}


def _one_amount() -> _Schema:
    pairs = (["weight", "epochs"], ["weight", "tokens"], ["epochs", "tokens"])
    return {"not": {"anyOf": [{"required": pair} for pair in pairs]}}


def _property(key: Key) -> _Schema:
    option = key.option
    made = {"description": _description(option)} | _type(key)
    if key.default not in (None, ()) and not is_required(key) and not option.unset:
        default: Any = list(key.default) if isinstance(key.default, tuple) else key.default
        if option.value not in ("fields", "weights", "arguments") and "efault" not in option.help:
            made["default"] = default
    return made


def _description(option: Option) -> str:
    """The help, with what choices mean and what the default is."""
    meanings = [f"{name}: {note}" for name, note in option.choices.items() if note]
    unset = f" Default: {option.unset}." if option.unset else ""
    sentence = option.help.replace(" May be repeated.", "").rstrip(".:")
    return sentence + (f" ({'; '.join(meanings)})" if meanings else "") + "." + unset


def _type(key: Key) -> _Schema:
    option = key.option
    one: _Schema = _TEXT
    if option.choices:
        names = [*option.choices, *option.aliases]
        one = {"enum": list(dict.fromkeys(names))}
    if option.value == "fields":
        return _OF_TEXTS
    if option.value == "arguments":
        return {"type": "object"}
    if option.value == "weights":
        number = {"anyOf": [{"type": "number", "minimum": 0}, _written("share")]}
        return {"type": "object", "additionalProperties": number}
    if key.is_list or option.value == "list":
        single = _TEXT if option.value == "list" else one
        return {"anyOf": [{"type": "array", "items": one}, single]}
    if option.choices:
        return one
    if bool in key.kinds:
        return {"type": "boolean"}
    if int in key.kinds or float in key.kinds:
        return _number(option)
    return one


def _number(option: Option) -> _Schema:
    number: _Schema = {"type": "integer" if option.value in _WHOLE else "number"}
    if option.least is not None:
        number["minimum"] = option.least
    if option.most is not None:
        number["maximum"] = option.most
    return {"anyOf": [number, _written(option.value)]} if option.value else number


def _written(kind: str) -> _Schema:
    return {"type": "string", "pattern": _WRITTEN[kind]}


if __name__ == "__main__":
    SCHEMA.write_text(text())
