"""Make documents fit into rows: split, truncate or drop those that are longer.

This works on lengths alone; no token moves. Everything lost is counted. It costs about 2 ns a
document, and 5 ns more when the places of the pieces are first used.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

from packer_cli._kernels import filling
from packer_cli.options.options import PackConfig
from packer_cli.packing.labels import flagged_between, trained_tokens
from packer_cli.records import Documents, Int32, Int64, Pieces, UInt8

_Lengths = TypeVar("_Lengths", Int32, Int64)
OVERLONG_POLICIES = ("split", "truncate", "drop", "error")
_ALL_PIECES = 1 << 62
_MOST_PIECES = {"truncate": 1, "drop": 0}  # of a document that is overlong

MAX_DOCUMENT_TOKENS = (1 << 31) - 1  # pieces number a document's tokens with int32


@dataclass
class Loss:
    """Documents and tokens that are left out. Dropped documents include the untrained ones."""

    truncated_documents: int = 0
    truncated_tokens: int = 0
    truncated_trained_tokens: int = 0
    dropped_documents: int = 0
    dropped_tokens: int = 0
    dropped_trained_tokens: int = 0
    untrained_documents: int = 0
    untrained_tokens: int = 0


class Untrained(NamedTuple):
    """Documents that are left out because none of their tokens is trained on.

    documents  int64[u], ascending indices in their batch
    tokens     int64[u], tokens of each in pieces
    """

    documents: Int64 = np.empty(0, np.int64)
    tokens: Int64 = np.empty(0, np.int64)


# What `fit` does with a document that is still too long under these policies.
_POLICIES = {"error": "split", "split-text": "split", "truncate-turns": "drop"}


def pieces_of(batch: Documents, config: PackConfig, position: int) -> tuple[Pieces, Untrained]:
    """Return the pieces of a batch that go into rows, and the documents left out as untrained.

    `position`: tokens before the batch in the stream that "wrap" cuts.
    """
    offsets, max_length, wraps = batch.offsets, config.max_length, config.strategy == "wrap"
    if wraps and batch.trained is None:
        return cut_stream(offsets, max_length, position, config.segment_multiple), Untrained()
    if wraps:
        pieces = fit(offsets, MAX_DOCUMENT_TOKENS, "split")
    else:
        policy = _POLICIES.get(config.overlong or "", config.overlong or "")
        pieces = fit(offsets, max_length, policy, config.truncate_side)
        if config.overlong == "split-text" and batch.trained is not None:
            pieces = without_overlong(pieces, offsets, batch.trained, max_length)
    untrained = Untrained()
    if batch.trained is not None:
        pieces, untrained = without_untrained(pieces, batch.trained)
    if wraps:
        documents = np.unique(pieces.document)
        pieces = cut_stream(offsets, max_length, position, config.segment_multiple, documents)
    return pieces, untrained


class FittedPieces(Pieces):
    """Pieces of documents that lie end to end, cut to the length of a row.

    Only `length` is there from the start. The other columns, five times as many bytes, are made
    together when one of them is first used.

    loss   documents and tokens that the policy leaves out; every token counts as trained on
    """

    loss: Loss
    _lengths: Int32 | Int64
    _cut: tuple[int, int]  # as the kernels take it
    _at_end: bool
    _first: int

    def __init__(
        self,
        lengths: Int32 | Int64,
        max_length: int,
        overlong: str,
        truncate_side: str = "right",
        first: int = 0,
    ) -> None:
        """`lengths`: [n], each >= 0; they are copied. `first`: the first begin.

        Any `overlong` but "truncate" and "drop" splits; under "error" nothing is to be split.
        """
        most, counted = _MOST_PIECES.get(overlong, _ALL_PIECES), np.empty(3, np.int64)
        length: Int32 = np.empty(len(lengths), np.int32)
        filling.copy_lengths(lengths, max_length, length, counted)
        empty, documents, tokens = counted.tolist()
        of_documents: Int32 | Int64 = length
        if empty or documents:  # not every document is one piece
            if lengths.max() > MAX_DOCUMENT_TOKENS:
                of_documents = lengths.copy()
            more = tokens // max_length if most == _ALL_PIECES else 0  # or fewer
            length = np.empty(len(lengths) + more, np.int32)
            length = length[: filling.cut_lengths(of_documents, max_length, most, length)]
        loss = Loss()
        if overlong == "truncate":
            tokens -= documents * max_length
            loss = Loss(documents, tokens, tokens)
        elif overlong == "drop":
            loss = Loss(0, 0, 0, documents, tokens, tokens)
        self.__dict__.update(
            length=length, loss=loss, _lengths=of_documents, _cut=(max_length, most),
            _at_end=truncate_side == "left" and overlong == "truncate", _first=first,
        )  # fmt: skip

    @cached_property
    def _columns(self) -> tuple[Int64, Int64, Int32]:
        pieces = len(self)
        columns = np.empty(pieces, np.int64), np.empty(pieces, np.int64), np.empty(pieces, np.int32)
        filling.locate_pieces(self._lengths, *self._cut, self._at_end, self._first, *columns)
        return columns

    @property
    def document(self) -> Int64:
        return self._columns[0]

    @property
    def begin(self) -> Int64:
        return self._columns[1]

    @property
    def start(self) -> Int32:
        return self._columns[2]


def first_overlong(offsets: Int64, max_length: int) -> int:
    """Return the index of the first document longer than max_length, or -1."""
    overlong = np.diff(offsets) > max_length
    return int(overlong.argmax()) if overlong.any() else -1


def fit(offsets: Int64, max_length: int, overlong: str, truncate_side: str = "right") -> Pieces:
    """Return the pieces of documents under the policy "split", "truncate" or "drop".

    offsets        int64[n + 1]; an empty document has no piece
    truncate_side  "right" cuts off the end of a document, "left" its beginning

    Callers apply the policy "error" themselves: see `first_overlong`.
    """
    lengths: Int64 = np.diff(offsets)
    return FittedPieces(lengths, max_length, overlong, truncate_side, int(offsets[0]))


def without_untrained(pieces: Pieces, trained: UInt8) -> tuple[Pieces, Untrained]:
    """Remove documents without a token to train on. `trained`: uint8[T] of their batch."""
    is_untrained = trained_tokens(trained, pieces.begin, pieces.begin + pieces.length) == 0
    if not is_untrained.any():
        return pieces, Untrained()
    count = np.bincount(pieces.document)
    untrained = np.bincount(pieces.document[is_untrained], minlength=len(count))
    left_out = (untrained > 0) & (untrained == count)
    documents, tokens = np.flatnonzero(left_out), _per_document(pieces, pieces.length, len(count))
    kept = ~left_out[pieces.document]
    return pieces.take(kept), Untrained(documents, tokens[documents])


def without_overlong(pieces: Pieces, offsets: Int64, trained: UInt8, max_length: int) -> Pieces:
    """Remove documents longer than a row, unless all of them is trained on: otherwise part of an
    answer would be trained on without its question.
    """
    lengths = np.diff(offsets)
    predicted = trained_tokens(trained, offsets[:-1], offsets[1:])
    dropped = (lengths > max_length) & (predicted < lengths - 1)
    return pieces.take(~dropped[pieces.document]) if dropped.any() else pieces


def loss_of(pieces: Pieces, offsets: Int64, trained: UInt8 | None = None) -> Loss:
    """Return what of the documents is not in the pieces. No two pieces share a token."""
    if int(pieces.length.sum(dtype=np.int64)) == offsets[-1] - offsets[0]:
        return Loss()
    lengths = np.diff(offsets)
    placed = _per_document(pieces, pieces.length, len(lengths))
    dropped = (placed == 0) & (lengths > 0)
    truncated = (placed > 0) & (placed < lengths)
    trained_lost = lengths - placed
    if trained is not None:
        of_piece = flagged_between(trained, pieces.begin, pieces.begin + pieces.length)
        of_document = flagged_between(trained, offsets[:-1], offsets[1:])
        trained_lost = of_document - _per_document(pieces, of_piece, len(lengths))
    return Loss(
        truncated_documents=int(truncated.sum()),
        truncated_tokens=int((lengths - placed)[truncated].sum()),
        truncated_trained_tokens=int(trained_lost[truncated].sum()),
        dropped_documents=int(dropped.sum()),
        dropped_tokens=int(lengths[dropped].sum()),
        dropped_trained_tokens=int(trained_lost[dropped].sum()),
    )


def cut_stream(
    offsets: Int64,
    max_length: int,
    stream_position: int,
    multiple: int = 1,
    documents: Int64 | None = None,
) -> Pieces:
    """Return the pieces of documents laid end to end and cut at every max_length places ("wrap").

    offsets          int64[n + 1]
    stream_position  place in the stream at which the first document begins
    multiple         each document takes its length rounded up to this, which divides max_length
    documents        indices of those that are in the stream; None: all
    """
    documents = np.arange(len(offsets) - 1) if documents is None else documents
    lengths = np.diff(offsets)[documents]
    taken = padded(lengths, multiple)
    phase = (stream_position + np.cumsum(taken) - taken) % max_length  # of each, in its row
    counts = np.where(lengths > 0, (phase + lengths + max_length - 1) // max_length, 0)
    which = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    edge = number * max_length - phase[which]
    start = np.maximum(edge, 0)
    length = np.minimum(edge + max_length, lengths[which]) - start
    document = documents[which]
    return Pieces(
        document, offsets[document] + start, length.astype(np.int32), start.astype(np.int32)
    )


def _per_document(pieces: Pieces, values: Any, count: int) -> Int64:
    return np.bincount(pieces.document, weights=values, minlength=count).astype(np.int64)


def padded(lengths: _Lengths, multiple: int) -> _Lengths:
    """Round lengths up to multiples: the places that segments take in their rows."""
    return lengths if multiple == 1 else lengths + (-lengths % multiple)
