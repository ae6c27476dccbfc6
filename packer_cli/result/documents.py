"""Segments back to documents.

A document's pieces lie in the rows of one unit. Segments of a unit are kept as int64[4, segments]:
the input, the document's position in it, the segment's first token in the document, its tokens.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from packer_cli.config.columns import PAIR, SIDE
from packer_cli.records import Int64
from packer_cli.result.reader import segments_of


def sources_of(batch: Any) -> Int64:
    """int64[3, segments] (file, position, start) of a batch's rows; 0 where they do not say."""
    if "segments" not in batch.schema.names:
        return np.zeros((3, len(segments_of(batch)[0])), np.int64)
    column = batch.column("segments")
    edges = column.offsets
    struct = column.values.slice(edges[0].as_py(), edges[-1].as_py() - edges[0].as_py())
    return np.stack([part.to_numpy().astype(np.int64) for part in struct.flatten()])


def sides_in(batch: Any) -> list[Side]:
    """What each segment of a batch's rows is in its pair; [] for other records."""
    if PAIR not in batch.schema.names:
        return []
    pairs, sides = (batch.column(name).flatten().to_pylist() for name in (PAIR, SIDE))
    together = [a == b for a, b in pairwise(pairs)]
    edges = zip([False, *together], [*together, False], strict=True)
    paired = [before or after for before, after in edges]
    return [Side(*one) for one in zip(pairs, sides, paired, strict=True)]


def segments_in(batch: Any) -> Int64:
    """int64[4, segments] (file, position, start, length) of a batch's rows."""
    return np.concatenate([sources_of(batch), segments_of(batch)[1][None]])


class Side(NamedTuple):
    """A segment's place in its pair.

    pair    the number of the pair within the row
    side    1 chosen or desirable, 0 rejected or undesirable
    paired  whether the pair has another segment; otherwise it is an answer with a label
    """

    pair: int
    side: int
    paired: bool

    def __str__(self) -> str:
        return side_name(self.side, paired=self.paired)


def side_name(side: int, *, paired: bool) -> str:
    """For people: "chosen"."""
    return (("undesirable", "desirable"), ("rejected", "chosen"))[paired][side]


class Documents(NamedTuple):
    """How a unit's segments make documents.

    order     int64[segments]: by input, position and start
    segments  int64[4, segments] in this order
    first     int64[documents + 1]: document d has the segments first[d] .. first[d + 1] of these
    """

    order: Int64
    segments: Int64
    first: Int64

    @property
    def tokens(self) -> Int64:
        """int64[documents] in rows."""
        tokens: Int64 = np.add.reduceat(self.segments[3], self.first[:-1])
        return tokens

    def expected_starts(self, *, whole: bool) -> Int64:
        """int64[segments]: where the segment before it in its document ends. `whole`: the first
        one starts at the document's first token; else where it does.
        """
        _, _, start, length = self.segments
        first = self.first[:-1]
        expected: Int64 = np.roll(start + length, 1)
        expected[first] = 0 if whole else start[first]
        return expected


def documents_of(segments: Int64) -> Documents:
    """The documents of one unit's segments."""
    file, position, start, _ = segments
    order = np.lexsort((start, position, file))
    ordered = segments[:, order]
    begins = np.ones(len(order), bool)
    begins[1:] = (np.diff(ordered[:2]) != 0).any(0)
    return Documents(order, ordered, np.append(np.flatnonzero(begins), len(order)))
