"""Schedules: which rows make a step, and every row once an epoch however often sizes change."""

from __future__ import annotations

import tracemalloc
from collections import Counter, deque
from collections.abc import Iterator
from itertools import count, islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from packer_cli import steps as scheduling
from packer_cli.steps import Grid, Order, Schedule, Steps, StepSizes, row_costs

ORDER = ("seed", "block_rows", "window_blocks")
SMALL: dict[str, Any] = {"seed": 3, "block_rows": 4, "window_blocks": 3}
relaxed = settings(max_examples=80, deadline=None)
ManySizes = tuple[int, int, int]  # world_size, batch_size, micro_batches


def costs_of(rows: int) -> np.ndarray:
    """Long-tailed, and some of them equal."""
    return np.random.default_rng(rows).lognormal(3, 1.5, rows).round()


def schedule(rows: int, sizes: ManySizes, balance: Any = None, **options: Any) -> Schedule:
    options = {"costs": costs_of(rows)} | SMALL | options
    order = {name: options.pop(name) for name in ORDER if name in options}
    return Schedule(Order(rows, **order), StepSizes(*sizes), balance=balance, **options)


def steps_of(one: Schedule, begin: int, end: int) -> list[np.ndarray]:
    """The rows of each step between two places."""
    steps = []
    while begin < end:
        _, stop = one.grid.step_at(begin)
        steps.append(one.rows_at(begin, stop))
        begin = stop
    return steps


many_rows = st.integers(7, 200)
many_sizes = st.tuples(st.integers(1, 7), st.integers(1, 3), st.integers(1, 4))
balances = st.sampled_from(["step", "order"])


@relaxed
@given(many_rows, many_sizes, st.integers(1, 5))
def test_windows_have_their_rows_and_cross_no_epoch(
    rows: int, sizes: ManySizes, window: int
) -> None:
    """And balanced steps those of plain ones."""
    hows = (None, "step", "order")
    plain, steps, even = (schedule(rows, sizes, how, window=window) for how in hows)
    for epoch in range(3):
        begin, end = steps.grid.epoch_at(epoch * rows)
        assert (begin, end) == plain.grid.epoch_at(epoch * rows)
        both = zip(steps_of(plain, begin, end), steps_of(steps, begin, end), strict=True)
        assert all(sorted(one) == sorted(other) for one, other in both)
    world_size, batch_size, micro_batches = sizes
    grid = Grid(rows, 0, StepSizes(*sizes), window)
    place, most = 0, world_size * batch_size * micro_batches
    while place < 3 * rows - world_size:
        begin, end = grid.window_at(place)
        assert begin == place < end <= place + window * most
        expected = plain.rows_at(begin, end)
        assert sorted(even.rows_at(begin, end)) == sorted(expected)
        assert begin // rows == (end - 1) // rows or end <= place + most
        place = end


def test_windows_of_an_epoch_are_about_as_long() -> None:
    """65 steps are not 64 and one, which would have no others to meet."""
    grid = Grid(65 * 8, 0, StepSizes(4, 1, 2), window=64)
    assert grid.window_at(0) == (0, 32 * 8)
    assert grid.window_at(32 * 8) == (32 * 8, 65 * 8)


@pytest.mark.parametrize("balance", [None, "step", "order"])
@pytest.mark.parametrize("seed", [None, 0])
def test_rows_are_the_same_however_they_are_asked_for(balance: Any, seed: int | None) -> None:
    """1003 rows are 250 blocks and a shorter one, which is in any window."""
    options = {"window": 5, "seed": seed}
    one, other = (schedule(1003, (4, 2, 3), balance, **options) for _ in range(2))
    whole = one.rows_at(0, 2500)
    rng = np.random.default_rng(0)
    for _ in range(100):
        begin, end = sorted(rng.integers(0, 2500, 2).tolist())
        assert other.rows_at(begin, end).tolist() == whole[begin:end].tolist()


@relaxed
@given(many_rows, balances, st.lists(st.tuples(many_sizes, st.integers(0, 60)), max_size=12),
       st.integers(1, 4))  # fmt: skip
