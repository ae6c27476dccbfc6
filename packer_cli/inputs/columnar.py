"""Read files of columns: Arrow IPC and Parquet.

Only the columns that are used are read. Positions are row numbers. Values become what JSON lines
would have, a few megabytes at a time; plain texts and lists of numbers are never Python objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
import pyarrow.parquet as pq

from packer_cli import storage
from packer_cli.errors import DataError, UsageError, damaged_input, from_os_error, named
from packer_cli.inputs import byte_streams
from packer_cli.inputs.formats import FIRST, FirstRecords, Reader
from packer_cli.inputs.record_columns import (
    BATCH_BYTES,
    ReadColumns,
    is_list,
    parts_of,
    records_of,
)
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.formats import SHIFTED
from packer_cli.options.shapes import (
    ABSENT,
    FACTS_OF_TRACES,
    MASKS,
    TRACE,
    Shape,
    may_hold,
    names_in_traces,
    value_at,
)
from packer_cli.options.value_columns import MESSAGE
from packer_cli.records import (
    BadRecord,
    InputFile,
    Int64,
    Records,
    RowGroup,
    Slice,
    Texts,
    offsets_of,
)
from packer_cli.result.columns import kind_in
from packer_cli.result.manifest import TOKENIZED

# Texts and fields become objects, each with a size of its own; lists of tokens do not.
_BATCH_ROWS, _TOKEN_ROWS = 1024, 1 << 16
_AS_OBJECTS = 8  # times as many bytes as the numbers of a list
_FILE_MARK = b"ARROW1"
_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_BINARY = ("binary", "large_binary", "binary_view")  # in which many writers keep texts
_TEXTS = ("string", "large_string", "string_view", *_BINARY)
_PLAIN = {"string": pa.string(), "large_string": pa.large_string()}
_PLAIN |= {"binary": pa.string(), "large_binary": pa.large_string()}
_SKIP = "fix the row, or use --on-error skip"
_HEADER_BYTES = 64  # of a file that may be of another format
_Convert = Callable[[Any], Any]


@contextmanager
def reading(file: InputFile) -> Iterator[None]:
    """Within this context, errors of Arrow become DataErrors."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last one: of names
        if isinstance(error, OSError) and error.errno is not None:
            raise from_os_error(error, file.path, "read") from error
        reason, tip = f": {str(error).splitlines()[0]}", "fetch or write the file again"
        with suppress(OSError, DataError), storage.open_bytes(file.path) as source:
            if content := byte_streams.other_content(source.read(_HEADER_BYTES)):
                reason, tip = f"; it {content[0]}", content[1]
        problem = f"{file.path}: not a readable {file.format} file{reason}"
        raise damaged_input(problem, tip) from error


# --- which columns


_EXPECTED = {  # kind of shape -> its columns' type, and a tip
    "text": ("a string", "name the right column with --text-field"),
    "tokens": ("a list of integers", "cast it, for example with pyarrow or datasets"),
}


def _columns_to_read(
    file: InputFile, schema: Any, shape: Shape, config: DocumentConfig
) -> list[str]:
    """Return the columns to read.

    Raises DataError if one is missing or has a wrong type, UsageError if masks are shifted.
    """
    if shape.kind == TRACE:
        names = chain.from_iterable(names_in_traces(shape).values())
        used = [*names, *config.beside, *FACTS_OF_TRACES]
        return [name for name in schema.names if any(may_hold((name,), path) for path in used)]
    expected, tip = _EXPECTED.get(shape.kind, ("", ""))
    is_right = _may_be_text if shape.kind == "text" else _is_integer_list
    wanted = [shape.columns[field] for field in shape.required]
    wanted += [shape.columns[field] for field in shape.optional
               if fields_at(schema, shape.columns[field])]  # fmt: skip
    field_of = {column: field for field, column in shape.columns.items()}
    values = [
        name
        for name, column in config.value_columns.items()
        if column.of != MESSAGE and (column.default is None or fields_at(schema, name))
    ]
    values += [name for name in config.where_fields if fields_at(schema, name)]
    masks = [name for name in wanted if field_of.get(name) in MASKS]
    if masks and SHIFTED.encode() in (schema.metadata or {}):
        raise UsageError(
            f"{file.path}: its {masks[0]} is that of the next token, for another trainer",
            "pack the directory that it was exported from, or export it without --shift",
        )
    for name in [*wanted, *values]:
        fields = fields_at(schema, name)
        if (count := len(fields)) != 1:
            raise DataError(
                f"{file.path}: {count or 'no'} column{'s' * (count > 1)} '{name}'; "
                f"columns found: {named(schema.names)}",
                "rename one of them"
                if count
                else "name the right one with --text-field, or with --field NAME=COLUMN",
            )
        kind = fields[0][-1].type
        is_mask = _is_number_list(kind) and field_of.get(name) in MASKS
        if expected and name in wanted and not is_right(kind) and not is_mask:
            problem = f"{file.path}: column '{name}' has type {kind}, expected {expected}"
            raise DataError(problem, tip)
    return [*dict.fromkeys((*wanted, *values))]


