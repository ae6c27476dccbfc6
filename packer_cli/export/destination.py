"""The output of an export: all of it, or nothing that has its name.

    OUT.packer-partial   what is being written, locked meanwhile; one that a killed export left is
                         taken over by the next
    OUT                  gets its name by one rename, when all is on the disk
    OUT.packer-earlier   what --overwrite is replacing, between two renames

`.packer-export.json` is in each of them, the first and the last of its files: it names the others,
once they are whole, and nothing else is ever removed. Trainers do not look at hidden files.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from packer_cli.errors import UsageError, from_os_error
from packer_cli.output import InUseError, sync

MARKER = ".packer-export.json"


@contextmanager
def new_directory(
    output: Path, source: Path, said: dict[str, str], *, overwrite: bool
) -> Iterator[Path]:
    """An empty folder that becomes `output` at the end, and nothing when that is not reached.

    `said`: what the marker tells of the export. Raises UsageError for an output that must not be
    replaced, InUseError when another export is writing to it.
    """
    real, own = Path(os.path.realpath(output)), Path(os.path.realpath(source))
    if real.is_relative_to(own):
        raise UsageError(
            f"{output}: lies in the directory that is exported", "choose another --output"
        )
    try:
        _refuse_taken(output, overwrite)
        work = real.with_name(real.name + ".packer-partial")
        earlier = real.with_name(real.name + ".packer-earlier")
        _refuse_taken(earlier, overwrite=True)
        work.parent.mkdir(parents=True, exist_ok=True)
        with _claimed(work, output):
            try:
                _settle(earlier, real)
                _refuse_taken(output, overwrite)  # now that no other export can change it
                yield work
                files = sorted(str(path.relative_to(work)) for path in _files(work))
                (work / MARKER).write_text(json.dumps(said | {"files": files}, indent=1))
                for path in work.rglob("*"):
                    sync(path)
                sync(work)
                _refuse_taken(output, overwrite)  # that may have been hours ago
                if overwrite and real.exists():
                    real.rename(earlier)
                work.rename(real)  # takes the place of an empty directory, and of no other
                if os.access(real.parent, os.R_OK):
                    sync(real.parent)
            except BaseException:
                shutil.rmtree(work, ignore_errors=True)
                raise
            finally:
                _settle(earlier, real)
    except OSError as error:
        raise from_os_error(error, output, "write") from error


def _settle(earlier: Path, real: Path) -> None:
    """Put an export that was being replaced back in its place, or remove it if it was replaced."""
    if not earlier.exists():
        return
    if not real.exists() or not os.listdir(real):
        earlier.rename(real)
        return
    with suppress(OSError):  # the next export will do it
        _clear(earlier)
        shutil.rmtree(earlier)


def _clear(folder: Path) -> None:
    """Remove everything but the marker: who is killed meanwhile leaves what is known as ours."""
    for path in folder.iterdir():
        if path.name != MARKER:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _refuse_taken(output: Path, overwrite: bool) -> None:
    if not output.exists():
        return
    if not output.is_dir():
        raise UsageError(f"{output}: exists and is not a directory", "choose another --output")
    if os.path.ismount(os.path.realpath(output)):  # nothing can be renamed to it
        raise UsageError(f"{output}: is a mount point", "choose a directory inside it")
    if not os.listdir(output):
        return
    try:
        listed = set(json.loads((output / MARKER).read_bytes())["files"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(
            f"{output}: is not empty, and not an export of packer",
            "choose another --output; --overwrite only replaces what packer made",
        ) from None
    if not overwrite:
        raise UsageError(
            f"{output}: holds a finished export",
            "choose another --output, or replace it with --overwrite",
        )
    for path in _files(output):
        name = str(path.relative_to(output))
        if name not in listed and name != MARKER:
            raise UsageError(
                f"{output}: holds {name}, which packer did not make",
                "move it elsewhere, or choose another --output",
            )


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())


@contextmanager
def _claimed(work: Path, output: Path) -> Iterator[None]:
    """Make the folder `work`, or take over one that nobody is at work in, and lock it."""
    try:
        work.mkdir()
        free = True
    except FileExistsError:
        free = False
    except PermissionError as error:
        raise from_os_error(error, work.parent, "write") from error
    folder = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = os.path.samestat(os.fstat(folder), os.stat(work))
        except (BlockingIOError, FileNotFoundError):
            free = False
        except OSError:  # a file system without locks: it is ours if we made it
            pass
        if not free:
            raise InUseError(
                f"{output}: another export is writing there",
                f"wait for it to end, or choose another --output; if none is, remove {work}",
            )
        if os.listdir(work) and not (work / MARKER).exists():
            raise UsageError(
                f"{work}: is not empty, and was not left by an export",
                "move it elsewhere, or choose another --output",
            )
        (work / MARKER).touch()
        _clear(work)
        yield
    finally:
        os.close(folder)
