"""Every reader of texts: each record once and at its place, however its file is cut and compressed.

A form is one way in which files hold the same texts. Formats of token ids: test_tokens.py
and test_readers_indexed.py; what is wrong with records of JSON: test_bad_records.py.
"""

from __future__ import annotations

import base64
import bz2
import csv
import gzip
import io
import json
import lzma
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import (
    COMPRESSORS,
    assert_error,
    jsonl,
    line_limit,
    pack,
    packer,
    recover_documents,
    recover_texts,
    succeeds,
)

from packer_cli.inputs import byte_streams
from packer_cli.inputs.formats import reader_for
from packer_cli.options.options import PackConfig
from packer_cli.options.shapes import Shape
from packer_cli.records import InputFile, Slice

pytestmark = pytest.mark.usefixtures("folder")
QUIET = ("-l", 16, "-t", "bytes", "-q", "-o", "out")
MARK = b"\xef\xbb\xbf"
TEXTS = [
    "plain", 'with "quotes", commas', "}], [{", "a\\", '\\"', "naïve \u2028 \x85 \x0b 𝄞", "", "[1]",
    "tab\there", "two\nlines\r\n\n\nthree",
    *(f"row {i} " + "x" * (i % 7) for i in range(40)), "x" * 60,
]  # fmt: skip
FLAT = [text.replace("\r\n", " ").replace("\n", " ") for text in TEXTS]
TEXT_SHAPE = Shape("text", {"text": "text"})


class Form(NamedTuple):
    """`write` gives the bytes of a file of texts, and the position of each."""

    name: str
    write: Callable[[list[str]], tuple[bytes, list[int]]]
    texts: list[str] = TEXTS
    slices: bool = True  # whether units read parts of it


def end_to_end(
    records: Iterable[str], begin: str = "", between: str = "\n", end: str = ""
) -> tuple[bytes, list[int]]:
    data, positions = begin.encode(), []
    for number, record in enumerate(records):
        data += between.encode() * bool(number)
        positions.append(len(data))
        data += record.encode()
    return data + end.encode(), positions


def lines(end: str = "\n", *, last: bool = True, blanks: str = "") -> Any:
    def write(texts: list[str]) -> tuple[bytes, list[int]]:
        records = [json.dumps({"id": [1, None, {}], "text": one}, ensure_ascii=False)
                   for one in texts]  # fmt: skip
        return end_to_end(records, blanks, end + blanks, end * last)

    return write


def array(begin: str, between: str, end: str, **how: Any) -> Any:
    def write(texts: list[str]) -> tuple[bytes, list[int]]:
        records = [{"id": i, "meta": {"tags": [[], {}, ["]", '"']]}, "text": text}
                   for i, text in enumerate(texts)]  # fmt: skip
        return end_to_end((json.dumps(one, **how) for one in records), begin, between, end)

    return write


def delimited(delimiter: str, end: str) -> Any:
    def row(*cells: object) -> str:
        buffer = io.StringIO(newline="")
        csv.writer(buffer, delimiter=delimiter).writerow(cells)
        return buffer.getvalue().removesuffix("\r\n")

    def write(texts: list[str]) -> tuple[bytes, list[int]]:
        rows = [row(i, text) for i, text in enumerate(texts)]
        return end_to_end(rows, row("id", "text") + end, end, end)

    return write


def parquet(kind: Any = None, **options: Any) -> Any:
    def write(texts: list[str]) -> tuple[bytes, list[int]]:
        column = pa.array(texts, kind) if kind else pa.array(texts).dictionary_encode()
        stream = io.BytesIO()
        pq.write_table(pa.table({"id": range(len(texts)), "text": column}), stream, **options)
        return stream.getvalue(), [*range(len(texts))]

    return write


def parquet_of_views(texts: list[str]) -> tuple[bytes, list[int]]:
    stream = io.BytesIO()
    write_views(pa.table({"id": range(len(texts)), "text": texts}), pa.string_view(), stream)
    return stream.getvalue(), [*range(len(texts))]


