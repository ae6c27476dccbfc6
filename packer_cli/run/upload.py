"""Results at a URL: packed in a local directory with all its guarantees, then uploaded.

    STAGING/.packer/<id>/   a lock, and staged.json: whose it is: the URL's digest, and the run
    STAGING/result/         a local result, finished or not

    URL/.packer/publishing.json   what is being uploaded: its manifest's sha256, and its files
    URL/shard-..., side files     a shard that is there already is not uploaded again
    URL/manifest.json             with it the result is complete; then the earlier one's files go

Stores have no locks, but they replace an object in one step, and shards are named by their content.
So an earlier result stays whole while shards are uploaded; the few side files follow, and at once
the manifest.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from packer_cli import storage
from packer_cli.config.options import RunOptions
from packer_cli.durable import make_folders, put_file
from packer_cli.errors import DataError, Interrupted, PackerError, UsageError, from_os_error, named
from packer_cli.interrupts import as_flag
from packer_cli.locks import locked_folder
from packer_cli.ownership import (
    Folder,
    Listed,
    OwnFolder,
    identity_of,
    is_leftover,
    remove_leftovers,
)
from packer_cli.progress import Progress
from packer_cli.result import manifest as manifests
from packer_cli.result.layout import INCOMPLETE, INPUT_TIMES, MANIFEST, SIDE_FILES, WORK
from packer_cli.result.manifest import Manifest
from packer_cli.result.shards import digest
from packer_cli.run import directory as output
from packer_cli.run import replacing
from packer_cli.run.contents import as_packed_in
from packer_cli.run.identity import Run, differences

Notify = Callable[[str], None]
MARKER = f"{WORK}/publishing.json"
_STAGED, _RESULT = "staged.json", "result"
_STAGING_FILES = re.compile(r"lock|staged\.json(\.part)?")
_NAMED_BY_CONTENT = re.compile(r"shard-.*-[0-9a-f]{16}\.arrow")
_THREADS = 8
_MOST_BYTES = 128 << 20  # of parts in memory, counted once
_BLOCK_BYTES = 1 << 20
_FETCHED_BYTES = 4 << 20
_WAIT_SECONDS = 1.2  # for threads to take back what they have begun to write


class _Staged(msgspec.Struct):
    url_sha256: str
    run: Run


class _Marker(msgspec.Struct, frozen=True):
    """`manifest_sha256` "": nothing is uploaded yet. (size, sha256 or "") by name: `files` of the
    new result, and what of `earlier` ones lay there before, which goes once it is complete.
    """

    manifest_sha256: str
    files: dict[str, tuple[int, str]] = {}
    earlier: dict[str, tuple[int, str]] = {}


class _Remote(NamedTuple):
    """What is at the URL. `manifest`: of a finished result, and the `files` that it lists;
    `problem`: why it cannot be used.
    """

    sizes: dict[str, int | None]
    manifest: Manifest | None
    files: dict[str, Listed]
    problem: str
    marker: _Marker | None

    @property
    def complete(self) -> bool:
        return self.manifest is not None or bool(self.problem)

    def listed(self, name: str) -> Iterator[Listed]:
        """What packer may have written under a name, by its records."""
        if name in self.files:
            yield self.files[name]
        for marked in (self.marker.files, self.marker.earlier) if self.marker else ():
            if name in marked:
                yield Listed(*marked[name])


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


def default_staging(url: str) -> Path:
    """The default staging directory: the same for each run of a user on this machine."""
    mine = hashlib.sha256(f"{os.getuid()}\n{url.rstrip('/')}".encode()).hexdigest()
    return Path(tempfile.gettempdir()) / f"packer-{mine[:20]}"


def publish(
    url: str,
    staging: Path | None,
    run: Run,
    pack: Callable[[Path], Manifest],
    *,
    overwrite: bool,
    no_lock: bool,
    notify: Notify,
    show_progress: bool,
) -> Manifest:
    """Pack `run` and upload its result to a URL; returns its manifest.

    `pack` packs it into a local directory, or goes on with it. A result that is marked incomplete
    is not uploaded, and stays in the staging directory. Raises PackerError.
    """
    output.refuse_inputs_inside(url, run.files)
    try:
        with _staging(url, staging, run, overwrite, no_lock, notify) as folder:
            result, manifest = folder / _RESULT, _finished(folder / _RESULT)
            remote = _look(url)
            if manifest is None:
                _refuse(url, remote, None, overwrite)
                with _reserved(url, remote):
                    manifest = _packed(pack, result)
                    if manifest.incomplete:
                        _unmark_empty(url)
                        return manifest
                remote = _look(url)
            own = digest(result / MANIFEST)
            if _is_there(url, remote, own):
                notify(f"{url}: was complete except for its last step")
                _unmark(url, remote)
            else:
                _refuse(url, remote, own[1], overwrite)
                _upload(url, result, manifest, own, remote, notify, show_progress)
            output.remove_result(result, no_lock=no_lock)
            return manifest
    except OSError as error:
        raise from_os_error(error, error.filename or url, "write") from error


def _packed(pack: Callable[[Path], Manifest], result: Path) -> Manifest:
    try:
        return pack(result)
    except PackerError as error:
        tip = error.tip.replace("another --output", "another --staging")
        raise type(error)(error.message, tip) from error


@contextmanager
def _staging(
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
                if not (path / _RESULT).exists():
                    own.remove(_STAGING_FILES)
                    remove_leftovers(folder, WORK, _STAGING_FILES)
                    with suppress(OSError):
                        path.rmdir()


def _make_private(folder: Path) -> None:
    """Others can write to the temporary directory, and foresee the name."""
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
    result, name = folder / _RESULT, hashlib.sha256(url.rstrip("/").encode()).hexdigest()
    try:
        staged = msgspec.json.decode(own.inside.read(_STAGED) or b"", type=_Staged)
    except (ValueError, TypeError, RecursionError, UsageError):
        staged = None
    if result.exists():
        if staged is not None and staged.url_sha256 != name:
            raise UsageError(
                f"--staging: {folder}: holds files for an upload to another URL",
                "choose another --staging",
            )
        is_same = as_packed_in(output.work_of(result) or result)
        differ = (
            ["another packer began it"] if staged is None else differences(staged.run, run, is_same)
        )
        if differ and not overwrite:
            raise UsageError(
                f"{folder}: holds an unfinished run for {url} that differs: {'; '.join(differ)}",
                "to continue it, give its options and inputs; to start over, --overwrite, or "
                "remove that directory",
            )
        if differ:
            notify(f"{folder}: the unfinished run is discarded: {'; '.join(differ)}")
        unfit = replacing.holds_result(result) and _finished(result) is None
        if differ or unfit or not run.resumable:
            output.remove_result(result, no_lock=no_lock)
    put_file(own.inside.path / _STAGED, msgspec.json.encode(_Staged(name, run)))


def _finished(result: Path) -> Manifest | None:
    """The manifest of a staged result that can be uploaded."""
    if not replacing.holds_result(result):
        return None
    try:
        manifest = manifests.load(result)
        files = _files(result, manifest)
    except (DataError, OSError):
        return None
    whole = all(files[shard.file].size == shard.bytes for shard in manifest.shards)
    return manifest if whole else None


def _files(result: Path, manifest: Manifest) -> dict[str, Listed]:
    """All but the manifest, in the order in which they are uploaded."""
    hashes = {shard.file: shard.sha256 for shard in manifest.shards}
    hashes |= dict(sorted(manifest.side_files.items()))
    return {
        name: Listed((result / name).stat().st_size, sha256)
        for name, sha256 in (hashes | {INPUT_TIMES: ""}).items()
    }


def _look(url: str) -> _Remote:
    if storage.is_file(url):
        raise UsageError(f"{url}: exists and is not a folder", "choose another --output")
    sizes, manifest, problem = storage.sizes(url), None, ""
    for name in (MANIFEST, INCOMPLETE):
        if sizes.get(name) is not None and manifest is None:
            with storage.open_bytes(storage.join(url, name), _FETCHED_BYTES) as file:
                content = file.read()
            if manifests.looks_like_one(content):
                try:
                    manifest = manifests.parse_unedited(content)
                except DataError as error:
                    problem = error.message
                break
    files = {} if manifest is None else replacing.listed(manifest)
    return _Remote(sizes, manifest, files, problem, _marker(url) if WORK in sizes else None)


def _is_there(url: str, remote: _Remote, own: tuple[int, str]) -> bool:
    """Whether the manifest at the URL is that of the staged result."""
    return remote.sizes.get(MANIFEST) == own[0] and digest(storage.join(url, MANIFEST)) == own


def _refuse(url: str, remote: _Remote, own: str | None, overwrite: bool) -> None:
    """Raise UsageError for what must not be replaced. `own`: the manifest's digest, if known."""
    if remote.complete:
        if not overwrite:
            raise UsageError(
                f"{url}: holds a finished result",
                "choose another --output, or replace it with --overwrite",
            )
        if remote.problem:
            raise UsageError(
                f"{storage.join(url, MANIFEST)}: {remote.problem}, so it does not tell which files "
                "are packer's",
                "choose another --output, or remove that folder yourself",
            )
    elif remote.marker is not None and remote.marker.manifest_sha256:
        if own not in (None, remote.marker.manifest_sha256) and not overwrite:
            raise UsageError(
                f"{url}: holds an unfinished upload of another result",
                "finish that with its own command, or replace it with --overwrite",
            )
    elif remote.sizes.keys() - {WORK} or (
        remote.marker is None and storage.sizes(storage.join(url, WORK))
    ):
        raise UsageError(
            f"{url}: is not empty, and not a result of packer",
            "choose another --output; --overwrite only replaces what packer made",
        )


