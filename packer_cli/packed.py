"""Reading a packed directory: memory-mapped shards, checked against the manifest.

A stream cut at a message boundary reads short without an error, so the size of every shard is
compared on open, and its rows when it is mapped.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packer_cli.config import PADDED_BOUNDARIES
from packer_cli.errors import DataError
from packer_cli.manifest import MANIFEST, load
from packer_cli.records import Int64

PACK_AGAIN = "copy the directory again, or pack the data again with --overwrite"


class PackedDirectory:
    """A finished result. `manifest` is the parsed manifest.json, `path` the directory."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        config = manifest["config"]
        self.max_length: int = config["max_length"]
        # results of a packer that did not have these options do not name them
        self.segment_multiple: int = config.get("segment_multiple", 1)
        self.label_shift: str = config.get("label_shift", "none")
        self.max_segments_per_row: int | None = config.get("max_segments_per_row")
        self._ends = list(accumulate(shard["rows"] for shard in manifest["shards"]))

    def __len__(self) -> int:
        """Rows in all shards."""
        return int(self.manifest["rows"])

    def find(self, row: int) -> tuple[dict[str, Any], int]:
        """The shard that holds a row counted over all shards, and the row's number in it."""
        index = bisect_right(self._ends, row)
        if index == len(self._ends):
            raise DataError(
                f"{self.path / MANIFEST}: its total is {len(self)} rows, its shards hold "
                f"{sum(shard['rows'] for shard in self.manifest['shards'])}",
                "pack the data again",
            )
        shard = self.manifest["shards"][index]
        return shard, row - (self._ends[index] - shard["rows"])

    def check_size(self, shard: dict[str, Any]) -> None:
        """Raise DataError when a shard is missing or not as long as the manifest says."""
        file = self.path / shard["file"]
        try:
            size = file.stat().st_size
        except OSError:
            raise DataError(f"{file}: is missing", PACK_AGAIN) from None
        if size != shard["bytes"]:
            raise DataError(
                f"{file}: has {size} bytes, the manifest says {shard['bytes']}", PACK_AGAIN
            )

    def batches(self, shard: dict[str, Any]) -> Iterator[Any]:
        """The Arrow record batches of a shard (an entry of manifest["shards"]), mapped.

        Raises DataError when the shard cannot be read or holds another number of rows.
        """
        path, rows = self.path / shard["file"], 0
        try:
            with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
                for batch in reader:
                    rows += batch.num_rows
                    yield batch
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}: not a readable shard: {error}", PACK_AGAIN) from error
        if rows != shard["rows"]:
            raise DataError(
                f"{path}: holds {rows} rows, the manifest says {shard['rows']}", PACK_AGAIN
            )


def open_packed(path: str | os.PathLike[str]) -> PackedDirectory:
    """Open a directory written by `packer pack`.

    Raises DataError when it is unfinished, of another format version, or when a shard is
    missing or has another size than the manifest says.
    """
    directory = Path(path)
    packed = PackedDirectory(directory, load(directory))
    for shard in packed.manifest["shards"]:
        packed.check_size(shard)
    return packed


def rows_of(column: Any) -> npt.NDArray[Any]:
    """A fixed-size column of a batch as an array [rows, max_length], without a copy."""
    width = column.type.list_size
    flat = column.values.to_numpy()[column.offset * width : (column.offset + len(column)) * width]
    rows: npt.NDArray[Any] = flat.reshape(len(column), width)
    return rows


def ragged_of(column: Any) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
    """A list column of a batch as (values, offsets int32[rows + 1]), without a copy."""
    return column.values.to_numpy(), column.offsets.to_numpy()


def segments_of(batch: Any) -> tuple[Int64, Int64, Int64]:
    """Where segments lie in a batch: (begin int64[s], length int64[s], offsets int64[rows + 1]).

    Segment k, offsets[r] <= k < offsets[r + 1], is in the places begin[k] .. begin[k] + length[k]
    of row r. With a segment multiple these are not its boundaries in cu_seqlens, which leave the
    padding between segments out.
    """
    name = PADDED_BOUNDARIES if PADDED_BOUNDARIES in batch.schema.names else "cu_seqlens"
    places, edges = ragged_of(batch.column(name))
    boundaries, real_edges = ragged_of(batch.column("cu_seqlens"))
    last = edges[1:] - 1 - edges[0]
    begin = np.delete(places[edges[0] : edges[-1]], last)
    length = np.delete(np.diff(boundaries[real_edges[0] : real_edges[-1]]), last[:-1])
    offsets = (edges - edges[0]).astype(np.int64) - np.arange(len(edges))
    return begin.astype(np.int64), length.astype(np.int64), offsets
