"""Best fit, by counts of lengths instead of one document at a time: decreasing, and mixed.

`best_fit_decreasing` never looks at a document, only at its length, and rows with
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

`mixed_best_fit` fills one row after the other. Best-fit decreasing takes documents by length, so a
row holds documents of one length; here rows take
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
    BitSet, bitset_add, bitset_free, bitset_init, bitset_next, bitset_previous, bitset_remove,
)

cdef extern from *:
    """
    static inline void packer_prefetch(const void* address) { __builtin_prefetch(address, 1); }
    """
    void prefetch "packer_prefetch"(const void* address) noexcept nogil

cdef enum:
    AHEAD = 16  # turns of a loop, in which what is prefetched arrives
    LOOK = 64
    UNLIMITED = 0x7FFFFFFF


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
