"""`squared_lengths.npy` read, and made from the shards of results that have none."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forging import Result
from support import jsonl, pack, packer, shard_of, squared_lengths_by_hand
from varied_results import texts

from packer_cli import open_packed
from packer_cli.errors import DataError
from packer_cli.result.layout import SQUARED_LENGTHS
from packer_cli.result.squared_lengths import header, squared_lengths

OPTIONS: dict[str, list[object]] = {
    "plain": ["-l", 64],
    "multiple": ["-l", 64, "--segment-multiple", 8],
    "units and parts": ["-l", 32, "--unit-bytes", 900, "--shard-bytes", 2000],
    "few columns": ["-l", 64, "--columns", "input_ids,cu_seqlens"],
    "long": ["-l", 5000],
}


def without_side_file(directory: str = "out") -> Path:
    """As an earlier packer has written it."""
    result = Result(directory)
    result.manifest["side_files"].pop(SQUARED_LENGTHS, None)
    result.save()
    path = Path(directory, SQUARED_LENGTHS)
    path.unlink(missing_ok=True)
    return path


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


def some_rows(*options: object) -> list[int]:
    Path("a.jsonl").write_bytes(jsonl(*texts(0, 60)))
    pack("a.jsonl", *(options or ("-l", 64)))
    return squared_lengths_by_hand("out")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_they_are_made_from_shards_where_there_is_no_file(
    folder: Path, options: list[object]
) -> None:
    expected = some_rows(*options)
    without_side_file()
    sums = squared_lengths(open_packed("out"))
    assert (sums.dtype, sums.tolist()) == (np.int64, expected)


def test_they_are_made_from_the_shards_of_a_view(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl(*texts(0, 60)))
    for command in (
        ("tokenize", "a.jsonl", "-t", "bytes", "-o", "tokens"),
        ("pack", "tokens", "-l", 64, "--segment-multiple", 4, "--view", "-o", "out"),
    ):
        result = packer(*command, "-q")
        assert result.exit_code == 0, result.stderr
    without_side_file()
    assert squared_lengths(open_packed("out")).tolist() == squared_lengths_by_hand("out")


def test_the_file_is_mapped(folder: Path) -> None:
    sums = np.array(some_rows())
    with_side_file(sums)
    found = squared_lengths(open_packed("out"))
    assert (found.dtype, found.tolist()) == (np.int64, sums.tolist())
    assert not found.flags.owndata
    assert not found.flags.writeable


@pytest.mark.parametrize("rows", [1, 9, 12345, 1 << 53])
def test_the_header_is_numpys_own(folder: Path, rows: int) -> None:
    with open("x.npy", "wb") as file:
        facts = {"descr": "<i8", "fortran_order": False, "shape": (rows,)}
        np.lib.format.write_array_header_1_0(file, facts)
    assert Path("x.npy").read_bytes() == header(rows)


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        (lambda sums: sums[:-1], "holds <i8[{fewer}] in {short} bytes"),
        (lambda sums: np.append(sums, 1), "holds <i8[{more}] in {long} bytes"),
        (lambda sums: sums.astype(np.float64), "holds <f8[{rows}] in {size} bytes"),
        (lambda sums: sums.astype(np.int32), "holds <i4[{rows}] in {half} bytes"),
        (lambda sums: sums.astype(">i8"), "holds >i8[{rows}] in {size} bytes"),
        (lambda sums: sums[:, None], "holds <i8[{rows}, 1] in {size} bytes"),
        (lambda sums: header(len(sums)) + bytes(7), "holds <i8[{rows}] in 135 bytes"),
        (lambda sums: b"", "holds no array of numpy's format 1.0 in 0 bytes"),
        (lambda sums: b"\x93NUMPY\x01\x00v\x00{'descr': eval(", "holds no array of numpy's"),
        (lambda sums: bytes(128) + sums.tobytes(), "holds no array of numpy's format 1.0 in"),
    ],
)  # fmt: skip
def test_a_file_of_another_size_or_type_is_an_error(folder: Path, changed: Any, found: str) -> None:
    sums = np.array(some_rows())
    path = with_side_file(changed(sums))
    rows = len(sums)
    figures = {
        "rows": rows, "fewer": rows - 1, "more": rows + 1, "size": 128 + 8 * rows,
        "short": 120 + 8 * rows, "long": 136 + 8 * rows, "half": 128 + 4 * rows,
    }  # fmt: skip
    with pytest.raises(DataError) as error:
        squared_lengths(open_packed("out"))
    assert f"{path}: {found.format(**figures)}" in error.value.message
    if "no array" not in found:
        assert error.value.message.endswith(f", expected <i8[{rows}] in {128 + 8 * rows}")
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
    with pytest.raises(DataError, match=f"{path}: is missing"):
        squared_lengths(open_packed("out"))


def test_the_file_of_a_result_that_took_the_place_is_not_taken_for_this_ones(folder: Path) -> None:
    with_side_file(np.array(some_rows()))
    packed = open_packed("out")
    Path("a.jsonl").write_bytes(jsonl(*texts(9, 69)))
    pack("a.jsonl", "-l", 64, "--overwrite")
    with pytest.raises(DataError, match="was replaced by another result while it was read"):
        squared_lengths(packed)


def test_a_damaged_shard_is_an_error(folder: Path) -> None:
    some_rows()
    without_side_file()
    shard = shard_of()
    data = bytearray(shard.read_bytes())
    packed = open_packed("out")
    (batch, *_) = packed.stored(packed.facts.shards[0])
    values = batch.column("cu_seqlens").values.to_numpy()
    at = data.index(values[:20].tobytes())
    data[at : at + 4] = (7).to_bytes(4, "little")
    shard.write_bytes(bytes(data))
    with pytest.raises(DataError, match="is damaged: cu_seqlens does not begin with 0"):
        squared_lengths(open_packed("out"))
