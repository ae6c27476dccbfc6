"""`packer pack mix.toml`: one result, or one for each side of a split, with options beside it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import assert_error, check_directory, contents, packer, packer_process

from packer_cli import open_packed

MIX = """
max_length = 64
tokenizer = "bytes"

[[source]]
name = "web"
inputs = ["web/*.jsonl"]
weight = 0.7

[[source]]
name = "code"
inputs = ["code"]
weight = 0.3
text_field = "content"
"""
SPLIT = '[validation]\nshare = "20%"\nsources = ["web"]\n'


@pytest.fixture
def mix(folder: Path) -> Path:
    for name, field in (("web", "text"), ("code", "content")):
        (folder / name).mkdir()
        lines = (json.dumps({field: f"{name} {n} " * (n % 7 + 1)}) for n in range(400))
        (folder / name / "a.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "mix.toml").write_text(MIX)
    return folder


def packed(*options: object) -> Any:
    """What a run prints as JSON."""
    result = packer("pack", "mix.toml", "-q", "--json", *options)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return json.loads(result.stdout)


def test_a_recipe_is_packed_into_one_result(mix: Path) -> None:
    report = packed()
    assert report["directory"] == "mix-packed-64"
    manifest = check_directory("mix-packed-64")
    assert report["tokens"] == manifest["tokens"]
    assert manifest["config"]["mixture"]["sources"][0]["weight"] == 0.7
    result = packer("pack", "mix.toml", "-q", "--update")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("mix-packed-64\n")
    assert packer("verify", "mix-packed-64").exit_code == 0


def test_both_sides_of_a_split_are_reported(mix: Path) -> None:
    (mix / "mix.toml").write_text(MIX + SPLIT)
    reports = packed("-o", "out")
    assert list(reports) == ["train", "validation"]
    for name, report in reports.items():
        manifest = check_directory(f"out/{name}")
        assert (report["directory"], report["rows"]) == (f"out/{name}", manifest["rows"])
    result = packer("pack", "mix.toml", "-o", "out", "-q", "--update")
    assert result.exit_code == 0, result.stderr
    assert [one.split("\n")[0] for one in result.stdout.split("\n\nout/")] == [
        "out/train", "validation"
    ]  # fmt: skip


def test_options_beside_a_recipe_win_in_every_source(mix: Path) -> None:
    packed("-o", "out", "-l", "32", "--no-eos", "--seed", 5)
    manifest = open_packed("out").manifest
    assert (manifest["config"]["max_length"], manifest["config"]["seed"]) == (32, 5)
    for name in ("web", "code"):
        kept = json.loads(Path(f"mix-tokenized/{name}/manifest.json").read_text())
        assert kept["config"]["add_eos"] is False


def test_a_view_of_the_same_rows(mix: Path) -> None:
    packed("-o", "out")
    packed("-o", "view", "--view")
    shown = [json.loads(packer("show", name, "0", "--json").stdout) for name in ("out", "view")]
    assert shown[0]["segments"]
    texts = [[segment["text"] for segment in row["segments"]] for row in shown]
    assert texts[0] == texts[1]


def test_an_earlier_result_is_replaced_only_when_asked(mix: Path) -> None:
    packed("-o", "out")
    again = packer("pack", "mix.toml", "-q", "-o", "out", "-l", 32)
    assert again.exit_code == 2
    assert "--overwrite" in again.stderr
    assert packed("-o", "out", "-l", 32, "--overwrite")["max_length"] == 32


def test_ranks_make_the_same_result(mix: Path) -> None:
    packed("-o", "out")
    options = ["-q", "-o", "by", "--world-size", "2", "--rank"]
    with ThreadPoolExecutor(1) as other:  # each waits for what the other tokenizes
        waiting = other.submit(packer_process, "pack", "mix.toml", *options, "1")
        first = packer_process("pack", "mix.toml", *options, "0")
        assert (first.returncode, waiting.result().returncode) == (0, 0), first.stderr
    rows = [
        {file: data for file, data in contents(name).items() if file.startswith("shard-")}
        for name in ("out", "by")
    ]
    assert rows[0]
    assert rows[0] == rows[1]


def test_a_source_that_cannot_be_read_is_named(mix: Path) -> None:
    (mix / "mix.toml").write_text(MIX.replace('["code"]', '["cod"]'))
    result = packer("pack", "mix.toml", "-q")
    assert_error(result, 2, "source 'code': cod: no such file or directory")
    assert not list(mix.glob("mix-*"))
