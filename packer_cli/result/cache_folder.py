"""A folder of files that are fetched, of which each is whole, locked by whoever fetches it.

    PLACE/packer-cache/owner.json     says that the folder is packer's, so that nothing else goes
    PLACE/packer-cache/<id>/lock      held while files come and go
    .../KIND-<sha256>                 a file, whole, named by its content
    .../KIND-<sha256>.part            locked by whoever fetches it

A `.part` that nobody locks was left by a process that has ended, and is removed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path

from packer_cli.durable import make_folders
from packer_cli.errors import DataError, UsageError, from_os_error
from packer_cli.ownership import Folder, OwnFolder, claim
from packer_cli.result.layout import PART

NAME, LOCK = "packer-cache", "lock"
SHARD, MANIFEST, SIDE = "shard", "manifest", "side"
_OWN = re.compile(rf"{LOCK}|({SHARD}|{MANIFEST}|{SIDE})-[0-9a-f]{{64}}(\.part)?")
_MOVE = "move them elsewhere, or choose another cache="

# Of this process. A copy of it (fork) shares locks, and would hold them when it is gone.
_locked: set[int] = set()


def _forget_locks() -> None:
    for descriptor in _locked:
        with suppress(OSError):
            os.close(descriptor)
    _locked.clear()


os.register_at_fork(after_in_child=_forget_locks)


class CacheFolder:
    """`folder`, made if necessary. Raises UsageError when the place in it is somebody else's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

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

    def _holds(self, name: str, size: int | None) -> bool:
        status = self._inside.status(name)
        if status is None:
            return False
        return stat.S_ISREG(status.st_mode) and size in (None, status.st_size)

    @contextmanager
    def _begun(self, name: str, size: int | None) -> Iterator[int | None]:
        """The `.part` of a file, locked; None when another process has it, or has just had it.

        It is removed unless it has been renamed to its name at the end.
        """
        part = name + PART
        with ExitStack() as stack:
            with self._alone(), explained(self.path(part)):  # or others take it for a leftover
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
        with explained(self.path(LOCK)):
            descriptor = self._inside.open(LOCK, os.O_RDWR | os.O_CREAT)
        with _closing(descriptor):
            self._lock(descriptor, fcntl.LOCK_EX)
            yield

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


def _close(own: OwnFolder) -> None:
    own.close()
    os.close(own.parent.descriptor)


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
