"""What inputs hold, to records and tokens: the elements of JSON arrays, texts of JSON records, and
columns of token ids.

Strings and brackets alone say where an element ends. Whether it is valid JSON, and whether its
brackets match, is left to whoever decodes it.

Columns of ids, labels and masks are of any integer type. Each function looks at all values in the
pass that copies them, and gives False where one of them cannot be: then what was written means
nothing, and the caller looks closer, document by document.
"""

from libc.stdint cimport (
    int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t,
)
from libc.string cimport memchr, memcmp, memcpy

from words cimport ONES, TOPS, trailing_zeros

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


def find_elements(const uint8_t[::1] data, int64_t at, int64_t[:, ::1] found) -> int:
    """Find elements of a JSON array. Returns how many end in the data, up to the rows of `found`.

    IN  data   uint8[n]; an element, or the blanks before it, begin at byte `at`
    OUT found  int64[m, 2], begin and end of each element: its first byte that is not blank, -1 if
               there is none, and the comma after it or the bracket that closes the array, which
               is the last
    """
    cdef int64_t n = data.shape[0], begin = -1, count = 0, back, depth = 0
    cdef const uint8_t* bytes_
    cdef const uint8_t* quote
    cdef uint8_t kind
    if found.shape[1] != 2 or not 0 <= at <= n:
        raise ValueError(f"{found.shape[1]} columns, from {at} of {n}")
    if n == 0:
        return 0
    bytes_ = &data[0]
    with nogil:
        while at < n and depth >= 0 and count < found.shape[0]:
            kind = KIND[bytes_[at]]
            if begin < 0 and (kind == OTHER or kind == QUOTE or kind == OPEN):
                begin = at
            if kind == QUOTE:
                back = at + 1
                while True:
                    quote = <const uint8_t*>memchr(bytes_ + back, c'"', n - back)
                    if quote == NULL:
                        break
                    back = quote - bytes_ + 1
                    if not _is_escaped(bytes_, at + 1, back - 1):
                        break
                at = n - 1 if quote == NULL else back - 1
            elif kind == OPEN:
                depth += 1
            elif kind == CLOSE:
                depth -= 1
            if depth < 0 or (kind == COMMA and depth == 0):
                found[count, 0] = begin
                found[count, 1] = at
                count += 1
                begin = -1
            at += 1
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


cdef int64_t _read_lists(
    const uint8_t* text, int64_t n, uint32_t* numbers, int64_t* sizes, int64_t most
) noexcept nogil:
    cdef int64_t at = 0, count = 0, lists = 0, begin = 0
    cdef uint64_t value = 0
    cdef bint is_open = False, is_list = False  # in a value, in a list
    cdef uint8_t byte
    while at < n:
        byte = text[at]
        if c"0" <= byte <= c"9":
            value = 10 * value + (byte - c"0")
            if value > 0x7FFFFFFF:
                return -1
            is_open = True
        elif byte == c"," or byte == c"]":
            if is_open:
                numbers[count] = <uint32_t>value
                count += 1
                value, is_open = 0, False
            if byte == c"]":
                if lists == most or not is_list:
                    return -1
                sizes[lists] = count - begin
                lists, begin, is_list = lists + 1, count, False
        elif byte == c"[":
            if is_list or is_open:  # a list in a list, or a value before it that is none
                return -1
            is_list = True
        elif byte == c"t" or byte == c"f":
            value, is_open = byte == c"t", True
            at += 3 if value else 4
        elif KIND[byte] != BLANK:
            return -1
        at += 1
    return count if lists == most and not is_open else -1


def read_lists(const uint8_t[::1] text, uint32_t[::1] numbers, int64_t[::1] sizes) -> int:
    """Read JSON lists of ids, or of true and false, which are 1 and 0. Returns how many values they
    have; -1 where one is neither, or above 2^31 - 1, where a value is no list, or where there are not
    as many lists as sizes.

    IN  text     uint8[n], values in valid JSON, end to end
    OUT numbers  uint32[m], m >= n / 2: the values
    OUT sizes    int64[k], how many of them each list has
    """
    cdef int64_t count, n = text.shape[0]
    if numbers.shape[0] < n // 2:
        raise ValueError(f"{numbers.shape[0]} numbers for {n} bytes")
    if n == 0 or sizes.shape[0] == 0 or numbers.shape[0] == 0:
        return 0 if n == sizes.shape[0] == 0 else -1
    with nogil:
        count = _read_lists(&text[0], n, &numbers[0], &sizes[0], sizes.shape[0])
    return count


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


