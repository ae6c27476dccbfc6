"""Dealing the rows of steps to ranks, an equal number of rows to each, at sums as even as may be.

By differencing (Karmarkar and Karp 1982) with as many rows for everyone (Yakir 1996, "The
differencing algorithm LDM for partitioning: a proof of a conjecture of Karmarkar and Karp"; Michiels
et al. 2003 for more than two parts). Of a step of W ranks:

1. Each W rows that follow one another are a tuple: a row for each rank, whichever it will be.
2. Of the tuples of a micro-step, the two whose own sums differ most become one: the largest sum of
   one joins the smallest of the other, and so on. So again until one is left.
3. The micro-steps' tuples become one in the same way.
4. Where that is asked for, the costliest rank and the cheapest exchange the two rows that leave them
   most alike, up to W times, until it is not worth it.

A rank's i-th row is one of the i-th W rows, but for exchanges, after which each rank's rows are in
order again: when rows come costliest first, ranks meet at rows of like cost in every micro-step, too.
O(rows · (log W + log B·M)) for a step. Only sums and differences of costs are compared: every
machine deals alike.
"""

import numpy as np

from libc.stdint cimport int64_t

cdef enum:
    RUN = 8  # rows that are sorted by insertion
    WORTH = 1024  # what is evened is more than such a part of the mean, or of the gap


cdef inline void _insert(
    const double* costs, int64_t begin, int64_t end, int64_t* order
) noexcept nogil:
    """order[begin:end] by descending cost, by insertion."""
    cdef int64_t i, j, held
    for i in range(begin + 1, end):
        held = order[i]
        j = i
        while j > begin and costs[order[j - 1]] < costs[held]:
            order[j] = order[j - 1]
            j -= 1
        order[j] = held


cdef inline void _merge(
    const double* costs, int64_t begin, int64_t middle, int64_t end,
    const int64_t* order, int64_t* merged,
) noexcept nogil:
    """order[begin:middle] and order[middle:end], each by descending cost, as one."""
    cdef int64_t i = begin, j = middle, k
    for k in range(begin, end):
        if i < middle and (j == end or costs[order[i]] >= costs[order[j]]):
            merged[k] = order[i]
            i += 1
        else:
            merged[k] = order[j]
            j += 1


cdef void _sort_costliest_first(
    const double* costs, int64_t n, int64_t* order, int64_t* spare
) noexcept nogil:
    """order[:n], row numbers, by descending cost, equal ones as they were: a merge sort."""
    cdef int64_t k, begin = 0, width = RUN
    cdef int64_t* source = order
    cdef int64_t* target = spare
    while begin < n:
        _insert(costs, begin, min(begin + RUN, n), order)
        begin += RUN
    while width < n:
        begin = 0
        while begin < n:
            _merge(
                costs, begin, min(begin + width, n), min(begin + 2 * width, n), source, target
            )
            begin += 2 * width
        source, target = target, source
        width *= 2
    if source != order:
        for k in range(n):
            order[k] = source[k]


def costliest_first(const double[::1] costs, int64_t size, int64_t[::1] out):
    """The numbers of `size` rows after another by descending cost; equal ones keep their order.

    IN  costs  float64[n]
    OUT out    int64[n]: of each `size` rows, the last of which may be fewer
    """
    cdef int64_t begin = 0, i, n = costs.shape[0]
    cdef int64_t[::1] spare = np.empty(min(size, n), np.int64)
    if n == 0:
        return
    with nogil:
        for i in range(n):
            out[i] = i
        while begin < n:
            _sort_costliest_first(&costs[0], min(size, n - begin), &out[begin], &spare[0])
            begin += size


cdef struct Tuples:
    int64_t ranks  # W
    double* sums  # [tuples, W], descending in each
    int64_t* member  # [tuples, W], a row of each sum
    int64_t* next_row  # [rows], the rows of a sum are a ring
    double* new_sums  # [W]
    int64_t* new_member
    int64_t* order
    int64_t* spare


