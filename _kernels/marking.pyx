"""From spans of bytes of texts to trained flags of tokens."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t


def mark_trained(
    const uint32_t[::1] ids, const int64_t[::1] offsets,
    const int32_t[::1] token_bytes, bint spaced, const int64_t[::1] text_bytes,
    const int64_t[::1] span_offsets, const int64_t[::1] span_begin, const int64_t[::1] span_end,
    uint8_t[::1] trained, uint8_t[::1] certain,
):
    """Mark the tokens that hold at least one byte of a span.

    Tokens lie end to end in their text, so summed lengths give their places.

    IN  ids uint32[T], offsets int64[n + 1]: the documents' tokens
    IN  token_bytes   int32[highest id + 1], bytes of text that a token stands for; negative for
                      the -(bytes + 1) of tokens that are never merged with their neighbours
    IN  spaced        the tokenizer puts a space before every run of other tokens, which is not in
                      the text (the SentencePiece way)
    IN  text_bytes    int64[n], bytes of each text
    IN  span_offsets  int64[n + 1], span_begin and span_end int64[spans]: bytes, in order
    OUT trained       uint8[T]
    OUT certain       uint8[n], 1 where the lengths add up to the text's; else the flags of that
                      document mean nothing
    """
    cdef int64_t n = offsets.shape[0] - 1, known = token_bytes.shape[0]
    cdef int64_t i, t, span, last, begin, end
    cdef int32_t size
    cdef bint fresh
    with nogil:
        for i in range(n):
            span = span_offsets[i]
            last = span_offsets[i + 1]
            begin = 0
            fresh = True
            for t in range(offsets[i], offsets[i + 1]):
                size = token_bytes[ids[t]] if ids[t] < known else 0
                if size < 0:
                    size = -size - 1
                    fresh = True
                else:
                    if spaced and fresh:
                        size -= 1
                    fresh = False
                end = begin + size
                while span < last and span_end[span] <= begin:
                    span += 1
                # the space alone stands before the byte that follows
                trained[t] = span < last and (end if size else begin + 1) > span_begin[span]
                begin = end
            certain[i] = begin == text_bytes[i]
