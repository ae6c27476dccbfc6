"""`packer verify` finds every damage to shards and to the rows in them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support import assert_error, jsonl, pack, packer, shard_of
from verifying import TEXTS, changed, first, forge, position_in, problems

pytestmark = pytest.mark.usefixtures("folder")
COLUMNS = (
    "input_ids", "labels", "attention_mask", "cu_seqlens", "segments", "position_ids",
    "cu_seqlens_padded",
)  # fmt: skip


@pytest.fixture
def many_shards(folder: Path) -> Path:
    (folder / "a.jsonl").write_bytes(jsonl(*TEXTS * 5))
    pack("a.jsonl", "-l", 16, "--unit-bytes", 300)
    assert len(list(Path("out").glob("shard-*"))) > 3
    return folder / "out"


def leaf_buffers(array: Any) -> list[Any]:
    return [buffer for buffer in array.buffers() if buffer is not None]


@pytest.mark.parametrize("column", COLUMNS)
def test_a_flipped_bit_in_every_column(packed: Path, column: str) -> None:
    shard = packed / first()
    good = shard.read_bytes()
    whole = pa.py_buffer(good)
    with pa.ipc.open_stream(whole) as reader:
        buffers = leaf_buffers(reader.read_next_batch().column(column))
    for buffer in buffers:
        data = bytearray(good)
        data[position_in(whole, buffer)] ^= 1
        shard.write_bytes(data)
        lines = problems()
        assert any(
            re.match(f"out: {first()}: its sha256 is \\w+, the manifest", one) for one in lines
        )
        if column not in ("input_ids", "segments"):  # only --against-inputs sees those
            forge(shard, bytes(data))
            assert problems()
            forge(shard, good)


def test_a_flipped_bit_anywhere(packed: Path) -> None:
    shard = packed / first()
    good = shard.read_bytes()
    for at in range(0, len(good), 61):
        data = bytearray(good)
        data[at] ^= 1 << at % 8
        shard.write_bytes(data)
        assert any(f"{first()}: its sha256 is" in one for one in problems()), at


RULES = {
    "an id below zero": ("input_ids", 0, -1, 0, "input_ids holds a negative id: place 0 has -1"),
    "an id above all": (
        "input_ids", 1, 999, 0,
        "row 0: input_ids holds an id above the tokenizer's highest, 257: place 1 has 999",
    ),
    "a label": ("labels", 2, 7, 0, "labels holds neither the token nor -100: place 2"),
    "a first label": ("labels", 0, None, 0, "row 0: labels trains on padding or on a segment's"),
    "a mask": ("attention_mask", 0, 0, 0, "the boundaries: place 0 has 0, expected 1"),
    "a position": ("position_ids", 1, 5, 0, "position_ids does not restart in every segment"),
    "a boundary": ("cu_seqlens", -1, 40, 0, "row 6: cu_seqlens ends outside 1..16: 40"),
    "a padded boundary": ("cu_seqlens_padded", 0, 1, 0, "cu_seqlens_padded does not begin with 0"),
    "a file": ("segments", 0, 9, 0, "row 0: segments: file is not an input of its unit: 9"),
    "a source": ("segments", 0, -1, 1, "row 0: segments: position is negative: -1"),
    "a start": ("segments", 0, 3, 2, "has a piece from token 3, expected from 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", RULES)
def test_every_rule_names_the_value(packed: Path, case: str) -> None:
    column, index, value, child, message = RULES[case]
    shard = packed / first()
    if value is None:
        batch = next(iter(pa.ipc.open_stream(shard.read_bytes())))
        value = batch.column("input_ids").values[index].as_py()
    forge(shard, changed(shard, column, index, value, child))
    lines = problems()
    assert any(one.startswith(f"out: {first()}: ") and message in one for one in lines), lines


def test_damaged_metadata(packed: Path) -> None:
    shard = packed / first()
    data = shard.read_bytes()
    forge(shard, data.replace(b'"pad_token_id": 257', b'"pad_token_id": 256'))
    assert problems() == [
        f"out: {first()}: its metadata has pad_token_id 256, the manifest says 257"
    ]
    forge(shard, data.replace(b'"pad_token_id": 257', b'"pad_token_id"  257'))
    assert "not a readable shard: metadata that is not JSON" in problems()[0]


def test_trained_tokens_that_were_untrained(packed: Path) -> None:
    """Rows that are sound, but not those of the manifest."""
    shard = packed / first()
    batch = next(iter(pa.ipc.open_stream(shard.read_bytes())))
    at = int(np.argmax(batch.column("labels").values.to_numpy() >= 0))
    forge(shard, changed(shard, "labels", at, -100))
    listed = json.loads(Path("out/manifest.json").read_bytes())["trained_tokens"]
    assert problems() == [
        f"out: {first()}: holds {listed - 1} trained_tokens, the manifest says {listed}"
    ]


@pytest.mark.parametrize("forged", [False, True], ids=["cut", "and the manifest edited"])
def test_a_shard_cut_at_every_message_boundary(folder: Path, forged: bool) -> None:
    (folder / "a.jsonl").write_bytes(jsonl(*TEXTS * 20))
    pack("a.jsonl", "-l", 16)
    shard = Path("out") / first()
    data = shard.read_bytes()
    source = pa.BufferReader(data)
    messages = pa.ipc.MessageReader.open_stream(source)
    edges = [source.tell() for _ in messages]
    for size in (0, *edges, len(data) - 8, len(data) - 1, 100, 3):
        if forged and size:
            forge(shard, data[:size])
            lines = problems()
        else:
            shard.write_bytes(data[:size])
            lines = problems()
            message = f"has {size} bytes, the manifest says {len(data)}"
            assert lines == [f"out: {first()}: {message}"]
        assert all(f"out: {first()}: " in one for one in lines[:1])


def test_a_missing_shard(many_shards: Path) -> None:
    shard = shard_of(many_shards, 1)
    shard.unlink()
    assert problems() == [f"out: {shard.name}: is missing"]


def test_swapped_shards(many_shards: Path) -> None:
    one, two = shard_of(many_shards), shard_of(many_shards, 1)
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)
    lines = problems()
    assert {line.split(": ")[1] for line in lines} == {one.name, two.name}


def test_things_in_the_place_of_a_shard(packed: Path) -> None:
    shard = packed / first()
    shard.unlink()
    shard.mkdir()
    assert problems() == [f"out: {first()}: is not a regular file"]
    shard.rmdir()
    os.mkfifo(shard)
    for command in (["stats", "out", "--deep"], ["show", "out"]):
        assert_error(packer(*command), 1, f"out/{first()}: is not a regular file")
    assert problems() == [f"out: {first()}: is not a regular file"]


def test_a_shard_that_claims_compression(packed: Path) -> None:
    """Arrow would allocate what the buffers say they become."""
    shard = packed / first()
    with pa.ipc.open_stream(shard.read_bytes()) as reader:
        table = reader.read_all()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    forge(shard, sink.getvalue().to_pybytes())
    assert problems() == [f"out: {first()}: not a readable shard: a compressed record batch"]
    assert_error(packer("show", "out"), 1, "not a readable shard: a compressed record batch")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff\xff\xff\xff\0\0\0\0", "not a readable shard: no schema"),
        (b"\xff\xff\xff\xff\xff\xff\xff\x7f", "not a readable shard: "),
        (b"x" * 100, "not a readable shard: "),
    ],
    ids=["only the end", "a header of 2 GiB", "garbage"],
)
def test_things_that_are_no_stream(packed: Path, data: bytes, message: str) -> None:
    forge(packed / first(), data)
    assert any(one.startswith(f"out: {first()}: {message}") for one in problems())
    for command in (["stats", "out", "--deep"], ["show", "out"]):
        assert_error(packer(*command), 1, f"out/{first()}: {message}")


def test_columns_of_another_type(packed: Path) -> None:
    with pa.ipc.open_stream((packed / first()).read_bytes()) as reader:
        table = reader.read_all()
    names = table.schema.names
    wide = table["cu_seqlens"].cast(pa.list_(pa.int64()))
    for changed_table, message in (
        (table.set_column(names.index("cu_seqlens"), "cu_seqlens", wide), "cu_seqlens is list<"),
        (table.drop_columns(["labels"]), "has the columns input_ids, attention_mask, "),
        (table.append_column("more", table["segments"]), "an unknown column 'more'"),
    ):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, changed_table.schema) as writer:
            writer.write_table(changed_table)
        forge(packed / first(), sink.getvalue().to_pybytes())
        lines = problems()
        assert any(f"out: {first()}: " in one and message in one for one in lines), lines
