"""Read rows: `len` and `take` of packed directories, of results at URLs, and of several as one.

    PackedDirectory    memory-mapped shards, checked against the manifest
    CopiedDirectory    a result at a URL, whose files are copied when they are first read
    Joined             several results, whose rows follow one another

`opening.open_packed` opens a result of any of these kinds; views are read there.

A stream cut at a message boundary reads short without an error, so the size of every shard is
compared on open, and its rows when it is mapped. Shards are named by their content, so a directory
whose result is replaced while it is read gives the rows of the result that was opened, or an error.

Rows are gathered by their numbers without reading anything but these rows: every record batch is a
span of rows with a place in memory for each column, so kernels gather rows of many shards at once,
from addresses.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numpy.lib.format import write_array_header_1_0

from packer_cli import storage
from packer_cli._kernels import gathering
from packer_cli.errors import DataError, UsageError, os_errors
from packer_cli.options.option import plain_int
from packer_cli.records import Int32, Int64, offsets_of
from packer_cli.result.columns import (
    PARTS,
    fixed,
    plain_values,
    ragged,
    rows_of,
    schema,
    schema_problem,
    stored_schema,
    values_type,
)
from packer_cli.result.layout import SQUARED_LENGTHS, Shard, difference, problem_of
from packer_cli.result.manifest import Manifest, Result, replaced
from packer_cli.storage import no_link

PACK_AGAIN = (
    "copy the directory again, or move what is damaged and pack the data again with --overwrite"
)
WITH_THE_SAME = "pack them with the same options"
CACHE = "and cache= names a local directory"
HEADER_BYTES = 128  # of `squared_lengths.npy`
_UPLOAD_AGAIN = "upload the result again; if it was replaced, open it again"


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
        """Copy sequences of int32."""
        arrays = [np.asarray(values, np.int32) for values in lists]
        flat = np.concatenate(arrays) if arrays else np.empty(0, np.int32)
        return cls(flat, offsets_of([*map(len, arrays)]))

    @classmethod
    def joined(cls, parts: Sequence[Lists], order: Int64) -> Lists:
        """Return list order[0], order[1], ... of all lists of `parts`."""
        sizes = np.concatenate([np.diff(part.ends) for part in parts])
        begins = (np.cumsum(sizes) - sizes)[order]
        ends = offsets_of(sizes[order])
        places = np.arange(ends[-1]) + np.repeat(begins - ends[:-1], sizes[order])
        return cls(np.concatenate([part.values for part in parts])[places], ends)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> Int32:
        place = range(len(self))[index]
        return self.values[self.ends[place] : self.ends[place + 1]]


@dataclass(frozen=True)
class Mapped:
    """Spans of rows, in ascending order. It never changes, so threads may share it.

    schema        of the batches
    batches       one for each span; they own the memory
    firsts, ends  int64[spans], the first row of each, and the first row after it
    addresses     for each column int64[lines, spans]: addresses of its offsets, if it has any, and
                  of its values; `segments` has `PARTS` in place of values, and their number
    """

    schema: Any
    batches: list[Any]
    firsts: Int64
    ends: Int64
    addresses: dict[str, Int64]

    @classmethod
    def of(cls, schema: Any, first: int = 0, batches: Sequence[Any] = ()) -> Mapped:
        """Map the rows of record batches, numbered from `first` on."""
        sizes = np.array([batch.num_rows for batch in batches], np.int64)
        ends = first + np.cumsum(sizes)
        addresses = {field.name: _addresses(field, batches) for field in schema}
        return cls(schema, list(batches), ends - sizes, ends, addresses)

    def added(self, first: int, batches: Sequence[Any]) -> Mapped:
        """Return a copy with further spans, as `of` takes them."""
        new = Mapped.of(self.schema, first, batches)
        firsts = np.concatenate([self.firsts, new.firsts])
        spans = np.argsort(firsts)
        every = self.batches + new.batches
        return Mapped(
            self.schema,
            [every[span] for span in spans],
            firsts[spans],
            np.concatenate([self.ends, new.ends])[spans],
            {name: np.concatenate([known, new.addresses[name]], axis=1).take(spans, axis=1)
             for name, known in self.addresses.items()},
        )  # fmt: skip

    def first_absent(self, rows: Int64) -> int:
        """Return the place in `rows` of the first that is in no span; -1 if all are mapped."""
        absent: int = gathering.first_absent(rows, self.firsts, self.ends)
        return absent

    def gather(self, rows: Int64, name: str) -> Any:
        """Copy a column, or part of `segments`, of mapped rows: [b, max_length], or `Lists`."""
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
        lists = np.empty(ends[-1], kind)
        to = lists.reshape(-1).view(np.uint8)
        gathering.gather_values(rows, self.firsts, offsets, values, ends, kind.itemsize, to)
        return Lists(lists, ends)


def _addresses(field: Any, batches: Sequence[Any]) -> Int64:
    """Return the addresses of a column, as `Mapped` has them."""
    name, lines, is_fixed = field.name, [], pa.types.is_fixed_size_list(field.type)
    for column in (batch.column(name) for batch in batches):
        values = column.values
        if is_fixed:
            lines.append([rows_of(column).ctypes.data])
            continue
        edges = column.offsets.to_numpy().ctypes.data
        if name == "segments":
            parts = [values.field(part).to_numpy().ctypes.data for part in PARTS]
            lines.append([edges, *parts, len(values)])
        else:
            lines.append([edges, plain_values(values).ctypes.data])
    count = 2 + len(PARTS) if name == "segments" else 2 - is_fixed
    addresses: Int64 = np.array(lines, np.int64).reshape(-1, count)
    return np.ascontiguousarray(addresses.T)


def described(rows: Any, path: object, tokens: int) -> str:
    """Return the `repr` of a result, or several: place, number of rows, and their length."""
    return (
        f"{type(rows).__name__}({path!r}, rows={len(rows)}, max_length={rows.max_length}, "
        f"tokens={tokens})"
    )


def in_parts(columns: Sequence[str]) -> list[str]:
    """Return names of columns with the parts of `segments` in its place."""
    return [part for name in columns for part in (PARTS if name == "segments" else [name])]


class Stored:
    """A finished result of any kind.

    path   the local directory
    where  its path or its URL, for messages
    facts  its manifest
    """

    facts: Result
    what, again = "rows", PACK_AGAIN  # what shards hold, and what to do if one is damaged

    def __init__(self, path: Path) -> None:
        self.path, self.where = path, str(path)

    def place_of(self, name: str) -> str:
        """Return the path or URL of a file of the result, for messages."""
        return storage.join(self.where, name)

    def replaced(self) -> DataError | None:
        """Return the error to raise if another result has taken the place of this one."""
        return replaced(self.where, self.facts)

    def damaged(self, shard: Shard, problem: str) -> DataError:
        """Return the error to raise for a shard with a problem."""
        place = self.place_of(shard.file)
        return self.replaced() or DataError(f"{place}: {problem}", self.again)

    def check_size(self, shard: Shard) -> None:
        """Raise DataError if a shard is missing or has another size than the manifest says."""
        if problem := problem_of(self.path / shard.file, shard):
            raise self.damaged(shard, problem)

    def check_digest(self, shard: Shard) -> None:
        """Raise DataError for a shard with another digest than the manifest says."""
        if problem := difference(self.path / shard.file, shard.sha256):
            raise self.damaged(shard, problem)

    def stored(self, shard: Shard, maps: list[mmap.mmap] | None = None) -> Iterator[Any]:
        """Yield a shard's record batches as stored, mapped and validated. OUT maps: of tokens.

        Raises DataError for anything that packer does not write.
        """
        count = 0
        with self._readable(shard), self._map(shard, maps) as source:
            for batch in _stored_batches(source, self._stored_schema(shard)):
                count += batch.num_rows
                if count > shard.rows:
                    break
                yield batch
        if count != shard.rows:
            text = f"holds {count} {self.what}, the manifest says {shard.rows}"
            raise self.damaged(shard, text)

    @contextmanager
    def _readable(self, shard: Shard) -> Iterator[None]:
        """Turn errors of Arrow and of the system in reading a shard into DataErrors."""
        try:
            yield
        except (pa.ArrowException, OSError, ValueError) as error:  # the last one: an empty file
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise self.damaged(shard, f"not a readable shard: {reason}") from error

    def _map(self, shard: Shard, maps: list[mmap.mmap] | None) -> Any:
        """Map a shard's bytes. Raises ArrowException or OSError."""
        return pa.memory_map(str(self.local(shard.file, shard.sha256, shard.bytes)))

    def local(self, name: str, sha256: str, size: int) -> Path:
        """Return the local path of a file with this digest and size."""
        return self.path / name

    def _stored_schema(self, shard: Shard) -> Any:
        raise NotImplementedError


