"""Results at a URL: packed in a local directory with all its guarantees, then uploaded.

    STAGING/staged.json   whose it is: the URL's digest, and the run
    STAGING/result/       a local result, finished or not
    STAGING/lock

    URL/.packer/publishing.json   which result is being uploaded: the sha256 of its manifest
    URL/shard-..., side files     what has the right size there is not uploaded again
    URL/manifest.json             gets there last: with it the result is complete

Stores have neither locks nor a rename. Sizes alone do not tell shards of one result from those of
another, so whatever is ours at the URL is removed, its manifest first, before the marker says
`cleared`: what is there from then on is of the result that the marker names.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any, NamedTuple

import msgspec

from packer_cli import manifest as manifests
from packer_cli import output, storage
from packer_cli.config import RunOptions
from packer_cli.contents import as_packed_in
from packer_cli.errors import DataError, Interrupted, PackerError, UsageError, from_os_error
from packer_cli.manifest import INCOMPLETE, MANIFEST
from packer_cli.progress import Progress
from packer_cli.run import RUN, Run, differences
from packer_cli.shards import digest

Notify = Callable[[str], None]
MARKER = f"{output.WORK}/publishing.json"
_STAGED, _RESULT, _OLD, _LOCK = "staged.json", "result", "old", "lock"
_THREADS = 8
_MOST_BYTES = 128 << 20  # of parts in memory, counted once
_BLOCK_BYTES = 1 << 20
_WAIT_SECONDS = 2.0  # for threads to take back what they have begun to write


class _Staged(msgspec.Struct):
    url_sha256: str
    run: Run


class _Marker(msgspec.Struct, frozen=True):
    """`manifest_sha256` "": nothing is uploaded yet."""

    manifest_sha256: str
    cleared: bool


class _Found(NamedTuple):
    """What is at the URL. `complete`: a result, whether marked incomplete or not."""

    sizes: dict[str, int | None]
    complete: bool
    marker: _Marker | None


class _File(NamedTuple):
    """Of the staged result. `sha256` None: not in the manifest."""

    size: int
    sha256: str | None


def check_options(url: str, options: RunOptions) -> None:
    """UsageError for what cannot be done at a URL."""
    if not url.partition("://")[2].strip("/"):
        raise UsageError(f"--output: {url}: names no folder", "for example s3://bucket/folder")
    if options.update:
        raise UsageError(
            f"--update: {url}: a URL, and only local results can be updated",
            "update a local copy and upload that, or pack everything anew with --overwrite",
        )
    if options.as_rank is not None:
        raise UsageError(
            f"--rank: {url}: a URL, and ranks only share local directories",
            "give the ranks a directory that all of them see, then upload it, manifest.json last",
        )


def default_staging(url: str) -> Path:
    """The same for each run of a user on this machine."""
    mine = hashlib.sha256(f"{os.getuid()}\n{url.rstrip('/')}".encode()).hexdigest()
    return Path(tempfile.gettempdir()) / f"packer-{mine[:20]}"


def publish(
    url: str,
    staging: Path | None,
    run: Run,
    pack: Callable[[Path], dict[str, Any]],
    *,
    overwrite: bool,
    notify: Notify,
    show_progress: bool,
) -> dict[str, Any]:
    """Have the result of `run` at a URL; gives its manifest.

    `pack` packs it into a local directory, or goes on with it. A result that is marked incomplete
    is not uploaded, and stays in the staging directory. Raises PackerError.
    """
    output.refuse_inputs_inside(url, run.files)
    try:
        with _staging(url, staging, run, overwrite, notify) as folder:
            result, manifest = folder / _RESULT, _finished(folder / _RESULT)
            found = _look(url)
            if manifest is None:
                _refuse(url, found, None, overwrite)
                with _reserved(url, found):
                    manifest = _packed(pack, result)
                    if "incomplete" in manifest:
                        _unmark_empty(url)
                        return manifest
                found = _look(url)
            own = digest(result / MANIFEST)
            if _is_there(url, found, own):
                notify(f"{url}: was complete but for its last step")
                _unmark(url)
            else:
                _refuse(url, found, own[1], overwrite)
                _upload(url, result, manifest, own, found, notify, show_progress)
            _throw_away(folder)
            return manifest
    except OSError as error:
        raise from_os_error(error, error.filename or url, "write") from error


def _packed(pack: Callable[[Path], dict[str, Any]], result: Path) -> dict[str, Any]:
    try:
        return pack(result)
    except PackerError as error:
        tip = error.tip.replace("another --output", "another --staging")
        raise type(error)(error.message, tip) from error


@contextmanager
def _staging(
    url: str, folder: Path | None, run: Run, overwrite: bool, notify: Notify
) -> Iterator[Path]:
    """The staging directory, ours alone, with what an equal run has left in it."""
    if folder is None:
        folder = default_staging(url)
        _make_private(folder)
    elif folder.exists() and not folder.is_dir():
        raise UsageError(f"--staging: {folder}: is not a directory", "choose another --staging")
    with _lock(folder, notify):
        try:
            _begin(url, folder, run, overwrite, notify)
            yield folder
        finally:
            if not (folder / _RESULT).exists():
                with suppress(OSError):
                    (folder / _STAGED).unlink(missing_ok=True)
                    (folder / _LOCK).unlink()
                    folder.rmdir()


def _make_private(folder: Path) -> None:
    """Others can write to the temporary directory, and foresee the name."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise UsageError(f"{folder}: is not a directory of yours", "choose one with --staging")


