"""What is known about a shard without opening it. Imports no Arrow, so `stats` is instant."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from packer_cli import storage
from packer_cli.errors import from_os_error
from packer_cli.result.layout import PART, SHARD_PATTERN, named_by_digest
from packer_cli.threads import built

FORMAT_VERSION = 1
MISSING = "is missing"
_HASH_BYTES = 1 << 20
_FETCHED_BYTES = 4 << 20


Count = Annotated[int, Meta(ge=0, le=1 << 53)]
AtLeastOne = Annotated[int, Meta(ge=1, le=1 << 53)]


@built
class Shard(Struct):
    """One finished file, as the manifest and the records of units describe it."""

    file: Annotated[str, Meta(pattern=SHARD_PATTERN, max_length=100)]
    unit: Count
    rows: AtLeastOne
    segments: AtLeastOne
    tokens: AtLeastOne
    trained_tokens: Count
    bytes: AtLeastOne
    sha256: str

    @classmethod
    def begun(cls, file: str, unit: int) -> Shard:
        """A shard that is being written: nothing is counted yet."""
        return cls(file, unit, 0, 0, 0, 0, 0, "")


def problem_of(path: Path, shard: Shard) -> str:
    """Why a file cannot be the shard, without reading it; "" if it can."""
    try:
        status = path.stat()
    except OSError:
        return MISSING
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    if status.st_size != shard.bytes:
        return f"has {status.st_size} bytes, the manifest says {shard.bytes}"
    return ""


def name_by_content(
    folder: Path, shard: Shard, stopped: Callable[[], bool] = lambda: False
) -> bool:
    """Find a written shard's size and digest, and name its file by these.

    False where `stopped` ended that early. Raises DataError when it cannot be read or renamed.
    """
    written = folder / shard.file
    shard.bytes, shard.sha256 = digest(written, stopped)
    if stopped():
        return False
    shard.file = named_by_digest(shard.file.removesuffix(PART), shard.sha256)
    try:
        os.rename(written, folder / shard.file)
    except OSError as error:
        raise from_os_error(error, written, "write") from error
    return True


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
