"""`packer export`: every format gives back every token, label and boundary; nothing half-written.

Formats are read here by their documented layout alone; tests/extras reads them with the trainers.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pty
import resource
import shutil
import signal
import struct
import subprocess
import termios
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from altered import altered
from support import (
    assert_error,
    check_directory,
    contents,
    packer,
    packer_process,
    packer_script,
    recover_documents,
    started,
    wait_for,
)

from packer_cli import open_packed
from packer_cli.errors import DataError
from packer_cli.export import FORMATS, destination
from packer_cli.export.destination import MARKER
from packer_cli.export.writing import lists
from packer_cli.show.rows import read_row

# (ids, labels) of a segment or document
Piece = tuple[list[int], list[int]]
L = 64
DIRECTORIES = {
    "plain": [],
    "several units": ["--unit-bytes", "4K"],
    "several shards": ["--shard-bytes", "1K"],
    "pre-shifted": ["--label-shift", "pre"],
    "multiple": ["--segment-multiple", "16"],
    "wrap": ["--strategy", "wrap"],
    "truncated left": ["--overlong", "truncate", "--truncate-side", "left"],
    "supervised": ["--shape", "tokens"],
}


@pytest.fixture(scope="module", params=DIRECTORIES)
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of 300 documents of 1 to 200 tokens; "supervised" has labels of its own."""
    folder = tmp_path_factory.mktemp("packed")
    random = np.random.default_rng(7)
    lines = []
    for length in random.integers(1, 200, 300):
        ids = random.integers(0, 1 << 31, length)
        record = {"input_ids": ids.tolist()}
        if request.param == "supervised":
            record["labels"] = np.where(random.random(length) < 0.4, -100, ids).tolist()
        lines.append(json.dumps(record))
    (folder / "data.jsonl").write_text("\n".join(lines))
    options = DIRECTORIES[request.param]
    result = packer(
        "pack", folder / "data.jsonl", "-l", L, "-o", folder / "out", "-q", *options
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    check_directory(folder / "out")
    return folder / "out"


def rows_of_segments(directory: Path) -> list[list[Piece]]:
    """What every row holds, as `packer show` finds it."""
    packed = open_packed(directory)
    rows = [read_row(packed, row).segments for row in range(len(packed))]
    return [
        [(one.ids.tolist(), np.where(one.trained, one.ids, -100).tolist()) for one in row]
        for row in rows
    ]


def export(directory: Path, to: str, output: Path) -> Path:
    result = packer("export", directory, "--to", to, "--output", output)
    assert result.exit_code == 0, result.stderr
    tokens = open_packed(directory).manifest["tokens"]
    assert result.stdout.startswith(f"{output}: ")
    assert f"{tokens:,} tokens" in result.stdout
    assert result.stderr == ""
    assert [path.name for path in output.parent.iterdir()] == [output.name]
    return output


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


def cut(values: list[int], lengths: list[int]) -> list[list[int]]:
    ends = np.cumsum(lengths)
    assert ends[-1] == len(values)
    return [values[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def read_trl(folder: Path) -> list[list[Piece]]:
    table = table_of(folder)
    assert list(table) == ["input_ids", "labels", "seq_lengths"]
    return [
        list(zip(cut(ids, lengths), cut(labels, lengths), strict=True))
        for ids, labels, lengths in zip(*table.values(), strict=True)
    ]


def read_llamafactory(folder: Path) -> list[list[Piece]]:
    assert json.loads((folder / "dataset_dict.json").read_text()) == {"splits": ["train"]}
    table = table_of(folder / "train")
    rows = []
    for ids, labels, mask, positions in zip(*table.values(), strict=True):
        assert len(ids) % 8 == 0
        assert len(ids) > L
        assert mask[-1] == 0
        used = len(mask) - mask.count(0)
        numbers, lengths = np.unique(mask[:used], return_counts=True)
        assert numbers.tolist() == list(range(1, len(numbers) + 1))
        assert mask[:used] == sorted(mask[:used])
        assert positions[:used] == [place for length in lengths for place in range(length)]
        assert positions[used:] == mask[used:] == [0] * (len(ids) - used)
        assert labels[used:] == [-100] * (len(ids) - used)
        rows.append(list(zip(cut(ids[:used], lengths), cut(labels[:used], lengths), strict=True)))
    return rows


def read_megatron_bridge(folder: Path) -> list[list[Piece]]:
    """By the rules of `GPTSFTPackedDataset.collate_fn`: inputs, targets, and their mask."""
    rows = []
    for path in sorted(folder.glob("*.idx.parquet")):
        schema = pq.read_schema(path)
        assert schema.field("loss_mask").type == pa.list_(pa.int8())
        assert schema.field("input_ids").type == pa.list_(pa.int32())
        for row in pq.read_table(path).to_pylist():
            segments = []
            edges = [*row["seq_start_id"], len(row["input_ids"])]
            assert edges[-1] - len(row["seq_start_id"]) <= L
            for begin, end in pairwise(edges):
                inputs = row["input_ids"][begin : end - 1]
                targets = row["input_ids"][begin + 1 : end]
                mask = row["loss_mask"][begin : end - 1]
                labels = [target if on else -100 for target, on in zip(targets, mask, strict=True)]
                segments.append((inputs, [-100, *labels][: len(inputs)]))
                assert labels[-1] == -100
            rows.append(segments)
    return rows


def without_padding(rows: list[list[Piece]], like: list[list[Piece]]) -> list[list[Piece]]:
    """With a segment multiple the format keeps the padding inside rows."""
    return [
        [
            (ids[: len(own)], labels[: len(own)])
            for (ids, labels), (own, _) in zip(a, b, strict=True)
        ]
        for a, b in zip(rows, like, strict=True)
    ]


def test_trl(packed: Path, tmp_path: Path) -> None:
    assert read_trl(export(packed, "trl", tmp_path / "out")) == rows_of_segments(packed)


def test_llamafactory(packed: Path, tmp_path: Path) -> None:
    found = read_llamafactory(export(packed, "llamafactory", tmp_path / "out"))
    assert found == rows_of_segments(packed)


def test_megatron_bridge(packed: Path, tmp_path: Path) -> None:
    found = read_megatron_bridge(export(packed, "megatron-bridge", tmp_path / "out"))
    expected, multiple = rows_of_segments(packed), open_packed(packed).segment_multiple
    assert {len(ids) % multiple for row in found for ids, _ in row} == {0} or multiple == 1
    assert without_padding(found, expected) == expected
    spare = [(ids[len(own) :], labels[len(own) :]) for a, b in zip(found, expected, strict=True)
             for (ids, labels), (own, _) in zip(a, b, strict=True)]  # fmt: skip
    assert all(set(labels) <= {-100} and len(ids) < multiple for ids, labels in spare)


def test_axolotl(packed: Path, tmp_path: Path) -> None:
    table = table_of(export(packed, "axolotl", tmp_path / "out"))
    assert set(table) == {"input_ids", "attention_mask", "labels"}
    found = list(zip(table["input_ids"], table["labels"], strict=True))
    assert found == [segment for row in rows_of_segments(packed) for segment in row]
    assert table["attention_mask"] == [[1] * len(ids) for ids in table["input_ids"]]


@pytest.mark.parametrize(
    ("to", "read"),
    [
        ("trl", read_trl),
        ("llamafactory", read_llamafactory),
        ("megatron-bridge", read_megatron_bridge),
    ],
)
def test_files_of_limited_size(
    folder: Path, monkeypatch: pytest.MonkeyPatch, to: str, read: Callable[[Path], Any]
) -> None:
    """Rows come in a record batch of a unit, and here each begins a file."""
    monkeypatch.setattr("packer_cli.export.writing._PART_BYTES", 1)
    Path("data.jsonl").write_text("\n".join('{"text": "some words"}' for _ in range(200)))
    command = ["pack", "data.jsonl", "-l", L, "-t", "bytes", "-o", "packed", "-q"]
    assert packer(*command, "--unit-bytes", "1K").exit_code == 0
    out = export(Path("packed"), to, _alone("out"))
    assert len([path for path in out.rglob("*") if "-0000" in path.name]) >= 4
    assert read(out) == rows_of_segments(Path("packed"))


def documents_of(directory: Path) -> list[list[int]]:
    """Tokens of every document in the order of the inputs; some begin in their middle."""
    manifest = open_packed(directory).manifest
    if manifest["config"]["truncate_side"] != "left":
        return [ids.tolist() for ids in recover_documents(directory).values()]
    lines = Path(manifest["inputs"][0]["path"]).read_text().splitlines()
    return [json.loads(line)["input_ids"][-L:] for line in lines]


def test_unpacked(packed: Path, tmp_path: Path) -> None:
    table = table_of(export(packed, "unpacked", tmp_path / "out"))
    assert list(table) == ["input_ids", "labels"]
    assert table["input_ids"] == documents_of(packed)
    manifest = open_packed(packed).manifest
    trained = sum(label != -100 for labels in table["labels"] for label in labels)
    assert trained == manifest["trained_tokens"]
    for ids, labels in zip(*table.values(), strict=True):
        assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))


def test_unpacked_is_an_input_of_the_same_documents(packed: Path, tmp_path: Path) -> None:
    manifest = open_packed(packed).manifest
    export(packed, "unpacked", tmp_path / "in")
    again = packer("pack", tmp_path / "in", "-l", L, "-o", tmp_path / "again", "-q",
                   "--keep-untrained")  # fmt: skip
    assert again.exit_code == 0, again.stderr
    found = check_directory(tmp_path / "again")
    assert found["tokens"] == manifest["tokens"]
    ids = [ids.tolist() for ids in recover_documents(tmp_path / "again").values()]
    assert ids == documents_of(packed)


def test_megatron(packed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result, folder = packer("export", packed, "--to", "megatron", "-o", out), out
    if "labels" in Path(open_packed(packed).manifest["inputs"][0]["path"]).read_text():
        assert_error(result, 2, "are not to be trained on, which --to megatron cannot say")
        return
    assert result.exit_code == 0, result.stderr
    index = (folder / "documents.idx").read_bytes()
    header, version, code, sequences, boundaries = struct.unpack_from("<9sQBQQ", index)
    assert (header, version, code) == (b"MMIDIDX\0\0", 1, 4)
    lengths = np.frombuffer(index, np.int32, sequences, 34)
    pointers = np.frombuffer(index, np.int64, sequences, 34 + 4 * sequences)
    ends = np.frombuffer(index, np.int64, boundaries, 34 + 12 * sequences)
    assert len(index) == 34 + 12 * sequences + 8 * boundaries
    assert ends.tolist() == list(range(sequences + 1))
    tokens = np.fromfile(folder / "documents.bin", np.int32)
    assert cut(tokens.tolist(), lengths.tolist()) == documents_of(packed)
    assert pointers.tolist() == [0, *(np.cumsum(lengths, dtype=np.int64) * 4).tolist()[:-1]]


def test_nanotron(packed: Path, tmp_path: Path) -> None:
    result = packer("export", packed, "--to", "nanotron", "--output", tmp_path / "out")
    if result.exit_code:
        assert_error(result, 2, "are not to be trained on, which --to nanotron cannot say")
        return
    tokens = np.fromfile(tmp_path / "out" / "00000_tokens.ds", "<u4")
    ends = np.fromfile(tmp_path / "out" / "00000_tokens.ds.index", "<u8")
    lengths = np.diff(ends.astype(np.int64), prepend=0)
    assert cut(tokens.tolist(), lengths.tolist()) == documents_of(packed)


def shards_of(directory: Path) -> Any:
    packed = open_packed(directory)
    batches = [batch for shard in packed.manifest["shards"] for batch in packed.batches(shard)]
    return pa.Table.from_batches(batches)


def test_parquet(packed: Path, tmp_path: Path) -> None:
    folder, shards = export(packed, "parquet", tmp_path / "out"), shards_of(packed)
    table = pa.concat_tables(pq.read_table(folder / name) for name in sorted(files_of(folder)))
    assert table.schema.metadata == shards.schema.metadata
    assert table.schema.field("input_ids").type.list_size == L
    table = table.cast(shards.schema)  # Parquet calls the items of a list element
    assert table.combine_chunks().equals(shards.combine_chunks())


def test_numpy(packed: Path, tmp_path: Path) -> None:
    folder, shards = export(packed, "numpy", tmp_path / "out"), shards_of(packed)
    for name in shards.column_names:
        array, expected = np.load(folder / f"{name}.npy", mmap_mode="r"), shards[name].to_pylist()
        if not (folder / f"{name}_offsets.npy").exists():
            assert array.tolist() == expected
            continue
        edges = np.load(folder / f"{name}_offsets.npy").tolist()
        if array.dtype.names:
            expected = [[tuple(one.values()) for one in row] for row in expected]
        assert cut(array.tolist(), np.diff(edges).tolist()) == expected
        assert edges[0] == 0
    said = json.loads((folder / "packer.json").read_text())
    assert said == json.loads(shards.schema.metadata[b"packer"])


@pytest.fixture
def small(folder: Path) -> Path:
    """A directory of one shard in the current directory."""
    Path("data.jsonl").write_text("\n".join('{"text": "some words"}' for _ in range(50)))
    command = ["pack", "data.jsonl", "-l", 64, "-t", "bytes", "-o", "packed", "-q"]
    assert packer(*command).exit_code == 0
    return Path("packed")


def test_json(small: Path) -> None:
    result = packer("export", small, "--to", "trl", "-o", "out", "--json")
    manifest = open_packed(small).manifest
    counts = {name: manifest[name] for name in ("rows", "segments", "documents", "tokens")}
    assert json.loads(result.stdout) == {"output": "out", "format": "trl"} | counts


def test_help_names_every_format() -> None:
    text = " ".join(packer("export", "--help").stdout.split())
    assert [name for name in FORMATS if name not in text] == []


def nothing_at(output: str) -> bool:
    """Neither a result nor what was to become one."""
    return not list(Path.cwd().glob(f"{output}*"))


@pytest.mark.parametrize("to", FORMATS)
def test_what_a_format_needs(folder: Path, to: str) -> None:
    Path("data.jsonl").write_text('{"text": "some words"}')
    command = ["pack", "data.jsonl", "-l", 64, "-t", "bytes", "-o", "packed", "-q"]
    assert packer(*command, "--columns", "input_ids,cu_seqlens").exit_code == 0
    result = packer("export", "packed", "--to", to, "-o", "out")
    if to in ("numpy", "parquet"):
        assert result.exit_code == 0
        return
    missing = "segments" if to in ("megatron", "nanotron", "unpacked") else "labels"
    assert_error(result, 2, f"packed: has no column {missing}, which --to {to} needs")
    assert nothing_at("out")


def test_a_mask_that_no_column_keeps_is_not_lost(folder: Path) -> None:
    Path("data.jsonl").write_text('{"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}')
    columns = "input_ids,cu_seqlens,segments"
    assert packer("pack", "data.jsonl", "-l", 8, "-q", "-o", "packed", "--columns", columns).stdout
    result = packer("export", "packed", "--to", "unpacked", "-o", "out")
    assert_error(result, 2, "1 of its tokens are not to be trained on, which --to unpacked cannot")
    assert packer("export", "packed", "--to", "parquet", "-o", "out").exit_code == 0


def test_unpacked_without_labels(small: Path) -> None:
    command = ["pack", "data.jsonl", "-l", 64, "-t", "bytes", "-o", "bare", "-q"]
    assert packer(*command, "--columns", "input_ids,cu_seqlens,segments").exit_code == 0
    table = table_of(export(Path("bare"), "unpacked", _alone("a")))
    assert list(table) == ["input_ids"]


def _alone(name: str) -> Path:
    Path("alone").mkdir()
    return Path("alone") / name


@pytest.mark.parametrize(
    ("output", "parts"),
    [
        pytest.param("full", ["full: is not empty, and not an export"], id="not empty"),
        pytest.param("file", ["file: exists and is not a directory"], id="a file"),
        pytest.param("packed", ["packed: lies in the directory"], id="the source"),
        pytest.param("packed/inside", ["packed/inside: lies in"], id="inside the source"),
        pytest.param("file/out", ["file/out: cannot write"], id="below a file"),
    ],
)
def test_outputs_that_are_refused(small: Path, output: str, parts: list[str]) -> None:
    Path("full").mkdir()
    Path("full/mine").touch()
    Path("file").touch()
    before = sorted(map(str, Path.cwd().rglob("*")))
    result = packer("export", small, "--to", "trl", "-o", output)
    assert_error(result, 1 if "cannot" in parts[0] else 2, *parts)
    assert sorted(map(str, Path.cwd().rglob("*"))) == before


def test_an_empty_directory_is_taken_and_its_parents_are_made(small: Path) -> None:
    Path("empty").mkdir()
    for output in ("empty", "new/and/deep"):
        assert packer("export", small, "--to", "numpy", "-o", output).exit_code == 0
        assert np.load(Path(output) / "input_ids.npy").shape[1] == 64


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        pytest.param(["packed", "--to", "tlr"], 2, "--to: 'tlr' is not one of trl", id="format"),
        pytest.param(["nowhere", "--to", "trl"], 2, "nowhere: no such directory", id="nowhere"),
        pytest.param([".", "--to", "trl"], 1, "has no manifest.json", id="not packed"),
    ],
)
def test_wrong_arguments(small: Path, arguments: list[str], code: int, part: str) -> None:
    assert_error(packer("export", *arguments, "-o", "out"), code, part)
    assert nothing_at("out")


