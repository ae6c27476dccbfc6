"""Records that are token ids already, from JSON lines and from columns."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny_tokenizers as tiny
from hypothesis import given
from hypothesis import strategies as st
from packer_cli._kernels import reference
from support import assert_error, check_directory, pack, packer, recover_documents, succeeds

from packer_cli import open_packed
from packer_cli.inputs.record_columns import Row, faultless, one_by_one

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
    succeeds("pack", name, "-l", 6, "--strategy", "next-fit", "-q", "-o", "out")
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


def test_token_ids_of_fixed_size_and_in_a_column_of_another_name(folder: Path) -> None:
    ids = pa.array([[1, 2, 3], [4, 5, 6]], pa.list_(pa.int32(), 3))
    for name, options in (("input_ids", ()), ("toks", ("--field", "input_ids=toks"))):
        pq.write_table(pa.table({name: ids}), folder / "a.parquet")
        pack("a.parquet", "-l", 4, *options, "--overwrite")
        documents = recover_documents("out")
        assert {place: tokens.tolist() for place, tokens in documents.items()} == {
            (0, 0): [1, 2, 3],
            (0, 1): [4, 5, 6],
        }


# what of [1, 2, 3, 4] and [5, 6] is trained on: the first token of a segment never is
FLAGS: list[tuple[dict[str, list[Any]], list[int]]] = [
    ({"loss_mask": [[0, 0, 1, 1], [0, 1]]}, [3, 4, 6]),
    ({"completion_mask": [[False, True, True, False], [True, True]]}, [2, 3, 6]),
    ({"assistant_masks": [[0.0, 1.0, 0.0, 1.0], [0.0, 0.0]]}, [2, 4]),
    ({"loss_mask": [[0, 0, 1, 1], [0, 1]], "completion_mask": [[0, 1, 1, 0], [0, 1]]}, [3, 6]),
    ({"loss_mask": [[0, 1, 1, 1], [1, 1]], "labels": [[-100, 2, 3, -100], [-100, -100]],
      "attention_mask": [[0, 1, 1, 1], [1, 1]]}, [3]),
]  # fmt: skip


def in_form(form: str, columns: dict[str, list[Any]]) -> Path:
    path, table = Path(f"data.{form}"), pa.table(columns)
    if form == "parquet":
        pq.write_table(table, path)
    else:
        path.write_text("\n".join(map(json.dumps, table.to_pylist())))
    return path


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize(("columns", "trained"), FLAGS)
def test_masks_beside_token_ids_say_what_is_trained_on(
    folder: Path, columns: dict[str, list[Any]], trained: list[int], form: str
) -> None:
    columns = {"input_ids": [[1, 2, 3, 4], [5, 6]], **columns}
    mask = next(iter(name for name in columns if name.endswith(("_mask", "_masks"))))

    def found(path: Path, *options: object) -> list[int]:
        pack(path, "-l", 4, "--overwrite", *options)
        return sorted(one for row in labels_of("out") for one in row if one != -100)

    assert found(in_form(form, columns)) == trained
    wrong = {name: values * 2 for name, values in columns.items()}
    wrong[mask] = [[float(one) for one in values] for values in wrong[mask]]
    wrong[mask][2] = [2, *wrong[mask][2][1:]]
    bad = in_form(form, wrong)
    assert_error(packer("pack", bad, "-l", 4, "-q"), 1, f"{mask}[0] is 2", "not 0 or 1")
    assert set(found(bad, "--on-error", "skip")) == set(trained)
    wrong[mask][2] = [float("nan"), *wrong[mask][2][1:]]
    if form != "jsonl":
        nan = in_form(form, wrong)
        assert_error(packer("pack", nan, "-l", 4, "-q"), 1, f"{mask}[0] is nan", "not 0 or 1")
    path = in_form(form, {name.replace(mask, "is_answer"): own for name, own in columns.items()})
    said = packer("pack", path, "-l", 4, "-o", "other").stderr
    field = "loss_mask=is_answer"
    assert f"ignored columns that look like masks: is_answer; --field {field}" in said
    assert found(path, "--field", field) == trained


@pytest.mark.parametrize(
    ("later", "is_mask"), [([0, 1], True), (None, True), ([0, 2], False), ([0], False)]
)
def test_columns_that_look_like_masks_in_later_records(
    folder: Path, later: Any, is_mask: bool
) -> None:
    rows = [{"input_ids": [1, 2]}, {"input_ids": [1, 2], "is_answer": [1, 0]},
            {"input_ids": [1, 2], "is_answer": later}]  # fmt: skip
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist([rows[0] | {"is_answer": None}, *rows[1:]]), "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        warned = packer("pack", name, "-l", 4, "-o", "out", "--overwrite").stderr
        assert ("ignored columns that look like masks: is_answer" in warned) == is_mask


def test_labels_of_some_records_only(folder: Path) -> None:
    rows = [
        {"input_ids": [1, 2]},
        {"input_ids": [3, 4, 5], "labels": [3, -100, 5]},
        {"input_ids": [6, 7], "attention_mask": [1, 0], "labels": None},
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist([*reversed(rows), {"input_ids": None}]), "a.parquet")
    pq.write_table(pq.read_table("a.parquet").take([2, 1, 0, 3]), "a.parquet")
    for name, bad in (("a.jsonl", 0), ("a.parquet", 1)):
        options = ["-l", 6, "--strategy", "next-fit", "--on-error", "skip", "--overwrite"]
        assert pack(name, *options)["rejected_records"] == bad
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
    succeeds("pack", "a.jsonl", *options)
    (folder / "b.jsonl").write_text(f'{json.dumps({"input_ids": good})}\n{{"input_ids": {bad}}}\n')
    result = packer("pack", "b.jsonl", *options, "--overwrite")
    assert_error(
        result, 1, f"input_ids holds {highest + 1}, the tokenizer's highest id is {highest}"
    )
    assert "b.jsonl, line 2" in result.stderr


# --- the fast way of token columns, by kernels, against the look at each record

INTEGERS = [f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)]


@given(seed=st.integers(0, 1 << 32), kind=st.sampled_from(INTEGERS))
def test_the_fast_way_is_the_careful_one(seed: int, kind: Any) -> None:
    """Documents of some tokens or none, with labels and padding, some of them bad."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 6, rng.integers(1, 8))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = rng.integers(0, 100, int(offsets[-1])).astype(kind)
    labels = np.where(rng.random(len(ids)) < 0.5, -100, ids.astype(np.int64))
    if seed % 4 == 1 and len(ids):
        labels[-1] = 101
    mask = (rng.random(len(ids)) < 0.7).astype(kind)
    if seed % 4 == 2 and len(ids):
        mask[0] = 3
    given = [(None, None), (labels, None), (None, mask), (labels, mask)][seed % 3 :]
    for some_labels, some_mask in given:
        fast = faultless(ids, offsets, some_labels, some_mask)
        rows = [
            tuple(None if x is None else x[a:b].tolist() for x in (ids, some_labels, some_mask))
            for a, b in pairwise(offsets)
        ]
        slow, bad = one_by_one(rows)
        assert fast is not None or bad or some_mask is not None
        if fast is not None:
            assert not bad
            for one, other in zip(fast, slow, strict=True):
                assert (one is None) == (other is None)
                assert one is None or (one.dtype == other.dtype and one.tolist() == other.tolist())
            if some_mask is not None and some_labels is not None:
                twin = reference.keep_real(
                    mask.tolist(), offsets.tolist(), ids.tolist(), (labels != -100).tolist()
                )
                assert [one.tolist() for one in fast if one is not None] == [
                    twin[0], twin[2], twin[1]
                ]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "expected"),
    [  # ids, labels, attention mask, loss mask and others; what is trained on, or what is wrong
        (([1, 2, 3], [1, 2, 9], None, [1, 1, 0]), [1, 1, 0]),  # a masked label is not compared
        (([1, 2, 3], [1, 2, 9], None, None, [1, 0, 0]), [1, 0, 0]),
        (([1, 2, 3], [1, 2, 9], None, [1, 1, 1]), "labels[2] is 9"),
        (([1, 2, 3], [1, 2, 9], [1, 1, 0], None), [1, 1]),  # nor is one of padding
        (([1, 2, 3], None, None, [1, 2, 0]), "loss_mask"),
        (([1, 2, 3], [1, 2, 9], None, [1, 1, 0], [0, 1, 1]), [0, 1, 0]),
    ],
)
def test_labels_are_compared_after_masks(row: Row, expected: Any) -> None:
    (_, _, trained), bad = one_by_one([row])
    if isinstance(expected, str):
        assert expected in bad[0]
    else:
        assert trained is not None
        assert (trained.tolist(), bad) == (expected, {})
