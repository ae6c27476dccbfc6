"""Cutting files into lines and slices: every line once, at its place, whatever the cuts."""

from __future__ import annotations

import io
import json
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support import pack, recover_documents, recover_texts

from packer_cli.config.options import PackConfig
from packer_cli.config.shapes import Shape
from packer_cli.inputs import byte_streams
from packer_cli.inputs.jsonl import JsonlReader
from packer_cli.inputs.lines import read_lines
from packer_cli.records import InputFile, Slice

pytestmark = pytest.mark.usefixtures("folder")

Found = list[tuple[int, bytes | None]]


def whole_lines(data: bytes) -> list[tuple[int, bytes]]:
    """(offset, line) the slow and obvious way."""
    expected, offset = [], 0
    for line in data.split(b"\n"):
        expected.append((offset, line))
        offset += len(line) + 1
    return expected if expected[-1][1] else expected[:-1]


def sliced_lines(data: bytes, cuts: list[int], block: int, limit: int) -> Found:
    """(offset, line) read slice by slice; None for a line longer than the limit."""
    lines_read: Found = []
    edges = [0, *sorted(cut for cut in set(cuts) if 0 < cut < len(data)), None]
    with patch.object(byte_streams, "BLOCK_BYTES", block):
        for start, stop in pairwise(edges):
            raw = io.BytesIO(data)
            raw.seek(max(start - 1, 0))
            source = byte_streams.Source(raw, raw)
            for lines in read_lines(source, start, stop, limit):
                if lines.data is None:
                    lines_read.append((lines.offset, None))
                    continue
                for offset, line in whole_lines(lines.data):
                    whole = line if len(line) <= limit else None
                    lines_read.append((lines.offset + offset, whole))
    return lines_read


lines = st.lists(st.text("ab\r", max_size=12).map(str.encode), max_size=12)


@given(
    lines=lines,
    ended=st.booleans(),
    cuts=st.lists(st.integers(1, 150), max_size=20),
    block=st.integers(1, 40),
    limit=st.integers(1, 14),
)
@example(lines=[b"a" * 12] * 3, ended=False, cuts=list(range(40)), block=1, limit=3)
@example(lines=[b"a" * 12, b"", b"b", b"a" * 12], ended=True, cuts=[12, 13, 14], block=4, limit=3)
@example(lines=[b"ab", b"a" * 12, b"a" * 12, b"ab"], ended=True, cuts=[3, 16], block=3, limit=2)
def test_every_slicing_gives_each_line_once(
    lines: list[bytes], ended: bool, cuts: list[int], block: int, limit: int
) -> None:
    data = b"\n".join(lines) + b"\n" * ended
    expected = [(at, line if len(line) <= limit else None) for at, line in whole_lines(data)]
    assert sliced_lines(data, cuts, block, limit) == expected


@given(
    texts=st.lists(st.text(max_size=12) | st.none(), max_size=10),
    line_end=st.sampled_from([b"\n", b"\r\n"]),
    ended=st.booleans(),
    cuts=st.lists(st.integers(1, 400), max_size=8),
    block=st.integers(1, 60),
    limit=st.integers(25, 60),
)
def test_jsonl_slices_give_each_record_once(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str | None],
    line_end: bytes,
    ended: bool,
    cuts: list[int],
    block: int,
    limit: int,
) -> None:
    """A text of None stands for a blank line; texts may make their lines overlong."""
    encoded = [
        b" " if text is None else json.dumps({"text": text, "n": 1}).encode() for text in texts
    ]
    data = line_end.join(encoded) + line_end * ended
    path = tmp_path_factory.getbasetemp() / "slices.jsonl"
    path.write_bytes(data)
    file = InputFile(0, str(path), "jsonl", None, len(data), 0)
    config = PackConfig(max_length=8, max_line_bytes=limit)
    edges = [0, *sorted(cut for cut in set(cuts) if cut < len(data)), None]
    good, bad = [], []
    with patch.object(byte_streams, "BLOCK_BYTES", block):
        for start, stop in pairwise(edges):
            part = Slice(0, start, stop, 0)
            for records in JsonlReader().read(file, part, Shape("text", {"text": "text"}), config):
                assert records.texts is not None
                good += zip(records.positions.tolist(), records.texts, strict=True)
                bad += [(record.position, record.reason) for record in records.bad]
    filled = [(at, line) for at, line in whole_lines(data) if line.strip()]
    assert good == [(at, json.loads(line)["text"]) for at, line in filled if len(line) <= limit]
    too_long = f"the line is longer than {limit} bytes"
    assert bad == [(at, too_long) for at, line in filled if len(line) > limit]