def _refuse_in_the_way(url: str, remote: _Remote, files: dict[str, Listed]) -> None:
    """Raise UsageError for objects that packer did not make, where the result would be."""
    blocked = [n for n in files if n in remote.sizes and not _is_own(url, n, remote)]
    if MANIFEST in remote.sizes and not remote.complete:
        blocked.append(MANIFEST)
    if blocked:
        raise UsageError(
            f"{url}: holds files that packer did not make, or that have changed: "
            f"{named(sorted(blocked))}",
            "nothing was changed; move them elsewhere, or choose another --output",
        )


def _is_own(url: str, name: str, remote: _Remote) -> bool:
    return _own_digest(url, name, remote) is not None


def _own_digest(url: str, name: str, remote: _Remote) -> str | None:
    """The sha256 of an object that packer's records list, or "" if it is told by something else;
    None for all others. The names of shards tell their content; others are read.
    """
    size, listed = remote.sizes[name], list(remote.listed(name))
    if size is None:
        return None
    put = remote.marker.files.get(name) if remote.marker is not None else None
    if put is not None and size < put[0] and not storage.is_put_whole(url):
        return ""  # its beginning
    if name == INPUT_TIMES and (remote.complete or listed):  # no digest covers it
        with storage.open_bytes(storage.join(url, name), _FETCHED_BYTES) as file:
            return "" if replacing.is_input_times(file.read()) else None
    digests = {file.sha256 for file in listed if file.size in (None, size)}
    if not digests or _NAMED_BY_CONTENT.fullmatch(name):
        return next(iter(digests), None)
    sha256 = digest(storage.join(url, name))[1]
    return sha256 if sha256 in digests else None


