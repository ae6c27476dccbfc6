"""Which rows make a training step, and which rank and micro-batch takes each of them.

A place counts the rows that all ranks together have taken since the run began: in a step that
begins at place s, row i of rank r is at place s + i * world_size + r. `Order` shuffles rows into
places; it depends on the number of rows, the seed and the epoch alone. `Schedule` keeps that order,
or deals the rows of each step or window of steps again, so that all ranks have equal costs.

A row costs `linear * L + sum(l ** 2)`. Everything but attention costs as much in each of the L
places, padding included; attention costs a segment the square of its length l. For a transformer,
`linear` is about six times its hidden size: its matrices against the two products of attention.

A run may go on with other sizes of steps in the middle of a step. The rows that are left of it then
depend on the sizes that dealt it, so a saved state lists these (`Schedule.history`). Nothing is
computed before it is needed; memory holds 8 bytes a row for costs, and the rows of a window.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from packer_cli._kernels import dealing, plans
from packer_cli.errors import DataError, UsageError, one_of
from packer_cli.options.option import plain_int
from packer_cli.options.run_options import StepOptions
from packer_cli.records import Int64
from packer_cli.result.wording import plural

Float64 = npt.NDArray[np.float64]
Cost = Callable[[Int64], npt.ArrayLike]
Balance = Literal["step", "order"]
BALANCES: tuple[Balance, ...] = ("step", "order")
WINDOW = 64
_AT_ONCE = 4096  # rows: small steps are dealt faster together
_LINEAR = 6  # for each unit of the hidden size


@dataclass(frozen=True)
class StepSizes:
    """Sizes of a step: `batch_size` rows in each of `micro_batches`, on each of the ranks.

    Raises UsageError for a size below 1.
    """

    world_size: int
    batch_size: int = 1
    micro_batches: int = 1

    def __post_init__(self) -> None:
        for name, size in list(vars(self).items()):
            object.__setattr__(self, name, whole_size(name, size))

    def __str__(self) -> str:
        batches = plural(self.micro_batches, "micro-batch", "micro-batches")
        return f"{plural(self.world_size, 'rank')} x {batches} x {plural(self.batch_size, 'row')}"

    @property
    def micro_step(self) -> int:
        """Rows of one micro-batch of all ranks."""
        return self.world_size * self.batch_size

    @property
    def rows(self) -> int:
        """Rows of a step of all ranks."""
        return self.micro_step * self.micro_batches


class StepRange(NamedTuple):
    """Places begin..end."""

    begin: int
    end: int


class Schedule:
    """Rows of the places of a run, over all epochs.

    order    the rows before they are dealt
    sizes    of the steps
    balance  None: rows stay in their order. "step": the rows of each step are dealt to ranks and
             micro-batches so that their costs are even. "order": rows of like cost also meet in
             a step, among the rows of `window` steps
    costs    float64[rows], for balance
    begin    the place where the run begins or goes on
    even     False: an epoch has all of its rows, and the first ranks one more than the others
    dealt    the `history` of the schedule that dealt the rows before `begin`

    `grid` has the limits of epochs and steps. An interrupted step or window may be left in the
    middle. Its rows that were not taken keep their places, at the beginning of the next one, and
    the order goes on behind them.

    Raises UsageError for an unknown balance, and DataError if there are more ranks than rows.
    """

    def __init__(
        self,
        order: Order,
        sizes: StepSizes,
        *,
        balance: Balance | None = None,
        window: int = WINDOW,
        costs: Float64 | None = None,
        begin: int = 0,
        even: bool = True,
        dealt: Sequence[Sequence[int]] = (),
    ) -> None:
        if balance is not None and balance not in BALANCES:
            raise one_of("balance", balance, BALANCES)
        self.order, self.sizes, self.begin = order, sizes, begin
        self._balance, self._window = balance, whole_size("window", window)
        self._costs = costs
        *earlier, (first, *known) = dealt or [(begin, *astuple(sizes))]
        if StepSizes(*known) != sizes or (begin - first) % sizes.world_size:
            first, earlier = begin, [*dealt]
        self.grid = Grid(order.rows, first, sizes, window if balance == "order" else 1, even=even)
        self._before: Schedule | None = None
        # before `_left`, rows are those that `_before` has in the same places; from `_settled` on,
        # those of the order
        self._left = self._settled = first
        if earlier:
            place, *known = earlier.pop()
            self._before = Schedule(
                order, StepSizes(*known), balance=balance, window=window, costs=costs, begin=place,
                even=even, dealt=earlier,
            )  # fmt: skip
            if (interrupted := self._before.grid.window_at(first)).begin < first:
                self._left = interrupted.end
            self._settled = max(self._left, self._before._settled)
        # assigned at once: after a KeyboardInterrupt, and in a second thread, it is still right
        self._block = StepRange(-1, -1), np.empty(0, np.int64)

    def options(self) -> dict[str, Any]:
        """Return the options, other than costs and sizes of steps, that rows depend on."""
        balance = {"balance": self._balance} if self._balance else {}
        window = {"window": self._window} if self._balance == "order" else {}
        return self.order.options() | balance | window

    def history(self, place: int) -> list[list[int]]:
        """Return the sizes that dealt the rows from `place` on, oldest first.

        Each is [first place, world_size, batch_size, micro_batches].
        """
        needed, first, schedule = list[list[int]](), place, self
        while True:
            needed.insert(0, [schedule.grid.begin, *astuple(schedule.sizes)])
            first = schedule.grid.window_at(first).begin
            if schedule._before is None or first >= schedule._settled:
                return needed
            first, schedule = schedule.grid.begin, schedule._before

    def rows_at(self, begin: int, end: int) -> Int64:
        """Return the rows of the places begin..end, int64[end - begin], from `grid.begin` on."""
        return _rows_of_blocks(self._rows_from, begin, end)

    def _rows_from(self, place: int, most: int) -> Int64:
        """Return `most` rows from a place on, or fewer: all of one block."""
        block, rows = self._block
        if not block.begin <= place < block.end:
            begin, end = self.grid.window_at(place)
            if self._balance != "order":  # as many whole steps as make a block
                several = begin + _AT_ONCE // self.sizes.rows * self.sizes.rows
                end = max(end, min(several, self.grid.epoch_at(begin).end))
            block, rows = StepRange(begin, end), self._rows_to_deal(begin, end)
            if self._balance is not None:
                assert self._costs is not None  # noqa: S101 for mypy: balance needs them
                by_window = self._balance == "order"
                name = f"{self.order.seed}/micro-steps from {begin}" if by_window else None
                rows = _deal(rows, self._costs, self.sizes, name)
            self._block = block, rows
        return rows[place - block.begin :][:most]

    def _rows_to_deal(self, begin: int, end: int) -> Int64:
        """Return the rows that are dealt in the places begin..end."""
        if self._before is None:
            return self.order.rows_at(begin, end)
        middle = min(max(begin, self._left), end)
        left = self._before.rows_at(begin, middle)
        return np.concatenate([left, self._before._rows_to_deal(middle, end)])


def _deal(rows: Int64, costs: Float64, sizes: StepSizes, shuffle: str | None) -> Int64:
    """Deal rows, the same number to each rank, at costs that are as even as possible.

    rows     int64[n], those of steps one after another, of which the last may be shorter; or those
             of a window of steps
    costs    float64[all rows]
    shuffle  determines the order of a window's micro-steps; None: each step is dealt by itself

    A step of W ranks, M micro-batches and B rows in each has M micro-steps of W * B rows.

    1. Rows of like cost make a micro-step, in each step or in the window.
    2. In a window, micro-steps are shuffled, and steps are made of them in turn.
    3. Rows are dealt so that the sums of ranks are even in each micro-step and in the whole step.

    Returns the same rows by places: in each step, row i of rank r is at i * world_size + r.
    """
    by_cost = np.empty(len(rows), np.int64)
    size = min(sizes.rows, len(rows)) if shuffle is None else len(rows)
    dealing.costliest_first(costs[rows], size, by_cost)
    rows = rows[by_cost]
    if shuffle is not None:
        size = min(sizes.micro_step, len(rows))
        whole = len(rows) // size
        shuffled = rows[: whole * size].reshape(whole, size)[permutation(whole, shuffle)]
        rows = np.concatenate([shuffled.ravel(), rows[whole * size :]])
    dealt, turns = np.empty(len(rows), np.int64), len(rows) // sizes.world_size
    batch_size, micro_batches = min(sizes.batch_size, turns), min(sizes.micro_batches, turns)
    by_step = shuffle is None
    dealing.deal(costs[rows], sizes.world_size, batch_size, micro_batches, by_step, dealt)
    return rows[dealt]


class Grid:
    """Limits of epochs, steps and windows of steps, in the places from `begin` on.

    Every rank gets the same number of rows in an epoch. The rows that are left over, fewer than
    there are ranks, begin the next epoch. Steps and windows are counted from the beginning of each
    epoch, so its last step may be shorter.

    rows    of an epoch
    sizes   of a step
    window  steps in a window, at most
    even    False: an epoch has all of its rows, and the first ranks one more than the others

    Raises DataError if there are more ranks than rows.
    """

    def __init__(
        self, rows: int, begin: int, sizes: StepSizes, window: int = 1, *, even: bool = True
    ) -> None:
        if rows < sizes.world_size:
            raise DataError(
                f"{sizes.world_size} ranks share {rows} rows: some would get none",
                "use fewer ranks, or pack more data or shorter rows",
            )
        self.begin, self.sizes, self.window = begin, sizes, window
        self._rows = rows
        self._ranks = sizes.world_size if even else 1

    def epoch_of(self, place: int) -> int:
        """Return the number of the epoch that contains a place where the ranks' turns begin."""
        return (place - self._within_turn(place) + self._ranks - 1) // self._rows

    def epoch_at(self, place: int) -> StepRange:
        """Return the epoch that contains a place, from `begin` on."""
        return self.epoch(self.epoch_of(place))

    def epoch(self, number: int) -> StepRange:
        """Return the epoch with a number, from `begin` on."""
        begin, end = (
            first - self._within_turn(first)
            for first in (number * self._rows, (number + 1) * self._rows)
        )
        return StepRange(max(self.begin, begin), end)

    def step_at(self, place: int) -> StepRange:
        """Return the step that contains a place."""
        begin, end = self.epoch_at(place)
        begin = place - (place - begin) % self.sizes.rows
        return StepRange(begin, min(begin + self.sizes.rows, end))

    def window_at(self, place: int) -> StepRange:
        """Return the window of steps that contains a place.

        The whole steps of an epoch are cut into windows of about equal length. A step that begins
        with rows left over from the epoch before is a window of its own, and so is a shorter one.
        """
        epoch, step = self.epoch_at(place), self.step_at(place)
        size = self.sizes.rows
        first_row = step.begin // self._rows * self._rows
        if step.end - step.begin < size or step.end > first_row + self._rows:
            return step
        first = -(-(max(first_row, epoch.begin) - epoch.begin) // size)
        count = (min(first_row + self._rows, epoch.end) - epoch.begin) // size - first
        windows = -(-count // self.window)
        number = (((step.begin - epoch.begin) // size - first + 1) * windows - 1) // count
        begin = epoch.begin + first * size
        return StepRange(
            begin + count * number // windows * size, begin + count * (number + 1) // windows * size
        )

    def _within_turn(self, place: int) -> int:
        """Count the ranks that have taken a row in the turn that contains a place."""
        return (place - self.begin) % self._ranks


class Steps:
    """Steps of a loop by their numbers, from 0 where the schedule begins or goes on.

    A step is `micro_batches` batches of each rank. The last step of an epoch may have fewer, and
    its last batch fewer rows.

    drop_last     the loader omits a last batch with fewer rows
    most_batches  of a rank in an epoch: all epochs of a Trainer have the same number. None: all
    """

    def __init__(
        self, schedule: Schedule, *, drop_last: bool = False, most_batches: int | None = None
    ) -> None:
        self._schedule, self._drop_last, self._most = schedule, drop_last, most_batches
        self._ranks, self._batch_size = schedule.sizes.world_size, schedule.sizes.batch_size

    def begin_of(self, step: int) -> int:
        """Return the place at which a step begins.

        Raises UsageError for a negative step, DataError if no epoch has a batch.
        """
        if step < 0:
            raise UsageError(f"step: {step} is negative", "steps count from 0, the first one")
        epoch = self._schedule.grid.epoch_of(self._schedule.begin)
        if step >= (first := self._count(epoch)):
            # later epochs have one of two lengths, in a pattern that repeats after `ranks` epochs
            pattern = sum(self._count(epoch + turn) for turn in range(1, self._ranks + 1))
            if not pattern:
                raise DataError(
                    f"no epoch has a batch of {self._batch_size} rows for each rank",
                    "use smaller batches, or a loader without drop_last",
                )
            turns, step = divmod(step - first, pattern)
            epoch += 1 + turns * self._ranks
            while step >= (count := self._count(epoch)):
                step, epoch = step - count, epoch + 1
        return self._epoch(epoch).begin + step * self._schedule.sizes.rows

    def rows_of(self, step: int) -> list[Int64]:
        """Return the rows of each rank in a step, int64[n], in the order of the rank's batches.

        Raises as `begin_of`.
        """
        place = self.begin_of(step)
        number = self._schedule.grid.epoch_of(place)
        epoch = self._epoch(number)
        rows = self._schedule.rows_at(place, min(place + self._schedule.sizes.rows, epoch.end))
        before = (place - epoch.begin) // self._ranks  # rows of a rank
        return [
            rows[rank :: self._ranks][: max(0, self._taken(number, rank) - before)].copy()
            for rank in range(self._ranks)
        ]

    def _epoch(self, number: int) -> StepRange:
        begin, end = self._schedule.grid.epoch(number)
        return StepRange(max(begin, self._schedule.begin), end)

    def _taken(self, epoch: int, rank: int) -> int:
        """Count the rows that a rank takes in an epoch."""
        begin, end = self._epoch(epoch)
        rows = len(range(begin + rank, end, self._ranks))
        if self._most is not None:
            rows = min(rows, self._most * self._batch_size)
        return rows - rows % self._batch_size if self._drop_last else rows

    def _count(self, epoch: int) -> int:
        """Count the steps of an epoch."""
        return -(-self._taken(epoch, 0) * self._ranks // self._schedule.sizes.rows)


def even_order(
    squared_lengths: Int64, max_length: int, sizes: StepOptions, origin: str | Path
) -> Int64:
    """Return an order of rows, int64[rows], in which rows of like cost meet in a step, as with
    `PackedSampler(balance="order")`. The last ones are those that are left over, fewer than there
    are ranks, and those that the reader drops.

    squared_lengths  int64[rows], the sum of the squared segment lengths of each row; -1 if the
                     reader drops it
    sizes            of a trainer that fills batches of B rows in turn, and gives batch i to process
                     i % W, as Accelerate's `BatchSamplerShard` does: a step of M micro-batches is
                     W * B * M neighboring rows
    origin           name of what has the rows, for errors

    Raises UsageError if a step has more rows than there are.
    """
    read = np.flatnonzero(squared_lengths >= 0)
    of_step = StepSizes(sizes.ranks or 1, sizes.batch_size, sizes.micro_batches)
    if of_step.rows > len(read):
        raise UsageError(
            f"{origin}: has {len(read):,} rows to train on, fewer than a step of "
            f"{of_step.rows:,}: {of_step}",
            "give the sizes that the trainer is going to have, or pack more data",
        )
    # of two rows, the same one costs more for every hidden size
    costs = row_costs(squared_lengths[read], max_length, hidden_size=1)
    schedule = Schedule(Order(len(read)), of_step, balance="order", costs=costs)
    taken, place, end = list[Int64](), 0, schedule.grid.epoch_at(0).end
    while place < end:
        begin, place = schedule.grid.step_at(place)
        step = schedule.rows_at(begin, place)
        micro_steps = np.split(step, range(of_step.micro_step, len(step), of_step.micro_step))
        # row i of rank r is at i * ranks + r there
        taken += [part.reshape(-1, of_step.world_size).T.ravel() for part in micro_steps]
    rows = read[np.concatenate(taken)]
    return np.concatenate([rows, np.setdiff1d(np.arange(len(squared_lengths)), rows)])


def row_costs(
    squared_lengths: Int64,
    max_length: int,
    hidden_size: int | None = None,
    cost: Cost | None = None,
) -> Float64:
    """Return the cost of each row, float64[rows], in an arbitrary unit.

    squared_lengths  int64[rows], the sum of the squared segment lengths of each row
    hidden_size      of the model; or instead
    cost             a function of int64[n] of those sums that returns n costs. They are rounded to
                     float32: processors differ in the last bits of powers and the like, and ranks
                     that deal differently would take rows twice

    Raises UsageError unless exactly one of both is given, and for invalid costs.
    """
    if (hidden_size is None) == (cost is None):
        raise UsageError(
            "hidden_size and cost: " + ("neither" if cost is None else "both") + " given",
            "give the model's hidden size, hidden_size=config.hidden_size; or cost=, a function of "
            "the sums of squared segment lengths",
        )
    if cost is None:
        linear = _LINEAR * whole_size("hidden_size", hidden_size)
        return np.add(squared_lengths, linear * max_length, dtype=np.float64)
    returned = cost(squared_lengths)
    try:
        with np.errstate(over="ignore"):  # to inf, which is refused below
            costs = np.array(returned, np.float32).astype(np.float64)
    except (TypeError, ValueError):
        costs = np.empty(0)
    if costs.shape != squared_lengths.shape or not (np.isfinite(costs) & (costs >= 0)).all():
        raise UsageError(
            f"cost: returned no array of {len(squared_lengths)} finite costs, each 0 or more",
            "return a cost for each of the sums that it is given",
        )
    return costs


def whole_size(name: str, size: object) -> int:
    """Return a size as a plain int, which JSON can hold. Raises UsageError if it is below 1."""
    if (plain := plain_int(name, size)) < 1:
        raise UsageError(f"{name}: {plain} is less than 1")
    return plain


def check_rank(rank: int, world_size: int) -> None:
    """Raise UsageError for a rank that is out of range."""
    if not 0 <= rank < world_size:
        raise UsageError(f"rank: {rank} is not between 0 and world_size - 1, {world_size - 1}")


class Order:
    """Shuffled rows of all epochs, by places 0, 1, ...

    rows    of an epoch
    seed    None: rows stay as they are stored
    block_rows, window_blocks   rows are shuffled in blocks that are read together, and then
            within windows of blocks

    Raises UsageError for a size below 1.
    """

    def __init__(
        self, rows: int, seed: int | None = 0, block_rows: int = 256, window_blocks: int = 64
    ) -> None:
        self.rows, self.seed = rows, seed
        self._block_rows = whole_size("block_rows", block_rows)
        self._window_blocks = whole_size("window_blocks", window_blocks)

    def options(self) -> dict[str, Any]:
        """Return the options that the order depends on."""
        return {
            "rows": self.rows,
            "seed": self.seed,
            "block_rows": self._block_rows,
            "window_blocks": self._window_blocks,
        }

    def rows_at(self, begin: int, end: int) -> Int64:
        """Return the rows of the places begin..end, int64[end - begin]."""
        return _rows_of_blocks(self._rows_from, begin, end)

    def _rows_from(self, place: int, most: int) -> Int64:
        """Return `most` rows from a place on, or fewer: all of one window or unshuffled epoch."""
        epoch, place = divmod(place, self.rows)
        if self.seed is None:
            return np.arange(place, min(place + most, self.rows))
        name, size, window_blocks = f"{self.seed}/{epoch}", self._block_rows, self._window_blocks
        blocks, last = _shuffled_blocks(name, -(-self.rows // size))
        missing = len(blocks) * size - self.rows  # in the last block, which may be in any window

        def begin_of(window: int) -> int:
            return window * window_blocks * size - missing * (window > last // window_blocks)

        window = place // (size * window_blocks)
        window += place >= begin_of(window + 1)
        rows = _shuffled_window(name, self.rows, size, window_blocks, window)
        return rows[place - begin_of(window) :][:most]


# The caches hold one window: places are read one after the other, by all ranks alike.
@lru_cache(maxsize=2)
def _shuffled_blocks(name: str, count: int) -> tuple[Int64, int]:
    """Return (block numbers int64[count], the index of the last block among them)."""
    blocks = permutation(count, f"{name}/blocks")
    return blocks, int(np.flatnonzero(blocks == count - 1)[0])


@lru_cache(maxsize=1)
def _shuffled_window(
    name: str, rows: int, block_rows: int, window_blocks: int, window: int
) -> Int64:
    """Return the rows of a window of blocks, in the order that `name` determines."""
    blocks, _ = _shuffled_blocks(name, -(-rows // block_rows))
    begins = blocks[window * window_blocks :][:window_blocks] * block_rows
    members = (begins[:, None] + np.arange(block_rows)).ravel()
    members = members[members < rows]
    return members[permutation(len(members), f"{name}/{window}")]


def permutation(count: int, name: str) -> Int64:
    """Return a permutation, int64[count], by packer's own generator: numpy's may change."""
    seed = hashlib.sha256(name.encode()).digest()[:8]
    numbers = np.empty(count, np.int64)
    plans.permutation(numbers, int.from_bytes(seed, "little"))
    return numbers


def _rows_of_blocks(rows_from: Callable[[int, int], Int64], begin: int, end: int) -> Int64:
    """Return the rows of the places begin..end from blocks.

    rows_from  (place, most) to the rows from a place on, `most` or fewer
    """
    pieces = [np.empty(0, np.int64)]
    while begin < end:
        pieces.append(rows_from(begin, end - begin))
        begin += len(pieces[-1])
    return np.concatenate(pieces)
