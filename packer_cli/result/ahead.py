"""Fetching shards before they are read, by threads of the process that knows the order.

Threads begin when there is something to fetch, and end when there is not, so that copies of the
process (fork) usually find none; a copy begins its own. They are daemons, and stop between two
requests when the process ends. What they cannot fetch they leave alone: whoever reads it asks
again, and gets the error.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from packer_cli.errors import PackerError
from packer_cli.result.cache import Cache
from packer_cli.result.cache_folder import SHARD
from packer_cli.result.fetching import Wanted

_THREADS = 3
_process_ends = threading.Event()
atexit.register(_process_ends.set)


class Ahead:
    """Fetches what `follow` says into a cache."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        return {"_cache": self._cache, "_process": 0}  # begun where it goes on

    def _begin(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()
        self._wanted: list[Wanted] = []
        self._threads = 0

    def follow(self, wanted: Sequence[Wanted]) -> None:
        """Fetch these, in this order, instead of what was wanted before.

        Only as many as the cache holds together: what comes later would take the place of what
        comes first. Those that are here already count as used, the first ones as the latest.
        """
        if self._process != os.getpid():
            self._begin()
        fitting = self._fitting(wanted)
        self._cache.touch(one.sha256 for one in reversed(fitting))
        missing = [one for one in fitting if not self._cache.holds(SHARD, one)]
        with self._lock:
            self._wanted = missing
            more = max(0, min(_THREADS, len(missing)) - self._threads)
            self._threads += more
        for _ in range(more):
            threading.Thread(target=self._fetch, daemon=True, name="packer-ahead").start()

    def _fitting(self, wanted: Sequence[Wanted]) -> list[Wanted]:
        room, fitting = self._cache.room(), list[Wanted]()
        for one in wanted:
            room -= one.size or 0
            if room < 0:
                break
            fitting.append(one)
        return fitting

    def _next(self) -> Wanted | None:
        """What is to be fetched next; None ends the thread."""
        with self._lock:
            if self._wanted and not _process_ends.is_set():
                return self._wanted.pop(0)
            self._threads -= 1
            return None

    def _fetch(self) -> None:
        while (one := self._next()) is not None:
            with suppress(PackerError, OSError):
                self._cache.try_to_fetch(SHARD, one, _process_ends.is_set)
