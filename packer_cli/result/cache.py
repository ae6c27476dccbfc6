"""A folder with local copies of files at URLs, shared by all processes of a machine.

A file that has its name has its content: it was compared with the digest in the manifest, and was
on the disk before it was renamed. So files of several results, or of one that is replaced, never
meet, and nothing is to be repaired after a crash (`cache_folder.py`).

The folder is never larger than the bound: room for a file is made before it is fetched, by removing
manifests and side files that no process has used for an hour, then the shards that were not used
for the longest time. A shard may go while processes read it: what they have mapped stays theirs,
and they ask `gone` now and then what to let go, so that the disk has it back.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from packer_cli.errors import UsageError
from packer_cli.result.cache_folder import LOCK, SHARD, CacheFolder, explained
from packer_cli.result.fetching import Wanted, fetch
from packer_cli.result.layout import PART
from packer_cli.result.wording import size as in_words

_IDLE_NS = 3_600_000_000_000  # results in use are touched every few seconds
_LOOK_SECONDS = 0.05  # between two looks at what another process fetches


class Cache(CacheFolder):
    """`folder`, made if necessary, of at most `limit` bytes; None: as large as what is read.

    It pickles as these, with `planned`. Raises UsageError when the place in the folder is somebody
    else's.
    """

    planned = False  # a sampler's order fits: how much of a shard one process reads says nothing
    waited_for = 0  # bytes that `local` itself has fetched, in this process
    given = 0.0  # bytes of the rows that were read of it, as their readers say

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        super().__init__(folder)
        self.limit = limit

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "limit": self.limit, "planned": self.planned}

    def holds(self, kind: str, wanted: Wanted) -> bool:
        """Whether a file is here."""
        return self._holds(_name(kind, wanted.sha256), wanted.size)

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
                    with explained(self.path(name)):
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
            with explained(self.path(name)):
                if not fetch(wanted, descriptor, stopped):
                    return False
                self._inside.rename(name + PART, self._inside, name)
        return True

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
            with explained(self.path(name)):
                os.ftruncate(descriptor, 0)
                try:
                    os.posix_fallocate(descriptor, 0, size)
                except OSError as error:
                    if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                        raise
                    os.ftruncate(descriptor, size)
        return True

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