def write_views(table: Any, kind: Any, file: Any) -> None:
    """Write Parquet whose last column is of a type of views, which a note says: the values are as
    those of the type without. Older versions of Arrow read such files, but do not write them.
    """
    noted = table.schema.set(table.num_columns - 1, pa.field(table.column_names[-1], kind))
    with pq.ParquetWriter(file, table.schema, store_schema=False) as writer:
        writer.write_table(table, row_group_size=8)
        writer.add_key_value_metadata({"ARROW:schema": base64.b64encode(noted.serialize())})


def arrow(new: Any = pa.ipc.new_file, kind: Any = None, **options: Any) -> Any:
    def write(texts: list[str]) -> tuple[bytes, list[int]]:
        column = pa.array(texts, kind or pa.string())
        if kind is None and new is pa.ipc.new_file:
            column, options["unify_dictionaries"] = column.dictionary_encode(), True
        table, stream = pa.table({"id": range(len(texts)), "text": column}), io.BytesIO()
        how = pa.ipc.IpcWriteOptions(**options)
        with new(stream, table.schema, options=how) as writer:
            writer.write_table(table, max_chunksize=7)
        return stream.getvalue(), [*range(len(texts))]

    return write


FORMS = {
    "lines": Form("a.jsonl", lines()),
    "lines that end with CR LF, and blank ones": Form("a.ndjson", lines("\r\n", blanks=" \t\r\n")),
    "lines in .json, without the last end": Form("a.json", lines(last=False)),
    "an array in one line": Form("a.json", array("[", ", ", "]"), slices=False),
    "an array with a record on each line": Form(
        "a.json", array("[\n", ",\n", "\n]\n"), slices=False
    ),
    "a pretty array": Form(
        "a.json", array(" \r\n[ ", "\r\n,  ", "]\r\n", indent="\t"), slices=False
    ),
    "plain text": Form("a.txt", end_to_end, FLAT, False),
    "csv": Form("a.csv", delimited(",", "\n"), slices=False),
    "csv with CR": Form("a.csv", delimited(",", "\r"), slices=False),
    "csv with blank lines": Form("a.csv", delimited(",", "\r\n\n\r\n"), slices=False),
    "parquet": Form("a.parquet", parquet(pa.string(), row_group_size=8)),
    "parquet of a dictionary": Form("a.parquet", parquet(row_group_size=8)),
    "parquet of views": Form("a.parquet", parquet_of_views),
    "arrow file": Form("a.arrow", arrow(kind=pa.string()), slices=False),
    "arrow stream": Form("a.arrow", arrow(pa.ipc.new_stream), slices=False),
    "arrow file of a dictionary": Form("a.ipc", arrow(), slices=False),
    "arrow stream of views": Form(
        "a.arrow", arrow(pa.ipc.new_stream, pa.string_view()), slices=False
    ),
    "arrow file, lz4 inside": Form(
        "a.arrow", arrow(kind=pa.string(), compression="lz4"), slices=False
    ),
}
COLUMNAR = ("a.parquet", "a.arrow", "a.ipc")
MARKED = [name for name, form in FORMS.items() if form.name not in COLUMNAR]


def written(form: Form) -> list[int]:
    """Its file, and where each text that is not empty is."""
    data, positions = form.write(form.texts)
    Path(form.name).write_bytes(data)
    return [at for at, text in zip(positions, form.texts, strict=True) if text]


@pytest.mark.parametrize("name", FORMS)
def test_units_of_any_size_give_each_record_once(folder: Path, name: str) -> None:
    form, units = FORMS[name], []
    positions = written(form)
    for size in (20, "1G"):
        manifest = pack(form.name, "-l", 32, "--unit-bytes", size, "--overwrite", "--workers", 2)
        assert recover_texts("out") == [text for text in form.texts if text]
        assert [place for _, place in recover_documents("out")] == positions
        assert (manifest["documents"], manifest["empty_documents"]) == (len(positions), 1)
        units.append(len(manifest["units"]))
    succeeds("verify", "out", "--against-inputs", "--sample", "9")
    assert units[0] > units[1] == 1 if form.slices else units == [1, 1]


