"""Packed rows on their way from a dataset to a collator, and where documents begin in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from packer_cli.config import PADDED_BOUNDARIES
from packer_cli.errors import UsageError
from packer_cli.records import Int32

RAGGED = ("cu_seqlens", PADDED_BOUNDARIES)


@dataclass(frozen=True)
class RowBatch:
    """b rows, gathered at once. Iterates as dicts, for those who want rows one by one.

    columns  name -> tensor [b, L] as stored: input_ids, labels, position_ids int32,
             attention_mask uint8
    ragged   name -> b int32 arrays, the rows' boundaries, to be read only: cu_seqlens,
             cu_seqlens_padded
    """

    columns: dict[str, Any]
    ragged: dict[str, list[Int32]]

    def __len__(self) -> int:
        return len(next(iter((self.columns or self.ragged).values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = {name: values[index] for name, values in self.columns.items()}
        # copied, because a shard's map cannot be written to
        return row | {name: torch.tensor(rows[index]) for name, rows in self.ragged.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    @property
    def max_length(self) -> int:
        return int(self.columns["input_ids"].shape[1])

    def boundaries(self) -> Int32:
        """int32[k + 1], where documents begin in the rows end to end: 0, ..., b * max_length.

        The padding at a row's end is a document of its own, so that every place belongs to one.
        A segment's own padding (`--segment-multiple`) is the end of its segment.
        """
        rows = self.ragged.get(PADDED_BOUNDARIES) or self.ragged["cu_seqlens"]
        edges, begin = [0], 0
        for row in rows:
            edges += [begin + edge for edge in row[1:].tolist()]
            begin += self.max_length
            if edges[-1] < begin:
                edges.append(begin)
        return np.array(edges, np.int32)


def row_batch(rows: Any) -> RowBatch:
    """What a collator is given, as a RowBatch: one already, or rows as dicts of tensors.

    Raises UsageError for rows without input_ids or boundaries, or of unlike columns.
    """
    if not len(rows):
        raise UsageError("a collator of packed rows got no rows")
    if isinstance(rows, RowBatch):
        batch = rows
    else:
        if not all(isinstance(row, Mapping) for row in rows):
            raise UsageError("a collator of packed rows got something else")
        if unlike := {name for row in rows for name in row.keys() ^ rows[0].keys()}:
            raise UsageError(
                f"some rows of a batch have {min(unlike)}, others do not",
                "data sets that are trained on together are packed with the same options",
            )
        batch = RowBatch(
            {name: torch.stack([torch.as_tensor(row[name]) for row in rows])
             for name in rows[0] if name not in (*RAGGED, "segments")},
            {name: [np.asarray(row[name], np.int32) for row in rows]
             for name in RAGGED if name in rows[0]},
        )  # fmt: skip
    for name, found in (("input_ids", batch.columns), ("cu_seqlens", batch.ragged)):
        if name not in found:
            raise UsageError(
                f"rows without {name}",
                "PackedDataset gives it unless `columns` leaves it out; transformers.Trainer "
                "removes it unless remove_unused_columns=False",
            )
    return batch
