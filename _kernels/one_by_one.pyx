"""Strategies that decide each document's row when they meet it.

All share one interface: IN lengths int32[n] in visiting order, each in 1..capacity;
IN most_segments, with which a row is closed, 0 for any number; OUT row_of int32[n], the
row of each; the number of rows is returned. Which order is visited (input, longest first,
shuffled) is the caller's choice: first-fit decreasing is `first_fit` over the lengths
sorted longest first.

`mffd_large_rows` is the first part of modified first-fit decreasing: first-fit decreasing that looks ahead for large lengths.

Johnson and Garey 1985, "A 71/60 theorem for bin packing". With lengths classed as large
(> 1/2 row), medium (> 1/3), small (> 1/6) and tiny:

1. Each large document opens a row, longest first.
2. Forward over these rows: if the shortest medium left fits, place the longest that fits.
3. Backward over the rows without a medium: if the two shortest small left fit together,
   place the shortest and then the longest small that fits.
4. Forward: place the longest document left that fits, until the shortest does not.
5. First-fit decreasing of what is left into new rows: the caller's, see `packing/plan.py`.

Steps 1-4 work on counts per length and a bitset of the lengths left: O(n + capacity).
"""

import numpy as np

from libc.stdint cimport int32_t, int64_t

from capacity cimport (
    BitSet, bitset_add, bitset_free, bitset_init, bitset_next, bitset_previous, bitset_remove,
)


cdef int32_t[::1] _open_to(int64_t rows, int32_t most_segments):
    """int32[rows], how many more segments each row may take; None: any number."""
    return np.full(rows, most_segments, np.int32) if most_segments else None


cdef int64_t _fit_by_space(
    const int32_t[::1] lengths, int32_t capacity, bint tightest, BitSet* spaces,
    int32_t[::1] top, int32_t[::1] below, int32_t[::1] row_of, int32_t[::1] open_to,
) noexcept nogil:
    """Best fit (tightest) or worst fit over stacks of rows with equal space."""
    cdef int64_t i
    cdef int32_t c, row, rows = 0
    cdef bint limited = open_to is not None
    for i in range(lengths.shape[0]):
        if tightest:
            c = <int32_t>bitset_next(spaces, lengths[i])
        else:
            c = <int32_t>bitset_previous(spaces, capacity)
        if c < lengths[i]:
            row = rows
            rows += 1
            c = capacity
        else:
            row = top[c]
            top[c] = below[row]
            if top[c] < 0:
                bitset_remove(spaces, c)
        row_of[i] = row
        c -= lengths[i]
        if limited:
            open_to[row] -= 1
        if c and not (limited and open_to[row] == 0):
            if top[c] < 0:
                bitset_add(spaces, c)
            below[row] = top[c]
            top[c] = row
    return rows


def _by_space(
    const int32_t[::1] lengths, int32_t capacity, bint tightest, int32_t[::1] row_of,
    int32_t most_segments,
):
    cdef int32_t[::1] top = np.full(capacity + 1, -1, np.int32)
    cdef int32_t[::1] below = np.empty(lengths.shape[0], np.int32)
    cdef int32_t[::1] open_to = _open_to(lengths.shape[0], most_segments)
    cdef int64_t rows
    cdef BitSet spaces
    if bitset_init(&spaces, <int64_t>capacity + 1):
        raise MemoryError("no memory for the set of free spaces")
    with nogil:
        rows = _fit_by_space(lengths, capacity, tightest, &spaces, top, below, row_of, open_to)
        bitset_free(&spaces)
    return rows


def best_fit(lengths, capacity, row_of, most_segments=0):
    """The tightest open row that fits; among equals the one touched last. O(n)."""
    return _by_space(lengths, capacity, True, row_of, most_segments)


def worst_fit(lengths, capacity, row_of, most_segments=0):
    """The emptiest open row; among equals the one touched last. O(n)."""
    return _by_space(lengths, capacity, False, row_of, most_segments)


