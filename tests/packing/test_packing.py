"""plan_packing: what every strategy keeps, whatever the lengths and limits, and its errors."""

from __future__ import annotations

import pickle
import tracemalloc
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer_cli import PackPlan, StreamPacker, plan_packing
from packer_cli.errors import DataError, PackerError, UsageError
from packer_cli.options.options import ALIASES, NAMES, keeps_order
from packer_cli.packing.figures import lower_bound_rows
from packer_cli.packing.fitting import fit, loss_of

relaxed = settings(max_examples=40, deadline=None)
capacities = st.one_of(
    st.sampled_from([1, 2, 3, 63, 64, 65, 4095, 4096, 4097, 131072]), st.integers(1, 3000)
)
any_seed = st.one_of(st.none(), st.integers(0, 2**63 - 1))
policies = st.sampled_from(["split", "truncate", "drop"])
LIMITABLE = [name for name in NAMES if name not in ("wrap", "mffd")]
BALANCED = [name for name in LIMITABLE if name not in ("next-fit", "harmonic")]


@st.composite
def problems(draw: st.DrawFn, longest: int = 1) -> tuple[list[int], int]:
    """Lengths, and a row that the longest of them needs `longest` of."""
    capacity = draw(capacities)
    most = longest * capacity
    lengths = st.one_of(st.integers(0, most), st.sampled_from([1, capacity // 2 + 1, capacity]))
    return draw(st.lists(lengths, max_size=150)), capacity


def rows_of(plan: PackPlan, values: np.ndarray) -> list[list[int]]:
    """Values of the pieces, row after row."""
    return [values[plan.order[a:b]].tolist() for a, b in pairwise(plan.row_offsets.tolist())]


def expected_pieces(lengths: list[int], max_length: int, policy: str) -> list[tuple[int, int, int]]:
    """(document, start, length) of every piece, from the definition."""
    pieces = []
    for document, total in enumerate(lengths):
        starts = list(range(0, total, max_length))
        if policy != "split" and total > max_length:
            starts = starts[:1] if policy == "truncate" else []
        pieces += [(document, start, min(max_length, total - start)) for start in starts]
    return pieces


def check(plan: PackPlan, lengths: list[int], policy: str) -> None:
    """Every piece by its definition, in exactly one row, and no row too full; and every figure
    from the rows themselves, the plain way.
    """
    pieces = plan.pieces
    columns = (pieces.document, pieces.begin, pieces.length, pieces.start)
    assert [column.dtype for column in columns] == [np.int64, np.int64, np.int32, np.int32]
    begins = np.concatenate([[0], np.cumsum(lengths)])
    assert pieces.begin.tolist() == (begins[pieces.document] + pieces.start).tolist()
    if plan.strategy != "wrap":
        found = np.stack([pieces.document, pieces.start, pieces.length], axis=1)
        assert list(map(tuple, found.tolist())) == expected_pieces(lengths, plan.max_length, policy)
    assert sorted(plan.order.tolist()) == list(range(len(pieces)))
    assert (np.diff(plan.row_offsets, prepend=-1) > 0).all()
    rows = rows_of(plan, pieces.length)
    taken = rows_of(plan, -(-pieces.length // plan.segment_multiple) * plan.segment_multiple)
    most = plan.max_segments_per_row
    assert all(row and sum(row) <= plan.max_length for row in taken)
    assert most is None or all(len(row) <= most for row in rows)
    assert plan.row_tokens.dtype == np.int64
    assert plan.row_tokens.tolist() == [sum(row) for row in rows]
    assert len(plan) == len(rows)
    assert plan.rows() == rows_of(plan, pieces.document)
    tokens, room = sum(map(sum, rows)), len(rows) * plan.max_length
    share = plan.row_tokens / plan.max_length if rows else np.zeros(1)
    lost, dropped = sum(lengths) - tokens, plan.loss.dropped_documents > 0
    overlong = sum(length > plan.max_length for length in lengths)
    bound = lower_bound_rows(
        np.bincount(pieces.length, minlength=plan.max_length + 1), plan.max_length,
        max_segments=most, segment_multiple=plan.segment_multiple,
    )  # fmt: skip
    assert asdict(plan.metrics) == {
        "rows": len(rows),
        "documents": len(lengths),
        "segments": len(pieces),
        "tokens": tokens,
        "padding_tokens": room - tokens,
        "utilization": tokens / room if rows else 0.0,
        "row_utilization_min": share.min(),
        "row_utilization_mean": share.mean(),
        "row_utilization_max": share.max(),
        "row_utilization_std": share.std(),
        "segments_per_row_mean": len(pieces) / len(rows) if rows else 0.0,
        "lower_bound_rows": bound,
        "truncated_tokens": 0 if dropped else lost,
        "dropped_documents": overlong if dropped else 0,
        "dropped_tokens": lost if dropped else 0,
    }
    assert len(rows) >= bound >= -(-tokens // plan.max_length)
    assert most is None or bound >= -(-len(pieces) // most)


@pytest.mark.parametrize("strategy", NAMES)
@relaxed
@given(st.data(), any_seed, policies)
def test_every_strategy_places_every_document_once(
    strategy: str, data: st.DataObject, seed: int | None, policy: str
) -> None:
    """Within all limits that it takes; exchanges leave rows as full, at costs more even."""
    lengths, units = data.draw(problems(longest=3))
    if strategy == "wrap":  # pieces of one token each would be millions
        lengths = [min(length, 4000) for length in lengths]
    multiple = data.draw(st.sampled_from([1, 2, 3, 16]))
    limit = data.draw(st.one_of(st.none(), st.integers(1, 6))) if strategy in LIMITABLE else None
    options: dict[str, Any] = {
        "strategy": strategy, "seed": seed, "overlong": policy, "max_segments_per_row": limit,
        "segment_multiple": multiple,
    }  # fmt: skip
    plan = plan_packing(lengths, units * multiple, **options)
    check(plan, lengths, policy)
    if keeps_order(strategy):
        assert plan.order.tolist() == list(range(len(plan.pieces)))
    if strategy == "wrap":
        assert all(sum(-(-length // multiple) * multiple for length in row) == plan.max_length
                   for row in rows_of(plan, plan.pieces.length)[:-1])  # fmt: skip
    if strategy in BALANCED:
        even = plan_packing(lengths, units * multiple, **options, balance="attention")
        check(even, lengths, policy)
        assert sorted(even.row_tokens.tolist()) == sorted(plan.row_tokens.tolist())
        costs = [[sum(length**2 for length in row) ** 2 for row in rows_of(one, one.pieces.length)]
                 for one in (plan, even)]  # fmt: skip
        assert sum(costs[1]) <= sum(costs[0])


@pytest.mark.parametrize("strategy", LIMITABLE)
@relaxed
@given(problem=problems(), multiple=st.integers(1, 5))
def test_multiples_are_planned_as_their_units(
    strategy: str, problem: tuple[list[int], int], multiple: int
) -> None:
    padded = [length * multiple for length in problem[0]]
    plan = plan_packing(padded, problem[1] * multiple, strategy=strategy, segment_multiple=multiple)
    assert plan.rows() == plan_packing(*problem, strategy=strategy).rows()


def test_seeds_differ_and_rows_do_not_come_longest_first() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 3000)
    first, second = (plan_packing(lengths, 4096, seed=seed) for seed in (1, 2))
    assert first.rows() != second.rows()
    assert [row for row in first.rows() if row != sorted(row)]  # within rows too
    heads = lengths[[row[0] for row in first.rows()]]
    assert abs(np.corrcoef(heads, np.arange(len(heads)))[0, 1]) < 0.15


def test_aliases_mean_the_same() -> None:
    lengths = np.random.default_rng(1).integers(1, 100, 200)
    for name, aliases in ALIASES.items():
        expected = plan_packing(lengths, 128, strategy=name).rows()
        assert all(plan_packing(lengths, 128, strategy=one).rows() == expected for one in aliases)


def test_a_million_documents_in_a_few_bytes_each() -> None:
    """Most of the time that a plan took went into the memory that it asked for."""
    lengths = np.random.default_rng(0).integers(1, 1000, 1_000_000).astype(np.int32)
    for overlong, longest, each in (("error", 1000, 48), ("split", 1500, 64)):
        lengths[::10] = longest
        tracemalloc.start()
        metrics = plan_packing(lengths, 1000, overlong=overlong).metrics
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < each * len(lengths)
        assert metrics.tokens == lengths.sum()
        assert metrics.rows <= metrics.lower_bound_rows * 1.005


@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize("lengths", [[], [0, 0], np.zeros(3, np.uint8)])
def test_nothing_to_pack(lengths: list[int], strategy: str) -> None:
    plan = plan_packing(lengths, 8, strategy=strategy, seed=1)
    assert plan.rows() == []
    check(plan, list(lengths), "error")


LENGTHS = [5, 0, 23, 8, 8, 1, 40, 3]


def _read_only(lengths: np.ndarray) -> np.ndarray:
    lengths.setflags(write=False)
    return lengths


@pytest.mark.parametrize("given_as", [*"bBhHiIqQ", ">i4", ">u2", ">i8"])
@pytest.mark.parametrize("layout", [np.array, lambda one: np.repeat(one, 2)[::2], _read_only])
def test_arrays_of_every_type_and_layout(given_as: str, layout: Any) -> None:
    """A plan is not changed with the array it was made from, and travels to other processes."""
    for policy in ("split", "truncate", "drop"):
        for max_length in (8, 64):
            lengths = layout(np.array(LENGTHS, given_as))
            plan = plan_packing(lengths, max_length, overlong=policy)
            if lengths.flags.writeable:
                lengths[:] = 7
            check(plan, LENGTHS, policy)
            again = pickle.loads(pickle.dumps(plan))  # noqa: S301 its own
            assert again.rows() == plan_packing(LENGTHS, max_length, overlong=policy).rows()
            assert again.metrics == plan.metrics
            assert repr(again) == repr(plan)


def test_the_largest_row_and_the_longest_document(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_packing([2**31 - 1, 1], 2**24, overlong="split")
    assert plan.row_tokens.tolist() == [2**24] * 128
    assert plan.pieces.start.tolist() == [*range(0, 2**31, 2**24), 0]
    monkeypatch.setattr("packer_cli.packing.plan._MAX_DOCUMENTS", 3)
    with pytest.raises(UsageError, match="4 documents are more than a plan can hold, 3"):
        plan_packing([1] * 4, 8)


@pytest.mark.parametrize(("policy", "kept"), [("truncate", [9, 10, 3]), ("drop", [9, 3])])
def test_a_run_may_cut_documents_of_more_tokens_than_31_bits_hold(
    policy: str, kept: list[int]
) -> None:
    offsets = np.cumsum([0, 9, (1 << 32) + 5, 3])
    pieces = fit(offsets, 10, policy)
    assert pieces.length.tolist() == kept
    assert pieces.begin.tolist() == [int(offsets[document]) for document in pieces.document]
    loss = loss_of(pieces, offsets)
    assert loss.truncated_tokens + loss.dropped_tokens == offsets[-1] - sum(kept)


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
        (UsageError, "max_length: 16777217 is not between 1 and 16777216",
         {"max_length": 2**24 + 1}),
        (UsageError, "overlong: 'cut' is not one of split, truncate, drop, error",
         {"overlong": "cut"}),
        (UsageError, "seed: -1 is not between 0 and 2**63 - 1", {"seed": -1}),
        (UsageError, "max_segments_per_row does not go with strategy wrap",
         {"max_segments_per_row": 2, "strategy": "wrap"}),
        (UsageError, "balance: 'even' is not one of none, attention", {"balance": "even"}),
        (UsageError, "balance does not go with strategy next-fit",
         {"balance": "attention", "strategy": "next-fit"}),
        (UsageError, "segment_multiple: 0 is not positive", {"segment_multiple": 0}),
        (UsageError, "segment_multiple: max_length 8 is not a multiple of 3",
         {"segment_multiple": 3}),
        *((UsageError, f"{name}: {wrong!r} is not a whole number", {name: wrong})
          for name in ("max_length", "seed", "max_segments_per_row", "segment_multiple")
          for wrong in ("8", 8.0, True, [8])),
        *((UsageError, f"{name}: {str(wrong)!r} is not one of {names}", {name: wrong})
          for name, names in (("strategy", _NAMES), ("balance", "none, attention"))
          for wrong in (False, 3, ["none"])),
        (UsageError, "overlong: 3 is not one of split, truncate, drop, error", {"overlong": 3}),
        (UsageError, f"{_NOT_FLAT} shape (), object", {"lengths": None}),
        (UsageError, f"{_NOT_FLAT} shape (2, 2), int64", {"lengths": [[1, 2], [3, 4]]}),
        (UsageError, f"{_NOT_FLAT} shape (1,), float64", {"lengths": [1.5]}),
        (UsageError, f"{_NOT_FLAT} shape (1,), object", {"lengths": [2**70]}),
        (DataError, "document 1 has the negative length -4", {"lengths": [1, -4, -5]}),
        (DataError, "document 2 has 9 tokens, max_length is 8", {"lengths": [8, 0, 9, 10]}),
        (DataError, "document 1 has 2147483648 tokens, the most is 2147483647",
         {"lengths": [1, 2**31], "overlong": "split"}),
    ],
)  # fmt: skip
def test_errors_name_what_is_wrong(
    kind: type[PackerError], message: str, arguments: dict[str, object]
) -> None:
    with pytest.raises(PackerError) as caught:
        plan_packing(**({"lengths": [1], "max_length": 8} | arguments))  # type: ignore[arg-type]
    assert type(caught.value) is kind
    assert caught.value.message == str(caught.value) == message


# --- lengths one at a time ---


@pytest.mark.parametrize("strategy", ["next-fit", "harmonic"])
@given(st.data(), st.one_of(st.sampled_from([1, 2, 3, 64, 4096]), st.integers(1, 300)))
def test_the_rows_are_those_of_the_plan(strategy: str, data: st.DataObject, most: int) -> None:
    lengths = data.draw(st.lists(st.integers(0, most), max_size=200))
    packer, rows = StreamPacker(most, strategy), []
    for length in lengths:
        closed = packer.add(length)
        assert len(closed) <= 2
        rows += closed
    rows += packer.finish()
    assert packer.documents == len(lengths)
    expected = plan_packing(lengths, most, strategy=strategy).rows()
    assert sorted(rows) == sorted(expected)
    if strategy == "next-fit":
        assert rows == expected


def test_few_rows_are_open() -> None:
    packer = StreamPacker(4096, "harmonic")
    closed = [row for i in range(10_000) for row in packer.add(i * 7919 % 4096 + 1)]
    still_open = packer.finish()
    assert len(still_open) <= 12 < len(closed)


def test_what_cannot_be() -> None:
    with pytest.raises(UsageError, match="'best-fit' is not one of next-fit, harmonic"):
        StreamPacker(8, "best-fit")
    with pytest.raises(UsageError, match="max_length: 0 is not between"):
        StreamPacker(0)
    for wrong in ("8", 8.5, None):
        with pytest.raises(UsageError, match=r"max_length: .* is not a whole number"):
            StreamPacker(wrong)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"length: .* is not a whole number"):
            StreamPacker(8).add(wrong)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"strategy: .* is not one of"):
            StreamPacker(8, wrong)  # type: ignore[arg-type]
    packer = StreamPacker(8)
    packer.add(3)
    assert repr(packer) == (
        "StreamPacker(max_length=8, strategy='next-fit', documents=1, open_rows=1)"
    )
    for length in (9, -1):
        with pytest.raises(DataError, match=f"document 1 has {length} tokens, max_length is 8"):
            packer.add(length)
    assert packer.finish() == [[0]]
    with pytest.raises(UsageError, match=r"add\(\) after finish\(\)"):
        packer.add(1)
