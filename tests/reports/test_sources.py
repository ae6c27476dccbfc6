"""`packer stats` of recipes: what each source has, is asked for and reaches."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from mixed import IN_SHARES, pack_mixed, recipe_of, write_sources
from support import assert_error, packer


@pytest.fixture(autouse=True)
def _sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_sources()


def _json(*arguments: object) -> dict[str, Any]:
    result = packer("stats", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    content: dict[str, Any] = json.loads(result.stdout)
    return content


def _lines(*arguments: object) -> list[str]:
    result = packer("stats", *arguments)
    assert result.exit_code == 0, result.stderr
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


def test_the_report_has_a_line_for_each_source() -> None:
    pack_mixed(recipe_of(IN_SHARES))
    lines = _lines("out")
    start = lines.index("sources, in shares of tokens")
    assert lines[start + 1] == "documents tokens trained epochs asked reached source"
    sources = {line.split()[-1]: line.split()[:-1] for line in lines[start + 2 : start + 5]}
    assert list(sources) == ["web", "code", "chat"]
    assert sources["web"] == ["4,000", "331,780", "324,684", "1.00", "56.67%", "56.67%"]
    assert sources["chat"][3] == "2.00"
    assert "documents left out" not in lines
    assert not [line for line in lines if "mixture" in line]


def test_json_has_shares_and_what_the_manifest_says() -> None:
    (manifest,) = pack_mixed(recipe_of(IN_SHARES))
    assert manifest is not None
    content = _json("out", "--by", "source")
    assert [one["name"] for one in content["sources"]] == ["web", "code", "chat"]
    for name in ("share_asked", "share_reached"):
        assert sum(one[name] for one in content["sources"]) == pytest.approx(1)
    for one, source, own in zip(
        content["sources"], manifest.sources, content["by_source"], strict=True
    ):
        assert abs(one["share_asked"] - one["share_reached"]) < 0.001
        assert one["taken"] == source.taken == own["tokens"]
        assert one["epochs"] == source.taken / source.available
    for name in ("documents", "tokens", "trained_tokens", "empty_documents"):
        assert sum(one[name] for one in content["by_source"]) == content[name]


def test_by_source_lists_an_epoch_and_what_is_asked_of_it() -> None:
    pack_mixed(recipe_of(IN_SHARES))
    lines = _lines("out", "--by", "source")
    start = lines.index("one epoch of each source, and tokens asked of it and taken")
    assert lines[start + 1] == "documents tokens asked taken source"
    assert lines[start + 2] == "4,000 331,780 331,780 331,780 web"


def test_documents_held_out_and_equal_to_others_are_listed() -> None:
    recipe = recipe_of(IN_SHARES, validation_share=0.1, dedup="exact")
    train, validation = pack_mixed(recipe)
    assert train is not None
    assert validation is not None
    lines = _lines("out/train")
    start = lines.index("documents left out")
    assert lines[start + 1] == "held out duplicates source"
    chat = train.sources[2]
    assert chat.held_out_documents > 0
    assert chat.duplicate_documents > 0
    expected = f"{chat.held_out_documents} {chat.duplicate_documents} chat"
    assert lines[start + 4] == expected
    # nothing is held out of what is held out
    assert "held out" not in " ".join(_lines("out/validation"))


def test_trained_tokens_are_named_where_amounts_count_them() -> None:
    pack_mixed(recipe_of(IN_SHARES, count="trained"))
    assert "sources, in shares of trained tokens" in _lines("out")


def test_what_has_no_sources_says_so() -> None:
    packer("pack", "web", "-l", 64, "-t", "bytes", "-q", "-o", "plain")
    assert_error(packer("stats", "plain", "--by", "source"), 2, "--by source", "plain", "recipe")
    packer("tokenize", "web", "-t", "bytes", "-q", "-o", "tokens")
    assert_error(packer("stats", "tokens", "--by", "source"), 2, "--by source", "recipe")


def test_both_sides_of_a_split_are_reported() -> None:
    pack_mixed(recipe_of(IN_SHARES, validation_share=0.1))
    lines = _lines("out", "--min-utilization", "50%", "--deep")
    assert lines.index("out/train") < lines.index("out/validation")
    assert lines.count("sources, in shares of tokens") == 2
    content = _json("out", "--by", "source")
    assert list(content) == ["train", "validation"]
    assert content["train"] == _json("out/train", "--by", "source")
    for side in ("train", "validation"):
        assert content[side]["sources"][0]["name"] == "web"
    refused = packer("stats", "out", "--html", "page.html")
    assert_error(refused, 2, "--html", "out holds 2 results")
    assert packer("stats", "out", "--min-utilization", "99.9%").exit_code == 1


def test_the_side_that_is_not_packed_yet_is_named() -> None:
    pack_mixed(recipe_of(IN_SHARES, validation_share=0.1))
    shutil.rmtree("out/validation")
    assert_error(packer("stats", "out"), 2, "out/validation", "no such directory")
    shutil.rmtree("out/train")
    assert_error(packer("stats", "out"), 1, "out", "not packed by packer")


def test_commands_for_one_result_name_both_sides() -> None:
    pack_mixed(recipe_of(IN_SHARES, validation_share=0.1))
    for arguments in (("show", "out"), ("export", "out", "--to", "trl", "-o", "exported")):
        result = packer(*arguments)
        assert_error(result, 1, "out", "train and validation")
        assert "out/train or out/validation" in result.stderr


def test_both_sides_of_a_split_are_verified() -> None:
    pack_mixed(recipe_of(IN_SHARES, validation_share=0.1))
    result = packer("verify", "out", "--against-inputs", "-q")
    assert result.exit_code == 0, result.stderr
    places = [line.split(":")[0] for line in result.stdout.splitlines()]
    assert places == ["out/train", "out/validation"]
    content = json.loads(packer("verify", "out", "--json", "-q").stdout)
    assert {side: one["ok"] for side, one in content.items()} == {"train": True, "validation": True}
    shard = next(Path("out/validation").glob("shard-*.arrow"))
    shard.write_bytes(shard.read_bytes()[:-8] + b"damaged!")
    result = packer("verify", "out", "-q")
    assert result.exit_code == 1
    assert "error: out/validation: " in result.stderr
