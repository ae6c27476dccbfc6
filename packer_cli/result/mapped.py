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
_FIRST, _END, _FIELDS = 0, 1, 2  # lines of a table


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

    fixed   name -> type of the values of a column that has max_length of them in each row
    ragged  names of columns of lists; `segments` is there as its `PARTS`
    """

    def __init__(self, fixed: dict[str, Any], ragged: Sequence[str], max_length: int) -> None:
        self._max_length = max_length
        self._fixed, self._ragged = fixed, ragged
        self._at: dict[str, int] = {}  # the first line of each column in the table
        lines = _FIELDS
        for name in (*fixed, *ragged):
            self._at[name] = lines
            lines += 1 if name in fixed else 2 + len(PARTS) if name == "segments" else 2
        self._table = np.empty((lines, 0), np.int64)
        self._batches: list[Any] = []  # which own the memory

    @property
    def firsts(self) -> Int64:
        """int64[spans], the first row of each."""
        firsts: Int64 = self._table[_FIRST]
        return firsts

    def _of(self, table: Int64, batches: list[Any]) -> Mapped:
        other = Mapped(self._fixed, self._ragged, self._max_length)
        other._table, other._batches = np.ascontiguousarray(table), batches
        return other

    def added(self, first: int, batches: Sequence[Any]) -> Mapped:
        """These spans and new ones: the rows of record batches, of which the first is `first`."""
        at, spans = int(np.searchsorted(self.firsts, first)), []
        for batch in batches:
            columns = [
                _addresses(batch.column(name), fixed=name in self._fixed) for name in self._at
            ]
            spans.append([first, first + batch.num_rows, *(a for one in columns for a in one)])
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
        absent: int = gathering.first_absent(rows, self.firsts, self._table[_END])
        return absent

    def gather(self, rows: Int64, name: str) -> Any:
        """A column of rows that are all here, copied: an array [b, max_length], or `Lists`. Of
        `segments` a part, by its name.
        """
        if name not in self._fixed:
            return self._lists(rows, name)
        kind = np.dtype(self._fixed[name])
        out = np.empty((len(rows), self._max_length), kind)
        to, row_bytes = out.view(np.uint8).reshape(-1), self._max_length * kind.itemsize
        gathering.gather_rows(rows, self.firsts, self._table[self._at[name]], row_bytes, to)
        return out

    def _lists(self, rows: Int64, name: str) -> Lists:
        at, part = self._at["segments" if name in PARTS else name], 1
        if name in PARTS:
            part += list(PARTS).index(name)
        kind = np.int8 if name == SIDE else PARTS.get(name, np.int32)
        offsets, values = self._table[at], self._table[at + part]
        ends = np.empty(len(rows) + 1, np.int64)
        gathering.count_values(rows, self.firsts, offsets, ends)
        found = np.empty(ends[-1], kind)
        gathering.gather_values(rows, self.firsts, offsets, values, ends, found)
        return Lists(found, ends)

    def segments(self) -> Int64:
        """int64[5, spans] of the column `segments`, see `gathering.find_pieces`."""
        at = self._at["segments"]
        return self._table[at : at + 2 + len(PARTS)]


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