cdef enum:
    SEPARATOR = 0xFF  # no byte of UTF-8
    DEEPEST = 63  # of values within a value, one bit each
    HIGH_SURROGATES = 0xD800, LOW_SURROGATES = 0xDC00, AFTER_SURROGATES = 0xE000


cdef uint8_t[256] MEANT  # the byte that one after a backslash stands for; 0: none
for _byte in range(256):
    MEANT[_byte] = 0
for _byte, _meant in zip(b'"\\/bfnrt', b'"\\/\b\f\n\r\t'):
    MEANT[_byte] = _meant


cdef inline int64_t _after_blanks(const uint8_t* data, int64_t at, int64_t end) noexcept nogil:
    while at < end and KIND[data[at]] == BLANK:
        at += 1
    return at


cdef inline int _plain_bytes(const uint8_t* data) noexcept nogil:
    """How many of the next eight bytes are ASCII that stands for itself in a string."""
    cdef uint64_t word, odd
    memcpy(&word, data, 8)
    odd = word | (word - ONES * 0x20)  # a byte above 0x7F, or below a space
    odd |= ((word ^ ONES * c'"') - ONES) | ((word ^ ONES * c"\\") - ONES)
    odd &= TOPS  # of the first odd byte, and maybe of others after it
    return trailing_zeros(odd) >> 3 if odd else 8


cdef inline int _utf8_bytes(const uint8_t* data, int64_t size) noexcept nogil:
    """How many bytes the character takes whose first byte is above 0x7F; 0 where it is none."""
    cdef int length, i
    cdef uint8_t first = data[0], least = 0x80, most = 0xBF
    if 0xC2 <= first <= 0xDF:
        length = 2
    elif first & 0xF0 == 0xE0:
        length = 3
        if first == 0xE0:
            least = 0xA0
        elif first == 0xED:
            most = 0x9F  # surrogates
    elif 0xF0 <= first <= 0xF4:
        length = 4
        if first == 0xF0:
            least = 0x90
        elif first == 0xF4:
            most = 0x8F
    else:
        return 0
    if size < length or not least <= data[1] <= most:
        return 0
    for i in range(2, length):
        if data[i] & 0xC0 != 0x80:
            return 0
    return length


cdef inline int64_t _code_unit(const uint8_t* data, int64_t size) noexcept nogil:
    """The number that "\\u" and four hexadecimal digits stand for; -1 where that is not there."""
    cdef int64_t value = 0
    cdef int i
    cdef uint8_t digit
    if size < 6 or data[0] != c"\\" or data[1] != c"u":
        return -1
    for i in range(2, 6):
        digit = data[i]
        if c"0" <= digit <= c"9":
            digit -= c"0"
        elif c"a" <= digit | 0x20 <= c"f":
            digit = (digit | 0x20) - c"a" + 10
        else:
            return -1
        value = value << 4 | digit
    return value


cdef inline int _escape(const uint8_t* data, int64_t size, int64_t* code) noexcept nogil:
    """How many bytes the escape takes that begins here, for `code`; 0 where it is not valid."""
    cdef int64_t low
    code[0] = _code_unit(data, size)
    if code[0] < 0:
        code[0] = MEANT[data[1]] if size > 1 else 0
        return 2 if code[0] else 0
    if not HIGH_SURROGATES <= code[0] < AFTER_SURROGATES:
        return 6
    low = _code_unit(data + 6, size - 6)
    if code[0] >= LOW_SURROGATES or not LOW_SURROGATES <= low < AFTER_SURROGATES:
        return 0
    code[0] = 0x10000 + ((code[0] - HIGH_SURROGATES) << 10) + (low - LOW_SURROGATES)
    return 12


cdef inline int _put(int64_t code, uint8_t* out) noexcept nogil:
    """Write a character in UTF-8; how many bytes it takes."""
    cdef int i, more = (code > 0x7F) + (code > 0x7FF) + (code > 0xFFFF)
    if not more:
        out[0] = <uint8_t>code
        return 1
    for i in range(more, 0, -1):
        out[i] = <uint8_t>(0x80 | code & 0x3F)
        code >>= 6
    out[0] = <uint8_t>(0xFF00 >> more + 1 | code)
    return more + 1


