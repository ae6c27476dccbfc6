"""Parquet, both Arrow IPC forms, and Hugging Face dataset folders: positions are row numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
import pyarrow.parquet as pq

from packer_cli import storage
from packer_cli.config.documents import DocumentConfig
from packer_cli.config.shapes import Shape
from packer_cli.errors import DataError, damaged_input, from_os_error
from packer_cli.inputs.arrow_records import (
    by_columns,
    columns_to_read,
    fields_at,
    fields_of,
    is_integer_list,
    is_text_type,
    texts_of,
    tokens_of,
)
from packer_cli.inputs.byte_streams import HashedFile
from packer_cli.inputs.looked_at import FIRST, Sample
from packer_cli.inputs.parquet_pages import pages
from packer_cli.records import BadRecord, Group, InputFile, Int64, LookedAt, Records, Slice
from packer_cli.result.document_writer import kind_in
from packer_cli.result.manifest import TOKENIZED

# Texts and fields become objects, each with a size of its own; lists of tokens do not.
_BATCH_ROWS, _TOKEN_ROWS = 1024, 1 << 16
_BATCH_BYTES = 4 << 20
# The memory that cells of a batch may take once each has its own copy of its dictionary entry.
_DENSE_BYTES, _MOST_DENSE_BYTES = 16 << 20, 1 << 30
_BUFFER_BYTES = 1 << 20
_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_OVERLONG = "raise --max-line-bytes, or use --on-error skip"
# The memory that a page may take whatever --max-line-bytes is: other formats take as much.
_LEAST_REFUSED = 64 << 20


@contextmanager
def _reading(file: InputFile) -> Iterator[None]:
    try:
        yield
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise damaged_input(
            f"{file.path}: not a readable {file.format} file: {reason}",
            "fetch or write the file again",
        ) from error
    except OSError as error:
        if error.errno is not None:
            raise from_os_error(error, file.path, "read") from error
        reason = str(error).splitlines()[0]
        raise damaged_input(
            f"{file.path}: not a readable {file.format} file: {reason}",
            "fetch or write the file again",
        ) from error


class _ColumnarReader:
    """The parts of reading that Parquet and Arrow share, from record batches on."""

    holds_tokens = True

    def describe(self, file: InputFile, position: int) -> str:
        return f"row {position}"

    def groups(self, file: InputFile) -> list[Group]:
        return []

    def _records(
        self,
        file: InputFile,
        batches: Iterator[Any],
        first_row: int,
        shape: Shape,
        consumed: float,
        longest: int,
    ) -> Iterator[Records]:
        """`consumed`: bytes of the file per row, for progress. `longest`: bytes in a cell."""
        row = first_row
        for batch in batches:
            for column in filter(lambda one: is_integer_list(one.type), batch.columns):
                column.validate(full=True)  # kernels write where its offsets say
            sizes = {name: _sizes(batch.column(name)) for name in batch.schema.names}
            for start, stop in _cuts(sizes, longest, _most_rows(shape)):
                part = batch.slice(start, stop - start)
                size = round(part.num_rows * consumed)
                overlong = next((name for name in sizes if sizes[name][start] > longest), None)
                if overlong is not None:
                    what = "the text" if shape.kind == "text" else overlong
                    reason = f"{what} is longer than {longest} bytes"
                    bad = [BadRecord(row, reason, _OVERLONG)]
                    yield Records(np.empty(0, np.int64), bad=bad, consumed=size)
                elif shape.kind == "text":
                    yield texts_of(part.column(shape.columns["text"]), row, size)
                elif shape.kind == "tokens":
                    yield tokens_of(part, row, size)
                else:
                    yield fields_of(part, shape, row, size)
                row += part.num_rows


def _sizes(column: Any) -> Int64:
    """Bytes of each cell, 0 for nulls; of nested values with their offsets."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        sizes = pa.array(_sizes(column.dictionary)).take(column.indices)
    elif is_integer_list(kind):
        sizes = pc.multiply(pc.list_value_length(column), kind.value_type.bit_width // 8)
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        sizes = pc.binary_length(column)
    elif is_text_type(kind):  # Arrow has no function for the lengths of views
        sizes = pa.array([len(cell.as_buffer() or b"") for cell in column], pa.int64())
    else:
        sizes = pa.array([column.slice(i, 1).nbytes for i in range(len(column))], pa.int64())
    lengths: Int64 = sizes.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths


def _most_rows(shape: Shape) -> int:
    return _TOKEN_ROWS if shape.kind == "tokens" else _BATCH_ROWS


def _cuts(sizes: dict[str, Int64], longest: int, most_rows: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of parts of few rows and bytes; a row with a cell above `longest` is alone."""
    columns = list(sizes.values())
    rows = len(columns[0])
    filled = np.cumsum(np.sum(columns, axis=0)) // _BATCH_BYTES
    alone = np.flatnonzero(np.max(columns, axis=0) > longest)
    full = np.flatnonzero(np.diff(filled)) + 1
    edges = np.concatenate([np.arange(0, rows, most_rows), full, alone, alone + 1, [rows]])
    return pairwise(np.unique(edges).tolist())


def _footer(file: InputFile) -> tuple[Any, Int64]:
    """The metadata of a Parquet file, and the first row of each row group."""
    return _footer_of(replace(file, path=storage.identity(file.path)))


@lru_cache(maxsize=8)  # a footer is as long as there are row groups, and many units read one file
def _footer_of(file: InputFile) -> tuple[Any, Int64]:
    with storage.open_arrow(file.path) as source, pq.ParquetFile(source) as parquet:
        metadata = parquet.metadata
    rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    return metadata, np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])


class ParquetReader(_ColumnarReader):
    """Split by row groups; decoded a few megabytes at a time."""

    def groups(self, file: InputFile) -> list[Group]:
        with _reading(file):
            metadata, _ = _footer(file)
            groups = map(metadata.row_group, range(metadata.num_row_groups))
            return [Group(one.num_rows, one.total_byte_size) for one in groups]

    def fields(self, file: InputFile, config: DocumentConfig) -> list[str] | None:
        with _reading(file):
            names: list[str] = _footer(file)[0].schema.to_arrow_schema().names
            return names

    def read(
        self,
        file: InputFile,
        part: Slice,
        shape: Shape,
        config: DocumentConfig,
        *,
        peek: bool = False,
    ) -> Iterator[Records]:
        with _reading(file):
            metadata, first_rows = _footer(file)
            # buffered, or a row group's column would be read in one piece
            with (
                HashedFile(file.path) as hashed,
                pq.ParquetFile(
                    hashed, metadata=metadata, buffer_size=_BUFFER_BYTES, pre_buffer=False
                ) as parquet,
            ):
                names = columns_to_read(file, parquet.schema_arrow, shape)
                stop = metadata.num_row_groups if part.stop is None else part.stop
                consumed = file.size / max(metadata.num_rows, 1)
                for groups in _readable(file, metadata, range(part.start, stop), names, config):
                    first_row = int(first_rows[groups.start])
                    if isinstance(groups, _Overlong):
                        bad = [BadRecord(first_row, groups.reason, _OVERLONG)]
                        yield Records(np.empty(0, np.int64), texts=[], bad=bad)
                        continue
                    rows = max(int(first_rows[groups.stop]) - first_row, 1)
                    size = sum(_stored_bytes(metadata.row_group(i), names) for i in groups)
                    most = _most_rows(shape)
                    at_once = min(max(_BATCH_BYTES * rows // max(size, 1), 1), most)
                    for group in map(metadata.row_group, groups):
                        at_once = min(at_once, _rows_of_dictionaries(file, group, names, most))
                    batches = parquet.iter_batches(at_once, row_groups=list(groups), columns=names)
                    own = (by_columns(batch, names) for batch in batches)
                    yield from self._records(
                        file, own, first_row, shape, consumed, config.max_line_bytes
                    )
                first = None if part.start or stop == 0 else _first_rows(file, metadata)
                end = Records.end(hashed.stretches())
                yield replace(end, looked_at=_looked_at(first, shape, config))

    def describe(self, file: InputFile, position: int) -> str:
        with _reading(file):
            _, first_rows = _footer(file)
        group = int(np.searchsorted(first_rows, position, side="right")) - 1
        row = position - first_rows[group]
        return f"row group {group}, row {row} (row {position} of the file)"


def _first_rows(file: InputFile, metadata: Any) -> Any:
    """A batch of the first rows of a Parquet file: all columns of texts whose pages are small."""
    schema, group = metadata.schema.to_arrow_schema(), metadata.row_group(0)
    names = []
    for one in schema:
        own = [column for column in _chunks(group, [one.name])
               if column.path_in_schema.split(".")[0] == one.name]  # fmt: skip
        first = [next(pages(file.path, column), None) for column in own]
        if _holds_text(one.type) and all(page and page.size < _DENSE_BYTES for page in first):
            names.append(one.name)
    # not through the file whose bytes are hashed as they are read
    with (
        storage.open_arrow(file.path) as source,
        pq.ParquetFile(
            source, metadata=metadata, buffer_size=_BUFFER_BYTES, pre_buffer=False
        ) as parquet,
    ):
        return next(parquet.iter_batches(FIRST, row_groups=[0], columns=names), None)


def _looked_at(batch: Any, shape: Shape, config: DocumentConfig) -> LookedAt:
    """What the first rows of a batch hold."""
    if batch is None:
        return LookedAt()

    def fields(row: int) -> dict[str, Any] | None:
        try:
            record: dict[str, Any] = batch.slice(row, 1).to_pylist()[0]
        except UnicodeDecodeError:
            return None
        return record

    return Sample(shape, config).of(min(batch.num_rows, FIRST), fields)


def _holds_text(kind: Any) -> bool:
    if pa.types.is_struct(kind):
        return any(_holds_text(kind.field(i).type) for i in range(kind.num_fields))
    if pa.types.is_nested(kind) and hasattr(kind, "value_type"):  # lists
        return _holds_text(kind.value_type)
    return is_text_type(kind)


def _chunks(row_group: Any, names: list[str]) -> list[Any]:
    """Of some columns, or of some more where names begin alike."""
    columns = (row_group.column(i) for i in range(row_group.num_columns))
    return [column for column in columns if column.path_in_schema.startswith(tuple(names))]


def _stored_bytes(row_group: Any, names: list[str]) -> int:
    """Decompressed bytes of some columns."""
    return sum(column.total_uncompressed_size for column in _chunks(row_group, names))


def _rows_of_dictionaries(file: InputFile, row_group: Any, names: list[str], most: int) -> int:
    """How many rows, at `most`, may be read at once, though a cell that is stored once, in a
    dictionary, may be in all of them.
    """
    rows: int = min(row_group.num_rows, most)
    for chunk in _chunks(row_group, names):
        if not chunk.has_dictionary_page or chunk.total_uncompressed_size * rows < _DENSE_BYTES:
            continue
        page = next(pages(file.path, chunk), None)
        if page and page.is_dictionary:
            cell = page.size // max(page.values, 1)  # of the usual length, and the longest
            rows = min(rows, _DENSE_BYTES // max(cell, 1), _MOST_DENSE_BYTES // max(page.size, 1))
    return max(rows, 1)


class _Overlong(NamedTuple):
    """A row group whose only row has a cell that is too long to be read."""

    start: int
    reason: str


def _readable(
    file: InputFile, metadata: Any, groups: range, names: list[str], config: DocumentConfig
) -> Iterator[range | _Overlong]:
    """Row groups that follow each other, without those of one row that is overlong.

    Raises DataError for an overlong cell among others: no reader passes over a part of a group.
    """
    begin = groups.start
    for group in groups:
        reason = _overlong(file, metadata.row_group(group), names, config.max_line_bytes)
        if not reason:
            continue
        if metadata.row_group(group).num_rows > 1:
            raise DataError(
                f"{file.path}, row group {group}: {reason}; the rows "
                "beside it cannot be read without it",
                "raise --max-line-bytes, or write the file again without that row",
            )
        if begin < group:
            yield range(begin, group)
        yield _Overlong(group, reason)
        begin = group + 1
    if begin < groups.stop:
        yield range(begin, groups.stop)


def _overlong(file: InputFile, row_group: Any, names: list[str], longest: int) -> str:
    """Why a row group cannot be read in bounded memory, before any is taken; "" if it can."""
    for chunk in _chunks(row_group, names):
        if chunk.total_uncompressed_size <= max(longest, _LEAST_REFUSED):
            continue
        for page in pages(file.path, chunk):
            if page.size > max(longest * max(page.values, 1), _LEAST_REFUSED):
                name = chunk.path_in_schema.split(".")[0]
                what = f"{page.values} cells" if page.values > 1 else "one cell"
                return f"{name} is longer than {longest} bytes: {page.size} bytes in {what}"
    return ""


class ArrowReader(_ColumnarReader):
    """The IPC file form and the stream form, told apart by the file's first bytes."""

    def fields(self, file: InputFile, config: DocumentConfig) -> list[str] | None:
        with (
            _reading(file),
            storage.open_bytes(file.path) as stored,
            _open_arrow(file, stored) as (
                schema,
                _,
            ),
        ):
            names: list[str] = schema.names
            return names

    def read(
        self,
        file: InputFile,
        part: Slice,
        shape: Shape,
        config: DocumentConfig,
        *,
        peek: bool = False,
    ) -> Iterator[Records]:
        with (
            _reading(file),
            HashedFile(file.path) as hashed,
            _open_arrow(file, hashed) as (
                schema,
                read_columns,
            ),
        ):
            batches = read_columns(columns_to_read(file, schema, shape))
            yield from self._records(file, batches, 0, shape, 0.0, config.max_line_bytes)
            texts = [one.name for one in schema if schema.names.count(one.name) == 1
                     and _holds_text(one.type)]  # fmt: skip
            first = next(read_columns(texts), None)
            end = Records.end(hashed.stretches())
            yield replace(end, looked_at=_looked_at(first, shape, config))


@contextmanager
def _open_arrow(
    file: InputFile, stored: Any
) -> Iterator[tuple[Any, Callable[[list[str]], Iterator[Any]]]]:
    """The schema, and a function from names of columns to record batches of them."""
    with pa.PythonFile(stored, mode="r") as source:
        is_file = source.size() >= 6 and source.read_at(6, 0) == b"ARROW1"
        # A stream cut between two messages reads short without an error.
        if not is_file and (
            source.size() < 8 or source.read_at(8, source.size() - 8) != _STREAM_END
        ):
            raise damaged_input(
                f"{file.path}: no end marker of an Arrow stream; the file was cut short, or is "
                "not Arrow",
                "fetch or write the file again",
            )

        def start(fields: list[int] | None = None) -> Any:
            source.seek(0)
            options = pa.ipc.IpcReadOptions(included_fields=fields)
            return (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source, options=options)

        with start() as reader:
            schema = reader.schema
        if kind_in(schema) == TOKENIZED:  # whose tokenizer and trained tokens are told elsewhere
            raise DataError(
                f"{file.path}: is a part of a tokenized directory",
                "name the directory that packer tokenize has finished",
            )

        def read_columns(names: list[str]) -> Iterator[Any]:
            outer = dict.fromkeys(fields_at(schema, name)[0][0].name for name in names)
            with start([schema.get_field_index(name) for name in outer]) as reader:
                if is_file:
                    batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
                else:
                    batches = iter(reader)
                yield from (by_columns(batch, names) for batch in batches)

        yield schema, read_columns
