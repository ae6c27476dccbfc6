"""Files that exist whole or not at all, also after a power loss."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from packer_cli.errors import from_os_error


@contextmanager
def written(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which is synced to the disk at the end."""
    try:
        with open(path, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise from_os_error(error, path, "write") from error


def write_file(path: Path, content: bytes) -> None:
    """Write a file and sync it to the disk."""
    with written(path) as file:
        file.write(content)


def put_file(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all, also after a power loss."""
    part = path.with_name(path.name + ".part")
    try:
        write_file(part, content)
        os.rename(part, path)
    except OSError as error:
        raise from_os_error(error, path, "write") from error
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
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise from_os_error(error, path, "write") from error
