"""Reading a packed directory: memory-mapped shards, checked against the manifest. `opening.py`
opens one, and `view.py` reads views in the same way.

A stream cut at a message boundary reads short without an error, so the size of every shard is
compared on open, and its rows when it is mapped. Shards are named by their content, so a directory
whose result is replaced while it is read gives the rows of the result that was opened, or an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from struct import error as struct_error
from struct import unpack_from
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packer_cli.config.columns import (
    COLUMNS,
    PADDED_BOUNDARIES,
    PAIR_COLUMNS,
    REQUIRED_COLUMNS,
    view_columns,
)
from packer_cli.errors import DataError
from packer_cli.records import Int64
from packer_cli.result.layout import MANIFEST
from packer_cli.result.manifest import Manifest
from packer_cli.result.manifest_file import load
from packer_cli.result.mapped import PARTS, Lists, Mapped, in_parts
from packer_cli.result.shard_writer import PADDED, column_type, fixed, ragged, schema
from packer_cli.result.shards import MISSING, Shard, problem_of

# Places of fields in Arrow's Message.fbs.
_MESSAGE_HEADER, _BATCH_COMPRESSION = 2, 3
PACK_AGAIN = "copy the directory again, or pack the data again with --overwrite"


class PackedDirectory:
    """A finished result. `path` is the directory, `facts` what its manifest says.

    Record batches are either as stored, or complete, with all columns of the manifest. Only in a
    view do they differ; `View` completes them.
    """

    def __init__(self, path: Path, facts: Manifest) -> None:
        self.path = path
        self.facts = facts
        self.max_length = facts.config.max_length
        self.segment_multiple = facts.config.segment_multiple
        self.label_shift = facts.config.label_shift
        self.max_segments_per_row = facts.config.max_segments_per_row
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
        """Rows in all shards."""
        return self.facts.rows

    def find(self, row: int) -> tuple[Shard, int]:
        """The shard that holds a row counted over all shards, and the row's number in it.

        Raises IndexError for a negative row, DataError for one that no shard has.
        """
        if row < 0:  # numpy would find it in the first shard
            raise IndexError(f"row {row} of {len(self)}")
        index = int(np.searchsorted(self._ends, row, side="right"))
        if index == len(self._ends):
            raise DataError(
                f"{self.path / MANIFEST}: its total is {len(self)} rows, its shards hold "
                f"{sum(shard.rows for shard in self.facts.shards)}",
                "pack the data again",
            )
        shard = self.facts.shards[index]
        return shard, row - (int(self._ends[index]) - shard.rows)

    def check_size(self, shard: Shard) -> None:
        """Raise DataError when a shard is missing or not as long as the manifest says."""
        file = self.path / shard.file
        problem = problem_of(file, shard)
        if problem == MISSING and (error := self.replaced()):
            raise error
        if problem:
            raise DataError(f"{file}: {problem}", PACK_AGAIN)

    def batches(self, shard: Shard | dict[str, Any]) -> Iterator[Any]:
        """The complete record batches of a shard (an entry of manifest["shards"]), mapped.

        Raises DataError when the shard cannot be read or holds another number of rows.
        """
        if isinstance(shard, dict):
            shard = msgspec.convert(shard, Shard)
        with self._readable(shard):
            for first, batch in self._numbered(shard):
                yield from self.filled(batch, first)

    def stored(self, shard: Shard) -> Iterator[Any]:
        """The record batches of a shard as they are stored, mapped. Raises as `batches`."""
        with self._readable(shard):
            for _, batch in self._numbered(shard):
                yield batch

    def _numbered(self, shard: Shard) -> Iterator[tuple[int, Any]]:
        """(number of its first row in the shard, record batch as it is stored)."""
        first = 0
        with self._map(shard) as source:
            for batch in self.stored_batches(source):
                yield first, batch
                first += batch.num_rows
        if first != shard.rows:
            raise DataError(
                f"{self.place_of(shard.file)}: holds {first} rows, the manifest says {shard.rows}",
                PACK_AGAIN,
            )

    @contextmanager
    def _readable(self, shard: Shard) -> Iterator[None]:
        """Turn errors of Arrow and of the system in reading a shard into DataErrors."""
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            raise self.replaced() or DataError(
                f"{self.place_of(shard.file)}: not a readable shard: {first_line(error)}",
                PACK_AGAIN,
            ) from error

    def take(self, rows: Int64, columns: Sequence[str] | None = None) -> Any:
        """Rows 0 <= row < len(self) as one complete record batch, copied, in the order given.

        `columns`: only these of the manifest's. Raises as `gather`.
        """
        kinds = self._schema()
        if columns is not None:
            kept = [kinds.field(name) for name in kinds.names if name in columns]
            kinds = pa.schema(kept, metadata=kinds.metadata)
        return as_batch(self.gather(rows, kinds.names), kinds)

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
        return self._nothing_mapped()

    def _nothing_mapped(self) -> Mapped:
        stored = self.stored_columns
        return Mapped(
            {name: PADDED[name] for name in stored if name in PADDED},
            [name for name in stored if name not in PADDED],
            self.max_length,
        )

    @cached_property
    def stored_columns(self) -> list[str]:
        """The columns that shards have."""
        config = self.facts.config
        return view_columns(config.columns) if config.view else list(config.columns)

    def _with_shard_of(self, row: int, mapped: Mapped) -> Mapped:
        """`mapped`, with the shard of a row added that it lacks."""
        shard, within = self.find(row)
        self.check_size(shard)  # the result may have been opened long ago
        batches = list(self.stored(shard))
        for batch in batches:
            if absent := {*self.stored_columns} - {*batch.schema.names}:
                raise DataError(
                    f"{self.place_of(shard.file)}: has no column {min(absent)}, {MANIFEST} says "
                    "it has",
                    PACK_AGAIN,
                )
            said = metadata_of(batch.schema)
            stated = said.get("label_shift", "none"), said.get("segment_multiple", 1)
            if stated != (self.label_shift, self.segment_multiple):
                raise DataError(
                    f"{self.place_of(shard.file)}: says another label_shift or segment_multiple "
                    f"than {MANIFEST}",
                    PACK_AGAIN,
                )
        # packers before 0.2 gave shards of all results the same names
        if shard.sha256[:16] not in shard.file and (error := self.replaced()):
            raise error
        return mapped.added(row - within, batches)

    def _schema(self) -> Any:
        """The Arrow schema of complete rows."""
        sha256 = self.facts.tokenizer.sha256 if self.facts.tokenizer else ""
        return schema(self.facts.config, self.facts.pad_token_id, sha256)

    def place_of(self, name: str) -> str:
        """Where a file of the result is, for messages."""
        return str(self.path / name)

    def local(self, name: str) -> Path:
        """A local file with the content of a side file."""
        return self.path / name

    def _map(self, shard: Shard) -> Any:
        """The shard's bytes, mapped. Raises ArrowException or OSError."""
        return pa.memory_map(str(self.path / shard.file))

    def replaced(self) -> DataError | None:
        """The error to raise when another result has taken the place of this one."""
        try:
            now = load(self.path, incomplete_too=True, half_too=True)
        except DataError:
            return None
        if now.sha256 == self.facts.sha256:
            return None
        return DataError(
            f"{self.path}: was replaced by another result while it was read", "read it again"
        )

    def filled(self, stored: Any, first_row: int = 0) -> Iterator[Any]:
        """A stored record batch, or some of its rows, made complete.

        Raises ArrowException for a row that cannot be; its rows count from `first_row`.
        """
        yield stored

    def stored_batches(self, source: Any) -> Iterator[Any]:
        """The record batches of an Arrow stream, each safe to look into.

        Raises ArrowException or OSError for what no shard of this directory can hold: a stream
        may come from anywhere, so nothing is allocated by what it says of itself.
        """
        messages = pa.ipc.MessageReader.open_stream(source)
        try:
            first = messages.read_next_message()
            if first.type != "schema":  # Arrow would take its bytes for a schema, and crash
                raise pa.ArrowInvalid(f"begins with a {first.type} message")
            schema = pa.ipc.read_schema(first)
            self._check_schema(schema)
        except StopIteration:
            raise pa.ArrowInvalid("no schema") from None
        except UnicodeDecodeError as error:
            raise pa.ArrowInvalid(f"a name that is not UTF-8: {error}") from error
        while True:
            try:
                message = messages.read_next_message()
            except StopIteration:
                return
            if message.type != "record batch":
                raise pa.ArrowInvalid(f"a {message.type} message among the rows")
            if _is_compressed(message.metadata):
                raise pa.ArrowInvalid("a compressed record batch")
            batch = pa.ipc.read_record_batch(message, schema)
            batch.validate(full=True)
            if not batch.num_rows:
                raise pa.ArrowInvalid("a record batch without rows")
            if any(map(_has_nulls, batch.columns)):
                raise pa.ArrowInvalid("a null")
            yield batch

    def _check_schema(self, schema: Any) -> None:
        metadata_of(schema)
        if self.facts.config.view:
            names = self.stored_columns
            kinds = [column_type(name, self.max_length) for name in names]
            if (schema.names, schema.types) != (names, kinds):
                raise pa.ArrowInvalid(
                    f"the columns are {', '.join(schema.names)}, not those of a view, "
                    f"{' and '.join(names)}"
                )
            return
        for field in schema:
            if field.name not in (*COLUMNS, PADDED_BOUNDARIES, *PAIR_COLUMNS):
                raise pa.ArrowInvalid(f"an unknown column {field.name!r}")
            expected = column_type(field.name, self.max_length)
            if field.type != expected:
                raise pa.ArrowInvalid(f"{field.name} is {field.type}, not {expected}")
        if len(set(schema.names)) < len(schema.names) or not {*REQUIRED_COLUMNS} <= {*schema.names}:
            raise pa.ArrowInvalid(f"the columns are {', '.join(schema.names)}")


