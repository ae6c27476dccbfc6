"""Whole runs: the same bytes every time, and every document found again under every option."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support import (
    BYTES_EOS,
    assert_error,
    check_directory,
    heavy,
    jsonl,
    pack,
    packer,
    recover_documents,
    recover_texts,
    shard_of,
)

from packer_cli import open_packed
from packer_cli.options.options import NAMES, PackConfig
from packer_cli.options.run_options import RunOptions
from packer_cli.run.pipeline import pack as run

pytestmark = pytest.mark.usefixtures("folder")


def texts_of(count: int, longest: int = 60, seed: int = 7) -> list[str]:
    """Mostly short texts, some long, with characters of one to four bytes."""
    chance = random.Random(seed)
    lengths = [int(longest ** chance.random()) for _ in range(count)]
    return [f"{i}:" + "".join(chance.choices("abc é→𝄞", k=n)) for i, n in enumerate(lengths)]


TEXTS = texts_of(300)
LENGTHS = [len(text.encode()) + 1 for text in TEXTS]


@pytest.fixture
def data(folder: Path) -> Path:
    (folder / "a.jsonl").write_bytes(jsonl(*TEXTS[:120], "", *TEXTS[120:200]))
    (folder / "b.jsonl").write_bytes(jsonl(*TEXTS[200:]))
    return folder


INPUTS = ("a.jsonl", "b.jsonl", "-l", 64, "-t", "bytes", "-q", "--unit-bytes", 2000)


def test_the_seed_changes_the_order_and_nothing_else(data: Path) -> None:
    """And with --no-shuffle nothing."""
    for options, different in (([], 3), (["--strategy", "online-best-fit", "--no-shuffle"], 1)):
        shards, rows = set[bytes](), set[int]()
        for seed in (0, 1, 2**63 - 1):
            manifest = pack(*INPUTS[:4], "--seed", seed, *options, "--overwrite")
            shards.add(shard_of().read_bytes())
            rows.add(manifest["rows"])
            assert recover_texts("out") == TEXTS
        assert (len(shards), len(rows)) == (different, 1)


@pytest.mark.parametrize("strategy", ["next-fit", "wrap"])
def test_strategies_that_keep_the_input_order(data: Path, strategy: str) -> None:
    pack(*INPUTS[:4], "--strategy", strategy, "--no-shuffle")
    packed = open_packed("out")
    places = [
        (segment["file"], segment["position"], segment["start"])
        for batch in packed.batches(packed.manifest["shards"][0])
        for row in batch.column("segments").to_pylist()
        for segment in row
    ]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("overlong", "max_length"),
    [(overlong, n) for overlong in ("split", "truncate") for n in (1, 7, 4096)] + [("drop", 7)],
)
@pytest.mark.parametrize("eos", [[BYTES_EOS], heavy([])])
def test_no_token_is_lost_without_a_count(
    data: Path, overlong: str, max_length: int, eos: list[int]
) -> None:
    options = ["--overlong", overlong, "--eos" if eos else "--no-eos"]
    manifest = pack("a.jsonl", "b.jsonl", "-l", max_length, *options)
    lost = manifest["truncated_tokens"] + manifest["dropped_tokens"]
    encoded = [[*text.encode(), *eos] for text in TEXTS]
    assert manifest["tokens"] + lost == sum(map(len, encoded))
    expected = {
        "split": encoded,
        "truncate": [tokens[:max_length] for tokens in encoded],
        "drop": [tokens for tokens in encoded if len(tokens) <= max_length],
    }[overlong]
    assert [tokens.tolist() for tokens in recover_documents("out").values()] == expected
    assert manifest["documents"] == len(expected)
    assert manifest["documents"] + manifest["dropped_documents"] == len(TEXTS)
    longer = sum(len(tokens) > max_length for tokens in encoded)
    counted = {"split": 0, "truncate": longer, "drop": longer}[overlong]
    assert manifest["truncated_documents"] + manifest["dropped_documents"] == counted


def test_what_overlong_refuses(data: Path) -> None:
    """A run that keeps nothing; and the first document that is too long, by its line."""
    options = ["-t", "bytes", "-q", "-o", "out", "--overlong"]
    nothing = packer("pack", *INPUTS[:2], "-l", 2, *options, "drop")
    message = "nothing to pack: 1 empty, 300 dropped and 0 rejected records"
    assert_error(nothing, 1, message)
    first = next(i for i, length in enumerate(LENGTHS) if length > 64)
    result = packer("pack", "a.jsonl", "-l", 64, *options, "error")
    message = f"the document has {LENGTHS[first]} tokens, --max-length is 64"
    assert_error(result, 1, f"error: a.jsonl, line {first + 1} (byte ", message)
    assert not Path("out").exists()
    pack("a.jsonl", "b.jsonl", "-l", max(LENGTHS), "--overlong", "error")
    assert recover_texts("out") == TEXTS


def test_a_document_whose_pieces_cannot_be_numbered(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2**31 tokens, made small for the test: the start of a piece is an int32."""
    monkeypatch.setattr("packer_cli.run.unit.MAX_DOCUMENT_TOKENS", 100)
    (data / "long.jsonl").write_bytes(jsonl("x" * 99, "y" * 100))
    options = ["long.jsonl", "-l", 64, "-t", "bytes", "-q"]
    message = "long.jsonl, line 2 (byte 112): the document has 101 tokens, the most is 100"
    assert_error(packer("pack", *options), 1, message)
    assert_error(packer("pack", *options, "--strategy", "wrap"), 1, message)
    pack(*options[:3], "--overlong", "truncate")


