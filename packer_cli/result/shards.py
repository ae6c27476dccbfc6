"""What is known of a shard without opening it. Imports no Arrow, so that `stats` is instant."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass

from packer_cli import storage
from packer_cli.errors import from_os_error

FORMAT_VERSION = 1
_HASH_BYTES = 1 << 20
_FETCHED_BYTES = 4 << 20


@dataclass
class Shard:
    """One finished file: what the manifest says of it."""

    file: str
    unit: int
    rows: int = 0
    segments: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    bytes: int = 0
    sha256: str = ""

    def as_json(self) -> dict[str, object]:
        return dict(vars(self))


def digest(
    path: str | os.PathLike[str], stopped: Callable[[], bool] = lambda: False
) -> tuple[int, str]:
    """(size, sha256) of a file; ends early, with a wrong result, once `stopped` says so.

    `path` may be a URL. Raises DataError when it cannot be read.
    """
    sha, size = hashlib.sha256(), 0
    buffer = memoryview(bytearray(_HASH_BYTES))
    try:
        with storage.open_bytes(os.fspath(path), _FETCHED_BYTES) as file:
            while (count := file.readinto(buffer)) and not stopped():
                sha.update(buffer[:count])
                size += count
    except OSError as error:
        raise from_os_error(error, path, "read") from error
    return size, sha.hexdigest()
