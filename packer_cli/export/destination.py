"""The output of an export: complete under its name, or not there.

    OUT.packer-partial/<id>/new   what is being written, in a folder of packer's (ownership.py)
    OUT.packer-partial/<id>/old   what --overwrite is replacing, where it cannot be exchanged
    OUT                           gets its name by one rename, once everything is on the disk

An earlier export and the new one change places in one step where the system can (RENAME_EXCHANGE:
ext4, XFS, Btrfs, tmpfs), and by two renames elsewhere. `.packer-export.json` in an export lists its
files with their digests. An export in which there is anything else is not replaced. Trainers do not
look at hidden files.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from packer_cli.durable import make_folders, sync
from packer_cli.errors import UsageError, from_os_error
from packer_cli.locks import LOCK, locked_folder
from packer_cli.ownership import (
    Folder,
    Listed,
    OwnFolder,
    file_digest,
    in_the_way,
    remove_leftovers,
    unchanged,
)

MARKER = ".packer-export.json"
_NEW, _OLD = "new", "old"
_OWN_FILES = re.compile(LOCK)
_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)


@contextmanager
def new_directory(
    output: Path,
    source: Path,
    details: dict[str, str] | None,
    *,
    overwrite: bool,
    no_lock: bool = False,
) -> Iterator[Path]:
    """An empty folder that becomes `output` at the end; on failure nothing is left.

    `details`: what the marker records about the export; None: there is no marker, and no export
    replaces it. Raises UsageError for an output that must
    not be replaced, InUseError when another export is writing to it.
    """
    real, own_source = Path(os.path.realpath(output)), Path(os.path.realpath(source))
    if real.is_relative_to(own_source):
        raise UsageError(
            f"{output}: lies in the directory that is exported", "choose another --output"
        )
    try:
        _refuse_taken(output, overwrite)
        make_folders(real.parent)
        with ExitStack() as stack:
            parent = stack.enter_context(Folder(real.parent))
            own = stack.enter_context(_claimed(parent, real, output, no_lock))
            _refuse_taken(output, overwrite)  # now that no other export can change it
            work = own.inside.path / _NEW
            work.mkdir()
            yield work
            if details is not None:
                _write_marker(work, details)
            for path in work.rglob("*"):
                sync(path)
            sync(work)
            _refuse_taken(output, overwrite, closely=True)  # the last check may have been hours ago
            _put_in_place(parent, own, real, output)
            if os.access(real.parent, os.R_OK):
                parent.sync()
    except OSError as error:
        raise from_os_error(error, output, "write") from error


@contextmanager
def _claimed(parent: Folder, real: Path, output: Path, no_lock: bool) -> Iterator[OwnFolder]:
    """The folder to write in, empty but for its lock; it is gone afterwards."""
    name = real.name + ".packer-partial"
    with ExitStack() as stack:
        try:
            own = stack.enter_context(locked_folder(parent, name, output, without=no_lock))
        except PermissionError as error:
            raise from_os_error(error, real.parent, "write") from error
        try:
            _settle(parent, own, real)
            yield own
        finally:
            _settle(parent, own, real)
            own.remove(_OWN_FILES)
            remove_leftovers(parent, name, _OWN_FILES)


def _settle(parent: Folder, own: OwnFolder, real: Path) -> None:
    """Put an export that was being replaced back in its place, or remove it if it was replaced;
    remove what was not finished.
    """
    if own.inside.status(_OLD) is not None:
        taken = parent.status(real.name) is not None and os.listdir(real)
        if not taken:
            own.inside.rename(_OLD, parent, real.name)
    for name in (_NEW, _OLD):
        path = own.inside.path / name
        if own.inside.status(name) is not None:
            if (path / MARKER).exists() and (names := _strangers(path)):
                raise in_the_way(path, names)
            with suppress(OSError):  # the next export will do it
                shutil.rmtree(path)


def _put_in_place(parent: Folder, own: OwnFolder, real: Path, output: Path) -> None:
    if not (real.exists() and os.listdir(real)):
        own.inside.rename(_NEW, parent, real.name)  # replaces an empty directory, and no other
        return
    if not _exchange(own.inside, _NEW, parent, real.name):
        parent.rename(real.name, own.inside, _OLD)
        own.inside.rename(_NEW, parent, real.name)
        return
    if names := _strangers(own.inside.path / _NEW):  # files that were added at this very moment
        _exchange(own.inside, _NEW, parent, real.name)
        raise in_the_way(output, names)


def _exchange(folder: Folder, name: str, other: Folder, new: str) -> bool:
    """Exchange two directories in one step; False where the system cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    places = folder.descriptor, os.fsencode(name), other.descriptor, os.fsencode(new)
    if call(*places, _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), new)


def _write_marker(work: Path, details: dict[str, str]) -> None:
    files = {}
    for path in sorted(_files(work)):
        with Folder(path.parent) as folder:
            files[str(path.relative_to(work))] = path.stat().st_size, file_digest(folder, path.name)
    (work / MARKER).write_text(json.dumps(details | {"files": files}, indent=1))


def _refuse_taken(output: Path, overwrite: bool, *, closely: bool = False) -> None:
    if not output.exists():
        return
    if not output.is_dir():
        raise UsageError(f"{output}: exists and is not a directory", "choose another --output")
    if os.path.ismount(os.path.realpath(output)):  # nothing can be renamed to it
        raise UsageError(f"{output}: is a mount point", "choose a directory inside it")
    if not os.listdir(output):
        return
    if _listed(output) is None:
        raise UsageError(
            f"{output}: is not empty, and not an export of packer",
            "choose another --output; --overwrite only replaces what packer made",
        )
    if not overwrite:
        raise UsageError(
            f"{output}: holds a finished export",
            "choose another --output, or replace it with --overwrite",
        )
    if names := _strangers(output, closely=closely):
        raise in_the_way(output, names)


def _listed(folder: Path) -> dict[str, Listed] | None:
    """The files of an export as its marker lists them."""
    try:
        with Folder(folder) as opened:
            files = json.loads(opened.read(MARKER) or b"")["files"]
        return {str(name): Listed(int(size), str(sha)) for name, (size, sha) in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _strangers(export: Path, *, closely: bool = False) -> list[str]:
    """The names in an export that are not what its marker lists: by name and kind and, if
    `closely`, by size and content.
    """
    listed = _listed(export) or {}
    folders = {str(parent) for name in listed for parent in Path(name).parents}
    names = []
    for path in sorted(export.rglob("*")):
        name = str(path.relative_to(export))
        if path.is_dir() and not path.is_symlink():
            own = name in folders
        elif name == MARKER:
            own = not path.is_symlink()
        else:
            with Folder(path.parent) as folder:
                own = name in listed and folder.is_file(path.name)
                own = own and (not closely or unchanged(folder, path.name, listed[name]))
        if not own:
            names.append(name)
    return names


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
