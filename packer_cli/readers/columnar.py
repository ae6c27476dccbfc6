"""Parquet, both Arrow IPC forms, and Hugging Face dataset folders: positions are row numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
import pyarrow.parquet as pq

from packer_cli.config import PackConfig
from packer_cli.errors import DataError, from_os_error, named
from packer_cli.readers.token_columns import check_tokens, clipped
from packer_cli.records import BadRecord, InputFile, Int64, Records, Slice
from packer_cli.shapes import Shape

_BATCH_ROWS = 1024
_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_SKIP = "mend the row, or use --on-error skip"


@contextmanager
def _reading(file: InputFile) -> Iterator[None]:
    try:
        yield
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{file.path}: not a readable {file.format} file: {reason}",
            "fetch or write the file again",
        ) from error
    except OSError as error:
        if error.errno is not None:
            raise from_os_error(error, file.path, "read") from error
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{file.path}: not a readable {file.format} file: {reason}",
            "fetch or write the file again",
        ) from error


class _ColumnarReader:
    """What Parquet and Arrow share once there are record batches."""

    holds_tokens = True

    def describe(self, file: InputFile, position: int) -> str:
        return f"row {position}"

    def _records(
        self, file: InputFile, batches: Iterator[Any], first_row: int, shape: Shape, consumed: float
    ) -> Iterator[Records]:
        """`consumed`: bytes of the file per row, for progress."""
        row = first_row
        for batch in batches:
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                part = batch.slice(start, _BATCH_ROWS)
                size = round(part.num_rows * consumed)
                if shape.kind == "text":
                    yield _texts(file, part.column(shape.columns["text"]), row, size)
                elif shape.kind == "tokens":
                    yield _tokens(file, part, row, size)
                else:
                    yield _fields(part, shape, row, size)
                row += part.num_rows


class ParquetReader(_ColumnarReader):
    """Split by row groups; decoded a thousand rows at a time."""

    splittable = True

    def row_group_bytes(self, file: InputFile) -> list[int]:
        """Uncompressed bytes of each row group: the weights of slices."""
        with _reading(file), pq.ParquetFile(file.path) as parquet:
            metadata = parquet.metadata
            return [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]

    def row_group_rows(self, file: InputFile) -> list[int]:
        """The rows of each row group: positions count through them."""
        with _reading(file), pq.ParquetFile(file.path) as parquet:
            metadata = parquet.metadata
            return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]

    def fields(self, file: InputFile, config: PackConfig) -> list[str] | None:
        with _reading(file), pq.ParquetFile(file.path) as parquet:
            names: list[str] = parquet.schema_arrow.names
            return names

    def read(
        self, file: InputFile, part: Slice, shape: Shape, config: PackConfig, *, peek: bool = False
    ) -> Iterator[Records]:
        with _reading(file), pq.ParquetFile(file.path) as parquet:
            metadata = parquet.metadata
            names = _columns(file, parquet.schema_arrow, shape)
            stop = metadata.num_row_groups if part.stop is None else part.stop
            first = sum(metadata.row_group(i).num_rows for i in range(part.start))
            groups = list(range(part.start, stop))
            batches = parquet.iter_batches(_BATCH_ROWS, row_groups=groups, columns=names)
            per_row = file.size / max(metadata.num_rows, 1)
            yield from self._records(file, batches, first, shape, per_row)

    def describe(self, file: InputFile, position: int) -> str:
        with _reading(file), pq.ParquetFile(file.path) as parquet:
            first = 0
            for group in range(parquet.metadata.num_row_groups):
                rows = parquet.metadata.row_group(group).num_rows
                if position < first + rows:
                    return f"row group {group}, row {position - first} (row {position} of the file)"
                first += rows
        return f"row {position}"


class ArrowReader(_ColumnarReader):
    """The IPC file form and the stream form, told apart by the file's first bytes."""

    splittable = False

    def fields(self, file: InputFile, config: PackConfig) -> list[str] | None:
        with _reading(file), _open_arrow(file) as (schema, _):
            names: list[str] = schema.names
            return names

    def read(
        self, file: InputFile, part: Slice, shape: Shape, config: PackConfig, *, peek: bool = False
    ) -> Iterator[Records]:
        with _reading(file), _open_arrow(file) as (schema, batches):
            names = _columns(file, schema, shape)
            chosen = (batch.select(names) for batch in batches)
            yield from self._records(file, chosen, 0, shape, 0.0)


@contextmanager
def _open_arrow(file: InputFile) -> Iterator[tuple[Any, Iterator[Any]]]:
    with pa.memory_map(file.path) as source:
        if source.size() >= 6 and source.read_at(6, 0) == b"ARROW1":
            with pa.ipc.open_file(source) as reader:
                batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
                yield reader.schema, batches
            return
        # A stream cut between two messages reads short without an error.
        if source.size() < 8 or source.read_at(8, source.size() - 8) != _STREAM_END:
            raise DataError(
                f"{file.path}: no end marker of an Arrow stream; the file was cut short, or is "
                "not Arrow",
                "fetch or write the file again",
            )
        with pa.ipc.open_stream(source) as reader:
            yield reader.schema, iter(reader)


