"""Every access of `packer verify` to the files of a result: no other module opens one."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol

from packer_cli.errors import Interrupted, from_os_error
from packer_cli.records import Int64
from packer_cli.result.manifest import Result
from packer_cli.result.reader import PackedDirectory
from packer_cli.result.shards import Shard, digest
from packer_cli.result.squared_lengths import squared_lengths

_READ_BYTES = 1 << 20


class Stored(Protocol):
    """A result of any kind on the disk: a `PackedDirectory` or a `TokenizedDirectory`."""

    path: Path

    @property
    def facts(self) -> Result: ...
    def check_size(self, shard: Shard) -> None: ...
    def batches(self, shard: Shard) -> Iterator[Any]: ...


def names_in(stored: Stored) -> set[str]:
    """The names of everything in the directory. Raises DataError."""
    try:
        return set(os.listdir(stored.path))
    except OSError as error:
        raise from_os_error(error, stored.path, "read") from error


def path_of(stored: Stored, name: str) -> Path:
    """The path of a file, for messages and for libraries that open files themselves."""
    return stored.path / name


def is_file(stored: Stored, name: str) -> bool:
    """Whether there is a regular file of that name."""
    return path_of(stored, name).is_file()


def digest_of(stored: Stored, name: str) -> tuple[int, str]:
    """(size, sha256) of a side file. Raises DataError when it cannot be read."""
    return digest(path_of(stored, name))


def open_shard(stored: Stored, shard: Shard) -> IO[bytes]:
    """Open a shard of the right size, to hash it. Raises DataError and OSError."""
    stored.check_size(shard)
    return open(path_of(stored, shard.file), "rb", buffering=0)


def batches_of(stored: Stored, shard: Shard) -> Iterator[Any]:
    """The record batches of a shard, mapped. Raises DataError."""
    return stored.batches(shard)


def lines_of(stored: Stored, name: str) -> Iterator[bytes]:
    """The lines of a side file, each with its end. Raises DataError."""
    path = path_of(stored, name)
    try:
        with open(path, "rb") as file:
            yield from file
    except OSError as error:
        raise from_os_error(error, path, "read") from error


def part_of(stored: Stored, name: str, start: int, size: int) -> bytes:
    """Some bytes of a side file. Raises DataError."""
    path = path_of(stored, name)
    try:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(size)
    except OSError as error:
        raise from_os_error(error, path, "read") from error


def content_of(stored: Stored, name: str) -> bytes:
    """All of a side file. Raises DataError."""
    return part_of(stored, name, 0, -1)


def squared_lengths_of(packed: PackedDirectory) -> Int64:
    """int64[rows], what the side file says of each, whose digest `check_files` has compared. Raises
    DataError for one that is unusable.
    """
    return squared_lengths(packed, compared=True)


class Hashed:
    """A file for Arrow to read, which hashes what is read and reads no more than `size`."""

    closed = False

    def __init__(self, file: IO[bytes], size: int, stop: threading.Event) -> None:
        self._file, self._left, self._stop = file, size, stop
        self._sha = hashlib.sha256()
        self.end = b""

    def read(self, size: int) -> bytes:
        if self._stop.is_set():
            raise Interrupted("stopped")
        data = self._file.read(min(size, self._left))
        self._left -= len(data)
        self._sha.update(data)
        self.end = (self.end + data[-8:])[-8:]
        return data

    def close(self) -> None:
        pass

    def digest(self) -> str:
        """The sha256 of the whole file; reads the rest first."""
        while self.read(_READ_BYTES):
            pass
        return self._sha.hexdigest()
