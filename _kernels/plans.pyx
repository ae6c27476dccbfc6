"""From decisions to a plan, and what is done to a plan: by row, shuffled, evened out.

Every strategy but best-fit decides a row for one document at a time, in some visiting
order. Linear passes make the visiting order and turn the decisions into a plan.

`balance_rows` evens out what attention costs per row, by exchanges that leave every row as full as it was.

The attention cost of a row is the sum of its squared segment lengths. The sum over all rows is
fixed by the documents; only its spread can change. A segment of length ``b + c`` in a costly
row X, exchanged for two segments of lengths ``b`` and ``c`` in a cheap row Y, moves ``2bc`` of
cost from X to Y, and no token of space. So, in at most ``PASSES`` passes:

1. List the segments of each length, those of the costliest rows first.
2. From the cheapest row Y on: look up, for each two of up to ``PAIRED`` of its segments, the
   first segment of their summed length that is still in a row X above the mean. Make the
   exchange that lowers the sum of squared costs most, by ``4bc * (cost(X) - cost(Y) - 2bc)``,
   and go on with Y until none does, or Y is at the mean.

Each pass pairs other segments of a row of many. A row is walked once a pass, and every exchange
uses up a segment of its row, so a pass is O(segments) after the sort of rows. All in integers, but for products that are only
compared: every machine makes the same exchanges.
"""

import numpy as np

from libc.stdint cimport int32_t, int64_t, uint64_t

cdef enum:
    PAIRED = 16
    PASSES = 16


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


cdef struct Rows:
    const int32_t* lengths
    int32_t* row_of
    int32_t* above  # the segment before each in its row, -1 the beginning
    int32_t* below  # the one after it, -1 the end
    int32_t* head  # of each row: its first segment
    int32_t* size  # segments in each row
    int64_t* cost


cdef inline void _take(Rows* rows, int32_t segment) noexcept nogil:
    cdef int32_t row = rows.row_of[segment]
    cdef int32_t above = rows.above[segment], below = rows.below[segment]
    if above < 0:
        rows.head[row] = below
    else:
        rows.below[above] = below
    if below >= 0:
        rows.above[below] = above
    rows.size[row] -= 1
    rows.cost[row] -= <int64_t>rows.lengths[segment] * rows.lengths[segment]


cdef inline void _put(Rows* rows, int32_t segment, int32_t row) noexcept nogil:
    cdef int32_t below = rows.head[row]
    rows.above[segment] = -1
    rows.below[segment] = below
    if below >= 0:
        rows.above[below] = segment
    rows.head[row] = segment
    rows.row_of[segment] = row
    rows.size[row] += 1
    rows.cost[row] += <int64_t>rows.lengths[segment] * rows.lengths[segment]


cdef void _list_by_length(
    Rows* rows, const int64_t[::1] cheapest_first, int64_t n,
    int32_t[::1] by_length, int32_t[::1] next_of, int32_t[::1] end_of,
) noexcept nogil:
    """by_length[next_of[length]:end_of[length]] are the segments of a length, step 1."""
    cdef int64_t i
    cdef int32_t segment, start = 0
    end_of[:] = 0
    for i in range(n):
        end_of[rows.lengths[i]] += 1
    for i in range(end_of.shape[0]):
        next_of[i] = start
        start += end_of[i]
        end_of[i] = next_of[i]
    for i in range(cheapest_first.shape[0] - 1, -1, -1):
        segment = rows.head[cheapest_first[i]]
        while segment >= 0:
            by_length[end_of[rows.lengths[segment]]] = segment
            end_of[rows.lengths[segment]] += 1
            segment = rows.below[segment]


cdef int32_t _some_segments(Rows* rows, int32_t row, int64_t skip, int32_t* own) noexcept nogil:
    """Up to PAIRED of a row's segments, evenly apart, others for every `skip`; how many."""
    cdef int32_t i, segment = rows.head[row], size = rows.size[row], k = 0
    cdef int32_t apart = (size - 1) // PAIRED + 1
    for i in range(size):
        if (i + skip) % apart == 0:
            own[k] = segment
            k += 1
        segment = rows.below[segment]
    return k


