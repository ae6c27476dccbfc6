"""Reading a packed directory: memory-mapped shards, checked against the manifest. `opening.py`
opens one, also views and results at URLs.

A stream cut at a message boundary reads short without an error, so the size of every shard is
compared on open, and its rows when it is mapped. Shards are named by their content, so a directory
whose result is replaced while it is read gives the rows of the result that was opened, or an error.

Rows are gathered by their numbers without reading anything but these rows: every record batch is a
span of rows with a place in memory for each column, so kernels gather rows of many shards at once,
from addresses.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packer_cli import storage
from packer_cli._kernels import gathering
from packer_cli.errors import DataError, UsageError, from_os_error
from packer_cli.options.options import PADDED_BOUNDARIES, VIEW_COLUMNS
from packer_cli.options.value_columns import ValueColumn
from packer_cli.options.values import plain_int
from packer_cli.records import Int32, Int64, offsets_of
from packer_cli.result.layout import (
    MISSING,
    SQUARED_LENGTHS,
    Measured,
    Shard,
    digest,
    problem_of,
)
from packer_cli.result.manifest import Manifest, Result, replaced
from packer_cli.result.shard_writer import (
    fixed,
    ragged,
    schema,
    schema_problem,
    stored_schema,
)
from packer_cli.result.values import measured

PACK_AGAIN = (
    "copy the directory again, or move what is damaged and pack the data again with --overwrite"
)
PARTS = {"file": np.int32, "position": np.int64, "start": np.int32}  # of the column `segments`
HEADER_BYTES = 128  # of `squared_lengths.npy`
_MAGIC = b"\x93NUMPY\x01\x00"


def values_type(kind: Any) -> np.dtype[Any]:
    """The numpy type of a value in the lists of an Arrow column; of several, where each value is a
    list of so many.
    """
    item, shape = kind.value_type, tuple[int, ...]()
    if pa.types.is_fixed_size_list(item):
        item, shape = item.value_type, (item.list_size,)
    return np.dtype((plain_type(item), shape))


def plain_type(kind: Any) -> np.dtype[Any]:
    """The numpy type of an Arrow type of numbers. Asked for `to_pandas_dtype`, pyarrow 20 imports
    pandas.
    """
    return np.asarray(pa.array([], kind).to_numpy()).dtype


@dataclass(frozen=True)
class Lists:
    """b lists of different lengths, end to end.

    values  int32[k], or int64, int8 or the type of a column of values
    ends    int64[b + 1]: list i is values[ends[i]:ends[i + 1]]
    """

    values: Int32
    ends: Int64

    @classmethod
    def of(cls, lists: Sequence[Any]) -> Lists:
        arrays = [np.asarray(one, np.int32) for one in lists]
        flat = np.concatenate(arrays) if arrays else np.empty(0, np.int32)
        return cls(flat, offsets_of([*map(len, arrays)]))

    @classmethod
    def joined(cls, parts: Sequence[Lists], order: Int64) -> Lists:
        """List order[0], order[1], ... of all lists of `parts`."""
        sizes = np.concatenate([np.diff(one.ends) for one in parts])
        begins = (np.cumsum(sizes) - sizes)[order]
        ends = offsets_of(sizes[order])
        places = np.arange(ends[-1]) + np.repeat(begins - ends[:-1], sizes[order])
        return cls(np.concatenate([one.values for one in parts])[places], ends)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> Int32:
        place = range(len(self))[index]
        return self.values[self.ends[place] : self.ends[place + 1]]


@dataclass(frozen=True)
class Mapped:
    """Spans of rows, in ascending order. It never changes, so threads may share it.

    schema        of the batches
    batches       of which each is a span; they own the memory
    firsts, ends  int64[spans], the first row of each, and the first row after it
    addresses     of each column, int64[lines, spans]: those of its offsets, if it has any, and of
                  its values; `segments` has `PARTS` in place of values, and how many there are
    """

    schema: Any
    batches: list[Any]
    firsts: Int64
    ends: Int64
    addresses: dict[str, Int64]

    @classmethod
    def of(cls, schema: Any, first: int = 0, batches: Sequence[Any] = ()) -> Mapped:
        """The rows of record batches, of which the first is `first`."""
        sizes = np.array([batch.num_rows for batch in batches], np.int64)
        ends = first + np.cumsum(sizes)
        addresses = {field.name: _addresses(field, batches) for field in schema}
        return cls(schema, list(batches), ends - sizes, ends, addresses)

    def added(self, first: int, batches: Sequence[Any]) -> Mapped:
        """A copy with further spans, as `of` takes them."""
        new = Mapped.of(self.schema, first, batches)
        both = Mapped(
            self.schema,
            self.batches + new.batches,
            np.concatenate([self.firsts, new.firsts]),
            np.concatenate([self.ends, new.ends]),
            {name: np.concatenate([own, new.addresses[name]], axis=1)
             for name, own in self.addresses.items()},
        )  # fmt: skip
        return both._take(np.argsort(both.firsts))

    def _take(self, spans: Int64) -> Mapped:
        addresses = {name: own.take(spans, axis=1) for name, own in self.addresses.items()}
        batches = [self.batches[span] for span in spans]
        return Mapped(self.schema, batches, self.firsts[spans], self.ends[spans], addresses)

    def first_absent(self, rows: Int64) -> int:
        """The place in `rows` of the first that is in no span; -1 when all are here."""
        absent: int = gathering.first_absent(rows, self.firsts, self.ends)
        return absent

    def gather(self, rows: Int64, name: str) -> Any:
        """A column of rows that are all here, copied: an array [b, max_length], or `Lists`. Of
        `segments` a part, by its name.
        """
        if name in PARTS:
            kind = np.dtype(PARTS[name])
            offsets, *parts, _ = self.addresses["segments"]
            values = parts[list(PARTS).index(name)]
        else:
            stored = self.schema.field(name).type
            kind, (*edges, values) = values_type(stored), self.addresses[name]
            if not edges:
                out = np.empty((len(rows), stored.list_size), kind)
                to, row_bytes = out.reshape(-1).view(np.uint8), stored.list_size * kind.itemsize
                gathering.gather_rows(rows, self.firsts, values, row_bytes, to)
                return out
            (offsets,) = edges
        ends = np.empty(len(rows) + 1, np.int64)
        gathering.count_values(rows, self.firsts, offsets, ends)
        found = np.empty(ends[-1], kind)
        to = found.reshape(-1).view(np.uint8)
        gathering.gather_values(rows, self.firsts, offsets, values, ends, kind.itemsize, to)
        return Lists(found, ends)


def _addresses(field: Any, batches: Sequence[Any]) -> Int64:
    """Where the values of a column are, as in `Mapped`."""
    name, found, is_fixed = field.name, [], pa.types.is_fixed_size_list(field.type)
    for column in (batch.column(name) for batch in batches):
        values = column.values
        if is_fixed:
            found.append([rows_of(column).ctypes.data])
            continue
        edges = column.offsets.to_numpy().ctypes.data
        if name == "segments":
            parts = [values.field(part).to_numpy().ctypes.data for part in PARTS]
            found.append([edges, *parts, len(values)])
        else:
            found.append([edges, plain_values(values).ctypes.data])
    count = 2 + len(PARTS) if name == "segments" else 2 - is_fixed
    lines: Int64 = np.array(found, np.int64).reshape(-1, count)
    return np.ascontiguousarray(lines.T)


def described(rows: Any, path: object, tokens: int) -> str:
    """Rows of a result, or several, for people: their place, how many there are, and how long."""
    return (
        f"{type(rows).__name__}({path!r}, rows={len(rows)}, max_length={rows.max_length}, "
        f"tokens={tokens})"
    )


def in_parts(columns: Sequence[str]) -> list[str]:
    """Names of columns, with those of the parts in place of `segments`."""
    return [part for name in columns for part in (PARTS if name == "segments" else [name])]


class Stored:
    """A finished result of any kind. `path` is the directory, `where` its path or its URL, `facts`
    what its manifest says.
    """

    facts: Result
    what, again = "rows", PACK_AGAIN  # what shards hold, and what to do about damaged ones

    def __init__(self, path: Path) -> None:
        self.path, self.where = path, str(path)

    def place_of(self, name: str) -> str:
        """Where a file of the result is, for messages."""
        return storage.join(self.where, name)

    def replaced(self) -> DataError | None:
        """The error to raise when another result has taken the place of this one."""
        return replaced(self.where, self.facts)

    def check_size(self, shard: Shard) -> None:
        """Raise DataError when a shard is missing or not as long as the manifest says."""
        if problem := problem_of(self.path / shard.file, shard):
            missing = problem == MISSING and self.replaced()
            raise missing or DataError(f"{self.place_of(shard.file)}: {problem}", self.again)

    def check_digests(self, stopped: Callable[[], bool]) -> None:
        """Raise DataError for a shard whose bytes are not those that the manifest knows; end early
        once `stopped` says so.
        """
        for shard in self.facts.shards:
            _, sha256 = digest(self.path / shard.file, stopped)
            if not stopped() and sha256 != shard.sha256:
                raise self.replaced() or DataError(
                    f"{self.place_of(shard.file)}: its sha256 is {sha256}, the manifest says "
                    f"{shard.sha256}",
                    self.again,
                )

    def stored(self, shard: Shard) -> Iterator[Any]:
        """The record batches of a shard as they are stored, mapped, each safe to look into.

        Raises DataError when the shard cannot be read or holds another number of rows.
        """
        with self._readable(shard):
            source = self._map(shard)
        return self._batches(shard, source)

    def _batches(self, shard: Shard, source: Any) -> Iterator[Any]:
        count = 0
        with self._readable(shard), source:
            for batch in stored_batches(source, self._stored_schema(shard)):
                count += batch.num_rows
                if count > shard.rows:
                    break
                yield batch
        if count != shard.rows:
            raise DataError(
                f"{self.place_of(shard.file)}: holds {count} {self.what}, the manifest says "
                f"{shard.rows}",
                self.again,
            )

    @contextmanager
    def _readable(self, shard: Shard) -> Iterator[None]:
        """Turn errors of Arrow and of the system in reading a shard into DataErrors."""
        try:
            yield
        except (pa.ArrowException, OSError, ValueError) as error:  # the last one: an empty file
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise self.replaced() or DataError(
                f"{self.place_of(shard.file)}: not a readable shard: {reason}", self.again
            ) from error

    def _map(self, shard: Shard) -> Any:
        """The shard's bytes, mapped. Raises ArrowException or OSError."""
        return pa.memory_map(str(self.path / shard.file))

    def _stored_schema(self, shard: Shard) -> Any:
        raise NotImplementedError


