"""--max-loss: a run that loses more tokens than it may keeps its output, marked incomplete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import assert_error, check_directory, jsonl, packer

OPTIONS = ("-t", "bytes", "-l", "16", "-o", "out", "-q", "--overlong", "truncate", "--no-eos")


@pytest.fixture
def data(folder: Path) -> Path:
    """40 tokens, of which truncating to 16 loses 4."""
    (folder / "a.jsonl").write_bytes(jsonl("a" * 20, "b" * 10, "c" * 10))
    return folder


def test_as_much_as_allowed_may_be_lost(data: Path) -> None:
    assert packer("pack", "a.jsonl", *OPTIONS, "--max-loss", "0.1").exit_code == 0
    assert packer("pack", "a.jsonl", *OPTIONS, "--overwrite", "--max-loss", "10%").exit_code == 0
    assert check_directory("out")["truncated_tokens"] == 4


def test_more_marks_the_output_incomplete(data: Path) -> None:
    result = packer("pack", "a.jsonl", *OPTIONS, "--max-loss", "0.09")
    assert result.exit_code == 1
    error, tip = result.stderr.splitlines()
    assert error.startswith("error: out: 0.1000 of the tokens were lost, 4 truncated and 0 dropped")
    assert tip.startswith("tip: the output is kept, marked incomplete")
    assert "truncated" in result.stdout
    assert not Path("out/manifest.json").exists()
    assert json.loads(Path("out/manifest.incomplete.json").read_bytes())["truncated_tokens"] == 4
    assert_error(packer("show", "out"), 1, "out: is marked incomplete: 0.1000 of the tokens")
    stats = packer("stats", "out")
    assert stats.exit_code == 0
    assert "out is marked incomplete: 0.1000" in stats.stderr


def test_the_next_run_replaces_it_only_with_overwrite(data: Path) -> None:
    packer("pack", "a.jsonl", *OPTIONS, "--max-loss", "0")
    assert_error(packer("pack", "a.jsonl", *OPTIONS), 2, "out: holds a finished result")
    assert packer("pack", "a.jsonl", *OPTIONS, "--overwrite").exit_code == 0
    check_directory("out")
    assert not Path("out/manifest.incomplete.json").exists()


def test_an_update_looks_at_it_when_nothing_is_new(data: Path) -> None:
    assert packer("pack", "a.jsonl", *OPTIONS).exit_code == 0
    shard = next(Path("out").glob("shard-*")).stat()
    update = ("pack", "a.jsonl", *OPTIONS, "--update")
    assert_error(packer(*update, "--max-loss", "0.09"), 1, "out: 0.1000 of the tokens were lost")
    assert packer(*update, "--max-loss", "0.1").exit_code == 0
    assert check_directory("out")["config"]["max_loss"] == 0.1
    before = Path("out/manifest.json").stat()
    assert packer(*update, "--max-loss", "0.1").exit_code == 0
    assert Path("out/manifest.json").stat() == before
    assert next(Path("out").glob("shard-*")).stat() == shard


@pytest.mark.parametrize("value", ["-0.1", "1.5"])
def test_a_share_is_between_0_and_1(data: Path, value: str) -> None:
    result = packer("pack", "a.jsonl", *OPTIONS, "--max-loss", value)
    assert_error(result, 2, f"--max-loss: {value} is not between 0 and 1")