def test_labels_and_types_are_those_of_the_format(data: Path) -> None:
    columns = "position_ids,cu_seqlens,input_ids"  # written in the order of the format
    config = pack("a.jsonl", "-l", 16, "--columns", columns)["config"]
    assert config["columns"] == ["input_ids", "cu_seqlens", "position_ids"]
    pack("a.jsonl", "-l", 16, "--overwrite")
    with pa.memory_map(str(shard_of())) as source:
        schema = pa.ipc.open_stream(source).schema
    assert [(field.name, str(field.type).replace(" not null", "")) for field in schema] == [
        ("input_ids", "fixed_size_list<item: int32>[16]"),
        ("labels", "fixed_size_list<item: int32>[16]"),
        ("attention_mask", "fixed_size_list<item: uint8>[16]"),
        ("cu_seqlens", "list<item: int32>"),
        ("segments", "list<item: struct<file: int32, position: int64, start: int32>>"),
    ]
    assert not any(field.nullable for field in schema)
    assert json.loads(schema.metadata[b"packer"]) == {
        "format_version": 1,
        "max_length": 16,
        "pad_token_id": 257,
        "label_shift": "none",
        "tokenizer_sha256": "",
    }


def test_shards_are_continued_in_parts(data: Path) -> None:
    manifest = pack("a.jsonl", "-l", 65536, "--shard-bytes", 1, "--overlong", "truncate")
    assert [shard["file"] for shard in manifest["shards"]] == [shard_of().name]
    (data / "long.jsonl").write_bytes(jsonl(*["x" * 600_000] * 6))
    options = ["-l", 65536, "--shard-bytes", "4M", "--columns", "input_ids,cu_seqlens,segments"]
    shards = pack("long.jsonl", *options, "--overwrite")["shards"]
    names = [f"shard-00000-00{i}-{shard['sha256'][:16]}.arrow" for i, shard in enumerate(shards)]
    assert len(names) == 4
    assert [shard["file"] for shard in shards] == names
    assert all(len(document) == 600_001 for document in recover_documents("out").values())


def by_windows(texts: list[str], strategy: str, window: int, max_length: int, seed: int) -> Any:
    """Pack `texts` with windows of few tokens, which carry rows over to each other."""
    Path("w.jsonl").write_bytes(jsonl(*texts))
    config = PackConfig(
        max_length=max_length, strategy=strategy, window_tokens=window, seed=seed, unit_bytes=4000
    )
    options = RunOptions(workers=1, progress=False, overwrite=True)
    run(["w.jsonl"], Path("windows"), config, options, "bytes")
    return check_directory("windows")


@pytest.mark.parametrize("strategy", NAMES)
def test_small_windows_carry_over_and_lose_nothing(
    data: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    from packer_cli.inputs import byte_streams

    monkeypatch.setattr(byte_streams, "BLOCK_BYTES", 256)  # a few records a batch
    manifest = by_windows(TEXTS, strategy, window=300, max_length=64, seed=3)
    assert recover_texts("windows") == TEXTS
    assert manifest["config"]["strategy"] == strategy
    one_window = by_windows(TEXTS, strategy, window=1 << 20, max_length=64, seed=3)
    assert manifest["tokens"] == one_window["tokens"]
    if strategy == "wrap":  # the open row is carried: only a unit's last row is not full
        assert manifest["padding_tokens"] < 64 * len(manifest["units"])
    # nearly as full as one plan: what a window of five rows fills badly waits for the next
    slack = 1.3 if strategy == "harmonic" else 1.1  # which has more rows open than that
    assert manifest["rows"] <= one_window["rows"] * slack


def test_rows_that_no_document_fills_do_not_wait_for_ever(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window would hold all of its unit."""
    monkeypatch.setattr("packer_cli.inputs.byte_streams.BLOCK_BYTES", 256)
    by_windows(["x" * 40] * 90, "best-fit", window=300, max_length=64, seed=0)
    packed = open_packed("windows")
    written = [len(list(packed.batches(shard))) for shard in packed.manifest["shards"]]
    assert min(written[:-1]) > 5
