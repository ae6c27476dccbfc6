"""How good plans are: rows are about as few as the lower bound allows, and mixed."""

from __future__ import annotations

import json
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import heavy, pack, packer, succeeds

from packer_cli import PackPlan, open_packed, plan_packing
from packer_cli.options.options import NAMES, STRATEGIES
from packer_cli.packing.figures import lower_bound_rows

relaxed = settings(max_examples=100, deadline=None)


def bound(lengths: list[int], capacity: int) -> int:
    counts = np.bincount(np.array(lengths, np.int64), minlength=capacity + 1)
    return lower_bound_rows(counts, capacity)


def _fewest_rows(lengths: list[int], capacity: int, most: int = 99) -> int:
    """The optimum by exhaustive search."""
    if not lengths:
        return 0
    first, rest = lengths[0], lengths[1:]
    best = len(lengths)
    for size in range(min(len(rest) + 1, most)):
        for others in combinations(range(len(rest)), size):
            if first + sum(rest[i] for i in others) <= capacity:
                left = [length for i, length in enumerate(rest) if i not in others]
                best = min(best, 1 + _fewest_rows(left, capacity, most))
    return best


@relaxed
@given(st.integers(1, 13).flatmap(
    lambda c: st.tuples(st.lists(st.integers(1, c), max_size=6), st.just(c))))  # fmt: skip
def test_the_bound_never_exceeds_the_optimum(problem: tuple[list[int], int]) -> None:
    fewest = _fewest_rows(*problem)
    assert bound(*problem) <= fewest
    for strategy in set(NAMES) - {"wrap"}:  # "wrap" may cut documents, and then need fewer
        assert len(plan_packing(*problem, strategy=strategy)) >= fewest


@relaxed
@given(st.integers(1, 7).flatmap(
    lambda c: st.tuples(st.lists(st.integers(1, 2 * c), max_size=6), st.just(2 * c))),
    st.integers(1, 4))  # fmt: skip
