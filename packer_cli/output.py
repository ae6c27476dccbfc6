"""The output directory: who may write to it, what may be removed, and when it is complete.

    OUT/.packer/   exists from the first byte to the last; a run works in there
    OUT/manifest.json   is written last, by rename: with it the result is complete

Only files that packer itself makes are ever removed, and only from a directory that packer
itself made.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from packer_cli.errors import DataError, UsageError, from_os_error
from packer_cli.manifest import MANIFEST, is_manifest
from packer_cli.records import InputFile

WORK = ".packer"
_LOCK = "lock"
_OURS = (
    "shard-*-*.arrow", MANIFEST, "state.json", "dataset_info.json", "rejected.jsonl",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
)  # fmt: skip


@contextmanager
def claimed(
    output: Path, files: list[InputFile], *, overwrite: bool, notify: Callable[[str], None]
) -> Iterator[Path]:
    """Make `output` ready and ours; gives its work folder, removed again on success.

    Raises UsageError when the directory holds something that must not be replaced, DataError
    when another run is writing to it.
    """
    _refuse_inputs_inside(output, files)
    try:
        _refuse_foreign(output, overwrite)
        work = output / WORK
        unfinished = work.is_dir()
        work.mkdir(parents=True, exist_ok=True)
        with open(work / _LOCK, "w") as lock:  # the kernel frees it however the process ends
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataError(
                    f"{output}: another run is writing there",
                    "wait for it to end, or choose another --output",
                ) from None
            _refuse_foreign(output, overwrite)  # again, now that nobody else can change it
            if unfinished:
                notify(f"{output} holds an unfinished run; starting it again from the beginning")
            _remove_ours(output)
            yield work
            shutil.rmtree(work)
    except OSError as error:
        raise from_os_error(error, error.filename or output, "write") from error


def _refuse_inputs_inside(output: Path, files: list[InputFile]) -> None:
    real = os.path.realpath(output)
    for file in files:
        if os.path.realpath(file.path).startswith(real + os.sep):
            raise UsageError(
                f"{output}: the input {file.path} lies inside the output directory",
                "choose another --output",
            )


def _refuse_foreign(output: Path, overwrite: bool) -> None:
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output}: exists and is not a directory", "choose another --output")
    if not output.is_dir() or not os.listdir(output):
        return
    if is_manifest(output / MANIFEST):
        if not overwrite:
            raise UsageError(
                f"{output}: holds a finished result",
                "choose another --output, or replace it with --overwrite",
            )
    elif not (output / WORK).is_dir():
        raise UsageError(
            f"{output}: is not empty, and not a result of packer",
            "choose another --output; --overwrite only replaces what packer made",
        )


def _remove_ours(output: Path) -> None:
    # the manifest first: what is left then does not look finished
    (output / MANIFEST).unlink(missing_ok=True)
    for pattern in _OURS:
        for path in output.glob(pattern):
            path.unlink()
    for path in (output / WORK).iterdir():
        if path.name != _LOCK:
            path.unlink()


def write_file(path: Path, content: bytes) -> None:
    """Write by temporary file, fsync and rename: `path` is whole or absent."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise from_os_error(error, path, "write") from error


def publish(source: Path, target: Path) -> None:
    """Give a finished file its name, once its bytes are on the disk."""
    try:
        sync(source)
        os.replace(source, target)
    except OSError as error:
        raise from_os_error(error, target, "write") from error


def sync(path: Path) -> None:
    """Fsync a file or a directory."""
    descriptor: Any = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
