"""`Schedule`: which rows make a step, and which rank and micro-batch each of them goes to.

Places count the rows that all ranks have taken since the run began: row i of rank r in a step that
begins at place s is at place s + i · W + r. Without balance, rows stand there in the order of
`Order`, whatever the sizes. With it, steps or windows of them are dealt when they are asked for,
from the rows that the order has in the same places: nothing is paid at the beginning of an epoch,
and memory holds the costs and a window.

Which sizes dealt rows from which place on is part of a state, as far as rows still to come depend
on it: a run may go on with other sizes in the middle of a step.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any, Literal

import numpy as np

from packer_cli.errors import UsageError, one_of
from packer_cli.records import Int64
from packer_cli.steps.costs import Float64
from packer_cli.steps.dealing import Unbalanced, WithinSteps, WithinWindows
from packer_cli.steps.eras import Deal, Era
from packer_cli.steps.grid import Grid, Sizes, Stretch, whole_size
from packer_cli.steps.order import Order

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
        seed: int | None,
        stages: Sequence[int] = (),
        block_rows: int,
        window_blocks: int,
        world_size: int,
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


def _dealing(balance: Balance | None, rows: int, seed: int | None, costs: Float64 | None) -> Deal:
    """How the rows of a block are dealt."""
    if balance is None:
        return Unbalanced()
    if balance not in BALANCES:
        raise one_of("balance", balance, BALANCES)
    if costs is None or len(costs) != rows:
        found = "no costs" if costs is None else f"{len(costs)} costs"
        raise UsageError(f"balance: {balance!r} of {rows} rows, and {found}")
    return WithinSteps(costs) if balance == "step" else WithinWindows(costs, seed)
