"""plan_packing: what every strategy must keep, whatever the lengths, and its errors."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packer_cli._kernels import reference

from packer_cli import PackPlan, plan_packing
from packer_cli.config.strategies import ALIASES, NAMES, keeps_order, takes_input_order
from packer_cli.errors import DataError, PackerError, UsageError
from packer_cli.packing.fitting import fit
from packer_cli.packing.planning import HARMONIC_CLASSES, plan_rows

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


LIMITABLE = [name for name in NAMES if name not in ("wrap", "mffd")]


@pytest.mark.parametrize("strategy", NAMES)
@relaxed
@given(problems(), st.integers(1, 6), st.sampled_from([1, 2, 3, 16]), st.booleans())
def test_rows_keep_to_their_limits(
    strategy: str, problem: tuple[list[int], int], most: int, multiple: int, limited: bool
) -> None:
    lengths, capacity = problem[0], problem[1] * multiple
    limit = most if limited and strategy in LIMITABLE else None
    plan = plan_packing(lengths, capacity, strategy=strategy, seed=3,
                        max_segments_per_row=limit, segment_multiple=multiple)  # fmt: skip
    check(plan, lengths)
    taken = -(-plan.pieces.length // multiple) * multiple
    fills = [taken[plan.order[a:b]].sum() for a, b in pairwise(plan.row_offsets)]
    assert all(fill <= capacity for fill in fills)
    assert limit is None or (np.diff(plan.row_offsets) <= limit).all()
    assert plan.metrics.rows >= plan.metrics.lower_bound_rows
    assert limit is None or plan.metrics.lower_bound_rows >= -(-len(plan.pieces) // limit)
    if strategy == "wrap":
        assert all(fill == capacity for fill in fills[:-1])


@pytest.mark.parametrize("seed", [None, 4])
@relaxed
@given(problem=problems())
def test_balance_only_exchanges(problem: tuple[list[int], int], seed: int | None) -> None:
    plain, even = (plan_packing(*problem, seed=seed, balance=how) for how in ("none", "attention"))
    check(even, problem[0])
    assert sorted(even.row_tokens.tolist()) == sorted(plain.row_tokens.tolist())
    squares = []
    for plan in (plain, even):
        cost = np.add.reduceat(
            plan.pieces.length[plan.order].astype(np.int64) ** 2, plan.row_offsets[:-1]
        ) if len(plan) else np.zeros(1, np.int64)  # fmt: skip
        squares.append(sum(one**2 for one in cost.tolist()))
    assert squares[1] <= squares[0]


@pytest.mark.parametrize("strategy", LIMITABLE)
@relaxed
@given(problem=problems(), multiple=st.integers(1, 5))
def test_multiples_are_planned_as_their_units(
    strategy: str, problem: tuple[list[int], int], multiple: int
) -> None:
    padded = [length * multiple for length in problem[0]]
    plan = plan_packing(padded, problem[1] * multiple, strategy=strategy, segment_multiple=multiple)
    assert plan.rows() == plan_packing(*problem, strategy=strategy).rows()


def _expected_rows(strategy: str, lengths: list[int], capacity: int) -> list[list[int]]:
    """The plan by the slow twins: each strategy is a way to decide and an order of visits."""
    if strategy == "wrap":
        firsts = np.concatenate([[0], np.cumsum(lengths)])
        owners = np.repeat(np.arange(len(lengths)), lengths).tolist()
        rows = [owners[i : i + capacity] for i in range(0, int(firsts[-1]), capacity)]
        return [sorted(set(row)) for row in rows]
    documents = [i for i, length in enumerate(lengths) if length]
    if not takes_input_order(strategy):
        documents = [documents[i] for i in reference.permutation(len(documents), 0)]
    sizes = [lengths[i] for i in documents]
    in_order, longest_first = list(range(len(sizes))), reference.longest_first(sizes)
    if strategy == "mffd":
        order, offsets = reference.mffd(sizes, capacity)
    elif strategy == "best-fit":
        order, offsets, *_ = reference.mixed_best_fit(sizes, capacity)
        exact = reference.best_fit_decreasing(sizes, capacity)
        if len(offsets) - 1 > (len(exact[1]) - 1) * 1.003 + 1:
            order, offsets, *_ = exact
    else:
        decide, visit = {
            "best-fit-decreasing": (reference.best_fit, longest_first),
            "first-fit": (reference.first_fit, longest_first),
            "first-fit-shuffle": (reference.first_fit, in_order),
            "online-best-fit": (reference.best_fit, in_order),
            "online-first-fit": (reference.first_fit, in_order),
            "worst-fit": (reference.worst_fit, in_order),
            "next-fit": (reference.next_fit, in_order),
            "harmonic": (lambda s, c: reference.harmonic(s, c, HARMONIC_CLASSES), in_order),
        }[strategy]
        row_of, rows = decide([sizes[i] for i in visit], capacity)
        order, offsets = reference.group_by_row(row_of, visit, rows)
    return [[documents[i] for i in order[a:b]] for a, b in pairwise(offsets)]


@pytest.mark.parametrize("strategy", NAMES)
@relaxed
@given(problem=problems())
def test_every_strategy_is_its_definition(strategy: str, problem: tuple[list[int], int]) -> None:
    lengths, capacity = problem
    if strategy == "wrap" and sum(lengths) > 50_000:
        lengths = lengths[:3]
    plan = plan_packing(lengths, capacity, strategy=strategy)
    assert plan.rows() == _expected_rows(strategy, lengths, capacity)


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


def test_more_documents_than_a_plan_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packer_cli.packing.planning._MAX_DOCUMENTS", 3)
    with pytest.raises(UsageError, match="4 documents are more than a plan can hold, 3"):
        plan_rows(np.ones(4, np.int32), 8, "best-fit", 0, False)


def test_wrap_cuts_documents_at_the_edges_of_rows() -> None:
    plan = plan_packing([3, 0, 7, 2], 4, strategy="wrap")
    assert plan.rows() == [[0, 2], [2], [2, 3]]
    assert plan.pieces.start.tolist() == [0, 0, 1, 5, 0]


@pytest.mark.parametrize("strategy", [name for name in NAMES if not keeps_order(name)])
@relaxed
@given(problem=problems(), seed=st.integers(0, 2**63 - 1))
def test_a_seed_only_reorders(strategy: str, problem: tuple[list[int], int], seed: int) -> None:
    pieces = fit(np.cumsum([0, *problem[0]]), problem[1], "drop")
    plain, shuffled, again = (
        plan_rows(pieces.length, problem[1], strategy, seed, shuffle)
        for shuffle in (False, True, True)
    )
    as_sets = [
        sorted(sorted(order[a:b].tolist()) for a, b in pairwise(offsets))
        for order, offsets in (plain, shuffled)
    ]
    assert as_sets[0] == as_sets[1]
    assert [part.tolist() for part in shuffled] == [part.tolist() for part in again]


def test_seeds_differ_and_rows_do_not_come_longest_first() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 3000)
    first, second = (plan_packing(lengths, 4096, seed=seed) for seed in (1, 2))
    assert first.rows() != second.rows()
    assert [row for row in first.rows() if row != sorted(row)]  # within rows too
    heads = lengths[[row[0] for row in first.rows()]]
    assert abs(np.corrcoef(heads, np.arange(len(heads)))[0, 1]) < 0.15


@pytest.mark.parametrize("name", NAMES)
def test_aliases_mean_the_same(name: str) -> None:
    lengths = np.random.default_rng(1).integers(1, 100, 200)
    expected = plan_packing(lengths, 128, strategy=name).rows()
    for alias in ALIASES[name]:
        assert plan_packing(lengths, 128, strategy=alias).rows() == expected


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
    losses = (metrics.truncated_tokens, metrics.dropped_documents, metrics.dropped_tokens)
    assert (metrics.rows, losses) == (rows, lost)
    assert metrics.tokens + metrics.truncated_tokens + metrics.dropped_tokens == 32


def test_metrics_of_a_known_plan() -> None:
    metrics = plan_packing([6, 4, 5], 10).metrics
    assert (metrics.rows, metrics.tokens, metrics.padding_tokens) == (2, 15, 5)
    assert metrics.utilization == metrics.row_utilization_mean == 0.75
    assert (metrics.row_utilization_min, metrics.row_utilization_max) == (0.5, 1.0)
    assert metrics.row_utilization_std == 0.25
    assert metrics.segments_per_row_mean == 1.5


@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize("lengths", [[], [0, 0], np.zeros(3, np.uint8)])
def test_nothing_to_pack(lengths: list[int], strategy: str) -> None:
    plan = plan_packing(lengths, 8, strategy=strategy, seed=1)
    assert plan.rows() == []
    metrics = plan.metrics
    assert (metrics.documents, metrics.rows, metrics.tokens) == (len(lengths), 0, 0)
    assert (metrics.lower_bound_rows, metrics.utilization, metrics.row_utilization_max) == (0, 0, 0)


@pytest.mark.parametrize("kind", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"])
def test_lengths_of_every_integer_type(kind: str) -> None:
    assert plan_packing(np.array([3, 0, 5, 4], kind), 8).rows() == [[2, 0], [3]]


def test_the_largest_row_and_the_longest_document() -> None:
    plan = plan_packing([2**31 - 1, 1], 2**24, overlong="split")
    assert plan.row_tokens.tolist() == [2**24] * 128
    assert plan.pieces.start.tolist() == [*range(0, 2**31, 2**24), 0]


_NAMES = (
    "best-fit, best-fit-decreasing, first-fit, online-best-fit, online-first-fit, worst-fit, "
    "first-fit-shuffle, next-fit, harmonic, mffd, wrap"
)
_NOT_FLAT = "lengths: expected a flat sequence of integers, got"


@pytest.mark.parametrize(
    ("kind", "message", "arguments"),
    [
        (UsageError, f"strategy: 'best' is not one of {_NAMES}", {"strategy": "best"}),
        (UsageError, "max_length: 0 is not between 1 and 16777216", {"max_length": 0}),
        (UsageError, "max_length: -1 is not between 1 and 16777216", {"max_length": -1}),
        (UsageError, "max_length: 16777217 is not between 1 and 16777216",
         {"max_length": 2**24 + 1}),
        (UsageError, "overlong: 'cut' is not one of split, truncate, drop, error",
         {"overlong": "cut"}),
        (UsageError, "seed: -1 is not between 0 and 2**63 - 1", {"seed": -1}),
        (UsageError, "max_segments_per_row: 0 is not between 1 and 16777216",
         {"max_segments_per_row": 0}),
        (UsageError, "max_segments_per_row: wrap fills every row to its end, whatever the number "
         "of segments", {"max_segments_per_row": 2, "strategy": "wrap"}),
        (UsageError, "max_segments_per_row: with a limit mffd would not keep within 71/60 of the "
         "fewest rows", {"max_segments_per_row": 2, "strategy": "mffd"}),
        (UsageError, "balance: 'even' is not one of none, attention", {"balance": "even"}),
        (UsageError, "balance: next-fit keeps the order of documents, exchanges would undo it",
         {"balance": "attention", "strategy": "next-fit"}),
        (UsageError, "segment_multiple: 0 is not positive", {"segment_multiple": 0}),
        (UsageError, "segment_multiple: max_length 8 is not a multiple of 3",
         {"segment_multiple": 3}),
        (UsageError, f"seed: {2**63} is not between 0 and 2**63 - 1", {"seed": 2**63}),
        (UsageError, f"{_NOT_FLAT} shape (2, 2), int64", {"lengths": [[1, 2], [3, 4]]}),
        (UsageError, f"{_NOT_FLAT} shape (1, 0), int64", {"lengths": [[]]}),
        (UsageError, f"{_NOT_FLAT} shape (1,), float64", {"lengths": [1.5]}),
        (UsageError, f"{_NOT_FLAT} shape (1,), bool", {"lengths": [True]}),
        (UsageError, f"{_NOT_FLAT} shape (1,), object", {"lengths": [2**70]}),
        (DataError, "document 1 has the negative length -4", {"lengths": [1, -4, -5]}),
        (DataError, "document 2 has 9 tokens, max_length is 8", {"lengths": [8, 0, 9, 10]}),
        (DataError, "document 1 has 2147483648 tokens, the most is 2147483647",
         {"lengths": [1, 2**31], "overlong": "split"}),
        (DataError, "document 0 has 9223372036854775813 tokens, the most is 2147483647",
         {"lengths": np.array([2**63 + 5], np.uint64), "overlong": "drop"}),
    ],
)  # fmt: skip
def test_errors_name_what_is_wrong(
    kind: type[PackerError], message: str, arguments: dict[str, object]
) -> None:
    with pytest.raises(PackerError) as caught:
        plan_packing(**({"lengths": [1], "max_length": 8} | arguments))  # type: ignore[arg-type]
    assert type(caught.value) is kind
    assert caught.value.message == str(caught.value) == message
