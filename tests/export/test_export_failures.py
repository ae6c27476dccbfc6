"""`packer export` on full disks, of damaged rows, killed: nothing is left half-written."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from altered import unaltered
from exporting import OF_PACKED, damage, nothing_at
from support import assert_error, heavy, packer, packer_process

from packer_cli import open_packed


def shorten(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-8])


@pytest.mark.parametrize("to", ["trl", "megatron", "parquet"])  # rows, documents and batches
@pytest.mark.parametrize("harm", [shorten, damage, Path.unlink])
def test_a_damaged_shard_leaves_nothing(small: Path, to: str, harm: Callable[[Path], None]) -> None:
    (shard,) = small.glob("*.arrow")
    harm(shard)
    assert_error(packer("export", small, "--to", to, "-o", "out"), 1, shard.name)
    assert nothing_at("out")


@pytest.mark.parametrize("to", OF_PACKED)
def test_a_lost_segment_shows(small: Path, to: str) -> None:
    """Two segments become one: every row is sound by itself."""
    (shard,) = small.glob("*.arrow")
    packed = open_packed(small)
    entry = packed.manifest["shards"][0]
    batches = list(packed.batches(entry))
    rows = pa.Table.from_batches(batches)
    lists = [[0, row[-1]] for row in rows["cu_seqlens"].to_pylist()]
    sources = [row[:1] for row in rows["segments"].to_pylist()]
    columns = {name: rows[name].combine_chunks() for name in rows.column_names}
    columns["cu_seqlens"] = pa.array(lists, rows.schema.field("cu_seqlens").type)
    columns["segments"] = pa.array(sources, rows.schema.field("segments").type)
    with pa.ipc.new_stream(str(shard), rows.schema) as stream:
        stream.write_table(pa.table(columns, rows.schema))
    manifest = json.loads((small / "manifest.json").read_text())
    manifest["shards"][0]["bytes"] = shard.stat().st_size
    (small / "manifest.json").write_text(json.dumps(manifest))
    result = packer("export", small, "--to", to, "-o", "out")
    assert_error(result, 1, f"{shard.name}: holds {entry['rows']} segments, the manifest says")
    assert nothing_at("out")


@pytest.mark.parametrize("to", sorted({*OF_PACKED} - {"parquet", "megatron-bridge"}))
def test_a_disk_that_fills_up_leaves_nothing(packed_mid: Path, small_disk: Path, to: str) -> None:
    """No bus error, as of a file that is mapped; the two left out are compressed to nothing."""
    result = unaltered("export", packed_mid, "--to", to, "-o", small_disk / "out")
    assert result.returncode == 1, result.stderr
    assert "disk/out: cannot write: No space left on device\ntip: free" in result.stderr
    assert list(small_disk.iterdir()) == []


@pytest.fixture(scope="module")
def packed_mid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """130,000 tokens, more than a small disk holds."""
    folder = tmp_path_factory.mktemp("mid")
    (folder / "data.jsonl").write_text((json.dumps({"text": "word " * 25}) + "\n") * 1000)
    command = ["pack", folder / "data.jsonl", "-l", 512, "-t", "bytes", "-o", folder / "out", "-q"]
    assert packer(*command).exit_code == 0
    return folder / "out"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 million tokens, 355 MB."""
    folder = tmp_path_factory.mktemp("large")
    line = json.dumps({"text": "word " * 400}) + "\n"
    (folder / "data.jsonl").write_text(line * 20_000)
    command = ["pack", folder / "data.jsonl", "-l", 512, "-t", "bytes", "-o", folder / "out", "-q"]
    assert packer(*command).exit_code == 0
    return folder / "out"


@pytest.mark.parametrize(
    "to", ["numpy", *map(heavy, ("trl", "unpacked", "megatron-bridge", "megatron"))]
)
def test_memory_does_not_grow_with_the_data(large: Path, folder: Path, to: str) -> None:
    """220 MB are enough, 150 of them for what is imported; maps of files do not count."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (300 << 20, 300 << 20))

    environment = os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system"}  # others reserve ahead
    result = packer_process(
        "export", large, "--to", to, "-o", "out", preexec_fn=limit, env=environment
    )
    assert result.returncode == 0, result.stderr
