"""Linear-time reordering: by length, by row, and the seeded shuffle; and what rows hold then.

Every strategy but best-fit decides a row for one document at a time, in some visiting
order. These passes make the visiting order and turn the decisions into a plan.
"""

import numpy as np

from libc.stdint cimport int32_t, int64_t, uint64_t


cdef inline uint64_t _splitmix64(uint64_t* state) noexcept nogil:
    """Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"."""
    cdef uint64_t z
    state[0] += <uint64_t>0x9E3779B97F4A7C15
    z = state[0]
    z = (z ^ (z >> 30)) * <uint64_t>0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * <uint64_t>0x94D049BB133111EB
    return z ^ (z >> 31)


cdef void _fisher_yates(int64_t* values, int64_t n, uint64_t* state) noexcept nogil:
    """Durstenfeld 1964; the bound is below 2**32, so multiply-shift gives the index."""
    cdef int64_t i, j, held
    for i in range(n - 1, 0, -1):
        j = <int64_t>(((_splitmix64(state) >> 32) * <uint64_t>(i + 1)) >> 32)
        held = values[i]
        values[i] = values[j]
        values[j] = held


def permutation(int64_t[::1] out, uint64_t seed):
    """OUT out int64[n]: 0..n-1 in an order that depends on `seed` and n alone."""
    cdef int64_t i
    with nogil:
        for i in range(out.shape[0]):
            out[i] = i
        if out.shape[0] > 1:
            _fisher_yates(&out[0], out.shape[0], &seed)


def longest_first(const int32_t[::1] lengths, int32_t capacity, int64_t[::1] out):
    """OUT out int64[n]: document numbers by descending length, equal lengths in input order.

    IN lengths int32[n], each in 1..capacity. A counting sort.
    """
    cdef int64_t i, k, start = 0
    cdef int64_t[::1] count = np.zeros(capacity + 1, np.int64)
    with nogil:
        for i in range(lengths.shape[0]):
            count[lengths[i]] += 1
        for i in range(capacity, 0, -1):
            k = count[i]
            count[i] = start
            start += k
        for i in range(lengths.shape[0]):
            k = count[lengths[i]]
            count[lengths[i]] = k + 1
            out[k] = i


def group_by_row(
    const int32_t[::1] row_of, const int64_t[::1] visit, int64_t rows,
    int64_t[::1] order, int64_t[::1] row_offsets,
):
    """Turn decisions into a plan; documents of a row keep the order they were visited in.

    IN  row_of       int32[n], the row of the i-th visited document, in 0..rows-1
    IN  visit        int64[n], the document visited i-th; None: documents in input order
    OUT order        int64[n]
    OUT row_offsets  int64[>= rows + 1]
    """
    cdef int64_t i, k, start = 0, n = row_of.shape[0]
    cdef bint renumber = visit is not None
    with nogil:
        for i in range(rows + 1):
            row_offsets[i] = 0
        for i in range(n):
            row_offsets[row_of[i] + 1] += 1
        for i in range(1, rows + 1):
            k = row_offsets[i]
            row_offsets[i] = start
            start += k
        for i in range(n):
            k = row_offsets[row_of[i] + 1]
            row_offsets[row_of[i] + 1] = k + 1
            order[k] = visit[i] if renumber else i


def sum_rows(
    const int32_t[::1] lengths, const int64_t[::1] order, const int64_t[::1] row_offsets,
    int32_t[::1] out,
):
    """OUT out int32[rows]: the sum of the lengths of each row's documents.

    IN lengths int32[n], order int64[n], row_offsets int64[rows + 1]
    """
    cdef int64_t row, i, total
    with nogil:
        for row in range(out.shape[0]):
            total = 0
            for i in range(row_offsets[row], row_offsets[row + 1]):
                total += lengths[order[i]]
            out[row] = <int32_t>total


def shuffle_plan(
    const int64_t[::1] order, const int64_t[::1] row_offsets, int64_t rows, uint64_t seed,
    int64_t[::1] new_order, int64_t[::1] new_row_offsets,
):
    """Shuffle the rows, and the documents inside each row, by one seeded generator.

    IN  order int64[n], row_offsets int64[rows + 1]
    OUT new_order int64[n], new_row_offsets int64[rows + 1]
    """
    cdef int64_t row, i, start, size, end = 0
    cdef int64_t[::1] source = np.empty(rows, np.int64)
    with nogil:
        for row in range(rows):
            source[row] = row
        if rows > 1:
            _fisher_yates(&source[0], rows, &seed)
        new_row_offsets[0] = 0
        for row in range(rows):
            start = row_offsets[source[row]]
            size = row_offsets[source[row] + 1] - start
            for i in range(size):
                new_order[end + i] = order[start + i]
            if size > 1:
                _fisher_yates(&new_order[end], size, &seed)
            end += size
            new_row_offsets[row + 1] = end
