"""Rows of any set as flat columns: one protocol, whatever they are stored in.

A `Table` says how many rows it has and reads spans of them, in ascending order, a few hundred
thousand tokens at a time, so that memory does not depend on the size of the set, and nothing is
allocated by what a file says of itself. `Pieces` are files of record batches or JSON lines, `Flat`
are files of tokens end to end. `formats.py` opens them.
"""

from __future__ import annotations

import csv
import mmap
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from packer_cli import storage
from packer_cli.errors import DataError, from_os_error, named
from packer_cli.records import Int64, offsets_of

# Columns that are read where they are there: all are lists, with one value for each token or for
# each document of the row. `segments` is packer's, see docs/format.md.
OF_TOKENS = (
    "input_ids", "labels", "loss_mask", "completion_mask", "assistant_masks", "attention_mask",
    "position_ids",
)  # fmt: skip
MASKS = ("loss_mask", "completion_mask", "assistant_masks")
OF_DOCUMENTS = (
    "seq_lengths", "seq_lens", "seq_lens_padded", "seq_start_id", "cu_seqlens", "cu_seqlens_padded",
    "segments",
)  # fmt: skip
_OF_SEGMENTS = ("file", "position", "start")
_AT_ONCE = 1 << 17  # tokens, which fit into the cache of a core with what is made of them
LONGEST = 1 << 24  # tokens of a row
_DECODED_BYTES = 2 << 20  # of Parquet
_DROP_BYTES = 64 << 20  # of a mapped file, which counts as memory of the process
_LINE_BYTES = 256 << 20
_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_AGAIN = "copy it again, or write it again"


Open = tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]


class Column(NamedTuple):
    """A list for each row: values[offsets[i]:offsets[i + 1]]; int64[rows + 1]."""

    values: npt.NDArray[Any]
    offsets: Int64


class Raw(NamedTuple):
    """Rows that follow one another, the first of which has the number `first`; `ids` are in all.

    open  of rows that are pieces of a longer document: bool[rows], what begins and what ends
          before or after the row; None where no row is
    """

    first: int
    columns: dict[str, Column]
    open: Open | None = None

    @property
    def rows(self) -> int:
        return len(self.columns["input_ids"].offsets) - 1


class Table(Protocol):
    """Rows of a set. `names`: of the columns that are read; `ignored`: those that are no lists of
    integers, with their types.
    """

    @property
    def rows(self) -> int: ...

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def ignored(self) -> Mapping[str, str]: ...

    def read(self, spans: Int64) -> Iterator[Raw]:
        """Rows spans[k, 0] <= row < spans[k, 1], int64[n, 2], in ascending order. Raises DataError
        for what cannot be read.
        """

    def where(self, row: int) -> tuple[str, int]:
        """(file, number of the row in it)."""
        ...


