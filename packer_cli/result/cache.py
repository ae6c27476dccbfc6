"""A folder of files that were fetched from URLs, shared by all processes of a machine.

    PLACE/packer-cache/owner.json     says that the folder is packer's, so that nothing else goes
    PLACE/packer-cache/<id>/lock      held while files come and go
    .../KIND-<sha256>                 a file, whole, named by its content
    .../KIND-<sha256>.part            locked by whoever fetches it; a leftover where nobody does

Content is compared with its digest when it is fetched, and again for a file without the seal of
what was written here: the nanoseconds of its mtime are made from its name and the folder's id, and
whoever writes to it later breaks them. The folder is never larger than the bound: before a file is
fetched, those that were not used (their atime) for the longest time go; manifests and side files a
day later than shards. A shard may go while
processes read it: what they have mapped stays theirs, and they ask `gone` now and then what to let
go, so that the disk has it back.

The caches of fsspec have no digests, no bound, and no locks between processes.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import os
import re
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from hashlib import sha256 as sha256_of
from pathlib import Path
from typing import Any

from packer_cli.durable import make_folders
from packer_cli.errors import DataError, PackerError, UsageError, from_os_error
from packer_cli.ownership import Folder, OwnFolder, claim, content_digest
from packer_cli.result.fetching import Wanted, fetch
from packer_cli.result.layout import PART
from packer_cli.result.wording import size as in_words

NAME, LOCK = "packer-cache", "lock"
SHARD, MANIFEST, SIDE = "shard", "manifest", "side"
_OWN = re.compile(rf"{LOCK}|({SHARD}|{MANIFEST}|{SIDE})-[0-9a-f]{{64}}(\.part)?")
_MOVE = "move them elsewhere, or choose another cache="
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_LOOK_SECONDS = 0.05  # between two looks at what another process fetches
_SECOND = 1_000_000_000
_KEPT_LONGER = 24 * 60 * 60 * _SECOND  # manifests and side files: they take little, all need them

# Of this process. A copy of it (fork) shares locks, and would hold them when it is gone.
_locked: set[int] = set()


def _forget_locks() -> None:
    for descriptor in _locked:
        with suppress(OSError):
            os.close(descriptor)
    _locked.clear()


os.register_at_fork(after_in_child=_forget_locks)


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
    def _own(self) -> OwnFolder:
        try:
            make_folders(self.folder)
            own = claim(Folder(self.folder), NAME)
        except UsageError as error:
            raise UsageError(f"cache: {error.message}", _MOVE) from error
        except OSError as error:
            raise from_os_error(error, self.folder, "write") from error
        weakref.finalize(self, _close, own)
        _refuse_others(own)
        return own

    @property
    def _inside(self) -> Folder:
        return self._own.inside

    def path(self, name: str) -> Path:
        """Where a file is, or would be."""
        return self._inside.path / name

    def holds(self, kind: str, wanted: Wanted) -> bool:
        """Whether a file is here."""
        return self._holds(_name(kind, wanted.sha256), wanted.size)

    def _holds(self, name: str, size: int | None) -> bool:
        status = self._found(name, size)
        if status is None:
            return False
        return self._seal(name, status.st_mtime_ns // _SECOND) == status.st_mtime_ns

    def seems_to_hold(self, kind: str, wanted: Wanted) -> bool:
        """Whether a file of that name and size is here, perhaps without a seal."""
        return self._found(_name(kind, wanted.sha256), wanted.size) is not None

    def _found(self, name: str, size: int | None) -> os.stat_result | None:
        status = self._inside.status(name)
        if status is None or not stat.S_ISREG(status.st_mode) or size not in (None, status.st_size):
            return None
        return status

    def _seal(self, name: str, second: int) -> int:
        """The mtime in ns, in this second, of a file that was written here."""
        told = sha256_of(f"{self._own.identity}/{name}/{second}".encode()).digest()
        return second * _SECOND + int.from_bytes(told[:8], "big") % _SECOND

    def _sealed(self, name: str, descriptor: int) -> None:
        now = time.time_ns()
        os.utime(descriptor, ns=(now, self._seal(name, now // _SECOND)))

    def _adopted(self, name: str, wanted: Wanted) -> bool:
        """Whether a file without a seal is what is wanted, by its content; then it has one now."""
        with explained(self.path(name)):
            try:
                descriptor = self._inside.open(name)
            except FileNotFoundError:
                return False
            with open(descriptor, "rb", buffering=0) as file:  # it stays the same if its name goes
                if wanted.size not in (None, os.fstat(descriptor).st_size):
                    return False
                if content_digest(file) != wanted.sha256:
                    return False
                self._sealed(name, descriptor)
        return True

    def read(self, kind: str, sha256: str) -> bytes | None:
        """The content of a small file; None when it is not here. Its content is not compared."""
        self.touch([sha256], kind)
        return self._inside.read(_name(kind, sha256))

    def put(self, kind: str, sha256: str, content: bytes) -> None:
        """Keep a small file that was made here."""
        name = _name(kind, sha256)
        self.touch([sha256], kind)
        while not self._holds(name, len(content)):
            with self._begun(name, len(content)) as descriptor:
                if descriptor is not None:
                    os.pwrite(descriptor, content, 0)
                    os.fsync(descriptor)
                    self._put_in_place(name, descriptor)
                    return
            time.sleep(_LOOK_SECONDS)

    def local(self, kind: str, wanted: Wanted) -> Path:
        """A local file, fetched if it is not here. Waits for another process that fetches it.

        Raises DataError as `fetch`, and when the disk is full.
        """
        name = _name(kind, wanted.sha256)
        self.touch([wanted.sha256], kind)
        while not self._is_here(name, wanted):
            if self._fetched(name, wanted):
                self.waited_for += wanted.size or 0
                break  # where times have no nanoseconds, there are no seals
            if not self._holds(name, wanted.size):
                time.sleep(_LOOK_SECONDS)
        return self.path(name)

    def try_to_fetch(
        self, kind: str, wanted: Wanted, stopped: Callable[[], bool] = lambda: False
    ) -> bool:
        """Fetch a file; False when it is here already, when another process fetches it or what
        takes its room, and once `stopped` says so. Raises as `local`.
        """
        name = _name(kind, wanted.sha256)
        return not self._is_here(name, wanted) and self._fetched(name, wanted, stopped)

    def _is_here(self, name: str, wanted: Wanted) -> bool:
        return self._holds(name, wanted.size) or self._adopted(name, wanted)

    def _fetched(
        self, name: str, wanted: Wanted, stopped: Callable[[], bool] = lambda: False
    ) -> bool:
        with self._begun(name, wanted.size or 0) as descriptor:
            if descriptor is None or not fetch(wanted, descriptor, stopped):
                return False
            self._put_in_place(name, descriptor)
        return True

    def _put_in_place(self, name: str, descriptor: int) -> None:
        self._sealed(name, descriptor)
        self._inside.rename(name + PART, self._inside, name)

    @contextmanager
    def _begun(self, name: str, size: int) -> Iterator[int | None]:
        """Open the `.part` of a file, locked and with room for `size` bytes. Gives None when
        another process fetches or has just fetched the file, or others fetch what takes the room.

        At the end it is removed, unless it was renamed. OSErrors become DataErrors.
        """
        part = name + PART
        with explained(self.path(name)), ExitStack() as stack:
            with self._alone():  # or others take it for a leftover
                descriptor = stack.enter_context(self._held(part))
                if ready := descriptor is not None and self._is(part, descriptor):
                    stack.callback(self._discard, part, descriptor)
                    ready = not self._holds(name, size) and self._reserved(part, descriptor, size)
            yield descriptor if ready else None

    def _discard(self, part: str, descriptor: int) -> None:
        if self._is(part, descriptor):
            self._inside.unlink(part)

    def _is(self, name: str, descriptor: int) -> bool:
        """Whether an open file still has this name."""
        status = self._inside.status(name)
        return status is not None and os.path.samestat(status, os.fstat(descriptor))

    def _reserved(self, part: str, descriptor: int, size: int) -> bool:
        """Reserve `size` bytes of the disk for a `.part`, within the bound; False while others
        fetch what takes the room.
        """
        files = {name: status for name, status in self._files() if name != part}
        used = sum(status.st_size for status in files.values())
        if self.limit is not None:
            whole = [name for name in files if name != LOCK and not name.endswith(PART)]
            for victim in sorted(whole, key=lambda name: _used_at(name, files[name])):
                if used + size <= self.limit:
                    break
                self._inside.unlink(victim)
                used -= files.pop(victim).st_size
            if used + size > self.limit:
                if any(name.endswith(PART) and files[name].st_size for name in files):
                    return False  # it can go when they have it
                raise UsageError(
                    f"cache: {self.folder}: cache_bytes is {self.limit:,}, and {used + size:,} are "
                    "needed for a shard and what goes with it",
                    "give more cache_bytes",
                )
        os.ftruncate(descriptor, 0)
        try:
            os.posix_fallocate(descriptor, 0, max(size, 1))
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
        os.ftruncate(descriptor, size)
        return True

    @contextmanager
    def _held(self, name: str, *, wait: bool = False) -> Iterator[int | None]:
        """A file, made if necessary, locked; None when another process has it."""
        with explained(self.path(name)):
            descriptor = self._inside.open(name, os.O_RDWR | os.O_CREAT)
        _locked.add(descriptor)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                held = True
            except BlockingIOError:
                held = False
            except OSError as error:
                raise DataError(
                    f"cache: {self.folder}: cannot be locked: {error.strerror}",
                    "choose a folder on a local disk",
                ) from error
            yield descriptor if held else None
        finally:
            _locked.discard(descriptor)
            with suppress(OSError):  # a copy of this process would go on holding it
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While no other process makes room."""
        with self._held(LOCK, wait=True):
            yield

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        """All files of packer with their status; a `.part` that nobody fetches goes."""
        for name in self._inside.names():
            if not _OWN.fullmatch(name):
                continue
            if name.endswith(PART):
                with suppress(DataError), self._held(name) as leftover:
                    if leftover is not None and self._is(name, leftover):
                        self._inside.unlink(name)
            if (status := self._inside.status(name)) is not None:
                yield name, status

    def used(self) -> int:
        """Bytes of all files."""
        with self._alone():
            return sum(status.st_size for _, status in self._files())

    def free(self) -> int:
        """Bytes that the disk has left."""
        status = os.statvfs(self._inside.descriptor)
        return status.f_bavail * status.f_frsize

    def touch(self, digests: Iterable[str], kind: str = SHARD) -> None:
        """Mark files as used now, so that others go first, and of these the first named."""
        now = time.time_ns()
        for place, sha256 in enumerate(digests):
            name = _name(kind, sha256)
            if (status := self._inside.status(name)) is not None:
                with suppress(OSError):
                    times = (now + place, status.st_mtime_ns)
                    os.utime(name, ns=times, dir_fd=self._inside.descriptor)

    def gone(self, digests: Iterable[str]) -> list[str]:
        """The shards that are no longer here, among some that were."""
        return [sha256 for sha256 in digests if self._inside.status(_name(SHARD, sha256)) is None]

    def check_space(self, missing: int, total: int) -> None:
        """Raise UsageError when a disk or the bound is too small for a result of `total` bytes, of
        which `missing` are not here.
        """
        free, used = self.free(), self.used()
        need = missing if self.limit is None else min(missing, max(0, self.limit - used))
        if need <= free:
            return
        what = (
            f"the result has {total:,} bytes, {missing:,} of them not here yet"
            if self.limit is None or total <= self.limit
            else f"cache_bytes is {self.limit:,}"
        )
        raise UsageError(
            f"cache: {self.folder}: {what}, and the disk has {free:,} left",
            f"give cache_bytes={_round(free + used)} or less, choose a larger disk, or free some "
            f"space ({in_words(need - free)})",
        )