class PackedDirectory(Stored):
    """A finished packed directory.

    Record batches are either as stored, or complete, with all columns of the manifest. Only in a
    view do they differ; `View` completes them.
    """

    facts: Manifest

    def __init__(self, path: Path, facts: Manifest) -> None:
        super().__init__(path)
        self.facts = facts
        self.max_length = facts.config.max_length
        self.segment_multiple = facts.config.segment_multiple
        self._ends = np.cumsum([shard.rows for shard in facts.shards], dtype=np.int64)

    @property
    def manifest(self) -> dict[str, Any]:
        """manifest.json as it is: plain dicts and lists."""
        return self.facts.document

    @property
    def digest(self) -> str:
        """What tells the result from others, as its manifest says."""
        return str(self.facts.sha256)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def find(self, row: int) -> tuple[Shard, int]:
        """The shard that holds a row counted over all shards, and the row's number in it. Raises
        IndexError.
        """
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        index = int(np.searchsorted(self._ends, row, side="right"))
        shard = self.facts.shards[index]
        return shard, row - (int(self._ends[index]) - shard.rows)

    def batches(self, shard: Shard | dict[str, Any]) -> Iterator[Any]:
        """The complete record batches of a shard, an entry of manifest["shards"], mapped. Raises
        as `stored`.
        """
        return self._complete(msgspec.convert(shard, Shard) if isinstance(shard, dict) else shard)

    def _complete(self, shard: Shard) -> Iterator[Any]:
        return self.stored(shard)

    def __repr__(self) -> str:
        return described(self, self.where, self.facts.tokens)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """A row, copied: its columns as numpy arrays, as docs/format.md has them, and of `segments`
        a dict of its parts. Negative numbers count from the end.

        Raises IndexError, and as `gather`.
        """
        count, plain = len(self), plain_int("row", row)
        if not -count <= plain < count:
            raise IndexError(f"row {plain} of {count}")
        names = self._schema().names
        found = self.gather(np.array([plain % count]), names)
        own = {name: values[0] for name, values in found.items()}
        return {name: own[name] if name in own else {part: own[part] for part in PARTS}
                for name in names}  # fmt: skip

    def take(
        self, rows: Iterable[int] | npt.NDArray[np.integer], columns: Sequence[str] | None = None
    ) -> Any:
        """Rows 0 <= row < len(self) as one complete record batch, copied, in the order given.

        `columns`: only these of the manifest's. Raises UsageError for what are no whole numbers,
        IndexError for one that is out of range, and as `gather`.
        """
        is_plain = hasattr(rows, "__iter__") and not hasattr(rows, "__array__")
        numbers = np.asarray([*rows] if is_plain else rows)
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            shape = f"shape {numbers.shape}, {numbers.dtype}"
            raise UsageError(f"rows: {shape}, expected row numbers", "give a list of integers")
        if len(wrong := numbers[(numbers < 0) | (numbers >= len(self))]):
            raise IndexError(f"row {wrong[0]} of {len(self)}")
        kinds = self._schema()
        if columns is not None:
            kept = [kinds.field(name) for name in kinds.names if name in columns]
            kinds = pa.schema(kept, metadata=kinds.metadata)
        return as_batch(self.gather(numbers.astype(np.int64), kinds.names), kinds)

    def gather(self, rows: Int64, columns: Sequence[str]) -> dict[str, Any]:
        """Columns of rows 0 <= row < len(self), copied, in the order given: arrays [b, max_length],
        or `Lists`. In place of `segments` there are its parts, each of which may also be named.

        The shards of these rows stay mapped. Threads may share it. Raises DataError for a shard
        that is missing or damaged, ValueError for a row that is damaged.
        """
        names = in_parts(columns) if "segments" in columns else columns
        mapped = self._mapped  # the same to the end, whatever other threads map
        while (absent := mapped.first_absent(rows)) >= 0:
            mapped = self._mapped = self._with_shard_of(int(rows[absent]), mapped)
        return self._gathered(mapped, rows, names)

    def _gathered(self, mapped: Mapped, rows: Int64, columns: Sequence[str]) -> dict[str, Any]:
        return {name: mapped.gather(rows, name) for name in columns}

    @cached_property
    def _mapped(self) -> Mapped:
        """What this process has mapped for `gather`."""
        return Mapped.of(self._rows_as_stored)

    @property
    def stored_columns(self) -> list[str]:
        config = self.facts.config
        return [*VIEW_COLUMNS] if config.view else [*config.columns]

    def _with_shard_of(self, row: int, mapped: Mapped) -> Mapped:
        """`mapped`, with the shard of a row added that it lacks."""
        shard, within = self.find(row)
        self.check_size(shard)  # the result may have been opened long ago
        return mapped.added(row - within, list(self.stored(shard)))

    def _schema(self) -> Any:
        return schema(self.facts.config, self.facts.pad_token_id, self.facts.tokenizer_sha256)

    @cached_property
    def _rows_as_stored(self) -> Any:
        facts = self.facts
        return stored_schema(facts.config, facts.pad_token_id, facts.tokenizer_sha256)

    def _stored_schema(self, shard: Shard) -> Any:
        return self._rows_as_stored

    def local_squares(self) -> Path:
        """A local file with the content of `squared_lengths.npy`."""
        return self.path / SQUARED_LENGTHS