def even_spans(rows: int, wanted: int, longest: int = 32) -> Int64:
    """int64[n, 2], spans of at most `longest` rows, evenly spread; all rows where as many are
    wanted.
    """
    if wanted >= rows:
        return np.array([[0, rows]], np.int64)
    count = max(1, min(wanted, -(-wanted // longest)))
    edges = np.linspace(0, rows, count + 1).astype(np.int64)
    sizes = np.diff(np.linspace(0, wanted, count + 1).astype(np.int64))
    begins: Int64 = edges[:-1]
    return np.stack([begins, np.minimum(begins + sizes, edges[1:])], axis=1)


def parts_of(raw: Raw) -> Iterator[Raw]:
    """The rows in parts of few tokens. Raises DataError for a row that is too long."""
    offsets = raw.columns["input_ids"].offsets
    lengths = np.diff(offsets)
    if len(lengths) and (longest := int(lengths.max())) > LONGEST:
        at = raw.first + int(lengths.argmax())
        raise DataError(f"row {at}: has {longest} tokens, at most {LONGEST} are read", _AGAIN)
    for begin, stop in _few_tokens(offsets):
        yield sliced(raw, begin, stop)


def _few_tokens(offsets: Int64) -> Iterator[tuple[int, int]]:
    """Rows begin <= row < stop, of those that have these offsets, which together are few tokens."""
    full = np.flatnonzero(np.diff(offsets[1:] // _AT_ONCE)) + 1
    for begin, stop in pairwise([0, *full.tolist(), len(offsets) - 1]):
        if stop > begin:
            yield begin, stop


def _opened(open_: Open | None, begin: int, stop: int) -> Open | None:
    """What `Raw.open` is of some of the rows."""
    return open_ and (open_[0][begin:stop], open_[1][begin:stop])


def sliced(raw: Raw, begin: int, stop: int) -> Raw:
    """The rows from `begin` on, counted in `raw`, without a copy."""
    columns = {}
    for name, (values, offsets) in raw.columns.items():
        own = offsets[begin : stop + 1]
        columns[name] = Column(values[own[0] : own[-1]], own - own[0])
    return Raw(raw.first + begin, columns, _opened(raw.open, begin, stop))


# --- files of record batches, and of JSON lines


@dataclass(frozen=True)
class Piece:
    """A file. `batches` gives (number of the first row, record batch), in ascending order, for all
    rows of the spans that it is asked for, and perhaps more.
    """

    place: str
    rows: int
    batches: Callable[[Int64], Iterator[tuple[int, Any]]]


class Pieces:
    """The rows of files, one after another; `columns` makes `Column`s of what a file gives."""

    def __init__(
        self, pieces: Sequence[Piece], names: Sequence[str], ignored: Mapping[str, str]
    ) -> None:
        self.pieces, self.names, self.ignored = pieces, names, ignored
        self._firsts = offsets_of([one.rows for one in pieces])
        self.rows = int(self._firsts[-1])

    def read(self, spans: Int64) -> Iterator[Raw]:
        for piece, first in zip(self.pieces, self._firsts.tolist(), strict=False):
            mine = spans[(spans[:, 1] > first) & (spans[:, 0] < first + piece.rows)] - first
            if len(mine):
                yield from self._of_piece(piece, mine, first)

    def where(self, row: int) -> tuple[str, int]:
        piece = int(np.searchsorted(self._firsts, row, side="right")) - 1
        return self.pieces[piece].place, row - int(self._firsts[piece])

    def _of_piece(self, piece: Piece, spans: Int64, first: int) -> Iterator[Raw]:
        last, read = min(int(spans[-1, 1]), piece.rows), 0
        with readable(piece.place):
            for at, batch in piece.batches(spans):
                rows = batch.num_rows
                chosen = spans[(spans[:, 1] > at) & (spans[:, 0] < at + rows)] - at
                if len(chosen):
                    raw = Raw(first + at, columns_of(batch, piece.place, at))
                    for begin, stop in np.clip(chosen, 0, rows).tolist():
                        yield from parts_of(sliced(raw, begin, stop))
                read = at + rows
                if read >= last:
                    return
        raise DataError(f"{piece.place}: holds {read} rows, expected {piece.rows}", _AGAIN)


def numbered(batches: Iterator[Any]) -> Iterator[tuple[int, Any]]:
    """Batches that come first to last, each with the number of its first row."""
    at = 0
    for batch in batches:
        yield at, batch
        at += batch.num_rows


@contextmanager
def readable(place: str) -> Iterator[None]:
    """A context in which what Arrow, msgspec and the system raise becomes a DataError."""
    try:
        yield
    except (pa.ArrowException, msgspec.MsgspecError, ValueError, OverflowError,
            csv.Error, zlib.error, EOFError) as error:  # fmt: skip
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{place}: cannot be read: {reason}", _AGAIN) from error
    except OSError as error:
        if error.errno is None:
            reason = (str(error).splitlines() or ["damaged"])[0]
            raise DataError(f"{place}: cannot be read: {reason}", _AGAIN) from error
        raise from_os_error(error, place, "read") from error


def columns_of(batch: Any, place: str, first: int = 0) -> dict[str, Column]:
    """The columns of a record batch that are in OF_TOKENS and OF_DOCUMENTS. Raises DataError for
    nulls, and for lists that do not have a value for each token.
    """
    found = {}
    for name in batch.schema.names:
        array = batch.column(name)
        array.validate(full=True)
        if name == "segments":  # of its parts, each a list as long as the other ones
            for part in _OF_SEGMENTS:
                column = pa.ListArray.from_arrays(array.offsets, array.values.field(part))
                found[f"segments.{part}"] = _column(column, f"{place}: {name}")
        else:
            found[name] = _column(array, f"{place}: {name}")
    ids = found["input_ids"].offsets
    for name in OF_TOKENS[1:]:
        if name in found and not np.array_equal(found[name].offsets, ids):
            wrong = np.flatnonzero(np.diff(found[name].offsets) != np.diff(ids))
            row = int(wrong[0])
            has = [int(np.diff(one)[row]) for one in (found[name].offsets, ids)]
            raise DataError(
                f"{place}: row {first + row}: {name} has {has[0]} values, input_ids {has[1]}",
                "each token needs one value: write the set again",
            )
    return found


def _column(array: Any, place: str) -> Column:
    fixed = pa.types.is_fixed_size_list(array.type)
    flat = array.flatten()
    if array.null_count or flat.null_count:
        raise DataError(f"{place} holds a null, expected lists of integers", _AGAIN)
    if fixed:
        offsets = np.arange(len(array) + 1, dtype=np.int64) * int(array.type.list_size)
    else:
        offsets = array.offsets.to_numpy().astype(np.int64)
        offsets -= offsets[0]
    return Column(signed(flat.to_numpy(zero_copy_only=False)), offsets)


def signed(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The values as signed integers; uint64 beyond int64 turns negative, which is out of range."""
    if values.dtype.kind == "u" and values.dtype.itemsize > 1:
        return values.astype(f"i{min(8, 2 * values.dtype.itemsize)}")
    return values


def chosen_columns(schema: Any, place: str) -> tuple[list[str], dict[str, str]]:
    """(names that are read, those that are ignored with their types) of a schema. Raises DataError
    where there is no column of token ids.
    """
    names, ignored = list[str](), dict[str, str]()
    for name in dict.fromkeys(schema.names):
        if name not in OF_TOKENS + OF_DOCUMENTS or len(schema.get_all_field_indices(name)) > 1:
            continue
        kind = schema.field(name).type
        lists = any(is_(kind) for is_ in (pa.types.is_list, pa.types.is_large_list,
                                          pa.types.is_fixed_size_list))  # fmt: skip
        inner = kind.value_type if lists else kind
        is_whole = pa.types.is_integer(inner) or pa.types.is_boolean(inner)
        if name == "segments":  # packer's, or something else of this name
            is_whole = pa.types.is_list(kind) and pa.types.is_struct(inner) and all(
                inner.get_field_index(part) >= 0
                and pa.types.is_integer(inner.field(part).type) for part in _OF_SEGMENTS
            )  # fmt: skip
        if lists and is_whole:
            names.append(name)
        else:
            ignored[name] = str(kind)
    if "input_ids" not in names:
        what = f"{ignored['input_ids']} in input_ids" if "input_ids" in ignored else "no input_ids"
        raise DataError(
            f"{place}: {what}, expected a column input_ids with lists of integers; columns found: "
            f"{named(schema.names)}",
            "name a set of token ids; texts are tokenized by packer tokenize",
        )
    return names, ignored


def arrow_piece(place: str, rows: int | None = None) -> tuple[Piece, list[str], dict[str, str]]:
    """An Arrow file or stream, local or at a URL; `rows`, where they are known, are not counted."""
    with readable(place):
        source, _ = _arrow_source(place)
        is_file = source.size() >= 6 and source.read_at(6, 0) == b"ARROW1"
        if not is_file and (
            source.size() < 8 or source.read_at(8, source.size() - 8) != _STREAM_END
        ):
            raise DataError(f"{place}: no end marker of Arrow: it is cut short, or not Arrow",
                            _AGAIN)  # fmt: skip
        source.seek(0)
        schema = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source).schema
        names, ignored = chosen_columns(schema, place)

    def batches(spans: Int64 | None = None) -> Iterator[tuple[int, Any]]:
        source, drop = _arrow_source(place)
        fields = [schema.get_field_index(name) for name in names]
        options = pa.ipc.IpcReadOptions(included_fields=fields)
        reader = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source, options=options)
        count = reader.num_record_batches if is_file else 0
        every = map(reader.get_batch, range(count)) if is_file else iter(reader)
        for at, batch in numbered(every):
            if batch.num_rows < 0:
                raise pa.ArrowInvalid(f"a record batch of {batch.num_rows} rows")
            yield at, batch
            drop()

    if rows is None:
        with readable(place):
            rows = sum(batch.num_rows for _, batch in batches())
    return Piece(place, rows, batches), names, ignored


def _arrow_source(place: str) -> tuple[Any, Callable[[], None]]:
    """The bytes of a file, mapped if it is local, and what gives its memory back."""
    if storage.is_url(place):
        return storage.open_arrow(place), lambda: None
    with storage.open_bytes(place) as file:
        size = storage.stat(place).size
        if not size:
            raise pa.ArrowInvalid("it is empty")
        mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    source, dropped = pa.BufferReader(pa.py_buffer(mapped)), [0]

    def drop() -> None:
        if source.tell() - dropped[0] > _DROP_BYTES or source.tell() < dropped[0]:
            mapped.madvise(mmap.MADV_DONTNEED)
            dropped[0] = source.tell()

    return source, drop


def parquet_piece(place: str) -> tuple[Piece, list[str], dict[str, str]]:
    """A Parquet file, decoded a few megabytes at a time."""

    def opened() -> Any:
        return pq.ParquetFile(storage.open_arrow(place), buffer_size=1 << 20, pre_buffer=False)

    with readable(place), opened() as file:
        names, ignored = chosen_columns(file.schema_arrow, place)
        metadata = file.metadata
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        size = max((one.total_byte_size // max(one.num_rows, 1) for one in groups), default=1)
    at_once = max(1, min(4096, _DECODED_BYTES // max(size, 1)))
    firsts = offsets_of([one.num_rows for one in groups])

    def batches(spans: Int64) -> Iterator[tuple[int, Any]]:
        with opened() as file:
            for number, (first, end) in enumerate(pairwise(firsts.tolist())):
                wanted = spans[(spans[:, 1] > first) & (spans[:, 0] < end), 1]
                if len(wanted):
                    own = file.iter_batches(at_once, [number], names)
                    for at, batch in numbered(own):
                        yield first + at, batch
                        if first + at + batch.num_rows >= wanted[-1]:
                            break

    return Piece(place, metadata.num_rows, batches), names, ignored


class _Line(msgspec.Struct):
    """The fields of a line that are columns; of Struct, since msgspec checks them while it reads.
    All others are passed over.
    """

    input_ids: list[int]
    labels: list[int] | None = None
    loss_mask: list[int | bool] | None = None
    completion_mask: list[int | bool] | None = None
    assistant_masks: list[int | bool] | None = None
    attention_mask: list[int | bool] | None = None
    position_ids: list[int] | None = None
    seq_lengths: list[int] | None = None
    seq_lens: list[int] | None = None
    seq_lens_padded: list[int] | None = None
    seq_start_id: list[int] | None = None
    cu_seqlens: list[int] | None = None
    cu_seqlens_padded: list[int] | None = None


def jsonl_piece(place: str) -> tuple[Piece, list[str], dict[str, str]]:
    """A file of JSON lines; columns are the fields of its first line."""
    decoder = msgspec.json.Decoder(_Line)

    def lines() -> Iterator[tuple[int, bytes]]:
        with storage.open_lines(place) as file:
            number = 0
            while line := file.readline(_LINE_BYTES):
                if len(line) == _LINE_BYTES:
                    raise ValueError(f"line {number} has more than {_LINE_BYTES} bytes")
                if line.strip():
                    yield number, line
                    number += 1

    def decoded(number: int, line: bytes) -> _Line:
        try:
            return decoder.decode(line)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise ValueError(f"row {number}: {error}") from error

    with readable(place):
        first = next(lines(), None)
        if first is None:
            raise DataError(f"{place}: has no lines, expected objects with input_ids", _AGAIN)
        own = decoded(*first)
        names = [name for name in _Line.__struct_fields__ if getattr(own, name) is not None]
        rows = sum(1 for _ in lines())

    def of_lines() -> Iterator[Any]:
        held, tokens = list[_Line](), 0
        for number, line in lines():
            held.append(decoded(number, line))
            tokens += 1 + len(held[-1].input_ids)  # so that empty rows end, too
            for name in names:
                if getattr(held[-1], name) is None:
                    raise ValueError(f"row {number}: has no {name}, other rows have")
            if tokens > _AT_ONCE:
                yield _as_batch(held, names)
                held, tokens = [], 0
        yield _as_batch(held, names)

    return Piece(place, rows, lambda spans: numbered(of_lines())), names, {}


def _as_batch(lines: list[_Line], names: Sequence[str]) -> Any:
    kind = pa.large_list(pa.int64())
    lists = {name: [getattr(line, name) for line in lines] for name in names}
    return pa.RecordBatch.from_arrays(
        [pa.array([list(map(int, one)) for one in of], kind) for of in lists.values()], names
    )


# --- files of tokens end to end


@dataclass(frozen=True)
class Flat:
    """Values of rows end to end in a file for each column, such as tokens and what is trained on.

    offsets   int64[rows + 1], in values, of each column
    sources   (file, type of its values, byte at which they begin) of each column, by its name
    open      as in `Raw`, for all rows
    """

    offsets: dict[str, Int64]
    sources: dict[str, tuple[str, np.dtype[Any], int]]
    open: Open | None = None
    ignored: Mapping[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return len(self.offsets["input_ids"]) - 1

    @property
    def names(self) -> list[str]:
        return list(self.sources)

    def where(self, row: int) -> tuple[str, int]:
        return self.sources["input_ids"][0], row

    def read(self, spans: Int64) -> Iterator[Raw]:
        offsets = self.offsets["input_ids"]
        for begin, stop in spans.tolist():
            for first, last in _few_tokens(offsets[begin : stop + 1]):
                rows = begin + first, begin + last
                columns = {name: self._read(name, *rows) for name in self.sources}
                yield Raw(rows[0], columns, _opened(self.open, *rows))

    def _read(self, name: str, first: int, last: int) -> Column:
        own = self.offsets[name][first : last + 1]
        (path, kind, header), count = self.sources[name], int(own[-1] - own[0])
        with readable(path), storage.open_bytes(path) as file:
            file.seek(header + int(own[0]) * kind.itemsize)
            data = bytearray()
            while len(data) < count * kind.itemsize:
                more = file.read(count * kind.itemsize - len(data))
                if not more:
                    raise DataError(f"{path}: ends before its index says: it was cut short", _AGAIN)
                data += more
        return Column(signed(np.frombuffer(bytes(data), kind)), own - own[0])
