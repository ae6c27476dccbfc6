"""Parquet: split by row groups, decoded a few megabytes at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from packer_cli import storage
from packer_cli.inputs.byte_streams import HashedFile
from packer_cli.inputs.columnar import ColumnarReader, Table, by_columns, reading
from packer_cli.inputs.token_columns import BATCH_BYTES
from packer_cli.records import Group, InputFile, Int64, Slice

# The memory that cells of a batch may take once each has its own copy of its dictionary entry.
_DENSE_BYTES, _MOST_DENSE_BYTES = 16 << 20, 1 << 30
_BUFFER_BYTES = 1 << 20
# How a page of a dictionary begins, in Thrift's compact protocol: its kind, its size once it is
# decompressed, its size as stored, perhaps a checksum, and the number of its values.
_NUMBER = rb"\x15([\x80-\xff]*[\0-\x7f])"
_DICTIONARY = re.compile(rb"\x15\x04%b%b(?:%b)?[\x3c\x4c]%b" % ((_NUMBER,) * 4), re.DOTALL)
_HEADER_BYTES = 64


class ParquetReader(ColumnarReader):
    """`.parquet` and `.pq` files: slices count row groups."""

    def groups(self, file: InputFile) -> list[Group]:
        with reading(file):
            metadata, _ = _footer(file)
            groups = map(metadata.row_group, range(metadata.num_row_groups))
            return [Group(one.num_rows, one.total_byte_size) for one in groups]

    def weight(self, file: InputFile) -> int:
        return sum(group.bytes for group in self.groups(file))

    def split(self, file: InputFile, parts: int) -> list[Slice]:
        groups = self.groups(file)
        return [Slice(file.index, i, i + 1, one.bytes) for i, one in enumerate(groups)]

    @contextmanager
    def opened(self, file: InputFile, hashed: HashedFile) -> Iterator[Table]:
        metadata, _ = _footer(file)
        # buffered, or the column of a row group would be read whole
        how = {"buffer_size": _BUFFER_BYTES, "pre_buffer": False}
        with pq.ParquetFile(hashed, metadata=metadata, **how) as parquet:

            def batches(part: Slice, names: list[str], most: int) -> Iterator[Any]:
                groups = list(range(metadata.num_row_groups)[part.start : part.stop])
                if groups and names:
                    at_once = _rows_at_once(file, metadata, groups, names, most)
                    every = parquet.iter_batches(at_once, row_groups=groups, columns=names)
                    yield from (by_columns(batch, names) for batch in every)

            row_bytes = file.size / max(metadata.num_rows, 1)
            yield Table(parquet.schema_arrow, batches, row_bytes)

    def first_row(self, file: InputFile, part: Slice) -> int:
        return int(_footer(file)[1][part.start])

    def describe(self, file: InputFile, position: int) -> str:
        with reading(file):
            _, first_rows = _footer(file)
        group = int(np.searchsorted(first_rows, position, side="right")) - 1
        row = position - first_rows[group]
        return f"row group {group}, row {row} (row {position} of the file)"


def _footer(file: InputFile) -> tuple[Any, Int64]:
    """The metadata of a Parquet file, and the first row of each row group."""
    return _footer_of(replace(file, path=storage.identity(file.path)))


@lru_cache(maxsize=8)  # a footer is as long as there are row groups, and many units read one file
def _footer_of(file: InputFile) -> tuple[Any, Int64]:
    with storage.open_arrow(file.path, file.status()) as source, pq.ParquetFile(source) as parquet:
        metadata = parquet.metadata
    rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    return metadata, np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])


def _rows_at_once(
    file: InputFile, metadata: Any, groups: list[int], names: list[str], most: int
) -> int:
    """The number of rows, at `most`, that may be decoded at once, though a cell that is stored
    once, in a dictionary, may be in all of them.
    """
    row_groups = [metadata.row_group(i) for i in groups]
    chunks = [
        (one.num_rows, chunk)
        for one in row_groups
        for chunk in map(one.column, range(one.num_columns))
        if chunk.path_in_schema.startswith(tuple(names))  # and some more, that begin alike
    ]
    size = sum(chunk.total_uncompressed_size for _, chunk in chunks)
    whole = sum(one.num_rows for one in row_groups)
    at_once: int = min(most, BATCH_BYTES * whole // max(size, 1), *(rows for rows, _ in chunks))
    for rows, chunk in chunks:
        if chunk.has_dictionary_page and chunk.total_uncompressed_size * rows >= _DENSE_BYTES:
            size, values = _dictionary(file, chunk)
            cell = size // max(values, 1)  # of the usual length, and the longest
            dense = _DENSE_BYTES // max(cell, 1), _MOST_DENSE_BYTES // max(size, 1)
            at_once = min(at_once, *dense)
    return max(at_once, 1)


def _dictionary(file: InputFile, chunk: Any) -> tuple[int, int]:
    """The bytes of a column chunk's dictionary once it is decompressed, and the number of its
    values; 0, 0 where its header, which Arrow does not give, cannot be read.
    """
    with storage.open_bytes(file.path, found=file.status()) as source:
        source.seek(chunk.dictionary_page_offset or chunk.data_page_offset)
        found = _DICTIONARY.match(source.read(_HEADER_BYTES))
    return (_number(found[1]), _number(found[4])) if found else (0, 0)


def _number(data: bytes) -> int:
    """A number of Thrift's compact protocol that is not negative: seven bits in a byte, doubled."""
    return sum((byte & 127) << 7 * i for i, byte in enumerate(data)) >> 1
