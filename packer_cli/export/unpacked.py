"""Packing undone: one document per row, its pieces joined, in the order of the inputs.

`datasets` maps it, and `packer pack` takes it as an input.
"""

from __future__ import annotations

from typing import Any

from packer_cli.export.rows import Rows
from packer_cli.export.writing import SavedDataset, lists


class Unpacked(SavedDataset):
    """input_ids and, where the directory has them, labels: list<int32>, one row per document."""

    takes = "documents"
    needs = ("segments",)

    def columns(self, rows: Rows) -> dict[str, Any]:
        columns = {"input_ids": lists(rows.offsets, rows.ids)}
        if rows.labels is not None:
            columns["labels"] = lists(rows.offsets, rows.labels)
        return columns
