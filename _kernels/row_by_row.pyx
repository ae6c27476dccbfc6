"""Best fit that fills one row after the other, so that rows hold a mix of all documents.

Best-fit decreasing takes documents by length, so a row holds documents of one length. Here rows take
them in the order given, which is a seeded one, and fit is looked for where it counts: at a row's end.

1. A row begins with the longest document left, if that is longer than half a row: only these can
   become impossible to combine. Otherwise with the next document in order.
2. While more than two mean lengths are free, the next document follows, or if it is too long, the
   longest that fits.
3. Then two documents at once: of the next `LOOK` in order, the first with which the longest
   document that still fits leaves the fewest tokens free. This goes on until none fits.

One document that fills the row exactly, or takes the last of its `most_segments`, ends it at any time.

This is "minimum bin slack" (Gupta and Ho 1999; the longest document first: Fleszar and Hindi 2002)
that draws all but the last two documents. O(n) turns of a bitset of the lengths left, at most `LOOK` of
them for each two documents at the end of a row. Needs about as many rows as best-fit decreasing,
mostly fewer; see `docs/packing.md`.
"""

import numpy as np

from libc.stdint cimport int32_t, int64_t, uint8_t

from capacity cimport (
    BitSet, bitset_add, bitset_free, bitset_init, bitset_previous, bitset_remove,
)

cdef enum:
    LOOK = 64
    UNLIMITED = 0x7FFFFFFF


cdef struct Shelf:
    # what is left, and the row that is being filled
    BitSet lengths
    const int32_t* length_of
    int32_t* left  # length -> how many documents
    const int32_t* by_length
    int32_t* end_of  # length -> the place in by_length after the last document that may be left
    uint8_t* is_taken
    int64_t* order
    int64_t taken
    int64_t next  # no document before it is left
    int32_t space
    int32_t may_take


cdef inline void _take(Shelf* shelf, int64_t document) noexcept nogil:
    cdef int32_t length = shelf.length_of[document]
    shelf.is_taken[document] = 1
    shelf.order[shelf.taken] = document
    shelf.taken += 1
    shelf.space -= length
    shelf.may_take -= 1
    shelf.left[length] -= 1
    if shelf.left[length] == 0:
        bitset_remove(&shelf.lengths, length)


cdef inline void _take_length(Shelf* shelf, int32_t length) noexcept nogil:
    """The last one in order: those that come soon are looked at, and should be of all lengths."""
    shelf.end_of[length] -= 1
    while shelf.is_taken[shelf.by_length[shelf.end_of[length]]]:
        shelf.end_of[length] -= 1
    _take(shelf, shelf.by_length[shelf.end_of[length]])


cdef void _take_two(Shelf* shelf, int64_t n, int32_t longest) noexcept nogil:
    """Step 3; or `longest` alone, where no two leave less."""
    cdef int64_t i, first = -1
    cdef int32_t length, second, best = longest, least = shelf.space - longest
    for i in range(shelf.next, min(shelf.next + LOOK, n)):
        length = shelf.length_of[i]
        if shelf.is_taken[i] or length > shelf.space:
            continue
        second = <int32_t>bitset_previous(&shelf.lengths, shelf.space - length)
        if second == length and shelf.left[length] == 1:
            second = <int32_t>bitset_previous(&shelf.lengths, length - 1)
        if second > 0 and shelf.space - length - second < least:
            first, best, least = i, second, shelf.space - length - second
            if least == 0:
                break
    if first >= 0:
        _take(shelf, first)
    _take_length(shelf, best)


cdef void _fill_row(Shelf* shelf, int64_t n, int32_t capacity, int32_t enough) noexcept nogil:
    cdef int32_t longest = <int32_t>bitset_previous(&shelf.lengths, capacity)
    cdef bint is_first = True
    while longest > 0 and shelf.may_take:
        while shelf.is_taken[shelf.next]:
            shelf.next += 1
        if is_first and longest <= capacity // 2:
            _take(shelf, shelf.next)
        elif is_first or longest == shelf.space or shelf.may_take == 1:
            _take_length(shelf, longest)
        elif shelf.space <= enough or shelf.may_take == 2:
            _take_two(shelf, n, longest)
        elif shelf.length_of[shelf.next] <= shelf.space:
            _take(shelf, shelf.next)
        else:
            _take_length(shelf, longest)
        is_first = False
        longest = <int32_t>bitset_previous(&shelf.lengths, shelf.space)


cdef void _stock(
    Shelf* shelf, int64_t n, int32_t capacity, const int32_t[::1] counts, int32_t[::1] by_length
) noexcept nogil:
    """What is left at first; a stable counting sort, with end_of as its cursor."""
    cdef int64_t i
    cdef int32_t length, start = 0
    for length in range(1, capacity + 1):
        shelf.left[length] = counts[length]
        shelf.end_of[length] = start
        start += counts[length]
        if counts[length]:
            bitset_add(&shelf.lengths, length)
    for i in range(n):
        length = shelf.length_of[i]
        by_length[shelf.end_of[length]] = <int32_t>i
        shelf.end_of[length] += 1


def mixed_best_fit(
    const int32_t[::1] lengths, int32_t capacity, int64_t[::1] order, int64_t[::1] row_offsets,
    int32_t[::1] row_tokens, int32_t[::1] counts, int32_t most_segments=0,
):
    """Plan rows one after the other, see above.

    IN  lengths      int32[n] in the order in which they are taken, each in 1..capacity, n < 2**31
    IN  most_segments  that a row may hold; 0: any number
    OUT order        int64[n], document numbers, row after row
    OUT row_offsets  int64[n + 1], row r is order[row_offsets[r]:row_offsets[r + 1]]
    OUT row_tokens   int32[n], what row r holds
    OUT counts       int32[capacity + 1], zeros before; counts[s] documents have length s

    Returns the number of rows.
    """
    cdef int64_t n = lengths.shape[0], i, rows = 0, tokens = 0
    cdef int32_t[:, ::1] by_lengths = np.zeros((2, capacity + 1), np.int32)
    cdef int32_t[::1] by_length = np.empty(n, np.int32)
    cdef uint8_t[::1] is_taken = np.zeros(n, np.uint8)
    cdef Shelf shelf
    row_offsets[0] = 0
    if n == 0:
        return 0
    if bitset_init(&shelf.lengths, <int64_t>capacity + 1):
        raise MemoryError("no memory for the set of lengths")
    shelf.length_of, shelf.is_taken, shelf.order = &lengths[0], &is_taken[0], &order[0]
    shelf.left, shelf.end_of = &by_lengths[0, 0], &by_lengths[1, 0]
    shelf.by_length = &by_length[0]
    shelf.taken = shelf.next = 0
    with nogil:
        for i in range(n):
            counts[lengths[i]] += 1
            tokens += lengths[i]
        _stock(&shelf, n, capacity, counts, by_length)
        while shelf.taken < n:
            shelf.space = capacity
            shelf.may_take = most_segments or UNLIMITED
            _fill_row(&shelf, n, capacity, <int32_t>min(2 * tokens // n, <int64_t>capacity))
            row_tokens[rows] = capacity - shelf.space
            rows += 1
            row_offsets[rows] = shelf.taken
        bitset_free(&shelf.lengths)
    return rows
