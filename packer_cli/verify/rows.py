"""The rows of a unit in memory, by the places that their segments came from.

Columns stay mapped; each segment of the unit takes 100 bytes of memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from packer_cli.config.columns import SIDE
from packer_cli.records import Int32, Int64
from packer_cli.result.documents import documents_of, segments_in
from packer_cli.result.reader import PackedDirectory, rows_of, segments_of
from packer_cli.result.shards import Shard
from packer_cli.verify.reading import batches_of


class Batch(NamedTuple):
    """A record batch: its shard, its first row's number there, its columns [rows, max_length]."""

    shard: str
    first_row: int
    ids: Int32
    labels: Int32 | None


class UnitRows(NamedTuple):
    """The segments of a unit, sorted by file, position and start.

    by_place            whether the rows say where segments come from; if not, all is 0 and the
                        segments are in the order of the rows
    batch, row, begin   where each is: in which of `batches`, in which of its rows, from which place
    in_order            int64[4, segments] (file, position, start, length), row after row
    row_sizes           int64[rows], segments in each row
    sides               int64[segments], row after row, the column `side`; None: there is none
    number              int64[segments]: where each is among those
    """

    file: Int64
    position: Int64
    start: Int64
    length: Int64
    batch: Int64
    row: Int64
    begin: Int64
    batches: list[Batch]
    in_order: Int64
    row_sizes: Int64
    by_place: bool
    sides: Int64 | None = None
    number: Int64 | None = None

    def side(self, segment: int) -> int | None:
        """What the column `side` says of a segment."""
        if self.sides is None or self.number is None:
            return None
        return int(self.sides[self.number[segment]])

    def positions(self, file: int) -> Int64:
        """The positions of the documents of a file, each once."""
        first, last = np.searchsorted(self.file, [file, file + 1])
        return np.unique(self.position[first:last])

    def pieces(self, file: int, position: int) -> range:
        """The segments of a document, by their numbers."""
        first, last = np.searchsorted(self.file, [file, file + 1])
        edges = first + np.searchsorted(self.position[first:last], [position, position + 1])
        return range(*edges.tolist())

    def place(self, row: int) -> tuple[str, int]:
        """(shard, row in the shard) of a row of the unit."""
        for batch in self.batches:
            if row < len(batch.ids):
                return batch.shard, batch.first_row + row
            row -= len(batch.ids)
        raise IndexError(row)


def load_rows(packed: PackedDirectory, shards: list[Shard]) -> UnitRows:
    """The rows of one unit's shards, which are known to be sound."""
    parts = [np.empty((7, 0), np.int64)]  # a unit may have lost all its documents
    batches: list[Batch] = []
    sizes, sides = ([np.empty(0, np.int64)] for _ in range(2))
    for shard in shards:
        first_row = 0
        for batch in batches_of(packed, shard):
            begin, _, offsets = segments_of(batch)
            row = np.repeat(np.arange(batch.num_rows), np.diff(offsets))
            number = np.full(len(row), len(batches))
            parts.append(np.concatenate([segments_in(batch), np.stack([number, row, begin])]))
            sizes.append(np.diff(offsets))
            if SIDE in batch.schema.names:
                sides.append(batch.column(SIDE).flatten().to_numpy().astype(np.int64))
            labels = rows_of(batch.column("labels")) if "labels" in batch.schema.names else None
            batches.append(Batch(shard.file, first_row, rows_of(batch.column("input_ids")), labels))
            first_row += batch.num_rows
    segments = np.concatenate(parts, axis=1)
    order, (file, position, start, length), _ = documents_of(segments[:4])
    number, row, begin = segments[4:, order]
    return UnitRows(
        file, position, start, length, number, row, begin, batches, segments[:4],
        np.concatenate(sizes), "segments" in packed.facts.config.columns,
        np.concatenate(sides) if SIDE in packed.facts.config.columns else None, order,
    )  # fmt: skip
