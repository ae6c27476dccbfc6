"""Whether texts hold a marked character, which tokens hold which of their bytes, and looks at the
messages of conversations: at many small dicts, with few words for each.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.dict cimport PyDict_Next
from cpython.object cimport PyObject
from cpython.unicode cimport PyUnicode_Contains
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

from words cimport TOPS, trailing_zeros

cdef extern from "Python.h":
    Py_ssize_t PyUnicode_GET_LENGTH(object)
    Py_UCS4 PyUnicode_READ_CHAR(object text, Py_ssize_t index)
    bint Py_UNICODE_ISSPACE(Py_UCS4 character)

cdef str THOUGHT = "</think>"
cdef tuple REASONING = ("reasoning_content", "thinking", "reasoning")

cdef enum:
    LATIN = 0xC4  # the first byte of U+0100


cdef bint _holds(
    const uint8_t* text, int64_t size, const uint8_t* marked
) noexcept nogil:
    cdef int64_t at = 0, length
    cdef uint64_t word
    cdef uint32_t code, lead
    while at < size:
        lead = text[at]
        if lead < 0x80:
            at += 1
            while at + 8 <= size:
                memcpy(&word, text + at, 8)
                if word & TOPS:
                    at += trailing_zeros(word & TOPS) >> 3
                    break
                at += 8
            continue
        if lead < LATIN:
            at += 2
            continue
        length = 2 + (lead >= 0xE0) + (lead >= 0xF0)
        if at + length > size:  # no UTF-8
            break
        code = lead << 6 | text[at + 1] & 0x3F  # the lead's own marks go beyond the last bit kept
        if length == 2:
            code &= 0x7FF
        elif length == 3:
            code = (code << 6 | text[at + 2] & 0x3F) & 0xFFFF
        else:
            code = ((code << 6 | text[at + 2] & 0x3F) << 6 | text[at + 3] & 0x3F) & 0x1FFFFF
        if marked[code]:
            return True
        at += length
    return False


def copied(const uint8_t[::1] data) -> bytes:
    """Copy bytes, while other threads go on."""
    cdef int64_t size = data.shape[0]
    copy = PyBytes_FromStringAndSize(NULL, size)
    cdef char* to = PyBytes_AS_STRING(copy)
    if size:
        with nogil:
            memcpy(to, &data[0], size)
    return copy


def find_in_texts(
    const uint8_t[::1] data, const int64_t[::1] offsets, const uint8_t[::1] marked,
    uint8_t[::1] found,
):
    """Find the texts with a marked character. Those below U+0100 are not looked at.

    IN  data    uint8[B], n texts in UTF-8: text i is data[offsets[i] : offsets[i + 1] - 1]
    IN  marked  uint8[0x110000], above 0 for every character that is; may change meanwhile
    OUT found   uint8[n]: 0 or 1
    """
    cdef int64_t i
    if offsets.shape[0] != found.shape[0] + 1 or offsets[found.shape[0]] > data.shape[0]:
        raise ValueError(f"{offsets.shape[0]} offsets of {data.shape[0]} bytes")
    if not found.shape[0]:
        return
    with nogil:
        for i in range(found.shape[0]):
            found[i] = _holds(&data[0] + offsets[i], offsets[i + 1] - 1 - offsets[i], &marked[0])


# As in packer_cli/tokenization/tokenizer.py.
cdef enum:
    ADDED = 2
    PREPENDED = 1, UNLESS_THERE = 2, AT_START = 3


cdef inline bint _is_space(const uint8_t* at, int64_t room) noexcept nogil:
    """Whether U+2581, "▁", is there."""
    return room >= 3 and at[0] == 0xE2 and at[1] == 0x96 and at[2] == 0x81


cdef inline int64_t _bytes_of(
    const uint8_t* piece, int64_t size, const uint8_t* text, int64_t room, bint spaces
) noexcept nogil:
    """How many bytes of the text the piece is; -1 where it is not what the text says."""
    cdef int64_t p = 0, t = 0
    if size <= room and memcmp(piece, text, size) == 0:
        return size
    while p < size:
        if t >= room:
            return -1
        if piece[p] == text[t]:
            p += 1
            t += 1
        elif spaces and text[t] == 0x20 and _is_space(piece + p, size - p):
            p += 3
            t += 1
        else:
            return -1
    return t


def mark_trained(
    const uint32_t[::1] ids, const int64_t[::1] offsets,
    const uint8_t[::1] pieces, const int64_t[::1] piece_offsets, const uint8_t[::1] kinds,
    bint spaces, int spacing,
    const uint8_t[::1] text, const int64_t[::1] text_offsets,
    const int64_t[::1] span_offsets, const int64_t[::1] span_begin, const int64_t[::1] span_end,
    uint8_t[::1] trained, uint8_t[::1] certain, int64_t[::1] span_of=None,
):
    """Mark the tokens that hold at least one byte of a span.

    The tokens are held to the text, byte after byte, so that their places are known and not summed.

    IN  ids uint32[T], offsets int64[n + 1]: the documents' tokens
    IN  pieces        uint8[B], piece_offsets int64[K + 1]: the bytes that a token stands for
    IN  kinds         uint8[K]: 1 of a token of the model, 2 of one that is added, which begins the
                      text after it anew; 0: which bytes it stands for is not known
    IN  spaces        "▁" in a piece stands for a space, or for itself
    IN  spacing       a "▁" that is not in the text is put before what begins anew: 0 never;
                      1 always; 2 unless the text there begins with a space or "▁"; 3 as 2, but
                      only before the whole text
    IN  text          uint8[bytes], text_offsets int64[n + 1]: the texts, as `find_in_texts` takes them
    IN  span_offsets  int64[n + 1], span_begin and span_end int64[spans]: bytes, in order
    OUT trained       uint8[T], 1 or, where the token begins before the span, 2; what adds no byte
                      goes with the byte that follows
    OUT certain       uint8[n], 1 where the tokens are the text, from its first byte to its last;
                      else the flags of that document mean nothing
    OUT span_of       int64[T], where trained is not 0 the number of the span; may be None
    """
    cdef int64_t n = offsets.shape[0] - 1, known = kinds.shape[0]
    cdef int64_t i, t, span, last, begin, end, stop, size, used
    cdef const uint8_t* piece
    cdef const uint8_t* here
    cdef uint8_t kind
    cdef bint fresh, numbered = span_of is not None
    with nogil:
        for i in range(n):
            span = span_offsets[i]
            last = span_offsets[i + 1]
            begin = 0
            stop = text_offsets[i + 1] - 1 - text_offsets[i]
            fresh = spacing > 0
            certain[i] = 0
            for t in range(offsets[i], offsets[i + 1]):
                kind = kinds[ids[t]] if ids[t] < known else 0
                if kind == 0:
                    break
                piece = &pieces[0] + piece_offsets[ids[t]]
                size = piece_offsets[ids[t] + 1] - piece_offsets[ids[t]]
                here = &text[0] + text_offsets[i] + begin
                if kind == ADDED:
                    fresh = spacing == PREPENDED or spacing == UNLESS_THERE
                elif fresh:
                    fresh = False
                    if spacing == PREPENDED or not (
                        stop > begin and (here[0] == 0x20 or _is_space(here, stop - begin))
                    ):
                        if not _is_space(piece, size):
                            break
                        piece += 3
                        size -= 3
                used = _bytes_of(piece, size, here, stop - begin, spaces)
                if used < 0:
                    break
                end = begin + used
                while span < last and span_end[span] <= begin:
                    span += 1
                trained[t] = 0
                # the space alone stands before the byte that follows
                if span < last and (end if used else begin + 1) > span_begin[span]:
                    trained[t] = 1 + (begin < span_begin[span])
                    if numbered:
                        span_of[t] = span
                begin = end
            else:
                certain[i] = begin == stop


def is_plain(message, frozenset parsed):
    """Whether a message is what templates know as it is: a dict without None, whose role and
    content are strings, and without any of the keys `parsed` but a list of dicts as tool_calls.
    """
    cdef Py_ssize_t at = 0
    cdef PyObject* key
    cdef PyObject* value
    if type(message) is not dict:
        return False
    if type((<dict>message).get("role")) is not str:
        return False
    if type((<dict>message).get("content")) is not str:
        return False
    while PyDict_Next(message, &at, &key, &value):
        if <object>value is None:
            return False
        if <object>key in parsed:
            if <object>key != "tool_calls" or type(<object>value) is not list:
                return False
            for call in <list><object>value:
                if type(call) is not dict:
                    return False
    return True


def kinds_of(list messages, dict known, make):
    """A tuple of the kinds of messages: `known[key_of(message)]`, else `make(message, key)`."""
    cdef list kinds = []
    for message in messages:
        key = key_of(message)
        kind = None if key is None else known.get(key)
        kinds.append(make(message, key) if kind is None else kind)
    return tuple(kinds)


cpdef key_of(message):
    """What tells a message of a usual kind from those of other kinds; None for unusual ones.

    Usual are messages with a role and without reasoning, whose content is nothing or begins with a
    word (and has no `</think>`, if it is the assistant's), and whose tool calls are dicts. The key
    is the role of messages that have nothing but that and content, in this order; else (role,
    whether there is content, or None without the field, the names of the fields, and for each call:
    whether it has a function, whether that has a name, the type of its arguments, whether they are
    empty).
    """
    cdef dict fields
    cdef Py_UCS4 first
    if type(message) is not dict:
        return None
    fields = <dict>message
    role, content = fields.get("role"), fields.get("content")
    if type(role) is not str:
        return None
    has_words = None
    if type(content) is str:
        has_words = PyUnicode_GET_LENGTH(content) > 0
        if has_words:
            first = PyUnicode_READ_CHAR(content, 0)
            if first == c"<" or Py_UNICODE_ISSPACE(first):
                return None
            if role == "assistant" and PyUnicode_Contains(content, THOUGHT):
                return None
            if len(fields) == 2 and _begins_with_role(fields):
                return role
    elif content is not None or "content" in fields:
        return None
    for name in REASONING:
        if name in fields:
            return None
    calls = fields.get("tool_calls")
    if calls is None:
        return role, has_words, tuple(fields)
    if type(calls) is not list:
        return None
    cdef list looks = []
    for call in <list>calls:
        if type(call) is not dict:
            return None
        function = (<dict>call).get("function")
        inner = function if type(function) is dict else call
        arguments = (<dict>inner).get("arguments")
        looks.append((function is inner, "name" in <dict>inner, type(arguments), not arguments))
    return role, has_words, tuple(fields), tuple(looks)


cdef bint _begins_with_role(dict fields):
    cdef Py_ssize_t at = 0
    cdef PyObject* key
    cdef PyObject* value
    PyDict_Next(fields, &at, &key, &value)
    return <object>key == "role"


cpdef bint may_hold(value, str part):
    """Whether any string in a value of JSON may hold a part, but for the names of fields; true
    also of values that JSON has not.
    """
    cdef Py_ssize_t at = 0
    cdef PyObject* key
    cdef PyObject* item
    kind = type(value)
    if kind is str:
        return PyUnicode_Contains(value, part)
    if kind is dict:
        while PyDict_Next(value, &at, &key, &item):
            if may_hold(<object>item, part):
                return True
        return False
    if kind is list:
        for one in <list>value:
            if may_hold(one, part):
                return True
        return False
    if kind is tuple:
        for one in <tuple>value:
            if may_hold(one, part):
                return True
        return False
    return not (value is None or kind is int or kind is float or kind is bool)


def ends_at(list pieces, list counts):
    """For each of `counts`, ascending, the length of so many of the pieces (strings) together."""
    cdef list ends = []
    cdef Py_ssize_t end = 0, at = 0, count
    for count in counts:
        while at < count:
            end += len(pieces[at])
            at += 1
        ends.append(end)
    return ends
