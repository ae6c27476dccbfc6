"""Writing rows as Arrow IPC streams: fixed schema, no validity bitmaps, no copies.

Shards are written in the run's work folder, and moved to the output once all of them are whole.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from packer_cli._kernels import filling
from packer_cli.config.columns import PADDED_BOUNDARIES, PAIR, SIDE
from packer_cli.config.options import PackConfig
from packer_cli.packing.pairs import numbered
from packer_cli.records import Int32, Int64, Stock
from packer_cli.result.layout import ROWS
from packer_cli.result.manifest import Config
from packer_cli.result.parts import ShardParts
from packer_cli.result.shards import FORMAT_VERSION, Shard

_BATCH_TOKENS = 1 << 20  # a record batch of about 9 MB: small buffers, still cheap to index
PADDED = {  # to max_length, with the types of their values
    "input_ids": np.int32,
    "labels": np.int32,
    "attention_mask": np.uint8,
    "position_ids": np.int32,
}


def column_type(name: str, max_length: int) -> Any:
    """The Arrow type of a column; its values are never null."""
    if name in PADDED:
        item = pa.field("item", pa.from_numpy_dtype(PADDED[name]), nullable=False)
        return pa.list_(item, max_length)
    if name in ("cu_seqlens", PADDED_BOUNDARIES):
        return pa.list_(pa.field("item", pa.int32(), nullable=False))
    if name in (PAIR, SIDE):
        return pa.list_(pa.field("item", pa.int32() if name == PAIR else pa.int8(), nullable=False))
    parts = [("file", pa.int32()), ("position", pa.int64()), ("start", pa.int32())]
    struct = pa.struct([pa.field(part, kind, nullable=False) for part, kind in parts])
    return pa.list_(pa.field("item", struct, nullable=False))


def rows_per_batch(max_length: int) -> int:
    """Rows in a record batch, if there are so many."""
    return max(1, _BATCH_TOKENS // max_length)


def schema(config: PackConfig | Config, pad_token_id: int, tokenizer_sha256: str) -> Any:
    """The Arrow schema of every shard, with what a reader must know as metadata."""
    metadata = {
        "format_version": FORMAT_VERSION,
        "max_length": config.max_length,
        "pad_token_id": pad_token_id,
        "label_shift": config.label_shift,
        "tokenizer_sha256": tokenizer_sha256,
    }
    if config.segment_multiple > 1:
        metadata["segment_multiple"] = config.segment_multiple
    return pa.schema(
        [
            pa.field(name, column_type(name, config.max_length), nullable=False)
            for name in config.columns
        ],
        metadata={"packer": json.dumps(metadata)},
    )


class ShardWriter:
    """Writes the rows of one unit, in parts of at most about `shard_bytes`."""

    def __init__(
        self, folder: Path, unit: int, config: PackConfig, schema: Any, pad_token_id: int
    ) -> None:
        self._parts = ShardParts(folder, unit, ROWS, schema, config.shard_bytes)
        self._config = config
        self._schema = schema
        self._pad = pad_token_id
        self._rows_per_batch = rows_per_batch(config.max_length)
        self._buffers: dict[str, Any] = {
            name: np.empty((self._rows_per_batch, config.max_length), kind)
            for name, kind in PADDED.items()
            if name in config.columns
        }

    @property
    def rows_at_once(self) -> int:
        """Rows in a record batch."""
        return self._rows_per_batch

    def write(self, stock: Stock, order: Int64, row_offsets: Int64) -> None:
        """Append rows: row r holds the pieces order[row_offsets[r]:row_offsets[r + 1]]."""
        rows = len(row_offsets) - 1
        for first in range(0, rows, self._rows_per_batch):
            edges = row_offsets[first : first + self._rows_per_batch + 1]
            self._write_batch(stock, order, edges)

    def _write_batch(self, stock: Stock, order: Int64, edges: Int64) -> None:
        rows = len(edges) - 1
        segments = int(edges[-1] - edges[0])
        out = {name: buffer[:rows] for name, buffer in self._buffers.items()}
        boundaries = np.empty(segments + rows, np.int32)
        boundary_offsets = np.empty(rows + 1, np.int32)
        multiple = self._config.segment_multiple
        padded = np.empty_like(boundaries) if multiple > 1 else None
        trained_tokens = filling.fill_rows(
            stock.ids, stock.trained, stock.begin, stock.length, order, edges,
            self._config.max_length, self._pad,
            out.get("input_ids"), out.get("labels"), out.get("attention_mask"),
            out.get("position_ids"), boundaries, boundary_offsets,
            self._config.label_shift == "pre", multiple, padded,
        )  # fmt: skip
        edges_of = {"cu_seqlens": boundaries, PADDED_BOUNDARIES: padded}
        columns = [
            fixed(self._schema.field(name).type, out[name])
            if name in out
            else ragged(self._schema.field(name).type, boundary_offsets, [edges_of[name]])
            if name in edges_of
            else segments_column(self._schema, name, stock, order, edges)
            for name in self._config.columns
        ]
        batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        tokens = int(boundaries[boundary_offsets[1:] - 1].sum())
        self._parts.write_rows(batch, segments, tokens, trained_tokens)

    def close(self) -> list[Shard]:
        """End the last part. The caller computes sizes and digests."""
        self._parts.close()
        return self._parts.shards

    def abandon(self) -> None:
        """Let go of the file after a failure."""
        self._parts.abandon()


def segments_column(schema: Any, name: str, stock: Stock, order: Int64, edges: Int64) -> Any:
    """A column with a value for each segment: where it is from, or its side of a pair."""
    pieces = order[edges[0] : edges[-1]]
    if name == PAIR:
        parts: list[Any] = [numbered(stock.start[pieces], edges)]
    elif name == SIDE:
        parts = [np.empty(0, np.int8) if stock.side is None else stock.side[pieces]]
    else:
        parts = [stock.file[pieces], stock.position[pieces], stock.start[pieces]]
    offsets = (edges - edges[0]).astype(np.int32)
    return ragged(schema.field(name).type, offsets, parts)


def fixed(kind: Any, rows: Any) -> Any:
    """A column of lists of one length, of an array [rows, length], without a copy."""
    values = pa.Array.from_buffers(kind.value_type, rows.size, [None, pa.py_buffer(rows)])
    return pa.Array.from_buffers(kind, len(rows), [None], children=[values])


def ragged(kind: Any, offsets: Int32, parts: list[Any]) -> Any:
    """A list column: row r has the values offsets[r] .. offsets[r + 1] of `parts`, which are the
    fields of its structs, or one array of plain values.
    """

    def flat(value_type: Any, array: Any) -> Any:
        return pa.Array.from_buffers(value_type, len(array), [None, pa.py_buffer(array)])

    if pa.types.is_struct(kind.value_type):
        children = [flat(kind.value_type.field(i).type, part) for i, part in enumerate(parts)]
        size = len(parts[0])
        values = pa.Array.from_buffers(kind.value_type, size, [None], children=children)
    else:
        values = flat(kind.value_type, parts[0])
    buffers = [None, pa.py_buffer(offsets)]
    return pa.Array.from_buffers(kind, len(offsets) - 1, buffers, children=[values])
