"""Exact best-fit decreasing, by counts instead of one document at a time.

Best-fit decreasing never looks at a document, only at its length, and rows with
equal free space are interchangeable. So:

1. Count the documents of each length.
2. From the longest length down, take the tightest row that still fits. After the
   first document of length ``s`` went into the tightest row with space ``c``, the
   new space ``c - s`` is tighter still, so ``min(c // s, left)`` documents go there
   at once. These are a *group*: one row, one length, consecutive documents.
3. Linear passes turn the groups into ``order`` and ``row_offsets``.

A row may be limited to some number of segments. It is closed then as if it were full,
so 2 holds with ``min(c // s, left, segments it may still take)``.

Cost O(n + capacity), no tree. The rows are those of the textbook algorithm, ties
between equally tight rows going to the one touched last (see ``reference.py``).
What is written at random is prefetched, because its address is known well before.
Scratch comes from numpy, which asks for huge pages: at ten million documents, page
faults cost as much as the algorithm.
"""

import numpy as np

from libc.stdint cimport int32_t, int64_t

from capacity cimport BitSet, bitset_add, bitset_free, bitset_init, bitset_next, bitset_remove

cdef extern from *:
    """
    static inline void packer_prefetch(const void* address) { __builtin_prefetch(address, 1); }
    """
    void prefetch "packer_prefetch"(const void* address) noexcept nogil

cdef enum:
    AHEAD = 16  # turns of a loop, in which what is prefetched arrives


cdef int64_t _place(
    const int32_t[::1] counts, int32_t longest, int32_t capacity, int32_t most_segments,
    BitSet* spaces, int32_t[::1] top, int32_t[::1] below,
    int32_t[::1] group_row, int32_t[::1] group_size,
    int64_t[::1] row_offsets, int32_t[::1] row_tokens, int64_t* rows,
) noexcept nogil:
    """Make the groups, longest length first; returns how many, and the rows opened.

    Rows of one free space form a stack: top[space] is its last row, below[row] the
    row under it, -1 the end. row_offsets[row + 1] counts the segments of a row.
    """
    cdef int64_t groups = 0
    cdef int32_t s, c, k, left, row, opened = 0
    row_offsets[0] = 0
    for s in range(longest, 0, -1):
        left = counts[s]
        while left:
            c = <int32_t>bitset_next(spaces, s)
            if c < 0:
                row = opened
                opened += 1
                c = capacity
                row_offsets[opened] = 0
            else:
                row = top[c]
                top[c] = below[row]
                if top[c] < 0:
                    bitset_remove(spaces, c)
            k = c // s
            if k > left:
                k = left
            if most_segments and k > most_segments - row_offsets[row + 1]:
                k = most_segments - <int32_t>row_offsets[row + 1]
            left -= k
            c -= k * s
            group_row[groups] = row
            group_size[groups] = k
            groups += 1
            row_tokens[row] = capacity - c
            row_offsets[row + 1] += k
            if c and not (most_segments and row_offsets[row + 1] == most_segments):
                if top[c] < 0:
                    bitset_add(spaces, c)
                below[row] = top[c]
                top[c] = row
    rows[0] = opened
    return groups


cdef void _sort_longest_first(
    const int32_t[::1] lengths, int32_t longest, const int32_t[::1] counts,
    int32_t[::1] cursor, int32_t[::1] by_length,
) noexcept nogil:
    """Stable counting sort; cursor[length] is where the next document of that length goes."""
    cdef int64_t i, n = lengths.shape[0]
    cdef int32_t k, start = 0
    for i in range(longest, 0, -1):
        cursor[i] = start
        start += counts[i]
    for i in range(n):
        if i + AHEAD < n:
            prefetch(&by_length[cursor[lengths[i + AHEAD]]])
        k = cursor[lengths[i]]
        cursor[lengths[i]] = k + 1
        by_length[k] = <int32_t>i


cdef void _write_plan(
    const int32_t[::1] group_row, const int32_t[::1] group_size, int64_t groups, int64_t rows,
    const int32_t[::1] by_length, int64_t[::1] order, int64_t[::1] row_offsets,
) noexcept nogil:
    """row_offsets[row + 1] is a count first, then the row's cursor, and ends as its end."""
    cdef int64_t g, i, k, position, start = 0
    for i in range(1, rows + 1):
        k = row_offsets[i]
        row_offsets[i] = start
        start += k
    i = 0
    for g in range(groups):
        if g + 2 * AHEAD < groups:
            prefetch(&row_offsets[group_row[g + 2 * AHEAD] + 1])
            prefetch(&order[row_offsets[group_row[g + AHEAD] + 1]])
        position = row_offsets[group_row[g] + 1]
        row_offsets[group_row[g] + 1] = position + group_size[g]
        for k in range(group_size[g]):
            order[position + k] = by_length[i]
            i += 1


def best_fit_decreasing(
    const int32_t[::1] lengths, int32_t capacity, int64_t[::1] order, int64_t[::1] row_offsets,
    int32_t[::1] row_tokens, int32_t[::1] counts, int32_t most_segments=0,
):
    """Plan rows by best-fit decreasing.

    IN  lengths      int32[n], each in 1..capacity, n < 2**31
    IN  most_segments  that a row may hold; 0: any number
    OUT order        int64[n], document numbers, row after row
    OUT row_offsets  int64[n + 1], row r is order[row_offsets[r]:row_offsets[r + 1]]
    OUT row_tokens   int32[n], what row r holds
    OUT counts       int32[capacity + 1], zeros before; counts[s] documents have length s

    Returns the number of rows. Source: Johnson 1973 (best-fit decreasing); the
    grouping by equal lengths is this project's.
    """
    cdef int64_t n = lengths.shape[0], i, groups, rows = 0
    cdef int32_t longest = 0
    cdef int32_t[::1] cursor = np.empty(capacity + 1, np.int32)
    cdef int32_t[::1] top = np.full(capacity + 1, -1, np.int32)
    # one array, because huge pages need some room to begin at their own multiples
    cdef int32_t[:, ::1] scratch = np.empty((4, n), np.int32)
    cdef int32_t[::1] below = scratch[0], by_length = scratch[1]
    cdef int32_t[::1] group_row = scratch[2], group_size = scratch[3]
    cdef BitSet spaces
    if bitset_init(&spaces, <int64_t>capacity + 1):
        raise MemoryError("no memory for the set of free spaces")
    with nogil:
        for i in range(n):
            counts[lengths[i]] += 1
            if lengths[i] > longest:
                longest = lengths[i]
        groups = _place(
            counts, longest, capacity, most_segments, &spaces, top, below,
            group_row, group_size, row_offsets, row_tokens, &rows,
        )
        bitset_free(&spaces)
        _sort_longest_first(lengths, longest, counts, cursor, by_length)
        _write_plan(group_row, group_size, groups, rows, by_length, order, row_offsets)
    return rows
