"""plan_packing: what every strategy must keep, whatever the lengths, and its errors."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer_cli import PackPlan, plan_packing
from packer_cli.bounds import lower_bound_rows
from packer_cli.errors import DataError, PackerError, UsageError
from packer_cli.strategies import ALIASES, NAMES, keeps_order

relaxed = settings(max_examples=40, deadline=None)
capacities = st.one_of(
    st.sampled_from([1, 2, 3, 63, 64, 65, 4095, 4096, 4097, 131072]), st.integers(1, 3000)
)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int]:
    capacity = draw(capacities)
    lengths = st.one_of(st.integers(0, capacity), st.sampled_from([1, capacity // 2 + 1, capacity]))
    return draw(st.lists(lengths, max_size=150)), capacity


def check(plan: PackPlan, lengths: list[int]) -> None:
    """Every token of every document in exactly one row, and no row too full."""
    pieces = plan.pieces
    assert sorted(plan.order.tolist()) == list(range(len(pieces)))
    assert plan.row_offsets[0] == 0
    assert plan.row_offsets[-1] == len(pieces)
    assert (np.diff(plan.row_offsets) > 0).all()
    assert (plan.row_tokens <= plan.max_length).all()
    assert (pieces.length > 0).all()
    placed = np.bincount(pieces.document, weights=pieces.length, minlength=len(lengths))
    assert placed.tolist() == lengths
    inside = np.concatenate([[0], np.cumsum(lengths)])[pieces.document] + pieces.start
    assert pieces.begin.tolist() == inside.tolist()


@pytest.mark.parametrize("strategy", NAMES)
@relaxed
@given(problems(), st.one_of(st.none(), st.integers(0, 2**63 - 1)))
def test_every_strategy_places_every_document_once(
    strategy: str, problem: tuple[list[int], int], seed: int | None
) -> None:
    lengths, capacity = problem
    plan = plan_packing(lengths, capacity, strategy=strategy, seed=seed)
    check(plan, lengths)
    metrics = plan.metrics
    assert metrics.rows == len(plan) == len(plan.rows())
    assert metrics.rows >= metrics.lower_bound_rows >= -(-sum(lengths) // capacity)
    assert metrics.tokens == sum(lengths)
    assert metrics.padding_tokens == metrics.rows * capacity - sum(lengths)
    assert metrics.documents == len(lengths)


@pytest.mark.parametrize("strategy", ["next-fit", "wrap"])
@relaxed
@given(problems())
def test_order_is_kept(strategy: str, problem: tuple[list[int], int]) -> None:
    plan = plan_packing(problem[0], problem[1], strategy=strategy, seed=5)
    assert keeps_order(strategy)
    assert plan.order.tolist() == list(range(len(plan.pieces)))


@relaxed
@given(problems())
def test_wrap_leaves_padding_only_in_the_last_row(problem: tuple[list[int], int]) -> None:
    plan = plan_packing(problem[0], problem[1], strategy="wrap")
    assert (plan.row_tokens[:-1] == problem[1]).all()


def test_wrap_cuts_documents_at_the_edges_of_rows() -> None:
    plan = plan_packing([3, 0, 7, 2], 4, strategy="wrap")
    assert plan.rows() == [[0, 2], [2], [2, 3]]
    assert plan.pieces.start.tolist() == [0, 0, 1, 5, 0]


@relaxed
@given(problems(), st.integers(0, 2**63 - 1))
def test_a_seed_only_reorders(problem: tuple[list[int], int], seed: int) -> None:
    plain = plan_packing(*problem).rows()
    shuffled = plan_packing(*problem, seed=seed).rows()
    assert sorted(map(sorted, shuffled)) == sorted(map(sorted, plain))
    assert plan_packing(*problem, seed=seed).rows() == shuffled


def test_seeds_differ_and_rows_do_not_come_longest_first() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 3000)
    first, second = (plan_packing(lengths, 4096, seed=seed) for seed in (1, 2))
    assert first.rows() != second.rows()
    heads = lengths[[row[0] for row in first.rows()]]
    assert abs(np.corrcoef(heads, np.arange(len(heads)))[0, 1]) < 0.15


@pytest.mark.parametrize("name", NAMES)
def test_aliases_mean_the_same(name: str) -> None:
    lengths = np.random.default_rng(1).integers(1, 100, 200)
    expected = plan_packing(lengths, 128, strategy=name).rows()
    for alias in ALIASES[name]:
        assert plan_packing(lengths, 128, strategy=alias).rows() == expected


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


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize(
    ("strategy", "ratio"), [("mffd", 71 / 60), ("best-fit", 11 / 9), ("first-fit", 11 / 9)]
)
def test_decreasing_strategies_keep_their_bounds(strategy: str, ratio: float, seed: int) -> None:
    optimum = 40
    rows = len(plan_packing(_cut_rows(seed, optimum, 1000), 1000, strategy=strategy))
    assert optimum <= rows <= ratio * optimum + 1


def test_harmonic_puts_equal_documents_together() -> None:
    assert plan_packing([60, 40, 60, 40], 100, strategy="hk").rows() == [[0], [1, 3], [2]]


def test_a_million_documents() -> None:
    lengths = np.random.default_rng(2).integers(1, 4097, 1_000_000)
    plan = plan_packing(lengths, 4096, seed=0)
    check(plan, lengths.tolist())
    assert plan.metrics.rows <= plan.metrics.lower_bound_rows * 1.001


@pytest.mark.parametrize(
    ("overlong", "rows", "lost"),
    [("split", 4, (0, 0, 0)), ("truncate", 2, (15, 0, 0)), ("drop", 1, (0, 1, 25))],
)
def test_overlong_policies(overlong: str, rows: int, lost: tuple[int, int, int]) -> None:
    metrics = plan_packing([3, 25, 4, 0], 10, overlong=overlong).metrics
    found = (metrics.truncated_tokens, metrics.dropped_documents, metrics.dropped_tokens)
    assert (metrics.rows, found) == (rows, lost)
    assert metrics.tokens + metrics.truncated_tokens + metrics.dropped_tokens == 32


def test_metrics_of_a_known_plan() -> None:
    metrics = plan_packing([6, 4, 5], 10).metrics
    assert (metrics.rows, metrics.tokens, metrics.padding_tokens) == (2, 15, 5)
    assert metrics.utilization == metrics.row_utilization_mean == 0.75
    assert (metrics.row_utilization_min, metrics.row_utilization_max) == (0.5, 1.0)
    assert metrics.row_utilization_std == 0.25
    assert metrics.segments_per_row_mean == 1.5


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_nothing_to_pack(lengths: list[int]) -> None:
    plan = plan_packing(lengths, 8)
    assert plan.rows() == []
    assert plan.metrics.utilization == 0.0


@pytest.mark.parametrize(
    ("kind", "message", "arguments"),
    [
        (UsageError, "strategy: 'best' is not one of best-fit, first-fit", {"strategy": "best"}),
        (UsageError, "max_length: 0 is not between 1 and 16777216", {"max_length": 0}),
        (UsageError, "max_length: 16777217 is not", {"max_length": 16777217}),
        (UsageError, "overlong: 'cut' is not one of split, truncate", {"overlong": "cut"}),
        (UsageError, "expected a flat sequence of integers", {"lengths": [[1, 2], [3, 4]]}),
        (UsageError, "expected a flat sequence of integers", {"lengths": [1.5]}),
        (DataError, "document 1 has the negative length -4", {"lengths": [1, -4]}),
        (DataError, "document 2 has 9 tokens, max_length is 8", {"lengths": [8, 0, 9]}),
    ],
)
def test_errors_name_what_is_wrong(
    kind: type[PackerError], message: str, arguments: dict[str, object]
) -> None:
    with pytest.raises(kind) as caught:
        plan_packing(**({"lengths": [1], "max_length": 8} | arguments))  # type: ignore[arg-type]
    assert message in caught.value.message


# The lower bound


def _fewest_rows(lengths: list[int], capacity: int) -> int:
    """The optimum by exhaustive search."""
    if not lengths:
        return 0
    first, rest = lengths[0], lengths[1:]
    best = len(lengths)
    for size in range(len(rest) + 1):
        for others in combinations(range(len(rest)), size):
            if first + sum(rest[i] for i in others) <= capacity:
                left = [length for i, length in enumerate(rest) if i not in others]
                best = min(best, 1 + _fewest_rows(left, capacity))
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
@given(st.integers(1, 30).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c)))))
def test_lower_bound_is_l2_or_volume(problem: tuple[int, list[int]]) -> None:
    capacity, lengths = problem
    counts = np.bincount(np.array(lengths, np.int64), minlength=capacity + 1)
    expected = max(_l2(lengths, capacity), -(-sum(lengths) // capacity))
    assert lower_bound_rows(counts, capacity) == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 12), max_size=6))
def test_lower_bound_never_exceeds_the_optimum(lengths: list[int]) -> None:
    counts = np.bincount(np.array(lengths, np.int64), minlength=13)
    assert lower_bound_rows(counts, 12) <= _fewest_rows(lengths, 12)
