"""What `packer verify` says of the result `out`, and changes to that result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from spoiling import edit
from support import ALL_COLUMNS, packer

from packer_cli.result.layout import digest

TEXTS = [
    letter * length for letter, length in zip("abcdefgh", (15, 7, 3, 3, 9, 9, 40, 5), strict=True)
]
CHAT = "".join([
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}",
    "{% if add_generation_prompt %}<assistant>{% endif %}",
])  # fmt: skip
EVERYTHING = ("-l", 16, *ALL_COLUMNS, "--segment-multiple", 4)


def first() -> str:
    """The name of the first shard, in which most tests do harm."""
    name: str = json.loads(Path("out/manifest.json").read_bytes())["shards"][0]["file"]
    return name


def problems(*options: object) -> list[str]:
    """The lines that verify prints; the exit code and stderr go with them."""
    result = packer("verify", "out", "-q", *options)
    lines: list[str] = result.stdout.splitlines()
    plural = "s" * (len(lines) != 1)
    assert result.exit_code == 1, result.stdout
    assert result.stderr.splitlines()[0] == f"error: out: {len(lines)} problem{plural}"
    assert result.stderr.splitlines()[1].startswith("tip: ")
    assert all(line.startswith("out: ") for line in lines)
    as_json = json.loads(packer("verify", "out", "-q", "--json", *options).stdout)
    assert not as_json["ok"]
    assert [f"out: {one['file']}: {one['problem']}" for one in as_json["problems"]] == lines
    return lines


def assert_sound(*options: object) -> str:
    result = packer("verify", "out", *options)
    assert (result.exit_code, result.stderr) == (0, ""), result.stdout
    assert ": OK" in result.stdout
    assert result.stdout.count("\n") == 1
    return str(result.stdout)


def forge(shard: Path, data: bytes) -> None:
    """Replace a shard, and what the manifest says of its bytes."""
    shard.write_bytes(data)
    size, sha256 = digest(shard)

    def list_it(manifest: dict[str, Any]) -> None:
        for one in manifest["shards"]:
            if one["file"] == shard.name:
                one.update(bytes=size, sha256=sha256)

    edit(list_it)


def position_in(data: pa.Buffer, buffer: Any) -> int:
    return int(buffer.address - data.address)


def changed(shard: bytes, column: str, index: int, value: int, child: int = 0) -> bytes:
    """A shard with one number of a column changed: its leaf buffer number `child`."""
    data = bytearray(shard)
    whole = pa.py_buffer(data)
    with pa.ipc.open_stream(whole) as reader:
        values = reader.read_next_batch().column(column).values
    leaf = values.field(child) if isinstance(values, pa.StructArray) else values
    kind = leaf.to_numpy().dtype
    at = position_in(whole, leaf.buffers()[1])
    np.frombuffer(data, kind, count=len(leaf), offset=at)[index] = value
    return bytes(data)
