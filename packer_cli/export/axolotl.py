"""axolotl: pretokenized rows, not packed, for its own `sample_packing` (or none).

"Columns in Dataset must be exactly input_ids, attention_mask, labels": axolotl's
docs/dataset-formats/tokenized.qmd, for an empty `type:`. A row is a segment, not a document:
axolotl drops or cuts what is longer than `sequence_len`, and segments fit by construction.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from packer_cli.export.rows import Rows
from packer_cli.export.rows import rows as rows_of
from packer_cli.export.writing import SavedDataset, lists, ones
from packer_cli.records import IGNORED, Int64
from packer_cli.result.reader import PackedDirectory


class Axolotl(SavedDataset):
    """input_ids, attention_mask, labels: list<int32> each, one row per segment."""

    needs = ("labels",)

    def columns(self, rows: Rows) -> dict[str, Any]:
        offsets = rows.segment_offsets
        return {
            "input_ids": lists(offsets, rows.ids),
            "attention_mask": lists(offsets, ones(len(rows.ids))),
            "labels": lists(offsets, rows.labels),
        }


class AxolotlInOrder(Axolotl):
    """The same, in rows that axolotl's sequential packing cannot but make again.

    That is next-fit (`allocate_sequentially` in src/axolotl/utils/samplers/multipack.py): it puts
    segments into a row while they fit. So the padding of a row is put behind its last segment,
    without labels, and all rows are full. Segments without labels do not count: axolotl drops them
    (`drop_no_trainable_tokens` in src/axolotl/utils/trainer.py), and rows of nothing else.
    """

    def __init__(self, folder: Path, packed: PackedDirectory) -> None:
        super().__init__(folder, packed)
        self._max_length = packed.max_length

    def columns(self, rows: Rows) -> dict[str, Any]:
        assert rows.labels is not None  # noqa: S101 `needs`
        _, lengths = _filled_up(rows, self._max_length)
        added = lengths - rows.lengths
        places = np.arange(len(rows.ids)) + np.repeat(np.cumsum(added) - added, rows.lengths)
        ids = np.full(int(lengths.sum()), self.packed.facts.pad_token_id, np.int32)
        labels = np.full(len(ids), IGNORED, np.int32)
        ids[places], labels[places] = rows.ids, rows.labels
        return super().columns(replace(rows, ids=ids, labels=labels, lengths=lengths))

    @classmethod
    def squared_lengths(cls, packed: PackedDirectory) -> Int64:
        found = []
        for part in rows_of(packed, lambda _: None):
            trained, lengths = _filled_up(part, packed.max_length)
            squares = np.add.reduceat(np.where(trained, lengths**2, 0), part.first[:-1])
            found.append(np.where(squares, squares, -1))
        return np.concatenate(found)


def _filled_up(rows: Rows, max_length: int) -> tuple[Any, Int64]:
    """Which segments axolotl keeps, bool[s], and how long they are with the padding, int64[s]."""
    trained = np.add.reduceat(rows.labels != IGNORED, rows.segment_offsets[:-1], dtype=np.int64) > 0
    firsts, lengths = rows.first[:-1], rows.lengths.copy()
    used = np.add.reduceat(np.where(trained, lengths, 0), firsts)
    last = np.maximum.reduceat(np.where(trained, np.arange(len(trained)), -1), firsts)
    lengths[last[last >= 0]] += (max_length - used)[last >= 0]
    return trained, lengths
