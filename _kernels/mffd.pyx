"""Modified first-fit decreasing: first-fit decreasing that looks ahead for large lengths.

Johnson and Garey 1985, "A 71/60 theorem for bin packing". With lengths classed as large
(> 1/2 row), medium (> 1/3), small (> 1/6) and tiny:

1. Each large document opens a row, longest first.
2. Forward over these rows: if the shortest medium left fits, place the longest that fits.
3. Backward over the rows without a medium: if the two shortest small left fit together,
   place the shortest and then the longest small that fits.
4. Forward: place the longest document left that fits, until the shortest does not.
5. First-fit decreasing of what is left into new rows: the caller's, see `packing/planning.py`.

Steps 1-4 work on counts per length and a bitset of the lengths left: O(n + capacity).
"""

import numpy as np

from libc.stdint cimport int32_t, int64_t

from capacity cimport (
    BitSet, bitset_add, bitset_free, bitset_init, bitset_next, bitset_previous, bitset_remove,
)


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
