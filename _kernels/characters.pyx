"""Whether texts hold a character of a set."""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t

cdef extern from "Python.h":
    int PyUnicode_KIND(object)
    void* PyUnicode_DATA(object)
    Py_ssize_t PyUnicode_GET_LENGTH(object)
    int PyUnicode_1BYTE_KIND
    int PyUnicode_2BYTE_KIND

ctypedef fused unit:
    uint16_t
    uint32_t

cdef enum:
    AT_A_TIME = 256  # characters looked at without a branch


cdef bint _holds(const unit* text, int64_t size, const uint8_t* bits) noexcept nogil:
    cdef int64_t at = 0, end = 0
    cdef uint8_t any_of
    while end < size:
        any_of = 0
        end = min(end + AT_A_TIME, size)
        for at in range(at, end):
            any_of |= bits[text[at] >> 3] >> (text[at] & 7)
        at = end
        if any_of & 1:
            return True
    return False


def find_in_texts(list texts, const uint8_t[::1] bits, uint8_t[::1] found):
    """Find the texts with a character of the set, none of which is below U+0100.

    IN  texts  n strings
    IN  bits   uint8[0x110000 / 8], 1 for the code points of the set, the lowest bit first
    OUT found  uint8[n]
    """
    cdef int64_t i, size
    cdef int kind
    cdef void* data
    cdef bint holds
    for i in range(len(texts)):
        text = <str?> texts[i]
        kind = PyUnicode_KIND(text)
        size = PyUnicode_GET_LENGTH(text)
        if kind == PyUnicode_1BYTE_KIND:
            found[i] = 0
            continue
        data = PyUnicode_DATA(text)
        with nogil:  # `texts` keeps it
            if kind == PyUnicode_2BYTE_KIND:
                holds = _holds(<const uint16_t*> data, size, &bits[0])
            else:
                holds = _holds(<const uint32_t*> data, size, &bits[0])
        found[i] = holds
