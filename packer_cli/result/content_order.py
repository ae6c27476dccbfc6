"""Orders of documents by their content hashes, and which documents are equal.

All are the same on every machine, and take about 0.1 microseconds a document.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from packer_cli._kernels import documents as kernels
from packer_cli.records import Int32, Int64, UInt32, UInt64

Bool = npt.NDArray[np.bool_]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio
_LOW = np.int64((1 << 32) - 1)


def content_hashes(ids: UInt32, offsets: Int64, chosen: Int32 | None = None) -> UInt64:
    """uint64[n, 2] of documents of such tokens; of pairs, which side is which counts, too."""
    hashes = np.empty((len(offsets) - 1, 2), np.uint64)
    kernels.hash_documents(ids, offsets, hashes)
    if chosen is not None:
        hashes[:, 0] += (chosen.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return hashes


def spread_order(keys: UInt64) -> Int64:
    """int64[n], the documents by their keys; equal keys are spread evenly over all of them."""
    order, same = _stable(keys)
    if not same.any():
        return order
    number = np.arange(len(keys))
    earlier = number - np.maximum.accumulate(np.where(same, 0, number))
    spread = np.copy(keys)
    spread[order] += earlier.astype(np.uint64) * _GOLDEN
    return _stable(spread)[0]


def repeated(hashes: UInt64) -> Bool:
    """bool[n], which of `hashes` uint64[n, 2] equal an earlier one."""
    order, same = _grouped(hashes)
    found = np.zeros(len(hashes), bool)
    found[order[same]] = True
    return found


def among(hashes: UInt64, contents: UInt64) -> Bool:
    """bool[n], which of `hashes` uint64[n, 2] are one of the contents uint64[m, 2]."""
    order, same = _grouped(np.concatenate([contents, hashes]))
    begin = np.maximum.accumulate(np.where(same, 0, np.arange(len(order))))
    found = np.zeros(len(order), bool)
    found[order] = order[begin] < len(contents)
    return found[len(contents) :]


def _grouped(hashes: UInt64) -> tuple[Int64, Bool]:
    """As `_stable`, of hashes: an order in which equal ones come together, in their order."""
    order, same = _stable(np.ascontiguousarray(hashes[:, 0]))
    at, high = np.flatnonzero(same), hashes[:, 1]
    if (high[order[at]] != high[order[at - 1]]).any():  # half of a hash does not tell them apart
        order = np.lexsort((hashes[:, 1], hashes[:, 0]))
        ordered = hashes[order]
        same[1:] = (ordered[1:] == ordered[:-1]).all(axis=1)
    return order, same


def _stable(keys: UInt64) -> tuple[Int64, Bool]:
    """A stable order of fewer than 2**31 keys, and bool[n], where in it a key is that before.

    Half the time of numpy's, whose unstable sorts are vectorised.
    """
    order = np.argsort(keys)
    ordered = keys[order]
    same = np.zeros(len(keys), bool)
    same[1:] = ordered[1:] == ordered[:-1]
    del ordered
    if same.any():  # by number within equal keys
        run = np.cumsum(~same)
        run <<= 32
        run |= order
        run.sort()
        order = run & _LOW
    return order, same
