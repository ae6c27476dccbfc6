"""A folder of files that were fetched from URLs, shared by all processes of a machine.

    PLACE/packer-cache/ID/lock    held while files come and go
    .../KIND-<sha256>             a file, whole, named by its content
    .../KIND-<sha256>.part        locked by whoever fetches it; a leftover where nobody does

Content is compared with its digest when it is fetched, and again for a file without the seal of
what was written here: the nanoseconds of its mtime are made from its name, and whoever writes to it
later breaks them. The folder is never larger than the bound: before a file is fetched, those that
were not used (their atime) for the longest time go; manifests and side files a day later than
shards. A shard may go while processes read it: what they have mapped stays theirs, and they ask
`gone` now and then what to let go, so that the disk has it back.

Files are fetched in ranges. What may pass (a connection that is cut, a server's error) is tried
again, a bounded number of times and after ever longer waits, besides what the store's own package
does. What does not pass ends in a DataError at once: an object that is not there or may not be
read, and content that is not what was asked for.

The caches of fsspec have no digests, no bound, and no locks between processes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import random
import re
import stat
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from packer_cli import storage
from packer_cli.durable import make_folders
from packer_cli.errors import DataError, PackerError, UsageError, from_os_error
from packer_cli.ownership import LOCK, Folder, claim, content_digest, strangers
from packer_cli.result.layout import PART
from packer_cli.result.wording import size as in_words

NAME = "packer-cache"
SHARD, MANIFEST, SIDE = "shard", "manifest", "side"
_OWN = re.compile(rf"{LOCK}|({SHARD}|{MANIFEST}|{SIDE})-[0-9a-f]{{64}}(\.part)?")
_MOVE = "move them elsewhere, or choose another cache="
_LOOK_SECONDS = 0.05  # between two looks at what another process fetches
_SECOND = 1_000_000_000
_KEPT_LONGER = 24 * 60 * 60 * _SECOND  # manifests and side files: they take little, all need them
RANGE_BYTES = 8 << 20
_AT_ONCE = 4  # ranges, so that 32 MiB are held in memory
TRIES = 3  # each of which the store's package may repeat by itself, as s3fs does
_FIRST_WAIT = 0.5
_LASTING = (FileNotFoundError, PermissionError, NotImplementedError, TypeError, ValueError)
UPLOAD_AGAIN = "remove the object and upload it again; if the result was replaced, open it again"

_T = TypeVar("_T")
Stopped = Callable[[], bool]

# Locks of this process. A copy of it (fork) shares them, and would hold them when it is gone.
_held: set[int] = set()


def _forget_locks() -> None:
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_locks)


class Wanted(NamedTuple):
    """A file of a result at a URL. `size` None: it is not known, and not to be fetched so."""

    url: str
    size: int | None
    sha256: str
    kind: str = SHARD

    @property
    def name(self) -> str:
        """What it is called in a cache."""
        return f"{self.kind}-{self.sha256}"


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
            make_folders(self.folder)
            with Folder(self.folder) as parent:
                inside = claim(parent, NAME)
        except UsageError as error:
            tip = f"{_MOVE}; if an older packer left it, remove it"
            raise UsageError(f"cache: {error.message}", tip) from error
        except OSError as error:
            raise from_os_error(error, self.folder, "write") from error
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
        if wanted.size not in (None, status.st_size):
            return False
        written = status.st_mtime_ns
        return not sealed or _seal(wanted.name, written // _SECOND) == written

    def _is_here(self, wanted: Wanted) -> bool:
        """Whether a file is here, by its seal, or by its content; then it has a seal now."""
        if self.holds(wanted):
            return True
        if not self.holds(wanted, sealed=False):
            return False
        with self._explained(), suppress(FileNotFoundError):
            descriptor = self._inside.open(wanted.name)
            with open(descriptor, "rb", buffering=0) as file:  # it stays the same if its name goes
                if content_digest(file) == wanted.sha256:
                    _set_seal(wanted.name, descriptor)
                    return True
        return False

    def local(self, wanted: Wanted, content: bytes | None = None) -> Path:
        """A local file, fetched, or made of its `content`, if it is not here. Waits for another
        process that fetches it.

        Raises DataError as `fetch`, and when the disk is full.
        """
        self.touch([wanted])
        write = partial(fetch, wanted) if content is None else partial(_written, content)
        while not self._is_here(wanted):
            if self._made(wanted, write):
                self.waited_for += wanted.size or 0
                break  # where times have no nanoseconds, there are no seals
            if not self.holds(wanted):
                time.sleep(_LOOK_SECONDS)
        return self.path(wanted)

    def try_to_fetch(self, wanted: Wanted, stopped: Stopped) -> bool:
        """Fetch a file; False when it is here already, when another process fetches it or what
        takes its room, and once `stopped` says so. Raises as `local`.
        """
        return not self._is_here(wanted) and self._made(
            wanted, partial(fetch, wanted, stopped=stopped)
        )

    def _made(self, wanted: Wanted, write: Callable[[int], bool]) -> bool:
        """Write a file, locked and with room for its bytes. False when `write` says so, another
        process writes or has just written the file, or others write what takes the room.
        """
        part = wanted.name + PART
        with self._explained(), ExitStack() as stack:
            with self._locked(LOCK, wait=True):  # or others take it for a leftover
                descriptor = stack.enter_context(self._locked(part))
                if descriptor is None:
                    return False
                stack.callback(self._discard, part, descriptor)
                if self.holds(wanted) or not self._has_room(part, wanted.size or 0):
                    return False
                os.ftruncate(descriptor, wanted.size or 0)
            if not write(descriptor):
                return False
            os.fsync(descriptor)
            _set_seal(wanted.name, descriptor)
            with self._locked(LOCK, wait=True):  # or whoever counts files sees neither name
                self._inside.rename(part, self._inside, wanted.name)
        return True

    def _has_room(self, part: str, size: int) -> bool:
        """Make room for a `.part` within the bound; False while others fetch what takes it."""
        files = {name: status for name, status in self._files() if name != part}
        used = sum(status.st_size for status in files.values())
        if self.limit is None:
            return True
        whole = [name for name in files if name != LOCK and not name.endswith(PART)]
        for victim in sorted(whole, key=lambda name: _used_at(name, files[name])):
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

    def gone(self, wanted: Wanted) -> bool:
        """Whether a file that was here is here no longer."""
        return self._inside.status(wanted.name) is None

    def check_space(self, missing: int, total: int) -> None:
        """Raise UsageError when a disk or the bound is too small for a result of `total` bytes, of
        which `missing` are not here.
        """
        with self._explained(), self._locked(LOCK, wait=True):
            used = sum(status.st_size for _, status in self._files())
        disk = os.statvfs(self._inside.descriptor)
        free = disk.f_bavail * disk.f_frsize
        need = missing if self.limit is None else min(missing, max(0, self.limit - used))
        if need <= free:
            return
        what = (
            f"the result has {total:,} bytes, {missing:,} of them not here yet"
            if self.limit is None or total <= self.limit
            else f"cache_bytes is {self.limit:,}"
        )
        fits = (free + used) * 9 // 10  # others write to the disk, too
        fits = fits // 1_000_000 * 1_000_000 or fits
        raise UsageError(
            f"cache: {self.folder}: {what}, and the disk has {free:,} left",
            f"give cache_bytes={fits} or less, choose a larger disk, or free some "
            f"space ({in_words(need - free)})",
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn OSErrors of files in the cache into DataErrors."""
        try:
            yield
        except OSError as error:
            place = self._inside.path
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DataError(
                    f"cache: {place}: the disk is full",
                    "free some space, or give cache_bytes, and run it again",
                ) from error
            raise from_os_error(error, place, "write") from error


