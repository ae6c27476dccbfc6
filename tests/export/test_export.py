"""`packer export`: every format gives back every token, label and boundary.

Formats are read here by their documented layout alone; tests/extras reads them with the trainers.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from exporting import OF_PACKED, files_of, nothing_at, rows_of_segments, table_of
from spoiling import arrow_file, edit, rewrite, tokenize
from support import assert_error, check_directory, jsonl, pack, packer, recover_documents, succeeds
from varied_results import CARRY, write_carried

from packer_cli import open_packed

# (ids, labels) of a segment or document
Piece = tuple[list[int], list[int]]
L = 64
DIRECTORIES = {
    "plain": [],
    "several units": ["--unit-bytes", "4K"],
    "multiple": ["--segment-multiple", "16"],
    "wrap": ["--strategy", "wrap"],
    "truncated left": ["--overlong", "truncate", "--truncate-side", "left"],
    "supervised": ["--shape", "tokens"],
}


@pytest.fixture(scope="module", params=DIRECTORIES)
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of 150 documents of 1 to 200 tokens; "supervised" has labels of its own."""
    folder = tmp_path_factory.mktemp("packed")
    random = np.random.default_rng(7)
    lines = []
    for length in random.integers(1, 200, 150):
        ids = random.integers(0, 1 << 31, length)
        record = {"input_ids": ids.tolist()}
        if request.param == "supervised":
            record["labels"] = np.where(random.random(length) < 0.4, -100, ids).tolist()
        lines.append(json.dumps(record))
    (folder / "data.jsonl").write_text("\n".join(lines))
    options = DIRECTORIES[request.param]
    succeeds(
        "pack", folder / "data.jsonl", "-l", L, "-o", folder / "out", "-q", *options
    )  # fmt: skip
    check_directory(folder / "out")
    return folder / "out"


def export(directory: Path, to: str, output: Path, *options: object) -> Path:
    result = succeeds("export", directory, "--to", to, "--output", output, *options)
    tokens = open_packed(directory).manifest["tokens"]
    assert result.stdout.startswith(f"{output}: ")
    assert f"{tokens:,} tokens" in result.stdout
    manifest = open_packed(directory).manifest
    lost = manifest.get("truncated_tokens", 0) + manifest.get("dropped_tokens", 0)
    joined = manifest["segments"] - manifest["documents"] if to in MASKED_DOCUMENTS else 0
    notes = [
        *([f"{lost:,} tokens that were cut off or dropped for the rows are missing"]
          if lost and to in OF_DOCUMENTS else []),
        *([f"pieces of documents are joined again; the first token of {joined:,} of them is not "
           "trained on"] if joined else []),
    ]  # fmt: skip
    assert result.stderr.splitlines() == [f"packer: --to {to}: {note}" for note in notes]
    assert [path.name for path in output.parent.iterdir()] == [output.name]
    return output


def cut(values: list[int], lengths: list[int]) -> list[list[int]]:
    ends = np.cumsum(lengths)
    assert ends[-1] == len(values)
    return [values[end - length : end] for end, length in zip(ends, lengths, strict=True)]


# --- formats of rows ---


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


def read_axolotl(folder: Path) -> list[list[Piece]]:
    """Each segment as a row of its own."""
    table = table_of(folder)
    assert list(table) == ["input_ids", "attention_mask", "labels"]
    assert table["attention_mask"] == [[1] * len(ids) for ids in table["input_ids"]]
    return [[one] for one in zip(table["input_ids"], table["labels"], strict=True)]


def read_automodel(folder: Path) -> list[list[Piece]]:
    """By the rules of `_pad_pack`: shifted labels, and padding that belongs to a segment."""
    table, rows = table_of(folder), []
    assert list(table) == ["input_ids", "labels", "position_ids", "seq_lens", "seq_lens_padded"]
    for ids, shifted, positions, lengths, padded in zip(*table.values(), strict=True):
        assert sum(padded) == len(ids) == len(shifted) == L
        assert positions == [place for length in padded for place in range(length)]
        parts = zip(cut(ids, padded), cut(shifted, padded), lengths, strict=True)
        row = []
        for its_ids, its_labels, length in parts:
            assert {*its_labels[length - 1 :]} == {-100}
            row.append((its_ids[:length], [-100, *its_labels[: length - 1]]))
        rows.append(row)
    return rows


OF_ROWS: dict[str, Callable[[Path], list[list[Piece]]]] = {
    "trl": read_trl,
    "llamafactory": read_llamafactory,
    "megatron-bridge": read_megatron_bridge,
    "axolotl": read_axolotl,
    "automodel": read_automodel,
}


