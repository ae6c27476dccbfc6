"""Plan which document goes to which row, from lengths alone.

    plan_packing    rows of documents, with overlong policies and metrics
    Planner         rows of pieces that all fit: allocates, and calls a strategy's kernel
    StreamPacker    lengths one at a time, every row as soon as it is closed

`benchmarks/plan_speed.py` measures a `Planner`; `plan_packing` takes about half as long again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from packer_cli._kernels import best_fit, one_by_one, plans
from packer_cli.errors import DataError, UsageError, one_of
from packer_cli.options.option import plain_int
from packer_cli.options.options import (
    STRATEGIES,
    checked_row_options,
    checked_values,
    keeps_order,
)
from packer_cli.packing.figures import lower_bound_rows
from packer_cli.packing.fitting import (
    MAX_DOCUMENT_TOKENS,
    OVERLONG_POLICIES,
    FittedPieces,
    Loss,
    cut_stream,
    padded,
)
from packer_cli.records import Int32, Int64, Pieces, offsets_of

HARMONIC_CLASSES = 12
_MAX_DOCUMENTS = (1 << 31) - 1  # kernels number documents and rows with int32


@dataclass(frozen=True)
class PackMetrics:
    """Figures of a plan. Utilizations are shares of a row, 0..1."""

    rows: int
    documents: int
    segments: int
    tokens: int
    padding_tokens: int
    utilization: float
    row_utilization_min: float
    row_utilization_mean: float
    row_utilization_max: float
    row_utilization_std: float
    segments_per_row_mean: float
    lower_bound_rows: int
    truncated_tokens: int
    dropped_documents: int
    dropped_tokens: int


@dataclass(frozen=True)
class PackPlan:
    """A plan: which document goes to which row.

    max_length   tokens in a row
    strategy     canonical name
    pieces       the documents, or parts of them, that rows hold (see `Pieces`; `begin` counts
                 in the concatenation of all documents)
    order        int64[pieces], piece numbers row after row
    row_offsets  int64[rows + 1], row r is order[row_offsets[r]:row_offsets[r + 1]]
    loss         documents and tokens that the overlong policy left out
    documents    number of planned lengths, empty ones included
    max_segments_per_row, segment_multiple   as in `plan_packing`
    """

    max_length: int
    strategy: str
    pieces: Pieces
    order: Int64
    row_offsets: Int64
    loss: Loss
    documents: int
    max_segments_per_row: int | None = None
    segment_multiple: int = 1
    # where the strategy knows them
    _known_row_tokens: Int32 | None = field(default=None, repr=False)
    _known_counts: Int32 | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.row_offsets) - 1

    def rows(self) -> list[list[int]]:
        """Return document numbers, one list per row; a cut document appears once per piece."""
        flat = self.pieces.document[self.order].tolist()
        return [flat[a:b] for a, b in pairwise(self.row_offsets.tolist())]

    @cached_property
    def row_tokens(self) -> Int64:
        """Tokens in each row without padding, int64[rows]."""
        tokens = self._known_row_tokens
        if tokens is None:
            tokens = np.empty(len(self), np.int32)
            plans.sum_rows(self.pieces.length, self.order, self.row_offsets, tokens)
        return tokens.astype(np.int64)

    @cached_property
    def metrics(self) -> PackMetrics:
        """Figures of the plan, counted when they are first used."""
        rows, tokens = len(self), int(self.row_tokens.sum())
        share = self.row_tokens / self.max_length if rows else np.zeros(1)
        counts: Int32 | Int64 | None = self._known_counts
        if counts is None:
            counts = np.bincount(self.pieces.length, minlength=self.max_length + 1)
        return PackMetrics(
            rows=rows,
            documents=self.documents,
            segments=len(self.order),
            tokens=tokens,
            padding_tokens=rows * self.max_length - tokens,
            utilization=tokens / (rows * self.max_length) if rows else 0.0,
            row_utilization_min=float(share.min()),
            row_utilization_mean=float(share.mean()),
            row_utilization_max=float(share.max()),
            row_utilization_std=float(share.std()),
            segments_per_row_mean=len(self.order) / rows if rows else 0.0,
            lower_bound_rows=lower_bound_rows(
                counts, self.max_length, max_segments=self.max_segments_per_row,
                segment_multiple=self.segment_multiple,
            ),
            truncated_tokens=self.loss.truncated_tokens,
            dropped_documents=self.loss.dropped_documents,
            dropped_tokens=self.loss.dropped_tokens,
        )  # fmt: skip


def plan_packing(
    lengths: Sequence[int] | npt.NDArray[np.integer],
    max_length: int,
    *,
    strategy: str = "best-fit",
    seed: int | None = None,
    overlong: str = "error",
    max_segments_per_row: int | None = None,
    segment_multiple: int = 1,
    balance: str = "none",
) -> PackPlan:
    """Plan rows of `max_length` tokens for documents of the given lengths.

    lengths    n integers >= 0; an empty document is placed nowhere
    strategy   see `packer_cli.options.options`; short aliases such as "bfd" are accepted
    seed       None: rows as the strategy makes them. A number shuffles the rows, and the
               documents in each row, reproducibly; strategies that keep the order ignore it.
    overlong   for lengths above max_length: "error", "split", "truncate" or "drop".
               "wrap" cuts documents anywhere and has no overlong ones.
    max_segments_per_row   closes a row; None: any number. Not for "wrap" and "mffd"
    segment_multiple       each segment takes its length rounded up to a multiple of this
    balance                "attention": exchange pieces between rows, each as full as before,
                           until the sums of squared lengths are about even. Not for
                           "next-fit", "wrap" and "harmonic"

    Raises UsageError for an unknown name, a max_length outside 1..2**24 or a seed outside
    0..2**63-1, values of another type, or options that do not go together, and DataError for a
    negative or (under "error") overlong length, or one of 2**31 and more, naming the first.
    """
    options = checked_row_options(
        strategy=strategy, max_length=max_length, max_segments_per_row=max_segments_per_row,
        segment_multiple=segment_multiple, balance=balance,
    )  # fmt: skip
    name, max_length, segment_multiple = (
        options.strategy, options.max_length, options.segment_multiple,
    )  # fmt: skip
    max_segments_per_row = options.max_segments_per_row
    seed = None if seed is None else plain_int("seed", seed)
    if seed is not None and not 0 <= seed < 1 << 63:
        raise UsageError(f"seed: {seed} is not between 0 and 2**63 - 1")
    if overlong not in OVERLONG_POLICIES:
        raise UsageError(f"overlong: {overlong!r} is not one of {', '.join(OVERLONG_POLICIES)}")
    checked = _checked(lengths)
    pieces, loss = _fitted(checked, max_length, name, overlong, segment_multiple)
    planner = Planner(max_length, name, max_segments_per_row, segment_multiple)
    order, row_offsets, row_tokens, counts = planner.rows(pieces.length, seed or 0)
    shuffle = None if keeps_order(name) else seed
    if shuffle is not None:
        order, row_offsets = shuffled(order, row_offsets, shuffle)
    if balance == "attention":
        order, row_offsets = planner.balanced(pieces.length, order, row_offsets)
        if shuffle is not None:
            order, row_offsets = shuffled(order, row_offsets, shuffle)
    as_planned = shuffle is None and balance == "none"
    return PackPlan(
        max_length, name, pieces, order, row_offsets, loss, len(checked), max_segments_per_row,
        segment_multiple, row_tokens if as_planned else None, counts,
    )  # fmt: skip


def _checked(lengths: Sequence[int] | npt.NDArray[np.integer]) -> Int32 | Int64:
    """Return the lengths as int32 or int64, without a copy if they are. Raises DataError."""
    array = np.asarray(lengths)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UsageError(
            f"lengths: expected a flat sequence of integers, got shape {array.shape}, {array.dtype}"
        )
    if array.min(initial=0) < 0:
        first = int((array < 0).argmax())
        raise DataError(f"document {first} has the negative length {array[first]}")
    if array.max(initial=0) > MAX_DOCUMENT_TOKENS:
        first = int((array > MAX_DOCUMENT_TOKENS).argmax())
        raise DataError(
            f"document {first} has {array[first]} tokens, the most is {MAX_DOCUMENT_TOKENS}"
        )
    return np.ascontiguousarray(array, np.int64 if array.dtype.itemsize == 8 else np.int32)


def _fitted(
    lengths: Int32 | Int64, max_length: int, strategy: str, overlong: str, multiple: int
) -> tuple[Pieces, Loss]:
    """Return the pieces that rows hold, and what is left out. Raises DataError under "error"."""
    if strategy == "wrap":
        return cut_stream(offsets_of(lengths), max_length, 0, multiple), Loss()
    if overlong == "error" and lengths.max(initial=0) > max_length:
        document = int((lengths > max_length).argmax())
        raise DataError(
            f"document {document} has {lengths[document]} tokens, max_length is {max_length}",
            'choose overlong="split", "truncate" or "drop", or a larger max_length',
        )
    pieces = FittedPieces(lengths, max_length, overlong)
    return pieces, pieces.loss


# The strategies


class RowOrder(NamedTuple):
    """Rows of n pieces: row r holds order[row_offsets[r]:row_offsets[r + 1]].

    order        int64[n]
    row_offsets  int64[rows + 1]
    row_tokens   int32[rows]; None if the strategy does not count them
    counts       int32[max_length + 1], counts[s] pieces have length s; None likewise
    """

    order: Int64
    row_offsets: Int64
    row_tokens: Int32 | None = None
    counts: Int32 | None = None


# from lengths, max_length, and the number of segments that closes a row; 0: any number
_Plan = Callable[[Int32, int, int], RowOrder]


def _best_fit(kernel: Callable[..., int]) -> _Plan:
    def plan(lengths: Int32, max_length: int, most: int) -> RowOrder:
        order, row_offsets = np.empty(len(lengths), np.int64), np.empty(len(lengths) + 1, np.int64)
        row_tokens, counts = np.empty(len(lengths), np.int32), np.zeros(max_length + 1, np.int32)
        rows = kernel(lengths, max_length, order, row_offsets, row_tokens, counts, most)
        return RowOrder(order, row_offsets[: rows + 1], row_tokens[:rows], counts)

    return plan


_decreasing = _best_fit(best_fit.best_fit_decreasing)
_mixed = _best_fit(best_fit.mixed_best_fit)


def _mixed_if_full(lengths: Int32, max_length: int, most: int) -> RowOrder:
    """Mix lengths in rows, unless best-fit decreasing needs over 0.3% and one row fewer, as with
    lengths that fill rows in only a few ways.
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

    def plan(lengths: Int32, max_length: int, most: int) -> RowOrder:
        visit = _longest_first(lengths, max_length) if longest_first else None
        row_of = np.empty(len(lengths), np.int32)
        seen = lengths if visit is None else lengths[visit]
        return _by_row(row_of, visit, decide(seen, max_length, *more, row_of, most))

    return plan