def _refuse_others(own: OwnFolder) -> None:
    """Raise UsageError for a cache in which others may have put files."""
    place = own.inside.path
    written = {*own.inside.names()} - {LOCK}  # listed first: who writes has set the modes
    for folder in (place.parent, place):
        status = os.stat(folder, follow_symlinks=False)
        if status.st_uid != os.geteuid():
            raise UsageError(
                f"cache: {folder}: belongs to another user, whose files are not trusted",
                "choose another cache=",
            )
        if status.st_mode & _OTHERS and written:
            raise UsageError(
                f"cache: {folder}: others may write in it, and their files are not trusted",
                f"remove it, or choose another cache=; to keep it: chmod go-w {folder}",
            )
        with explained(folder):
            os.chmod(folder, 0o700)  # whatever the umask lets others do with the files in it
    if strangers := own.strangers(_OWN):
        raise UsageError(
            f"cache: {place}: holds files that packer did not make: {strangers[0]}", _MOVE
        )


def _round(number: int) -> int:
    """Nine tenths of it, in whole MB where there are some: others write to the disk, too."""
    number = number * 9 // 10
    return number // 1_000_000 * 1_000_000 or number


def _used_at(name: str, status: os.stat_result) -> int:
    """When a file was used last, in ns; a manifest or a side file counts as used a day later."""
    return status.st_atime_ns + (0 if name.startswith(SHARD) else _KEPT_LONGER)


