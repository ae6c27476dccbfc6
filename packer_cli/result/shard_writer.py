"""Write shards as Arrow IPC streams: of rows, and of documents with their indexes.

    shard-00000-000.arrow       rows; those of a view without tokens, see `opening.View`
    documents-00000-000.arrow   input_ids, trained, file, position
    index-00000-000.arrow       length, trained_tokens, content_hash, tier of the same documents

The index alone is read to plan, to choose and to split. Shards are written in the run's work
folder, without copies and validity bitmaps, and moved to the output once all of them are whole.
Needs the memory of one record batch, 4 to 9 MB.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from packer_cli._kernels import documents as kernels
from packer_cli._kernels import filling
from packer_cli.errors import PackerError, from_os_error, os_errors
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.options import PADDED_BOUNDARIES, PackConfig
from packer_cli.packing.fitting import padded
from packer_cli.packing.labels import trained_tokens
from packer_cli.packing.window import trained_in
from packer_cli.records import (
    TIER,
    Documents,
    Int32,
    Int64,
    UInt8,
    UInt32,
    UInt64,
    bytes_of,
    value_bytes,
)
from packer_cli.result.columns import (
    HASH_BYTES,
    PADDED,
    PARTS,
    batch_tokens,
    flat,
    index_schema,
    measured,
    ragged,
    stored_batch_rows,
)
from packer_cli.result.layout import (
    DOCUMENTS,
    INDEX,
    PART,
    ROWS,
    Measured,
    Shard,
    add_measured,
    unnamed_shard,
)
from packer_cli.result.reader import Lists, as_batch

_ROOM_TOKENS = 1 << 21  # enough for most flushes: one batch more than waits
_MOST_TOKENS = (1 << 31) - 1  # that the offsets of a record batch count


# --- files


class Parts:
    """Files in `folder`, a new one as soon as the last has `limit` bytes: opened when they are
    needed, ended when they are full, abandoned after a failure.

    name    returns the name of a file by its number: 0, 1, ...
    start   makes an Arrow or Parquet writer of a file and a schema

    Raises OSError if a file cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        name: Callable[[int], str],
        schema: Any,
        limit: int,
        start: Callable[..., Any],
    ) -> None:
        self._folder, self._name, self._limit, self._start = folder, name, limit, start
        self._open: tuple[Any, Any] | None = None  # the file and its writer
        self.schema = schema
        self.names: list[str] = []

    @property
    def full(self) -> bool:
        """True if the open file gets no more batches."""
        return self._open is not None and self._open[0].tell() >= self._limit

    def write(self, batch: Any, **how: Any) -> None:
        """Append a record batch. `how`: arguments for the writer."""
        if self.full:
            self.close()
        if self._open is None:
            self.names.append(self._name(len(self.names)))
            sink = pa.OSFile(str(self._folder / self.names[-1]), "wb")
            self._open = sink, self._start(sink, self.schema)
        self._open[1].write_batch(batch, **how)

    def close(self) -> None:
        """End the open file; the next batch begins another."""
        if self._open is not None:
            (sink, writer), self._open = self._open, None
            try:
                writer.close()
            finally:
                sink.close()

    def abandon(self) -> None:
        """Close the open file after a failure, without another error."""
        if self._open is not None:
            (sink, _), self._open = self._open, None
            with suppress(OSError):
                sink.close()


class LazyFile:
    """A file that is created when something is written to it. Raises DataError, which names it.

    path  None until then
    """

    def __init__(self, name: Path) -> None:
        self._name = name
        self._file: Any = None
        self.path: Path | None = None
        self.size = 0

    def write(self, data: Any) -> None:
        """Append bytes, or a buffer of them."""
        with os_errors(self._name, "write"):
            if self._file is None:
                self._file, self.path = open(self._name, "wb"), self._name  # noqa: SIM115
            self.size += self._file.write(data)

    def close(self) -> None:
        with os_errors(self._name, "write"):
            if self._file is not None:
                self._file.close()

    def abandon(self) -> None:
        """Close the file after a failure, without another error."""
        with suppress(PackerError):
            self.close()