cdef inline void _put(Tuples* state, int64_t into) noexcept nogil:
    """The new sums and members as a tuple, largest first."""
    cdef int64_t i, w = state.ranks
    for i in range(w):
        state.order[i] = i
    _sort_costliest_first(state.new_sums, w, state.order, state.spare)
    for i in range(w):
        state.sums[into * w + i] = state.new_sums[state.order[i]]
        state.member[into * w + i] = state.new_member[state.order[i]]


cdef inline void _join(Tuples* state, int64_t a, int64_t b) noexcept nogil:
    """Tuple b, from its smallest sum on, into tuple a."""
    cdef int64_t i, x, y, held, w = state.ranks
    for i in range(w):
        x, y = state.member[a * w + i], state.member[b * w + w - 1 - i]
        state.new_sums[i] = state.sums[a * w + i] + state.sums[b * w + w - 1 - i]
        state.new_member[i] = x
        held = state.next_row[x]  # one ring of two
        state.next_row[x] = state.next_row[y]
        state.next_row[y] = held
    _put(state, a)


cdef inline bint _goes_before(Tuples* state, int64_t a, int64_t b) noexcept nogil:
    cdef int64_t w = state.ranks
    cdef double of_a = state.sums[a * w] - state.sums[a * w + w - 1]
    cdef double of_b = state.sums[b * w] - state.sums[b * w + w - 1]
    return of_a > of_b or (of_a == of_b and a < b)


cdef void _sink(Tuples* state, int64_t* heap, int64_t size, int64_t place) noexcept nogil:
    cdef int64_t sunk = heap[place], child = 2 * place + 1
    while child < size:
        if child + 1 < size and _goes_before(state, heap[child + 1], heap[child]):
            child += 1
        if not _goes_before(state, heap[child], sunk):
            break
        heap[place] = heap[child]
        place = child
        child = 2 * place + 1
    heap[place] = sunk


