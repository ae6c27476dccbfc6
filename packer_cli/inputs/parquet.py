"""Read Parquet. Slices count row groups, and a few megabytes are decoded at a time.

A footer costs a few hundred bytes of memory per column and row group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from packer_cli import storage
from packer_cli.inputs.columnar import (
    ColumnarFile,
    ColumnarReader,
    by_columns,
    fields_at,
    reading,
)
from packer_cli.inputs.record_columns import BATCH_BYTES
from packer_cli.records import InputFile, Int64, RowGroup, Slice, offsets_of

_BUFFER_BYTES = 1 << 20
_FIRST_ROWS, _FEW_ROWS = 16, 64  # that show the size of rows, and that are always decoded together


class ParquetReader(ColumnarReader):
    """Reader of `.parquet` and `.pq` files."""

    def groups(self, file: InputFile) -> list[RowGroup]:
        with reading(file):
            return _groups(file)[1]

    def weight(self, file: InputFile) -> int:
        return sum(group.bytes for group in self.groups(file))

    def split(self, file: InputFile, parts: int) -> list[Slice]:
        groups = self.groups(file)
        return [Slice(file.index, i, i + 1, group.bytes) for i, group in enumerate(groups)]

    @contextmanager
    def opened(self, file: InputFile) -> Iterator[ColumnarFile]:
        metadata, all_groups = _groups(file)
        with (
            storage.open_arrow(file.path) as source,
            parquet_file(source, metadata) as parquet,
        ):

            def batches(part: Slice, names: list[str], most: int) -> Iterator[Any]:
                numbers = list(range(len(all_groups))[part.start : part.stop])
                if not numbers or not names:
                    return
                paths = [fields_at(schema, name)[0] for name in names]
                stored = [*dict.fromkeys(".".join(f.name for f in path) for path in paths)]

                def read(rows: int) -> Iterator[Any]:
                    return parquet.iter_batches(  # type: ignore[no-any-return]
                        rows, row_groups=numbers, columns=stored,
                        use_threads=False,  # a process with threads cannot fork the workers
                    )  # fmt: skip

                first = next(read(_FIRST_ROWS), None)
                if first is not None:
                    at_once = _rows_at_once(first, [all_groups[i] for i in numbers])
                    yield from (by_columns(batch, names) for batch in read(min(most, at_once)))

            schema, row_bytes = parquet.schema_arrow, file.size / max(metadata.num_rows, 1)
            yield ColumnarFile(schema, batches, row_bytes)

    def first_row(self, file: InputFile, part: Slice) -> int:
        return int(_first_rows(file)[part.start])

    def describe(self, file: InputFile, position: int) -> str:
        with reading(file):
            first_rows = _first_rows(file)
        group = int(np.searchsorted(first_rows, position, side="right")) - 1
        row = position - first_rows[group]
        return f"row group {group}, row {row} (row {position} of the file)"


def parquet_file(source: Any, metadata: Any = None) -> Any:
    """Open a Parquet file. It is buffered little, and pages are compared with their checksums."""
    return pq.ParquetFile(
        source,
        metadata=metadata,
        buffer_size=_BUFFER_BYTES,  # or the column of a row group would be read whole
        pre_buffer=False,
        page_checksum_verification=True,
    )


def _groups(file: InputFile) -> tuple[Any, list[RowGroup]]:
    """Return the metadata of a file, as Arrow has it, and its row groups."""
    return _groups_of(replace(file, path=storage.identity(file.path)))


@lru_cache(maxsize=64)  # a unit has slices of many files, and many units read one file
def _groups_of(file: InputFile) -> tuple[Any, list[RowGroup]]:
    with storage.open_arrow(file.path) as source, parquet_file(source) as parquet:
        metadata = parquet.metadata
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    return metadata, [RowGroup(group.num_rows, group.total_byte_size) for group in groups]


def _first_rows(file: InputFile) -> Int64:
    """Return the first row of each row group, int64[row groups + 1]."""
    return offsets_of([group.rows for group in _groups(file)[1]])


def _rows_at_once(first: Any, groups: list[RowGroup]) -> int:
    """Return how many rows of these groups make a few megabytes: by the `first`, in which each has
    its own copy of what a file stores once, and by the mean row, but not fewer than a few of these,
    since columns that are not read may have most of its bytes.
    """
    mean = sum(group.bytes for group in groups) // max(sum(group.rows for group in groups), 1)
    by_mean = max(BATCH_BYTES // max(mean, 1), _FEW_ROWS)
    by_first = BATCH_BYTES * int(first.num_rows) // max(first.nbytes, 1)
    return int(max(min(by_mean, by_first), 1))
