"""Which files packer made, and which process may change them.

    own_folder(folder, ".packer", ...)   a folder for packer alone, locked

A run's files are in `NAME/ID`, and ID is a name that nobody else gives. A folder NAME that holds
anything but ID is somebody else's, and so is all in `ID` that is not a regular file of one of the
names that packer gives. Links are never followed, names never leave their directory: all calls are
relative to descriptors. Locks end with the process that holds them (flock).
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO

from packer_cli.errors import DataError, UsageError, named, os_errors
from packer_cli.storage import MOST_AT_ONCE

ID = "dd4cbd969ee4cf0b968a8b865edeed7a"
LOCK = "lock"
_MOST_NAMED = 5
_TRIES, _SECONDS, _TOLD_AFTER = 100, 0.05, 200  # a note comes after ten seconds


class InUseError(DataError):
    """Another run is writing to the directory."""


class Folder:
    """A directory held open: its names mean the same files even if its path changes."""

    def __init__(self, path: Path, within: Folder | None = None, *, no_lock: bool = False) -> None:
        """`within`: the folder that holds it; then `path` may be no link. `no_lock`: go on where
        there are no locks: two runs in one directory silently give wrong data. Raises OSError.
        """
        self.path = path
        self.no_lock: bool = within.no_lock if within else no_lock
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        if within is None:
            self.descriptor = os.open(path, flags)
        else:
            self.descriptor = os.open(
                _plain(path.name), flags | os.O_NOFOLLOW, dir_fd=within.descriptor
            )

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.descriptor)

    def names(self) -> list[str]:
        return os.listdir(self.descriptor)

    def status(self, name: str) -> os.stat_result | None:
        """Status of the name itself, link or not; None when there is none."""
        try:
            return os.stat(_plain(name), dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def is_file(self, name: str) -> bool:
        """Tell whether it is a regular file, not a link to one."""
        status = self.status(name)
        return status is not None and stat.S_ISREG(status.st_mode)

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """A descriptor. Raises OSError, also for links; never waits for the other end of a pipe."""
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(_plain(name), flags, 0o666, dir_fd=self.descriptor)

    def read(self, name: str) -> bytes | None:
        """The content of a regular file; None for all else, for one that goes just now, and for one
        that is too large to be packer's.
        """
        status = self.status(name)
        if status is None or not stat.S_ISREG(status.st_mode) or status.st_size > MOST_AT_ONCE:
            return None
        try:
            with open(self.open(name), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def rename(self, name: str, to: Folder, new: str) -> None:
        os.rename(_plain(name), _plain(new), src_dir_fd=self.descriptor, dst_dir_fd=to.descriptor)

    def unlink(self, name: str) -> None:
        os.unlink(_plain(name), dir_fd=self.descriptor)

    def mkdir(self, name: str) -> None:
        os.mkdir(_plain(name), dir_fd=self.descriptor)

    def rmdir(self, name: str) -> None:
        os.rmdir(_plain(name), dir_fd=self.descriptor)

    def sync(self) -> None:
        os.fsync(self.descriptor)


def _plain(name: str) -> str:
    """Check that the names of a call name something in the folder itself. Raises ValueError."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is not a file name")
    return name


def find_own(parent: Folder, name: str) -> Path | None:
    """Find packer's files in its folder of that name; None when there is none.

    Raises UsageError when the folder is somebody else's. An empty one is nobody's.
    """
    status = parent.status(name)
    if status is None:
        return None
    path = parent.path / name
    if not stat.S_ISDIR(status.st_mode):
        raise _foreign(path, "is no directory")
    try:
        with Folder(path, parent) as outer:
            names, inside = outer.names(), outer.status(ID)
    except FileNotFoundError:  # a run that ended just now took it away
        return None
    if inside is None and ID not in names:
        if names:
            raise _foreign(path, "is not packer's own folder")
        return None
    if inside is not None and not stat.S_ISDIR(inside.st_mode):
        raise _foreign(path / ID, "is no directory")
    if rest := {*names} - {ID}:
        raise in_the_way(path, rest)
    return path / ID


def claim(parent: Folder, name: str) -> Folder:
    """Packer's folder in the one of that name, made now if there is none, to be closed.

    Raises UsageError when it is somebody else's.
    """
    find_own(parent, name)
    with suppress(FileExistsError):
        parent.mkdir(name)
    with Folder(parent.path / name, parent) as outer:
        with suppress(FileExistsError):
            outer.mkdir(ID)
        return Folder(outer.path / ID, outer)


