"""Plan the documents of a work unit, a window at a time.

    add(batch) ... -> rows()            plan, keep back the badly filled rows, return the others
                      rows(last=True)   return all rows

Documents of rows that are kept back join the next window. So the rows of many small windows are as
full as those of one plan, and memory holds one window.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from packer_cli.options.options import Mixture, PackConfig, keeps_order
from packer_cli.packing.figures import AttentionCost
from packer_cli.packing.fitting import padded
from packer_cli.packing.labels import trained_tokens
from packer_cli.packing.plan import Planner, shuffled
from packer_cli.records import Documents, Int32, Int64, Pieces, offsets_of

# A row is badly filled if more than 1/64 of it would be padding. At most a quarter of the rows are
# kept back: if documents do not fit together, waiting does not help.
_BAD_SPACE = 64
_MOST_KEPT_BACK = 4
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio


@dataclass(frozen=True)
class PlannedRows:
    """Rows to write.

    documents    the segments: documents, or parts of them, that each fit into a row
    order        int64[n], row after row
    row_offsets  int64[rows + 1], row r holds order[row_offsets[r]:row_offsets[r + 1]]
    unbalanced   cost of the same rows before `--balance`; None without that option
    """

    documents: Documents
    order: Int64
    row_offsets: Int64
    unbalanced: AttentionCost | None = None


class Window:
    """Collects pieces of one unit until they are planned. `tokens`: of the pieces collected."""

    def __init__(self, config: PackConfig, unit: int) -> None:
        self._config, self._unit = config, unit
        self._plans = 0
        self._parts = list[Documents]()
        self.tokens = 0

    def add(self, batch: Documents, pieces: Pieces) -> None:
        """Add pieces of a batch."""
        tokens = int(pieces.length.sum())
        if not tokens:
            return
        self._parts.append(batch.cut(pieces))
        self.tokens += tokens

    def rows(self, *, last: bool = False) -> PlannedRows:
        """Plan what was added. Return the rows to write now; the other documents stay."""
        config, documents = self._config, Documents.concat(self._parts)
        self._parts, self.tokens = [], 0  # the parts' tokens are freed before any are copied
        # differs between windows and does not depend on the machine
        name = f"{config.seed}/{self._unit}/{self._plans}"
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        most, multiple = config.max_segments_per_row, config.segment_multiple
        planner = Planner(config.max_length, config.strategy, most, multiple)
        order, row_offsets, *_ = planner.rows(documents.lengths, seed)
        if config.shuffle:
            order, row_offsets = shuffled(order, row_offsets, seed)
        self._plans += 1
        if not last:
            order, row_offsets = self._keep_back(documents, order, row_offsets)
        unbalanced = None
        if config.balance != "none":
            # after keeping back, so that the next windows are those of a run without balance
            unbalanced = AttentionCost.of(documents.lengths[order], row_offsets)
            order, row_offsets = planner.balanced(documents.lengths, order, row_offsets)
            if config.shuffle:
                order, row_offsets = shuffled(order, row_offsets, seed)
        if config.mixture is not None and config.shuffle:
            source = sources_of(config.mixture, documents.file)
            order, row_offsets = evened_out(documents.lengths, source, order, row_offsets, seed)
        return PlannedRows(documents, order, row_offsets, unbalanced)

    def _keep_back(
        self, documents: Documents, order: Int64, row_offsets: Int64
    ) -> tuple[Int64, Int64]:
        """Keep the documents of badly filled rows. Return order and row_offsets of the others."""
        config, rows = self._config, len(row_offsets) - 1
        is_kept = np.zeros(rows, bool)
        if keeps_order(config.strategy):
            is_kept[rows - 1 :] = True  # the open row, which the next window continues to fill
        else:
            used = offsets_of(padded(documents.lengths[order], config.segment_multiple))
            space = config.max_length - np.diff(used[row_offsets])
            emptiest = np.argsort(-space, kind="stable")[: rows // _MOST_KEPT_BACK]
            is_kept[emptiest] = space[emptiest] * _BAD_SPACE > config.max_length
        waiting, _ = rows_taken(order, row_offsets, np.flatnonzero(is_kept))
        self._parts = [documents.take(waiting)]
        self.tokens = int(self._parts[0].offsets[-1])
        return rows_taken(order, row_offsets, np.flatnonzero(~is_kept))


def sources_of(mixture: Mixture, file: Int32) -> Int64:
    """Return the source of each input, int64[n]. `file`: int32[n], numbers of inputs."""
    ends = np.cumsum([source.inputs for source in mixture.sources])
    return np.searchsorted(ends, file, side="right")


def evened_out(
    lengths: Int32, source: Int64, order: Int64, row_offsets: Int64, seed: int
) -> tuple[Int64, Int64]:
    """Order the rows of a mixture so that each kind comes in turn: in a random order, a few rows in
    sequence often have too much of one source. lengths, source: of each piece.

    Rows are sorted by their main source and its share; row i goes to the fractional part of i times
    the golden ratio: such places of neighbours lie evenly between 0 and 1.
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
    """Return order and row_offsets of some rows, int64[m]."""
    size = np.diff(row_offsets)[rows]
    new_offsets = offsets_of(size)
    places = np.arange(new_offsets[-1]) + np.repeat(row_offsets[rows] - new_offsets[:-1], size)
    return order[places], new_offsets


def trained_in(documents: Documents, order: Int64) -> Int64:
    """Count the tokens that are trained on in these segments, int64[n]."""
    begin, end = documents.offsets[:-1][order], documents.offsets[1:][order]
    return trained_tokens(documents.trained, begin, end)
