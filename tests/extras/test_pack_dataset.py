"""`packer_cli.hf`: packed datasets in memory, and finished directories in the trainers' hands."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset

from packer_cli import pack_sequences, plan_packing
from packer_cli.errors import DataError, UsageError
from packer_cli.hf import pack_dataset, pack_dataset_from_result
from packer_cli.torch import packed_collate_fn

COLUMNS = ["input_ids", "attention_mask", "labels", "position_ids"]
SEQUENCES = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11, 12]]


def test_labels_and_options_are_those_of_pack_sequences() -> None:
    labels = [[-100, -100, 3], [4, 5], [6, -100, -100, 9], [-100] * 3]
    how: dict[str, Any] = {"strategy": "ff", "seed": 5, "pad_token_id": 99, "overlong": "split"}
    expected = pack_sequences(SEQUENCES, 3, labels=labels, **how)
    columns = pack_dataset(SEQUENCES, 3, labels=labels, **how).with_format("numpy")[:]
    for name in COLUMNS:
        assert np.array_equal(columns[name], getattr(expected, name)), name


@pytest.mark.parametrize(
    "kind", ["arrays", "tensors", "column", "sliced", "nested", "arrow", "chunks"]
)
def test_every_kind_of_sequences(kind: str) -> None:
    saved = Dataset.from_dict({"input_ids": [[99], *SEQUENCES]}).select(range(1, 5))
    shuffled = Dataset.from_dict({"input_ids": SEQUENCES[::-1]}).select([3, 2, 1, 0])
    arrow = saved.with_format("arrow")[:]["input_ids"]
    given = {
        "arrays": [np.array(one, np.uint16) for one in SEQUENCES],
        "tensors": [torch.tensor(one) for one in SEQUENCES],
        "column": shuffled["input_ids"],
        "sliced": saved["input_ids"],
        "nested": Dataset.from_dict({"a": [{"ids": one} for one in SEQUENCES]})["a"]["ids"],
        "arrow": arrow.combine_chunks(),
        "chunks": arrow,
    }[kind]
    expected = pack_dataset(SEQUENCES, 8).to_dict()
    assert pack_dataset(given, 8).to_dict() == expected
    plan = plan_packing([len(one) for one in SEQUENCES], 8)
    assert pack_dataset_from_result(plan, given).to_dict() == expected


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (SEQUENCES, {"labels": [[1]]}, "labels: 1 given for 4 sequences"),
    (pa.array([[1], None, [2]]), {}, "sequences are or hold nulls"),
    (pa.chunked_array([[[1]], [[2, 3], [], [4, None]]]), {}, "sequences are or hold nulls"),
    (pa.array([[0.5]]), {}, "sequence 0: expected a flat sequence of integers"),
    (Dataset.from_dict({"input_ids": [[1]]}), {}, "expected a column, got a whole Dataset"),
]


@pytest.mark.parametrize(("sequences", "options", "message"), REFUSED)
def test_refused(sequences: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((DataError, UsageError), match=message):
        pack_dataset(sequences, 8, **options)


def test_rows_become_a_packed_batch() -> None:
    """As themselves, not as documents that are packed anew, whatever else is said."""
    rows = pack_dataset([[1, 2, 3], [4, 5, 6], [7, 8]], 10)
    for given in (rows, rows.with_format("numpy")):
        for collate in (packed_collate_fn, partial(packed_collate_fn, max_length=10)):
            batch = collate([given[0]])
            assert batch.cu_seqlens.tolist() == [0, 3, 6, 8, 10]
            assert batch.labels.tolist() == rows["labels"][:1]


def test_rows_and_documents_are_not_mixed() -> None:
    row = pack_dataset([[1, 2, 3], [4, 5]], 8)[0]
    for mixed in ([{"input_ids": [1, 2]}, row], [row, {"input_ids": [1, 2]}]):
        with pytest.raises(UsageError, match="others do not"):
            packed_collate_fn(mixed, max_length=8)


def test_in_map(tmp_path: Path) -> None:
    dataset = Dataset.from_dict({"input_ids": SEQUENCES * 50})
    packed = dataset.with_format("arrow").map(
        lambda table: pack_dataset(table["input_ids"], 8).data.table,
        batched=True, batch_size=100, remove_columns=dataset.column_names,
    )  # fmt: skip
    packed = packed.with_format("torch")
    assert packed.column_names == COLUMNS
    assert packed[:]["attention_mask"].sum() == 50 * 12
    twice = packed.map(lambda row: {"used": row["attention_mask"].sum()})
    assert sum(twice["used"][:]) == 50 * 12


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.uint8])
def test_tensors_give_tensors_with_the_rows_of_lists(kind: torch.dtype) -> None:
    tensors = [torch.tensor(sequence, dtype=kind) for sequence in SEQUENCES]
    options: dict[str, Any] = {"strategy": "next-fit", "eos_token_id": 99, "return_spans": True}
    found = pack_sequences(tensors, 8, labels=tensors, **options)
    expected = pack_sequences(SEQUENCES, 8, labels=SEQUENCES, **options)
    for name in COLUMNS:
        assert isinstance(getattr(found, name), torch.Tensor)
        assert getattr(found, name).tolist() == getattr(expected, name).tolist()
    assert (found.input_ids.dtype, found.attention_mask.dtype) == (torch.int32, torch.uint8)
    assert [one.tolist() for one in found.cu_seqlens] == [o.tolist() for o in expected.cu_seqlens]
    assert found.spans == expected.spans
