"""`packer verify` finds every damage to shards and their rows, every edit of the manifest, and
every figure of a side file, whether digests were made anew or not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tiny_tokenizers
from altered import unaltered
from spoiling import arrow_file, edit, rewrite, tokenize
from support import assert_error, jsonl, pack, packer, shard_of, succeeds
from verifying import TEXTS, assert_sound, changed, first, forge, position_in, problems

pytestmark = pytest.mark.usefixtures("folder")
COLUMNS = (
    "input_ids", "labels", "attention_mask", "cu_seqlens", "segments", "position_ids",
    "cu_seqlens_padded",
)  # fmt: skip


def assert_found(start: str, message: str) -> None:
    lines = problems()
    assert any(one.startswith(f"out: {start}: ") and message in one for one in lines), lines


@pytest.mark.parametrize("column", COLUMNS)
def test_a_flipped_bit_in_every_column(packed: Path, column: str) -> None:
    shard = packed / first()
    good = shard.read_bytes()
    whole = pa.py_buffer(good)
    with pa.ipc.open_stream(whole) as reader:
        buffers = reader.read_next_batch().column(column).buffers()
    for buffer in filter(None, buffers):
        data = bytearray(good)
        data[position_in(whole, buffer)] ^= 1
        shard.write_bytes(data)
        assert_found(first(), "its sha256 is ")
        shard.write_bytes(good)


# Damage with digests made anew: what becomes of the bytes of a shard, and the problem

Change = Callable[[bytes], bytes]


def value(column: str, index: int, number: int, child: int = 0) -> Change:
    return lambda data: changed(data, column, index, number, child)


def tabled(change: Callable[[Any], Any], codec: str | None = None) -> Change:
    """Write another table, perhaps compressed."""

    def written(data: bytes) -> bytes:
        with pa.ipc.open_stream(data) as reader:
            table = change(reader.read_all())
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression=codec)
        with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
            writer.write_table(table)
        return bytes(sink.getvalue().to_pybytes())

    return written


def widened(table: Any) -> Any:
    wide = table["cu_seqlens"].cast(pa.list_(pa.int64()))
    return table.set_column(table.schema.names.index("cu_seqlens"), "cu_seqlens", wide)


SHARDS: dict[str, tuple[Change, str]] = {  # all rules of rows are in tests/result/test_rules.py
    "an id above all": (
        value("input_ids", 1, 999),
        "row 0: input_ids holds an id above the tokenizer's highest, 257: place 1 has 999",
    ),
    "a label": (value("labels", 2, 7), "labels holds neither the token nor -100: place 2"),
    "a file": (value("segments", 0, 9), "row 0: segments: file is not an input of its unit: 9"),
    "a source": (value("segments", 0, -1, 1), "row 0: segments: position is negative: -1"),
    "a start": (value("segments", 0, 3, 2), "has a piece from token 3, expected from 0"),
    "compressed": (
        tabled(lambda table: table, "zstd"), "not a readable shard: a compressed record batch"
    ),  # its buffers claim the size that they become
    "only the end": (lambda data: b"\xff\xff\xff\xff\0\0\0\0", "not a readable shard: no schema"),
    "a header of 2 GiB": (lambda data: b"\xff\xff\xff\xff\xff\xff\xff\x7f", ""),
    "garbage": (lambda data: b"x" * 100, ""),
    "other metadata": (
        lambda data: data.replace(b'"pad_token_id": 257', b'"pad_token_id": 256'),
        "'pad_token_id': 256, 'label_shift': 'none', ",
    ),
    "no metadata": (
        lambda data: data.replace(b'"pad_token_id": 257', b'"pad_token_id"  257'),
        "not a readable shard: its metadata is {}",
    ),
    "another type": (tabled(widened), "cu_seqlens is list<"),
    "a column less": (
        tabled(lambda table: table.drop_columns(["labels"])),
        "has the columns input_ids, attention_mask, ",
    ),
    "a column more": (
        tabled(lambda table: table.append_column("more", table["segments"])),
        "more, not input_ids, ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARDS)
def test_damaged_shards(packed: Path, name: str) -> None:
    change, message = SHARDS[name]
    forge(packed / first(), change((packed / first()).read_bytes()))
    assert_found(first(), message)
    if "not a readable" in message:
        for command in (["stats", "out", "--deep"], ["show", "out"]):
            assert_error(packer(*command), 1, message.partition(": its metadata")[0])


def set_at(column: str, at: int, value: Any) -> Callable[[dict[str, list[Any]]], None]:
    return lambda columns: columns[column].__setitem__(at, value)


def swap(columns: dict[str, list[Any]]) -> None:
    """Exchange trained_tokens of documents 4 and 6: the sum stays."""
    values = columns["trained_tokens"]
    values[4], values[6] = values[6], values[4]


IDS = [{"input_ids": [1, 2], "labels": [-100, 2]}]
VALUES = [{"input_ids": [1], "logprobs": [-0.5], "won": True},
          {"input_ids": [2, 3], "logprobs": [-0.5, -0.25], "won": False}]  # fmt: skip
CARRY = ("--carry", "logprobs:float32", "--carry", "won:bool")
DOCUMENTS: list[tuple[list[Any], str, Any, str]] = [
    (TEXTS, "documents", set_at("position", 3, 0), "its document 3 is at 0 of a.jsonl, not after"),
    (TEXTS, "documents", set_at("file", 3, 7), "document 3: is of input 7, there are 1"),
    (TEXTS, "documents", set_at("input_ids", 2, [999]), "document 2: holds the id 999, the tok"),
    (TEXTS, "documents", set_at("input_ids", 2, []), "document 2: has no tokens"),
    (TEXTS, "documents", set_at("input_ids", 2, [1, 2]), "document 2: its length is 2, the index"),
    (TEXTS, "index", set_at("length", 5, 1), "the sum of length is "),
    (TEXTS, "index", swap, "document 4: its trained_tokens is "),
    (TEXTS, "index", set_at("content_hash", 5, bytes(16)), "document 5: its content_hash is not"),
    (IDS, "documents", set_at("trained", 0, [2, 1]),
     "document 0: its trained is [2, 1], not ascending within its 2 tokens"),
    (IDS, "documents", set_at("trained", 0, [0, 1, 2]),
     "document 0: its trained has an odd number of edges"),
    (VALUES, "documents", set_at("logprobs", 1, [0.5]),
     "document 1: has 1 values of logprobs, and 2 tokens"),
    (VALUES, "documents", set_at("logprobs", 1, [0.5, np.nan]),
     "document 1: logprobs holds a value that is not finite: nan"),
    (VALUES, "documents", set_at("logprobs", 1, [0.5, 3.5]),
     "holds other values of logprobs than the manifest says"),
    (VALUES, "documents", set_at("won", 1, 3), "document 1: won holds neither 0 nor 1: 3"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("records", "kind", "change", "message"), DOCUMENTS, ids=[one[3][:40] for one in DOCUMENTS]
)
def test_damaged_documents(
    folder: Path, records: list[Any], kind: str, change: Any, message: str
) -> None:
    lines = [json.dumps({"text": one} if isinstance(one, str) else one) + "\n" for one in records]
    (folder / "a.jsonl").write_text("".join(lines))
    options = ("-t", "bytes") if records is TEXTS else CARRY if records is VALUES else ()
    tokenize("a.jsonl", "-o", "out", *options)
    assert_sound("--against-inputs", "--sample", "all")
    rewrite(kind, change)
    found = [line for line in problems() if "units.jsonl" not in line and ".json:" not in line]
    assert any(message in line for line in found), found


@pytest.fixture
def tokenized(folder: Path) -> Path:
    (folder / "a.jsonl").write_bytes(jsonl(*TEXTS))
    tokenize("a.jsonl", "-t", "bytes", "-o", "out")
    return folder / "out"


@pytest.mark.usefixtures("tokenized")
def test_a_column_whose_name_is_no_text() -> None:
    path = arrow_file("documents")
    forge(path, path.read_bytes().replace(b"input_ids", b"input\xffids"))
    assert f"out: {path.name}: not a readable shard: " in "".join(problems())


@pytest.mark.usefixtures("tokenized")
def test_manifest_that_names_no_index() -> None:
    edit(lambda manifest: manifest["shards"].pop())
    for command in (
        ["verify", "out", "-q"], ["pack", "out", "-l", 64, "-o", "rows", "-q"], ["show", "out"]
    ):  # fmt: skip
        assert_error(packer(*command), 1, "out/manifest.json: ", "followed by its index")
    assert not Path("rows").exists()


# Files of shards


def test_a_shard_cut_at_every_message_boundary(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl(*TEXTS * 20))
    pack("a.jsonl", "-l", 16)
    shard = Path("out") / first()
    data = shard.read_bytes()
    source = pa.BufferReader(data)
    edges = [source.tell() for _ in pa.ipc.MessageReader.open_stream(source)]
    for size in (0, *edges, len(data) - 8, len(data) - 1, 100, 3):
        shard.write_bytes(data[:size])
        message = f"has {size} bytes, the manifest says {len(data)}"
        assert problems() == [f"out: {first()}: {message}"]


def test_shards_that_are_gone_swapped_or_something_else(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl(*TEXTS * 5))
    pack("a.jsonl", "-l", 16, "--unit-bytes", 300)
    one, two = shard_of("out"), shard_of("out", 1)
    data = [one.read_bytes(), two.read_bytes()]
    one.write_bytes(data[1])
    two.write_bytes(data[0])
    assert {line.split(": ")[1] for line in problems()} == {one.name, two.name}
    one.write_bytes(data[0])
    two.unlink()
    assert problems() == [f"out: {two.name}: is missing"]
    two.mkdir()
    assert problems() == [f"out: {two.name}: is not a regular file"]
    two.rmdir()
    os.mkfifo(two)
    result = packer("stats", "out", "--deep")
    assert_error(result, 1, f"out/{two.name}: is not a regular file")
    assert problems() == [f"out: {two.name}: is not a regular file"]


# The manifest


def more(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda manifest: manifest.update({name: manifest[name] + 1})


EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "figures": (lambda m: m.update(rows=m["rows"] + 1, tokens=m["tokens"] + 1),
                "manifest.json: tokens: "),
    "a histogram": (lambda m: m["histograms"]["row_fill"].reverse(), "manifest.json: row_fill: ["),
    "no side files": (lambda m: m.pop("side_files"), "a foreign file"),
    "an input less": (lambda m: m["inputs"].pop(), "file is not an input of its unit: 1"),
    "more rows than bytes": (lambda m: m["shards"][0].update(rows=1 << 53),
                             "cannot hold the 9007199254740992 rows that the manifest says"),
    "a wrong digest": (lambda m: m["shards"][0].update(sha256="0" * 64), "the manifest says 000"),
    "another seed": (lambda m: m["config"].update(seed=5), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_manifest(packed: Path, name: str) -> None:
    change, message = EDITS[name]
    before = Path("out/manifest.json").read_bytes()
    edit(change, signed=False)
    if name not in ("no side files",):
        assert_found("manifest.json", "was edited: its contents have the sha256 ")
    if message:  # the others show in the checksum, or by the inputs
        Path("out/manifest.json").write_bytes(before)
        edit(change)
        lines = problems()
        assert any(message in line for line in lines), lines


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["shards"][0].update(file="../a"), "damaged: Expected `str` matching regex"),
        (lambda m: m["shards"][0].pop("rows"), "damaged: Object missing required field `rows`"),
        (lambda m: m["config"].pop("shape"), "damaged: config: has no shape"),
        (
            lambda m: m["config"].update(max_length=1 << 40),
            "damaged: config: --max-length: 1099511627776 is not between 1 and 16777216",
        ),
        (
            lambda m: m["config"].update(strategy="x") or m.update(packer_version="9.1"),
            "of packer 9.1, which this packer ",
        ),
        (lambda m: m.update(rows=0), "damaged: Expected `int` >= 1 - at `$.rows`"),
    ],
)
def test_a_manifest_of_no_use(packed: Path, change: Callable[[Any], Any], message: str) -> None:
    edit(change)
    assert_error(packer("verify", "out"), 1, f"out/manifest.json: {message}")


@pytest.mark.parametrize("name", ["manifest.json", "units.jsonl", "squared_lengths.npy"])
def test_nothing_waits_for_a_pipe_in_the_place_of_a_file(folder: Path, name: str) -> None:
    Path("a.jsonl").write_bytes(jsonl("one", "two"))
    again = ("pack", "a.jsonl", "-l", 16, "-t", "bytes", "-o", "out", "-q")
    succeeds(*again)
    Path("out", name).unlink()
    os.mkfifo(f"out/{name}")
    loop = ("--ranks", 1, "--hidden-size", 8)
    for command in (again, (*again, "--add"), ("stats", "out", *loop), ("verify", "out", "-q"),
                    ("show", "out", "--step", 0, "--balance", "order", *loop)):  # fmt: skip
        assert packer(*command).exit_code in (0, 1, 2), command
    assert Path("out", name).is_fifo()


def flip_bit(path: Path, column: str) -> None:
    """Damage the first byte of a list column's values."""
    stored = pa.py_buffer(path.read_bytes())
    (batch,) = pa.ipc.open_stream(pa.BufferReader(stored))
    place = batch.column(column).values.buffers()[1].address - stored.address
    data = bytearray(stored.to_pybytes())
    data[place] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("column", "max_length"), [("input_ids", 8), ("input_ids", 64), ("trained", 64)]
)
def test_a_flipped_bit_is_not_packed_under_a_fresh_digest(
    folder: Path, column: str, max_length: int
) -> None:
    """Of a document that is cut, too."""
    pair = {"prompt": "Hi", "completion": "Hello there"}
    Path("a.jsonl").write_bytes(
        json.dumps(pair).encode() if column == "trained" else jsonl("Hello there")
    )
    for command in (("tokenize", "a.jsonl", "-t", "bytes", "-o", "tok"),
                    ("pack", "tok", "-l", max_length, "-o", "rows"),
                    ("pack", "tok", "-l", max_length, "-o", "view", "--view")):  # fmt: skip
        succeeds(*command, "-q")
    documents = next(Path("tok").glob("documents-*"))
    flip_bit(documents, column)
    what = "content_hash" if column == "input_ids" else "trained_tokens"
    packed = packer("pack", "tok", "-l", max_length, "-o", "again", "-q")
    assert_error(packed, 1, f"tok: its document 0 has another {what} than its index says")
    for source, to in (("tok", "unpacked"), ("view", "numpy"), ("view", "packed")):
        result = packer("export", source, "--to", to, "-o", "again", "-q")
        assert_error(result, 1, ".arrow: ")  # a digest, a hash or a count
    rows = shard_of("rows")
    flip_bit(rows, "input_ids")
    for to in ("unpacked", "numpy"):
        result = packer("export", "rows", "--to", to, "-o", "again", "-q")
        assert_error(result, 1, rows.name, ": its sha256 is ")
    assert not Path("again").exists()