def _columns(file: InputFile, schema: Any, shape: Shape) -> list[str]:
    """The columns to read, checked for presence and type."""
    is_text, is_tokens = shape.kind == "text", shape.kind == "tokens"
    wanted = [shape.columns[own] for own in shape.required]
    wanted += [n for own in shape.optional if (n := shape.columns[own]) in schema.names]
    for name in wanted:
        count = schema.names.count(name)
        if count != 1:
            raise DataError(
                f"{file.path}: {count or 'no'} column{'s' * (count > 1)} '{name}'; "
                f"columns found: {named(schema.names)}",
                "write the file again"
                if is_tokens
                else "name the right one with --text-field, or with --field NAME=COLUMN",
            )
        kind = schema.field(name).type
        if (is_text and not _is_text(kind)) or (is_tokens and not _is_integer_list(kind)):
            raise DataError(
                f"{file.path}: column '{name}' has type {kind}, expected "
                f"{'a string' if is_text else 'a list of integers'}",
                "name the right column with --text-field"
                if is_text
                else "cast it, for example with pyarrow or datasets",
            )
    return wanted


def _is_text(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    is_view = getattr(pa.types, "is_string_view", lambda kind: False)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or is_view(kind))


def _is_integer_list(kind: Any) -> bool:
    is_list = (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )
    return bool(is_list and pa.types.is_integer(kind.value_type))


def _texts(file: InputFile, column: Any, first_row: int, consumed: int) -> Records:
    positions = np.arange(first_row, first_row + len(column), dtype=np.int64)
    bad: dict[int, str] = {}
    try:
        texts: list[str | None] = column.to_pylist()
    except UnicodeDecodeError:
        texts = []
        for i, scalar in enumerate(column):
            try:
                texts.append(scalar.as_py())
            except UnicodeDecodeError as error:
                texts.append(None)
                bad[i] = f"invalid UTF-8 at byte {error.start} of the text"
    good = [text for text in texts if text is not None]
    if len(good) < len(texts):
        for i, text in enumerate(texts):
            if text is None:
                bad.setdefault(i, "the text is null")
        positions = np.delete(positions, list(bad))
    return Records(positions, texts=good, bad=_bad(bad, first_row), consumed=consumed)


def _fields(batch: Any, shape: Shape, first_row: int, consumed: int) -> Records:
    positions = np.arange(first_row, first_row + batch.num_rows, dtype=np.int64)
    columns = {
        own: batch.column(name) for own, name in shape.columns.items() if name in batch.schema.names
    }
    bad: dict[int, str] = {}
    try:
        values = {own: column.to_pylist() for own, column in columns.items()}
    except UnicodeDecodeError:
        values = {own: [None] * batch.num_rows for own in columns}
        for i in range(batch.num_rows):
            try:
                for own, column in columns.items():
                    values[own][i] = column[i].as_py()
            except UnicodeDecodeError as error:
                bad[i] = f"invalid UTF-8 at byte {error.start} of a text"
    records = [
        {own: _without_nulls(values[own][i]) for own in values}
        for i in range(batch.num_rows)
        if i not in bad
    ]
    positions = np.delete(positions, list(bad))
    return Records(positions, fields=records, bad=_bad(bad, first_row), consumed=consumed)


def _without_nulls(value: Any) -> Any:
    """Arrow gives every struct of a column all the fields that any of them has."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _tokens(file: InputFile, batch: Any, first_row: int, consumed: int) -> Records:
    bad: dict[int, str] = {}
    columns: dict[str, Any] = {name: batch.column(name) for name in batch.schema.names}
    ids = columns["input_ids"]
    for name, column in columns.items():
        if column.null_count:
            nulls = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))
            bad.update({int(i): f"{name} is null" for i in nulls})
        uneven = pc.not_equal(pc.list_value_length(column), pc.list_value_length(ids))
        for i in np.flatnonzero(uneven.fill_null(False).to_numpy(zero_copy_only=False)).tolist():
            bad.setdefault(i, f"{name} has {len(column[i])} values, input_ids {len(ids[i])}")
        if pc.list_flatten(column).null_count:
            for i, row in enumerate(column):
                if row.is_valid and row.values.null_count:
                    bad.setdefault(i, f"{name} holds a null")
    keep = np.delete(np.arange(batch.num_rows), list(bad))
    arrays = {name: column.take(pa.array(keep)) for name, column in columns.items()}
    offsets = np.zeros(len(keep) + 1, np.int64)
    np.cumsum(
        pc.list_value_length(arrays["input_ids"]).to_numpy(zero_copy_only=False), out=offsets[1:]
    )

    def flat(name: str) -> Int64 | None:
        if name not in arrays:
            return None
        values: Int64 = clipped(pc.list_flatten(arrays[name]).to_numpy(zero_copy_only=False))
        return values

    values = flat("input_ids")
    assert values is not None  # noqa: S101 the column was checked to exist
    tokens, wrong = check_tokens(values, offsets, flat("labels"), flat("attention_mask"))
    bad.update({int(keep[i]): reason for i, reason in wrong.items()})
    positions = np.delete(np.arange(first_row, first_row + batch.num_rows), list(bad))
    return Records(positions, tokens=tokens, bad=_bad(bad, first_row), consumed=consumed)


def _bad(reasons: dict[int, str], first_row: int) -> list[BadRecord]:
    return [BadRecord(first_row + i, reasons[i], _SKIP) for i in sorted(reasons)]
