"""Results at a URL: packed in a local directory with all its guarantees, then uploaded.

    URL/shard-..., side files     what this run has uploaded already is not uploaded again
    URL/.packer/publishing.json   what is being uploaded: its manifest's sha256, and its files
    URL/manifest.json             completes the result; then the files of the earlier one go

Stores have no locks, but they replace an object in one step, and shards are named by their content.
So an earlier result stays whole while shards are uploaded; the few side files follow, and at once
the manifest. Only what packer's records list, the marker and manifests, is replaced or removed: its
content is compared, or the store's version of it, where a record has that.

    STAGING/.packer/ID/                 the run, as in any output directory, and its result
    STAGING/.packer/ID/staged           the digest of the URL
    STAGING/.packer/ID/uploaded.jsonl   what has been uploaded, with the store's versions of it
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from packer_cli import storage
from packer_cli.errors import (
    DataError,
    Interrupted,
    PackerError,
    UsageError,
    from_os_error,
    os_errors,
)
from packer_cli.interrupts import Task, run_all
from packer_cli.options.option import refuse
from packer_cli.options.run_options import RunOptions
from packer_cli.ownership import LOCK, Listed, in_the_way, make_folders, put_file
from packer_cli.progress import Progress
from packer_cli.result.layout import (
    INCOMPLETE,
    INPUT_TIMES,
    MANIFEST,
    SIDE_FILES,
    WORK,
    built,
    digest,
    is_named_by_content,
)
from packer_cli.result.manifest import Result, load_as_is, looks_like_one, parse
from packer_cli.run import destination as output
from packer_cli.run.destination import STAGED, UPLOADED, Claim, Earlier
from packer_cli.run.identity import Run
from packer_cli.run.update import refuse_other_result

_BEGUN = {f"{STAGED}.part"}
_MARKER = f"{WORK}/publishing.json"
_BLOCK_BYTES = 1 << 20
_THREADS = 8
_MOST_BYTES = 128 << 20  # of parts in memory, counted once
_WAIT_SECONDS = 1.2  # for threads to undo what they have begun to write


def check_options(url: str, options: RunOptions) -> None:
    """Raise UsageError for options that do not work with a URL."""
    refuse((
        (not url.partition("://")[2].strip("/"), f"--output: {url}: names no folder",
         "for example s3://bucket/folder"),
        (options.update, f"{'--add' if options.add else '--update'}: {url}: a URL, and only local "
         "results can be updated",
         "update a local copy and upload that, or pack everything again with --overwrite"),
        (options.as_rank, f"--rank: {url}: a URL, and ranks only share local directories",
         "give the ranks a directory that all of them see, then upload it, manifest.json last"),
    ))  # fmt: skip


def publish(
    url: str,
    run: Run,
    options: RunOptions,
    pack: Callable[[Claim, Callable[[Claim], None]], Result | None],
) -> Result:
    """Pack `run` and upload its result to a URL; returns its manifest.

    `pack` packs it in a local directory, or goes on with it, and puts it in place by what it is
    given. A result that is marked incomplete is not uploaded, and stays in the staging directory.
    Raises PackerError.
    """
    output.refuse_inputs_inside(url, run.files)

    def put(claim: Claim) -> None:
        manifest = parse((claim.work / MANIFEST).read_bytes())
        if manifest.incomplete:
            output.replace(claim)
            return
        _Upload(url, claim, manifest).go_on(look(url))
        output.discard(claim)

    try:
        with _staged(url, run, options) as claim:
            there = look(url)
            staged, marker = claim.inside.read(MANIFEST) or b"", there.marker or _Marker("")
            is_ours = there.result is not None and there.result.content == staged
            if is_ours and marker.manifest_sha256 in ("", hashlib.sha256(staged).hexdigest()):
                _unmark(url, marker)  # it was killed at its very end
                output.discard(claim)
                there = look(url)
            if there.result and not there.marker and (is_ours or not options.overwrite):
                try:
                    refuse_other_result(url, there.result.manifest, run)
                except UsageError:
                    if not options.overwrite:
                        raise
                else:
                    options.notify(f"{url}: up to date")
                    return there.result.manifest
            _refuse_to_replace(url, there, None, overwrite=options.overwrite)
            with _reserved(url, there):
                manifest = pack(claim, put) or load_as_is(claim.output)
            if manifest.incomplete:
                _unmark_empty(url)
            return manifest
    except OSError as error:
        raise from_os_error(error, error.filename or url, "write") from error


def default_staging(url: str) -> Path:
    """The default staging directory: the same for each run of a user on this machine.

    `tempfile` would try its folders by writing to them, and a kill would leave what it wrote.
    """
    mine = hashlib.sha256(f"{os.getuid()}\n{url.rstrip('/')}".encode()).hexdigest()
    named = os.environ.get("TMPDIR", "")
    return Path(named if os.path.isdir(named) else "/tmp", f"packer-{mine[:20]}")  # noqa: S108


@contextmanager
def _staged(url: str, run: Run, options: RunOptions) -> Iterator[Claim]:
    """The staging directory, claimed, with what an equal run left in it."""
    path = options.staging
    if path is None:
        path = default_staging(url)
        _make_private(path)
    elif path.exists() and not path.is_dir():
        raise UsageError(f"--staging: {path}: is not a directory", "choose another --staging")
    make_folders(path)
    mine = hashlib.sha256(url.rstrip("/").encode()).hexdigest().encode()
    try:
        if not _is_staging(path):
            raise UsageError(
                f"--staging: {path}: is neither empty nor left by an interrupted upload",
                "choose another --staging",
            )
        with output.claimed(path, run.files, options) as claim:
            if _holds_work(claim) and claim.inside.read(STAGED) not in (None, mine):
                raise UsageError(
                    f"--staging: {path}: holds files for an upload to another URL",
                    "choose another --staging",
                )
            put_file(claim.work / STAGED, mine)
            try:
                yield claim
            finally:
                if not _holds_work(claim):
                    for name in filter(claim.inside.is_file, (UPLOADED, STAGED)):
                        claim.inside.unlink(name)
    except PackerError as error:
        if error.message.startswith(url):
            raise
        tip = error.tip.replace("another --output", "another --staging")
        raise type(error)(error.message, tip) from error
    finally:
        with suppress(OSError):
            path.rmdir()


def _make_private(folder: Path) -> None:
    """Make the folder for this user alone: others can foresee its name in a shared directory."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise UsageError(f"{folder}: is not a directory of yours", "choose one with --staging")


