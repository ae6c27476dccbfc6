"""Results at URLs, read through a folder of fetched files: `open_cached` opens one, as a
`PackedDirectory`, and `Foresight` fetches what a sampler reads next.

    PLACE/packer-cache/ID/lock    held while files come and go
    .../KIND-<sha256>             a file, whole, named by its content
    .../KIND-<sha256>.part        locked by whoever fetches it; a leftover where nobody does

All processes of a machine share the folder. Content is compared with its digest when it is fetched,
and again for a file without the seal of what was written here: an mtime made from its name, which
whoever writes to it later breaks. So an object that is replaced, damaged or cut short at the URL
ends in an error, and never in other rows.

The folder is never larger than the bound: before a file is fetched, those that were not used (their
atime) for the longest time go. A shard may go while processes read it: what they have mapped stays
theirs, until they look what is gone, so that the disk has it back.

The caches of fsspec have no digests, no bound, and no locks between processes.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import re
import stat
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from packer_cli import storage
from packer_cli.errors import DataError, PackerError, UsageError, from_os_error, os_errors
from packer_cli.ownership import LOCK, Folder, claim, content_digest, make_folders, strangers
from packer_cli.records import Int64
from packer_cli.result.layout import PART, SQUARED_LENGTHS, Shard
from packer_cli.result.manifest import Manifest, load
from packer_cli.result.reader import HEADER_BYTES, Mapped, PackedDirectory
from packer_cli.result.wording import size as in_words

NAME = "packer-cache"
_OWN = re.compile(rf"{LOCK}|(shard|side|manifest)-[0-9a-f]{{64}}(\.part)?")
_MOVE = "move them elsewhere, or choose another cache="
RANGE_BYTES, _AT_ONCE = 8 << 20, 4  # so that 32 MiB are held in memory
_WAIT_SECONDS = 0.05  # for another process that fetches
_UPLOAD_AGAIN = "remove the object and upload it again; if the result was replaced, open it again"
_WITHOUT_LISTINGS = ("http", "https")
_TRIES_TO_MAP = 100
_LOOK_SECONDS = 1.0  # between two looks at what is still in the cache
# Of what is fetched, less than one part in so many is read: nearly every batch waits for shards.
_WASTE, _TURNS = 20, 2
_OFTEN = 3  # times that an epoch may fetch all of a result before a word is said about it
_THREADS = 3
_process_ends = threading.Event()
atexit.register(_process_ends.set)

# Locks of this process. A copy of it (fork) shares them, and would hold them when it is gone.
_held: set[int] = set()


def _forget_locks() -> None:
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_locks)


def open_cached(url: str, cache: Cache) -> CachedDirectory:
    """Open a result at a URL.

    Raises DataError when it is unfinished, of another format version, lacks a shard, or cannot be
    read; UsageError for a view, a cache that is somebody else's, or too small.
    """
    packed = CachedDirectory(url, load(url), cache)
    if packed.facts.config.view:
        raise UsageError(
            f"{url}: a view, which is only read from a local directory",
            "copy it and its tokenized directories to local paths; or pack without --view",
        )
    packed.check_room()
    return packed


class Wanted(NamedTuple):
    """A file of a result at a URL."""

    url: str
    size: int
    sha256: str
    kind: str = "shard"

    @property
    def name(self) -> str:
        """What it is called in a cache."""
        return f"{self.kind}-{self.sha256}"

    @property
    def seal(self) -> int:
        """The mtime in ns, long ago, of such a file that was written here."""
        return int(self.sha256[:15], 16)


class Cache:
    """`folder`, made if necessary, of at most `limit` bytes; None: as large as what is read.

    It pickles as these, with `planned`. Raises UsageError when the place in the folder is somebody
    else's, or others may write in it.
    """

    planned = False  # a sampler's order fits: how much of a shard one process reads says nothing
    waited_for = 0  # bytes that `local` itself has fetched, in this process
    given = 0.0  # bytes of the rows that were read of it, as their readers say

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        self.folder, self.limit = folder, limit

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "limit": self.limit, "planned": self.planned}

    @cached_property
    def _inside(self) -> Folder:
        try:
            with os_errors(self.folder, "write"):
                make_folders(self.folder)
                with Folder(self.folder) as parent:
                    inside = claim(parent, NAME)
        except UsageError as error:
            tip = f"{_MOVE}; if an older packer left it, remove it"
            raise UsageError(f"cache: {error.message}", tip) from error
        weakref.finalize(self, os.close, inside.descriptor)
        _refuse_others(inside)
        return inside

    def path(self, wanted: Wanted) -> Path:
        """Where a file is, or would be."""
        return self._inside.path / wanted.name

    def holds(self, wanted: Wanted, *, sealed: bool = True) -> bool:
        """Whether a file of this name and size is here; `sealed`: as it was written here."""
        status = self._inside.status(wanted.name)
        if status is None or not stat.S_ISREG(status.st_mode):
            return False
        is_whole = wanted.size == status.st_size
        return is_whole and (not sealed or status.st_mtime_ns == wanted.seal)

    def _is_here(self, wanted: Wanted) -> bool:
        """Whether a file is here, by its seal, or by its content; then it has a seal now."""
        if self.holds(wanted) or not self.holds(wanted, sealed=False):
            return self.holds(wanted)
        with self._explained(), suppress(FileNotFoundError):
            descriptor = self._inside.open(wanted.name)  # it stays the same if its name goes
            with open(descriptor, "rb", buffering=0) as file:
                if content_digest(file) == wanted.sha256:
                    os.utime(descriptor, ns=(time.time_ns(), wanted.seal))
                    return True
        return False

    def local(self, wanted: Wanted) -> Path:
        """A local file, fetched if it is not here. Waits for another process that fetches it.

        Raises DataError for an object with other content, for whatever the store says, and when
        the disk is full.
        """
        self.touch([wanted])
        while not self._is_here(wanted):
            if self._made(wanted):
                self.waited_for += wanted.size
                break  # where times have no nanoseconds, there are no seals
            if not self.holds(wanted):
                time.sleep(_WAIT_SECONDS)
        return self.path(wanted)

    def try_to_fetch(self, wanted: Wanted) -> bool:
        """Fetch a file; False when it is here already, when another process fetches it or what
        takes its room, and once this process ends. Raises as `local`.
        """
        return not self._is_here(wanted) and self._made(wanted)

    def _made(self, wanted: Wanted) -> bool:
        """Write a file, locked and with room for its bytes. False when the process ends, another
        one writes or has just written the file, or others write what takes the room.
        """
        part = wanted.name + PART
        with self._explained(), ExitStack() as stack:
            with self._locked(LOCK, wait=True):  # or others take it for a leftover
                descriptor = stack.enter_context(self._locked(part))
                if descriptor is None:
                    return False
                stack.callback(self._discard, part, descriptor)
                if self.holds(wanted) or not self._has_room(part, wanted.size):
                    return False
                os.ftruncate(descriptor, wanted.size)
            with open(descriptor, "wb", closefd=False) as file:
                for block in _fetched(wanted):
                    if _process_ends.is_set():
                        return False
                    file.write(block)
            os.fsync(descriptor)
            os.utime(descriptor, ns=(time.time_ns(), wanted.seal))
            with self._locked(LOCK, wait=True):  # or whoever counts files sees neither name
                self._inside.rename(part, self._inside, wanted.name)
        return True

    def _has_room(self, part: str, size: int) -> bool:
        """Make room for a `.part` within the bound; False while others fetch what takes it."""
        files = {name: status for name, status in self._files() if name != part}
        if self.limit is None:
            return True
        used = sum(status.st_size for status in files.values())
        whole = [name for name in files if name != LOCK and not name.endswith(PART)]
        for victim in sorted(whole, key=lambda name: files[name].st_atime_ns):
            if used + size <= self.limit:
                break
            self._inside.unlink(victim)
            used -= files.pop(victim).st_size
        if used + size <= self.limit:
            return True
        if any(name.endswith(PART) and files[name].st_size for name in files):
            return False  # it can go when they have it
        raise UsageError(
            f"cache: {self.folder}: cache_bytes is {self.limit:,}, and {used + size:,} are "
            "needed for a shard and what goes with it",
            "give more cache_bytes",
        )

    @contextmanager
    def _locked(self, name: str, *, wait: bool = False) -> Iterator[int | None]:
        """A file, made if necessary, locked; None when another process has it, or had it."""
        descriptor = self._inside.open(name, os.O_RDWR | os.O_CREAT)
        _held.add(descriptor)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield None
                return
            except OSError as error:
                raise DataError(
                    f"cache: {self.folder}: cannot be locked: {error.strerror}",
                    "choose a folder on a local disk",
                ) from error
            yield descriptor if self._is(name, descriptor) else None
        finally:
            _held.discard(descriptor)
            with suppress(OSError):  # a copy of this process would go on holding it
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _is(self, name: str, descriptor: int) -> bool:
        """Whether an open file still has this name."""
        status = self._inside.status(name)
        return status is not None and os.path.samestat(status, os.fstat(descriptor))

    def _discard(self, part: str, descriptor: int) -> None:
        if self._is(part, descriptor):
            self._inside.unlink(part)

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        """All files of packer with their status; a `.part` that nobody fetches goes."""
        for name in filter(_OWN.fullmatch, self._inside.names()):
            if name.endswith(PART):
                with self._locked(name) as leftover:
                    if leftover is not None:
                        self._discard(name, leftover)
            if (status := self._inside.status(name)) is not None:
                yield name, status

    def touch(self, used: Iterable[Wanted]) -> None:
        """Mark files as used now, so that others go first, and of these the first named."""
        now = time.time_ns()
        for place, wanted in enumerate(used):
            if (status := self._inside.status(wanted.name)) is not None:
                with suppress(OSError):
                    times = (now + place, status.st_mtime_ns)
                    os.utime(wanted.name, ns=times, dir_fd=self._inside.descriptor)

    def check_space(self, missing: int, total: int) -> None:
        """Raise UsageError when the disk is too small for a result of `total` bytes, of which
        `missing` are not here, or for what the bound allows of it.
        """
        with self._explained(), self._locked(LOCK, wait=True):
            used = sum(status.st_size for _, status in self._files())
        disk = os.statvfs(self._inside.descriptor)
        free = disk.f_bavail * disk.f_frsize
        need = missing if self.limit is None else min(missing, max(0, self.limit - used))
        if need > free:
            fits = (free + used) * 9 // 10  # others write to the disk, too
            raise UsageError(
                f"cache: {self.folder}: the result has {total:,} bytes, {missing:,} of them not "
                f"here yet, {need:,} are needed, and the disk has {free:,} left",
                f"give cache_bytes={fits} or less, choose a larger disk, or free some space",
            )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn OSErrors of files in the cache into DataErrors."""
        try:
            yield
        except OSError as error:
            message = from_os_error(error, f"cache: {self._inside.path}", "write").message
            raise DataError(
                message, "free some space, or give cache_bytes=, if it is full"
            ) from error


