"""Rows of mapped record batches, gathered by their numbers: no shard is read but these rows.

Every record batch is a span of rows with a place in memory for each column, so rows of many shards
are gathered at once, by kernels, from addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from packer_cli._kernels import gathering
from packer_cli.config.columns import SIDE
from packer_cli.records import Int32, Int64

PARTS = {"file": np.int32, "position": np.int64, "start": np.int32}  # of the column `segments`
_OF_SEGMENTS = 2 + len(PARTS)  # lines: of offsets and parts, and how many there are


@dataclass(frozen=True)
class Lists:
    """b lists of different lengths, end to end.

    values  int32[k], or int64 or int8
    ends    int64[b + 1]: list i is values[ends[i]:ends[i + 1]]
    """

    values: Int32
    ends: Int64

    @classmethod
    def of(cls, lists: Sequence[Any]) -> Lists:
        arrays = [np.asarray(one, np.int32) for one in lists]
        ends = np.cumsum([0, *map(len, arrays)])
        return cls(np.concatenate(arrays) if arrays else np.empty(0, np.int32), ends)

    @classmethod
    def joined(cls, parts: Sequence[Lists], order: Int64) -> Lists:
        """List order[0], order[1], ... of all lists of `parts`."""
        sizes = np.concatenate([np.diff(one.ends) for one in parts])
        begins = (np.cumsum(sizes) - sizes)[order]
        ends = np.concatenate([[0], np.cumsum(sizes[order])])
        places = np.arange(ends[-1]) + np.repeat(begins - ends[:-1], sizes[order])
        return cls(np.concatenate([one.values for one in parts])[places], ends)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> Int32:
        place = range(len(self))[index]
        return self.values[self.ends[place] : self.ends[place + 1]]


class Mapped:
    """Spans of rows, in ascending order. It never changes, so threads may share it.

    firsts  int64[spans], the first row of each
    fixed   name -> type of the values of a column that has max_length of them in each row
    ragged  names of columns of lists; `segments` is there as its `PARTS`
    """

    def __init__(self, fixed: dict[str, Any], ragged: Sequence[str], max_length: int) -> None:
        self._max_length = max_length
        self._fixed = fixed
        self._ragged = sorted(ragged, key="segments".__eq__)  # which come last
        sizes = [_OF_SEGMENTS if name == "segments" else 2 for name in self._ragged]
        self._hold(np.empty((2 + len(fixed) + sum(sizes), 0), np.int64), [])

    def _hold(self, table: Int64, batches: list[Any]) -> None:
        """Set what is mapped: the batches, and where their columns are.

        table  int64[lines, spans]: the first row of each, the first row after it, `_addresses`
        """
        self._table, self._batches = table, batches  # which own the memory
        lines = iter(table)
        self.firsts: Int64 = next(lines)
        self._ends: Int64 = next(lines)
        # name -> (type, addresses of offsets, or None, and of values)
        self._columns: dict[str, tuple[Any, Any, Any]] = {}
        for name, kind in self._fixed.items():
            self._columns[name] = (np.dtype(kind), None, next(lines))
        for name in self._ragged:
            offsets = next(lines)
            parts = PARTS if name == "segments" else {name: np.int8 if name == SIDE else np.int32}
            for part, kind in parts.items():
                self._columns[part] = (np.dtype(kind), offsets, next(lines))

    @property
    def segments(self) -> Int64:
        """int64[5, spans] of the column `segments`, see `gathering.find_pieces`."""
        return self._table[-_OF_SEGMENTS:]

    def _of(self, table: Int64, batches: list[Any]) -> Mapped:
        other = Mapped(self._fixed, self._ragged, self._max_length)
        other._hold(np.ascontiguousarray(table), batches)
        return other

    def added(self, first: int, batches: Sequence[Any]) -> Mapped:
        """These spans and new ones: the rows of record batches, of which the first is `first`."""
        at, spans = int(np.searchsorted(self.firsts, first)), []
        for batch in batches:
            span = [first, first + batch.num_rows]
            for name in (*self._fixed, *self._ragged):
                span += _addresses(batch.column(name), fixed=name in self._fixed)
            spans.append(span)
            first += batch.num_rows
        new = np.array(spans, np.int64).reshape(-1, len(self._table)).T
        table = np.concatenate([self._table[:, :at], new, self._table[:, at:]], axis=1)
        return self._of(table, [*self._batches[:at], *batches, *self._batches[at:]])

    def without(self, begins: Int64, ends: Int64) -> Mapped:
        """These spans but for those of some rows: begins[k] .. ends[k], ascending."""
        at = np.searchsorted(ends, self.firsts, side="right")
        keep = self.firsts < np.append(begins, self.firsts.max(initial=0) + 1)[at]
        return self._of(self._table[:, keep], [self._batches[k] for k in np.flatnonzero(keep)])

    def first_absent(self, rows: Int64) -> int:
        """The place in `rows` of the first that is in no span; -1 when all are here."""
        absent: int = gathering.first_absent(rows, self.firsts, self._ends)
        return absent

    def gather(self, rows: Int64, name: str) -> Any:
        """A column of rows that are all here, copied: an array [b, max_length], or `Lists`. Of
        `segments` a part, by its name.
        """
        kind, offsets, values = self._columns[name]
        if offsets is None:
            out = np.empty((len(rows), self._max_length), kind)
            to, row_bytes = out.view(np.uint8).reshape(-1), self._max_length * kind.itemsize
            gathering.gather_rows(rows, self.firsts, values, row_bytes, to)
            return out
        ends = np.empty(len(rows) + 1, np.int64)
        gathering.count_values(rows, self.firsts, offsets, ends)
        found = np.empty(ends[-1], kind)
        gathering.gather_values(rows, self.firsts, offsets, values, ends, found)
        return Lists(found, ends)


def in_parts(columns: Sequence[str]) -> list[str]:
    """Names of columns, with those of the parts in place of `segments`."""
    return [part for name in columns for part in (PARTS if name == "segments" else [name])]


def _addresses(column: Any, *, fixed: bool) -> list[int]:
    """Where the values of a column are; of lists the address of their offsets comes first, and of
    `segments` how many there are last.
    """
    values = column.values
    if fixed:
        return [values.to_numpy()[column.offset * column.type.list_size :].ctypes.data]
    edges = column.offsets.to_numpy().ctypes.data
    if not values.type.num_fields:
        return [edges, values.to_numpy().ctypes.data]
    parts = [values.field(part).to_numpy().ctypes.data for part in PARTS]
    return [edges, *parts, len(values)]