def _is_staging(path: Path) -> bool:
    """True if it is empty, but for what a run killed at its beginning left, or has our record."""
    names = {*os.listdir(path)}
    work = output.work_of(path) if WORK in names else None
    inside = {*os.listdir(work)} if work else set[str]()
    return STAGED in inside or (names <= {WORK} and all(LOCK in one for one in inside - _BEGUN))


def _holds_work(claim: Claim) -> bool:
    place = claim.output
    return output.is_begun(claim.work) or output.holds_result(place) or output.is_replacing(place)


@built
class _Marker(msgspec.Struct, frozen=True):
    """`manifest_sha256` "": nothing is uploaded yet. By name: `files` of the new result, and what
    of `earlier` ones lay there before, with size and version, which goes once it is complete.
    """

    manifest_sha256: str
    files: dict[str, Listed] = {}
    earlier: dict[str, tuple[int, int]] = {}


class _There(NamedTuple):
    """The objects at the URL. `result`: a finished one; `problem`: why it cannot be used."""

    objects: dict[str, storage.Stat | None]
    result: Earlier | None
    problem: UsageError | None
    marker: _Marker | None


def look(url: str) -> _There:
    if storage.is_file(url):
        raise UsageError(f"{url}: exists and is not a folder", "choose another --output")
    objects, result, problem = _objects(url), None, None
    for name in (MANIFEST, INCOMPLETE):
        content = _read(url, name) if objects.get(name) else b""
        if looks_like_one(content):
            try:
                result = output.relied_on(storage.join(url, name), content)
            except UsageError as error:
                problem = error
            break
    return _There(objects, result, problem, _marker_at(url) if WORK in objects else None)


def _objects(url: str) -> dict[str, storage.Stat | None]:
    """By name; None for folders, and for links and pipes, which some stores have."""
    found = storage.objects(url).items()
    return {name: one if one and one.regular else None for name, one in found}


def _read(url: str, name: str) -> bytes:
    return storage.read_bytes(storage.join(url, name))


def _refuse_to_replace(url: str, there: _There, own: str | None, *, overwrite: bool) -> None:
    """Raise UsageError for what must not be replaced. `own`: the manifest's digest, if known."""
    if there.result or there.problem:
        if not overwrite:
            raise output.finished(url)
        if there.problem:
            raise there.problem
    elif there.marker is not None and there.marker.manifest_sha256:
        if own not in (None, there.marker.manifest_sha256) and not overwrite:
            raise UsageError(
                f"{url}: holds an unfinished upload of another result",
                "finish that with its own command, or replace it with --overwrite",
            )
    elif there.objects.keys() - {WORK} or (
        there.marker is None and storage.objects(storage.join(url, WORK))
    ):
        raise UsageError(
            f"{url}: is not empty, and not a result of packer",
            "choose another --output; --overwrite only replaces what packer made",
        )