def _seal(name: str, second: int) -> int:
    """The mtime in ns, in this second, of a file that was written here."""
    told = hashlib.sha256(f"{name}/{second}".encode()).digest()
    return second * _SECOND + int.from_bytes(told[:8], "big") % _SECOND


def _set_seal(name: str, descriptor: int) -> None:
    now = time.time_ns()
    os.utime(descriptor, ns=(now, _seal(name, now // _SECOND)))


def _used_at(name: str, status: os.stat_result) -> int:
    """When a file was used last, in ns; a manifest or a side file counts as used a day later."""
    return status.st_atime_ns + (0 if name.startswith(SHARD) else _KEPT_LONGER)


def _refuse_others(inside: Folder) -> None:
    """Raise UsageError for a cache in which others may have put files."""
    place = inside.path
    written = {*inside.names()} - {LOCK}  # listed first: who writes has set the modes
    for folder in (place.parent, place):
        status = os.stat(folder, follow_symlinks=False)
        if status.st_uid != os.geteuid():
            raise UsageError(
                f"cache: {folder}: belongs to another user, whose files are not trusted",
                "choose another cache=",
            )
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and written:
            raise UsageError(
                f"cache: {folder}: others may write in it, and their files are not trusted",
                f"remove it, or choose another cache=; to keep it: chmod go-w {folder}",
            )
        try:
            os.chmod(folder, 0o700)  # whatever the umask lets others do with the files in it
        except OSError as error:
            raise from_os_error(error, folder, "write") from error
    if foreign := strangers(inside, _OWN):
        raise UsageError(
            f"cache: {place}: holds files that packer did not make: {foreign[0]}", _MOVE
        )


def patiently(ask: Callable[[], _T]) -> _T:
    """Ask a store, again if it may help. Raises what it raised the last time."""
    for attempt in range(1, TRIES + 1):
        try:
            return ask()
        except DataError as error:
            cause = error.__cause__  # of a store, if it may pass
            lasts = cause is None or isinstance(cause, (*_LASTING, PackerError))
            if lasts or "credential" in type(cause).__name__.lower():
                raise
            if attempt == TRIES:
                raise DataError(f"{error.message} (tried {TRIES} times)", error.tip) from error
        longest = _FIRST_WAIT * 2**attempt
        time.sleep(random.uniform(longest / 2, longest))  # noqa: S311 apart from other processes
    raise AssertionError


def fetch(wanted: Wanted, descriptor: int, stopped: Stopped = lambda: False) -> bool:
    """Write an object to a file, from its beginning; False once `stopped` says so.

    Raises DataError for one with another content, and for whatever the store says; OSError for the
    file.
    """
    size, sha = wanted.size or 0, hashlib.sha256()
    spans = list(pairwise([*range(0, size, RANGE_BYTES), size]))
    try:
        with open(descriptor, "wb", closefd=False) as file:
            for first in range(0, len(spans), _AT_ONCE):
                if stopped():
                    return False
                for block in _blocks(wanted.url, spans[first : first + _AT_ONCE]):
                    sha.update(block)
                    file.write(block)
    except DataError as error:
        found = wanted.size
        with suppress(PackerError):
            found = storage.stat(wanted.url, again=True).size
        if found == wanted.size:
            raise
        raise DataError(
            f"{wanted.url}: has {found} bytes, the manifest says {wanted.size}", UPLOAD_AGAIN
        ) from error
    if sha.hexdigest() != wanted.sha256:
        raise DataError(
            f"{wanted.url}: its sha256 is {sha.hexdigest()}, the manifest says {wanted.sha256}",
            UPLOAD_AGAIN,
        )
    return True


def _blocks(url: str, spans: list[tuple[int, int]]) -> Iterable[bytes]:
    """Ranges of an object, at the same time; one by one, where that fails."""
    try:
        return storage.ranges(url, spans)
    except DataError:
        return (patiently(partial(storage.ranges, url, [span]))[0] for span in spans)


def _written(content: bytes, descriptor: int) -> bool:
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    return True
