"""The checker that the other tests trust: it sees every kind of damage, and nothing else."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from support import broken_invariants

PAD = 9
GOOD: dict[str, list[Any]] = {
    "input_ids": [[1, 2, 3, 4, 5, PAD], [6, 6, 6, 6, 6, 6]],
    "labels": [[-100, 2, 3, -100, -100, -100], [-100, 6, 6, 6, 6, 6]],
    "attention_mask": [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]],
    "position_ids": [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]],
    "cu_seqlens": [[0, 3, 5], [0, 6]],
    "segments": [[{"file": 0}, {"file": 0}], [{"file": 1}]],
}
RAGGED = ("cu_seqlens", "segments", "cu_seqlens_padded")


def batch_of(columns: dict[str, list[Any]]) -> Any:
    arrays = [
        pa.array(rows) if name in RAGGED else pa.array(rows, pa.list_(pa.int32(), 6))
        for name, rows in columns.items()
    ]
    arrays = [
        array.cast(pa.list_(pa.int32())) if name.startswith("cu_seqlens") else array
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
        "row 0: labels holds neither the token nor -100: place 1 has 7, expected 6 (1 rows)"
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


# The segments 1 2 3 and 4 in multiples of 2, then the row's padding; a row without any.
PADDED: dict[str, list[Any]] = {
    "input_ids": [[1, 2, 3, PAD, 4, PAD, PAD, PAD], [6, 6, 6, 6, 6, 6, 6, 6]],
    "labels": [[2, 3, -100, -100, -100, -100, -100, -100], [6, -100, 6, 6, 6, 6, 6, -100]],
    "attention_mask": [[1, 1, 1, 0, 1, 0, 0, 0], [1] * 8],
    "position_ids": [[0, 1, 2, 3, 0, 1, 0, 1], list(range(8))],
    "cu_seqlens": [[0, 3, 4], [0, 8]],
    "cu_seqlens_padded": [[0, 4, 6], [0, 8]],
    "segments": [[{"file": 0}, {"file": 0}], [{"file": 1}]],
}
SHIFTED: dict[str, Any] = {"segment_multiple": 2, "label_shift": "pre", "max_segments": 2}


def padded_batch(columns: dict[str, list[Any]]) -> Any:
    kinds = {name: pa.list_(pa.int32()) for name in columns if name.startswith("cu_")}
    kinds["segments"] = None
    return pa.RecordBatch.from_arrays(
        [
            pa.array(rows, kinds.get(name, pa.list_(pa.int32(), 8)))
            for name, rows in columns.items()
        ],
        names=list(columns),
    )


def test_good_padded_and_shifted_rows_pass() -> None:
    batch = padded_batch(PADDED)
    assert broken_invariants(batch, 8, PAD, **SHIFTED) == []
    assert broken_invariants(batch.slice(1), 8, PAD, **SHIFTED) == []
    assert broken_invariants(batch.slice(0, 1), 8, PAD, **SHIFTED) == []


@pytest.mark.parametrize(
    ("column", "row", "message"),
    [
        ("cu_seqlens_padded", [0, 4], "cu_seqlens_padded does not match cu_seqlens"),
        ("cu_seqlens_padded", [2, 6, 8], "cu_seqlens_padded does not begin with 0"),
        ("cu_seqlens_padded", [0, 3, 4], "cu_seqlens_padded is not cu_seqlens in multiples of 2"),
        ("cu_seqlens_padded", [0, 6, 8], "cu_seqlens_padded is not cu_seqlens in multiples of 2"),
        ("cu_seqlens", [0, 1, 2, 3], "cu_seqlens has more than 2 segments"),
        ("input_ids", [1, 2, 3, 4, 4, PAD, PAD, PAD], "input_ids holds something other than pad"),
        ("attention_mask", [1, 1, 1, 1, 1, 0, 0, 0], "attention_mask differs"),
        ("labels", [-100, 2, 3, -100, -100, -100, -100, -100], "labels holds neither the token"),
        ("labels", [2, 3, PAD, -100, -100, -100, -100, -100], "labels trains on padding"),
        ("labels", [2, 3, -100, 4, -100, -100, -100, -100], "labels trains on padding or on a seg"),
        ("labels", [2, 3] + [-100] * 5 + [1], "labels trains on what follows the row"),
        ("position_ids", [0, 1, 2, 0, 0, 1, 0, 1], "position_ids does not restart"),
        ("position_ids", [0, 1, 2, 3, 0, 1, 2, 3], "position_ids does not restart"),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_damage_to_padded_and_shifted_rows_is_seen(
    column: str, row: list[Any], message: str, place: int
) -> None:
    columns = {name: [rows[0], rows[0]] for name, rows in PADDED.items()}
    columns[column][place] = row
    problems = broken_invariants(padded_batch(columns), 8, PAD, **SHIFTED)
    assert any(problem.startswith(f"row {place}: {message}") for problem in problems), problems
