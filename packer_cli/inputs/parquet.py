"""Read Parquet. Slices count row groups, and a few megabytes are decoded at a time.

A cell that a file stores once, in a dictionary, may be in every row, so batches have fewer rows
where dictionaries are large. The footer lists the dictionaries; it is decoded here, because pyarrow
aborts the process if it looks up a column chunk in a damaged footer. A footer costs a few hundred
bytes of memory per column and row group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
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

# The memory that cells of a batch may take once each has its own copy of its dictionary entry.
_DENSE_BYTES, _MOST_DENSE_BYTES = 16 << 20, 1 << 30
_BUFFER_BYTES = 1 << 20
_HEADER_BYTES = 64  # of a page without statistics
# numbers of fields: of a footer, a row group, a chunk, its meta data, and the header of a page
_ROW_GROUPS, _COLUMNS, _META_DATA = 4, 1, 3
_PATH, _SIZE, _PAGES, _DICTIONARY = 3, 6, 9, 11
_KIND, _PAGE_SIZE, _OF_DICTIONARY, _VALUES = 1, 2, 7, 1
_DICTIONARY_PAGE = 2
# what decoding damaged bytes raises
_DAMAGE = (IndexError, KeyError, TypeError, ValueError, RecursionError)


class ParquetReader(ColumnarReader):
    """Reader of `.parquet` and `.pq` files."""

    def groups(self, file: InputFile) -> list[RowGroup]:
        with reading(file):
            metadata = _footer(file).metadata
            groups = map(metadata.row_group, range(metadata.num_row_groups))
            return [RowGroup(group.num_rows, group.total_byte_size) for group in groups]

    def weight(self, file: InputFile) -> int:
        return sum(group.bytes for group in self.groups(file))

    def split(self, file: InputFile, parts: int) -> list[Slice]:
        groups = self.groups(file)
        return [Slice(file.index, i, i + 1, group.bytes) for i, group in enumerate(groups)]

    @contextmanager
    def opened(self, file: InputFile) -> Iterator[ColumnarFile]:
        footer = _footer(file)
        metadata = footer.metadata
        with (
            storage.open_arrow(file.path, file.status()) as source,
            parquet_file(source, metadata) as parquet,
        ):

            def batches(part: Slice, names: list[str], most: int) -> Iterator[Any]:
                groups = list(range(metadata.num_row_groups)[part.start : part.stop])
                if groups and names:
                    paths = [fields_at(schema, name)[0] for name in names]
                    stored = [*dict.fromkeys(".".join(f.name for f in path) for path in paths)]
                    at_once = _rows_at_once(file, footer, groups, stored, most)
                    read = parquet.iter_batches(
                        at_once, row_groups=groups, columns=stored,
                        use_threads=False,  # a process with threads cannot fork the workers
                    )  # fmt: skip
                    yield from (by_columns(batch, names) for batch in read)

            schema, row_bytes = parquet.schema_arrow, file.size / max(metadata.num_rows, 1)
            yield ColumnarFile(schema, batches, row_bytes)

    def first_row(self, file: InputFile, part: Slice) -> int:
        return int(_footer(file).first_rows[part.start])

    def describe(self, file: InputFile, position: int) -> str:
        with reading(file):
            first_rows = _footer(file).first_rows
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


class _Chunk(NamedTuple):
    """One column of a row group.

    path        names that lead to the column, with dots between them
    size        bytes after decompression
    dictionary  byte of the file at which its dictionary begins; None if it has none
    """

    path: str
    size: int
    dictionary: int | None


class _Footer(NamedTuple):
    """Footer of a Parquet file.

    metadata    Arrow's
    first_rows  int64[row groups + 1], the first row of each row group
    chunks      of each row group
    """

    metadata: Any
    first_rows: Int64
    chunks: list[list[_Chunk]]


def _footer(file: InputFile) -> _Footer:
    return _footer_of(replace(file, path=storage.identity(file.path)))


@lru_cache(maxsize=64)  # a unit has slices of many files, and many units read one file
def _footer_of(file: InputFile) -> _Footer:
    with storage.open_arrow(file.path, file.status()) as source, parquet_file(source) as parquet:
        metadata, end = parquet.metadata, source.size() - 8
        size = int.from_bytes(source.read_at(4, end), "little")
        data: bytes = source.read_at(size, end - size)
    rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    try:
        chunks = [[*map(_chunk, group[_COLUMNS])] for group in _struct(data)[_ROW_GROUPS]]
    except _DAMAGE as error:
        raise pa.ArrowInvalid(f"its footer cannot be read: {error!r}") from error
    return _Footer(metadata, offsets_of(rows), chunks)


def _chunk(column: Mapping[int, Any]) -> _Chunk:
    """Return the chunk that a struct of the footer describes."""
    facts, dictionary = column[_META_DATA], None
    if _DICTIONARY in facts:  # some writers have 0 there
        dictionary = facts[_DICTIONARY] or facts[_PAGES]
    return _Chunk(b".".join(facts[_PATH]).decode(), facts[_SIZE], dictionary)


def _rows_at_once(
    file: InputFile, footer: _Footer, groups: list[int], names: list[str], most: int
) -> int:
    """Return how many rows may be decoded at once, at `most`, even if a cell that is stored once,
    in a dictionary, is in all of them.
    """
    counts: list[int] = np.diff(footer.first_rows)[groups].tolist()
    chunks = [
        (rows, chunk)
        for rows, number in zip(counts, groups, strict=True)
        for chunk in footer.chunks[number]
        if chunk.path.startswith(tuple(names))  # and some more, that begin alike
    ]
    size = sum(chunk.size for _, chunk in chunks)
    at_once: int = min(
        most, BATCH_BYTES * sum(counts) // max(size, 1), *(rows for rows, _ in chunks)
    )
    for rows, chunk in chunks:
        if chunk.dictionary is not None and chunk.size * rows >= _DENSE_BYTES:
            size, values = _dictionary(file, chunk.dictionary)
            cell = size // max(values, 1)  # of the usual length, and the longest
            dense = _DENSE_BYTES // max(cell, 1), _MOST_DENSE_BYTES // max(size, 1)
            at_once = min(at_once, *dense)
    return max(at_once, 1)


def _dictionary(file: InputFile, begin: int) -> tuple[int, int]:
    """Return a dictionary's bytes after decompression and its number of values; 0, 0 if there is no
    readable one at this byte.
    """
    with storage.open_bytes(file.path, expected=file.status()) as source:
        source.seek(begin)
        with suppress(*_DAMAGE):
            header = _struct(source.read(_HEADER_BYTES))
            if header[_KIND] == _DICTIONARY_PAGE:
                return header[_PAGE_SIZE], header[_OF_DICTIONARY][_VALUES]
    return 0, 0


# --- Thrift's compact protocol


def _struct(data: bytes) -> dict[int, Any]:
    """Decode a struct: the values of its fields, by number. Raises one of `_DAMAGE`."""
    fields: dict[int, Any] = _decoded(data, 0, 12)[0]
    return fields


def _decoded(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    """Decode the value of a type that begins at a byte. Return it, and the byte where it ends."""
    if kind < 3:  # true or false
        return kind == 1, at
    if kind == 3:
        return data[at], at + 1
    if kind < 7:  # an integer; one that is not negative is stored doubled
        number, at = _varint(data, at)
        return number >> 1, at
    if kind == 7:  # a float
        return None, at + 8
    if kind == 8:
        size, at = _varint(data, at)
        return data[at : at + size], at + size
    if kind in (9, 10):
        size, inner, at = data[at] >> 4, data[at] & 15, at + 1
        if size == 15:
            size, at = _varint(data, at)
        values = list[Any]()
        for _ in range(size):
            value, at = _decoded(data, at, 3 if inner < 3 else inner)
            values.append(value)
        return values, at
    if kind != 12:  # maps, which Parquet does not have
        raise ValueError(f"type {kind}")
    fields, number = dict[int, Any](), 0
    while head := data[at]:  # the distance from the field before, and the type
        at += 1
        if head > 15:
            number += head >> 4
        else:
            number, at = _decoded(data, at, 4)
        fields[number], at = _decoded(data, at, head & 15)
    return fields, at + 1


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Decode a number that has seven bits in a byte. Return it, and the byte where it ends."""
    value = shift = 0
    while (byte := data[at]) > 127 and shift < 64:
        value |= (byte & 127) << shift
        shift += 7
        at += 1
    return value | byte << shift, at + 1
