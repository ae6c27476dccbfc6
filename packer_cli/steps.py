"""`Schedule`: which rows make a step, and which rank and micro-batch each of them goes to.

Places count the rows that all ranks have taken since the run began: row i of rank r in a step that
begins at place s is at place s + i · W + r. Without balance, rows stand there in the order of
`Order`, whatever the sizes: an order that depends on the number of rows, the seed and the epoch.
With it, steps or windows of them are dealt when they are asked for, from the rows that the order
has in the same places: nothing is paid at the beginning of an epoch, and memory holds the costs and
a window.

A row costs `linear · L + Σ l²`: everything but attention costs as much for each of the L places,
padding too; attention costs a segment the square of its length. For a transformer, `linear` is
about six times its hidden size: its matrices against the two products of attention.

Which sizes dealt rows from which place on is part of a state, as far as rows still to come depend
on it: a run may go on with other sizes in the middle of a step. `Grid` is the arithmetic of epochs,
steps and windows, `_Dealer` the rows of places that the same sizes deal, `Steps` the steps by their
numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from packer_cli._kernels import dealing, plans
from packer_cli.errors import DataError, UsageError, one_of
from packer_cli.options.option import plain_int
from packer_cli.records import Int64
from packer_cli.result.wording import plural

Float64 = npt.NDArray[np.float64]
Cost = Callable[[Int64], npt.ArrayLike]
Balance = Literal["step", "order"]
BALANCES: tuple[Balance, ...] = ("step", "order")
WINDOW = 64
_AT_ONCE = 4096  # rows
_LINEAR = 6  # for each unit of the hidden size


class Schedule:
    """Row numbers of the places of a run, all epochs, from the place on where it began or went on
    with these sizes.

    order    the rows before any are dealt
    sizes    of steps
    balance  None: as the order has them. "step": the rows of a step are dealt to ranks and
             micro-batches evenly. "order": rows of like cost meet, within `window` steps.
    costs    float64[rows], for balance
    begin    where the run goes on
    even     False: an epoch has all of its rows, and the first ranks one more than others
    dealt    which sizes dealt rows before that: as `history` gave it

    `grid` says where epochs and steps are. Raises UsageError for a balance that is none, and
    DataError for more ranks than rows.
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
        self.order, self.sizes, rows = order, sizes, order.rows
        self.begin = begin
        self._balance, self._window = balance, whole_size("window", window)
        deal: _Deal | None = None
        if balance is not None:
            if balance not in BALANCES:
                raise one_of("balance", balance, BALANCES)
            assert costs is not None  # noqa: S101 for mypy: who balances knows them
            deal = partial(_deal, balance, costs, order.seed)
        known = [(place, StepSizes(*its)) for place, *its in dealt]
        if not known or known[-1][1] != sizes or (begin - known[-1][0]) % sizes.world_size:
            known.append((begin, sizes))  # others than dealt rows before
        by_window, dealer = balance == "order", None
        for place, its in known:
            grid = Grid(rows, place, its, window if by_window else 1, even=even)
            dealer = _Dealer(grid, order, deal, 0 if by_window else _AT_ONCE, dealer)
        assert dealer is not None  # noqa: S101 for mypy: it is that of `begin`
        self._dealer, self.grid = dealer, dealer.grid

    def rows_at(self, begin: int, end: int) -> Int64:
        """int64[end - begin], the rows of the places begin..end, from `grid.begin` on."""
        return self._dealer.rows_at(begin, end)

    def name(self) -> dict[str, Any]:
        """What the rows of places depend on, but for their costs and the sizes of steps."""
        balance = {"balance": self._balance} if self._balance else {}
        window = {"window": self._window} if self._balance == "order" else {}
        return self.order.name() | balance | window

    def history(self, place: int) -> list[list[int]]:
        """[place, world_size, batch_size, micro_batches] of those that dealt rows from each place
        on, of which rows from `place` on depend.
        """
        grids = [dealer.grid for dealer in self._dealer.needed_from(place)]
        return [[grid.begin, *astuple(grid.sizes)] for grid in grids]


