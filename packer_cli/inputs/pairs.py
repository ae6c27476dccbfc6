"""Inputs that are several files: one of tokens, which names them all, and an index beside it.

Only the first is an input; the others are looked at with it: one that changes changes the input.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from packer_cli import storage
from packer_cli.config.formats import belongs_to, companions, format_of
from packer_cli.errors import DataError
from packer_cli.records import InputFile, Notify

_VERSION_BYTES = 7


def without_companions(paths: list[str]) -> Iterator[str]:
    """The paths, and for each index and the like the file that it belongs to, named once.

    Raises DataError where that is not there.
    """
    named = set(paths)
    for path in paths:
        main = belongs_to(path)
        if main is None:
            yield path
        elif main not in named:
            named.add(main)
            if not storage.is_file(main):
                raise alone(path, main)
            yield main


def is_pair(file: InputFile) -> bool:
    return bool(file.format and companions(file.path, file.format))


def alone(path: str, other: str) -> DataError:
    return DataError(
        f"{path}: expected {storage.base_name(other)} beside it, there is none",
        "copy that there, too: neither means anything without the other",
    )


def is_input_by_name(
    name: str,
    names: set[str],
    folder: str,
    notify: Notify,
    *,
    documents: bool = False,
) -> bool:
    """Whether a file of a folder with these names is an input, as far as the names tell.

    An index without what it belongs to is one, so that somebody is told. A lone file with the
    ending of a pair may be anything, unless there are other pairs. `documents`: as `format_of`.
    """
    file_format, compression = format_of(name, documents=documents)
    if file_format is None:
        main = belongs_to(name)
        kind = format_of(main)[0] if main else None
        return bool(main and kind and main not in names and companions(main, kind)[0] == name)
    beside = companions(name, file_format)
    if not beside or beside[0] in names:
        return True
    if compression is None and any(map(belongs_to, names)):
        return True
    notify(f"{storage.join(folder, name)}: left out: there is no {beside[0]} beside it")
    return False


def status_of(path: str, file_format: str, *, again: bool = False) -> tuple[storage.Stat, int]:
    """What is known of a file and those that belong to it, and when any of them last changed.

    The size is the file's own. Raises OSError, for URLs PackerError; DataError where the index is
    not there.
    """
    status = storage.stat(path, again=again)
    beside = companions(path, file_format)
    if not beside:
        return status, max(status.version, status.ctime_ns)
    if not storage.is_file(beside[0]):
        raise alone(path, beside[0])
    there = [storage.stat(one, again=again) for one in beside if storage.is_file(one)]
    versions = repr([(one.size, one.version) for one in (status, *there)])
    digest = hashlib.sha256(versions.encode()).digest()
    changed = max(one.ctime_ns for one in (status, *there))
    latest = max(changed, *(one.version for one in (status, *there)))
    version = int.from_bytes(digest[:_VERSION_BYTES], "big")
    return status._replace(version=version, ctime_ns=changed), latest
