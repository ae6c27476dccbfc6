"""Results at a URL: packed in a local directory with all its guarantees, then uploaded.

    URL/shard-..., side files     a shard that is there already is not uploaded again
    URL/manifest.json             completes the result; then the files of the earlier one go

Stores have no locks, but they replace an object in one step, and shards are named by their content.
So an earlier result stays whole while shards are uploaded; the few side files follow, and at once
the manifest. `staging` has the local directory, `remote` what lies at the URL.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from packer_cli import storage
from packer_cli.config.run_options import RunOptions
from packer_cli.errors import DataError, Interrupted, PackerError, UsageError, from_os_error
from packer_cli.ownership import Listed
from packer_cli.progress import Progress
from packer_cli.records import Notify
from packer_cli.result.layout import MANIFEST, SIDE_FILES
from packer_cli.result.manifest import Result
from packer_cli.result.shards import digest
from packer_cli.run import directory as output
from packer_cli.run.identity import Run
from packer_cli.run.remote import (
    Marker,
    Remote,
    earlier_files,
    holds,
    is_uploaded,
    look,
    mark,
    marker_at,
    refuse_in_the_way,
    refuse_to_replace,
    reserved,
    unmark,
    unmark_empty,
    write,
)
from packer_cli.run.staging import RESULT, files_of, finished, locked_staging
from packer_cli.run.transfer import blocks_of, on_threads
from packer_cli.run.update import refuse_other_result


def check_options(url: str, options: RunOptions) -> None:
    """Raise UsageError for options that do not work with a URL."""
    if not url.partition("://")[2].strip("/"):
        raise UsageError(f"--output: {url}: names no folder", "for example s3://bucket/folder")
    if options.update:
        option = "--add" if options.add else "--update"
        raise UsageError(
            f"{option}: {url}: a URL, and only local results can be updated",
            "update a local copy and upload that, or pack everything again with --overwrite",
        )
    if options.as_rank is not None:
        raise UsageError(
            f"--rank: {url}: a URL, and ranks only share local directories",
            "give the ranks a directory that all of them see, then upload it, manifest.json last",
        )


def publish(
    url: str,
    staging: Path | None,
    run: Run,
    pack: Callable[[Path], Result],
    *,
    overwrite: bool,
    no_lock: bool,
    notify: Notify,
    show_progress: bool,
    before_switch: Callable[[], None],
) -> Result:
    """Pack `run` and upload its result to a URL; returns its manifest.

    `pack` packs it into a local directory, or goes on with it. `before_switch`: called before the
    manifest is uploaded. A result that is marked incomplete
    is not uploaded, and stays in the staging directory. Raises PackerError.
    """
    output.refuse_inputs_inside(url, run.files)
    try:
        with locked_staging(url, staging, run, overwrite, no_lock, notify) as folder:
            result, manifest = folder / RESULT, finished(folder / RESULT)
            remote = look(url)
            if manifest is None:
                if remote.manifest and not (overwrite or remote.marker):
                    refuse_other_result(url, remote.manifest, run)
                    notify(f"{url}: up to date")
                    return remote.manifest
                refuse_to_replace(url, remote, None, overwrite)
                with reserved(url, remote):
                    manifest = _packed(pack, result)
                    if manifest.incomplete:
                        unmark_empty(url)
                        return manifest
                remote = look(url)
            own = digest(result / MANIFEST)
            if holds(url, remote, own):
                notify(f"{url}: was complete except for its last step")
                unmark(url, remote)
            else:
                refuse_to_replace(url, remote, own[1], overwrite)
                _upload(
                    url, result, manifest, own, remote, notify, before_switch,
                    show_progress=show_progress,
                )  # fmt: skip
            output.remove_result(result, no_lock=no_lock)
            return manifest
    except OSError as error:
        raise from_os_error(error, error.filename or url, "write") from error


def _packed(pack: Callable[[Path], Result], result: Path) -> Result:
    try:
        return pack(result)
    except PackerError as error:
        tip = error.tip.replace("another --output", "another --staging")
        raise type(error)(error.message, tip) from error


def _upload(
    url: str,
    result: Path,
    manifest: Result,
    own: tuple[int, str],
    remote: Remote,
    notify: Notify,
    before_switch: Callable[[], None],
    *,
    show_progress: bool,
) -> None:
    """`own`: size and digest of the manifest."""
    files = files_of(result, manifest)
    refuse_in_the_way(url, remote, files)
    marker = _marker(url, own[1], files, remote)
    left = [name for name in files if not is_uploaded(name, files[name], remote)]
    if remote.marker != marker:
        mark(url, marker)
    elif len(left) < len(files):
        done = len(files) - len(left)
        notify(f"{url}: continuing: {done} of {len(files)} files are already uploaded")
    total, rest = (sum(files[name].size or 0 for name in names) for names in (files, left))
    progress = Progress(total, show=show_progress, doing="uploading")
    progress.skip(1 - rest / total)
    with progress:
        _upload_files(url, result, files, left, progress)
    before_switch()
    _check_uploaded(url, files, marker)
    blocks = blocks_of(result / MANIFEST, own[1], threading.Event(), progress)
    write(url, MANIFEST, blocks, own[0])
    if storage.stat(storage.join(url, MANIFEST), again=True).size != own[0]:
        raise _other_writer(f"{storage.join(url, MANIFEST)}: is not what was uploaded")
    unmark(url, remote._replace(marker=marker))


def _marker(url: str, manifest: str, files: dict[str, Listed], remote: Remote) -> Marker:
    """The one at the URL if it is of this upload, or else a new one. `manifest`: its digest."""
    marker = Marker(manifest, {name: (file.size or 0, file.sha256) for name, file in files.items()})
    there = remote.marker
    if there is not None and there == replace(marker, earlier=there.earlier):
        return there
    return replace(marker, earlier=earlier_files(url, remote))


def _upload_files(
    url: str, result: Path, files: dict[str, Listed], left: list[str], progress: Progress
) -> None:
    """Upload those that are `left`, the side files last: an earlier result has the same names."""
    stop, uploaded = threading.Event(), list[str]()

    def put(name: str) -> None:
        blocks = blocks_of(result / name, files[name].sha256, stop, progress)
        write(url, name, blocks, files[name].size or 0)
        uploaded.append(name)

    largest = max(storage.part_bytes(file.size or 0) for file in files.values())
    try:
        for side_files in (False, True):
            names = [name for name in left if (name in SIDE_FILES) == side_files]
            on_threads((partial(put, name) for name in names), stop, largest)
    except PackerError as error:
        done = len(files) - len(left) + len(uploaded)
        kept = f"{done} of {len(files)} files are uploaded; run the same command again to continue"
        again = isinstance(error, Interrupted) or not error.tip
        tip = kept if again else f"{error.tip}; {kept}"
        raise type(error)(error.message, tip) from error


def _check_uploaded(url: str, files: dict[str, Listed], marker: Marker) -> None:
    """Raise DataError when somebody else writes there."""
    there = storage.sizes(url)
    for name, file in files.items():
        if there.get(name) != file.size:
            raise _other_writer(f"{storage.join(url, name)}: is not what was uploaded")
    if marker_at(url) != marker:
        raise _other_writer(f"{url}: another run is writing there")


def _other_writer(message: str) -> DataError:
    return DataError(message, "let nothing else write there, and run the same command again")
