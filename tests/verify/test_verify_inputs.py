"""`packer verify --against-inputs`: documents of every shape and format, encoded once more."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny_tokenizers
from altered import unaltered
from forging import Result
from support import COMPRESSORS, jsonl, pack, packer
from verifying import TEXTS, assert_sound, changed, first, forge, problems

from packer_cli.inputs.delimited import CsvReader
from packer_cli.records import InputFile
from packer_cli.tokenization.engines import BytesEngine

pytestmark = pytest.mark.usefixtures("folder")


CHAT = "".join([
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}",
    "{% if add_generation_prompt %}<assistant>{% endif %}",
])  # fmt: skip
SHAPES: dict[str, tuple[list[dict[str, Any]], list[object]]] = {
    "text": ([{"text": text} for text in TEXTS], []),
    "another field": ([{"body": text} for text in TEXTS], ["--text-field", "body"]),
    "separator": ([{"text": text} for text in TEXTS], ["--separator", "\n", "--no-eos"]),
    "messages": (
        [{"messages": [{"role": "user", "content": f"q{i}"},
                       {"role": "assistant", "content": "a" * i}]} for i in range(1, 30)],
        [],
    ),
    "long messages": (
        [{"messages": [{"role": role, "content": str(i) * 5} for role in ("user", "assistant") * 3]}
         for i in range(9)],
        ["--overlong", "truncate-turns"],
    ),
    "messages cut": (
        [{"messages": [{"role": "user", "content": "q" * 50},
                       {"role": "assistant", "content": "a" * 50}]} for i in range(3)],
        ["--overlong", "split", "--force-split", "--keep-untrained"],
    ),
    "prompts": (
        [{"prompt": f"p{i} ", "completion": "c" * i} for i in range(9)], ["--label-shift", "pre"],
    ),
    "alpaca": (
        [{"instruction": "add", "input": str(i), "output": "o" * i} for i in range(9)],
        ["-l", 512],
    ),
    "tokens": (
        [{"input_ids": [1, 2, 3 + i], "labels": [-100, 2, 3 + i]} for i in range(9)], [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sample", ["all", "4"])
def test_every_shape_against_its_inputs(folder: Path, shape: str, sample: str) -> None:
    records, options = SHAPES[shape]
    (folder / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    tiny_tokenizers.save(
        folder / "tok", tiny_tokenizers.byte_level(), tokenizer_config={"eos_token": "</s>"}
    )
    (folder / "t.jinja").write_text(CHAT)
    template = ["--chat-template", "t.jinja"] if "messages" in shape else []
    result = packer(
        "pack", "a.jsonl", "-l", 64, "-t", "tok", *template, *options, "-q", "-o", "out"
    )
    assert result.exit_code == 0, result.stderr
    shutil.rmtree(folder / "tok")  # the directory has all that is needed
    (folder / "t.jinja").unlink()
    text = assert_sound("--against-inputs", "--sample", sample)
    documents = len(records) if sample == "all" else min(4, len(records))
    assert f"; {documents} documents of 1 input encoded again: the same" in text


def write_parquet(path: str, texts: list[str]) -> None:
    pq.write_table(pa.table({"text": texts}), path, row_group_size=3)


def write_arrow(path: str, texts: list[str]) -> None:
    table = pa.table({"text": texts})
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


FORMATS: dict[str, Callable[[str, list[str]], Any]] = {
    "a.jsonl": lambda path, texts: Path(path).write_bytes(jsonl(*texts)),
    "a.jsonl.gz": lambda path, texts: Path(path).write_bytes(COMPRESSORS["gz"](jsonl(*texts))),
    "a.json": lambda path, texts: Path(path).write_text(json.dumps([{"text": t} for t in texts])),
    "a.txt": lambda path, texts: Path(path).write_text("".join(t + "\n" for t in texts)),
    "a.csv": lambda path, texts: Path(path).write_text("text\n" + "".join(t + "\n" for t in texts)),
    "a.parquet": write_parquet,
    "a.arrow": write_arrow,
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("sample", ["all", "5"])
def test_every_format_against_its_inputs(folder: Path, name: str, sample: str) -> None:
    FORMATS[name](name, TEXTS * 3)
    pack(name, "-l", 16, "--unit-bytes", 100)
    count = 24 if sample == "all" else 5
    text = assert_sound("--against-inputs", "--sample", sample)
    assert f"; {count} documents of 1 input encoded again: the same" in text


def test_a_sample_is_encoded_in_few_batches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine takes as long to begin with a text as to encode it."""
    lines = [jsonl(f"{i} " + "x" * 50) for i in range(400)]
    (folder / "a.jsonl").write_bytes(b"".join(lines))
    pack("a.jsonl", "-l", 256, "--overlong", "drop")
    calls, encode = list[int](), BytesEngine.encode

    def counted(engine: BytesEngine, texts: list[str]) -> Any:
        calls.append(len(texts))
        return encode(engine, texts)

    monkeypatch.setattr(BytesEngine, "encode", counted)
    assert "300 documents of 1 input encoded again" in assert_sound(
        "--against-inputs", "--sample", 300
    )
    assert len(calls) < 10
    assert sum(calls) >= 300


