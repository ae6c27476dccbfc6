"""What `packer show` reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from showing import IN_ORDER, TEXTS
from support import jsonl, pack


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
