"""`CachedRows`: the rows of a result at a URL, gathered as those of a local directory.

Only three things differ: shards come through the cache, those that have left it are let go, so that
the disk has their space back, and an order that makes the cache useless is an error.
"""

from __future__ import annotations

import time
from functools import cached_property
from typing import Any

import numpy as np

from packer_cli.errors import UsageError
from packer_cli.records import Int64
from packer_cli.result.cache import Cache
from packer_cli.result.cache_folder import MANIFEST
from packer_cli.result.cached import CachedDirectory, open_cached
from packer_cli.result.shards import Shard
from packer_cli.torch.maps import MappedRows
from packer_cli.torch.result_rows import Mapped, ResultRows
from packer_cli.torch.rows import RowBatch

_LOOK_SECONDS = 1.0  # between two looks at what is still in the cache
# Of what is fetched, less than one part in so many is read: nearly every batch waits for shards.
_WASTE, _TURNS = 20, 2


class CachedRows(ResultRows):
    """A packed directory at a URL. It pickles as that, the cache and the manifest's digest."""

    def __init__(self, url: str, cache: Cache) -> None:
        self.path = self.url = url
        self.columns = ()
        self._tokens, self.cache = None, cache
        self._digest = None
        self._digest = self.packed.digest

    @cached_property
    def packed(self) -> CachedDirectory:
        """The result, opened once in each process; by its digest all but the first time."""
        return open_cached(self.url, self.cache, self._digest)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"url": self.url, "cache": self.cache}

    def gather(self, rows: Int64) -> RowBatch:
        self._look()
        self._used[np.searchsorted(self._ends, rows, side="right")] = True
        self.cache.given += len(rows) * self._row_bytes
        return super().gather(rows)

    @cached_property
    def _ends(self) -> Int64:
        return np.cumsum([shard.rows for shard in self.packed.facts.shards])

    @cached_property
    def _used(self) -> Any:
        """bool[shards], which have been read since the last look."""
        return np.zeros(len(self._ends), bool)

    @cached_property
    def _row_bytes(self) -> float:
        facts = self.packed.facts
        return sum(shard.bytes for shard in facts.shards) / facts.rows

    _looked = 0.0  # seconds

    def _look(self) -> None:
        """Tell the cache which shards are read, and let those go that it has removed."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        if self._digest is not None:
            self.cache.touch([self._digest], MANIFEST)
        shards = self.packed.facts.shards
        self.cache.touch(shards[index].sha256 for index in np.flatnonzero(self._used))
        self._used[:] = False
        mapped = self._mapped
        if not isinstance(mapped, MappedRows):  # of a view, which is never at a URL
            return
        here = np.unique(np.searchsorted(self._ends, mapped.firsts, side="right")).tolist()
        gone = {*self.cache.gone(shards[index].sha256 for index in here)}
        lost = [index for index in here if shards[index].sha256 in gone]
        if lost:
            ends = self._ends[lost]
            self._mapped = mapped.without(ends - [shards[index].rows for index in lost], ends)

    def _map(self, row: int, mapped: Mapped) -> Mapped:
        self._refuse_waste()
        return super()._map(row, mapped)

    def _refuse_waste(self) -> None:
        limit, fetched, read = self.cache.limit, self.cache.waited_for, self.cache.given
        if limit is None or self.cache.planned:
            return
        if fetched < _TURNS * limit or fetched <= _WASTE * read:
            return
        total = sum(shard.bytes for shard in self.packed.facts.shards)
        raise UsageError(
            f"{self.path}: {fetched:,} bytes of shards were fetched for {read:,.0f} bytes of rows: "
            f"the order asks for other shards than the cache holds, cache_bytes is {limit:,}",
            f"shuffle with PackedSampler, or give cache_bytes={total * 101 // 100} or more",
        )

    def _check(self, entry: Shard) -> None:
        """Nothing: what is in the cache has been compared with the manifest."""
