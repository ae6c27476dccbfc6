"""Damaged and hostile results: an error, never a crash, a hang or unbounded memory.

Processes of their own read mutated shards and manifests, see fuzzing.py. `make test-fuzz` tries
10,000; a failure is repeated by `python tests/fuzzing.py DIR NUMBER 1`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_tokenizers
from support import ALL_COLUMNS, jsonl, succeeds

MUTATIONS = int(os.environ.get("PACKER_FUZZ", "30"))
_AT_ONCE = 40
_SECONDS = 1800  # of a process that waits for ever; one that is at work has less, in fuzzing.py


@pytest.fixture
def result(folder: Path) -> Path:
    texts = [letter * size for letter, size in zip("abcdef", (15, 7, 33, 3, 9, 2), strict=True)]
    (folder / "a.jsonl").write_bytes(jsonl(*texts * 6) + b"bad\n")
    tiny_tokenizers.save(
        folder / "tok", tiny_tokenizers.byte_level(), tokenizer_config={"eos_token": "</s>"}
    )
    options = ["-l", 16, "--unit-bytes", 600, *ALL_COLUMNS, "--segment-multiple", 4]
    options += ["--balance", "attention", "--max-segments-per-row", 3, "--on-error", "skip"]
    succeeds("pack", "a.jsonl", *options, "-t", "tok", "-q", "-o", "out")
    return folder / "out"


@pytest.mark.parametrize("first", range(0, MUTATIONS, _AT_ONCE))
def test_no_mutation_ends_in_a_crash(result: Path, first: int) -> None:
    count = min(_AT_ONCE, MUTATIONS - first)
    program = str(Path(__file__).parents[1] / "fuzzing.py")
    command = [sys.executable, program, str(result), str(first), str(count)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        lines, end = done.stdout.splitlines(), f"exit {done.returncode}: {done.stderr[-1000:]}"
    except subprocess.TimeoutExpired as error:
        lines, end = (error.stdout or b"").decode().splitlines(), f"hangs ({_SECONDS} s)"
    failed = [line for line in lines if line.startswith("failed")]
    if not lines or lines[-1] != "end":
        begun = [line for line in lines if line.startswith("begin")]
        failed.append(f"{begun[-1:]}: {end}")
    assert not failed, "\n".join(failed)
