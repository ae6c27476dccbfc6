"""LLaMA-Factory: a directory for `tokenized_path`, packed as by `neat_packing: true`.

Rows are those of `PackedSupervisedDatasetProcessor` in src/llamafactory/data/processor/
supervised.py: `attention_mask` numbers the documents from 1 and is 0 on padding, `position_ids`
restart and are 0 on padding. The directory is a DatasetDict with the split train, which
`get_dataset` in src/llamafactory/data/loader.py takes in every version.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from packer_cli.export.rows import Rows
from packer_cli.export.writing import SavedDataset
from packer_cli.records import IGNORED
from packer_cli.result.layout import DATASET_DICT
from packer_cli.result.reader import PackedDirectory

# The trainer's collator pads input_ids, labels and attention_mask to a multiple of this, and
# position_ids not at all ("pad_to_multiple_of ignore this").
_MULTIPLE = 8


class LlamaFactory(SavedDataset):
    """input_ids, labels, attention_mask, position_ids: fixed_size_list<int32> each.

    A row has at least one padding token, as LLaMA-Factory's own rows do: under FlashAttention 2
    transformers ignores a mask without a zero, and documents would see each other.
    """

    needs = ("labels",)
    subfolder = "train"

    def __init__(self, folder: Path, packed: PackedDirectory) -> None:
        super().__init__(folder, packed)
        (folder / DATASET_DICT).write_text(json.dumps({"splits": ["train"]}))
        self._width = (packed.max_length // _MULTIPLE + 1) * _MULTIPLE

    def columns(self, rows: Rows) -> dict[str, Any]:
        count = len(rows.offsets) - 1
        begins = np.arange(count) * self._width
        places = np.arange(len(rows.ids)) + np.repeat(
            begins - rows.offsets[:-1], np.diff(rows.offsets)
        )
        numbers = np.arange(len(rows.lengths)) - np.repeat(rows.first[:-1], np.diff(rows.first)) + 1

        def padded(values: Any, padding: int) -> Any:
            flat = np.full(count * self._width, padding, np.int32)
            flat[places] = values
            return pa.FixedSizeListArray.from_arrays(pa.array(flat), self._width)

        return {
            "input_ids": padded(rows.ids, self.packed.facts.pad_token_id),
            "labels": padded(rows.labels, IGNORED),
            "attention_mask": padded(np.repeat(numbers, rows.lengths), 0),
            "position_ids": padded(rows.positions, 0),
        }
