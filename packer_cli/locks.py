"""Locks that end with the process that holds them (flock).

Where the file system has none, as some network file systems, going on without them must be
asked for: two runs in one directory silently give wrong data.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from packer_cli.errors import DataError
from packer_cli.ownership import Folder, OwnFolder, claim

LOCK = "lock"
_TRIES, _SECONDS = 100, 0.05


class InUseError(DataError):
    """Another run is writing to the directory."""


@contextmanager
def locked(
    folder: Folder,
    name: str,
    place: Path,
    *,
    shared: bool = False,
    wait: bool = False,
    tries: int = 1,
    without: bool = False,
) -> Iterator[None]:
    """Hold the lock file `name`, made if necessary. `place`: what errors say is in use.

    `shared`: with others that share it. `wait`: for whoever holds it; otherwise it is tried
    `tries` times, a twentieth of a second apart. `without`: go on where there are no locks. Raises
    InUseError when another process holds it, DataError where there are no locks.
    """
    descriptor = folder.open(name, os.O_RDWR | os.O_CREAT)
    try:
        how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        _lock(descriptor, how, tries, place, without)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def locked_folder(
    parent: Folder,
    name: str,
    place: Path,
    *,
    shared: bool = False,
    tries: int = 1,
    without: bool = False,
) -> Iterator[OwnFolder]:
    """The folder of packer of that name, claimed and locked; the options are those of `locked`.

    The process that holds the lock may remove it at the end, just when another is about to lock it.
    """
    for _ in range(_TRIES):
        with ExitStack() as stack:
            own = claim(parent, name)
            stack.callback(own.close)
            lock = locked(own.inside, LOCK, place, shared=shared, tries=tries, without=without)
            try:
                stack.enter_context(lock)
            except FileNotFoundError:  # it is gone
                continue
            if own.is_in_place():
                yield own
                return
    raise InUseError(
        f"{place}: other runs keep starting and ending there", "choose another --output"
    )


def _lock(descriptor: int, how: int, tries: int, place: Path, without: bool) -> None:
    for attempt in range(tries):
        try:
            fcntl.flock(descriptor, how)
            return
        except BlockingIOError:
            if attempt < tries - 1:
                time.sleep(_SECONDS)
        except OSError as error:
            if without:
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
