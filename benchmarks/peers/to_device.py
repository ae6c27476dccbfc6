"""Tokens a second to the GPU: {"gpu": name, way: rate} or {"skipped": why}, as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from packer_cli.torch import PackingIterableDataset, to_device, varlen_collate

BATCHES, ROWS, MAX_LENGTH, ROUNDS = 64, 8, 4096, 7


def pageable(batches: list[Any]) -> Iterable[Any]:
    for batch in batches:
        yield {name: v.cuda() if torch.is_tensor(v) else v for name, v in batch.items()}


def pinned(batches: list[Any]) -> Iterable[Any]:
    for batch in batches:
        yield {
            name: v.pin_memory().to("cuda", non_blocking=True) if torch.is_tensor(v) else v
            for name, v in batch.items()
        }


def best_rate(ways: dict[str, Callable[[], Iterable[Any]]]) -> dict[str, float]:
    """The best of some rounds of each, one after the other."""
    best = dict.fromkeys(ways, 0.0)
    for _ in range(ROUNDS):
        for way, batches in ways.items():
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for batch in batches():
                batch["input_ids"].sum()  # a step, however small, on the step's stream
            torch.cuda.synchronize()
            seconds = time.perf_counter() - begun
            best[way] = max(best[way], BATCHES * ROWS * MAX_LENGTH / seconds)
    return best


def main() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"skipped": "no GPU here"}
    documents = [list(range(n % 3000 + 100)) for n in range(0, BATCHES * ROWS * 3000, 977)]
    rows = list(PackingIterableDataset(documents, MAX_LENGTH))
    picked = [[rows[(k * ROWS + i) % len(rows)] for i in range(ROWS)] for k in range(BATCHES)]
    wide = [varlen_collate(one, config=None) for one in picked]
    narrow = [varlen_collate(one, dtype=torch.int32, config=None) for one in picked]
    rates = best_rate(
        {
            "pageable": lambda: pageable(wide),
            "pinned for each batch": lambda: pinned(wide),
            "to_device": lambda: to_device(narrow, "cuda"),
        }
    )
    return {"gpu": torch.cuda.get_device_name(), **rates}


if __name__ == "__main__":
    print(json.dumps(main()))
