"""Eight bytes at a time: a word for each question that is asked of all of them."""

from libc.stdint cimport uint64_t

cdef extern from *:
    """
    #define ONES 0x0101010101010101ULL
    #define TOPS 0x8080808080808080ULL
    """
    const uint64_t ONES  # 1 in each byte
    const uint64_t TOPS  # the highest bit of each byte
    int trailing_zeros "__builtin_ctzll"(uint64_t word) noexcept nogil
