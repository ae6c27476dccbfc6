"""What a sampler tells a dataset at a URL: which rows come next, and what its order asks of the
cache.

Shuffled blocks of rows lie in many shards, and those of a window are all read until it ends. If
they do not fit into the cache, each is fetched again and again: that is an error at the beginning,
by a bound that holds for every window of every epoch.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from packer_cli.errors import UsageError
from packer_cli.records import Int64
from packer_cli.result.cache import Ahead, Cache
from packer_cli.result.cached import CachedDirectory
from packer_cli.result.fetching import Wanted
from packer_cli.result.reader import PackedDirectory
from packer_cli.result.wording import size as in_words

# How often an epoch may fetch all of a result before a word is said about it.
_OFTEN = 3


class Foresight:
    """For results one after another, of which some are read through `cache`."""

    def __init__(self, results: Sequence[PackedDirectory], cache: Cache) -> None:
        self._cache, self._ahead = cache, Ahead(cache)
        self._wanted: list[Wanted | None] = []  # None: a local shard
        rows, sizes, beside = list[int](), [0], 0
        for result in results:
            remote = result if isinstance(result, CachedDirectory) else None
            beside += remote.beside_shards if remote else 0
            for shard in result.facts.shards:
                self._wanted.append(remote.wanted(shard) if remote else None)
                rows.append(shard.rows)
                sizes.append(shard.bytes if remote else 0)
        self._ends: Int64 = np.cumsum(rows, dtype=np.int64)
        self._edges: Int64 = np.cumsum(sizes, dtype=np.int64)  # of bytes, before each shard
        self.room = sys.maxsize if cache.limit is None else max(0, cache.limit - beside)

    def coming(self, rows: Int64) -> None:
        """Fetch the shards of these rows, in the order in which they need them."""
        shards, first = np.unique(np.searchsorted(self._ends, rows, side="right"), True)
        ordered = shards[np.argsort(first)].tolist()
        wanted = [one for shard in ordered if (one := self._wanted[shard]) is not None]
        self._ahead.follow(wanted, self.room)

    def check_order(
        self,
        stages: Sequence[int],
        block_rows: int,
        window_blocks: int,
        *,
        windows: int = 1,
        shuffled: bool = True,
    ) -> None:
        """Raise UsageError when the cache cannot hold the shards of a window at once; else it is
        `planned`.

        `stages`: how many rows each has; none: all rows are one. `windows`: how many are read at
        once. Warns when an epoch fetches most shards several times.
        """
        if self._cache.limit is None:
            return
        room, blocks = self.room, self._blocks(stages, block_rows)
        need = largest_window(blocks, window_blocks * windows if shuffled else 1)
        need = min(need, int(self._edges[-1]))
        if need > room:
            raise UsageError(
                f"PackedSampler: the shards of {window_blocks * windows} blocks of {block_rows} "
                f"rows, which are read at once, have up to {need:,} bytes, cache_bytes has room "
                f"for {room:,}: each would be fetched over and over",
                self._way_out(need, room, most_window_blocks(blocks, room) // windows, block_rows),
            )
        self._cache.planned = True
        if shuffled and (times := self._times(blocks, room)) > _OFTEN:
            warnings.warn(
                f"cache_bytes has room for {in_words(room)} of {in_words(int(self._edges[-1]))}: "
                f"in this order an epoch fetches shards about {times:.0f} times. block_rows="
                f"{self._rows_of_shards()}, the rows of a shard, with fewer window_blocks, or "
                "more cache_bytes fetch less",
                stacklevel=3,
            )

    def _blocks(self, stages: Sequence[int], block_rows: int) -> list[Int64]:
        """Of each stage the bytes of all shards that each block needs."""
        rows = int(self._ends[-1])
        edges = [0, *accumulate(stages or [rows])]
        found = []
        for begin, end in pairwise(edges):
            firsts = np.arange(begin, end, block_rows)
            lasts = np.minimum(firsts + block_rows, end) - 1
            before = np.searchsorted(self._ends, firsts, side="right")
            after = np.searchsorted(self._ends, lasts, side="right") + 1
            found.append(self._edges[after] - self._edges[before])
        return found

    def _way_out(self, need: int, room: int, window_blocks: int, block_rows: int) -> str:
        more = f"give cache_bytes={(self._cache.limit or 0) - room + need} or more"
        fewer = f", or window_blocks={window_blocks} with block_rows={block_rows}"
        return more + fewer if window_blocks else more

    def _times(self, blocks: list[Int64], room: int) -> float:
        """About how often an epoch fetches each shard: once for each block, if it is not here."""
        total = int(self._edges[-1])
        return sum(int(some.sum()) for some in blocks) / total * (1 - min(1.0, room / total))

    def _rows_of_shards(self) -> int:
        return int(np.median(np.diff(self._ends, prepend=0)))


def largest_window(blocks: Sequence[Int64], window_blocks: int) -> int:
    """The most bytes that any choice of so many blocks of one stage needs.

    `blocks`: of each stage, int64[b], the bytes that each block needs.
    """
    return max(int(np.sort(some)[-window_blocks:].sum()) for some in blocks)


def most_window_blocks(blocks: Sequence[Int64], room: int) -> int:
    """How many blocks of one stage `room` holds, whichever they are."""
    return min(
        int(np.searchsorted(np.cumsum(np.sort(some)[::-1]), room, side="right")) for some in blocks
    )
