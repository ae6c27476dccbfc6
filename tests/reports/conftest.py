"""What `packer show` reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from showing import IN_ORDER, TEXTS
from spoiling import tokenize
from support import jsonl, pack, succeeds


@pytest.fixture
def packed(folder: Path) -> Path:
    """Rows of 16, bytes: first + second | third | a longer one | its end."""
    (folder / "a.jsonl").write_bytes(jsonl(*TEXTS))
    pack("a.jsonl", "-l", 16, *IN_ORDER)
    return folder / "out"


@pytest.fixture
def many_shards(folder: Path) -> Path:
    (folder / "a.jsonl").write_bytes(jsonl(*(f"document {n:02}" for n in range(40))))
    pack("a.jsonl", "-l", 16, "--unit-bytes", 100, *IN_ORDER)
    return folder / "out"


@pytest.fixture
def carried(folder: Path) -> Path:
    """A row of two documents with values of tokens and records, their tokenized directory `tokens`,
    and `view`, the same row of it.
    """
    records = [
        {"input_ids": [1, 2, 3], "logprobs": [-0.5, -1.5, -1], "top": [[1, 9]] * 3, "reward": 1},
        {"input_ids": [4, 5], "logprobs": [-2.0, 0.3], "top": [[2, 1200], [3, 5]], "reward": 0.5},
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    names = ("logprobs:float32", "top:int32[2]", "reward:bfloat16")
    tokenize("a.jsonl", "-o", "tokens", *(part for name in names for part in ("--carry", name)))
    for output, how in (("out", []), ("view", ["--view"])):
        succeeds("pack", "tokens", "-l", 8, "-q", "-o", output, *IN_ORDER, *how)
    return folder / "out"
