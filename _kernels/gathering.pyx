"""Rows out of mapped shards into a batch, and where its documents are."""

from libc.stdint cimport int8_t, int32_t, int64_t, uint8_t
from libc.string cimport memcpy

from spans cimport find

ctypedef fused Position:
    int32_t
    int64_t

ctypedef fused Value:
    int8_t
    int32_t


def first_absent(
    const int64_t[::1] rows, const int64_t[::1] firsts, const int64_t[::1] ends,
):
    """The place of the first row that is in none of the spans firsts[k] .. ends[k], or -1."""
    cdef int64_t i, span
    for i in range(rows.shape[0]):
        span = find(firsts, rows[i])
        if span < 0 or rows[i] >= ends[span]:
            return i
    return -1


def gather_rows(
    const int64_t[::1] rows, const int64_t[::1] firsts, const int64_t[::1] addresses,
    int64_t row_bytes, uint8_t[::1] out,
):
    """Copy rows of `row_bytes` bytes, end to end, into `out`.

    Span k of the rows, from firsts[k] on, begins at addresses[k]. Addresses, because a batch's rows
    lie in many maps; the caller keeps them mapped, and has asked `first_absent`.
    """
    cdef int64_t i, span
    if out.shape[0] != rows.shape[0] * row_bytes:
        raise ValueError(f"{rows.shape[0]} rows of {row_bytes} bytes into {out.shape[0]}")
    with nogil:
        for i in range(rows.shape[0]):
            span = find(firsts, rows[i])
            memcpy(
                &out[i * row_bytes],
                <const uint8_t*>addresses[span] + (rows[i] - firsts[span]) * row_bytes,
                row_bytes,
            )


def count_values(
    const int64_t[::1] rows, const int64_t[::1] firsts, const int64_t[::1] offsets,
    int64_t[::1] ends,
):
    """OUT ends int64[rows + 1]: the values of row i will be ends[i] .. ends[i + 1].

    offsets[k] is the address of int32 offsets into the lists of span k.
    """
    cdef int64_t i, span
    cdef const int32_t* edge
    if ends.shape[0] != rows.shape[0] + 1:
        raise ValueError(f"{rows.shape[0]} rows, {ends.shape[0]} ends")
    ends[0] = 0
    for i in range(rows.shape[0]):
        span = find(firsts, rows[i])
        edge = <const int32_t*>offsets[span] + (rows[i] - firsts[span])
        ends[i + 1] = ends[i] + edge[1] - edge[0]
        if ends[i + 1] < ends[i]:
            raise ValueError(f"the list of row {rows[i]} ends before it begins")


def gather_values(
    const int64_t[::1] rows, const int64_t[::1] firsts, const int64_t[::1] offsets,
    const int64_t[::1] addresses, const int64_t[::1] ends, Value[::1] out,
):
    """Copy the values of lists, end to end, into `out`; `ends` is of `count_values`.

    A file may be written to while it is mapped: nothing is copied beyond what was counted.
    """
    cdef int64_t i, span
    cdef const int32_t* edge
    if out.shape[0] != ends[rows.shape[0]]:
        raise ValueError(f"{ends[rows.shape[0]]} values into {out.shape[0]}")
    for i in range(rows.shape[0]):
        if ends[i] == ends[i + 1]:
            continue
        span = find(firsts, rows[i])
        edge = <const int32_t*>offsets[span] + (rows[i] - firsts[span])
        memcpy(
            &out[ends[i]], <const Value*>addresses[span] + edge[0],
            (ends[i + 1] - ends[i]) * sizeof(Value),
        )


def join_boundaries(
    const int32_t[::1] values, const int64_t[::1] ends, int32_t max_length, int32_t[::1] out,
):
    """Boundaries of rows end to end, of each row's own: 0, ..., rows * max_length.

    IN values ends[i] .. ends[i + 1] are those of row i: 0, ..., at most max_length, ascending.
    OUT out int32[values + 1]; what follows a row's last boundary becomes a document. Returns
    (how many boundaries, the longest document), and (-1, i) if those of row i are not as they must.
    """
    cdef int64_t row, i, count = 1
    cdef int32_t begin = 0, longest = 0
    if out.shape[0] < values.shape[0] + 1:
        raise ValueError(f"boundaries of {values.shape[0]} values into {out.shape[0]}")
    out[0] = 0
    for row in range(ends.shape[0] - 1):
        if ends[row] == ends[row + 1] or values[ends[row]] != 0:
            return -1, row
        for i in range(ends[row] + 1, ends[row + 1]):
            if not values[i - 1] < values[i] <= max_length:
                return -1, row
            out[count] = begin + values[i]
            count += 1
        begin += max_length
        if out[count - 1] < begin:
            out[count] = begin
            count += 1
    for i in range(1, count):
        longest = max(longest, out[i] - out[i - 1])
    return count, longest


def count_positions(const int32_t[::1] edges, Position[::1] out):
    """OUT out[edges[-1]]: 0, 1, ... from each of `edges`, which ascend from 0, to the next."""
    cdef int64_t i, k
    cdef Position* to
    if edges.shape[0] < 2 or edges[0] != 0 or out.shape[0] != edges[edges.shape[0] - 1]:
        raise ValueError(f"{edges.shape[0]} edges of {out.shape[0]} places")
    for k in range(edges.shape[0] - 1):
        if edges[k + 1] < edges[k] or edges[k + 1] > out.shape[0]:
            raise ValueError(f"edge {k + 1} is {edges[k + 1]} after {edges[k]}")
    if out.shape[0] == 0:
        return
    to = &out[0]
    with nogil:
        for k in range(edges.shape[0] - 1):
            for i in range(edges[k + 1] - edges[k]):
                to[edges[k] + i] = <Position>i