def metadata_of(schema: Any) -> dict[str, Any]:
    """The metadata of a shard. Raises ArrowInvalid when it cannot be read."""
    try:
        metadata = json.loads((schema.metadata or {}).get(b"packer", b"{}"))
    except (ValueError, RecursionError) as error:
        raise pa.ArrowInvalid(f"metadata that is not JSON: {error}") from error
    if not isinstance(metadata, dict):
        raise pa.ArrowInvalid("metadata that is not a JSON object")
    return metadata


def _has_nulls(array: Any) -> bool:
    if array.null_count:
        return True
    if isinstance(array, pa.ListArray | pa.FixedSizeListArray):
        return _has_nulls(array.values)
    return isinstance(array, pa.StructArray) and any(
        _has_nulls(array.field(i)) for i in range(array.type.num_fields)
    )


def _is_compressed(metadata: Any) -> bool:
    """Whether a record batch message (a flatbuffer, which Arrow has checked) names a codec.

    Arrow would believe the size that compressed buffers claim, and allocate it.
    """
    data = memoryview(metadata)

    def field(table: int, index: int) -> int:
        """Where a table's field is, 0 when it is left out."""
        vtable = table - unpack_from("<i", data, table)[0]
        slot = 4 + 2 * index
        if slot >= unpack_from("<H", data, vtable)[0]:
            return 0
        offset: int = unpack_from("<H", data, vtable + slot)[0]
        return offset and table + offset

    try:
        root = unpack_from("<I", data, 0)[0]
        header = field(root, _MESSAGE_HEADER)
        return bool(field(header + unpack_from("<I", data, header)[0], _BATCH_COMPRESSION))
    except struct_error as error:
        raise pa.ArrowInvalid("a damaged message") from error


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def rows_of(column: Any) -> npt.NDArray[Any]:
    """A fixed-size column of a batch as an array [rows, max_length], without a copy."""
    width = column.type.list_size
    flat = column.values.to_numpy()[column.offset * width : (column.offset + len(column)) * width]
    rows: npt.NDArray[Any] = flat.reshape(len(column), width)
    return rows