@pytest.mark.parametrize(
    "name",
    ["plain text", "csv", "parquet", "parquet of a dictionary", "parquet of views", "arrow file",
     "arrow file of a dictionary", "arrow stream of views"],
)  # fmt: skip
def test_a_record_longer_than_the_limit_is_bad(folder: Path, name: str) -> None:
    """Records of JSON: where any slices of them are read."""
    form = FORMS[name]
    positions = written(form)
    with line_limit(59):
        assert_error(packer("pack", form.name, *QUIET), 1, "is longer than 59 bytes")
    if form.name != "a.csv":  # where a record ends is unknown there
        with line_limit(59):
            manifest = pack(form.name, "-l", 16, "--on-error", "skip")
        assert manifest["rejected_records"] == 1
        assert [place for _, place in recover_documents("out")] == positions[:-1]


@pytest.mark.parametrize("ending", ["", "gz"])
@pytest.mark.parametrize("name", MARKED)
def test_the_mark_of_utf8_is_no_part_of_a_file(folder: Path, name: str, ending: str) -> None:
    form = FORMS[name]
    data, positions = form.write(form.texts)
    path = f"{form.name}.{ending}" if ending else form.name
    Path(path).write_bytes(COMPRESSORS[ending](MARK + data) if ending else MARK + data)
    manifest = pack(path, "-l", 16, "--unit-bytes", 300)
    assert recover_texts("out") == [text for text in form.texts if text]
    first, *others = (place for _, place in recover_documents("out"))
    assert first in (positions[0], positions[0] + len(MARK))  # the first line begins with it
    assert others[-1] == positions[-1] + len(MARK)
    assert len(manifest["units"]) == 1 or (form.slices and not ending)


@pytest.mark.parametrize(
    ("name", "encoding"),
    [("lines", "UTF-16LE"), ("lines", "UTF-16BE"), ("lines", "UTF-32LE"), ("lines", "UTF-32BE"),
     ("a pretty array", "UTF-16LE"), ("plain text", "UTF-16LE"), ("csv", "UTF-16LE")],
)  # fmt: skip
def test_other_encodings_say_how_to_convert(folder: Path, name: str, encoding: str) -> None:
    form = FORMS[name]
    data = MARK + form.write(form.texts)[0]
    Path(form.name).write_bytes(data.decode().encode(encoding))
    for skip in ((), ("--on-error", "skip")):
        result = packer("pack", form.name, *QUIET, *skip, "--unit-bytes", 20)
        message = f"{form.name}: begins with the byte order mark of {encoding}, expected UTF-8"
        assert_error(result, 1, message)
        assert f"tip: convert it: iconv -f {encoding[:6]} -t UTF-8 FILE > NEW_FILE" in result.stderr


@pytest.mark.parametrize("mark", [b"", MARK], ids=["", "mark"])
@pytest.mark.parametrize("form", ["a.jsonl \n \n", "a.jsonl ", "a.json [ ]", "a.json "])
def test_a_file_without_records(folder: Path, form: str, mark: bytes) -> None:
    name, _, content = form.partition(" ")
    (folder / name).write_bytes(mark + content.encode())
    (folder / "b.jsonl").write_bytes(jsonl("b"))
    assert_error(packer("pack", name, *QUIET), 1, f"{name}: no records in 1 input file")
    manifest = pack(name, "b.jsonl", "-l", 16)
    assert [one["documents"] for one in manifest["inputs"]] == [0, 1]
    assert manifest["empty_documents"] == 0