def _refuse_others(inside: Folder) -> None:
    """Raise UsageError for a cache in which others may have put files."""
    place = inside.path
    written = {*inside.names()} - {LOCK}  # listed first: who writes has set the modes
    for folder in (place.parent, place):
        status = os.stat(folder, follow_symlinks=False)
        theirs = status.st_uid != os.geteuid()
        if theirs or (status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and written):
            raise UsageError(
                f"cache: {folder}: {'belongs to another user' if theirs else 'others may write'}, "
                "so its files are not trusted",
                f"choose another cache=, or remove it; to keep one of yours: chmod go-w {folder}",
            )
        with os_errors(folder, "write"):
            os.chmod(folder, 0o700)  # whatever the umask lets others do with the files in it
    if foreign := strangers(inside, _OWN):
        raise UsageError(
            f"cache: {place}: holds files that packer did not make: {foreign[0]}", _MOVE
        )


def _fetched(wanted: Wanted) -> Iterator[bytes]:
    """The content of an object, in parts. Raises DataError, after the last for another digest, to
    which a byte after the end adds.
    """
    size, sha = wanted.size, hashlib.sha256()
    spans = list(pairwise([*range(0, size, RANGE_BYTES), size]))
    for first in range(0, len(spans), _AT_ONCE):
        some = spans[first : first + _AT_ONCE]
        for block in storage.ranges(wanted.url, some, size):
            sha.update(block)
            yield block
    if sha.hexdigest() != wanted.sha256:
        raise DataError(
            f"{wanted.url}: its sha256 is {sha.hexdigest()}, the manifest says {wanted.sha256}",
            _UPLOAD_AGAIN,
        )


