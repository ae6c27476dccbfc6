"""`packer stats` of recipes: what each source has, is asked for and reaches."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from approving import assert_approved
from mixed import IN_SHARES, pack_mixed, recipe_of, write_sources
from support import assert_error, packer, succeeds


@pytest.fixture(autouse=True)
def _sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_sources()


def _stats(*arguments: object) -> str:
    result = succeeds("stats", *arguments)
    return str(result.stdout)


def _json(*arguments: object) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(_stats(*arguments, "--json"))
    return content


def _tables(*arguments: object) -> str:
    """Return the tables of sources."""
    return "sources, in " + _stats(*arguments).partition("\nsources, in ")[2]


def test_the_tables_of_sources() -> None:
    """Also of both sides of a split, with duplicates, and trained tokens as amounts."""
    pack_mixed(recipe_of(IN_SHARES))
    tables = [_tables("out", "--by", "source")]
    pack_mixed(recipe_of(IN_SHARES, validation_share=0.1, dedup="exact", count="trained"),
               "sides")  # fmt: skip
    tables += [_tables("sides/train"), _tables("sides/validation")]
    assert_approved("stats of a recipe", *tables)


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


def test_what_has_no_sources_says_so() -> None:
    packer("pack", "web", "-l", 64, "-t", "bytes", "-q", "-o", "plain")
    assert_error(packer("stats", "plain", "--by", "source"), 2, "--by source", "plain", "recipe")
    packer("tokenize", "web", "-t", "bytes", "-q", "-o", "tokens")
    assert_error(packer("stats", "tokens", "--by", "source"), 2, "--by source", "recipe")


@pytest.fixture
def split() -> None:
    pack_mixed(recipe_of(IN_SHARES, validation_share=0.1))


@pytest.mark.usefixtures("split")
def test_both_sides_of_a_split_are_reported() -> None:
    lines = _stats("out", "--min-utilization", "50%", "--deep").splitlines()
    assert lines.index("out/train") < lines.index("out/validation")
    assert lines.count("sources, in shares of tokens") == 2
    content = _json("out", "--by", "source")
    assert list(content) == ["train", "validation"]
    assert content["train"] == _json("out/train", "--by", "source")
    assert {side["sources"][0]["name"] for side in content.values()} == {"web"}
    assert packer("stats", "out", "--min-utilization", "99.9%").exit_code == 1


@pytest.mark.usefixtures("split")
def test_commands_for_one_result_name_both_sides_or_the_one_that_is_missing() -> None:
    assert_error(packer("stats", "out", "--html", "page.html"), 2, "--html", "out holds 2 results")
    for arguments in (("show", "out"), ("export", "out", "--to", "trl", "-o", "exported")):
        result = packer(*arguments)
        assert_error(result, 1, "out", "train and validation")
        assert "out/train or out/validation" in result.stderr
    shutil.rmtree("out/validation")
    assert_error(packer("stats", "out"), 2, "out/validation", "no such directory")
    shutil.rmtree("out/train")
    assert_error(packer("stats", "out"), 1, "out", "not packed by packer")


@pytest.mark.usefixtures("split")
def test_both_sides_of_a_split_are_verified() -> None:
    result = succeeds("verify", "out", "--against-inputs", "-q")
    places = [line.split(":")[0] for line in result.stdout.splitlines()]
    assert places == ["out/train", "out/validation"]
    content = json.loads(packer("verify", "out", "--json", "-q").stdout)
    assert {side: one["ok"] for side, one in content.items()} == {"train": True, "validation": True}
    shard = next(Path("out/validation").glob("shard-*.arrow"))
    shard.write_bytes(shard.read_bytes()[:-8] + b"damaged!")
    result = packer("verify", "out", "-q")
    assert result.exit_code == 1
    assert "error: out/validation: " in result.stderr
