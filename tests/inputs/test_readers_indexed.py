"""Megatron-LM's files of token ids, written by hand from their definition."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from showing import show_json
from support import (
    assert_error,
    check_directory,
    inputs_of,
    line_limit,
    pack,
    packer,
    recover_documents,
    succeeds,
)

from packer_cli.result.layout import digest

pytestmark = pytest.mark.usefixtures("folder")

DOCUMENTS = [[5, 6, 7], [], [8], [1, 2, 3, 4], [9, 9]]
CODES = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "u2": 8}


def megatron(
    stem: str,
    documents: list[list[int]] = DOCUMENTS,
    kind: str = "i4",
    *,
    sequences: list[int] | None = None,
    boundaries: list[int] | None = None,
    modes: bytes = b"",
) -> None:
    """`sequences`: their lengths, if a document is not just one."""
    tokens = np.array([token for document in documents for token in document], kind)
    lengths = np.array(sequences or [len(document) for document in documents], "<i4")
    edges = np.array(boundaries or range(len(lengths) + 1), "<i8")
    begins = (np.cumsum(lengths, dtype="<i8") - lengths) * tokens.itemsize
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, CODES[kind], len(lengths), len(edges))
    index = header + lengths.tobytes() + begins.tobytes() + edges.tobytes() + modes
    Path(f"{stem}.bin").write_bytes(tokens.tobytes())
    Path(f"{stem}.idx").write_bytes(index)


def documents_packed(directory: str = "out") -> dict[tuple[int, int], list[int]]:
    return {place: tokens.tolist() for place, tokens in recover_documents(directory).items()}


def expected(documents: list[list[int]] = DOCUMENTS) -> dict[tuple[int, int], list[int]]:
    return {(0, i): document for i, document in enumerate(documents) if document}


@pytest.mark.parametrize("kind", CODES)
def test_megatron_of_every_token_type(kind: str) -> None:
    megatron("a", kind=kind)
    manifest = pack("a.bin", "-l", 16, "--strategy", "next-fit")
    assert documents_packed() == expected()
    segments = show_json("0")[0]["segments"]
    places = [(one["position"], one["position_unit"]) for one in segments]
    assert places == [(0, "document"), (2, "document"), (3, "document"), (4, "document")]
    assert manifest["empty_documents"] == 1
    assert manifest["config"]["add_eos"] is False
    (one,) = manifest["inputs"]
    assert (one["size"], one["sha256"]) == digest("a.bin")


def test_documents_of_several_sequences_whose_modes_are_all_text() -> None:
    tokens = [list(range(10))]
    for modes in (b"", bytes(5)):
        megatron("a", tokens, sequences=[1, 2, 3, 0, 4], boundaries=[0, 2, 2, 5], modes=modes)
        pack("a.bin", "-l", 16, "--overwrite")
        assert documents_packed() == {(0, 0): [0, 1, 2], (0, 2): [3, 4, 5, 6, 7, 8, 9]}
    megatron("a", modes=b"\0\0\1\0\0")
    assert_error(packer("pack", "a.bin", "-l", 6), 1, "a.idx: has modes other than 0")


def test_every_way_to_name_a_pair_names_it_once(folder: Path) -> None:
    Path("data").mkdir()
    os.chdir("data")
    megatron("a")
    os.chdir("..")
    paths = ["data/a.bin", "data/a.idx"]
    ways = [["data"], ["data/*"], paths, paths[::-1], *([path] for path in paths)]
    for way in ways:
        shutil.rmtree("out", ignore_errors=True)
        manifest = pack(*way, "-l", 6)
        assert inputs_of(manifest) == ["data/a.bin"], way
        assert documents_packed() == expected()


@pytest.mark.parametrize("unit_bytes", [1, 2000, "1G"])
def test_slices_are_documents(unit_bytes: object) -> None:
    rng = np.random.default_rng(1)
    lengths = np.minimum(rng.lognormal(3, 1.5, 80).astype(int), 2000)
    documents = [rng.integers(0, 250, length).tolist() for length in lengths]
    megatron("a", documents)
    manifest = pack("a.bin", "-l", 128, "--unit-bytes", unit_bytes, "--workers", 2)
    assert documents_packed() == expected(documents)
    assert manifest["inputs"][0]["sha256"] == digest("a.bin")[1]
    units = manifest["units"]
    assert len(units) == 1 if unit_bytes == "1G" else len(units) > 5
    if unit_bytes == 2000:  # cut where the tokens are, not where so many documents are
        slices = [part for unit in units for part in unit["slices"]]
        tokens = [sum(map(len, documents[start:stop])) for _, start, stop in slices]
        assert max(tokens) < 2 * sum(tokens) / len(tokens) + 2000
    for sample in ("all", "20"):
        succeeds("verify", "out", "--against-inputs", "--sample", sample)


BAD_DOCUMENTS = [
    ("i4", [3, -3, 4], "input_ids[1] is -3, not between 0 and 2147483647"),
    ("i8", [3, 1 << 40, 4], f"input_ids[1] is {1 << 40}, not between 0 and"),
    ("i4", [3] * 1000, "the document is longer than 1000 bytes"),
]


@pytest.mark.parametrize(("kind", "document", "message"), BAD_DOCUMENTS)
def test_bad_documents(kind: str, document: list[int], message: str) -> None:
    megatron("a", [[1, 2], document, [5]], kind)
    with line_limit(1000):
        result = packer("pack", "a.bin", "-l", 8, "-q")
        manifest = pack("a.bin", "-l", 8, "--on-error", "skip")
    assert_error(result, 1, f"a.bin, document 1: {message}")
    assert (manifest["rejected_records"], manifest["documents"]) == (1, 2)
    assert documents_packed() == {(0, 0): [1, 2], (0, 2): [5]}
    assert manifest["inputs"][0]["sha256"] == digest("a.bin")[1]


def edit(path: str, at: int, data: bytes) -> None:
    content = bytearray(Path(path).read_bytes())
    content[at : at + len(data)] = data
    Path(path).write_bytes(content)


def cut(path: str, size: int) -> None:
    os.truncate(path, os.stat(path).st_size - size)


# header 34 bytes, then 5 lengths of 4, begins of 8 from 54, boundaries of 8 from 94, to 142
DAMAGED = [
    (lambda: edit("a.idx", 0, b"NOTIDX"), "a.idx: begins with b'NOTIDXX\\x00\\x00'"),
    (lambda: edit("a.idx", 9, b"\2"), "a.idx: version 2 and tokens of type code 4, expected"),
    (
        lambda: edit("a.idx", 17, b"\5"),
        "a.idx, sequence 1: begins at byte 12, expected the end of the one before",
    ),
    (lambda: cut("a.idx", 1), "a.idx: 141 bytes, expected 142 for 5 sequences and 6 boundaries"),
    (lambda: edit("a.idx", 34, b"\xff" * 4), "a.idx, sequence 0: tokens: -1, expected 0 or more"),
    (lambda: edit("a.idx", 94, b"\1"), "a.idx, boundary 0: is at sequence 1, expected 0 first"),
    (lambda: edit("a.idx", 110, b"\0"), "a.idx, boundary 2: is at sequence 0, expected"),
    (lambda: cut("a.bin", 1), "a.bin: 39 bytes, expected 40 by a.idx"),
    (lambda: os.remove("a.idx"), "a.bin: expected a.idx beside it, there is none"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGED)
def test_damaged_pairs(damage: Any, message: str) -> None:
    megatron("a")
    damage()
    assert_error(packer("pack", "a.bin", "-l", 6, "-q", "--on-error", "skip"), 1, message)
    assert not Path("a-packed-6").exists()


def test_an_index_alone(folder: Path) -> None:
    (folder / "a.idx").write_bytes(b"")
    message = "a.idx: expected a.bin beside it, there is none"
    assert_error(packer("pack", "a.idx", "-l", 6), 1, message)
    (folder / "b.jsonl").write_text('{"input_ids": [1]}\n')
    assert_error(packer("pack", ".", "-l", 6), 1, message)


def test_other_files_called_bin_are_left_out_of_a_folder(folder: Path) -> None:
    Path("data").mkdir()
    Path("data/model.bin").write_bytes(b"weights")
    Path("data/b.jsonl").write_text('{"input_ids": [1, 2]}\n')
    result = succeeds("pack", "data", "-l", 6, "-o", "out")
    assert "data/model.bin: left out: there is no model.idx beside it" in result.stderr
    assert inputs_of(check_directory("out")) == ["data/b.jsonl"]
    megatron("data/c")  # beside a pair, it may be one that has lost its index
    message = "data/model.bin: expected model.idx beside it, there is none"
    assert_error(packer("pack", "data", "-l", 6, "-o", "other"), 1, message)


def test_a_format_that_is_named_and_not_through_stdin_nor_compressed() -> None:
    megatron("a")
    os.rename("a.bin", "a.tokens")
    pack("a.tokens", "-l", 6, "--input-format", "megatron")
    assert documents_packed() == expected()
    Path("a.bin.gz").write_bytes(b"")
    assert_error(packer("pack", "a.bin.gz", "-l", 6), 2, "megatron files are not read through gzip")
    result = packer("pack", "-", "--input-format", "megatron", "-l", 6, "-o", "out")
    assert_error(result, 2, "megatron cannot be read from stdin")


def test_no_documents_at_all() -> None:
    megatron("a", [])
    assert_error(packer("pack", "a.bin", "-l", 6), 1, "a.bin: no records in 1 input file")
    Path("c.jsonl").write_text('{"input_ids": [1, 2]}\n')
    pack("a.bin", "c.jsonl", "-l", 6)
    assert documents_packed() == {(1, 0): [1, 2]}


def test_an_index_that_changes_changes_the_input() -> None:
    megatron("a")
    pack("a.bin", "-l", 6)
    times = os.stat("a.bin")
    again = packer("pack", "a.bin", "-l", 6, "-o", "out", "-t", "bytes", "--add")
    assert "up to date" in again.stderr
    megatron("a", sequences=[1, 2, 1, 4, 2])
    os.utime("a.bin", ns=(times.st_atime_ns, times.st_mtime_ns))
    succeeds("pack", "a.bin", "-l", 6, "-o", "out", "-t", "bytes", "--add")
    check_directory("out")
    assert documents_packed() == expected([[5], [6, 7], [8], [1, 2, 3, 4], [9, 9]])


def test_a_pair_by_url() -> None:
    fsspec = pytest.importorskip("fsspec")
    megatron("a")
    store = fsspec.filesystem("memory")
    store.store.clear()
    for path in Path().glob("a.*"):
        store.pipe_file(f"memory://bucket/{path}", path.read_bytes())
    for name in ("memory://bucket", "memory://bucket/a.idx"):
        shutil.rmtree("out", ignore_errors=True)
        manifest = pack(name, "-l", 6, "--unit-bytes", 8)
        assert [one["path"] for one in manifest["inputs"]] == ["memory://bucket/a.bin"]
        assert documents_packed() == expected()
    store.rm_file("memory://bucket/a.idx")
    message = "memory://bucket/a.bin: expected a.idx beside it, there is none"
    assert_error(packer("pack", "memory://bucket/a.bin", "-l", 6), 1, message)
