"""`Grid`: where epochs, steps and windows of steps begin and end. Only arithmetic.

A place counts the rows that all ranks have taken since the run began. Every rank gets as many rows
of an epoch as the others: the rows left over, fewer than there are ranks, begin the next one. Steps
and windows are counted anew from the beginning of each epoch, so its last step may be shorter.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index as as_index
from typing import NamedTuple

from packer_cli.errors import DataError, UsageError


def whole_size(name: str, size: object) -> int:
    """A size as a plain int, which a state in JSON can hold. Raises UsageError for one below 1."""
    try:
        plain = as_index(size)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{name}: {size!r} is not a whole number") from None
    if plain < 1:
        raise UsageError(f"{name}: {plain} is less than 1")
    return plain


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
    """The places from `begin` on, of a run whose epochs have `rows` rows.

    sizes    of a step
    ends     of the stages in an epoch, the last one being `rows`
    window   how many steps make a window, at most

    Raises DataError for more ranks than rows.
    """

    def __init__(
        self, rows: int, begin: int, sizes: Sizes, ends: Sequence[int] = (), window: int = 1
    ) -> None:
        if rows < sizes.world_size:
            raise DataError(
                f"{sizes.world_size} ranks share {rows} rows: some would get none",
                "use fewer ranks, or pack more data or shorter rows",
            )
        self.begin, self.sizes, self.window = begin, sizes, window
        self._rows, self._ends = rows, ends or [rows]

    def epoch_of(self, place: int) -> int:
        """The number of the epoch that a place is in, if it is the first of a rank's batch."""
        return (place - self._within_ranks(place) + self.sizes.world_size - 1) // self._rows

    def epoch_at(self, place: int) -> Stretch:
        """The epoch that a place is in, or what these sizes have of it."""
        epoch = self.epoch_of(place)
        return Stretch(max(self.begin, self._border(epoch)), self._border(epoch + 1))

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
        return (place - self.begin) % self.sizes.world_size

    def _stage_at(self, place: int) -> Stretch:
        epoch, within = divmod(place, self._rows)
        stage = bisect_right(self._ends, within)
        begin = self._ends[stage - 1] if stage else 0
        return Stretch(epoch * self._rows + begin, epoch * self._rows + self._ends[stage])
