"""`--on-error skip` with files that cannot be decoded: left out whole, counted and listed."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import COMPRESSORS, assert_error, contents, jsonl, packer, recover_texts, succeeds

from packer_cli.inputs import byte_streams

OPTIONS = ["-t", "bytes", "-q", "--on-error", "skip"]
TEXTS = [f"{i} " + "x" * (i * 7 % 90) for i in range(200)]


def table(form: str) -> bytes:
    columns, out = pa.table({"text": TEXTS}), io.BytesIO()
    if form == "parquet":
        pq.write_table(columns, out, row_group_size=50, compression="zstd")
    else:
        with pa.ipc.new_stream(out, columns.schema) as writer:
            writer.write_table(columns)
    return out.getvalue()


def spoilt(data: bytes, place: float) -> bytes:
    at = int(len(data) * place)
    return data[:at] + bytes(byte ^ 0xA5 for byte in data[at : at + 40]) + data[at + 40 :]


COLUMNAR = ("parquet", "arrow")


def damaged() -> dict[str, bytes]:
    files = {}
    for ending, compress in COMPRESSORS.items():
        whole = compress(jsonl(*TEXTS))
        other = b"\xff\0another thing"  # neither compressed nor text
        files |= {f"cut.jsonl.{ending}": whole[:-1], f"other.jsonl.{ending}": other}
        files |= {f"garbage-after.jsonl.{ending}": whole + b"garbage after the end"}
    for ending in ("gz", "zst"):
        whole = COMPRESSORS[ending](jsonl(*TEXTS))
        files |= {f"cut-in-a-member.jsonl.{ending}": whole + whole[: len(whole) // 2]}
        files |= {f"spoilt.jsonl.{ending}": spoilt(whole, 0.5), f"empty.json.{ending}": b""}
    parquet, arrow = table("parquet"), table("arrow")
    files |= {"cut.parquet": parquet[:-9], "spoilt.parquet": spoilt(parquet, 0.4)}
    files |= {"cut.arrow": arrow[:-9]}
    return files


@pytest.fixture
def whole(folder: Path) -> list[str]:
    Path("a.jsonl").write_bytes(jsonl(*TEXTS[:90]))
    Path("z.jsonl").write_bytes(jsonl(*TEXTS[90:]) + b"{\n")
    return ["a.jsonl", "z.jsonl"]


@pytest.mark.parametrize("name", damaged())
def test_a_damaged_file_ends_a_run_or_is_left_out(whole: list[str], name: str) -> None:
    Path(name).write_bytes(damaged()[name])
    fails = packer("pack", "a.jsonl", name, "-l", 64, "-t", "bytes", "-q", "-o", "fails")
    said = "not valid " if name.startswith("garbage") else ""
    said = "data ends too early; the file was cut short" if "cut" in name else said
    assert_error(fails, 1, f"{name}: ", "" if name.endswith(COLUMNAR) else said)
    assert "or leave the file out, with --on-error skip" in fails.stderr
    done = succeeds("pack", name, *whole, "-l", 64, *OPTIONS, "-o", "out")
    warning = f"packer: warning: out: leaves out 1 input that cannot be decoded: {name}; "
    assert done.stderr.startswith(warning)
    assert sorted(recover_texts("out")) == sorted(TEXTS)
    lines = [json.loads(line) for line in Path("out/rejected.jsonl").read_bytes().splitlines()]
    (line,) = (line for line in lines if line["position"] is None)
    assert Path(line["file"]).name == name
    assert name not in line["reason"]
    stats = json.loads(packer("stats", "out", "--json").stdout)
    assert (stats["rejected_records"], stats["rejected_files"]) == (2, 1)
    assert "damaged" in packer("stats", "out").stdout
    succeeds("verify", "out", "-q", "--against-inputs", "--sample", "all")


def test_the_bytes_depend_on_nothing_else(
    whole: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on how much of a damaged file is read at a time, nor on who packs it."""
    for name, data in damaged().items():
        Path(name).write_bytes(data)
    command = ["pack", *whole, *damaged(), "-l", 64, *OPTIONS, "-o", "first"]
    succeeds(*command, "--workers", 1)
    assert sorted(recover_texts("first")) == sorted(TEXTS)
    for workers, block in ((1, 100), (3, 1000)):
        monkeypatch.setattr(byte_streams, "BLOCK_BYTES", block)
        command[-1] = f"by-{workers}"
        succeeds(*command, "--workers", workers)
        assert contents(command[-1]) == contents("first")


@pytest.mark.parametrize("kind", ["pack", "tokenize"])
def test_a_damaged_file_of_conversations(folder: Path, kind: str) -> None:
    """Which are read in processes of their own."""
    lines = b""
    for i in range(50):
        turns = [("user", f"{i}?"), ("assistant", "x" * i)]
        chat = {"messages": [{"role": role, "content": text} for role, text in turns]}
        lines += json.dumps(chat).encode() + b"\n"
    names = [f"{i}.jsonl.gz" for i in range(5)]
    for name in names:
        Path(name).write_bytes(COMPRESSORS["gz"](lines)[:-9])
    Path("b.jsonl").write_bytes(lines)
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    Path("t.jinja").write_text(template)
    options = ["--chat-template", "t.jinja", *OPTIONS, *(["-l", 64] if kind == "pack" else [])]
    for workers in (1, 2):
        out = f"by-{workers}"
        succeeds(kind, *names, "b.jsonl", *options, "--workers", workers, "-o", out)
        assert json.loads(packer("stats", out, "--json").stdout)["rejected_files"] == 5
    assert contents("by-1") == contents("by-2")


def test_a_file_that_is_left_out_counts_as_a_bad_record(whole: list[str]) -> None:
    Path("b.jsonl.gz").write_bytes(COMPRESSORS["gz"](jsonl("b"))[:-9])
    command: list[Any] = [
        "pack", *whole, "b.jsonl.gz", "-l", 64, *OPTIONS, "-o", "out", "--max-errors"
    ]  # fmt: skip
    assert_error(packer(*command, 1), 1, "2 records are bad so far; --max-errors is 1")
    succeeds(*command, 2)
    planned = json.loads(packer("plan", *command[1:-3], "--json").stdout)
    rows = json.loads(packer("stats", "out", "--json").stdout)["rows"]
    assert planned["outcomes"][0]["rows"] == rows
    Path("b.jsonl.gz").write_bytes(COMPRESSORS["gz"](jsonl("b")))
    succeeds(*command, 2, "--add")
    assert sorted(recover_texts("out")) == sorted([*TEXTS, "b"])
    assert json.loads(packer("stats", "out", "--json").stdout)["rejected_files"] == 0


def test_a_damaged_file_that_several_units_read_ends_the_run(whole: list[str]) -> None:
    Path("b.parquet").write_bytes(spoilt(table("parquet"), 0.4))
    command = ["pack", "b.parquet", *whole, "-l", 64, *OPTIONS, "-o", "out", "--unit-bytes", 1000]
    assert_error(packer(*command), 1, "b.parquet: ", "only files that one work unit reads")


@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_flipped_bytes_are_errors_of_the_data(whole: list[str], form: str) -> None:
    """Whatever Arrow makes of them: it has raised SystemError."""
    data, name = table(form), f"flipped.{form}"
    for place in range(0, len(data), len(data) // 12):
        Path(name).write_bytes(data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :])
        done = packer("pack", name, "-l", 64, "-t", "bytes", "-q", "--overwrite", "-o", "out")
        if done.exit_code:
            assert_error(done, 1, f"error: {name}")
            assert done.stderr.count(name) == 1
            assert len(done.stderr) < 2000