def _marker_at(url: str) -> _Marker | None:
    """None when there is none. UsageError for one that is not packer's."""
    place = storage.join(url, _MARKER)
    inside, name = _objects(storage.join(url, WORK)), storage.base_name(place)
    if name not in inside:
        return None
    try:
        return msgspec.json.decode(_read(url, _MARKER) if inside[name] else b"", type=_Marker)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise UsageError(
            f"{place}: is not packer's", "move it elsewhere, or choose another --output"
        ) from None


def _mark(url: str, marker: _Marker) -> None:
    content = msgspec.json.encode(marker)
    storage.write(storage.join(url, _MARKER), [content], len(content))


def _unmark(url: str, marker: _Marker) -> None:
    """Remove what an earlier result left, unless it is another by now, then the marker."""
    objects = _objects(url)
    for name, seen in sorted(marker.earlier.items()):
        found = objects.get(name)
        if name not in marker.files and found is not None and found[:2] == seen:
            storage.remove(storage.join(url, name))
    storage.remove(storage.join(url, _MARKER))
    storage.remove_folder(storage.join(url, WORK))


def _unmark_empty(url: str) -> None:
    with suppress(PackerError):
        if _marker_at(url) == _Marker(""):
            _unmark(url, _Marker(""))


@contextmanager
def _reserved(url: str, there: _There) -> Iterator[None]:
    """Prove that the URL can be written to before the work, not after."""
    if there.marker is None:
        _mark(url, _Marker(""))
    try:
        yield
    except BaseException:
        _unmark_empty(url)
        raise