def _shorten(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-8])


def _damage(shard: Path) -> None:
    """As long as before, but a row's boundaries are nonsense."""
    data = bytearray(shard.read_bytes())
    batch = pa.ipc.open_stream(pa.py_buffer(data)).read_next_batch()
    at = batch.column("cu_seqlens").values.buffers()[1]
    inside = bytes(at.slice(0, 16))
    place = data.index(inside)
    data[place + 4 : place + 8] = struct.pack("<i", 1 << 20)
    shard.write_bytes(data)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("harm", [_shorten, _damage, Path.unlink])
def test_a_damaged_shard_leaves_nothing(small: Path, to: str, harm: Callable[[Path], None]) -> None:
    (shard,) = small.glob("*.arrow")
    harm(shard)
    assert_error(packer("export", small, "--to", to, "-o", "out"), 1, shard.name)
    assert nothing_at("out")


@pytest.mark.parametrize("to", FORMATS)
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


@pytest.mark.parametrize("to", FORMATS)
def test_a_full_disk_leaves_nothing(small: Path, to: str) -> None:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (256, 256))

    result = packer_process("export", small, "--to", to, "-o", "out", preexec_fn=limit)
    assert result.returncode == 1, result.stderr
    assert result.stderr.startswith(b"error: out: cannot write: File too large\ntip: ")
    assert nothing_at("out")


