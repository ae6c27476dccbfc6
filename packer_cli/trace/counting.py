"""`Steps`: which places of the order make a step, as a loop counts steps.

A place counts the rows of all ranks since the run began. Each time the loop begins its loader again
it goes through an epoch: to its last place or, where ranks are to have the same number of rows, to
fewer than `world_size` before it; those left over begin the next epoch. Within, a step is the next
`micro_batches` batches of every rank. The last one of an epoch may have fewer batches, and its last
batch fewer rows, unless the loader drops such a batch. A Trainer's epochs all have as many batches
as the first: it leaves out the last one of an epoch that has one more.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from packer_cli.config.loop import Loop
from packer_cli.errors import DataError
from packer_cli.records import Int64


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
    """Of a loop over `rows` rows that began, or was resumed, at the place `begin`.

    Raises DataError for more ranks than rows, and for a loader that drops all of an epoch.
    """

    def __init__(self, rows: int, loop: Loop, begin: int = 0) -> None:
        if rows < loop.world_size:
            raise DataError(
                f"{loop.world_size} ranks share {rows} rows: some would get none",
                "use fewer ranks, or pack more data or shorter rows",
            )
        self._rows, self._loop, self._begin = rows, loop, begin
        late = 0 if loop.uneven else loop.world_size - 1
        self.first_epoch = (begin + late) // rows
        if loop.drop_last and rows // loop.world_size < loop.batch_size:
            raise DataError(
                f"an epoch has {rows // loop.world_size} rows for each rank, and a loader that "
                f"drops batches of fewer than {loop.batch_size} rows has no batch",
                "use smaller batches",
            )
        # Epochs are of two lengths, in a pattern that begins anew after as many as there are ranks.
        ends = self._ends(self.first_epoch + np.arange(loop.world_size + 1))
        self._first = self._count(begin, int(ends[0]))
        counts = [self._count(*edges) for edges in pairwise(ends.tolist())]
        self._later = np.cumsum([0, *counts])

    def of(self, number: int) -> Step:
        """The step of a number. The loop goes on for ever."""
        epoch, before = self.first_epoch, 0
        if number >= self._first:
            periods, rest = divmod(number - self._first, int(self._later[-1]))
            place = int(np.searchsorted(self._later, rest, side="right")) - 1
            epoch += 1 + periods * self._loop.world_size + place
            before = number - rest + int(self._later[place])
        begin, end = self.epoch(epoch)
        return self._step(number - before, number, epoch, begin, end)

    def at(self, place: int) -> tuple[Step, int, int] | None:
        """The step that took a place, its rank, and the number of the row among those of the rank
        in this step; None for what the loader dropped.
        """
        epoch = self._epoch_of(place)
        begin, end = self.epoch(epoch)
        within = (place - begin) // self._loop.rows_per_step
        if within >= self._count(begin, end):
            return None
        step = self._step(within, self.before(epoch) + within, epoch, begin, end)
        if place not in self.places(step):
            return None
        row, rank = divmod(place - step.begin, self._loop.world_size)
        return step, rank, row

    def last_before(self, place: int) -> Step | None:
        """The step in or after which a loop had taken the places before this one; None: there was
        none.
        """
        if place <= self._begin:
            return None
        epoch = self._epoch_of(place - 1)
        begin, end = self.epoch(epoch)
        within = min((place - 1 - begin) // self._loop.rows_per_step, self._count(begin, end) - 1)
        number = self.before(epoch) + within
        return self.of(number) if number >= 0 else None

    def places(self, step: Step) -> Int64:
        """int64[n], the places of a step, ascending, without those that the loader dropped."""
        places = np.arange(step.begin, step.end)
        begin, end = self.epoch(step.epoch)
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

    def epoch(self, epoch: int) -> tuple[int, int]:
        """The places at which the loop begins and ends an epoch."""
        begin, end = self._ends(np.array([epoch - 1, epoch])).tolist()
        return begin if epoch > self.first_epoch else self._begin, end

    def _epoch_of(self, place: int) -> int:
        """In which the loop takes a place."""
        epoch = max(place // self._rows, self.first_epoch)
        return epoch + (place >= self.epoch(epoch)[1])

    def _ends(self, epochs: Int64) -> Int64:
        ends = (epochs + 1) * self._rows
        if not self._loop.uneven:
            ends = ends - (ends - self._begin) % self._loop.world_size
        return ends

    def _count(self, begin: int, end: int) -> int:
        """The steps of an epoch of these places."""
        of_rank = -(-(end - begin) // self._loop.world_size)
        return -(-int(self._batches(begin, of_rank)) // self._loop.micro_batches)

    def _batches(self, begin: int, of_rank: Any) -> Any:
        """Of an epoch that the loop begins at a place, with so many rows of a rank; for arrays of
        them, too.
        """
        loop = self._loop
        batches = _in_batches(of_rank, loop)
        if not loop.trainer:
            return batches
        most = _in_batches(self._rows // loop.world_size, loop)
        # steps of the epoch that a run has behind it which goes on from a state
        first = (begin + loop.world_size - 1) // self._rows * self._rows
        done = -(-(begin - first) // loop.rows_per_step)
        return np.minimum(batches, max(most - done * loop.micro_batches, 0))

    def _step(self, within: int, number: int, epoch: int, begin: int, end: int) -> Step:
        first = begin + within * self._loop.rows_per_step
        return Step(number, epoch, begin, first, min(first + self._loop.rows_per_step, end))


def _in_batches(rows: Any, loop: Loop) -> Any:
    """How many batches so many rows of a rank are."""
    return rows // loop.batch_size if loop.drop_last else -(-rows // loop.batch_size)
