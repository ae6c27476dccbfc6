"""Writing the rows of a view: where each segment is, and no token.

A view's shards have two of a packed directory's columns, `cu_seqlens` and `segments`, and for
records of preference `pair` and `side`; a segment's
file and position are a tokenized directory and a document's number in it. All else that a row
holds follows from these: see `view`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from packer_cli.config.columns import view_columns
from packer_cli.config.options import PackConfig
from packer_cli.packing.window import trained_in
from packer_cli.records import Int64, Stock
from packer_cli.result.layout import ROWS
from packer_cli.result.parts import ShardParts
from packer_cli.result.shard_writer import column_type, ragged, schema, segments_column
from packer_cli.result.shards import Shard

ROWS_PER_BATCH = 1 << 16


def view_schema(config: PackConfig, tokenizer_sha256: str) -> Any:
    """The Arrow schema of a view's shards, with the metadata of packed ones."""
    metadata = schema(config, 0, tokenizer_sha256).metadata
    return pa.schema(
        [pa.field(name, column_type(name, config.max_length), nullable=False)
         for name in view_columns(config.columns)],
        metadata=metadata,
    )  # fmt: skip


class ViewWriter:
    """Writes the rows of one unit into one shard."""

    rows_at_once = 0  # it needs no tokens

    def __init__(self, folder: Path, unit: int, config: PackConfig, tokenizer_sha256: str) -> None:
        self._schema = view_schema(config, tokenizer_sha256)
        self._parts = ShardParts(folder, unit, ROWS, self._schema, sys.maxsize)

    def write(self, stock: Stock, order: Int64, row_offsets: Int64) -> None:
        """Append rows: row r holds the pieces order[row_offsets[r]:row_offsets[r + 1]]."""
        for first in range(0, len(row_offsets) - 1, ROWS_PER_BATCH):
            self._write_batch(stock, order, row_offsets[first : first + ROWS_PER_BATCH + 1])

    def _write_batch(self, stock: Stock, order: Int64, edges: Int64) -> None:
        pieces = order[edges[0] : edges[-1]]
        sizes, rows = np.diff(edges), len(edges) - 1
        # each row's boundaries are a 0, and the sums of its lengths up to each
        begins = edges[:-1] - edges[0]
        sums = np.cumsum(stock.length[pieces], dtype=np.int64)
        before = np.concatenate([[0], sums])[begins]
        boundaries = np.zeros(len(pieces) + rows, np.int32)
        at = np.arange(len(pieces)) + np.repeat(np.arange(1, rows + 1), sizes)
        boundaries[at] = sums - np.repeat(before, sizes)
        offsets = (edges - edges[0] + np.arange(rows + 1)).astype(np.int32)
        cu_seqlens = ragged(self._schema.field("cu_seqlens").type, offsets, [boundaries])
        others = [segments_column(self._schema, name, stock, order, edges)
                  for name in self._schema.names[1:]]  # fmt: skip
        batch = pa.RecordBatch.from_arrays([cu_seqlens, *others], schema=self._schema)
        self._parts.write_rows(batch, len(pieces), int(sums[-1]), trained_in(stock, pieces))

    def close(self) -> list[Shard]:
        """End the shard. Its size and digest are the caller's to find."""
        self._parts.close()
        return self._parts.shards

    def abandon(self) -> None:
        """Let go of the file after a failure."""
        self._parts.abandon()
