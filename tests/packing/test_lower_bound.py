"""How few rows there can be: the lower bound is true and L2, and strategies keep near it."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer_cli import plan_packing
from packer_cli.options.options import NAMES
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


def _l2(lengths: list[int], capacity: int) -> int:
    """Martello and Toth's L2, from its definition."""
    best = 0
    for a in range(capacity // 2 + 1):
        one = [s for s in lengths if s > capacity - a]
        two = [s for s in lengths if capacity - a >= s > capacity / 2]
        three = sum(s for s in lengths if capacity / 2 >= s >= a)
        spill = max(0, -(-(three - (len(two) * capacity - sum(two))) // capacity))
        best = max(best, len(one) + len(two) + spill)
    return best


@relaxed
@given(st.integers(1, 30).flatmap(lambda c: st.tuples(st.lists(st.integers(0, c)), st.just(c))))
def test_the_bound_is_l2_from_its_definition(problem: tuple[list[int], int]) -> None:
    lengths, capacity = problem
    assert bound(lengths, capacity) == _l2(lengths, capacity) >= -(-sum(lengths) // capacity)


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


@pytest.mark.parametrize(
    ("strategy", "rows"), [("first-fit", 110), ("best-fit-decreasing", 110), ("mffd", 95)]
)
def test_first_fit_decreasing_reaches_its_worst_case_and_mffd_stays_below(
    strategy: str, rows: int
) -> None:
    """Johnson's lengths: 60 rows of 510 + 260 + 230 and 30 of 2 * 270 + 2 * 230 fill 90 rows.

    First fit decreasing puts 510 with 270, then has 260 three and 230 four to a row: 11/9.
    MFFD finds the 60 rows; after them its last step puts 270 three and 230 four to a row.
    """
    lengths = [510] * 60 + [270] * 60 + [260] * 60 + [230] * 120
    assert bound(lengths, 1000) == 90
    assert len(plan_packing(lengths, 1000, strategy=strategy)) == rows