def first_fit(
    const int32_t[::1] lengths, int32_t capacity, int32_t[::1] row_of, int32_t most_segments=0,
):
    """The earliest row that fits. O(n log rows), a tree of the largest space below.

    Any two rows of first fit together exceed one row, so `2 * tokens / capacity + 2`
    leaves are enough, and one more for each row closed by its number of segments; unopened
    rows are leaves that are still empty.
    """
    cdef int64_t n = lengths.shape[0], i, node, leaves = 1, rows = 0, tokens = 0, most_rows
    cdef int32_t[::1] space, open_to
    for i in range(n):
        tokens += lengths[i]
    most_rows = 2 * (tokens // capacity) + 2
    if most_segments:
        most_rows += n // most_segments
    while leaves < most_rows and leaves < n:
        leaves *= 2
    open_to = _open_to(leaves, most_segments)
    space = np.full(2 * leaves, capacity, np.int32)
    with nogil:
        for i in range(n):
            node = 1
            while node < leaves:
                node *= 2
                if space[node] < lengths[i]:
                    node += 1
            row_of[i] = <int32_t>(node - leaves)
            if row_of[i] >= rows:
                rows = row_of[i] + 1
            space[node] -= lengths[i]
            if most_segments:
                open_to[node - leaves] -= 1
                if open_to[node - leaves] == 0:
                    space[node] = 0
            while node > 1:
                node >>= 1
                space[node] = max(space[2 * node], space[2 * node + 1])
    return rows


def next_fit(
    const int32_t[::1] lengths, int32_t capacity, int32_t[::1] row_of, int32_t most_segments=0,
):
    """The current row, or a new one; keeps the order. O(n)."""
    cdef int64_t i
    cdef int32_t rows = 0, space = 0, segments = 0
    with nogil:
        for i in range(lengths.shape[0]):
            if lengths[i] > space:
                rows += 1
                space = capacity
                segments = 0
            space -= lengths[i]
            segments += 1
            if segments == most_segments:
                space = 0
            row_of[i] = rows - 1
    return rows


def harmonic(const int32_t[::1] lengths, int32_t capacity, int32_t classes, int32_t[::1] row_of,
    int32_t most_segments=0,
):
    """Harmonic-k (Lee and Lee 1985): at most `classes` rows are open at any time. O(n).

    Class j < classes holds lengths in (capacity/(j+1), capacity/j], exactly j to a row;
    the last class holds the rest, by next fit.
    """
    cdef int64_t i
    cdef int32_t j, rows = 0
    cdef int32_t[::1] open_row = np.zeros(classes + 1, np.int32)
    cdef int32_t[::1] space = np.zeros(classes + 1, np.int32)  # free tokens of the open row
    cdef int32_t[::1] segments = np.zeros(classes + 1, np.int32)  # in the open row
    with nogil:
        for i in range(lengths.shape[0]):
            j = min(capacity // lengths[i], classes)
            # j lengths of class j < classes always fit in a row, j + 1 never do
            if lengths[i] > space[j]:
                open_row[j] = rows
                space[j] = capacity
                segments[j] = 0
                rows += 1
            space[j] -= lengths[i]
            segments[j] += 1
            if segments[j] == most_segments:
                space[j] = 0
            row_of[i] = open_row[j]
    return rows


cdef struct Shelf:
    # what is left, by length, and where the taken ones go
    BitSet lengths
    int64_t* next_of  # length -> place in by_length of its next document
    int64_t* end_of
    const int64_t* by_length
    int64_t* visit
    int32_t* row_of
    int32_t* space
    int64_t taken


cdef inline void _take(Shelf* shelf, int32_t length, int32_t row) noexcept nogil:
    shelf.visit[shelf.taken] = shelf.by_length[shelf.next_of[length]]
    shelf.row_of[shelf.taken] = row
    shelf.space[row] -= length
    shelf.taken += 1
    shelf.next_of[length] += 1
    if shelf.next_of[length] == shelf.end_of[length]:
        bitset_remove(&shelf.lengths, length)


cdef int32_t _first_four_steps(Shelf* shelf, int32_t capacity) noexcept nogil:
    cdef int32_t half = capacity // 2, third = capacity // 3, sixth = capacity // 6
    cdef int32_t row, rows = 0, length, shortest, second
    length = <int32_t>bitset_previous(&shelf.lengths, capacity)
    while length > half:
        shelf.space[rows] = capacity
        _take(shelf, length, rows)
        rows += 1
        length = <int32_t>bitset_previous(&shelf.lengths, length)
    for row in range(rows):
        shortest = <int32_t>bitset_next(&shelf.lengths, third + 1)
        if third < shortest <= half and shortest <= shelf.space[row]:
            _take(shelf, <int32_t>bitset_previous(&shelf.lengths, min(half, shelf.space[row])), row)
            shelf.space[row] = -1 - shelf.space[row]  # marks rows that hold a medium
    for row in range(rows - 1, -1, -1):
        if shelf.space[row] < 0:
            shelf.space[row] = -1 - shelf.space[row]
            continue
        shortest = <int32_t>bitset_next(&shelf.lengths, sixth + 1)
        if shortest < 0 or shortest > third:
            continue
        second = shortest
        if shelf.end_of[shortest] - shelf.next_of[shortest] < 2:
            second = <int32_t>bitset_next(&shelf.lengths, shortest + 1)
        if second < 0 or second > third or shortest + second > shelf.space[row]:
            continue
        _take(shelf, shortest, row)
        _take(shelf, <int32_t>bitset_previous(&shelf.lengths, min(third, shelf.space[row])), row)
    for row in range(rows):
        while True:
            length = <int32_t>bitset_previous(&shelf.lengths, shelf.space[row])
            if length < 1:
                break
            _take(shelf, length, row)
    return rows


def mffd_large_rows(
    const int32_t[::1] lengths, int32_t capacity, const int64_t[::1] by_length,
    int64_t[::1] visit, int32_t[::1] row_of,
):
    """Steps 1-4. Returns (documents placed, rows opened).

    IN  lengths   int32[n], each in 1..capacity
    IN  by_length int64[n], document numbers longest first
    OUT visit     int64[n], documents in the order they were placed, the rest longest first
    OUT row_of    int32[n], the row of each placed document
    """
    cdef int64_t n = lengths.shape[0], i, placed
    cdef int32_t rows, length
    cdef int64_t[::1] next_of = np.zeros(capacity + 1, np.int64)
    cdef int64_t[::1] end_of = np.zeros(capacity + 1, np.int64)
    cdef int32_t[::1] space = np.empty(n, np.int32)
    cdef Shelf shelf
    if n == 0:
        return 0, 0
    if bitset_init(&shelf.lengths, <int64_t>capacity + 1):
        raise MemoryError("no memory for the set of lengths")
    shelf.next_of = &next_of[0]
    shelf.end_of = &end_of[0]
    shelf.by_length = &by_length[0]
    shelf.visit = &visit[0]
    shelf.row_of = &row_of[0]
    shelf.space = &space[0]
    shelf.taken = 0
    with nogil:
        for i in range(n):
            length = lengths[by_length[i]]
            if end_of[length] == 0:
                next_of[length] = i
                bitset_add(&shelf.lengths, length)
            end_of[length] = i + 1
        rows = _first_four_steps(&shelf, capacity)
        bitset_free(&shelf.lengths)
        placed = shelf.taken
        for length in range(capacity, 0, -1):
            for i in range(next_of[length], end_of[length]):
                visit[shelf.taken] = by_length[i]
                shelf.taken += 1
    return placed, rows
