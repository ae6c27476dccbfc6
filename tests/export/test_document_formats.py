"""Documents for trainers that pack them: what is read back is what was tokenized.

Files are read here by their documented layout alone; tests/extras reads them with the trainers.
"""

from __future__ import annotations

import csv
import gzip
import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from exporting import files_of, table_of
from support import assert_error, jsonl, packer, succeeds
from varied_results import TEMPLATE, conversation

CARRY = [
    word
    for column in (
        "logprobs:float32", "loss_weights:float16", "top:int32[2]", "reward:bfloat16/record"
    )
    for word in ("--carry", column)
]  # fmt: skip


def record(number: int) -> dict[str, Any]:
    """Token ids that say where they belong; a third of the tokens are trained on."""
    ids = [number * 100 + place for place in range(4 + number * 7 % 23)]
    trained = [token % 3 == 0 for token in ids]
    return {
        "input_ids": ids,
        "labels": [token if one else -100 for token, one in zip(ids, trained, strict=True)],
        "logprobs": [-token / 8 for token in ids],
        "loss_weights": [token % 7 / 4 for token in ids],
        "top": [[token, number] for token in ids],
        "reward": number / 4,
    }


RECORDS = [record(number) for number in range(60)]
MASKS = [
    [0, *(int(one != -100) for one in its["labels"][1:])] for its in RECORDS
]  # the first token of a document is never trained on


@pytest.fixture(params=["tokens", "packed", "view"])
def source(folder: Path, request: pytest.FixtureRequest) -> str:
    """The records, tokenized or in rows of whole documents."""
    Path("a.jsonl").write_text("\n".join(map(json.dumps, RECORDS)))
    succeeds("tokenize", "a.jsonl", *CARRY, "-q", "-o", "tokens", "--unit-bytes", "2K")
    succeeds("pack", "a.jsonl", *CARRY, "-l", 64, "-q", "-o", "packed", "--unit-bytes", "2K")
    succeeds("pack", "tokens", "-l", 64, "--view", "-q", "-o", "view")
    return str(request.param)


def documents(folder: str, *options: str) -> list[dict[str, Any]]:
    """Export "documents" of the folder, and read them in the order of the records."""
    succeeds("export", folder, "--to", "documents", "-o", "out", "-q", *options)
    assert all(name.endswith(".parquet") for name in files_of(Path("out")))
    found = [row for name in sorted(files_of(Path("out")))
             for row in pq.read_table(f"out/{name}").to_pylist()]  # fmt: skip
    return sorted(found, key=lambda row: next(iter(row.values())))


def test_ids_masks_and_values_are_those_of_the_records(source: str) -> None:
    found = documents(source)
    columns = ["input_ids", "loss_mask", "logprobs", "loss_weights", "top", "reward"]
    for row, its, mask in zip(found, RECORDS, MASKS, strict=True):
        assert list(row) == columns
        assert row == {"loss_mask": mask} | {name: its[name] for name in columns if name in its}
    schema = pq.read_schema("out/part-00000.parquet")
    if source == "tokens":  # rows are spread over the inputs, and are read as they were packed
        table = pq.read_table("out/part-00000.parquet", columns=["input_ids"])
        assert [row["input_ids"] for row in table.to_pylist()] == [r["input_ids"] for r in RECORDS]
    kinds = [str(schema.field(name).type) for name in ("input_ids", "loss_mask", "reward")]
    assert kinds == ["list<element: int32>", "list<element: uint8>", "float"]
    assert Path("out/.packer-export").exists()  # which readers that walk folders do not take


def test_weights_at_the_predicting_token(source: str) -> None:
    """What Levanter reads; columns have other names, and other columns stay where they are."""
    renamed = ("--names", "tokens=input_ids", "--names", "mask=loss_mask")
    for row, its, mask in zip(
        documents(source, "--weights", "--shift", *renamed), RECORDS, MASKS, strict=True
    ):
        weights = [one * weight for one, weight in zip(mask, its["loss_weights"], strict=True)]
        assert row["tokens"] == its["input_ids"]
        assert row["mask"] == [*mask[1:], 0]
        assert row["loss_weights"] == [*weights[1:], 0]
        assert row["logprobs"] == its["logprobs"]


