"""Strategies that decide each document's row when they meet it.

All share one interface: IN lengths int32[n] in visiting order, each in 1..capacity;
OUT row_of int32[n], the row of each; the number of rows is returned. Which order is
visited (input, longest first, shuffled) is the caller's choice: first-fit decreasing
is `first_fit` over the lengths sorted longest first.
"""

import numpy as np

from libc.stdint cimport int32_t, int64_t

from capacity cimport (
    BitSet, bitset_add, bitset_free, bitset_init, bitset_next, bitset_previous, bitset_remove,
)


cdef int64_t _fit_by_space(
    const int32_t[::1] lengths, int32_t capacity, bint tightest, BitSet* spaces,
    int32_t[::1] top, int32_t[::1] below, int32_t[::1] row_of,
) noexcept nogil:
    """Best fit (tightest) or worst fit over stacks of rows with equal space."""
    cdef int64_t i
    cdef int32_t c, row, rows = 0
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
        if c:
            if top[c] < 0:
                bitset_add(spaces, c)
            below[row] = top[c]
            top[c] = row
    return rows


def _by_space(const int32_t[::1] lengths, int32_t capacity, bint tightest, int32_t[::1] row_of):
    cdef int32_t[::1] top = np.full(capacity + 1, -1, np.int32)
    cdef int32_t[::1] below = np.empty(lengths.shape[0], np.int32)
    cdef int64_t rows
    cdef BitSet spaces
    if bitset_init(&spaces, <int64_t>capacity + 1):
        raise MemoryError("no memory for the set of free spaces")
    with nogil:
        rows = _fit_by_space(lengths, capacity, tightest, &spaces, top, below, row_of)
        bitset_free(&spaces)
    return rows


def best_fit(lengths, capacity, row_of):
    """The tightest open row that fits; among equals the one touched last. O(n)."""
    return _by_space(lengths, capacity, True, row_of)


def worst_fit(lengths, capacity, row_of):
    """The emptiest open row; among equals the one touched last. O(n)."""
    return _by_space(lengths, capacity, False, row_of)


def first_fit(const int32_t[::1] lengths, int32_t capacity, int32_t[::1] row_of):
    """The earliest row that fits. O(n log rows), a tree of the largest space below.

    Any two rows of first fit together exceed one row, so `2 * tokens / capacity + 2`
    leaves are enough; unopened rows are leaves that are still empty.
    """
    cdef int64_t n = lengths.shape[0], i, node, leaves = 1, rows = 0, tokens = 0
    cdef int32_t[::1] space
    for i in range(n):
        tokens += lengths[i]
    while leaves < 2 * (tokens // capacity) + 2 and leaves < n:
        leaves *= 2
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
            while node > 1:
                node >>= 1
                space[node] = max(space[2 * node], space[2 * node + 1])
    return rows


def next_fit(const int32_t[::1] lengths, int32_t capacity, int32_t[::1] row_of):
    """The current row, or a new one; keeps the order. O(n)."""
    cdef int64_t i
    cdef int32_t rows = 0, space = 0
    with nogil:
        for i in range(lengths.shape[0]):
            if lengths[i] > space:
                rows += 1
                space = capacity
            space -= lengths[i]
            row_of[i] = rows - 1
    return rows


def harmonic(const int32_t[::1] lengths, int32_t capacity, int32_t classes, int32_t[::1] row_of):
    """Harmonic-k (Lee and Lee 1985): at most `classes` rows are open at any time. O(n).

    Class j < classes holds lengths in (capacity/(j+1), capacity/j], exactly j to a row;
    the last class holds the rest, by next fit.
    """
    cdef int64_t i
    cdef int32_t j, rows = 0
    cdef int32_t[::1] open_row = np.zeros(classes + 1, np.int32)
    cdef int32_t[::1] space = np.zeros(classes + 1, np.int32)  # free tokens of the open row
    with nogil:
        for i in range(lengths.shape[0]):
            j = min(capacity // lengths[i], classes)
            # j lengths of class j < classes always fit in a row, j + 1 never do
            if lengths[i] > space[j]:
                open_row[j] = rows
                space[j] = capacity
                rows += 1
            space[j] -= lengths[i]
            row_of[i] = open_row[j]
    return rows