class _Upload:
    """A staged result on its way to a URL."""

    def __init__(self, url: str, claim: Claim, manifest: Result) -> None:
        self.url, self.folder, self.options = url, claim.work, claim.options
        self.manifest, self.record = digest(self.folder / MANIFEST), self.folder / UPLOADED
        hashes = {shard.file: shard.sha256 for shard in manifest.shards}
        hashes |= dict(sorted(manifest.side_files.items()))
        hashes[INPUT_TIMES] = digest(self.folder / INPUT_TIMES)[1]
        self.files = {
            name: Listed((self.folder / name).stat().st_size, sha256)
            for name, sha256 in hashes.items()
        }
        self.uploaded = dict[str, tuple[str, int]]()
        with suppress(OSError):
            for line in self.record.read_bytes().splitlines():
                with suppress(ValueError):  # what a power loss has cut short is uploaded again
                    name, sha256, version = msgspec.json.decode(line, type=tuple[str, str, int])
                    if version:  # else the store does not tell
                        self.uploaded[name] = sha256, version

    def go_on(self, there: _There) -> None:
        """Upload what is not there yet, the manifest last; then remove the earlier result."""
        url, (size, sha256) = self.url, self.manifest
        _refuse_to_replace(url, there, sha256, overwrite=self.options.overwrite)
        marker, places = _Marker(sha256, self.files), {*self.files, MANIFEST}
        goes_on = there.marker is not None and replace(there.marker, earlier={}) == marker
        own = self._own(there, places if goes_on else {*there.objects})
        if blocked := places & (there.objects.keys() - own.keys()):
            raise in_the_way(url, blocked)
        if goes_on and there.marker is not None:
            marker = there.marker
        else:
            own.pop(MANIFEST, None)
            marker = replace(marker, earlier=own)
            _mark(url, marker)
        left = [name for name in self.files if not self._is_uploaded(name, there.objects)]
        if 0 < len(left) < len(self.files):
            self.options.notify(f"{url}: continuing: {self._done(left)} are already uploaded")
        total = sum(file.size or 0 for file in self.files.values())
        progress = Progress(total, show=self.options.progress, doing="uploading")
        progress.skip(1 - sum(self.files[name].size or 0 for name in left) / total)
        with progress:
            self._put_all(left, progress)
        self.options.before_switch()
        self._check_uploaded(marker)
        self._put(MANIFEST, Listed(size, sha256), progress)
        if storage.stat(storage.join(url, MANIFEST), again=True).size != size:
            raise _other_writer(f"{storage.join(url, MANIFEST)}: is not what was uploaded")
        _unmark(url, marker)

    def _own(self, there: _There, names: Collection[str]) -> dict[str, tuple[int, int]]:
        """The objects that are packer's, with their sizes and versions."""
        own = dict[str, tuple[int, int]]()

        def compare(name: str, found: storage.Stat) -> None:
            if self._is_own(name, found, there):
                own[name] = found[:2]
            progress.read(found.size, 0)

        objects = {n: one for n, one in there.objects.items() if n in names and one is not None}
        tasks: list[Task] = [partial(compare, *one) for one in sorted(objects.items())]
        total = sum(found.size for found in objects.values())
        show = self.options.progress and total > 0
        with Progress(total, show=show, doing="comparing") as progress:
            run_all(tasks, _THREADS, self.options.stop, wait_seconds=_WAIT_SECONDS)
        return own

    def _is_own(self, name: str, found: storage.Stat, there: _There) -> bool:
        """True for what is as packer's records list it or the result is to have it, and for the
        beginning of what is being put there, which stores without whole objects may have. It is
        read, unless its version was recorded.
        """
        result, marker = there.result, there.marker or _Marker("")
        recorded = found.version and marker.earlier.get(name) == found[:2]
        if recorded or self._is_uploaded(name, there.objects):
            return True
        if name in (MANIFEST, INCOMPLETE):
            return result is not None and _read(self.url, name) == result.content
        if name == INPUT_TIMES:  # no manifest has its digest
            return output.is_input_times(_read(self.url, name))
        new, put = self.files.get(name), marker.files.get(name)
        listed = [one for one in (new, put, result and result.files.get(name)) if one]
        if any(file.size in (None, found.size) for file in listed):
            sha256 = digest(storage.join(self.url, name), self.options.stop.is_set)[1]
            if new and sha256 == new.sha256:
                self.uploaded[name] = sha256, found.version
            if sha256 in {file.sha256 for file in listed}:
                return True
        if put is None or found.size >= (put.size or 0):
            return False
        return is_named_by_content(name) or (put == new and self._begins(name, found.size))

    def _begins(self, name: str, size: int) -> bool:
        """True if an object of this size holds the beginning of a side file."""
        with open(self.folder / name, "rb") as file:
            begin = hashlib.sha256(file.read(size)).hexdigest()
        return digest(storage.join(self.url, name)) == (size, begin)

    def _is_uploaded(self, name: str, objects: dict[str, storage.Stat | None]) -> bool:
        """True if what is there under a name is known to be what the result has there."""
        found, file = objects.get(name), self.files.get(name)
        if found is None or file is None or found.size != file.size:
            return False
        return self.uploaded.get(name) == (file.sha256, found.version)

    def _done(self, left: list[str]) -> str:
        return f"{len(self.files) - len(left)} of {len(self.files)} files"

    def _put_all(self, left: list[str], progress: Progress) -> None:
        """Upload files, the side files last: an earlier result has the same names."""
        largest = max(storage.part_bytes(file.size or 0) for file in self.files.values())
        threads = min(_THREADS, max(1, _MOST_BYTES // largest))

        def put(name: str) -> None:
            self._put(name, self.files[name], progress)

        try:
            for side_files in (False, True):
                names = [name for name in left if (name in SIDE_FILES) == side_files]
                tasks: list[Task] = [partial(put, name) for name in names]
                # a request may take minutes: threads in one write nothing after it
                run_all(tasks, threads, self.options.stop, wait_seconds=_WAIT_SECONDS)
        except PackerError as error:
            rest = [name for name in left if name not in self.uploaded]
            kept = f"{self._done(rest)} are uploaded; run the same command again to continue"
            again = isinstance(error, Interrupted) or not error.tip
            tip = kept if again else f"{error.tip}; {kept}"
            raise type(error)(error.message, tip) from error

    def _put(self, name: str, file: Listed, progress: Progress) -> None:
        place = storage.join(self.url, name)
        storage.write(place, self._blocks(name, file, progress), file.size or 0)
        self.uploaded[name] = file.sha256, storage.stat(place, again=True).version
        with open(self.record, "ab") as record:
            record.write(msgspec.json.encode((name, *self.uploaded[name])) + b"\n")

    def _blocks(self, name: str, file: Listed, progress: Progress) -> Iterator[bytes]:
        """A file's content. DataError when it is not what was packed, Interrupted to stop."""
        path, sha = self.folder / name, hashlib.sha256()
        with os_errors(path), open(path, "rb") as opened:
            while block := opened.read(_BLOCK_BYTES):
                if self.options.stop.is_set():
                    raise Interrupted("interrupted")
                sha.update(block)
                yield block
                progress.read(len(block), 0)
        if file.sha256 != sha.hexdigest():
            raise DataError(
                f"{path}: has changed since it was packed: its sha256 differs",
                "remove the directory, check its disk, and run the same command again",
            )

    def _check_uploaded(self, marker: _Marker) -> None:
        """Raise DataError when somebody else writes there."""
        objects = _objects(self.url)
        for name, file in self.files.items():
            place = storage.join(self.url, name)
            # some stores call a version otherwise in a list than in an answer about one object
            if not self._is_uploaded(name, objects) and (
                not objects.get(name) or digest(place) != file
            ):
                raise _other_writer(f"{place}: is not what was uploaded")
        if _marker_at(self.url) != marker:
            raise _other_writer(f"{self.url}: another run is writing there")


def _other_writer(message: str) -> DataError:
    return DataError(message, "let nothing else write there, and run the same command again")
