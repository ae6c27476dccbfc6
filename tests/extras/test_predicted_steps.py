"""`packer stats --ranks` predicts the steps that `PackedSampler` makes with its defaults."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from support import jsonl, packer, squared_lengths_by_hand

from packer_cli.torch import PackedDataset, PackedSampler

L, HIDDEN = 256, 4
RANKS, MICRO_BATCHES, BATCH = 4, 2, 3


@pytest.mark.parametrize("balance", [None, "step", "order"])
def test_the_steps_of_the_sampler_cost_what_was_predicted(
    folder: Path, balance: str | None
) -> None:
    random_ = random.Random(0)
    lengths = (min(int(random_.lognormvariate(3, 1.5)), L - 1) for _ in range(9000))
    (folder / "a.jsonl").write_bytes(jsonl(*("x" * length for length in lengths)))
    assert packer("pack", "a.jsonl", "-l", L, "-t", "bytes", "-q", "-o", "out").exit_code == 0
    sizes = ("--ranks", RANKS, "--micro-batches", MICRO_BATCHES, "--batch-size", BATCH)
    told = packer("stats", "out", *sizes, "--hidden-size", HIDDEN, "--json")
    predicted = json.loads(told.stdout)["steps"]
    costs, dataset = 6 * HIDDEN * L + np.array(squared_lengths_by_hand("out")), PackedDataset("out")
    how = {"balance": balance, "batch_size": BATCH, "micro_batches": MICRO_BATCHES,
           "hidden_size": HIDDEN} if balance else {}  # fmt: skip
    of_rank = BATCH * MICRO_BATCHES
    own = np.stack([
        costs[[*PackedSampler(dataset, rank=rank, world_size=RANKS, **how)]]  # type: ignore[arg-type]
        [: predicted["steps"] * of_rank].reshape(-1, of_rank).sum(1)
        for rank in range(RANKS)
    ])  # fmt: skip
    assert own.shape == (RANKS, predicted["steps"])
    ratio = (own.max(0) / own.mean(0)).mean()
    assert predicted[balance or "random"]["max_over_mean"] == pytest.approx(ratio)
