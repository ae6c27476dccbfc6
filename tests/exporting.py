"""What tests of `packer export` share."""

from __future__ import annotations

import functools
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from packer_cli import open_packed
from packer_cli.export import FORMATS, MARKER
from packer_cli.reports.show import read_row

# Only of a view is there a packed directory to make: tests/result/test_views.py.
OF_PACKED = [name for name in FORMATS if name != "packed"]


def files_of(folder: Path) -> set[str]:
    """Their names, without the one that packer itself goes by."""
    return {path.name for path in folder.iterdir()} - {MARKER}


def table_of(saved: Path) -> dict[str, Any]:
    """Columns of a directory made for load_from_disk."""
    state = json.loads((saved / "state.json").read_text())
    names = [file["filename"] for file in state["_data_files"]]
    assert {*names, "state.json", "dataset_info.json"} == files_of(saved)
    tables = [pa.ipc.open_stream(pa.memory_map(str(saved / name))).read_all() for name in names]
    return {name: pa.concat_tables(tables)[name].to_pylist() for name in tables[0].column_names}


@functools.cache
def rows_of_segments(directory: Path) -> list[list[tuple[list[int], list[int]]]]:
    """(ids, labels) of the segments of every row, as `packer show` finds them."""
    packed = open_packed(directory)
    rows = [read_row(packed, row).segments for row in range(len(packed))]
    return [
        [(one.ids.tolist(), np.where(one.trained, one.ids, -100).tolist()) for one in row]
        for row in rows
    ]


def nothing_at(output: str) -> bool:
    """Neither a result nor what was to become one."""
    return not list(Path.cwd().glob(f"{output}*"))


def damage(shard: Path) -> None:
    """As long as before, but a row's boundaries are nonsense."""
    data = bytearray(shard.read_bytes())
    batch = pa.ipc.open_stream(pa.py_buffer(data)).read_next_batch()
    at = batch.column("cu_seqlens").values.buffers()[1]
    inside = bytes(at.slice(0, 16))
    place = data.index(inside)
    data[place + 4 : place + 8] = struct.pack("<i", 1 << 20)
    shard.write_bytes(data)
