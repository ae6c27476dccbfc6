"""pack_sequences: token sequences in memory to padded rows in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer_cli import PackedRows, pack_sequences
from packer_cli.errors import DataError, PackerError, UsageError
from packer_cli.options.options import NAMES

FOUR = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11, 12]]
IGNORED = -100
X = IGNORED  # in tables of labels


def lists(rows: PackedRows, name: str) -> list[list[int]]:
    values: list[list[int]] = getattr(rows, name).tolist()
    return values


def test_next_fit_gives_exactly_the_documented_rows() -> None:
    rows = pack_sequences(FOUR, 8, pad_token_id=0, strategy="next-fit", return_spans=True)
    kinds = {"input_ids": "i4", "labels": "i4", "attention_mask": "u1", "position_ids": "i4"}
    for name, kind in kinds.items():
        assert (getattr(rows, name).dtype, getattr(rows, name).shape) == (kind, (2, 8))
    assert {part.dtype for part in rows.cu_seqlens} == {np.dtype(np.int32)}
    assert pack_sequences(FOUR, 8).spans is None
    assert lists(rows, "input_ids") == [[1, 2, 3, 4, 5, 0, 0, 0], [6, 7, 8, 9, 10, 11, 12, 0]]
    assert lists(rows, "labels") == [[X, 2, 3, X, 5, X, X, X], [X, 7, 8, 9, X, 11, 12, X]]
    assert lists(rows, "attention_mask") == [[1] * 5 + [0] * 3, [1] * 7 + [0]]
    assert lists(rows, "position_ids") == [[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 0, 1, 2, 0]]
    assert [part.tolist() for part in rows.cu_seqlens] == [[0, 3, 5], [0, 4, 7]]
    assert rows.spans == [(0, 0, 3), (0, 3, 5), (1, 0, 4), (1, 4, 7)]
    assert len(rows) == 2
    assert rows.plan.metrics.padding_tokens == 4


@pytest.mark.parametrize(
    "sequences",
    [
        pytest.param([tuple(s) for s in FOUR], id="tuples"),
        pytest.param([np.array(s, np.uint16) for s in FOUR], id="uint16"),
        pytest.param([np.array(s, np.uint64) for s in FOUR], id="uint64"),
        pytest.param([FOUR[0], np.array(FOUR[1], np.uint64), *FOUR[2:]], id="mixed"),
        pytest.param([range(1, 4), range(4, 6), range(6, 10), range(10, 13)], id="ranges"),
    ],
)  # fmt: skip
def test_any_kind_of_integer_sequence(sequences: Any) -> None:
    expected = pack_sequences(FOUR, 8)
    assert lists(pack_sequences(sequences, 8), "input_ids") == lists(expected, "input_ids")
    matrix = pack_sequences(np.arange(6).reshape(3, 2), 4, strategy="next-fit")
    assert lists(matrix, "input_ids") == [[0, 1, 2, 3], [4, 5, 0, 0]]  # a list of its rows


@pytest.mark.parametrize("sequences", [[], [[]], [[], np.empty(0)], np.empty((0, 3), int)])
def test_nothing_to_pack_gives_no_rows(sequences: Any) -> None:
    rows = pack_sequences(sequences, 8, eos_token_id=9, return_spans=True)
    assert rows.input_ids.shape == rows.labels.shape == (0, 8)
    assert len(rows) == 0
    assert rows.cu_seqlens == []
    assert rows.spans == [None] * len(sequences)


HIGHEST = (1 << 31) - 1


NOT_IN_RANGE = f"is not in 0..{HIGHEST}"
ERRORS: list[tuple[type[PackerError], dict[str, Any], str]] = [
    (DataError, {"sequences": [[1], [2, -1]]}, f"sequence 1: -1 {NOT_IN_RANGE}"),
    (DataError, {"sequences": [[1], [1 << 63]]}, f"sequence 1: 9223372036854775808 {NOT_IN_RANGE}"),
    (DataError, {"sequences": [[1], [0.5]]}, r"sequence 1: .* got shape \(1,\), float64"),
    (DataError, {"sequences": [[1], [2, [3]]]}, "sequence 1: not a flat sequence of integers"),
    (DataError, {"sequences": [[1], [None]]}, "sequence 1: expected a flat sequence of integers"),
    (DataError, {"sequences": [[1], [1] * 9]}, "document 1 has 9 tokens, max_length is 8"),
    (DataError, {"labels": [[1]]}, "labels: 1 given for 4 sequences"),
    (DataError, {"labels": [[1, 2, 3], [4], *FOUR[2:]]},
     "labels 1: has 1 values, the sequence 2 tokens"),
    (DataError, {"labels": [FOUR[0], [4, -1], *FOUR[2:]]}, f"labels 1: -1 {NOT_IN_RANGE}"),
    (UsageError, {"eos_token_id": -1}, "the eos id -1 is not in 0"),
    (UsageError, {"eos_token_id": 1 << 31}, "the eos id 2147483648 is not in 0"),
    (UsageError, {"pad_token_id": -1}, "the pad id -1 is not in 0"),
    (UsageError, {"pad_token_id": "1"}, "pad_token_id: '1' is not a whole number"),
    (UsageError, {"eos_token_id": 1.0}, "eos_token_id: 1.0 is not a whole number"),
    (UsageError, {"labels": 5}, "expected a list of labels, got int"),
    (UsageError, {"sequences": None}, "expected a list of sequences, got NoneType"),
    (UsageError, {"sequences": "abc"}, "expected a list of sequences, got str"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "arguments", "message"), ERRORS)
def test_errors_name_the_sequence_or_the_option(
    kind: type[PackerError], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(kind, match=message):
        pack_sequences(**({"sequences": FOUR, "max_length": 8} | arguments))


TOKENS = st.lists(st.integers(1, 30), max_size=14)


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of pack_sequences, every option on or off."""
    sequences = draw(st.lists(TOKENS, max_size=12))

    def like(values: st.SearchStrategy[int]) -> Any:
        one = [draw(st.lists(values, min_size=len(s), max_size=len(s))) for s in sequences]
        return draw(st.sampled_from([None, one]))

    return {
        "sequences": sequences,
        "max_length": draw(st.integers(1, 17)),
        "strategy": draw(st.sampled_from(NAMES)),
        "overlong": draw(st.sampled_from(["split", "truncate", "drop"])),
        "labels": like(st.sampled_from([X, 31, 32, 33])),
        "eos_token_id": draw(st.sampled_from([None, 9])),
        "pad_token_id": draw(st.sampled_from([0, 9])),
        "seed": draw(st.sampled_from([None, 0, 7])),
    }


