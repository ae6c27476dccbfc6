"""Results to verify: small ones, and copies of those that take longer to pack."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from forging import Result
from support import jsonl, pack, packer
from varied_results import RESULTS
from verifying import EVERYTHING, TEXTS


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of inputs with their result, which tests copy."""
    made = {}
    before = Path.cwd()
    for name, write in RESULTS.items():
        folder = tmp_path_factory.mktemp(name)
        os.chdir(folder)
        try:
            result = packer("pack", *write(folder), "-q", "-o", "out")
            assert result.exit_code == (1 if name == "lossy" else 0), result.stderr
        finally:
            os.chdir(before)
        made[name] = folder
    return made


@pytest.fixture
def copied(folder: Path, results: dict[str, Path]) -> Callable[[str], Result]:
    def copy(name: str) -> Result:
        shutil.copytree(results[name], folder, dirs_exist_ok=True)
        return Result("out")

    return copy


@pytest.fixture
def packed(folder: Path) -> Path:
    (folder / "a.jsonl").write_bytes(jsonl(*TEXTS[:4], ""))
    (folder / "b.jsonl").write_bytes(jsonl(*TEXTS[4:]))
    pack("a.jsonl", "b.jsonl", *EVERYTHING)
    return folder / "out"
