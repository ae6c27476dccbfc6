"""`packer stats --ranks`: how the slowest rank of steps compares with the mean one."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from approving import assert_approved
from support import assert_error, jsonl, packer, squared_lengths_by_hand, succeeds

from packer_cli.cli import stats
from packer_cli.steps import Order, Schedule, StepSizes

pytestmark = pytest.mark.usefixtures("out")
L, HIDDEN = 256, 4
SIZES = ("--ranks", 8, "--micro-batches", 2, "--batch-size", 3, "--hidden-size", HIDDEN)


@pytest.fixture
def out(folder: Path) -> None:
    random_ = random.Random(0)
    lengths = (min(int(random_.lognormvariate(3, 1.5)), L - 1) for _ in range(2000))
    Path("a.jsonl").write_bytes(jsonl(*("x" * length for length in lengths)))
    succeeds("pack", "a.jsonl", "-l", L, "-t", "bytes", "-q", "-o", "out")


def steps_in(directory: object = "out", *sizes: object) -> dict[str, Any]:
    result = packer("stats", directory, *(sizes or SIZES), "--json")
    assert (result.exit_code, result.stderr) == (0, ""), result.stderr
    steps: dict[str, Any] = json.loads(result.stdout)["steps"]
    return steps


def by_hand(balance: Any, ranks: int, micro_batches: int, batch_size: int) -> float:
    """The mean over steps of slowest / mean, rank by rank."""
    costs = np.array(squared_lengths_by_hand("out"), np.float64) + 6 * HIDDEN * L
    sizes = StepSizes(ranks, batch_size, micro_batches)
    schedule = Schedule(Order(len(costs)), sizes, balance=balance, costs=costs)
    ratios = []
    for step in range(len(costs) // sizes.rows):
        rows = schedule.rows_at(step * sizes.rows, (step + 1) * sizes.rows)
        own = [sum(costs[row] for row in rows[rank::ranks]) for rank in range(ranks)]
        ratios.append(max(own) / (sum(own) / ranks))
    return sum(ratios) / len(ratios)


@pytest.mark.parametrize("sizes", [(8, 2, 3), (16, 1, 1), (1, 4, 2)])
def test_it_is_what_the_steps_cost(sizes: tuple[int, int, int]) -> None:
    options = zip(("--ranks", "--micro-batches", "--batch-size"), sizes, strict=True)
    found = steps_in("out", *(part for pair in options for part in pair), "--hidden-size", HIDDEN)
    steps = len(squared_lengths_by_hand("out")) // int(np.prod(sizes))
    assert (found["steps"], found["steps_counted"]) == (steps, steps)
    for name in ("random", "step", "order"):
        balance = None if name == "random" else name
        assert found[name] == pytest.approx(by_hand(balance, *sizes))
    if sizes == (8, 2, 3):
        assert 1 <= found["order"] < found["step"] < found["random"] - 0.1


def test_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def line(*sizes: object) -> str:
        (found,) = (one for one in packer("stats", "out", *sizes).stdout.splitlines()
                    if one.startswith("slowest rank"))  # fmt: skip
        return found

    lines = [line(*SIZES), line("--ranks", 9999, "--hidden-size", HIDDEN)]
    monkeypatch.setattr(stats, "_MOST_ROWS", 100)
    assert_approved("stats --ranks", *lines, line(*SIZES))
    assert "slowest rank" not in packer("stats", "out").stdout


def test_views_and_sides_of_a_split() -> None:
    succeeds("tokenize", "a.jsonl", "-t", "bytes", "-q", "-o", "tokens")
    for name, more in (("view", ["--view"]), ("rows", [])):
        succeeds("pack", "tokens", "-l", L, *more, "-q", "-o", name)
    assert steps_in("view") == steps_in("rows")
    refused = packer("stats", "tokens", *SIZES)
    assert_error(refused, 2, "--ranks: tokens holds documents, which are not in rows yet")
    recipe = 'max_length = 256\ntokenizer = "bytes"\n[validation]\nshare = 0.1\n'
    source = '[[source]]\nname = "a"\ninputs = ["a.jsonl"]\nweight = 1\n'
    Path("mix.toml").write_text(recipe + source)
    succeeds("pack", "mix.toml", "-q", "-o", "both")
    both = json.loads(packer("stats", "both", *SIZES, "--json").stdout)
    assert both["train"]["steps"] == steps_in("both/train")
    assert both["validation"]["steps"]["steps"] == 0
