"""`Schedule`: which rows make a step, and which rank and micro-batch each of them goes to.

Places count the rows that all ranks have taken since the run began: row i of rank r in a step that
begins at place s is at place s + i · W + r. Without balance, rows stand there in the order of
`Order`, whatever the sizes. With it, steps or windows of them are dealt when they are asked for,
from the rows that the order has in the same places: nothing is paid at the beginning of an epoch,
and memory holds the costs and a window.

Which sizes dealt rows from which place on is part of a state, as far as rows still to come depend
on it: a run may go on with other sizes in the middle of a step. `Grid` is the arithmetic of epochs,
steps and windows, `Era` the rows of places that the same sizes deal, and the functions at the end
deal them.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from packer_cli._kernels import dealing
from packer_cli.errors import DataError, UsageError, one_of
from packer_cli.records import Int64
from packer_cli.steps.costs import Float64, whole_size
from packer_cli.steps.order import BLOCK_ROWS, WINDOW_BLOCKS, Order, permutation

Balance = Literal["step", "order"]
BALANCES = ("step", "order")
WINDOW = 64
_AT_ONCE = 4096  # rows


class Schedule:
    """Row numbers of the places of a whole run, all epochs.

    rows             of an epoch
    seed, stages, block_rows, window_blocks   of the order
    world_size, batch_size, micro_batches     ranks, rows of a micro-batch, micro-batches of a step
    balance          None: as the order has them. "step": the rows of a step are dealt to ranks and
                     micro-batches evenly. "order": rows of like cost meet, within `window` steps.
    costs            float64[rows], for balance
    begin            where the run goes on
    dealt            which sizes dealt rows before that: as `history` gave it

    Raises UsageError for sizes below 1 and for balance without a cost for each row, and DataError
    for more ranks than rows.
    """

    def __init__(
        self,
        rows: int,
        *,
        world_size: int,
        seed: int | None = 0,
        stages: Sequence[int] = (),
        block_rows: int = BLOCK_ROWS,
        window_blocks: int = WINDOW_BLOCKS,
        batch_size: int = 1,
        micro_batches: int = 1,
        balance: Balance | None = None,
        window: int = WINDOW,
        costs: Float64 | None = None,
        begin: int = 0,
        dealt: Sequence[Sequence[int]] = (),
    ) -> None:
        self.sizes = Sizes(world_size, batch_size, micro_batches)
        self._balance, self._window = balance, whole_size("window", window)
        self._order = Order(rows, seed, block_rows, window_blocks, stages)
        deal = _dealing(balance, rows, seed, costs)
        by_window = balance == "order"
        before: Era | None = None
        for place, sizes in _with_now(dealt, begin, self.sizes):
            grid = Grid(rows, place, sizes, self._order.ends, window if by_window else 1)
            before = Era(grid, self._order.rows_at, deal, 0 if by_window else _AT_ONCE, before)
        assert before is not None  # noqa: S101 for mypy: it is that of `begin`
        self._era = before

    def rows_at(self, begin: int, end: int) -> Int64:
        """int64[end - begin], the rows of the places begin..end.

        Raises UsageError for places of which it is not known any more how they were dealt.
        """
        pieces = []
        while begin < end:
            era, stop = self._era_at(begin)
            pieces.append(era.rows_at(begin, min(end, stop)))
            begin = stop
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    @property
    def window_rows(self) -> int:
        """How many rows, of all ranks, are dealt together at most."""
        return self.sizes.step * (self._window if self._balance == "order" else 1)

    def epoch_of(self, place: int) -> int:
        """The number of the epoch that a place is in. Raises as `rows_at`."""
        return self._era_at(place)[0].grid.epoch_of(place)

    def epoch_at(self, place: int) -> Stretch:
        """(begin, end) of the epoch that a place is in, or of that part of it in which sizes are
        the same. Raises as `rows_at`.
        """
        era, stop = self._era_at(place)
        begin, end = era.grid.epoch_at(place)
        return Stretch(begin, min(end, stop))

    def step_at(self, place: int) -> Stretch:
        """(begin, end) of the step that a place is in. The last one of an epoch may be shorter, and
        one in which other sizes took over ends there. Raises as `rows_at`.
        """
        era, stop = self._era_at(place)
        begin, end = era.grid.step_at(place)
        return Stretch(begin, min(end, stop))

    def _era_at(self, place: int) -> tuple[Era, int]:
        """The era that a place is in, and where it ends."""
        era, end = self._era, sys.maxsize
        while place < era.grid.begin:
            if era.before is None:
                raise UsageError(
                    f"place {place}: rows before place {era.grid.begin} were dealt in a way that "
                    "is not known any more",
                    "take a state from an earlier time",
                )
            era, end = era.before, era.grid.begin
        return era, end

    def name(self) -> dict[str, Any]:
        """What the rows of places depend on, but for their costs and the sizes of steps."""
        balance = {"balance": self._balance} if self._balance else {}
        window = {"window": self._window} if self._balance == "order" else {}
        return self.order_name() | balance | window

    def order_name(self) -> dict[str, Any]:
        """What the order depends on, from which rows are dealt."""
        return self._order.name()

    def history(self, place: int) -> list[list[int]]:
        """[place, world_size, batch_size, micro_batches] of those that dealt rows from each place
        on, of which rows from `place` on depend.
        """
        eras = [era.grid for era in self._era.needed_from(place)]
        return [[grid.begin, *astuple(grid.sizes)] for grid in eras]


def _with_now(dealt: Sequence[Sequence[int]], begin: int, sizes: Sizes) -> list[tuple[int, Sizes]]:
    """(place, sizes) of those that dealt rows and, if they are others, of those that do now."""
    eras = [(place, Sizes(*its)) for place, *its in dealt]
    if not eras or eras[-1][1] != sizes or (begin - eras[-1][0]) % sizes.world_size:
        eras.append((begin, sizes))
    return eras


def _dealing(
    balance: Balance | None, rows: int, seed: int | None, costs: Float64 | None
) -> Deal | None:
    """How the rows of a block are dealt; None: they stay as they are."""
    if balance is None:
        return None
    if balance not in BALANCES:
        raise one_of("balance", balance, BALANCES)
    if costs is None or len(costs) != rows:
        found = "no costs" if costs is None else f"{len(costs)} costs"
        raise UsageError(f"balance: {balance!r} of {rows} rows, and {found}")
    if balance == "step":
        return partial(deal_in_steps, costs)
    return partial(deal_in_windows, costs, seed)


RowsAt = Callable[[int, int], Int64]  # places begin..end to rows
Deal = Callable[[Int64, int, "Sizes"], Int64]  # rows, where they begin, and the sizes of steps


class Era:
    """Row numbers of the places from `grid.begin` on, which the same sizes deal, up to the next
    interruption that changes them. Keeps one block of them, dealt.

    An interruption may leave a step or a window in the middle. Its rows that were not taken come
    first in the next era, in the places that they had in the last one, and the order goes on behind
    them.

    order    row numbers of the places begin..end, before any dealing
    deal     deals the rows of a block: a window
    at_once  or as many whole steps as have this many rows, where that is more: small ones are
             quicker together. Only where each is dealt by itself.
    before   the era that ends where this one begins
    """

    def __init__(
        self, grid: Grid, order: RowsAt, deal: Deal | None, at_once: int, before: Era | None
    ) -> None:
        self.grid, self.before = grid, before
        self._order, self._deal, self._at_once = order, deal, at_once
        self._dealt = Stretch(-1, -1), np.empty(0, np.int64)  # both at once: see `rows_at`
        begin = grid.begin
        # up to where rows are those that the era before has in these places
        self._left = before.grid.window_at(begin) if before else Stretch(begin, begin)
        if self._left.begin == begin:
            self._left = Stretch(begin, begin)
        # from where on rows are those of the order
        self._settled: int = max(self._left.end, before._settled if before else begin)

    def rows_at(self, begin: int, end: int) -> Int64:
        """int64[end - begin], the rows of the places begin..end.

        A block is kept only once it is dealt: after an interruption it is dealt again, and a second
        thread sees one block or the other.
        """
        pieces = []
        while begin < end:
            block, rows = self._dealt
            if not block.begin <= begin < block.end:
                block = self._block_at(begin)
                rows = self._before_dealing(*block)
                if self._deal is not None:
                    rows = self._deal(rows, block.begin, self.grid.sizes)
                self._dealt = block, rows
            piece = rows[begin - block.begin : end - block.begin]
            pieces.append(piece)
            begin += len(piece)
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def _block_at(self, place: int) -> Stretch:
        begin, end = self.grid.window_at(place)
        size = self.grid.sizes.step
        several = min(begin + self._at_once // size * size, self.grid.epoch_at(begin).end)
        return Stretch(begin, max(end, several))

    def _before_dealing(self, begin: int, end: int) -> Int64:
        """The rows that this era deals in the places begin..end."""
        if self.before is None:
            return self._order(begin, end)
        middle = min(max(begin, self._left.end), end)
        left = self.before.rows_at(begin, middle)
        return np.concatenate([left, self.before._before_dealing(middle, end)])

    def needed_from(self, place: int) -> list[Era]:
        """The eras that rows from a place on depend on, oldest first; this one is the last."""
        eras, first = [self], self.grid.window_at(place).begin
        while (before := eras[0].before) and first < eras[0]._settled:
            first = before.grid.window_at(eras[0].grid.begin).begin
            eras.insert(0, before)
        return eras


@dataclass(frozen=True)
class Sizes:
    """How many ranks take how many rows. Raises UsageError for a size below 1."""

    world_size: int
    batch_size: int = 1
    micro_batches: int = 1

    def __post_init__(self) -> None:
        for name, size in list(vars(self).items()):
            object.__setattr__(self, name, whole_size(name, size))

    @property
    def micro_step(self) -> int:
        """Rows of all ranks together in a micro-batch each."""
        return self.world_size * self.batch_size

    @property
    def step(self) -> int:
        """Rows of all ranks together in a step."""
        return self.micro_step * self.micro_batches


class Stretch(NamedTuple):
    """Places begin..end."""

    begin: int
    end: int


class Grid:
    """Arithmetic of the places from `begin` on, of a run whose epochs have `rows` rows: where
    epochs, steps and windows of steps begin and end.

    Every rank gets as many rows of an epoch as the others: the rows left over, fewer than there are
    ranks, begin the next one. Steps and windows are counted anew from the beginning of each epoch,
    so its last step may be shorter.

    sizes    of a step
    ends     of the stages in an epoch, the last one being `rows`
    window   how many steps make a window, at most
    even     False: an epoch has all of its rows, and the first ranks one more than the others

    Raises DataError for more ranks than rows.
    """

    def __init__(
        self,
        rows: int,
        begin: int,
        sizes: Sizes,
        ends: Sequence[int] = (),
        window: int = 1,
        *,
        even: bool = True,
    ) -> None:
        if rows < sizes.world_size:
            raise DataError(
                f"{sizes.world_size} ranks share {rows} rows: some would get none",
                "use fewer ranks, or pack more data or shorter rows",
            )
        self.begin, self.sizes, self.window = begin, sizes, window
        self._rows, self._ends = rows, ends or [rows]
        self._ranks = sizes.world_size if even else 1

    def epoch_of(self, place: int) -> int:
        """The number of the epoch that a place is in, if it is the first of a rank's batch."""
        return (place - self._within_ranks(place) + self._ranks - 1) // self._rows

    def epoch_at(self, place: int) -> Stretch:
        """The epoch that a place is in, or what these sizes have of it."""
        return self.epoch(self.epoch_of(place))

    def epoch(self, number: int) -> Stretch:
        """The epoch of a number, or what these sizes have of it."""
        return Stretch(max(self.begin, self._border(number)), self._border(number + 1))

    def step_at(self, place: int) -> Stretch:
        """The step that a place is in."""
        begin, end = self.epoch_at(place)
        begin = place - (place - begin) % self.sizes.step
        return Stretch(begin, min(begin + self.sizes.step, end))

    def window_at(self, place: int) -> Stretch:
        """The window of steps that a place is in.

        The whole steps that lie in one stage of an epoch are cut into windows as even as can be. A
        step in which a stage ends is one by itself, and so is a shorter one.
        """
        epoch, step = self.epoch_at(place), self.step_at(place)
        size = self.sizes.step
        stage = self._stage_at(step.begin)
        if step.end - step.begin < size or step.end > stage.end:
            return step
        first = -(-(max(stage.begin, epoch.begin) - epoch.begin) // size)
        count = (min(stage.end, epoch.end) - epoch.begin) // size - first
        windows = -(-count // self.window)
        number = (((step.begin - epoch.begin) // size - first + 1) * windows - 1) // count
        begin = epoch.begin + first * size
        return Stretch(
            begin + count * number // windows * size,
            begin + count * (number + 1) // windows * size,
        )

    def _border(self, epoch: int) -> int:
        """Where an epoch begins: where every rank has as many rows as the others."""
        return epoch * self._rows - self._within_ranks(epoch * self._rows)

    def _within_ranks(self, place: int) -> int:
        return (place - self.begin) % self._ranks

    def _stage_at(self, place: int) -> Stretch:
        epoch, within = divmod(place, self._rows)
        stage = bisect_right(self._ends, within)
        begin = self._ends[stage - 1] if stage else 0
        return Stretch(epoch * self._rows + begin, epoch * self._rows + self._ends[stage])


def deal_in_steps(costs: Float64, rows: Int64, begin: int, sizes: Sizes) -> Int64:
    """Deal the rows of steps, as many to each rank, at costs that are as even as may be.

    A step of W ranks, M micro-batches and B rows in each is M micro-steps of W · B rows. Rows of
    like cost make a micro-step; then they are dealt so that the sums of ranks are even, in each
    micro-step and in the whole step.

    costs  float64[all rows]
    rows   int64[n], those of steps one after another, of which the last may be shorter

    Returns the same rows by places: in each step, row i of rank r is at i * world_size + r.
    """
    rows = rows[_costliest_first(costs[rows], sizes.step)]
    return rows[_dealt(costs[rows], sizes, exchange=True)]


def deal_in_windows(
    costs: Float64, seed: int | None, rows: Int64, begin: int, sizes: Sizes
) -> Int64:
    """Deal the rows of a window of steps in the same way, after those of like cost have met in
    micro-steps, which are shuffled. The window begins at the place `begin`.
    """
    rows = rows[_costliest_first(costs[rows], len(rows))]
    size = min(sizes.micro_step, len(rows))
    whole = len(rows) // size
    cut = whole * size
    order = permutation(whole, f"{seed}/micro-steps from {begin}")
    shuffled = rows[:cut].reshape(whole, size)[order]
    rows = np.concatenate([shuffled.ravel(), rows[cut:]])
    return rows[_dealt(costs[rows], sizes, exchange=False)]


def _costliest_first(costs: Float64, size: int) -> Int64:
    order = np.empty(len(costs), np.int64)
    dealing.costliest_first(costs, min(size, len(costs)), order)
    return order


def _dealt(costs: Float64, sizes: Sizes, *, exchange: bool) -> Int64:
    order, turns = np.empty(len(costs), np.int64), len(costs) // sizes.world_size
    batch_size, micro_batches = min(sizes.batch_size, turns), min(sizes.micro_batches, turns)
    dealing.deal(costs, sizes.world_size, batch_size, micro_batches, exchange, order)
    return order
