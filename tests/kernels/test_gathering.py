"""The kernels that gather rows out of maps, against plain numpy and Python."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packer_cli._kernels import gathering


def int64(values: Any) -> Any:
    return np.array(values, np.int64)


@st.composite
def spans(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """(first row, rows) of each span, with gaps between some, and rows that lie in them."""
    firsts, counts, end = [], [], 0
    for gap, count in draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), min_size=1)):
        firsts.append(end + gap)
        counts.append(count)
        end += gap + count
    inside = [f + i for f, n in zip(firsts, counts, strict=True) for i in range(n)]
    return firsts, counts, draw(st.lists(st.sampled_from(inside), max_size=20))


@given(spans(), st.integers(0, 60))
def test_the_first_row_that_is_nowhere(
    problem: tuple[list[int], list[int], list[int]], extra: int
) -> None:
    firsts, counts, rows = problem
    ends = int64(firsts) + int64(counts)
    inside = {f + i for f, n in zip(firsts, counts, strict=True) for i in range(n)}
    found = gathering.first_absent(int64([*rows, extra]), int64(firsts), ends)
    assert found == (-1 if extra in inside else len(rows))
    assert gathering.first_absent(int64(rows), int64(firsts), ends) == -1
    assert gathering.first_absent(int64([0]), int64([]), int64([])) == 0


@given(spans(), st.integers(1, 9))
def test_rows_are_copied_from_their_spans(
    problem: tuple[list[int], list[int], list[int]], width: int
) -> None:
    firsts, counts, rows = problem
    random = np.random.default_rng(width)
    maps = [random.integers(0, 256, (n, width)).astype(np.uint8) for n in counts]
    by_row = {f + i: m[i] for f, m in zip(firsts, maps, strict=True) for i in range(len(m))}
    out = np.full(len(rows) * width + 2, 77, np.uint8)
    addresses = int64([m.ctypes.data for m in maps])
    gathering.gather_rows(int64(rows), int64(firsts), addresses, width, out[1:-1])
    assert out.tolist() == [77, *(value for row in rows for value in by_row[row].tolist()), 77]
    with pytest.raises(ValueError, match=f"{len(rows)} rows of {width} bytes into"):
        gathering.gather_rows(int64(rows), int64(firsts), addresses, width, out)


@given(spans(), st.integers(0, 100), st.sampled_from([np.int64, np.int32, np.int8]))
def test_lists_are_copied_from_their_spans(
    problem: tuple[list[int], list[int], list[int]], seed: int, kind: Any
) -> None:
    firsts, counts, rows = problem
    random = np.random.default_rng(seed)
    offsets = [np.cumsum([seed % 3, *random.integers(0, 4, n)]).astype(np.int32) for n in counts]
    values = [random.integers(0, 99, edges[-1] + 1).astype(kind) for edges in offsets]
    by_row = {
        first + i: own[edges[i] : edges[i + 1]].tolist()
        for first, own, edges in zip(firsts, values, offsets, strict=True)
        for i in range(len(edges) - 1)
    }
    where = int64([edges.ctypes.data for edges in offsets])
    addresses, ends = int64([own.ctypes.data for own in values]), np.empty(len(rows) + 1, np.int64)
    gathering.count_values(int64(rows), int64(firsts), where, ends)
    assert np.diff(ends).tolist() == [len(by_row[row]) for row in rows]
    out = np.full(ends[-1] + 2, 77, kind)
    gathering.gather_values(int64(rows), int64(firsts), where, addresses, ends, out[1:-1])
    assert out.tolist() == [77, *(value for row in rows for value in by_row[row]), 77]
    for wrong in (ends[:-1], np.append(ends, 0)):
        with pytest.raises(ValueError, match=r"rows, \d+ ends"):
            gathering.count_values(int64(rows), int64(firsts), where, wrong)
    with pytest.raises(ValueError, match="values into"):
        gathering.gather_values(int64(rows), int64(firsts), where, addresses, ends, out)


def test_lists_that_change_while_they_are_mapped() -> None:
    """By who writes to the file: what was counted is copied."""
    values, edges = np.arange(9, dtype=np.int32), np.array([2, 4, 5], np.int32)
    rows, firsts, where = int64([0, 1]), int64([0]), int64([edges.ctypes.data])
    ends, out = np.empty(3, np.int64), np.full(4, 77, np.int32)
    gathering.count_values(rows, firsts, where, ends)
    edges[:] = [2, 4, 7]
    gathering.gather_values(rows, firsts, where, int64([values.ctypes.data]), ends, out[:3])
    assert out.tolist() == [2, 3, 4, 77]
    edges[:] = [4, 2, 7]
    with pytest.raises(ValueError, match="the list of row 0 ends before it begins"):
        gathering.count_values(rows, firsts, where, ends)


boundaries = st.integers(1, 9).flatmap(
    lambda most: st.tuples(
        st.just(most),
        st.lists(
            st.sets(st.integers(1, most), min_size=1).map(lambda edges: [0, *sorted(edges)]),
            min_size=1, max_size=6,
        ),
    )
)  # fmt: skip


def joined(rows: list[list[int]], max_length: int) -> tuple[tuple[int, int], list[int]]:
    ends = np.cumsum([0, *map(len, rows)]).astype(np.int64)
    values = np.array([edge for row in rows for edge in row], np.int32)
    out = np.full(len(values) + 2, 77, np.int32)
    found = gathering.join_boundaries(values, ends, max_length, out[:-1])
    assert out[-1] == 77
    return found, out[: found[0]].tolist()


@given(boundaries)
def test_boundaries_are_joined_with_the_padding_as_documents(
    problem: tuple[int, list[list[int]]],
) -> None:
    most, rows = problem
    expected = sorted({
        *(number * most + edge for number, row in enumerate(rows) for edge in row), len(rows) * most
    })  # fmt: skip
    (count, longest), found = joined(rows, most)
    assert found == expected
    assert count == len(expected)
    assert longest == max(b - a for a, b in pairwise(expected))


@pytest.mark.parametrize(
    "wrong", [[], [1, 2], [0, 2, 2], [0, 3, 1], [0, 9], [0, -1], [0, 2**31 - 1]]
)
def test_boundaries_that_are_none(wrong: list[int]) -> None:
    assert joined([[0, 8], wrong, [0, 1]], 8)[0] == (-1, 1)


@pytest.mark.parametrize("kind", [np.int32, np.int64])
@given(st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_positions_count_from_every_boundary(kind: Any, lengths: list[int]) -> None:
    edges = np.cumsum([0, *lengths]).astype(np.int32)
    out = np.full(edges[-1] + 2, 77, kind)
    gathering.count_positions(edges, out[1:-1])
    assert out.tolist() == [77, *(place for n in lengths for place in range(n)), 77]


@pytest.mark.parametrize(
    "edges", [[], [0], [1, 4], [0, 3], [0, 5], [0, 5, 4], [0, -1, 4], [0, 9, 4]]
)
def test_edges_that_are_none(edges: list[int]) -> None:
    with pytest.raises(ValueError, match="edge"):
        gathering.count_positions(np.array(edges, np.int32), np.empty(4, np.int64))