@pytest.mark.parametrize("to", sorted({*FORMATS} - {"parquet", "megatron-bridge"}))
def test_a_disk_that_fills_up_is_an_error(packed_mid: Path, small_disk: Path, to: str) -> None:
    """Not a bus error, as of a file that is mapped; the two left out are compressed to nothing."""
    result = packer_process("export", packed_mid, "--to", to, "-o", small_disk / "out")
    assert result.returncode == 1, result.stderr
    assert b"disk/out: cannot write: No space left on device\ntip: free" in result.stderr
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


@pytest.mark.parametrize("to", ["trl", "unpacked", "numpy", "megatron-bridge", "megatron"])
def test_memory_does_not_grow_with_the_data(large: Path, folder: Path, to: str) -> None:
    """220 MB are enough, 150 of them for what is imported; maps of files do not count."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (300 << 20, 300 << 20))

    environment = os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system"}  # others reserve ahead
    result = packer_process(
        "export", large, "--to", to, "-o", "out", preexec_fn=limit, env=environment
    )
    assert result.returncode == 0, result.stderr


def test_a_termination_leaves_nothing(large: Path, folder: Path) -> None:
    command = [packer_script(), "export", str(large), "--to", "parquet", "-o", "out"]
    with started(*command, stderr=subprocess.PIPE) as run:
        assert wait_for(lambda: list(Path.cwd().glob("out.packer-partial/*/new")))
        run.send_signal(signal.SIGTERM)
        _, message = run.communicate(timeout=300)
    assert run.returncode == 130, message
    assert message.startswith(b"stopped: interrupted\ntip: ")
    assert nothing_at("out")


def test_what_a_killed_export_left_goes(large: Path, small: Path) -> None:
    with started(packer_script(), "export", str(large), "--to", "numpy", "-o", "out") as run:
        assert wait_for(lambda: list(Path.cwd().glob("out.packer-partial/*/new")))
        run.send_signal(signal.SIGSTOP)  # it is not done before the other one has begun
        at_work = packer("export", small, "--to", "trl", "-o", "out")
    assert_error(at_work, 1, "out: another run is writing there")
    assert not Path("out").exists()
    assert packer("export", small, "--to", "trl", "-o", "out").exit_code == 0
    assert table_of(Path("out"))
    assert [str(path) for path in Path().glob("out*")] == ["out"]


def test_without_locks_it_is_refused(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", flock)
    command = ["export", small, "--to", "trl", "-q", "-o", "out"]
    assert_error(packer(*command), 1, "out: cannot be locked: no locks")
    assert not Path("out").exists()
    assert packer(*command, "--no-lock").exit_code == 0
    assert table_of(Path("out"))


def test_overwrite_replaces_an_export_and_nothing_else(small: Path) -> None:
    for to in FORMATS:
        assert packer("export", small, "--to", to, "-o", "out", "--overwrite").exit_code == 0
        again = packer("export", small, "--to", to, "-o", "out")
        assert_error(again, 2, "out: holds a finished export")
        assert json.loads(Path("out", MARKER).read_text())["format"] == to
    assert list(table_of(Path("out"))) == ["input_ids", "labels"]
    Path("out/notes").write_text("mine")
    result = packer("export", small, "--to", "trl", "-o", "out", "--overwrite")
    assert_error(
        result, 2, "out: holds files that packer did not make, or that have changed: notes"
    )
    before = contents(small)
    for other in ("packed", "."):
        result = packer("export", small, "--to", "trl", "-o", other, "--overwrite")
        assert_error(result, 2, f"{other}: ")
    assert contents(small) == before
    assert Path("out/notes").read_text() == "mine"


@pytest.mark.parametrize("exchange", [True, False], ids=["one step", "two renames"])
def test_overwrite_keeps_the_earlier_export_until_the_end(
    small: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    command = ["export", small, "-o", "out", "--overwrite"]
    assert packer(*command, "--to", "numpy").exit_code == 0
    before = contents("out")
    (shard,) = small.glob("*.arrow")
    whole = shard.read_bytes()
    _damage(shard)
    assert_error(packer(*command, "--to", "trl"), 1, shard.name)
    assert contents("out") == before
    shard.write_bytes(whole)
    with monkeypatch.context() as patch:
        if exchange:
            patch.setattr(destination, "_exchange", lambda *places: _fail_at(Path("out"), "out"))
        else:
            rename = os.rename
            patch.setattr(destination, "_exchange", lambda *places: False)
            patch.setattr(
                os,
                "rename",
                lambda own, to, **at: _fail_at(Path(own), "new") or rename(own, to, **at),
            )
        assert_error(packer(*command, "--to", "trl"), 1, "out: cannot write")
    assert contents("out") == before
    assert [str(path) for path in Path().glob("out*")] == ["out"]


# A program that is packer where directories cannot be exchanged, killed between the two renames.
KILLED_BETWEEN = """
import os
from packer_cli.cli import app as cli
from packer_cli.export import destination
rename = os.rename
def renamed(own, to, **at):
    if own == "new":
        os.kill(os.getpid(), 9)
    rename(own, to, **at)