@contextmanager
def own_folder(
    parent: Folder, name: str, place: Path, *, shared: bool = False, tries: int = 1
) -> Iterator[Folder]:
    """Packer's folder in the one of that name, claimed and locked; the options are those of
    `locked`.

    The process that holds the lock may remove it at the end, just when another is about to lock it.
    """
    for _ in range(_TRIES):
        with ExitStack() as stack:
            try:
                inside = stack.enter_context(claim(parent, name))
                stack.enter_context(locked(inside, LOCK, place, shared=shared, tries=tries))
            except FileNotFoundError:  # it is gone
                continue
            yield inside
            return
    raise InUseError(
        f"{place}: other runs keep starting and ending there", "choose another --output"
    )


@contextmanager
def locked(
    folder: Folder,
    name: str,
    place: Path,
    *,
    shared: bool = False,
    wait: Callable[[str], None] | None = None,
    tries: int = 1,
) -> Iterator[None]:
    """Hold the lock file `name`, made if necessary. `place`: what errors say is in use.

    `shared`: with others that share it. `wait`: for whoever holds it, and say so after a while;
    otherwise it is tried `tries` times, a twentieth of a second apart. Raises InUseError when
    another process holds it, DataError where there are no locks, FileNotFoundError when the folder
    is gone.
    """
    how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
    while True:
        descriptor = folder.open(name, os.O_RDWR | os.O_CREAT)
        try:
            _lock(descriptor, how, tries, place, wait, no_lock=folder.no_lock)
            status = folder.status(name)
            if status is None or not os.path.samestat(status, os.fstat(descriptor)):
                continue  # whoever held it has removed it
            yield
            return
        finally:
            os.close(descriptor)


def _lock(
    descriptor: int, how: int, tries: int, place: Path, wait: Callable[[str], None] | None, *,
    no_lock: bool,
) -> None:  # fmt: skip
    for attempt in count():
        try:
            fcntl.flock(descriptor, how)
            return
        except BlockingIOError:
            if wait is None and attempt >= tries - 1:
                break
            if wait is not None and attempt == _TOLD_AFTER:
                wait(f"{place}: waiting for another rank, which holds begin.lock there")
            time.sleep(_SECONDS)
        except OSError as error:
            if no_lock:
                return
            raise DataError(
                f"{place}: cannot be locked: {error.strerror}",
                "choose a file system with locks, or add --no-lock if you are sure that no "
                "other run writes there",
            ) from error
    raise InUseError(
        f"{place}: another run is writing there",
        "wait until it ends, or choose another --output",
    )


def strangers(inside: Folder, own: re.Pattern[str]) -> list[str]:
    """Names in packer's folder of what is no regular file with a name of packer's.

    A name that is gone by now is another rank's: `unit-00000.json.part` before its rename.
    """
    return [
        name
        for name in sorted(inside.names())
        if (status := inside.status(name)) is not None
        and not (own.fullmatch(name) and stat.S_ISREG(status.st_mode))
    ]


def remove_own(parent: Folder, name: str, inside: Folder, own: re.Pattern[str]) -> None:
    """Remove packer's files, the lock last, and both folders unless they hold anything else."""
    foreign = {*strangers(inside, own)}
    for file in sorted({*inside.names()} - foreign, key=LOCK.__eq__):
        inside.unlink(file)
    with suppress(OSError):
        with Folder(parent.path / name, parent) as outer:
            outer.rmdir(ID)
        parent.rmdir(name)
    parent.sync()  # or a power loss brings it back


def _foreign(path: Path, why: str) -> UsageError:
    return UsageError(
        f"{path}: {why}, so packer does not write in it",
        "move it elsewhere, or choose another --output",
    )


def in_the_way(folder: Path | str, names: Iterable[str]) -> UsageError:
    """The error for files that packer did not make, in places where it would write or remove."""
    return UsageError(
        f"{folder}: holds files that packer did not make, or that have changed: "
        f"{named(sorted(names), _MOST_NAMED)}",
        "nothing was changed; move them elsewhere, or choose another --output",
    )


# Files that are there whole or not at all, also after a power loss


def open_unlinked(path: str, flags: int) -> int:
    """A descriptor, as the `opener` of `open`. Raises OSError for a link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@contextmanager
def written(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which is synced to the disk at the end. Links are not followed."""
    with os_errors(path, "write"), open(path, "wb", opener=open_unlinked) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write_file(path: Path, content: bytes) -> None:
    """Write a file and sync it to the disk."""
    with written(path) as file:
        file.write(content)


def put_file(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all, also after a power loss."""
    part = path.with_name(path.name + ".part")
    with os_errors(path, "write"):
        write_file(part, content)
        os.rename(part, path)
    sync(path.parent)


def make_folders(path: Path) -> None:
    """Make a directory and those above it, so that a power loss takes none of them away.

    Raises NotADirectoryError below a file.
    """
    if path.is_dir():
        return
    make_folders(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():  # nobody else made it meanwhile
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
    if os.access(path.parent, os.R_OK):
        sync(path.parent)


def sync(path: Path) -> None:
    """Sync a file or a directory to the disk (fsync)."""
    with os_errors(path, "write"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
