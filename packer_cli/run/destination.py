"""The output directory: who may write to it, how far a run has come, and how its result takes the
place of another.

OUT/.packer/ID/    a run writes everything in here; gone when the result is complete
run.json           the run: inputs, options, tokenizer and units
unit-*.json        one for each unit that is packed: see commits.py
replacing.json     run.json, from when all is packed until it is in its place
earlier.json       from then on, the manifest whose place its own takes
OUT/manifest.json  with it the result is complete

Shards are named by their content, so the new result lies in OUT beside the earlier one, no file of
which has gone, when the rename of the manifest makes it the result: readers find all of the one or
all of the other. Then what the earlier manifest lists goes, and nothing else. What
is in the way and is not listed there, or with another size, is an error before anything is written.
"""

from __future__ import annotations

import dataclasses
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from packer_cli import storage
from packer_cli.errors import DataError, UsageError, from_os_error
from packer_cli.inputs.byte_streams import STDIN
from packer_cli.options.run_options import RunOptions
from packer_cli.ownership import (
    LOCK,
    Folder,
    InUseError,
    find_own,
    in_the_way,
    locked,
    make_folders,
    own_folder,
    put_file,
    remove_own,
    strangers,
    sync,
    write_file,
)
from packer_cli.records import InputFile
from packer_cli.result.layout import (
    INCOMPLETE,
    MANIFEST,
    REJECTED,
    SHARD_NAME,
    SIDE_FILES,
    SQUARED_LENGTHS,
    TOKENIZER_FILES,
    WORK,
    is_result_file,
)
from packer_cli.result.manifest import Result, is_manifest, looks_like_one, parse_unedited
from packer_cli.run.commits import UNIT_RECORDS, units_in
from packer_cli.run.identity import (
    RUN,
    Run,
    differences,
    differing_options,
    load_run,
)

REPLACING, _EARLIER = "replacing.json", "earlier.json"
_BEGIN_LOCK, _RANK_LOCK = "begin.lock", "rank-{}-of-{}.lock"
_TRIES = 100  # to join other ranks: one that ends keeps all others out for a moment
_WORK_FILES = re.compile(
    r"(lock|begin\.lock|rank-[0-9]{1,9}-of-[0-9]{1,9}\.lock|(run|replacing|earlier|manifest)\.json"
    r"|unit-[0-9]{5,20}\.json|rejected-[0-9]{5,20}\.jsonl|squared_lengths-[0-9]{5,20}\.bin"
    rf"|{SHARD_NAME}"
    rf"|{'|'.join(map(re.escape, sorted(SIDE_FILES)))})(\.part)?"
)


class ExistingResult(NamedTuple):
    """A result in the output: its manifest, as bytes and read, and the files that this lists."""

    content: bytes
    manifest: Result
    files: dict[str, int]

    @classmethod
    def of(cls, content: bytes) -> ExistingResult:
        """Raises DataError for a manifest that is not as packer has written it."""
        manifest = parse_unedited(content)
        return cls(content, manifest, listed(manifest))


@dataclass(frozen=True)
class Claim:
    """An output directory that is ours.

    folder, inside  the directory and our folder in it, held open; `work` is the path of the latter
    ended           the run whose result has just been put in place, because whoever packed it was
                    interrupted while doing so
    """

    output: Path
    folder: Folder
    inside: Folder
    options: RunOptions
    ended: Run | None

    @property
    def work(self) -> Path:
        return self.inside.path


@contextmanager
def claimed(output: Path, files: Sequence[InputFile], options: RunOptions) -> Iterator[Claim]:
    """Claim `output`, with the units that an interrupted run has packed.

    They stay there when this one fails, too, for the next; whatever else is left goes. Of ranks,
    others may pack units of the same run meanwhile. Raises UsageError when the directory holds
    something that nobody may replace, InUseError when another run is writing to it.
    """
    refuse_inputs_inside(output, files)
    rank = options.as_rank
    shared = rank is not None
    try:
        if output.exists() and not output.is_dir():
            raise UsageError(f"{output}: exists and is not a directory", "choose another --output")
        created = not output.exists()
        make_folders(output)
        with ExitStack() as stack:
            folder = stack.enter_context(Folder(output, no_lock=options.no_lock))
            if not is_replacing(output):
                _refuse_foreign(folder)
            if rank is not None:
                alone = dataclasses.replace(options, rank=None, world_size=None)
                stack.callback(lambda: clean(output, alone) if holds_result(output) else None)
            tries = _TRIES if shared else 1
            own = own_folder(folder, WORK, output, shared=shared, tries=tries)
            inside = stack.enter_context(own)
            try:
                if foreign := strangers(inside, _WORK_FILES):
                    raise in_the_way(inside.path, foreign)
                if rank is not None:
                    _hold_rank(stack, inside, rank, output)
                # ranks begin at the same time
                with locked(inside, _BEGIN_LOCK, inside.path, wait=options.notify):
                    ended = _ended(folder, inside)
                if ended is None:  # now that nobody else can change it
                    _refuse_foreign(folder)
                yield Claim(output, folder, inside, options, ended)
            finally:
                if not (shared or is_begun(inside.path) or inside.status(REPLACING)):
                    remove_own(folder, WORK, inside, _WORK_FILES)
                    if created:
                        with suppress(OSError):  # it holds a result
                            output.rmdir()
    except OSError as error:
        raise from_os_error(error, _place(error, output), "write") from error


