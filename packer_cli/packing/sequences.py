"""`pack_sequences`: token sequences in memory to padded rows in memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packer_cli._kernels import filling
from packer_cli.errors import DataError, UsageError
from packer_cli.packing.plan import PackPlan, plan_packing
from packer_cli.records import HIGHEST_ID, IGNORED, Int32, Int64, UInt8, UInt32, wrong_ids


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
        """For each sequence the (row, start, end) of all its pieces, in the sequence's order."""
        spans: list[list[tuple[int, int, int]]] = [[] for _ in range(self.plan.documents)]
        plan, place = self.plan, _places(self.plan)
        row, start = place[0].tolist(), place[1].tolist()
        lengths, documents = plan.pieces.length.tolist(), plan.pieces.document.tolist()
        for piece, document in enumerate(documents):
            spans[document].append((row[piece], start[piece], start[piece] + lengths[piece]))
        return spans


def pack_sequences(
    sequences: Sequence[Any],
    max_length: int,
    *,
    pad_token_id: int = 0,
    strategy: str = "best-fit",
    seed: int | None = None,
    overlong: str = "error",
    labels: Sequence[Any] | None = None,
    attention_masks: Sequence[Any] | None = None,
    eos_token_id: int | None = None,
    separator_id: int | None = None,
    return_spans: bool = False,
) -> PackedRows:
    """Pack token sequences into rows of `max_length`.

    sequences        lists, 1-d integer arrays or 1-d torch tensors of ids in 0..2**31-1
    strategy, seed, overlong   as in `plan_packing`; "next-fit" keeps the order
    labels           per sequence, unshifted; -100 where not trained on, and else any id
    attention_masks  per sequence 0/1; tokens with 0 are padding and are left out
    eos_token_id     appended to each sequence that does not end with it; trained on
    separator_id     appended to each sequence always; not trained on
    return_spans     also give each sequence's (row, start, end)

    Raises UsageError for unknown options and DataError, naming the sequence, for ids out of
    range, labels or masks of another length, and (under "error") overlong sequences.
    """
    as_torch = _is_torch(sequences)
    ids, lengths = _flat(sequences, "sequence")
    _check_ids(ids, lengths, "sequence")
    given = None if labels is None else _flat_labels(labels, lengths)
    if attention_masks is not None:
        keep = _flat_like(attention_masks, lengths, "attention_mask") != 0
        edges = np.concatenate([[0], np.cumsum(lengths)])
        lengths = np.diff(np.concatenate([[0], np.cumsum(keep)])[edges])
        ids = ids[keep]
        given = None if given is None else given[keep]
    for name, token in (("eos", eos_token_id), ("separator", separator_id), ("pad", pad_token_id)):
        if token is not None:
            _check_token(token, name)
    for token, always in ((eos_token_id, False), (separator_id, True)):
        if token is not None:
            ids, given, lengths = _append(ids, given, lengths, token, always)
    plan = plan_packing(lengths, max_length, strategy=strategy, seed=seed, overlong=overlong)
    return _fill(plan, ids.astype(np.uint32), given, pad_token_id, return_spans, as_torch)


def fill_plan(
    plan: PackPlan,
    sequences: Sequence[Any],
    *,
    labels: Sequence[Any] | None = None,
    pad_token_id: int = 0,
) -> PackedRows:
    """The rows of a plan that `plan_packing` made of the lengths of these sequences.

    Arguments and errors as in `pack_sequences`; DataError, too, when the plan is not of these
    lengths.
    """
    as_torch = _is_torch(sequences)
    ids, lengths = _flat(sequences, "sequence")
    _check_ids(ids, lengths, "sequence")
    given = None if labels is None else _flat_labels(labels, lengths)
    _check_plan(plan, lengths)
    _check_token(pad_token_id, "pad")
    return _fill(plan, ids.astype(np.uint32), given, pad_token_id, False, as_torch)


def _check_plan(plan: PackPlan, lengths: Int64) -> None:
    if plan.segment_multiple > 1:
        raise UsageError(
            f"a plan with a segment multiple of {plan.segment_multiple}: rows in memory have none",
            "plan without segment_multiple, or use packer pack --segment-multiple",
        )
    ends, pieces = np.cumsum(lengths), plan.pieces
    # a last document that grew would otherwise be cut silently
    tokens = pieces.length.sum() + plan.loss.truncated_tokens + plan.loss.dropped_tokens
    if (
        plan.documents != len(lengths)
        or tokens != lengths.sum()
        or ((pieces.begin - pieces.start) != (ends - lengths)[pieces.document]).any()
        or (pieces.begin + pieces.length > ends[pieces.document]).any()
    ):
        raise DataError(
            "the plan was made for other lengths than these sequences have", "plan them again"
        )


def _is_torch(sequences: Sequence[Any]) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and len(sequences) > 0 and isinstance(sequences[0], torch.Tensor)


def _flat(sequences: Sequence[Any], what: str) -> tuple[Int64, Int64]:
    """(values int64[T], lengths int64[n]) of integer sequences."""
    arrays: list[npt.NDArray[Any]] = []
    for i, sequence in enumerate(sequences):
        try:
            array = np.asarray(sequence)
        except (TypeError, ValueError, OverflowError) as error:
            raise DataError(f"{what} {i}: not a flat sequence of integers: {error}") from None
        if array.size == 0:
            array = np.empty(0, np.int64)
        if array.ndim != 1 or array.dtype.kind not in "iub":
            raise DataError(
                f"{what} {i}: expected a flat sequence of integers, "
                f"got shape {array.shape}, {array.dtype}"
            )
        if array.dtype == np.uint64 and (array > HIGHEST_ID).any():
            raise DataError(f"{what} {i}: {array.max()} is not in 0..{HIGHEST_ID}")
        arrays.append(array.astype(np.int64, copy=False))
    lengths = np.array([len(array) for array in arrays], np.int64)
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64), lengths


