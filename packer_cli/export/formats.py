"""The formats of `packer export`: a class for each, which cites where the format is defined.

A format is a `Writer` into an empty folder. `Tables` are made of record batches, in files of about
a gigabyte; `Files` are written from beginning to end.
"""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, ClassVar
from urllib.parse import quote

import msgspec.structs
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.lib.format import dtype_to_descr, write_array_header_1_0

from packer_cli.errors import DataError, UsageError, named
from packer_cli.export.rows import UnpaddedRows, batches, compare, documents, units
from packer_cli.export.rows import rows as rows_of_shards
from packer_cli.inputs.indexed_tokens import header, sections
from packer_cli.options.formats import SHIFTED
from packer_cli.options.run_options import FormatOptions
from packer_cli.options.value_columns import ValueColumn
from packer_cli.packing.figures import squared_sums
from packer_cli.records import IGNORED, Int64
from packer_cli.result.columns import (
    as_numbers,
    column_type,
    lists_of,
    measured_in,
    rows_of,
    segments_of,
    values_in,
)
from packer_cli.result.layout import (
    DATASET_DICT,
    INFO,
    MANIFEST,
    ROWS,
    SQUARED_LENGTHS,
    STATE,
    UNITS,
    Shard,
    digest,
    name_by_content,
    saved_dataset,
)
from packer_cli.result.manifest import Manifest, to_bytes
from packer_cli.result.opening import View
from packer_cli.result.reader import (
    PackedDirectory,
    check_side_file,
    squared_lengths,
    squares_header,
)
from packer_cli.result.shard_writer import Parts, ShardParts
from packer_cli.result.tokenized import TokenizedDirectory
from packer_cli.run.run_plan import as_line, read_units
from packer_cli.storage import open_bytes

Exported = PackedDirectory | TokenizedDirectory  # the latter to formats of documents alone

PART_BYTES = 1 << 30
_MOST_VALUES = (1 << 31) - 1
# LLaMA-Factory's collator pads input_ids, labels and attention_mask to a multiple of this, and
# position_ids not at all ("pad_to_multiple_of ignore this").
_MULTIPLE = 8
_MEGATRON_TOKENS = "<i4"
_ROW_GROUP = 500  # as `write_packed_parquet` of Megatron-Bridge: its reader holds one whole


class Writer(ABC):
    """One format, written into the empty `folder`.

    takes       the function of `export.rows` that yields the parts of a directory to write
    needs       columns that the directory must have
    keeps_mask  whether the format can say which tokens are not trained on
    in_order    whether its readers can be told to take rows as they lie
    keeps_values  whether it has a place for columns of values
    takes_options  fields of `FormatOptions` that it has a use for

    `even`: rows come in an order for such readers.
    """

    takes: ClassVar[Callable[..., Iterable[Any]]] = staticmethod(rows_of_shards)
    needs: ClassVar[tuple[str, ...]] = ()
    keeps_mask: ClassVar[bool] = True
    in_order: ClassVar[bool] = False
    keeps_values: ClassVar[bool] = False
    takes_options: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def notes(cls, exported: Exported, options: FormatOptions) -> Iterator[str]:
        """Yield what readers of the format need to know, such as what it has no place for.

        Raises UsageError if `options` do not fit the directory.
        """
        columns = exported.facts.config.value_columns
        if columns and not cls.keeps_values:
            yield f"has no place for carried columns, left out: {named(columns)}"
        facts = exported.facts
        if cls.takes is not documents or not isinstance(facts, Manifest):
            return
        if lost := facts.truncated_tokens + facts.dropped_tokens:
            yield f"{lost:,} tokens that were cut off or dropped for the rows are missing"
        is_masked = cls.keeps_mask and "labels" in facts.config.columns
        if is_masked and (joined := facts.segments - facts.documents) > 0:
            yield (
                f"pieces of documents are joined again; the first token of {joined:,} of them is "
                "not trained on"
            )

    def __init__(
        self,
        folder: Path,
        exported: Any,
        *,
        even: bool = False,
        options: FormatOptions = FormatOptions(),  # noqa: B008 it is immutable
    ) -> None:
        self.folder, self.exported, self.even, self.options = folder, exported, even, options

    @classmethod
    def squared_lengths(cls, packed: PackedDirectory) -> Int64:
        """int64[rows], what attention costs in each row as it is read; -1: the reader drops it."""
        return squared_lengths(packed)

    @abstractmethod
    def write(self, part: Any) -> None:
        """Append a part. Raises OSError when it cannot be written."""

    @abstractmethod
    def close(self) -> None:
        """Close all files; also called after a failure."""


