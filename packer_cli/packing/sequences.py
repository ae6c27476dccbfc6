"""Pack token sequences in memory into padded rows in memory: `pack_sequences`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from packer_cli._kernels import filling
from packer_cli.errors import DataError, UsageError
from packer_cli.options.option import plain_int
from packer_cli.packing.labels import labels_of
from packer_cli.packing.plan import PackPlan, plan_packing
from packer_cli.records import HIGHEST_ID, IGNORED, Int64, UInt8, wrong_ids


@dataclass(frozen=True)
class PackedRows:
    """Rows of `max_length` tokens. Arrays are torch tensors when the sequences were.

    input_ids       int32[rows, max_length], padded with pad_token_id
    labels          int32[rows, max_length], unshifted: the token, or -100 on padding, on
                    untrained tokens and on each segment's first token
    attention_mask  uint8[rows, max_length], 1 real, 0 padding
    position_ids    int32[rows, max_length], restarting at 0 in every segment
    cu_seqlens      a list of int32 arrays, each row's boundaries [0, l0, ..., used]
    spans           (row, start, end) of each sequence's first piece, None for sequences that
                    were dropped or empty; `all_spans` has every piece
    plan            the plan behind the rows, with its metrics
    """

    input_ids: Any
    labels: Any
    attention_mask: Any
    position_ids: Any
    cu_seqlens: list[Any]
    spans: list[tuple[int, int, int] | None] | None
    plan: PackPlan

    def __len__(self) -> int:
        return len(self.plan)

    def all_spans(self) -> list[list[tuple[int, int, int]]]:
        """Return the (row, start, end) of all pieces of each sequence, in the sequence's order."""
        return _all_spans(self.plan)


def pack_sequences(
    sequences: Sequence[Any],
    max_length: int,
    *,
    pad_token_id: int = 0,
    strategy: str = "best-fit",
    seed: int | None = None,
    overlong: str = "error",
    labels: Sequence[Any] | None = None,
    eos_token_id: int | None = None,
    return_spans: bool = False,
) -> PackedRows:
    """Pack token sequences into rows of `max_length`.

    sequences        lists, 1-d integer arrays or 1-d torch tensors of ids in 0..2**31-1
    strategy, seed, overlong   as in `plan_packing`; "next-fit" keeps the order
    labels           per sequence, unshifted; -100 where not trained on, and else any id
    eos_token_id     appended to each sequence that does not end with it; trained on
    return_spans     also give each sequence's (row, start, end)

    Raises UsageError for unknown options and DataError, naming the sequence, for ids out of
    range, labels of another length, and (under "error") overlong sequences.
    """
    flat = _FlatSequences.of(sequences, labels)
    pad_token_id = _checked_token(pad_token_id, "pad")
    if eos_token_id is not None:
        flat = flat.ended(_checked_token(eos_token_id, "eos"))
    plan = plan_packing(flat.lengths, max_length, strategy=strategy, seed=seed, overlong=overlong)
    spans = [pieces[0] if pieces else None for pieces in _all_spans(plan)] if return_spans else None
    return _filled(plan, flat, pad_token_id, spans)


def fill_plan(
    plan: PackPlan,
    sequences: Sequence[Any],
    *,
    labels: Sequence[Any] | None = None,
    pad_token_id: int = 0,
) -> PackedRows:
    """Fill the rows of a plan that `plan_packing` made of the lengths of these sequences.

    Arguments and errors as in `pack_sequences`; also raises DataError if the plan is not of these
    lengths.
    """
    flat = _FlatSequences.of(sequences, labels)
    if plan.segment_multiple > 1:
        raise UsageError(
            f"a plan with a segment multiple of {plan.segment_multiple}: rows in memory have none",
            "plan without segment_multiple, or use packer pack --segment-multiple",
        )
    ends, pieces = np.cumsum(flat.lengths), plan.pieces
    # a last document that grew would otherwise be cut silently
    tokens = pieces.length.sum() + plan.loss.truncated_tokens + plan.loss.dropped_tokens
    if (
        plan.documents != len(ends)
        or tokens != len(flat.ids)
        or ((pieces.begin - pieces.start) != (ends - flat.lengths)[pieces.document]).any()
        or (pieces.begin + pieces.length > ends[pieces.document]).any()
    ):
        raise DataError(
            "the plan was made for other lengths than these sequences have", "plan them again"
        )
    return _filled(plan, flat, _checked_token(pad_token_id, "pad"), None)


@dataclass(frozen=True)
class _FlatSequences:
    """Sequences end to end.

    ids       int64[T]
    labels    int64[T]; None: every token is trained on
    lengths   int64[n]
    as_torch  they came as tensors
    """

    ids: Int64
    labels: Int64 | None
    lengths: Int64
    as_torch: bool

    @classmethod
    def of(cls, sequences: Sequence[Any], labels: Sequence[Any] | None) -> _FlatSequences:
        ids, lengths = _flat(sequences, "sequence")
        torch: Any = sys.modules.get("torch")
        as_torch = torch and len(sequences) > 0 and isinstance(sequences[0], torch.Tensor)
        _check_ids(ids, lengths, "sequence")
        flat_labels = None if labels is None else _flat_labels(labels, lengths)
        return cls(ids, flat_labels, lengths, bool(as_torch))

    def ended(self, token: int) -> _FlatSequences:
        """Put `token` at the end of the non-empty sequences that do not end with it."""
        ids, labels, ends, wanted = self.ids, self.labels, np.cumsum(self.lengths), self.lengths > 0
        if len(ids):
            wanted &= ids[np.maximum(ends - 1, 0)] != token
        places = ends[wanted]
        if labels is not None:
            labels = np.insert(labels, places, token)
        return replace(
            self, ids=np.insert(ids, places, token), labels=labels, lengths=self.lengths + wanted
        )