def read(
    name: str, file_format: str, data: bytes, slices: list[Slice] | None = None, **options: Any
) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """([(position, text)], [(position, reason)]) of a file, or of slices of it."""
    path = Path(name)
    path.write_bytes(data)
    file = InputFile(0, str(path), file_format, None, len(data), 0)
    reader, config = reader_for(file_format), PackConfig(max_length=8, **options)
    good, bad = [], []
    for part in slices or [Slice(0, 0, None, 0)]:
        for records in reader.read(file, part, TEXT_SHAPE, config):
            good += zip(records.positions.tolist(), records.texts or [], strict=True)
            bad += [(one.position, one.reason) for one in records.bad]
    return good, bad


pieces = st.lists(
    st.sampled_from(["a", '"', "\\", "[", "]", "{", "}", ",", " ", "é", "\n"]), max_size=8
)
blanks = st.sampled_from(["", " ", "\n", "\r\n\t "])


@given(
    texts=st.lists(pieces.map("".join), max_size=8),
    gaps=st.lists(blanks, min_size=18, max_size=18),
    mark=st.booleans(),
    block=st.integers(1, 40),
    limit=st.integers(14, 40),
)
def test_an_array_is_cut_into_its_records(
    texts: list[str], gaps: list[str], mark: bool, block: int, limit: int
) -> None:
    data, expected, sizes = MARK * mark + gaps[0].encode() + b"[" + gaps[1].encode(), [], {}
    for number, text in enumerate(texts):
        data += b"," * bool(number) + gaps[2 * number].encode()
        expected.append((len(data), text))
        record = json.dumps({"text": text}, ensure_ascii=False) + gaps[2 * number + 1]
        sizes[len(data)] = len(record.encode())
        data += record.encode()
    data += b"]" + gaps[-1].encode()
    with patch.object(byte_streams, "BLOCK_BYTES", block), line_limit(limit):
        good, bad = read("a.json", "json", data)
    assert good == [(place, text) for place, text in expected if sizes[place] <= limit]
    too_long = f"the record is longer than {limit} bytes"
    assert bad == [(place, too_long) for place, _ in expected if sizes[place] > limit]


@given(
    texts=st.lists(st.text(max_size=12) | st.none(), max_size=10),
    line_end=st.sampled_from([b"\n", b"\r\n"]),
    mark=st.booleans(),
    ended=st.booleans(),
    cuts=st.sets(st.integers(1, 400), max_size=8),
    block=st.integers(1, 60),
    limit=st.integers(25, 60),
)
def test_every_slicing_of_lines(
    texts: list[str | None], line_end: bytes, mark: bool, ended: bool, cuts: set[int],
    block: int, limit: int,
) -> None:  # fmt: skip
    """A text of None stands for a blank line; texts may make their lines overlong."""
    limit += 1000 * mark  # it may count or not
    encoded = [b" " if text is None else json.dumps({"text": text}).encode() for text in texts]
    data = MARK * mark + line_end.join(encoded) + line_end * ended
    edges = [0, *sorted(cut for cut in cuts if cut < len(data))]
    slices = [Slice(0, a, b, 0) for a, b in zip(edges, [*edges[1:], None], strict=True)]
    with patch.object(byte_streams, "BLOCK_BYTES", block), line_limit(limit):
        good, bad = read("a.jsonl", "jsonl", data, slices)
    filled, at = [], 0
    for line in data.split(b"\n"):
        if content := line.removeprefix(MARK * (at == 0)).strip():
            filled.append((at, json.loads(content)["text"], len(line)))
        at += len(line) + 1
    assert good == [(at, text) for at, text, size in filled if size <= limit]
    too_long = f"the line is longer than {limit} bytes"
    assert bad == [(at, too_long) for at, _, size in filled if size > limit]