class Tables(Writer):
    """A format of record batches, each made of a part.

    file_name   formats the number of a file
    start       makes an Arrow or Parquet writer of a file and a schema
    how         for this writer, with each batch
    """

    file_name: ClassVar[str]
    start: ClassVar[Callable[..., Any]]
    how: ClassVar[dict[str, Any]] = {}
    parts: Parts | None = None

    def columns(self, rows: UnpaddedRows) -> dict[str, Any]:
        """Arrow arrays of the same length."""
        raise NotImplementedError

    @property
    def is_shifted(self) -> bool:
        """True if masks are those of the next token, which files then say to `packer pack`."""
        return False

    def batch(self, part: Any) -> Any:
        """The record batch of a part."""
        metadata = {SHIFTED: "true"} if self.is_shifted else None
        return pa.RecordBatch.from_pydict(self.columns(part), metadata=metadata)

    def write(self, part: Any) -> None:
        self.write_batch(self.batch(part))

    def write_batch(self, batch: Any) -> None:
        """Append a record batch to the open file, or to a new one."""
        if self.parts is None:
            name = self.file_name.format
            self.parts = Parts(self.folder, name, batch.schema, PART_BYTES, self.start)
        self.parts.write(batch, **self.how)

    def close(self) -> None:
        if self.parts is not None:
            self.parts.close()


def eos_of(exported: Exported) -> int:
    """Return the id that ends documents; -1, which no token has, if none is known."""
    tokenizer = exported.facts.tokenizer
    eos = tokenizer.eos_token_id if tokenizer else None
    return -1 if eos is None else eos


def with_numbers(column: ValueColumn, array: Any) -> Any:
    """A column of values of a shard as Arrow has them: bfloat16 as float32, bool."""
    kind = array.type
    if not (pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind)):
        return pa.array(as_numbers(column, array.to_numpy()))
    values = with_numbers(column, array.flatten())
    item = pa.field("item", values.type, nullable=False)
    if pa.types.is_list(kind):
        offsets = pc.subtract(array.offsets, array.offsets[0])
        return pa.ListArray.from_arrays(offsets, values, pa.list_(item))
    return pa.FixedSizeListArray.from_arrays(values, type=pa.list_(item, kind.list_size))


def arrow(values: Any) -> Any:
    """An Arrow array of values [n], or of lists of K, of values [n, K]."""
    flat = pa.array(values.reshape(-1))
    return flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def lists(offsets: Int64, values: Any) -> Any:
    """An Arrow list array; `offsets` int64[rows + 1]. Raises DataError for too many values."""
    if len(values) > _MOST_VALUES:
        raise DataError(
            f"documents of {len(values)} tokens are too long for this format",
            "cut them before they are packed, or choose --to megatron",
        )
    return pa.ListArray.from_arrays(pa.array(offsets.astype("int32")), arrow(values))


class SavedDataset(Tables):
    """A directory as `Dataset.save_to_disk` makes it, to be mapped by `load_from_disk`."""

    file_name = "data-{:05d}.arrow"
    start = staticmethod(pa.ipc.new_stream)

    def close(self) -> None:
        super().close()
        if self.parts is not None:
            identity = "".join((*self.exported.facts.data_digests, type(self).__name__))
            for name, content in saved_dataset(self.parts.names, identity).items():
                (self.folder / name).write_bytes(content)


