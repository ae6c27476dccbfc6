"""Results at URLs, read through a cache: `open_cached` opens one, as a `PackedDirectory`.

Its manifest is fetched each time, and also kept in the cache by its digest, for processes that go
on with a result that was opened. Shards are fetched when they are first read, or ahead of that by
`Foresight`, to which a sampler tells its order. Every byte that is read was compared with the
manifest, so an object that is replaced, damaged or cut short at the URL ends in an error, and never
in other rows.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from packer_cli import storage
from packer_cli.errors import DataError, PackerError, UsageError
from packer_cli.records import Int64
from packer_cli.result.cache import MANIFEST as KEPT_MANIFEST
from packer_cli.result.cache import SIDE, UPLOAD_AGAIN, Cache, Wanted, patiently
from packer_cli.result.layout import MANIFEST, SQUARED_LENGTHS, Shard
from packer_cli.result.manifest import Manifest
from packer_cli.result.manifest_file import checksum, load, load_as_is
from packer_cli.result.reader import HEADER_BYTES, Mapped, PackedDirectory
from packer_cli.result.wording import size as in_words

_TRIES = 100
_WITHOUT_LISTINGS = ("http", "https")
_LOOK_SECONDS = 1.0  # between two looks at what is still in the cache
# Of what is fetched, less than one part in so many is read: nearly every batch waits for shards.
_WASTE, _TURNS = 20, 2
# How often an epoch may fetch all of a result before a word is said about it.
_OFTEN = 3
_WAIT_SECONDS = 0.05  # between two tries to fetch what another process fetches
_THREADS = 3
_process_ends = threading.Event()
atexit.register(_process_ends.set)


class CachedDirectory(PackedDirectory):
    """A result at `url`. `path` is the folder of the cache, where its files have other names."""

    def __init__(self, url: str, facts: Manifest, cache: Cache) -> None:
        super().__init__(cache.folder, facts)
        self.url, self.cache = url, cache
        self._bytes = sum(shard.bytes for shard in facts.shards)
        self._used = np.zeros(len(facts.shards), bool)  # which were read since the last look
        self._looked = 0.0  # seconds

    @cached_property
    def digest(self) -> str:
        """Digest of what the manifest says, whoever wrote it."""
        return checksum(self.manifest)

    def place_of(self, name: str) -> str:
        return storage.join(self.url, name)

    @cached_property
    def beside_shards(self) -> int:
        """How many bytes its manifest and side files may take in the cache."""
        sums = HEADER_BYTES + 8 * len(self) if SQUARED_LENGTHS in self.facts.side_files else 0
        return len(msgspec.json.encode(self.manifest)) + sums

    def wanted(self, shard: Shard) -> Wanted:
        return Wanted(self.place_of(shard.file), shard.bytes, shard.sha256)

    def holds(self, shard: Shard) -> bool:
        """Whether a shard is in the cache."""
        return self.cache.holds(self.wanted(shard))

    def local(self, name: str) -> Path:
        wanted = Wanted(self.place_of(name), None, self.facts.side_files[name], SIDE)
        try:
            if not self.cache.holds(wanted):
                size = patiently(lambda: storage.stat(wanted.url, again=True)).size
                wanted = wanted._replace(size=size)
            return self.cache.local(wanted)
        except DataError as error:
            raise self.replaced() or error from error

    def _map(self, shard: Shard) -> Any:
        wanted = self.wanted(shard)
        for _ in range(_TRIES):
            try:
                mapped = pa.memory_map(str(self.cache.local(wanted)))
            except FileNotFoundError:  # another process has made room just now
                continue
            except DataError as error:
                raise self.replaced() or error from error
            self.cache.touch([wanted])
            return mapped
        raise DataError(
            f"cache: {self.cache.folder}: shards go before they are read", "give more cache_bytes"
        )

    def gather(self, rows: Int64, columns: Sequence[str]) -> dict[str, Any]:
        """Gather rows, and now and then unmap shards that have left the cache, so that the disk has
        their space back. Raises UsageError for an order that makes the cache useless.
        """
        self._look()
        self.cache.given += len(rows) * self._bytes / len(self)
        found = super().gather(rows, columns)
        self._used[np.searchsorted(self._ends, rows, side="right")] = True
        return found

    def _look(self) -> None:
        """Tell the cache which shards are read, and let those go that it has removed."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        shards, mapped = self.facts.shards, self._mapped
        used = [self.wanted(shards[index]) for index in np.flatnonzero(self._used)]
        self.cache.touch([_manifest(self.digest), *used])
        self._used[:] = False
        here = np.unique(np.searchsorted(self._ends, mapped.firsts, side="right")).tolist()
        if lost := [index for index in here if self.cache.gone(self.wanted(shards[index]))]:
            ends = self._ends[lost]
            self._mapped = mapped.without(ends - [shards[index].rows for index in lost], ends)

    def _with_shard_of(self, row: int, mapped: Mapped) -> Mapped:
        limit, fetched, read = self.cache.limit, self.cache.waited_for, self.cache.given
        useless = limit is not None and fetched >= _TURNS * limit and fetched > _WASTE * read
        if useless and not self.cache.planned:
            raise UsageError(
                f"{self.url}: {fetched:,} bytes of shards were fetched for {read:,.0f} bytes of "
                f"rows: the order asks for other shards than the cache holds, cache_bytes is "
                f"{limit:,}",
                "shuffle with PackedSampler, or give cache_bytes="
                f"{self._bytes * 101 // 100} or more",
            )
        return super()._with_shard_of(row, mapped)

    def check_size(self, shard: Shard) -> None:
        """Nothing: what is fetched is compared with the manifest."""

    def replaced(self) -> DataError | None:
        try:
            now = load_as_is(self.url)
        except DataError:
            return None
        if checksum(now.document) == self.digest:
            return None
        return DataError(
            f"{self.url}: was replaced by another result while it was read", "open it again"
        )

    def keep(self) -> None:
        """Keep the manifest in the cache. Raises UsageError for a cache or a disk that is too
        small, DataError for a shard that is not at the URL, or not as long as it should be, where
        servers list what they have.
        """
        cache, shards = self.cache, self.facts.shards
        content = msgspec.json.encode(self.manifest)
        largest = max(shard.bytes for shard in shards)
        if cache.limit is not None and cache.limit < largest + len(content):
            raise UsageError(
                f"cache_bytes: {cache.limit:,} bytes do not hold the largest shard of {self.url}, "
                f"{largest:,} bytes, and its manifest",
                "give more: all of a shard is fetched at once",
            )
        missing = [one for one in shards if not cache.holds(self.wanted(one), sealed=False)]
        cache.check_space(sum(shard.bytes for shard in missing), self._bytes)
        if missing and self.url.partition("://")[0] not in _WITHOUT_LISTINGS:
            sizes = patiently(lambda: storage.sizes(self.url))
            for shard in missing:
                if (found := sizes.get(shard.file)) != shard.bytes:
                    problem = f"has {found} bytes, the manifest says {shard.bytes}"
                    raise self.replaced() or DataError(
                        f"{self.place_of(shard.file)}: {problem if found else 'is missing'}",
                        UPLOAD_AGAIN if found else "upload the result again",
                    )
        cache.local(_manifest(self.digest, len(content)), content)