def fields_at(fields: Iterable[Any], column: str) -> list[tuple[Any, ...]]:
    """Return the paths to a column, each as Arrow's fields from the outermost to the innermost.

    Fields of that very name come first. Otherwise dots lead into structs, or up to the JSON that
    may hold the column.
    """
    fields = list(fields)
    if exact := [(field,) for field in fields if field.name == column]:
        return exact
    return [
        (outer, *path)
        for outer in fields
        if column.startswith(f"{outer.name}.")
        for path in (
            fields_at(outer.type, column[len(outer.name) + 1 :])
            if pa.types.is_struct(outer.type)
            else [()] * _is_json(outer.type)
        )
    ]


def by_columns(batch: Any, columns: list[str]) -> Any:
    """Return a batch of these columns, taken out of the structs and the JSON that hold them."""
    if all(column in batch.schema.names for column in columns):
        return batch.select(columns)
    arrays = []
    for column in columns:
        outer, *path = (field.name for field in fields_at(batch.schema, column)[0])
        array = batch.column(outer)
        array = pc.struct_field(array, path) if path else array
        inner = column[len(".".join((outer, *path))) + 1 :]
        arrays.append(_within_json(array, inner) if inner else array)
    return pa.RecordBatch.from_arrays(arrays, names=columns)


def _within_json(array: Any, name: str) -> Any:
    """Return the values of a name in JSON objects, as JSON; null if an object lacks it."""
    values = list[str | None]()
    for text in array.to_pylist():
        try:
            value = value_at(_decode_json(text), name)
        except msgspec.DecodeError:
            values.append(text)  # bad once it is decoded
            continue
        values.append(None if value is ABSENT else msgspec.json.encode(value).decode())
    return pa.ExtensionArray.from_storage(pa.json_(), pa.array(values, pa.string()))


def _is_json(kind: Any) -> bool:
    """Tell JSON text, in which datasets keeps values of unlike types, from other types."""
    return isinstance(kind, pa.JsonType)


