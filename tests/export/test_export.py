"""`packer export`: every format gives back every token, label and boundary.

Formats are read here by their documented layout alone; tests/extras reads them with the trainers.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from exporting import OF_PACKED, files_of, nothing_at, table_of
from support import assert_error, check_directory, packer, recover_documents

from packer_cli import open_packed
from packer_cli.export import FORMATS
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


@functools.cache
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
    rows = read_llamafactory(export(packed, "llamafactory", tmp_path / "out"))
    assert rows == rows_of_segments(packed)


def test_megatron_bridge(packed: Path, tmp_path: Path) -> None:
    rows = read_megatron_bridge(export(packed, "megatron-bridge", tmp_path / "out"))
    expected, multiple = rows_of_segments(packed), open_packed(packed).segment_multiple
    assert {len(ids) % multiple for row in rows for ids, _ in row} == {0} or multiple == 1
    assert without_padding(rows, expected) == expected
    spare = [(ids[len(own) :], labels[len(own) :]) for a, b in zip(rows, expected, strict=True)
             for (ids, labels), (own, _) in zip(a, b, strict=True)]  # fmt: skip
    assert all(set(labels) <= {-100} and len(ids) < multiple for ids, labels in spare)


def test_axolotl(packed: Path, tmp_path: Path) -> None:
    table = table_of(export(packed, "axolotl", tmp_path / "out"))
    assert set(table) == {"input_ids", "attention_mask", "labels"}
    segments = list(zip(table["input_ids"], table["labels"], strict=True))
    assert segments == [segment for row in rows_of_segments(packed) for segment in row]
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
    out = export(Path("packed"), to, alone("out"))
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
    repacked = check_directory(tmp_path / "again")
    assert repacked["tokens"] == manifest["tokens"]
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
    description = json.loads((folder / "packer.json").read_text())
    assert description == json.loads(shards.schema.metadata[b"packer"])


def test_json(small: Path) -> None:
    result = packer("export", small, "--to", "trl", "-o", "out", "--json")
    manifest = open_packed(small).manifest
    counts = {name: manifest[name] for name in ("rows", "segments", "documents", "tokens")}
    assert json.loads(result.stdout) == {"output": "out", "format": "trl"} | counts


def test_help_names_every_format() -> None:
    text = " ".join(packer("export", "--help").stdout.split())
    assert [name for name in FORMATS if name not in text] == []


@pytest.mark.parametrize("to", OF_PACKED)
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
    table = table_of(export(Path("bare"), "unpacked", alone("a")))
    assert list(table) == ["input_ids"]


def alone(name: str) -> Path:
    Path("alone").mkdir()
    return Path("alone") / name


@pytest.mark.parametrize("to", ["megatron", "nanotron", "unpacked"])
def test_a_document_more_or_less_shows(small: Path, to: str) -> None:
    manifest = json.loads((small / "manifest.json").read_text())
    manifest["documents"] += 1
    manifest["inputs"][0]["documents"] += 1
    (small / "manifest.json").write_text(json.dumps(manifest))
    result = packer("export", small, "--to", to, "-o", "out")
    assert_error(result, 1, "packed: holds 50 documents, the manifest says 51")
    assert nothing_at("out")
