"""The documents that one plan considers together, and what it carries into the next window.

    add(batch) ... -> rows()      plans, keeps back the badly filled rows, gives the others
                      rows(last=True)   gives all that is left

Carrying instead of padding makes the rows of many small windows as full as those of one plan.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packer_cli.options.options import Mixture, PackConfig, keeps_order
from packer_cli.packing.figures import AttentionCost
from packer_cli.packing.fitting import padded
from packer_cli.packing.labels import trained_tokens
from packer_cli.packing.plan import Planner, shuffled
from packer_cli.records import Documents, Int32, Int64, Pieces, offsets_of

# A row is badly filled when more than 1/64 of it would be padding. At most a quarter of the
# rows are carried: where documents do not fit together, waiting does not help.
_BAD_SPACE = 64
_MOST_CARRIED = 4
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio


@dataclass(frozen=True)
class PlannedRows:
    """Rows to be written.

    documents    what rows hold, each of which fits into one: segments, once they are placed
    order        int64[n], row after row
    row_offsets  int64[rows + 1], row r holds order[row_offsets[r]:row_offsets[r + 1]]
    unbalanced   of the same rows without `--balance`; None where it is not asked for
    """

    documents: Documents
    order: Int64
    row_offsets: Int64
    unbalanced: AttentionCost | None = None


class Window:
    """Gathers pieces of one unit until there are enough to plan."""

    def __init__(self, config: PackConfig, unit: int) -> None:
        self._config, self._unit = config, unit
        self._plans = 0
        self._parts = list[Documents]()
        self.tokens = 0

    def add(self, batch: Documents, pieces: Pieces) -> None:
        tokens = int(pieces.length.sum())
        if not tokens:
            return
        self._parts.append(batch.cut(pieces))
        self.tokens += tokens

    def rows(self, *, last: bool = False) -> PlannedRows:
        """The rows to write now; the rest stays in the window."""
        config, documents = self._config, Documents.concat(self._parts)
        self._parts, self.tokens = [], 0  # the parts' tokens are freed before any are copied
        seed = self._seed()
        order, row_offsets = self._planned(documents, seed)
        self._plans += 1
        if not last:
            order, row_offsets = self._keep_back(documents, order, row_offsets)
        unbalanced = None
        if config.balance != "none":
            # after keeping back, so that the next windows are those of a run without balance
            unbalanced = AttentionCost.of(documents.lengths[order], row_offsets)
            order, row_offsets = self._planner().balanced(documents.lengths, order, row_offsets)
            if config.shuffle:
                order, row_offsets = shuffled(order, row_offsets, seed)
        if config.mixture is not None and config.shuffle:
            source = sources_of(config.mixture, documents.file)
            order, row_offsets = evened_out(documents.lengths, source, order, row_offsets, seed)
        return PlannedRows(documents, order, row_offsets, unbalanced)

    def _planner(self) -> Planner:
        config = self._config
        most, multiple = config.max_segments_per_row, config.segment_multiple
        return Planner(config.max_length, config.strategy, most, multiple)

    def _planned(self, documents: Documents, seed: int) -> tuple[Int64, Int64]:
        """(order, row_offsets) of all pieces."""
        order, row_offsets, *_ = self._planner().rows(documents.lengths, seed)
        if self._config.shuffle:
            order, row_offsets = shuffled(order, row_offsets, seed)
        return order, row_offsets

    def _keep_back(
        self, documents: Documents, order: Int64, row_offsets: Int64
    ) -> tuple[Int64, Int64]:
        """Carry the badly filled rows; (order, row_offsets) of the others."""
        carried = self._carried(documents, order, row_offsets)
        waiting, _ = rows_taken(order, row_offsets, np.flatnonzero(carried))
        self._parts = [documents.take(waiting)]
        self.tokens = int(self._parts[0].offsets[-1])
        return rows_taken(order, row_offsets, np.flatnonzero(~carried))

    def _seed(self) -> int:
        """A seed that differs between windows, and depends only on the options and the place."""
        name = f"{self._config.seed}/{self._unit}/{self._plans}"
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")

    def _carried(
        self, documents: Documents, order: Int64, row_offsets: Int64
    ) -> npt.NDArray[np.bool_]:
        """bool[rows]: which rows wait for the next window."""
        rows = len(row_offsets) - 1
        carried = np.zeros(rows, bool)
        if keeps_order(self._config.strategy):
            carried[rows - 1 :] = True  # the open row; the next window goes on filling it
            return carried
        used = offsets_of(padded(documents.lengths[order], self._config.segment_multiple))
        space = self._config.max_length - np.diff(used[row_offsets])
        emptiest = np.argsort(-space, kind="stable")[: rows // _MOST_CARRIED]
        carried[emptiest] = space[emptiest] * _BAD_SPACE > self._config.max_length
        return carried


def sources_of(mixture: Mixture, file: Int32) -> Int64:
    """The number of the source of each input."""
    ends = np.cumsum([one.inputs for one in mixture.sources])
    return np.searchsorted(ends, file, side="right")


def evened_out(
    lengths: Int32, source: Int64, order: Int64, row_offsets: Int64, seed: int
) -> tuple[Int64, Int64]:
    """Rows of a mixture, one of every kind in turn: at random, stretches of few rows would have too
    much of one source. `lengths` and `source`: of the pieces.

    1. Rows are sorted by the source that has most of them, and by how much that is.
    2. Multiples of the golden ratio, without their whole part, say where each comes: those of any
       few neighbours lie evenly between 0 and 1.
    """
    rows, sources = len(row_offsets) - 1, int(source.max(initial=0)) + 1
    row = np.repeat(np.arange(rows), np.diff(row_offsets))
    tokens = np.bincount(row * sources + source[order], lengths[order], rows * sources)
    tokens = tokens.reshape(rows, sources)
    most = tokens.argmax(axis=1)
    alike = np.lexsort((tokens.max(axis=1) / tokens.sum(axis=1), most))
    place = np.arange(rows, dtype=np.uint64) * _GOLDEN + np.uint64(seed)
    return rows_taken(order, row_offsets, alike[np.argsort(place)])


def rows_taken(order: Int64, row_offsets: Int64, rows: Int64) -> tuple[Int64, Int64]:
    """(order, row_offsets) of these rows."""
    places, new_offsets = _members(row_offsets, rows)
    return order[places], new_offsets


def _members(offsets: Int64, lists: Int64) -> tuple[Int64, Int64]:
    """(the places of the members of some lists, end to end, and where each list ends there): list i
    has the places offsets[i]..offsets[i + 1].
    """
    size = np.diff(offsets)[lists]
    ends = offsets_of(size)
    return np.arange(ends[-1]) + np.repeat(offsets[lists] - ends[:-1], size), ends


def trained_in(documents: Documents, order: Int64) -> Int64:
    """Count the tokens that are trained on in these segments, int64[n]."""
    begin, end = documents.offsets[:-1][order], documents.offsets[1:][order]
    return trained_tokens(documents.trained, begin, end)