def _expected(call: dict[str, Any]) -> list[list[tuple[int, int]]]:
    """(token, label) of each sequence as it must come out, overlong ones handled."""
    tokens = []
    for i, sequence in enumerate(call["sequences"]):
        labels = call["labels"][i] if call["labels"] else sequence
        pairs = list(zip(sequence, labels, strict=True))
        eos = call["eos_token_id"]
        if pairs and eos is not None and pairs[-1][0] != eos:
            pairs.append((eos, eos))
        if len(pairs) > call["max_length"] and call["strategy"] != "wrap":
            keep = {"truncate": call["max_length"], "drop": 0}.get(call["overlong"], len(pairs))
            pairs = pairs[:keep]
        tokens.append(pairs)
    return tokens


@given(call=calls())
def test_every_strategy_and_option_against_a_slow_reading(call: dict[str, Any]) -> None:
    """Take every sequence out of the rows again; nothing but padding may remain. An end that a
    sequence has already is not appended again, and everything left out is counted.
    """
    rows = pack_sequences(**call, return_spans=True)
    kept, loss = sum(map(len, _expected(call))), rows.plan.loss
    whole = sum(map(len, _expected(call | {"overlong": "split"})))
    assert loss.truncated_tokens + loss.dropped_tokens == whole - kept
    ids, labels = lists(rows, "input_ids"), lists(rows, "labels")
    masks, positions = lists(rows, "attention_mask"), lists(rows, "position_ids")
    places = rows.all_spans()
    assert rows.spans == [spans[0] if spans else None for spans in places]
    boundaries: list[set[int]] = [{0} for _ in range(len(rows))]
    for expected, spans in zip(_expected(call), places, strict=True):
        left = expected
        for row, start, end in spans:
            piece, left = left[: end - start], left[end - start :]
            assert ids[row][start:end] == [token for token, _ in piece]
            assert labels[row][start:end] == [X, *(label for _, label in piece[1:])]
            assert masks[row][start:end] == [1] * len(piece)
            assert positions[row][start:end] == list(range(len(piece)))
            masks[row][start:end] = [0] * len(piece)
            boundaries[row].add(end)
        assert left == []
    assert [part.tolist() for part in rows.cu_seqlens] == [sorted(part) for part in boundaries]
    for row, used in enumerate(map(max, boundaries)):
        room = call["max_length"] - used
        assert masks[row] == [0] * call["max_length"]
        assert ids[row][used:] == [call["pad_token_id"]] * room
        assert labels[row][used:] == [X] * room
        assert positions[row][used:] == list(range(room))
        assert used > 0
    if call["strategy"] in ("next-fit", "wrap"):
        flat = [span for spans in places for span in spans]
        assert flat == sorted(flat)
    if call["strategy"] == "wrap":
        assert all(max(part) == call["max_length"] for part in boundaries[:-1])