def test_limits_raise_the_bound_no_further_than_the_optimum(
    problem: tuple[list[int], int], most: int
) -> None:
    lengths, capacity = problem
    counts = np.bincount(np.array(lengths, np.int64), minlength=capacity + 1)
    padded = [length + length % 2 for length in lengths]
    assert lower_bound_rows(counts, capacity, segment_multiple=2) == bound(padded, capacity)
    limited = lower_bound_rows(counts, capacity, max_segments=most)
    assert limited >= max(bound(lengths, capacity), -(-len(lengths) // most))
    assert limited <= _fewest_rows(lengths, capacity, most)


def _cut_rows(seed: int, rows: int, capacity: int) -> list[int]:
    """Lengths that fill exactly `rows` rows: the optimum is known."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    for _ in range(rows):
        cuts = np.sort(rng.integers(0, capacity + 1, rng.integers(1, 5)))
        lengths += np.diff(np.concatenate([[0], cuts, [capacity]])).tolist()
    lengths = [length for length in lengths if length]
    rng.shuffle(lengths)
    return lengths


@pytest.mark.parametrize("seed", range(15))
def test_decreasing_strategies_keep_their_guarantees(seed: int) -> None:
    optimum, capacity = (40, 1000) if seed % 2 else (300, 61)
    lengths = _cut_rows(seed, optimum, capacity)
    assert bound(lengths, capacity) == optimum
    ratios = {"mffd": 71 / 60, "best-fit-decreasing": 11 / 9, "first-fit": 11 / 9}
    for strategy, ratio in ratios.items():
        rows = len(plan_packing(lengths, capacity, strategy=strategy))
        assert optimum <= rows <= ratio * optimum + 1


# Rows are about as few as those of the exact order, and mix lengths and inputs


# Lengths, tokens in a row, and how many percent more rows than of best-fit-decreasing are allowed.
DATA = {
    "short texts": (lambda rng: rng.lognormal(5.5, 1, 100_000), 4096, 0.1),
    "long texts": (lambda rng: rng.lognormal(6.2, 1.6, 100_000), 32768, 0.1),
    "uniform": (lambda rng: rng.integers(100, 701, 50_000), 4096, 0.3),
    "one window": (lambda rng: rng.lognormal(6.8, 0.7, 5000), 4096, 0.3),
}
SEEDED = [name for name in NAMES if STRATEGIES[name].order != "input"]


def of_one_length(lengths: Any, plan: PackPlan) -> float:
    """The share of rows of three documents or more, over 80% of them within 5% of the median."""
    rows = [lengths[plan.order[a:b]] for a, b in pairwise(plan.row_offsets)]
    alike = [
        len(row) >= 3 and (abs(row - np.median(row)) <= 0.05 * np.median(row)).mean() > 0.8
        for row in rows
    ]
    return float(np.mean(alike))


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("seed", [0, heavy(1)])
def test_rows_are_as_few_as_of_the_exact_order_and_not_of_one_length(data: str, seed: int) -> None:
    draw, max_length, allowed = DATA[data]
    lengths = np.clip(draw(np.random.default_rng(seed)), 1, max_length).astype(np.int32)
    mixed = plan_packing(lengths, max_length, seed=seed)
    exact = plan_packing(lengths, max_length, strategy="best-fit-decreasing", seed=seed)
    assert len(mixed) <= len(exact) * (1 + allowed / 100)
    assert of_one_length(lengths, mixed) < 0.001
    assert of_one_length(lengths, exact) > 0.2


def test_lengths_that_seldom_fit_together_are_planned_in_the_exact_order() -> None:
    lengths = np.random.default_rng(0).choice([1000, 1300], 9000)
    exact = len(plan_packing(lengths, 4096, strategy="best-fit-decreasing"))
    assert exact * 1.02 < len(plan_packing(lengths, 4096, strategy="first-fit-shuffle"))
    assert len(plan_packing(lengths, 4096)) <= exact * 1.003 + 1


def test_a_limit_of_segments_leaves_no_rows_of_short_documents() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 1, 20_000), 1, 4096).astype(int)
    mixed, exact = (
        plan_packing(lengths, 4096, strategy=name, max_segments_per_row=12)
        for name in ("best-fit", "best-fit-decreasing")
    )
    assert len(mixed) < 0.9 * len(exact)


@pytest.mark.parametrize("strategy", SEEDED)
def test_equal_lengths_come_from_everywhere(strategy: str) -> None:
    plan = plan_packing(np.full(1000, 10), 100, strategy=strategy, seed=3)
    inputs = [len({document // 100 for document in row}) for row in plan.rows()]
    assert np.mean(inputs) > 5


def _inputs() -> list[str]:
    """Three files with the same lengths, a thousand documents in each."""
    lengths = np.random.default_rng(5).integers(20, 60, 1000).tolist()
    for name in "abc":
        Path(f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": name * length}) + "\n" for length in lengths)
        )
    return ["a.jsonl", "b.jsonl", "c.jsonl"]


@pytest.mark.parametrize("shuffle", ["--shuffle", "--no-shuffle"])
def test_rows_of_several_files(folder: Path, shuffle: str) -> None:
    pack(*_inputs(), "-l", 512, shuffle)
    Path("out").rename("mixed")
    pack(*_inputs(), "-l", 512, shuffle, "--strategy", "bfd")
    Path("out").rename("exact")
    figures = [json.loads(packer("stats", one, "--json").stdout) for one in ("mixed", "exact")]
    mixed, exact = (one["mixedness"] for one in figures)
    assert figures[0]["rows"] <= figures[1]["rows"]
    assert mixed["one_length"] == 0
    assert max(mixed["one_input"], exact["one_input"]) < 0.02
    assert 0.9 < mixed["spread"] < 1.1
    assert exact["one_length"] > 0.9
    assert exact["spread"] < 0.3
    for name in ("mixed", "exact"):
        succeeds("verify", name, "--against-inputs")
    counts = open_packed("mixed").manifest["histograms"]
    many = sum(counts["segments_per_row"][2:])
    assert sum(counts["one_length"]) == sum(counts["one_input"]) == many
