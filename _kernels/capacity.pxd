# A set of integers 0..n-1 as a tree of 64-bit words: level 0 holds one bit per
# integer, each level above one bit per non-zero word of the level below. Finding
# the next or previous member is two or three word operations for any n up to 2**24,
# which is what makes "the tightest row that still takes this length" cheap.
#
# Only inline functions live here, so cimporting it costs no module at run time.

from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free

cdef extern from *:
    """
    #include <stdint.h>
    static inline int packer_lowest_bit(uint64_t w) { return __builtin_ctzll(w); }
    static inline int packer_highest_bit(uint64_t w) { return 63 - __builtin_clzll(w); }
    """
    int lowest_bit "packer_lowest_bit"(uint64_t w) noexcept nogil
    int highest_bit "packer_highest_bit"(uint64_t w) noexcept nogil

cdef struct BitSet:
    uint64_t* level[5]
    int64_t words[5]
    int depth


cdef inline void bitset_free(BitSet* self) noexcept nogil:
    cdef int d
    for d in range(self.depth):
        free(self.level[d])
    self.depth = 0


cdef inline int bitset_init(BitSet* self, int64_t n) noexcept nogil:
    """An empty set over 0..n-1. Returns 0, or -1 when memory is short."""
    cdef int64_t words = (n + 63) >> 6
    self.depth = 0
    while True:
        self.level[self.depth] = <uint64_t*>calloc(words, sizeof(uint64_t))
        if self.level[self.depth] == NULL:
            bitset_free(self)
            return -1
        self.words[self.depth] = words
        self.depth += 1
        if words == 1:
            return 0
        words = (words + 63) >> 6


cdef inline void bitset_add(BitSet* self, int64_t i) noexcept nogil:
    cdef int d
    for d in range(self.depth):
        self.level[d][i >> 6] |= (<uint64_t>1) << (i & 63)
        i >>= 6


cdef inline void bitset_remove(BitSet* self, int64_t i) noexcept nogil:
    cdef int d
    for d in range(self.depth):
        self.level[d][i >> 6] &= ~((<uint64_t>1) << (i & 63))
        if self.level[d][i >> 6]:
            return
        i >>= 6


cdef inline int64_t bitset_next(BitSet* self, int64_t i) noexcept nogil:
    """The smallest member >= i, or -1."""
    cdef int d = 0
    cdef uint64_t word
    while d < self.depth:
        if (i >> 6) >= self.words[d]:
            return -1
        word = self.level[d][i >> 6] >> (i & 63)
        if word:
            i += lowest_bit(word)
            while d:
                d -= 1
                i = (i << 6) + lowest_bit(self.level[d][i])
            return i
        i = (i >> 6) + 1
        d += 1
    return -1


cdef inline int64_t bitset_previous(BitSet* self, int64_t i) noexcept nogil:
    """The largest member <= i, or -1."""
    cdef int d = 0
    cdef uint64_t word
    while d < self.depth and i >= 0:
        word = self.level[d][i >> 6] << (63 - (i & 63))
        if word:
            i -= 63 - highest_bit(word)
            while d:
                d -= 1
                i = (i << 6) + highest_bit(self.level[d][i])
            return i
        i = (i >> 6) - 1
        d += 1
    return -1
