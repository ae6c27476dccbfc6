"""Windows: whatever batches documents come in, every piece is in one row, and rows stay as full."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer_cli.options.options import PackConfig
from packer_cli.packing.figures import AttentionCost
from packer_cli.packing.fitting import cut_stream, fit
from packer_cli.packing.window import PlannedRows, Window
from packer_cli.records import Pieces, TokenBatch

LENGTH = 16
STRATEGIES = ("best-fit", "first-fit-shuffle", "harmonic", "next-fit")
# the lengths of the documents of some batches
BATCHES = st.lists(st.lists(st.integers(0, 3 * LENGTH), max_size=12), max_size=8)
# (file, position, index in its document, token, whether it is trained on)
Token = tuple[int, int, int, int, int]


def batches_of(lengths: list[list[int]], trained: bool) -> Iterator[TokenBatch]:
    """Tokens are numbered through; every third is trained on, in every second batch."""
    first = position = 0
    for number, of_batch in enumerate(lengths):
        ids = np.arange(first, first + sum(of_batch), dtype=np.uint32)
        flags = (ids % 3 == 0).astype(np.uint8) if trained and number % 2 == 0 else None
        offsets = np.concatenate([[0], np.cumsum(of_batch)]).astype(np.int64)
        positions = np.arange(position, position + len(of_batch), dtype=np.int64)
        yield TokenBatch(ids, offsets, flags, np.full(len(of_batch), number, np.int32), positions)
        first, position = first + len(ids), position + len(of_batch)


def tokens_of(stock: Any, piece: int) -> list[Token]:
    begin, length = int(stock.begin[piece]), int(stock.length[piece])
    place = int(stock.file[piece]), int(stock.position[piece])
    flags = np.ones(len(stock.ids)) if stock.trained is None else stock.trained
    return [
        (*place, int(stock.start[piece]) + i, int(stock.ids[begin + i]), int(flags[begin + i]))
        for i in range(length)
    ]


def rows_of(planned: PlannedRows) -> list[list[list[Token]]]:
    """row -> segment -> token"""
    offsets, order = planned.row_offsets.tolist(), planned.order.tolist()
    assert offsets[0] == 0
    assert offsets[-1] == len(order)
    return [
        [tokens_of(planned.stock, piece) for piece in order[begin:end]]
        for begin, end in pairwise(offsets)
    ]


def packed(
    lengths: list[list[int]], config: PackConfig, *, trained: bool = False, every: int = 40
) -> list[list[list[list[Token]]]]:
    """plan -> row -> segment -> token, as `pack_unit` does it."""
    window, plans = Window(config, 0), []
    position = 0
    for batch in batches_of(lengths, trained):
        if config.strategy == "wrap":
            pieces: Pieces = cut_stream(batch.offsets, LENGTH, position, 1, None)
            position += int(pieces.length.sum())
        else:
            pieces = fit(batch.offsets, LENGTH, "split", "right")
        window.add(batch, pieces)
        if window.tokens >= every:
            plans.append(rows_of(window.rows()))
    if window.tokens:
        plans.append(rows_of(window.rows(last=True)))
    assert window.tokens == 0
    return plans


def all_tokens(lengths: list[list[int]], trained: bool) -> list[Token]:
    return [
        (int(batch.file[i]), int(batch.position[i]), k, int(batch.ids[at]),
         1 if batch.trained is None else int(batch.trained[at]))
        for batch in batches_of(lengths, trained)
        for i, (begin, end) in enumerate(pairwise(batch.offsets.tolist()))
        for k, at in enumerate(range(begin, end))
    ]  # fmt: skip


@pytest.mark.parametrize("strategy", [*STRATEGIES, "wrap"])
@given(lengths=BATCHES, trained=st.booleans(), most=st.sampled_from([None, 2]))
def test_every_token_is_in_one_row(
    strategy: str, lengths: list[list[int]], trained: bool, most: int | None
) -> None:
    """Of no more than `most` segments."""
    most = None if strategy == "wrap" else most
    config = PackConfig(LENGTH, strategy, max_segments_per_row=most)
    rows = [row for plan in packed(lengths, config, trained=trained) for row in plan]
    tokens = [token for row in rows for segment in row for token in segment]
    assert sorted(tokens) == all_tokens(lengths, trained)
    for row in rows:
        assert 0 < sum(map(len, row)) <= LENGTH
        assert most is None or len(row) <= most
        for segment in row:  # a part of one document, without a gap
            assert len({token[:2] for token in segment}) == 1
            assert [token[2] - segment[0][2] for token in segment] == list(range(len(segment)))


@pytest.mark.parametrize("strategy", ["next-fit", "wrap"])
@given(lengths=BATCHES)
def test_an_order_that_is_kept_is_kept_over_windows(
    strategy: str, lengths: list[list[int]]
) -> None:
    """As if there were one window: the open row goes on in the next."""
    small = packed(lengths, PackConfig(LENGTH, strategy))
    large = packed(lengths, PackConfig(LENGTH, strategy), every=1 << 30)
    assert [row for plan in small for row in plan] == [row for plan in large for row in plan]


@given(lengths=BATCHES)
def test_only_badly_filled_rows_are_carried_and_not_many(lengths: list[list[int]]) -> None:
    window, config = Window(PackConfig(LENGTH), 0), PackConfig(LENGTH)
    for batch in batches_of(lengths, trained=False):
        window.add(batch, fit(batch.offsets, config.max_length, "split", "right"))
        if not window.tokens:
            continue
        there = window.tokens
        written = rows_of(window.rows())
        assert there == window.tokens + sum(len(segment) for row in written for segment in row)
        # at most a quarter of the rows of the plan
        assert window.tokens <= LENGTH * (len(written) // 3)


@given(lengths=BATCHES.filter(lambda batches: sum(map(sum, batches)) > 0))
def test_what_rows_cost_before_they_are_balanced(lengths: list[list[int]]) -> None:
    [planned, alone] = [
        _last(lengths, PackConfig(LENGTH, balance=balance)) for balance in ("attention", "none")
    ]
    assert alone.unbalanced is None
    expected = AttentionCost.of(alone.stock.length[alone.order], alone.row_offsets)
    assert planned.unbalanced == expected
    balanced = AttentionCost.of(planned.stock.length[planned.order], planned.row_offsets)
    assert balanced.total == expected.total
    assert balanced.squares <= expected.squares


def _last(lengths: list[list[int]], config: PackConfig) -> PlannedRows:
    """All in one plan."""
    window = Window(config, 0)
    for batch in batches_of(lengths, trained=False):
        window.add(batch, fit(batch.offsets, LENGTH, "split", "right"))
    return window.rows(last=True)


def test_what_was_cut_off_does_not_stay() -> None:
    """A batch of which a little is packed is not held whole."""
    (batch,) = batches_of([[LENGTH * 1000]], trained=True)
    window = Window(PackConfig(LENGTH), 0)
    window.add(batch, fit(batch.offsets, LENGTH, "truncate", "right"))
    planned = window.rows(last=True)
    assert len(planned.stock.ids) == LENGTH
    assert planned.stock.trained is not None
    assert len(planned.stock.trained) == LENGTH