def _mffd(lengths: Int32, max_length: int, most: int) -> RowOrder:
    visit, row_of = np.empty(len(lengths), np.int64), np.empty(len(lengths), np.int32)
    longest_first = _longest_first(lengths, max_length)
    placed, rows = one_by_one.mffd_large_rows(lengths, max_length, longest_first, visit, row_of)
    rows_of_others = row_of[placed:]
    more_rows = one_by_one.first_fit(lengths[visit[placed:]], max_length, rows_of_others)
    rows_of_others += rows
    return _by_row(row_of, visit, rows + more_rows)


def _longest_first(lengths: Int32, max_length: int) -> Int64:
    visit = np.empty(len(lengths), np.int64)
    plans.longest_first(lengths, max_length, visit)
    return visit


def _by_row(row_of: Int32, visit: Int64 | None, rows: int) -> RowOrder:
    """Return rows from the row of each document, in the order `visit`."""
    order, row_offsets = np.empty(len(row_of), np.int64), np.empty(rows + 1, np.int64)
    plans.group_by_row(row_of, visit, rows, order, row_offsets)
    return RowOrder(order, row_offsets)


_PLANNERS: dict[str, _Plan] = {
    "best-fit": _mixed_if_full,
    "best-fit-decreasing": _decreasing,
    "harmonic": _in_order(one_by_one.harmonic, HARMONIC_CLASSES),
    "mffd": _mffd,
} | {
    name: _in_order(
        getattr(one_by_one, strategy.kernel), longest_first=strategy.order == "longest first"
    )
    for name, strategy in STRATEGIES.items()
    if strategy.kernel
}