def _name(kind: str, sha256: str) -> str:
    return f"{kind}-{sha256}"


def _close(own: OwnFolder) -> None:
    own.close()
    os.close(own.parent.descriptor)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn OSErrors of files in the cache into DataErrors."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"cache: {path.parent}: the disk is full",
                "free some space, or give cache_bytes, and run it again",
            ) from error
        raise from_os_error(error, path, "write") from error


_THREADS = 3
_process_ends = threading.Event()
atexit.register(_process_ends.set)


class Ahead:
    """Fetches shards before they are read, by threads of the process that knows the order.

    Threads begin when there is something to fetch, and end when there is not, so that copies of the
    process (fork) usually find none; a copy begins its own. They are daemons, and stop between two
    requests when the process ends. What another process fetches, or has no room yet, they try again
    later. What they cannot fetch they leave alone: whoever reads it asks again, and gets the error.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        return {"_cache": self._cache, "_process": 0}  # begun where it goes on

    def _begin(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()
        self._wanted: list[Wanted] = []
        self._threads = 0

    def follow(self, wanted: Sequence[Wanted], room: float) -> None:
        """Fetch these, in this order, instead of what was wanted before.

        Only as many as `room` bytes hold together: what comes later would take the place of what
        comes first. Those that are here already count as used, the first ones as the latest.
        """
        if self._process != os.getpid():
            self._begin()
        fitting = list[Wanted]()
        for one in wanted:
            room -= one.size or 0
            if room < 0:
                break
            fitting.append(one)
        self._cache.touch(one.sha256 for one in reversed(fitting))
        missing = [one for one in fitting if not self._cache.holds(SHARD, one)]
        with self._lock:
            self._wanted = missing
            more = max(0, min(_THREADS, len(missing)) - self._threads)
            self._threads += more
        for _ in range(more):
            threading.Thread(target=self._fetch, daemon=True, name="packer-ahead").start()

    def _next(self) -> tuple[Wanted, list[Wanted]] | None:
        """What is to be fetched next, and the list it is of; None ends the thread."""
        with self._lock:
            if self._wanted and not _process_ends.is_set():
                return self._wanted.pop(0), self._wanted
            self._threads -= 1
            return None

    def _fetch(self) -> None:
        while (taken := self._next()) is not None:
            one, others = taken
            with suppress(PackerError, OSError):
                fetched = self._cache.try_to_fetch(SHARD, one, _process_ends.is_set)
                if not fetched and not self._cache.seems_to_hold(SHARD, one):
                    _process_ends.wait(_LOOK_SECONDS)
                    with self._lock:
                        others.append(one)  # which nobody reads once others are wanted