@given(
    paragraphs=st.lists(
        st.lists(st.text("aé", min_size=1, max_size=9), min_size=1, max_size=4), max_size=6
    ),
    gap=st.sampled_from(["\n\n", "\n \n", "\n\n\n\n"]),
    ended=st.booleans(),
    block=st.integers(1, 30),
    limit=st.integers(1, 30),
)
def test_paragraphs_are_the_same_in_any_blocks(
    paragraphs: list[list[str]], gap: str, ended: bool, block: int, limit: int
) -> None:
    texts = ["\n".join(one) for one in paragraphs]
    data, positions = end_to_end(texts, "", gap, "\n" * ended)
    with patch.object(byte_streams, "BLOCK_BYTES", block), line_limit(limit):
        good, bad = read("a.txt", "text", data, sample_by="paragraph")
    expected = list(zip(positions, texts, strict=True))
    assert good == [(at, text) for at, text in expected if len(text.encode()) <= limit]
    assert [at for at, _ in bad] == [at for at, text in expected if len(text.encode()) > limit]


TEXT = b"one\r\n\n\r\ntwo\nthree\n \n\nfour"


@pytest.mark.parametrize(
    ("sample_by", "documents", "empty"),
    [
        ("line", {0: "one", 8: "two", 12: "three", 18: " ", 21: "four"}, 3),
        ("paragraph", {0: "one", 8: "two\nthree", 21: "four"}, 0),
        ("document", {0: TEXT.decode()}, 0),
    ],
)
@pytest.mark.parametrize("mark", [b"", MARK], ids=["", "mark"])
def test_documents_of_plain_text(
    folder: Path, sample_by: str, documents: dict[int, str], empty: int, mark: bytes
) -> None:
    (folder / "a.txt").write_bytes(mark + TEXT)
    (folder / "b.txt").write_bytes(mark)  # not one line
    manifest = pack("a.txt", "b.txt", "-l", 16, "--sample-by", sample_by)
    places = [0, *(place + len(mark) for place in list(documents)[1:])]
    assert [position for _, position in recover_documents("out")] == places
    assert recover_texts("out") == list(documents.values())
    assert manifest["empty_documents"] == empty


@pytest.mark.parametrize("block", [1, 3, 17, 1000])
def test_csv_is_the_same_in_any_blocks(folder: Path, block: int) -> None:
    data, positions = delimited(",", "\n")(TEXTS)
    data += b'short\n6,"x"y\n7,last\n'
    with patch.object(byte_streams, "BLOCK_BYTES", block):
        good, bad = read("a.csv", "csv", data)
    assert good == [*zip(positions, TEXTS, strict=True), (len(data) - 7, "last")]
    assert bad == [
        (data.index(b"short"), "1 field, the header has 2"),
        (data.index(b'6,"x"y'), "not valid CSV: ',' expected after '\"'"),
    ]


@pytest.mark.parametrize(
    ("name", "data", "field"),
    [
        ("a.csv", b"id,body\n1,yes\n\n2,also\n", "body"),
        ("a.csv", b"\n\r\ntext,b\nyes,1\nalso,2\n", "text"),  # blank lines before the header
        ("a.csv", MARK + b"\n\r\ntext,b\nyes,1\nalso,2\n", "text"),
        ("a.jsonl", b'{"text": 7, "the body": "yes"}\n{"the body": "also"}\n', "the body"),
    ],
)
def test_fields_by_name(folder: Path, name: str, data: bytes, field: str) -> None:
    (folder / name).write_bytes(data)
    pack(name, "-l", 8, "--text-field", field)
    assert recover_texts("out") == ["yes", "also"]


# --- columns


