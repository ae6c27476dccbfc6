"""`packer verify` counts squared_lengths.npy again from the rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forging import Result
from support import jsonl, packer
from varied_results import texts
from verifying import assert_sound, first, problems

from packer_cli.result.layout import SQUARED_LENGTHS
from packer_cli.result.squared_lengths import header

OPTIONS = ("-l", 64, "--unit-bytes", 1500)


@pytest.fixture(params=["packed", "view"])
def out(request: pytest.FixtureRequest, folder: Path) -> Path:
    """A result of several units."""
    (folder / "a.jsonl").write_bytes(jsonl(*texts(0, 60)))
    made, more = ("a.jsonl", "-t", "bytes"), list[str]()
    if request.param == "view":
        result = packer("tokenize", *made, "-o", "tokens", "-q")
        assert result.exit_code == 0, result.stderr
        made, more = ("tokens",), ["--view"]
    result = packer("pack", *made, *OPTIONS, *more, "-q", "-o", "out")
    assert result.exit_code == 0, result.stderr
    assert_sound()
    return Path("out")


def forge(change: Callable[[np.ndarray], None]) -> np.ndarray:
    """Change the figures, and every digest of them."""
    result = Result("out")
    sums = np.load(Path("out", SQUARED_LENGTHS))
    change(sums)
    result.write(SQUARED_LENGTHS, header(len(sums)) + sums.tobytes())
    result.save()
    return sums


def test_a_forged_figure_is_told_by_its_row(out: Path) -> None:
    made = np.load(out / SQUARED_LENGTHS)
    forged = forge(lambda sums: sums.__setitem__(3, sums[3] + 2))
    assert problems() == [
        f"out: {SQUARED_LENGTHS}: has {forged[3]} for row 3 of {first()}, whose segments make "
        f"{made[3]} (1 rows)"
    ]


def test_forged_figures_are_told_once(out: Path) -> None:
    made = np.load(out / SQUARED_LENGTHS)
    shard = Result("out").manifest["shards"][1]
    row = Result("out").manifest["shards"][0]["rows"] + 1  # the second of the second shard

    def change(sums: np.ndarray) -> None:
        sums[row:] += 1

    forge(change)
    assert problems() == [
        f"out: {SQUARED_LENGTHS}: has {made[row] + 1} for row 1 of {shard['file']}, whose segments "
        f"make {made[row]} ({len(made) - row} rows)"
    ]


def test_figures_in_another_order_are_told(out: Path) -> None:
    def change(sums: np.ndarray) -> None:
        sums[:] = sums[::-1].copy()

    made = np.load(out / SQUARED_LENGTHS)
    forge(change)
    (line,) = problems()
    assert f"({np.count_nonzero(made != made[::-1])} rows)" in line


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "holds no array of numpy's format 1.0 in 0 bytes, expected"),
        (header(1) + bytes(8), "holds <i8[1] in 136 bytes, expected"),
    ],
)
def test_a_file_that_cannot_hold_them_is_told(out: Path, content: bytes, problem: str) -> None:
    result = Result("out")
    result.write(SQUARED_LENGTHS, content)
    result.save()
    (line,) = problems()
    assert line.startswith(f"out: {SQUARED_LENGTHS}: {problem}")


def test_a_file_that_was_changed_or_lost_is_told_once(out: Path) -> None:
    path = out / SQUARED_LENGTHS
    path.write_bytes(path.read_bytes()[:-8])
    (line,) = problems()
    assert line.startswith(f"out: {SQUARED_LENGTHS}: its sha256 is ")
    path.unlink()
    assert problems() == [f"out: {SQUARED_LENGTHS}: is missing"]


def test_they_are_hashed_once(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the largest of the side files: 8 bytes for each row."""
    content, hashed = (out / SQUARED_LENGTHS).read_bytes(), list[bytes]()
    sha256 = hashlib.sha256

    class Noted:
        def __init__(self, data: Any = b"") -> None:
            self._sha = sha256()
            self.update(data)

        def update(self, data: Any) -> None:
            hashed.append(bytes(data))
            self._sha.update(data)

        def hexdigest(self) -> str:
            return self._sha.hexdigest()

    monkeypatch.setattr(hashlib, "sha256", Noted)
    assert_sound()
    assert hashed.count(content) == 1


def test_a_result_of_an_earlier_packer_has_none(out: Path) -> None:
    result = Result("out")
    del result.manifest["side_files"][SQUARED_LENGTHS]
    result.save()
    assert problems() == [f"out: {SQUARED_LENGTHS}: a foreign file: the manifest does not list it"]
    (out / SQUARED_LENGTHS).unlink()
    assert_sound()


def test_documents_have_none(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl(*texts(0, 60)))
    result = packer("tokenize", "a.jsonl", "-t", "bytes", "-o", "out", "-q")
    assert result.exit_code == 0, result.stderr
    assert not Path("out", SQUARED_LENGTHS).exists()
    forged = Result("out")
    forged.write(SQUARED_LENGTHS, header(0))
    forged.manifest["side_files"][SQUARED_LENGTHS] = ""
    forged.save()
    assert problems() == [
        f"out: manifest.json: lists {SQUARED_LENGTHS} as a side file, which packer does not write"
    ]
