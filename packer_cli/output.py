"""The output directory: who may write to it, what may be removed, and when it is complete.

    OUT/.packer/        a run writes everything in here, and leaves no trace of it at its end
    OUT/manifest.json   gets there last, by rename: with it the result is complete

An earlier result stays whole and readable until `replace` puts the new one in its place. Only
files that packer itself makes are ever removed, and only from a directory that packer itself made.
As long as a directory holds files but no manifest, .packer stays in it to say whose they are.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from packer_cli.errors import DataError, UsageError, from_os_error
from packer_cli.manifest import INCOMPLETE, MANIFEST, is_manifest
from packer_cli.readers.byte_streams import STDIN
from packer_cli.records import InputFile

WORK = ".packer"
_LOCK = "lock"
_OURS = (
    "shard-*-*.arrow", MANIFEST, INCOMPLETE, "state.json", "dataset_info.json", "rejected.jsonl",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
)  # fmt: skip


@contextmanager
def claimed(
    output: Path, files: list[InputFile], *, overwrite: bool, notify: Callable[[str], None]
) -> Iterator[Path]:
    """Make `output` ours; gives its empty work folder, removed again however the run ends.

    Raises UsageError when the directory holds something that must not be replaced, DataError
    when another run is writing to it.
    """
    _refuse_inputs_inside(output, files)
    try:
        _refuse_foreign(output, overwrite)
        work = output / WORK
        created, unfinished = not output.exists(), work.is_dir()
        with _locked(work, notify):
            try:
                _refuse_foreign(output, overwrite)  # again, now that nobody else can change it
                if unfinished:
                    notify(
                        f"{output} holds an unfinished run; starting it again from the beginning"
                    )
                _empty(work)
                yield work
            finally:
                # A whole manifest in here: `replace` may have removed the earlier result already.
                if not is_manifest(work / MANIFEST):
                    _remove(output, created)
    except OSError as error:
        raise from_os_error(error, error.filename or output, "write") from error


def _locked(work: Path, notify: Callable[[str], None]) -> IO[str]:
    """Make the work folder and open its lock, held until closed or until the process ends."""
    for _ in range(100):
        try:
            work.mkdir(parents=True, exist_ok=True)
            lock = open(work / _LOCK, "w")  # noqa: SIM115
        except FileNotFoundError:
            continue  # a run that ended just now took its folder with it
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            break
        except OSError as error:  # some network file systems have no locks
            notify(f"{work} cannot be locked ({error.strerror}); let no other run write there")
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(work / _LOCK)):
                return lock
        lock.close()  # of that run, too: nobody else would meet us at it
    raise DataError(
        f"{work.parent}: another run is writing there",
        "wait for it to end, or choose another --output",
    )


def _refuse_inputs_inside(output: Path, files: list[InputFile]) -> None:
    real = os.path.realpath(output)
    for file in files:
        if file.path != STDIN and os.path.realpath(file.path).startswith(real + os.sep):
            raise UsageError(
                f"{output}: the input {file.path} lies inside the output directory",
                "choose another --output",
            )


def _refuse_foreign(output: Path, overwrite: bool) -> None:
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output}: exists and is not a directory", "choose another --output")
    if not output.is_dir() or not os.listdir(output):
        return
    if _holds_result(output):
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


def _empty(work: Path) -> None:
    for path in work.iterdir():
        if path.name != _LOCK:
            path.unlink()


def _remove(output: Path, created: bool) -> None:
    """Remove the work folder, the lock last: whoever finds it gone must find all gone."""
    work = output / WORK
    with suppress(OSError):
        _empty(work)
        if _holds_result(output) or os.listdir(output) == [WORK]:
            (work / _LOCK).unlink()
            work.rmdir()
            if created:
                output.rmdir()  # unless it holds a result


def write_file(path: Path, content: bytes) -> None:
    """Write a file of the work folder, down to the disk."""
    try:
        with open(path, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise from_os_error(error, path, "write") from error


def sync(path: Path) -> None:
    """Bring a file or a directory to the disk (fsync)."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise from_os_error(error, path, "write") from error


def _holds_result(output: Path) -> bool:
    return is_manifest(output / MANIFEST) or is_manifest(output / INCOMPLETE)


def replace(output: Path, *, complete: bool = True) -> None:
    """Put the files of the work folder, the manifest last, in the place of the earlier result.

    The manifest of a result that is not `complete` gets a name that says so.

    Every file must be on the disk already. The old manifest goes first: whatever moment this
    ends at, a directory with a manifest is complete.
    """
    try:
        names = sorted(set(os.listdir(output / WORK)) - {_LOCK, MANIFEST})
        (output / MANIFEST).unlink(missing_ok=True)
        sync(output)
        for pattern in _OURS:
            for path in output.glob(pattern):
                path.unlink()
        for name in names:
            os.replace(output / WORK / name, output / name)
        sync(output)
        os.replace(output / WORK / MANIFEST, output / (MANIFEST if complete else INCOMPLETE))
        sync(output)
    except OSError as error:
        raise from_os_error(error, error.filename or output, "write") from error
