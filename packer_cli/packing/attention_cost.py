"""What attention costs in packed rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import mul

import numpy as np

from packer_cli.records import Int32, Int64


def squared_sums(lengths: Int32 | Int64, row_offsets: Int64) -> Int64:
    """int64[rows]: the sum of squared segment lengths of each row, which is what attention costs
    in it. Row r has the segments row_offsets[r]..row_offsets[r + 1].
    """
    sums = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(np.square(lengths, dtype=np.int64), out=sums[1:])
    of_rows: Int64 = np.diff(sums[row_offsets])
    return of_rows


@dataclass(frozen=True)
class AttentionCost:
    """Sums over rows of what attention costs in each, see `squared_sums`.

    Exact, so that those of units add up and those of a recount compare.
    """

    rows: int = 0
    total: int = 0
    squares: int = 0  # the sum of the rows' squared costs
    most: int = 0

    @classmethod
    def of(cls, lengths: Int32 | Int64, row_offsets: Int64) -> AttentionCost:
        """Of segments row after row: row r has those of row_offsets[r]..row_offsets[r + 1]."""
        costs = squared_sums(lengths, row_offsets).tolist()
        squares = sum(map(mul, costs, costs))  # beyond 64 bits for long rows
        return cls(len(costs), sum(costs), squares, max(costs, default=0))

    def __add__(self, other: AttentionCost) -> AttentionCost:
        return AttentionCost(
            self.rows + other.rows,
            self.total + other.total,
            self.squares + other.squares,
            max(self.most, other.most),
        )

    def as_json(self) -> dict[str, int]:
        return {
            "rows": self.rows,
            "sum": self.total,
            "sum_of_squares": self.squares,
            "max": self.most,
        }


def spread(rows: int, total: int, squares: int, most: int) -> dict[str, float]:
    """Of the sums of `AttentionCost`: coefficient of variation, and max / mean."""
    variance = max(rows * squares - total * total, 0)
    return {"cv": math.sqrt(variance) / total, "max_over_mean": most * rows / total}
