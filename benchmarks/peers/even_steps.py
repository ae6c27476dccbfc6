"""Rows a second of processor time of one rank, drawn with and without balance, in one process.

python even_steps.py DIR WORLD_SIZE BATCH_SIZE    prints {"rows_per_second": {way: rate}}
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from packer_cli.torch import PackedDataset, PackedSampler, varlen_collate

ROUNDS, MICRO_BATCHES, ROWS, LEAST_SECONDS = 6, 4, 20_000, 0.3


def rates(directory: str, world_size: int, batch_size: int) -> dict[str, float]:
    torch.set_num_threads(1)
    # the same rows several times: as many as several steps of all ranks take
    rows = len(PackedDataset(directory))
    dataset = PackedDataset([directory] * -(-ROWS // rows))
    sizes = {"batch_size": batch_size, "micro_batches": MICRO_BATCHES, "hidden_size": 4096}
    best: dict[str, float] = {}
    for _ in range(ROUNDS):  # one after the other, so that a busy moment meets all of them
        for balance in (None, "step", "order"):
            chosen: dict[str, Any] = {"balance": balance} | sizes if balance else {}
            sampler = PackedSampler(dataset, rank=0, world_size=world_size, **chosen)
            loader = DataLoader(
                dataset, batch_size, sampler=sampler,
                collate_fn=partial(varlen_collate, config=None),
            )  # fmt: skip
            for name, rows_of in (("sampler", sampler), ("loader", loader)):
                way = f"{name}, {balance}"
                best[way] = max(best.get(way, 0), rate(sampler, rows_of))
    return best


def rate(sampler: PackedSampler, batches: Any) -> float:
    """Rows a second of processor time, over whole epochs: nothing but this process works for it."""
    rows, begun = 0, time.process_time()
    while (seconds := time.process_time() - begun) < LEAST_SECONDS:
        rows += len(sampler)
        for _ in batches:
            pass
    return rows / seconds


if __name__ == "__main__":
    directory, world_size, batch_size = sys.argv[1:]
    found = rates(directory, int(world_size), int(batch_size))
    print(json.dumps({"rows_per_second": found}))