def open_cached(url: str, cache: Cache, digest: str | None = None) -> CachedDirectory:
    """Open a result at a URL. `digest`: go on with the one that was opened, as its `digest` says.

    Raises DataError when it is unfinished, of another format version, lacks a shard, cannot be
    read, or is another one than `digest` says; UsageError for a view, a cache that is somebody
    else's, or too small.
    """
    if digest is not None:
        with suppress(OSError, ValueError, AttributeError, RecursionError):
            cache.touch([_manifest(digest)])
            document = msgspec.json.decode(cache.path(_manifest(digest)).read_bytes())
            if checksum(document) == digest:
                return CachedDirectory(url, Manifest.of(document), cache)
    packed = CachedDirectory(url, patiently(lambda: load(url)), cache)
    if packed.facts.config.view:
        raise UsageError(
            f"{url}: a view, which is only read from a local directory",
            "copy it and its tokenized directories to local paths; or pack without --view",
        )
    if digest not in (None, packed.digest):
        raise DataError(
            f"{packed.place_of(MANIFEST)}: changed since the dataset was opened",
            "open it again; upload into a new folder while one is in use",
        )
    packed.keep()
    return packed


def _manifest(digest: str, size: int | None = None) -> Wanted:
    """What a manifest is in the cache."""
    return Wanted("", size, digest, KEPT_MANIFEST)