def _is_text(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return str(kind) in _TEXTS


def _may_be_text(kind: Any) -> bool:
    return _is_text(kind) or _is_json(kind)


def _is_integer_list(kind: Any) -> bool:
    return is_list(kind) and bool(pa.types.is_integer(kind.value_type))


def _is_number_list(kind: Any) -> bool:
    return is_list(kind) and bool(pa.types.is_primitive(kind.value_type))


# --- from record batches to records


class ColumnarFile(NamedTuple):
    """An opened file of columns.

    schema     Arrow's
    batches    from a slice, names of columns and a number of rows: record batches of these columns
               with at most so many rows, in order
    row_bytes  bytes of the file per row, about, for progress
    """

    schema: Any
    batches: Callable[[Slice, list[str], int], Iterator[Any]]
    row_bytes: float = 0.0


class ColumnarReader(Reader):
    """Reader of record batches; a format only opens its files."""

    holds_tokens = True

    def opened(self, file: InputFile) -> AbstractContextManager[ColumnarFile]:
        """Open a file."""
        raise NotImplementedError

    def first_row(self, file: InputFile, part: Slice) -> int:
        """Return the number of a slice's first row."""
        return 0

    def first(self, file: InputFile, config: DocumentConfig) -> FirstRecords | None:
        with reading(file), self.opened(file) as table:
            schema = table.schema

        def read(columns: list[str]) -> dict[str, list[Any]]:
            names = [name for name in columns if len(fields_at(schema, name)) == 1]
            values: dict[str, list[Any]] = {name: [] for name in names}
            if not names:
                return values
            count, held = 0, 0.0
            with reading(file), self.opened(file) as table:
                for batch in table.batches(Slice(file.index, 0, None, 0), names, FIRST):
                    rows = batch.slice(0, FIRST - count)
                    row_bytes = max(rows.nbytes / max(rows.num_rows, 1), 1)
                    rows = rows.slice(0, int((BATCH_BYTES - held) // row_bytes) + 1)
                    for name in names:
                        values[name] += _values(rows.column(name), name, {})
                    count, held = count + rows.num_rows, held + rows.num_rows * row_bytes
                    if count >= FIRST or held >= BATCH_BYTES:
                        break
            return values

        return FirstRecords(schema.names, read)

    def read(
        self, file: InputFile, part: Slice, shape: Shape, config: DocumentConfig
    ) -> Iterator[Records]:
        with reading(file), self.opened(file) as table:
            row = self.first_row(file, part)
            most = _TOKEN_ROWS if shape.kind == "tokens" else _BATCH_ROWS
            names = _columns_to_read(file, table.schema, shape, config)
            for batch in table.batches(part, names, most):
                yield from _records(batch, row, shape, most, config, table.row_bytes)
                row += batch.num_rows

    def describe(self, file: InputFile, position: int) -> str:
        return f"row {position}"


def _records(
    batch: Any, row: int, shape: Shape, most: int, config: DocumentConfig, row_bytes: float
) -> Iterator[Records]:
    """Yield the records of a batch that begins at a row of the file, some at a time."""
    longest = byte_streams.MAX_LINE_BYTES
    for column in filter(lambda column: _is_number_list(column.type), batch.columns):
        column.validate(full=True)  # kernels trust its offsets
    sizes = {name: _sizes(batch.column(name)) for name in batch.schema.names}
    each = np.array(list(sizes.values()))
    become_objects = shape.columns.values() if shape.kind != "tokens" else ()
    weights = [
        _AS_OBJECTS if name in become_objects and _is_number_list(batch.column(name).type) else 1
        for name in sizes
    ]
    for start, stop in parts_of(np.array(weights) @ each, each.max(0), longest, most):
        overlong = next((name for name in sizes if sizes[name][start] > longest), None)
        if overlong is None:
            positions = np.arange(row + start, row + stop, dtype=np.int64)
            rows, consumed = batch.slice(start, stop - start), round((stop - start) * row_bytes)
            yield records_of(  # nothing else holds the texts while they are worked on
                _columns_of(rows, positions, shape, config), shape, config, _SKIP, consumed
            )
        else:
            reason = f"{overlong} is longer than {longest} bytes"
            bad = [BadRecord(row + start, reason, byte_streams.CUT)]
            yield Records(np.empty(0, np.int64), bad=bad, consumed=round(row_bytes))


def _sizes(column: Any) -> Int64:
    """Return the bytes of each cell, int64[n]: 0 for nulls; nested values count their offsets."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        sizes = pa.array(_sizes(column.dictionary)).take(column.indices)
    elif _is_number_list(kind):
        sizes = pc.multiply(pc.list_value_length(column), _bytes_of(kind.value_type))
    elif pa.types.is_primitive(kind):
        sizes = pa.repeat(_bytes_of(kind), len(column))
    elif str(kind) in _PLAIN:
        sizes = pc.binary_length(column)
    elif _is_text(kind):  # Arrow has no function for the lengths of views
        sizes = pa.array([len(cell.as_buffer() or b"") for cell in column], pa.int64())
    else:
        sizes = pa.array([column.slice(i, 1).nbytes for i in range(len(column))], pa.int64())
    lengths: Int64 = sizes.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths


def _bytes_of(kind: Any) -> int:
    return max(int(kind.bit_width) // 8, 1)


def _columns_of(batch: Any, positions: Int64, shape: Shape, config: DocumentConfig) -> ReadColumns:
    """Return a record batch as columns, without the rows that cannot be read."""
    names = {field: name for field, name in shape.columns.items() if name in batch.schema.names}
    if shape.kind == TRACE:
        names = {name: name for name in batch.schema.names}
    bad = dict[int, str]()
    columns: dict[str, Any] = {field: batch.column(name) for field, name in names.items()}
    if shape.kind == "text":
        texts = _plain_texts(columns["text"])
        columns["text"] = texts or _texts(columns["text"], bad)
    elif shape.kind != "tokens":
        columns = {field: _values(column, field, bad) for field, column in columns.items()}
    values = dict[str, Any]()
    for name in config.beside if shape.kind != TRACE else ():
        if name in batch.schema.names:
            column = batch.column(name)
            if pa.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            kind = column.type
            is_number = pa.types.is_primitive(kind) and not pa.types.is_temporal(kind)
            is_plain = is_number or (is_list(kind) and not _converter(kind))
            values[name] = column if is_plain else _values(column, name, bad)
    if bad:
        is_good = np.ones(len(positions), bool)
        is_good[[*bad]] = False
        wrong = [BadRecord(int(positions[row]), bad[row], _SKIP) for row in sorted(bad)]
        good = batch.filter(pa.array(is_good))
        return _columns_of(good, positions[is_good], shape, config)._replace(bad=wrong)
    return ReadColumns(positions, columns, values, [])


def _texts(column: Any, bad: dict[int, str]) -> list[Any]:
    """Return the texts of a column. OUT bad: by row, what is wrong with it."""
    values, reasons = _values(column, "text", bad), {type(None): "null", bytes: "not UTF-8"}
    for row, text in enumerate(values):
        if not isinstance(text, str):
            bad.setdefault(row, f"the text is {reasons.get(type(text), 'not a string')}")
    return values


def _values(column: Any, field: str, bad: dict[int, str]) -> list[Any]:
    """Return values as JSON lines would have them. OUT bad: by row, what is wrong with it."""
    convert = _converter(column.type)
    with suppress(ValueError, msgspec.DecodeError):  # UnicodeDecodeError, too
        cells: list[Any] = column.to_pylist()
        return [*map(convert, cells)] if convert else cells
    values = list[Any]()
    for row, cell in enumerate(column):
        try:
            value = cell.as_py()
            values.append(convert(value) if convert else value)
        except UnicodeDecodeError as error:
            values.append(None)
            bad.setdefault(row, f"invalid UTF-8 at byte {error.start} of the {field}")
        except msgspec.DecodeError as error:
            values.append(None)
            bad.setdefault(row, f"the {field} holds JSON that is not valid: {error}")
        except ValueError:
            values.append(None)
            bad.setdefault(row, f"the {field} holds a time of nanoseconds, expected microseconds")
    return values


def _converter(kind: Any) -> _Convert | None:
    """Return a function from Python values of an Arrow type to those that JSON lines would have.

    It decodes JSON and texts in bytes, makes objects of maps, and removes nulls from structs, since
    each struct has all fields that any in its column has. None if values stay as they are.
    """
    if _is_json(kind):
        return _decode_json
    if str(kind) in _BINARY:
        return _decode_text
    if isinstance(kind, pa.BaseExtensionType):
        return _converter(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _converter(kind.value_type)
    if is_list(kind):
        convert = _converter(kind.value_type)
        return convert and partial(_convert_list, convert)
    if pa.types.is_map(kind):
        return partial(_convert_map, _converter(kind.key_type), _converter(kind.item_type))
    if pa.types.is_struct(kind):
        inner = {field.name: convert for field in kind if (convert := _converter(field.type))}
        return partial(_convert_struct, inner)
    return None


def _decode_json(value: Any) -> Any:
    return None if value is None else msgspec.json.decode(value)


def _decode_text(value: Any) -> Any:
    """Decode a text. Bytes that are not UTF-8, such as a picture, stay as they are."""
    with suppress(UnicodeDecodeError):
        return None if value is None else value.decode()
    return value


def _convert_map(of_keys: _Convert | None, of_items: _Convert | None, value: Any) -> Any:
    """Make an object of (key, item) pairs. Its nulls stay."""
    if value is None:
        return None
    pairs = ((of_keys(key) if of_keys else key, item) for key, item in value)
    return {str(key): of_items(item) if of_items else item for key, item in pairs}


def _convert_list(convert: _Convert, value: Any) -> Any:
    return None if value is None else [*map(convert, value)]


def _convert_struct(converters: Mapping[str, _Convert], value: Any) -> Any:
    if value is None:
        return None
    fields = {name: inner for name, inner in value.items() if inner is not None}
    for name in fields.keys() & converters.keys():
        fields[name] = converters[name](fields[name])
    return fields


def _plain_texts(column: Any) -> Texts | None:
    """Return texts straight from Arrow's buffers; None if rows must be looked at one by one."""
    kind = pa.large_binary()
    as_text = _PLAIN.get(str(column.type))
    if as_text is None or column.null_count or not len(column):
        return None
    with suppress(pa.ArrowInvalid):  # what is not UTF-8
        column = column.cast(as_text)
        column.validate(full=True)
        ended = pc.binary_join_element_wise(
            column.cast(kind), pa.scalar(b"", kind), pa.scalar(b"\xff", kind)
        )
        _, offsets, data = ended.buffers()
        return Texts(
            np.frombuffer(data, np.uint8), np.frombuffer(offsets, np.int64, len(column) + 1)
        )
    return None


# --- Arrow


def open_ipc(source: Any) -> tuple[Any, Callable[[Iterable[str]], Iterator[Any]]]:
    """Open the file form or the stream form of Arrow IPC, which differ in their first bytes.

    Returns the schema, and a function from names of columns, or [] for all, to record batches.
    Raises ArrowInvalid for data that was cut short.
    """
    # The file form is a stream between two marks, with an index. Arrow starts threads to read the
    # index, and a process that has threads cannot fork the workers of a run.
    size = source.size()
    begin = len(_FILE_MARK) + 2 if source.read_at(min(6, size), 0) == _FILE_MARK else 0
    end = source.read_at(min(8, size), max(size - 8, 0))  # a stream may be cut between two messages
    if not end.endswith(_FILE_MARK) if begin else end != _STREAM_END:
        raise pa.ArrowInvalid("no end marker of Arrow: it is cut short, or not Arrow")

    def batches(names: Iterable[str]) -> Any:
        fields = [*map(schema.get_field_index, names)]
        source.seek(begin)
        options = pa.ipc.IpcReadOptions(included_fields=fields or None, use_threads=False)
        return pa.ipc.open_stream(source, options=options)

    source.seek(begin)
    schema = pa.ipc.open_stream(source).schema
    return schema, batches


class ArrowReader(ColumnarReader):
    """Reader of both forms of Arrow IPC; a file is one slice."""

    @contextmanager
    def opened(self, file: InputFile) -> Iterator[ColumnarFile]:
        with storage.open_arrow(file.path) as source:
            schema, batches_of = open_ipc(source)
            if kind_in(schema) == TOKENIZED:  # trained tokens are marked in another column
                raise DataError(
                    f"{file.path}: is a part of a tokenized directory",
                    "name the directory that packer tokenize has finished",
                )

            def batches(part: Slice, names: list[str], most: int) -> Iterator[Any]:
                outer = dict.fromkeys(fields_at(schema, name)[0][0].name for name in names)
                yield from (by_columns(_checked(batch), names) for batch in batches_of(outer))

            yield ColumnarFile(schema, batches)


def _checked(batch: Any) -> Any:
    """Return the batch if no offset lies outside its values. Raises ArrowInvalid.

    A text that is not UTF-8 is damage within another value; in a column of texts it makes one
    record bad, later.
    """
    if batch.num_rows < 0:
        raise pa.ArrowInvalid(f"a record batch of {batch.num_rows} rows")
    for column in batch.columns:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            if "UTF8" not in str(error) or not _is_text(column.type):
                raise
    return batch


# --- Parquet: slices count row groups. A footer costs a few hundred bytes a column and row group

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

                read = parquet.iter_batches(
                    min(most, _rows_at_once(file, tuple(stored), [all_groups[i] for i in numbers])),
                    row_groups=numbers,
                    columns=stored,
                    use_threads=False,  # a process with threads cannot fork the workers
                )
                yield from (by_columns(batch, names) for batch in read)

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


def _rows_at_once(file: InputFile, columns: tuple[str, ...], groups: list[RowGroup]) -> int:
    """Return how many rows of these groups make a few megabytes: by the first rows of the file, and
    by the mean row, but not fewer than a few, since other columns may have most of its bytes.
    """
    mean = sum(group.bytes for group in groups) // max(sum(group.rows for group in groups), 1)
    by_mean = max(BATCH_BYTES // max(mean, 1), _FEW_ROWS)
    return max(min(by_mean, BATCH_BYTES // max(_bytes_of_first(file, columns), 1)), 1)


@lru_cache(maxsize=64)
def _bytes_of_first(file: InputFile, columns: tuple[str, ...]) -> int:
    """Return the bytes of one of the first rows, with its own copy of what a file stores once."""
    with storage.open_arrow(file.path) as source, parquet_file(source) as parquet:
        first = next(parquet.iter_batches(_FIRST_ROWS, columns=columns, use_threads=False), None)
        return first.nbytes // max(first.num_rows, 1) if first else 0
