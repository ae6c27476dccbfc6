"""The output directory: who may write to it, what may be removed, and when it is complete.

    OUT/.packer/        a run writes everything in here; gone when the result is complete
        run.json        what the run is
        unit-*.json     one for each unit that is packed: see commits.py
        replacing.json  run.json, once all is packed and being put in place
    OUT/manifest.json   gets there last, by rename: with it the result is complete

An earlier result stays whole and readable until `replace` puts the new one in its place. Only
files that packer itself makes are ever removed, and only from a directory that packer itself made.
As long as a directory holds files but no manifest, .packer stays in it to say whose they are.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from packer_cli import storage
from packer_cli.errors import DataError, UsageError, from_os_error
from packer_cli.manifest import INCOMPLETE, MANIFEST, is_manifest
from packer_cli.readers.byte_streams import STDIN
from packer_cli.records import InputFile
from packer_cli.run import RUN, Run, differences, load_run

WORK = ".packer"
UNIT_RECORDS = "unit-*.json"
REPLACING = "replacing.json"
INPUT_TIMES = "input_times.json"
_LOCK = "lock"
_RANK_LOCK = "rank-{}-of-{}." + _LOCK
_TRIES, _SECONDS = 100, 0.05  # to join other ranks: who ends one keeps all out for a moment
OURS = (
    f"shard-{'[0-9]' * 5}*-{'[0-9]' * 3}*.arrow",
    MANIFEST, INCOMPLETE, "state.json", "dataset_info.json", "rejected.jsonl",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "chat_template.tool_use.jinja", "units.jsonl", INPUT_TIMES,
)  # fmt: skip


class InUseError(DataError):
    """Another run is writing to the directory."""


@dataclass(frozen=True)
class Claim:
    """An output directory that is ours.

    ended   the run whose result was put in place just now, because whoever packed it was
            interrupted while doing so
    shared  with other ranks of the same run
    """

    output: Path
    work: Path
    notify: Callable[[str], None]
    ended: Run | None
    shared: bool


@contextmanager
def claimed(
    output: Path,
    files: Sequence[InputFile],
    *,
    may_replace: bool,
    notify: Callable[[str], None],
    rank: tuple[int, int] | None = None,
) -> Iterator[Claim]:
    """Make `output` ours, with the units that an interrupted run has packed.

    They stay there when this one fails, too, for the next; whatever else is left goes.
    `may_replace`: an earlier result. `rank`: and how many there are: others may pack units of the
    same run meanwhile, or have finished it, which is theirs to look at. Raises UsageError when the
    directory holds something that must not be replaced, InUseError when another run is writing
    to it.
    """
    refuse_inputs_inside(output, files)
    try:
        work, created, shared = output / WORK, not output.exists(), rank is not None
        if not (work / REPLACING).exists():
            _refuse_foreign(output, may_replace or shared)
        with ExitStack() as stack:
            if shared:
                stack.callback(_clean, output)
            stack.enter_context(_locked(work, _LOCK, notify, shared=shared))
            try:
                if rank is not None:
                    number, size = rank
                    own = _locked(work, _RANK_LOCK.format(number, size), notify)
                    stack.enter_context(own)
                with _waiting_for(work / f"begin.{_LOCK}"):  # ranks begin at the same time
                    if rank is not None:
                        _refuse_other_ranks(work, size)
                    ended = _ended(output)
                if ended is None:  # now that nobody else can change it
                    _refuse_foreign(output, may_replace or shared)
                yield Claim(output, work, notify, ended, shared)
            finally:
                if not (shared or is_begun(work) or (work / REPLACING).exists()):
                    _remove(output, created)
    except OSError as error:
        raise from_os_error(error, error.filename or output, "write") from error


def begin(claim: Claim, run: Run, side_files: dict[str, bytes], *, may_replace: bool) -> bool:
    """Make the work folder that of `run`, with the units that it has already; False when its
    result is in place. Raises UsageError for units or a result that may not be thrown away.

    `side_files`: those of `run`, by name. `may_replace`: what another run has packed.
    """
    with _waiting_for(claim.work / f"begin.{_LOCK}"):  # ranks begin at the same time
        return _begin(claim, run, side_files, may_replace)


def _begin(claim: Claim, run: Run, side_files: dict[str, bytes], may_replace: bool) -> bool:
    output, work = claim.output, claim.work
    if claim.ended is not None:
        if not differences(claim.ended, run):
            return False
        _refuse_foreign(output, may_replace)
    if run.resumable and (is_begun(work) or (claim.shared and (work / RUN).exists())):
        earlier = load_run(work / RUN)
        differ = (
            ["it is damaged, or of another packer"]
            if earlier is None
            else differences(earlier, run)
        )
        if not differ:
            put_file(work / RUN, run.to_bytes())  # its limits may be others
            return True
        if not may_replace:
            raise UsageError(
                f"{output}: holds an unfinished run that differs: {'; '.join(differ)}",
                "to go on with it, give its options and inputs; to start over, "
                + (f"remove {work} when no rank is at work" if claim.shared else "--overwrite"),
            )
        claim.notify(f"{output}: the unfinished run is thrown away: {'; '.join(differ)}")
    elif not all(map(_is_lock, os.listdir(work))):
        claim.notify(f"{output} holds an unfinished run; starting it again from the beginning")
    _empty(work)
    for name, content in side_files.items():
        write_file(work / name, content)
    put_file(work / RUN, run.to_bytes())
    sync(output)
    if os.access(output.parent, os.R_OK):
        sync(output.parent)  # or a power loss takes all of it, however complete
    return True


def _ended(output: Path) -> Run | None:
    """The run that was interrupted while putting its result in place, which is done now."""
    work = output / WORK
    if not (work / REPLACING).exists():
        return None
    ended = load_run(work / REPLACING)
    return ended if _put_in_place(output) else None


def _clean(output: Path) -> None:
    """Remove the locks of ranks from a result, if this was the last of them."""
    if (output / WORK).is_dir() and holds_result(output):
        with suppress(InUseError), claimed(output, [], may_replace=True, notify=lambda line: None):
            pass


def _refuse_other_ranks(work: Path, size: int) -> None:
    """InUseError when ranks of another world size are at work: both would pack some units."""
    for path in work.glob(_RANK_LOCK.format("*", "*")):
        if not path.match(_RANK_LOCK.format("*", size)):
            with open(path) as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise InUseError(
                        f"{work.parent}: ranks of another --world-size than {size} are at work",
                        "give that --world-size, or wait for them to end",
                    ) from None


def forget(work: Path) -> None:
    """Throw the units of an unfinished run away: nobody is to go on with them."""
    _empty(work)


def is_begun(work: Path) -> bool:
    """Whether units are packed that a run can go on with."""
    return (work / RUN).is_file() and any(work.glob(UNIT_RECORDS))


def _locked(
    work: Path, name: str, notify: Callable[[str], None], *, shared: bool = False
) -> IO[str]:
    """Make the work folder and open a lock in it, held until closed or until the process ends."""
    for attempt in range(_TRIES):
        try:
            work.mkdir(parents=True, exist_ok=True)
            # network file systems want what is locked by several to be open for reading, too
            lock = open(work / name, "w+")  # noqa: SIM115
        except FileNotFoundError:
            continue  # a run that ended just now took its folder with it
        try:
            fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            if not shared or attempt == _TRIES - 1:
                break
            time.sleep(_SECONDS)
            continue
        except OSError as error:  # some network file systems have no locks
            if shared:
                raise DataError(
                    f"{work}: cannot be locked: {error.strerror}; ranks need it to tell the last",
                    "choose an --output on another file system, or leave out --rank",
                ) from error
            notify(f"{work} cannot be locked ({error.strerror}); let no other run write there")
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(work / name)):
                return lock
        lock.close()  # of that run, too: nobody else would meet us at it
    raise InUseError(
        f"{work.parent}: another run is writing there",
        "wait for it to end, or choose another --output",
    )


@contextmanager
def _waiting_for(path: Path) -> Iterator[None]:
    with open(path, "w+") as lock:
        with suppress(OSError):  # said before
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_lock(name: str) -> bool:
    return name.endswith(_LOCK)


def refuse_inputs_inside(output: str | Path, files: Sequence[InputFile]) -> None:
    """UsageError when an input lies in the output, a directory or a URL."""
    real = storage.identity(str(output)).rstrip("/")
    for file in files:
        if file.path != STDIN and storage.identity(file.path).startswith(real + os.sep):
            raise UsageError(
                f"{output}: the input {file.path} lies inside the output directory",
                "choose another --output",
            )


def finished(output: Path) -> UsageError:
    """The error for a result that is not to be replaced."""
    return UsageError(
        f"{output}: holds a finished result",
        "choose another --output, or replace it with --overwrite",
    )


def _refuse_foreign(output: Path, overwrite: bool) -> None:
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output}: exists and is not a directory", "choose another --output")
    if not output.is_dir() or not os.listdir(output):
        return
    if holds_result(output):
        if not overwrite:
            raise finished(output)
    elif not (output / WORK).is_dir():
        raise UsageError(
            f"{output}: is not empty, and not a result of packer",
            "choose another --output; --overwrite only replaces what packer made",
        )


def _empty(work: Path) -> None:
    """Remove all but the locks; what says that a result is being put in place goes last."""
    for path in sorted(work.iterdir(), key=lambda path: path.name == REPLACING):
        if not _is_lock(path.name):
            path.unlink()


def _remove(output: Path, created: bool) -> None:
    """Remove the work folder, the lock last: whoever finds it gone must find all gone."""
    work = output / WORK
    with suppress(OSError):
        _empty(work)
        if holds_result(output) or os.listdir(output) == [WORK]:
            for name in sorted(os.listdir(work), key=lambda name: name == _LOCK):
                (work / name).unlink()
            work.rmdir()
            if created:
                output.rmdir()  # unless it holds a result


@contextmanager
def written(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, of the work folder; on the disk afterwards."""
    try:
        with open(path, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise from_os_error(error, path, "write") from error


def write_file(path: Path, content: bytes) -> None:
    """Write a file of the work folder, down to the disk."""
    with written(path) as file:
        file.write(content)


def put_file(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Write a file that is there whole or not at all. `durable`: after a power loss, too."""
    part = path.with_name(path.name + ".part")
    try:
        if durable:
            write_file(part, content)
        else:
            part.write_bytes(content)
        os.rename(part, path)
    except OSError as error:
        raise from_os_error(error, path, "write") from error
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """Bring a file or a directory to the disk (fsync)."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise from_os_error(error, path, "write") from error


def holds_result(output: Path) -> bool:
    """Whether a finished result is there, also one that is marked incomplete."""
    return is_manifest(output / MANIFEST) or is_manifest(output / INCOMPLETE)


def replace(output: Path) -> None:
    """Put the result in the work folder in the place of the earlier one, the manifest last.

    Every file must be on the disk already, the manifest too. From here on there is no way back:
    whoever comes next finishes it.
    """
    work = output / WORK
    try:
        sync(work)  # first: what is being put in place must be there
        os.rename(work / RUN, work / REPLACING)
        sync(work)
        _put_in_place(output)
    except OSError as error:
        raise from_os_error(error, error.filename or output, "write") from error


def _put_in_place(output: Path) -> bool:
    """What `replace` does, from wherever it ended. The old manifest goes first: whatever moment
    this ends at, a directory with a manifest is complete. False when the new one is damaged or
    gone: the run is then an unfinished one again.
    """
    work = output / WORK
    if is_manifest(work / MANIFEST):
        new = msgspec.json.decode((work / MANIFEST).read_bytes())
        names = {INPUT_TIMES, *new["side_files"], *(shard["file"] for shard in new["shards"])}
        for manifest in (MANIFEST, INCOMPLETE):
            (output / manifest).unlink(missing_ok=True)
        sync(output)
        for pattern in OURS:
            for path in output.glob(pattern):
                # what is new is still in the work folder; what is not is in its place already
                if path.name not in names or (work / path.name).exists():
                    path.unlink()
        for name in sorted(names):
            if (work / name).exists():
                os.replace(work / name, output / name)
        sync(output)
        # a result that missed --max-loss gets a name that says so
        os.replace(work / MANIFEST, output / (INCOMPLETE if "incomplete" in new else MANIFEST))
        sync(output)
    elif (work / MANIFEST).exists() or not holds_result(output):
        os.rename(work / REPLACING, work / RUN)
        return False
    _empty(work)
    return True
