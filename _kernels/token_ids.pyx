"""Columns of token ids, labels and masks, of any integer type, into flat tokens.

Each looks at all values in the pass that copies them, and gives False where one of them cannot be:
then what was written means nothing, and the caller looks closer, document by document.
"""

from libc.stdint cimport (
    int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t,
)

cdef enum:
    IGNORED = -100  # as in packer_cli/records.py

ctypedef fused Integer:
    int8_t
    int16_t
    int32_t
    int64_t
    uint8_t
    uint16_t
    uint32_t
    uint64_t


def copy_ids(const Integer[::1] values, uint32_t[::1] out) -> bool:
    """OUT out uint32[T], the values; whether all of them are between 0 and 2^31 - 1."""
    cdef int64_t i
    cdef uint64_t seen = 0
    if out.shape[0] != values.shape[0]:
        raise ValueError(f"{values.shape[0]} ids into {out.shape[0]}")
    with nogil:
        for i in range(values.shape[0]):
            out[i] = <uint32_t>values[i]
            seen |= <uint64_t>values[i]  # a negative one has all the high bits
    return seen >> 31 == 0


def copy_trained(
    const Integer[::1] labels, const uint32_t[::1] ids, uint8_t[::1] out
) -> bool:
    """OUT out uint8[T], 1 where a label is not -100; whether all these are the ids themselves."""
    cdef int64_t i
    cdef bint wrong = False, trained
    if out.shape[0] != labels.shape[0] or ids.shape[0] != labels.shape[0]:
        raise ValueError(f"{labels.shape[0]} labels of {ids.shape[0]} ids into {out.shape[0]}")
    with nogil:
        for i in range(labels.shape[0]):
            # a label that is no int64 is no id either: as one it would be negative
            trained = <int64_t>labels[i] != IGNORED
            out[i] = trained
            wrong |= trained & (<int64_t>labels[i] != <int64_t>ids[i])
    return not wrong


def count_real(const Integer[::1] mask):
    """How many of the values are 1; -1 if any is neither 0 nor 1."""
    cdef int64_t i
    cdef uint64_t ones = 0, seen = 0
    with nogil:
        for i in range(mask.shape[0]):
            seen |= <uint64_t>mask[i]
            ones += <uint64_t>mask[i] & 1
    return <int64_t>ones if seen <= 1 else -1


def keep_real(
    const Integer[::1] mask, const int64_t[::1] offsets, uint32_t[::1] ids, uint8_t[::1] trained,
    int64_t[::1] kept_offsets,
):
    """Leave out the tokens whose mask is 0.

    IN  mask          [T], of values that `count_real` has looked at
    IN  offsets       int64[n + 1], document i is at offsets[i] .. offsets[i + 1]
    IN/OUT ids        uint32[T], trained uint8[T] or None: those that stay come first
    OUT kept_offsets  int64[n + 1], of these
    """
    cdef int64_t document, i, kept = 0
    cdef bint has_trained = trained is not None
    if (
        kept_offsets.shape[0] != offsets.shape[0] or ids.shape[0] != mask.shape[0]
        or offsets[0] != 0 or offsets[offsets.shape[0] - 1] != mask.shape[0]
        or (has_trained and trained.shape[0] != mask.shape[0])
    ):
        raise ValueError(f"{mask.shape[0]} masks of {ids.shape[0]} ids")
    kept_offsets[0] = 0
    with nogil:
        for document in range(offsets.shape[0] - 1):
            for i in range(offsets[document], offsets[document + 1]):
                ids[kept] = ids[i]
                if has_trained:
                    trained[kept] = trained[i]
                kept += mask[i] != 0
            kept_offsets[document + 1] = kept


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
