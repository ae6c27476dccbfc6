"""What the columns `pair` and `side` must satisfy; `rules.py` has the others.

pair   0 in a row's first segment, then the same or one more; at most two segments have it
side   1 or 0; of a pair's two segments 1 first, then 0
segments, where they are written: a pair's two are of one document, the second right after the
       first; all others begin a document
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from packer_cli.config.columns import PAIR, SIDE
from packer_cli.records import Int64
from packer_cli.result.documents import sources_of
from packer_cli.result.reader import ragged_of, segments_of

_Flags = npt.NDArray[np.bool_]


def broken_pairs(batch: Any) -> list[tuple[str, _Flags]]:
    """(rule, bool[rows]: whether it holds) of the rules that do not hold for all rows. The
    boundaries and `segments` must be sound.
    """
    if PAIR not in batch.schema.names:
        return []
    _, length, offsets = segments_of(batch)
    pair, side = (_own(batch.column(name)) for name in (PAIR, SIDE))
    counts = [np.diff(batch.column(name).offsets.to_numpy()) for name in (PAIR, SIDE)]
    for name, count in zip((PAIR, SIDE), counts, strict=True):
        if (holds := count == np.diff(offsets)).sum() < len(holds):
            return [(f"{name} does not match cu_seqlens", holds)]
    first = offsets[:-1]
    begins = np.zeros(len(pair), bool)
    begins[first] = True
    again = np.zeros(len(pair), bool)
    again[1:] = (np.diff(pair) == 0) & ~begins[1:]
    step = np.diff(pair, prepend=0)
    goes_on = np.where(begins, pair == 0, (step == 0) | (step == 1))
    goes_on[1:] &= ~(again[1:] & again[:-1])  # three segments with one number
    sides = (side == 0) | (side == 1)
    sides[1:] &= ~again[1:] | ((side[1:] == 0) & (side[:-1] == 1))
    rules = [("pair does not count the pairs of its row", goes_on),
             ("side is not 1 and then 0 in every pair", sides)]  # fmt: skip
    if "segments" in batch.schema.names:
        file, position, start = sources_of(batch)
        if len(start) != len(pair):  # which another rule tells
            return []
        follows = np.zeros(len(pair), bool)
        follows[1:] = (file[1:] == file[:-1]) & (position[1:] == position[:-1])
        follows[1:] &= start[1:] == length[:-1]
        rules.append(
            ("segments of a pair are not its two sides", np.where(again, follows, start == 0))
        )
    of_rows = [(rule, np.logical_and.reduceat(holds, first)) for rule, holds in rules]
    return [(rule, holds) for rule, holds in of_rows if not holds.all()]


def _own(column: Any) -> Int64:
    values, edges = ragged_of(column)
    return values[edges[0] : edges[-1]].astype(np.int64)
