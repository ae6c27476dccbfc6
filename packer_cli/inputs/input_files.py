"""One input: its format and size, and whether it is still what it was when the run began."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace

from packer_cli import storage
from packer_cli.config.documents import DocumentConfig
from packer_cli.config.formats import FORMATS, JSON, format_named, format_of
from packer_cli.errors import DamagedInputError, InputChangedError, UsageError, from_os_error
from packer_cli.inputs.byte_streams import STDIN
from packer_cli.inputs.pairs import status_of
from packer_cli.records import InputFile
from packer_cli.result.layout import DOCUMENTS_SHARD, MANIFEST
from packer_cli.result.manifest import TOKENIZED
from packer_cli.result.manifest_file import holds_documents

# The coarsest clock of any file system in use: FAT's.
_TICK_NS = 2_000_000_000


def input_file(index: int, path: str, config: DocumentConfig) -> InputFile:
    """The description of an input. UsageError or DataError when it cannot be read."""
    if path == STDIN:
        if sys.stdin is None:
            raise UsageError("-: stdin is closed", "pipe data to it, or name a file")
        name = config.input_format or JSON
        if not format_named(name).streamed:
            raise UsageError(f"-: {name} cannot be read from stdin", "name the file instead")
        return _of_content(InputFile(index, path, name, None, 0, 0))
    if DOCUMENTS_SHARD.match(storage.base_name(path)):
        folder = path[: -len(storage.base_name(path))].rstrip("/") or "."
        raise UsageError(
            f"{path}: is a shard of a tokenized directory, and not to be packed without the others",
            f"name the directory: packer pack {folder}; if that has no {MANIFEST}, tokenize again",
        )
    file_format, compression = _format_of(path, config)
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
    try:
        path.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{os.fsencode(path)!r}: the name is not UTF-8, so no manifest can hold it",
            "rename the file, or name a symbolic link to it",
        ) from None
    try:
        status, latest = status_of(path, file_format)
        if not status.regular:
            raise UsageError(
                f"{path}: not a regular file, so it cannot be read twice",
                "pipe it to stdin: COMMAND | packer pack - ...",
            )
        with storage.open_bytes(path):
            pass
    except OSError as error:
        raise from_os_error(error, path, "read") from error
    racy = bool(status.inode) and latest > time.time_ns() - _TICK_NS
    file = InputFile(index, path, file_format, compression, 0, 0, racy=racy)
    return _of_content(_identified(file, status))


def _format_of(path: str, config: DocumentConfig) -> tuple[str | None, str | None]:
    """(format, compression) of an input; a tokenized directory is named by its manifest."""
    if storage.base_name(path) == MANIFEST and holds_documents(path):
        return TOKENIZED, None
    file_format, compression = format_of(path, documents=config.whole_files)
    return config.input_format or file_format, compression


def _of_content(file: InputFile) -> InputFile:
    """The same, JSON files that hold no array as JSON lines. Raises DataError."""
    if file.format != JSON:
        return file
    from packer_cli.inputs.json_array import holds_array  # noqa: PLC0415

    try:
        is_array = holds_array(file)
    except DamagedInputError:  # whoever reads its records says so
        is_array = False
    if is_array:
        return file
    return replace(file, format="jsonl")


def _identified(file: InputFile, status: storage.Stat) -> InputFile:
    return replace(
        file, size=status.size, mtime_ns=status.version,
        ctime_ns=status.ctime_ns, device=status.device, inode=status.inode,
    )  # fmt: skip


def check_unchanged(file: InputFile) -> bool:
    """Whether a file is surely what it was when the run began; False where its contents
    must tell. Raises InputChangedError when it is surely another.
    """
    if file.path == STDIN:
        return True
    try:
        now = _identified(file, status_of(file.path, file.format, again=True)[0])
    except OSError as error:
        raise from_os_error(error, file.path, "read") from error
    if file.has_changed(now):
        raise changed(file, f"{file.size} bytes, now {now.size}")
    return file.looks_like(now)


def changed(file: InputFile, how: str) -> InputChangedError:
    """The error for an input that is not what it was when the run began."""
    return InputChangedError(
        f"{file.path}: changed while it was read ({how})",
        "wait until nothing writes to it, then run again",
    )