def test_without_carried_weights_they_are_those_of_the_mask(folder: Path) -> None:
    Path("a.jsonl").write_bytes(jsonl("abc", "d"))
    succeeds("tokenize", "a.jsonl", "-t", "bytes", "-q", "-o", "tokens")
    found = documents("tokens", "--weights")
    assert found == [
        {"input_ids": [97, 98, 99, 256], "loss_mask": [0, 1, 1, 1], "loss_weights": [0, 1, 1, 1]},
        {"input_ids": [100, 256], "loss_mask": [0, 1], "loss_weights": [0, 1]},
    ]


def test_weights_of_records_are_those_of_their_tokens(folder: Path) -> None:
    records = [{"input_ids": [1, 2, 3], "loss_weights": 0.5}, {"input_ids": [4], "loss_weights": 2}]
    Path("a.jsonl").write_text("\n".join(map(json.dumps, records)))
    column = "loss_weights:float32/record"
    succeeds("pack", "a.jsonl", "--carry", column, "-l", 8, "-q", "-o", "packed")
    assert [row["loss_weights"] for row in documents("packed", "--weights")] == [[0, 0.5, 0.5], [0]]
    found = documents("packed", "--shift", "--overwrite")
    assert [row["loss_weights"] for row in found] == [[0.5, 0.5, 0], [0]]
    assert [row["loss_weights"] for row in documents("packed", "--overwrite")] == [0.5, 2]


def test_several_weights_of_a_token_are_kept_as_they_are(folder: Path) -> None:
    Path("a.jsonl").write_text('{"input_ids": [1, 2], "loss_weights": [[1, 2], [3, 4]]}')
    succeeds("tokenize", "a.jsonl", "--carry", "loss_weights:float32[2]", "-q", "-o", "tokens")
    for option in ("--weights", "--shift"):
        result = packer("export", "tokens", "--to", "documents", option, "-o", "out")
        assert_error(result, 2, f"{option}: loss_weights:float32[2]/token has several values")
    assert documents("tokens")[0]["loss_weights"] == [[1, 2], [3, 4]]


def test_rows_without_labels_are_trained_on_but_for_first_tokens(folder: Path) -> None:
    """Also where a document was cut."""
    Path("a.jsonl").write_text(json.dumps({"input_ids": [1] * 20}))
    columns = ("--columns", "input_ids,cu_seqlens,segments")
    succeeds("pack", "a.jsonl", "-l", 8, "--overlong", "split", *columns, "-q", "-o", "packed")
    assert "trained on" not in packer("export", "packed", "--to", "olmo", "-o", "arrays").stderr
    assert "part-00000.mask.npy" not in files_of(Path("arrays"))
    assert packer("export", "packed", "--to", "documents", "-o", "out").stderr == ""
    assert documents("packed", "--overwrite")[0]["loss_mask"] == [0] + [1] * 19


def test_packer_reads_its_own_documents(source: str) -> None:
    documents(source)
    succeeds("tokenize", "out", *CARRY, "-q", "-o", "again")
    succeeds("export", "again", "--to", "documents", "-o", "twice", "-q")
    tables = [pq.read_table(f"{name}/part-00000.parquet") for name in ("out", "twice")]
    assert tables[0].equals(tables[1])


def test_conversations_keep_their_masks(folder: Path) -> None:
    lines = [json.dumps(conversation(number)) for number in range(40)]
    Path("a.jsonl").write_text("\n".join(lines))
    Path("t.jinja").write_text(TEMPLATE)
    how = ("-t", "bytes", "--chat-template", "t.jinja", "-q")
    succeeds("tokenize", "a.jsonl", *how, "-o", "tokens")
    succeeds("export", "tokens", "--to", "unpacked", "-o", "expected", "-q")
    expected = table_of(Path("expected"))
    succeeds("export", "tokens", "--to", "documents", "-o", "out", "-q")
    table = pq.read_table("out/part-00000.parquet").to_pydict()
    assert table["input_ids"] == expected["input_ids"]
    masks = [[int(one != -100) for one in labels] for labels in expected["labels"]]
    assert table["loss_mask"] == masks
    assert any(map(any, masks))


