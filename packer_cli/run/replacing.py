"""How one result replaces another in a directory.

    OUT/.packer/<id>/replacing.json   run.json, from when all is packed until it is in its place
    OUT/.packer/<id>/earlier.json     which files of the earlier result are packer's

The new result lies in OUT beside the earlier one, no file of which has gone, when the rename of
the manifest makes it the result: readers find all of the one or all of the other. A rename of a
file is one step on every file system that people use, also where directories cannot be exchanged.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from packer_cli.durable import put_file
from packer_cli.errors import DataError, UsageError
from packer_cli.ownership import Folder, Listed, file_digest, in_the_way, unchanged
from packer_cli.result.layout import INCOMPLETE, INPUT_TIMES, MANIFEST, SIDE_FILES, is_result_file
from packer_cli.result.manifest import Result
from packer_cli.result.manifest_bytes import looks_like_one, parse, parse_unedited
from packer_cli.result.manifest_file import is_manifest
from packer_cli.run.commits import UNIT_RECORDS, read_unit_record
from packer_cli.run.identity import RUN, sealed, unsealed

REPLACING = "replacing.json"
_EARLIER = "earlier.json"
_TICK_SECONDS = 0.01  # after this long, a change has a later time on every file system


class Earlier(NamedTuple):
    """A result in the output. `status` is that of its manifest, the file `name`."""

    name: str
    manifest: Result
    status: os.stat_result


def holds_result(output: Path) -> bool:
    """Whether there is a finished result, even one that is marked incomplete."""
    return is_manifest(output / MANIFEST) or is_manifest(output / INCOMPLETE)


def earlier_result(folder: Folder) -> Earlier | None:
    """The finished result in a directory. Raises UsageError for one whose manifest cannot be
    relied on: nobody knows what of the directory is packer's.
    """
    for name in (MANIFEST, INCOMPLETE):
        content, status = folder.read(name), folder.status(name)
        if content is None or status is None or not looks_like_one(content):
            continue
        try:
            return Earlier(name, parse_unedited(content), status)
        except DataError as error:
            raise UsageError(
                f"{folder.path / name}: {error.message}, so it does not say which files are "
                "packer's",
                "choose another --output, or remove that directory yourself",
            ) from error
    return None


def listed(manifest: Result) -> dict[str, Listed]:
    """The files that a manifest lists, with the sizes and digests that it gives."""
    files = {shard.file: Listed(shard.bytes, shard.sha256) for shard in manifest.shards}
    files |= {name: Listed(None, sha256) for name, sha256 in manifest.side_files.items()}
    return {name: file for name, file in files.items() if is_result_file(name)}


def is_own(folder: Folder, name: str, earlier: Earlier | None) -> bool:
    """Whether a file belongs to the earlier result and is unchanged."""
    if earlier is None or name == earlier.name:
        return earlier is not None
    if name == INPUT_TIMES:  # no digest covers it
        return is_input_times(folder.read(name) or b"")
    file = listed(earlier.manifest).get(name)
    if file is None:
        return False
    is_shard = name not in SIDE_FILES  # people edit the others, and they are read soon
    return unchanged(folder, name, file, earlier.status if is_shard else None)


def is_input_times(content: bytes) -> bool:
    """Whether it holds only what packer writes there, in this version or an earlier one."""
    try:
        document = msgspec.json.decode(content, type=dict[str, list[Any]])
    except (ValueError, RecursionError):
        return False
    return document.keys() <= {"inputs", "racy", "mtime_ns"}


def replace_earlier(folder: Folder, work: Folder) -> None:
    """Replace the earlier result in `folder` with the one in the work folder.

    Every file must be on the disk already, the manifest too. Raises UsageError, before anything is
    changed, when files of others are where the result is to be; OSError.
    """
    earlier, new = earlier_result(folder), parse(work.read(MANIFEST) or b"")
    own = {} if earlier is None else _replaced(folder, work, earlier, new)
    _refuse_blocked(folder, work, new, own)
    put_file(work.path / _EARLIER, sealed(msgspec.json.encode(own)))
    work.sync()  # first: what is about to be put in place must be there
    work.rename(RUN, work, REPLACING)
    work.sync()
    put_in_place(folder, work)


_State = tuple[int, int, int, int]  # inode, size and times: a file that was not changed has it
_Own = tuple[_State | None, str]  # or else its digest tells


def _replaced(folder: Folder, work: Folder, earlier: Earlier, new: Result) -> dict[str, _Own]:
    """The files of the earlier result that the new one is to replace, or that go."""
    files, stay = listed(earlier.manifest), listed(new).keys()
    own = {}
    for name in (*files, INPUT_TIMES, earlier.name):
        goes = name not in stay or work.status(name) is not None
        if goes and folder.is_file(name) and is_own(folder, name, earlier):
            sha256 = files[name].sha256 if name in files else file_digest(folder, name)
            own[name] = _state(folder, name), sha256
    return own


def _is_still(folder: Folder, name: str, own: dict[str, _Own]) -> bool:
    """Whether a file is that of the earlier result, be it a copy of it."""
    if name not in own:
        return False
    state, sha256 = own[name]
    return _state(folder, name) == state or unchanged(folder, name, Listed(None, sha256))


def _state(folder: Folder, name: str) -> _State | None:
    status = folder.status(name)
    if status is None:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _earlier_files(work: Folder) -> dict[str, _Own]:
    try:
        content = unsealed(work.read(_EARLIER) or b"")
        owned = msgspec.json.decode(content, type=dict[str, _Own])
    except ValueError:
        return {}
    known = (MANIFEST, INCOMPLETE)
    return {name: owned[name] for name in owned if is_result_file(name) or name in known}


def _refuse_blocked(folder: Folder, work: Folder, new: Result, own: dict[str, _Own]) -> None:
    """UsageError for files in the way of those in the work folder that the manifest lists."""
    files = listed(new)
    blocked = [
        name
        for name in (*files, INPUT_TIMES)
        if work.status(name) is not None and not _is_free(folder, name, own, files.get(name))
    ]
    if work.status(MANIFEST) is not None and not _is_free(folder, _target(new), own, None):
        blocked.append(_target(new))
    if blocked:
        raise in_the_way(folder.path, blocked)


def _is_free(folder: Folder, name: str, own: dict[str, _Own], new: Listed | None) -> bool:
    """Whether nothing is lost when a file takes this name: there is none, or the earlier
    result's, or the very same content.
    """
    if folder.status(name) is None or _is_still(folder, name, own):
        return True
    return new is not None and unchanged(folder, name, new)


def _target(manifest: Result) -> str:
    """A result that missed --max-loss gets a name that says so."""
    return INCOMPLETE if manifest.incomplete else MANIFEST


def put_in_place(folder: Folder, work: Folder) -> bool:
    """Do, or continue, what `replace_earlier` does. False when the new manifest is damaged
    or gone: the run is then an unfinished one again.
    """
    content = work.read(MANIFEST)
    new = _new_result(folder, work) if content is None else _sound(content)
    if new is None:
        _take_back(folder, work)
        work.rename(REPLACING, work, RUN)
        return False
    own, files = _earlier_files(work), listed(new)
    _refuse_blocked(folder, work, new, own)
    for name in (*files, INPUT_TIMES):  # shards first: side files name them
        if work.status(name) is not None:
            work.rename(name, folder, name)
    if work.status(MANIFEST) is not None:
        folder.sync()
        time.sleep(_TICK_SECONDS)  # so that the times tell: see ownership.unchanged
        work.rename(MANIFEST, folder, _target(new))
        folder.sync()
    for name in own.keys() - {*files, INPUT_TIMES, _target(new)}:
        if _is_still(folder, name, own):
            folder.unlink(name)
    folder.sync()
    return True


def _sound(content: bytes) -> Result | None:
    try:
        return parse_unedited(content)
    except DataError:
        return None


def _new_result(folder: Folder, work: Folder) -> Result | None:
    """The manifest in the output, if it is no longer the earlier result's."""
    there = earlier_result(folder)
    before = _earlier_files(work)
    if there is None or (
        there.name in before and _state(folder, there.name) == before[there.name][0]
    ):
        return None
    return there.manifest


def _take_back(folder: Folder, work: Folder) -> None:
    """Move back shards that are already in the output and that no result there lists."""
    earlier = earlier_result(folder)
    there = listed(earlier.manifest) if earlier else {}
    for path in work.path.glob(UNIT_RECORDS):
        record = read_unit_record(path)
        for shard in record.shards if record and not record.reused else ():
            file = Listed(shard.bytes, shard.sha256)
            moved = work.status(shard.file) is None and shard.file not in there
            if moved and is_result_file(shard.file) and unchanged(folder, shard.file, file):
                folder.rename(shard.file, work, shard.file)
