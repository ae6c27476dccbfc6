"""Results at URLs, read through a cache: `open_cached` opens one, as a `PackedDirectory`.

Its manifest is fetched each time, and also kept in the cache by its digest, for processes that go
on with a result that was opened. Shards are fetched when they are first read, or ahead of that
(`foresight.py`). Every byte that is read was compared with the manifest, so an object that is
replaced, damaged or cut short at the URL ends in an error, and never in other rows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from packer_cli import storage
from packer_cli.errors import DataError, UsageError
from packer_cli.records import Int64
from packer_cli.result.cache import MANIFEST as KEPT_MANIFEST
from packer_cli.result.cache import SHARD, SIDE, Cache
from packer_cli.result.fetching import UPLOAD_AGAIN, Wanted, patiently
from packer_cli.result.layout import MANIFEST, SQUARED_LENGTHS
from packer_cli.result.manifest import Manifest
from packer_cli.result.manifest_bytes import checksum
from packer_cli.result.manifest_file import load
from packer_cli.result.mapped import Mapped
from packer_cli.result.reader import PackedDirectory
from packer_cli.result.shards import Shard
from packer_cli.result.squared_lengths import HEADER_BYTES

_TRIES = 100
_WITHOUT_LISTINGS = ("http", "https")
_LOOK_SECONDS = 1.0  # between two looks at what is still in the cache
# Of what is fetched, less than one part in so many is read: nearly every batch waits for shards.
_WASTE, _TURNS = 20, 2


class CachedDirectory(PackedDirectory):
    """A result at `url`. `path` is the folder of the cache, where its files have other names."""

    def __init__(self, url: str, facts: Manifest, cache: Cache) -> None:
        super().__init__(cache.folder, facts)
        self.url, self.cache = url, cache

    @cached_property
    def digest(self) -> str:
        """Of what the manifest says, whoever wrote it."""
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
        return self.cache.holds(SHARD, self.wanted(shard))

    def fetched(self, shard: Shard) -> Path:
        """The local file of a shard, fetched if it is not in the cache.

        Raises DataError when it cannot be, or another result has taken the place of this one.
        """
        try:
            return self.cache.local(SHARD, self.wanted(shard))
        except DataError as error:
            raise self.replaced() or error from error

    def local(self, name: str) -> Path:
        url, sha256 = self.place_of(name), self.facts.side_files[name]
        wanted = Wanted(url, None, sha256)
        try:
            if not self.cache.holds(SIDE, wanted):
                wanted = Wanted(url, patiently(lambda: storage.stat(url, again=True)).size, sha256)
            return self.cache.local(SIDE, wanted)
        except DataError as error:
            raise self.replaced() or error from error

    def _map(self, shard: Shard) -> Any:
        for _ in range(_TRIES):
            path = self.fetched(shard)
            try:
                mapped = pa.memory_map(str(path))
            except FileNotFoundError:  # another process has made room just now
                continue
            self.cache.touch([shard.sha256])
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

    @cached_property
    def _used(self) -> Any:
        """bool[shards], which have been read since the last look."""
        return np.zeros(len(self._ends), bool)

    @cached_property
    def _bytes(self) -> int:
        return sum(shard.bytes for shard in self.facts.shards)

    _looked = 0.0  # seconds

    def _look(self) -> None:
        """Tell the cache which shards are read, and let those go that it has removed."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        self.cache.touch([self.digest], KEPT_MANIFEST)
        shards, mapped = self.facts.shards, self._mapped
        self.cache.touch(shards[index].sha256 for index in np.flatnonzero(self._used))
        self._used[:] = False
        here = np.unique(np.searchsorted(self._ends, mapped.firsts, side="right")).tolist()
        gone = {*self.cache.gone(shards[index].sha256 for index in here)}
        if lost := [index for index in here if shards[index].sha256 in gone]:
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

    def check_objects(self, missing: list[Shard]) -> None:
        """Raise DataError for a shard that is not at the URL, or not as long as it should be.

        Of servers that list nothing, nothing is known.
        """
        if not missing or self.url.partition("://")[0] in _WITHOUT_LISTINGS:
            return
        sizes = patiently(lambda: storage.sizes(self.url))
        for shard in missing:
            found = sizes.get(shard.file)
            if found == shard.bytes:
                continue
            problem, tip = "is missing", "upload the result again"
            if found is not None:
                problem = f"has {found} bytes, the manifest says {shard.bytes}"
                tip = UPLOAD_AGAIN
            raise self.replaced() or DataError(f"{self.place_of(shard.file)}: {problem}", tip)

    def replaced(self) -> DataError | None:
        try:
            now = load(self.url, incomplete_too=True, half_too=True)
        except DataError:
            return None
        if checksum(now.document) == self.digest:
            return None
        return DataError(
            f"{self.url}: was replaced by another result while it was read", "open it again"
        )


def open_cached(url: str, cache: Cache, digest: str | None = None) -> CachedDirectory:
    """Open a result at a URL. `digest`: go on with the one that was opened, as its `digest` says.

    Raises DataError when it is unfinished, of another format version, lacks a shard, cannot be
    read, or is another one than `digest` says; UsageError for a view, a cache that is somebody
    else's, or too small.
    """
    if digest is not None and (kept := _kept(cache, digest)) is not None:
        return CachedDirectory(url, kept, cache)
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
    _keep(packed)
    return packed


def _kept(cache: Cache, digest: str) -> Manifest | None:
    """A manifest in the cache."""
    try:
        document = msgspec.json.decode(cache.read(KEPT_MANIFEST, digest) or b"")
        return Manifest.of(document) if checksum(document) == digest else None
    except (ValueError, AttributeError, RecursionError):
        return None


def _keep(packed: CachedDirectory) -> None:
    """Make sure that the cache can hold a result's shards, and keep its manifest."""
    cache, shards = packed.cache, packed.facts.shards
    content = msgspec.json.encode(packed.manifest)
    largest = max(shard.bytes for shard in shards)
    if cache.limit is not None and cache.limit < largest + len(content):
        raise UsageError(
            f"cache_bytes: {cache.limit:,} bytes do not hold the largest shard of {packed.url}, "
            f"{largest:,} bytes, and its manifest",
            "give more: all of a shard is fetched at once",
        )
    missing = [one for one in shards if not cache.seems_to_hold(SHARD, packed.wanted(one))]
    cache.check_space(sum(shard.bytes for shard in missing), sum(s.bytes for s in shards))
    packed.check_objects(missing)
    cache.put(KEPT_MANIFEST, packed.digest, content)