def test_row_groups_are_limited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One document is larger than a group, and has one of its own."""
    monkeypatch.setattr("packer_cli.export.document_formats._GROUP_BYTES", 1000)
    lengths = [10, 30, 500, 40, 60, 70, 80, 90, 100, 5]
    Path("a.jsonl").write_bytes(jsonl(*("x" * (length - 1) for length in lengths)))
    succeeds("tokenize", "a.jsonl", "-t", "bytes", "-q", "-o", "tokens", "--unit-bytes", 300)
    found = [len(row["input_ids"]) for row in documents("tokens")]
    assert sorted(found) == sorted(lengths)
    file = pq.ParquetFile("out/part-00000.parquet")
    groups = [file.read_row_group(group).column(0) for group in range(file.num_row_groups)]
    sizes = [sum(5 * len(ids) + 8 for ids in group.to_pylist()) for group in groups]
    assert max(sizes) == 5 * 500 + 8
    assert sorted(sizes)[-2] <= 1000
    assert len(sizes) == 5


# --- arrays for OLMo-core


def test_olmo(source: str) -> None:
    succeeds("export", source, "--to", "olmo", "-o", "out", "-q")
    assert files_of(Path("out")) == {f"part-00000{end}" for end in (".npy", ".csv.gz", ".mask.npy")}
    ids = np.fromfile("out/part-00000.npy", np.uint32)  # no vocabulary is known
    mask = np.fromfile("out/part-00000.mask.npy", bool)
    with gzip.open("out/part-00000.csv.gz", "rt") as file:
        lines = list(csv.reader(file))
    end, found = 0, {}
    starts = [0]
    for line in Path("a.jsonl").read_bytes().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for first, last, name, origin, position in lines:
        assert int(first) == end
        end = int(last)
        number = int(ids[int(first)]) // 100
        assert (name, origin, position) == (
            f"a.jsonl:{position}",
            "a.jsonl",
            str(starts[number]),
        ) or source == "view"
        found[number] = ids[int(first) : end].tolist(), mask[int(first) : end].tolist()
    assert end == len(ids) == len(mask)
    assert [found[number] for number in range(60)] == [
        (its["input_ids"], its_mask) for its, its_mask in zip(RECORDS, MASKS, strict=True)
    ]


def test_the_audit_reads_the_masks(source: str) -> None:
    succeeds("export", source, "--to", "olmo", "-o", "out", "-q")
    said = packer("audit", "out").stdout
    assert "columns      input_ids, loss_mask; labels are at their own token" in said
    assert "left out" not in said


def test_olmo_of_a_small_vocabulary(folder: Path) -> None:
    """All tokens are trained on but the first, so there is no mask; sources have their names."""
    for name in ("a", "b"):
        Path(f"{name}.jsonl").write_bytes(jsonl(*(f"{name}{number}" for number in range(9))))
    Path("mix.toml").write_text(
        "".join(f'[[source]]\nname = "{name}1"\ninputs = ["{name}.jsonl"]\n' for name in "ab")
    )
    succeeds("pack", "mix.toml", "-t", "bytes", "-l", 64, "-q", "-o", "packed")
    result = succeeds("export", "packed", "--to", "olmo", "-o", "out")
    assert result.stderr == ""
    assert files_of(Path("out")) == {"part-00000.npy", "part-00000.csv.gz"}
    assert len(np.fromfile("out/part-00000.npy", np.uint16)) == 18 * 3
    with gzip.open("out/part-00000.csv.gz", "rt") as file:
        assert [line[3] for line in csv.reader(file)] == ["a1"] * 9 + ["b1"] * 9


@pytest.mark.parametrize(("highest", "kind"), [(65_535, np.uint16), (65_536, np.uint32)])
def test_olmo_of_a_vocabulary_with_gaps(folder: Path, highest: int, kind: Any) -> None:
    """Its highest id decides, not how many tokens it has."""
    vocabulary = {"<eos>": 0, "a": 1, "b": highest}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<eos>"}
    tokenizer = {"model": model, "pre_tokenizer": {"type": "WhitespaceSplit"}, "added_tokens": []}
    Path("tokenizer.json").write_text(json.dumps(tokenizer))
    Path("a.jsonl").write_bytes(jsonl("a b a"))
    how = ("-t", "tokenizer.json", "--eos-token", "<eos>", "-q")
    succeeds("tokenize", "a.jsonl", *how, "-o", "tokens")
    succeeds("export", "tokens", "--to", "olmo", "-o", "out", "-q")
    assert np.fromfile("out/part-00000.npy", kind).tolist() == [1, highest, 1, 0]


def test_lines_of_olmo_are_lines_whatever_inputs_are_called(folder: Path) -> None:
    Path("a, \n b.jsonl").write_bytes(jsonl("a", "b"))
    succeeds("tokenize", "a, \n b.jsonl", "-t", "bytes", "-q", "-o", "tokens")
    succeeds("export", "tokens", "--to", "olmo", "-o", "out", "-q")
    with gzip.open("out/part-00000.csv.gz", "rt") as file:
        lines = file.readlines()
    assert [line.split(",")[:2] for line in lines] == [["0", "2"], ["2", "4"]]
    assert [line[3] for line in csv.reader(lines)] == ["a, \\n b.jsonl"] * 2


def test_olmo_says_where_eos_is_not_at_the_end(folder: Path) -> None:
    Path("a.jsonl").write_bytes(jsonl("a", "b<eos>c", "d"))
    how = ("-t", "bytes", "-q")
    succeeds("tokenize", "a.jsonl", *how, "-o", "tokens", "--no-eos")
    result = succeeds("export", "tokens", "--to", "olmo", "-o", "out")
    assert "3 documents do not end in EOS" in result.stderr
    Path("ids.jsonl").write_text('{"input_ids": [1, 2]}')
    succeeds("tokenize", "ids.jsonl", "-q", "-o", "ids")
    result = succeeds("export", "ids", "--to", "olmo", "-o", "of-ids")
    assert "no EOS is known" in result.stderr
    assert "1 documents" not in result.stderr


def test_parts_hold_whole_documents(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packer_cli.export.document_formats.PART_BYTES", 100)
    Path("a.jsonl").write_bytes(jsonl(*("x" * 39 for _ in range(9))))
    succeeds("tokenize", "a.jsonl", "-t", "bytes", "-q", "-o", "tokens", "--unit-bytes", 60)
    succeeds("export", "tokens", "--to", "olmo", "-o", "out", "-q")
    lengths = {}
    for name in sorted(files_of(Path("out"))):
        if name.endswith(".csv.gz"):
            with gzip.open(f"out/{name}", "rt") as file:
                ends = [int(end) for _, end, *_ in csv.reader(file)]
            tokens = np.fromfile(f"out/{name[:10]}.npy", np.uint16)
            assert ends[-1] == len(tokens)
            lengths[name] = np.diff([0, *ends]).tolist()
    assert [*chain(*lengths.values())] == [40] * 9
    assert len(lengths) > 3


# --- what is refused, and what is said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--to", "trl", "--shift"), "--shift: --to trl has no use for it"),
        (("--to", "olmo", "--rows"), "--rows: --to olmo has no use for it"),
        (("--to", "documents", "--names", "x=ids"), "--names: "),
        (("--to", "documents", "--names", "loss_mask=input_ids"), "would be called loss_mask"),
        (
            ("--to", "documents", "--names", "a=input_ids", "--names", "b=input_ids"),
            "--names: a column has two names",
        ),
        (
            ("--to", "megatron", "--rows"),
            "holds documents, and --to megatron --rows is a format of rows",
        ),
    ],
)
def test_it_is_refused(folder: Path, options: tuple[str, ...], message: str) -> None:
    Path("a.jsonl").write_bytes(jsonl("abc", "d"))
    succeeds("tokenize", "a.jsonl", "-t", "bytes", "-q", "-o", "tokens")
    assert_error(packer("export", "tokens", *options, "-o", "out"), 2, message)
    assert not Path("out").exists()


@pytest.mark.parametrize("options", [("documents", "--shift"), ("megatron-bridge",)])
def test_masks_of_the_next_token_are_not_packed_as_masks(
    folder: Path, options: tuple[str, ...]
) -> None:
    Path("a.jsonl").write_bytes(jsonl("abc", "d"))
    succeeds("pack", "a.jsonl", "-t", "bytes", "-l", 16, "-q", "-o", "packed")
    succeeds("export", "packed", "--to", *options, "-q", "-o", "out")
    result = packer("pack", "out", "-l", 16, "-q", "-o", "again")
    assert_error(result, 2, "its loss_mask is that of the next token")
