"""Records that are token ids already, from JSON lines and from columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny_tokenizers as tiny
from altered import unaltered
from support import assert_error, check_directory, pack, packer, recover_documents

from packer_cli import open_packed

pytestmark = pytest.mark.usefixtures("folder")

IDS = [[5, 6, 7], [], [8], [1, 2, 3]]
LABELS = [[-100, 6, -100], [], [8], [1, -100, 3]]
MASK = [[1, 1, 1], [], [1], [0, 1, 1]]


def id_columns(kind: str) -> dict[str, Any]:
    types = {
        "list": pa.list_(pa.int64()),
        "large_list": pa.large_list(pa.uint16()),
        "list of uint32": pa.list_(pa.uint32()),
    }
    small = {"list": pa.list_(pa.int8()), "large_list": pa.large_list(pa.int16())}
    return {
        "input_ids": pa.array(IDS, types[kind]),
        "labels": pa.array(LABELS, small.get(kind, pa.list_(pa.int32()))),
        "attention_mask": pa.array(MASK, pa.list_(pa.uint8())),
    }


def labels_of(directory: str) -> list[list[int]]:
    packed = open_packed(directory)
    batches = (batch for shard in packed.manifest["shards"] for batch in packed.batches(shard))
    return [row for batch in batches for row in batch.column("labels").to_pylist()]


@pytest.mark.parametrize("kind", ["jsonl", "list", "large_list", "list of uint32"])
def test_token_ids_with_labels_and_mask(folder: Path, kind: str) -> None:
    if kind == "jsonl":
        names = ("input_ids", "labels", "attention_mask")
        rows = [dict(zip(names, row, strict=True)) for row in zip(IDS, LABELS, MASK, strict=True)]
        (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
        name = "a.jsonl"
    else:
        pq.write_table(pa.table(id_columns(kind)), folder / "a.parquet")
        name = "a.parquet"
    result = packer("pack", name, "-l", 6, "--strategy", "next-fit", "-q", "-o", "out")
    assert result.exit_code == 0, result.stderr
    manifest = check_directory("out")
    assert [tokens.tolist() for tokens in recover_documents("out").values()] == [
        [5, 6, 7], [2, 3],  # the empty one is not packed; masked tokens are padding
    ]  # fmt: skip
    # the first token of a segment is never trained on, so of [8] nothing is
    assert labels_of("out") == [[-100, 6, -100, -100, 3, -100]]
    assert (manifest["empty_documents"], manifest["trained_tokens"]) == (1, 2)
    assert manifest["untrained_documents"] == 1
    assert manifest["tokenizer"] is None
    assert manifest["config"]["add_eos"] is False  # none is appended to ids


def test_token_ids_of_fixed_size_without_labels(folder: Path) -> None:
    ids = pa.array([[1, 2, 3], [4, 5, 6]], pa.list_(pa.int32(), 3))
    pq.write_table(pa.table({"input_ids": ids}), folder / "a.parquet")
    pack("a.parquet", "-l", 4)
    documents = recover_documents("out")
    assert {place: tokens.tolist() for place, tokens in documents.items()} == {
        (0, 0): [1, 2, 3],
        (0, 1): [4, 5, 6],
    }


def test_labels_of_some_json_lines_only(folder: Path) -> None:
    (folder / "a.jsonl").write_text(
        '{"input_ids": [1, 2]}\n'
        '{"input_ids": [3, 4, 5], "labels": [3, -100, 5]}\n'
        '{"input_ids": [6, 7], "attention_mask": [1, 0], "labels": null}\n'
    )
    pack("a.jsonl", "-l", 6, "--strategy", "next-fit")
    assert labels_of("out") == [[-100, 2, -100, -100, 5, -100]]


def test_null_labels_and_masks_of_columns_are_as_if_not_there(folder: Path) -> None:
    kind = pa.list_(pa.int64())
    columns = {
        "input_ids": pa.array([[1, 2], [3, 4, 5], [6, 7], None], kind),
        "labels": pa.array([None, [3, -100, 5], None, None], kind),
        "attention_mask": pa.array([None, None, [1, 0], None], kind),
    }
    pq.write_table(pa.table(columns), folder / "a.parquet")
    options = ["-l", 6, "--strategy", "next-fit", "--on-error", "skip"]
    assert pack("a.parquet", *options)["rejected_records"] == 1
    assert labels_of("out") == [[-100, 2, -100, -100, 5, -100]]


BAD_IDS = [
    ([1, -2], None, None, "input_ids[1] is -2, not between 0 and 2147483647"),
    ([1 << 31], None, None, "input_ids[0] is 2147483648, not between 0 and 2147483647"),
    ([1 << 63], None, None, "input_ids[0] is a number of 63 bits or more, not between 0"),
    ([1, 2], [1], None, "labels has 1 values, input_ids 2"),
    ([1, 2], [2, -100], None, "labels[0] is 2, neither -100 nor input_ids[0] = 1"),
    ([1, 2], None, [1], "attention_mask has 1 values, input_ids 2"),
    ([1, 2], None, [1, 2], "attention_mask[1] is 2, not 0 or 1"),
]


@pytest.mark.parametrize(("ids", "labels", "mask", "message"), BAD_IDS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_bad_token_ids(
    folder: Path, name: str, ids: Any, labels: Any, mask: Any, message: str
) -> None:
    given = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    row = {field: values for field, values in given.items() if values is not None}
    good = {field: [1, 1] for field in row}
    if name == "a.jsonl":
        (folder / name).write_text(f"{json.dumps(good)}\n{json.dumps(row)}\n{json.dumps(good)}")
        place = "a.jsonl, line 2"
    else:
        kind = pa.uint64() if max(ids) >= 1 << 63 else pa.int64()
        columns = {
            field: pa.array([[1, 1], values, [1, 1]], pa.list_(kind))
            for field, values in row.items()
        }
        pq.write_table(pa.table(columns), folder / name)
        place = "a.parquet, row group 0, row 1"
    assert_error(packer("pack", name, "-l", 8, "-q"), 1, place, message)
    manifest = pack(name, "-l", 8, "--on-error", "skip")
    assert (manifest["rejected_records"], manifest["documents"]) == (1, 2)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([[1], None]), "row 1 (row 1 of the file): input_ids is null"),
        (pa.array([[1], [None]]), "row 1 (row 1 of the file): input_ids holds a null"),
    ],
)
def test_nulls_among_token_ids(folder: Path, column: Any, message: str) -> None:
    pq.write_table(pa.table({"input_ids": column}), folder / "a.parquet")
    assert_error(packer("pack", "a.parquet", "-l", 8, "-q"), 1, message)


@pytest.mark.parametrize(("tokenizer", "highest"), [("tok", 399), ("bytes", 257)])
def test_ids_that_the_tokenizer_does_not_have(folder: Path, tokenizer: str, highest: int) -> None:
    tiny.save(folder / "tok", tiny.byte_level(), tokenizer_config={"eos_token": tiny.EOS})
    options = ["-l", 8, "-o", "out", "-q", "-t", tokenizer]
    good, bad = ([1, highest], [1, highest + 1])
    (folder / "a.jsonl").write_text(json.dumps({"input_ids": good}) + "\n")
    assert packer("pack", "a.jsonl", *options).exit_code == 0
    (folder / "b.jsonl").write_text(f'{json.dumps({"input_ids": good})}\n{{"input_ids": {bad}}}\n')
    result = packer("pack", "b.jsonl", *options, "--overwrite")
    assert_error(
        result, 1, f"input_ids holds {highest + 1}, the tokenizer's highest id is {highest}"
    )
    assert "b.jsonl, line 2" in result.stderr


@pytest.mark.parametrize("command", [("pack", "-l", 64), ("tokenize",)])
@pytest.mark.parametrize("offsets", [[0, 80, 20, 100], [0, 300, 100], [0, 100, 60]])
def test_lists_that_are_not_in_their_file(command: tuple[object, ...], offsets: list[int]) -> None:
    """Arrow reads such a file without a word; what counts by its offsets would write anywhere."""

    def column(values: Any) -> Any:
        flat, edges = pa.array(values), pa.py_buffer(np.array(offsets, np.int32))
        kind = pa.list_(flat.type)
        return pa.Array.from_buffers(kind, len(offsets) - 1, [None, edges], children=[flat])

    mask = np.arange(100) < 99
    columns = [column(np.arange(100, dtype=np.int32)), column(mask.astype(np.int8))]
    batch = pa.RecordBatch.from_arrays(columns, names=["input_ids", "attention_mask"])
    with pa.ipc.new_file("a.arrow", batch.schema) as file:
        file.write_batch(batch)
    done = unaltered(*command, "a.arrow", "-q", "-o", "out")
    assert done.returncode == 1, done.stderr
    assert "a.arrow: not a readable arrow file" in done.stderr
    assert not Path("out").exists()
