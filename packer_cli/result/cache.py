"""A folder with local copies of files at URLs, shared by all processes of a machine.

    CACHE/packer-cache/owner.json     says that the folder is packer's, so that nothing else goes
    CACHE/packer-cache/<id>/lock      held while room is made
    .../shard-<sha256>                a file, whole, named by its content; also manifest-, side-
    .../shard-<sha256>.part           locked by whoever fetches it

A file that has its name has its content: it was compared with the digest in the manifest, and was
on the disk before it was renamed. So files of several results, or of one that is replaced, never
meet, and nothing is to be repaired after a crash: a `.part` that nobody locks is removed.

The folder is never larger than the bound: room for a file is made before it is fetched, by removing
manifests and side files that no process has used for an hour, then the shards that were not used
for the longest time. A shard may go while processes read it: what
they have mapped stays theirs, and they ask `gone` now and then what to let go, so that the disk has
it back.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from packer_cli.durable import make_folders
from packer_cli.errors import DataError, UsageError, from_os_error
from packer_cli.ownership import Folder, OwnFolder, claim
from packer_cli.result.fetching import Wanted, fetch
from packer_cli.result.layout import PART
from packer_cli.result.wording import size as in_words

NAME, LOCK = "packer-cache", "lock"
SHARD, MANIFEST, SIDE = "shard", "manifest", "side"
_OWN = re.compile(rf"{LOCK}|({SHARD}|{MANIFEST}|{SIDE})-[0-9a-f]{{64}}(\.part)?")
_IDLE_NS = 3_600_000_000_000  # results in use are touched every few seconds
_LOOK_SECONDS = 0.05  # between two looks at what another process fetches
_MOVE = "move them elsewhere, or choose another cache="

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
    else's.
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
        if strangers := own.strangers(_OWN):
            place = own.inside.path
            raise UsageError(
                f"cache: {place}: holds files that packer did not make: {strangers[0]}", _MOVE
            )
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
        status = self._inside.status(name)
        if status is None:
            return False
        return stat.S_ISREG(status.st_mode) and size in (None, status.st_size)

    def read(self, kind: str, sha256: str) -> bytes | None:
        """The content of a small file; None when it is not here."""
        self.touch([sha256], kind)
        return self._inside.read(_name(kind, sha256))

    def put(self, kind: str, sha256: str, content: bytes) -> None:
        """Keep a small file that was made here."""
        name = _name(kind, sha256)
        self.touch([sha256], kind)
        while not self._holds(name, len(content)):
            with self._begun(name, len(content)) as descriptor:
                if descriptor is not None:
                    self._make_room(name, descriptor, len(content))
                    with _explained(self.path(name)):
                        os.pwrite(descriptor, content, 0)
                        os.fsync(descriptor)
                        self._inside.rename(name + PART, self._inside, name)

    def local(self, kind: str, wanted: Wanted) -> Path:
        """A local file, fetched if it is not here. Waits for another process that fetches it.

        Raises DataError as `fetch`, and when the disk is full.
        """
        name = _name(kind, wanted.sha256)
        self.touch([wanted.sha256], kind)
        while not self._holds(name, wanted.size):
            if self.try_to_fetch(kind, wanted):
                self.waited_for += wanted.size or 0
            elif not self._holds(name, wanted.size):
                time.sleep(_LOOK_SECONDS)
        return self.path(name)

    def try_to_fetch(
        self, kind: str, wanted: Wanted, stopped: Callable[[], bool] = lambda: False
    ) -> bool:
        """Fetch a file; False when it is here already, when another process fetches it, and once
        `stopped` says so. Raises as `local`.
        """
        name = _name(kind, wanted.sha256)
        if self._holds(name, wanted.size):
            return False
        with self._begun(name, wanted.size) as descriptor:
            if descriptor is None:
                return False
            self._make_room(name, descriptor, wanted.size or 0)
            with _explained(self.path(name)):
                if not fetch(wanted, descriptor, stopped):
                    return False
                self._inside.rename(name + PART, self._inside, name)
        return True

    @contextmanager
    def _begun(self, name: str, size: int | None) -> Iterator[int | None]:
        """The `.part` of a file, locked; None when another process has it, or has just had it.

        It is removed unless it has been renamed to its name at the end.
        """
        part = name + PART
        with ExitStack() as stack:
            with self._alone(), _explained(self.path(part)):  # or others take it for a leftover
                descriptor = self._inside.open(part, os.O_RDWR | os.O_CREAT)
                stack.enter_context(_closing(descriptor))
                locked = self._lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not locked or not self._is(part, descriptor):
                yield None
                return
            try:
                yield None if self._holds(name, size) else descriptor
            finally:
                if self._is(part, descriptor):
                    self._inside.unlink(part)

    def _is(self, name: str, descriptor: int) -> bool:
        """Whether the name is still that of an open file."""
        status = self._inside.status(name)
        return status is not None and os.path.samestat(status, os.fstat(descriptor))

    def _lock(self, descriptor: int, how: int) -> bool:
        """False when another process has it."""
        try:
            fcntl.flock(descriptor, how)
        except BlockingIOError:
            return False
        except OSError as error:
            raise DataError(
                f"cache: {self.folder}: cannot be locked: {error.strerror}",
                "choose a folder on a local disk",
            ) from error
        return True

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While no other process makes room."""
        with _explained(self.path(LOCK)):
            descriptor = self._inside.open(LOCK, os.O_RDWR | os.O_CREAT)
        with _closing(descriptor):
            self._lock(descriptor, fcntl.LOCK_EX)
            yield

    def _make_room(self, name: str, descriptor: int, size: int) -> None:
        """Reserve `size` bytes of the disk for a `.part`, within the bound."""
        while not self._reserved(name, descriptor, size):
            time.sleep(_LOOK_SECONDS)  # others fetch what takes the room; it can go then

    def _reserved(self, name: str, descriptor: int, size: int) -> bool:
        with self._alone():
            files = {n: s for n, s in self._files() if n != name + PART}
            used = sum(status.st_size for status in files.values())
            if self.limit is not None:
                for victim in _victims(files):
                    if used + size <= self.limit:
                        break
                    self._inside.unlink(victim)
                    used -= files.pop(victim).st_size
                if used + size > self.limit:
                    # not those who wait for room themselves
                    if any(n.endswith(PART) and files[n].st_size for n in files):
                        return False
                    raise UsageError(
                        f"cache: {self.folder}: cache_bytes is {self.limit:,}, and "
                        f"{used + size:,} are needed for a shard and what goes with it",
                        "give more cache_bytes",
                    )
            with _explained(self.path(name)):
                os.ftruncate(descriptor, 0)
                try:
                    os.posix_fallocate(descriptor, 0, size)
                except OSError as error:
                    if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                        raise
                    os.ftruncate(descriptor, size)
        return True

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        """All files of packer with their status; a `.part` that nobody fetches goes."""
        for name in self._inside.names():
            if not _OWN.fullmatch(name) or (name.endswith(PART) and self._removed(name)):
                continue
            if (status := self._inside.status(name)) is not None:
                yield name, status

    def _removed(self, part: str) -> bool:
        """Whether a `.part` was left by a process that ended, and is gone now."""
        try:
            descriptor = self._inside.open(part, os.O_RDWR)
        except OSError:
            return True
        with _closing(descriptor):
            if not self._lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
                return False
            if self._is(part, descriptor):
                self._inside.unlink(part)
            return True

    def used(self) -> int:
        """Bytes of all files."""
        with self._alone():
            return sum(status.st_size for _, status in self._files())

    def room(self) -> int:
        """Bytes that shards may take."""
        if self.limit is None:
            return sys.maxsize
        others = [name for name in self._inside.names() if not name.startswith(SHARD)]
        found = filter(None, map(self._inside.status, others))
        return self.limit - sum(status.st_size for status in found if not _is_idle(status))

    def free(self) -> int:
        """Bytes that the disk has left."""
        status = os.statvfs(self._inside.descriptor)
        return status.f_bavail * status.f_frsize

    def touch(self, digests: Iterable[str], kind: str = SHARD) -> None:
        """Files that are used: those named last go last."""
        now = time.time_ns()
        for place, sha256 in enumerate(digests):
            with suppress(OSError):
                os.utime(_name(kind, sha256), ns=(now + place, now + place),
                         dir_fd=self._inside.descriptor)  # fmt: skip

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


def _close(own: OwnFolder) -> None:
    own.close()
    os.close(own.parent.descriptor)


def _victims(files: dict[str, os.stat_result]) -> list[str]:
    """What may go to make room, what goes first at the beginning."""
    whole = [name for name in files if not name.endswith(PART) and name != LOCK]
    idle = [n for n in whole if not n.startswith(SHARD) and _is_idle(files[n])]
    shards = [name for name in whole if name.startswith(SHARD)]
    return idle + sorted(shards, key=lambda name: files[name].st_mtime_ns)


def _is_idle(status: os.stat_result) -> bool:
    return status.st_mtime_ns < time.time_ns() - _IDLE_NS


def _round(number: int) -> int:
    """Nine tenths of it, in whole MB where there are some: others write to the disk, too."""
    number = number * 9 // 10
    return number // 1_000_000 * 1_000_000 or number


def _name(kind: str, sha256: str) -> str:
    return f"{kind}-{sha256}"


@contextmanager
def _closing(descriptor: int) -> Iterator[None]:
    """Unlock and close it at the end: a copy of this process would go on holding the lock."""
    _locked.add(descriptor)
    try:
        yield
    finally:
        _locked.discard(descriptor)
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
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
