"""Labels given with token records stay with their tokens through windows, units and cuts."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from packer_cli import open_packed
from packer_cli.options.options import COLUMNS, PackConfig
from packer_cli.options.run_options import RunOptions
from packer_cli.result.reader import lists_of, rows_of
from packer_cli.run import pipeline

Piece = tuple[int, list[int], list[int]]


def pieces_of(directory: Path) -> dict[int, list[Piece]]:
    """Position of each document -> its (start, ids, labels), in order."""
    packed, pieces_at = open_packed(directory), dict[int, list[Piece]]()
    for shard in packed.manifest["shards"]:
        for batch in packed.batches(shard):
            boundaries, edges = lists_of(batch, "cu_seqlens")
            ids, labels = (rows_of(batch.column(name)) for name in ("input_ids", "labels"))
            for row, segments in enumerate(batch.column("segments").to_pylist()):
                cuts = boundaries[edges[row] : edges[row + 1]]
                for segment, a, b in zip(segments, cuts, cuts[1:], strict=False):
                    piece = (segment["start"], ids[row, a:b].tolist(), labels[row, a:b].tolist())
                    pieces_at.setdefault(segment["position"], []).append(piece)
    return {position: sorted(pieces) for position, pieces in pieces_at.items()}


@pytest.mark.parametrize("strategy", ["best-fit", "wrap", "next-fit", "mffd", "harmonic"])
@pytest.mark.parametrize(("window", "unit"), [(200, 10_000_000), (1000, 20_000), (5000, 5000)])
def test_labels_stay_with_their_tokens(folder: Path, strategy: str, window: int, unit: int) -> None:
    rng = random.Random(window)
    documents = []
    for _ in range(200):
        ids = [rng.randrange(1, 2**31) for _ in range(rng.choice([0, 1, 2, 5, 30, 64, 65, 200]))]
        document = {"input_ids": ids}
        if rng.random() < 0.7:
            document["labels"] = [token if rng.random() < 0.5 else -100 for token in ids]
        documents.append(document)
    lines = [json.dumps(document) + "\n" for document in documents]
    Path("tokens.jsonl").write_text("".join(lines))
    config = PackConfig(
        64, strategy=strategy, window_tokens=window, unit_bytes=unit, columns=COLUMNS,
        keep_untrained=True,
    )  # fmt: skip
    pipeline.pack(["tokens.jsonl"], Path("out"), config, RunOptions(progress=False, workers=2))
    packed = pieces_of(Path("out"))
    for position, document in zip(np.cumsum([0, *map(len, lines)]), documents, strict=False):
        pieces = packed.pop(int(position), [])
        assert [token for _, ids, _ in pieces for token in ids] == document["input_ids"]
        for start, ids, labels in pieces:
            given = document.get("labels", document["input_ids"])[start : start + len(ids)]
            assert labels == [-100, *given[1:]]
    assert packed == {}