class ShardParts(Parts):
    """The shards of one unit, counted; the caller names them. Raises DataError that names one."""

    def __init__(self, folder: Path, unit: int, kind: str, schema: Any, limit: int) -> None:
        super().__init__(
            folder, lambda part: unnamed_shard(kind, unit, part) + PART, schema, limit,
            pa.ipc.new_stream,
        )  # fmt: skip
        self._unit = unit
        self.shards: list[Shard] = []

    def write_rows(
        self,
        batch: Any,
        segments: int,
        tokens: int,
        trained_tokens: int,
        values: Mapping[str, Measured] = MappingProxyType({}),
    ) -> None:
        """Append a record batch. The other arguments are counts of its rows."""
        try:
            self.write(batch)
        except OSError as error:
            raise from_os_error(error, self._folder / self.names[-1], "write") from error
        if len(self.shards) < len(self.names):
            self.shards.append(Shard.begun(self.names[-1], self._unit))
        shard = self.shards[-1]
        shard.rows += batch.num_rows
        shard.segments += segments
        shard.tokens += tokens
        shard.trained_tokens += trained_tokens
        add_measured(shard.values, values)

    def close(self) -> None:
        if self.names:
            with os_errors(self._folder / self.names[-1], "write"):
                super().close()


# --- rows


class ShardWriter:
    """Writes the rows of one unit, in parts of about `shard_bytes` at most, a view in one part.

    A view has two columns, `cu_seqlens` and `segments`, and no tokens. FILE and POSITION of a
    segment are the number of a tokenized directory and of a document in it.

    rows_at_once  rows in a record batch; 0 for a view, which needs no tokens
    """

    def __init__(
        self, folder: Path, unit: int, config: PackConfig, schema: Any, pad_token_id: int
    ) -> None:
        """`schema`: as `stored_schema` returns it."""
        self._config, self._schema, self._pad = config, schema, pad_token_id
        self._columns = {} if config.view else config.value_columns
        limit = sys.maxsize if config.view else config.shard_bytes
        self._parts = ShardParts(folder, unit, ROWS, schema, limit)
        self._rows_per_batch = stored_batch_rows(config)
        self.rows_at_once = 0 if config.view else self._rows_per_batch
        self._buffers: dict[str, Any] = {
            name: np.empty((self._rows_per_batch, config.max_length), kind)
            for name, kind in PADDED.items()
            if name in schema.names
        }

    def write(self, documents: Documents, order: Int64, row_offsets: Int64) -> None:
        """Append rows: row r holds the documents order[row_offsets[r]:row_offsets[r + 1]]."""
        rows = len(row_offsets) - 1
        for first in range(0, rows, self._rows_per_batch):
            edges = row_offsets[first : first + self._rows_per_batch + 1]
            self._write_batch(documents, order, edges)

    def _write_batch(self, documents: Documents, order: Int64, edges: Int64) -> None:
        pieces, ends = order[edges[0] : edges[-1]], edges - edges[0]
        make = self._references if self._config.view else self._filled
        columns, trained = make(documents, order, edges)
        if "segments" in self._schema.names:
            for part in PARTS:
                columns[part] = Lists(documents.of_documents[part][pieces], ends)
        counts = dict[str, Measured]()
        if self._columns:
            length = documents.lengths[pieces].astype(np.int64)
            begin = _places(length, edges, self._config)
            for name, values in values_in_rows(self._config, documents, order, edges).items():
                column = self._columns[name]
                if column.is_of_segments:
                    columns[name] = Lists(values, ends)
                    counts[name] = measured(column, values)
                else:
                    columns[name] = values
                    counts[name] = measured(column, values, begin, length)
        tokens = int(documents.lengths[pieces].sum(dtype=np.int64))
        batch = as_batch(columns, self._schema)
        self._parts.write_rows(batch, len(pieces), tokens, trained, counts)

    def _filled(
        self, documents: Documents, order: Int64, edges: Int64
    ) -> tuple[dict[str, Any], int]:
        """Return the columns of tokens and boundaries, and how many tokens are trained on."""
        out = {name: buffer[: len(edges) - 1] for name, buffer in self._buffers.items()}
        return fill_rows(
            out, documents.ids, documents.trained, documents.offsets[:-1], documents.lengths,
            order, edges, self._config, self._pad,
        )  # fmt: skip

    def _references(
        self, documents: Documents, order: Int64, edges: Int64
    ) -> tuple[dict[str, Any], int]:
        """Return the boundaries, without reading tokens, and how many tokens are trained on."""
        pieces, begins = order[edges[0] : edges[-1]], edges[:-1] - edges[0]
        # each row's boundaries are a 0, and the sums of its lengths up to each
        sums = np.cumsum(documents.lengths[pieces], dtype=np.int64)
        before = np.concatenate([[0], sums])[begins]
        in_rows = (sums - np.repeat(before, np.diff(edges))).astype(np.int32)
        boundaries = Lists(np.insert(in_rows, begins, 0), edges - edges[0] + np.arange(len(edges)))
        return {"cu_seqlens": boundaries}, int(trained_in(documents, pieces).sum())

    def close(self) -> list[Shard]:
        self._parts.close()
        return self._parts.shards

    def abandon(self) -> None:
        self._parts.abandon()


