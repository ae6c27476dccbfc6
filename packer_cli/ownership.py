"""Which files packer made. All code that removes, replaces or truncates files is here.

    claim(folder, ".packer")      a folder for packer alone, told by a marker that only packer makes
    Listed, unchanged             whether a file is still what packer's own record says it wrote

A folder of packer's is `NAME/owner.json`, with a random id, and `NAME/<id>/`, in which packer's
files are. It is made elsewhere and renamed into its place, so it is there with its marker or not
at all. A folder of that name without the marker is somebody else's, and so is everything in it but
the two, and in `<id>` everything that is not a regular file of one of packer's names. Links are
never followed, names never leave their directory: all calls are relative to descriptors.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import msgspec

from packer_cli.errors import InternalError, UsageError, named

MARKER = "owner.json"
_KIND = "packer's own folder: put nothing in it"
_ID = re.compile("[0-9a-f]{32}")
_HASH_BYTES = 1 << 20
_MOST_NAMED = 5
_TRIES = 100
_PUT_NS = 60_000_000_000  # from the writing of a record to its rename; after longer, files are read


class Folder:
    """A directory held open: its names mean the same files even if its path changes."""

    def __init__(self, path: Path, within: Folder | None = None) -> None:
        """`within`: the folder that holds it; then `path` may be no link. Raises OSError."""
        self.path = path
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        if within is None:
            self.descriptor = os.open(path, flags)
        else:
            self.descriptor = os.open(
                _plain(path.name), flags | os.O_NOFOLLOW, dir_fd=within.descriptor
            )

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self.descriptor)

    def names(self) -> list[str]:
        return os.listdir(self.descriptor)

    def status(self, name: str) -> os.stat_result | None:
        """Of the name itself, link or not; None when there is none."""
        try:
            return os.stat(_plain(name), dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def is_file(self, name: str) -> bool:
        """Whether it is a regular file, not a link to one."""
        status = self.status(name)
        return status is not None and stat.S_ISREG(status.st_mode)

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """A descriptor. Raises OSError, also for links; never waits for the other end of a pipe."""
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(_plain(name), flags, 0o666, dir_fd=self.descriptor)

    def read(self, name: str) -> bytes | None:
        """The content of a regular file; None for all else, and for one that goes just now."""
        if not self.is_file(name):
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


class Listed(NamedTuple):
    """A file as packer's record lists it. `size` None: not in the record."""

    size: int | None
    sha256: str


def unchanged(
    folder: Folder, name: str, listed: Listed, record: os.stat_result | None = None
) -> bool:
    """Whether a file is the one that the record lists: a regular file of that size and digest.

    As git does, it is not read where its times, and those of the `record`, tell.
    """
    status = folder.status(name)
    if status is None or not stat.S_ISREG(status.st_mode):
        return False
    if listed.size not in (None, status.st_size):
        return False
    return _tell_times(status, record) or file_digest(folder, name) == listed.sha256


def _tell_times(file: os.stat_result, record: os.stat_result | None) -> bool:
    """Whether nobody has changed a file since packer wrote the record, as the last of all, and then
    renamed both to their places, which sets the time of change of status only.

    They do not tell once somebody has touched, copied or moved the record.
    """
    return (
        record is not None
        and record.st_mtime_ns < record.st_ctime_ns < record.st_mtime_ns + _PUT_NS
        and file.st_mtime_ns <= record.st_mtime_ns
        and file.st_mtime_ns < file.st_ctime_ns < record.st_ctime_ns
    )


def file_digest(folder: Folder, name: str) -> str:
    """The sha256 of a regular file. Raises OSError."""
    with open(folder.open(name), "rb", buffering=0) as file:
        return content_digest(file)


def content_digest(file: FileIO) -> str:
    """The sha256 of what an open file holds from where it stands. Raises OSError."""
    sha, buffer = hashlib.sha256(), memoryview(bytearray(_HASH_BYTES))
    while count := file.readinto(buffer):
        sha.update(buffer[:count])
    return sha.hexdigest()


class OwnFolder:
    """A folder that packer has made in another. `inside` is where packer's files are."""

    def __init__(self, parent: Folder, name: str, identity: str) -> None:
        self.parent, self.name, self.identity = parent, name, identity
        with Folder(parent.path / name, parent) as outer:
            with suppress(FileExistsError):  # it may be missing from a copy, or after a cleaner
                outer.mkdir(identity)
            self.inside = Folder(outer.path / identity, outer)

    def close(self) -> None:
        os.close(self.inside.descriptor)

    def is_in_place(self) -> bool:
        """Whether it still has its name: the end of a run takes it away."""
        return _is_at(self.parent, f"{self.name}/{self.identity}", self.inside)

    def strangers(self, own: re.Pattern[str]) -> list[str]:
        """What is in `inside`, but is no regular file with a name of packer's.

        A name that is gone by now is another rank's: `unit-00000.json.part` before its rename.
        """
        return [
            name
            for name in sorted(self.inside.names())
            if (status := self.inside.status(name)) is not None
            and not (own.fullmatch(name) and stat.S_ISREG(status.st_mode))
        ]

    def refuse_strangers(self, own: re.Pattern[str]) -> None:
        if names := self.strangers(own):
            raise in_the_way(self.inside.path, names)

    def remove(self, own: re.Pattern[str]) -> None:
        """Remove packer's files and the folder; the folder stays if it holds other files."""
        if self.strangers(own):
            for name in self.inside.names():
                if own.fullmatch(name) and self.inside.is_file(name):
                    self.inside.unlink(name)
            return
        aside = f"{self.name}-{self.identity}"  # nobody else gets at half of it
        self.parent.rename(self.name, self.parent, aside)
        with suppress(OSError):  # the next run does this, or has just done it
            _remove(self.parent, aside, own)
        self.parent.sync()  # or a power loss brings it back