def _marker(url: str) -> _Marker | None:
    """None when there is none. UsageError for one that is not packer's."""
    place = storage.join(url, MARKER)
    if not storage.is_file(place):
        return None
    try:
        with storage.open_bytes(place) as file:
            return msgspec.json.decode(file.read(), type=_Marker)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise UsageError(
            f"{place}: is not packer's", "move it elsewhere, or choose another --output"
        ) from None


def _mark(url: str, marker: _Marker) -> None:
    content = msgspec.json.encode(marker)
    _write(url, MARKER, [content], len(content))


def _write(url: str, name: str, blocks: Iterable[bytes], size: int) -> None:
    part = storage.join(url, f"{WORK}/{storage.base_name(name)}.part")
    storage.write(storage.join(url, name), blocks, size, part)


def _unmark(url: str, remote: _Remote) -> None:
    """Remove what an earlier result left, then the marker that lists it."""
    if remote.marker is not None:
        sizes = storage.sizes(url)
        gone = [
            name
            for name, (size, _) in remote.marker.earlier.items()
            if name not in remote.marker.files and sizes.get(name) == size
        ]
        tasks = (partial(storage.remove, storage.join(url, name)) for name in sorted(gone))
        _on_threads(tasks, _THREADS, threading.Event())
    for name in storage.sizes(storage.join(url, WORK)):
        if name.endswith(".part"):  # of local files, when a run was killed
            storage.remove(storage.join(url, f"{WORK}/{name}"))
    storage.remove(storage.join(url, MARKER))
    storage.remove_folder(storage.join(url, WORK))


def _unmark_empty(url: str) -> None:
    with suppress(PackerError):
        if _marker(url) == _Marker(""):
            _unmark(url, _look(url))


@contextmanager
def _reserved(url: str, remote: _Remote) -> Iterator[None]:
    """Prove that the URL can be written to before the work, not after."""
    if remote.marker is None:
        _mark(url, _Marker(""))
    try:
        yield
    except BaseException:
        _unmark_empty(url)
        raise


