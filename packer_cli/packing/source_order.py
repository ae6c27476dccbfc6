"""Rows of a mixture in an order in which every stretch of them has all sources in their shares.

Rows with long documents hold few others, so rows of sources with long documents and rows of others
differ. At random, stretches of few rows would have too much of one; here rows that are alike come
as far apart as they can.
"""

from __future__ import annotations

import numpy as np

from packer_cli.config.mixture import Mixture
from packer_cli.records import Int32, Int64

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio


def sources_of(mixture: Mixture, file: Int32) -> Int64:
    """The number of the source of each input."""
    ends = np.cumsum([one.inputs for one in mixture.sources])
    return np.searchsorted(ends, file, side="right")


def evened_out(
    lengths: Int32, source: Int64, order: Int64, row_offsets: Int64, seed: int
) -> tuple[Int64, Int64]:
    """The same rows, one of every kind in turn. `lengths` and `source`: of the pieces.

    1. Rows are sorted by the source that has most of them, and by how much that is.
    2. Multiples of the golden ratio, without their whole part, say where each comes: those of any
       few neighbours lie evenly between 0 and 1.
    """
    rows, sources = len(row_offsets) - 1, int(source.max(initial=0)) + 1
    row = np.repeat(np.arange(rows), np.diff(row_offsets))
    tokens = np.bincount(row * sources + source[order], lengths[order], rows * sources)
    tokens = tokens.reshape(rows, sources)
    most = tokens.argmax(axis=1)
    alike = np.lexsort((tokens.max(axis=1) / tokens.sum(axis=1), most))
    place = np.arange(rows, dtype=np.uint64) * _GOLDEN + np.uint64(seed)
    return rows_taken(order, row_offsets, alike[np.argsort(place)])


def rows_taken(order: Int64, row_offsets: Int64, rows: Int64) -> tuple[Int64, Int64]:
    """(order, row_offsets) of these rows."""
    size = np.diff(row_offsets)[rows]
    new_offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(size, out=new_offsets[1:])
    within = np.arange(new_offsets[-1]) - np.repeat(new_offsets[:-1], size)
    return order[np.repeat(row_offsets[rows], size) + within], new_offsets
