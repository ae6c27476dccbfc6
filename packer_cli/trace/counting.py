"""`Steps`: which places of the order make a step, as a loop counts steps.

Epochs and steps are those of `Grid`; here steps have numbers. The last step of an epoch may have
fewer batches, and its last batch fewer rows, unless the loader drops such a batch. A Trainer's
epochs all have as many batches as the first: it leaves out the last one of an epoch that has one
more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from packer_cli.config.loop import Loop
from packer_cli.errors import DataError
from packer_cli.records import Int64
from packer_cli.steps.schedule import Grid, Sizes, Stretch


@dataclass(frozen=True)
class Step:
    """A step: the places `begin` .. `end`, of which a loader may have dropped some.

    number  counted from 0
    epoch   counted from 0; `epoch_begin`: the place at which the loop began it
    """

    number: int
    epoch: int
    epoch_begin: int
    begin: int
    end: int


class Steps:
    """The steps of a loop over `rows` rows that began, or was resumed, at the place `begin`.

    Raises DataError for more ranks than rows, and for a loader that drops all of an epoch.
    """

    def __init__(self, rows: int, loop: Loop, begin: int = 0) -> None:
        self._rows, self._loop = rows, loop
        self.sizes = Sizes(loop.world_size, loop.batch_size, loop.micro_batches)
        self.grid = Grid(rows, begin, self.sizes, even=not loop.uneven)
        self.first_epoch = self.grid.epoch_of(begin)
        if loop.drop_last and rows // loop.world_size < loop.batch_size:
            raise DataError(
                f"an epoch has {rows // loop.world_size} rows for each rank, and a loader that "
                f"drops batches of fewer than {loop.batch_size} rows has no batch",
                "use smaller batches",
            )
        # Epochs are of two lengths, in a pattern that begins anew after as many as there are ranks.
        counts = [self._count(self.grid.epoch(self.first_epoch + k))
                  for k in range(loop.world_size + 1)]  # fmt: skip
        self._first, self._later = counts[0], np.cumsum([0, *counts[1:]])

    def of(self, number: int) -> Step:
        """The step of a number. The loop goes on for ever."""
        epoch, before = self.first_epoch, 0
        if number >= self._first:
            periods, rest = divmod(number - self._first, int(self._later[-1]))
            place = int(np.searchsorted(self._later, rest, side="right")) - 1
            epoch += 1 + periods * self._loop.world_size + place
            before = number - rest + int(self._later[place])
        epoch_begin = self.grid.epoch(epoch).begin
        begin, end = self.grid.step_at(epoch_begin + (number - before) * self.sizes.step)
        return Step(number, epoch, epoch_begin, begin, end)

    def at(self, place: int) -> tuple[Step, int, int] | None:
        """The step that took a place, its rank, and the number of the row among those of the rank
        in this step; None for what the loader dropped.
        """
        number, kept = self._number_at(place)
        step = self.of(number) if kept else None
        if step is None or place not in self.places(step):
            return None
        row, rank = divmod(place - step.begin, self._loop.world_size)
        return step, rank, row

    def last_before(self, place: int) -> Step | None:
        """The step in or after which a loop had taken the places before this one; None: there was
        none.
        """
        if place <= self.grid.begin:
            return None
        number, _ = self._number_at(place - 1)
        return self.of(number) if number >= 0 else None

    def _number_at(self, place: int) -> tuple[int, bool]:
        """(number of the step that a place is in, whether its epoch has it; else of the last)."""
        epoch = self.grid.epoch_of(place)
        stretch = self.grid.epoch(epoch)
        within, count = (place - stretch.begin) // self.sizes.step, self._count(stretch)
        return self.before(epoch) + min(within, count - 1), within < count

    def places(self, step: Step) -> Int64:
        """int64[n], the places of a step, ascending, without those that the loader dropped."""
        places = np.arange(step.begin, step.end)
        begin, end = self.grid.epoch(step.epoch)
        row, rank = np.divmod(places - begin, self._loop.world_size)
        of_rank = -(-(end - begin - rank) // self._loop.world_size)
        taken: Int64 = places[row < self._batches(begin, of_rank) * self._loop.batch_size]
        return taken

    def before(self, epoch: int) -> int:
        """The steps before an epoch."""
        if epoch == self.first_epoch:
            return 0
        periods, rest = divmod(epoch - self.first_epoch - 1, self._loop.world_size)
        return self._first + periods * int(self._later[-1]) + int(self._later[rest])

    def _count(self, epoch: Stretch) -> int:
        """The steps of an epoch of these places."""
        of_rank = -(-(epoch.end - epoch.begin) // self._loop.world_size)
        return -(-int(self._batches(epoch.begin, of_rank)) // self._loop.micro_batches)

    def _batches(self, begin: int, of_rank: Any) -> Any:
        """The batches of an epoch that the loop begins at a place, with so many rows of a rank; for
        arrays of them, too.
        """
        loop = self._loop
        batches = _in_batches(of_rank, loop)
        if not loop.trainer:
            return batches
        most = _in_batches(self._rows // loop.world_size, loop)
        # steps of the epoch that a run has behind it which goes on from a state
        first = (begin + loop.world_size - 1) // self._rows * self._rows
        done = -(-(begin - first) // self.sizes.step)
        return np.minimum(batches, max(most - done * loop.micro_batches, 0))


def _in_batches(rows: Any, loop: Loop) -> Any:
    """How many batches so many rows of a rank are."""
    return rows // loop.batch_size if loop.drop_last else -(-rows // loop.batch_size)
