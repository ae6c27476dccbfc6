"""Run `packer pack` and `packer tokenize` from inputs to a finished result.

    find_inputs, resolve_run -> RunPlan   what to do
    locked_output, begin                  where, and which units are done already
    Pool of UnitContext.pack_and_commit   the units that are left
    finalize                              one result from the records of all units
    publish                               an upload, if the output is a URL

Of several ranks, each packs every W-th unit, from the R-th on. The last one to end finishes the
result; if that was killed, the command of any rank does. What the parent does takes about 1% of a
run, the end of one with many units aside.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from packer_cli import storage
from packer_cli.errors import (
    DataError,
    InputChangedError,
    Interrupted,
    PackerError,
    UsageError,
    named,
)
from packer_cli.inputs.byte_streams import STDIN, begin_stdin
from packer_cli.inputs.detection import (
    NOTHING_KNOWN,
    KnownShapes,
    detect_shape,
    ignored_columns,
    unknown_speakers,
    with_bearers,
)
from packer_cli.inputs.discovery import find_inputs
from packer_cli.inputs.tokenized import check_stored, is_tokenized, with_columns_of
from packer_cli.mixing.units import choice_of
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.option import options_of
from packer_cli.options.options import PackConfig
from packer_cli.options.run_options import EncodingOptions, RunOptions
from packer_cli.options.shape_rules import check_options_apply, for_shape
from packer_cli.options.shapes import Suggested
from packer_cli.progress import Progress
from packer_cli.records import InputFile, Notify, WorkUnit
from packer_cli.result.existing import find_own, holds_result
from packer_cli.result.layout import WORK
from packer_cli.result.manifest import Manifest, Result, load_as_is
from packer_cli.result.warnings import FORMATS, RAW, warnings_of
from packer_cli.result.wording import count
from packer_cli.run.compare import begin, known_shapes, plan_addition, refuse_other_result
from packer_cli.run.finalize import check_url, finalize, publish
from packer_cli.run.place import InUseError, LockedOutput, discard, locked_output
from packer_cli.run.run_plan import RUN, UNIT_RECORDS, RunPlan, UnitRecord, left_to_do, load_run
from packer_cli.run.source import choose_encoding, choose_tokenized
from packer_cli.run.unit import UnitContext


def pack(
    inputs: list[str],
    destination: Path | str,
    config: DocumentConfig,
    options: RunOptions,
    tokenizer_name: str | None = None,
) -> Result | None:
    """Pack `inputs` into the directory `destination`, or a URL.

    config          only tokenizes if it is not a PackConfig
    tokenizer_name  as on the command line; None: the default

    Returns the manifest; None to a rank if other ranks have units to pack.

    Raises UsageError before anything is written, DataError for bad records or storage, and
    Interrupted for Ctrl-C. Packed units are kept for the next run.
    """
    begun = time.monotonic()
    url = storage.public(str(destination)) if storage.is_url(str(destination)) else None
    destination = url or destination
    if url:
        check_url(url, options)
    for option, is_shared in (
        ("--rank", options.as_rank),
        ("--engine ray", options.engine == "ray"),
    ):
        if is_shared and STDIN in inputs:
            raise UsageError(
                f"{option}: does not go with stdin, which only one process can read",
                "write the data to a file, and name that",
            )
    for name, declared in options_of(type(config)).items():
        try:
            msgspec.json.encode(value := getattr(config, name))
        except UnicodeEncodeError:
            problem = f"{declared.flag}: {value!r} is not UTF-8, so no manifest can hold it"
            raise UsageError(problem, "use a name that is UTF-8") from None
    begin_stdin()
    notes = _HeldNotes(options.notify)
    held = replace(options, notify=notes.hold)
    try:
        files = find_inputs(inputs, config, notes.hold)
        _refuse_inputs_inside(destination, files)
        known = NOTHING_KNOWN if url else known_shapes(Path(destination), files, config, held)
        run = resolve_run(files, config, tokenizer_name, held, known)
        choice_of(run.files, run.config)  # raises an error if a source has too little
    except PackerError:
        notes.give()
        raise
    done: Result | None
    if url:
        run = run.cut()
        done = publish(run, url, options, partial(_pack_anew, run, notes))
    else:
        done = _pack_to_directory(run, notes, Path(destination), options)
    if done is not None:
        _warn_of_losses(str(destination), done, config, options, notes)
    if notes.are_given:
        what = "done" if done else "this rank is done"
        options.notify(f"{destination}: {what} in {time.monotonic() - begun:.1f} s")
    return done


class _HeldNotes:
    """Notes on inputs, held back until something is packed: a run without work repeats none."""

    def __init__(self, notify: Notify) -> None:
        self._notify, self._held, self.are_given = notify, list[str](), False

    def hold(self, message: str) -> None:
        self._held.append(message)

    def give(self) -> None:
        self.are_given = True
        while self._held:
            self._notify(self._held.pop(0))


def resolve_run(
    files: list[InputFile],
    config: DocumentConfig,
    tokenizer_name: str | None,
    options: EncodingOptions,
    known: KnownShapes = NOTHING_KNOWN,
) -> RunPlan:
    """Detect the shape of the inputs, fill in default options, and select the tokenizer.

    Returns a plan without work units yet: `RunPlan.cut` adds them.

    Raises UsageError if the options do not fit the inputs.
    """
    if is_tokenized(files):
        shape, chosen = choose_tokenized(files, config, tokenizer_name)
        check_stored(files, config.where_fields)
        config = with_columns_of(files, config)
        return RunPlan(for_shape(config, shape), shape, tuple(files), (), chosen)
    if isinstance(config, PackConfig) and config.view:
        raise UsageError(
            "--view: rows can only refer to stored tokens, and the inputs are not tokenized",
            "packer tokenize INPUT -o DIR first, then packer pack DIR --view",
        )
    detected = detect_shape(files, config, known)
    files, shape = detected.files, detected.shape
    for member in shape.members:
        some = [file.path for file in files if file.shape == member]
        if some:
            options.notify(f"{named(some, 1)}: {member}")
    check_options_apply(config, shape)
    config = for_shape(with_bearers(detected, shape, config, known), shape)
    for line, is_warning in ignored_columns(detected, shape, config):
        if is_warning:
            options.warn(f"warning: {line}")
        else:
            options.notify(line)
    chosen = choose_encoding(shape, config, tokenizer_name, options)
    source = " ".join(chosen.template.sources) if chosen.template else ""
    for path, roles in unknown_speakers(detected, shape, config, source).items():
        options.warn(
            f"warning: {path}: unknown speakers: {named(roles)}; say who they are: "
            f"{Suggested({}, roles)}"
        )
    return RunPlan(config, shape, tuple(files), (), chosen)


def _pack_to_directory(
    run: RunPlan, notes: _HeldNotes, destination: Path, options: RunOptions
) -> Result | None:
    """Pack all inputs, the share of this rank, or those that --add finds new or changed."""
    with locked_output(destination, options) as output:
        earlier = None
        if holds_result(destination) and (output.was_placed or not options.overwrite):
            earlier = load_as_is(destination)
        to_pack = _changed(run, earlier, output) if earlier else run.cut()
        if to_pack is None:
            how = "already finished" if options.as_rank else "up to date"
            options.notify(f"{destination}: {how}")
            if options.add:
                discard(output.work)
            return earlier
        notes.give()
        manifest = _pack_locked(to_pack, output)
        if manifest is not None:
            return manifest
    return finish_if_last(destination, options)


def _changed(run: RunPlan, earlier: Result, output: LockedOutput) -> RunPlan | None:
    """Return the run that makes the result what it is to be; None if it is that already."""
    options = output.options
    # with a recipe, a change of one source changes what is taken of the others
    is_mixed = isinstance(earlier, Manifest) and earlier.sources
    if options.add and not is_mixed:
        return plan_addition(output.path, earlier, run, options)
    run = run.cut()
    try:
        in_any_order = options.exact or options.as_rank is not None
        refuse_other_result(output.path, earlier, run, in_any_order=in_any_order)
    except UsageError:
        if not (options.overwrite or options.add):
            raise
        return run
    return None


def _pack_anew(run: RunPlan, notes: _HeldNotes, directory: Path, options: RunOptions) -> Result:
    """Pack everything into a new directory. Nothing is kept if that fails."""
    notes.give()
    with locked_output(directory, options) as output:
        manifest = _pack_locked(run, output, is_kept=False)
        return manifest or load_as_is(directory)


def _pack_locked(run: RunPlan, output: LockedOutput, *, is_kept: bool = True) -> Result | None:
    """Pack the units that have no record, and finish. Returns the manifest, or None to ranks.

    is_kept  keep packed units after an error
    """
    options = output.options
    begin(output, run)
    try:
        _pack_rest(replace(run, kept=()), output.work, options)
    except (PackerError, KeyboardInterrupt) as problem:
        error = problem if isinstance(problem, PackerError) else Interrupted("interrupted")
        if is_kept:
            error = _with_progress(error, run, output)
        raise error from problem
    return None if options.as_rank else finalize(run, output)


def _pack_rest(run: RunPlan, work: Path, options: RunOptions) -> None:
    """Pack the units that have no record in the work folder."""
    ours = slice(options.rank, None, options.world_size)
    units, mine = left_to_do(run, work, ours), len(run.units[ours])
    if len(units) < mine:
        packed = f"{mine - len(units)} of {mine} units are already packed"
        options.notify(f"{work.parents[1]}: continuing: {packed}")
    if not units:
        return
    whole, left = (sum(unit.weight for unit in some) for some in (run.units, units))
    size = whole if run.is_tokenized else sum(file.size for file in run.files)
    doing = "tokenizing" if run.is_to_tokenize else "packing"
    with Progress(size, show=options.progress, doing=doing, done=1 - left / whole) as progress:
        if options.engine == "ray":
            from packer_cli.run.ray_engine import pack_on_ray  # noqa: PLC0415 an extra

            records = pack_on_ray(run, units, work, options, progress)
        else:
            records = _pack_in_workers(run, units, work, options, progress)
        bad, limit = 0, run.config.max_errors  # a share is known only at the end
        with closing(records):
            for record in records:
                bad += record.counts.get("rejected_records", 0)
                if isinstance(limit, int) and bad > limit:
                    raise DataError(
                        f"{bad:,} records are bad so far; --max-errors is {limit}",
                        f"see {work}/rejected-*.jsonl, or raise --max-errors",
                    )


def _pack_in_workers(
    run: RunPlan, units: Sequence[WorkUnit], work: Path, options: RunOptions, progress: Progress
) -> Generator[UnitRecord, None, None]:
    """Pack units in forked workers. Raises what packing a unit raises."""
    context = UnitContext.reporting(run, work, options, progress)
    pool = context.pool(context.pack_and_commit, context.described)
    with closing(pool), closing(pool.map(units)) as packed:
        for _, record in packed:
            yield record


def _with_progress(error: PackerError, run: RunPlan, output: LockedOutput) -> PackerError:
    """Return the error with a tip that says how much of the run is kept."""
    done = sum(1 for _ in output.work.glob(UNIT_RECORDS)) if run.resumable else 0
    kept = f"{done} of {len(run.units)} units are packed and kept"
    if isinstance(error, Interrupted):
        again = f"{kept}; run the same command again to continue"
        tip = again if done else "run the same command again to start over"
    elif isinstance(error, InputChangedError):  # the next run would refuse the units as another's
        tip = error.tip if output.may_replace or not done else f"{error.tip}, with --overwrite"
    else:
        tip = f"{error.tip}; {kept}" if done else error.tip
    return type(error)(error.message, tip)


def _refuse_inputs_inside(output: Path | str, files: Iterable[InputFile]) -> None:
    """Raise UsageError if an input lies in the output, a directory or a URL."""
    real = storage.identity(str(output)).rstrip("/")
    for file in files:
        if file.path != STDIN and storage.identity(file.path).startswith(real + os.sep):
            raise UsageError(
                f"{output}: the input {file.path} lies inside the output directory",
                "choose another --output",
            )


def _warn_of_losses(
    place: str, manifest: Result, config: DocumentConfig, options: RunOptions, notes: _HeldNotes
) -> None:
    """Report losses, omissions, and fields of records that nothing reads.

    `config`: the options before defaults, which show which of these are intended.
    """
    for one in warnings_of(manifest):
        is_meant = (one.about == RAW and config.prompt_template == "none") or (
            one.about == FORMATS and config.prompt_template is not None
        )
        if not is_meant:
            options.warn(f"warning: {place}: {one}")
    names = [f"{name} ({count(number)})" for name, number in manifest.unread.items()]
    if names and notes.are_given:
        options.notify(f"{place}: neither packer nor the chat template reads {named(names)}")


# Ranks: processes, perhaps on several machines, that share nothing but the output directory

_AUTO, _SIZE = "auto", "--world-size"
_ARRAY = "SLURM_ARRAY_TASK_"
# As job schedulers and launchers say them.
_VARIABLES = {
    "--rank": (
        f"{_ARRAY}ID", "SLURM_PROCID", "RANK", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX",
    ),
    _SIZE: (f"{_ARRAY}COUNT", "SLURM_NTASKS", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"),
}  # fmt: skip


def find_rank(rank: str | None, world_size: str | None, notify: Notify) -> dict[str, int | None]:
    """The options `rank` and `world_size`; "auto" is read from the environment, and noted.

    Nothing is looked up unless one of them is given: a job array in which every task packs a
    file of its own must not lose all but a share of it. Raises UsageError.
    """
    if rank is None and world_size is None:
        return {}
    own, of_rank = _number_of("--rank", rank)
    size, of_size = _number_of(_SIZE, world_size)
    if names := [one for one in (of_rank, of_size) if one in os.environ]:
        notify(f"rank {own} of {size}, from {' and '.join(names)}")
    return {"rank": own, "world_size": size}


def _number_of(option: str, given: str | None) -> tuple[int, str]:
    """A number as it is given, or from the environment, and what it is read from."""
    name, text = option, given or ""
    if given in (None, _AUTO):
        tried = _VARIABLES[option]
        name = next((one for one in tried if one in os.environ), "")
        if not name:
            raise UsageError(
                f"{option}: not given, and none of {', '.join(tried)} is set",
                "give numbers, such as --rank 0 --world-size 4, or start this in a job array",
            )
        text = os.environ[name]
    if not text.isdecimal():
        raise UsageError(f"{name}: {text!r} is not a number")
    number = int(text)
    if name == f"{_ARRAY}ID":  # --array=1-7:2
        first, step = (os.environ.get(f"{_ARRAY}{one}") or "0" for one in ("MIN", "STEP"))
        if not (first + step).isdecimal():
            raise UsageError(f"{_ARRAY}MIN: {first!r}, or STEP: {step!r}, is not a number")
        number = (number - int(first)) // max(1, int(step))
    return number, name


def finish_if_last(destination: Path, options: RunOptions) -> Result | None:
    """Finish the result and return its manifest, if no other rank is working and all units are
    packed; None otherwise.
    """
    alone = replace(options, rank=None, world_size=None)
    work = find_own(destination, WORK)
    # looked at before it is locked, or a rank that begins now would find it locked
    if work is None or not _tell_missing(destination, work, options):
        try:
            with locked_output(destination, alone) as output:
                run = load_run(output.work / RUN)
                if run and not _tell_missing(destination, output.work, options):
                    return finalize(run, output)
        except InUseError:
            options.notify(f"{destination}: other ranks are at work; the last one finishes")
    # another rank was perhaps the last, just now
    return load_as_is(destination) if holds_result(destination) else None


def _tell_missing(destination: Path, work: Path, options: RunOptions) -> bool:
    """Tell how many units of the run in the work folder are missing; False for none."""
    run = load_run(work / RUN)
    missing = left_to_do(run, work) if run else []
    if run and missing:
        options.notify(f"{destination}: {len(missing)} of {len(run.units)} units are not packed")
    return bool(missing)
