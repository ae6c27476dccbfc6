"""Options of rows, alone and together, through the command line: every token and label found."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import asdict
from support import ALL_COLUMNS, check_directory, heavy, jsonl, pack, recover_texts

from packer_cli import open_packed
from packer_cli.options.options import COLUMNS, NAMES, PackConfig
from packer_cli.options.run_options import RunOptions
from packer_cli.packing.figures import AttentionCost
from packer_cli.result.columns import rows_of, segments_of
from packer_cli.run import pipeline

pytestmark = pytest.mark.usefixtures("folder")
LIMITABLE = [name for name in NAMES if name not in ("wrap", "mffd")]
BALANCED = [name for name in NAMES if name not in ("wrap", "next-fit", "harmonic")]


@pytest.fixture
def texts(folder: Path) -> list[str]:
    chance = random.Random(3)
    texts = [f"{i}:" + "x" * int(150 ** chance.random()) for i in range(400)]
    (folder / "a.jsonl").write_bytes(jsonl(*texts))
    return texts


def batches() -> Iterator[Any]:
    packed = open_packed("out")
    for shard in packed.manifest["shards"]:
        yield from packed.batches(shard)


def column(name: str) -> np.ndarray:
    return np.concatenate([rows_of(batch.column(name)) for batch in batches()])


def metadata() -> dict[str, Any]:
    """Of the schema of the shards."""
    content: dict[str, Any] = json.loads(next(batches()).schema.metadata[b"packer"])
    return content


@pytest.mark.parametrize("strategy", LIMITABLE)
def test_no_row_has_more_segments_than_asked(texts: list[str], strategy: str) -> None:
    most = 1 if strategy == "best-fit" else 3
    manifest = pack("a.jsonl", "-l", 64, "--strategy", strategy, "--max-segments-per-row", most)
    assert max(np.diff(segments_of(batch)[2]).max() for batch in batches()) == most
    assert manifest["config"]["max_segments_per_row"] == most
    assert manifest["lower_bound_rows"] >= -(-manifest["segments"] // most)
    assert recover_texts("out") == texts


@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize("multiple", [16, heavy(2), heavy(64)])
def test_segments_begin_at_multiples(texts: list[str], strategy: str, multiple: int) -> None:
    options = ("--segment-multiple", multiple, *ALL_COLUMNS, "--unit-bytes", 4000)
    manifest = pack("a.jsonl", "-l", 64, "--strategy", strategy, *options)
    assert recover_texts("out") == texts
    assert metadata()["segment_multiple"] == manifest["config"]["segment_multiple"] == multiple
    for batch in batches():
        begin = segments_of(batch)[0]
        assert (begin % multiple == 0).all()
        places = batch.column("cu_seqlens_padded").to_pylist()
        assert [row[0] for row in places] == [0] * len(places)
        assert all(step % multiple == 0 for row in places for step in np.diff(row))
    tokens = sum(len(text.encode()) + 1 for text in texts)
    assert manifest["tokens"] == tokens == column("attention_mask").sum()
    assert manifest["utilization"] == tokens / (64 * manifest["rows"])
    # positions restart with segments and with the row's padding, nowhere else
    restarts = sum(len(row) - (row[-1] == 64) for batch in batches()
                   for row in batch.column("cu_seqlens_padded").to_pylist())  # fmt: skip
    assert (column("position_ids") == 0).sum() == restarts


@pytest.mark.parametrize(
    "strategy", ["best-fit", "first-fit", "worst-fit", "harmonic", "next-fit", "wrap", "mffd"]
)
@pytest.mark.parametrize(("window", "unit"), [(200, 10_000_000), (1000, 20_000), heavy(5000, 5000)])
def test_tokens_and_labels_stay_together_in_windows_units_and_cuts(
    folder: Path, strategy: str, window: int, unit: int
) -> None:
    """With all other options of rows that the strategy takes."""
    chance = random.Random(window)
    documents = []
    for _ in range(200):
        sizes = [0, 1, 2, 5, 30, 64, 65, 200]
        ids = [chance.randrange(1, 2**31) for _ in range(chance.choice(sizes))]
        labels = [token if chance.random() < 0.5 else -100 for token in ids]
        documents.append({"input_ids": ids} | ({"labels": labels} if chance.random() < 0.7 else {}))
    lines = [json.dumps(document) + "\n" for document in documents]
    Path("tokens.jsonl").write_text("".join(lines))
    config = PackConfig(
        64, strategy=strategy, window_tokens=window, unit_bytes=unit, columns=tuple(COLUMNS),
        max_segments_per_row=4 if strategy in LIMITABLE else None, segment_multiple=4,
        balance="attention" if strategy in BALANCED else "none",
    )  # fmt: skip
    pipeline.pack(["tokens.jsonl"], Path("out"), config, RunOptions(progress=False, workers=2))
    check_directory("out")
    packed: dict[int, list[Any]] = {}
    for batch in batches():
        begin, length, of_row = segments_of(batch)
        ids, labels = (rows_of(batch.column(name)) for name in ("input_ids", "labels"))
        for row, segments in enumerate(batch.column("segments").to_pylist()):
            for k, segment in enumerate(segments, int(of_row[row])):
                here = slice(begin[k], begin[k] + length[k])
                piece = (segment["start"], ids[row, here].tolist(), labels[row, here].tolist())
                packed.setdefault(segment["position"], []).append(piece)
    for position, document in zip(np.cumsum([0, *map(len, lines)]), documents, strict=False):
        pieces = sorted(packed.pop(int(position), []))
        if not pieces:  # an untrained document
            assert {*document.get("labels", document["input_ids"])[1:]} <= {-100}
            continue
        assert [token for _, ids, _ in pieces for token in ids] == document["input_ids"]
        for start, ids, labels in pieces:
            own = document.get("labels", document["input_ids"])[start + 1 : start + len(ids)]
            assert labels == [-100, *own]
    assert packed == {}


def shard_costs(out: str) -> tuple[AttentionCost, list[int]]:
    """Of all rows as they lie in the shards: their attention cost, and how full they are."""
    packed, cost, fills = open_packed(out), AttentionCost(), []
    for shard in packed.manifest["shards"]:
        for batch in packed.batches(shard):
            _, length, offsets = segments_of(batch)
            cost += AttentionCost.of(length, offsets)
            fills += np.add.reduceat(length, offsets[:-1]).tolist()
    return cost, sorted(fills)


@pytest.mark.parametrize("strategy", BALANCED)
@pytest.mark.parametrize(
    ("shuffle", "most", "multiple"),
    [(True, None, 1), (False, 5, 4), heavy(True, 5, 4), heavy(False, None, 1)],
)
def test_balance_evens_out_rows_that_stay_as_full(
    folder: Path, strategy: str, shuffle: bool, most: int | None, multiple: int
) -> None:
    most = None if strategy == "mffd" else most
    chance = random.Random(0)
    texts = [f"{i}" + "x" * min(int(chance.lognormvariate(2.5, 0.8)), 120) for i in range(1500)]
    (folder / "a.jsonl").write_bytes(jsonl(*texts))
    manifests = {}
    for balance in ("none", "attention"):
        config = PackConfig(
            128, strategy=strategy, window_tokens=4000, unit_bytes=50_000, balance=balance,
            max_segments_per_row=most, segment_multiple=multiple, shuffle=shuffle,
        )  # fmt: skip
        run = RunOptions(progress=False, workers=2)
        pipeline.pack(["a.jsonl"], Path(balance), config, run, "bytes")
        manifests[balance] = check_directory(balance)
    assert sorted(recover_texts("attention")) == sorted(texts)
    (before, fills), (after, new_fills) = shard_costs("none"), shard_costs("attention")
    assert new_fills == fills
    assert manifests["attention"]["config"]["balance"] == "attention"
    costs = manifests["attention"]["attention_cost"]
    assert "attention_cost" not in manifests["none"]
    assert costs == {"before": asdict(before), "after": asdict(after)}
    assert (after.rows, after.sum) == (before.rows, before.sum)
    assert after.spread["cv"] < before.spread["cv"]
    assert after.max <= before.max
