"""`Order`: the order in which rows are taken, epoch after epoch, stage after stage.

It depends on the number of rows, the seed and the epoch, never on how many ranks there are: blocks
of neighbouring rows are shuffled, so that a cold disk reads runs, and then the rows of a window of
blocks, so that neighbours part. Stages of a recipe follow one another: no row leaves its own.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from packer_cli._kernels import sorting
from packer_cli.errors import UsageError
from packer_cli.records import Int64

BLOCK_ROWS, WINDOW_BLOCKS = 256, 64  # of the shuffle, as PackedSampler has it by default


class Order:
    """Places 0, 1, ... of all epochs to row numbers. Keeps one window of them.

    rows    of an epoch
    seed    None: as they are stored
    stages  how many rows each has, one after another; none: all rows are shuffled together
    block_rows, window_blocks   the shuffle's sizes

    Raises UsageError for a size below 1.
    """

    def __init__(
        self,
        rows: int,
        seed: int | None,
        block_rows: int,
        window_blocks: int,
        stages: Sequence[int] = (),
    ) -> None:
        self.rows = rows
        self._seed, self._stages = seed, list(stages)
        self._block_rows, self._window_blocks = block_rows, window_blocks
        for name, size in (("block_rows", block_rows), ("window_blocks", window_blocks)):
            if size < 1:
                raise UsageError(f"{name}: {size} is less than 1")
        self.ends = list(accumulate(self._stages or [rows]))  # of stages, in an epoch
        self._now: tuple[tuple[int, int], _Shuffled | None] = ((-1, -1), None)  # epoch and stage

    def name(self) -> dict[str, Any]:
        """What the order depends on."""
        return {
            "rows": self.rows,
            "seed": self._seed,
            "block_rows": self._block_rows,
            "window_blocks": self._window_blocks,
            "stages": self._stages or None,
        }

    def rows_at(self, begin: int, end: int) -> Int64:
        """int64[end - begin], the rows of the places begin..end."""
        pieces = []
        while begin < end:
            piece = self._some_rows(begin, end - begin)
            pieces.append(piece)
            begin += len(piece)
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def _some_rows(self, place: int, most: int) -> Int64:
        """The rows from a place on, `most` or fewer: those of one window or, unshuffled, epoch."""
        epoch, within = divmod(place, self.rows)
        if self._seed is None:
            return np.arange(within, min(within + most, self.rows))
        stage = bisect_right(self.ends, within)
        first = self.ends[stage - 1] if stage else 0
        which, shuffled = self._now  # read and set at once: an interruption leaves no half of it
        if shuffled is None or which != (epoch, stage):
            shuffled = _Shuffled(
                self.ends[stage] - first,
                f"{self._seed}/{epoch}" + (f"/stage {stage}" if self._stages else ""),
                self._block_rows,
                self._window_blocks,
            )
            self._now = (epoch, stage), shuffled
        return first + shuffled.some_rows(within - first, most)


class _Shuffled:
    """Some rows in the order that a name gives them; the window of the last place is kept."""

    def __init__(self, rows: int, name: str, block_rows: int, window_blocks: int) -> None:
        self._rows, self._name = rows, name
        self._block_rows, self._window_blocks = block_rows, window_blocks
        count = -(-rows // block_rows)
        self._blocks = permutation(count, f"{name}/blocks")
        # the last block may be shorter, and be in any window
        self._missing = count * block_rows - rows
        self._short = int(np.flatnonzero(self._blocks == count - 1)[0]) // window_blocks
        self._kept = -1, np.empty(0, np.int64)  # a window and its rows

    def some_rows(self, place: int, most: int) -> Int64:
        """The rows from a place on, `most` or, to the end of its window, fewer."""
        window = place // (self._block_rows * self._window_blocks)
        window += place >= self._begin(window + 1)
        kept, members = self._kept
        if window != kept:
            members = self._members_of(window)
            self._kept = window, members
        within = place - self._begin(window)
        return members[within : within + most]

    def _begin(self, window: int) -> int:
        missing = self._missing if window > self._short else 0
        return window * self._window_blocks * self._block_rows - missing

    def _members_of(self, window: int) -> Int64:
        first = window * self._window_blocks
        begins = self._blocks[first : first + self._window_blocks] * self._block_rows
        rows = (begins[:, None] + np.arange(self._block_rows)).ravel()
        rows = rows[rows < self._rows]
        return rows[permutation(len(rows), f"{self._name}/{window}")]


def permutation(count: int, name: str) -> Int64:
    """A permutation, int64[count], by packer's own generator: numpy's may change some day."""
    seed = hashlib.sha256(name.encode()).digest()[:8]
    numbers = np.empty(count, np.int64)
    sorting.permutation(numbers, int.from_bytes(seed, "little"))
    return numbers