def _place(error: OSError, output: Path) -> Path:
    """The path that an error is about: in the output, or in the way of the output itself."""
    path = Path(os.fsdecode(error.filename)) if error.filename else output
    return path if output.is_relative_to(path) else output / path


def _hold_rank(stack: ExitStack, inside: Folder, rank: tuple[int, int], output: Path) -> None:
    """Hold the lock of a rank. Raises InUseError when ranks of another world size are at work."""
    stack.enter_context(locked(inside, _RANK_LOCK.format(*rank), output))
    for name in inside.names():
        parts = re.fullmatch(_RANK_LOCK.format("[0-9]+", "([0-9]+)"), name)
        if parts and int(parts[1]) != rank[1]:
            try:
                with locked(inside, name, output, shared=True):
                    pass
            except InUseError:
                raise InUseError(
                    f"{output}: ranks of another --world-size than {rank[1]} are at work",
                    "give that --world-size, or wait for them to end",
                ) from None


def begin(claim: Claim, run: Run, *, may_replace: bool) -> bool:
    """Make the work folder that of `run`, with the units that it has already; False when its
    result is in place. Raises UsageError for units or a result that may not be thrown away, and
    for files of others where the result is to be.

    `may_replace`: what another run has packed.
    """
    inside = claim.inside
    with locked(inside, _BEGIN_LOCK, inside.path, wait=claim.options.notify):
        if claim.ended is not None and holds_result(claim.output):  # which nobody has discarded
            its, own = claim.ended.config, run.config
            differ = differences(claim.ended, run) or differing_options(its, own, limits=True)
            if not differ:
                return False
            if not may_replace:
                raise finished(claim.output, "; ".join(differ))
        _refuse_in_the_way(claim.folder, names_of(run), earlier_result(claim.folder))
        if not _continues(claim, run, may_replace):
            forget(inside)
            for name, content in run.chosen.side_files.items():
                write_file(claim.work / name, content)
        put_file(claim.work / RUN, run.to_bytes())  # its limits may be others
        sync(claim.work.parent)
        claim.folder.sync()
        return True


def _continues(claim: Claim, run: Run, may_replace: bool) -> bool:
    """True if the units in the work folder are those of `run`."""
    output, work, options = claim.output, claim.work, claim.options
    shared = options.as_rank is not None
    if not run.resumable or not (is_begun(work) or (shared and (work / RUN).exists())):
        if any(not name.endswith(LOCK) for name in claim.inside.names()):
            options.notify(
                f"{output} holds an unfinished run; starting it again from the beginning"
            )
        return False
    earlier = load_run(work / RUN)
    differ = (
        ["it is damaged, or of another packer"]
        if earlier is None
        else differences(earlier, run) or _skipped(earlier, run, work)
    )
    if not differ:
        return True
    if not may_replace:
        raise UsageError(
            f"{output}: holds an unfinished run that differs: {'; '.join(differ)}",
            "to continue it, give its options and inputs; to start over, "
            + (f"remove {output / WORK} when no rank is at work" if shared else "--overwrite"),
        )
    options.notify(f"{output}: the unfinished run is discarded: {'; '.join(differ)}")
    return False


def _skipped(earlier: Run, run: Run, work: Path) -> list[str]:
    """How the runs differ if units are there without bad records on which `run` is to fail."""
    if (earlier.config.on_error, run.config.on_error) != ("skip", "fail"):
        return []
    is_skipped = any(one.rejected for one in units_in(work, earlier.identity))
    return differing_options(earlier.config, run.config, limits=True) if is_skipped else []


