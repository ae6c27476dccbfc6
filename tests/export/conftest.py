"""A small result to export."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import succeeds


@pytest.fixture
def small(folder: Path) -> Path:
    """A directory of one shard in the current directory."""
    Path("data.jsonl").write_text("\n".join('{"text": "some words"}' for _ in range(50)))
    succeeds("pack", "data.jsonl", "-l", 64, "-t", "bytes", "-o", "packed", "-q")
    return Path("packed")