@pytest.mark.parametrize("to", OF_ROWS)
def test_rows(packed: Path, tmp_path: Path, to: str) -> None:
    rows, expected = OF_ROWS[to](export(packed, to, tmp_path / "out")), rows_of_segments(packed)
    if to == "axolotl":
        expected = [[segment] for row in expected for segment in row]
    if to == "megatron-bridge":  # keeps the padding inside rows
        multiple, added = open_packed(packed).segment_multiple, []
        for row, own in zip(rows, expected, strict=True):
            for at, ((ids, labels), (real, _)) in enumerate(zip(row, own, strict=True)):
                assert len(ids) % multiple == 0
                row[at] = ids[: len(real)], labels[: len(real)]
                added.append((len(ids) - len(real), {*labels[len(real) :]}))
        assert all(size < multiple and labels <= {-100} for size, labels in added)
    assert rows == expected


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


# --- formats of documents ---


def documents_of(directory: Path) -> list[list[int]]:
    """Tokens of every document in the order of the inputs; some begin in their middle."""
    manifest = open_packed(directory).manifest
    if manifest["config"]["truncate_side"] != "left":
        return [ids.tolist() for ids in recover_documents(directory).values()]
    lines = Path(manifest["inputs"][0]["path"]).read_text().splitlines()
    return [json.loads(line)["input_ids"][-L:] for line in lines]


def read_megatron(folder: Path, name: str = "documents") -> list[list[int]]:
    index = (folder / f"{name}.idx").read_bytes()
    header, version, code, sequences, boundaries = struct.unpack_from("<9sQBQQ", index)
    assert (header, version, code) == (b"MMIDIDX\0\0", 1, 4)
    lengths = np.frombuffer(index, np.int32, sequences, 34)
    pointers = np.frombuffer(index, np.int64, sequences, 34 + 4 * sequences)
    ends = np.frombuffer(index, np.int64, boundaries, 34 + 12 * sequences)
    assert len(index) == 34 + 12 * sequences + 8 * boundaries
    assert ends.tolist() == list(range(sequences + 1))
    assert pointers.tolist() == [0, *(np.cumsum(lengths, dtype=np.int64) * 4).tolist()[:-1]]
    tokens = np.fromfile(folder / f"{name}.bin", np.int32)
    return cut(tokens.tolist(), lengths.tolist())


def test_rows_for_megatron(packed: Path, tmp_path: Path) -> None:
    """A sequence is a row: its segments end to end, then padding."""
    result = packer("export", packed, "--to", "megatron", "--rows", "-o", tmp_path / "out")
    if "labels" in (packed.parent / "data.jsonl").read_text():
        assert_error(result, 2, "are not to be trained on, which --to megatron cannot say")
        return
    expected = [[*chain(*(ids for ids, _ in row))] for row in rows_of_segments(packed)]
    pad = open_packed(packed).facts.pad_token_id
    found = read_megatron(tmp_path / "out", "rows")
    assert found == [ids + [pad] * (L - len(ids)) for ids in expected]
    assert f"{len(found) - 1:,} samples of --seq-length {L}" in result.stderr
    assert "no EOS is known" in result.stderr
    padding = len(found) * L - open_packed(packed).facts.tokens
    assert f"{padding:,} tokens are padding, {pad}: Megatron trains on them" in result.stderr


def test_rows_for_megatron_that_it_does_not_set_apart(folder: Path) -> None:
    """Pieces of a document but its last; rows are full, so there is no padding to speak of."""
    Path("a.jsonl").write_bytes(jsonl("x" * (3 * L - 1)))
    pack("a.jsonl", "-l", L, "-t", "bytes")
    assert succeeds("export", "out", "--to", "megatron", "--rows", "-o", "rows").stderr == (
        "packer: --to megatron: 2 segments do not end in EOS: Megatron does not set them apart "
        "from what follows\n"
        f"packer: --to megatron: 2 samples of --seq-length {L} in an epoch\n"
    )


def read_unpacked(folder: Path) -> list[list[int]]:
    documents: list[list[int]] = table_of(folder)["input_ids"]
    return documents


MASKED_DOCUMENTS = ("unpacked",)
OF_DOCUMENTS = {"megatron": read_megatron, "unpacked": read_unpacked}


