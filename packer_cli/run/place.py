"""Put a result in its place: it is complete or absent, and nothing that packer did not write is
touched, whenever a run is killed or the power fails.

OUT/.packer/ID/          the folder in which a run writes; locked, gone when the result is in place
run.json, unit-*.json    what is packed so far: see run_plan.py
replacing.json           from when all is packed until it is in place: the files of both results
OUT/manifest.json        with it the result is complete

Shards are named by their content, so the new result lies in OUT beside the earlier one until the
rename of the manifest makes it the result, in one step on every file system. Then the files that
the earlier manifest lists are removed, and no others. A file in the way that it does not list, or
lists with another size, is an error before anything is changed. A URL gets the same files, the
manifest last, and has the journal in URL/.packer/uploading.json from before the work.

Links are not followed. Locks end with the processes that hold them (flock). A file costs a stat and
a rename, or an upload; none is read again.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import msgspec

from packer_cli import storage
from packer_cli.errors import DataError, UsageError, from_os_error
from packer_cli.options.run_options import RunOptions
from packer_cli.progress import Progress
from packer_cli.result.existing import (
    MANIFESTS,
    Journal,
    OutputState,
    find_own,
    holds_result,
    in_the_way,
    look,
)
from packer_cli.result.layout import ID, MANIFEST, SHARD_NAME, SIDE_FILES, UPLOADING, WORK, digest
from packer_cli.run.run_plan import RUN, UNIT_RECORDS
from packer_cli.storage import OTHER, make_folders, size_of

LOCK, REPLACING = "lock", "replacing.json"
_RANK_LOCK = "rank-{}-of-{}.lock"
_WORK_FILES = re.compile(
    r"(lock|begin\.lock|rank-[0-9]{1,9}-of-[0-9]{1,9}\.lock|(run|replacing)\.json"
    r"|unit-[0-9]{5,20}\.json|rejected-[0-9]{5,20}\.jsonl|squared_lengths-[0-9]{5,20}\.bin"
    rf"|{SHARD_NAME}|{'|'.join(map(re.escape, sorted({*SIDE_FILES, *MANIFESTS})))})(\.part)?"
)
_SECONDS, _SILENT = 0.05, 200  # between tries; a note comes after ten seconds
_FEW = 5  # tries: workers of a run that was killed hold its lock until they have ended, too
_MANY = 100  # tries of ranks: one that ends keeps all others out for a moment
_AT_ONCE = 8  # files of an upload


class InUseError(DataError):
    """Another run is writing to the directory."""


# A folder of packer's own, and locks


@contextmanager
def own_folder(
    parent: Path, name: str, output: Path, options: RunOptions, *, shared: bool = False
) -> Iterator[Path]:
    """Lock packer's folder `name/ID`, made if necessary; `shared`: with other ranks.

    Raises UsageError if something else lies there, InUseError if another run is writing there.
    """
    path, tries = parent / name / ID, _MANY if shared else _FEW
    for _ in range(_MANY):
        with ExitStack() as stack:
            try:
                find_own(parent, name)
                for folder in (path.parent, path):
                    with suppress(FileExistsError):
                        os.mkdir(folder)
                lock = locked(path / LOCK, output, options, shared=shared, tries=tries)
                stack.enter_context(lock)
            except FileNotFoundError:  # the run that held the lock has just removed the folder
                continue
            yield path
            return
    raise InUseError(f"{output}: other runs keep starting and ending there", "run it again")


@contextmanager
def locked(
    path: Path, output: Path, options: RunOptions, *, shared: bool = False, tries: int | None = _FEW
) -> Iterator[None]:
    """Hold a lock file, made if necessary; `shared`: with others that share it.

    `tries`: a twentieth of a second apart; None: until it is free, with a note after a while.
    Raises InUseError if another process holds it, DataError if the file system has no locks,
    FileNotFoundError if the file has just been removed with its folder.
    """
    for attempt in count(1):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            if _flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, output, options):
                if os.path.samestat(os.lstat(path), os.fstat(descriptor)):
                    yield
                    return
                continue  # the run that held it has removed it
        finally:
            os.close(descriptor)
        if attempt == tries:
            raise InUseError(
                f"{output}: another run is writing there",
                "wait until it ends, or choose another --output",
            )
        if tries is None and attempt == _SILENT:
            options.notify(f"{output}: waiting for another rank, which holds {path.name} there")
        time.sleep(_SECONDS)


def _flock(descriptor: int, mode: int, output: Path, options: RunOptions) -> bool:
    try:
        fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if not options.no_lock:
            raise DataError(
                f"{output}: cannot be locked: {error.strerror}",
                "choose a file system with locks, or add --no-lock if you are sure that no "
                "other run writes there",
            ) from error
    return True


def _files_in(folder: Path, *, foreign: bool = False) -> list[str]:
    """Return the names of packer's files in its folder, or of others there."""
    sizes = storage.sizes(str(folder)).items()
    own = {name: size != OTHER and bool(_WORK_FILES.fullmatch(name)) for name, size in sizes}
    return [name for name, is_own in own.items() if is_own != foreign]