@dataclass(frozen=True)
class Planner:
    """A strategy with its options.

    max_length        tokens in a row
    strategy          canonical name
    max_segments      segments that close a row; None: any number
    segment_multiple  each piece takes its length rounded up to a multiple of this, which divides
                      max_length
    """

    max_length: int
    strategy: str
    max_segments: int | None = None
    segment_multiple: int = 1

    def rows(self, lengths: Int32, seed: int) -> RowOrder:
        """Plan rows of pieces that all fit: lengths int32[n], each in 1..max_length.

        Strategies that do not keep the order of pieces take them in an order that depends on
        `seed`, so that pieces of equal length come from everywhere.
        """
        if len(lengths) == 0:
            return RowOrder(np.empty(0, np.int64), np.zeros(1, np.int64))
        if len(lengths) > _MAX_DOCUMENTS:
            raise UsageError(
                f"{len(lengths)} documents are more than a plan can hold, {_MAX_DOCUMENTS}"
            )
        visit = None
        if STRATEGIES[self.strategy].order != "input":
            visit = np.empty(len(lengths), np.int64)
            plans.permutation(visit, seed)
            lengths = lengths[visit]
        max_length, multiple = self.max_length, self.segment_multiple
        if multiple > 1:  # everything in units: the strategies need not know
            lengths, max_length = padded(lengths, multiple) // multiple, max_length // multiple
        planned = _PLANNERS[self.strategy](lengths, max_length, self.max_segments or 0)
        if multiple > 1:
            planned = RowOrder(planned.order, planned.row_offsets)
        return planned if visit is None else planned._replace(order=visit[planned.order])

    def balanced(self, lengths: Int32, order: Int64, row_offsets: Int64) -> tuple[Int64, Int64]:
        """Exchange pieces between rows until attention costs are more even; rows stay as full.

        Pieces that moved come first in their rows. Returns the new order and row_offsets.
        """
        moved, new_row_offsets = np.empty_like(order), np.empty_like(row_offsets)
        plans.balance_rows(
            lengths[order], row_offsets, self.max_length, self.segment_multiple,
            self.max_segments or 0, moved, new_row_offsets,
        )  # fmt: skip
        return order[moved], new_row_offsets


