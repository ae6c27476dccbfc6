"""Stores to upload to."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from shop import OTHERS, TEXTS, Shop
from support import jsonl


@pytest.fixture
def stores(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty ones, inputs in the current directory, and a temporary directory of our own."""
    fsspec.register_implementation("shop", Shop, clobber=True)
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    Shop.objects.clear()
    Shop.log.clear()
    Shop.has_versions = True
    Shop.disturb = lambda what, path: None
    (folder / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(folder / "tmp"))
    Path("a.jsonl").write_bytes(jsonl(*TEXTS))
    Path("b.jsonl").write_bytes(jsonl(*OTHERS))
