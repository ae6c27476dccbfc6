"""Formats that `datasets.load_from_disk` maps: TRL, LLaMA-Factory, axolotl, whole documents."""

from __future__ import annotations

import json
from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from packer_cli.export.rows import Rows
from packer_cli.export.rows import rows as rows_of_shards
from packer_cli.export.writing import Exported, Writer, lists, parts_of
from packer_cli.records import IGNORED, Int32, Int64
from packer_cli.result.layout import DATASET_DICT
from packer_cli.result.manifest_bytes import checksum
from packer_cli.result.parts import Parts
from packer_cli.result.reader import PackedDirectory
from packer_cli.result.saved_dataset import saved_dataset

# The trainer's collator pads input_ids, labels and attention_mask to a multiple of this, and
# position_ids not at all ("pad_to_multiple_of ignore this").
_MULTIPLE = 8


class SavedDataset(Writer):
    """A directory as `Dataset.save_to_disk` makes it, to be mapped by `load_from_disk`.

    Formats are subclasses that give the columns of some rows.
    """

    subfolder: ClassVar[str] = ""

    def __init__(self, folder: Path, packed: Exported) -> None:
        self.packed = packed
        self._folder = folder / self.subfolder
        self._folder.mkdir(exist_ok=True)
        self._parts: Parts | None = None
        self._identity = f"{checksum(packed.facts.document)}/{type(self).__name__}"

    @abstractmethod
    def columns(self, rows: Rows) -> dict[str, Any]:
        """Arrow arrays of the same length."""

    def write(self, part: Rows) -> None:
        batch = pa.RecordBatch.from_pydict(self.columns(part))
        if self._parts is None:
            self._parts = parts_of(
                self._folder, "data-{:05d}.arrow", batch.schema, pa.ipc.new_stream
            )
        self._parts.write(batch)

    def close(self) -> None:
        if self._parts is None:
            return
        self._parts.close()
        for name, content in saved_dataset(self._parts.names, self._identity).items():
            (self._folder / name).write_bytes(content)


class Trl(SavedDataset):
    """input_ids, labels, seq_lengths: list<int32> each, one row per packed row.

    The columns are those that `DataCollatorForLanguageModeling` in trl/trainer/sft_trainer.py
    reads; with `padding_free=True` it makes restarting positions from `seq_lengths` (TRL 1.16).
    """

    needs = ("labels",)

    def columns(self, rows: Rows) -> dict[str, Any]:
        return {
            "input_ids": lists(rows.offsets, rows.ids),
            "labels": lists(rows.offsets, rows.labels),
            "seq_lengths": lists(rows.first, rows.lengths.astype("int32")),
        }


class LlamaFactory(SavedDataset):
    """input_ids, labels, attention_mask, position_ids: fixed_size_list<int32> each.

    A row has at least one padding token, as LLaMA-Factory's own rows do: under FlashAttention 2
    transformers ignores a mask without a zero, and documents would see each other.

    Rows are those of `PackedSupervisedDatasetProcessor` in src/llamafactory/data/processor/
    supervised.py: `attention_mask` numbers the documents from 1 and is 0 on padding, `position_ids`
    restart and are 0 on padding. The directory is a DatasetDict with the split train, which
    `get_dataset` in src/llamafactory/data/loader.py takes in every version.
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


class Axolotl(SavedDataset):
    """input_ids, attention_mask, labels: list<int32> each, one row per segment.

    "Columns in Dataset must be exactly input_ids, attention_mask, labels": axolotl's
    docs/dataset-formats/tokenized.qmd, for an empty `type:`. A row is a segment, not a document:
    axolotl drops or cuts what is longer than `sequence_len`, and segments fit by construction.
    """

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
        for part in rows_of_shards(packed, lambda _: None):
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


class Unpacked(SavedDataset):
    """input_ids and, where the directory has them, labels: list<int32>, one row per document.

    `datasets` maps it, and `packer pack` takes it as an input.
    """

    takes = "documents"
    needs = ("segments",)

    def columns(self, rows: Rows) -> dict[str, Any]:
        columns = {"input_ids": lists(rows.offsets, rows.ids)}
        if rows.labels is not None:
            columns["labels"] = lists(rows.offsets, rows.labels)
        return columns


def ones(count: int) -> Int32:
    """An attention mask of nothing but tokens."""
    return np.ones(count, np.int32)