def _lock(folder: Path, notify: Notify) -> IO[str]:
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        if (names := set(os.listdir(folder))) and not names & {_LOCK, _STAGED}:
            raise UsageError(
                f"--staging: {folder}: is not empty, and not of an upload that was interrupted",
                "choose another --staging",
            )
        try:
            lock = open(folder / _LOCK, "w")  # noqa: SIM115
        except FileNotFoundError:
            continue  # a run that ended just now took it with it
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise output.InUseError(
                f"{folder}: another run is writing there",
                "wait for it to end, or choose another --output",
            ) from None
        except OSError as error:  # some network file systems have no locks
            notify(f"{folder} cannot be locked ({error.strerror}); let no other run write there")
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(folder / _LOCK)):
                return lock
        lock.close()


def _begin(url: str, folder: Path, run: Run, overwrite: bool, notify: Notify) -> None:
    """Everything in the staging directory is of runs equal to that in `staged.json`."""
    result, name = folder / _RESULT, hashlib.sha256(url.rstrip("/").encode()).hexdigest()
    shutil.rmtree(folder / _OLD, ignore_errors=True)
    try:
        staged = msgspec.json.decode((folder / _STAGED).read_bytes(), type=_Staged)
    except (OSError, ValueError, TypeError):
        staged = None
    if result.exists():
        if staged is not None and staged.url_sha256 != name:
            raise UsageError(
                f"--staging: {folder}: holds what is to be uploaded to another URL",
                "choose another --staging",
            )
        unfinished = result / output.WORK
        is_same = as_packed_in(unfinished if (unfinished / RUN).exists() else result)
        differ = (
            ["another packer began it"] if staged is None else differences(staged.run, run, is_same)
        )
        if differ and not overwrite:
            raise UsageError(
                f"{folder}: holds an unfinished run for {url} that differs: {'; '.join(differ)}",
                "to go on with it, give its options and inputs; to start over, --overwrite, or "
                "remove that directory",
            )
        if differ:
            notify(f"{folder}: the unfinished run is thrown away: {'; '.join(differ)}")
        unfit = output.holds_result(result) and _finished(result) is None
        if differ or unfit or not run.resumable:
            _throw_away(folder)
    output.put_file(folder / _STAGED, msgspec.json.encode(_Staged(name, run)))


def _throw_away(folder: Path) -> None:
    """Remove the staged result, whole or not at all."""
    os.rename(folder / _RESULT, folder / _OLD)
    output.sync(folder)
    shutil.rmtree(folder / _OLD)


def _finished(result: Path) -> dict[str, Any] | None:
    """The manifest of a staged result that can be uploaded."""
    if not output.holds_result(result):
        return None
    try:
        manifest = manifests.load(result)
        files = _files(result, manifest)
    except (DataError, OSError):
        return None
    sizes = {shard["file"]: shard["bytes"] for shard in manifest["shards"]}
    return manifest if all(files[name].size == sizes[name] for name in sizes) else None


def _files(result: Path, manifest: dict[str, Any]) -> dict[str, _File]:
    """All but the manifest, in the order in which they are uploaded."""
    hashes: dict[str, str | None] = {one["file"]: one["sha256"] for one in manifest["shards"]}
    hashes |= dict(sorted(manifest["side_files"].items()))
    hashes[output.INPUT_TIMES] = None
    return {name: _File((result / name).stat().st_size, sha) for name, sha in hashes.items()}


def _look(url: str) -> _Found:
    if storage.is_file(url):
        raise UsageError(f"{url}: exists and is not a folder", "choose another --output")
    sizes = storage.sizes(url)
    complete = any(
        name in sizes and manifests.is_manifest(storage.join(url, name))
        for name in (MANIFEST, INCOMPLETE)
    )
    return _Found(sizes, complete, _marker(url) if output.WORK in sizes else None)


def _is_there(url: str, found: _Found, own: tuple[int, str]) -> bool:
    """Whether the manifest at the URL is that of the staged result."""
    return found.sizes.get(MANIFEST) == own[0] and digest(storage.join(url, MANIFEST)) == own


