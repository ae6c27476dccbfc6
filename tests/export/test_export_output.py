"""Where `packer export` writes: what it refuses, what takes the place of an earlier export; and
that a failure leaves nothing.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from altered import altered, begun, faulty, unaltered
from exporting import damage, nothing_at, table_of
from spoiling import edit
from support import assert_error, contents, heavy, packer, packer_process, succeeds

from packer_cli import open_packed
from packer_cli.export import FORMATS, MARKER

# What is refused: options, the exit code and the error.
REFUSED = """
packed -o full --to trl                   | 2 | full: is not empty, and not an export
packed -o full --to trl --overwrite       | 2 | full: is not empty, and not an export
packed -o file --to trl                   | 2 | file: exists and is not a directory
packed -o file/out --to trl               | 1 | file/out: cannot write
packed -o packed --to trl --overwrite     | 2 | packed: lies in the directory
packed -o packed/in --to trl              | 2 | packed/in: lies in
packed -o inside/deeper --to trl          | 2 | inside/deeper: lies in the directory that is
packed -o / --to trl                      | 2 | /: is a mount point
packed -o file://HERE/packed --to trl     | 2 | packed: lies in the directory
packed -o . --to trl --overwrite          | 2 | .: is not empty, and not an export
packed -o other --to trl --overwrite      | 2 | other: holds a finished result, and --overwrite
. -o out --to trl                         | 1 | has no manifest.json
"""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_it_is_refused_and_nothing_is_written(small: Path, line: str) -> None:
    Path("full").mkdir()
    Path("full/mine").touch()
    Path("file").touch()
    Path("inside").symlink_to("packed")
    shutil.copytree("packed", "other")
    before = sorted(map(str, Path.cwd().rglob("*")))
    command, code, error = (part.strip() for part in line.split(" | "))
    command = command.replace("HERE", str(Path.cwd()))
    assert_error(packer("export", *command.split()), int(code), error)
    assert sorted(map(str, Path.cwd().rglob("*"))) == before


def test_where_it_is_written(small: Path) -> None:
    """Into an empty directory, below new ones, and where a link leads."""
    Path("empty").mkdir()
    Path("link").symlink_to("place")
    for output in ("empty", "new/and/deep", "link", "link"):
        succeeds("export", small, "--to", "numpy", "-o", output, "--overwrite")
        assert np.load(Path(output) / "input_ids.npy").shape[1] == 64
    assert Path("link").readlink() == Path("place")


def test_overwrite_replaces_an_export_and_nothing_else(small: Path) -> None:
    command = ["export", small, "-o", "out", "--to"]
    for to in ("numpy", "unpacked"):
        succeeds(*command, to, "--overwrite")
        assert_error(packer(*command, to), 2, "out: holds a finished export")
        assert json.loads(Path("out", MARKER).read_text())["format"] == to
    assert list(table_of(Path("out"))) == ["input_ids", "labels"]
    earlier, (shard,) = contents("out"), small.glob("*.arrow")
    Path("out/mine").mkdir()
    Path("out/notes").write_text("mine")
    with Path("out/state.json").open("ab") as file:
        file.write(b"mine")
    changed = contents("out")
    result = packer(*command, "trl", "--overwrite")
    others = "holds files that packer did not make, or that have changed: mine, notes, state.json"
    assert_error(result, 2, f"out: {others}")
    assert contents("out") == changed
    Path("out/mine").rmdir()
    Path("out/notes").unlink()
    Path("out/state.json").write_bytes(earlier["state.json"])
    damage(shard)
    result = packer(*command, "trl", "--overwrite")
    assert_error(result, 1, shard.name)  # and the earlier export stays
    assert contents("out") == earlier


# A program that is packer where directories cannot be exchanged, killed between the two renames.
KILLED_BETWEEN = """
import os
from packer_cli.cli import app as cli
import packer_cli.export
rename = os.rename
def renamed(own, to):
    if own.name == "new":
        os.kill(os.getpid(), 9)
    rename(own, to)