@pytest.mark.parametrize("to", OF_DOCUMENTS)
def test_documents(packed: Path, tmp_path: Path, to: str) -> None:
    has_labels = "labels" in (packed.parent / "data.jsonl").read_text()
    if has_labels and to != "unpacked":
        result = packer("export", packed, "--to", to, "-o", tmp_path / "out")
        assert_error(result, 2, f"are not to be trained on, which --to {to} cannot say")
        return
    out = export(packed, to, tmp_path / "out")
    assert sorted(OF_DOCUMENTS[to](out)) == sorted(documents_of(packed))
    manifest = open_packed(packed).manifest
    if to == "unpacked":
        table = table_of(out)
        assert list(table) == ["input_ids", "labels"]
        trained = sum(one != -100 for own in table["labels"] for one in own)
        assert trained == manifest["trained_tokens"]
        for ids, labels in zip(*table.values(), strict=True):
            assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
    succeeds("pack", out, "-l", L, "-o", tmp_path / "again", "-q")
    # a document of one token is not trained on, as its labels say now
    expected = [ids for ids in documents_of(packed) if to != "unpacked" or len(ids) > 1]
    assert check_directory(tmp_path / "again")["tokens"] == sum(map(len, expected))
    ids = [ids.tolist() for ids in recover_documents(tmp_path / "again").values()]
    assert sorted(ids) == sorted(expected)


@pytest.mark.parametrize("to", OF_DOCUMENTS)
def test_a_document_more_or_less_shows(small: Path, to: str) -> None:
    edit(lambda manifest: manifest.update(documents=51), small)
    edit(lambda manifest: manifest["inputs"][0].update(documents=51), small)
    result = packer("export", small, "--to", to, "-o", "out")
    assert_error(result, 1, "packed: holds 50 documents, the manifest says 51")
    assert nothing_at("out")


# --- what all have in common ---


