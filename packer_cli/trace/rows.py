"""What is read of rows to trace them: boundaries and sources, never tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from packer_cli.config.columns import PADDED_BOUNDARIES
from packer_cli.errors import DataError
from packer_cli.records import Int64, record_position
from packer_cli.result.documents import segments_in
from packer_cli.result.reader import PACK_AGAIN, PackedDirectory, segments_of
from packer_cli.result.rules import RowLimits, broken_boundaries, broken_sources
from packer_cli.result.view import View

_COLUMNS = ("cu_seqlens", PADDED_BOUNDARIES, "segments")
_NONE = int(np.iinfo(np.int64).max)


def segments_of_rows(packed: PackedDirectory, numbers: Int64) -> tuple[Int64, Int64]:
    """Of n rows of a result (int64[4, s] segments as in `documents.py`, int64[n + 1] the first of
    each row). File, position and start are 0 where the result does not have them.

    Raises DataError for what is missing or damaged.
    """
    if len(numbers) == 0:
        return np.empty((4, 0), np.int64), np.zeros(1, np.int64)
    names = [name for name in _COLUMNS if name in packed.stored_columns]
    rows = packed.take(numbers, names)
    _check(packed, rows, numbers)
    return segments_in(rows), segments_of(rows)[2]


def _check(packed: PackedDirectory, rows: Any, numbers: Int64) -> None:
    """Raise DataError for the first of some rows that breaks a rule."""
    limits = RowLimits.of(packed.facts)
    if isinstance(packed, View):  # which places segments begin at does not matter
        limits = replace(limits, segment_multiple=1)
    broken = broken_boundaries(rows, limits)
    if not broken and "segments" in rows.schema.names:
        broken = broken_sources(rows, np.arange(len(packed.facts.inputs)))
    if broken:
        shard, row = packed.find(int(numbers[broken[0].row]))
        place = f"{packed.path / shard.file}: row {row}"
        raise DataError(f"{place}: is damaged: {broken[0].rule}{broken[0].detail}", PACK_AGAIN)


def rows_with(packed: PackedDirectory, sought: Mapping[int, Int64]) -> Int64:
    """int64[n], the rows of a result with segments of some positions of its inputs, ascending.

    Only shards of units that read these inputs are looked at. Raises DataError.
    """
    found = [np.empty(0, np.int64)]
    for first, column in _sources(packed, sought):
        edges, file, position = _values(column)
        here = np.zeros(len(file), bool)
        for number, positions in sought.items():
            here |= (file == number) & np.isin(position, positions)
        rows = np.searchsorted(edges, np.flatnonzero(here), side="right") - 1
        found.append(first + np.unique(rows))
    return np.concatenate(found)


def nearest_positions(packed: PackedDirectory, number: int, position: int) -> list[int]:
    """The positions of records in rows next to one of an input: below it and above it, or fewer."""
    below, above = -1, _NONE
    for _, column in _sources(packed, [number]):
        _, file, positions = _values(column)
        its = record_position(positions[file == number], packed.facts.config.turns)
        below = max(below, int(its[its < position].max(initial=-1)))
        above = min(above, int(its[its > position].min(initial=_NONE)))
    return [one for one in (below, above) if 0 <= one < _NONE]


def _sources(packed: PackedDirectory, inputs: Collection[int]) -> Iterator[tuple[int, Any]]:
    """(first row, column `segments`) of the record batches of units that read these inputs."""
    units = {
        one.unit for one in packed.facts.units if any(part[0] in inputs for part in one.slices)
    }
    first = 0
    for shard in packed.facts.shards:
        if shard.unit in units:
            packed.check_size(shard)
            at = first
            for stored in packed.stored(shard):
                yield at, stored.column("segments")
                at += stored.num_rows
        first += shard.rows


def _values(column: Any) -> tuple[Int64, Any, Int64]:
    """(offsets int64[rows + 1] from 0, file int32[s], position int64[s]) of a column `segments`."""
    edges = column.offsets.to_numpy().astype(np.int64)
    file, position = (column.values.field(name).to_numpy()[edges[0] : edges[-1]]
                      for name in ("file", "position"))  # fmt: skip
    return edges - edges[0], file, position
