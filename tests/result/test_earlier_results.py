"""Results of packers before 0.2 are read, verified, exported and replaced."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from forging import Result
from support import assert_error, jsonl, pack, packer, recover_texts

pytestmark = pytest.mark.usefixtures("folder")
OPTIONS = ("-l", 16, "--unit-bytes", 60)
TEXTS = [f"text {i}" for i in range(20)]
_NEWER = ("bos_token", "eos_token", "prefix", "suffix")


@pytest.fixture
def earlier(folder: Path) -> Path:
    """As a packer before 0.2 has written it: less is told, and shards lack the digest's part."""
    (folder / "a.jsonl").write_bytes(jsonl(*TEXTS))
    pack("a.jsonl", *OPTIONS)
    result = Result("out")
    del result.manifest["special_tokens_in_text"]
    result.manifest["packer_version"] = "0.1.0"
    for shard in (s for one in (result.manifest, *result.records) for s in one["shards"]):
        was = shard["file"]
        shard["file"] = re.sub("-[0-9a-f]{16}[.]", ".", was)
        if Path("out", was).exists():
            Path("out", was).rename(Path("out", shard["file"]))
    for one in (result.manifest, *result.records):
        one["tokenizer"] = {k: v for k, v in one["tokenizer"].items() if k not in _NEWER}
    for record in result.records:
        record.pop("stretches", None)
    result.save()
    times = {"mtime_ns": [Path("a.jsonl").stat().st_mtime_ns]}
    Path("out/input_times.json").write_text(json.dumps(times))
    return Path("out")


def assert_sound(directory: Path, texts: list[str]) -> None:
    result = packer("verify", directory, "-q")
    assert result.exit_code == 0, (result.stderr, result.stdout)
    assert recover_texts(directory) == texts


def test_it_is_read(earlier: Path) -> None:
    assert_sound(earlier, TEXTS)
    for command in (("stats", "out"), ("stats", "out", "--json", "--deep"), ("show", "out")):
        result = packer(*command)
        assert result.exit_code == 0, (command, result.stderr)
    assert packer("export", "out", "--to", "parquet", "-o", "e", "-q").exit_code == 0


def test_it_is_replaced(earlier: Path) -> None:
    pack("a.jsonl", *OPTIONS, "--overwrite")
    assert_sound(earlier, TEXTS)
    assert not list(Path("out").glob("shard-?????-???.arrow"))


def test_its_unfinished_run_is_not_taken_for_packers(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl(*TEXTS))
    Path("out/.packer").mkdir(parents=True)
    Path("out/.packer/run.json").write_bytes(b"{}")
    result = packer("pack", "a.jsonl", *OPTIONS, "-t", "bytes", "-q", "-o", "out")
    assert_error(result, 2, "out/.packer: has no owner.json of packer's")
    assert "if an older packer left it, remove it" in result.stderr