class Trl(SavedDataset):
    """input_ids, labels, seq_lengths: list<int32> each, one row per packed row; columns of values
    are lists, too.

    The columns are those that `DataCollatorForLanguageModeling` in trl/trainer/sft_trainer.py
    reads; with `padding_free=True` it makes restarting positions from `seq_lengths` (TRL 1.16).
    """

    needs = ("labels",)
    in_order = True
    keeps_values = True

    def columns(self, rows: UnpaddedRows) -> dict[str, Any]:
        columns = {
            "input_ids": lists(rows.offsets, rows.ids),
            "labels": lists(rows.offsets, rows.labels),
            "seq_lengths": lists(rows.first, rows.lengths.astype("int32")),
        }
        for name, column in self.exported.facts.config.value_columns.items():
            offsets = rows.first if column.is_of_segments else rows.offsets
            columns[name] = lists(offsets, as_numbers(column, rows.values(column)))
        return columns


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
    in_order = True

    def __init__(self, folder: Path, exported: Any, **how: Any) -> None:
        super().__init__(folder / "train", exported, **how)
        self.folder.mkdir()
        (folder / DATASET_DICT).write_text(json.dumps({"splits": ["train"]}))

    def columns(self, rows: UnpaddedRows) -> dict[str, Any]:
        count = len(rows.offsets) - 1
        width = (self.exported.max_length // _MULTIPLE + 1) * _MULTIPLE
        begins = np.arange(count) * width
        places = np.arange(len(rows.ids)) + np.repeat(
            begins - rows.offsets[:-1], np.diff(rows.offsets)
        )
        numbers = np.arange(len(rows.lengths)) - np.repeat(rows.first[:-1], np.diff(rows.first)) + 1
        positions = np.arange(len(rows.ids)) - np.repeat(rows.segment_offsets[:-1], rows.lengths)

        def padded(values: Any, padding: int) -> Any:
            flat = np.full(count * width, padding, np.int32)
            flat[places] = values
            return pa.FixedSizeListArray.from_arrays(pa.array(flat), width)

        return {
            "input_ids": padded(rows.ids, self.exported.facts.pad_token_id),
            "labels": padded(rows.labels, IGNORED),
            "attention_mask": padded(np.repeat(numbers, rows.lengths), 0),
            "position_ids": padded(positions, 0),
        }


class Automodel(SavedDataset):
    """input_ids, labels, position_ids: fixed_size_list<int32>; seq_lens, seq_lens_padded:
    list<int32>, one row per packed row.

    Rows are those of `_pad_pack` in nemo_automodel/components/datasets/llm/packed_sequence.py, for
    `packed_thd_collater`: labels are those of the next token; padding belongs to the segment before
    it in `seq_lens_padded`, whose positions it continues.
    """

    needs = ("labels",)
    in_order = True

    def columns(self, rows: UnpaddedRows) -> dict[str, Any]:
        count, width = len(rows.offsets) - 1, self.exported.max_length
        lengths, last = rows.lengths, rows.first[1:] - 1
        padded = lengths + -lengths % self.exported.segment_multiple
        padded[last] += width - np.add.reduceat(padded, rows.first[:-1])
        begins = np.cumsum(padded) - padded
        places = _places(rows, padded - lengths)
        ids = np.full(count * width, self.exported.facts.pad_token_id, np.int32)
        labels = np.full(len(ids), IGNORED, np.int32)
        ids[places] = rows.ids
        trained = rows.labels != IGNORED
        labels[places[trained] - 1] = rows.ids[trained]  # a segment's first token has no label
        positions = (np.arange(len(ids)) - np.repeat(begins, padded)).astype(np.int32)
        flat = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return {
            **{name: arrow(values.reshape(count, width)) for name, values in flat.items()},
            "seq_lens": lists(rows.first, lengths.astype(np.int32)),
            "seq_lens_padded": lists(rows.first, padded.astype(np.int32)),
        }


class Axolotl(SavedDataset):
    """input_ids, attention_mask, labels: list<int32> each, one row per segment.

    "Columns in Dataset must be exactly input_ids, attention_mask, labels": axolotl's
    docs/dataset-formats/tokenized.qmd, for an empty `type:`. A row is a segment, not a document:
    axolotl drops or cuts what is longer than `sequence_len`, and segments fit by construction.

    In an even order, rows are such that axolotl's sequential packing cannot but make them again.
    That is next-fit (`allocate_sequentially` in src/axolotl/utils/samplers/multipack.py): it puts
    segments into a row while they fit. So the padding of a row is put behind its last segment,
    without labels, and all rows are full. Segments without labels do not count: axolotl drops them
    (`drop_no_trainable_tokens` in src/axolotl/utils/trainer.py), and rows of nothing else.
    """

    needs = ("labels",)
    in_order = True

    def columns(self, rows: UnpaddedRows) -> dict[str, Any]:
        if self.even:
            rows = self._filled_up(rows)
        offsets = rows.segment_offsets
        return {
            "input_ids": lists(offsets, rows.ids),
            "attention_mask": lists(offsets, np.ones(len(rows.ids), np.int32)),
            "labels": lists(offsets, rows.labels),
        }

    def _filled_up(self, rows: UnpaddedRows) -> UnpaddedRows:
        assert rows.labels is not None  # noqa: S101 `needs`
        lengths = _filled_up(rows, self.exported.max_length)[1]
        places = _places(rows, lengths - rows.lengths)
        ids = np.full(int(lengths.sum()), self.exported.facts.pad_token_id, np.int32)
        labels = np.full(len(ids), IGNORED, np.int32)
        ids[places], labels[places] = rows.ids, rows.labels
        return replace(rows, ids=ids, labels=labels, lengths=lengths)

    @classmethod
    def squared_lengths(cls, packed: PackedDirectory) -> Int64:
        squared = []
        for part in rows_of_shards(packed, lambda _: None):
            trained, lengths = _filled_up(part, packed.max_length)
            squares = np.add.reduceat(np.where(trained, lengths**2, 0), part.first[:-1])
            squared.append(np.where(squares, squares, -1))
        return np.concatenate(squared)


def _filled_up(rows: UnpaddedRows, max_length: int) -> tuple[Any, Int64]:
    """Return the segments that axolotl keeps, bool[s], and their lengths with padding, int64[s]."""
    trained = np.add.reduceat(rows.labels != IGNORED, rows.segment_offsets[:-1], dtype=np.int64) > 0
    firsts, lengths = rows.first[:-1], rows.lengths.copy()
    used = np.add.reduceat(np.where(trained, lengths, 0), firsts)
    last = np.maximum.reduceat(np.where(trained, np.arange(len(trained)), -1), firsts)
    lengths[last[last >= 0]] += (max_length - used)[last >= 0]
    return trained, lengths


def _places(rows: UnpaddedRows, added: Int64) -> Int64:
    """Return the places of tokens, int64[T], if `added` int64[s] tokens are put after segments."""
    return np.arange(len(rows.ids)) + np.repeat(np.cumsum(added) - added, rows.lengths)


class Unpacked(SavedDataset):
    """input_ids and, where the directory has them, labels: list<int32>, one row per document; and
    columns of values, as records have them.

    `datasets` maps it, and `packer pack` takes it as an input.
    """

    takes = staticmethod(documents)
    needs = ("segments",)
    keeps_values = True

    def columns(self, rows: UnpaddedRows) -> dict[str, Any]:
        columns = {"input_ids": lists(rows.offsets, rows.ids)}
        if rows.labels is not None:
            columns["labels"] = lists(rows.offsets, rows.labels)
        for name, column in self.exported.facts.config.value_columns.items():
            values = as_numbers(column, rows.values(column))
            columns[name] = arrow(values) if column.is_of_segments else lists(rows.offsets, values)
        return columns


class MegatronBridge(Tables):
    """input_ids list<int32>, seq_start_id list<int32>, loss_mask list<int8>.

    The columns and their types are in that class's docstring, in src/megatron/bridge/data/datasets/
    packed_parquet.py. What they mean is in `GPTSFTPackedDataset.collate_fn` of sft.py there: a
    segment of n + 1 tokens gives n inputs, all but its last, and n targets, all but its first;
    `loss_mask` is that of the targets, at the place of the input (as `fill_packing_strategy` rolls
    it).

    So every segment gets an extra token that is a target only, and not trained on; without it the
    segment's last token would be one. The inputs are then exactly the packed row. With a segment
    multiple the padding inside the row is kept, too.
    """

    needs = ("labels",)
    file_name = "packed-{:05d}.idx.parquet"
    start = pq.ParquetWriter
    how: ClassVar = {"row_group_size": _ROW_GROUP}
    is_shifted = True

    def columns(self, rows: UnpaddedRows) -> dict[str, Any]:
        added = -rows.lengths % self.exported.segment_multiple + 1
        ends, places = np.cumsum(rows.lengths + added), _places(rows, added)
        ids = np.full(int(ends[-1]), self.exported.facts.pad_token_id, np.int32)
        ids[places] = rows.ids
        mask = np.zeros(len(ids), np.int8)
        mask[places[rows.labels != IGNORED] - 1] = 1  # a segment's first token has no label
        offsets = np.append(0, ends)[rows.first]
        begins = ends - rows.lengths - added - np.repeat(offsets[:-1], np.diff(rows.first))
        return {
            "input_ids": lists(offsets, ids),
            "seq_start_id": lists(rows.first, begins.astype(np.int32)),
            "loss_mask": lists(offsets, mask),
        }


class Parquet(Tables):
    """Parquet files with the shards' columns and metadata, a record batch a row group."""

    takes = staticmethod(batches)
    in_order = True
    keeps_values = True
    file_name = "packed-{:05d}.parquet"
    start = pq.ParquetWriter

    def batch(self, part: Any) -> Any:
        columns, schema = dict(zip(part.schema.names, part.columns, strict=True)), part.schema
        for name, column in self.exported.facts.config.value_columns.items():
            columns[name] = with_numbers(column, columns[name])
            at = schema.get_field_index(name)
            schema = schema.set(at, schema.field(at).with_type(columns[name].type))
        return pa.RecordBatch.from_arrays([*columns.values()], schema=schema)


class Files(Writer):
    """A format whose files are written from beginning to end.

    They are not mapped: on a full disk, a map ends the process instead of raising an error.
    """

    def __init__(self, folder: Path, exported: Any, **how: Any) -> None:
        super().__init__(folder, exported, **how)
        self._stack = ExitStack()
        self.begin()

    @abstractmethod
    def begin(self) -> None:
        """Open the files."""

    def open(self, name: str, mode: str = "wb") -> IO[bytes]:
        """A file in the folder, to be written."""
        return self._stack.enter_context(open(self.folder / name, mode))

    def close(self) -> None:
        self._stack.close()


class Megatron(Files):
    """Token ids int32 end to end; a sequence is a document, by unit in the order of the inputs.

    `packer_cli/inputs/indexed_tokens.py` says what the index is. Megatron cuts the stream of
    documents anew, so packed rows would mean nothing to it; it has no loss mask.
    """

    takes = staticmethod(documents)
    needs: ClassVar[tuple[str, ...]] = ("segments",)
    keeps_mask = False
    takes_options: ClassVar[tuple[str, ...]] = ("rows",)
    name = "documents"

    @property
    def count(self) -> int:
        """The number of sequences."""
        return int(self.exported.facts.documents)

    def begin(self) -> None:
        begin = header(_MEGATRON_TOKENS, self.count, self.count + 1)
        (self.folder / f"{self.name}.idx").write_bytes(begin)
        self._tokens = self.open(f"{self.name}.bin")
        # the index has three parts, each written from its own offset on
        at, self._index = len(begin), []
        for size in sections(self.count, self.count + 1):
            self._index.append(self.open(f"{self.name}.idx", "r+b"))
            self._index[-1].seek(at)
            at += size
        self._seen = 0
        self._index[2].write(bytes(8))

    def write(self, part: UnpaddedRows) -> None:
        self.write_sequences(part.ids, np.diff(part.offsets))

    def write_sequences(self, ids: Any, sizes: Int64) -> None:
        """Append sequences: ids int32[T], of `sizes` int64[n]."""
        before, self._seen = self._seen, self._seen + len(sizes)
        lengths, pointers, boundaries = self._index
        lengths.write(sizes.astype("<i4").tobytes())
        begins = self._tokens.tell() + (np.cumsum(sizes) - sizes) * 4
        pointers.write(begins.astype("<i8").tobytes())
        boundaries.write(np.arange(before + 1, self._seen + 1, dtype="<i8").tobytes())
        self._tokens.write(ids.astype(_MEGATRON_TOKENS).tobytes())


class MegatronRows(Megatron):
    """Token ids int32 end to end; a sequence is a row of L tokens, with its padding at the end.

    `GPTDataset` in megatron/core/datasets/gpt_dataset.py, and in forks of it, cuts the stream of
    sequences into samples of L tokens, each with the first token of the next as the target of its
    last. So with `--seq-length L` samples are rows, and documents are apart by EOS, with
    `--reset-position-ids --reset-attention-mask --eod-mask-loss`.
    """

    takes = staticmethod(rows_of_shards)
    needs: ClassVar[tuple[str, ...]] = ()
    name = "rows"

    @classmethod
    def notes(cls, exported: Exported, options: FormatOptions) -> Iterator[str]:
        yield from super().notes(exported, options)
        assert isinstance(exported, PackedDirectory)  # noqa: S101 a format of rows
        eos, width, unended = eos_of(exported), exported.max_length, 0
        for part in rows_of_shards(exported, lambda size: None):
            last = part.segment_offsets[1:] - 1
            unended += int((part.ids[last] != eos).sum())
        if eos < 0:
            yield "no EOS is known, by which alone Megatron sets segments apart"
        elif unended:
            yield (
                f"{unended:,} segments do not end in EOS: Megatron does not set them apart from "
                "what follows"
            )
        facts = exported.facts
        padding, pad = facts.rows * width - facts.tokens, facts.pad_token_id
        if padding and pad != eos:
            yield (
                f"{padding:,} tokens are padding, {pad}: Megatron trains on them unless {pad} is "
                "its tokenizer's padding, and nothing else"
            )
        samples = (facts.rows * width - 1) // width
        yield f"{samples:,} samples of --seq-length {width} in an epoch"

    @property
    def count(self) -> int:
        return int(self.exported.facts.rows)

    def write(self, part: UnpaddedRows) -> None:
        count, width = len(part.offsets) - 1, self.exported.max_length
        ids = np.full((count, width), self.exported.facts.pad_token_id, np.int32)
        used = np.diff(part.offsets)
        ids[np.arange(width) < used[:, None]] = part.ids
        self.write_sequences(ids, np.full(count, width))


class Numpy(Files):
    """A .npy file per column, to be mapped: `numpy.load(name, mmap_mode="r")`.

    Columns of fixed length are [rows, max_length]. Those of lists are their values end to end,
    with NAME_offsets.npy int64[rows + 1] beside them; segments are records of file, position and
    start. Columns of values are carried_NAME.npy, with escapes where no file could be called so.
    packer.json has the metadata of a shard: max_length, label_shift, pad_token_id, ...
    """

    takes = staticmethod(batches)
    in_order = True
    keeps_values = True

    def begin(self) -> None:
        packed = self.exported
        self._values = packed.facts.config.value_columns
        rows, segments = packed.facts.rows, packed.facts.segments
        self._files: dict[str, IO[bytes]] = {}
        self._filled: dict[str, int] = {}  # values of a column of lists
        for column in packed.facts.config.columns:
            kind, kept = column_type(column, packed.facts.config), self._values.get(column)
            dtype = _dtype_of(kind.value_type) if kept is None else _dtype_of_values(kept)
            dtype, each, name = dtype.base, dtype.shape, self._file(column)
            if pa.types.is_fixed_size_list(kind):
                self._begin(name, dtype, rows, packed.max_length, *each)
                continue
            of_segments = column == "segments" or kept is not None
            self._begin(name, dtype, segments if of_segments else segments + rows, *each)
            self._begin(name + "_offsets", np.dtype(np.int64), rows + 1).write(bytes(8))
            self._filled[name] = 0

    def _file(self, name: str) -> str:
        """Name the file of a column, without its ending."""
        return f"carried_{quote(name, safe='')}" if name in self._values else name

    def _begin(self, name: str, dtype: Any, *shape: int) -> IO[bytes]:
        if name in self._files:
            raise UsageError(f"--to numpy: two columns would be in {name}.npy", "see --to parquet")
        file = self._files[name] = self.open(f"{name}.npy")
        description = {"descr": dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        write_array_header_1_0(file, description)
        return file

    def write(self, part: Any) -> None:
        if not (description := self.folder / "packer.json").exists():
            description.write_bytes(part.schema.metadata[b"packer"])
        for column_name in part.schema.names:
            column, name = part.column(column_name), self._file(column_name)
            if kept := self._values.get(column_name):
                values = as_numbers(kept, values_in(part, kept))
            elif name not in self._filled:
                values = rows_of(column)
            elif pa.types.is_struct(column.type.value_type):
                values = _records(column.flatten())
            else:
                values = lists_of(part, column_name)[0]
            self._files[name].write(np.ascontiguousarray(values).data)
            if name not in self._filled:
                continue
            edges = column.offsets.to_numpy().astype(np.int64)
            offsets = edges[1:] - edges[0] + self._filled[name]
            self._files[name + "_offsets"].write(offsets.data)
            self._filled[name] = int(offsets[-1])


def _dtype_of_values(column: ValueColumn) -> Any:
    """Return the numpy type of a value of a column of values, or of its K values, as numbers."""
    kind = as_numbers(column, np.empty(0, column.dtype.base)).dtype
    return np.dtype((kind, column.dtype.shape))


def _dtype_of(item: Any) -> Any:
    if pa.types.is_struct(item):
        return np.dtype([(field.name, str(field.type)) for field in item])
    return np.dtype(str(item))


def _records(values: Any) -> Any:
    """Structs as an array of records."""
    records = np.empty(len(values), _dtype_of(values.type))
    for field in records.dtype.names or ():
        records[field] = values.field(field).to_numpy()
    return records


class PackedCopy(Writer):
    """A view as a packed directory: shards of complete rows and a manifest of their own, byte for
    byte what the same run without --view writes of the same work units.
    """

    takes = staticmethod(units)
    keeps_values = True

    def __init__(self, folder: Path, packed: PackedDirectory, **how: Any) -> None:
        super().__init__(folder, packed, **how)
        if not isinstance(packed, View):
            raise UsageError(f"{packed.path}: is packed, and no view", "copy the directory")
        self._view, self._shards = packed, list[Shard]()
        self._sums = open(folder / SQUARED_LENGTHS, "wb")  # noqa: SIM115
        self._sums.write(squares_header(packed.facts.rows))

    def write(self, part: list[Shard]) -> None:
        """Write the rows of a unit. Raises DataError for a shard that differs from the manifest."""
        view, parts = self._view, None
        columns, most = view.facts.config.value_columns.values(), view.facts.config.shard_bytes
        try:
            for shard in part:
                counts = np.zeros(3, np.int64)
                for batch, trained in view.counted(shard):
                    if parts is None:
                        parts = ShardParts(self.folder, shard.unit, ROWS, batch.schema, most)
                    _, lengths, offsets = segments_of(batch)
                    counted = len(lengths), int(lengths.sum()), trained
                    parts.write_rows(batch, *counted, measured_in(batch, columns))
                    counts += counted
                    self._sums.write(squared_sums(lengths, offsets).astype("<i8", copy=False).data)
                compare(view.path / shard.file, shard, *counts.tolist())
            if parts is not None:
                parts.close()
                for shard in parts.shards:
                    name_by_content(self.folder, shard)
                self._shards += parts.shards
        finally:
            if parts is not None:
                parts.abandon()

    def close(self) -> None:
        """Write the manifest and the side files, if nothing failed."""
        self._sums.close()
        view, facts = self._view, self._view.facts
        if sum(shard.rows for shard in self._shards) != facts.rows:
            return
        files = [shard.file for shard in self._shards]
        contents = saved_dataset(files, "".join(shard.sha256 for shard in self._shards))
        records = (
            msgspec.structs.replace(
                record, shards=[shard for shard in self._shards if shard.unit == record.unit]
            )
            for record in read_units(view.path, facts)
        )
        contents[UNITS] = b"".join(map(as_line, records))
        for name, content in contents.items():
            (self.folder / name).write_bytes(content)
        for name in {*facts.side_files} - {STATE, INFO, UNITS, SQUARED_LENGTHS}:
            check_side_file(view.path / name, facts, name)
            with open_bytes(str(view.path / name)) as file, open(self.folder / name, "wb") as copy:
                shutil.copyfileobj(file, copy)
        hashes = {name: sha256(content).hexdigest() for name, content in contents.items()}
        hashes[SQUARED_LENGTHS] = digest(self.folder / SQUARED_LENGTHS)[1]
        document = view.manifest | {
            "config": view.manifest["config"] | {"view": False},
            "shards": msgspec.to_builtins(self._shards),
            "side_files": facts.side_files | hashes,
            "side_file_bytes": {
                name: (self.folder / name).stat().st_size for name in facts.side_files | hashes
            },
        }
        (self.folder / MANIFEST).write_bytes(to_bytes(document))
