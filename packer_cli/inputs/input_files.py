"""One input: its format and size, and whether it is still what it was when the run began.

Some are several files: one of tokens, and an index and the like beside it. Only the first is an
input; the others are looked at with it: one that changes changes the input.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from packer_cli import storage
from packer_cli.errors import DamagedInputError, DataError, InputChangedError, UsageError
from packer_cli.inputs.byte_streams import STDIN, refusals
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.formats import (
    FORMATS,
    JSON,
    belongs_to,
    companions,
    format_named,
    format_of,
)
from packer_cli.records import InputFile, Notify
from packer_cli.result.layout import DOCUMENTS_SHARD, MANIFEST
from packer_cli.result.manifest import TOKENIZED, holds_documents

# The coarsest clock of any file system in use: FAT's.
_TICK_NS = 2_000_000_000
_VERSION_BYTES = 7


def input_file(index: int, path: str, config: DocumentConfig) -> InputFile:
    """The description of an input. UsageError or DataError when it cannot be read."""
    if path == STDIN:
        if sys.stdin is None:
            raise UsageError("-: stdin is closed", "pipe data to it, or name a file")
        name = config.input_format or JSON
        if not format_named(name).streamed:
            raise UsageError(f"-: {name} cannot be read from stdin", "name the file instead")
        return _of_content(InputFile(index, path, name, None, 0, 0))
    file_format, compression = _format_of(path, config)
    try:
        path.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{os.fsencode(path)!r}: the name is not UTF-8, so no manifest can hold it",
            "rename the file, or name a symbolic link to it",
        ) from None
    file = InputFile(index, path, file_format, compression, 0, 0)
    with refusals(path):
        file, is_regular, latest = _as_it_is(file)
        if not is_regular:
            raise UsageError(
                f"{path}: not a regular file, so it cannot be read twice",
                "pipe it to stdin: COMMAND | packer pack - ...",
            )
        storage.open_bytes(path).close()
    return _of_content(replace(file, racy=bool(file.inode) and latest > time.time_ns() - _TICK_NS))


def _format_of(path: str, config: DocumentConfig) -> tuple[str, str | None]:
    """(format, compression) of an input; a tokenized directory is named by its manifest. UsageError
    where the name does not tell, or the format is not read so.
    """
    name = storage.base_name(path)
    if name == MANIFEST and holds_documents(path):
        return TOKENIZED, None
    if DOCUMENTS_SHARD.match(name):
        folder = path[: -len(name)].rstrip("/") or "."
        raise UsageError(
            f"{path}: is a shard of a tokenized directory, and not to be packed without the others",
            f"name the directory: packer pack {folder}; if that has no {MANIFEST}, tokenize again",
        )
    by_name, compression = format_of(path, documents=config.whole_files)
    file_format = config.input_format or by_name
    if file_format is None and format_of(path, documents=True)[0]:
        raise UsageError(
            f"{path}: may be one document or one in each line",
            "add --sample-by document, or --input-format text",
        )
    if file_format is None:
        raise UsageError(
            f"{path}: cannot tell the format from the name",
            f"give it with --input-format: {', '.join(FORMATS)}",
        )
    if compression and not format_named(file_format).streamed:
        raise UsageError(
            f"{path}: {file_format} files are not read through {compression}", "decompress it first"
        )
    return file_format, compression


def _of_content(file: InputFile) -> InputFile:
    """The file; as JSON lines if it is JSON and holds no array. Raises DataError."""
    if file.format != JSON:
        return file
    from packer_cli.inputs.jsonl import holds_array  # noqa: PLC0415

    try:
        return file if holds_array(file) else replace(file, format="jsonl")
    except DamagedInputError:  # whoever reads its records says so
        return replace(file, format="jsonl")


def _as_it_is(file: InputFile, *, again: bool = False) -> tuple[InputFile, bool, int]:
    """The file as it is now, whether it is regular, and when it, or what belongs to it, last
    changed. Raises OSError, for URLs PackerError; DataError where the index is not there.
    """
    status = storage.stat(file.path, again=again)
    each, version = [status], status.version
    if beside := companions(file.path, file.format):
        if not storage.is_file(beside[0]):
            raise _alone(file.path, beside[0])
        each += [storage.stat(one, again=again) for one in beside if storage.is_file(one)]
        versions = repr([(one.size, one.version) for one in each])
        digest = hashlib.sha256(versions.encode()).digest()
        version = int.from_bytes(digest[:_VERSION_BYTES], "big")
    changed_at = max(one.ctime_ns for one in each)
    now = replace(
        file, size=status.size, mtime_ns=version,
        ctime_ns=changed_at, device=status.device, inode=status.inode,
    )  # fmt: skip
    return now, status.regular, max(changed_at, *(one.version for one in each))


def check_unchanged(file: InputFile) -> bool:
    """True where a file is surely what it was when the run began; False where its contents
    must tell. Raises InputChangedError when it is surely another.
    """
    if file.path == STDIN:
        return True
    with refusals(file.path):
        now, _, _ = _as_it_is(file, again=True)
    if file.has_changed(now):
        raise changed(file, f"{file.size} bytes, now {now.size}")
    return file.looks_like(now)


def changed(file: InputFile, how: str) -> InputChangedError:
    """The error for an input that is not what it was when the run began."""
    return InputChangedError(
        f"{file.path}: changed while it was read ({how})",
        "wait until nothing writes to it, then run again",
    )


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
                raise _alone(path, main)
            yield main


def is_pair(file: InputFile) -> bool:
    return bool(file.format and companions(file.path, file.format))


def _alone(path: str, other: str) -> DataError:
    return DataError(
        f"{path}: expected {storage.base_name(other)} beside it, there is none",
        "copy that there, too: neither means anything without the other",
    )


def is_input_by_name(
    name: str, names: set[str], folder: str, notify: Notify, *, documents: bool = False
) -> bool:
    """True where a file of a folder with these names is an input, as far as the names tell.

    An index without what it belongs to is one, so that somebody is told. A lone file with the
    ending of a pair may be anything, unless there are other pairs. `documents`: as `format_of`.
    """
    file_format, compression = format_of(name, documents=documents)
    if file_format is None:
        main = belongs_to(name)
        kind = format_of(main)[0] if main else None
        return bool(main and kind and main not in names and companions(main, kind)[0] == name)
    beside = companions(name, file_format)
    if not beside or beside[0] in names or (compression is None and any(map(belongs_to, names))):
        return True
    notify(f"{storage.join(folder, name)}: left out: there is no {beside[0]} beside it")
    return False