os.rename, packer_cli.export._exchange = renamed, lambda *places: False
cli.main()
"""


@pytest.mark.parametrize("made", [False, True], ids=["gone", "made anew"])
def test_an_export_that_was_being_replaced_comes_back(small: Path, made: bool) -> None:
    """Also when its reader has made the directory that was gone."""
    command = ["export", str(small), "-o", "out", "--overwrite", "--to"]
    succeeds(*command, "numpy")
    before = contents("out")
    killed = altered(KILLED_BETWEEN, *command, "trl")
    assert killed.returncode == -signal.SIGKILL
    assert not Path("out").exists()
    if made:
        Path("out").mkdir()
    result = packer("export", small, "-o", "out", "--to", "trl")
    assert_error(result, 2, "out: holds a finished export")
    assert contents("out") == before
    assert [str(path) for path in Path().glob("out*")] == ["out"]


def test_readers_of_an_export_find_one_or_the_other(small: Path) -> None:
    """The two change places in one step."""
    command = ["export", str(small), "-o", "out", "--overwrite", "-q", "--to"]
    succeeds(*command, "numpy")
    for to in ("trl", "numpy"):
        run = begun([*command, to])
        while run.poll() is None:
            assert Path("out", MARKER).exists()
            time.sleep(0.0001)
        assert json.loads(Path("out", MARKER).read_text())["format"] == to


@pytest.mark.parametrize("name", ["notes.txt", "mine/data-00000.arrow"])
def test_what_others_put_into_a_half_made_export_stays(small: Path, name: str) -> None:
    command = ["export", str(small), "-o", "out", "--to", "trl"]
    faulty("at_step(5, kill)", *command)
    (work,) = Path().glob("out.packer-partial/*/new")
    assert list(work.iterdir())
    mine = work / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_bytes(b"mine")
    assert_error(packer(*command), 2, "new: holds files that packer did not make, or", name)
    assert mine.read_bytes() == b"mine"
    mine.unlink()
    if mine.parent.name == "mine":
        mine.parent.rmdir()
    succeeds(*command)
    assert not Path("out.packer-partial").exists()


def test_what_got_into_the_output_meanwhile_stays(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(self: Any, part: Any) -> None:
        Path("out").mkdir()
        Path("out/mine").touch()

    monkeypatch.setattr(FORMATS["trl"], "write", write)
    result = packer("export", small, "--to", "trl", "-o", "out", "--overwrite")
    assert_error(result, 2, "out: is not empty, and not an export of packer")
    assert Path("out/mine").exists()
    assert not Path("out.packer-partial").exists()


# --- full disks and damaged rows: nothing is left half-written ---


def shorten(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-8])


@pytest.mark.parametrize(
    ("to", "harm"),  # rows, documents and batches
    [("trl", shorten), ("trl", damage), ("megatron", damage), ("parquet", Path.unlink)],
)
def test_a_damaged_shard_leaves_nothing(small: Path, to: str, harm: Callable[[Path], None]) -> None:
    (shard,) = small.glob("*.arrow")
    harm(shard)
    assert_error(packer("export", small, "--to", to, "-o", "out"), 1, shard.name)
    assert nothing_at("out")


@pytest.mark.parametrize("to", ["trl", "numpy", "megatron"])
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
    edit(lambda manifest: manifest["shards"][0].update(bytes=shard.stat().st_size), small)
    result = packer("export", small, "--to", to, "-o", "out")
    assert_error(result, 1, f"{shard.name}: holds {entry['rows']} segments, the manifest says")
    assert nothing_at("out")


@pytest.mark.parametrize("to", ["trl", "numpy", "megatron"])
def test_a_disk_that_fills_up_leaves_nothing(packed_mid: Path, small_disk: Path, to: str) -> None:
    """No bus error, as of a file that is mapped."""
    result = unaltered("export", packed_mid, "--to", to, "-o", small_disk / "out")
    assert result.returncode == 1, result.stderr
    assert "disk/out: cannot write: No space left on device\ntip: free" in result.stderr
    assert list(small_disk.iterdir()) == []


@pytest.fixture(scope="module")
def packed_mid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """130,000 tokens, more than a small disk holds."""
    folder = tmp_path_factory.mktemp("mid")
    (folder / "data.jsonl").write_text((json.dumps({"text": "word " * 25}) + "\n") * 1000)
    succeeds("pack", folder / "data.jsonl", "-l", 512, "-t", "bytes", "-o", folder / "out", "-q")
    return folder / "out"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 million tokens, 355 MB."""
    folder = tmp_path_factory.mktemp("large")
    line = json.dumps({"text": "word " * 400}) + "\n"
    (folder / "data.jsonl").write_text(line * 20_000)
    succeeds("pack", folder / "data.jsonl", "-l", 512, "-t", "bytes", "-o", folder / "out", "-q")
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
