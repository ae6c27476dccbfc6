"""axolotl: pretokenized rows, not packed, for its own `sample_packing` (or none).

"Columns in Dataset must be exactly input_ids, attention_mask, labels": axolotl's
docs/dataset-formats/tokenized.qmd, for an empty `type:`. A row is a segment, not a document:
axolotl drops or cuts what is longer than `sequence_len`, and segments fit by construction.
"""

from __future__ import annotations

from typing import Any

from packer_cli.export.rows import Rows
from packer_cli.export.writing import SavedDataset, lists, ones


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