def stored_batches(source: Any, expected: Any) -> Iterator[Any]:
    """The record batches of an Arrow stream with the schema `expected`.

    Raises ArrowException or OSError for what no shard of ours can hold: a stream may come from
    anywhere, so nothing is allocated by what it says of itself.
    """
    messages = pa.ipc.MessageReader.open_stream(source)
    try:
        first = messages.read_next_message()
        if first.type != "schema":  # Arrow would take its bytes for a schema, and crash
            raise pa.ArrowInvalid(f"begins with a {first.type} message")
        schema = pa.ipc.read_schema(first)
        if problem := schema_problem(schema, expected):
            raise pa.ArrowInvalid(problem)
    except StopIteration:
        raise pa.ArrowInvalid("no schema") from None
    while True:
        try:
            message = messages.read_next_message()
        except StopIteration:
            return
        if message.type != "record batch":
            raise pa.ArrowInvalid(f"a {message.type} message among the rows")
        batch = pa.ipc.read_record_batch(message, schema)
        batch.validate(full=True)
        if not batch.num_rows:
            raise pa.ArrowInvalid("a record batch without rows")
        if not _lies_in(message.body, batch):
            raise pa.ArrowInvalid("a compressed record batch")
        for field, column in zip(schema, batch.columns, strict=True):
            if _has_nulls(column.values if field.nullable else column):
                raise pa.ArrowInvalid("a null")
        yield batch


