"""Two small inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
from owning import TEXTS
from support import jsonl


@pytest.fixture
def data(folder: Path) -> Path:
    (folder / "a.jsonl").write_bytes(jsonl(*TEXTS))
    (folder / "b.jsonl").write_bytes(jsonl("third"))
    return folder
