"""Results of packer 0.2.0, as it made them: read as ever, but not gone on with.

tests/of_0_2 holds two inputs, and what packer 0.2.0 (08f33b6) made of them:

    packer tokenize rivers.jsonl hills.jsonl -o tokenized -t bytes
    packer pack rivers.jsonl hills.jsonl -o packed -l 256 -t bytes
    packer pack tokenized -o view --view -l 384
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from support import assert_error, contents, packer

import packer_cli
from packer_cli import open_packed

COMMANDS = {
    "tokenized": ["tokenize", "rivers.jsonl", "hills.jsonl", "-t", "bytes"],
    "packed": ["pack", "rivers.jsonl", "hills.jsonl", "-l", "256", "-t", "bytes"],
    "view": ["pack", "tokenized", "--view", "-l", "384"],
}
NOW = str(packer_cli.__version__)


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(Path(__file__).parents[1] / "of_0_2", tmp_path / "of_0_2")
    monkeypatch.chdir(tmp_path / "of_0_2")


def done(*arguments: str) -> str:
    result = packer(*arguments)
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_they_are_read(name: str) -> None:
    stats = json.loads(done("stats", name, "--json"))
    assert (stats["documents"], stats["tokens"], stats["trained_tokens"]) == (10, 1807, 221)
    assert "### Instruction:\nWhere is the " in done("show", name)
    assert "sound" in done("verify", name)
    assert "mixedness" not in stats  # nothing counted it then
    assert "mixed" not in done("stats", name, "--deep")


@pytest.mark.parametrize("name", ["packed", "view"])
def test_they_are_exported_and_opened(name: str) -> None:
    done("export", name, "--to", "trl", "-o", "exported", "-q")
    rows = open_packed(name)
    assert len(rows) == {"packed": 10, "view": 5}[name]
    batches = [one for shard in rows.manifest["shards"] for one in rows.batches(shard)]
    labels = np.concatenate([one.column("labels").flatten().to_numpy() for one in batches])
    assert (labels >= 0).sum() == 221


def test_what_was_tokenized_is_packed() -> None:
    done("pack", "tokenized", "-l", "384", "-o", "new", "-q")
    assert json.loads(done("stats", "new", "--json"))["tokens"] == 1807
    again = packer("verify", "new", "--against-inputs")
    assert again.exit_code == 0, again.stderr
    assert "tokenized: was tokenized by packer 0.2.0, so its documents are not" in again.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_they_are_not_gone_on_with(name: str) -> None:
    """Another version may make other documents and rows; which one it was is said."""
    before = contents(name)
    command = [*COMMANDS[name], "-q", "-o", name]
    for how in ("--update", "--add"):
        result = packer(*command, how)
        assert_error(result, 2, f"{name}: was packed by packer 0.2.0, and this is packer {NOW}")
        assert "use --overwrite" in result.stderr
    result = packer(*command)
    assert_error(result, 2, f"holds a finished result that differs: packer was 0.2.0, is now {NOW}")
    assert "--overwrite" in result.stderr
    assert contents(name) == before
    for sample in ("1000", "all"):
        result = packer("verify", name, "--against-inputs", "--sample", sample)
        assert_error(result, 2, f"{name}: was packed by packer 0.2.0, and this is packer {NOW}")
        assert "without --against-inputs" in result.stderr
    assert packer(*command, "--overwrite").exit_code == 0
    assert "up to date" in packer(*command[:-3], "-o", name).stderr
