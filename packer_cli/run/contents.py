"""Whether an input still has the same content, where size and times cannot tell.

The bytes of an input are hashed as they are read for packing, as stretches. A unit that reads a
whole file from one end to the other thereby knows its digest, with no second read. Elsewhere the
file is read once more for its digest, and what was packed is compared with that.

    digest_of(path, stretches)   the digest of a file that holds these stretches
    holds(path, stretches)       whether it does, without its digest
    as_packed_in(folder)         whether inputs are what a result, or an unfinished run, holds
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import IO, Any

from packer_cli import storage
from packer_cli.errors import PackerError, from_os_error
from packer_cli.records import InputFile, Stretch
from packer_cli.result.manifest_file import load_any
from packer_cli.result.shards import digest
from packer_cli.run import commits
from packer_cli.run.commits import Digest
from packer_cli.run.identity import RUN, IsSame

_BLOCK_BYTES = 1 << 20
_FETCHED_BYTES = 4 << 20


def digest_of(
    path: str, stretches: Iterable[Stretch], stopped: Callable[[], bool] = lambda: False
) -> Digest | None:
    """(size, sha256) of a file, read once; None when one of the stretches is not in it.

    Ends early, with a wrong result, once `stopped` says so. Raises DataError when it cannot be
    read.
    """
    left, active, whole = sorted(stretches, key=lambda s: -s.offset), _Active(), hashlib.sha256()
    edges = sorted({0, *(s.offset for s in left), *(s.offset + s.size for s in left)})
    position = 0
    try:
        with storage.open_bytes(path, _FETCHED_BYTES) as file:
            for begin, end in zip(edges, [*edges[1:], None], strict=True):
                while left and left[-1].offset == begin:
                    active.begin(left.pop())
                size = None if end is None else end - begin
                position += _feed(file, size, [whole, *active.hashes], stopped)
                if stopped():
                    break
                if not active.end(begin if end is None else end):
                    return None
    except OSError as error:
        raise from_os_error(error, path, "read") from error
    return position, whole.hexdigest()


def holds(
    path: str, stretches: Iterable[Stretch], stopped: Callable[[], bool] = lambda: False
) -> bool:
    """Whether a file has these stretches; reads no more of it. Raises DataError."""
    try:
        with storage.open_bytes(path, _FETCHED_BYTES) as file:
            for stretch in stretches:
                file.seek(stretch.offset)
                sha = hashlib.sha256()
                if _feed(file, stretch.size, [sha], stopped) != stretch.size:
                    return stopped()
                if sha.hexdigest() != stretch.sha256:
                    return False
    except OSError as error:
        raise from_os_error(error, path, "read") from error
    return True


class _Active:
    """The stretches that contain the current place in a file."""

    def __init__(self) -> None:
        self._open: list[tuple[Stretch, Any]] = []

    @property
    def hashes(self) -> list[Any]:
        return [sha for _, sha in self._open]

    def begin(self, stretch: Stretch) -> None:
        self._open.append((stretch, hashlib.sha256()))

    def end(self, position: int) -> bool:
        """Whether those that end here have their digests."""
        ended = [one for one in self._open if one[0].offset + one[0].size <= position]
        self._open = [one for one in self._open if one[0].offset + one[0].size > position]
        return all(sha.hexdigest() == stretch.sha256 for stretch, sha in ended)


def _feed(file: IO[bytes], size: int | None, hashes: list[Any], stopped: Callable[[], bool]) -> int:
    """Hash `size` bytes, or with None all that are left; returns how many there were."""
    done = 0
    while size is None or done < size:
        data = file.read(_BLOCK_BYTES if size is None else min(size - done, _BLOCK_BYTES))
        if not data or stopped():
            break
        for sha in hashes:
            sha.update(data)
        done += len(data)
    return done


def as_packed_in(folder: Path) -> IsSame:
    """A function that says whether an input still holds what was packed of it.

    `folder`: the directory of a result, or the work folder of a run. Where nothing was packed of
    an input, it counts as the same. The function raises DataError for inputs that cannot be read.
    """

    @cache
    def known() -> tuple[dict[int, Digest], dict[int, list[Stretch]]]:
        if (folder / RUN).exists():  # a work folder
            return commits.digests_in(folder), commits.stretches_in(folder)
        return _digests_of_result(folder), {}

    def is_same(then: InputFile, now: InputFile) -> bool:
        if then.has_changed(now) or then.is_surely(now):
            return not then.has_changed(now)
        digests, stretches = known()
        if then.index in digests:
            return digest(now.path) == digests[then.index]
        return holds(now.path, stretches.get(then.index, ()))

    return is_same


def _digests_of_result(folder: Path) -> dict[int, Digest]:
    try:
        inputs = load_any(folder, incomplete_too=True, half_too=True).inputs
    except PackerError:
        return {}
    return {index: (one.size, one.sha256) for index, one in enumerate(inputs)}