def test_nulls_name_row_group_and_row_and_can_be_skipped(folder: Path) -> None:
    column = [None if i % 10 == 5 else f"row {i}" for i in range(50)]
    table = pa.table({"text": column})
    pq.write_table(table, "a.parquet", row_group_size=8)
    message = "a.parquet, row group 0, row 5 (row 5 of the file): the text is null"
    assert_error(packer("pack", "a.parquet", *QUIET), 1, message)
    pack("a.parquet", "-l", 32, "--unit-bytes", 1, "--on-error", "skip")
    assert recover_texts("out") == [text for text in column if text]
    rejected = map(json.loads, Path("out/rejected.jsonl").read_text().splitlines())
    assert sorted(tuple(one.values()) for one in rejected) == [
        (str(folder / "a.parquet"), i, "the text is null") for i in range(5, 50, 10)
    ]
    values = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0], pa.int8()), pa.array(["a", None]))
    with pa.ipc.new_file("a.arrow", pa.schema({"text": values.type})) as writer:
        writer.write_table(pa.table({"text": values}))
    assert_error(packer("pack", "a.arrow", *QUIET, "--overwrite"), 1, "a.arrow, row 1")
    pack("a.arrow", "-l", 8, "--on-error", "skip", "--overwrite")
    assert recover_texts("out") == ["a", "a"]


def spoilt_texts() -> Any:
    """Three texts, of which the second is not UTF-8."""
    offsets, data = np.array([0, 2, 6, 7], np.int32), b"okcaf\xe9!"
    return pa.StringArray.from_buffers(3, pa.py_buffer(offsets), pa.py_buffer(data))


def nested(kind: str, texts: Any) -> Any:
    """The texts within other values, one in each."""
    if kind == "dictionary":
        return pa.DictionaryArray.from_arrays(pa.array([0, 1, 2], pa.int8()), texts)
    if kind == "list of structs":
        turns = pa.StructArray.from_arrays([texts], ["content"])
        return pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), turns)
    return texts


TEXT_KINDS = ("text", "dictionary")
OTHER_KINDS = (*TEXT_KINDS, "list of structs")


@pytest.mark.parametrize(
    ("kind", "used"),
    [(kind, True) for kind in TEXT_KINDS] + [(kind, False) for kind in OTHER_KINDS],
)
@pytest.mark.parametrize("form", ["parquet", "arrow file", "arrow stream"])
def test_invalid_utf8_of_a_column_is_a_bad_record_where_the_column_is_used(
    folder: Path, form: str, kind: str, used: bool
) -> None:
    column, name = nested(kind, spoilt_texts()), FORMS[form].name
    table = pa.table({"text": column} if used else {"text": ["ok", "good", "!"], "more": column})
    if form == "parquet":
        pq.write_table(table, name)
    else:
        new = pa.ipc.new_file if form == "arrow file" else pa.ipc.new_stream
        with new(name, table.schema) as writer:
            writer.write_table(table)
    if not used:
        pack(name, "-l", 8)
        assert recover_texts("out") == ["ok", "good", "!"]
        return
    result = packer("pack", name, *QUIET)
    if (form, kind) == ("parquet", "dictionary"):  # which Arrow decodes as a whole
        assert_error(result, 1, "a.parquet: not a readable parquet file: Invalid UTF8")
        return
    where = "row group 0, row 1 (row 1 of the file)" if form == "parquet" else "row 1"
    assert_error(result, 1, f"{name}, {where}: invalid UTF-8 at byte 3 of the text")
    manifest = pack(name, "-l", 8, "--on-error", "skip")
    assert (manifest["rejected_records"], manifest.get("rejected_files", 0)) == (1, 0)
    assert recover_texts("out") == ["ok", "!"]
    (line,) = map(json.loads, Path("out/rejected.jsonl").read_text().splitlines())
    assert (Path(line["file"]).name, line["position"]) == (name, 1)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"body": ["a"], "id": [1]},
            "text, input_ids, traces, nodes, prompt_ids+completion_ids, calls, "
            "schema_version+steps; fields found: body, id",
        ),
        ({"text": [1]}, "column 'text' has type int64, expected a string"),
        ({"text": [b"a", b"\xff"]}, "row 1 (row 1 of the file): the text is not UTF-8"),
        ({"input_ids": [1]}, "column 'input_ids' has type int64, expected a list of integers"),
        ({"input_ids": [[1.5]]}, "column 'input_ids' has type list<element: double>"),
        ([("text", ["a"]), ("text", ["b"])], "a.parquet: 2 columns 'text'; columns found: text, t"),
    ],
)
def test_columns_of_the_wrong_name_or_type(folder: Path, table: Any, message: str) -> None:
    names, columns = zip(*(table.items() if isinstance(table, dict) else table), strict=True)
    pq.write_table(pa.table([pa.array(one) for one in columns], names=names), "a.parquet")
    assert_error(packer("pack", "a.parquet", *QUIET), 1, "a.parquet", message)


