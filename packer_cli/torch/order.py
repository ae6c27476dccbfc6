"""`Order`: the order in which a sampler takes rows, epoch after epoch, stage after stage."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from packer_cli._kernels import sorting
from packer_cli.records import Int64


class Order:
    """Places 0, 1, ... of all epochs to row numbers.

    rows    of an epoch
    seed    None: as they are stored
    stages  how many rows each has, one after another; none: all rows are shuffled together
    """

    def __init__(
        self,
        rows: int,
        seed: int | None,
        block_rows: int,
        window_blocks: int,
        stages: Sequence[int] = (),
    ) -> None:
        self._rows, self._seed = rows, seed
        self._block_rows, self._window_blocks = block_rows, window_blocks
        self._stages = list(stages)
        self._ends = list(accumulate(self._stages or [rows]))
        self._now, self._first = (-1, -1), 0
        self._shuffled: _Shuffled

    def name(self) -> dict[str, Any]:
        """What the order depends on."""
        return {
            "rows": self._rows,
            "seed": self._seed,
            "block_rows": self._block_rows,
            "window_blocks": self._window_blocks,
            "stages": self._stages or None,
        }

    def __getitem__(self, place: int) -> int:
        epoch, within = divmod(place, self._rows)
        if self._seed is None:
            return within
        stage = bisect_right(self._ends, within)
        if (epoch, stage) != self._now:
            self._now, self._first = (epoch, stage), self._ends[stage - 1] if stage else 0
            self._shuffled = _Shuffled(
                self._ends[stage] - self._first,
                f"{self._seed}/{epoch}" + (f"/stage {stage}" if self._stages else ""),
                self._block_rows,
                self._window_blocks,
            )
        return self._first + self._shuffled[within - self._first]


class _Shuffled:
    """Some rows in the order that a name gives them; the window of the last place is kept."""

    def __init__(self, rows: int, name: str, block_rows: int, window_blocks: int) -> None:
        self._rows, self._name = rows, name
        self._block_rows, self._window_blocks = block_rows, window_blocks
        self._blocks = self._permutation(-(-rows // block_rows), "blocks")
        self._window, self._begin, self._members = -1, 0, np.empty(0, np.int64)

    def __getitem__(self, place: int) -> int:
        while not self._begin <= place < self._begin + len(self._members):
            self._next_window(back=place < self._begin)
        return int(self._members[place - self._begin])

    def _next_window(self, *, back: bool) -> None:
        """Windows are made in turn: the last block may be shorter, and be in any of them."""
        self._window = 0 if back else self._window + 1
        self._begin = 0 if back else self._begin + len(self._members)
        first = self._window * self._window_blocks
        blocks = self._blocks[first : first + self._window_blocks]
        begins = blocks * self._block_rows
        rows = (begins[:, None] + np.arange(self._block_rows)).ravel()
        rows = rows[rows < self._rows]
        self._members = rows[self._permutation(len(rows), self._window)]

    def _permutation(self, count: int, what: object) -> Int64:
        """A permutation by packer's own generator: numpy's may change with its version."""
        seed = hashlib.sha256(f"{self._name}/{what}".encode()).digest()[:8]
        permutation = np.empty(count, np.int64)
        sorting.permutation(permutation, int.from_bytes(seed, "little"))
        return permutation
