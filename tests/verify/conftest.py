"""A small result to verify."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import jsonl, pack
from verifying import EVERYTHING, TEXTS


@pytest.fixture
def packed(folder: Path) -> Path:
    (folder / "a.jsonl").write_bytes(jsonl(*TEXTS[:4], ""))
    (folder / "b.jsonl").write_bytes(jsonl(*TEXTS[4:]))
    pack("a.jsonl", "b.jsonl", *EVERYTHING)
    return folder / "out"
