"""JSON files that hold one array of records: the same documents as from JSON lines."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import (
    COMPRESSORS,
    assert_error,
    check_directory,
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
from packer_cli.inputs.json_array import JsonArrayReader
from packer_cli.records import InputFile, Slice

pytestmark = pytest.mark.usefixtures("folder")
QUIET = ("-l", 16, "-t", "bytes", "-q")
MARK = b"\xef\xbb\xbf"

TEXTS = [
    "plain",
    'quo"te',
    "}], [{",
    "a\\",
    '\\"',
    "two\nlines",
    "naïve \u2028 𝄞",
    "[1, 2]",
    "x" * 30,
]
RECORDS: list[dict[str, Any]] = [
    {"id": i, "meta": {"tags": [[], {}, ["]", '"']]}, "text": text} for i, text in enumerate(TEXTS)
]
WRITTEN = {
    "one line": json.dumps(RECORDS),
    "compact": json.dumps(RECORDS, separators=(",", ":"), ensure_ascii=False),
    "pretty": json.dumps(RECORDS, indent=4),
    "tabs": json.dumps(RECORDS, indent="\t").replace("\n", "\r\n"),
    "a record on each line": "[\n" + ",\n".join(map(json.dumps, RECORDS)) + "\n]\n",
    "commas first": " \n[" + "\n, ".join(map(json.dumps, RECORDS)) + "] \n\n",
}


@pytest.mark.parametrize("unit_bytes", ["1", "90", "1M"])
@pytest.mark.parametrize("mark", [b"", MARK], ids=["", "bom"])
@pytest.mark.parametrize("how", WRITTEN)
def test_an_array_gives_its_records(folder: Path, how: str, mark: bytes, unit_bytes: str) -> None:
    data = mark + WRITTEN[how].encode()
    (folder / "a.json").write_bytes(data)
    manifest = pack("a.json", "-l", 16, "--unit-bytes", unit_bytes)
    assert recover_texts("out") == TEXTS
    places = [position for _, position in recover_documents("out")]
    decoder = json.JSONDecoder()
    for place, record in zip(places, RECORDS, strict=True):  # positions are those of the records
        assert decoder.raw_decode(data[place:].decode())[0] == record
    if unit_bytes == "1":
        assert len(manifest["units"]) == len(RECORDS)


@pytest.mark.parametrize("ending", COMPRESSORS)
def test_a_compressed_array(folder: Path, ending: str) -> None:
    data = MARK + WRITTEN["pretty"].encode()
    (folder / f"a.json.{ending}").write_bytes(COMPRESSORS[ending](data))
    (folder / "a.json").write_bytes(data)
    manifest = pack(f"a.json.{ending}", "-l", 16, "--unit-bytes", 50)
    assert len(manifest["units"]) == 1
    places = list(recover_documents("out"))
    pack("a.json", "-l", 16, "--overwrite")
    assert places == list(recover_documents("out"))


@pytest.mark.parametrize("options", [(), ("--input-format", "json")])
@pytest.mark.parametrize("data", [WRITTEN["pretty"].encode(), MARK + jsonl(*TEXTS)])
def test_stdin_is_an_array_or_lines(folder: Path, data: bytes, options: tuple[str, ...]) -> None:
    done = packer_process("pack", "-", *QUIET, *options, "-o", "out", stdin=data)
    assert done.returncode == 0, done.stderr
    assert recover_texts("out") == TEXTS
    assert packer("show", "out", "0", "--json").exit_code == 0
    assert packer("verify", "out").exit_code == 0


def test_an_array_at_a_url(folder: Path) -> None:
    (folder / "a.json").write_text(WRITTEN["pretty"])
    pack(f"file://{folder}/a.json", "-l", 16, "--unit-bytes", 50)
    assert recover_texts("out") == TEXTS


@pytest.mark.parametrize("records", [
    [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "[,]"}]}],
    [{"prompt": "a", "completion": "b"}, {"prompt": "c}", "completion": "d"}],
    [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [4]}],
])  # fmt: skip
def test_every_shape_is_packed_as_from_lines(folder: Path, records: list[Any]) -> None:
    (folder / "a.json").write_text(json.dumps(records, indent=1))
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "t.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}"
        "{% endfor %}"
    )
    options = ("--chat-template", "t.jinja") if "messages" in records[0] else ()
    if "messages" in records[0]:
        options += ("--train-on", "all")
    rows = {}
    for name in ("a.json", "a.jsonl"):
        manifest = pack(name, "-l", 16, "--overwrite", *options)
        tokens = [
            [one.tolist() for one in recover_documents("out", column).values()]
            for column in ("input_ids", "labels")
        ]
        rows[name] = manifest["tokens"], manifest["trained_tokens"], tokens
    assert rows["a.json"] == rows["a.jsonl"]


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
    parts=st.integers(1, 12),
)
def test_every_slicing_gives_each_record_once(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str],
    gaps: list[str],
    mark: bool,
    block: int,
    limit: int,
    parts: int,
) -> None:
    data, expected = MARK * mark + gaps[0].encode() + b"[" + gaps[1].encode(), []
    sizes = {}
    for number, text in enumerate(texts):
        data += b"," * bool(number) + gaps[2 * number].encode()
        expected.append((len(data), text))
        record = json.dumps({"text": text}, ensure_ascii=False) + gaps[2 * number + 1]
        sizes[len(data)] = len(record.encode())
        data += record.encode()
    data += b"]" + gaps[-1].encode()
    path = tmp_path_factory.getbasetemp() / "slices.json"
    path.write_bytes(data)
    file = InputFile(0, str(path), "json", None, len(data), 0)
    config = PackConfig(max_length=8, max_line_bytes=limit)
    reader, good, bad = JsonArrayReader(), [], []
    with patch.object(byte_streams, "BLOCK_BYTES", block):
        edges = reader.edges(file, parts)
        assert edges[0] == 0
        assert len(edges) <= parts
        for start, stop in pairwise([*edges, None]):
            part = Slice(0, start or 0, stop, 0)
            for records in reader.read(file, part, Shape("text", {"text": "text"}), config):
                good += zip(records.positions.tolist(), records.texts or [], strict=True)
                bad += [(one.position, one.reason) for one in records.bad]
        for place, text in good:  # as packer verify reads single records
            part = Slice(0, place, place + 1, 0)
            read = list(reader.read(file, part, Shape("text", {"text": "text"}), config))
            assert [one for records in read for one in records.texts or []] == [text]
    assert good == [(place, text) for place, text in expected if sizes[place] <= limit]
    too_long = f"the record is longer than {limit} bytes"
    assert bad == [(place, too_long) for place, _ in expected if sizes[place] > limit]


GOOD = b'[{"text": "good"},\n '
# id: (what follows a good record, where, what is said of it); a run that skips goes on after these
BAD_RECORDS = {
    "trailing comma": (b"]", 20, "no record before the end of the array, after a comma"),
    "two commas": (b', {"text": "b"}]', 20, "no record before this comma"),
    "NaN": (b'{"text": NaN, "x": NaN}]', 20, "not valid JSON: NaN is not a JSON value"),
    "not UTF-8": (b'{"text": "caf\xe9"}]', 20, "invalid UTF-8 at byte 13 of the record: 0xe9"),
    "line end": (b'{"text": "a\nb"}]', 20, "not valid JSON: Invalid control character at char"),
    "no field": (b'{"txt": 1}]', 20, "no field 'text'; fields found: txt"),
    "number": (b'{"text": 3}, {"text": "b"}]', 20, "field 'text' is an integer, expected a string"),
    "a string": (b'"]"]', 20, "a string, expected an object"),
    "an array": (b'[{"text": "a"}]]', 20, "an array, expected an object"),
    "long": (b'{"text": "%s"}]' % (b"x" * 99), 20, "the record is longer than 50 bytes"),
}
# …and after these, where the next record is cannot be told
DAMAGE = {
    "open record": (
        b'{"text": "a"',
        20,
        "the record that begins here, or the array, is not closed",
    ),
    "open string": (
        b'{"text": "a}]',
        20,
        "the record that begins here, or the array, is not closed",
    ),
    "cut after a comma": (b"", 20, "the file ends before its array does, expected a record or ]"),
    "cut after a record": (
        b'{"text": "b"}',
        20,
        "the record that begins here, or the array, is not closed",
    ),
    "quote": (b'{"text": "a"b"}]', 20, "the record that begins here, or the array, is not closed"),
    "bracket": (b'{"text": "b"]]', 20, "not valid JSON: Expecting ',' delimiter at character 13"),
    "brace": (b'{"text": "b"}}', 33, "a closing brace, expected a comma or the end of the array"),
    "second array": (b'{"text": "b"}]\n[{"text": "c"}]', 35, "more after the end of the array"),
    "more": (b'{"text": "b"}] x', 35, "more after the end of the array, expected one array"),
}


def spoiled(folder: Path, end: bytes, *options: object) -> Any:
    (folder / "a.json").write_bytes(GOOD + end)
    return packer("pack", "a.json", *QUIET, "-o", "out", "--max-line-bytes", 50, *options)


@pytest.mark.parametrize("case", BAD_RECORDS | DAMAGE)
def test_a_bad_record_ends_the_run(folder: Path, case: str) -> None:
    end, place, reason = (BAD_RECORDS | DAMAGE)[case]
    line = (GOOD + end)[:place].count(b"\n") + 1
    result = spoiled(folder, end)
    assert_error(result, 1, f"a.json, line {line} (byte {place}): {reason}")
    assert not Path("out").exists()


@pytest.mark.parametrize("case", BAD_RECORDS)
def test_bad_records_are_skipped(folder: Path, case: str) -> None:
    end, place, reason = BAD_RECORDS[case]
    result = spoiled(folder, end, "--on-error", "skip")
    assert result.exit_code == 0, result.stderr
    assert check_directory("out")["rejected_records"] == 1
    assert recover_texts("out") == (["good", "b"] if b'"b"' in end else ["good"])
    (line,) = Path("out/rejected.jsonl").read_text().splitlines()
    rejected = json.loads(line)
    assert (rejected["file"], rejected["position"]) == ("a.json", place)
    assert rejected["reason"].startswith(reason)


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_never_skipped(folder: Path, case: str) -> None:
    end, place, reason = DAMAGE[case]
    assert_error(spoiled(folder, end, "--on-error", "skip"), 1, f"(byte {place}): {reason}")


@pytest.mark.parametrize("data", [b"[]", MARK + b" [\n]\n"])
def test_an_empty_array_has_no_records(folder: Path, data: bytes) -> None:
    (folder / "a.json").write_bytes(data)
    assert_error(packer("pack", "a.json", *QUIET), 1, "a.json: no records in 1 input file")
    (folder / "b.jsonl").write_bytes(jsonl("b"))
    manifest = pack("a.json", "b.jsonl", "-l", 16)
    assert recover_texts("out") == ["b"]
    assert [one["documents"] for one in manifest["inputs"]] == [0, 1]


def test_other_names_say_how_an_array_is_read(folder: Path) -> None:
    for name in ("a.jsonl", "a.ndjson"):
        (folder / name).write_text(WRITTEN["one line"])
        result = packer("pack", name, *QUIET)
        assert_error(result, 1, f"{name}, line 1 (byte 0): a JSON array, expected one object per")
        assert "name it FILE.json or give --input-format json" in result.stderr
        pack(name, "-l", 16, "--input-format", "json", "--overwrite")
        assert recover_texts("out") == TEXTS


@pytest.mark.parametrize(
    ("data", "message", "tip"),
    [
        ('{\n  "text": "a"\n}\n', "line 1 (byte 0): an object over several lines", "jq -c . FILE"),
        ('{"data": [\n{"text": "a"}]}', "(byte 0): an object over several", "'.NAME[]' FILE"),
        (
            json.dumps({"version": 1, "data": RECORDS}),
            "(byte 0): one object, with a list of objects in 'data'; expected a record on each",
            """jq -c '.["data"][]' FILE > FILE.jsonl""",
        ),
    ],
)
def test_other_json_says_how_to_convert_it(folder: Path, data: str, message: str, tip: str) -> None:
    (folder / "a.json").write_text(data)
    result = packer("pack", "a.json", *QUIET)
    assert_error(result, 1, "a.json, line 1", message)
    assert tip in result.stderr


def test_show_and_verify_find_records_of_an_array(folder: Path) -> None:
    (folder / "a.json").write_text(WRITTEN["pretty"])
    manifest = pack("a.json", "-l", 64, "--unit-bytes", 300)
    assert len(manifest["units"]) > 2
    shown = packer("show", "out", "0", "--json")
    (place, *_) = [position for _, position in recover_documents("out")]
    assert f'"position": {place}' in shown.stdout, shown.stdout
    for sample in ("all", "5"):
        done = packer("verify", "out", "--against-inputs", "--sample", sample)
        assert done.exit_code == 0, done.stderr + done.stdout
    (folder / "a.json").write_text(WRITTEN["pretty"].replace("plain", "plaIn"))
    assert packer("verify", "out", "--against-inputs").exit_code == 1


def test_an_array_is_updated_and_tokenized(folder: Path) -> None:
    (folder / "a.json").write_text(WRITTEN["pretty"])
    (folder / "b.json").write_bytes(jsonl("b"))
    pack("a.json", "b.json", "-l", 16)
    (folder / "a.json").write_text(json.dumps(RECORDS[:2]))
    (folder / "c.json").write_text(json.dumps(RECORDS[2:3]))
    manifest = pack("a.json", "b.json", "c.json", "-l", 16, "--update")
    assert sorted(recover_texts("out")) == sorted([*TEXTS[:3], "b"])
    assert [one["documents"] for one in manifest["inputs"]] == [2, 1, 1]
    done = packer("tokenize", "a.json", "c.json", "-t", "bytes", "-q", "-o", "tokens")
    assert done.exit_code == 0, done.stderr
    done = packer("verify", "tokens", "--against-inputs", "--sample", "all")
    assert done.exit_code == 0, done.stderr
    plan = packer("plan", "a.json", "-l", "16", "-t", "bytes")
    assert plan.exit_code == 0, plan.stderr
    shutil.rmtree("tokens")