def _flat_like(values: Sequence[Any], lengths: Int64, what: str) -> Int64:
    flat, counts = _flat(values, what)
    if len(counts) != len(lengths):
        raise DataError(f"{what}: {len(counts)} given for {len(lengths)} sequences")
    wrong = np.flatnonzero(counts != lengths)
    if len(wrong):
        i = int(wrong[0])
        raise DataError(f"{what} {i}: has {counts[i]} values, the sequence {lengths[i]} tokens")
    return flat


def _flat_labels(labels: Sequence[Any], lengths: Int64) -> Int64:
    flat = _flat_like(labels, lengths, "labels")
    _check_ids(np.where(flat == IGNORED, 0, flat), lengths, "labels")
    return flat


def _check_token(token: int, name: str) -> None:
    if not 0 <= token <= HIGHEST_ID:
        raise UsageError(f"the {name} id {token} is not in 0..{HIGHEST_ID}")


def _check_ids(ids: Int64, lengths: Int64, what: str) -> None:
    wrong = np.flatnonzero(wrong_ids(ids))
    if len(wrong):
        at = int(wrong[0])
        sequence = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
        raise DataError(f"{what} {sequence}: {ids[at]} is not in 0..{HIGHEST_ID}")


def _append(
    ids: Int64, labels: Int64 | None, lengths: Int64, token: int, always: bool
) -> tuple[Int64, Int64 | None, Int64]:
    """Put `token` at the end of the non-empty sequences; a separator (always) is not trained on."""
    ends = np.cumsum(lengths)
    wanted = lengths > 0
    if not always and len(ids):
        wanted &= ids[np.maximum(ends - 1, 0)] != token
    places = ends[wanted]
    if always and labels is None:
        labels = ids
    if labels is not None:
        labels = np.insert(labels, places, IGNORED if always else token)
    return np.insert(ids, places, token), labels, lengths + wanted


def _fill(
    plan: PackPlan, ids: UInt32, labels: Int64 | None, pad: int, spans: bool, as_torch: bool
) -> PackedRows:
    shape = (len(plan), plan.max_length)
    out_ids, out_labels, positions = (np.empty(shape, np.int32) for _ in range(3))
    mask: UInt8 = np.empty(shape, np.uint8)
    boundaries = np.empty(len(plan.order) + len(plan), np.int32)
    edges = np.empty(len(plan) + 1, np.int32)
    filling.fill_rows(
        ids, None, plan.pieces.begin, plan.pieces.length, plan.order, plan.row_offsets,
        plan.max_length, pad, out_ids, out_labels, mask, positions, boundaries, edges,
    )  # fmt: skip
    if labels is not None:
        _given_labels(plan, labels, out_labels, positions, pad)
    cu_seqlens: list[Any] = np.split(boundaries, edges[1:-1]) if len(plan) else []
    wrap: Callable[[Any], Any] = sys.modules["torch"].from_numpy if as_torch else _as_is
    return PackedRows(
        wrap(out_ids),
        wrap(out_labels),
        wrap(mask),
        wrap(positions),
        [wrap(row) for row in cu_seqlens],
        _first_spans(plan) if spans else None,
        plan,
    )


def _as_is(array: Any) -> Any:
    return array


def _given_labels(plan: PackPlan, labels: Int64, out: Int32, positions: Int32, pad: int) -> None:
    """Put the caller's labels in place by the same fill, as if they were the ids."""
    as_ids = labels.astype(np.int32).view(np.uint32)
    boundaries = np.empty(len(plan.order) + len(plan), np.int32)
    edges = np.empty(len(plan) + 1, np.int32)
    filling.fill_rows(
        as_ids, None, plan.pieces.begin, plan.pieces.length, plan.order, plan.row_offsets,
        plan.max_length, IGNORED, out, None, None, None, boundaries, edges,
    )  # fmt: skip
    out[positions == 0] = IGNORED  # a segment's first token; in the padding it is so already


def _places(plan: PackPlan) -> tuple[Int64, Int64]:
    """(row int64[p], first token in the row int64[p]) of each piece."""
    rows = np.repeat(np.arange(len(plan)), np.diff(plan.row_offsets))
    lengths = plan.pieces.length[plan.order].astype(np.int64)
    ends = np.cumsum(lengths)
    row_begin = np.concatenate([[0], ends])[plan.row_offsets[:-1]]
    row_of, start_of = np.empty_like(plan.order), np.empty_like(plan.order)
    row_of[plan.order] = rows
    start_of[plan.order] = ends - lengths - row_begin[rows]
    return row_of, start_of


def _first_spans(plan: PackPlan) -> list[tuple[int, int, int] | None]:
    spans: list[tuple[int, int, int] | None] = [None] * plan.documents
    row, start = _places(plan)
    documents, pieces = np.unique(plan.pieces.document, return_index=True)
    ends = start[pieces] + plan.pieces.length[pieces]
    pieces_in_rows = zip(
        documents.tolist(), row[pieces].tolist(), start[pieces].tolist(), ends.tolist(), strict=True
    )
    for document, at_row, begin, end in pieces_in_rows:
        spans[document] = (at_row, begin, end)
    return spans