@pytest.mark.parametrize("name", ["units.jsonl", "tokenizer.json", "squared_lengths.npy"])
def test_a_file_of_another_size_is_not_read(folder: Path, name: str) -> None:
    """A sparse one takes no room on the disk, and hours to read."""
    Path("a.jsonl").write_bytes(jsonl("one", "two"))
    tiny_tokenizers.save(Path("t"), tiny_tokenizers.byte_level())
    again = ("pack", "a.jsonl", "-l", 16, "-t", "t", "-o", "out", "-q")
    succeeds(*again)
    succeeds("tokenize", "a.jsonl", "-t", "t", "-o", "tok", "-q")
    for directory in ("out", "tok"):
        if Path(directory, name).exists():
            os.truncate(Path(directory, name), 1 << 40)
            result = packer("verify", directory)
            message = f"{name}: has {1 << 40} bytes, the manifest says "
            assert (result.exit_code, message in result.stdout) == (1, True), result.stderr
    Path("b.jsonl").write_bytes(jsonl("three"))
    if name == "units.jsonl":
        added = packer("pack", "b.jsonl", *again[2:], "--add")
        assert_error(added, 2, "out: units.jsonl is damaged")
    if name == "tokenizer.json":
        assert_error(packer("pack", "tok", "-l", 16, "-o", "of-tok", "-q"), 1, message)
        assert_error(packer("pack", "b.jsonl", "-l", 16, "-t", "tok"), 1, "File too large")