def fill_rows(
    columns: Mapping[str, Any],
    ids: UInt32 | None,
    trained: UInt8 | None,
    begin: Int64,
    length: Int32,
    order: Int64,
    row_offsets: Int64,
    config: PackConfig,
    pad_token_id: int,
    *,
    by_address: bool = False,
) -> tuple[dict[str, Any], int]:
    """Fill columns of `PADDED`, each [rows, max_length], of shards or of views. OUT columns.

    Returns them with the boundaries of rows, and how many of their tokens are trained on.

    ids, trained, begin, length, by_address  as in `filling.fill_rows`
    order, row_offsets                       as in `PlannedRows`
    """
    rows, multiple = len(row_offsets) - 1, config.segment_multiple
    boundaries = np.empty(int(row_offsets[-1] - row_offsets[0]) + rows, np.int32)
    padded = np.empty_like(boundaries) if multiple > 1 else None
    offsets = np.empty(rows + 1, np.int32)
    trained_tokens = filling.fill_rows(
        ids, trained, begin, length, order, row_offsets, config.max_length, pad_token_id,
        columns.get("input_ids"), columns.get("labels"), columns.get("attention_mask"),
        columns.get("position_ids"), boundaries, offsets, multiple, padded, by_address,
    )  # fmt: skip
    filled = {**columns, "cu_seqlens": Lists(boundaries, offsets.astype(np.int64))}
    if padded is not None:
        filled[PADDED_BOUNDARIES] = Lists(padded, filled["cu_seqlens"].ends)
    return filled, trained_tokens


def values_in_rows(
    config: PackConfig, documents: Documents, order: Int64, row_offsets: Int64
) -> dict[str, Any]:
    """Copy columns of values into rows: of tokens [rows, max_length], 0 in padding; of records
    [segments]; with K values each [..., K].

    order, row_offsets  as in `PlannedRows`
    """
    columns = dict[str, Any]()
    for name, column in config.value_columns.items():
        if column.is_of_segments:
            pieces = order[row_offsets[0] : row_offsets[-1]]
            columns[name] = documents.of_documents[name][pieces]
            continue
        values = documents.token_values(name)
        shape = (len(row_offsets) - 1, config.max_length, *values.shape[1:])
        columns[name] = rows = np.empty(shape, values.dtype)
        filling.place_pieces(
            bytes_of(values), value_bytes(values), documents.offsets[:-1], documents.lengths,
            order, row_offsets, config.segment_multiple, bytes_of(rows).reshape(len(rows), -1),
        )  # fmt: skip
    return columns


def _places(length: Int64, edges: Int64, config: PackConfig) -> Int64:
    """Return where segments of such lengths begin, counted over all rows, int64[s]."""
    steps, counts = padded(length, config.segment_multiple), np.diff(edges)
    ends = np.cumsum(steps)
    before = np.append(0, ends)[edges[:-1] - edges[0]]
    places: Int64 = np.arange(len(counts)) * config.max_length - before
    return ends - steps + np.repeat(places, counts)


# --- documents


def content_hashes(ids: UInt32, offsets: Int64) -> UInt64:
    """Hash documents, uint64[n, 2], by their tokens."""
    hashes = np.empty((len(offsets) - 1, 2), np.uint64)
    kernels.hash_documents(ids, offsets, hashes)
    return hashes


