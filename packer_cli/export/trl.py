"""TRL: rows as `trl.pack_dataset` makes them, ragged, with the lengths of their documents.

The columns are those that `DataCollatorForLanguageModeling` in trl/trainer/sft_trainer.py reads;
with `padding_free=True` it makes restarting positions from `seq_lengths` (TRL 1.16).
"""

from __future__ import annotations

from typing import Any

from packer_cli.export.rows import Rows
from packer_cli.export.writing import SavedDataset, lists


class Trl(SavedDataset):
    """input_ids, labels, seq_lengths: list<int32> each, one row per packed row."""

    needs = ("labels",)

    def columns(self, rows: Rows) -> dict[str, Any]:
        return {
            "input_ids": lists(rows.offsets, rows.ids),
            "labels": lists(rows.offsets, rows.labels),
            "seq_lengths": lists(rows.first, rows.lengths.astype("int32")),
        }
