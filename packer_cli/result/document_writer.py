"""Writing the shards of a tokenized directory: documents as Arrow IPC streams, and their indexes.

    documents-00000-000.arrow   input_ids, trained, file, position
    index-00000-000.arrow       length, trained_tokens, content_hash of the same documents

For records of preference both have `chosen`, too, see `TokenBatch`.

The index alone is read to plan, to choose and to split. Both are written in the run's work folder,
and moved to the output once all shards are whole.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from packer_cli._kernels import documents as kernels
from packer_cli.errors import from_os_error
from packer_cli.records import Int32, TokenBatch, UInt8, UInt32
from packer_cli.result.content_order import content_hashes
from packer_cli.result.layout import DOCUMENTS, INDEX, PART, unnamed_shard
from packer_cli.result.manifest import TOKENIZED
from packer_cli.result.shards import FORMAT_VERSION, Shard

_BATCH_TOKENS = 1 << 20  # a record batch of about 4 MB
_ROOM_TOKENS = 2 * _BATCH_TOKENS  # of most flushes: one batch more than waits
_MOST_TOKENS = (1 << 31) - 1  # that the offsets of a record batch count
HASH_BYTES = 16
_CHOSEN = pa.field("chosen", pa.int32(), nullable=False)
INDEX_SCHEMA = pa.schema(
    [
        pa.field("length", pa.int32(), nullable=False),
        pa.field("trained_tokens", pa.int32(), nullable=False),
        pa.field("content_hash", pa.binary(HASH_BYTES), nullable=False),
    ]
)


def index_schema(*, has_chosen: bool) -> Any:
    """The Arrow schema of the indexes of documents."""
    return INDEX_SCHEMA.append(_CHOSEN) if has_chosen else INDEX_SCHEMA


def documents_schema(tokenizer_sha256: str, *, has_trained: bool, has_chosen: bool = False) -> Any:
    """The Arrow schema of document shards, with what a reader must know as metadata.

    `trained` lists [start, stop, ...] of the tokens trained on; null: all of them. Without that
    column all tokens of all documents are trained on. `chosen` is there for pairs of answers.
    """
    ids = pa.list_(pa.field("item", pa.int32(), nullable=False))
    fields = [
        pa.field("input_ids", ids, nullable=False),
        *([pa.field("trained", ids)] if has_trained else []),
        pa.field("file", pa.int32(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),
        *([_CHOSEN] if has_chosen else []),
    ]
    metadata = {
        "format_version": FORMAT_VERSION,
        "kind": TOKENIZED,
        "tokenizer_sha256": tokenizer_sha256,
    }
    return pa.schema(fields, metadata={"packer": json.dumps(metadata)})


def kind_in(schema: Any) -> str | None:
    """What a shard of ours with this Arrow schema holds, if its metadata tells."""
    try:
        return str(json.loads(schema.metadata[b"packer"])["kind"])
    except (TypeError, KeyError, ValueError):
        return None


class DocumentWriter:
    """Writes the documents of one unit, in parts of at most about `shard_bytes`.

    Empty documents are left out.
    """

    def __init__(self, folder: Path, unit: int, shard_bytes: int, schema: Any) -> None:
        self._folder, self._unit, self._shard_bytes = folder, unit, shard_bytes
        self._schema = schema
        self._index_schema = index_schema(has_chosen="chosen" in schema.names)
        self._waiting: list[TokenBatch] = []
        self._tokens = 0
        # for ids of batches put together, again and again: fresh memory costs more than the copy
        self._room = np.empty(_ROOM_TOKENS, np.uint32)
        self._sink: Any = None
        self._stream: Any = None
        self._index: list[Any] = []
        self._shards: list[Shard] = []

    def write(self, batch: TokenBatch) -> None:
        """Append documents; `batch.ids` may not change any more."""
        tokens = int(batch.offsets[-1] - batch.offsets[0])
        if not tokens:  # or batches of empty documents would wait without an end
            return
        if self._tokens + tokens > _MOST_TOKENS:
            self._flush()
        self._waiting.append(batch)
        self._tokens += tokens
        if self._tokens >= _BATCH_TOKENS:
            self._flush()

    def _flush(self) -> None:
        waiting, self._waiting, self._tokens = self._waiting, [], 0
        batch = _joined(waiting, self._room)
        del waiting  # what was copied is free while it is written
        if batch is not None:
            self._write_batch(batch)

    def _write_batch(self, batch: TokenBatch) -> None:
        lengths = np.diff(batch.offsets)
        count = len(lengths)
        hashes = content_hashes(batch.ids, batch.offsets, batch.chosen)
        chosen = [] if batch.chosen is None else [pa.array(batch.chosen)]
        trained_tokens, trained = (lengths - 1).astype(np.int32), None
        if "trained" in self._schema.names:
            trained, trained_tokens = self._trained(batch, trained_tokens)
        lists = _lists(batch.offsets.astype(np.int32), batch.ids.view(np.int32))
        columns = [lists, *([trained] if trained is not None else []), batch.file, batch.position,
                   *chosen]  # fmt: skip
        arrays = [pa.array(one) if isinstance(one, np.ndarray) else one for one in columns]
        record_batch = pa.RecordBatch.from_arrays(
            [array.cast(field.type) if not isinstance(array, pa.ListArray) else array
             for array, field in zip(arrays, self._schema, strict=True)],
            schema=self._schema,
        )  # fmt: skip
        try:
            if self._sink is None or self._sink.tell() >= self._shard_bytes:
                self._finish_part()
                self._start_part()
            self._stream.write_batch(record_batch)
        except OSError as error:
            raise self._failed(error) from error
        hash_buffer = pa.py_buffer(hashes)
        self._index.append(
            pa.RecordBatch.from_arrays(
                [
                    pa.array(lengths.astype(np.int32)),
                    pa.array(trained_tokens),
                    pa.Array.from_buffers(pa.binary(HASH_BYTES), count, [None, hash_buffer]),
                    *chosen,
                ],
                schema=self._index_schema,
            )
        )
        shard = self._shards[-1]
        shard.rows += count
        shard.segments += count
        shard.tokens += int(lengths.sum())
        shard.trained_tokens += int(trained_tokens.sum())

    def _trained(self, batch: TokenBatch, everything: Int32) -> tuple[Any, Int32]:
        """The column `trained`, and how many tokens that are, first ones left out."""
        if batch.trained is None:
            return pa.nulls(len(everything), self._schema.field("trained").type), everything
        tokens, edges = np.empty_like(everything), np.empty(len(everything) + 1, np.int32)
        kernels.count_trained(batch.trained, batch.offsets, tokens, edges)
        flat = np.empty(edges[-1], np.int32)
        kernels.stretches(batch.trained, batch.offsets, flat)
        return _lists(edges, flat), tokens

    def _opened(self, name: str) -> Any:
        """Where a file is written."""
        return pa.OSFile(str(self._folder / name), "wb")

    def _start_part(self) -> None:
        name = unnamed_shard(DOCUMENTS, self._unit, len(self._shards) // 2) + PART
        self._shards.append(Shard.begun(name, self._unit))
        self._sink = self._opened(name)
        self._stream = pa.ipc.new_stream(self._sink, self._schema)

    def _finish_part(self) -> None:
        """End a part, and write its index, as one record batch."""
        if self._sink is None:
            return
        self._stream.close()
        self._sink.close()
        self._sink = self._stream = None
        documents = self._shards[-1]
        name = unnamed_shard(INDEX, self._unit, len(self._shards) // 2) + PART
        index = Shard.begun(name, self._unit)
        for figure in ("rows", "segments", "tokens", "trained_tokens"):
            setattr(index, figure, getattr(documents, figure))
        self._shards.append(index)
        table = pa.Table.from_batches(self._index).combine_chunks()
        self._index = []
        with (
            self._opened(name) as sink,
            pa.ipc.new_stream(sink, self._index_schema) as stream,
        ):
            stream.write_table(table)

    def close(self) -> list[Shard]:
        """End the last part. Sizes and digests are the caller's to find."""
        self._flush()
        try:
            self._finish_part()
        except OSError as error:
            raise self._failed(error) from error
        return self._shards

    def abandon(self) -> None:
        """Let go of the file after a failure."""
        if self._sink is not None:
            with suppress(OSError):  # the failure itself is the one to report
                self._sink.close()

    def _failed(self, error: OSError) -> Exception:
        return from_os_error(error, self._folder / self._shards[-1].file, "write")


