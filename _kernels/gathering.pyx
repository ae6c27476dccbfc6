"""Rows out of mapped shards into a batch, and where the tokens of a view's rows are."""

from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.string cimport memcpy

from spans cimport find


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
    const int64_t[::1] addresses, const int64_t[::1] ends, int64_t value_bytes,
    uint8_t[::1] out,
):
    """Copy the values of lists, of `value_bytes` bytes each, end to end, into `out`; `ends` is of
    `count_values`.

    A file may be written to while it is mapped: nothing is copied beyond what was counted.
    """
    cdef int64_t i, span
    cdef const int32_t* edge
    if out.shape[0] != ends[rows.shape[0]] * value_bytes:
        raise ValueError(f"{ends[rows.shape[0]]} values into {out.shape[0]} bytes")
    for i in range(rows.shape[0]):
        if ends[i] == ends[i + 1]:
            continue
        span = find(firsts, rows[i])
        edge = <const int32_t*>offsets[span] + (rows[i] - firsts[span])
        memcpy(
            &out[ends[i] * value_bytes],
            <const uint8_t*>addresses[span] + edge[0] * value_bytes,
            (ends[i + 1] - ends[i]) * value_bytes,
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


def count_positions(const int32_t[::1] edges, int64_t[::1] out):
    """OUT out[edges[-1]]: 0, 1, ... from each of `edges`, which ascend from 0, to the next."""
    cdef int64_t i, k
    cdef int64_t* to
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
                to[edges[k] + i] = i


cdef enum:
    SOUND = 0
    NO_BOUNDARIES = 1  # they do not ascend from 0 to the row's length
    NO_SEGMENTS = 2  # not one for each boundary but the first
    NO_DOCUMENT = 3
    NO_TOKENS = 4  # a piece that goes beyond its document


def find_pieces(
    const int64_t[::1] rows, const int64_t[::1] firsts, const int64_t[:, ::1] lists,
    const int32_t[::1] boundaries, const int64_t[::1] ends,
    const int64_t[:, ::1] directories, const int64_t[:, ::1] documents,
    int32_t capacity, int32_t segment_multiple,
    int64_t[::1] row_offsets, int64_t[::1] number, int32_t[::1] start, int32_t[::1] length,
    int64_t[::1] address,
):
    """Look up every segment of rows of a view.

    IN  rows         int64[b]
    IN  firsts       int64[spans], the first row of each span of rows
    IN  lists        int64[5, spans]: the addresses of the int32 offsets of the span's lists of
        segments, of their int32 files, int64 positions and int32 starts; how many segments
        it has
    IN  boundaries   int32[k]: row i has boundaries[ends[i]:ends[i + 1]], see `count_values`
    IN  directories  int64[files, 2], the first document of each file, and how many it has
    IN  documents    int64[4, spans]: the first document of each span, the addresses of its int32
        offsets and int32 tokens, and how many tokens it has
    OUT row_offsets  int64[b + 1]: row i has the pieces row_offsets[i] .. row_offsets[i + 1]
    OUT number, start, length  of each piece: its document, its first token in it, its tokens
    OUT address      int64, of its first token

    Returns (row, reason), a place in `rows` and one of the numbers above, for the first row that
    is not sound; reason 0: all are. Nothing is believed of files, which may be written to while they
    are mapped: the tokens from an address on have been counted when the file was mapped.
    """
    cdef int64_t b = rows.shape[0], i, k, span, at = 0, count, place, file, position, owner, used
    cdef int64_t low, high, begin, stop, low_token, high_token
    cdef int32_t first, size
    cdef const int32_t* edge
    if row_offsets.shape[0] != b + 1 or ends.shape[0] != b + 1 or lists.shape[0] != 5:
        raise ValueError(f"{b} rows, {ends.shape[0]} ends, {row_offsets.shape[0]} offsets")
    if ends[b] > boundaries.shape[0] or directories.shape[1] != 2 or documents.shape[0] != 4:
        raise ValueError(f"{ends[b]} of {boundaries.shape[0]} boundaries")
    count = address.shape[0]
    if number.shape[0] != count or start.shape[0] != count or length.shape[0] != count:
        raise ValueError(f"{count} addresses, {length.shape[0]} lengths")
    cdef const int64_t[::1] document_firsts = documents[0]
    row_offsets[0] = 0
    with nogil:
        for i in range(b):
            span = find(firsts, rows[i])
            low, high = ends[i], ends[i + 1]
            if span < 0 or low >= high or boundaries[low] != 0:
                with gil:
                    return i, NO_BOUNDARIES
            edge = <const int32_t*>lists[0, span] + (rows[i] - firsts[span])
            begin, stop = edge[0], edge[1]
            if begin < 0 or stop > lists[4, span] or stop - begin != high - low - 1 \
                    or at + stop - begin > count:
                with gil:
                    return i, NO_SEGMENTS
            used = 0
            for k in range(high - low - 1):
                if boundaries[low + k + 1] <= boundaries[low + k]:
                    with gil:
                        return i, NO_BOUNDARIES
                size = boundaries[low + k + 1] - boundaries[low + k]
                used += (<int64_t>size + segment_multiple - 1) // segment_multiple * segment_multiple
                if used > capacity:
                    with gil:
                        return i, NO_BOUNDARIES
                place = begin + k
                file = (<const int32_t*>lists[1, span])[place]
                position = (<const int64_t*>lists[2, span])[place]
                first = (<const int32_t*>lists[3, span])[place]
                if file < 0 or file >= directories.shape[0] or position < 0 \
                        or position >= directories[file, 1]:
                    with gil:
                        return i, NO_DOCUMENT
                position += directories[file, 0]
                owner = find(document_firsts, position)
                edge = <const int32_t*>documents[1, owner] + (position - document_firsts[owner])
                low_token, high_token = edge[0], edge[1]
                if first < 0 or low_token < 0 or high_token > documents[3, owner] \
                        or <int64_t>first + size > high_token - low_token:
                    with gil:
                        return i, NO_TOKENS
                number[at], start[at], length[at] = position, first, size
                address[at] = documents[2, owner] + (low_token + first) * <int64_t>sizeof(int32_t)
                at += 1
            row_offsets[i + 1] = at
    return -1, SOUND
