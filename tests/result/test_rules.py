"""The checker that the other tests trust: it sees every kind of damage, and nothing else."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from support import broken_invariants

from packer_cli.options.value_columns import value_columns_of

PAD = 9


class Rows(NamedTuple):
    """Two sound rows, and the options that they are of."""

    columns: dict[str, list[Any]]
    max_length: int
    options: dict[str, Any]

    def broken(self, columns: dict[str, Any], rows: slice = slice(None)) -> list[str]:
        """What is wrong with some of these rows, with other `columns`."""
        kinds = {name: pa.list_(pa.int32(), self.max_length) for name in self.columns}
        kinds |= {name: pa.list_(pa.int32()) for name in kinds if name.startswith("cu_")}
        for one in self.options.get("columns", ()):
            of_rows = () if one.is_of_segments else (self.max_length,)
            kinds[one.name] = pa.list_(one.arrow_type, *of_rows)
        arrays = [
            pa.array(its, None if name == "segments" else kinds[name])
            for name, its in (self.columns | columns).items() if its
        ]  # fmt: skip
        names = [name for name, its in (self.columns | columns).items() if its]
        batch = pa.RecordBatch.from_arrays(arrays, names=names)
        first, last, _ = rows.indices(batch.num_rows)
        part = batch.slice(first, last - first)
        return broken_invariants(part, self.max_length, PAD, **self.options)


PLAIN = Rows({
    "input_ids": [[1, 2, 3, 4, 5, PAD], [6, 6, 6, 6, 6, 6]],
    "labels": [[-100, 2, 3, -100, -100, -100], [-100, 6, 6, 6, 6, 6]],
    "attention_mask": [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]],
    "position_ids": [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]],
    "cu_seqlens": [[0, 3, 5], [0, 6]],
    "segments": [[{"file": 0}, {"file": 0}], [{"file": 1}]],
}, 6, {})  # fmt: skip
# The segments 1 2 3 and 4 in multiples of 2, then the row's padding; a row without any.
PADDED = Rows({
    "input_ids": [[1, 2, 3, PAD, 4, PAD, PAD, PAD], [6, 6, 6, 6, 6, 6, 6, 6]],
    "labels": [[-100, 2, 3, -100, -100, -100, -100, -100], [-100, 6, -100, 6, 6, 6, 6, 6]],
    "attention_mask": [[1, 1, 1, 0, 1, 0, 0, 0], [1] * 8],
    "position_ids": [[0, 1, 2, 3, 0, 1, 0, 1], list(range(8))],
    "cu_seqlens": [[0, 3, 4], [0, 8]],
    "cu_seqlens_padded": [[0, 4, 6], [0, 8]],
    "segments": [[{"file": 0}, {"file": 0}], [{"file": 1}]],
}, 8, {"segment_multiple": 2, "max_segments": 2})  # fmt: skip
# The same with carried columns.
CARRYING = PADDED._replace(
    columns=PADDED.columns | {
        "logprobs": [[-0.5, -1, -2, 0, -0.1, 0, 0, 0], [-1.0] * 8],
        "rank": [[*[[1, 2]] * 3, [0, 0], [3, 4], *[[0, 0]] * 3], [[5, 6]] * 8],
        "good": [[1, 0, 1, 0, 1, 0, 0, 0], [1] * 8],
        "reward": [[16256, 0], [16256]],
        "won": [[1, 0], [1]],
    },
    options=PADDED.options | {"columns": [*value_columns_of((
        "logprobs:float32/token", "rank:int32[2]/token", "good:bool/token",
        "reward:bfloat16/record", "won:bool/record",
    )).values()]},
)  # fmt: skip


@pytest.mark.parametrize("rows", [PLAIN, PADDED, CARRYING])
def test_sound_rows_pass(rows: Rows) -> None:
    for some in (slice(None), slice(1), slice(1, None)):
        assert rows.broken({}, some) == []
    for left_out in ("labels", "attention_mask", "position_ids"):
        assert rows.broken({left_out: None}) == []


def test_a_slice_of_a_batch_is_checked_as_its_own_rows() -> None:
    labels = {"labels": [PLAIN.columns["labels"][0], [-100, 7, 6, 6, 6, 6]]}
    assert PLAIN.broken(labels, slice(1)) == []
    assert PLAIN.broken(labels, slice(1, None)) == [
        "row 0: labels holds neither the token nor -100: place 1 has 7, expected 6 (1 rows)"
    ]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    ("rows", "column", "row", "message"),
    [
        (PLAIN, "cu_seqlens", [0], "cu_seqlens has fewer than two boundaries"),
        (PLAIN, "cu_seqlens", [1, 3, 5], "cu_seqlens does not begin with 0"),
        (PLAIN, "cu_seqlens", [0, 3, 3], "cu_seqlens does not increase"),
        (PLAIN, "cu_seqlens", [0, 3, 7], "cu_seqlens ends outside 1..6"),
        (PLAIN, "input_ids", [-1, 2, 3, 4, 5, PAD], "input_ids holds a negative id"),
        (PLAIN, "input_ids", [1, 2, 3, 4, 5, 5], "input_ids holds something other than pad_token"),
        (PLAIN, "attention_mask", [1, 1, 1, 1, 1, 1], "attention_mask differs from the boundaries"),
        (PLAIN, "labels", [-100, 3, 3, -100, -100, -100], "labels holds neither the token nor"),
        (PLAIN, "labels", [1, 2, 3, -100, -100, -100], "labels trains on padding or on a segment"),
        (PLAIN, "labels", [-100, 2, 3, -100, -100, PAD], "labels trains on padding or on a"),
        (PLAIN, "position_ids", [0, 1, 2, 3, 4, 0], "position_ids does not restart in every"),
        (PLAIN, "position_ids", [0, 1, 2, 0, 1, 2], "position_ids does not restart in every"),
        (PLAIN, "segments", [{"file": 0}], "segments does not match cu_seqlens"),
        (PADDED, "cu_seqlens_padded", [0, 4], "cu_seqlens_padded does not match cu_seqlens"),
        (PADDED, "cu_seqlens_padded", [2, 6, 8], "cu_seqlens_padded does not begin with 0"),
        (PADDED, "cu_seqlens_padded", [0, 3, 4], "cu_seqlens_padded is not cu_seqlens in mult"),
        (PADDED, "cu_seqlens", [0, 1, 2, 3], "cu_seqlens has more than 2 segments"),
        (PADDED, "input_ids", [1, 2, 3, 4, 4, *[PAD] * 3], "input_ids holds something other than"),
        (PADDED, "attention_mask", [1, 1, 1, 1, 1, 0, 0, 0], "attention_mask differs"),
        (PADDED, "labels", [-100, 3, 3, *[-100] * 5], "labels holds neither the token"),
        (PADDED, "labels", [-100, 2, 3, PAD, *[-100] * 4], "labels trains on padding"),
        (
            PADDED,
            "labels",
            [-100, 2, 3, -100, 4, *[-100] * 3],
            "labels trains on padding or on a seg",
        ),
        (PADDED, "position_ids", [0, 1, 2, 0, 0, 1, 0, 1], "position_ids does not restart"),
        (CARRYING, "logprobs", [-1.0] * 4 + [0] * 4, "logprobs holds something other than 0 in"),
        (CARRYING, "logprobs", [math.nan] + [0] * 7, "logprobs holds a value that is not finite"),
        (CARRYING, "rank", [[0, 0]] * 7 + [[0, 1]], "rank holds something other than 0 in padding"),
        (CARRYING, "good", [2, 0, 1, 0, 1, 0, 0, 0], "good holds neither 0 nor 1: place 0 has 2"),
        (CARRYING, "reward", [16256], "reward does not match cu_seqlens"),
        (CARRYING, "reward", [0, 32640], "reward holds a value that is not finite: 32640"),
        (CARRYING, "won", [0, 3], "won holds neither 0 nor 1: 3"),
    ],
)
def test_every_kind_of_damage_is_seen(
    rows: Rows, column: str, row: list[Any], message: str, place: int
) -> None:
    columns = {name: [its[0], its[0]] for name, its in rows.columns.items()}
    columns[column][place] = row
    problems = rows.broken(columns)
    assert any(problem.startswith(f"row {place}: {message}") for problem in problems), problems