def discard(work: Path) -> None:
    """Remove what a run has packed, all but locks: its record first, without which the other files
    belong to no run, and the journal of a switch last.
    """
    for name in sorted(_files_in(work), key=lambda name: (name == REPLACING, name != RUN)):
        if not name.endswith(LOCK):
            os.unlink(work / name)


def remove_own(folder: Path) -> None:
    """Remove packer's files in its folder, the lock last, and the folder unless it holds more."""
    for name in sorted(_files_in(folder), key=LOCK.__eq__):
        os.unlink(folder / name)
    with suppress(OSError):
        os.rmdir(folder)
        os.rmdir(folder.parent)
    storage.sync(folder.parents[1])  # or a power loss brings it back


# The output of a run


@dataclass(frozen=True)
class LockedOutput:
    """An output directory that this run alone may change, or the ranks of it.

    work        packer's folder in it
    was_placed  an interrupted run had packed its result, which has just been put in its place
    """

    path: Path
    work: Path
    options: RunOptions
    was_placed: bool = False

    @property
    def may_replace(self) -> bool:
        """True if packed units of another run may be discarded. --add without an earlier result is
        a plain run: it must not discard them.
        """
        return self.options.overwrite or (self.options.add and holds_result(self.path))

    def begin_lock(self) -> AbstractContextManager[None]:
        """Hold the lock of ranks that begin at the same time."""
        return locked(self.work / "begin.lock", self.work, self.options, tries=None)


@contextmanager
def locked_output(output: Path, options: RunOptions) -> Iterator[LockedOutput]:
    """Lock an output directory, made if necessary, and finish a switch that was interrupted there.

    When the run fails, packed units stay for the next one, and packer's other files go. Raises
    UsageError if the directory is not packer's, InUseError if another run is writing to it.
    """
    shared = options.as_rank is not None
    try:
        created = not output.exists()
        if not (created or output.is_dir()):
            raise UsageError(f"{output}: exists and is not a directory", "choose another --output")
        make_folders(output)
        look(output).refuse_foreign(())
        with ExitStack() as stack:
            if shared:
                stack.callback(lambda: clean(output, options) if holds_result(output) else None)
            work = stack.enter_context(own_folder(output, WORK, output, options, shared=shared))
            try:
                if foreign := _files_in(work, foreign=True):
                    raise in_the_way(work, foreign)
                if shared:
                    _hold_rank(stack, work, output, options)
                ours = LockedOutput(output, work, options)
                with ours.begin_lock():
                    was_placed = _finish_switch(output, work)
                yield replace(ours, was_placed=was_placed)
            finally:
                if not (shared or is_begun(work) or (work / REPLACING).exists()):
                    remove_own(work)
                    if created:
                        with suppress(OSError):  # it holds a result
                            output.rmdir()
    except OSError as error:
        raise from_os_error(error, error.filename or output, "write") from error


def _hold_rank(stack: ExitStack, work: Path, output: Path, options: RunOptions) -> None:
    """Hold the lock of a rank. Raises InUseError if ranks of another world size are at work."""
    rank, size = options.rank, options.world_size
    stack.enter_context(locked(work / _RANK_LOCK.format(rank, size), output, options))
    for name in os.listdir(work):
        match = re.fullmatch(_RANK_LOCK.format("[0-9]+", "([0-9]+)"), name)
        if match and int(match[1]) != size:
            try:
                with locked(work / name, output, options, shared=True):
                    pass
            except InUseError:
                raise InUseError(
                    f"{output}: ranks of another --world-size than {size} are at work",
                    "give that --world-size, or wait for them to end",
                ) from None


