"""The kernel that looks up what rows of a view refer to, against its slow twin."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packer_cli._kernels import gathering, reference

LENGTHS = [[3, 9], [1], [7, 2, 5]]  # of documents, in spans
DIRECTORIES = [(0, 3), (0, 0), (3, 3)]  # of which the middle one is gone


def int64(values: Any) -> Any:
    return np.array(values, np.int64)


references = st.tuples(st.integers(-1, 3), st.integers(-1, 3), st.integers(-1, 7))
sound = st.sampled_from([(0, 0, 0), (0, 1, 2), (2, 0, 1), (0, 2, 0), (2, 2, 0)])
edges = st.lists(st.integers(0, 3), max_size=4).map(lambda steps: np.cumsum([0, *steps]).tolist())
ones = st.integers(0, 4).map(lambda count: list(range(count + 1)))
rows_of_views = st.lists(
    st.tuples(
        st.one_of(ones, edges, st.lists(st.integers(-2, 9), max_size=4)),
        st.lists(st.one_of(sound, sound, references), max_size=4),
        st.booleans(),  # as many segments as boundaries say
    ),
    min_size=1,
    max_size=6,
)


class Mapped:
    """Columns of rows in two spans, and documents in three."""

    def __init__(self, rows: list[tuple[list[int], list[tuple[int, int, int]]]]) -> None:
        cut = len(rows) // 2
        self.firsts, self.kept, spans = int64([0, cut] if cut else [0]), [], []
        for some in [rows[:cut], rows[cut:]] if cut else [rows]:
            parts = [segment for _, segments in some for segment in segments]
            columns = [
                np.array([part[i] for part in parts], kind)
                for i, kind in enumerate((np.int32, np.int64, np.int32))
            ]
            offsets = np.cumsum([0, *(len(segments) for _, segments in some)]).astype(np.int32)
            self.kept += [offsets, *columns]
            spans.append([array.ctypes.data for array in (offsets, *columns)] + [len(parts)])
        self.lists = int64(spans).T.copy()
        self.boundaries = np.array([edge for row, _ in rows for edge in row], np.int32)
        self.ends = int64(np.cumsum([0, *(len(row) for row, _ in rows)]))
        self.pieces = sum(len(segments) for _, segments in rows)
        documents, first = [], 0
        self.tokens = []
        for lengths in LENGTHS:
            offsets = np.cumsum([1, *lengths]).astype(np.int32)  # one token belongs to none
            values = np.arange(100 * first, 100 * first + offsets[-1], dtype=np.int32)
            self.kept += [offsets, values]
            self.tokens += np.split(values[: offsets[-1]], offsets[:-1])[1:]
            documents.append([first, offsets.ctypes.data, values.ctypes.data, offsets[-1]])
            first += len(lengths)
        self.documents = int64(documents).T.copy()

    def find(self, capacity: int, multiple: int, pieces: int | None = None) -> Any:
        """What the kernel returns, and its outputs."""
        count = self.pieces if pieces is None else pieces
        rows = len(self.ends) - 1
        out = [
            np.full(size, 77, kind)
            for size, kind in (
                (rows + 1, np.int64), (count, np.int64), (count, np.int32), (count, np.int32),
                (count, np.int64),
            )
        ]  # fmt: skip
        wrong = gathering.find_pieces(
            int64(range(rows)), self.firsts, self.lists, self.boundaries, self.ends,
            int64(DIRECTORIES), self.documents, capacity, multiple, *out,
        )  # fmt: skip
        return wrong, out


@given(rows_of_views, st.integers(1, 12), st.sampled_from([1, 2, 3]))
def test_find_pieces_equals_its_twin(drawn: Any, capacity: int, multiple: int) -> None:
    rows = [
        (row, ([*segments, *[(0, 1, 0)] * 9][: max(0, len(row) - 1)] if fits else segments))
        for row, segments, fits in drawn
    ]
    mapped = Mapped(rows)
    (row, problem), (offsets, number, start, length, address) = mapped.find(capacity, multiple)
    lengths = [len(tokens) for tokens in mapped.tokens]
    expected = reference.find_pieces(
        [row for row, _ in rows], [segments for _, segments in rows], DIRECTORIES, lengths,
        capacity, multiple,
    )  # fmt: skip
    if problem:
        assert (row, problem) == expected
        return
    pieces = list(zip(number.tolist(), start.tolist(), length.tolist(), strict=True))
    assert [pieces[a:b] for a, b in pairwise(offsets)] == expected
    for (document, first, _), place in zip(pieces, address.tolist(), strict=True):
        assert place == mapped.tokens[document].ctypes.data + 4 * first


ROWS = [([0, 2, 4], [(0, 0, 1), (2, 0, 3)]), ([0, 3], [(2, 2, 0)])]


def test_files_that_change_while_they_are_mapped() -> None:
    """What an offset says is compared with what was counted when the file was mapped."""
    mapped = Mapped(ROWS)
    assert mapped.find(8, 1)[0] == (-1, 0)
    offsets = mapped.kept[0]  # of the first row's segments
    for edges in ([0, 3], [1, 3], [-1, 1]):
        offsets[:2] = edges
        assert mapped.find(8, 1)[0] == (0, 2)
    mapped = Mapped(ROWS)
    offsets = mapped.kept[8]  # of the first documents
    for edges in ([1, 99], [-2, 1], [4, 2]):
        offsets[:2] = edges
        assert mapped.find(8, 1)[0] == (0, 4)


def test_arrays_that_do_not_fit_together() -> None:
    mapped = Mapped(ROWS)
    assert mapped.find(8, 1, pieces=2)[0] == (1, 2)
    mapped.ends[-1] += 1
    with pytest.raises(ValueError, match=r"6 of 5 boundaries"):
        mapped.find(8, 1)
    mapped.lists = mapped.lists[:4]
    with pytest.raises(ValueError, match="rows"):
        mapped.find(8, 1)


def test_a_row_before_the_first_span() -> None:
    mapped = Mapped(ROWS)
    mapped.firsts += 1
    assert gathering.first_absent(int64([0]), mapped.firsts, mapped.firsts + 1) == 0
    assert mapped.find(8, 1)[0] == (0, 1)