class CachedDirectory(PackedDirectory):
    """A result at `url`. `path` is the folder of the cache, where its files have other names.
    Shards are fetched when they are first read.
    """

    def __init__(self, url: str, facts: Manifest, cache: Cache) -> None:
        super().__init__(cache.folder, facts)
        self.where, self.cache = url, cache
        self._bytes = sum(shard.bytes for shard in facts.shards)
        self._used = np.zeros(len(facts.shards), bool)  # which were read since the last look
        self._looked = 0.0  # seconds

    @property
    def side_bytes(self) -> int:
        """How many bytes its side file may take in the cache."""
        return HEADER_BYTES + 8 * len(self) if SQUARED_LENGTHS in self.facts.side_files else 0

    def wanted(self, shard: Shard) -> Wanted:
        return Wanted(self.place_of(shard.file), shard.bytes, shard.sha256)

    def local_squares(self) -> Path:
        sha256 = self.facts.side_files[SQUARED_LENGTHS]
        url = self.place_of(SQUARED_LENGTHS)
        return self.cache.local(Wanted(url, self.side_bytes, sha256, "side"))

    def _map(self, shard: Shard) -> Any:
        wanted = self.wanted(shard)
        for _ in range(_TRIES_TO_MAP):
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
        self._used[self.shards_of(rows)] = True
        return found

    def _look(self) -> None:
        """Tell the cache which shards are read, and let those go that it has removed."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        shards, mapped = self.facts.shards, self._mapped
        used = [self.wanted(shards[index]) for index in np.flatnonzero(self._used)]
        self.cache.touch(used)
        self._used[:] = False
        here = np.unique(self.shards_of(mapped.firsts)).tolist()
        lost = [one for one in here if not self.cache.path(self.wanted(shards[one])).exists()]
        if lost:
            self._mapped = mapped.where(~np.isin(self.shards_of(mapped.firsts), lost))

    def _with_shard_of(self, row: int, mapped: Mapped) -> Mapped:
        limit, fetched, read = self.cache.limit, self.cache.waited_for, self.cache.given
        useless = limit is not None and fetched >= _TURNS * limit and fetched > _WASTE * read
        if useless and not self.cache.planned:
            raise UsageError(
                f"{self.where}: {fetched:,} bytes of shards were fetched for {read:,.0f} bytes of "
                f"rows: the order asks for other shards than the cache holds, cache_bytes is "
                f"{limit:,}",
                "shuffle with PackedSampler, or give cache_bytes="
                f"{self._bytes * 101 // 100} or more",
            )
        return super()._with_shard_of(row, mapped)

    def check_size(self, shard: Shard) -> None:
        """Nothing: what is fetched is compared with the manifest."""

    def check_room(self) -> None:
        """Raise UsageError for a cache or a disk that is too small, DataError for a shard that is
        not at the URL, or has another size, where servers list what they have.
        """
        cache, shards = self.cache, self.facts.shards
        largest = max(shard.bytes for shard in shards)
        if cache.limit is not None and cache.limit < largest:
            raise UsageError(
                f"cache_bytes: {cache.limit:,} bytes do not hold the largest shard of "
                f"{self.where}, {largest:,} bytes",
                "give more: all of a shard is fetched at once",
            )
        missing = [one for one in shards if not cache.holds(self.wanted(one), sealed=False)]
        cache.check_space(sum(shard.bytes for shard in missing), self._bytes)
        if not missing or self.where.partition("://")[0] in _WITHOUT_LISTINGS:
            return
        sizes = storage.sizes(self.where)
        for shard in missing:
            found = sizes.get(shard.file)
            problem, tip = f"has {found} bytes, the manifest says {shard.bytes}", _UPLOAD_AGAIN
            if found is None:
                problem, tip = "is missing", "upload the result again"
            if found != shard.bytes:
                error = DataError(f"{self.place_of(shard.file)}: {problem}", tip)
                raise self.replaced() or error


class Foresight:
    """Rows that come next, as a sampler tells a dataset with results that are read through `cache`,
    and what its order asks of the cache.

    Shards are fetched before they are read, by daemon threads that begin when there is something to
    fetch and end when there is not, so that copies of the process (fork) usually find none; a copy
    begins its own. What another process fetches, or has no room yet, they try again later. What
    they cannot fetch they leave alone: whoever reads it asks again, and gets the error.
    """

    def __init__(self, results: Sequence[PackedDirectory], cache: Cache) -> None:
        self._cache = cache
        # by shard of all results; None: a local one
        self._shards: list[Wanted | None] = [
            result.wanted(shard) if isinstance(result, CachedDirectory) else None
            for result in results
            for shard in result.facts.shards
        ]
        sizes = [one.size if one else 0 for one in self._shards]
        self._ends: Int64 = np.cumsum([one.rows for each in results for one in each.facts.shards])
        self._edges: Int64 = np.cumsum([0, *sizes])  # of bytes, before each shard
        beside = sum(one.side_bytes for one in results if isinstance(one, CachedDirectory))
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
            self._process, self._lock, self._threads = os.getpid(), threading.Lock(), 0
        shards, first = np.unique(np.searchsorted(self._ends, rows, side="right"), True)
        needed = [self._shards[shard] for shard in shards[np.argsort(first)].tolist()]
        remote = [one for one in needed if one is not None]
        ends = accumulate(one.size for one in remote)
        fitting = [one for one, end in zip(remote, ends, strict=True) if end <= self.room]
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
                fetched = self._cache.try_to_fetch(one)
                if not fetched and not self._cache.holds(one, sealed=False):
                    _process_ends.wait(_WAIT_SECONDS)
                    with self._lock:
                        wanted.append(one)

    def check_order(
        self, block_rows: int, window_blocks: int, *, windows: int = 1, shuffled: bool = True
    ) -> None:
        """Raise UsageError when the cache cannot hold the shards of a window at once, which are all
        read until it ends; else it is `planned`. The bound holds for every window of every epoch.

        `windows`: how many are read at once. Warns when an epoch fetches most shards several times.
        """
        if self._cache.limit is None:
            return
        room, total = self.room, int(self._edges[-1])
        blocks = self.largest_blocks(block_rows)
        at_once = window_blocks * windows if shuffled else 1
        need = min(total, int(blocks[:at_once].sum()))
        if need > room:
            fitting = int(np.searchsorted(np.cumsum(blocks), room, "right"))
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
        times = int(blocks.sum()) / total * (1 - min(1.0, room / total))
        if shuffled and times > _OFTEN:
            warnings.warn(
                f"cache_bytes has room for {in_words(room)} of {in_words(total)}: "
                f"in this order an epoch fetches shards about {times:.0f} times. block_rows="
                f"{int(np.median(np.diff(self._ends, prepend=0)))}, the rows of a shard, with "
                "fewer window_blocks, or more cache_bytes fetch less",
                stacklevel=3,
            )

    def largest_blocks(self, block_rows: int) -> Int64:
        """int64[blocks], bytes of all shards that each block of rows needs, the largest first."""
        rows = int(self._ends[-1])
        firsts = np.arange(0, rows, block_rows)
        lasts = np.minimum(firsts + block_rows, rows) - 1
        before = np.searchsorted(self._ends, firsts, side="right")
        after = np.searchsorted(self._ends, lasts, side="right") + 1
        return np.sort(self._edges[after] - self._edges[before])[::-1]
