"""`plan_packing`: rows planned from lengths alone, with overlong policies and metrics.

Costs about half as much again as `plan_rows` (see `benchmarks/`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from packer_cli._kernels import sorting
from packer_cli.config.row_rules import check_row_options
from packer_cli.config.strategies import canonical_name, keeps_order
from packer_cli.errors import DataError, UsageError
from packer_cli.packing.fitting import (
    MAX_DOCUMENT_TOKENS,
    OVERLONG_POLICIES,
    FittedPieces,
    Loss,
    cut_stream,
)
from packer_cli.packing.lower_bound import lower_bound_rows
from packer_cli.packing.planning import balanced, check_max_length, planned_rows, shuffled
from packer_cli.records import Int32, Int64, Pieces


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
    planned = planned_rows(
        pieces.length, max_length, name, seed or 0, max_segments_per_row, multiple
    )
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