os.rename, destination._exchange = renamed, lambda *places: False
cli.main()
"""


@pytest.mark.parametrize("made", [False, True], ids=["gone", "made anew"])
def test_an_export_that_was_being_replaced_comes_back(small: Path, made: bool) -> None:
    """Also when its reader has made the directory that was gone."""
    command = ["export", str(small), "-o", "out", "--overwrite", "--to"]
    assert packer(*command, "numpy").exit_code == 0
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
    assert packer(*command, "numpy").exit_code == 0
    for to in ("trl", "numpy"):
        with subprocess.Popen([packer_script(), *command, to]) as run:
            while run.poll() is None:
                assert Path("out", MARKER).exists()
        assert json.loads(Path("out", MARKER).read_text())["format"] == to


def test_what_others_gave_such_a_name_stays(small: Path) -> None:
    for content in ({"mine": b"mine"}, {MARKER: b""}, {"owner.json": b'{"id": "x"}'}, {}):
        name = Path("out.packer-partial")
        name.mkdir()
        for file, data in content.items():
            Path(name, file).write_bytes(data)
        result = packer("export", small, "--to", "trl", "-o", "out", "--overwrite")
        assert_error(result, 2, "out.packer-partial: has no owner.json of packer's")
        assert contents(name) == content
        assert not Path("out").exists()
        shutil.rmtree(name)


def test_a_file_of_an_export_that_was_changed_is_not_replaced(small: Path) -> None:
    command = ["export", small, "-o", "out", "--overwrite", "--to"]
    assert packer(*command, "numpy").exit_code == 0
    data = bytearray(Path("out/labels.npy").read_bytes())
    data[-1] ^= 1
    Path("out/labels.npy").write_bytes(data)
    Path("out/mine").mkdir()
    before = contents("out")
    result = packer(*command, "trl")
    assert_error(result, 2, "out: holds files that packer did not make, or that have changed: mine")
    Path("out/mine").rmdir()
    assert_error(packer(*command, "trl"), 2, "that have changed: labels.npy")
    assert contents("out") == before


def test_a_removal_that_was_interrupted_goes_on(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["export", small, "-o", "out", "--overwrite", "--to"]
    assert packer(*command, "numpy").exit_code == 0
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path: _fail_at(path, "new"))
        assert packer(*command, "parquet").exit_code == 0
    assert list(Path().glob("out.packer-partial/*/new/labels.npy"))
    assert packer(*command, "trl").exit_code == 0
    assert [str(path) for path in Path().glob("out*")] == ["out"]


def _fail_at(path: Path, name: str) -> None:
    if name in path.name:
        raise OSError(errno.EIO, "broken")


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


def test_a_mount_point_is_refused_at_once(small: Path, small_disk: Path) -> None:
    Path("link").symlink_to(small_disk)
    for output in (small_disk, "link", "/"):
        result = packer("export", small, "--to", "trl", "-o", output)
        assert_error(result, 2, f"{output}: is a mount point")


def test_a_parent_that_is_not_to_be_written_is_named(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the output, which may be there, empty and ours."""

    def mkdir(path: object, *arguments: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "no")

    Path("out").mkdir()
    monkeypatch.setattr(os, "mkdir", mkdir)
    result = packer("export", small, "--to", "trl", "-o", "out")
    assert_error(result, 1, f"{Path.cwd()}: cannot write: Permission denied")