def _upload(
    url: str,
    result: Path,
    manifest: Manifest,
    own: tuple[int, str],
    remote: _Remote,
    notify: Notify,
    show_progress: bool,
) -> None:
    """`own`: size and digest of the manifest."""
    files = _files(result, manifest)
    _refuse_in_the_way(url, remote, files)
    marker = _Marker(own[1], {name: (file.size or 0, file.sha256) for name, file in files.items()})
    if remote.marker is not None and remote.marker == replace(
        marker, earlier=remote.marker.earlier
    ):
        marker = remote.marker
    else:
        marker = replace(marker, earlier=_earlier_files(url, remote))
    left = [name for name in files if not _is_there_already(name, files[name], remote)]
    if remote.marker != marker:
        _mark(url, marker)
    elif len(left) < len(files):
        done = len(files) - len(left)
        notify(f"{url}: continuing: {done} of {len(files)} files are already uploaded")
    stop, uploaded = threading.Event(), list[str]()
    total, rest = (sum(files[name].size or 0 for name in names) for names in (files, left))
    progress = Progress(total, show=show_progress, doing="uploading")
    progress.skip(1 - rest / total)

    def put(name: str) -> None:
        blocks = _blocks(result / name, files[name].sha256, stop, progress)
        _write(url, name, blocks, files[name].size or 0)
        uploaded.append(name)

    largest = max(storage.part_bytes(file.size or 0) for file in files.values())
    threads = min(_THREADS, max(1, _MOST_BYTES // largest))
    with progress:
        try:
            for side_files in (False, True):  # an earlier result has some of the same names
                names = [name for name in left if (name in SIDE_FILES) == side_files]
                _on_threads((partial(put, name) for name in names), threads, stop)
        except PackerError as error:
            done = len(files) - len(left) + len(uploaded)
            kept = (
                f"{done} of {len(files)} files are uploaded; run the same command again to continue"
            )
            again = isinstance(error, Interrupted) or not error.tip
            tip = kept if again else f"{error.tip}; {kept}"
            raise type(error)(error.message, tip) from error
    there = storage.sizes(url)
    for name, file in files.items():
        if there.get(name) != file.size:
            raise _other_writer(f"{storage.join(url, name)}: is not what was uploaded")
    if _marker(url) != marker:
        raise _other_writer(f"{url}: another run is writing there")
    blocks = _blocks(result / MANIFEST, own[1], stop, progress)
    _write(url, MANIFEST, blocks, own[0])
    if storage.stat(storage.join(url, MANIFEST), again=True).size != own[0]:
        raise _other_writer(f"{storage.join(url, MANIFEST)}: is not what was uploaded")
    _unmark(url, remote._replace(marker=marker))


def _other_writer(message: str) -> DataError:
    return DataError(message, "let nothing else write there, and run the same command again")


def _is_there_already(name: str, file: Listed, remote: _Remote) -> bool:
    return bool(_NAMED_BY_CONTENT.fullmatch(name)) and remote.sizes.get(name) == file.size


def _earlier_files(url: str, remote: _Remote) -> dict[str, tuple[int, str]]:
    """What is there of an earlier result, or upload, by packer's records."""
    earlier = {
        name: (size, sha256)
        for name, size in sorted(remote.sizes.items())
        if size is not None
        if (sha256 := _own_digest(url, name, remote)) is not None
    }
    if remote.manifest is not None and remote.manifest.incomplete:
        earlier[INCOMPLETE] = remote.sizes[INCOMPLETE] or 0, ""
    return earlier


def _blocks(path: Path, sha256: str, stop: threading.Event, progress: Progress) -> Iterator[bytes]:
    """A staged file's content. DataError when it is not what was packed, Interrupted to stop."""
    sha = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(_BLOCK_BYTES):
                if stop.is_set():
                    raise Interrupted("interrupted")
                sha.update(block)
                yield block
                progress.read(len(block), 0)
    except OSError as error:
        raise from_os_error(error, path, "read") from error
    if sha256 not in ("", sha.hexdigest()):
        raise DataError(
            f"{path}: has changed since it was packed: its sha256 differs",
            "remove the directory, check its disk, and run the same command again",
        )


def _on_threads(tasks: Iterable[Callable[[], None]], count: int, stop: threading.Event) -> None:
    """Run the tasks; on the first failure or Ctrl-C set `stop` and raise.

    A request may take minutes, so threads in the middle of one are not waited for for long: they
    write nothing after it, and end with the process.
    """
    queue, lock, errors = iter(tasks), threading.Lock(), list[BaseException]()
    ended = SimpleQueue[None]()  # join would take an interrupted wait for the thread's end

    def work() -> None:
        try:
            while not stop.is_set():
                with lock:
                    task = next(queue, None)
                if task is None:
                    return
                task()
        except BaseException as error:
            errors.append(error)
            stop.set()
        finally:
            ended.put(None)

    running = count
    with as_flag() as interrupted:
        for _ in range(count):
            threading.Thread(target=work, daemon=True).start()
        while running and not stop.is_set():
            running -= _one_ended(ended, 0.2)
            if interrupted():
                errors.insert(0, Interrupted("interrupted"))
                stop.set()
        end = time.monotonic() + _WAIT_SECONDS
        while running and (left := end - time.monotonic()) > 0:
            running -= _one_ended(ended, left)
        if errors:
            raise errors[0]


def _one_ended(ended: SimpleQueue[None], seconds: float) -> bool:
    try:
        ended.get(timeout=seconds)
    except Empty:
        return False
    return True
