"""Documents to pieces that fit, and pieces into preallocated rows.

Cuts are at the multiples of `max_length`. Of a document that is cut only the first `most` pieces are
taken: none drops it, one truncates it, any number splits it. An empty document gives no piece.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.string cimport memcpy, memset

ctypedef fused Length:
    int32_t
    int64_t


def copy_lengths(
    const Length[::1] lengths, Length max_length, int32_t[::1] out, int64_t[::1] counted,
):
    """Copy the lengths, and count on the way those that are no piece as they are.

    IN  lengths  [n], each >= 0
    OUT out      int32[n]; what is longer than 2**31 - 1 does not come out as it is
    OUT counted  int64[3]: empty documents, overlong ones, and the tokens of these
    """
    cdef int64_t i, n = lengths.shape[0], empty = 0, documents = 0, tokens = 0
    cdef Length length, overlong
    with nogil:
        for i in range(n):  # without branches, so that compilers make it of vectors
            length = lengths[i]
            out[i] = <int32_t>length
            overlong = -<Length>(length > max_length)
            empty += length == 0
            documents -= overlong
            tokens += length & overlong
        counted[0], counted[1], counted[2] = empty, documents, tokens


def cut_lengths(
    const Length[::1] lengths, int64_t max_length, int64_t most, int32_t[::1] length,
):
    """The pieces' lengths. Returns how many pieces there are.

    IN  lengths  [n], each >= 0
    OUT length   int32[>= pieces]
    """
    cdef int64_t i, left, cut, piece = 0
    with nogil:
        for i in range(lengths.shape[0]):
            left = lengths[i]
            cut = 0
            while left > max_length and cut < most:
                length[piece] = <int32_t>max_length
                piece += 1
                cut += 1
                left -= max_length
            if 0 < left <= max_length and (cut == 0 or cut < most):
                length[piece] = <int32_t>left
                piece += 1
    return piece


def locate_pieces(
    const Length[::1] lengths, int64_t max_length, int64_t most, bint at_end, int64_t first,
    int64_t[::1] document, int64_t[::1] begin, int32_t[::1] start,
):
    """Where the pieces of `cut_lengths` are.

    IN  lengths   [n], each >= 0
    IN  at_end    one piece of an overlong document is its end, not its beginning
    IN  first     where the first document begins
    OUT document  int64[pieces], the number of the document
    OUT begin     int64[pieces], first token, counted as `first` is
    OUT start     int32[pieces], that token's index in its document
    """
    cdef int64_t i, left, cut, from_, begins = first, piece = 0
    with nogil:
        for i in range(lengths.shape[0]):
            left = lengths[i]
            cut = 0
            while left > max_length and cut < most:
                from_ = left - max_length if at_end else cut * max_length
                document[piece] = i
                begin[piece] = begins + from_
                start[piece] = <int32_t>from_
                piece += 1
                cut += 1
                left -= max_length
            if 0 < left <= max_length and (cut == 0 or cut < most):
                document[piece] = i
                begin[piece] = begins + cut * max_length
                start[piece] = <int32_t>(cut * max_length)
                piece += 1
            begins += lengths[i]


cdef enum:
    IGNORED = -100  # the label that losses skip (the Hugging Face convention)


cdef int32_t _fill_segment(
    const uint32_t* ids, const uint8_t* trained, int32_t length,
    int32_t* input_ids, int32_t* labels, uint8_t* mask, int32_t* position_ids,
) noexcept nogil:
    """Returns how many of the segment's tokens are trained on."""
    cdef int32_t i, count = length - 1
    if input_ids != NULL:
        memcpy(input_ids, ids, length * sizeof(int32_t))
    if labels != NULL:
        # the first token of a segment has no context, so nothing may predict it
        labels[0] = IGNORED
        if trained == NULL:
            memcpy(labels + 1, ids + 1, (length - 1) * sizeof(int32_t))
        else:
            for i in range(1, length):
                labels[i] = <int32_t>ids[i] if trained[i] else IGNORED
    if mask != NULL:
        memset(mask, 1, length)
    if position_ids != NULL:
        for i in range(length):
            position_ids[i] = i
    if trained != NULL:
        count = 0
        for i in range(1, length):
            count += trained[i] != 0
    return count


cdef void _fill_padding(
    int32_t pad_id, int32_t length, int32_t first_position,
    int32_t* input_ids, int32_t* labels, uint8_t* mask, int32_t* position_ids,
) noexcept nogil:
    cdef int32_t i
    if length <= 0:
        return
    if input_ids != NULL:
        for i in range(length):
            input_ids[i] = pad_id
    if labels != NULL:
        for i in range(length):
            labels[i] = IGNORED
    if mask != NULL:
        memset(mask, 0, length)
    if position_ids != NULL:
        for i in range(length):
            position_ids[i] = first_position + i