cdef int64_t _string(
    const uint8_t* data, int64_t at, int64_t end, uint8_t* out, int64_t* written
) noexcept nogil:
    """The place after the string whose first byte, after its quote, is here; -1 where it is not
    valid. Its text is written to `out`, unless that is NULL.
    """
    cdef int64_t size, code, used = 0
    while at < end:
        while at + 8 <= end:
            if out != NULL:  # more than is plain is written anew
                memcpy(out + used, data + at, 8)
            size = _plain_bytes(data + at)
            at += size
            used += size
            if size < 8:
                break
        if at >= end or data[at] == c'"':
            break
        code = data[at]
        if code == c"\\":
            size = _escape(data + at, end - at, &code)
        elif code > 0x7F:
            size = _utf8_bytes(data + at, end - at)
        else:
            size = code >= 0x20
        if not size:
            return -1
        if data[at] == c"\\":
            if out != NULL:
                used += _put(code, out + used)
        elif out != NULL:
            memcpy(out + used, data + at, size)
            used += size
        at += size
    written[0] = used
    return at + 1 if at < end else -1


cdef inline int64_t _digits(const uint8_t* data, int64_t at, int64_t end) noexcept nogil:
    """The place after the digits that begin here; -1 where there are none."""
    cdef int64_t begin = at
    while at < end and c"0" <= data[at] <= c"9":
        at += 1
    return -1 if at == begin else at


cdef int64_t _number(const uint8_t* data, int64_t at, int64_t end) noexcept nogil:
    if data[at] == c"-":
        at += 1
    if at < end and data[at] == c"0":
        at += 1
    else:
        at = _digits(data, at, end)
    if 0 <= at < end and data[at] == c".":
        at = _digits(data, at + 1, end)
    if 0 <= at < end and data[at] | 0x20 == c"e":
        at += 1
        if at < end and (data[at] == c"+" or data[at] == c"-"):
            at += 1
        at = _digits(data, at, end)
    return at


cdef int64_t _name(const uint8_t* data, int64_t at, int64_t end) noexcept nogil:
    """Where the value begins whose name begins here; -1 where it is not valid."""
    cdef int64_t size
    if at >= end or data[at] != c'"':
        return -1
    at = _string(data, at + 1, end, NULL, &size)
    if at < 0:
        return -1
    at = _after_blanks(data, at, end)
    if at >= end or data[at] != c":":
        return -1
    at = _after_blanks(data, at + 1, end)
    return at if at < end else -1


cdef inline bint _is_word(
    const uint8_t* data, int64_t size, const char* word, int64_t length
) noexcept nogil:
    return size >= length and memcmp(data, word, length) == 0


cdef int64_t _value(const uint8_t* data, int64_t at, int64_t end) noexcept nogil:
    """The place after the value that begins here; -1 where it is not valid, or very deep."""
    cdef uint64_t objects = 0  # a bit for each value that holds this one, the innermost the lowest
    cdef int64_t size
    cdef int depth = 0
    cdef bint is_empty
    while True:
        is_empty = False
        if data[at] == c"{" or data[at] == c"[":
            if depth == DEEPEST:
                return -1
            depth += 1
            objects = objects << 1 | (data[at] == c"{")
            at = _after_blanks(data, at + 1, end)
            is_empty = at < end and KIND[data[at]] == CLOSE
            if not is_empty:
                at = _name(data, at, end) if objects & 1 else at
                if not 0 <= at < end:
                    return -1
                continue
        elif data[at] == c'"':
            at = _string(data, at + 1, end, NULL, &size)
        elif _is_word(data + at, end - at, b"true", 4) or _is_word(data + at, end - at, b"null", 4):
            at += 4
        elif _is_word(data + at, end - at, b"false", 5):
            at += 5
        else:
            at = _number(data, at, end)
        while at >= 0 and depth:  # after a value, or in an empty one
            at = _after_blanks(data, at, end)
            if at >= end:
                return -1
            if data[at] == c"," and not is_empty:
                at = _after_blanks(data, at + 1, end)
                at = _name(data, at, end) if objects & 1 else at
                break
            if data[at] != (c"}" if objects & 1 else c"]"):
                return -1
            is_empty = False
            depth -= 1
            objects >>= 1
            at += 1
        if at < 0 or not depth:
            return at
        if at >= end:
            return -1


