"""Pairs of answers in rows: each is one item to plan, and two segments side by side once it is
filled.

    pieces_of_pairs   the sides of the pairs that fit into a row
    items_of          what is planned: the pieces of a pair together
    numbered          the columns `pair` and `side`

A single answer with a label is an item of one piece.
"""

from __future__ import annotations

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
    lengths = np.diff(batch.offsets)
    chosen = np.empty(0, np.int64) if batch.chosen is None else batch.chosen.astype(np.int64)
    # one piece or two of each document that is not empty
    length = np.stack([chosen, lengths - chosen], axis=1).ravel()
    start = np.stack([np.zeros_like(chosen), chosen], axis=1).ravel()
    document = np.repeat(np.arange(len(lengths)), 2)
    fits = rooms(lengths, chosen, segment_multiple) <= max_length
    there = (length > 0) & fits[document]
    document, start, length = document[there], start[there], length[there]
    begin = batch.offsets[document] + start
    pieces = Pieces(document, begin, length.astype(np.int32), start.astype(np.int32))
    if batch.trained is None or keep_untrained:
        return pieces, Untrained()
    nothing = trained_between(batch.trained, begin + 1, begin + length) == 0
    if not nothing.any():
        return pieces, Untrained()
    documents = np.unique(document[nothing])
    return pieces.take(~np.isin(document, documents)), Untrained(documents, lengths[documents])


def rooms(lengths: Int32 | Int64, chosen: Int32 | Int64, segment_multiple: int) -> Int64:
    """int64[n], the places that documents take in a row: each side in its own segment."""
    first = padded(chosen.astype(np.int64), segment_multiple)
    return first + padded(lengths.astype(np.int64) - chosen, segment_multiple)


def sides_of(batch: TokenBatch, pieces: Pieces) -> Int8 | None:
    """int8[p], 1 for a piece that is chosen or desirable; None where that says nothing."""
    if batch.chosen is None:
        return None
    return (pieces.start < batch.chosen[pieces.document]).astype(np.int8)


def items_of(stock: Stock, segment_multiple: int) -> tuple[Int64, Int32]:
    """The pieces of pairs together, which are planned as one.

    first  int64[items + 1], item i is the pieces first[i]..first[i + 1]
    room   int32[items], the places that it takes
    """
    first = np.flatnonzero(stock.start == 0)
    taken = padded(stock.length.astype(np.int64), segment_multiple)
    room = np.add.reduceat(taken, first).astype(np.int32) if len(first) else np.empty(0, np.int32)
    return np.append(first, len(stock.start)), room


def item_lengths(lengths: Int32 | Int64, begins: npt.NDArray[np.bool_]) -> Int64:
    """int64[items], the tokens of items; `begins`: which of their segments begin one."""
    first, lengths = np.flatnonzero(begins), lengths.astype(np.int64)
    of_items: Int64 = np.add.reduceat(lengths, first) if len(first) else lengths
    return of_items


def numbered(start: Int32, row_offsets: Int64) -> Int32:
    """int32[s], of segments row after row: the number of each one's pair within its row.

    start  int32[s], the first token of each in its document
    """
    begins = np.cumsum(start == 0) - 1
    edges = row_offsets - row_offsets[0]
    number = begins - np.repeat(begins[edges[:-1]], np.diff(edges))
    return np.asarray(number, np.int32)