cdef int64_t _difference(Tuples* state, int64_t* heap, int64_t size) noexcept nogil:
    """heap[:size], tuples, into one of them, which is returned."""
    cdef int64_t i, a
    for i in range(size // 2 - 1, -1, -1):
        _sink(state, heap, size, i)
    while size > 1:
        a = heap[0]
        size -= 1
        heap[0] = heap[size]
        _sink(state, heap, size, 0)
        _join(state, a, heap[0])
        heap[0] = a
        _sink(state, heap, size, 0)
    return heap[0]


cdef inline void _into_order(int64_t* out, int64_t place, int64_t w, int64_t count) noexcept nogil:
    """out[place::w] in order again, `count` rows of which the one at `place` may be wrong."""
    cdef int64_t held = out[place], last = (count - 1) * w
    while place >= w and out[place - w] > held:
        out[place] = out[place - w]
        place -= w
    while place < last and out[place + w] < held:
        out[place] = out[place + w]
        place += w
    out[place] = held


cdef bint _exchange(
    const double* costs, double* sums, int64_t w, int64_t count, int64_t most, int64_t least,
    int64_t* out,
) noexcept nogil:
    """The best exchange of a row of rank `most` for a cheaper one of `least`, if worth it. Of
    several as good ones, that of the first rows.
    """
    cdef double gap = sums[most] - sums[least], best = gap / WORTH, d, moved
    cdef int64_t i, j, first, k = 0, best_i = -1, best_j = -1
    for i in range(count):
        # the first row that is cheaper by half the gap, or one before it
        while k < count and costs[out[i * w + most]] - costs[out[k * w + least]] < gap / 2:
            k += 1
        first = max(k - 1, 0)
        while first > 0 and costs[out[(first - 1) * w + least]] == costs[out[first * w + least]]:
            first -= 1
        for j in range(first, min(k + 1, count)):
            d = costs[out[i * w + most]] - costs[out[j * w + least]]
            moved = min(d, gap - d)
            if moved > best:
                best, best_i, best_j = moved, i, j
    if best_i < 0:
        return False
    d = costs[out[best_i * w + most]] - costs[out[best_j * w + least]]
    sums[most] -= d
    sums[least] += d
    i, j = best_i * w + most, best_j * w + least
    out[i], out[j] = out[j], out[i]
    _into_order(out, i, w, count)
    _into_order(out, j, w, count)
    return True


cdef void _even_out(
    const double* costs, double* sums, int64_t w, int64_t count, int64_t* out
) noexcept nogil:
    """Step 4, of one step whose rows are costliest first."""
    cdef int64_t rank, i, turn, most, least
    cdef double total = 0
    for rank in range(w):
        sums[rank] = 0
        for i in range(count):
            sums[rank] += costs[out[i * w + rank]]
        total += sums[rank]
    for turn in range(w):
        most = least = 0
        for rank in range(1, w):
            if sums[rank] > sums[most]:
                most = rank
            if sums[rank] < sums[least]:
                least = rank
        if sums[most] * w <= total + total / WORTH:
            return
        if not _exchange(costs, sums, w, count, most, least, out):
            return


cdef void _deal_step(
    Tuples* state, const double* costs, int64_t count, int64_t batch_size,
    int64_t* tuples, int64_t* micro_steps, int64_t* out,
) noexcept nogil:
    """`count` tuples of rows; out as `deal` gives it, rows counted from those of the step."""
    cdef int64_t i, rank, row, first, micro = 0, w = state.ranks
    for i in range(count):
        tuples[i] = i
        for rank in range(w):
            row = i * w + rank
            state.new_sums[rank], state.new_member[rank], state.next_row[row] = costs[row], row, row
        _put(state, i)
    i = 0
    while i < count:
        micro_steps[micro] = _difference(state, &tuples[i], min(batch_size, count - i))
        micro += 1
        i += batch_size
    i = _difference(state, micro_steps, micro)
    for rank in range(w):
        first = row = state.member[i * w + rank]
        while True:
            out[row // w * w + rank] = row
            row = state.next_row[row]
            if row == first:
                break


def deal(
    const double[::1] costs, int64_t world_size, int64_t batch_size, int64_t micro_batches,
    bint exchange, int64_t[::1] out,
):
    """Deal steps of world_size * batch_size * micro_batches rows, micro-step after micro-step.

    IN  costs  float64[n], n a multiple of world_size; the last step may be of fewer rows
    IN  exchange  whether rows may leave their W rows; costs are then descending in each step
    OUT out    int64[n], the rows by places: in each step, row i of rank r is at i * world_size + r
    """
    cdef int64_t n = costs.shape[0], w = world_size
    cdef int64_t most = batch_size * micro_batches, count, i, first = 0
    if n == 0:
        return
    most = min(most, n // w)
    cdef double[::1] sums = np.empty(most * w, np.float64), new_sums = np.empty(w, np.float64)
    cdef int64_t[::1] member = np.empty(most * w, np.int64)
    cdef int64_t[::1] next_row = np.empty(most * w, np.int64)
    cdef int64_t[::1] new_member = np.empty(w, np.int64)
    cdef int64_t[::1] order = np.empty(w, np.int64), spare = np.empty(w, np.int64)
    cdef int64_t[::1] tuples = np.empty(most, np.int64), micro_steps = np.empty(most, np.int64)
    cdef Tuples state
    state.ranks, state.sums, state.member, state.next_row = w, &sums[0], &member[0], &next_row[0]
    state.new_sums, state.new_member = &new_sums[0], &new_member[0]
    state.order, state.spare = &order[0], &spare[0]
    with nogil:
        while first < n:
            count = min(most, (n - first) // w)
            _deal_step(
                &state, &costs[first], count, batch_size, &tuples[0], &micro_steps[0], &out[first]
            )
            if exchange:
                _even_out(&costs[first], &new_sums[0], w, count, &out[first])
            for i in range(first, first + count * w):
                out[i] += first
            first += count * w
