"""What a plan knows of itself, against the same from its rows, and what it costs in memory."""

from __future__ import annotations

import pickle
import tracemalloc
from dataclasses import asdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer_cli import PackPlan, plan_packing
from packer_cli.config.strategies import NAMES
from packer_cli.packing.lower_bound import lower_bound_rows
from packer_cli.records import Pieces

relaxed = settings(max_examples=40, deadline=None)
policies = st.sampled_from(["split", "truncate", "drop"])
documents = st.lists(st.integers(0, 60), max_size=80)


def as_tuples(pieces: Pieces) -> list[tuple[int, ...]]:
    """(document, begin, length, start) of every piece."""
    columns = (pieces.document, pieces.begin, pieces.length, pieces.start)
    assert [column.dtype for column in columns] == [np.int64, np.int64, np.int32, np.int32]
    return list(zip(*(column.tolist() for column in columns), strict=True))


def expected_pieces(lengths: list[int], max_length: int, policy: str) -> list[tuple[int, ...]]:
    """The same, from the definition."""
    begins = np.cumsum([0, *lengths]).tolist()
    pieces = []
    for document, total in enumerate(lengths):
        cuts = list(range(0, total, max_length))
        if policy != "split" and total > max_length:
            cuts = cuts[:1] if policy == "truncate" else []
        pieces += [
            (document, begins[document] + start, min(max_length, total - start), start)
            for start in cuts
        ]
    return pieces


def check_metrics(plan: PackPlan, lengths: list[int]) -> None:
    """Every figure from the rows themselves, the plain way."""
    of_piece = plan.pieces.length
    rows = [of_piece[plan.order[a:b]].tolist() for a, b in pairwise(plan.row_offsets.tolist())]
    assert plan.row_tokens.dtype == np.int64
    assert plan.row_tokens.tolist() == [sum(row) for row in rows]
    tokens, room = sum(map(sum, rows)), len(rows) * plan.max_length
    share = (
        np.array([sum(row) for row in rows], np.int64) / plan.max_length if rows else np.zeros(1)
    )
    overlong = [length for length in lengths if length > plan.max_length]
    lost = sum(lengths) - tokens
    dropped = plan.loss.dropped_documents > 0
    assert asdict(plan.metrics) == {
        "rows": len(rows),
        "documents": len(lengths),
        "segments": len(of_piece),
        "tokens": tokens,
        "padding_tokens": room - tokens,
        "utilization": tokens / room if rows else 0.0,
        "row_utilization_min": share.min(),
        "row_utilization_mean": share.mean(),
        "row_utilization_max": share.max(),
        "row_utilization_std": share.std(),
        "segments_per_row_mean": len(of_piece) / len(rows) if rows else 0.0,
        "lower_bound_rows": lower_bound_rows(
            np.bincount(of_piece, minlength=plan.max_length + 1), plan.max_length,
            max_segments=plan.max_segments_per_row, segment_multiple=plan.segment_multiple,
        ),
        "truncated_tokens": 0 if dropped else lost,
        "dropped_documents": len(overlong) if dropped else 0,
        "dropped_tokens": lost if dropped else 0,
    }  # fmt: skip


@pytest.mark.parametrize("strategy", NAMES)
@relaxed
@given(documents, st.integers(1, 40), policies, st.sampled_from([None, 3]), st.sampled_from([1, 4]))
def test_metrics_are_those_of_the_rows(
    strategy: str, lengths: list[int], units: int, policy: str, seed: int | None, multiple: int
) -> None:
    plan = plan_packing(lengths, units * multiple, strategy=strategy, seed=seed, overlong=policy,
                        segment_multiple=multiple)  # fmt: skip
    check_metrics(plan, lengths)


@pytest.mark.parametrize("seed", [None, 3])
@relaxed
@given(lengths=documents, max_length=st.integers(1, 40), most=st.integers(1, 5))
def test_metrics_are_those_of_balanced_and_limited_rows(
    lengths: list[int], max_length: int, most: int, seed: int | None
) -> None:
    plan = plan_packing(lengths, max_length, seed=seed, overlong="split", balance="attention",
                        max_segments_per_row=most)  # fmt: skip
    check_metrics(plan, lengths)


@relaxed
@given(documents, st.integers(1, 40), policies)
def test_pieces_of_a_plan(lengths: list[int], max_length: int, policy: str) -> None:
    pieces = plan_packing(lengths, max_length, overlong=policy).pieces
    assert as_tuples(pieces) == expected_pieces(lengths, max_length, policy)


LENGTHS = [5, 0, 23, 8, 8, 1, 40, 3]


def _spaced(lengths: np.ndarray) -> np.ndarray:
    return np.repeat(lengths, 2)[::2]


def _read_only(lengths: np.ndarray) -> np.ndarray:
    lengths.setflags(write=False)
    return lengths


@pytest.mark.parametrize("policy", ["split", "truncate", "drop"])
@pytest.mark.parametrize(
    "given_as",
    [*"bBhHiIqQ", ">i4", ">u2", ">i8"],
)
@pytest.mark.parametrize("layout", [np.array, _spaced, _read_only])
def test_arrays_of_every_type_and_layout(policy: str, given_as: str, layout: object) -> None:
    lengths = layout(np.array(LENGTHS, given_as))  # type: ignore[operator]
    plan = plan_packing(lengths, 8, overlong=policy)
    assert plan.rows() == plan_packing(LENGTHS, 8, overlong=policy).rows()
    check_metrics(plan, LENGTHS)


@pytest.mark.parametrize("given_as", ["i4", "i8", "u2"])
@pytest.mark.parametrize("max_length", [8, 64])
def test_a_plan_is_not_changed_with_the_array_it_was_made_from(
    given_as: str, max_length: int
) -> None:
    lengths = np.array(LENGTHS, given_as)
    plan = plan_packing(lengths, max_length, overlong="split")
    lengths[:] = 7
    assert as_tuples(plan.pieces) == expected_pieces(LENGTHS, max_length, "split")
    check_metrics(plan, LENGTHS)


def test_a_plan_travels_to_other_processes() -> None:
    plan = plan_packing(LENGTHS, 8, overlong="split")
    again = pickle.loads(pickle.dumps(plan))  # noqa: S301 its own
    assert again.rows() == plan.rows()
    assert again.metrics == plan.metrics
    assert repr(again) == repr(plan)


@pytest.mark.parametrize("overlong", ["error", "split"])
def test_memory_is_a_few_bytes_a_document(overlong: str) -> None:
    """Most of the time that a plan took went into the memory that it asked for."""
    count = 100_000
    lengths = np.random.default_rng(0).integers(1, 1000, count).astype(np.int32)
    lengths[::10] = 1500 if overlong == "split" else 1000
    tracemalloc.start()
    plan_packing(lengths, 1000, overlong=overlong).metrics  # noqa: B018
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < (48 if overlong == "error" else 64) * count
