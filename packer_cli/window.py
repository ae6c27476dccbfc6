"""The documents that one plan considers together, and what it carries into the next window.

    add(batch) ... -> rows()      plans, keeps back the badly filled rows, gives the others
                      rows(last=True)   gives all that is left

Carrying instead of padding makes the rows of many small windows as full as those of one plan.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from packer_cli._kernels import filling
from packer_cli.config import PackConfig
from packer_cli.packing import plan_rows
from packer_cli.records import Int64, Pieces, Stock, TokenBatch, UInt8
from packer_cli.strategies import keeps_order

# A row is badly filled when more than 1/64 of it would be padding. At most a quarter of the
# rows are carried: where documents just do not pair up, waiting would not help.
_BAD_SPACE = 64
_MOST_CARRIED = 4


class Window:
    """Gathers pieces of one unit until there are enough to plan."""

    def __init__(self, config: PackConfig, unit: int) -> None:
        self._config = config
        self._unit = unit
        self._plans = 0
        self._parts: list[Stock] = []
        self.tokens = 0

    def add(self, batch: TokenBatch, pieces: Pieces) -> None:
        tokens = int(pieces.length.sum())
        if not tokens:
            return
        document = pieces.document
        stock = Stock(
            batch.ids,
            batch.trained,
            pieces.begin,
            pieces.length,
            pieces.start,
            batch.file[document],
            batch.position[document],
        )
        if 2 * tokens < len(batch.ids):  # or what was cut off would stay as long as the window
            stock = _gathered(stock, np.arange(len(pieces)))
        self._parts.append(stock)
        self.tokens += tokens

    def rows(self, *, last: bool = False) -> tuple[Stock, Int64, Int64]:
        """(stock, order, row_offsets) of the rows to write now; the rest stays in the window."""
        config, stock = self._config, _joined(self._parts)
        self._parts, self.tokens = [], 0  # the parts' tokens are freed before any are copied
        order, row_offsets = plan_rows(
            stock.length, config.max_length, config.strategy, self._seed(), bool(config.shuffle)
        )
        self._plans += 1
        if last:
            return stock, order, row_offsets
        carried = self._carried(stock, order, row_offsets)
        sizes = np.diff(row_offsets)
        of_carried = np.repeat(carried, sizes)
        self._parts = [_gathered(stock, order[of_carried])]
        self.tokens = int(self._parts[0].length.sum())
        kept_offsets = np.zeros(int((~carried).sum()) + 1, np.int64)
        np.cumsum(sizes[~carried], out=kept_offsets[1:])
        return stock, order[~of_carried], kept_offsets

    def _seed(self) -> int:
        """Differs between windows, depends on nothing but the options and the place."""
        name = f"{self._config.seed}/{self._unit}/{self._plans}"
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")

    def _carried(self, stock: Stock, order: Int64, row_offsets: Int64) -> npt.NDArray[np.bool_]:
        """bool[rows]: which rows wait for the next window."""
        rows = len(row_offsets) - 1
        carried = np.zeros(rows, bool)
        if keeps_order(self._config.strategy):
            carried[rows - 1 :] = True  # the open row; the next window goes on filling it
            return carried
        used = np.zeros(len(order) + 1, np.int64)
        np.cumsum(stock.length[order], out=used[1:])
        space = self._config.max_length - np.diff(used[row_offsets])
        emptiest = np.argsort(-space, kind="stable")[: rows // _MOST_CARRIED]
        carried[emptiest] = space[emptiest] * _BAD_SPACE > self._config.max_length
        return carried


def _gathered(stock: Stock, pieces: Int64) -> Stock:
    """Some pieces of a stock with a copy of their tokens, and no others."""
    begin, length = stock.begin[pieces], stock.length[pieces]
    tokens = int(length.sum())
    ids, trained = np.empty(tokens, np.uint32), None
    filling.gather_pieces(stock.ids, begin, length, ids)
    if stock.trained is not None:
        trained = np.empty(tokens, np.uint8)
        filling.gather_pieces(stock.trained, begin, length, trained)
    return Stock(
        ids,
        trained,
        np.cumsum(length, dtype=np.int64) - length,
        length,
        stock.start[pieces],
        stock.file[pieces],
        stock.position[pieces],
    )


def _joined(parts: list[Stock]) -> Stock:
    if len(parts) == 1:
        return parts[0]
    sizes = [len(part.ids) for part in parts]
    shift = np.repeat(
        np.cumsum(sizes, dtype=np.int64) - np.array(sizes, np.int64),
        [len(part.begin) for part in parts],
    )
    return Stock(
        np.concatenate([part.ids for part in parts]),
        _trained(parts),
        np.concatenate([part.begin for part in parts]) + shift,
        np.concatenate([part.length for part in parts]),
        np.concatenate([part.start for part in parts]),
        np.concatenate([part.file for part in parts]),
        np.concatenate([part.position for part in parts]),
    )


def _trained(parts: list[Stock]) -> UInt8 | None:
    if all(part.trained is None for part in parts):
        return None
    flags = [np.ones(len(p.ids), np.uint8) if p.trained is None else p.trained for p in parts]
    return np.concatenate(flags)