def claim(parent: Folder, name: str) -> OwnFolder:
    """The folder of packer of that name, made now if there is none.

    Raises UsageError when it is somebody else's.
    """
    for attempt in range(_TRIES):
        try:
            if (identity := identity_of(parent, name)) is not None:
                return OwnFolder(parent, name, identity)
            _make(parent, name, secrets.token_hex(16))
        except FileNotFoundError:  # a run that ended just now took it away
            if attempt == _TRIES - 1:
                raise
    raise InternalError(f"{parent.path / name} keeps disappearing")


def identity_of(parent: Folder, name: str) -> str | None:
    """The id of packer's folder of that name; None when there is none.

    Raises UsageError when it is somebody else's.
    """
    status = parent.status(name)
    if status is None:
        return None
    path = parent.path / name
    if not stat.S_ISDIR(status.st_mode):
        raise _foreign(path, "is no directory")
    try:
        with Folder(path, parent) as outer:
            identity, names = _identity(outer), outer.names()
            if not _is_at(parent, name, outer):
                return None  # a run that ended just now took it away, perhaps before we read it
    except FileNotFoundError:
        return None
    if identity is None:
        raise _foreign(path, f"has no {MARKER} of packer's")
    if rest := set(names) - {MARKER, identity}:
        raise in_the_way(path, rest)
    return identity


def _is_at(parent: Folder, place: str, folder: Folder) -> bool:
    """Whether a folder held open is at this path, links not followed."""
    try:
        status = os.stat(place, dir_fd=parent.descriptor, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return os.path.samestat(status, os.fstat(folder.descriptor))


def _identity(outer: Folder) -> str | None:
    try:
        marker = msgspec.json.decode(outer.read(MARKER) or b"")
        identity = str(marker["id"])
        return identity if marker["made_as"] == _KIND and _ID.fullmatch(identity) else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _make(parent: Folder, name: str, identity: str) -> None:
    """Make it under another name, then rename it: it never exists without its marker."""
    new = f"{name}-{identity}"
    parent.mkdir(new)
    with Folder(parent.path / new, parent) as outer:
        outer.mkdir(identity)
        content = msgspec.json.encode({"made_as": _KIND, "id": identity})
        with open(outer.open(MARKER, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        outer.sync()
    try:
        parent.rename(new, parent, name)  # replaces no directory with anything in it, nor a file
    except FileNotFoundError:
        raise
    except OSError as error:
        _remove(parent, new, re.compile(""))
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise  # else another run was faster; it may have ended by now, too


def remove_leftovers(parent: Folder, name: str, own: re.Pattern[str]) -> None:
    """Remove half-made or half-removed folders of packer, left by a kill or a power loss.

    Another run may be bringing one in or out just now. So one with a marker gets another name
    first, under which nobody puts it in place; of one without, only empty folders go.
    """
    for entry in parent.names():
        if is_leftover(entry, name):
            with suppress(OSError):
                _remove_leftover(parent, entry, name, own)


def _remove_leftover(parent: Folder, entry: str, name: str, own: re.Pattern[str]) -> None:
    with Folder(parent.path / entry, parent) as outer:
        if _identity(outer) is None:
            for empty in filter(_ID.fullmatch, outer.names()):
                outer.rmdir(empty)
            parent.rmdir(entry)
            return
    ours = f"{name}-{secrets.token_hex(16)}"
    parent.rename(entry, parent, ours)
    _remove(parent, ours, own)


def is_leftover(entry: str, name: str) -> bool:
    """Whether the name is one that the folder `name` has on its way in or out."""
    return entry.startswith(f"{name}-") and bool(_ID.fullmatch(entry.removeprefix(f"{name}-")))


def _remove(parent: Folder, name: str, own: re.Pattern[str]) -> None:
    """Remove a folder of packer. Files that are not packer's stay, and cause an OSError."""
    with Folder(parent.path / name, parent) as outer:
        identity = _identity(outer)
        if identity is not None and outer.status(identity) is not None:
            with Folder(outer.path / identity, outer) as inside:
                names = inside.names()
                if all(own.fullmatch(file) and inside.is_file(file) for file in names):
                    for file in names:
                        inside.unlink(file)
            outer.rmdir(identity)
        if identity is not None and outer.names() == [MARKER]:
            outer.unlink(MARKER)
    parent.rmdir(name)


def _foreign(path: Path, why: str) -> UsageError:
    return UsageError(
        f"{path}: {why}, so packer does not write in it",
        "move it elsewhere, or choose another --output; if an older packer left it, remove it",
    )


def in_the_way(folder: Path, names: Iterable[str]) -> UsageError:
    """The error for files that packer did not make, in places where it would write or remove."""
    return UsageError(
        f"{folder}: holds files that packer did not make, or that have changed: "
        f"{named(sorted(names), _MOST_NAMED)}",
        "nothing was changed; move them elsewhere, or choose another --output",
    )