def _flat(sequences: Sequence[Any], name: str) -> tuple[Int64, Int64]:
    """Return the values int64[T] and lengths int64[n] of sequences; errors call them by `name`."""
    if isinstance(sequences, str) or not hasattr(sequences, "__iter__"):
        kind = type(sequences).__name__
        raise UsageError(
            f"expected a list of {name.rstrip('s')}s, got {kind}", "give a list, each of integers"
        )
    arrays: list[npt.NDArray[Any]] = []
    for i, sequence in enumerate(sequences):
        try:
            array = np.asarray(sequence)
        except (TypeError, ValueError, OverflowError) as error:
            raise DataError(f"{name} {i}: not a flat sequence of integers: {error}") from None
        if array.size == 0:
            array = np.empty(0, np.int64)
        if array.ndim != 1 or array.dtype.kind not in "iub":
            raise DataError(
                f"{name} {i}: expected a flat sequence of integers, "
                f"got shape {array.shape}, {array.dtype}"
            )
        if array.dtype == np.uint64 and (array > HIGHEST_ID).any():
            raise DataError(f"{name} {i}: {array.max()} is not in 0..{HIGHEST_ID}")
        arrays.append(array.astype(np.int64, copy=False))
    lengths = np.array([len(array) for array in arrays], np.int64)
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64), lengths


def _flat_labels(labels: Sequence[Any], lengths: Int64) -> Int64:
    flat, counts = _flat(labels, "labels")
    if len(counts) != len(lengths):
        raise DataError(f"labels: {len(counts)} given for {len(lengths)} sequences")
    if (wrong := counts != lengths).any():
        i = int(wrong.argmax())
        raise DataError(f"labels {i}: has {counts[i]} values, the sequence {lengths[i]} tokens")
    _check_ids(np.where(flat == IGNORED, 0, flat), lengths, "labels")
    return flat


def _checked_token(token: int, name: str) -> int:
    if not 0 <= (plain := plain_int(f"{name}_token_id", token)) <= HIGHEST_ID:
        raise UsageError(f"the {name} id {plain} is not in 0..{HIGHEST_ID}")
    return plain


def _check_ids(ids: Int64, lengths: Int64, name: str) -> None:
    wrong = np.flatnonzero(wrong_ids(ids))
    if len(wrong):
        at = int(wrong[0])
        sequence = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
        raise DataError(f"{name} {sequence}: {ids[at]} is not in 0..{HIGHEST_ID}")


def _filled(plan: PackPlan, flat: _FlatSequences, pad: int, spans: Any) -> PackedRows:
    """Fill the rows of a plan of these sequences."""
    shape, row_count = (len(plan), plan.max_length), len(plan)
    ids, labels, positions = (np.empty(shape, np.int32) for _ in range(3))
    mask: UInt8 = np.empty(shape, np.uint8)
    boundaries = np.empty(len(plan.order) + row_count, np.int32)
    edges = np.empty(row_count + 1, np.int32)

    def fill(values: Int64, pad: int, *out: Any) -> None:
        filling.fill_rows(
            values.astype(np.int32).view(np.uint32), None, plan.pieces.begin, plan.pieces.length,
            plan.order, plan.row_offsets, plan.max_length, pad, *out, boundaries, edges,
        )  # fmt: skip

    fill(flat.ids, pad, ids, labels, mask, positions)
    if flat.labels is not None:  # by the same fill, as if they were the ids
        fill(flat.labels, IGNORED, labels, None, None, None)
        begins = np.flatnonzero(positions == 0)  # of segments, and of padding, which has no label
        labels[:] = labels_of(labels.reshape(-1), None, begins).reshape(shape)

    def wrapped(array: Any) -> Any:
        return sys.modules["torch"].from_numpy(array) if flat.as_torch else array

    cu_seqlens: list[Any] = np.split(boundaries, edges[1:-1]) if row_count else []
    return PackedRows(
        wrapped(ids),
        wrapped(labels),
        wrapped(mask),
        wrapped(positions),
        [wrapped(row) for row in cu_seqlens],
        spans,
        plan,
    )


def _all_spans(plan: PackPlan) -> list[list[tuple[int, int, int]]]:
    """Return the (row, start, end) of each sequence's pieces."""
    rows = np.repeat(np.arange(len(plan)), np.diff(plan.row_offsets))
    lengths = plan.pieces.length[plan.order].astype(np.int64)
    ends = np.cumsum(lengths)
    ends -= np.concatenate([[0], ends])[plan.row_offsets[:-1]][rows]  # in each row
    placed = np.empty((3, len(plan.order)), np.int64)
    placed[:, plan.order] = rows, ends - lengths, ends
    spans: list[list[tuple[int, int, int]]] = [[] for _ in range(plan.documents)]
    for document, *span in zip(plan.pieces.document.tolist(), *placed.tolist(), strict=True):
        spans[document].append((span[0], span[1], span[2]))
    return spans