class Foresight:
    """Rows that come next, as a sampler tells a dataset with results that are read through `cache`,
    and what its order asks of the cache.

    Shards are fetched before they are read, by threads that begin when there is something to fetch
    and end when there is not, so that copies of the process (fork) usually find none; a copy begins
    its own. They are daemons, and stop between two requests when the process ends. What another
    process fetches, or has no room yet, they try again later. What they cannot fetch they leave
    alone: whoever reads it asks again, and gets the error.
    """

    def __init__(self, results: Sequence[PackedDirectory], cache: Cache) -> None:
        self._cache = cache
        self._shards: list[Wanted | None] = []  # None: a local one
        rows, sizes, beside = list[int](), [0], 0
        for result in results:
            remote = result if isinstance(result, CachedDirectory) else None
            beside += remote.beside_shards if remote else 0
            for shard in result.facts.shards:
                self._shards.append(remote.wanted(shard) if remote else None)
                rows.append(shard.rows)
                sizes.append(shard.bytes if remote else 0)
        self._ends: Int64 = np.cumsum(rows, dtype=np.int64)
        self._edges: Int64 = np.cumsum(sizes, dtype=np.int64)  # of bytes, before each shard
        self.room = sys.maxsize if cache.limit is None else max(0, cache.limit - beside)
        self._process = 0  # whose threads they are

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_process": 0, "_lock": None}

    def coming(self, rows: Int64) -> None:
        """Fetch the shards of these rows, in the order in which they need them, instead of what
        was wanted before.

        Only as many as there is room for together: what comes later would take the place of what
        comes first. Those that are here already count as used, the first ones as the latest.
        """
        if self._process != os.getpid():
            self._process, self._lock = os.getpid(), threading.Lock()
            self._threads = 0
        shards, first = np.unique(np.searchsorted(self._ends, rows, side="right"), True)
        fitting, room = list[Wanted](), self.room
        for one in map(self._shards.__getitem__, shards[np.argsort(first)].tolist()):
            if one is not None:
                room -= one.size or 0
                if room < 0:
                    break
                fitting.append(one)
        self._cache.touch(reversed(fitting))
        with self._lock:
            self._wanted = [one for one in fitting if not self._cache.holds(one)]
            more = max(0, min(_THREADS, len(self._wanted)) - self._threads)
            self._threads += more
        for _ in range(more):
            threading.Thread(target=self._fetch, daemon=True, name="packer-ahead").start()

    def _fetch(self) -> None:
        while True:
            with self._lock:
                wanted = self._wanted  # which nobody reads once others are
                if not wanted or _process_ends.is_set():
                    self._threads -= 1
                    return
                one = wanted.pop(0)
            with suppress(PackerError, OSError):
                fetched = self._cache.try_to_fetch(one, _process_ends.is_set)
                if not fetched and not self._cache.holds(one, sealed=False):
                    _process_ends.wait(_WAIT_SECONDS)
                    with self._lock:
                        wanted.append(one)

    def check_order(
        self,
        stages: Sequence[int],
        block_rows: int,
        window_blocks: int,
        *,
        windows: int = 1,
        shuffled: bool = True,
    ) -> None:
        """Raise UsageError when the cache cannot hold the shards of a window at once, which are all
        read until it ends; else it is `planned`. The bound holds for every window of every epoch.

        `stages`: how many rows each has; none: all rows are one. `windows`: how many are read at
        once. Warns when an epoch fetches most shards several times.
        """
        if self._cache.limit is None:
            return
        room, total, blocks = (
            self.room,
            int(self._edges[-1]),
            self.largest_blocks(stages, block_rows),
        )
        at_once = window_blocks * windows if shuffled else 1
        need = min(total, max(int(some[:at_once].sum()) for some in blocks))
        if need > room:
            fitting = min(int(np.searchsorted(np.cumsum(some), room, "right")) for some in blocks)
            fewer = f", or window_blocks={fitting // windows} with block_rows={block_rows}"
            raise UsageError(
                f"PackedSampler: the shards of {window_blocks * windows} blocks of {block_rows} "
                f"rows, which are read at once, have up to {need:,} bytes, cache_bytes has room "
                f"for {room:,}: each would be fetched over and over",
                f"give cache_bytes={self._cache.limit - room + need} or more"
                f"{fewer if fitting // windows else ''}",
            )
        self._cache.planned = True
        # a shard is fetched once for each block, if it is not here
        times = sum(int(some.sum()) for some in blocks) / total * (1 - min(1.0, room / total))
        if shuffled and times > _OFTEN:
            warnings.warn(
                f"cache_bytes has room for {in_words(room)} of {in_words(total)}: "
                f"in this order an epoch fetches shards about {times:.0f} times. block_rows="
                f"{int(np.median(np.diff(self._ends, prepend=0)))}, the rows of a shard, with "
                "fewer window_blocks, or more cache_bytes fetch less",
                stacklevel=3,
            )

    def largest_blocks(self, stages: Sequence[int], block_rows: int) -> list[Int64]:
        """Bytes of all shards that each block of a stage needs, the largest first, by stage."""
        found = []
        for begin, end in pairwise([0, *accumulate(stages or [int(self._ends[-1])])]):
            firsts = np.arange(begin, end, block_rows)
            lasts = np.minimum(firsts + block_rows, end) - 1
            before = np.searchsorted(self._ends, firsts, side="right")
            after = np.searchsorted(self._ends, lasts, side="right") + 1
            found.append(np.sort(self._edges[after] - self._edges[before])[::-1])
        return found
