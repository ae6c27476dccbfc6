"""Where the tokens of a view's rows are: its references, each checked, to addresses."""

from libc.stdint cimport int32_t, int64_t

from spans cimport find

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
