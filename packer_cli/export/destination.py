"""The output of an export: complete under its name, or not there.

    OUT.packer-partial/ID/new     what is being written, in a folder of packer's (ownership.py)
    OUT.packer-partial/ID/old     what --overwrite is replacing, where it cannot be exchanged
    OUT                           gets its name by one rename, once everything is on the disk

An earlier export and the new one change places in one step where the system can (RENAME_EXCHANGE:
ext4, XFS, Btrfs, tmpfs), and by two renames elsewhere. `.packer-export.json` in an export lists its
files with their sizes. An export in which there is anything else is not replaced. Trainers do not
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

import msgspec

from packer_cli.errors import UsageError, from_os_error
from packer_cli.options.option import refuse
from packer_cli.options.options import COLUMNS
from packer_cli.options.run_options import RunOptions
from packer_cli.ownership import (
    LOCK,
    Folder,
    in_the_way,
    make_folders,
    own_folder,
    put_file,
    remove_own,
    sync,
)
from packer_cli.result.layout import (
    DATASET_DICT,
    INCOMPLETE,
    MANIFEST,
    SHARD_NAME,
    SIDE_FILES,
)
from packer_cli.run.destination import clean, holds_result

MARKER = ".packer-export.json"
_PARTIAL, _NEW, _OLD = ".packer-partial", "new", "old"
_OWN_FILES = re.compile(LOCK)
_OF_TRAIN = "train/state.json"  # in the only folder that an export has
_HALF_MADE = re.compile(
    r"data-[0-9]{5,20}\.arrow|packed-[0-9]{5,20}(\.idx)?\.parquet|documents\.(bin|idx)"
    r"|packer\.json"
    rf"|({'|'.join(COLUMNS)}|carried_[\w.~%-]+)(_offsets)?\.npy"
    rf"|({SHARD_NAME}|{re.escape(MARKER)})(\.part)?"
    rf"|{'|'.join(map(re.escape, sorted(SIDE_FILES | {DATASET_DICT, MANIFEST, INCOMPLETE})))}"
)  # what exports write
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
    replaces it. Raises UsageError for an output that must not be replaced, InUseError when another
    export is writing to it.
    """
    real = Path(os.path.realpath(output))
    if real.is_relative_to(os.path.realpath(source)):
        raise UsageError(
            f"{output}: lies in the directory that is exported", "choose another --output"
        )
    if os.path.ismount(real):  # nothing can be renamed to it
        raise UsageError(f"{output}: is a mount point", "choose a directory inside it")
    if real.exists() and not real.is_dir():
        raise UsageError(f"{output}: exists and is not a directory", "choose another --output")
    clean(real, RunOptions(no_lock=no_lock))
    name = real.name + _PARTIAL
    try:
        make_folders(real.parent)
        with ExitStack() as stack:
            parent = stack.enter_context(Folder(real.parent, no_lock=no_lock))
            inside = stack.enter_context(own_folder(parent, name, output))
            stack.callback(remove_own, parent, name, inside, _OWN_FILES)
            stack.callback(_settle, parent, inside, real)
            _settle(parent, inside, real)
            _refuse_taken(output, overwrite)
            work = inside.path / _NEW
            work.mkdir()
            yield work
            if details is not None:
                paths = [path for path in sorted(work.rglob("*")) if path.is_file()]
                files = {str(path.relative_to(work)): path.stat().st_size for path in paths}
                put_file(work / MARKER, json.dumps(details | {"files": files}, indent=1).encode())
            for path in (*work.rglob("*"), work):
                sync(path)
            _refuse_taken(output, overwrite)  # the last check may have been hours ago
            _put_in_place(parent, inside, real, output)
            if os.access(real.parent, os.R_OK):
                parent.sync()
    except OSError as error:
        raise from_os_error(error, output, "write") from error


def _settle(parent: Folder, inside: Folder, real: Path) -> None:
    """Put an export that was being replaced back in its place, or remove it if it was replaced;
    remove what was not finished.
    """
    taken = parent.status(real.name) is not None and os.listdir(real)
    if inside.status(_OLD) is not None and not taken:
        inside.rename(_OLD, parent, real.name)
    for path in (inside.path / _NEW, inside.path / _OLD):
        if path.exists():
            if names := _strangers(path):
                raise in_the_way(path, names)
            with suppress(OSError):  # the next export will do it
                shutil.rmtree(path)


def _put_in_place(parent: Folder, inside: Folder, real: Path, output: Path) -> None:
    if not (real.exists() and os.listdir(real)):
        inside.rename(_NEW, parent, real.name)  # replaces an empty directory, and no other
    elif not _exchange(inside, _NEW, parent, real.name):
        parent.rename(real.name, inside, _OLD)
        inside.rename(_NEW, parent, real.name)
    elif names := _strangers(inside.path / _NEW):  # files that were added at this very moment
        _exchange(inside, _NEW, parent, real.name)
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


def _refuse_taken(output: Path, overwrite: bool) -> None:
    tip = "choose another --output"
    if not output.exists() or not os.listdir(output):
        return
    refuse([
        (
            holds_result(output),
            f"{output}: holds a finished result, and --overwrite replaces exports only",
            tip,
        ),
        (
            _listed(output) is None,
            f"{output}: is not empty, and not an export of packer",
            f"{tip}; --overwrite only replaces what packer made",
        ),
        (
            not overwrite,
            f"{output}: holds a finished export",
            f"{tip}, or replace it with --overwrite",
        ),
    ])  # fmt: skip
    if names := _strangers(output, by_size=True):
        raise in_the_way(output, names)


class _Marker(msgspec.Struct):
    files: dict[str, int]


def _listed(export: Path) -> dict[str, int] | None:
    try:
        with Folder(export) as folder:
            return msgspec.json.decode(folder.read(MARKER) or b"", type=_Marker).files
    except (ValueError, RecursionError):
        return None


def _strangers(export: Path, *, by_size: bool = False) -> list[str]:
    """The names in an export that are not what its marker lists: by name and kind and, if
    `by_size`, by size. Without a marker: those that exports do not write.
    """
    names, listed = [], _listed(export)
    folders = {str(parent) for name in listed or [_OF_TRAIN] for parent in Path(name).parents}
    for path in sorted(export.rglob("*")):
        name = str(path.relative_to(export))
        with Folder(path.parent) as folder:
            if path.is_dir() and not path.is_symlink():
                own = name in folders
            elif listed is None or name == MARKER:
                own = folder.is_file(path.name) and bool(_HALF_MADE.fullmatch(path.name))
            else:
                own = name in listed and folder.is_file(path.name)
                own = own and (not by_size or path.lstat().st_size == listed[name])
        if not own:
            names.append(name)
    return names
