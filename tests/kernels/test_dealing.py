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
    dealing.deal(costs, ranks, rows, micro_batches, out)
    assert margins_kept(out)
    assert out.tolist() == reference.deal(costs.tolist(), ranks, rows, micro_batches)
    # each rank has one of each so many rows
    assert (np.sort(out.reshape(-1, ranks)) == np.arange(len(costs)).reshape(-1, ranks)).all()


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
    dealing.deal(costs, 3, 1, 3, out)
    # 5 3 1 differ most, then 9 7 6: 10, 10, 11, and all get 4 more
    assert costs[out].reshape(3, 3).sum(axis=0).tolist() == [15, 14, 14]


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_it_is_about_as_even_as_any_way(micro_batches: int) -> None:
    """The costliest rank of 3 against the best of all ways to give each one of each 3 rows."""
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(300):
        costs = rng.lognormal(3, 1, (micro_batches, 3))
        costs = -np.sort(-costs.ravel())
        out = output(len(costs))
        dealing.deal(costs, 3, 1, micro_batches, out)
        dealt = costs[out].reshape(micro_batches, 3).sum(axis=0).max()
        groups = costs.reshape(micro_batches, 3)
        ways = product(permutations(range(3)), repeat=micro_batches)
        best = min(
            sum(group[[*turn]] for group, turn in zip(groups, way, strict=True)).max()
            for way in ways
        )
        assert dealt >= best - 1e-9
        ratios.append(dealt / best)
    assert np.mean(ratios) < 1.01
    assert max(ratios) < 1.2
