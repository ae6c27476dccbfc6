"""Byte order marks at the beginning of files: UTF-8's is no text, others say how to convert."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
from support import (
    COMPRESSORS,
    assert_error,
    jsonl,
    pack,
    packer,
    packer_process,
    recover_documents,
    recover_texts,
)

from packer_cli.config.options import PackConfig
from packer_cli.config.shapes import Shape
from packer_cli.inputs import byte_streams
from packer_cli.inputs.jsonl import JsonlReader
from packer_cli.records import InputFile, Slice

pytestmark = pytest.mark.usefixtures("folder")
QUIET = ("-l", 16, "-t", "bytes", "-q", "-o", "out")
MARK = "\ufeff"
# what files hold, all of the texts "one" and "two"
PLAIN = {
    "a.jsonl": '{"text": "one"}\n{"text": "two"}\n',
    "a.json": '[{"text": "one"}, {"text": "two"}]',
    "b.json": '{"text": "one"}\n{"text": "two"}\n',
    "a.txt": "one\ntwo\n",
    "a.csv": "text,b\none,1\ntwo,2\n",
    "a.tsv": '"text"\tb\none\t1\ntwo\t2\n',
}


@pytest.mark.parametrize("ending", ["", *COMPRESSORS])
@pytest.mark.parametrize("name", PLAIN)
def test_the_mark_of_utf8_is_no_part_of_a_file(folder: Path, name: str, ending: str) -> None:
    places = []
    for mark in ("", MARK):
        data = (mark + PLAIN[name]).encode()
        path = f"{name}.{ending}" if ending else name
        (folder / path).write_bytes(COMPRESSORS[ending](data) if ending else data)
        pack(path, "-l", 16, "--overwrite", "--unit-bytes", 3)
        assert recover_texts("out") == ["one", "two"]
        places.append([position for _, position in recover_documents("out")])
    marked = len(MARK.encode())
    first = marked if places[0][0] or name == "a.json" else 0  # a line begins with the mark
    assert places[1] == [places[0][0] + first, places[0][1] + marked]


def test_the_mark_on_stdin(folder: Path) -> None:
    done = packer_process("pack", "-", *QUIET, stdin=(MARK + PLAIN["a.jsonl"]).encode())
    assert done.returncode == 0, done.stderr
    assert recover_texts("out") == ["one", "two"]


@pytest.mark.parametrize("block", [1, 2, 3, 5, 100])
def test_the_mark_of_json_lines_in_any_slices(tmp_path: Path, block: int) -> None:
    data = (MARK + PLAIN["a.jsonl"]).encode()
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    file = InputFile(0, str(path), "jsonl", None, len(data), 0)
    config, shape = PackConfig(max_length=8), Shape("text", {"text": "text"})
    with patch.object(byte_streams, "BLOCK_BYTES", block):
        for cuts in ([], [1], [2], [3], [4], [1, 2, 3, 4], range(1, len(data))):
            read = []
            for start, stop in pairwise([0, *cuts, None]):
                for records in JsonlReader().read(
                    file, Slice(0, start or 0, stop, 0), shape, config
                ):
                    assert not records.bad
                    read += zip(records.positions.tolist(), records.texts or [], strict=True)
            assert read == [(0, "one"), (data.index(b"\n") + 1, "two")]


def test_a_mark_further_on_is_a_bad_line_of_json(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl("a") + MARK.encode() + jsonl("b"))
    result = packer("pack", "a.jsonl", *QUIET)
    assert_error(result, 1, "a.jsonl, line 2 (byte 14): a UTF-8 byte order mark, which only the")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt"])
def test_a_file_of_nothing_but_the_mark_is_empty(folder: Path, name: str) -> None:
    (folder / name).write_bytes(MARK.encode())
    (folder / "b.jsonl").write_bytes(jsonl("b"))
    manifest = pack("b.jsonl", name, "-l", 16)
    assert (manifest["documents"], manifest["empty_documents"]) == (1, 0)


@pytest.mark.parametrize("encoding", ["UTF-16LE", "UTF-16BE", "UTF-32LE", "UTF-32BE"])
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("skip", [(), ("--on-error", "skip")], ids=["", "skip"])
def test_other_encodings_say_how_to_convert(
    folder: Path, name: str, encoding: str, skip: tuple[str, ...]
) -> None:
    (folder / name).write_bytes((MARK + PLAIN[name]).encode(encoding))
    result = packer("pack", name, *QUIET, *skip, "--unit-bytes", 20)
    message = f"{name}: begins with the byte order mark of {encoding}, expected UTF-8"
    assert_error(result, 1, message)
    assert f"tip: convert it: iconv -f {encoding[:6]} -t UTF-8 FILE > NEW_FILE" in result.stderr


def test_json_lines_in_another_encoding_without_a_mark(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(PLAIN["a.jsonl"].encode("utf-16-le"))
    result = packer("pack", "a.jsonl", *QUIET)
    assert_error(result, 1, "a.jsonl, line 1 (byte 0): a NUL byte, which no text has")
    assert "iconv -f UTF-16" in result.stderr
