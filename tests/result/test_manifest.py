"""The manifest as readers have it: typed, with all that a newer packer has added to it."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from forging import Result
from support import assert_error, contents, jsonl, pack, packer

from packer_cli import open_packed
from packer_cli.result.manifest import load

pytestmark = pytest.mark.usefixtures("folder")
ADDED = {"since": "0.9", "more": [1, None, {"x": 0.5}]}


@pytest.fixture
def newer(folder: Path) -> dict[str, Any]:
    """The manifest of `out`, as a packer that says more has written it."""
    (folder / "a.jsonl").write_bytes(jsonl(*(f"text {i}" for i in range(20))))
    pack("a.jsonl", "-l", 16, "--balance", "attention", "--unit-bytes", 60)
    result = Result("out")
    manifest = result.manifest
    places = [manifest, manifest["config"], manifest["tokenizer"], manifest["histograms"]]
    places += [manifest["attention_cost"], manifest["attention_cost"]["after"]]
    places += [one for name in ("inputs", "units", "shards") for one in manifest[name]]
    for place in places:
        items = list(place.items())
        place.clear()
        place.update(dict([*items[:1], ("added", ADDED), *items[1:]]))  # not at the end
    result.save()
    manifest: dict[str, Any] = json.loads(Path("out/manifest.json").read_text())
    return manifest


def test_what_a_newer_packer_says_is_kept(newer: dict[str, Any]) -> None:
    assert open_packed("out").manifest == newer
    content = json.loads(packer("stats", "out", "--json", "--by", "shard").stdout)
    for name in ("config", "tokenizer", "histograms"):
        assert content[name] == newer[name]
    assert content["by_shard"] == newer["shards"]
    content = json.loads(packer("stats", "out", "--json", "--by", "input").stdout)
    assert content["by_input"] == newer["inputs"]


def test_and_keeps_nothing_from_being_used(newer: dict[str, Any]) -> None:
    result = packer("verify", "out", "--against-inputs", "--sample", "all", "-q")
    assert result.exit_code == 0, result.stdout
    for command in (("stats", "out", "--deep"), ("show", "out", "0"),
                    ("export", "out", "--to", "trl", "-o", "e", "-q")):  # fmt: skip
        assert packer(*command).exit_code == 0, command
    # the checksum covers what was added: without it, nobody knows whose the files are
    again = packer("pack", "a.jsonl", "-l", 8, "-t", "bytes", "-o", "out", "--overwrite", "-q")
    assert again.exit_code == 0, again.stderr
    assert "added" not in contents("out")["manifest.json"].decode()


def test_an_edit_of_what_was_added_is_seen(newer: dict[str, Any]) -> None:
    path = Path("out/manifest.json")
    path.write_text(path.read_text().replace('"since":"0.9"', '"since":"0.8"', 1))
    again = packer("pack", "a.jsonl", "-l", 8, "-t", "bytes", "-o", "out", "--overwrite", "-q")
    assert_error(again, 2, "manifest.json: was edited, so it does not say which files")


def test_it_is_typed(newer: dict[str, Any]) -> None:
    manifest = load("out")
    assert manifest.config.max_length == newer["config"]["max_length"] == 16
    assert [shard.file for shard in manifest.shards] == [one["file"] for one in newer["shards"]]
    assert manifest.inputs[0].path == "a.jsonl"
    assert manifest.document == newer


def test_shards_are_read_by_either_name(newer: dict[str, Any]) -> None:
    packed = open_packed("out")
    for typed, plain in zip(packed.facts.shards, packed.manifest["shards"], strict=True):
        assert list(packed.batches(typed)) == list(packed.batches(plain))


def test_it_goes_to_other_processes_whole(newer: dict[str, Any]) -> None:
    packed = open_packed("out")
    for again in (pickle.loads(pickle.dumps(packed)), copy.deepcopy(packed)):  # noqa: S301 ours
        assert again.manifest == newer
        assert again.facts == packed.facts
        assert len(again) == len(packed)
