"""The elements of a JSON array, found in blocks of its bytes, without reading what is in them.

Strings and brackets alone say where an element ends. Whether an element is valid JSON, and whether
its brackets match, is left to whoever decodes it.
"""

from libc.stdint cimport int64_t, uint8_t
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
