"""The shards' own columns, as they are, in formats that need neither packer nor Arrow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.lib.format import dtype_to_descr, write_array_header_1_0

from packer_cli.config.columns import OF_SEGMENTS
from packer_cli.export.writing import Files, Writer, parts_of
from packer_cli.result.parts import Parts
from packer_cli.result.reader import PackedDirectory, ragged_of, rows_of
from packer_cli.result.shard_writer import column_type


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
