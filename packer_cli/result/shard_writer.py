"""Writing shards as Arrow IPC streams: of rows, and of documents with their indexes.

    shard-00000-000.arrow       rows; those of a view without tokens, see `opening.View`
    documents-00000-000.arrow   input_ids, trained, file, position
    index-00000-000.arrow       length, trained_tokens, content_hash of the same documents

The index alone is read to plan, to choose and to split. Shards are written in the run's work
folder, without copies and validity bitmaps, and moved to the output once all of them are whole.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from packer_cli.options.options import PADDED_BOUNDARIES, VIEW_COLUMNS, PackConfig
from packer_cli.options.value_columns import ValueColumn
from packer_cli.packing.fitting import padded
from packer_cli.packing.labels import trained_tokens
from packer_cli.packing.window import trained_in
from packer_cli.records import Documents, Int32, Int64, UInt32, UInt64, bytes_of, value_bytes
from packer_cli.result.layout import (
    DOCUMENTS,
    FORMAT_VERSION,
    INDEX,
    PART,
    ROWS,
    Measured,
    Shard,
    add_measured,
    unnamed_shard,
)
from packer_cli.result.manifest import TOKENIZED
from packer_cli.result.values import measured

_BATCH_TOKENS = 1 << 20  # a record batch of 4 to 9 MB: small buffers, still cheap to index
_VIEW_BATCH_ROWS = 1 << 16
_ROOM_TOKENS = 2 * _BATCH_TOKENS  # of most flushes: one batch more than waits
_MOST_TOKENS = (1 << 31) - 1  # that the offsets of a record batch count
PADDED = {  # to max_length, with the types of their values
    "input_ids": np.int32,
    "labels": np.int32,
    "attention_mask": np.uint8,
    "position_ids": np.int32,
}

HASH_BYTES = 16
INDEX_SCHEMA = pa.schema(
    [
        pa.field("length", pa.int32(), nullable=False),
        pa.field("trained_tokens", pa.int32(), nullable=False),
        pa.field("content_hash", pa.binary(HASH_BYTES), nullable=False),
    ]
)


class Parts:
    """Files in `folder`, a new one as soon as the last has `limit` bytes: opened when they are
    needed, ended when they are full, let go of after a failure.

    name    of the file of a number: 0, 1, ...
    start   makes an Arrow or Parquet writer of a file and a schema

    Raises OSError where a file cannot be written.
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
        """Whether the open file gets no more batches."""
        return self._open is not None and self._open[0].tell() >= self._limit

    def write(self, batch: Any, **how: Any) -> None:
        """Append a record batch. `how`: for the writer."""
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
        """Let go of the open file after a failure, which is the one to report."""
        if self._open is not None:
            (sink, _), self._open = self._open, None
            with suppress(OSError):
                sink.close()


class LazyFile:
    """A file that is there once something is written to it. `path`: None until then; `size` and
    `sha`: of what was written.

    Raises DataError, which names the file, where it cannot be written.
    """

    def __init__(self, name: Path) -> None:
        self._name = name
        self._file: Any = None
        self.path: Path | None = None
        self.size, self.sha = 0, hashlib.sha256()

    def write(self, data: Any) -> None:
        """Append bytes, or a buffer of them."""
        with os_errors(self._name, "write"):
            if self._file is None:
                self._file, self.path = open(self._name, "wb"), self._name  # noqa: SIM115
            self.size += self._file.write(data)
        self.sha.update(data)

    def close(self) -> None:
        with os_errors(self._name, "write"):
            if self._file is not None:
                self._file.close()

    def abandon(self) -> None:
        """Let go of the file after a failure."""
        with suppress(PackerError):  # the failure itself is the one to report
            self.close()


