"""Writing the shards of a tokenized directory: documents as Arrow IPC streams, and their indexes.

    documents-00000-000.arrow   input_ids, trained, file, position
    index-00000-000.arrow       length, trained_tokens, content_hash of the same documents

For records of preference both have `chosen`, too, see `TokenBatch`.

The index alone is read to plan, to choose and to split. Both are written in the run's work folder,
and moved to the output once all shards are whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from packer_cli._kernels import documents as kernels
from packer_cli.records import Int32, TokenBatch, UInt8, UInt32
from packer_cli.result.content_order import content_hashes
from packer_cli.result.layout import DOCUMENTS, INDEX
from packer_cli.result.manifest import TOKENIZED
from packer_cli.result.parts import ShardParts
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

    def __init__(
        self,
        folder: Path,
        unit: int,
        shard_bytes: int,
        schema: Any,
        opened: Callable[[str], Any] | None = None,
    ) -> None:
        """`opened`: as `Parts` takes it."""
        has_chosen = "chosen" in schema.names
        self._schema = schema
        self._documents = ShardParts(folder, unit, DOCUMENTS, schema, shard_bytes, opened)
        of_index = index_schema(has_chosen=has_chosen)
        self._indexes = ShardParts(folder, unit, INDEX, of_index, 0, opened)  # of a batch each
        self._index: list[Any] = []  # of the open part
        self._waiting: list[TokenBatch] = []
        self._tokens = 0
        # for ids of batches put together, again and again: fresh memory costs more than the copy
        self._room = np.empty(_ROOM_TOKENS, np.uint32)

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
        if self._documents.full:
            self._end_part()
        tokens, of_trained = int(lengths.sum()), int(trained_tokens.sum())
        self._documents.write_rows(record_batch, count, tokens, of_trained)
        hash_buffer = pa.py_buffer(hashes)
        self._index.append(
            pa.RecordBatch.from_arrays(
                [
                    pa.array(lengths.astype(np.int32)),
                    pa.array(trained_tokens),
                    pa.Array.from_buffers(pa.binary(HASH_BYTES), count, [None, hash_buffer]),
                    *chosen,
                ],
                schema=self._indexes.schema,
            )
        )

    def _trained(self, batch: TokenBatch, everything: Int32) -> tuple[Any, Int32]:
        """The column `trained`, and how many tokens that are, first ones left out."""
        if batch.trained is None:
            return pa.nulls(len(everything), self._schema.field("trained").type), everything
        tokens, edges = np.empty_like(everything), np.empty(len(everything) + 1, np.int32)
        kernels.count_trained(batch.trained, batch.offsets, tokens, edges)
        flat = np.empty(edges[-1], np.int32)
        kernels.stretches(batch.trained, batch.offsets, flat)
        return _lists(edges, flat), tokens

    def _end_part(self) -> None:
        """End a part, and write its index."""
        self._documents.close()
        if self._index:
            (batch,) = pa.Table.from_batches(self._index).combine_chunks().to_batches()
            shard, self._index = self._documents.shards[-1], []
            self._indexes.write_rows(batch, shard.segments, shard.tokens, shard.trained_tokens)

    def close(self) -> list[Shard]:
        """End the last part. Sizes and digests are the caller's to find."""
        self._flush()
        self._end_part()
        self._indexes.close()
        pairs = zip(self._documents.shards, self._indexes.shards, strict=True)
        return [*chain.from_iterable(pairs)]

    def abandon(self) -> None:
        """Let go of the files after a failure."""
        self._documents.abandon()
        self._indexes.abandon()


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
