"""Planning: which document goes to which row, from lengths alone.

`plan_rows` validates, allocates and calls a kernel; `plan_packing` is the public form with
overlong policies and metrics. Costs about 5 ns a document for best-fit, and half as much again with
all that the public form adds (see `benchmarks/`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from packer_cli._kernels import balancing, best_fit, mffd, one_by_one, sorting
from packer_cli.config.row_rules import MAX_LENGTH_LIMIT, check_row_options
from packer_cli.config.strategies import canonical_name, keeps_order
from packer_cli.errors import DataError, UsageError
from packer_cli.packing.fitting import (
    MAX_DOCUMENT_TOKENS,
    OVERLONG_POLICIES,
    FittedPieces,
    Loss,
    cut_stream,
    padded,
)
from packer_cli.packing.lower_bound import lower_bound_rows
from packer_cli.records import Int32, Int64, Pieces

HARMONIC_CLASSES = 12
_MAX_DOCUMENTS = (1 << 31) - 1  # kernels number documents and rows with int32


class _Planned(NamedTuple):
    """order and row_offsets as `plan_rows` gives them, and what best-fit knows of them.

    row_tokens  int32[rows]
    counts      int32[max_length + 1], counts[s] documents have length s
    """

    order: Int64
    row_offsets: Int64
    row_tokens: Int32 | None = None
    counts: Int32 | None = None


_Decide = Callable[[Int32, int, Int32, int], int]
_Plan = Callable[[Int32, int, int, int], _Planned]


def _by_decisions(
    decide: _Decide, lengths: Int32, max_length: int, visit: Int64 | None, most: int
) -> _Planned:
    """Plan with a kernel of `one_by_one`, visiting documents in the order `visit`.

    `most` segments close a row; 0: any number.
    """
    row_of = np.empty(len(lengths), np.int32)
    seen = lengths if visit is None else lengths[visit]
    rows = decide(seen, max_length, row_of, most)
    order, row_offsets = np.empty(len(lengths), np.int64), np.empty(rows + 1, np.int64)
    sorting.group_by_row(row_of, visit, rows, order, row_offsets)
    return _Planned(order, row_offsets)


def _longest_first(lengths: Int32, max_length: int) -> Int64:
    visit = np.empty(len(lengths), np.int64)
    sorting.longest_first(lengths, max_length, visit)
    return visit


def _best_fit(lengths: Int32, max_length: int, seed: int, most: int) -> _Planned:
    order, row_offsets = np.empty(len(lengths), np.int64), np.empty(len(lengths) + 1, np.int64)
    row_tokens, counts = np.empty(len(lengths), np.int32), np.zeros(max_length + 1, np.int32)
    rows = best_fit.best_fit_decreasing(
        lengths, max_length, order, row_offsets, row_tokens, counts, most
    )
    return _Planned(order, row_offsets[: rows + 1], row_tokens[:rows], counts)


def _first_fit(lengths: Int32, max_length: int, seed: int, most: int) -> _Planned:
    visit = _longest_first(lengths, max_length)
    return _by_decisions(one_by_one.first_fit, lengths, max_length, visit, most)


def _first_fit_shuffle(lengths: Int32, max_length: int, seed: int, most: int) -> _Planned:
    visit = np.empty(len(lengths), np.int64)
    sorting.permutation(visit, seed)
    return _by_decisions(one_by_one.first_fit, lengths, max_length, visit, most)


def _mffd(lengths: Int32, max_length: int, seed: int, most: int) -> _Planned:
    visit, row_of = np.empty(len(lengths), np.int64), np.empty(len(lengths), np.int32)
    longest_first = _longest_first(lengths, max_length)
    placed, rows = mffd.mffd_large_rows(lengths, max_length, longest_first, visit, row_of)
    rest = row_of[placed:]
    rest_rows = one_by_one.first_fit(lengths[visit[placed:]], max_length, rest)
    rest += rows
    order, row_offsets = np.empty(len(lengths), np.int64), np.empty(rows + rest_rows + 1, np.int64)
    sorting.group_by_row(row_of, visit, rows + rest_rows, order, row_offsets)
    return _Planned(order, row_offsets)


def _harmonic(lengths: Int32, capacity: int, row_of: Int32, most: int) -> int:
    rows: int = one_by_one.harmonic(lengths, capacity, HARMONIC_CLASSES, row_of, most)
    return rows


def _in_order(decide: _Decide) -> _Plan:
    def plan(lengths: Int32, max_length: int, seed: int, most: int) -> _Planned:
        return _by_decisions(decide, lengths, max_length, None, most)

    return plan


# "wrap" is next fit over pieces that `fitting.cut_stream` cut at the rows' edges.
_PLANNERS: dict[str, _Plan] = {
    "best-fit": _best_fit,
    "first-fit": _first_fit,
    "online-best-fit": _in_order(one_by_one.best_fit),
    "online-first-fit": _in_order(one_by_one.first_fit),
    "worst-fit": _in_order(one_by_one.worst_fit),
    "first-fit-shuffle": _first_fit_shuffle,
    "next-fit": _in_order(one_by_one.next_fit),
    "harmonic": _in_order(_harmonic),
    "mffd": _mffd,
    "wrap": _in_order(one_by_one.next_fit),
}


def plan_rows(
    lengths: Int32,
    max_length: int,
    strategy: str,
    seed: int,
    shuffle: bool,
    *,
    max_segments: int | None = None,
    segment_multiple: int = 1,
) -> tuple[Int64, Int64]:
    """Plan pieces that all fit.

    lengths int32[n], each in 1..max_length; `strategy` a canonical name; a row is closed by
    `max_segments` pieces; each piece takes its length rounded up to a `segment_multiple`,
    which divides max_length. Returns
    (order int64[n], row_offsets int64[rows + 1]): row r holds the pieces
    order[row_offsets[r]:row_offsets[r + 1]]. With `shuffle`, rows and the pieces within a
    row are permuted by `seed`: decreasing strategies come out longest first otherwise.
    """
    planned = _planned(lengths, max_length, strategy, seed, max_segments, segment_multiple)
    return shuffled(*planned[:2], seed) if shuffle else planned[:2]


def _planned(
    lengths: Int32, max_length: int, strategy: str, seed: int, most: int | None, multiple: int
) -> _Planned:
    if len(lengths) == 0:
        return _Planned(np.empty(0, np.int64), np.zeros(1, np.int64))
    if len(lengths) > _MAX_DOCUMENTS:
        raise UsageError(
            f"{len(lengths)} documents are more than a plan can hold, {_MAX_DOCUMENTS}"
        )
    if multiple == 1:
        return _PLANNERS[strategy](lengths, max_length, seed, most or 0)
    # everything in units: the strategies need not know
    units = padded(lengths, multiple) // multiple
    planned = _PLANNERS[strategy](units, max_length // multiple, seed, most or 0)
    return _Planned(planned.order, planned.row_offsets)


def shuffled(order: Int64, row_offsets: Int64, seed: int) -> tuple[Int64, Int64]:
    """The same rows in another order, and the pieces in each."""
    new_order, new_row_offsets = np.empty_like(order), np.empty_like(row_offsets)
    sorting.shuffle_plan(order, row_offsets, len(row_offsets) - 1, seed, new_order, new_row_offsets)
    return new_order, new_row_offsets


def balanced(
    lengths: Int32,
    order: Int64,
    row_offsets: Int64,
    max_length: int,
    *,
    max_segments: int | None = None,
    segment_multiple: int = 1,
) -> tuple[Int64, Int64]:
    """A plan of the same rows, each as full as it was, with a more even attention cost.

    Segments that were exchanged come first in their rows. Arguments as in `plan_rows`.
    """
    moved, new_row_offsets = np.empty_like(order), np.empty_like(row_offsets)
    balancing.balance_rows(
        lengths[order], row_offsets, max_length, segment_multiple, max_segments or 0,
        moved, new_row_offsets,
    )  # fmt: skip
    return order[moved], new_row_offsets


@dataclass(frozen=True)
class PackMetrics:
    """Figures derived from a plan. Utilizations are shares of a row, 0..1."""

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
    """Which document goes to which row.

    max_length   tokens in a row
    strategy     canonical name
    pieces       the documents, or parts of them, that rows hold (see `Pieces`; `begin` counts
                 in the concatenation of all documents)
    order        int64[pieces], piece numbers row after row
    row_offsets  int64[rows + 1], row r is order[row_offsets[r]:row_offsets[r + 1]]
    loss         what the overlong policy left out
    documents    how many lengths were planned, empty ones included
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
    _known_row_tokens: Int32 | None = field(
        default=None, repr=False
    )  # where the strategy knows them
    _known_counts: Int32 | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.row_offsets) - 1

    def rows(self) -> list[list[int]]:
        """Document numbers, one list per row; a document that was cut appears once per piece."""
        flat = self.pieces.document[self.order].tolist()
        edges = self.row_offsets.tolist()
        return [flat[a:b] for a, b in pairwise(edges)]

    @cached_property
    def row_tokens(self) -> Int64:
        """int64[rows], real tokens in each row."""
        return self._row_tokens.astype(np.int64)

    @cached_property
    def _row_tokens(self) -> Int32:
        if self._known_row_tokens is not None:
            return self._known_row_tokens
        tokens = np.empty(len(self), np.int32)
        sorting.sum_rows(self.pieces.length, self.order, self.row_offsets, tokens)
        return tokens

    @cached_property
    def _length_counts(self) -> Int32 | Int64:
        """[max_length + 1], how many pieces have each length."""
        if self._known_counts is not None:
            return self._known_counts
        counts: Int64 = np.bincount(self.pieces.length, minlength=self.max_length + 1)
        return counts

    @cached_property
    def metrics(self) -> PackMetrics:
        rows, tokens = len(self), int(self._row_tokens.sum(dtype=np.int64))
        share = self._row_tokens / self.max_length if rows else np.zeros(1)
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
                self._length_counts,
                self.max_length,
                max_segments=self.max_segments_per_row,
                segment_multiple=self.segment_multiple,
            ),
            truncated_tokens=self.loss.truncated_tokens,
            dropped_documents=self.loss.dropped_documents,
            dropped_tokens=self.loss.dropped_tokens,
        )


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
    strategy   see `packer_cli.config.strategies`; short aliases such as "bfd" are accepted
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
    0..2**63-1, or options that do not go together, and DataError for a negative or (under
    "error") overlong length, or one of 2**31 and more, naming the first.
    """
    name = canonical_name(strategy)
    check_max_length(max_length)
    if seed is not None and not 0 <= seed < 1 << 63:
        raise UsageError(f"seed: {seed} is not between 0 and 2**63 - 1")
    if overlong not in OVERLONG_POLICIES:
        raise UsageError(f"overlong: {overlong!r} is not one of {', '.join(OVERLONG_POLICIES)}")
    check_row_options(name, max_length, max_segments_per_row, segment_multiple, balance, str)
    checked, longest = _checked(lengths)
    multiple = segment_multiple
    if overlong == "error" and name != "wrap" and longest > max_length:
        raise _overlong(checked, max_length)
    pieces, loss = _fitted(checked, max_length, name, overlong, multiple)
    planned = _planned(pieces.length, max_length, name, seed or 0, max_segments_per_row, multiple)
    order, row_offsets, row_tokens, counts = planned
    shuffle = seed is not None and not keeps_order(name)
    if shuffle:
        order, row_offsets = shuffled(order, row_offsets, seed or 0)
    if balance == "attention":
        order, row_offsets = balanced(
            pieces.length, order, row_offsets, max_length,
            max_segments=max_segments_per_row, segment_multiple=multiple,
        )  # fmt: skip
        if shuffle:
            order, row_offsets = shuffled(order, row_offsets, seed or 0)
    if shuffle or balance != "none":
        row_tokens = None  # they were of other rows
    return PackPlan(
        max_length, name, pieces, order, row_offsets, loss, len(checked), max_segments_per_row,
        multiple, row_tokens, counts,
    )  # fmt: skip


def _fitted(
    lengths: Int32 | Int64, max_length: int, strategy: str, overlong: str, multiple: int
) -> tuple[Pieces, Loss]:
    """Under "error" nothing is overlong."""
    if strategy == "wrap":
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return cut_stream(offsets, max_length, 0, multiple), Loss()
    pieces = FittedPieces(lengths, max_length, overlong)
    return pieces, pieces.loss


def _overlong(lengths: Int32 | Int64, max_length: int) -> DataError:
    """Names the first document that is longer than a row."""
    document = int((lengths > max_length).argmax())
    return DataError(
        f"document {document} has {lengths[document]} tokens, max_length is {max_length}",
        'choose overlong="split", "truncate" or "drop", or a larger max_length',
    )


def check_max_length(max_length: int) -> None:
    """UsageError for a length that no row can have."""
    if not 1 <= max_length <= MAX_LENGTH_LIMIT:
        raise UsageError(f"max_length: {max_length} is not between 1 and {MAX_LENGTH_LIMIT}")


def _checked(lengths: Sequence[int] | npt.NDArray[np.integer]) -> tuple[Int32 | Int64, int]:
    """The lengths as int32 or int64, not copied where they are that already, and the longest."""
    array = np.asarray(lengths)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UsageError(
            f"lengths: expected a flat sequence of integers, got shape {array.shape}, {array.dtype}"
        )
    shortest, longest = (int(array.min()), int(array.max())) if len(array) else (0, 0)
    if shortest < 0:
        first = int((array < 0).argmax())
        raise DataError(f"document {first} has the negative length {array[first]}")
    if longest > MAX_DOCUMENT_TOKENS:
        first = int((array > MAX_DOCUMENT_TOKENS).argmax())
        raise DataError(
            f"document {first} has {array[first]} tokens, the most is {MAX_DOCUMENT_TOKENS}"
        )
    kind = np.int64 if array.dtype.itemsize == 8 else np.int32
    return np.ascontiguousarray(array, kind), longest
