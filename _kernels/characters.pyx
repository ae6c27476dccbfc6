"""Whether texts hold a marked character."""

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
    AT_A_TIME = 64  # characters looked at without a branch
    LATIN = 0x100


cdef bint _holds(const unit* text, int64_t size, const uint8_t* marked) noexcept nogil:
    cdef int64_t at, begin, end = 0
    cdef unit united
    cdef uint8_t found
    while end < size:
        begin, end = end, min(end + AT_A_TIME, size)
        united = 0
        for at in range(begin, end):  # by the compiler many at once; most are below in most texts
            united |= text[at]
        if united < LATIN:
            continue
        found, at = 0, begin
        while at + 4 <= end:  # four loads wait for each other less than one after the other
            found |= (
                marked[text[at]] | marked[text[at + 1]] | marked[text[at + 2]] | marked[text[at + 3]]
            )
            at += 4
        while at < end:
            found |= marked[text[at]]
            at += 1
        if found:
            return True
    return False


def find_in_texts(list texts, const uint8_t[::1] marked, uint8_t[::1] found):
    """Find the texts with a marked character. Those below U+0100 are not looked at.

    IN  texts   n strings
    IN  marked  uint8[0x110000], above 0 for every character that is; may change meanwhile
    OUT found   uint8[n]: 0 or 1
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
                holds = _holds(<const uint16_t*> data, size, &marked[0])
            else:
                holds = _holds(<const uint32_t*> data, size, &marked[0])
        found[i] = holds