def fill_rows(
    const uint32_t[::1] ids, const uint8_t[::1] trained,
    const int64_t[::1] begin, const int32_t[::1] length,
    const int64_t[::1] order, const int64_t[::1] row_offsets,
    int32_t capacity, int32_t pad_id,
    int32_t[:, ::1] input_ids, int32_t[:, ::1] labels, uint8_t[:, ::1] attention_mask,
    int32_t[:, ::1] position_ids, int32_t[::1] cu_seqlens, int32_t[::1] cu_offsets,
    int32_t segment_multiple=1, int32_t[::1] cu_seqlens_padded=None,
    bint by_address=False,
):
    """Write rows; every byte of every output is written, padding included.

    IN  ids          uint32[T], tokens of all documents; None by address
    IN  trained      uint8[T], 1 where the token is trained on; None: everywhere
    IN  begin        int64[p], first token of each piece in ids
    IN  length       int32[p], tokens of each piece, 1..capacity
    IN  order        int64[p'], pieces row after row
    IN  row_offsets  int64[rows + 1], into order; need not begin at 0
    OUT input_ids, labels  int32[rows, capacity]; attention_mask uint8[rows, capacity];
        position_ids int32[rows, capacity]; each may be None: not wanted. Positions
        restart at 0 in every segment, go on through its own padding, and restart in the
        row's.
    OUT cu_seqlens   int32[pieces + rows], each row's [0, l0, l0 + l1, ..., used]
    OUT cu_offsets   int32[rows + 1], where each row's boundaries begin in cu_seqlens
    IN  segment_multiple  each segment is padded in its row to a multiple of it; a row's
        padded lengths must fit in capacity
    OUT cu_seqlens_padded  int32[pieces + rows], where segments begin in the row: the
        boundaries with each segment's padding counted; may be None
    IN  by_address   begin has the address in memory of each piece's first token, which the caller
        has checked, and `trained` is that of the pieces in `order`, end to end

    Returns the number of trained tokens: labels that are not -100, wanted or not.
    """
    cdef int64_t rows = row_offsets.shape[0] - 1, row, i, piece, boundary = 0, trained_tokens = 0
    cdef int64_t end = 0
    cdef const uint32_t* tokens
    cdef int32_t used, size, place, padding
    cdef int32_t* ids_row = NULL
    cdef int32_t* labels_row = NULL
    cdef int32_t* positions_row = NULL
    cdef uint8_t* mask_row = NULL
    cdef const uint8_t* flags = NULL
    cdef bint want_ids = input_ids is not None, want_labels = labels is not None
    cdef bint want_mask = attention_mask is not None, want_positions = position_ids is not None
    cdef bint some_untrained = trained is not None, want_padded = cu_seqlens_padded is not None
    if (ids is None) != by_address:
        raise ValueError("ids, or addresses of them")
    cu_offsets[0] = 0
    with nogil:
        for row in range(rows):
            if want_ids:
                ids_row = &input_ids[row, 0]
            if want_labels:
                labels_row = &labels[row, 0]
            if want_mask:
                mask_row = &attention_mask[row, 0]
            if want_positions:
                positions_row = &position_ids[row, 0]
            used = place = 0
            cu_seqlens[boundary] = 0
            if want_padded:
                cu_seqlens_padded[boundary] = 0
            boundary += 1
            for i in range(row_offsets[row], row_offsets[row + 1]):
                piece = order[i]
                size = length[piece]
                if by_address:
                    tokens = <const uint32_t*>begin[piece]
                else:
                    tokens = &ids[begin[piece]]
                if some_untrained:
                    flags = &trained[end if by_address else begin[piece]]
                end += size
                trained_tokens += _fill_segment(
                    tokens, flags, size,
                    ids_row + place if want_ids else NULL,
                    labels_row + place if want_labels else NULL,
                    mask_row + place if want_mask else NULL,
                    positions_row + place if want_positions else NULL,
                )
                used += size
                place += size
                if segment_multiple > 1:
                    padding = segment_multiple - 1 - (size - 1) % segment_multiple
                    _fill_padding(
                        pad_id, padding, size,
                        ids_row + place if want_ids else NULL,
                        labels_row + place if want_labels else NULL,
                        mask_row + place if want_mask else NULL,
                        positions_row + place if want_positions else NULL,
                    )
                    place += padding
                cu_seqlens[boundary] = used
                if want_padded:
                    cu_seqlens_padded[boundary] = place
                boundary += 1
            _fill_padding(
                pad_id, capacity - place, 0,
                ids_row + place if want_ids else NULL,
                labels_row + place if want_labels else NULL,
                mask_row + place if want_mask else NULL,
                positions_row + place if want_positions else NULL,
            )
            cu_offsets[row + 1] = <int32_t>boundary
    return trained_tokens