def names_of(run: Run) -> set[str]:
    """Names that the result of a run may have beside shards, for a look before all the work."""
    names = {*SIDE_FILES, MANIFEST, INCOMPLETE} - ({*TOKENIZER_FILES} - run.chosen.hashes.keys())
    if run.config.on_error != "skip":
        names -= {REJECTED}
    if run.is_to_tokenize or run.row_config.max_loss is None:
        names -= {INCOMPLETE}
    return names - {SQUARED_LENGTHS} if run.is_to_tokenize else names


def _refuse_in_the_way(
    folder: Folder,
    names: Iterable[str],
    earlier: ExistingResult | None,
    new: ExistingResult | None = None,
) -> None:
    """UsageError for files where those of a result are to be: neither the earlier result's, nor
    what is `new` already.
    """
    blocked = [name for name in names if folder.status(name) is not None
               and not _is_own(folder, name, earlier, new)]  # fmt: skip
    if blocked:
        raise in_the_way(folder.path, blocked)


def _ended(folder: Folder, inside: Folder) -> Run | None:
    """Finish putting a result in place, if its run was interrupted there; returns that run."""
    if inside.status(REPLACING) is None:
        return None
    before = inside.read(_EARLIER)
    there = [one for one in map(folder.read, (MANIFEST, INCOMPLETE)) if one not in (None, before)]
    own = inside.read(MANIFEST)
    try:
        earlier = ExistingResult.of(before) if before else None
        new = ExistingResult.of(own or (there[0] if there else before) or b"")
        if not own and new.content == before and _coming(folder, inside, new, earlier):
            raise DataError("the manifest is gone")  # else the two are the same
    except DataError:  # damaged or gone: it is an unfinished run again
        inside.rename(REPLACING, inside, RUN)
        return None
    ended = load_run(inside.path / REPLACING)
    _put_in_place(folder, inside, new, earlier)
    return ended


def clean(output: Path, options: RunOptions) -> None:
    """Remove what runs leave that none continues, such as the locks of ranks, if none is at work.
    One that was interrupted while it took its place does so.
    """
    if (output / WORK).is_dir():
        with suppress(InUseError), claimed(output, [], options):
            pass


def work_of(output: Path) -> Path | None:
    """The folder in which a run writes, or was interrupted. Raises UsageError."""
    if not output.is_dir():
        return None
    with Folder(output) as folder:
        return find_own(folder, WORK)


def is_begun(work: Path) -> bool:
    """True if there are packed units that a run can continue from."""
    return (work / RUN).is_file() and any(work.glob(UNIT_RECORDS))


def is_replacing(output: Path) -> bool:
    """True if a run was interrupted while putting its result in place."""
    work = work_of(output)
    return work is not None and (work / REPLACING).is_file()


def holds_result(output: Path) -> bool:
    """True if there is a finished result, even one that is marked incomplete."""
    return is_manifest(output / MANIFEST) or is_manifest(output / INCOMPLETE)


def refuse_inputs_inside(output: str | Path, files: Sequence[InputFile]) -> None:
    """UsageError when an input lies in the output, a directory or a URL."""
    real = storage.identity(str(output)).rstrip("/")
    for file in files:
        if file.path != STDIN and storage.identity(file.path).startswith(real + os.sep):
            raise UsageError(
                f"{output}: the input {file.path} lies inside the output directory",
                "choose another --output",
            )


def finished(place: Path | str, differs: str = "", *, may_add: bool = False) -> UsageError:
    """The error for a result that is not to be replaced. `differs`: how from what was to be packed;
    `may_add`: only in its inputs.
    """
    how = f" that differs: {differs}" if differs else ""
    add = "pack what is new or has changed, with --add; " if may_add else ""
    return UsageError(
        f"{place}: holds a finished result{how}",
        f"{add}choose another --output, or replace it with --overwrite",
    )


def _refuse_foreign(folder: Folder) -> None:
    # looked at first: a rank that ends meanwhile puts the manifest in its place before its own
    # folder goes
    is_foreign = find_own(folder, WORK) is None and {*folder.names()} - {WORK}
    if holds_result(folder.path):
        earlier_result(folder)  # raises, when it is not known which files it has
    elif is_foreign:
        raise UsageError(
            f"{folder.path}: is not empty, and not a result of packer",
            "choose another --output; --overwrite only replaces what packer made",
        )