ODD_TEXTS = ["plain", "two\nlines", "naïve", "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg", "𝄞", "end\r"]


@pytest.mark.parametrize("unit_bytes", ["1", "7", "40", "1k", None])
def test_unit_size_changes_no_document(folder: Path, unit_bytes: str | None) -> None:
    texts = [text * n for n in (1, 7) for text in ODD_TEXTS]
    data = b"".join(json.dumps({"text": t}, ensure_ascii=False).encode() + b"\n" for t in texts)
    (folder / "a.jsonl").write_bytes(data)
    manifest = pack("a.jsonl", "-l", 16, *(["--unit-bytes", unit_bytes] if unit_bytes else []))
    assert recover_texts("out") == texts
    if unit_bytes == "1":
        assert len(manifest["units"]) > len(texts)


def test_positions_are_the_byte_offsets_of_lines(folder: Path) -> None:
    data = '\n{"text": "é"}\r\n\n  {"text": "b"}\n{"text": "c"}'.encode()
    (folder / "a.jsonl").write_bytes(data)
    pack("a.jsonl", "-l", 8)
    starts = [position for _, position in recover_documents("out")]
    assert [data[at:].split(b"\n")[0].strip() for at in starts] == [
        '{"text": "é"}'.encode(), b'{"text": "b"}', b'{"text": "c"}',
    ]  # fmt: skip
    assert recover_texts("out") == ["é", "b", "c"]


def test_separators_of_unicode_do_not_split_lines(folder: Path) -> None:
    text = "a\u2028b\u2029c\u0085d"
    (folder / "a.jsonl").write_text(f'{{"text": "{text}"}}\n', encoding="utf-8")
    assert pack("a.jsonl", "-l", 32)["documents"] == 1
    assert recover_texts("out") == [text]


def test_blank_lines_are_skipped(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(b'\n\n{"text":"a"}\n \t\r\n{"text":"b"}\n\n')
    manifest = pack("a.jsonl", "-l", 8)
    assert (manifest["documents"], manifest["empty_documents"]) == (2, 0)
    assert recover_texts("out") == ["a", "b"]


def test_other_fields_are_ignored(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(
        b'{"id": 1, "meta": {"text": "no", "list": [1, null, {}]}, "text": "yes"}\n'
        b'{"text": "also", "id": "seven", "score": 1e400}\n'
    )
    pack("a.jsonl", "-l", 16)
    assert recover_texts("out") == ["yes", "also"]


def test_text_field_names_another_field(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(b'{"text": 7, "the body": "yes"}\n')
    pack("a.jsonl", "-l", 8, "--text-field", "the body")
    assert recover_texts("out") == ["yes"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "a.JSONL"])
def test_names_of_json_lines(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b'{"text": "a"}')
    pack(name, "-l", 8)
    assert recover_texts("out") == ["a"]


def test_empty_texts_are_counted_and_not_packed(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(b'{"text": ""}\n{"text": "a"}\n{"text": ""}\n')
    manifest = pack("a.jsonl", "-l", 8)
    assert (manifest["documents"], manifest["empty_documents"]) == (1, 2)
    assert recover_texts("out") == ["a"]
