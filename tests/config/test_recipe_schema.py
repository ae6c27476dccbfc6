"""The schema that editors complete recipes by: what is generated, and what it takes and refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from packer_cli.config.recipe_keys import SOURCE, STAGE, TABLES, TOP, VALIDATION, keys_of
from packer_cli.config.recipe_schema import SCHEMA, schema, text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCS = Path(__file__).parent.parent.parent / "docs"
WEB = '[[source]]\nname = "web"\ninputs = "a"\n'


def problems(recipe: str) -> list[Any]:
    checker = jsonschema.Draft7Validator(schema())
    return list(checker.iter_errors(tomllib.loads(recipe)))


def test_the_schema_that_is_shipped_is_the_one_that_is_generated() -> None:
    assert SCHEMA.read_text() == text(), "run python -m packer_cli.config.recipe_schema"
    jsonschema.Draft7Validator.check_schema(json.loads(text()))


def test_every_key_is_there_and_described() -> None:
    top = schema()["properties"]
    tables = {
        TOP: top,
        SOURCE: top["source"]["items"]["properties"],
        VALIDATION: top["validation"]["properties"],
        STAGE: top["stage"]["items"]["properties"],
    }
    for owners, properties in tables.items():
        extra = TABLES.keys() if owners is TOP else set()
        assert properties.keys() == keys_of(*owners).keys() | extra
        assert all(len(one["description"]) > 10 for one in properties.values())


@pytest.mark.parametrize(
    "recipe",
    [
        'inputs = ["a"]\nmax-length = "4k"\nmax_loss = "0.5%"\nshuffle = false',
        f'max_length = 4096\ntokens = "2B"\n{WEB}weight = 0.7\ntrain-on = "full"\n'
        '[validation]\nshare = "0.5%"\nsources = ["web"]',
        f"{WEB}epochs = 2.5\nfield = {{messages = 'chosen'}}",
        f"{WEB}weight = '70%'\n[[stage]]\ntokens = '4M'\nweights = {{web = 0.5}}",
    ],
)
def test_what_a_recipe_may_say(recipe: str) -> None:
    assert problems(recipe) == []


@pytest.mark.parametrize(
    "recipe",
    [
        "max_length = 16",
        'inputs = "a"\nmax_lenght = 16',
        'inputs = "a"\nmax_length = true',
        'inputs = "a"\nmax_length = 0',
        'inputs = "a"\nstrategy = "magic"',
        WEB + "max_length = 16",
        WEB + "weight = -1",
        WEB + "weight = 1\nepochs = 1",
        WEB + "[validation]",
        WEB + "[[stage]]\nname = 'a'",
        '[[source]]\ninputs = "a"',
    ],
)
def test_what_it_refuses(recipe: str) -> None:
    assert problems(recipe) != []


def test_the_recipes_of_the_docs_are_valid() -> None:
    page = DOCS / "recipes.md"
    examples = page.read_text().split("```toml\n")[1:]
    assert len(examples) > 2
    for example in examples:
        assert problems(example.split("```")[0]) == []
