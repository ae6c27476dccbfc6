"""Every kernel against its slow twin: equal to the last element, for every kind of capacity."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packer_cli._kernels import best_fit, filling, mffd, one_by_one, reference, sorting

# Around the words of the bitset: one, two and three levels deep.
CAPACITIES = [1, 2, 3, 5, 6, 7, 63, 64, 65, 4095, 4096, 4097, 131072, 262143, 262144, 262145]
relaxed = settings(max_examples=200, deadline=None)


@st.composite
def problems(draw: st.DrawFn, most: int = 120) -> tuple[np.ndarray, int]:
    """Lengths and a capacity; lengths near 1, near thirds and halves of a row, or anywhere."""
    capacity = draw(st.one_of(st.sampled_from(CAPACITIES), st.integers(1, 5000)))
    near = [1, 2, capacity // 6, capacity // 3, capacity // 2, capacity]
    around = st.builds(lambda a, d: a + d, st.sampled_from(near), st.integers(-2, 2))
    anywhere = st.integers(1, capacity)
    kinds = draw(
        st.sampled_from([anywhere, around, st.one_of(anywhere, around), st.just(capacity)])
    )
    lengths = draw(st.lists(kinds, max_size=most))
    return np.clip(np.array(lengths, np.int32), 1, capacity).astype(np.int32), capacity


def plan(lengths: np.ndarray, capacity: int) -> tuple[list[int], list[int]]:
    order, offsets = np.full(len(lengths), -7, np.int64), np.full(len(lengths) + 1, -7, np.int64)
    rows = best_fit.best_fit_decreasing(lengths, capacity, order, offsets)
    return order.tolist(), offsets[: rows + 1].tolist()


@relaxed
@given(problems())
def test_best_fit_decreasing_equals_its_twin(problem: tuple[np.ndarray, int]) -> None:
    lengths, capacity = problem
    expected = reference.best_fit_decreasing(lengths, capacity)
    assert plan(lengths, capacity) == (list(expected[0]), list(expected[1]))


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("seed", range(3))
def test_best_fit_decreasing_on_many_documents(capacity: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = np.minimum(rng.lognormal(np.log(max(capacity / 7, 1)), 1, 1500), capacity)
    lengths = np.maximum(sizes, 1).astype(np.int32)
    expected = reference.best_fit_decreasing(lengths, capacity)
    assert plan(lengths, capacity) == (list(expected[0]), list(expected[1]))


@relaxed
@given(problems(), st.sampled_from(["best_fit", "worst_fit", "first_fit", "next_fit"]))
def test_one_by_one_equals_its_twin(problem: tuple[np.ndarray, int], name: str) -> None:
    lengths, capacity = problem
    row_of = np.full(len(lengths), -7, np.int32)
    rows = getattr(one_by_one, name)(lengths, capacity, row_of)
    assert (row_of.tolist(), rows) == getattr(reference, name)(lengths, capacity)


@relaxed
@given(problems(), st.integers(1, 15))
def test_harmonic_equals_its_twin(problem: tuple[np.ndarray, int], classes: int) -> None:
    lengths, capacity = problem
    row_of = np.full(len(lengths), -7, np.int32)
    rows = one_by_one.harmonic(lengths, capacity, classes, row_of)
    assert (row_of.tolist(), rows) == reference.harmonic(lengths, capacity, classes)


@relaxed
@given(problems(most=60))
def test_mffd_equals_its_twin(problem: tuple[np.ndarray, int]) -> None:
    lengths, capacity = problem
    visit, row_of = np.full(len(lengths), -7, np.int64), np.full(len(lengths), -7, np.int32)
    longest = np.array(reference.longest_first(lengths), np.int64)
    placed, rows = mffd.mffd_large_rows(lengths, capacity, longest, visit, row_of)
    rest = visit[placed:]
    more, more_rows = reference.first_fit(lengths[rest], capacity)
    all_rows = [*row_of[:placed].tolist(), *(row + rows for row in more)]
    found = reference.group_by_row(all_rows, visit.tolist(), rows + more_rows)
    assert found == reference.mffd(lengths, capacity)


@relaxed
@given(problems())
def test_longest_first_is_stable(problem: tuple[np.ndarray, int]) -> None:
    lengths, capacity = problem
    out = np.full(len(lengths), -7, np.int64)
    sorting.longest_first(lengths, capacity, out)
    assert out.tolist() == reference.longest_first(lengths)


@relaxed
@given(problems(), st.integers(0, 2**64 - 1), st.booleans())
def test_group_by_row_and_shuffle_equal_their_twins(
    problem: tuple[np.ndarray, int], seed: int, permuted: bool
) -> None:
    lengths, capacity = problem
    n = len(lengths)
    visit = np.full(n, -7, np.int64)
    sorting.permutation(visit, seed)
    assert visit.tolist() == reference.permutation(n, seed)
    row_of, rows = reference.next_fit(lengths, capacity)
    order, offsets = np.full(n, -7, np.int64), np.full(rows + 1, -7, np.int64)
    sorting.group_by_row(
        np.array(row_of, np.int32), visit if permuted else None, rows, order, offsets
    )
    visited = visit.tolist() if permuted else list(range(n))
    assert (order.tolist(), offsets.tolist()) == reference.group_by_row(row_of, visited, rows)
    new_order, new_offsets = np.full(n, -7, np.int64), np.full(rows + 1, -7, np.int64)
    sorting.shuffle_plan(order, offsets, rows, seed, new_order, new_offsets)
    expected = reference.shuffle_plan(order.tolist(), offsets.tolist(), seed)
    assert (new_order.tolist(), new_offsets.tolist()) == expected


@relaxed
@given(problems(most=30), st.booleans(), st.randoms(use_true_random=False))
def test_fill_rows_equals_its_twin(
    problem: tuple[np.ndarray, int], some_untrained: bool, random: object
) -> None:
    lengths = np.minimum(problem[0], 300)
    capacity = min(problem[1], 400)
    lengths = np.minimum(lengths, capacity).astype(np.int32)
    rng = np.random.default_rng(random.randrange(2**32))  # type: ignore[attr-defined]
    ids = rng.integers(0, 2**31, int(lengths.sum()) + 3).astype(np.uint32)
    trained = rng.integers(0, 2, len(ids)).astype(np.uint8) if some_untrained else None
    begin = (np.cumsum(lengths) - lengths + 3).astype(np.int64)
    order, offsets = (np.array(part, np.int64) for part in plan(lengths, capacity))
    rows = len(offsets) - 1
    out = [np.full((rows, capacity), 77, kind) for kind in (np.int32, np.int32, np.uint8, np.int32)]
    boundaries, edges = np.full(len(order) + rows, 77, np.int32), np.full(rows + 1, 77, np.int32)
    count = filling.fill_rows(
        ids, trained, begin, lengths, order, offsets, capacity, 9, *out, boundaries, edges
    )
    flags = None if trained is None else trained.tolist()
    expected = reference.fill_rows(
        ids.tolist(), flags, begin.tolist(), lengths.tolist(), order.tolist(), offsets.tolist(),
        capacity, 9,
    )  # fmt: skip
    assert [column.tolist() for column in out] == list(expected[:4])
    assert boundaries.tolist() == [value for row in expected[4] for value in row]
    assert edges.tolist() == np.cumsum([0, *map(len, expected[4])]).tolist()
    assert count == expected[5]
    # the same with no column wanted: only boundaries and the count
    again = np.full_like(boundaries, 78)
    nothing = (None, None, None, None)
    same = filling.fill_rows(
        ids, trained, begin, lengths, order, offsets, capacity, 9, *nothing, again, edges
    )
    assert same == count
    assert again.tolist() == boundaries.tolist()


def test_fill_rows_of_the_middle_of_a_plan() -> None:
    ids = np.arange(10, dtype=np.uint32)
    begin, length = np.array([0, 4, 7], np.int64), np.array([4, 3, 3], np.int32)
    order, offsets = np.array([2, 0, 1], np.int64), np.array([0, 1, 2, 3], np.int64)
    out, edges = np.full((2, 5), 77, np.int32), np.full(3, 77, np.int32)
    boundaries = np.full(4, 77, np.int32)
    filling.fill_rows(
        ids,
        None,
        begin,
        length,
        order,
        offsets[1:],
        5,
        99,
        out,
        None,
        None,
        None,
        boundaries,
        edges,
    )
    assert out.tolist() == [[0, 1, 2, 3, 99], [4, 5, 6, 99, 99]]
    assert boundaries.tolist() == [0, 4, 0, 3]
    assert edges.tolist() == [0, 2, 4]


small_ids = st.lists(st.integers(0, 3), max_size=6)


@relaxed
@given(st.lists(small_ids, max_size=20), st.lists(st.integers(0, 3), max_size=2), small_ids)
def test_frame_documents_equals_its_twin(
    documents: list[list[int]], prefix: list[int], suffix: list[int]
) -> None:
    suffix = suffix[:2]
    ids = np.array([token for ids in documents for token in ids], np.uint32)
    offsets = np.cumsum([0, *map(len, documents)]).astype(np.int64)
    out = np.full(len(ids) + len(documents) * (len(prefix) + len(suffix)), 77, np.uint32)
    out_offsets = np.full(len(documents) + 1, 77, np.int64)
    used = filling.frame_documents(
        ids, offsets, np.array(prefix, np.uint32), np.array(suffix, np.uint32), out, out_offsets
    )
    expected = reference.frame_documents(documents, prefix, suffix)
    assert out_offsets.tolist() == np.cumsum([0, *map(len, expected)]).tolist()
    assert out[:used].tolist() == [token for ids in expected for token in ids]


@relaxed
@given(problems())
def test_gather_pieces_equals_its_twin(problem: tuple[np.ndarray, int]) -> None:
    lengths = np.minimum(problem[0], 50).astype(np.int32)
    ids = np.arange(100, dtype=np.uint32)
    begin = (np.arange(len(lengths)) * 7 % 50).astype(np.int64)
    out = np.full(int(lengths.sum()), 777, np.uint32)
    filling.gather_pieces(ids, begin, lengths, out)
    expected = reference.gather_pieces(ids.tolist(), begin.tolist(), lengths.tolist())
    assert out.tolist() == expected


def test_permutation_depends_on_its_seed() -> None:
    first, second = np.empty(100, np.int64), np.empty(100, np.int64)
    sorting.permutation(first, 1)
    sorting.permutation(second, 2)
    assert sorted(first) == sorted(second) == list(range(100))
    assert first.tolist() != second.tolist()