class Steps:
    """The steps of a loop over a schedule by their numbers, from 0, where the schedule goes on.

    A step is `micro_batches` batches of each rank; the last one of an epoch may have fewer, and its
    last batch fewer rows.

    drop_last     the loader leaves out a last batch with fewer rows
    most_batches  that a rank takes in an epoch; None: all. The epochs of a Trainer all have as many
    """

    def __init__(
        self, schedule: Schedule, *, drop_last: bool = False, most_batches: int | None = None
    ) -> None:
        self._schedule, self._drop_last, self._most = schedule, drop_last, most_batches
        self._ranks, self._batch_size = schedule.sizes.world_size, schedule.sizes.batch_size
        self._each = schedule.sizes.rows // self._ranks  # rows of a rank

    def begin_of(self, step: int) -> int:
        """Return the place at which a step begins.

        Raises UsageError for a negative step, DataError if no epoch has a batch.
        """
        if step < 0:
            raise UsageError(f"step: {step} is negative", "steps count from 0, the first one")
        epoch = self._schedule.grid.epoch_of(self._schedule.begin)
        if step >= (first := self._count(epoch)):
            # Later epochs are of two lengths, in a pattern of as many epochs as there are ranks.
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
        return -(-self._taken(epoch, 0) // self._each)


def row_costs(
    squared_lengths: Int64,
    max_length: int,
    hidden_size: int | None = None,
    cost: Cost | None = None,
) -> Float64:
    """float64[rows], what each row costs, in no unit: only ratios count.

    squared_lengths  int64[rows], the sum of the squared segment lengths of each row
    hidden_size      of the model; or else
    cost             a function that takes int64[n] of those sums, and returns n costs. They are
                     rounded to float32: processors differ in the last bits of powers and the like,
                     and ranks that deal differently would take rows twice

    Raises UsageError where not exactly one of both is given, and for costs that are none.
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
    given = cost(squared_lengths)
    try:
        with np.errstate(over="ignore"):  # to inf, which is refused below
            costs = np.array(given, np.float32).astype(np.float64)
    except (TypeError, ValueError):
        costs = np.empty(0)
    if costs.shape != squared_lengths.shape or not (np.isfinite(costs) & (costs >= 0)).all():
        raise UsageError(
            f"cost: returned no array of {len(squared_lengths)} finite costs, each 0 or more",
            "return a cost for each of the sums that it is given",
        )
    return costs


def whole_size(name: str, size: object) -> int:
    """A size as a plain int, which a state in JSON can hold. Raises UsageError for one below 1."""
    if (plain := plain_int(name, size)) < 1:
        raise UsageError(f"{name}: {plain} is less than 1")
    return plain


def digest_of(costs: Float64) -> str:
    """By which states tell costs apart."""
    return hashlib.sha256(costs.astype("<f8", copy=False).data).hexdigest()


class Order:
    """Places 0, 1, ... of all epochs to row numbers.

    rows    of an epoch
    seed    None: as they are stored
    block_rows, window_blocks   the shuffle's sizes

    Raises UsageError for a size below 1.
    """

    def __init__(
        self,
        rows: int,
        seed: int | None = 0,
        block_rows: int = 256,
        window_blocks: int = 64,
    ) -> None:
        self.rows, self.seed = rows, seed
        self._block_rows = whole_size("block_rows", block_rows)
        self._window_blocks = whole_size("window_blocks", window_blocks)

    def name(self) -> dict[str, Any]:
        """What the order depends on."""
        return {
            "rows": self.rows,
            "seed": self.seed,
            "block_rows": self._block_rows,
            "window_blocks": self._window_blocks,
        }

    def rows_at(self, begin: int, end: int) -> Int64:
        """int64[end - begin], the rows of the places begin..end."""
        return _all_rows(self._some_rows, begin, end)

    def _some_rows(self, place: int, most: int) -> Int64:
        """The rows from a place on, `most` or fewer: those of one window or, unshuffled, epoch."""
        epoch, within = divmod(place, self.rows)
        if self.seed is None:
            return np.arange(within, min(within + most, self.rows))
        name, sizes = f"{self.seed}/{epoch}", (self._block_rows, self._window_blocks)
        begin, rows = _shuffled_window(name, self.rows, *sizes, within)
        return rows[within - begin :][:most]


def _shuffled_window(
    name: str, rows: int, block_rows: int, window_blocks: int, place: int
) -> tuple[int, Int64]:
    """(its first place, its rows) of the window that has a place, of some rows in the order that a
    name gives them.
    """
    blocks, last = _shuffled_blocks(name, -(-rows // block_rows))
    missing = len(blocks) * block_rows - rows  # in the last block, which may be in any window

    def begin_of(window: int) -> int:
        behind = window > last // window_blocks
        return window * window_blocks * block_rows - (missing if behind else 0)

    window = place // (block_rows * window_blocks)
    window += place >= begin_of(window + 1)
    return begin_of(window), _window_rows(name, rows, block_rows, window_blocks, window)


# Of the last places only: those of an epoch are asked for one after the other, by all ranks alike.
@lru_cache(maxsize=2)
def _shuffled_blocks(name: str, count: int) -> tuple[Int64, int]:
    """(block numbers, where the last block is among them)."""
    blocks = permutation(count, f"{name}/blocks")
    return blocks, int(np.flatnonzero(blocks == count - 1)[0])


@lru_cache(maxsize=1)
def _window_rows(name: str, rows: int, block_rows: int, window_blocks: int, window: int) -> Int64:
    blocks, _ = _shuffled_blocks(name, -(-rows // block_rows))
    begins = blocks[window * window_blocks :][:window_blocks] * block_rows
    members = (begins[:, None] + np.arange(block_rows)).ravel()
    members = members[members < rows]
    return members[permutation(len(members), f"{name}/{window}")]


def _all_rows(some: Callable[[int, int], Int64], begin: int, end: int) -> Int64:
    """The rows of places begin..end; `some` gives those from a place on, so many or fewer."""
    pieces = [np.empty(0, np.int64)]
    while begin < end:
        pieces.append(some(begin, end - begin))
        begin += len(pieces[-1])
    return np.concatenate(pieces)


def permutation(count: int, name: str) -> Int64:
    """A permutation, int64[count], by packer's own generator: numpy's may change some day."""
    seed = hashlib.sha256(name.encode()).digest()[:8]
    numbers = np.empty(count, np.int64)
    plans.permutation(numbers, int.from_bytes(seed, "little"))
    return numbers


_Deal = Callable[[Int64, int, "StepSizes"], Int64]  # rows, where they begin, and the sizes of steps


class _Dealer:
    """Row numbers of the places from `grid.begin` on, which the same sizes deal, up to the next
    interruption that changes them. Keeps one block of them, dealt.

    An interruption may leave a step or a window in the middle. Its rows that were not taken come
    first in the next one, in the places that they had, and the order goes on behind them.

    deal     deals the rows of a block: a window
    at_once  or as many whole steps as have this many rows, where that is more: small ones are
             quicker together. Only where each is dealt by itself.
    before   what deals up to where this one begins
    """

    def __init__(
        self, grid: Grid, order: Order, deal: _Deal | None, at_once: int, before: _Dealer | None
    ) -> None:
        self.grid, self._before = grid, before
        self._order, self._deal, self._at_once = order, deal, at_once
        # set at once, when it is dealt: after an interruption it is dealt again, and a second
        # thread sees one block or the other
        self._dealt = StepRange(-1, -1), np.empty(0, np.int64)
        # up to where rows are those that `before` has in these places
        self._left = grid.begin
        if before and before.grid.window_at(grid.begin).begin < grid.begin:
            self._left = before.grid.window_at(grid.begin).end
        # from where on rows are those of the order
        self._settled: int = max(self._left, before._settled if before else 0)

    def rows_at(self, begin: int, end: int) -> Int64:
        """int64[end - begin], the rows of the places begin..end."""
        return _all_rows(self._some_rows, begin, end)

    def _some_rows(self, place: int, most: int) -> Int64:
        block, rows = self._dealt
        if not block.begin <= place < block.end:
            begin, end = self.grid.window_at(place)
            size = self.grid.sizes.rows
            several = min(begin + self._at_once // size * size, self.grid.epoch_at(begin).end)
            block = StepRange(begin, max(end, several))
            rows = self._before_dealing(*block)
            if self._deal is not None:
                rows = self._deal(rows, block.begin, self.grid.sizes)
            self._dealt = block, rows
        return rows[place - block.begin :][:most]

    def _before_dealing(self, begin: int, end: int) -> Int64:
        """The rows that are dealt in the places begin..end."""
        if self._before is None:
            return self._order.rows_at(begin, end)
        middle = min(max(begin, self._left), end)
        left = self._before.rows_at(begin, middle)
        return np.concatenate([left, self._before._before_dealing(middle, end)])

    def needed_from(self, place: int) -> list[_Dealer]:
        """Dealers that rows from a place on depend on, oldest first; this one is the last."""
        needed, first = [self], self.grid.window_at(place).begin
        while (before := needed[0]._before) and first < needed[0]._settled:
            first = before.grid.window_at(needed[0].grid.begin).begin
            needed.insert(0, before)
        return needed


@dataclass(frozen=True)
class StepSizes:
    """How many ranks take how many rows: `batch_size` in each of `micro_batches`.

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
        """Rows of all ranks together in a micro-batch each."""
        return self.world_size * self.batch_size

    @property
    def rows(self) -> int:
        """Rows of all ranks together in a step."""
        return self.micro_step * self.micro_batches


class StepRange(NamedTuple):
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
    window   how many steps make a window, at most
    even     False: an epoch has all of its rows, and the first ranks one more than the others

    Raises DataError for more ranks than rows.
    """

    def __init__(
        self,
        rows: int,
        begin: int,
        sizes: StepSizes,
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
        self._rows = rows
        self._ranks = sizes.world_size if even else 1

    def epoch_of(self, place: int) -> int:
        """The number of the epoch that a place is in, if it is the first of a rank's batch."""
        return (place - self._within_ranks(place) + self._ranks - 1) // self._rows

    def epoch_at(self, place: int) -> StepRange:
        """The epoch that a place is in, or what these sizes have of it."""
        return self.epoch(self.epoch_of(place))

    def epoch(self, number: int) -> StepRange:
        """The epoch of a number, or what these sizes have of it."""
        return StepRange(max(self.begin, self._border(number)), self._border(number + 1))

    def step_at(self, place: int) -> StepRange:
        """The step that a place is in."""
        begin, end = self.epoch_at(place)
        begin = place - (place - begin) % self.sizes.rows
        return StepRange(begin, min(begin + self.sizes.rows, end))

    def window_at(self, place: int) -> StepRange:
        """The window of steps that a place is in.

        The whole steps of an epoch are cut into windows as even as can be. A step that begins with
        rows left over from the epoch before is one by itself, and so is a shorter one.
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
            begin + count * number // windows * size,
            begin + count * (number + 1) // windows * size,
        )

    def _border(self, epoch: int) -> int:
        """Where an epoch begins: where every rank has as many rows as the others."""
        return epoch * self._rows - self._within_ranks(epoch * self._rows)

    def _within_ranks(self, place: int) -> int:
        return (place - self.begin) % self._ranks


def _deal(
    balance: Balance, costs: Float64, seed: int | None, rows: Int64, begin: int, sizes: StepSizes
) -> Int64:
    """Deal rows, as many to each rank, at costs that are as even as may be.

    rows   int64[n], with "step" those of steps one after another, of which the last may be shorter;
           with "order" those of a window of steps, which begins at the place `begin`
    costs  float64[all rows]

    A step of W ranks, M micro-batches and B rows in each is M micro-steps of W · B rows.

    1. Rows of like cost make a micro-step, of each step or of the window.
    2. With "order", micro-steps are shuffled, and steps made of them in turn.
    3. Rows are dealt so that the sums of ranks are even, in each micro-step and in the whole step.

    Returns the same rows by places: in each step, row i of rank r is at i * world_size + r.
    """
    by_window = balance == "order"
    alike = np.empty(len(rows), np.int64)
    size = len(rows) if by_window else min(sizes.rows, len(rows))
    dealing.costliest_first(costs[rows], size, alike)
    rows = rows[alike]
    if by_window:
        size = min(sizes.micro_step, len(rows))
        whole = len(rows) // size
        order = permutation(whole, f"{seed}/micro-steps from {begin}")
        shuffled = rows[: whole * size].reshape(whole, size)[order]
        rows = np.concatenate([shuffled.ravel(), rows[whole * size :]])
    dealt, turns = np.empty(len(rows), np.int64), len(rows) // sizes.world_size
    batch_size, micro_batches = min(sizes.batch_size, turns), min(sizes.micro_batches, turns)
    dealing.deal(costs[rows], sizes.world_size, batch_size, micro_batches, not by_window, dealt)
    return rows[dealt]