class DocumentWriter:
    """Writes the documents of a unit but empty ones, in parts of about `shard_bytes` at most. They
    have their TIER if the options have tiers.
    """

    def __init__(self, folder: Path, unit: int, config: DocumentConfig, schema: Any) -> None:
        """`schema`: as `documents_schema` returns it."""
        self._columns = config.value_columns
        self._documents = ShardParts(folder, unit, DOCUMENTS, schema, config.shard_bytes)
        # a batch is a part
        self._indexes = ShardParts(folder, unit, INDEX, index_schema(config), 0)
        self._index: list[Any] = []  # of the open part
        self._waiting = list[Documents]()
        self._tokens = 0
        self._batch_tokens = batch_tokens(self._columns.values())
        # for ids of batches put together, again and again: fresh memory costs more than the copy
        self._room = np.empty(_ROOM_TOKENS, np.uint32)

    def write(self, batch: Documents) -> None:
        """Append documents; `batch.ids` may not change any more."""
        tokens = int(batch.offsets[-1])
        if not tokens:  # or batches of empty documents would wait without an end
            return
        if self._tokens + tokens > _MOST_TOKENS:
            self._flush()
        self._waiting.append(batch)
        self._tokens += tokens
        if self._tokens >= self._batch_tokens:
            self._flush()

    def _flush(self) -> None:
        waiting, self._waiting, self._tokens = self._waiting, [], 0
        if not waiting:
            return
        batch = Documents.concat(waiting, self._room)
        del waiting  # what was copied is free while it is written
        if not batch.lengths.all():
            batch = batch.take(np.flatnonzero(batch.lengths))
        ids, edges = batch.token_ids, batch.offsets.astype(np.int32)
        trained, trained_counts = self._trained(batch)
        hashes = pa.py_buffer(content_hashes(ids, batch.offsets))
        columns = {
            "input_ids": self._lists(edges, ids.view(np.int32)),
            "trained": trained,
            "file": batch.file,
            "position": batch.position,
            "length": batch.lengths,
            "trained_tokens": trained_counts,
            "tier": batch.of_documents.get(TIER),
            "content_hash": pa.Array.from_buffers(
                pa.binary(HASH_BYTES), len(batch), [None, hashes]
            ),
        }
        counts = dict[str, Measured]()
        for name, column in self._columns.items():
            kind = self._documents.schema.field(name).type
            if column.is_of_segments:
                values = batch.of_documents[name]
                columns[name] = flat(kind, values)
            else:
                values = batch.token_values(name)
                columns[name] = ragged(kind, edges, [values])
            counts[name] = measured(column, values)
        documents, index = (
            pa.RecordBatch.from_arrays(
                [pa.array(values) if isinstance(values, np.ndarray) else values
                 for values in map(columns.__getitem__, parts.schema.names)],
                schema=parts.schema,
            )
            for parts in (self._documents, self._indexes)
        )  # fmt: skip
        if self._documents.full:
            self._end_part()
        self._documents.write_rows(
            documents, len(batch), int(batch.offsets[-1]), int(trained_counts.sum()), counts
        )
        self._index.append(index)

    def _trained(self, batch: Documents) -> tuple[Any, Int32]:
        """Return the column `trained`, and how many tokens of each document are trained on."""
        tokens = trained_tokens(batch.trained, batch.offsets[:-1], batch.offsets[1:])
        counts: Int32 = tokens.astype(np.int32)
        if "trained" not in self._documents.schema.names:
            return None, counts
        if batch.trained is None:
            return pa.nulls(len(batch), self._documents.schema.field("trained").type), counts
        edges = np.empty(len(batch) + 1, np.int32)
        kernels.count_stretches(batch.trained, batch.offsets, edges)
        stretches = np.empty(edges[-1], np.int32)
        kernels.stretches(batch.trained, batch.offsets, stretches)
        return self._lists(edges, stretches), counts

    def _lists(self, offsets: Int32, values: Int32) -> Any:
        return ragged(self._documents.schema.field("input_ids").type, offsets, [values])

    def _end_part(self) -> None:
        self._documents.close()
        if self._index:
            (batch,) = pa.Table.from_batches(self._index).combine_chunks().to_batches()
            shard, self._index = self._documents.shards[-1], []
            self._indexes.write_rows(batch, shard.segments, shard.tokens, shard.trained_tokens)

    def close(self) -> list[Shard]:
        self._flush()
        self._end_part()
        self._indexes.close()
        pairs = zip(self._documents.shards, self._indexes.shards, strict=True)
        return [*chain.from_iterable(pairs)]

    def abandon(self) -> None:
        self._documents.abandon()
        self._indexes.abandon()