cdef int64_t _text_of(
    const uint8_t* data, int64_t at, int64_t end,
    const uint8_t* names, const int64_t* edges, int64_t others, uint8_t* out,
    int64_t* places, int64_t stride,
) noexcept nogil:
    """How many bytes the text of the first name has, which is written to `out`; -1 where the record
    is not one that surely has it. Where the values of the other names are is written to `places`.
    """
    cdef int64_t key, i, size, begin, written = -1
    at = _after_blanks(data, at, end)
    if at >= end or data[at] != c"{":
        return -1
    while True:
        key = _after_blanks(data, at + 1, end)  # after the opening brace, or a comma
        at = _name(data, key, end)
        if at < 0 or memchr(data + key, c"\\", at - key) != NULL:  # a name in another spelling
            return -1
        if at - key >= edges[1] and memcmp(data + key, names, edges[1]) == 0:
            if written >= 0 or data[at] != c'"':
                return -1
            at = _string(data, at + 1, end, out, &written)
        else:
            begin = at
            at = _value(data, at, end)
            for i in range(others if at >= 0 else 0):
                size = edges[i + 2] - edges[i + 1]
                if begin - key >= size and memcmp(data + key, names + edges[i + 1], size) == 0:
                    if places[i * stride] >= 0:
                        return -1
                    places[i * stride] = begin
                    places[i * stride + 1] = at
        if at < 0:
            return -1
        at = _after_blanks(data, at, end)
        if at < end and data[at] == c"}":
            return written if _after_blanks(data, at + 1, end) == end else -1
        if at >= end or data[at] != c",":
            return -1


def find_texts(
    const uint8_t[::1] data, const int64_t[::1] begins, const int64_t[::1] ends,
    const uint8_t[::1] names, const int64_t[::1] edges, uint8_t[::1] out, int64_t[::1] offsets,
    int64_t[:, :, ::1] places,
) -> int:
    """Find the text of each JSON object, the value of one field, and where the values of others
    are. Returns how many objects were read: all, or those before the first one that is odd. What is
    found is right, and what is odd may still be valid: a name with an escape, or twice; values
    within more than 63 others.

    IN  data     uint8[B]; object i is data[begins[i] : ends[i]]
    IN  names    uint8, names of fields in their quotes, in UTF-8, without anything to escape, end
                 to end; the first is the text's
    IN  edges    int64[k + 2]: name j is names[edges[j] : edges[j + 1]]
    OUT out      uint8, at least the objects' bytes: the texts in UTF-8, each with a byte 0xFF after
    OUT offsets  int64[n + 1]: text i is out[offsets[i] : offsets[i + 1] - 1]
    OUT places   int64[k, n, 2]: the value of name j + 1 in object i is data[places[j, i, 0] :
                 places[j, i, 1]]; -1 if it has none
    """
    cdef int64_t i, size, used = 0, n = begins.shape[0], room = 0, others = places.shape[0]
    if ends.shape[0] != n or offsets.shape[0] != n + 1 or names.shape[0] < 2:
        raise ValueError(f"{n} begins, {ends.shape[0]} ends, {offsets.shape[0]} offsets")
    if edges.shape[0] != others + 2 or places.shape[1] != n or places.shape[2] != 2:
        raise ValueError(f"{edges.shape[0]} edges of names, places of {others} in {places.shape[1]}")
    for i in range(others + 1):
        if not 0 <= edges[i] <= edges[i + 1] <= names.shape[0]:
            raise ValueError(f"name {i} is at {edges[i]}..{edges[i + 1]} of {names.shape[0]}")
    for i in range(n):
        if not 0 <= begins[i] <= ends[i] <= data.shape[0]:
            raise ValueError(f"object {i} is at {begins[i]}..{ends[i]} of {data.shape[0]}")
        room += ends[i] - begins[i]
    if out.shape[0] < room:
        raise ValueError(f"{out.shape[0]} bytes for {room}")
    offsets[0] = 0
    places[...] = -1
    if room == 0:
        return 0
    with nogil:
        for i in range(n):
            size = _text_of(
                &data[0], begins[i], ends[i], &names[0], &edges[0], others, &out[used],
                &places[0, i, 0] if others else NULL, 2 * n,
            )
            if size < 0:
                break
            out[used + size] = SEPARATOR
            used += size + 1
            offsets[i + 1] = used
        else:
            i = n
    return i
