"""The output directory: who may write to it, and how far a run in it has come.

OUT/.packer/<id>/   a run writes everything in here; gone when the result is complete
run.json        the run: inputs, options, tokenizer and units
unit-*.json     one for each unit that is packed: see commits.py
OUT/manifest.json   with it the result is complete: see replacing.py
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from packer_cli import storage
from packer_cli.durable import make_folders, put_file, sync, write_file
from packer_cli.errors import UsageError, from_os_error
from packer_cli.inputs.byte_streams import STDIN
from packer_cli.locks import LOCK, InUseError, locked, locked_folder
from packer_cli.ownership import (
    Folder,
    OwnFolder,
    identity_of,
    in_the_way,
    is_leftover,
    remove_leftovers,
)
from packer_cli.records import InputFile, Notify
from packer_cli.result.layout import (
    INCOMPLETE,
    INPUT_TIMES,
    MANIFEST,
    REJECTED,
    SHARD_NAME,
    SIDE_FILES,
    SQUARED_LENGTHS,
    TOKENIZER_FILES,
    WORK,
)
from packer_cli.run.commits import UNIT_RECORDS
from packer_cli.run.contents import as_packed_in
from packer_cli.run.identity import RUN, Run, differences, load_run
from packer_cli.run.replacing import (
    REPLACING,
    earlier_result,
    holds_result,
    is_own,
    listed,
    put_in_place,
    replace_earlier,
)

_BEGIN_LOCK, _RANK_LOCK = "begin.lock", "rank-{}-of-{}.lock"
_TRIES = 100  # to join other ranks: one that ends keeps all others out for a moment
_WORK_FILES = re.compile(
    r"(lock|begin\.lock|rank-[0-9]{1,9}-of-[0-9]{1,9}\.lock|(run|replacing|earlier|manifest)\.json"
    r"|(unit|input)-[0-9]{5,20}\.json|rejected-[0-9]{5,20}\.jsonl|squared_lengths-[0-9]{5,20}\.bin"
    rf"|{SHARD_NAME}"
    rf"|{'|'.join(map(re.escape, sorted(SIDE_FILES)))})(\.part)?"
)


@dataclass(frozen=True)
class Claim:
    """An output directory that is ours.

    folder, own  the directory and our folder in it, held open; `work` is the path of the latter
    ended        the run whose result has just been put in place, because whoever packed it was
                 interrupted while doing so
    shared       with other ranks of the same run
    no_lock      go on where there are no locks
    """

    output: Path
    work: Path
    folder: Folder
    own: OwnFolder
    notify: Notify
    ended: Run | None
    shared: bool
    no_lock: bool


@contextmanager
def claimed(
    output: Path,
    files: Sequence[InputFile],
    *,
    may_replace: bool,
    notify: Notify,
    rank: tuple[int, int] | None = None,
    no_lock: bool = False,
) -> Iterator[Claim]:
    """Claim `output`, with the units that an interrupted run has packed.

    They stay there when this one fails, too, for the next; whatever else is left goes.
    `may_replace`: an earlier result. `rank`: and how many there are: others may pack units of the
    same run meanwhile, or have finished it, which is theirs to look at. `no_lock`: go on where
    there are no locks. Raises UsageError when the directory holds something that must not be
    replaced, InUseError when another run is writing to it.
    """
    refuse_inputs_inside(output, files)
    shared = rank is not None
    try:
        if output.exists() and not output.is_dir():
            raise UsageError(f"{output}: exists and is not a directory", "choose another --output")
        created = not output.exists()
        make_folders(output)
        with ExitStack() as stack:
            folder = stack.enter_context(Folder(output))
            if not is_replacing(output):
                _refuse_foreign(folder, may_replace or shared)
            if rank is not None:
                stack.callback(clean, output, no_lock=no_lock)
            own = stack.enter_context(
                locked_folder(
                    folder, WORK, output, shared=shared, tries=_TRIES if shared else 1,
                    without=no_lock,
                )
            )  # fmt: skip
            try:
                own.refuse_strangers(_WORK_FILES)
                if rank is not None:
                    _hold_rank(stack, own, rank, output, no_lock)
                with _alone(own, no_lock):  # ranks begin at the same time
                    ended = _ended(folder, own)
                if ended is None:  # now that nobody else can change it
                    _refuse_foreign(folder, may_replace or shared)
                yield Claim(output, own.inside.path, folder, own, notify, ended, shared, no_lock)
            finally:
                if not (shared or is_begun(own.inside.path) or own.inside.status(REPLACING)):
                    _leave(folder, own, output, created)
    except OSError as error:
        raise from_os_error(error, _place(error, output), "write") from error


def _leave(folder: Folder, own: OwnFolder, output: Path, created: bool) -> None:
    """Remove our folder, and the output directory if we made it and it holds nothing."""
    own.remove(_WORK_FILES)
    remove_leftovers(folder, WORK, _WORK_FILES)
    if created:
        with suppress(OSError):  # it holds a result
            output.rmdir()


def _place(error: OSError, output: Path) -> Path:
    """What an error is about: a name in the output, or what is in the way of the output itself."""
    path = Path(os.fsdecode(error.filename)) if error.filename else output
    return path if output.is_relative_to(path) else output / path


def _hold_rank(
    stack: ExitStack, own: OwnFolder, rank: tuple[int, int], output: Path, no_lock: bool
) -> None:
    """Hold the lock of a rank. Raises InUseError when ranks of another world size are at work."""
    mine = _RANK_LOCK.format(*rank)
    stack.enter_context(locked(own.inside, mine, output, without=no_lock))
    for name in own.inside.names():
        parts = re.fullmatch(_RANK_LOCK.format("[0-9]+", "([0-9]+)"), name)
        if parts and int(parts[1]) != rank[1]:
            try:
                with locked(own.inside, name, output, shared=True, without=no_lock):
                    pass
            except InUseError:
                raise InUseError(
                    f"{output}: ranks of another --world-size than {rank[1]} are at work",
                    "give that --world-size, or wait for them to end",
                ) from None


@contextmanager
def _alone(own: OwnFolder, no_lock: bool) -> Iterator[None]:
    with locked(own.inside, _BEGIN_LOCK, own.inside.path, wait=True, without=no_lock):
        yield


def begin(claim: Claim, run: Run, side_files: dict[str, bytes], *, may_replace: bool) -> bool:
    """Make the work folder that of `run`, with the units that it has already; False when its
    result is in place. Raises UsageError for units or a result that may not be thrown away, and
    for files of others where the result is to be.

    `side_files`: those of `run`, by name. `may_replace`: what another run has packed.
    """
    with _alone(claim.own, claim.no_lock):
        return _begin(claim, run, side_files, may_replace)


def _begin(claim: Claim, run: Run, side_files: dict[str, bytes], may_replace: bool) -> bool:
    output, work = claim.output, claim.work
    if claim.ended is not None:
        if not differences(claim.ended, run, as_packed_in(output)):
            return False
        _refuse_foreign(claim.folder, may_replace)
    _refuse_in_the_way(claim.folder, run)
    if run.resumable and (is_begun(work) or (claim.shared and (work / RUN).exists())):
        earlier = load_run(work / RUN)
        differ = (
            ["it is damaged, or of another packer"]
            if earlier is None
            else differences(earlier, run, as_packed_in(work))
        )
        if not differ:
            put_file(work / RUN, run.to_bytes())  # its limits may be others
            return True
        if not may_replace:
            raise UsageError(
                f"{output}: holds an unfinished run that differs: {'; '.join(differ)}",
                "to continue it, give its options and inputs; to start over, "
                + (
                    f"remove {output / WORK} when no rank is at work"
                    if claim.shared
                    else "--overwrite"
                ),
            )
        claim.notify(f"{output}: the unfinished run is discarded: {'; '.join(differ)}")
    elif not all(map(_is_lock, claim.own.inside.names())):
        claim.notify(f"{output} holds an unfinished run; starting it again from the beginning")
    _empty(claim.own.inside)
    for name, content in side_files.items():
        write_file(work / name, content)
    put_file(work / RUN, run.to_bytes())
    sync(work.parent)
    claim.folder.sync()
    return True


def _refuse_in_the_way(folder: Folder, run: Run) -> None:
    """UsageError for files of others where the result is to be, before all the work."""
    names = SIDE_FILES | {MANIFEST, INCOMPLETE}
    names -= {*TOKENIZER_FILES} - run.side_files.keys()
    if run.config.on_error != "skip":
        names -= {REJECTED}
    if run.is_to_tokenize or run.row_config.max_loss is None:
        names -= {INCOMPLETE}
    if run.is_to_tokenize:
        names -= {SQUARED_LENGTHS}
    earlier = earlier_result(folder)
    if foreign := [n for n in names if folder.status(n) and not is_own(folder, n, earlier)]:
        raise in_the_way(folder.path, foreign)


def _ended(folder: Folder, own: OwnFolder) -> Run | None:
    """Finish putting a result in place, if its run was interrupted there; returns that run."""
    if own.inside.status(REPLACING) is None:
        return None
    ended = load_run(own.inside.path / REPLACING)
    if not put_in_place(folder, own.inside):
        return None
    _empty(own.inside)
    return ended


def clean(output: Path, *, no_lock: bool) -> None:
    """Remove what runs leave beside a result, such as the locks of ranks, if none is at work. One
    that was interrupted while it took its place does so.
    """
    if (output / WORK).is_dir() and holds_result(output):
        with (
            suppress(InUseError),
            claimed(output, [], may_replace=True, notify=lambda line: None, no_lock=no_lock),
        ):
            pass


def forget(claim: Claim) -> None:
    """Discard the units of an unfinished run, which nobody is to continue."""
    _empty(claim.own.inside)


def work_of(output: Path) -> Path | None:
    """The folder in which a run writes, or was interrupted. Raises UsageError."""
    if not output.is_dir():
        return None
    with Folder(output) as folder:
        identity = identity_of(folder, WORK)
    return output / WORK / identity if identity else None


def is_begun(work: Path) -> bool:
    """Whether there are packed units that a run can continue from."""
    return (work / RUN).is_file() and any(work.glob(UNIT_RECORDS))


def is_replacing(output: Path) -> bool:
    """Whether a run was interrupted while putting its result in place."""
    work = work_of(output)
    return work is not None and (work / REPLACING).is_file()


def _is_lock(name: str) -> bool:
    return name.endswith(LOCK)


def refuse_inputs_inside(output: str | Path, files: Sequence[InputFile]) -> None:
    """UsageError when an input lies in the output, a directory or a URL."""
    real = storage.identity(str(output)).rstrip("/")
    for file in files:
        if file.path != STDIN and storage.identity(file.path).startswith(real + os.sep):
            raise UsageError(
                f"{output}: the input {file.path} lies inside the output directory",
                "choose another --output",
            )


def finished(place: Path | str, differs: str = "", *, may_update: bool = False) -> UsageError:
    """The error for a result that is not to be replaced. `differs`: how from what was to be packed;
    `may_update`: only in its inputs.
    """
    how = f" that differs: {differs}" if differs else ""
    update = "pack only what is new or has changed, with --update; " if may_update else ""
    return UsageError(
        f"{place}: holds a finished result{how}",
        f"{update}choose another --output, or replace it with --overwrite",
    )


def _refuse_foreign(folder: Folder, may_replace: bool) -> None:
    # looked at first: a rank that ends meanwhile puts the manifest in its place before its own
    # folder goes
    is_foreign = identity_of(folder, WORK) is None and not all(
        is_leftover(n, WORK) for n in folder.names()
    )
    if holds_result(folder.path):
        if not may_replace:
            raise finished(folder.path)
        earlier_result(folder)  # raises, when it is not known which files it has
    elif is_foreign:
        raise UsageError(
            f"{folder.path}: is not empty, and not a result of packer",
            "choose another --output; --overwrite only replaces what packer made",
        )


def _empty(work: Folder) -> None:
    """Remove all but the locks; the record of a result that is being put in place goes last."""
    for name in sorted(work.names(), key=lambda name: name == REPLACING):
        if _WORK_FILES.fullmatch(name) and work.is_file(name) and not _is_lock(name):
            work.unlink(name)


def replace(claim: Claim) -> None:
    """Put the result in the work folder in the place of the earlier one.

    Every file must be on the disk already, the manifest too. Raises UsageError, before anything is
    changed, when files of others are where the result is to be.
    """
    try:
        replace_earlier(claim.folder, claim.own.inside)
        _empty(claim.own.inside)
    except OSError as error:
        raise from_os_error(error, _place(error, claim.output), "write") from error


def remove_result(output: Path, *, no_lock: bool = False) -> None:
    """Remove a result, finished or not, with its directory, and nothing that others made."""
    with claimed(output, [], may_replace=True, notify=lambda line: None, no_lock=no_lock) as claim:
        _empty(claim.own.inside)
        if earlier := earlier_result(claim.folder):
            names = [*listed(earlier.manifest), INPUT_TIMES]
            for name in names:
                if claim.folder.status(name) and is_own(claim.folder, name, earlier):
                    claim.folder.unlink(name)
            claim.folder.unlink(earlier.name)  # last: it says whose the others are
    with suppress(OSError):
        output.rmdir()
