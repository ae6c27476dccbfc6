"""`packer verify --against-inputs` notices documents of the inputs that no row holds."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forging import Result
from support import jsonl, packer


def half(texts: list[str]) -> list[str]:
    return [text if i % 2 else "" for i, text in enumerate(texts)]


def blank_half(data: bytes) -> bytes:
    """Every second line is spaces, so that the others are where they were."""
    lines = data.splitlines(keepends=True)
    return b"".join(
        line if i % 2 else b" " * (len(line) - 1) + b"\n" for i, line in enumerate(lines)
    )


MANY = [f"{i} " + "x" * (i % 11) for i in range(400)]
LACKING: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {  # half, and all
    "a.jsonl": (
        lambda path: path.write_bytes(blank_half(jsonl(*MANY))),
        lambda path: path.write_bytes(jsonl(*MANY)),
    ),
    "a.jsonl.gz": (
        lambda path: path.write_bytes(gzip.compress(blank_half(jsonl(*MANY)))),
        lambda path: path.write_bytes(gzip.compress(jsonl(*MANY))),
    ),
    "a.parquet": (
        lambda path: pq.write_table(pa.table({"text": half(MANY)}), path, row_group_size=30),
        lambda path: pq.write_table(pa.table({"text": MANY}), path, row_group_size=30),
    ),
}


@pytest.mark.parametrize("name", LACKING)
def test_a_sample_notices_documents_that_rows_lack(folder: Path, name: str) -> None:
    write_half, write_all = LACKING[name]
    write_half(folder / name)
    options = ("-t", "bytes", "-l", 64, "--unit-bytes", 10000, "-q", "-o", "out")
    assert packer("pack", name, *options).exit_code == 0
    assert packer("verify", "out", "--against-inputs", "--sample", 40).exit_code == 0
    write_all(folder / name)
    data = (folder / name).read_bytes()
    result = Result("out")
    result.manifest["inputs"][0].update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    result.save()
    for sample in (40, "all"):
        checked = packer("verify", "out", "--against-inputs", "--sample", sample, "-q")
        assert checked.exit_code == 1
        assert "is packed as none of its tokens, 0-" in checked.stdout


def test_a_sample_notices_an_input_all_of_whose_documents_are_gone(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl(*MANY))
    (folder / "b.jsonl").write_bytes(blank_half(blank_half(jsonl(*MANY))))
    (folder / "b.jsonl").write_bytes(b" " * 50 + b"\n")
    options = ("-t", "bytes", "-l", 64, "-q", "-o", "out")
    assert packer("pack", "a.jsonl", "b.jsonl", *options).exit_code == 0
    (folder / "b.jsonl").write_bytes(jsonl("what is gone" * 2))
    data = (folder / "b.jsonl").read_bytes()
    result = Result("out")
    result.manifest["inputs"][1].update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    result.save()
    checked = packer("verify", "out", "--against-inputs", "--sample", 5, "-q")
    problem = "out: b.jsonl: line 1 (byte 0): is packed as none of its tokens"
    assert checked.stdout.startswith(problem)