def shuffled(order: Int64, row_offsets: Int64, seed: int) -> tuple[Int64, Int64]:
    """Shuffle rows, and the pieces in each: most strategies put the longest pieces first."""
    new_order, new_row_offsets = np.empty_like(order), np.empty_like(row_offsets)
    plans.shuffle_plan(order, row_offsets, len(row_offsets) - 1, seed, new_order, new_row_offsets)
    return new_order, new_row_offsets


# Classes of lengths, each with an open row: next-fit is harmonic (Lee and Lee 1985) with one.
_CLASSES = {"next-fit": 1, "harmonic": HARMONIC_CLASSES}


class StreamPacker:
    """Makes the rows that `plan_packing` makes of the same lengths, in the order they close.

        packer = StreamPacker(4096)
        for document in documents:
            for row in packer.add(len(document)):
                ...  # a list of document numbers, counted from 0 in the order of `add`
        for row in packer.finish():
            ...

    max_length  tokens in a row
    strategy    "next-fit" or "harmonic", or an alias of these: the others have many open rows, and
                pack better a buffer at a time: `plan_packing`, or for the tokens
                `packer_cli.torch.PackingIterableDataset`
    documents   number of documents added, with empty ones, which are not in any row

    Raises UsageError for another strategy, a max_length outside 1..2**24, or documents after
    the end.
    """

    def __init__(self, max_length: int, strategy: str = "next-fit") -> None:
        options = checked_values(strategy=strategy, max_length=max_length)
        self.max_length, self.strategy, self.documents = options.max_length, options.strategy, 0
        name = self.strategy
        if name not in _CLASSES:
            raise one_of("strategy of a StreamPacker", strategy, _CLASSES)
        self._classes = _CLASSES[name]
        # class -> documents in its open row, and how many more tokens fit
        self._rows: dict[int, list[int]] = {}
        self._space: dict[int, int] = {}
        self._finished = False

    def add(self, length: int) -> list[list[int]]:
        """Place the next document, and return the rows that this closes, two at most.

        Raises DataError for a length outside 0..max_length: cut or leave out such a document;
        UsageError for a value that is not a whole number.
        """
        if self._finished:
            raise UsageError("add() after finish()", "make a new StreamPacker")
        length = plain_int("length", length)
        if not 0 <= length <= self.max_length:
            raise DataError(
                f"document {self.documents} has {length} tokens, max_length is {self.max_length}",
                "cut it or leave it out, or choose a larger max_length",
            )
        self.documents += 1
        if not length:
            return []
        # class j < classes: lengths in (max_length / (j + 1), max_length / j], exactly j to a row
        kind = min(self.max_length // length, self._classes)
        closed = self._close(kind) if length > self._space.get(kind, 0) else []
        row = self._rows.setdefault(kind, [])
        row.append(self.documents - 1)
        self._space[kind] = self._space.get(kind, self.max_length) - length
        if not self._space[kind] or len(row) == kind < self._classes:
            closed += self._close(kind)
        return closed

    def __repr__(self) -> str:
        return (
            f"StreamPacker(max_length={self.max_length}, strategy={self.strategy!r}, "
            f"documents={self.documents}, open_rows={len(self._rows)})"
        )

    def finish(self) -> list[list[int]]:
        """Return the rows that are still open, oldest first. No more documents can be added."""
        self._finished = True
        return sorted(row for kind in list(self._rows) for row in self._close(kind))

    def _close(self, kind: int) -> list[list[int]]:
        self._space.pop(kind, None)
        row = self._rows.pop(kind, None)
        return [row] if row else []
