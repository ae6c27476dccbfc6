"""Documents that may be longer than a row, to pieces that are not: one pass, no temporary arrays.

Cuts are at the multiples of `max_length`. Of a document that is cut only the first `most` pieces are
taken: none drops it, one truncates it, any number splits it. An empty document gives no piece.
"""

from libc.stdint cimport int32_t, int64_t

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