@pytest.mark.parametrize("to", ["trl", "llamafactory", "megatron-bridge"])
def test_files_of_limited_size(folder: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    """Rows come in a record batch of a unit, and here each begins a file."""
    monkeypatch.setattr("packer_cli.export.formats.PART_BYTES", 1)
    Path("data.jsonl").write_text("\n".join('{"text": "some words"}' for _ in range(200)))
    command = ["pack", "data.jsonl", "-l", L, "-t", "bytes", "-o", "packed", "-q"]
    succeeds(*command, "--unit-bytes", "1K")
    Path("alone").mkdir()
    out = export(Path("packed"), to, Path("alone/out"))
    assert len([path for path in out.rglob("*") if "-0000" in path.name]) >= 4
    assert OF_ROWS[to](out) == rows_of_segments(Path("packed"))


def test_json(small: Path) -> None:
    result = packer("export", small, "--to", "trl", "-o", "out", "--json")
    manifest = open_packed(small).manifest
    counts = {name: manifest[name] for name in ("rows", "segments", "documents", "tokens")}
    assert json.loads(result.stdout) == {"output": "out", "format": "trl"} | counts


# columns of rows; None: documents are tokenized
SOURCES = {
    "bare": "input_ids,cu_seqlens", "masked": "input_ids,cu_seqlens,segments", "tokens": None,
}  # fmt: skip
MASK = "1 of its tokens are not to be trained on, which --to "
DOCUMENTS = ("megatron", "unpacked", "documents", "olmo")
NEEDS = {  # of each source, the error by format; others are written
    "bare": {
        **dict.fromkeys(DOCUMENTS, "bare: has no column segments, which --to "),
        **dict.fromkeys(OF_ROWS, "bare: has no column labels, which --to "),
    },
    "masked": {
        **dict.fromkeys(DOCUMENTS, f"masked: {MASK}"),
        **dict.fromkeys(OF_ROWS, "masked: has no column labels, which --to "),
    },
    "tokens": {
        **dict.fromkeys((*OF_ROWS, "numpy", "parquet"), "tokens: holds documents, and --to "),
        "megatron": f"tokens: {MASK}",
    },
}


@pytest.mark.parametrize("to", OF_PACKED)
@pytest.mark.parametrize("source", SOURCES)
def test_what_a_format_needs(folder: Path, source: str, to: str) -> None:
    """A mask that no column keeps is not lost, and rows are not made of documents."""
    Path("data.jsonl").write_text('{"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}')
    columns = SOURCES[source]
    rows = ["-l", 8, "--columns", columns] if columns else []
    succeeds("pack" if columns else "tokenize", "data.jsonl", *rows, "-q", "-o", source)
    result = packer("export", source, "--to", to, "-o", "out")
    error = NEEDS[source].get(to)
    if error is None:
        assert result.exit_code == 0, result.stderr
    else:
        assert_error(result, 2, f"{error}{to}" if error.endswith(" ") else error)
        assert nothing_at("out")


# --- carried columns ---

CARRIED = ("logprobs", "rank", "top", "good", "weight", "reward")


def segments_of_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What rows with the columns of shards have in each segment."""
    found = []
    for row in rows:
        begins, ends = row["cu_seqlens_padded"], row["cu_seqlens"]
        for at, (begin, (left, right)) in enumerate(zip(begins[:-1], pairwise(ends), strict=True)):
            its = slice(begin, begin + right - left)
            names = ("input_ids", *CARRIED[:-1])
            found.append({name: row[name][its] for name in names} | {"reward": row["reward"][at]})
            assert not any(row["weight"][its.stop : begins[at + 1]])
    return found


def table_rows(folder: Path) -> list[dict[str, Any]]:
    table = table_of(folder)
    return [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]


def carried_in_trl(folder: Path) -> list[dict[str, Any]]:
    found = []
    for row in table_rows(folder):
        names = ("input_ids", *CARRIED[:-1])
        parts = [cut(row[name], row["seq_lengths"]) for name in names]
        found += [
            dict(zip((*names, "reward"), one, strict=True))
            for one in zip(*parts, row["reward"], strict=True)
        ]
    return found


def carried_in_parquet(folder: Path) -> list[dict[str, Any]]:
    (file,) = files_of(folder)
    schema = pq.read_schema(folder / file)
    kinds = [str(schema.field(name).type.value_type) for name in ("good", "weight", "reward")]
    assert kinds == ["bool", "float", "halffloat"]
    return segments_of_rows(pq.read_table(folder / file).to_pylist())


def carried_in_numpy(folder: Path) -> list[dict[str, Any]]:
    names = {name: f"carried_{name}" if name in CARRIED else name
             for name in ("input_ids", "cu_seqlens", "cu_seqlens_padded", *CARRIED)}  # fmt: skip
    columns = {}
    for name, file in names.items():
        values = np.load(folder / f"{file}.npy")
        columns[name] = values.tolist()
        if name in ("cu_seqlens", "cu_seqlens_padded", "reward"):
            edges = np.load(folder / f"{file}_offsets.npy")
            columns[name] = cut(columns[name], np.diff(edges).tolist())
    return segments_of_rows(
        [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    )


def carried_in_unpacked(folder: Path) -> list[dict[str, Any]]:
    rows = table_rows(folder)
    assert sorted(row["input_ids"][0] for row in rows) == list(range(60))
    return rows


def carried_in_documents(folder: Path) -> list[dict[str, Any]]:
    (file,) = files_of(folder)
    found: list[dict[str, Any]] = pq.read_table(folder / file).to_pylist()
    return found


OF_CARRIED: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    "trl": carried_in_trl, "parquet": carried_in_parquet, "numpy": carried_in_numpy,
    "unpacked": carried_in_unpacked, "documents": carried_in_documents,
}  # fmt: skip


@pytest.mark.parametrize("to", OF_PACKED)
def test_carried_columns(folder: Path, to: str) -> None:
    """Every value is beside its token, or its segment: all follow from the id and its place."""
    options = write_carried(folder)
    succeeds("pack", *options, "-q", "-o", "packed")
    succeeds("tokenize", "a.jsonl", *CARRY, "-q", "-o", "tokens")
    succeeds("pack", "tokens", "-l", 32, "--segment-multiple", 4, "--view", "-q", "-o", "view")
    for source in ("packed", "view", *(["tokens"] if to in ("unpacked", "documents") else [])):
        result = succeeds("export", source, "--to", to, "-o", f"{source}-out")
        if to not in OF_CARRIED:
            note = f"packer: --to {to}: has no place for carried columns, left out: logprobs, rank,"
            assert result.stderr.startswith(note)
            continue
        assert "left out" not in result.stderr
        found = OF_CARRIED[to](Path(f"{source}-out"))
        assert sum(len(one["input_ids"]) for one in found) == open_tokens("packed")
        for one in found:
            ids, places = one["input_ids"], one["rank"]
            record = ids[0] - places[0]
            assert ids == [record + place for place in places]
            assert one["logprobs"] == [-token / 8 for token in ids]
            assert one["top"] == [[place, record] for place in places]
            assert one["good"] == [token % 3 == 0 for token in ids]
            assert one["weight"] == [1 + place / 4 for place in places]
            assert one["reward"] == (record / 4 if record % 5 else 2)


def test_a_view_with_carried_columns_as_a_packed_directory(folder: Path) -> None:
    write_carried(folder)
    succeeds("tokenize", "a.jsonl", *CARRY, "-q", "-o", "tokens")
    for output, how in (("out", ()), ("view", ("--view",))):
        succeeds("pack", "tokens", "-l", 32, "-q", "-o", output, *how)
    result = packer("export", "view", "--to", "packed", "-o", "again")
    assert (result.exit_code, result.stderr) == (0, "")
    made = [check_directory(name) for name in ("out", "again")]
    assert "carried" in made[0]["shards"][0]
    assert made[0]["shards"] == made[1]["shards"]


def open_tokens(directory: str) -> int:
    tokens: int = open_packed(directory).manifest["tokens"]
    return tokens


# Tokenized directories: formats of documents


def export_tokens(to: str) -> None:
    succeeds("export", "tokens", "--to", to, "-o", to, "-q")


@pytest.fixture
def tokens(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(jsonl(*(letter * 9 for letter in "abcdefgh")))
    tokenize("a.jsonl", "-t", "bytes", "-o", "tokens", "--unit-bytes", 60)


@pytest.mark.usefixtures("tokens")
@pytest.mark.parametrize("to", ["megatron", "unpacked"])
def test_documents_are_those_of_rows_that_are_unpacked(to: str) -> None:
    export_tokens(to)
    columns = "input_ids,cu_seqlens,segments"
    pack("a.jsonl", "-l", 16, "--unit-bytes", 60, "--columns", columns, "--no-shuffle")
    succeeds("export", "out", "--to", to, "-o", "again", "-q")
    if to == "unpacked":
        assert table_of(Path(to)) == table_of(Path("again"))
        return
    assert files_of(Path(to)) == files_of(Path("again"))
    for name in files_of(Path(to)):
        assert (Path(to) / name).read_bytes() == (Path("again") / name).read_bytes()


def test_labels_say_what_is_trained_on(folder: Path) -> None:
    records = [
        {"input_ids": [1, 2, 3, 4], "labels": [-100, 2, -100, 4]},
        {"input_ids": [5, 6], "labels": [5, 6]},
        {"input_ids": [7], "labels": [-100]},
    ]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    tokenize("a.jsonl", "-o", "tokens")
    export_tokens("unpacked")
    assert table_of(Path("unpacked")) == {
        "input_ids": [[1, 2, 3, 4], [5, 6], [7]],
        "labels": [[-100, 2, -100, 4], [-100, 6], [-100]],
    }


@pytest.mark.usefixtures("tokens")
def test_damage_in_documents() -> None:
    rewrite("documents", lambda columns: columns["input_ids"].__setitem__(1, [3] * 10), "tokens")
    result = packer("export", "tokens", "--to", "unpacked", "-o", "o", "-q")
    name = arrow_file("documents", "tokens").name
    assert_error(
        result, 1, f"tokens/{name}: document 1: its content_hash is not that of its tokens"
    )
    assert nothing_at("o")


# Rows in an even order: the same, even for processes that read them in turn


EVEN = ["--order", "even", "--ranks", 4, "--micro-batches", 3]


@pytest.fixture(scope="module")
def even_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 200 rows of log-normal documents, in several shards."""
    folder = tmp_path_factory.mktemp("packed")
    random = np.random.default_rng(5)
    lengths = np.minimum(random.lognormal(3.0, 1.5, 1200).astype(int) + 2, 2000)
    lines = (json.dumps({"input_ids": random.integers(1, 1 << 20, n).tolist()}) for n in lengths)
    (folder / "data.jsonl").write_text("\n".join(lines))
    command = ["pack", folder / "data.jsonl", "-l", 256, "-o", folder / "out", "-q"]
    succeeds(*command, "--overlong", "split", "--unit-bytes", "100K")
    return folder / "out"


@pytest.mark.parametrize("to", ["trl", "llamafactory", "numpy", "parquet"])
def test_rows_are_the_same_in_an_even_order(even_rows: Path, tmp_path: Path, to: str) -> None:
    """In another order, with all of their columns."""
    orders = []
    for how in ([], EVEN):
        output = tmp_path / str(len(how))
        succeeds("export", even_rows, "--to", to, "--output", output, *how)
        if to == "parquet":
            rows: Any = pq.read_table(output).to_pylist()
        elif to == "numpy":
            rows = np.load(output / "input_ids.npy").tolist()
        else:
            columns = table_of(output / "train" if to == "llamafactory" else output).values()
            rows = zip(*columns, strict=True)
        orders.append([*map(str, rows)])
    before, after = orders
    assert len(before) == len(open_packed(even_rows)) > 150
    assert before != after
    assert sorted(before) == sorted(after)
