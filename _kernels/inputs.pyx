"""What inputs hold, to records and tokens: the elements of JSON arrays, and columns of token ids.

Strings and brackets alone say where an element ends. Whether it is valid JSON, and whether its
brackets match, is left to whoever decodes it.

Columns of ids, labels and masks are of any integer type. Each function looks at all values in the
pass that copies them, and gives False where one of them cannot be: then what was written means
nothing, and the caller looks closer, document by document.
"""

from libc.stdint cimport (
    int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t,
)
from libc.string cimport memchr

# what `state` holds; `initial_state` says what each means
cdef enum:
    AT, DEPTH, IN_STRING, ESCAPED, BEGIN, AFTER_COMMA, FIELDS

# what a byte outside strings does
cdef enum:
    OTHER, BLANK, QUOTE, OPEN, CLOSE, COMMA

cdef uint8_t[256] KIND
for _byte in range(256):
    KIND[_byte] = OTHER
KIND[c" "] = KIND[c"\t"] = KIND[c"\r"] = KIND[c"\n"] = BLANK
KIND[c'"'] = QUOTE
KIND[c"["] = KIND[c"{"] = OPEN
KIND[c"]"] = KIND[c"}"] = CLOSE
KIND[c","] = COMMA


def find_elements(
    const uint8_t[::1] data, int64_t offset, int64_t[::1] state, int64_t[:, ::1] found,
):
    """Go on through a block. Returns how many elements end in what was looked at.

    IN     data    uint8[n], bytes `offset` and following of the file; state[0] is where to go on
    IN/OUT state   int64[6]: where in `data` to go on; the depth, 0 before the array and -1 after
                   it; whether that is in a string, and after an odd number of backslashes there;
                   where in the file the element begins, -1 before it does; whether it comes
                   after a comma
    OUT    found   int64[m, 2], begin and end in the file of each element: the first byte that is
                   not blank, -1 where there is none, and the comma or bracket that ends it

    Looks at all of `data`, but stops where `found` is full, and after the array.
    """
    cdef int64_t n = data.shape[0], at = state[AT], depth = state[DEPTH]
    cdef int64_t begin = state[BEGIN], count = 0, back
    cdef bint in_string = state[IN_STRING], escaped = state[ESCAPED]
    cdef bint after_comma = state[AFTER_COMMA]
    cdef const uint8_t* bytes_
    cdef const uint8_t* quote
    cdef uint8_t kind
    if state.shape[0] != FIELDS or found.shape[1] != 2 or not 0 <= at <= n:
        raise ValueError(f"{state.shape[0]} numbers, {found.shape[1]} columns, from {at} of {n}")
    if n == 0:
        return 0
    bytes_ = &data[0]
    with nogil:
        while at < n and depth >= 0 and count < found.shape[0]:
            if in_string:
                if escaped:
                    at += 1
                    escaped = False
                    continue
                quote = <const uint8_t*>memchr(bytes_ + at, c'"', n - at)
                back = n if quote == NULL else quote - bytes_
                escaped = _is_escaped(bytes_, at, back)
                at = back
                if quote != NULL and not escaped:
                    in_string = False
                    at += 1
                continue
            kind = KIND[bytes_[at]]
            if depth == 0:
                if bytes_[at] == c"[":
                    depth = 1
                at += 1
                continue
            if depth == 1 and begin < 0 and (kind == OTHER or kind == QUOTE or kind == OPEN):
                begin = offset + at
            if kind == QUOTE:
                in_string = True
            elif kind == OPEN:
                depth += 1
            elif kind == CLOSE:
                depth -= 1
                if depth == 0:
                    depth = -1
                    if begin >= 0 or after_comma:
                        found[count, 0] = begin
                        found[count, 1] = offset + at
                        count += 1
                    begin = -1
            elif kind == COMMA and depth == 1:
                found[count, 0] = begin
                found[count, 1] = offset + at
                count += 1
                begin = -1
                after_comma = True
            at += 1
    state[AT], state[DEPTH], state[IN_STRING], state[ESCAPED] = at, depth, in_string, escaped
    state[BEGIN], state[AFTER_COMMA] = begin, after_comma
    return count


cdef inline bint _is_escaped(const uint8_t* data, int64_t begin, int64_t end) noexcept nogil:
    """Whether an odd number of backslashes, from `begin` on, stands before `end`."""
    cdef int64_t at = end
    while at > begin and data[at - 1] == c"\\":
        at -= 1
    return (end - at) & 1


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