def _joined(batches: list[TokenBatch], room: UInt32) -> TokenBatch | None:
    """Batches as one without empty documents; None, if nothing is left.

    Its ids are those of the only batch, or lie in `room` where that is large enough.
    """
    lengths = np.concatenate([np.diff(b.offsets) for b in batches] or [np.empty(0, np.int64)])
    kept = lengths > 0
    if not kept.any():
        return None
    offsets = np.zeros(int(kept.sum()) + 1, np.int64)
    np.cumsum(lengths[kept], out=offsets[1:])
    trained: UInt8 | None = None
    if any(batch.trained is not None for batch in batches):
        trained = np.concatenate(
            [np.ones(len(b.ids), np.uint8) if b.trained is None else b.trained for b in batches]
        )
    ids = batches[0].ids
    if len(batches) > 1:
        fits = offsets[-1] <= len(room)
        out = room[: offsets[-1]] if fits else None
        ids = np.concatenate([batch.ids for batch in batches], out=out)
    return TokenBatch(
        ids,
        offsets,
        trained,
        np.concatenate([batch.file for batch in batches])[kept],
        np.concatenate([batch.position for batch in batches])[kept],
        _chosen(batches, kept),
    )


def _chosen(batches: list[TokenBatch], kept: Any) -> Int32 | None:
    chosen = [batch.chosen for batch in batches if batch.chosen is not None]
    return np.concatenate(chosen)[kept] if chosen else None


def _lists(offsets: Int32, values: Int32) -> Any:
    """A list column without nulls."""
    kind = pa.list_(pa.field("item", pa.int32(), nullable=False))
    flat = pa.Array.from_buffers(pa.int32(), len(values), [None, pa.py_buffer(values)])
    buffers = [None, pa.py_buffer(offsets)]
    return pa.Array.from_buffers(kind, len(offsets) - 1, buffers, children=[flat])