def _stored_batches(source: Any, expected: Any) -> Iterator[Any]:
    """Yield the record batches of an Arrow stream with the schema `expected`.

    Raises ArrowException or OSError for anything that packer does not write: a stream may come from
    anywhere, so no memory is allocated for the sizes that it claims.
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
        if not _is_inside(message.body, batch):
            raise pa.ArrowInvalid("a compressed record batch")
        for field, column in zip(schema, batch.columns, strict=True):
            if _has_nulls(column.values if field.nullable else column):
                raise pa.ArrowInvalid("a null")
        yield batch


def _is_inside(body: Any, batch: Any) -> bool:
    """Return False if a batch has memory of its own, which Arrow has decompressed into."""
    first, last = body.address, body.address + body.size
    buffers = (buffer for column in batch.columns for buffer in column.buffers() if buffer)
    return all(first <= one.address and one.address + one.size <= last for one in buffers)


def _has_nulls(array: Any) -> bool:
    if array.null_count:
        return True
    if isinstance(array, pa.ListArray | pa.FixedSizeListArray):
        return _has_nulls(array.values)
    return isinstance(array, pa.StructArray) and any(
        _has_nulls(array.field(i)) for i in range(array.type.num_fields)
    )


class RowReader(ABC):
    """Rows by their numbers, of one result or of several."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def gather(self, rows: Int64, columns: Sequence[str]) -> dict[str, Any]:
        """Copy columns of rows 0 <= row < len(self), in the order given: arrays [b, max_length], or
        `Lists`. The parts of `segments` are columns in its place, and may be named alone.
        """

    @abstractmethod
    def _schema(self) -> Any:
        """Return the Arrow schema of complete rows."""

    def take(
        self, rows: Iterable[int] | npt.NDArray[np.integer], columns: Sequence[str] | None = None
    ) -> Any:
        """Copy rows 0 <= row < len(self) into one complete record batch, in the order given.

        `columns`: only these of the manifest's. Raises UsageError if `rows` are not whole numbers,
        IndexError if one is out of range, and as `gather`.
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


class PackedDirectory(Stored, RowReader):
    """A finished packed directory.

    Record batches are either as stored, or complete, with all columns of the manifest. They differ
    only in a view, which `opening.View` completes.
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
        """manifest.json as plain dicts and lists."""
        return self.facts.document

    @property
    def digest(self) -> str:
        """Checksum that the manifest has, different for each result."""
        return str(self.facts.sha256)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __repr__(self) -> str:
        return described(self, self.where, self.facts.tokens)

    def find(self, row: int) -> tuple[Shard, int]:
        """Return the shard that holds a row, and the row's number in it. Raises IndexError."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        index = int(np.searchsorted(self._ends, row, side="right"))
        shard = self.facts.shards[index]
        return shard, row - (int(self._ends[index]) - shard.rows)

    def batches(self, shard: Shard | dict[str, Any]) -> Iterator[Any]:
        """Return the complete record batches of a shard, an entry of manifest["shards"], mapped."""
        return self._complete(msgspec.convert(shard, Shard) if isinstance(shard, dict) else shard)

    def _complete(self, shard: Shard) -> Iterator[Any]:
        return self.stored(shard)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Copy a row: its columns as numpy arrays, as docs/format.md has them, and `segments` as a
        dict of its parts. Negative numbers count from the end.

        Raises IndexError, and as `gather`.
        """
        count, number = len(self), plain_int("row", row)
        if not -count <= number < count:
            raise IndexError(f"row {number} of {count}")
        names = self._schema().names
        columns = self.gather(np.array([number % count]), names)
        first = {name: values[0] for name, values in columns.items()}
        return {
            name: first[name] if name in first else {part: first[part] for part in PARTS}
            for name in names
        }

    def gather(self, rows: Int64, columns: Sequence[str]) -> dict[str, Any]:
        """Copy columns, and keep the shards of these rows mapped. Threads may share it.

        Raises DataError for a shard that is missing or damaged, ValueError for a damaged row.
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
        """Shards that this process has mapped for `gather`."""
        return Mapped.of(self._rows_as_stored)

    def _with_shard_of(self, row: int, mapped: Mapped) -> Mapped:
        """Return `mapped` with the shard of a row, which it lacks."""
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


def as_batch(columns: Mapping[str, Any], kinds: Any) -> Any:
    """Make a record batch of the schema `kinds` from columns as `gather` returns them."""

    def array(name: str) -> Any:
        kind, values = kinds.field(name).type, columns.get(name)
        if not isinstance(values, Lists | None):
            return fixed(kind, values)
        lists = [columns[part] for part in PARTS] if values is None else [values]
        return ragged(kind, lists[0].ends.astype(np.int32), [part.values for part in lists])

    return pa.RecordBatch.from_arrays([array(name) for name in kinds.names], schema=kinds)


class CopiedDirectory(PackedDirectory):
    """A packed directory at a URL, no view. Files are copied into a folder below `cache` when they
    are first read, and compared with their digests. Nothing there is ever removed.
    """

    def __init__(self, url: str, facts: Manifest, cache: str | os.PathLike[str] | None) -> None:
        if facts.config.view:
            raise UsageError(
                f"{url}: a view, which is only read from a local directory",
                "copy it and its tokenized directories to local paths; or pack without --view",
            )
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        place = os.path.join(home, "packer") if cache is None else storage.local(cache, CACHE)
        super().__init__(Path(place).expanduser().absolute() / str(facts.sha256), facts)
        self.where = url

    def check_size(self, shard: Shard) -> None:
        """Do nothing: copies are compared with the manifest when they are made."""

    def local(self, name: str, sha256: str, size: int) -> Path:
        """Copy a file, unless it is there. Other processes wait for the one that does: it holds a
        lock on the copy until that has its name. Raises DataError if the object has changed.
        """
        path, part = self.path / name, self.path / f"{name}.part"
        with os_errors(path, "write"):
            if storage.size_of(path) == size:
                return path
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(part, "ab", opener=no_link) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                try:
                    if storage.size_of(path) != size:
                        storage.download(self.place_of(name), part)
                        if problem := difference(part, sha256):
                            raise DataError(f"{self.place_of(name)}: {problem}", _UPLOAD_AGAIN)
                        os.replace(part, path)
                except DataError as error:
                    raise self.replaced() or error from error
                finally:  # a copy of this process (fork) would go on holding it
                    fcntl.flock(file, fcntl.LOCK_UN)
        return path


class Joined(RowReader):
    """Several results as one, whose rows follow one another. Raises DataError if they do not match.

    firsts  int64[results + 1], the first row of each, and how many rows there are
    """

    def __init__(self, parts: Sequence[PackedDirectory]) -> None:
        self.parts = list(parts)
        self.firsts = offsets_of([*map(len, parts)])
        first = parts[0]
        for other in parts[1:]:
            known = _common_properties(other)
            for name, value in _common_properties(first).items():
                if value != known.get(name, value):
                    raise DataError(
                        f"{first.path} and {other.path} do not go together: {name} is {value} in "
                        f"the first and {known[name]} in the second",
                        WITH_THE_SAME,
                    )

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def places(self, rows: Int64) -> tuple[Int64, Int64]:
        """Return (number in its result, which result) of rows."""
        which = np.searchsorted(self.firsts, rows, side="right") - 1
        return rows - self.firsts[which], which

    def _schema(self) -> Any:
        return self.parts[0]._schema()

    def gather(self, rows: Int64, columns: Sequence[str]) -> dict[str, Any]:
        """Copy columns that all results have. Raises DataError for a damaged result."""
        numbers, which = self.places(rows)
        chosen = np.unique(which).tolist() or [0]
        places = [np.flatnonzero(which == result) for result in chosen]
        parts = list[dict[str, Any]]()
        for result, here in zip(chosen, places, strict=True):
            try:
                parts.append(self.parts[result].gather(numbers[here], columns))
            except ValueError as error:  # changed while it was mapped
                where = self.parts[result].where
                raise DataError(f"{where}: {error}", PACK_AGAIN) from error
        if len(parts) == 1:
            return parts[0]
        order = np.argsort(np.concatenate(places))
        return {name: _merged([part[name] for part in parts], order) for name in parts[0]}

    @property
    def fingerprint(self) -> str:
        """Digest of rows and their order, the same for copies of the results."""

        def joined(digests: list[str]) -> str:
            return hashlib.sha256("".join(digests).encode()).hexdigest()

        prints = [joined(part.facts.data_digests) for part in self.parts]
        return prints[0] if len(prints) == 1 else joined(prints)

    @property
    def squared_lengths(self) -> Int64:
        """Sum of squared segment lengths of every row, int64[rows]."""
        sums = [squared_lengths(part) for part in self.parts]
        return sums[0] if len(sums) == 1 else np.concatenate(sums)  # one is mapped


def _merged(columns: Sequence[Any], order: Int64) -> Any:
    """Return row order[0], order[1], ... of columns of all parts."""
    if isinstance(columns[0], Lists):
        return Lists.joined(columns, order)
    return np.concatenate(columns)[order]


def _common_properties(packed: PackedDirectory) -> dict[str, object]:
    """Return what rows of one batch must have in common, by the words for it."""
    facts, tokenizer = packed.facts, packed.facts.tokenizer
    columns = sorted(map(str, facts.config.value_columns.values()))
    return {
        "max_length": packed.max_length,
        "the segment multiple": packed.segment_multiple,
        "columns of values": ", ".join(columns) or "none",
        "the tokenizer": f"{tokenizer.source}, sha256 {tokenizer.sha256}" if tokenizer else "none",
    }


# --- side files


def squared_lengths(packed: PackedDirectory) -> Int64:
    """Map the sum of squared segment lengths of every row, int64[rows], read-only.

    Raises DataError if the file is not the manifest's, and if the result has been replaced.
    """
    facts, name = packed.facts, SQUARED_LENGTHS
    try:
        path = packed.local(name, facts.side_files.get(name, ""), HEADER_BYTES + 8 * len(packed))
        with os_errors(path), storage.open_bytes(str(path)) as file:
            size = os.fstat(file.fileno()).st_size
            content = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""
        check_side_file(path, facts, name)  # of what was mapped: files are replaced by renaming
    except DataError as error:
        raise packed.replaced() or error from None
    sums: Int64 = np.frombuffer(content, "<i8", offset=HEADER_BYTES)
    return sums


def check_side_file(place: str | os.PathLike[str], facts: Result, name: str) -> None:
    """Raise DataError if the side file `name`, which lies at `place`, is not the manifest's."""
    listed = facts.side_files.get(name, "missing"), facts.side_file_bytes.get(name)
    if problem := difference(place, *listed):
        raise DataError(f"{os.fspath(place)}: {problem}", PACK_AGAIN)


def squares_header(rows: int) -> bytes:
    """Return the first HEADER_BYTES of a file of this many squared lengths."""
    file = io.BytesIO()
    facts = {"descr": "<i8", "fortran_order": False, "shape": (rows,)}
    write_array_header_1_0(file, facts)
    return file.getvalue()
