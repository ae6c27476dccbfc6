"""Documents of a tokenized directory: their content hashes, what of them is trained on, and their
tokens out of mapped shards.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from spans cimport find


cdef inline uint64_t _rotated(uint64_t x, int by) noexcept nogil:
    return (x << by) | (x >> (64 - by))


cdef inline uint64_t _mixed(uint64_t k) noexcept nogil:
    k = (k ^ (k >> 33)) * <uint64_t>0xff51afd7ed558ccd
    k = (k ^ (k >> 33)) * <uint64_t>0xc4ceb9fe1a85ec53
    return k ^ (k >> 33)


cdef void _hash(const uint32_t* ids, int64_t count, uint64_t* out) noexcept nogil:
    """MurmurHash3_x64_128 (Austin Appleby, public domain), seed 0, of ids as little-endian bytes."""
    cdef uint64_t c1 = <uint64_t>0x87c37b91114253d5, c2 = <uint64_t>0x4cf5ad432745937f
    cdef uint64_t h1 = 0, h2 = 0, k1, k2
    cdef int64_t i, rest = count & 3, blocks = count >> 2
    for i in range(blocks):
        k1 = <uint64_t>ids[4 * i] | (<uint64_t>ids[4 * i + 1] << 32)
        k2 = <uint64_t>ids[4 * i + 2] | (<uint64_t>ids[4 * i + 3] << 32)
        h1 = (_rotated(h1 ^ (_rotated(k1 * c1, 31) * c2), 27) + h2) * 5 + 0x52dce729
        h2 = (_rotated(h2 ^ (_rotated(k2 * c2, 33) * c1), 31) + h1) * 5 + 0x38495ab5
    if rest == 3:
        h2 ^= _rotated(<uint64_t>ids[4 * blocks + 2] * c2, 33) * c1
    if rest:
        k1 = ids[4 * blocks]
        if rest > 1:
            k1 |= <uint64_t>ids[4 * blocks + 1] << 32
        h1 ^= _rotated(k1 * c1, 31) * c2
    h1 ^= <uint64_t>(4 * count)
    h2 ^= <uint64_t>(4 * count)
    h1 += h2
    h2 += h1
    h1, h2 = _mixed(h1), _mixed(h2)
    h1 += h2
    out[0] = h1
    out[1] = h2 + h1


def hash_documents(const uint32_t[::1] ids, const int64_t[::1] offsets, uint64_t[:, ::1] out):
    """OUT uint64[n, 2]: MurmurHash3_x64_128 of the ids of each document, as little-endian bytes.

    Document i is ids[offsets[i]:offsets[i + 1]].
    """
    cdef int64_t i
    _check_offsets(ids.shape[0], offsets)
    if out.shape[0] != offsets.shape[0] - 1 or out.shape[1] != 2:
        raise ValueError(f"{offsets.shape[0] - 1} documents, {out.shape[0]} hashes")
    with nogil:
        for i in range(out.shape[0]):
            # no address is taken behind the end
            _hash(&ids[offsets[i]] if offsets[i] < offsets[i + 1] else NULL,
                  offsets[i + 1] - offsets[i], &out[i, 0])


def order_keys(const uint64_t[:, ::1] hashes, uint64_t seed, uint64_t[::1] out):
    """OUT uint64[n]: by which documents are put into a seeded order, from their hashes alone."""
    cdef int64_t i
    cdef uint64_t salt = _mixed(seed + <uint64_t>0x9e3779b97f4a7c15)
    if out.shape[0] != hashes.shape[0] or hashes.shape[1] != 2:
        raise ValueError(f"{hashes.shape[0]} hashes, {out.shape[0]} keys")
    with nogil:
        for i in range(out.shape[0]):
            out[i] = _mixed(hashes[i, 0] ^ salt)


cdef int _check_offsets(int64_t total, const int64_t[::1] offsets) except -1:
    cdef int64_t i
    if offsets.shape[0] == 0 or offsets[0] < 0 or offsets[offsets.shape[0] - 1] > total:
        raise ValueError(f"offsets that are not into {total} tokens")
    for i in range(offsets.shape[0] - 1):
        if offsets[i + 1] < offsets[i]:
            raise ValueError(f"document {i} ends before it begins")
    return 0


def count_stretches(
    const uint8_t[::1] trained, const int64_t[::1] offsets, int32_t[::1] edges,
):
    """Count stretches of tokens next to each other of which `trained` is 1, in n documents.

    OUT edges int32[n + 1]  where the stretches of document i begin in what `stretches` gives, and
        edges[n] how many numbers that are, two for each stretch
    """
    cdef int64_t i, k
    cdef int32_t total = 0
    cdef uint8_t before
    _check_offsets(trained.shape[0], offsets)
    if edges.shape[0] != offsets.shape[0]:
        raise ValueError(f"{offsets.shape[0] - 1} documents, {edges.shape[0]} edges")
    with nogil:
        edges[0] = 0
        for i in range(edges.shape[0] - 1):
            before = 0
            for k in range(offsets[i], offsets[i + 1]):
                if trained[k]:
                    total += 2 * (not before)
                before = trained[k]
            edges[i + 1] = total


def stretches(
    const uint8_t[::1] trained, const int64_t[::1] offsets, int32_t[::1] out,
):
    """OUT [start, stop, ...] of what is trained on, of each document, counted from its beginning.

    As many as `count_stretches` has counted.
    """
    cdef int64_t i, k, at = 0
    cdef uint8_t before
    _check_offsets(trained.shape[0], offsets)
    for i in range(offsets.shape[0] - 1):
        before = 0
        for k in range(offsets[i], offsets[i + 1]):
            if (trained[k] != 0) != (before != 0):
                if at >= out.shape[0]:
                    raise ValueError(f"more than {out.shape[0]} edges")
                out[at] = <int32_t>(k - offsets[i])
                at += 1
            before = trained[k]
        if before:
            if at >= out.shape[0]:
                raise ValueError(f"more than {out.shape[0]} edges")
            out[at] = <int32_t>(offsets[i + 1] - offsets[i])
            at += 1


def gather_documents(
    const int64_t[::1] document, const int32_t[::1] start, const int32_t[::1] length,
    const int64_t[::1] firsts, const int64_t[::1] offsets, const int64_t[::1] values,
    int64_t value_bytes, uint8_t[::1] out,
):
    """Copy pieces of documents, end to end, into `out`; returns the first piece that is not in its
    document, or -1.

    Span k of the documents, from firsts[k] up to firsts[k + 1], has int32 offsets into its tokens
    at the address offsets[k], and at values[k] a value of `value_bytes` bytes for each token.
    """
    cdef int64_t i, span, size, at = 0, wrong = -1
    cdef const int32_t* edge
    with nogil:
        for i in range(document.shape[0]):
            span = find(firsts, document[i])
            if span < 0 or span >= offsets.shape[0]:
                wrong = i
                break
            edge = <const int32_t*>offsets[span] + (document[i] - firsts[span])
            size = length[i] * value_bytes
            if (start[i] < 0 or size < 0 or at + size > out.shape[0]
                    or <int64_t>start[i] + length[i] > <int64_t>edge[1] - edge[0]):
                wrong = i
                break
            if size:
                memcpy(&out[at], <const uint8_t*>values[span]
                       + (<int64_t>edge[0] + start[i]) * value_bytes, size)
            at += size
    return wrong


def gather_trained(
    const int64_t[::1] document, const int32_t[::1] start, const int32_t[::1] length,
    const int64_t[::1] firsts, const int64_t[::1] offsets, const int64_t[::1] values,
    const int64_t[::1] valid, uint8_t[::1] out,
):
    """OUT uint8: 1 where the tokens of pieces are trained on, as `gather_documents` lays them out.

    offsets and values as there, of the stretches; values[k] 0: everything in the span is trained
    on. valid[k]: the address of a bitmap, 0 if there is none, in which an unset bit says that
    everything in that document is. Returns the first piece of no document, or -1.
    """
    cdef int64_t i, span, number, e, low, high, at = 0, wrong = -1
    cdef const int32_t* edge
    cdef const int32_t* flat
    cdef const uint8_t* bits
    with nogil:
        for i in range(document.shape[0]):
            span = find(firsts, document[i])
            if (span < 0 or span >= values.shape[0] or start[i] < 0 or length[i] < 0
                    or at + length[i] > out.shape[0]):
                wrong = i
                break
            if not length[i]:
                continue
            number = document[i] - firsts[span]
            bits = <const uint8_t*>valid[span]
            if values[span] == 0 or (bits != NULL and not bits[number >> 3] >> (number & 7) & 1):
                memset(&out[at], 1, length[i])
                at += length[i]
                continue
            edge = <const int32_t*>offsets[span] + number
            flat = <const int32_t*>values[span]
            memset(&out[at], 0, length[i])
            for e in range(edge[0], edge[1] - 1, 2):
                low = max(flat[e], start[i]) - start[i]
                high = min(<int64_t>flat[e + 1], <int64_t>start[i] + length[i]) - start[i]
                if low < high:
                    memset(&out[at + low], 1, high - low)
            at += length[i]
    return wrong
