"""Rows a second out of a packed directory, by every way, in one process.

python loader.py DIR [VIEW]    prints {"rows_per_second": {way: rate}}
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import datasets
import numpy as np
import torch
from torch.utils.data import DataLoader

from packer_cli import open_packed
from packer_cli.result.columns import rows_of
from packer_cli.torch import PackedDataset, padded_collate, varlen_collate

BATCH, ROUNDS = 8, 5
SAME = ["input_ids", "labels", "attention_mask"]


def rates(directory: str, view: str = "") -> dict[str, float]:

    torch.set_num_threads(1)
    theirs = datasets.load_from_disk(directory)
    order = np.random.default_rng(0).permutation(len(theirs)).tolist()

    def load(dataset: Any, collate: Any, part: int = 1) -> tuple[int, Callable[[], Any]]:
        rows = order[: len(order) // part]
        loader = DataLoader(dataset, BATCH, sampler=rows, collate_fn=collate)
        return len(rows), lambda: drain(loader)

    ways = {
        "packer, same": load(PackedDataset(directory, SAME), lambda batch: batch.columns),
        "packer, all": load(PackedDataset(directory), lambda batch: batch),
        # with its own default collator, as it is used; lists of different lengths it cannot stack
        "datasets, same": load(theirs.with_format("torch", columns=SAME), None, 4),
        "datasets, all": load(theirs.with_format("torch"), lambda batch: batch, 4),
        "numpy, same": (len(order), plain(directory, order)),
        "varlen_collate": load(PackedDataset(directory), partial(varlen_collate, config=None)),
        "padded_collate": load(PackedDataset(directory), partial(padded_collate, config=None)),
    }
    if view:
        order_of_view = np.random.default_rng(0).permutation(len(PackedDataset(view))).tolist()
        for name, columns in (("same", SAME), ("all", None)):
            loader = DataLoader(
                PackedDataset(view, columns), BATCH, sampler=order_of_view,
                collate_fn=lambda batch: batch,
            )  # fmt: skip
            ways[f"view, {name}"] = len(order_of_view), partial(drain, loader)
    best = dict.fromkeys(ways, 0.0)
    for _ in range(ROUNDS):  # one after the other, so that a busy moment meets all of them
        for way, (rows, work) in ways.items():
            begun = time.perf_counter()
            work()
            best[way] = max(best[way], rows / (time.perf_counter() - begun))
    return best


def drain(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass


def plain(directory: str, order: list[int]) -> Callable[[], None]:
    """What one would write with nothing but numpy, given where every row lies."""

    packed = open_packed(directory)
    batches = [b for shard in packed.manifest["shards"] for b in packed.batches(shard)]
    views = [{name: rows_of(batch.column(name)) for name in SAME} for batch in batches]
    places = [(view, row) for view in views for row in range(len(view["input_ids"]))]

    def gather() -> None:
        for first in range(0, len(order), BATCH):
            rows = [places[row] for row in order[first : first + BATCH]]
            {name: np.stack([view[name][row] for view, row in rows]) for name in SAME}

    return gather


if __name__ == "__main__":
    print(json.dumps({"rows_per_second": rates(*sys.argv[1:])}))