def _lies_in(body: Any, batch: Any) -> bool:
    """Whether a batch is mapped: what Arrow has decompressed has memory of its own."""
    first, last = body.address, body.address + body.size
    buffers = (one for column in batch.columns for one in column.buffers() if one)
    return all(first <= one.address and one.address + one.size <= last for one in buffers)


def _has_nulls(array: Any) -> bool:
    if array.null_count:
        return True
    if isinstance(array, pa.ListArray | pa.FixedSizeListArray):
        return _has_nulls(array.values)
    return isinstance(array, pa.StructArray) and any(
        _has_nulls(array.field(i)) for i in range(array.type.num_fields)
    )


def rows_of(column: Any) -> npt.NDArray[Any]:
    """A fixed-size column of a batch as an array [rows, max_length], without a copy; [rows,
    max_length, K] where each token has K values.
    """
    width, values = column.type.list_size, plain_values(column.values)
    flat = values[column.offset * width : (column.offset + len(column)) * width]
    rows: npt.NDArray[Any] = flat.reshape(len(column), width, *values.shape[1:])
    return rows


def plain_values(values: Any) -> npt.NDArray[Any]:
    """Values of an Arrow array without nulls, [n], or [n, K] of lists of K, without a copy."""
    if pa.types.is_fixed_size_list(values.type):
        return rows_of(values)
    plain: npt.NDArray[Any] = values.to_numpy()
    return plain


