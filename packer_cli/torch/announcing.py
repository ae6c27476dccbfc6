"""`Announcer`: what a sampler tells a dataset at a URL, so that shards come before their rows."""

from __future__ import annotations

from packer_cli.result.foresight import Foresight
from packer_cli.steps.order import Order


class Announcer:
    """Says which rows come in the next two windows, of all ranks: those of a machine share what is
    fetched. Dealing rows to ranks leaves them in their window, so the plain order is enough.

    window   how many rows a window has; it is one of the shuffle, or of balanced steps if that is
             longer
    """

    def __init__(self, foresight: Foresight, order: Order, window: int) -> None:
        self._foresight, self._order = foresight, order
        self._window = min(window, order.rows)
        self._said = -1  # the place up to which nothing is to be said

    def begin(self, place: int) -> None:
        """An iteration begins."""
        self._said = place
        self.reached(place)

    def reached(self, place: int) -> None:
        """Rows from this place on are taken next."""
        if place >= self._said:
            self._foresight.coming(self._order.rows_at(place, place + 2 * self._window))
            self._said = place + self._window


def announcer_of(
    rows: object,
    seed: int | None,
    block_rows: int,
    window_blocks: int,
    steps: int = 0,
) -> Announcer | None:
    """That of a dataset; None for what is local, or no dataset.

    steps   rows of a window of balanced steps, which are all read until it ends
    Raises UsageError when the cache cannot hold what a window needs.
    """
    foresight: Foresight | None = getattr(rows, "foresight", None)
    if foresight is None:
        return None
    stages = [one.rows for one in rows.stages]  # type: ignore[attr-defined]
    order = Order(len(rows), seed, block_rows, window_blocks, stages)  # type: ignore[arg-type]
    window = block_rows * window_blocks
    together = 1 + -(-steps // window) if steps else 1  # windows of the shuffle, at most
    foresight.check_order(
        stages,
        block_rows,
        window_blocks,
        windows=together,
        shuffled=seed is not None or steps > 0,
    )
    return Announcer(foresight, order, max(window, steps))
