"""The rows of the shards that this process has mapped, copied a batch at a time: `MappedRows`
those of packed directories, `MappedViewRows` those of views.

Every record batch is a span of rows with a place in memory for each column, so a batch is gathered
by kernels from addresses. An object never changes: while one thread gathers from it, others may
make another one with more spans. For the column `source` they give the input of each segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from packer_cli._kernels import gathering
from packer_cli.config.columns import PAIR, SIDE
from packer_cli.errors import DataError
from packer_cli.records import Int64
from packer_cli.result.reader import PACK_AGAIN, ragged_of, rows_of
from packer_cli.result.shard_writer import column_type
from packer_cli.result.view import View
from packer_cli.torch.rows import RAGGED, SOURCE, Lists


class MappedRows:
    """Spans of rows, in ascending order. `columns`: which are gathered."""

    def __init__(self, columns: Sequence[str], max_length: int) -> None:
        self._max_length = max_length
        self._kinds = {
            name: np.dtype(np.int8 if name == SIDE else np.int32) if name in RAGGED
            else np.dtype(column_type(name, max_length).value_type.to_pandas_dtype())
            for name in columns
        }  # fmt: skip
        self._firsts, self._ends = np.empty(0, np.int64), np.empty(0, np.int64)
        self._values = {name: np.empty(0, np.int64) for name in columns}  # addresses
        self._offsets = {name: np.empty(0, np.int64) for name in columns if name in RAGGED}
        self._mapped: list[Any] = []  # of each span, the batch that owns its memory

    def added(self, first: int, batches: Sequence[Any]) -> MappedRows:
        """These spans and new ones: the rows of record batches, of which the first is `first`."""
        more = MappedRows(tuple(self._kinds), self._max_length)
        at = int(np.searchsorted(self._firsts, first))
        ends = first + np.cumsum([len(batch) for batch in batches])
        more._firsts = np.insert(self._firsts, at, [first, *ends[:-1]])
        more._ends = np.insert(self._ends, at, ends)
        for name, known in self._values.items():
            if name in RAGGED:
                lists = [_lists_of(batch, name) for batch in batches]
                addresses = [values.ctypes.data for values, _ in lists]
                offsets = [offsets.ctypes.data for _, offsets in lists]
                more._offsets[name] = np.insert(self._offsets[name], at, offsets)
            else:
                addresses = [rows_of(batch.column(name)).ctypes.data for batch in batches]
            more._values[name] = np.insert(known, at, addresses)
        more._mapped = [*self._mapped[:at], *batches, *self._mapped[at:]]
        return more

    @property
    def firsts(self) -> Int64:
        """int64[spans], the first row of each."""
        return self._firsts

    def without(self, begins: Int64, ends: Int64) -> MappedRows:
        """These spans but for those of some rows: begins[k] .. ends[k], ascending."""
        less = MappedRows(tuple(self._kinds), self._max_length)
        at = np.searchsorted(ends, self._firsts, side="right")
        keep = self._firsts < np.append(begins, self._firsts.max(initial=0) + 1)[at]
        less._firsts, less._ends = self._firsts[keep], self._ends[keep]
        less._values = {name: values[keep] for name, values in self._values.items()}
        less._offsets = {name: values[keep] for name, values in self._offsets.items()}
        less._mapped = [self._mapped[k] for k in np.flatnonzero(keep)]
        return less

    def first_absent(self, rows: Int64) -> int:
        """The place in `rows` of the first that is in no span; -1 when all are here."""
        absent: int = gathering.first_absent(rows, self._firsts, self._ends)
        return absent

    def gather(self, rows: Int64) -> dict[str, Any]:
        """The columns of rows that are all here: an array [b, max_length], or `Lists`."""
        return {name: self._column(rows, name) for name in self._kinds}

    def _column(self, rows: Int64, name: str) -> Any:
        kind, values = self._kinds[name], self._values[name]
        if name in RAGGED:
            ends, offsets = np.empty(len(rows) + 1, np.int64), self._offsets[name]
            gathering.count_values(rows, self._firsts, offsets, ends)
            gathered = np.empty(ends[-1], kind)
            gathering.gather_values(rows, self._firsts, offsets, values, ends, gathered)
            return Lists(gathered, ends)
        out = np.empty((len(rows), self._max_length), kind)
        to, row_bytes = out.view(np.uint8).reshape(-1), self._max_length * kind.itemsize
        gathering.gather_rows(rows, self._firsts, values, row_bytes, to)
        return out


def _lists_of(batch: Any, name: str) -> tuple[Any, Any]:
    """(values, int32 offsets) of a column's lists; of `source`, the inputs of segments."""
    if name != SOURCE:
        return ragged_of(batch.column(name))
    segments = batch.column("segments")
    return segments.values.field("file").to_numpy(), segments.offsets.to_numpy()


class MappedViewRows:
    """The same for the rows of a view, which are filled from mapped documents; but `pair` and
    `side` are its own.
    """

    def __init__(self, columns: Sequence[str], view: View) -> None:
        self._columns, self._view, self._rows = columns, view, view.rows
        own = [name for name in (PAIR, SIDE) if name in columns]
        self._own = MappedRows(own, view.max_length)

    def added(self, first: int, batches: Sequence[Any]) -> MappedViewRows:
        more = MappedViewRows(self._columns, self._view)
        more._rows = self._rows.added(first, batches)
        more._own = self._own.added(first, batches)
        return more

    def first_absent(self, rows: Int64) -> int:
        return self._rows.first_absent(rows)

    def gather(self, rows: Int64) -> dict[str, Any]:
        """As `MappedRows`. Raises DataError for a row that cannot be filled."""
        try:
            values, _ = self._rows.fill(rows, self._columns)
        except ValueError as error:
            raise DataError(f"{self._view.path}: {error}", PACK_AGAIN) from error
        if SOURCE in self._columns:
            values[SOURCE] = self._rows.files(rows)
        own = self._own.gather(rows)
        filled = {
            name: Lists(*values[name]) if name in RAGGED else values[name]
            for name in self._columns if name not in own
        }  # fmt: skip
        return filled | own