def as_batch(columns: Mapping[str, Any], kinds: Any) -> Any:
    """Columns as `PackedDirectory.gather` gives them, as a record batch of the schema `kinds`."""

    def array(name: str) -> Any:
        kind, values = kinds.field(name).type, columns.get(name)
        if not isinstance(values, Lists | None):
            return fixed(kind, values)
        lists = [columns[part] for part in PARTS] if values is None else [values]
        return ragged(kind, lists[0].ends.astype(np.int32), [one.values for one in lists])

    return pa.RecordBatch.from_arrays([array(name) for name in kinds.names], schema=kinds)


def lists_of(batch: Any, name: str) -> tuple[Any, Int64]:
    """(values, offsets int64[rows + 1] into them) of a list column, the values without a copy."""
    column = batch.column(name)
    offsets = column.offsets.to_numpy().astype(np.int64)
    return plain_values(column.values)[offsets[0] : offsets[-1]], offsets - offsets[0]


def segments_of(batch: Any) -> tuple[Int64, Int64, Int64]:
    """Where segments lie in a batch: (begin int64[s], length int64[s], offsets int64[rows + 1]).

    Segment k, offsets[r] <= k < offsets[r + 1], is in the places begin[k] .. begin[k] + length[k]
    of row r. With a segment multiple these are not its boundaries in cu_seqlens, which leave the
    padding between segments out.
    """
    name = PADDED_BOUNDARIES if PADDED_BOUNDARIES in batch.schema.names else "cu_seqlens"
    places, edges = lists_of(batch, name)
    boundaries, _ = lists_of(batch, "cu_seqlens")
    last = edges[1:] - 1
    begin = np.delete(places, last)
    length = np.delete(np.diff(boundaries), last[:-1])
    return begin.astype(np.int64), length.astype(np.int64), edges - np.arange(len(edges))