def test_every_row_is_taken_once_an_epoch_whatever_the_sizes_were(
    rows: int, balance: str, runs: list[tuple[ManySizes, int]], window: int
) -> None:
    """Runs that end anywhere, and go on with other sizes from the state of the last one."""
    place, dealt, taken = 0, [], []
    for sizes, turns in [*runs, ((3, 2, 2), 1000), ((3, 2, 2), 1000)]:
        one = schedule(rows, sizes, balance, window=window, begin=place, dealt=dealt)
        stop = min(place + turns * sizes[0], one.grid.epoch_at(place).end)
        taken += one.rows_at(place, stop).tolist()
        place, dealt = stop, one.history(stop)
    assert len(dealt) == 1  # what no row depends on any more is forgotten
    plain = schedule(rows, (1, 1, 1))
    assert Counter(taken) == Counter(plain.rows_at(0, place).tolist())


def test_what_was_left_of_a_step_comes_first() -> None:
    one = schedule(100, (4, 1, 3), "step")
    steps = one.rows_at(0, 24)
    dealt = one.history(16)  # a third of the second step is taken
    more = schedule(100, (2, 1, 5), "step", begin=16, dealt=dealt)
    assert dealt == [[0, 4, 1, 3]]
    assert more.history(16) == [[0, 4, 1, 3], [16, 2, 1, 5]]
    assert more.history(26) == [[16, 2, 1, 5]]
    plain = schedule(100, (1, 1, 1)).rows_at(0, 100)
    assert sorted(more.rows_at(16, 26)) == sorted([*steps[16:24], *plain[24:26]])
    assert [more.grid.step_at(place) for place in (16, 26)] == [(16, 26), (26, 36)]
    assert more.grid.epoch_at(16) == (16, 100)
    assert (
        schedule(100, (2, 1, 5), "step", begin=26, dealt=more.history(26)).rows_at(26, 90).tolist()
        == more.rows_at(26, 90).tolist()
    )


@pytest.mark.parametrize(
    ("balance", "name", "turn"),
    [(None, "plans.permutation", 1), (None, "plans.permutation", 400),
     ("step", "plans.permutation", 340), ("step", "dealing.deal", 1), ("order", "dealing.deal", 2)],
)  # fmt: skip
def test_an_interruption_leaves_no_rows_of_another_place(
    monkeypatch: pytest.MonkeyPatch, balance: Any, name: str, turn: int
) -> None:
    """In a notebook the same sampler goes on after Ctrl+C."""
    expected = schedule(9000, (4, 2, 2), balance).rows_at(0, 9000).tolist()
    one = schedule(9000, (4, 2, 2), balance)
    one.rows_at(0, 16)
    module, function = name.split(".")
    kernels, turns = getattr(scheduling, module), count(1)

    def interrupted(*arguments: Any) -> Any:
        if next(turns) == turn:
            raise KeyboardInterrupt
        return getattr(kernels, function)(*arguments)

    own = {**vars(kernels), function: interrupted}
    monkeypatch.setattr(scheduling, module, SimpleNamespace(**own))
    places = iter(range(0, 9000, 8))
    with pytest.raises(KeyboardInterrupt):
        deque(one.rows_at(place, place + 8) for place in places)
    place = next(places) - 8
    assert one.rows_at(place, place + 8).tolist() == expected[place : place + 8]
    assert one.rows_at(0, 9000).tolist() == expected


@pytest.mark.parametrize("balance", ["step", "order"])
@pytest.mark.parametrize("sizes", [(2, 2**40, 2**40), (2, 2**62, 4), (2, 1, 2**70), (1, 10**30, 1)])
def test_steps_far_larger_than_the_epoch(balance: Any, sizes: ManySizes) -> None:
    assert sorted(schedule(100, sizes, balance).rows_at(0, 100)) == [*range(100)]