def test_a_column_name_with_a_dot_and_a_file_without_it(folder: Path) -> None:
    table = pa.table({"a": ["no"], "a.b": ["yes"], "a.b.c": ["no"]})
    pq.write_table(table, folder / "a.parquet")
    pack("a.parquet", "-l", 8, "--text-field", "a.b")
    assert recover_texts("out") == ["yes"]
    pq.write_table(pa.table({"body": ["a"], "id": [1]}), folder / "b.parquet")
    pq.write_table(pa.table({"text": ["a"]}), folder / "c.parquet")
    result = packer("pack", "c.parquet", "b.parquet", *QUIET, "--overwrite")
    assert_error(result, 1, "b.parquet: the records' fields fit none of", "found: body, id")


def test_long_lists_are_bad_records(folder: Path) -> None:
    ids = pa.array([[1, 2], [1, 2, 3], [], [4]], pa.list_(pa.int32()))
    pq.write_table(pa.table({"input_ids": ids}), folder / "a.parquet")
    message = "row 1 (row 1 of the file): input_ids is longer than 8 bytes"
    with line_limit(8):
        assert_error(packer("pack", "a.parquet", "-l", 4, "-q"), 1, message)
        pack("a.parquet", "-l", 4, "--on-error", "skip")
    assert [tokens.tolist() for tokens in recover_documents("out").values()] == [[1, 2], [4]]


def test_parquet_is_read_a_few_rows_at_a_time_and_opened_once_a_unit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["x" * (i % 5 * 50_000) for i in range(400)]
    pq.write_table(pa.table({"text": texts}), folder / "a.parquet")
    file, config = InputFile(0, "a.parquet", "parquet", None, 1, 0), PackConfig(max_length=8)
    read = reader_for("parquet").read(file, Slice(0, 0, None, 0), TEXT_SHAPE, config)
    batches = [records.texts or [] for records in read]
    assert [text for batch in batches for text in batch] == texts
    assert max(sum(map(len, batch)) for batch in batches) <= (4 << 20) + 200_000
    opened, whole = [], pq.ParquetFile
    (folder / "b.parquet").write_bytes(parquet(pa.string(), row_group_size=1)(TEXTS)[0])
    monkeypatch.setattr(pq, "ParquetFile", lambda *a, **k: opened.append(a) or whole(*a, **k))
    manifest = pack("b.parquet", "-l", 32, "--unit-bytes", 600)
    assert len(TEXTS) > len(manifest["units"]) > 2
    assert [len(unit["slices"]) for unit in manifest["units"]] == [1] * len(manifest["units"])
    assert len(opened) <= len(manifest["units"]) + 6  # its names, its footer, its first rows


@pytest.mark.parametrize("compression", ["xz", "bz2", "gzip"])
def test_streams_whose_blocks_end_anywhere_are_read_whole(compression: str) -> None:
    """An LZMA decoder may want no input and give nothing, where a block ends with its output."""
    compress = {"xz": lzma.compress, "bz2": bz2.compress, "gzip": gzip.compress}[compression]
    with patch.multiple(byte_streams, _STORED_BYTES=64, _PLAIN_BYTES=64):
        for size in range(1, 800):
            data = (b"0123456789" * 10 + random.Random(size).randbytes(60)) * 5
            stored = io.BytesIO(compress(data[:size]))
            assert b"".join(byte_streams._of_streams(stored, compression)) == data[:size]
