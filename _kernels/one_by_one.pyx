"""Strategies that decide each document's row when they meet it.

All share one interface: IN lengths int32[n] in visiting order, each in 1..capacity;
IN most_segments, with which a row is closed, 0 for any number; OUT row_of int32[n], the
row of each; the number of rows is returned. Which order is visited (input, longest first,
shuffled) is the caller's choice: first-fit decreasing is `first_fit` over the lengths
sorted longest first.
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