def as_batch(columns: Mapping[str, Any], kinds: Any) -> Any:
    """Columns as `PackedDirectory.gather` gives them, as a record batch of the schema `kinds`."""

    def array(name: str) -> Any:
        kind, values = kinds.field(name).type, columns.get(name)
        if not isinstance(values, Lists | None):
            return fixed(kind, values)
        lists = [columns[part] for part in PARTS] if values is None else [values]
        return ragged(kind, lists[0].ends.astype(np.int32), [one.values for one in lists])

    return pa.RecordBatch.from_arrays([array(name) for name in kinds.names], schema=kinds)


def ragged_of(column: Any) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
    """A list column of a batch as (values, offsets int32[rows + 1]), without a copy."""
    return column.values.to_numpy(), column.offsets.to_numpy()


def segments_of(batch: Any) -> tuple[Int64, Int64, Int64]:
    """Where segments lie in a batch: (begin int64[s], length int64[s], offsets int64[rows + 1]).

    Segment k, offsets[r] <= k < offsets[r + 1], is in the places begin[k] .. begin[k] + length[k]
    of row r. With a segment multiple these are not its boundaries in cu_seqlens, which leave the
    padding between segments out.
    """
    name = PADDED_BOUNDARIES if PADDED_BOUNDARIES in batch.schema.names else "cu_seqlens"
    places, edges = ragged_of(batch.column(name))
    boundaries, real_edges = ragged_of(batch.column("cu_seqlens"))
    last = edges[1:] - 1 - edges[0]
    begin = np.delete(places[edges[0] : edges[-1]], last)
    length = np.delete(np.diff(boundaries[real_edges[0] : real_edges[-1]]), last[:-1])
    offsets = (edges - edges[0]).astype(np.int64) - np.arange(len(edges))
    return begin.astype(np.int64), length.astype(np.int64), offsets
