"""Figures of rows: the cost of attention, how mixed rows are, and a lower bound of their number.

All are sums of integers, so that the figures of units add up to those of a whole result.
"""

from __future__ import annotations

import math

import numpy as np
from msgspec import Struct

from packer_cli.records import Int32, Int64, offsets_of

# Rows with fewer segments do not show how mixed rows are: theirs may be alike by chance. A row is
# called of one length, or of one input, from these shares of its segments on.
FEWEST = 4
ONE_LENGTH, ONE_INPUT = 0.8, 0.9
_LENGTH_BITS = 25  # a row has at most 2**24 tokens
_NEAR = 20  # lengths within one part in so many of a row's median are nearly one length


def squared_sums(lengths: Int32 | Int64, row_offsets: Int64) -> Int64:
    """Return the sum of squared segment lengths of each row, its cost of attention, int64[rows]."""
    of_rows: Int64 = np.diff(offsets_of(np.square(lengths, dtype=np.int64))[row_offsets])
    return of_rows


class AttentionCost(Struct, frozen=True):
    """Sums over rows of the cost of attention, see `squared_sums`. They are exact."""

    rows: int = 0
    sum: int = 0
    sum_of_squares: int = 0  # beyond 64 bits for long rows
    max: int = 0

    @classmethod
    def of(cls, lengths: Int32 | Int64, row_offsets: Int64) -> AttentionCost:
        """Sum up rows: row r has the segments row_offsets[r]..row_offsets[r + 1]."""
        costs = squared_sums(lengths, row_offsets).tolist()
        squares = sum(cost * cost for cost in costs)
        return cls(len(costs), sum(costs), squares, max(costs, default=0))

    def __add__(self, other: AttentionCost) -> AttentionCost:
        rows, squares = self.rows + other.rows, self.sum_of_squares + other.sum_of_squares
        return AttentionCost(rows, self.sum + other.sum, squares, max(self.max, other.max))

    @property
    def spread(self) -> dict[str, float]:
        """Coefficient of variation and max / mean, of one row at least."""
        total = self.sum or 1  # a damaged manifest may have none
        variance = max(self.rows * self.sum_of_squares - self.sum * self.sum, 0)
        return {"cv": math.sqrt(variance) / total, "max_over_mean": self.max * self.rows / total}


def deviations(lengths: Int32 | Int64, row_offsets: Int64) -> tuple[int, int]:
    """Return the sums of squared lengths, and of squared deviations from the mean of each row."""
    lengths = lengths.astype(np.int64)
    squares = np.add.reduceat(lengths * lengths, row_offsets[:-1])
    tokens, size = np.add.reduceat(lengths, row_offsets[:-1]), np.diff(row_offsets)
    # tokens² / size, rounded up, without a product beyond 64 bits: a row has at most 2**24 tokens
    squared_deviations = squares - -(-(tokens * tokens) // size)
    return sum(squares.tolist()), sum(squared_deviations.tolist())


def length_spread(squares: int, in_rows: int, tokens: int, segments: int, rows: int) -> float:
    """Return the standard deviation of lengths in a row over that in the data: 1 for random rows.

    NaN if all rows have one segment, or all lengths are equal. First two: sums of `deviations`.
    """
    of_data = squares * segments - tokens * tokens
    if segments <= rows or of_data <= 0:
        return math.nan
    return math.sqrt(in_rows / (segments - rows) / (of_data / segments / (segments - 1)))


def near_median(lengths: Int32 | Int64, row_offsets: Int64) -> tuple[Int64, Int64]:
    """Count, in rows of `FEWEST` segments or more, those near the median, and all, int64[m]."""
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
    """Count, in rows of `FEWEST` segments or more, the main input's and all, int64[m]."""
    size = np.diff(row_offsets)
    if not files.any():  # all are from the first input: nothing to sort
        return size[size >= FEWEST], size[size >= FEWEST]
    row = np.repeat(np.arange(len(size)), size)
    key = row * (int(files.max(initial=0)) + 1) + files
    key.sort()
    ends = np.append(np.flatnonzero(np.diff(key)) + 1, len(key))
    most = np.zeros(len(size), np.int64)
    np.maximum.at(most, row[ends - 1], np.diff(ends, prepend=0))
    return most[size >= FEWEST], size[size >= FEWEST]


def lower_bound_rows(
    counts: Int32 | Int64,
    max_length: int,
    *,
    max_segments: int | None = None,
    segment_multiple: int = 1,
) -> int:
    """Return a number of rows below which no plan can pack these lengths.

    counts            [max_length + 1]: counts[s] documents have s tokens; counts[0] is
                      ignored
    max_segments      a row may hold; None: any number
    segment_multiple  segments are padded to multiples of this, which divides max_length

    The largest of ceil(documents / max_segments), ceil(tokens / max_length), tokens counted with
    their padding, and the L2 bound of Martello and Toth 1990 ("Lower bounds and reduction
    procedures for the bin packing problem"): for a threshold a,
    documents above max_length - a stand alone, those above half a row need one each, and
    those from a to half a row can only use what the latter leave. Here for all a at once, by
    prefix sums over lengths: O(max_length).
    """
    of_length = counts[: max_length + 1].astype(np.int64)
    if segment_multiple > 1:  # lengths rounded up to whole units, and the row in units
        in_units = np.zeros(max_length // segment_multiple + 1, np.int64)
        np.add.at(in_units, -(-np.arange(len(of_length)) // segment_multiple), of_length)
        of_length, max_length = in_units, max_length // segment_multiple
    lengths = np.arange(len(of_length), dtype=np.int64)
    documents = offsets_of(of_length)  # documents[s]: shorter than s
    tokens = offsets_of(of_length * lengths)
    half = max_length // 2
    a = np.arange(1, half + 1)
    alone = documents[-1] - documents[max_length - a + 1]
    above_half = documents[-1] - documents[half + 1]
    paired = above_half - alone
    paired_tokens = tokens[max_length - a + 1] - tokens[half + 1]
    middle_tokens = tokens[half + 1] - tokens[a]
    spill = middle_tokens - (paired * max_length - paired_tokens)
    l2 = above_half + np.maximum(0, -(-spill // max_length))
    by_volume = -(-int(tokens[-1]) // max_length)
    by_number = -(-int(of_length[1:].sum()) // max_segments) if max_segments else 0
    return max(by_volume, by_number, int(above_half), int(l2.max(initial=0)))