def forget(inside: Folder) -> None:
    """Discard what a run has packed, which nobody is to continue: all but locks. Without its record
    it is no run any more, but that of one whose result is being put in place goes last.
    """
    for name in sorted(inside.names(), key=lambda name: (name == REPLACING, name != RUN)):
        if _WORK_FILES.fullmatch(name) and inside.is_file(name) and not name.endswith(LOCK):
            inside.unlink(name)


def earlier_result(folder: Folder) -> ExistingResult | None:
    """The finished result in a directory. Raises UsageError for one whose manifest cannot be
    relied on: nobody knows what of the directory is packer's.
    """
    for name in (MANIFEST, INCOMPLETE):
        content = folder.read(name)
        if content is not None and looks_like_one(content):
            return relied_on(folder.path / name, content)
    return None


def relied_on(place: Path | str, content: bytes) -> ExistingResult:
    """A result of which the manifest says what of a place is packer's. Raises UsageError for one
    that cannot.
    """
    try:
        return ExistingResult.of(content)
    except DataError as error:
        raise UsageError(
            f"{place}: {error.message}, so it does not say which files are packer's",
            "choose another --output, or remove what lies there yourself",
        ) from error


def listed(manifest: Result) -> dict[str, int]:
    """The files that a manifest lists, with their sizes."""
    files = manifest.side_file_bytes | {shard.file: shard.bytes for shard in manifest.shards}
    return {name: size for name, size in files.items() if is_result_file(name)}


def _is_own(
    folder: Folder,
    name: str,
    earlier: ExistingResult | None,
    new: ExistingResult | None = None,
) -> bool:
    """True for a regular file that the earlier result lists, by name and size, or its manifest; and
    for a shard that is that of the `new` one, by its name and size.
    """
    status = folder.status(name)
    if status is None or not stat.S_ISREG(status.st_mode):
        return False
    if name in (MANIFEST, INCOMPLETE):
        return earlier is not None and folder.read(name) == earlier.content
    if earlier is not None and name in earlier.files:
        return earlier.files[name] == status.st_size
    return new is not None and new.files.get(name) == status.st_size


def replace(claim: Claim) -> None:
    """Put the result in the work folder in the place of the earlier one.

    Every file must be on the disk already, the manifest too. Raises UsageError, before anything is
    changed, when files of others are where the result is to be.
    """
    folder, inside = claim.folder, claim.inside
    claim.options.before_switch()
    try:
        earlier, new = earlier_result(folder), ExistingResult.of(inside.read(MANIFEST) or b"")
        _coming(folder, inside, new, earlier)
        put_file(inside.path / _EARLIER, earlier.content if earlier else b"")
        inside.sync()  # first: what is about to be put in place must be there
        inside.rename(RUN, inside, REPLACING)
        inside.sync()
        _put_in_place(folder, inside, new, earlier)
    except OSError as error:
        raise from_os_error(error, _place(error, claim.output), "write") from error


def _put_in_place(
    folder: Folder, inside: Folder, new: ExistingResult, earlier: ExistingResult | None
) -> None:
    """Do, or go on to do, what `replace` does."""
    target = _target(new)
    for name in _coming(folder, inside, new, earlier):
        if name == MANIFEST:
            folder.sync()
        inside.rename(name, folder, target if name == MANIFEST else name)
    folder.sync()
    if earlier is not None:
        gone = {*earlier.files, MANIFEST, INCOMPLETE} - {*new.files, target}
        _remove(folder, gone, earlier)
        folder.sync()
    forget(inside)


def _target(result: ExistingResult) -> str:
    """The name of a manifest: one of a result that missed --max-loss says so."""
    return INCOMPLETE if result.manifest.incomplete else MANIFEST


def _coming(
    folder: Folder, inside: Folder, new: ExistingResult, earlier: ExistingResult | None
) -> list[str]:
    """The part of the result that is still in the work folder: its shards, the side files, which
    name these, and the manifest. UsageError for what is in their way.
    """
    names = [*sorted(new.files, key=SIDE_FILES.__contains__), MANIFEST]
    coming = [name for name in names if inside.status(name) is not None]
    places = (_target(new) if name == MANIFEST else name for name in coming)
    _refuse_in_the_way(folder, places, earlier, new)
    return coming


def _remove(folder: Folder, names: Iterable[str], earlier: ExistingResult) -> None:
    """Remove what is still as the earlier result has it."""
    for name in names:
        if folder.status(name) is not None and _is_own(folder, name, earlier):
            folder.unlink(name)
