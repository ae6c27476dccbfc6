"""`Era`: places that are dealt with the same sizes, up to the next interruption that changes them.

An interruption may leave a step or a window in the middle. Its rows that were not taken come first
in the next era, in the places that they had in the last one, and the order goes on behind them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from packer_cli.records import Int64
from packer_cli.steps.grid import Grid, Sizes, Stretch

RowsAt = Callable[[int, int], Int64]  # places begin..end to rows
Deal = Callable[[Int64, int, Sizes], Int64]  # rows, where they begin, and the sizes of steps


class Era:
    """Row numbers of the places from `grid.begin` on. Keeps one block of them, dealt.

    order    row numbers of the places begin..end, before any dealing
    deal     deals the rows of a block: a window
    at_once  or as many whole steps as have this many rows, where that is more: small ones are
             quicker together. Only where each is dealt by itself.
    before   the era that ends where this one begins
    """

    def __init__(
        self, grid: Grid, order: RowsAt, deal: Deal, at_once: int, before: Era | None
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
                rows = self._deal(self._before_dealing(*block), block.begin, self.grid.sizes)
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
