"""Formats in files of their own kinds: Megatron-LM, Megatron-Bridge, nanotron, and the shards' own
columns as Parquet or .npy, which need neither packer nor Arrow.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.lib.format import dtype_to_descr, write_array_header_1_0

from packer_cli.config.columns import OF_SEGMENTS
from packer_cli.export.rows import Rows
from packer_cli.export.writing import Exported, Writer, lists, parts_of
from packer_cli.inputs.megatron import header, sections
from packer_cli.records import IGNORED
from packer_cli.result.parts import Parts
from packer_cli.result.reader import PackedDirectory, ragged_of, rows_of
from packer_cli.result.shard_writer import column_type

_TOKENS = "<i4"  # of Megatron-LM
_TOKEN_BYTES = 4  # of nanotron
_ROW_GROUP = 500  # as `write_packed_parquet` there: its reader holds one whole at a time
_LIST32, _LIST8 = pa.list_(pa.int32()), pa.list_(pa.int8())


class Files(Writer):
    """A format whose files are written from beginning to end.

    They are not mapped: on a full disk, a map ends the process instead of raising an error.
    """

    def __init__(self, folder: Path, packed: Exported) -> None:
        self._folder, self._stack = folder, ExitStack()

    def _open(self, name: str, mode: str = "wb") -> IO[bytes]:
        return self._stack.enter_context(open(self._folder / name, mode))

    def close(self) -> None:
        self._stack.close()


class Megatron(Files):
    """Token ids int32 end to end; a sequence is a document, in the order of the inputs.

    `packer_cli/inputs/megatron.py` says what the index is. Megatron cuts the stream of documents
    anew, so packed rows would mean nothing to it; it has no loss mask.
    """

    takes = "documents"
    needs = ("segments",)
    keeps_mask = False

    def __init__(self, folder: Path, packed: Exported) -> None:
        super().__init__(folder, packed)
        count = packed.facts.documents
        begin = header(_TOKENS, count, count + 1)
        (folder / "documents.idx").write_bytes(begin)
        self._tokens = self._open("documents.bin")
        # the index has three parts, each written from its own offset on
        at, self._index = len(begin), []
        for size in sections(count, count + 1):
            self._index.append(self._open("documents.idx", "r+b"))
            self._index[-1].seek(at)
            at += size
        self._seen = 0
        self._index[2].write(bytes(8))

    def write(self, part: Rows) -> None:
        before, self._seen = self._seen, self._seen + len(part.lengths)
        lengths, pointers, boundaries = self._index
        lengths.write(part.lengths.astype("<i4").tobytes())
        pointers.write((self._tokens.tell() + part.offsets[:-1] * 4).astype("<i8").tobytes())
        boundaries.write(np.arange(before + 1, self._seen + 1, dtype="<i8").tobytes())
        self._tokens.write(part.ids.astype(_TOKENS).tobytes())


class Nanotron(Files):
    """Token ids uint32; documents in the order of the inputs.

    `00000_tokens.ds` has the token ids end to end, `.ds.index` each document's end in tokens as
    uint64 (datatrove/pipeline/tokens/tokenizer.py). nanotron's `NanosetDatasetsArgs` takes
    tokenizer and token size from the first line of `.ds.metadata`, "name|4", and loads that
    tokenizer. It cuts the stream itself and has no loss mask; with positions from the index, no
    document sees another.
    """

    takes = "documents"
    needs = ("segments",)
    keeps_mask = False

    def __init__(self, folder: Path, packed: PackedDirectory) -> None:
        super().__init__(folder, packed)
        self._tokens = self._open("00000_tokens.ds")
        self._index = self._open("00000_tokens.ds.index")
        tokenizer, tokens = packed.facts.tokenizer, packed.facts.tokens
        if tokenizer and tokenizer.source != "bytes":  # which transformers does not know
            lines = f"{tokenizer.source}|{_TOKEN_BYTES}", str(tokens), f"{tokens / 1e6:.3g} MT"
            (folder / "00000_tokens.ds.metadata").write_text("\n".join(lines))

    def write(self, part: Rows) -> None:
        before = self._tokens.tell() // _TOKEN_BYTES
        self._index.write((part.offsets[1:] + before).astype("<u8").tobytes())
        self._tokens.write(part.ids.astype("<u4").tobytes())


class MegatronBridge(Writer):
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


class Parquet(Writer):
    """Parquet files with the shards' columns and metadata, a record batch a row group."""

    takes = "batches"
    keeps_pairs = True

    def __init__(self, folder: Path, packed: PackedDirectory) -> None:
        self._folder = folder
        self._parts: Parts | None = None

    def write(self, part: Any) -> None:
        if self._parts is None:
            name = "packed-{:05d}.parquet"
            self._parts = parts_of(self._folder, name, part.schema, pq.ParquetWriter)
        self._parts.write(part)

    def close(self) -> None:
        if self._parts is not None:
            self._parts.close()


class Numpy(Files):
    """A .npy file per column, to be mapped: `numpy.load(name, mmap_mode="r")`.

    Columns of fixed length are [rows, max_length]. Those of lists are their values end to end,
    with NAME_offsets.npy int64[rows + 1] beside them; segments are records of file, position and
    start. packer.json has the metadata of a shard: max_length, label_shift, pad_token_id, ...
    """

    takes = "batches"
    keeps_pairs = True

    def __init__(self, folder: Path, packed: PackedDirectory) -> None:
        super().__init__(folder, packed)
        rows = sum(shard.rows for shard in packed.facts.shards)
        segments = sum(shard.segments for shard in packed.facts.shards)
        self._files: dict[str, Any] = {}
        self._filled: dict[str, int] = {}
        for name in packed.facts.config.columns:
            kind = column_type(name, packed.max_length)
            dtype = _dtype_of(kind.value_type)
            if pa.types.is_fixed_size_list(kind):
                self._start(name, dtype, (rows, packed.max_length))
                continue
            values = segments if name in OF_SEGMENTS else segments + rows
            self._start(name, dtype, (values,))
            self._start(name + "_offsets", np.dtype(np.int64), (rows + 1,))
            self._write(name + "_offsets", np.zeros(1, np.int64))
            self._filled[name] = 0

    def _start(self, name: str, dtype: Any, shape: tuple[int, ...]) -> None:
        file = self._files[name] = self._open(f"{name}.npy")
        header = {"descr": dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        write_array_header_1_0(file, header)

    def _write(self, name: str, values: Any) -> None:
        self._files[name].write(np.ascontiguousarray(values).data)

    def write(self, part: Any) -> None:
        if not (description := self._folder / "packer.json").exists():
            description.write_bytes(part.schema.metadata[b"packer"])
        for name in part.schema.names:
            column = part.column(name)
            if name not in self._filled:
                self._write(name, rows_of(column))
                continue
            values, edges = _list_of(column)
            self._write(name, values[edges[0] : edges[-1]])
            offsets = edges[1:].astype(np.int64) - edges[0] + self._filled[name]
            self._write(name + "_offsets", offsets)
            self._filled[name] = int(offsets[-1])


def _dtype_of(item: Any) -> Any:
    if pa.types.is_struct(item):
        return np.dtype([(field.name, str(field.type)) for field in item])
    return np.dtype(str(item))


def _list_of(column: Any) -> tuple[Any, Any]:
    """A list column as (values, offsets), structs as records."""
    if not pa.types.is_struct(column.type.value_type):
        return ragged_of(column)
    records = np.empty(len(column.values), _dtype_of(column.type.value_type))
    for field in records.dtype.names or ():
        records[field] = column.values.field(field).to_numpy()
    return records, column.offsets.to_numpy()