cdef bint _same(const uint32_t* a, const uint32_t[::1] b) noexcept nogil:
    cdef int64_t k
    for k in range(b.shape[0]):
        if a[k] != b[k]:
            return False
    return True


def frame_documents(
    const uint32_t[::1] ids, const int64_t[::1] offsets,
    const uint32_t[::1] prefix, const uint32_t[::1] suffix,
    uint32_t[::1] out_ids, int64_t[::1] out_offsets,
    const uint8_t[::1] trained=None, uint8_t[::1] out_trained=None,
):
    """Copy a ragged batch, putting `prefix` before and `suffix` after each document.

    A document that begins with the prefix, or ends with the suffix, does not get it twice;
    an empty document stays empty.

    IN  ids uint32[T], offsets int64[n + 1], prefix uint32[a], suffix uint32[b]
    IN  trained uint8[T], or None
    OUT out_ids uint32[>= T + n * (a + b)], out_offsets int64[n + 1]
    OUT out_trained as out_ids, unless `trained` is None: the prefix is not trained on, the
        suffix is where the token before it is

    Returns the tokens written.
    """
    cdef int64_t n = offsets.shape[0] - 1, i, k, start, size, end = 0
    cdef int64_t before = prefix.shape[0], after = suffix.shape[0]
    cdef bint flags = trained is not None
    with nogil:
        out_offsets[0] = 0
        for i in range(n):
            start = offsets[i]
            size = offsets[i + 1] - start
            if size:
                if before and (size < before or not _same(&ids[start], prefix)):
                    for k in range(before):
                        out_ids[end + k] = prefix[k]
                    if flags:
                        memset(&out_trained[end], 0, before)
                    end += before
                memcpy(&out_ids[end], &ids[start], size * sizeof(uint32_t))
                if flags:
                    memcpy(&out_trained[end], &trained[start], size)
                end += size
                if after and (size < after or not _same(&ids[start + size - after], suffix)):
                    for k in range(after):
                        out_ids[end + k] = suffix[k]
                    if flags:
                        memset(&out_trained[end], out_trained[end - 1], after)
                    end += after
            out_offsets[i + 1] = end
    return end


def gather_pieces(
    const uint8_t[::1] values, int64_t value_bytes,
    const int64_t[::1] begin, const int32_t[::1] length, uint8_t[::1] out,
):
    """Copy pieces end to end, of values of `value_bytes` bytes for each token.

    IN  values uint8[T * value_bytes]; begin int64[p], length int32[p], in tokens
    OUT out  uint8[sum(length) * value_bytes]
    """
    cdef int64_t i, size, end = 0
    with nogil:
        for i in range(begin.shape[0]):
            size = length[i] * value_bytes
            if size:
                memcpy(&out[end], &values[begin[i] * value_bytes], size)
            end += size


def place_pieces(
    const uint8_t[::1] values, int64_t value_bytes,
    const int64_t[::1] begin, const int32_t[::1] length,
    const int64_t[::1] order, const int64_t[::1] row_offsets, int32_t segment_multiple,
    uint8_t[:, ::1] out,
):
    """Put the values of pieces where `fill_rows` puts their tokens; padding is 0.

    IN  values, begin, length  as in `gather_pieces`; order, row_offsets as in `fill_rows`
    OUT out  uint8[rows, capacity * value_bytes]
    """
    cdef int64_t row, i, piece, place, size
    with nogil:
        for row in range(out.shape[0]):
            place = 0
            for i in range(row_offsets[row], row_offsets[row + 1]):
                piece = order[i]
                size = length[piece] * value_bytes
                memcpy(&out[row, place], &values[begin[piece] * value_bytes], size)
                place += size
                size = (segment_multiple - 1 - (length[piece] - 1) % segment_multiple) * value_bytes
                if size:
                    memset(&out[row, place], 0, size)
                place += size
            if place < out.shape[1]:
                memset(&out[row, place], 0, out.shape[1] - place)


def count_trained(
    const uint8_t[::1] trained, const int64_t[::1] begin, const int64_t[::1] end,
    int64_t[::1] out,
):
    """OUT out int64[n], how many of trained[begin[i]:end[i]] are set; IN trained is 0 or 1."""
    cdef int64_t i, k, count
    if not begin.shape[0] == end.shape[0] == out.shape[0]:
        raise ValueError(f"{begin.shape[0]} begins and {end.shape[0]} ends into {out.shape[0]}")
    for i in range(begin.shape[0]):
        if begin[i] < 0 or end[i] > trained.shape[0]:
            raise ValueError(f"span {i} is {begin[i]} to {end[i]} of {trained.shape[0]} tokens")
    with nogil:
        for i in range(begin.shape[0]):
            count = 0
            for k in range(begin[i], end[i]):
                count += trained[k]
            out[i] = count