def clean(output: Path, options: RunOptions) -> None:
    """Remove what runs leave that none continues, such as the locks of ranks, and finish a switch
    that was interrupted, unless a run is at work.
    """
    if (output / WORK).is_dir():
        alone = replace(options, rank=None, world_size=None)
        with suppress(InUseError), locked_output(output, alone):
            pass


def is_begun(work: Path) -> bool:
    """True if there are packed units that a run can continue from."""
    return (work / RUN).is_file() and any(work.glob(UNIT_RECORDS))


def is_replacing(output: Path) -> bool:
    """True if a run is putting its result in its place, or was interrupted while doing so."""
    work = find_own(output, WORK)
    return work is not None and (work / REPLACING).is_file()


# From one result to another


def switch(output: LockedOutput, journal: Journal, content: bytes) -> None:
    """Put the result in the work folder in the place of the earlier one. All of its files are on
    the disk but the manifest, which is written here.
    """
    output.options.before_switch()
    storage.write_file(output.work / next(reversed(journal.new)), content)
    storage.sync(output.work)  # first: what the journal lists must be there
    storage.put_file(output.work / REPLACING, msgspec.json.encode(journal))
    _finish_switch(output.path, output.work)


def _finish_switch(output: Path, work: Path) -> bool:
    """Do the rest of a switch, by its journal; False if there is none."""
    try:
        journal = msgspec.json.decode(storage.read_bytes(work / REPLACING), type=Journal)
    except FileNotFoundError:
        return False
    except ValueError:
        journal = Journal({}, {}, "")
    new, old = journal.new, journal.old
    coming = [name for name in new if size_of(work / name) is not None]
    manifest = next(reversed(new), MANIFEST)
    path = work / manifest if manifest in coming else output / manifest
    if size_of(path) is None or digest(path)[1] != journal.sha256:
        os.unlink(work / REPLACING)  # the manifest or the journal is lost: an unfinished run again
        return False
    state = OutputState(output, storage.sizes(str(output)), old, is_begun=True)
    state.refuse_foreign(coming, new)
    for name in coming:
        if name == manifest:
            storage.sync(output)
        os.rename(work / name, output / name)
    storage.sync(output)
    for name in old.keys() - new.keys():
        if state.sizes.get(name) == old[name]:
            os.unlink(output / name)
    storage.sync(output)
    discard(work)
    return True


def upload(state: OutputState, folder: Path, journal: Journal, options: RunOptions) -> None:
    """Upload a result in the place of what was at the URL when its `state` was looked at.

    Raises InUseError if another run has put its result there meanwhile.
    """
    url, sizes = str(state.place), journal.new
    announce(state, journal)
    *files, manifest = sizes
    with Progress(sum(sizes.values()), show=options.progress, doing="uploading") as progress:
        for begin in range(0, len(files), _AT_ONCE):
            batch = files[begin : begin + _AT_ONCE]
            storage.upload([folder / name for name in batch], url)
            progress.read(sum(sizes[name] for name in batch), 0)
    options.before_switch()
    if look(url).content != state.content:
        raise InUseError(
            f"{url}: another run has put its result there meanwhile",
            "run the same command again, which compares with that result",
        )
    storage.write(storage.join(url, manifest), storage.read_bytes(folder / manifest))
    clean_url(state, journal.new)


def announce(state: OutputState, journal: Journal | None = None) -> None:
    """Write the journal of an upload, or that one begins; so it is known what it leaves."""
    content = msgspec.json.encode(journal or Journal({}, state.owned, ""))
    storage.write(storage.join(str(state.place), UPLOADING), content)


def clean_url(state: OutputState, kept: Iterable[str]) -> None:
    """Remove packer's files but those that are `kept`, and the journal."""
    url = str(state.place)
    for name in sorted(state.owned.keys() - {*kept}):
        storage.remove(storage.join(url, name))
    storage.remove(storage.join(url, UPLOADING))
    storage.remove_folder(storage.join(url, WORK))