class ShardParts(Parts):
    """The shards of one unit, counted. Sizes, digests and names by these are the caller's to find.

    Raises DataError, which names the shard, where one cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        unit: int,
        kind: str,
        schema: Any,
        limit: int,
    ) -> None:
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
        """Append a record batch with so many segments, tokens and trained tokens in its rows, and
        what is measured of their `values`.
        """
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


def column_type(name: str, config: PackConfig) -> Any:
    """The Arrow type of a column; its values are never null."""
    column = config.value_columns.get(name)
    if name in PADDED or (column and not column.is_of_segments):
        kind = column.arrow_type if column else pa.from_numpy_dtype(PADDED[name])
        return pa.list_(pa.field("item", kind, nullable=False), config.max_length)
    if column:
        return pa.list_(pa.field("item", column.arrow_type, nullable=False))
    if name in ("cu_seqlens", PADDED_BOUNDARIES):
        kind = pa.int32()
    else:
        parts = [("file", pa.int32()), ("position", pa.int64()), ("start", pa.int32())]
        kind = pa.struct([pa.field(*part, nullable=False) for part in parts])
    return pa.list_(pa.field("item", kind, nullable=False))


def rows_per_batch(config: PackConfig) -> int:
    """Rows in a record batch, if there are so many: fewer if columns of values need memory."""
    more = sum(one.bytes for one in config.value_columns.values())
    return max(1, 8 * _BATCH_TOKENS // (8 + more) // config.max_length)


def schema(
    config: PackConfig,
    pad_token_id: int,
    tokenizer_sha256: str,
    columns: Sequence[str] = (),
) -> Any:
    """The Arrow schema of complete rows, or of some `columns`, with what a reader must know as
    metadata.
    """
    metadata = {
        "format_version": FORMAT_VERSION,
        "max_length": config.max_length,
        "pad_token_id": pad_token_id,
        "label_shift": "none",
        "tokenizer_sha256": tokenizer_sha256,
    }
    if config.segment_multiple > 1:
        metadata["segment_multiple"] = config.segment_multiple
    return pa.schema(
        [
            pa.field(name, column_type(name, config), nullable=False)
            for name in columns or config.columns
        ],
        metadata={"packer": json.dumps(metadata)},
    )


def stored_schema(config: PackConfig, pad_token_id: int, tokenizer_sha256: str) -> Any:
    """The Arrow schema of shards: `schema`, or that of a view, which knows no padding."""
    if not config.view:
        return schema(config, pad_token_id, tokenizer_sha256)
    return schema(config, 0, tokenizer_sha256, VIEW_COLUMNS)


def stored_batch_rows(config: PackConfig) -> int:
    """Rows in a record batch of a shard, if there are so many."""
    return _VIEW_BATCH_ROWS if config.view else rows_per_batch(config)


class ShardWriter:
    """Writes the rows of one unit, in parts of at most about `shard_bytes`, those of a view in one.

    A view's have no tokens but two of a packed directory's columns, `cu_seqlens` and `segments`; a
    segment's file and position are a tokenized directory and a document's number in it. All else
    that a row holds follows from these.

    rows_at_once  rows in a record batch; 0 for a view, which needs no tokens
    """

    def __init__(
        self,
        folder: Path,
        unit: int,
        config: PackConfig,
        schema: Any,
        pad_token_id: int,
    ) -> None:
        """`schema`: as `stored_schema` gives it."""
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
        """Append rows: row r holds the pieces order[row_offsets[r]:row_offsets[r + 1]]."""
        rows = len(row_offsets) - 1
        for first in range(0, rows, self._rows_per_batch):
            edges = row_offsets[first : first + self._rows_per_batch + 1]
            self._write_batch(documents, order, edges)

    def _write_batch(self, documents: Documents, order: Int64, edges: Int64) -> None:
        pieces, offsets = order[edges[0] : edges[-1]], (edges - edges[0]).astype(np.int32)
        make = self._references if self._config.view else self._filled
        made, trained_tokens = make(documents, order, edges)
        if "segments" in self._schema.names:
            parts = documents.file[pieces], documents.position[pieces], documents.start[pieces]
            made["segments"] = ragged(self._schema.field("segments").type, offsets, parts)
        figures = dict[str, Measured]()
        if self._columns:
            length = documents.lengths[pieces].astype(np.int64)
            begin = _places(length, edges, self._config)
            for name, values in values_in_rows(self._config, documents, order, edges).items():
                kind = self._schema.field(name).type
                is_fixed = pa.types.is_fixed_size_list(kind)
                made[name] = fixed(kind, values) if is_fixed else ragged(kind, offsets, [values])
                where = (begin, length) if is_fixed else ()
                figures[name] = measured(self._columns[name], values, *where)
        arrays = [made[name] for name in self._schema.names]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        tokens = int(documents.lengths[pieces].sum(dtype=np.int64))
        self._parts.write_rows(batch, len(pieces), tokens, trained_tokens, figures)

    def _filled(
        self, documents: Documents, order: Int64, edges: Int64
    ) -> tuple[dict[str, Any], int]:
        """The columns of tokens and boundaries, and how many tokens are trained on."""
        rows, multiple = len(edges) - 1, self._config.segment_multiple
        out = {name: buffer[:rows] for name, buffer in self._buffers.items()}
        boundaries = np.empty(int(edges[-1] - edges[0]) + rows, np.int32)
        offsets = np.empty(rows + 1, np.int32)
        padded = np.empty_like(boundaries) if multiple > 1 else None
        trained_tokens = filling.fill_rows(
            documents.ids, documents.trained, documents.offsets[:-1], documents.lengths,
            order, edges,
            self._config.max_length, self._pad,
            out.get("input_ids"), out.get("labels"), out.get("attention_mask"),
            out.get("position_ids"), boundaries, offsets,
            multiple, padded,
        )  # fmt: skip
        made = {name: fixed(self._schema.field(name).type, values) for name, values in out.items()}
        for name, values in (("cu_seqlens", boundaries), (PADDED_BOUNDARIES, padded)):
            if values is not None:
                made[name] = ragged(self._schema.field(name).type, offsets, [values])
        return made, trained_tokens

    def _references(
        self, documents: Documents, order: Int64, edges: Int64
    ) -> tuple[dict[str, Any], int]:
        """The boundaries, without a look at tokens, and how many tokens are trained on."""
        pieces, begins = order[edges[0] : edges[-1]], edges[:-1] - edges[0]
        # each row's boundaries are a 0, and the sums of its lengths up to each
        sums = np.cumsum(documents.lengths[pieces], dtype=np.int64)
        before = np.concatenate([[0], sums])[begins]
        in_rows = (sums - np.repeat(before, np.diff(edges))).astype(np.int32)
        boundaries = np.insert(in_rows, begins, 0)
        offsets = (edges - edges[0] + np.arange(len(edges))).astype(np.int32)
        kind = self._schema.field("cu_seqlens").type
        trained_tokens = int(trained_in(documents, pieces).sum())
        return {"cu_seqlens": ragged(kind, offsets, [boundaries])}, trained_tokens

    def close(self) -> list[Shard]:
        self._parts.close()
        return self._parts.shards

    def abandon(self) -> None:
        self._parts.abandon()


def values_in_rows(
    config: PackConfig, documents: Documents, order: Int64, row_offsets: Int64
) -> dict[str, Any]:
    """Return the columns of values in rows, copied: of tokens [rows, max_length], 0 in padding;
    of records [segments]; with K values each [..., K].

    order, row_offsets  as in `PlannedRows`
    """
    made = dict[str, Any]()
    for one in config.value_columns.values():
        if one.is_of_segments:
            pieces = order[row_offsets[0] : row_offsets[-1]]
            made[one.name] = documents.of_documents[one.name][pieces]
            continue
        values = documents.token_values(one.name)
        shape = (len(row_offsets) - 1, config.max_length, *values.shape[1:])
        made[one.name] = rows = np.empty(shape, values.dtype)
        filling.place_pieces(
            bytes_of(values), value_bytes(values), documents.offsets[:-1], documents.lengths,
            order, row_offsets, config.segment_multiple, bytes_of(rows).reshape(len(rows), -1),
        )  # fmt: skip
    return made


def _places(length: Int64, edges: Int64, config: PackConfig) -> Int64:
    """int64[s]: where segments of such lengths begin, counted over all rows."""
    steps, counts = padded(length, config.segment_multiple), np.diff(edges)
    ends = np.cumsum(steps)
    before = np.append(0, ends)[edges[:-1] - edges[0]]
    places: Int64 = np.arange(len(counts)) * config.max_length - before
    return ends - steps + np.repeat(places, counts)


def fixed(kind: Any, rows: Any) -> Any:
    """A column of lists of one length, of an array [rows, length], without a copy; or [rows,
    length, K].
    """
    values = _flat(kind.value_type, rows.reshape(-1, *rows.shape[2:]))
    return pa.Array.from_buffers(kind, len(rows), [None], children=[values])


def _flat(kind: Any, values: Any) -> Any:
    """Values of an array [n], or [n, K] as lists of K."""
    if pa.types.is_fixed_size_list(kind):
        return fixed(kind, values)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def ragged(kind: Any, offsets: Int32, parts: Sequence[Any]) -> Any:
    """A list column: row r has the values offsets[r] .. offsets[r + 1] of `parts`, which are the
    fields of its structs, or one array of plain values.
    """
    if pa.types.is_struct(kind.value_type):
        children = [_flat(kind.value_type.field(i).type, part) for i, part in enumerate(parts)]
        size = len(parts[0])
        values = pa.Array.from_buffers(kind.value_type, size, [None], children=children)
    else:
        values = _flat(kind.value_type, parts[0])
    buffers = [None, pa.py_buffer(offsets)]
    return pa.Array.from_buffers(kind, len(offsets) - 1, buffers, children=[values])


def documents_schema(
    tokenizer_sha256: str,
    *,
    has_trained: bool,
    columns: Iterable[ValueColumn] = (),
) -> Any:
    """The Arrow schema of document shards, with what a reader must know as metadata.

    `trained` lists [start, stop, ...] of the tokens trained on; null: all of them. Without that
    column all tokens of all documents are trained on. A column of values
    has a list for each document, with a value for each token, or the record's value.
    """
    ids = pa.list_(pa.field("item", pa.int32(), nullable=False))
    fields = [
        pa.field("input_ids", ids, nullable=False),
        *([pa.field("trained", ids)] if has_trained else []),
        pa.field("file", pa.int32(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),
        *(
            pa.field(
                one.name,
                one.arrow_type
                if one.is_of_segments
                else pa.list_(pa.field("item", one.arrow_type, nullable=False)),
                nullable=False,
            )
            for one in columns
        ),
    ]
    metadata = {
        "format_version": FORMAT_VERSION,
        "kind": TOKENIZED,
        "tokenizer_sha256": tokenizer_sha256,
    }
    return pa.schema(fields, metadata={"packer": json.dumps(metadata)})


def schema_problem(written: Any, expected: Any) -> str:
    """How the Arrow schema of a shard and the one that packer writes differ; "" if they do not."""
    if written.names != expected.names:
        return f"has the columns {', '.join(written.names)}, not {', '.join(expected.names)}"
    for own, its in zip(written, expected, strict=True):
        if own != its:
            return f"{own.name} is {own.type}, not {its.type} without nulls"
    if written.metadata == expected.metadata:
        return ""
    theirs, ours = _metadata_of(written), _metadata_of(expected)
    return f"its metadata is {theirs}, written otherwise than {ours}"


def _metadata_of(schema: Any) -> dict[str, Any]:
    """The metadata of a shard; {} where it is none of ours."""
    try:
        metadata = json.loads((schema.metadata or {}).get(b"packer", b"{}"))
    except (ValueError, RecursionError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


def kind_in(schema: Any) -> str | None:
    """What a shard of ours with this Arrow schema holds, if its metadata tells."""
    kind = _metadata_of(schema).get("kind")
    return None if kind is None else str(kind)


def content_hashes(ids: UInt32, offsets: Int64) -> UInt64:
    """uint64[n, 2] of documents of such tokens."""
    hashes = np.empty((len(offsets) - 1, 2), np.uint64)
    kernels.hash_documents(ids, offsets, hashes)
    return hashes


class DocumentWriter:
    """Writes the documents of one unit, in parts of at most about `shard_bytes`.

    Empty documents are left out.
    """

    def __init__(
        self,
        folder: Path,
        unit: int,
        shard_bytes: int,
        schema: Any,
        columns: Mapping[str, ValueColumn] = MappingProxyType({}),
    ) -> None:
        self._columns = columns
        self._documents = ShardParts(folder, unit, DOCUMENTS, schema, shard_bytes)
        self._indexes = ShardParts(folder, unit, INDEX, INDEX_SCHEMA, 0)  # of a batch each
        self._index: list[Any] = []  # of the open part
        self._waiting = list[Documents]()
        self._tokens = 0
        each = 8 + sum(one.bytes for one in columns.values())
        self._batch_tokens = 8 * _BATCH_TOKENS // each  # fewer if they have many values
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
        lengths = batch.lengths
        trained, tokens_trained = self._trained(batch)
        ids = batch.token_ids
        hashes = pa.py_buffer(content_hashes(ids, batch.offsets))
        columns = {
            "input_ids": self._lists(batch.offsets.astype(np.int32), ids.view(np.int32)),
            "trained": trained,
            "file": batch.file,
            "position": batch.position,
            "length": lengths,
            "trained_tokens": tokens_trained,
            "content_hash": pa.Array.from_buffers(
                pa.binary(HASH_BYTES), len(lengths), [None, hashes]
            ),
        }
        figures = dict[str, Measured]()
        for name, one in self._columns.items():
            kind, edges = self._documents.schema.field(name).type, batch.offsets.astype(np.int32)
            own = batch.of_documents[name] if one.is_of_segments else batch.token_values(name)
            columns[name] = _flat(kind, own) if one.is_of_segments else ragged(kind, edges, [own])
            figures[name] = measured(one, own)
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
            documents, len(lengths), int(batch.offsets[-1]), int(tokens_trained.sum()), figures
        )
        self._index.append(index)

    def _trained(self, batch: Documents) -> tuple[Any, Int32]:
        """Return the column `trained`, and how many tokens of each document are trained on."""
        counts = trained_tokens(batch.trained, batch.offsets[:-1], batch.offsets[1:])
        tokens: Int32 = counts.astype(np.int32)
        if "trained" not in self._documents.schema.names:
            return None, tokens
        if batch.trained is None:
            return pa.nulls(len(batch), self._documents.schema.field("trained").type), tokens
        edges = np.empty(len(batch) + 1, np.int32)
        kernels.count_stretches(batch.trained, batch.offsets, edges)
        flat = np.empty(edges[-1], np.int32)
        kernels.stretches(batch.trained, batch.offsets, flat)
        return self._lists(edges, flat), tokens

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
