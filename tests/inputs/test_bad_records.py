"""Bad records, by the command line: one line that says where and what, one that helps.

Nothing that looks finished is ever left behind, and nothing is lost without a line of its own.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from altered import altered, unaltered
from support import (
    COMPRESSORS,
    assert_error,
    check_directory,
    jsonl,
    line_limit,
    pack,
    packer,
    packer_process,
    recover_texts,
    succeeds,
)

from packer_cli.errors import DataError
from packer_cli.inputs import byte_streams
from packer_cli.inputs.formats import reader_for
from packer_cli.options.options import PackConfig
from packer_cli.options.shapes import Shape
from packer_cli.records import InputFile

pytestmark = pytest.mark.usefixtures("folder")
QUIET = ("-l", 16, "-t", "bytes", "-q")
OPTIONS = (*QUIET, "-o", "out")
GOOD = b'{"text": "good"}\n'

# id: (the line, where it stands after two good lines, what is said of it); no line may hold a
# line end, as the time in the header of gzip now and then does
BAD_LINES = {
    "cut": (b'{"text": "a', "not valid JSON: Unterminated string at character 10 of the line"),
    "no comma": (b'{"text": "a" "b": 1}', "not valid JSON: Expecting ',' delimiter at char"),
    "control character": (b'{"text": "a\tb"}', "not valid JSON: Invalid control character"),
    "NaN": (b'{"text": NaN}', "not valid JSON: NaN is not a JSON value"),
    "nested": (b'{"text": "a", "x": ' + b"[" * 100_000 + b"}", "JSON nested too deeply"),
    "not UTF-8": (b'{"text": "caf\xe9"}', "invalid UTF-8 at byte 13 of the line: 0xe9"),
    "surrogate": (rb'{"text": "a\ud800b"}', "a string with a lone surrogate, which is not valid"),
    "no field": (b'{"txt": "a", "id": 3}', "no field 'text'; fields found: txt, id"),
    "number": (b'{"text": 3}', "Expected `str`, got `int` - at `$.text`"),
    "null": (b'{"text": null}', "Expected `str`, got `null` - at `$.text`"),
    "a string": (b'"text"', "Expected `object`, got `str`"),
    "a null": (b"null", "Expected `object`, got `null`"),
    "an array": (b'[{"text": "a"}]', "a JSON array, expected one object per line"),
    "an open object": (b"{", "an object over several lines, expected one object per line"),
    "too long": (b'{"text": "%s"}' % (b"x" * 200_000), "the line is longer than 150000 bytes"),
    "compressed": (gzip.compress(b"x", mtime=0)[:9], "compressed or other data, not JSON"),
    "byte order mark": (b'\xef\xbb\xbf{"text": "a"}', "not valid JSON: Unexpected UTF-8 BOM"),
}  # fmt: skip


@pytest.mark.parametrize("case", ["cut", "not UTF-8", "number", "too long", "compressed"])
def test_a_bad_line_ends_the_run(case: str) -> None:
    line, reason = BAD_LINES[case]
    Path("a.jsonl").write_bytes(GOOD + GOOD + line + b"\n" + GOOD)
    with line_limit(150_000):
        result = packer("pack", "a.jsonl", *OPTIONS)
    assert_error(result, 1, f"a.jsonl, line 3 (byte 34): {reason}")
    assert not Path("out").exists()


def rejected(directory: str = "out") -> list[dict[str, Any]]:
    lines = Path(directory, "rejected.jsonl").read_bytes().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("unit_bytes", [100, 1 << 30])
def test_bad_lines_are_skipped_into_a_file_of_their_own(unit_bytes: int) -> None:
    data, expected = b"", []
    for i, (line, reason) in enumerate(BAD_LINES.values()):
        data += jsonl(f"good {i}")
        expected.append((len(data), reason.replace("150000", "30000")))
        # thousands of units would show nothing that hundreds do not
        data += line.replace(b"[" * 5, b"[").replace(b"x" * 5, b"x") + b"\n"
    Path("a.jsonl").write_bytes(data)
    options = ["-l", 16, "--on-error", "skip"]
    with line_limit(30_000):
        manifest = pack("a.jsonl", *options, "--unit-bytes", unit_bytes)
    assert manifest["rejected_records"] == len(expected)
    assert manifest["inputs"][0]["rejected_records"] == len(expected)
    assert recover_texts("out") == [f"good {i}" for i in range(len(expected))]
    lines = sorted(rejected(), key=lambda line: line["position"])
    assert [list(line) for line in lines] == [["file", "position", "reason"]] * len(lines)
    assert [(Path(line["file"]).name, line["position"]) for line in lines] == [
        ("a.jsonl", position) for position, _ in expected
    ]
    for line, (_, reason) in zip(lines, expected, strict=True):
        assert line["reason"].replace("\n", "\\n").startswith(reason)


ARRAY = b'[{"text": "good"},\n '
# id: (what follows a good record, where, what is said of it); a run that skips goes on after these
BAD_RECORDS = {
    "trailing comma": (b"]", 20, "no record before the end of the array, after a comma"),
    "NaN": (b'{"text": NaN, "x": NaN}]', 20, "not valid JSON: NaN is not a JSON value"),
    "not UTF-8": (b'{"text": "caf\xe9"}]', 20, "invalid UTF-8 at byte 13 of the record: 0xe9"),
    "line end": (b'{"text": "a\nb"}]', 20, "not valid JSON: Invalid control character at char"),
    "no field": (b'{"txt": 1}]', 20, "no field 'text'; fields found: txt"),
    "number": (b'{"text": 3}, {"text": "b"}]', 20, "Expected `str`, got `int` - at `$.text`"),
    "a string": (b'"]"]', 20, "Expected `object`, got `str`"),
    "an array": (b'[{"text": "a"}]]', 20, "Expected `object`, got `array`"),
    "long": (b'{"text": "%s"}]' % (b"x" * 99), 20, "the record is longer than 50 bytes"),
}
# …and after these, where the next record is cannot be told
NOT_CLOSED = "the record that begins here, or the array, is not closed"
DAMAGE = {
    "open record": (b'{"text": "a"', 20, NOT_CLOSED),
    "cut after a comma": (b"", 20, "the file ends before its array does, expected a record or ]"),
    "quote": (b'{"text": "a"b"}]', 20, NOT_CLOSED),
    "brace": (b'{"text": "b"}}', 33, "more after the end of the array, expected one array"),
    "more": (b'{"text": "b"}] x', 35, "more after the end of the array, expected one array"),
}


@pytest.mark.parametrize("case", BAD_RECORDS | DAMAGE)
def test_bad_records_of_an_array(case: str) -> None:
    end, place, reason = (BAD_RECORDS | DAMAGE)[case]
    Path("a.json").write_bytes(ARRAY + end)
    command = ("pack", "a.json", *OPTIONS)
    line = (ARRAY + end)[:place].count(b"\n") + 1
    with line_limit(50):
        assert_error(packer(*command), 1, f"a.json, line {line} (byte {place}): {reason}")
        assert not Path("out").exists()
        skipped = packer(*command, "--on-error", "skip")
    if case in DAMAGE:
        assert_error(skipped, 1, f"(byte {place}): {reason}")
        return
    assert skipped.exit_code == 0, skipped.stderr
    assert check_directory("out")["rejected_records"] == 1
    assert recover_texts("out") == (["good", "b"] if b'"b"' in end else ["good"])
    (one,) = rejected()
    assert (Path(one["file"]).name, one["position"]) == ("a.json", place)
    assert one["reason"].startswith(reason)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_what_is_no_number_in_a_field_that_nothing_uses(name: str) -> None:
    lines = [
        b'{"text": "a", "score": NaN}',
        b'{"x": [-Infinity, {"y": Infinity}], "text": "NaN, \\"NaN"}',
        b'{"text": "b", "x": NaN, "y": 1e999}',
    ]
    data = b"\n".join(lines) if name == "a.jsonl" else b"[" + b",".join(lines) + b"]"
    Path(name).write_bytes(data)
    assert pack(name, "-l", 16)["rejected_records"] == 0
    assert recover_texts("out") == ["a", 'NaN, "NaN', "b"]


def test_a_bad_first_record_can_be_skipped() -> None:
    Path("a.jsonl").write_bytes(b'{"id": 1}\n[]\n' + GOOD)
    assert pack("a.jsonl", "-l", 16, "--on-error", "skip")["rejected_records"] == 2
    assert recover_texts("out") == ["good"]
    Path("a.jsonl").write_bytes(GOOD)
    assert pack("a.jsonl", "-l", 16, "--on-error", "skip", "--overwrite")["rejected_records"] == 0
    assert not Path("out/rejected.jsonl").exists()


def stream(table: Any, **how: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, **how)
    return bytes(sink.getvalue().to_pybytes())


STREAM = stream(pa.table({"text": ["a" * 50, "b" * 50, "c" * 50]}), max_chunksize=1)


SKIP = ("--on-error", "skip")
GIT_LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
# one raw block in a frame whose header asks for a window of 256 MiB
WIDE_FRAME = b"\x28\xb5\x2f\xfd\0\x90" + (len(GOOD) << 3 | 1).to_bytes(3, "little") + GOOD
UNREADABLE = "no records in 1 input file that can be read"
# (file, its content, options, what is said, what of the tip)
SAID: list[tuple[str, bytes, tuple[str, ...], str, str]] = [
    ("a.jsonl", b"", (), "a.jsonl: no records in 1 input file", "check the paths"),
    ("a.jsonl", b'{"text": ""}\n' * 2, (), "nothing to pack: 2 empty, 0 dropped and 0 rej", ""),
    ("a.jsonl", b'{"input_ids": [1], "attention_mask": [0]}\n', (), "nothing to pack: 1 empty", ""),
    ("a.jsonl", b'{"body": [], "id": 1}\n', (),
     "fit none of: messages, conversations, prompt+completion, instruction+output, text, "
     "input_ids, traces, nodes, prompt_ids+completion_ids, calls, schema_version+steps; fields "
     "found: body, id",
     "--text-field"),
    ("a.json", b'{"version": 1, "pages": [{"body": "a"}]}\n', (),
     "holds the records in .pages[]", "jq -c '.pages[]' FILE > FILE.jsonl"),
    ("a.jsonl", b'{"text": 1}\n' * 3, SKIP,
     "nothing to pack: 0 empty, 0 dropped and 3 rejected records, no tokens; the first rejected, "
     "a.jsonl, line 1 (byte 0): ", ""),
    ("a.jsonl", b"oops\n" * 3, SKIP, UNREADABLE, "--on-error skip"),
    ("a.jsonl", jsonl("x" * 1000), (),
     "a.jsonl, line 1 (byte 0): the line is longer than 100 bytes", "cut it into parts"),
    ("a.jsonl", jsonl("x" * 1000), SKIP, UNREADABLE, ""),
    ("a.jsonl", b'[{"text": "a"}]', (), "a.jsonl, line 1 (byte 0): a JSON array, expected one",
     "name it FILE.json or give --input-format json"),
    ("a.json", b'{\n  "text": "a"\n}\n', (), "line 1 (byte 0): an object over several lines",
     "jq -c . FILE"),
    *((f"a.{form}", gzip.compress(GOOD, mtime=0), (), f"a.{form}: is gzip data, expected",
       "let its name end in .gz; decompress what goes to stdin")
      for form in ("jsonl", "csv", "txt")),
    ("a.parquet", gzip.compress(GOOD, mtime=0), (), "not a readable parquet file; it is gzip data",
     "let its name end in .gz"),
    *((f"a.{form}", GIT_LFS, (), "is a Git LFS pointer, not the file", "git lfs pull")
      for form in ("jsonl", "json", "csv", "txt", "jsonl.gz", "txt.zst", "parquet", "arrow")),
    ("a.jsonl.zst", WIDE_FRAME, (), "zstd window is larger than 128 MiB", "zstd -d --long=31 "),
    ("a.jsonl.gz", gzip.compress(GOOD, mtime=0) + b"more", (), "not valid gzip data: Error -3",
     "fetch or"),
    ("a.jsonl.gz", b"\x1f\x8c" + GOOD, (), "not valid gzip data: Error -3", "fetch or write"),
    ("a.jsonl.gz", gzip.compress(GOOD, mtime=0)[:-9], (), "the gzip data ends too early",
     "fetch or write"),
    ("a.json", b'{"v": 1, "data": [{"text": "a"}]}', (), "holds the records in .data[], expected",
     "jq -c '.data[]' FILE"),
    ("a.jsonl", b'{"a b": {"train": [{"question": "q", "answer": "a"}]}}', (),
     """holds the records in ."a b".train[]""", """jq -c '."a b".train[]' FILE"""),
    ("a.json", b'{"1": {"text": "a"}, "2": {"text": "b"}}', (), "holds the records in .[]",
     "jq -c '.[]' FILE"),
    ("a.json", GOOD[:-1] + b" ,\n" + GOOD, (), "line 1 (byte 0): a comma after the object",
     "sed 's/,[[:space:]]*$//' FILE"),
    ("a.jsonl", GOOD[:-1] + b", " + GOOD, (), "several objects on one line", "| jq -c '.[]'"),
    ("a.jsonl", GOOD[:-1] + GOOD, (), "several objects on one line", "jq -c . FILE > FILE.jsonl"),
    ("a.jsonl", GOOD.decode().encode("utf-16-le"), (), "(byte 0): compressed or other data",
     "iconv -f UTF-16 -t UTF-8 FILE > FILE.jsonl"),
    ("a.jsonl", jsonl("y" * 99) * 2, SKIP,
     "nothing to pack: 0 empty, 0 dropped and 2 rejected records", ""),
    ("a.json", b'{"data": [\n{"text": "a"}]}', (), "(byte 0): an object over several lines",
     "'.NAME[]' FILE"),
    ("a.jsonl", b"{}\n", (), "schema_version+steps; fields found: none", "--text-field"),
    # other formats
    ("a.txt", b"good\ncaf\xe9\n", (),
     "a.txt, line 2 (byte 5): invalid UTF-8 at byte 3 of the line", "iconv"),
    ("a.csv", b"a,b\n1,2\n", (), "text; fields found: a, b", "--text-field"),
    ("a.csv", b"text,b\n1\n", (), "a.csv, line 2 (byte 7): 1 field, the header has 2", "fix"),
    ("a.csv", b'text,b\n"1\n2', (),
     "a.csv, line 2 (byte 7): not valid CSV: unexpected end of data", "close the quote"),
    ("a.csv", b"input_ids\n1\n", (), "output, text; fields found: input_ids", ""),
    # an open quote takes in every record that follows, up to the end or to the limit of a field
    *(("a.csv", b'text,b\nok,1\n"%s,2\n' % quote + b"good,3\n" * 30_000, options,
       "line 3 (byte 12): not valid CSV", "close the quote")
      for quote, options in ((b"wide", ()), (b"wide", SKIP), (b"open", SKIP))),
    ("a.parquet", b"", (), "a.parquet: not a readable parquet file: Parquet file size is 0", ""),
    ("a.parquet", b"PAR1 no PAR1", (), "a.parquet: not a readable parquet file", "fetch or write"),
    ("a.arrow", b"", (), "no end marker of Arrow", ""),
    ("a.arrow", b"ARROW1xxxx", (), "a.arrow: not a readable arrow file", ""),
    ("a.arrow", b"something else", (), "no end marker of Arrow", ""),
    ("a.arrow", b"z" * 9 + b"\xff" * 4 + bytes(4), (), "not a readable arrow", ""),
    *(("a.arrow", STREAM[:-size], (), "cut short", "") for size in (1, 8, 9, 100, 400)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "data", "options", "message", "tip"), SAID)
def test_what_is_said(
    name: str, data: bytes, options: tuple[str, ...], message: str, tip: str
) -> None:
    Path(name).write_bytes(data)
    block, limit = 64 if b"xx" in data else 4 << 20, 1 << 20
    if b"xx" in data or b"yy" in data:
        limit = 100
    elif b"wide" in data:
        limit = 150_000
    with patch.object(byte_streams, "BLOCK_BYTES", block), line_limit(limit):
        result = packer("pack", name, *OPTIONS, *options)
    assert_error(result, 1, message)
    assert tip in result.stderr.splitlines()[1]
    assert not Path("out").exists()


def test_an_error_of_the_real_script_is_two_lines_and_debug_adds_a_traceback() -> None:
    Path("a.jsonl").write_bytes(GOOD + b"{oops\n")
    result = packer_process("pack", "a.jsonl", *OPTIONS)
    assert (result.returncode, result.stdout) == (1, b"")
    expected = (
        "error: a.jsonl, line 2 (byte 17): not valid JSON: Expecting property name enclosed in "
        "double quotes at character 2 of the line\n"
        "tip: fix the line, or use --on-error skip\n"
    )
    assert result.stderr.decode() == expected
    debugged = packer("pack", "a.jsonl", *OPTIONS, "--debug")
    assert debugged.exit_code == 1
    assert debugged.stderr.startswith("Traceback (most recent call last):")
    assert debugged.stderr.endswith(expected)


# --- arrays, from everywhere


def test_arrays_by_stdin_url_and_option_and_their_updates(folder: Path) -> None:
    texts = ["plain", 'quo"te', "}], [{", "two\nlines", "naïve \u2028 𝄞"]
    array = json.dumps([{"text": text} for text in texts], indent=4)
    Path("a.json").write_text(array)
    Path("a.ndjson").write_text(array)
    for data in (array.encode(), b"\xef\xbb\xbf" + jsonl(*texts)):
        done = unaltered("pack", "-", *OPTIONS, "--overwrite", stdin=data)
        assert done.returncode == 0, done.stderr
        assert recover_texts("out") == texts
        succeeds("verify", "out")
    for name in (f"file://{folder}/a.json", "a.ndjson"):
        pack(name, "-l", 16, "--unit-bytes", 50, "--input-format", "json", "--overwrite")
        assert recover_texts("out") == texts
    Path("b.json").write_bytes(jsonl("b"))
    pack("a.json", "b.json", "-l", 16, "--overwrite")
    succeeds("verify", "out", "--against-inputs", "--sample", "5")
    Path("a.json").write_text(json.dumps([{"text": text} for text in texts[:2]]))
    assert packer("verify", "out", "--against-inputs").exit_code == 1
    manifest = pack("a.json", "b.json", "-l", 16, "--add")
    assert sorted(recover_texts("out")) == sorted([*texts[:2], "b"])
    assert [one["documents"] for one in manifest["inputs"]] == [2, 1]
    succeeds("tokenize", "a.json", "-t", "bytes", "-q", "-o", "tokens")
    succeeds("verify", "tokens", "--against-inputs", "--sample", "all")
    succeeds("plan", "a.json", "-l", "16", "-t", "bytes")


# Files


@pytest.mark.parametrize("ending", COMPRESSORS)
def test_members_that_are_empty_and_content_that_has_another_name(ending: str) -> None:
    """As for `datasets`; the padding is that of tapes, and of downloads in blocks."""
    parts = [b"", jsonl("one"), b"", b"", jsonl("two"), b""]
    Path(f"0.jsonl.{ending}").write_bytes(b"".join(map(COMPRESSORS[ending], parts)))
    Path(f"a.jsonl.{ending}").write_bytes(jsonl("naïve"))
    other = "gz" if ending == "xz" else "xz"
    Path(f"b.jsonl.{ending}").write_bytes(COMPRESSORS[other](jsonl("other")) + bytes(100_000))
    padded = COMPRESSORS["gz"](jsonl("tape")) + bytes(512)
    Path("c.jsonl.gz").write_bytes(padded * 2)
    pack(*(f"{name}.jsonl.{ending}" for name in "0ab"), "c.jsonl.gz", "-l", 16)
    assert recover_texts("out") == ["one", "two", "naïve", "other", "tape", "tape"]


def test_a_footer_of_parquet_that_is_damaged_anywhere() -> None:
    """pyarrow aborts its process if the metadata is asked for a chunk of some of these."""
    pq.write_table(pa.table({"text": ["a", "b"], "id": [1, 2]}), "a.parquet", row_group_size=1)
    data = Path("a.parquet").read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    reader, config = reader_for("parquet"), PackConfig(max_length=16)
    shape = Shape("text", {"text": "text"})
    outcomes = set[str]()
    for place in range(footer, footer + 400):
        damaged = data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :]
        Path("a.parquet").write_bytes(damaged)
        file = InputFile(0, "a.parquet", "parquet", None, len(data), place)
        try:
            for part in reader.split(file, 1):
                for _ in reader.read(file, part, shape, config):
                    outcomes.add("read")
        except DataError as error:
            outcomes.add(error.message.partition(":")[0])
    assert outcomes == {"read", "a.parquet"}


def test_a_page_of_parquet_is_compared_with_its_checksum() -> None:
    table = pa.table({"text": ["the text"]})
    how: dict[str, Any] = {"use_dictionary": False, "compression": "none"}
    pq.write_table(table, "a.parquet", write_page_checksum=True, write_statistics=False, **how)
    data = Path("a.parquet").read_bytes()
    assert data.count(b"the text") == 1
    Path("a.parquet").write_bytes(data.replace(b"the text", b"the next"))
    message = "a.parquet: not a readable parquet file: could not verify page integrity"
    assert_error(packer("pack", "a.parquet", *OPTIONS), 1, message)


def test_offsets_of_arrow_that_lead_nowhere() -> None:
    """Arrow reads such a file without a word; what goes by its offsets would read anywhere."""

    def lists(values: Any, offsets: list[int]) -> Any:
        edges = pa.py_buffer(np.array(offsets, np.int32))
        kind = pa.list_(values.type)
        return pa.Array.from_buffers(kind, len(offsets) - 1, [None, edges], children=[values])

    offsets = pa.py_buffer(np.array([0, 1, -9, 2], np.int32))
    texts = pa.StringArray.from_buffers(3, offsets, pa.py_buffer(b"ab"))
    ids = pa.array(np.arange(100, dtype=np.int32))
    mask = pa.array((np.arange(100) < 99).astype(np.int8))
    wrong: list[dict[str, Any]] = [{"text": texts}]
    wrong += [
        {"input_ids": lists(ids, edges), "attention_mask": lists(mask, edges)}
        for edges in ([0, 80, 20, 100], [0, 300, 100], [0, 100, 60])
    ]
    for columns in wrong:
        batch = pa.RecordBatch.from_arrays([*columns.values()], [*columns])
        with pa.ipc.new_file("a.arrow", batch.schema) as writer:
            writer.write_batch(batch)
        for command in (
            ("pack", "-l", 64),
            ("pack", "-l", 64, "--on-error", "skip"),
            ("tokenize",),
        ):
            result = packer(*command, "a.arrow", "-t", "bytes", "-q", "-o", "out")
            assert_error(result, 1, "a.arrow: not a readable arrow file: ")


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """A world-readable directory, visited without the rights of root."""
    import packer_cli.run.pipeline  # noqa: F401 root's own modules may be out of nobody's reach

    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o777)  # noqa: S103 nobody writes here too
        was = os.geteuid()
        try:
            if was == 0:
                os.seteuid(65534)
            yield Path(name)
        finally:
            os.seteuid(was)


def test_what_may_not_be_read_or_written(as_nobody: Path) -> None:
    os.chdir(as_nobody)
    Path("a.jsonl").write_bytes(GOOD)
    for folder in ("data/inner", "locked/tok", "kept"):
        Path(folder).mkdir(parents=True)
    Path("data/a.jsonl").write_bytes(GOOD)
    Path("data/b.jsonl").write_bytes(GOOD)
    for name in ("data/b.jsonl", "data/inner", "locked"):
        Path(name).chmod(0)
    Path("kept").chmod(0o555)
    plain = ("-t", "bytes", "-o", "out")
    for command, message in (
        (("pack", "data/b.jsonl", *plain), "data/b.jsonl: cannot read: Permission denied"),
        (("pack", "data", *plain), "data/inner: cannot read: Permission denied"),
        (
            ("pack", "a.jsonl", "-t", "bytes", "-o", "kept/out"),
            "kept/out: cannot write: Permission",
        ),
        (("pack", "a.jsonl", "-t", "bytes", "-o", "kept/new/out"), "kept/new: cannot write: Perm"),
        (("pack", "a.jsonl", "-t", "bytes", "-o", "locked/out"), "locked/out: cannot write: Perm"),
        (("pack", "a.jsonl", "-t", "locked"), "locked/tokenizer.json: cannot read: Permission"),
    ):
        result = packer(*command, "-l", 16, "-q")
        assert_error(result, 1, f"error: {message}")
    assert result.stderr.endswith("ls -ld locked\n")  # what is there
    assert_error(packer("stats", "locked/tok"), 1, "locked/tok: cannot read: Permission denied")


def test_a_file_that_fails_while_it_is_read() -> None:
    result = packer("pack", "/proc/self/mem", "--input-format", "text", *OPTIONS)
    assert_error(result, 1, "/proc/self/mem: cannot read: Input/output error")


def grow() -> None:
    with open("a.jsonl", "ab") as file:  # in one step: the input is hashed meanwhile
        file.write(GOOD)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (grow, "a.jsonl: changed while it was read (340 bytes, now 357)"),
        # and is not called bad JSON
        (lambda: os.truncate("a.jsonl", 200), "a.jsonl: changed while it was read (340 bytes, now"),
        (lambda: os.unlink("b.jsonl"), "b.jsonl: cannot read: No such file or directory"),
    ],
)
def test_a_file_that_changes_once_the_first_documents_are_encoded(
    monkeypatch: pytest.MonkeyPatch, action: Callable[[], None], message: str
) -> None:
    from packer_cli.tokenization import encoding

    encode, pending = encoding.token_batch, [action]

    def meddling(*arguments: Any) -> Any:
        if pending:
            pending.pop()()
        return encode(*arguments)

    monkeypatch.setattr(byte_streams, "BLOCK_BYTES", 64)
    monkeypatch.setattr(encoding, "token_batch", meddling)
    Path("a.jsonl").write_bytes(GOOD * 20)
    Path("b.jsonl").write_bytes(GOOD)
    assert_error(packer("pack", "a.jsonl", "b.jsonl", *OPTIONS, "--workers", 1), 1, message)
    assert not Path("out").exists()


def test_an_arrow_file_cut_while_it_is_read() -> None:
    table = pa.table({"text": ["x" * 10_000] * 1000})
    with pa.ipc.new_file("a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    script = (
        "import os\n"
        "from packer_cli.cli import app as cli\n"
        "from packer_cli.tokenization import encoding\n"
        "encode = encoding.token_batch\n"
        "def cut(*given): os.truncate('a.arrow', 4096); return encode(*given)\n"
        "encoding.token_batch = cut; cli.main()"
    )
    done = altered(script, "pack", "a.arrow", "-l", "8", "-t", "bytes", "-q")
    assert done.returncode == 1  # not SIGBUS
    assert done.stderr.startswith("error: a.arrow: ")