cdef bint _improve(
    Rows* rows, int32_t y, int32_t* own, int32_t k, int64_t mean, int32_t capacity,
    int32_t multiple, int32_t most_segments, const int32_t[::1] by_length, int32_t[::1] next_of,
    const int32_t[::1] end_of,
) noexcept nogil:
    """Make the best exchange for two of own[:k], segments of row y; returns whether there was
    one. Then own[:k - 1] has the longer segment for the two.
    """
    cdef int32_t i, j, b, c, x, taken, best_i = 0, best_j = 0, best_long = -1
    cdef int64_t moved
    cdef double gain, best = 0
    for i in range(k):
        b = rows.lengths[own[i]]
        for j in range(i):
            c = rows.lengths[own[j]]
            if b + c > capacity:
                continue
            while next_of[b + c] < end_of[b + c] and (
                rows.cost[rows.row_of[by_length[next_of[b + c]]]] <= mean
            ):
                next_of[b + c] += 1
            if next_of[b + c] == end_of[b + c]:
                continue
            x = rows.row_of[by_length[next_of[b + c]]]
            if most_segments and rows.size[x] >= most_segments:
                continue
            if multiple > 1:  # the padding must not grow
                taken = (b - 1) // multiple + (c - 1) // multiple + 2
                if taken != (b + c - 1) // multiple + 1:
                    continue
            moved = 2 * <int64_t>b * c
            gain = <double>moved * <double>(rows.cost[x] - rows.cost[y] - moved)
            if gain > best:
                best, best_i, best_j = gain, i, j
                best_long = by_length[next_of[b + c]]
    if best_long < 0:
        return False
    next_of[rows.lengths[best_long]] += 1
    x = rows.row_of[best_long]
    _take(rows, best_long)
    _take(rows, own[best_i])
    _take(rows, own[best_j])
    _put(rows, best_long, y)
    _put(rows, own[best_i], x)
    _put(rows, own[best_j], x)
    own[best_i] = best_long
    own[best_j] = own[k - 1]
    return True


def balance_rows(
    const int32_t[::1] lengths, const int64_t[::1] row_offsets, int32_t capacity,
    int32_t multiple, int32_t most_segments, int64_t[::1] order, int64_t[::1] new_row_offsets,
):
    """Exchange segments between rows; every row keeps its number of tokens.

    IN  lengths      int32[n], segments row after row, each in 1..capacity, n < 2**31
    IN  row_offsets  int64[rows + 1], row r holds segments row_offsets[r]..row_offsets[r + 1]
    IN  multiple     lengths rounded up to it take no more of a row than before, either
    IN  most_segments  that a row may hold; 0: any number
    OUT order        int64[n], segments row after row
    OUT new_row_offsets  int64[rows + 1], into order

    Returns the number of exchanges.
    """
    cdef int64_t n = lengths.shape[0], count = row_offsets.shape[0] - 1
    cdef int64_t i, row, mean = 0, skip, exchanges = 0, before
    cdef int32_t segment, y, k
    cdef int32_t own[PAIRED]
    cdef int32_t[::1] row_of = np.empty(n, np.int32)
    cdef int32_t[::1] above = np.empty(n, np.int32)
    cdef int32_t[::1] below = np.empty(n, np.int32)
    cdef int32_t[::1] by_length = np.empty(n, np.int32)
    cdef int32_t[::1] head = np.full(count, -1, np.int32)
    cdef int32_t[::1] size = np.zeros(count, np.int32)
    cdef int32_t[::1] next_of = np.empty(capacity + 1, np.int32)
    cdef int32_t[::1] end_of = np.empty(capacity + 1, np.int32)
    cdef int64_t[::1] cost = np.zeros(count, np.int64)
    cdef int64_t[::1] cheapest_first
    cdef Rows rows
    new_row_offsets[0] = 0
    if n == 0:
        return 0
    rows.lengths = &lengths[0]
    rows.row_of, rows.above, rows.below = &row_of[0], &above[0], &below[0]
    rows.head, rows.size, rows.cost = &head[0], &size[0], &cost[0]
    with nogil:
        for row in range(count):
            for i in range(row_offsets[row + 1] - 1, row_offsets[row] - 1, -1):
                _put(&rows, <int32_t>i, <int32_t>row)
            mean += cost[row]
        mean //= count
    for skip in range(PASSES):
        cheapest_first = np.argsort(cost, kind="stable")
        before = exchanges
        with nogil:
            _list_by_length(&rows, cheapest_first, n, by_length, next_of, end_of)
            for row in range(count):
                y = <int32_t>cheapest_first[row]
                k = _some_segments(&rows, y, skip, own)
                while cost[y] < mean and _improve(
                    &rows, y, own, k, mean, capacity, multiple, most_segments,
                    by_length, next_of, end_of,
                ):
                    k -= 1
                    exchanges += 1
        if exchanges == before:
            break
    with nogil:
        i = 0
        for row in range(count):
            segment = head[row]
            while segment >= 0:
                order[i] = segment
                i += 1
                segment = below[segment]
            new_row_offsets[row + 1] = i
    return exchanges
