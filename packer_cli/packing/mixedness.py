"""How mixed rows are: whether a row is a sample of the data, or a block of like documents.

Shares are of rows with `FEWEST` segments or more: of fewer, all may be alike by chance. Functions
take the segments of one row or more, row after row.
"""

from __future__ import annotations

import math

import numpy as np

from packer_cli.records import Int32, Int64

FEWEST = 4
ONE_LENGTH, ONE_INPUT = 0.8, 0.9  # from which share of its segments on a row is called so
_LENGTH_BITS = 25  # a row has at most 2**24 tokens
_NEAR = 20  # lengths within one part in so many of a row's median are nearly one length


def deviations(lengths: Int32 | Int64, row_offsets: Int64) -> tuple[int, int]:
    """The sum of squared lengths, and that of squared deviations from the mean of each one's row.
    In whole numbers for each row, so that those of units add up.
    """
    lengths = lengths.astype(np.int64)
    squares = np.add.reduceat(lengths * lengths, row_offsets[:-1])
    tokens, size = np.add.reduceat(lengths, row_offsets[:-1]), np.diff(row_offsets)
    # tokens² / size, rounded up, without a product beyond 64 bits: a row has at most 2**24 tokens
    own = squares - -(-(tokens * tokens) // size)
    return sum(squares.tolist()), sum(own.tolist())


def spread(squares: int, squares_in_rows: int, tokens: int, segments: int, rows: int) -> float:
    """Standard deviation of lengths in a row over that in the data: 1 for rows at random. NaN where
    rows are of one segment, or all lengths are equal.
    """
    of_data = squares * segments - tokens * tokens
    if segments <= rows or of_data <= 0:
        return math.nan
    return math.sqrt(squares_in_rows / (segments - rows) / (of_data / segments / (segments - 1)))


def near_median(lengths: Int32 | Int64, row_offsets: Int64) -> tuple[Int64, Int64]:
    """(how many, of how many) segments are within 5% of their row's median length, of each row with
    `FEWEST` or more.
    """
    size = np.diff(row_offsets)
    row = np.repeat(np.arange(len(size)), size)
    ordered = row << _LENGTH_BITS | lengths
    ordered.sort()
    ordered &= (1 << _LENGTH_BITS) - 1
    first = row_offsets[:-1]
    median = ordered[first + (size - 1) // 2] + ordered[first + size // 2]  # twice the median
    is_near = np.abs(2 * ordered - median[row]) * _NEAR <= median[row]
    near = np.bincount(row, is_near, len(size)).astype(np.int64)
    return near[size >= FEWEST], size[size >= FEWEST]


def from_one_input(files: Int32 | Int64, row_offsets: Int64) -> tuple[Int64, Int64]:
    """(how many, of how many) segments come from the input that has most of the row, of each row
    with `FEWEST` or more.
    """
    size = np.diff(row_offsets)
    row = np.repeat(np.arange(len(size)), size)
    key = row * (int(files.max(initial=0)) + 1) + files
    key.sort()
    ends = np.append(np.flatnonzero(np.diff(key)) + 1, len(key))
    runs = np.diff(ends, prepend=0)
    most = np.zeros(len(size), np.int64)
    np.maximum.at(most, row[ends - 1], runs)
    return most[size >= FEWEST], size[size >= FEWEST]
