"""`squared_lengths.npy` as it is written and read."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forging import Result
from support import jsonl, pack, squared_lengths_by_hand
from varied_results import texts

from packer_cli import open_packed
from packer_cli.errors import DataError
from packer_cli.result.layout import SQUARED_LENGTHS
from packer_cli.result.reader import squared_lengths, squares_header


def with_side_file(content: Any) -> Path:
    """With another file of that name, as its manifest says."""
    path, result = Path("out", SQUARED_LENGTHS), Result("out")
    if not isinstance(content, bytes):
        np.save(path, content)
        content = path.read_bytes()
    result.write(SQUARED_LENGTHS, content)
    result.manifest["side_files"][SQUARED_LENGTHS] = ""
    result.save()
    return path


def some_rows() -> list[int]:
    Path("a.jsonl").write_bytes(jsonl(*texts(0, 60)))
    pack("a.jsonl", "-l", 64)
    return squared_lengths_by_hand("out")


def test_they_are_mapped(folder: Path) -> None:
    """`check_directory` compares them with the rows of every result."""
    expected = some_rows()
    sums = squared_lengths(open_packed("out"))
    assert (sums.dtype, sums.tolist()) == (np.int64, expected)
    assert not sums.flags.owndata
    assert not sums.flags.writeable


@pytest.mark.parametrize("rows", [1, 9, 12345, 1 << 53])
def test_the_header_is_numpys_own(folder: Path, rows: int) -> None:
    with open("x.npy", "wb") as file:
        facts = {"descr": "<i8", "fortran_order": False, "shape": (rows,)}
        np.lib.format.write_array_header_1_0(file, facts)
    assert Path("x.npy").read_bytes() == squares_header(rows)


@pytest.mark.parametrize(
    "changed",
    [
        lambda sums: sums[:-1],
        lambda sums: sums.astype(np.float64),
        lambda sums: sums.astype(">i8"),
        lambda sums: sums[:, None],
        lambda sums: squares_header(len(sums)) + bytes(7),
        lambda sums: b"",
        lambda sums: bytes(128) + sums.tobytes(),
    ],
)
def test_a_file_of_another_size_or_type_is_an_error(folder: Path, changed: Any) -> None:
    sums = np.array(some_rows())
    path = with_side_file(changed(sums))
    with pytest.raises(DataError) as error:
        squared_lengths(open_packed("out"))
    expected = f"{path}: is no array of numpy's format 1.0, <i8[{len(sums)}] in "
    assert error.value.message.startswith(expected)
    assert "pack the data again" in error.value.tip


def test_a_file_that_is_not_the_manifests_is_an_error(folder: Path) -> None:
    sums = np.array(some_rows())
    path = with_side_file(sums)
    sums[0] += 1
    np.save(path, sums)
    with pytest.raises(DataError, match=r"its sha256 is .*, the manifest says") as error:
        squared_lengths(open_packed("out"))
    assert hashlib.sha256(path.read_bytes()).hexdigest() in error.value.message
    path.unlink()
    with pytest.raises(DataError, match=f"{path}: cannot read: No such file or directory"):
        squared_lengths(open_packed("out"))


def test_the_file_of_a_result_that_took_the_place_is_not_taken_for_this_ones(folder: Path) -> None:
    with_side_file(np.array(some_rows()))
    packed = open_packed("out")
    Path("a.jsonl").write_bytes(jsonl(*texts(9, 69)))
    pack("a.jsonl", "-l", 64, "--overwrite")
    with pytest.raises(DataError, match="was replaced by another result while it was read"):
        squared_lengths(packed)
