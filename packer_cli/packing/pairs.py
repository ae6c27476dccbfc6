"""Pairs of answers in rows: each is one item to plan, and two segments side by side once it is
filled.

    pieces_of_pairs   the sides of the pairs that fit into a row
    items_of          what is planned: the pieces of a pair together
    spread_out        planned items back to their pieces
    numbered          the columns `pair` and `side`

A single answer with a label is an item of one piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packer_cli.packing.fitting import Untrained, padded, trained_between
from packer_cli.records import Int8, Int32, Int64, Pieces, Stock, TokenBatch


def pieces_of_pairs(
    batch: TokenBatch, max_length: int, segment_multiple: int, *, keep_untrained: bool = False
) -> tuple[Pieces, Untrained]:
    """The sides of all documents that fit into a row whole; and the documents that fit and are
    left out since nothing of one of their sides is trained on.
    """
    pieces, offsets = _sides(batch), batch.offsets
    fits = rooms(np.diff(offsets), _chosen(batch), segment_multiple) <= max_length
    pieces = pieces.take(fits[pieces.document])
    if batch.trained is None or keep_untrained:
        return pieces, Untrained()
    nothing = trained_between(batch.trained, pieces.begin + 1, pieces.begin + pieces.length) == 0
    if not nothing.any():
        return pieces, Untrained()
    documents = np.unique(pieces.document[nothing])
    kept = ~np.isin(pieces.document, documents)
    return pieces.take(kept), Untrained(documents, np.diff(offsets)[documents])


def rooms(lengths: Int32 | Int64, chosen: Int32, segment_multiple: int) -> Int64:
    """int64[n], the places that documents take in a row: each side in its own segment."""
    first = padded(chosen.astype(np.int64), segment_multiple)
    return first + padded(lengths.astype(np.int64) - chosen, segment_multiple)


def _chosen(batch: TokenBatch) -> Int32:
    return np.empty(0, np.int32) if batch.chosen is None else batch.chosen


def _sides(batch: TokenBatch) -> Pieces:
    """One piece or two of each document that is not empty."""
    lengths, chosen = np.diff(batch.offsets), _chosen(batch).astype(np.int64)
    length = np.stack([chosen, lengths - chosen], axis=1).ravel()
    start = np.stack([np.zeros_like(chosen), chosen], axis=1).ravel()
    document = np.repeat(np.arange(len(lengths)), 2)
    there = length > 0
    document, start, length = document[there], start[there], length[there]
    begin = batch.offsets[document] + start
    return Pieces(document, begin, length.astype(np.int32), start.astype(np.int32))


def sides_of(batch: TokenBatch, pieces: Pieces) -> Int8 | None:
    """int8[p], 1 for a piece that is chosen or desirable; None where that says nothing."""
    if batch.chosen is None:
        return None
    return (pieces.start < batch.chosen[pieces.document]).astype(np.int8)


@dataclass(frozen=True)
class Items:
    """What is planned of pieces.

    first  int64[items + 1], item i is the pieces first[i]..first[i + 1]
    room   int32[items], the places that it takes
    """

    first: Int64
    room: Int32

    @property
    def most_pieces(self) -> int:
        return int(np.diff(self.first).max(initial=1))


def items_of(stock: Stock, segment_multiple: int) -> Items:
    first = np.flatnonzero(stock.start == 0)
    taken = padded(stock.length.astype(np.int64), segment_multiple)
    room = np.add.reduceat(taken, first).astype(np.int32) if len(first) else np.empty(0, np.int32)
    return Items(np.append(first, len(stock.start)), room)


def item_lengths(lengths: Int32 | Int64, begins: npt.NDArray[np.bool_]) -> Int64:
    """int64[items], the tokens of items; `begins`: which of their segments begin one."""
    first, lengths = np.flatnonzero(begins), lengths.astype(np.int64)
    of_items: Int64 = np.add.reduceat(lengths, first) if len(first) else lengths
    return of_items


def spread_out(items: Items, order: Int64, row_offsets: Int64) -> tuple[Int64, Int64]:
    """Planned items as planned pieces: (order, row_offsets) of these."""
    sizes = np.diff(items.first)[order]
    ends = np.zeros(len(order) + 1, np.int64)
    np.cumsum(sizes, out=ends[1:])
    within = np.arange(ends[-1]) - np.repeat(ends[:-1], sizes)
    return np.repeat(items.first[order], sizes) + within, ends[row_offsets]


def numbered(start: Int32, row_offsets: Int64) -> Int32:
    """int32[s], of segments row after row: the number of each one's pair within its row.

    start  int32[s], the first token of each in its document
    """
    begins = np.cumsum(start == 0) - 1
    edges = row_offsets - row_offsets[0]
    number = begins - np.repeat(begins[edges[:-1]], np.diff(edges))
    return np.asarray(number, np.int32)
