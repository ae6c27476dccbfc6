"""Bad records, by the command line: one line that says where and what, one that helps.

Nothing that looks finished is ever left behind, and nothing is lost without a line of its own.
"""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path
from unittest.mock import patch

import pytest
from support import (
    assert_error,
    jsonl,
    pack,
    packer,
    packer_process,
    packer_script,
    recover_texts,
)

from packer_cli.inputs import byte_streams
from packer_cli.inputs.json_mistakes import explain

pytestmark = pytest.mark.usefixtures("folder")
OPTIONS = ("-l", 16, "-t", "bytes", "-q", "-o", "out")
GOOD = b'{"text": "good"}\n'

# id: (the line, where it stands after two good lines, what is said of it); no line may hold a
# line end, as the time in the header of gzip now and then does
BAD_LINES = {
    "cut": (b'{"text": "a', "not valid JSON: Unterminated string at character 10 of the line"),
    "no comma": (b'{"text": "a" "b": 1}', "not valid JSON: Expecting ',' delimiter at char"),
    "two on a line": (b'{"text": "a"} {}', "not valid JSON: Extra data at character 15"),
    "control character": (b'{"text": "a\tb"}', "not valid JSON: Invalid control character"),
    "NaN": (b'{"text": NaN}', "not valid JSON: NaN is not a JSON value"),
    "number beside NaN": (b'{"x": NaN, "text": 3}', "field 'text' is an integer, expected a str"),
    "beside NaN, cut": (b'{"x": NaN, "text": "a', "not valid JSON: NaN is not a JSON value"),
    "nested": (b'{"text": "a", "x": ' + b"[" * 100_000 + b"}", "JSON nested too deeply"),
    "not UTF-8": (b'{"text": "caf\xe9"}', "invalid UTF-8 at byte 13 of the line: 0xe9"),
    "surrogate": (rb'{"text": "a\ud800b"}', "the lone surrogate \\ud800 in a string is not valid"),
    "no field": (b'{"txt": "a", "id": 3}', "no field 'text'; fields found: txt, id"),
    "no fields": (b"{}", "no field 'text'; fields found: none"),
    "line end in a name": (rb'{"a\nb": 1}', "no field 'text'; fields found: a\\nb"),
    "number": (b'{"text": 3}', "field 'text' is an integer, expected a string"),
    "fraction": (b'{"text": 0.5}', "field 'text' is a number, expected a string"),
    "true": (b'{"text": true}', "field 'text' is true or false, expected a string"),
    "list": (b'{"text": ["a"]}', "field 'text' is an array, expected a string"),
    "object": (b'{"text": {"a": 1}}', "field 'text' is an object, expected a string"),
    "null": (b'{"text": null}', "field 'text' is null, expected a string"),
    "a string": (b'"text"', "a string, expected one object per line"),
    "a null": (b"null", "null, expected one object per line"),
    "an array": (b'[{"text": "a"}]', "a JSON array, expected one object per line"),
    "an open object": (b"{", "an object over several lines, expected one object per line"),
    "too long": (b'{"text": "%s"}' % (b"x" * 200_000), "the line is longer than 150000 bytes"),
    "compressed": (gzip.compress(b"x", mtime=0)[:9], "compressed data, not JSON"),
    "byte order mark": (b'\xef\xbb\xbf{"text": "a"}', "a UTF-8 byte order mark"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_ends_the_run(folder: Path, case: str) -> None:
    line, reason = BAD_LINES[case]
    (folder / "a.jsonl").write_bytes(GOOD + GOOD + line + b"\n" + GOOD)
    result = packer("pack", "a.jsonl", *OPTIONS, "--max-line-bytes", 150_000)
    assert_error(result, 1, f"a.jsonl, line 3 (byte 34): {reason}")
    assert not Path("out").exists()


UNUSED_CONSTANTS = (
    b'{"text": "a", "score": NaN}\n{"x": [-Infinity, {"y": Infinity}], "text": "NaN, \\"NaN"}\n'
    b'{"text": "b"}\n'
)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_what_is_no_number_in_a_field_that_nothing_uses(folder: Path, name: str) -> None:
    data = UNUSED_CONSTANTS
    if name == "a.json":
        data = b"[" + data.strip().replace(b"\n", b",") + b"]"
    (folder / name).write_bytes(data)
    manifest = pack(name, "-l", 16)
    assert manifest["rejected_records"] == 0
    assert recover_texts("out") == ["a", 'NaN, "NaN', "b"]


def test_a_line_that_fails_but_once_is_a_bad_record_too() -> None:
    bad = explain(b'{"text": "a"}', 7, lambda line: None)
    assert (bad.position, bad.reason) == (7, "JSON nested too deeply")


@pytest.mark.parametrize("unit_bytes", [100, 1 << 30])
def test_bad_lines_are_skipped_into_a_file_of_their_own(folder: Path, unit_bytes: int) -> None:
    data, expected = b"", []
    for i, (line, reason) in enumerate(BAD_LINES.values()):
        data += jsonl(f"good {i}")
        expected.append((len(data), reason.replace("150000", "30000")))
        # thousands of units would show nothing that hundreds do not
        data += line.replace(b"[" * 5, b"[").replace(b"x" * 5, b"x") + b"\n"
    (folder / "a.jsonl").write_bytes(data)
    options = ["-l", 16, "--on-error", "skip", "--max-line-bytes", 30_000]
    manifest = pack("a.jsonl", *options, "--unit-bytes", unit_bytes)
    assert manifest["rejected_records"] == len(expected)
    assert manifest["inputs"][0]["rejected_records"] == len(expected)
    assert recover_texts("out") == [f"good {i}" for i in range(len(expected))]
    lines = [json.loads(line) for line in Path("out/rejected.jsonl").read_bytes().splitlines()]
    assert [list(line) for line in lines] == [["file", "position", "reason"]] * len(lines)
    assert [(line["file"], line["position"]) for line in lines] == [
        ("a.jsonl", position) for position, _ in expected
    ]
    for line, (_, reason) in zip(lines, expected, strict=True):
        assert line["reason"].replace("\n", "\\n").startswith(reason)


def test_rejections_are_the_same_for_any_number_of_workers(folder: Path) -> None:
    for name in ("a", "b", "c"):
        data = b"".join(GOOD + b'{"text": %d}\n' % i for i in range(50))
        (folder / f"{name}.jsonl").write_bytes(data)
    inputs = ["a.jsonl", "b.jsonl", "c.jsonl", "-l", 16, "--on-error", "skip", "--unit-bytes", 300]
    contents = set()
    for workers in (1, 4):
        manifest = pack(*inputs, "--workers", workers, "--overwrite")
        assert [one["rejected_records"] for one in manifest["inputs"]] == [50, 50, 50]
        contents.add(Path("out/rejected.jsonl").read_bytes())
    (content,) = contents
    files = [json.loads(line)["file"] for line in content.splitlines()]
    assert files == ["a.jsonl"] * 50 + ["b.jsonl"] * 50 + ["c.jsonl"] * 50


def test_no_rejected_file_without_bad_records(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(GOOD)
    assert pack("a.jsonl", "-l", 16, "--on-error", "skip")["rejected_records"] == 0
    assert not Path("out/rejected.jsonl").exists()


def test_a_bad_first_record_can_be_skipped(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(b'{"id": 1}\n[]\n' + GOOD)
    assert pack("a.jsonl", "-l", 16, "--on-error", "skip")["rejected_records"] == 2
    assert recover_texts("out") == ["good"]


def test_many_field_names_do_not_fill_the_screen(folder: Path) -> None:
    record = {f"name{i}": i for i in range(500)}
    (folder / "a.jsonl").write_text(json.dumps(record))
    result = packer("pack", "a.jsonl", *OPTIONS)
    assert_error(result, 1, "fields found: name0, name1,", "name19 and 480 more")


def test_a_field_name_that_json_would_escape(folder: Path) -> None:
    (folder / "a.jsonl").write_text(json.dumps({'a"b': "x"}))
    result = packer("pack", "a.jsonl", *OPTIONS, "--text-field", 'a"b')
    assert_error(result, 2, """'a"b' cannot be read from JSON""")


NOTHING = {
    "empty file": (b"", "a.jsonl: no records in 1 input file"),
    "blank lines": (b"\n \n\r\n", "a.jsonl: no records in 1 input file"),
    "empty texts": (b'{"text": ""}\n' * 2, "nothing to pack: 2 empty, 0 dropped and 0 rejected"),
    "empty ids": (b'{"input_ids": []}\n', "nothing to pack: 1 empty, 0 dropped and 0 rejected"),
    "all masked": (
        b'{"input_ids": [1], "attention_mask": [0]}\n',
        "nothing to pack: 1 empty, 0 dropped and 0 rejected",
    ),
    "another shape": (
        b'{"body": [], "id": 1}\n',
        "fit none of: messages, conversations, prompt+completion, instruction+output, text, "
        "chosen+rejected, input_ids; fields found: body, id",
    ),
}


@pytest.mark.parametrize("case", NOTHING)
def test_nothing_to_pack(folder: Path, case: str) -> None:
    data, message = NOTHING[case]
    (folder / "a.jsonl").write_bytes(data)
    assert_error(packer("pack", "a.jsonl", *OPTIONS), 1, message)
    assert not Path("out").exists()


def test_nothing_but_bad_records(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(GOOD.replace(b'"good"', b"1") * 3)
    result = packer("pack", "a.jsonl", *OPTIONS, "--on-error", "skip")
    assert_error(
        result, 1, "nothing to pack: 0 empty, 0 dropped and 3 rejected records, no tokens; "
        "the first rejected, a.jsonl, line 1 (byte 0): ",
    )  # fmt: skip


def test_nothing_but_lines_that_are_no_json(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(b"oops\n" * 3)
    result = packer("pack", "a.jsonl", *OPTIONS, "--on-error", "skip")
    assert_error(result, 1, "a.jsonl: no records in 1 input file that can be read")
    assert "--on-error skip" in result.stderr.splitlines()[1]


def test_a_file_that_is_one_line_too_long(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl("x" * 1000))
    options = ["-l", 64, "-t", "bytes", "-q", "--max-line-bytes", "100", "-o", "out"]
    with patch.object(byte_streams, "BLOCK_BYTES", 64):
        result = packer("pack", "a.jsonl", *options)
        assert_error(result, 1, "a.jsonl, line 1 (byte 0): the line is longer than 100 bytes")
        assert "--max-line-bytes" in result.stderr.splitlines()[1]
        result = packer("pack", "a.jsonl", *options, "--on-error", "skip")
        assert_error(result, 1, "a.jsonl: no records in 1 input file that can be read")


def test_an_endless_stream_of_bad_lines_is_not_waited_out(folder: Path) -> None:
    command = [packer_script(), "pack", "-", *map(str, OPTIONS), "--on-error", "skip"]
    with (
        subprocess.Popen(["yes", "oops"], stdout=subprocess.PIPE) as endless,
        subprocess.Popen(command, stdin=endless.stdout, stderr=subprocess.PIPE) as run,
    ):
        try:
            _, stderr = run.communicate(timeout=300)
        finally:
            run.kill()
            endless.kill()
    assert stderr.startswith(b"error: -: no records in 1 input file that can be read\n")


def test_several_files_without_records(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / f"{name}.jsonl").touch()
    result = packer("pack", "a.jsonl", "b.jsonl", *OPTIONS)
    assert_error(result, 1, "a.jsonl to b.jsonl: no records in 2 input files")


def test_an_error_of_the_real_script_is_two_lines(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(GOOD + b"{oops\n")
    result = packer_process("pack", "a.jsonl", *OPTIONS)
    assert (result.returncode, result.stdout) == (1, b"")
    assert result.stderr.decode() == (
        "error: a.jsonl, line 2 (byte 17): not valid JSON: Expecting property name enclosed in "
        "double quotes at character 2 of the line\n"
        "tip: mend the line, or use --on-error skip\n"
    )


def test_debug_adds_a_traceback(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(b"{oops\n")
    result = packer("pack", "a.jsonl", *OPTIONS, "--debug")
    assert result.exit_code == 1
    assert "Traceback (most recent call last):" in result.stderr
    assert result.stderr.splitlines()[-2].startswith("error: a.jsonl, line 1 (byte 0): not valid")