@pytest.mark.parametrize(
    ("balance", "expected"),
    [
        ("step", [9, 11, 4, 10, 5, 7, 8, 3, 2, 0, 1, 6]),
        ("order", [4, 10, 9, 11, 2, 7, 8, 5, 1, 6, 0, 3]),
    ],
)
def test_the_schedule_is_the_same_with_every_version(balance: Any, expected: list[int]) -> None:
    """A run that is resumed after an upgrade goes on as it was."""
    costs = np.array([5, 1, 9, 3, 3, 7, 2, 8, 6, 4, 1, 5], np.float64)
    order = Order(12, block_rows=2, window_blocks=3)
    one = Schedule(order, StepSizes(2, 1, 2), balance=balance, costs=costs, window=2)
    assert one.rows_at(0, 12).tolist() == expected


def test_a_row_costs_its_places_and_its_squares() -> None:
    squared = np.array([16, 100], np.int64)
    assert row_costs(squared, 10, hidden_size=4).tolist() == [256, 340]
    assert row_costs(squared, 10, cost=lambda sums: sums * 2).tolist() == [32, 200]
    # numpy's powers differ in their last bits, from one kind of processor to the next
    squared = np.random.default_rng(0).integers(1000, 10**9, 10_000)
    one = row_costs(squared, 4096, cost=lambda sums: sums**0.6)
    other = row_costs(squared, 4096, cost=lambda sums: np.nextafter(sums**0.6, np.inf))
    assert one.tolist() == other.tolist()


@pytest.mark.parametrize("balance", ["step", "order"])
def test_it_takes_8_bytes_a_row(balance: Any) -> None:
    """And the sums of squares as many, which are mapped."""
    rows = 500_000
    squared = np.arange(rows)
    tracemalloc.start()
    costs = row_costs(squared, 4096, hidden_size=16)
    one = Schedule(Order(rows), StepSizes(8, 2, 4), balance=balance, costs=costs)
    one.rows_at(0, 8)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12 * rows


def steps_by_hand(
    rows: int, sizes: ManySizes, begin: int, *, drop_last: bool, even: bool, most: int | None
) -> Iterator[list[list[int]]]:
    """The rows of each rank, step after step, as loaders take them of the order 0, 1, 2, ..."""
    world, size, micro_batches = sizes
    while True:
        epoch = (begin + (world - 1 if even else 0)) // rows
        end = (epoch + 1) * rows
        end -= (end - begin) % world if even else 0
        shares = [range(begin + rank, end, world) for rank in range(world)]
        batches = [[one[i : i + size] for i in range(0, len(one), size)][:most] for one in shares]
        if drop_last:
            batches = [[one for one in its if len(one) == size] for its in batches]
        for first in range(0, max(map(len, batches)), micro_batches):
            yield [[place % rows for one in its[first : first + micro_batches] for place in one]
                   for its in batches]  # fmt: skip
        begin = end


@relaxed
@given(
    rows=st.integers(1, 40), begin=st.integers(0, 130), drop_last=st.booleans(), even=st.booleans(),
    sizes=st.tuples(st.integers(1, 7), st.integers(1, 4), st.integers(1, 3)),
    most=st.none() | st.integers(1, 5),
)  # fmt: skip
def test_steps_are_those_of_a_loop(
    rows: int, sizes: ManySizes, begin: int, drop_last: bool, even: bool, most: int | None
) -> None:
    assume(rows // sizes[0] >= (sizes[1] if drop_last else 1))
    begin -= 0 if even else begin % rows % sizes[0]
    one = Schedule(Order(rows, None), StepSizes(*sizes), begin=begin, even=even)
    steps = Steps(one, drop_last=drop_last, most_batches=most)
    how: Any = {"drop_last": drop_last, "even": even, "most": most}
    for number, step in enumerate(islice(steps_by_hand(rows, sizes, begin, **how), 50)):
        assert [its.tolist() for its in steps.rows_of(number)] == step, number
    if not begin and even:  # far away, steps still follow one another
        begins = [steps.begin_of(number) for number in (10**12, 10**12 + 1)]
        assert 0 < begins[1] - begins[0] <= one.sizes.rows + rows
