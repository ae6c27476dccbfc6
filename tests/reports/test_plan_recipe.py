"""`packer plan mix.toml`: the rows of a recipe, and what they have of each source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mixed import write_sources
from planning import planned
from support import assert_error, contents, packer, succeeds

RECIPE = """
max_length = 512
tokenizer = "bytes"

[[source]]
name = "web"
inputs = ["web"]
weight = 0.6

[[source]]
name = "code"
inputs = ["code.jsonl"]
weight = 0.3

[[source]]
name = "chat"
inputs = ["chat.jsonl"]
epochs = 2.0
"""
SPLIT = '[validation]\nshare = "5%"\n'


@pytest.fixture(autouse=True)
def _recipe(folder: Path) -> None:
    write_sources()
    Path("mix.toml").write_text(RECIPE)


def _pack(*options: object) -> None:
    succeeds("pack", "mix.toml", "-q", *options)


def _stats(*arguments: object) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(
        packer("stats", *arguments, "--by", "source", "--json").stdout
    )
    return content


def _assert_same(outcome: dict[str, Any], packed: dict[str, Any]) -> None:
    for name in ("rows", "tokens", "trained_tokens", "documents", "utilization", "sources"):
        assert outcome[name] == packed[name], name
    for planned_one, packed_one in zip(outcome["by_source"], packed["by_source"], strict=True):
        for name in ("name", "documents", "tokens", "trained_tokens"):
            assert planned_one[name] == packed_one[name]


def test_what_is_planned_is_what_is_packed() -> None:
    _pack("-o", "mix-packed-512")
    before = contents(".")
    plan = planned("mix.toml")
    assert contents(".") == before
    (outcome,) = plan["outcomes"]
    assert outcome["max_length"] == 512
    _assert_same(outcome, _stats("mix-packed-512"))


def test_several_lengths_of_which_each_chooses_its_documents() -> None:
    """Where long documents are dropped, a source has less to take from."""
    _pack("-o", "kept", "-l", 64)
    plan = planned("mix.toml", "-l", "64,128", "--overlong", "drop")
    assert [one["max_length"] for one in plan["outcomes"]] == [64, 128]
    for outcome in plan["outcomes"]:
        length = outcome["max_length"]
        out = f"out-{length}"
        _pack("-o", out, "-l", length, "--overlong", "drop")
        _assert_same(outcome, _stats(out))
    first, second = (one["sources"][0] for one in plan["outcomes"])
    assert first["available"] != second["available"]


def test_both_sides_of_a_split() -> None:
    Path("mix.toml").write_text(RECIPE + SPLIT)
    _pack()
    plans = planned("mix.toml")
    assert list(plans) == ["train", "validation"]
    for side, plan in plans.items():
        (outcome,) = plan["outcomes"]
        _assert_same(outcome, _stats(f"mix-packed-512/{side}"))
    lines = packer("plan", "mix.toml", "-q").stdout.splitlines()
    assert lines.index("mix.toml: train") < lines.index("mix.toml: validation")


def test_a_recipe_that_was_never_tokenized_says_how_to() -> None:
    before = contents(".")
    refused = packer("plan", "mix.toml", "-q")
    assert_error(refused, 2, "mix.toml, source 'web': mix-tokenized/web: not there yet")
    assert "tip: run packer pack mix.toml, which tokenizes them" in refused.stderr
    assert contents(".") == before


def test_a_sample_of_tokenized_sources_is_an_estimate() -> None:
    Path("mix.toml").write_text(RECIPE.replace("max_length", 'unit_bytes = "8k"\nmax_length'))
    _pack()
    (outcome,) = planned("mix.toml", "--sample", "30%")["outcomes"]
    packed = _stats("mix-packed-512")
    assert 0.25 < outcome["share_read"] < 0.5
    for name in ("rows", "tokens", "documents"):
        assert outcome[name] == pytest.approx(packed[name], rel=0.15)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: Path("code.jsonl").write_text('{"text": "pass"}\n'), "inputs have changed"),
        (lambda: Path("mix.toml").write_text(RECIPE + "eos = false\n"), "tokenized otherwise"),
    ],
    ids=["inputs", "options"],
)
def test_sources_that_changed_since_they_were_tokenized(change: Any, message: str) -> None:
    _pack()
    change()
    before = contents(".")
    assert_error(packer("plan", "mix.toml", "-q"), 2, "source ", message)
    assert contents(".") == before


def test_a_recipe_without_sources_is_planned_as_its_inputs_are() -> None:
    Path("one.toml").write_text('max_length = 64\ntokenizer = "bytes"\ninputs = ["web"]\n')
    plan = planned("one.toml")
    assert plan == planned("web", "-l", 64, "-t", "bytes")
    assert "sources" not in plan["outcomes"][0]
