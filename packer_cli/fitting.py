"""Making documents fit: cutting, truncating or dropping those longer than a row.

Works on offsets alone; no token moves. Everything lost is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packer_cli.records import Int64, Pieces

MAX_DOCUMENT_TOKENS = (1 << 31) - 1  # pieces number a document's tokens with int32


@dataclass(frozen=True)
class Loss:
    """What fitting left out, in documents and tokens."""

    truncated_documents: int = 0
    truncated_tokens: int = 0
    dropped_documents: int = 0
    dropped_tokens: int = 0


def first_overlong(offsets: Int64, max_length: int) -> int:
    """Index of the first document longer than max_length, or -1."""
    overlong = np.flatnonzero(np.diff(offsets) > max_length)
    return int(overlong[0]) if len(overlong) else -1


def fit(offsets: Int64, max_length: int, overlong: str) -> tuple[Pieces, Loss]:
    """Pieces for documents given by `offsets` int64[n+1], under policy split, truncate or drop.

    Empty documents give no piece. The policy "error" is the caller's: see `first_overlong`.
    """
    if overlong == "split":
        return _cut(offsets, max_length, np.zeros(len(offsets) - 1, np.int64)), Loss()
    lengths = np.diff(offsets)
    is_long = lengths > max_length
    lost = int(lengths[is_long].sum())
    if overlong == "truncate":
        kept = np.flatnonzero(lengths)
        loss = Loss(int(is_long.sum()), lost - int(is_long.sum()) * max_length)
    else:
        kept = np.flatnonzero((lengths > 0) & ~is_long)
        loss = Loss(dropped_documents=int(is_long.sum()), dropped_tokens=lost)
    pieces = Pieces(
        kept,
        offsets[kept],
        np.minimum(lengths[kept], max_length).astype(np.int32),
        np.zeros(len(kept), np.int32),
    )
    return pieces, loss


def cut_stream(offsets: Int64, max_length: int, stream_position: int) -> Pieces:
    """Pieces of documents laid end to end and cut at every max_length tokens ("wrap").

    `stream_position` is the number of tokens of the stream before the first document.
    """
    return _cut(offsets, max_length, (stream_position + offsets[:-1] - offsets[0]) % max_length)


def _cut(offsets: Int64, max_length: int, phase: Int64) -> Pieces:
    """Cut each document at the multiples of max_length, counted from -phase[i]."""
    lengths = np.diff(offsets)
    counts = np.where(lengths > 0, (phase + lengths + max_length - 1) // max_length, 0)
    document = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    edge = number * max_length - phase[document]
    start = np.maximum(edge, 0)
    length = np.minimum(edge + max_length, lengths[document]) - start
    return Pieces(
        document, offsets[document] + start, length.astype(np.int32), start.astype(np.int32)
    )
