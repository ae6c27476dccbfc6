"""The shards' own columns, as they are, in formats that need neither packer nor Arrow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packer_cli.export.writing import Parts, Writer
from packer_cli.packed import PackedDirectory, ragged_of, rows_of
from packer_cli.shard_writer import column_type


class Parquet(Writer):
    """Parquet files with the shards' columns and metadata, a record batch a row group."""

    takes = "batches"

    def __init__(self, folder: Path, packed: PackedDirectory) -> None:
        self._folder = folder
        self._parts: Parts | None = None

    def write(self, part: Any) -> None:
        if self._parts is None:
            name = "packed-{:05d}.parquet"
            self._parts = Parts(self._folder, name, part.schema, pq.ParquetWriter)
        self._parts.write(part)

    def close(self) -> None:
        if self._parts is not None:
            self._parts.close()


class Numpy(Writer):
    """A .npy file per column, to be mapped: `numpy.load(name, mmap_mode="r")`.

    Columns of fixed length are [rows, max_length]. Those of lists are their values end to end,
    with NAME_offsets.npy int64[rows + 1] beside them; segments are records of file, position and
    start. packer.json is what a shard says of itself: max_length, label_shift, pad_token_id, ...
    """

    takes = "batches"

    def __init__(self, folder: Path, packed: PackedDirectory) -> None:
        rows, segments = packed.manifest["rows"], packed.manifest["segments"]
        self._folder, self._row = folder, 0
        self._arrays: dict[str, Any] = {}
        self._filled: dict[str, int] = {}
        for name in packed.manifest["config"]["columns"]:
            kind = column_type(name, packed.max_length)
            item = kind.value_type
            dtype = (
                np.dtype([(field.name, str(field.type)) for field in item])
                if pa.types.is_struct(item)
                else np.dtype(str(item))
            )
            if pa.types.is_fixed_size_list(kind):
                self._arrays[name] = self._open(name, dtype, (rows, packed.max_length))
                continue
            count = segments if name == "segments" else segments + rows
            self._arrays[name] = self._open(name, dtype, (count,))
            self._arrays[name + "_offsets"] = self._open(name + "_offsets", np.int64, (rows + 1,))
            self._filled[name] = self._arrays[name + "_offsets"][0] = 0

    def _open(self, name: str, dtype: Any, shape: tuple[int, ...]) -> Any:
        return np.lib.format.open_memmap(self._folder / f"{name}.npy", "w+", dtype, shape)

    def write(self, part: Any) -> None:
        if not self._row:
            (self._folder / "packer.json").write_bytes(part.schema.metadata[b"packer"])
        here = slice(self._row, self._row + part.num_rows)
        for name in part.schema.names:
            column = part.column(name)
            if name not in self._filled:
                self._arrays[name][here] = rows_of(column)
                continue
            values, edges = _list_of(column)
            begin = self._filled[name]
            self._filled[name] = begin + int(edges[-1] - edges[0])
            offsets = edges[1:].astype(np.int64) - edges[0] + begin
            self._arrays[name + "_offsets"][here.start + 1 : here.stop + 1] = offsets
            target = self._arrays[name][begin : self._filled[name]]
            if target.dtype.names:
                for field in target.dtype.names:
                    target[field] = values.field(field).to_numpy()[edges[0] : edges[-1]]
            else:
                target[:] = values[edges[0] : edges[-1]]
        self._row = here.stop

    def close(self) -> None:
        for array in self._arrays.values():
            array.flush()


def _list_of(column: Any) -> tuple[Any, Any]:
    if pa.types.is_struct(column.type.value_type):
        return column.values, column.offsets.to_numpy()
    return ragged_of(column)
