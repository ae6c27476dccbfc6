"""What is counted: sums add up in any order, survive being written, and nothing else is read."""

from __future__ import annotations

import json
from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict

from packer_cli.packing.figures import AttentionCost
from packer_cli.result.counts import (
    ROW_FILL_BUCKETS,
    Counts,
    InputTotals,
)

FIGURE = st.integers(0, 1 << 40)
NUMBERS = [name for name in Counts.__struct_fields__ if isinstance(getattr(Counts(), name), int)]


def histogram(buckets: int) -> st.SearchStrategy[Any]:
    return st.lists(FIGURE, min_size=buckets, max_size=buckets).map(np.array)


COSTS = st.lists(st.integers(1, 1 << 20), max_size=5).map(
    lambda lengths: AttentionCost.of(np.array(lengths, np.int64), np.arange(len(lengths) + 1))
)
COUNTS = st.builds(
    Counts,
    **dict.fromkeys(NUMBERS, FIGURE),
    document_length=histogram(32),
    row_fill=histogram(ROW_FILL_BUCKETS),
    segments_per_row=histogram(32),
    piece_length=st.lists(FIGURE, min_size=1, max_size=9).map(np.array),
    attention_before=COSTS,
    attention_after=COSTS,
    files=st.dictionaries(st.integers(0, 5), st.builds(InputTotals, *[FIGURE] * 14), max_size=3),
)


def copied(counts: Counts) -> Counts:
    return Counts.from_json(json.loads(json.dumps(counts.as_json())))


def plain(counts: Counts) -> dict[str, Any]:
    """All figures as Python's own, without the zeros behind the longest piece."""
    figures = {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in asdict(counts).items()
    }
    while len(figures["piece_length"]) > 1 and not figures["piece_length"][-1]:
        figures["piece_length"].pop()
    return figures


def total(parts: list[Counts]) -> Counts:
    """By `add`, which changes the counts it is called on."""
    sums = Counts()
    for part in parts:
        sums.add(part)
    return sums


def added(one: list[int], other: list[int]) -> list[int]:
    size = max(len(one), len(other))
    return [sum(part[i] for part in (one, other) if i < len(part)) for i in range(size)]


@given(COUNTS)
def test_counts_survive_being_written(counts: Counts) -> None:
    assert plain(copied(counts)) == plain(counts)
    assert copied(counts).as_json() == counts.as_json()


@given(st.lists(COUNTS, max_size=4), st.randoms())
def test_sums_are_those_of_every_figure(parts: list[Counts], random: Any) -> None:
    before = [plain(part) for part in parts]
    sums = plain(total(parts))
    assert [plain(part) for part in parts] == before  # those that were added stay as they are
    for name in NUMBERS:
        assert sums[name] == sum(part[name] for part in before)
    for name in ("document_length", "row_fill", "segments_per_row", "piece_length"):
        assert sums[name] == reduce(added, (part[name] for part in before), plain(Counts())[name])
    for index in {index for part in before for index in part["files"]}:
        of_file = [asdict(part["files"][index]) for part in before if index in part["files"]]
        expected = {name: sum(one[name] for one in of_file) for name in of_file[0]}
        assert asdict(sums["files"][index]) == expected
    random.shuffle(parts)
    assert plain(total(parts)) == sums
    assert plain(total([copied(part) for part in parts])) == sums


@pytest.mark.parametrize(
    "damaged",
    [
        {"documentz": 1},
        {"documents": "1"},
        {"documents": 1.5},
        {"documents": None},
        {"row_fill": [1, 2]},
        {"document_length": [[1]] * 32},
        {"row_fill": "x"},
        {"piece_length": "not base64!"},
        {"piece_length": "AAAA"},
        {"piece_length": 5},
        {"attention_before": [1, 2, 3, 4, 5]},
        {"files": [[0, *range(15)]]},
        {"files": 3},
        {"files": [[0, "1"]]},
        {"attention_after": ["1"]},
        {"unread": {"a": "1"}},
    ],
    ids=str,
)
def test_what_is_no_counts_is_refused(damaged: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        Counts.from_json(damaged)