def test_a_sample_is_spread_over_the_files(folder: Path) -> None:
    for number, count in enumerate((1, 2, 100, 100)):
        (folder / f"{number}.jsonl").write_bytes(jsonl(*TEXTS[:1] * count))
    pack(*(f"{number}.jsonl" for number in range(4)), "-l", 16, "--unit-bytes", 500)
    for sample, count in ((10, 10), (2, 2), (60, 60), (1000, 203)):
        text = assert_sound("--against-inputs", "--sample", sample, "--seed", 3)
        assert f"; {count} documents of 4 inputs encoded again" in text


def test_files_without_a_share_of_the_sample_are_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        (folder / f"{number}.csv").write_text(f"text\nrecord {number}\n")
    pack(*(f"{number}.csv" for number in range(20)), "-l", 16)
    files, read = list[str](), CsvReader.read

    def noted(self: CsvReader, file: InputFile, *rest: Any, **options: Any) -> Any:
        files.append(file.path)
        return read(self, file, *rest, **options)

    monkeypatch.setattr(CsvReader, "read", noted)
    assert_sound("--against-inputs", "--sample", 2)
    assert len(set(files)) == 4  # two documents of the rows, and a record of two other files


def test_changed_inputs(packed: Path) -> None:
    path = Path("a.jsonl")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"bbb", b"bxb"))
    (line,) = problems("--against-inputs")
    assert line.startswith("out: a.jsonl: its sha256 is ")
    assert line.endswith(f"it was {hashlib.sha256(data).hexdigest()} when it was packed")
    path.write_bytes(data + b"\n")
    message = f"has {len(data) + 1} bytes, it had {len(data)} when it was packed"
    assert problems("--against-inputs") == [f"out: a.jsonl: {message}"]
    path.rename("elsewhere")
    (line,) = problems("--against-inputs")
    assert line == "out: a.jsonl: an input: cannot read: No such file or directory"
    assert_sound()


def repacked_input(data: bytes) -> None:
    """Change an input, and what the manifest says of it."""
    Path("a.jsonl").write_bytes(data)
    result = Result("out")
    result.manifest["inputs"][0].update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    result.save()


@pytest.mark.parametrize("sample", ["all", "1000"])
def test_documents_that_are_not_those_of_the_inputs(folder: Path, sample: str) -> None:
    options = ["--against-inputs", "--sample", sample]
    (folder / "a.jsonl").write_bytes(jsonl("one", "two", "three"))
    pack("a.jsonl", "-l", 16, "--no-shuffle", "--strategy", "next-fit")
    repacked_input(jsonl("one", "twx", "three"))
    assert problems(*options) == [
        "out: a.jsonl: line 2 (byte 16): input_ids has 111 at place 6 of row 0 of "
        f"{first()}, 120 expected when encoded again"
    ]
    repacked_input(jsonl("one", "twoo", "three"))
    lines = problems(*options)
    assert lines[0] == (
        "out: a.jsonl: line 2 (byte 16): is packed as 0-4 of its tokens, 0-5 expected when "
        "encoded again"
    )
    assert any("no document begins there (1 in all)" in line for line in lines)
    repacked_input(jsonl("one", "two", "three", "four"))
    if sample == "all":  # what is not in the shards cannot be in a sample of them
        assert problems(*options) == [
            "out: a.jsonl: line 4 (byte 50): is packed as none of its tokens, 0-5 expected when "
            "encoded again"
        ]


def test_a_label_that_was_untrained(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl("one", "two"))
    pack("a.jsonl", "-l", 16, "--no-shuffle", "--strategy", "next-fit")
    shard = Path("out") / first()
    forge(shard, changed(shard, "labels", 1, -100))

    result = Result("out")
    result.add_to_input("trained_tokens", -1)
    result.manifest["shards"][0]["trained_tokens"] -= 1
    result.save()
    assert_sound()
    assert problems("--against-inputs") == [
        f"out: a.jsonl: line 1 (byte 0): labels has -100 at place 1 of row 0 of {first()}, 110 "
        "expected when encoded again"
    ]


def test_stdin_cannot_be_read_again(folder: Path) -> None:
    result = unaltered("pack", "-", "-l", 16, "-q", "-o", "out", stdin=jsonl(*TEXTS))
    assert result.returncode == 0, result.stderr
    result = packer("verify", "out", "--against-inputs")
    assert result.exit_code == 0
    assert "-: came from stdin, which cannot be read again: not compared" in result.stderr
    assert "0 documents of 0 inputs" in result.stdout


def test_a_broken_result_is_not_compared(packed: Path) -> None:
    (packed / "notes.txt").write_text("mine")
    result = packer("verify", "out", "--against-inputs")
    assert result.exit_code == 1
    assert "not compared with the inputs: the result itself has problems" in result.stderr
