"""Dealing rows to ranks: as the slow twin does, and hardly worse than the best of all ways."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packer_cli._kernels import dealing, reference

UNTOUCHED, MARGIN = 77, 3
relaxed = settings(max_examples=300, deadline=None)
sizes = st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 4))


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Costs, many of them equal or all different, and ranks, rows and micro-batches."""
    size = draw(sizes)
    n, seed = draw(st.integers(0, 60)) * size[0], draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    most = draw(st.sampled_from([1, 5, 1_000_000]))
    costs = rng.integers(0, most, n, endpoint=True) + draw(st.sampled_from([0, 0.25]))
    return fixed(rng.lognormal(3, 2, n) if draw(st.booleans()) else costs), size


def fixed(values: object) -> np.ndarray:
    array = np.array(values, np.float64)
    array.setflags(write=False)
    return array


def output(size: int) -> np.ndarray:
    return np.full(size + 2 * MARGIN, UNTOUCHED, np.int64)[MARGIN : MARGIN + size]


def margins_kept(out: np.ndarray) -> bool:
    return (np.delete(out.base, np.s_[MARGIN : MARGIN + len(out)]) == UNTOUCHED).all()


@relaxed
@given(problems())
def test_deal_equals_its_twin(problem: tuple[np.ndarray, tuple[int, int, int]]) -> None:
    costs, (ranks, rows, micro_batches) = problem
    out = output(len(costs))
    dealing.deal(costs, ranks, rows, micro_batches, False, out)
    assert margins_kept(out)
    assert out.tolist() == reference.deal(costs.tolist(), ranks, rows, micro_batches, False)
    # each rank has one of each so many rows
    assert (np.sort(out.reshape(-1, ranks)) == np.arange(len(costs)).reshape(-1, ranks)).all()


@relaxed
@given(problems())
def test_deal_with_exchanges_equals_its_twin(
    problem: tuple[np.ndarray, tuple[int, int, int]],
) -> None:
    costs, (ranks, rows, micro_batches) = problem
    step = ranks * rows * micro_batches
    before, after = output(len(costs)), output(len(costs))
    dealing.costliest_first(costs, step, before)
    costs = fixed(costs[before])
    dealing.deal(costs, ranks, rows, micro_batches, False, before)
    dealing.deal(costs, ranks, rows, micro_batches, True, after)
    assert margins_kept(after)
    assert after.tolist() == reference.deal(costs.tolist(), ranks, rows, micro_batches, True)
    for begin in range(0, len(costs), step):
        plain, even = (out[begin : begin + step].reshape(-1, ranks) for out in (before, after))
        assert sorted(even.ravel()) == list(range(begin, min(begin + step, len(costs))))
        assert (np.diff(even, axis=0) > 0).all()  # the costliest first, for each rank
        assert costs[even].sum(axis=0).max() <= costs[plain].sum(axis=0).max() * (1 + 1e-12)


@relaxed
@given(problems(), st.integers(1, 100))
def test_costliest_first_equals_its_twin(
    problem: tuple[np.ndarray, tuple[int, int, int]], size: int
) -> None:
    costs, _ = problem
    out = output(len(costs))
    dealing.costliest_first(costs, size, out)
    assert margins_kept(out)
    assert out.tolist() == reference.costliest_first(costs.tolist(), size)


def test_the_largest_joins_the_smallest() -> None:
    costs = fixed([9, 7, 6, 5, 3, 1, 4, 4, 4])
    out = output(9)
    dealing.deal(costs, 3, 1, 3, False, out)
    # 5 3 1 differ most, then 9 7 6: 10, 10, 11, and all get 4 more
    assert costs[out].reshape(3, 3).sum(axis=0).tolist() == [15, 14, 14]


def test_the_costliest_and_the_cheapest_rank_exchange_rows() -> None:
    """One of each two rows for both would be 9 + 4 and 8 + 5 at best, and 4 + 1 and 4 + 1."""
    costs, out = fixed([20, 9, 8, 7, 3, 1]), output(6)
    dealing.deal(costs, 2, 1, 3, False, out)
    assert costs[out].reshape(3, 2).sum(axis=0).tolist() == [28, 20]
    dealing.deal(costs, 2, 1, 3, True, out)
    assert costs[out].reshape(3, 2).T.tolist() == [[20, 3, 1], [9, 8, 7]]


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_it_is_about_as_even_as_any_way(micro_batches: int) -> None:
    """The costliest rank of 3 against the best of all ways to give each one of each 3 rows."""
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(300):
        costs = rng.lognormal(3, 1, (micro_batches, 3))
        costs = -np.sort(-costs.ravel())
        out = output(len(costs))
        dealing.deal(costs, 3, 1, micro_batches, True, out)
        dealt = costs[out].reshape(micro_batches, 3).sum(axis=0).max()
        groups = costs.reshape(micro_batches, 3)
        ways = product(permutations(range(3)), repeat=micro_batches)
        best = min(
            sum(group[[*turn]] for group, turn in zip(groups, way, strict=True)).max()
            for way in ways
        )
        ratios.append(dealt / best)
    assert np.mean(ratios) < 1.01
    assert max(ratios) < 1.2