def _refuse(url: str, found: _Found, own: str | None, overwrite: bool) -> None:
    """UsageError for what must not be replaced. `own`: the digest of the manifest, if known."""
    if found.complete:
        if not overwrite:
            raise UsageError(
                f"{url}: holds a finished result",
                "choose another --output, or replace it with --overwrite",
            )
    elif found.marker is not None and found.marker.manifest_sha256:
        if own not in (None, found.marker.manifest_sha256) and not overwrite:
            raise UsageError(
                f"{url}: holds an unfinished upload of another result",
                "finish that with its own command, or replace it with --overwrite",
            )
    elif found.sizes.keys() - {output.WORK} or (
        found.marker is None and storage.sizes(storage.join(url, output.WORK))
    ):
        raise UsageError(
            f"{url}: is not empty, and not a result of packer",
            "choose another --output; --overwrite only replaces what packer made",
        )


def _marker(url: str) -> _Marker | None:
    """None when there is none. One that cannot be read is of no result that we know."""
    place = storage.join(url, MARKER)
    if not storage.is_file(place):
        return None
    try:
        with storage.open_bytes(place) as file:
            return msgspec.json.decode(file.read(), type=_Marker)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _Marker("unreadable", cleared=False)


def _mark(url: str, marker: _Marker) -> None:
    content = msgspec.json.encode(marker)
    storage.write(storage.join(url, MARKER), [content], len(content))


def _unmark(url: str) -> None:
    storage.remove(storage.join(url, MARKER))
    storage.remove_folder(storage.join(url, output.WORK))


def _unmark_empty(url: str) -> None:
    with suppress(PackerError):
        if _marker(url) == _Marker("", cleared=False):
            _unmark(url)


@contextmanager
def _reserved(url: str, found: _Found) -> Iterator[None]:
    """Show that the URL can be written to before all the work, rather than after."""
    if found.marker is None:
        _mark(url, _Marker("", cleared=False))
    try:
        yield
    except BaseException:
        _unmark_empty(url)
        raise


def _upload(
    url: str,
    result: Path,
    manifest: dict[str, Any],
    own: tuple[int, str],
    found: _Found,
    notify: Notify,
    show_progress: bool,
) -> None:
    """`own`: size and digest of the manifest."""
    files, marker = _files(result, manifest), _Marker(own[1], cleared=True)
    if found.complete or found.marker != marker:
        _clear(url, found, own[1])
        _mark(url, marker)
    there = storage.sizes(url)
    left = [name for name, file in files.items() if there.get(name) != file.size]
    if len(left) < len(files):
        done = len(files) - len(left)
        notify(f"{url}: going on: {done} of {len(files)} files are uploaded already")
    stop, uploaded = threading.Event(), list[str]()
    total, rest = (sum(files[name].size for name in names) for names in (files, left))
    progress = Progress(total, show=show_progress, doing="uploading")
    progress.skip(1 - rest / total)

    def put(name: str) -> None:
        blocks = _blocks(result / name, files[name].sha256, stop, progress)
        storage.write(storage.join(url, name), blocks, files[name].size)
        uploaded.append(name)

    largest = max(storage.part_bytes(file.size) for file in files.values())
    threads = min(_THREADS, max(1, _MOST_BYTES // largest))
    with closing(progress):
        try:
            _on_threads((partial(put, name) for name in left), threads, stop)
        except PackerError as error:
            done = len(files) - len(left) + len(uploaded)
            kept = f"{done} of {len(files)} files are uploaded; run the same command again to go on"
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
    storage.write(storage.join(url, MANIFEST), blocks, own[0])
    if storage.stat(storage.join(url, MANIFEST), again=True).size != own[0]:
        raise _other_writer(f"{storage.join(url, MANIFEST)}: is not what was uploaded")
    _unmark(url)


def _other_writer(message: str) -> DataError:
    return DataError(message, "let nothing else write there, and run the same command again")


def _clear(url: str, found: _Found, own: str) -> None:
    """Remove what is ours, the manifest first: from there on no result seems complete."""
    ours = {
        name
        for name, size in found.sizes.items()
        if size is not None and any(fnmatch(name, pattern) for pattern in output.OURS)
    }
    if not ours:
        return
    _mark(url, _Marker(own, cleared=False))
    for name in (MANIFEST, INCOMPLETE):
        if name in ours:
            storage.remove(storage.join(url, name))
    rest = sorted(ours - {MANIFEST, INCOMPLETE})
    tasks = (partial(storage.remove, storage.join(url, name)) for name in rest)
    _on_threads(tasks, _THREADS, threading.Event())


def _blocks(
    path: Path, sha256: str | None, stop: threading.Event, progress: Progress
) -> Iterator[bytes]:
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
    if sha256 not in (None, sha.hexdigest()):
        raise DataError(
            f"{path}: is not what was packed: its sha256 differs",
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
    try:
        for _ in range(count):
            threading.Thread(target=work, daemon=True).start()
        while running and not stop.is_set():
            running -= _one_ended(ended, 0.2)
    except KeyboardInterrupt:
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
