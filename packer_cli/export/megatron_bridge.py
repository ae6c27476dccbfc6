"""Megatron-Bridge: packed Parquet for `GPTSFTPackedParquetDataset`.

The columns and their types are in that class's docstring, in src/megatron/bridge/data/datasets/
packed_parquet.py. What they mean is in `GPTSFTPackedDataset.collate_fn` of sft.py there: a segment
of n + 1 tokens gives n inputs, all but its last, and n targets, all but its first; `loss_mask` is
that of the targets, at the place of the input (as `fill_packing_strategy` rolls it).

So every segment gets an extra token that is a target only, and not trained on; without it the
segment's last token would be one. The inputs are then exactly the packed row. With a segment
multiple the padding inside the row is kept, too.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packer_cli.export.rows import Rows
from packer_cli.export.writing import Writer, lists, parts_of
from packer_cli.records import IGNORED
from packer_cli.result.reader import PackedDirectory

_ROW_GROUP = 500  # as `write_packed_parquet` there: its reader holds one whole at a time
_LIST32, _LIST8 = pa.list_(pa.int32()), pa.list_(pa.int8())


class MegatronBridge(Writer):
    """input_ids list<int32>, seq_start_id list<int32>, loss_mask list<int8>."""

    needs = ("labels",)

    def __init__(self, folder: Path, packed: PackedDirectory) -> None:
        self._multiple, self._pad = packed.segment_multiple, packed.facts.pad_token_id
        fields = {"input_ids": _LIST32, "seq_start_id": _LIST32, "loss_mask": _LIST8}
        name = "packed-{:05d}.idx.parquet"
        self._parts = parts_of(folder, name, pa.schema(fields), pq.ParquetWriter)

    def write(self, part: Rows) -> None:
        added = -part.lengths % self._multiple + 1
        ends = np.cumsum(part.lengths + added)
        places = np.arange(len(part.ids)) + np.repeat(np.cumsum(added) - added, part.lengths)
        ids = np.full(int(ends[-1]), self._pad, np.int32)
        ids[places] = part.ids
        mask = np.zeros(len(ids), np.int8)
        assert part.labels is not None  # noqa: S101 `needs`
        mask[places[part.labels != IGNORED] - 1] = 1  # a segment's first token has no label
        begins = ends - part.lengths - added
        offsets = np.append(0, ends)[part.first]
        own = begins - np.repeat(offsets[:-1], np.diff(part.first))
        columns = [
            lists(offsets, ids),
            lists(part.first, own.astype(np.int32)),
            lists(offsets, mask),
        ]
        batch = pa.RecordBatch.from_arrays(columns, schema=self._parts.schema)
        self._parts.write(batch, row_group_size=_ROW_GROUP)

    def close(self) -> None:
        self._parts.close()