def places_in(batch: Any, max_length: int) -> tuple[Int64, Int64, Int64]:
    """As `segments_of`, but `begin` counts over all rows of the batch."""
    begin, length, first = segments_of(batch)
    rows = np.repeat(np.arange(batch.num_rows), np.diff(first))
    return begin + rows * max_length, length, first


def measured_in(batch: Any, columns: Iterable[ValueColumn]) -> dict[str, Measured]:
    """Return what a shard says of the columns of values of a valid batch of rows or documents."""
    found = dict[str, Measured]()
    for one in columns:
        values, where = values_in(batch, one), tuple[Int64, ...]()
        if "cu_seqlens" in batch.schema.names and not one.is_of_segments:
            where = places_in(batch, values.shape[1])[:2]
            values = values.reshape(-1, *values.shape[2:])
        found[one.name] = measured(one, values, *where)
    return found


def values_in(batch: Any, column: ValueColumn) -> npt.NDArray[Any]:
    """Return a column of values as it is stored.

    Of rows: [rows, max_length], or [segments] if records have the values. Of documents: [T], or
    [n]. With K values each has another dimension.
    """
    stored = batch.column(column.name)
    is_list = pa.types.is_list(stored.type)
    return lists_of(batch, column.name)[0] if is_list else plain_values(stored)


def squared_lengths(packed: PackedDirectory) -> Int64:
    """int64[rows]: the sum of squared segment lengths of every row, which is what attention costs
    in it, in the order of the shards. They are in `squared_lengths.npy`, of numpy's format 1.0: a
    header of 128 bytes, then 8 bytes for each row, little-endian.

    Mapped, and read-only. Raises DataError for a side file that is not the manifest's, and when
    another result has taken the place of this one: the file has the same name in all of them, so
    its digest is compared.
    """
    path: Path | str = packed.place_of(SQUARED_LENGTHS)
    try:
        path = packed.local_squares()
        with storage.open_bytes(os.fspath(path)) as file:
            size = os.fstat(file.fileno()).st_size
            content = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""
        expected = HEADER_BYTES + 8 * packed.facts.rows
        if len(content) != expected or content[:HEADER_BYTES] != squares_header(packed.facts.rows):
            raise DataError(
                f"{os.fspath(path)}: is no array of numpy's format 1.0, <i8[{packed.facts.rows}] "
                f"in {expected} bytes: it has {len(content)}",
                PACK_AGAIN,
            )
        sha256 = hashlib.sha256(content).hexdigest()
        compare_digest(path, sha256, packed.facts, SQUARED_LENGTHS)
    except OSError as error:
        raise packed.replaced() or from_os_error(error, path, "read") from error
    except DataError as error:
        raise packed.replaced() or error from None
    sums: Int64 = np.frombuffer(content, "<i8", offset=HEADER_BYTES)
    return sums


def check_side_file(place: str | os.PathLike[str], facts: Result, name: str) -> None:
    """DataError where the side file `name`, which lies at `place`, is not the manifest's."""
    listed = facts.side_file_bytes.get(name)
    size, sha256 = digest(place, listed=listed)
    if listed not in (None, size):
        what = f"{os.fspath(place)}: has {size} bytes, the manifest says {listed}"
        raise DataError(what, PACK_AGAIN)
    compare_digest(place, sha256, facts, name)


def compare_digest(place: str | os.PathLike[str], sha256: str, facts: Result, name: str) -> None:
    """DataError where the side file `name`, which lies at `place`, is not the manifest's."""
    if sha256 != (listed := facts.side_files.get(name)):
        raise DataError(
            f"{os.fspath(place)}: its sha256 is {sha256}, the manifest says {listed}", PACK_AGAIN
        )


def squares_header(rows: int) -> bytes:
    """How a file of squared lengths of so many rows begins: as numpy itself writes it."""
    text = f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({rows},), }}"
    size = HEADER_BYTES - len(_MAGIC) - 2
    return _MAGIC + size.to_bytes(2, "little") + text.ljust(size - 1).encode() + b"\n"