def test_a_link_is_followed(small: Path) -> None:
    Path("link").symlink_to("place")
    for to in ("trl", "numpy"):
        assert packer("export", small, "--to", to, "-o", "link", "--overwrite").exit_code == 0
    assert Path("link").readlink() == Path("place")
    assert Path("place/input_ids.npy").exists()
    Path("inside").symlink_to("packed")
    result = packer("export", small, "--to", "trl", "-o", "inside/deeper")
    assert_error(result, 2, "inside/deeper: lies in the directory that is exported")


@pytest.mark.parametrize("to", ["trl", "parquet", "unpacked"])
def test_progress_on_a_terminal_only(small: Path, to: str) -> None:
    terminal, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    command = [packer_script(), "export", small, "--to", to, "-o"]
    loud, silent = (
        subprocess.run([*command, name, *more], stdout=-1, stderr=child, check=True, timeout=300)
        for name, more in (("a", []), ("b", ["-q"]))
    )
    os.close(child)
    shown = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert shown.count("exporting: 100%") == 1
    assert loud.stdout.decode() == silent.stdout.decode().replace("b: ", "a: ")


def test_lists_that_offsets_of_32_bits_cannot_count() -> None:
    values = np.broadcast_to(np.int32(0), 1 << 31)
    with pytest.raises(DataError, match="documents of 2147483648 tokens are too long"):
        lists(np.array([0, 1 << 31]), values)


@pytest.mark.parametrize("to", ["megatron", "nanotron", "unpacked"])
def test_a_document_more_or_less_shows(small: Path, to: str) -> None:
    manifest = json.loads((small / "manifest.json").read_text())
    manifest["documents"] += 1
    manifest["inputs"][0]["documents"] += 1
    (small / "manifest.json").write_text(json.dumps(manifest))
    result = packer("export", small, "--to", to, "-o", "out")
    assert_error(result, 1, "packed: holds 50 documents, the manifest says 51")
    assert nothing_at("out")
