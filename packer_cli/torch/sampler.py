"""`PackedSampler`: one order of all rows, from which every rank takes its share.

The order depends on the number of rows, the seed and the epoch, never on how many ranks there are:
blocks of neighbouring rows are shuffled, so that a cold disk reads runs, and then the rows of a
window of blocks, so that neighbours part. Stages of a recipe follow one another: no row leaves its
own. Ranks stripe the order: with W ranks, rank r takes places r, r + W, ... A position in it is
therefore one number for all ranks, the rows taken since the run began, and a run goes on from there
on any other number of ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sized
from typing import Any

import numpy as np

from packer_cli.errors import DataError, UsageError
from packer_cli.torch.order import Order
from packer_cli.torch.ranks import share_of_ranks


class PackedSampler:
    """Row numbers for a DataLoader's `sampler=`. Needs no more memory than a window of them.

    rows           the data set, whose stages are kept apart, or how many rows it has: numbers, and
                   a Subset, have no stages
    seed           of the order; None keeps the order of the shards
    rank, world_size   which share of the order. Where torch.distributed or WORLD_SIZE say that
                   there are several ranks, both must be given: 0 and 1 with Accelerate and the
                   Trainer, which distribute whole batches themselves.
    even           every rank gets the same number of rows of an epoch; those left over, fewer than
                   world_size, begin the next one. False: the first ranks get one row more.
    block_rows, window_blocks   the shuffle's sizes

    Each iteration is an epoch; the first may be the rest of one. `state_dict()` has how many rows
    all ranks together have taken; `load_state_dict` goes on after them. A loader with workers reads
    ahead, and so do those of Accelerate and `to_device` on a GPU: pass how many rows this iteration
    has trained on, `state_dict(rows=steps * batch_size)`. torchdata's StatefulDataLoader keeps
    track by itself; to resume on another number of ranks leave snapshot_every_n_steps at 1.

    Raises UsageError for invalid sizes and DataError for more ranks than rows.
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
    ) -> None:
        self.rows = rows if isinstance(rows, int) else len(rows)
        self._data: str | None = getattr(rows, "fingerprint", None)
        self.rank, self.world_size = share_of_ranks(rank, world_size)
        stages = [one.rows for one in getattr(rows, "stages", ())]
        self._order = Order(self.rows, seed, block_rows, window_blocks, stages)
        self._even = even
        self._foresight: Any = getattr(rows, "foresight", None)
        self._window_rows = min(block_rows * window_blocks, self.rows)
        self._begin = 0  # where the next iteration begins
        self._go_to(0)
        for name, size in (("block_rows", block_rows), ("window_blocks", window_blocks)):
            if size < 1:
                raise UsageError(f"{name}: {size} is less than 1")
        if self.rows < self.world_size:
            raise DataError(
                f"{self.world_size} ranks share {self.rows} rows: some would get none",
                "use fewer ranks, or pack more data or shorter rows",
            )
        if self._foresight is not None:
            self._foresight.check_order(
                stages, block_rows, window_blocks, shuffled=seed is not None
            )

    def __iter__(self) -> Iterator[int]:
        begin, end = self._begin, self._end()
        self._now, self._taken, self._restored = (begin, end), begin, False
        ahead = end if self._foresight is None else begin
        for place in range(begin + self.rank, end, self.world_size):
            if place >= ahead:
                ahead = self._announce(place)
            self._taken = min(place - self.rank + self.world_size, end)
            if place + self.world_size >= end:
                self._begin = end  # also for loops that stop at the last row
            yield self._order[place]
        self._begin = self._taken = end

    def _announce(self, place: int) -> int:
        """Say which rows come next, of all ranks, since those of a machine share what is fetched;
        returns from where on to say it again. Two windows are known at any time.
        """
        count = self._window_rows
        order = copy.deepcopy(self._order)  # whose window stays where it is
        rows = (order[at] for at in range(place, place + 2 * count))
        self._foresight.coming(np.fromiter(rows, np.int64, 2 * count))
        return place + count

    def __len__(self) -> int:
        """Rows that this rank takes in the next iteration."""
        return len(range(self._begin + self.rank, self._end(), self.world_size))

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return (self._begin + (self.world_size - 1 if self._even else 0)) // self.rows

    def _end(self) -> int:
        end = (self.epoch + 1) * self.rows
        return end - (end - self._begin) % self.world_size if self._even else end

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, unless the next iteration is in it already.

        Raises UsageError when a restored state is in another one: it would be lost.
        """
        if epoch == self.epoch:
            return
        if self._restored:
            raise UsageError(
                f"set_epoch({epoch}) after a state of epoch {self.epoch} was loaded",
                "begin with the loader's epoch set to the sampler's: loader.set_epoch(...)",
            )
        begin = epoch * self.rows
        self._go_to(begin - begin % self.world_size if self._even else begin)

    def _go_to(self, place: int) -> None:
        self._begin = place
        self._now = (place, place)  # begin and end of the current iteration, or the last
        self._taken = place  # how far it got; all of these count the rows of all ranks
        self._restored = False

    def state_dict(self, rows: int | None = None) -> dict[str, Any]:
        """The position: `samples`, rows taken by all ranks since the run began, and the order.

        rows   that this rank has trained on in this iteration, an epoch or the rest of one; more
               than it has are all. None: as many as were drawn from the sampler
        Raises UsageError for a negative number.
        """
        if rows is not None and rows < 0:
            raise UsageError(f"rows: {rows} is negative")
        begin, end = self._now
        taken = self._taken if rows is None else min(begin + rows * self.world_size, end)
        return {"samples": taken, "data": self._data, **self._order.name()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the rows of a `state_dict`, of any number of ranks.

        Raises DataError when it is of another order: other rows, another seed or other sizes.
        """
        known = {"data": self._data} if self._data and state.get("data") else {}
        for name, value in (self._order.name() | known).items():
            if state.get(name) != value:
                raise DataError(
                    f"the sampler's state has {name} {state.get(name)}, this sampler {value}",
                    "resume with the data and the options that the run began with",
                )
        self._go_to(state["samples"])
        self._restored = True
