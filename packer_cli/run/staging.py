"""The staging directory of an upload: a local result, and a record of whose it is.

    STAGING/.packer/<id>/   a lock, and staged.json: the URL's digest, and the run
    STAGING/result/         a local result, finished or not

An equal run goes on with what an interrupted one left there; any other run is refused.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from packer_cli.durable import make_folders, put_file
from packer_cli.errors import DataError, UsageError
from packer_cli.locks import locked_folder
from packer_cli.ownership import (
    Folder,
    Listed,
    OwnFolder,
    identity_of,
    is_leftover,
    remove_leftovers,
)
from packer_cli.records import Notify
from packer_cli.result.layout import INPUT_TIMES, WORK
from packer_cli.result.manifest import Result
from packer_cli.result.manifest_file import load_any
from packer_cli.run import directory as output
from packer_cli.run import replacing
from packer_cli.run.contents import as_packed_in
from packer_cli.run.identity import Run, differences, run_of

_STAGED, RESULT = "staged.json", "result"
_STAGING_FILES = re.compile(r"lock|staged\.json(\.part)?")


def default_staging(url: str) -> Path:
    """The default staging directory: the same for each run of a user on this machine."""
    mine = hashlib.sha256(f"{os.getuid()}\n{url.rstrip('/')}".encode()).hexdigest()
    return Path(tempfile.gettempdir()) / f"packer-{mine[:20]}"


@contextmanager
def locked_staging(
    url: str, path: Path | None, run: Run, overwrite: bool, no_lock: bool, notify: Notify
) -> Iterator[Path]:
    """The staging directory, locked, with what an equal run left in it."""
    if path is None:
        path = default_staging(url)
        _make_private(path)
    elif path.exists() and not path.is_dir():
        raise UsageError(f"--staging: {path}: is not a directory", "choose another --staging")
    make_folders(path)
    with Folder(path) as folder:
        names = [name for name in folder.names() if not is_leftover(name, WORK)]
        if identity_of(folder, WORK) is None and names:
            raise UsageError(
                f"--staging: {path}: is neither empty nor left by an interrupted upload",
                "choose another --staging",
            )
        with locked_folder(folder, WORK, path, without=no_lock) as own:
            try:
                own.refuse_strangers(_STAGING_FILES)
                _begin(url, path, own, run, overwrite, no_lock, notify)
                yield path
            finally:
                if not (path / RESULT).exists():
                    own.remove(_STAGING_FILES)
                    remove_leftovers(folder, WORK, _STAGING_FILES)
                    with suppress(OSError):
                        path.rmdir()


def _make_private(folder: Path) -> None:
    """Make the folder for this user alone: others can foresee its name in a shared directory."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise UsageError(f"{folder}: is not a directory of yours", "choose one with --staging")


def _begin(
    url: str,
    folder: Path,
    own: OwnFolder,
    run: Run,
    overwrite: bool,
    no_lock: bool,
    notify: Notify,
) -> None:
    """Everything in the staging directory is of runs equal to that in `staged.json`."""
    result, name = folder / RESULT, hashlib.sha256(url.rstrip("/").encode()).hexdigest()
    try:
        staged = msgspec.json.decode(own.inside.read(_STAGED) or b"")
        url_sha256, earlier = staged["url_sha256"], run_of(staged["run"])
    except (LookupError, ValueError, TypeError, RecursionError, UsageError):
        url_sha256, earlier = None, None
    if result.exists() and not _holds_work(result):  # killed while it was removed, or at its start
        output.remove_result(result, no_lock=no_lock)
    if result.exists():
        if earlier is not None and url_sha256 != name:
            raise UsageError(
                f"--staging: {folder}: holds files for an upload to another URL",
                "choose another --staging",
            )
        is_same = as_packed_in(output.work_of(result) or result)
        differ = (
            ["another packer began it"] if earlier is None else differences(earlier, run, is_same)
        )
        if differ and not overwrite:
            raise UsageError(
                f"{folder}: holds an unfinished run for {url} that differs: {'; '.join(differ)}",
                "to continue it, give its options and inputs; to start over, --overwrite, or "
                "remove that directory",
            )
        if differ:
            notify(f"{folder}: the unfinished run is discarded: {'; '.join(differ)}")
        unfit = replacing.holds_result(result) and finished(result) is None
        if differ or unfit or not run.resumable:
            output.remove_result(result, no_lock=no_lock)
    put_file(own.inside.path / _STAGED, msgspec.json.encode({"url_sha256": name, "run": run}))


def _holds_work(result: Path) -> bool:
    work = output.work_of(result)
    begun = work is not None and output.is_begun(work)
    return begun or replacing.holds_result(result) or output.is_replacing(result)


def finished(result: Path) -> Result | None:
    """The manifest of a staged result that can be uploaded."""
    if not replacing.holds_result(result):
        return None
    try:
        manifest = load_any(result)
        files = files_of(result, manifest)
    except (DataError, OSError):
        return None
    whole = all(files[shard.file].size == shard.bytes for shard in manifest.shards)
    return manifest if whole else None


def files_of(result: Path, manifest: Result) -> dict[str, Listed]:
    """All but the manifest, in the order in which they are uploaded."""
    hashes = {shard.file: shard.sha256 for shard in manifest.shards}
    hashes |= dict(sorted(manifest.side_files.items()))
    return {
        name: Listed((result / name).stat().st_size, sha256)
        for name, sha256 in (hashes | {INPUT_TIMES: ""}).items()
    }
