"""Planning: which document goes to which row, from lengths alone.

A `Planner` allocates and calls a kernel; `benchmarks/plan_speed.py` says what it costs. `plan.py`
has the public form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from packer_cli._kernels import best_fit, one_by_one, plans
from packer_cli.errors import UsageError
from packer_cli.options.options import MAX_LENGTH_LIMIT, takes_input_order
from packer_cli.packing.fitting import padded
from packer_cli.records import Int32, Int64

HARMONIC_CLASSES = 12
_MAX_DOCUMENTS = (1 << 31) - 1  # kernels number documents and rows with int32


class Planned(NamedTuple):
    """Rows of n pieces: row r holds order[row_offsets[r]:row_offsets[r + 1]].

    order        int64[n]
    row_offsets  int64[rows + 1]
    row_tokens   int32[rows], where the strategy knows them
    counts       int32[max_length + 1], counts[s] pieces have length s, where it knows that
    """

    order: Int64
    row_offsets: Int64
    row_tokens: Int32 | None = None
    counts: Int32 | None = None


# of lengths, max_length, and how many segments close a row; 0: any number
_Plan = Callable[[Int32, int, int], Planned]


def _best_fit(kernel: Callable[..., int]) -> _Plan:
    def plan(lengths: Int32, max_length: int, most: int) -> Planned:
        order, row_offsets = np.empty(len(lengths), np.int64), np.empty(len(lengths) + 1, np.int64)
        row_tokens, counts = np.empty(len(lengths), np.int32), np.zeros(max_length + 1, np.int32)
        rows = kernel(lengths, max_length, order, row_offsets, row_tokens, counts, most)
        return Planned(order, row_offsets[: rows + 1], row_tokens[:rows], counts)

    return plan


_decreasing = _best_fit(best_fit.best_fit_decreasing)
_mixed = _best_fit(best_fit.mixed_best_fit)


def _mixed_if_full(lengths: Int32, max_length: int, most: int) -> Planned:
    """Mixed rows, unless best-fit decreasing needs over 0.3% and one row fewer: lengths that fill
    rows in a few ways only leave mixed ones emptier.
    """

    def nearly(rows: int) -> int:
        return rows + 1 + rows * 3 // 1000

    mixed = _mixed(lengths, max_length, most)
    rows = len(mixed.row_offsets) - 1
    if rows <= nearly(-(-int(lengths.sum(dtype=np.int64)) // max_length)):
        return mixed
    exact = _decreasing(lengths, max_length, most)
    return mixed if rows <= nearly(len(exact.row_offsets) - 1) else exact


def _in_order(decide: Callable[..., int], *more: int, longest_first: bool = False) -> _Plan:
    """Plan with a kernel of `one_by_one`, which takes lengths, max_length and `more`."""

    def plan(lengths: Int32, max_length: int, most: int) -> Planned:
        visit = _longest_first(lengths, max_length) if longest_first else None
        row_of = np.empty(len(lengths), np.int32)
        seen = lengths if visit is None else lengths[visit]
        return _by_row(row_of, visit, decide(seen, max_length, *more, row_of, most))

    return plan


def _mffd(lengths: Int32, max_length: int, most: int) -> Planned:
    visit, row_of = np.empty(len(lengths), np.int64), np.empty(len(lengths), np.int32)
    longest_first = _longest_first(lengths, max_length)
    placed, rows = one_by_one.mffd_large_rows(lengths, max_length, longest_first, visit, row_of)
    rest = row_of[placed:]
    rest_rows = one_by_one.first_fit(lengths[visit[placed:]], max_length, rest)
    rest += rows
    return _by_row(row_of, visit, rows + rest_rows)


def _longest_first(lengths: Int32, max_length: int) -> Int64:
    visit = np.empty(len(lengths), np.int64)
    plans.longest_first(lengths, max_length, visit)
    return visit


def _by_row(row_of: Int32, visit: Int64 | None, rows: int) -> Planned:
    """A plan of the rows that documents got in the order `visit`."""
    order, row_offsets = np.empty(len(row_of), np.int64), np.empty(rows + 1, np.int64)
    plans.group_by_row(row_of, visit, rows, order, row_offsets)
    return Planned(order, row_offsets)


# "wrap" is next fit over pieces that `fitting.cut_stream` cut at the rows' edges.
_PLANNERS: dict[str, _Plan] = {
    "best-fit": _mixed_if_full,
    "best-fit-decreasing": _decreasing,
    "first-fit": _in_order(one_by_one.first_fit, longest_first=True),
    "online-best-fit": _in_order(one_by_one.best_fit),
    "online-first-fit": _in_order(one_by_one.first_fit),
    "worst-fit": _in_order(one_by_one.worst_fit),
    "first-fit-shuffle": _in_order(one_by_one.first_fit),
    "next-fit": _in_order(one_by_one.next_fit),
    "harmonic": _in_order(one_by_one.harmonic, HARMONIC_CLASSES),
    "mffd": _mffd,
    "wrap": _in_order(one_by_one.next_fit),
}


@dataclass(frozen=True)
class Planner:
    """How rows are planned.

    max_length        tokens in a row
    strategy          canonical name
    max_segments      close a row; None: any number
    segment_multiple  each piece takes its length rounded up to a multiple of this, which divides
                      max_length
    """

    max_length: int
    strategy: str
    max_segments: int | None = None
    segment_multiple: int = 1

    def rows(self, lengths: Int32, seed: int) -> Planned:
        """The rows of pieces that all fit: lengths int32[n], each in 1..max_length.

        Strategies that do not take pieces in the order given take them in one that depends on
        `seed`, so that those of equal lengths come from everywhere.
        """
        if len(lengths) == 0:
            return Planned(np.empty(0, np.int64), np.zeros(1, np.int64))
        if len(lengths) > _MAX_DOCUMENTS:
            raise UsageError(
                f"{len(lengths)} documents are more than a plan can hold, {_MAX_DOCUMENTS}"
            )
        visit = None
        if not takes_input_order(self.strategy):
            visit = np.empty(len(lengths), np.int64)
            plans.permutation(visit, seed)
            lengths = lengths[visit]
        max_length, multiple = self.max_length, self.segment_multiple
        if multiple > 1:  # everything in units: the strategies need not know
            lengths, max_length = padded(lengths, multiple) // multiple, max_length // multiple
        planned = _PLANNERS[self.strategy](lengths, max_length, self.max_segments or 0)
        if multiple > 1:
            planned = Planned(planned.order, planned.row_offsets)
        return planned if visit is None else planned._replace(order=visit[planned.order])

    def balanced(self, lengths: Int32, order: Int64, row_offsets: Int64) -> tuple[Int64, Int64]:
        """A plan of the same rows, each as full as it was, with a more even attention cost.

        Segments that were exchanged come first in their rows.
        """
        moved, new_row_offsets = np.empty_like(order), np.empty_like(row_offsets)
        plans.balance_rows(
            lengths[order], row_offsets, self.max_length, self.segment_multiple,
            self.max_segments or 0, moved, new_row_offsets,
        )  # fmt: skip
        return order[moved], new_row_offsets


def shuffled(order: Int64, row_offsets: Int64, seed: int) -> tuple[Int64, Int64]:
    """Put rows into another order, and the pieces in each: most strategies begin with the longest
    pieces otherwise.
    """
    new_order, new_row_offsets = np.empty_like(order), np.empty_like(row_offsets)
    plans.shuffle_plan(order, row_offsets, len(row_offsets) - 1, seed, new_order, new_row_offsets)
    return new_order, new_row_offsets


def check_max_length(max_length: int) -> None:
    """UsageError for a length that no row can have."""
    if not 1 <= max_length <= MAX_LENGTH_LIMIT:
        raise UsageError(f"max_length: {max_length} is not between 1 and {MAX_LENGTH_LIMIT}")
