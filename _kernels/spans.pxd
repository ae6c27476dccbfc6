# Where an item lies that is counted over spans of which only the first items are known.
#
# Only an inline function lives here, so cimporting it costs no module at run time.

from libc.stdint cimport int64_t


cdef inline int64_t find(const int64_t[::1] firsts, int64_t item) noexcept nogil:
    """The last of `firsts`, which ascend, that is not above `item`; -1 if there is none."""
    cdef int64_t low = 0, high = firsts.shape[0], middle
    while low < high:
        middle = (low + high) >> 1
        if firsts[middle] <= item:
            low = middle + 1
        else:
            high = middle
    return low - 1
