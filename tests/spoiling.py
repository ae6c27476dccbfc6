"""Tokenizing through the command line, and damage to what that writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from support import succeeds

from packer_cli.result.layout import digest
from packer_cli.result.manifest import checksum


def tokenize(*arguments: object) -> None:
    succeeds("tokenize", *arguments, "-q")


def arrow_file(kind: str, directory: Path | str = "out") -> Path:
    """The first shard of "documents", or the first "index"."""
    return min(Path(directory).glob(f"{kind}-*.arrow"))


def flip(path: Path, at: int) -> None:
    """Change a bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def edit(
    change: Callable[[dict[str, Any]], object],
    directory: Path | str = "out",
    *,
    signed: bool = True,
) -> None:
    """Change the manifest; `signed`: and its checksum with it, as a forger would."""
    path = Path(directory) / "manifest.json"
    manifest = json.loads(path.read_bytes())
    change(manifest)
    checked = {"sha256": checksum(manifest)} if signed else {}
    path.write_text(json.dumps(manifest | checked))


def rewrite(
    kind: str, change: Callable[[dict[str, list[Any]]], object], directory: Path | str = "out"
) -> None:
    """Write a shard with other values, and the figures of its bytes with it."""
    path = arrow_file(kind, directory)
    with pa.ipc.open_stream(path.read_bytes()) as stream:
        schema, table = stream.schema, stream.read_all()
    columns = table.to_pydict()
    change(columns)
    arrays = [pa.array(columns[field.name], field.type) for field in schema]
    with pa.ipc.new_stream(str(path), schema) as stream:
        stream.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))

    def listed(manifest: dict[str, Any]) -> None:
        for one in manifest["shards"]:
            if one["file"] == path.name:
                one["bytes"], one["sha256"] = digest(path)

    edit(listed, directory)
