"""The checker that the other tests trust: it sees every kind of damage, and nothing else."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from packer_cli.invariants import broken_invariants

PAD = 9
GOOD: dict[str, list[Any]] = {
    "input_ids": [[1, 2, 3, 4, 5, PAD], [6, 6, 6, 6, 6, 6]],
    "labels": [[-100, 2, 3, -100, -100, -100], [-100, 6, 6, 6, 6, 6]],
    "attention_mask": [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]],
    "position_ids": [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]],
    "cu_seqlens": [[0, 3, 5], [0, 6]],
    "segments": [[{"file": 0}, {"file": 0}], [{"file": 1}]],
}
RAGGED = ("cu_seqlens", "segments")


def batch_of(columns: dict[str, list[Any]]) -> Any:
    arrays = [
        pa.array(rows) if name in RAGGED else pa.array(rows, pa.list_(pa.int32(), 6))
        for name, rows in columns.items()
    ]
    arrays = [
        array.cast(pa.list_(pa.int32())) if name == "cu_seqlens" else array
        for name, array in zip(columns, arrays, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))


def test_good_rows_pass() -> None:
    assert broken_invariants(batch_of(GOOD), 6, PAD) == []


@pytest.mark.parametrize("left_out", ["labels", "attention_mask", "position_ids"])
def test_columns_are_optional(left_out: str) -> None:
    columns = {name: rows for name, rows in GOOD.items() if name != left_out}
    assert broken_invariants(batch_of(columns), 6, PAD) == []


def test_a_slice_of_a_batch_is_checked_as_its_own_rows() -> None:
    assert broken_invariants(batch_of(GOOD).slice(1), 6, PAD) == []
    broken = batch_of(GOOD | {"labels": [GOOD["labels"][0], [-100, 7, 6, 6, 6, 6]]})
    assert broken_invariants(broken.slice(0, 1), 6, PAD) == []
    assert broken_invariants(broken.slice(1), 6, PAD) == [
        "row 0: labels holds neither the token nor -100 (1 rows)"
    ]


@pytest.mark.parametrize(
    ("column", "row", "message"),
    [
        ("cu_seqlens", [0], "cu_seqlens has fewer than two boundaries"),
        ("cu_seqlens", [1, 3, 5], "cu_seqlens does not begin with 0"),
        ("cu_seqlens", [0, 3, 3], "cu_seqlens does not increase"),
        ("cu_seqlens", [0, 3, 2], "cu_seqlens does not increase"),
        ("cu_seqlens", [0, 3, 7], "cu_seqlens ends outside 1..6"),
        ("input_ids", [-1, 2, 3, 4, 5, PAD], "input_ids holds a negative id"),
        ("input_ids", [1, 2, 3, 4, 5, 5], "input_ids holds something other than pad_token_id"),
        ("attention_mask", [1, 1, 1, 1, 1, 1], "attention_mask differs from the boundaries"),
        ("attention_mask", [1, 1, 1, 0, 1, 0], "attention_mask differs from the boundaries"),
        ("labels", [-100, 3, 3, -100, -100, -100], "labels holds neither the token nor -100"),
        ("labels", [1, 2, 3, -100, -100, -100], "labels trains on padding or on a segment's first"),
        ("labels", [-100, 2, 3, 4, -100, -100], "labels trains on padding or on a segment's first"),
        ("labels", [-100, 2, 3, -100, -100, PAD], "labels trains on padding or on a segment's"),
        ("position_ids", [0, 1, 2, 3, 4, 0], "position_ids does not restart in every segment"),
        ("position_ids", [0, 1, 2, 0, 1, 2], "position_ids does not restart in every segment"),
        ("segments", [{"file": 0}], "segments does not match cu_seqlens"),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_every_kind_of_damage_is_seen(
    column: str, row: list[Any], message: str, place: int
) -> None:
    columns = {name: [rows[0], rows[0]] for name, rows in GOOD.items()}
    columns[column][place] = row
    problems = broken_invariants(batch_of(columns), 6, PAD)
    assert any(problem.startswith(f"row {place}: {message}") for problem in problems), problems
