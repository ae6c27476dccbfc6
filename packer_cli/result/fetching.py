"""Fetching an object of a store whole: in ranges, with patience, and checked by its digest.

What may pass (a connection that is cut, a server's error) is tried again, a bounded number of times
and after ever longer waits, besides what the store's own package does. What does not pass ends in a
DataError at once: an object that is not there or may not be read, and content that is not what was
asked for.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

from packer_cli import storage
from packer_cli.errors import DataError, PackerError

RANGE_BYTES = 8 << 20
_AT_ONCE = 4  # ranges, so that 32 MiB are held in memory
TRIES = 3  # each of which the store's package may repeat by itself, as s3fs does
_FIRST_WAIT = 0.5
_LASTING = (FileNotFoundError, PermissionError, NotImplementedError, TypeError, ValueError)
UPLOAD_AGAIN = "remove the object and upload it again; if the result was replaced, open it again"

_T = TypeVar("_T")


class Wanted(NamedTuple):
    """A file of a result at a URL. `size` None: it is not known, and not to be fetched so."""

    url: str
    size: int | None
    sha256: str


class DifferentError(DataError):
    """What is at a URL is not what the manifest says."""


def patiently(ask: Callable[[], _T]) -> _T:
    """Ask a store, again if it may help. Raises what it raised the last time."""
    for attempt in range(1, TRIES + 1):
        try:
            return ask()
        except DataError as error:
            if not _may_pass(error):
                raise
            if attempt == TRIES:
                raise DataError(f"{error.message} (tried {TRIES} times)", error.tip) from error
        longest = _FIRST_WAIT * 2**attempt
        time.sleep(random.uniform(longest / 2, longest))  # noqa: S311 apart from other processes
    raise AssertionError


def _may_pass(error: DataError) -> bool:
    """Whether it came from a store, and is not certain to come again."""
    cause = error.__cause__
    if cause is None or isinstance(cause, (*_LASTING, PackerError)):
        return False
    return "credential" not in type(cause).__name__.lower()


def fetch(wanted: Wanted, descriptor: int, stopped: Callable[[], bool] = lambda: False) -> bool:
    """Write an object to a file, from its beginning; False once `stopped` says so.

    The file has its content, and so has the disk, if True comes back. Raises DataError for one that
    is another, even when it is fetched once more, and for whatever the store says; OSError for the
    file.
    """
    try:
        try:
            return _fetched(wanted, descriptor, stopped)
        except DifferentError:  # replaced while it was fetched, perhaps
            return _fetched(wanted, descriptor, stopped)
    except DifferentError:
        raise
    except DataError as error:
        if different := _different_size(wanted):
            raise different from error
        raise


def _fetched(wanted: Wanted, descriptor: int, stopped: Callable[[], bool]) -> bool:
    size = wanted.size or 0
    sha, at = hashlib.sha256(), 0
    for first in range(0, size, _AT_ONCE * RANGE_BYTES):
        if stopped():
            return False
        begins = range(first, min(first + _AT_ONCE * RANGE_BYTES, size), RANGE_BYTES)
        for block in _blocks(wanted.url, [(b, min(b + RANGE_BYTES, size)) for b in begins]):
            sha.update(block)
            view = memoryview(block)
            while view:
                count = os.pwrite(descriptor, view, at)
                view, at = view[count:], at + count
    if sha.hexdigest() != wanted.sha256:
        raise DifferentError(
            f"{wanted.url}: its sha256 is {sha.hexdigest()}, the manifest says {wanted.sha256}",
            UPLOAD_AGAIN,
        )
    os.ftruncate(descriptor, size)
    os.fsync(descriptor)
    return True


def _blocks(url: str, spans: list[tuple[int, int]]) -> Iterable[bytes]:
    """Ranges of an object, at the same time; one by one, where that fails."""
    try:
        return storage.ranges(url, spans)
    except DataError as error:
        if not _may_pass(error):
            raise
    return (patiently(partial(storage.ranges, url, [span]))[0] for span in spans)


def _different_size(wanted: Wanted) -> DifferentError | None:
    """The error for an object that is there, but longer or shorter than the manifest says."""
    with suppress(PackerError):
        found = storage.stat(wanted.url, again=True).size
        if wanted.size not in (None, found):
            return DifferentError(
                f"{wanted.url}: has {found} bytes, the manifest says {wanted.size}", UPLOAD_AGAIN
            )
    return None
