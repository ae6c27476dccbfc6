"""`PackedSampler`: one order of all rows, from which every rank takes its share.

The order depends on the number of rows, the seed and the epoch, never on the number of ranks. A
position in it is one number for all ranks, the rows taken since the run began, so a run can go on
from there on any other number of ranks. `packer_cli.steps` decides which rows make a step. Needs
the memory of a window of rows, and with balance 16 bytes a row.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence, Sized
from dataclasses import asdict
from functools import partial
from operator import index as as_index
from typing import Any

from packer_cli.errors import DataError, UsageError
from packer_cli.options.option import refuse
from packer_cli.records import Int64
from packer_cli.steps import (
    WINDOW,
    Balance,
    Cost,
    Order,
    Schedule,
    Steps,
    StepSizes,
    check_rank,
    row_costs,
)

_AT_ONCE = 4096  # rows of all ranks


class PackedSampler:
    """Row numbers for a DataLoader's `sampler=`.

    rows           the data set, or its number of rows; numbers and a Subset have no costs
    seed           of the order; None keeps the order of the shards
    rank, world_size   which share of the order. If torch.distributed or WORLD_SIZE report several
                   ranks, both must be given: 0 and 1 with Accelerate and the Trainer, which
                   distribute whole batches themselves.
    even           every rank gets the same number of rows in an epoch; those left over, fewer than
                   world_size, begin the next one. False: the first ranks get one row more.
    block_rows, window_blocks   the shuffle's sizes

    batch_size, micro_batches   of a step: each rank draws its rows one after another, `batch_size`
                   for each of `micro_batches` (1 and 1)
    balance        None: ranks take turns. "step": the rows of each step are dealt to ranks and
                   micro-batches so that their costs are even; steps have the same rows as without.
                   "order": besides, rows of like cost meet in a step, within `window` steps (64),
                   and the micro-batches of a window are shuffled.
    hidden_size    of the model; rows then cost `6 * hidden_size * L + sum(l ** 2)`; or instead
    cost           a function of the rows' sums of squared segment lengths, int64[n], that returns n
                   costs, the same ones on every rank

    Each iteration is an epoch; the first may be the rest of one. `state_dict()` has the number of
    rows that all ranks together have taken; `load_state_dict` goes on after them. A loader with
    workers reads ahead, and so does that of Accelerate: pass the number of rows that this iteration
    has trained on, `state_dict(rows=steps * batch_size)`. torchdata's StatefulDataLoader keeps
    track by itself; to resume on another number of ranks leave snapshot_every_n_steps at 1.

    Raises UsageError for invalid sizes, and for options of balance without it or it without them,
    and DataError for more ranks than rows.
    """

    def __init__(
        self,
        rows: int | Sized,
        *,
        seed: int | None = 0,
        rank: int | None = None,
        world_size: int | None = None,
        even: bool = True,
        block_rows: int = 256,
        window_blocks: int = 64,
        batch_size: int | None = None,
        micro_batches: int = 1,
        balance: Balance | None = None,
        hidden_size: int | None = None,
        cost: Cost | None = None,
        window: int | None = None,
    ) -> None:
        self.rows = rows if isinstance(rows, int) else len(rows)
        self._data: str | None = getattr(rows, "fingerprint", None)
        self.rank, self.world_size = share_of_ranks(rank, world_size)
        _check_options(
            balance, batch_size, even=even, hidden_size=hidden_size, cost=cost, window=window
        )
        costs, self._cost = None, dict[str, Any]()
        if balance is not None:
            sums, length = rows.squared_lengths, rows.max_length  # type: ignore[union-attr]
            costs = row_costs(sums, length, hidden_size, cost)
            digest = hashlib.sha256(costs.astype("<f8", copy=False).data).hexdigest()
            self._cost["cost"] = int(hidden_size) if hidden_size else digest
        self.sizes = StepSizes(
            self.world_size, 1 if batch_size is None else batch_size, micro_batches
        )
        self._schedule_from = partial(
            Schedule, Order(self.rows, seed, block_rows, window_blocks), self.sizes,
            balance=balance, costs=costs, window=WINDOW if window is None else window, even=even,
        )  # fmt: skip
        self._begin = 0  # of the next iteration
        self._go_to(0)

    def __iter__(self) -> Iterator[int]:
        begin, end = self._begin, self._end()
        schedule, size = self._schedule, -(-_AT_ONCE // self.world_size) * self.world_size
        self._iteration, self._taken, self._restored = (begin, end), begin, False
        for first in range(begin, end, size):
            rows = schedule.rows_at(first, min(first + size, end))[self.rank :: self.world_size]
            for turn, row in enumerate(rows.tolist(), 1):
                place = first + turn * self.world_size
                self._taken = min(place, end)
                if place + self.rank >= end:
                    self._begin = end  # also for loops that stop at the last row
                yield row
        self._begin = self._taken = end

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={value}" for name, value in asdict(self.sizes).items())
        options = ", ".join(f"{name}={value!r}" for name, value in self._schedule.options().items())
        return f"PackedSampler({options}, rank={self.rank}, {sizes}, epoch={self.epoch})"

    def __len__(self) -> int:
        """Count the rows that this rank takes in the next iteration."""
        return len(range(self._begin + self.rank, self._end(), self.world_size))

    def rows_of(self, step: int, rank: int, *, drop_last: bool = False) -> Int64:
        """Return the row numbers that a rank takes in a step, int64[n], in the order of batches.

        step       from 0, counted from where the sampler began: at the run's beginning, after the
                   state that was loaded, or at the epoch that was set. A step is `micro_batches`
                   batches of `batch_size` rows, fewer at the end of an epoch; counting goes on in
                   the next one.
        rank       any rank from 0 to world_size - 1
        drop_last  as the DataLoader has it

        Raises UsageError for a negative step and a rank that is out of range, DataError if
        drop_last leaves no batch.
        """
        check_rank(rank, self.world_size)
        return Steps(self._schedule, drop_last=drop_last).rows_of(step)[rank]

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._schedule.grid.epoch_of(self._begin)

    def _end(self) -> int:
        return self._schedule.grid.epoch_at(self._begin).end

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, unless the next iteration is in it already.

        Raises UsageError if a restored state is in another one: it would be lost.
        """
        if epoch == self.epoch:
            return
        if self._restored:
            raise UsageError(
                f"set_epoch({epoch}) after a state of epoch {self.epoch} was loaded",
                "begin with the loader's epoch set to the sampler's: loader.set_epoch(...)",
            )
        self._go_to(self._schedule_from(begin=0).grid.epoch(epoch).begin)

    def _go_to(self, place: int, dealt: Sequence[Sequence[int]] = ()) -> None:
        self._schedule = self._schedule_from(begin=place, dealt=dealt)
        # places, which count the rows of all ranks
        self._begin = self._taken = place
        self._iteration = (place, place)  # begin and end of the current iteration, or the last
        self._restored = False

    def state_dict(self, rows: int | None = None) -> dict[str, Any]:
        """Return the position: `samples`, rows taken by all ranks since the run began, the options
        of the order and, with balance, which sizes `dealt` the rows that are left.

        rows   that this rank has trained on in this iteration, an epoch or the rest of one; a
               larger number stands for all of them. None: as many as were drawn from the sampler
        """
        begin, end = self._iteration
        taken = self._taken if rows is None else min(begin + rows * self.world_size, end)
        dealt = {"dealt": self._schedule.history(taken)} if self._cost else {}
        position = {"samples": taken, "data": self._data}
        return position | self._schedule.options() | self._cost | dealt

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the rows of a `state_dict`, of any number of ranks and any sizes of batches.

        A run without balance may go on with it. Raises DataError if the state is of another order:
        other rows, another seed or other sizes of its windows, another balance or cost.
        """
        expected = self._schedule.order.options()
        if state.get("balance"):
            expected = {"balance": None} | self._schedule.options() | self._cost
        if self._data and state.get("data"):
            expected["data"] = self._data
        for name, value in expected.items():
            if state.get(name) != value:
                raise DataError(
                    f"the sampler's state has {name} {state.get(name)}, this sampler {value}",
                    "resume with the data and the options that the run began with",
                )
        self._go_to(state["samples"], state.get("dealt", ()))
        self._restored = True


def share_of_ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return (rank, world_size) as given, or (0, 1) if there is only one rank.

    Under torch.distributed either default would be silently wrong for someone: Accelerate and the
    Trainer distribute batches themselves, a loop of your own does not.
    """
    if (rank is None) != (world_size is None):
        raise UsageError("rank and world_size: give both or none")
    if rank is None or world_size is None:
        import torch.distributed as dist  # noqa: PLC0415 slow

        if dist.is_available() and dist.is_initialized():
            ranks = int(dist.get_world_size())
        else:  # by torchrun and others, before it is initialized
            started = os.environ.get("WORLD_SIZE", "")
            ranks = int(started) if started.isdecimal() else 1
        if ranks > 1:
            raise UsageError(
                f"rank and world_size: not given, and torch.distributed runs {ranks} ranks",
                "rank=dist.get_rank(), world_size=dist.get_world_size(); with Accelerate and the "
                "Trainer, which distribute batches themselves, rank=0, world_size=1",
            )
        return 0, 1
    rank, world_size = as_index(rank), as_index(world_size)  # plain ints: states are JSON
    check_rank(rank, world_size)
    return rank, world_size


def _check_options(
    balance: Balance | None, batch_size: int | None, *, even: bool, **of_balance: Any
) -> None:
    """Raise UsageError for options of balance without it, and for those that exclude it."""
    idle = [name for name, value in of_balance.items() if value is not None and balance is None]
    if balance == "step" and of_balance["window"] is not None:
        idle.append("window")
    wanted = "balance" if balance is None else "balance='order'"
    refuse([
        (
            idle,
            f"{', '.join(idle[:1])}: is only for {wanted}, which is {balance!r}",
            "give balance= too, or leave it out",
        ),
        (
            balance and batch_size is None,
            f"balance: {balance!r} without batch_size",
            "give the rows of a micro-batch, as to the DataLoader, and micro_batches=, how many of "
            "them make a step",
        ),
        (
            balance and not even,
            f"balance: {balance!r} with even=False: ranks would get different numbers of rows",
            "leave out even=False; the rows left over begin the next epoch",
        ),
    ])  # fmt: skip
