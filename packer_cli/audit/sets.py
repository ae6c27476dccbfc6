"""Sets of other tools: find and recognize their files, and read their rows as flat columns.

`FORMATS` is the table of formats. The first one whose columns are there is used, or the one that
`--format` names. A `SetFile` reads any kind of file as Arrow record batches, and `AuditedSet.read`
turns these into flat columns, a few hundred thousand tokens at a time. Memory does not depend on
the size of the set, and no size that a file claims is allocated unchecked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json

from packer_cli import storage
from packer_cli.errors import DataError, UsageError, from_os_error, named, one_of
from packer_cli.inputs.byte_streams import open_source
from packer_cli.inputs.columnar import ColumnarReader
from packer_cli.inputs.discovery import find_inputs, input_file
from packer_cli.inputs.formats import reader_for
from packer_cli.inputs.indexed_tokens import MegatronReader
from packer_cli.inputs.jsonl import JsonlReader
from packer_cli.inputs.record_columns import is_list
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.shapes import MASKS
from packer_cli.records import InputFile, Int64, Slice, offsets_of
from packer_cli.result.layout import DATASET_DICT, SQUARED_LENGTHS, Shard
from packer_cli.result.manifest import Manifest, TokenizedManifest, is_result, load_any
from packer_cli.result.opening import View, opened
from packer_cli.result.rules import labels_in, sound_batches
from packer_cli.result.tokenized import open_tokenized

# Columns that are read: lists with one value for each token of the row, or for each of its
# documents. `segments` is packer's, see docs/format.md.
_OF_TOKENS = ("input_ids", "labels", *MASKS, "attention_mask", "position_ids")
_OF_DOCUMENTS = (
    "seq_lengths", "seq_lens", "seq_lens_padded", "seq_start_id", "cu_seqlens", "cu_seqlens_padded",
)  # fmt: skip
_READ = (*_OF_TOKENS, *_OF_DOCUMENTS, "segments")
_OF_SEGMENTS = ("file", pa.int32()), ("position", pa.int64()), ("start", pa.int32())
_SEGMENTS = pa.struct([pa.field(*part, nullable=False) for part in _OF_SEGMENTS])
_AT_ONCE = 1 << 17  # tokens: they fit into the cache of a core with all arrays made from them
_LONGEST = 1 << 24  # tokens of a row
_MOST_ROWS = 4096  # decoded together
_MASK = ".mask.npy"
_AGAIN = "copy it again, or write it again"
_WHOLE = "copy it again: it was cut short, or its parts are not of one set"
_NO_RECORD: dict[str, Any] = {"input_ids": []}
_EXPECTED = (
    "a folder of datasets, files of Parquet, Arrow or JSON lines with input_ids, .bin with .idx, "
    ".npy, or a directory of packer"
)


class SetFormat(NamedTuple):
    """A format of sets: the meaning of its columns.

    columns       a set that has all of these has this format
    description   one line for the report
    evidence      the sign of the format
    shift         the place of a token's label: at the token itself (`own`), for trainers that
                  shift labels, or one place earlier (`next`), for those that do not
    by_eos        its trainer separates documents at EOS, and ignores other boundaries
    target_tokens tokens at the end of a document that are only targets, and do not fill a row
    weaker        rule -> the reason why it is only a warning for this format
    """

    columns: tuple[str, ...]
    description: str
    evidence: str = "its columns"
    shift: Literal["own", "next"] = "own"
    by_eos: bool = False
    target_tokens: int = 0
    weaker: Mapping[str, str] = {}


FORMATS = {
    "packer": SetFormat((), "rows of packer pack", "its manifest"),
    "packer-tokenized": SetFormat((), "documents of packer tokenize", "its manifest"),
    "megatron": SetFormat(
        (), "documents of Megatron-LM, which separates them at EOS", "its index", by_eos=True
    ),
    "olmo": SetFormat(
        (),
        "tokens of OLMo, which separates documents at EOS",
        "the name .npy, without a header of numpy",
        by_eos=True,
    ),
    "megatron-bridge": SetFormat(
        ("loss_mask", "seq_start_id"),
        "packed rows of Megatron-Bridge; loss_mask is that of the next token",
        shift="next",
        target_tokens=1,
    ),
    "seq-lens": SetFormat(
        ("seq_lens",), "rows of NeMo Automodel or prime-rl, with shifted labels", shift="next"
    ),
    "trl": SetFormat(
        ("seq_lengths",),
        "packed rows of TRL",
        weaker={
            "cross-document-target": "TRL leaves the first token of a document out of the loss "
            "only with padding_free=True, and older versions not even then"
        },
    ),
    "llamafactory": SetFormat(
        ("labels", "attention_mask", "position_ids"), "rows as LLaMA-Factory and axolotl write them"
    ),
    "columns": SetFormat((), "rows by their columns, for trainers that shift labels themselves"),
    "shifted": SetFormat(
        (), "rows by their columns, whose labels are shifted already", shift="next"
    ),
}


class Column(NamedTuple):
    """A list for each row: values[offsets[i]:offsets[i + 1]]; offsets are int64[rows + 1]."""

    values: npt.NDArray[Any]
    offsets: Int64


class FlatRows(NamedTuple):
    """Consecutive rows from number `first` on, by column; `input_ids` is always there."""

    first: int
    columns: Mapping[str, Column]

    @property
    def rows(self) -> int:
        return len(self.columns["input_ids"].offsets) - 1


class SetFile(NamedTuple):
    """A file, or several files that belong together.

    names      the columns that are read
    ignored    name -> type of columns that are not lists of integers
    batches    spans int64[n, 2] to (number of the first row, record batch), in ascending order, of
               at least the rows in these spans
    documents  True if rows are documents that are not packed yet
    """

    place: str
    rows: int
    names: Sequence[str]
    batches: Callable[[Int64], Iterator[tuple[int, Any]]]
    ignored: Mapping[str, str] = {}
    documents: bool = False


@dataclass(frozen=True)
class AuditedSet:
    """An open set.

    format    name in FORMATS; `meaning` is the format itself, and `evidence` its sign
    facts     the manifest of a result of packer
    left_out  descriptions of what is not read
    """

    name: str
    format: str
    meaning: SetFormat
    evidence: str
    files: Sequence[SetFile]
    facts: Manifest | TokenizedManifest | None = None
    left_out: Sequence[str] = ()

    @cached_property
    def _firsts(self) -> Int64:
        return offsets_of([file.rows for file in self.files])

    @property
    def rows(self) -> int:
        """Number of rows in all files."""
        return int(self._firsts[-1])

    @property
    def names(self) -> Sequence[str]:
        """Names of the columns that are read."""
        return self.files[0].names

    @property
    def documents(self) -> bool:
        """True if rows are documents that are not packed yet."""
        return self.files[0].documents

    @property
    def has_labels(self) -> bool:
        """True if labels or masks mark the trained tokens."""
        return bool({"labels", *MASKS} & {*self.names})

    def where(self, row: int) -> tuple[str, int]:
        """Return (file, number of a row in it)."""
        number = int(np.searchsorted(self._firsts, row, side="right")) - 1
        return self.files[number].place, row - int(self._firsts[number])

    def read(self, spans: Int64) -> Iterator[FlatRows]:
        """Yield the rows spans[k, 0] <= row < spans[k, 1], a few at a time.

        spans  int64[n, 2], in ascending order

        Raises DataError for files that cannot be read.
        """
        for file, first in zip(self.files, self._firsts.tolist(), strict=False):
            inside = spans[(spans[:, 1] > first) & (spans[:, 0] < first + file.rows)] - first
            if len(inside):
                yield from _rows_of(file, np.clip(inside, 0, file.rows), first)


def _rows_of(file: SetFile, spans: Int64, first: int) -> Iterator[FlatRows]:
    last, read = int(spans[-1, 1]), 0
    with _readable(file.place):
        batches = file.batches(spans)
        for at, batch in batches:
            rows = batch.num_rows
            chosen = spans[(spans[:, 1] > at) & (spans[:, 0] < at + rows)] - at
            if len(chosen):
                for array in batch.columns:
                    array.validate(full=True)
                offsets = _column(batch.column("input_ids"), f"{file.place}: input_ids")[1]
                _refuse_long(file.place, offsets, at)
                for begin, stop in np.clip(chosen, 0, rows).tolist():
                    for a, b in _few_tokens(offsets, begin, stop):
                        part = batch.slice(a, b - a)
                        yield FlatRows(first + at + a, _columns_of(part, file.place, at + a))
            read = at + rows
            if read >= last:
                break
        if last == file.rows:
            read += sum(len(batch) for _, batch in batches)
    if read < last or read > file.rows:
        raise DataError(f"{file.place}: holds {read} rows, expected {file.rows}", _AGAIN)


def _refuse_long(place: str, offsets: Int64, first: int = 0) -> None:
    lengths = np.diff(offsets)
    if len(lengths) and (longest := int(lengths.max())) > _LONGEST:
        row = first + int(lengths.argmax())
        raise DataError(
            f"{place}: row {row} has {longest} tokens, expected at most {_LONGEST}",
            "split it into shorter ones",
        )


def _few_tokens(offsets: Int64, begin: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cut the rows begin..stop into ranges (begin, stop) of few tokens each."""
    full = np.flatnonzero(np.diff(offsets[begin + 1 : stop + 1] // _AT_ONCE)) + begin + 1
    yield from ((a, b) for a, b in pairwise([begin, *full.tolist(), stop]) if b > a)


def even_spans(rows: int, wanted: int, longest: int = 32) -> Int64:
    """Spread `wanted` rows evenly over a set, in spans of at most `longest` rows, int64[n, 2].

    Returns one span of all rows if there are not more than wanted.
    """
    if wanted >= rows:
        return np.array([[0, rows]], np.int64)
    count = max(1, min(wanted, -(-wanted // longest)))
    edges = np.linspace(0, rows, count + 1).astype(np.int64)
    sizes = np.diff(np.linspace(0, wanted, count + 1).astype(np.int64))
    return np.stack([edges[:-1], np.minimum(edges[:-1] + sizes, edges[1:])], axis=1)


@contextmanager
def _readable(place: str) -> Iterator[None]:
    """A context that turns errors of Arrow, msgspec and the system into a DataError."""
    try:
        yield
    except (pa.ArrowException, msgspec.MsgspecError, ValueError, OverflowError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise from_os_error(error, place, "read") from error
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{place}: cannot be read: {reason}", _AGAIN) from error


# --- record batches as flat columns


def _column(array: Any, name: str) -> tuple[Any, Int64]:
    """Return (values, offsets int64[rows + 1]) of a column of lists. Raises DataError for nulls."""
    values = array.flatten()
    if array.null_count or values.null_count:
        raise DataError(f"{name} holds a null, expected lists of integers", _AGAIN)
    if pa.types.is_fixed_size_list(array.type):
        return values, np.arange(len(array) + 1, dtype=np.int64) * int(array.type.list_size)
    offsets = array.offsets.to_numpy().astype(np.int64)
    return values, offsets - offsets[0]


def _columns_of(batch: Any, place: str, first: int) -> dict[str, Column]:
    """Return the columns of a batch. Raises DataError if a token has not one value in each."""
    columns, ids = {}, _column(batch.column("input_ids"), place)[1]
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        values, offsets = _column(array, f"{place}: {name}")
        if name in _OF_TOKENS and not np.array_equal(offsets, ids):
            lengths, expected = np.diff(offsets), np.diff(ids)
            row = int(np.argmax(lengths != expected))
            raise DataError(
                f"{place}: row {first + row}: {name} has {lengths[row]} values, expected "
                f"{expected[row]}, as many as input_ids",
                "write the set again: each token needs one value",
            )
        if name == "segments":
            columns["segments.start"] = Column(values.field("start").to_numpy(), offsets)
        else:
            columns[name] = Column(_signed(values.to_numpy(zero_copy_only=False)), offsets)
    return columns


def _signed(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return values as signed integers. Those beyond int64 become negative: out of range, too."""
    if values.dtype.kind == "u" and values.dtype.itemsize > 1:
        return values.astype(f"i{min(8, 2 * values.dtype.itemsize)}")
    return values


def _chosen(schema: Any, place: str) -> tuple[list[str], dict[str, str]]:
    """Return (columns to read, types of ignored ones) of a schema. Raises DataError without ids."""
    kinds = {name: schema.field(name).type for name in _READ if schema.names.count(name) == 1}
    names = [name for name, kind in kinds.items() if _is_read(name, kind)]
    ignored = {name: str(kind) for name, kind in kinds.items() if name not in names}
    if "input_ids" not in names:
        problem = "no input_ids"
        if "input_ids" in ignored:
            problem = f"{ignored['input_ids']} in input_ids"
        raise DataError(
            f"{place}: {problem}, expected a column input_ids with lists of integers; columns "
            f"found: {named(schema.names)}",
            "name a set of token ids; texts are tokenized by packer tokenize",
        )
    return names, ignored


def _is_read(name: str, kind: Any) -> bool:
    if not is_list(kind):
        return False
    if name == "segments":
        return bool(kind.value_type == _SEGMENTS)
    return bool(pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type))


# --- files of record batches, and of JSON


def _numbered(batches: Iterable[Any], first: int = 0) -> Iterator[tuple[int, Any]]:
    """Yield consecutive batches, each with the number of its first row."""
    for batch in batches:
        yield first, batch
        first += batch.num_rows


def _columnar(file: InputFile, rows: int | None = None) -> SetFile:
    """Open Arrow or Parquet. `rows` of Arrow are counted if they are not known."""
    reader = reader_for(file.format)
    assert isinstance(reader, ColumnarReader)  # noqa: S101 by its format
    with _readable(file.path), reader.opened(file) as table:
        names, ignored = _chosen(table.schema, file.path)
        groups = reader.groups(file)
        if groups is None and rows is None:
            whole = table.batches(Slice(file.index, 0, None, 0), ["input_ids"], _MOST_ROWS)
            rows = sum(batch.num_rows for batch in whole)
    firsts = offsets_of([rows or 0] if groups is None else [group.rows for group in groups])

    def batches(spans: Int64) -> Iterator[tuple[int, Any]]:
        with reader.opened(file) as table:
            for number, (first, end) in enumerate(pairwise(firsts.tolist())):
                stops = spans[(spans[:, 1] > first) & (spans[:, 0] < end), 1]
                group = Slice(file.index, number, number + 1, 0)
                decoded = table.batches(group, names, _MOST_ROWS) if len(stops) else ()
                for at, batch in _numbered(decoded, first):
                    yield at, batch
                    if at + batch.num_rows >= stops[-1] < end:
                        break

    return SetFile(file.path, int(firsts[-1]), names, batches, ignored)


def _json(file: InputFile) -> SetFile:
    """Open JSON lines or an array. Its columns are the lists of the first record."""
    reader = reader_for(file.format)
    assert isinstance(reader, JsonlReader)  # noqa: S101 by its format

    def blocks() -> Iterator[tuple[int, Sequence[bytes | memoryview]]]:
        first = 0
        with open_source(file) as source:
            for block in reader.blocks(file, source, Slice(file.index, 0, None, 0)):
                if len(block.pieces):
                    yield first, block.pieces
                first += len(block.pieces)
                if block.bad:
                    raise ValueError(f"row {first}: {block.bad[0].reason}")

    with _readable(file.path):
        record = next((_object_in(records[0]) for _, records in blocks()), _NO_RECORD)
        lists = {name: record[name] for name in _READ[:-1] if type(record.get(name)) is list}
        kinds = {name: pa.bool_() if {*map(type, values)} == {bool} else pa.int64()
                 for name, values in lists.items()}  # fmt: skip
        if "input_ids" not in kinds:
            _chosen(pa.schema([(name, pa.null()) for name in record]), file.path)
        rows = sum(len(records) for _, records in blocks())
    schema = pa.schema([(name, pa.list_(kinds.get(name, pa.int64()))) for name in _READ[:-1]])

    def batches(spans: Int64) -> Iterator[tuple[int, Any]]:
        for first, records in blocks():
            table = _decoded(records, first, schema)
            for name in table.column_names:
                odd = pc.index(table[name].is_null(), name in kinds).as_py()
                if odd >= 0:
                    has = "has no" if name in kinds else "has"
                    expected = f"{has} {name}, expected the columns of row 0"
                    raise ValueError(f"row {first + odd}: {expected}")
            yield first, table.select([*kinds]).combine_chunks().to_batches()[0]

    return SetFile(file.path, rows, [*kinds], batches)


def _object_in(record: bytes | memoryview) -> dict[str, Any]:
    try:
        return msgspec.json.decode(record, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"row 0: {error}") from error


def _decoded(records: Sequence[bytes | memoryview], first: int, schema: Any) -> Any:
    """Decode records from number `first` on, as a table of the columns that they have or lack."""
    data = b"\n".join(records)
    try:
        return pa.json.read_json(
            pa.BufferReader(data),
            pa.json.ReadOptions(use_threads=False, block_size=len(data) + 1),
            pa.json.ParseOptions(
                schema, newlines_in_values=True, unexpected_field_behavior="ignore"
            ),
        )
    except pa.ArrowInvalid as error:
        raise ValueError(f"among the rows from {first} on: {error}") from error


# --- files of tokens end to end

_FlatColumn = tuple[str, np.dtype[Any], int]  # file, type of its values, byte of the first one


def _flat(
    offsets: Mapping[str, Int64], sources: Mapping[str, _FlatColumn], *, documents: bool
) -> SetFile:
    """Open rows that are stored end to end, in a file for each column with its `offsets`."""
    ids, place = offsets["input_ids"], sources["input_ids"][0]
    _refuse_long(place, ids)

    def batches(spans: Int64) -> Iterator[tuple[int, Any]]:
        for begin, stop in spans.tolist():
            for a, b in _few_tokens(ids, begin, stop):
                columns = [
                    pa.LargeListArray.from_arrays(
                        pa.array(offsets[name][a : b + 1] - offsets[name][a]),
                        pa.array(_values(source, *offsets[name][[a, b]].tolist())),
                    )
                    for name, source in sources.items()
                ]
                yield a, pa.RecordBatch.from_arrays(columns, list(sources))

    return SetFile(place, len(ids) - 1, list(sources), batches, documents=documents)


def _values(source: _FlatColumn, begin: int, stop: int) -> npt.NDArray[Any]:
    path, kind, header = source
    size = (stop - begin) * kind.itemsize
    with _readable(path), storage.open_lines(path) as file:
        file.seek(header + begin * kind.itemsize)
        if len(data := file.read(size)) < size:
            raise DataError(f"{path}: ends before its index says: it was cut short", _AGAIN)
    return np.frombuffer(data, kind)


def _indexed(file: InputFile) -> SetFile:
    """Open tokens of Megatron-LM."""
    kind, offsets = MegatronReader().index(file)
    column: dict[str, _FlatColumn] = {"input_ids": (file.path, kind, 0)}
    return _flat({"input_ids": offsets}, column, documents=True)


def _olmo(path: str, max_length: int | None) -> SetFile:
    """Open tokens without a header, uint16 or uint32, as `NumpyDatasetBase` of olmo_core/data does.

    `X.csv.gz` beside them has begin and end of each document, and `*labels_mask*`, `*label_mask*`
    or `X.mask.npy` a bool for each token.
    """
    size, side = storage.stat(path).size, path.removesuffix(".npy") + ".csv.gz"
    has_ends = storage.is_file(side)
    if has_ends:
        offsets = _ends_in(side)
        tokens = int(offsets[-1])
        width = 2 if size == 2 * tokens else 4
        expected = f"{2 * tokens} or {4 * tokens} for the {tokens} tokens of {side}"
    elif max_length is None:
        raise UsageError(
            f"{path}: neither an array of numpy with a header nor a file with its documents beside "
            "it",
            "give --max-length, the tokens of a window; ids are then read as uint32",
        )
    else:
        width, tokens, expected = 4, size // 4, "a multiple of 4"
        offsets = np.append(np.arange(0, tokens, max_length), tokens)
    if size != width * tokens:
        raise DataError(f"{path}: {size} bytes, expected {expected}", _WHOLE)
    sources: dict[str, _FlatColumn] = {"input_ids": (path, np.dtype(f"<u{width}"), 0)}
    folder, stem = os.path.split(path)
    names = [stem.replace("token_ids", kind) for kind in ("label_mask", "labels_mask")]
    for name in (*names, stem.removesuffix(".npy") + _MASK):
        mask = os.path.join(folder, name)
        if mask == path or not storage.is_file(mask):
            continue
        if (has := storage.stat(mask).size) != tokens:
            raise DataError(f"{mask}: {has} bytes, expected {tokens}, one for each token", _WHOLE)
        sources["loss_mask"] = mask, np.dtype("u1"), 0
    return _flat(dict.fromkeys(sources, offsets), sources, documents=has_ends)


def _ends_in(path: str) -> Int64:
    """Read the boundaries of documents, int64[documents + 1], from lines of begin, end, ..."""
    with _readable(path), storage.open_bytes(path) as file:
        unpacked = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "gzip")
        options = pa.csv.ReadOptions(autogenerate_column_names=True)
        begins, ends = pa.csv.read_csv(unpacked, read_options=options).columns[:2]
        offsets = np.append(0, ends.to_numpy()).astype(np.int64)
        if not np.array_equal(begins.to_numpy(), offsets[:-1]) or (np.diff(offsets) < 0).any():
            raise ValueError("documents do not begin where the one before ends")
    return offsets


def _exported(folder: str, files: Sequence[str]) -> SetFile:
    """Open an export to numpy: an array for each column, of rows or with NAME_offsets."""
    sources, offsets = dict[str, _FlatColumn](), dict[str, Int64]()
    for name in [column for column in _READ[:-1] if f"{column}.npy" in files]:
        shape, source = _array_in(storage.join(folder, f"{name}.npy"))
        if len(shape) == 2:
            edges = np.arange(shape[0] + 1, dtype=np.int64) * shape[1]
        elif f"{name}_offsets.npy" in files:
            (count,), stored = _array_in(storage.join(folder, f"{name}_offsets.npy"))
            edges = _values(stored, 0, count).astype(np.int64)
            if not count or edges[0] or edges[-1] != shape[0] or (np.diff(edges) < 0).any():
                raise DataError(f"{stored[0]}: does not ascend from 0 to {shape[0]}", _WHOLE)
        else:
            continue
        offsets[name], sources[name] = edges, source
    rows = {len(edges) - 1 for edges in offsets.values()}
    if len(rows) != 1:
        raise DataError(
            f"{folder}: its arrays have {sorted(rows)} rows, expected one number", _WHOLE
        )
    return _flat(offsets, sources, documents=False)


def _array_in(path: str) -> tuple[tuple[int, ...], _FlatColumn]:
    """Return (shape, values) of an array of integers with numpy's header. Raises DataError."""
    with _readable(path), storage.open_lines(path) as file:
        np.lib.format.read_magic(file)
        shape, by_columns, kind = np.lib.format.read_array_header_1_0(file)
        is_odd = not 0 < len(shape) < 3 or (by_columns and len(shape) > 1) or 0 in shape[1:]
        if is_odd or kind.kind not in "iub":
            raise ValueError(f"an array of {shape}, {kind}, expected rows of integers in C order")
        kind = np.dtype("u1") if kind.kind == "b" else kind
        begin, count = file.tell(), int(np.prod(shape, dtype=np.int64))
    if (size := storage.stat(path).size) != (whole := begin + count * kind.itemsize):
        raise DataError(f"{path}: {size} bytes, expected {whole} by its header", _WHOLE)
    return shape, (path, kind, begin)


# --- names to sets


def open_set(
    name: str, format_: str | None = None, max_length: int | None = None, tokens: Sequence[str] = ()
) -> AuditedSet:
    """Open a set.

    format_  name in FORMATS; None: recognize it
    tokens   the tokenized directories of a view, if they have moved

    Raises UsageError for an unknown format or a name without files; DataError for files that cannot
    be read.
    """
    name = storage.public(name)
    if format_ is not None and format_ not in FORMATS:
        raise one_of("--format", format_, FORMATS)
    if tokens and not is_result(name):
        raise UsageError(f"--tokens: {name} is not a view of packer", "leave it out")
    set_ = _result(name, tokens) if is_result(name) else _other(name, max_length)
    if format_ not in (None, set_.format):
        meaning, evidence = FORMATS[str(format_)], f"--format {format_}"
        if lacking := [column for column in meaning.columns if column not in set_.names]:
            raise DataError(
                f"{name}: has no {', '.join(lacking)}, which {format_} sets have; columns found: "
                f"{', '.join(set_.names)}",
                "leave --format out, or name another",
            )
        set_ = replace(set_, format=str(format_), meaning=meaning, evidence=evidence)
    if not set_.rows:
        raise DataError(f"{name}: has no rows, expected {_EXPECTED}", "name another set")
    return set_


def _result(name: str, tokens: Sequence[str]) -> AuditedSet:
    """Open a packed or tokenized directory of packer, or a view, local or at a URL."""
    facts = load_any(name)
    if not isinstance(facts, Manifest):
        kind = "packer-tokenized"
        return AuditedSet(
            name, kind, FORMATS[kind], "its manifest", _documents_in(Path(name)), facts
        )
    packed = opened(Path(name), facts, tokens) if facts.config.view or tokens else None
    names = [column for column in facts.config.columns if column in _READ]

    def complete(view: View, shard: Shard, spans: Int64) -> Iterator[tuple[int, Any]]:
        return _numbered(batch.select(names) for batch in view.batches(shard))

    files = [
        SetFile(packed.place_of(shard.file), shard.rows, names, partial(complete, packed, shard))
        if isinstance(packed, View)
        else _columnar(input_file(0, storage.join(name, shard.file), DocumentConfig()), shard.rows)
        for shard in facts.shards
    ]
    return AuditedSet(
        name, "packer", FORMATS["packer"], "its manifest", files, facts, _beside(name, files)
    )


def _documents_in(folder: Path) -> list[SetFile]:
    """Open the documents of a tokenized directory."""
    tokenized = open_tokenized(folder)
    schema = next(iter(tokenized.stored(tokenized.shards[0]))).schema
    names = ["input_ids", *["labels"] * ("trained" in schema.names)]

    def with_labels(batch: Any) -> Any:
        ids = batch.column("input_ids")
        if len(names) == 1:
            return batch.select(names)
        edges = ids.offsets.to_numpy() - ids.offsets[0].as_py()
        lists = pa.ListArray.from_arrays(pa.array(edges), pa.array(labels_in(batch)))
        return pa.RecordBatch.from_arrays([ids, lists], names)

    def batches(number: int, spans: Int64) -> Iterator[tuple[int, Any]]:
        return _numbered(with_labels(batch) for batch, _ in sound_batches(tokenized, number))

    return [
        SetFile(
            tokenized.place_of(shard.file), shard.rows, names, partial(batches, at), documents=True
        )
        for at, shard in enumerate(tokenized.shards)
    ]


_OPENS: dict[str, Callable[[InputFile], SetFile]] = {
    "arrow": _columnar, "parquet": _columnar, "jsonl": _json, "json": _json, "megatron": _indexed,
}  # fmt: skip


def _other(name: str, max_length: int | None) -> AuditedSet:
    """Open a set of another tool, or an export of packer."""
    folder = _split_of(name)
    arrays = _arrays_in(folder)
    if storage.join(folder, "input_ids.npy") in arrays:
        kind, files = "columns", [_exported(folder, [*map(storage.base_name, arrays)])]
    elif arrays:
        kind, files = "olmo", [_olmo(path, max_length) for path in arrays]
    else:
        inputs = find_inputs([folder], DocumentConfig())
        kind = inputs[0].format
        for file in inputs:
            if file.format not in _OPENS or file.format != kind:
                raise DataError(
                    f"{file.path}: is {file.format}, expected {_EXPECTED}",
                    "name the files of one format; texts are tokenized by packer tokenize",
                )
        files = [_OPENS[kind](file) for file in inputs]
    names = {*files[0].names}
    for other in files[1:]:
        if {*other.names} != names:
            raise DataError(
                f"{other.place}: has the columns {', '.join(sorted(other.names))}, expected those "
                f"of {files[0].place}: {', '.join(sorted(names))}",
                "name files with the same columns",
            )
    if kind not in FORMATS:
        of_columns = {
            one: {*format_.columns} for one, format_ in FORMATS.items() if format_.columns
        }
        kind = next((one for one, columns in of_columns.items() if columns <= names), "columns")
    meaning, ignored = FORMATS[kind], files[0].ignored.items()
    evidence = f"{meaning.evidence} {', '.join(meaning.columns)}".strip()
    left_out = [
        f"column {column}, since {type_} is not a list of integers" for column, type_ in ignored
    ]
    left_out += _beside(folder, files)
    return AuditedSet(name, kind, meaning, evidence, files, left_out=left_out)


def _arrays_in(name: str) -> list[str]:
    """List files of arrays: OLMo's, without a header, or files of packer export."""
    if storage.kind(name) != "folder":
        return [name] if name.endswith(".npy") else []
    with _readable(name):
        files = sorted(file for file, is_folder in storage.listing(name) if not is_folder)
    arrays = [file for file in files if file.endswith(".npy") and file != SQUARED_LENGTHS]
    if "input_ids.npy" not in arrays:
        arrays = [file for file in arrays if "mask" not in file]
    return [storage.join(name, file) for file in arrays]


class _Splits(msgspec.Struct):
    splits: Annotated[list[str], msgspec.Meta(min_length=1)]


def _split_of(name: str) -> str:
    """Return the folder of the only split of a dataset, or `name` if it has no splits."""
    place = storage.join(name, DATASET_DICT)
    if not storage.is_file(place):
        return name
    try:
        splits = msgspec.json.decode(storage.read_bytes(place), type=_Splits).splits
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DataError(f"{place}: does not list splits: {error}", _AGAIN) from error
    if len(splits) > 1:
        raise UsageError(f"{name}: has the splits {', '.join(splits)}, and one is read at a time",
                         f"name one: {storage.join(name, splits[0])}")  # fmt: skip
    return storage.join(name, splits[0])


def _beside(folder: str, files: Sequence[SetFile]) -> list[str]:
    """Describe shards in a folder that its manifest, or the list of `datasets`, does not name."""
    if storage.kind(folder) != "folder":
        return []
    read = {storage.base_name(file.place) for file in files}
    endings = {os.path.splitext(name)[1] for name in read}
    return [
        f"{name}, which is not listed as a part of the set"
        for name, is_folder in sorted(storage.listing(folder))
        if not is_folder
        and name.replace(_MASK, ".npy") not in read
        and os.path.splitext(name)[1] in endings
    ]