# Commands, and the files that these read, whatever is in them.
READERS: dict[str, tuple[object, ...]] = {
    "list.txt": ("pack", "@list.txt", "-t", "bytes", "-l", 16),
    "tok/tokenizer.json": ("pack", "a.jsonl", "-t", "tok", "-l", 16),
    "toks/tokenizer.json": ("pack", "toks", "-l", 16),
    "saved/state.json": ("pack", "saved", "-t", "bytes", "-l", 16),
    "trainer_state.json": ("show", "packed", "--checkpoint", ".", "--ranks", 1),
    "mix/dataset_dict.json": ("pack", "mix.toml"),
}


@pytest.mark.parametrize(("name", "what"), [*zip(READERS, cycle(["pipe", "device"]))])
def test_nothing_but_regular_files_is_read(folder: Path, name: str, what: str) -> None:
    """A pipe may wait for ever, and a device never end."""
    Path("a.jsonl").write_bytes(jsonl("one") + b"bad\n" + jsonl("two"))
    files = {"eos_token": "</s>"}
    tiny_tokenizers.save(Path("tok"), tiny_tokenizers.byte_level(), tokenizer_config=files)
    for command in (("tokenize", "-o", "toks"), ("pack", "-l", 16, "-o", "packed")):
        succeeds(command[0], "a.jsonl", "-t", "tok", "-q", "--on-error", "skip", *command[1:])
    succeeds("pack", "toks", "-l", 16, "--view", "-q", "-o", "view")
    recipe = 'max_length = 16\ntokenizer = "tok"\n[[source]]\nname = "a"\ninputs = ["a.jsonl"]\n'
    Path("mix.toml").write_text(f'{recipe}epochs = 1\n[validation]\nshare = "50%"\n')
    for directory in ("saved", "mix"):
        Path(directory).mkdir()
    Path("saved/dataset_info.json").write_text("{}")
    Path(name).unlink(missing_ok=True)
    if what == "pipe":
        os.mkfifo(name)
    else:
        Path(name).symlink_to("/dev/zero")
    command = list(READERS[name])
    if command[0] in ("pack", "export"):
        command += ["-o", "mix" if name.startswith("mix") else "out"]
    done = unaltered(*command)
    reasons = ("not a regular file", "is not a file", "has no tokenizer.json", "of another dataset")
    assert done.returncode in (1, 2), done.stderr
    assert any(reason in done.stderr for reason in reasons), done.stderr
    assert Path(name).is_fifo() or Path(name).is_symlink()
