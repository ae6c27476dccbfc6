"""Parquet: split by row groups, decoded a few megabytes at a time.

A cell of a gigabyte may be a page of a few kilobytes: what would not fit into memory must be known
before Arrow makes room for it. Arrow itself gives no page headers, so this reads them: Thrift's
compact protocol, of which only the sizes are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packer_cli import storage
from packer_cli.errors import DataError
from packer_cli.inputs.byte_streams import HashedFile
from packer_cli.inputs.columnar import (
    OVERLONG,
    ColumnarReader,
    by_columns,
    columns_to_read,
    holds_text,
    looked_at,
    most_rows,
    reading,
)
from packer_cli.inputs.formats import FIRST
from packer_cli.inputs.token_columns import BATCH_BYTES
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.shapes import Shape
from packer_cli.records import BadRecord, Group, InputFile, Int64, Records, Slice

# The memory that cells of a batch may take once each has its own copy of its dictionary entry.
_DENSE_BYTES, _MOST_DENSE_BYTES = 16 << 20, 1 << 30
_BUFFER_BYTES = 1 << 20
# The memory that a page may take whatever --max-line-bytes is: other formats take as much.
_LEAST_REFUSED = 64 << 20
_HEADER_BYTES = 1 << 16
# Stores take a request for each page.
_MOST_FETCHED = 64 << 20
# Fields of a page's header by their numbers; its details: of data, of a dictionary, of data of
# version 2.
_KIND, _DECOMPRESSED, _STORED, _DETAILS = 1, 2, 3, (5, 7, 8)
_DICTIONARY = 2


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

    def fields(self, file: InputFile, config: DocumentConfig) -> list[str] | None:
        with reading(file):
            names: list[str] = _footer(file)[0].schema.to_arrow_schema().names
            return names

    def read(
        self, file: InputFile, part: Slice, shape: Shape, config: DocumentConfig
    ) -> Iterator[Records]:
        with reading(file), HashedFile(file) as hashed:
            metadata, first_rows = _footer(file)
            with _opened(hashed, metadata) as parquet:
                names = columns_to_read(file, parquet.schema_arrow, shape)
                stop = metadata.num_row_groups if part.stop is None else part.stop
                consumed = file.size / max(metadata.num_rows, 1)
                for groups, reason in _readable(
                    file, metadata, range(part.start, stop), names, config.max_line_bytes
                ):
                    first_row = int(first_rows[groups.start])
                    if reason:
                        bad = [BadRecord(first_row, reason, OVERLONG)]
                        yield Records(np.empty(0, np.int64), bad=bad)
                        continue
                    at_once = _rows_at_once(file, metadata, groups, names, most_rows(shape))
                    batches = parquet.iter_batches(at_once, row_groups=list(groups), columns=names)
                    own = (by_columns(batch, names) for batch in batches)
                    yield from self.records(own, first_row, shape, consumed, config.max_line_bytes)
                first = None if part.start or stop == 0 else _first_rows(file, metadata)
                end = Records.end(hashed.stretches())
                yield replace(end, looked_at=looked_at(first, shape, config))

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


@contextmanager
def _opened(source: Any, metadata: Any) -> Iterator[Any]:
    """A file with a known footer; buffered, or the column of a row group would be read whole."""
    with pq.ParquetFile(
        source, metadata=metadata, buffer_size=_BUFFER_BYTES, pre_buffer=False
    ) as parquet:
        yield parquet


def _first_rows(file: InputFile, metadata: Any) -> Any:
    """A batch of the first rows of a Parquet file: all columns of texts whose pages are small. None
    where Arrow cannot decode one of them, which may be one that nothing uses.
    """
    schema, group = metadata.schema.to_arrow_schema(), metadata.row_group(0)
    names = []
    for one in schema:
        own = [column for column in _chunks(group, [one.name])
               if column.path_in_schema.split(".")[0] == one.name]  # fmt: skip
        first = [next(_pages(file, column), None) for column in own]
        if holds_text(one.type) and all(page and page.size < _DENSE_BYTES for page in first):
            names.append(one.name)
    # not through the file whose bytes are hashed as they are read
    with (
        storage.open_arrow(file.path, file.status()) as source,
        _opened(source, metadata) as parquet,
        suppress(pa.ArrowInvalid),
    ):
        return next(parquet.iter_batches(FIRST, row_groups=[0], columns=names), None)
    return None


def _chunks(row_group: Any, names: list[str]) -> list[Any]:
    """The chunks of some columns, or of some more where names begin alike."""
    columns = (row_group.column(i) for i in range(row_group.num_columns))
    return [column for column in columns if column.path_in_schema.startswith(tuple(names))]


def _rows_at_once(
    file: InputFile, metadata: Any, groups: range, names: list[str], most: int
) -> int:
    """The number of rows, at `most`, that may be decoded at once, though a cell that is stored
    once, in a dictionary, may be in all of them.
    """
    row_groups = [metadata.row_group(i) for i in groups]
    chunks = [(one.num_rows, chunk) for one in row_groups for chunk in _chunks(one, names)]
    size = sum(chunk.total_uncompressed_size for _, chunk in chunks)
    whole = sum(one.num_rows for one in row_groups)
    at_once: int = min(most, BATCH_BYTES * whole // max(size, 1), *(rows for rows, _ in chunks))
    for rows, chunk in chunks:
        if chunk.has_dictionary_page and chunk.total_uncompressed_size * rows >= _DENSE_BYTES:
            page = next(_pages(file, chunk), None)
            if page and page.is_dictionary:
                cell = page.size // max(page.values, 1)  # of the usual length, and the longest
                dense = _DENSE_BYTES // max(cell, 1), _MOST_DENSE_BYTES // max(page.size, 1)
                at_once = min(at_once, *dense)
    return max(at_once, 1)


def _readable(
    file: InputFile, metadata: Any, groups: range, names: list[str], longest: int
) -> Iterator[tuple[range, str]]:
    """Row groups that follow each other; alone, those of one row that is overlong, with a reason.

    Raises DataError for an overlong cell among others: no reader passes over a part of a group.
    """
    begin = groups.start
    for group in groups:
        reason = _overlong(file, metadata.row_group(group), names, longest)
        if not reason:
            continue
        if metadata.row_group(group).num_rows > 1:
            raise DataError(
                f"{file.path}, row group {group}: {reason}; the rows "
                "beside it cannot be read without it",
                "raise --max-line-bytes, or write the file again without that row",
            )
        if begin < group:
            yield range(begin, group), ""
        begin = group + 1
        yield range(group, begin), reason
    if begin < groups.stop:
        yield range(begin, groups.stop), ""


def _overlong(file: InputFile, row_group: Any, names: list[str], longest: int) -> str:
    """The reason why a row group cannot be read in bounded memory, or "", before any is taken."""
    for chunk in _chunks(row_group, names):
        if chunk.total_uncompressed_size <= max(longest, _LEAST_REFUSED):
            continue
        for page in _pages(file, chunk):
            if page.size > max(longest * max(page.values, 1), _LEAST_REFUSED):
                name = chunk.path_in_schema.split(".")[0]
                what = f"{page.values} cells" if page.values > 1 else "one cell"
                return f"{name} is longer than {longest} bytes: {page.size} bytes in {what}"
    return ""


class _Page(NamedTuple):
    """`size`: bytes once decompressed. `values`: how many it has, for nested columns of leaves."""

    size: int
    values: int
    is_dictionary: bool


def _pages(file: InputFile, chunk: Any) -> Iterator[_Page]:
    """The pages of a column chunk (of the footer); none further where a header cannot be read."""
    first_only = storage.is_url(file.path) and chunk.total_compressed_size > _MOST_FETCHED
    place = chunk.dictionary_page_offset or chunk.data_page_offset
    end = place + chunk.total_compressed_size
    with storage.open_bytes(file.path, found=file.status()) as source:
        while place < end:
            source.seek(place)
            header = _Header(source.read(_HEADER_BYTES))
            try:
                fields = header.struct()
                values = next(fields[name][1] for name in _DETAILS if name in fields)
                page = _Page(fields[_DECOMPRESSED], values, fields[_KIND] == _DICTIONARY)
                place += header.place + max(fields[_STORED], 0)
            except (IndexError, KeyError, TypeError, StopIteration, RecursionError):
                return  # Arrow says what is wrong with it
            yield page
            if first_only:
                return


class _Header:
    """A struct of Thrift's compact protocol: numbers and structs by the numbers of their fields."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.place = 0

    def struct(self) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while kind := self._byte():
            number = number + (kind >> 4) if kind >> 4 else self._number()
            fields[number] = self._value(kind & 15)
        return fields

    def _value(self, kind: int) -> Any:
        if kind in (1, 2):  # true and false
            return kind == 1
        if kind == 3:
            return self._byte()
        if kind in (4, 5, 6):
            return self._number()
        if kind == 12:
            return self.struct()
        if kind not in (7, 8):  # lists, sets and maps: page headers have none
            raise KeyError(kind)
        size = 8 if kind == 7 else self._unsigned()  # a fraction, or bytes
        self.place += size
        return None

    def _byte(self) -> int:
        self.place += 1
        return self._data[self.place - 1]

    def _unsigned(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 128:
            value |= (byte & 127) << shift
            shift += 7
        return value | byte << shift

    def _number(self) -> int:
        value = self._unsigned()
        return value >> 1 ^ -(value & 1)
