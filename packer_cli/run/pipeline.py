"""A whole run: discover, pack every unit that is not packed yet, finalize.

    find_inputs -> work_units -> Run      what is to be done
    output.claimed, begin                 where, and which units are done already
    Worker, on threads                    the rest
    finalize                              one result of all units' records
    publish                               uploaded, if its place is a URL

Units go to a pool of threads: everything heavy (tokenizing, planning, filling, writing,
hashing) frees the GIL.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from packer_cli import storage
from packer_cli.config.documents import DocumentConfig
from packer_cli.config.run_options import RunOptions
from packer_cli.config.shape_rules import for_shape, refuse_idle
from packer_cli.config.shapes import Shape
from packer_cli.early import EarlyReference
from packer_cli.errors import DataError, InputChangedError, Interrupted, PackerError, UsageError
from packer_cli.inputs.byte_streams import STDIN, begin_stdin
from packer_cli.inputs.detection import NOTHING_KNOWN, KnownShapes, detect_shape
from packer_cli.inputs.discovery import find_inputs
from packer_cli.inputs.tokenized import is_tokenized
from packer_cli.interrupts import as_flag
from packer_cli.mixing.units import choice_of, work_units
from packer_cli.progress import Progress
from packer_cli.records import InputFile, Notify, WorkUnit
from packer_cli.result.manifest import Result
from packer_cli.result.manifest_file import load_any
from packer_cli.run import directory as output
from packer_cli.run.chosen import Chosen, choose_encoding
from packer_cli.run.commits import UNIT_RECORDS
from packer_cli.run.finalize import finalize
from packer_cli.run.identity import Run
from packer_cli.run.known_shapes import known_shapes
from packer_cli.run.ranks import finalize_if_last
from packer_cli.run.replacing import holds_result
from packer_cli.run.tokenized_source import choose_tokenized, refuse_view
from packer_cli.run.unnamed import described, left_out, moves, refuse_to_forget
from packer_cli.run.unused import name_columns, warn_of_losses
from packer_cli.run.update import Update, plan_update, refuse_other_result
from packer_cli.run.upload import check_options, publish
from packer_cli.run.worker import Worker, commit_input, left_to_do
from packer_cli.threads import Task, run_all
from packer_cli.tokenization.locate import choose

_Config = TypeVar("_Config", bound=DocumentConfig)
_WORKERS_PER_STORAGE_THREAD = 4  # a worker's shards take a fifth of its time to sync and hash


def pack(
    inputs: list[str],
    destination: Path | str,
    config: DocumentConfig,
    options: RunOptions,
    tokenizer_name: str | None = None,
    notify: Notify = lambda message: None,
    warn: Notify = lambda message: None,
    early: EarlyReference | None = None,
    staging: Path | None = None,
    before_switch: Callable[[], None] = lambda: None,
) -> Result | None:
    """Pack `inputs` into the directory `destination`, or a URL; gives the manifest, or None to a
    rank that leaves work to others. Without options of rows, when `config` is no PackConfig, the
    documents are tokenized only.

    `notify` hears one-line messages for the user, `warn` those that nobody should miss. `early`: of
    the tokenizer, if begun. `staging`: where what goes to a URL is packed. `before_switch`: called
    when all is packed, before a new result takes its place. Raises PackerError: UsageError before
    anything is written, DataError for bad records or storage, Interrupted for Ctrl-C. Units that
    are packed by then are kept for the next run.
    """
    begun = time.monotonic()
    url = str(destination) if storage.is_url(str(destination)) else None
    if url:
        check_options(url, options)
    _refuse_other_than_utf8(config, tokenizer_name)
    stop = threading.Event()
    begin_stdin(stop.is_set)
    _refuse_shared_stdin(inputs, options)
    files = find_inputs(inputs, config, notify)
    known = NOTHING_KNOWN if url else known_shapes(Path(destination), files, config, options)
    raw = config.prompt_template == "none"
    files, config, shape, chosen = settled(files, config, tokenizer_name, notify, warn, known)
    choice_of(files, config)  # what a recipe asks of its sources is there, or nothing is written
    job = _Job(config, shape, files, chosen, options, notify, stop, early, before_switch)
    done = job.to_url(url, staging) if url else job.to_directory(Path(destination))
    if done is not None:
        warn_of_losses(str(destination), done, chosen, notify, warn, raw=raw)
    what = "done" if done else "this rank is done"
    notify(f"{destination}: {what} in {time.monotonic() - begun:.1f} s")
    return done


def settled(
    files: list[InputFile],
    config: _Config,
    tokenizer_name: str | None,
    notify: Notify,
    warn: Notify,
    known: KnownShapes = NOTHING_KNOWN,
) -> tuple[list[InputFile], _Config, Shape, Chosen]:
    """The inputs with their shapes, the options with their defaults for these, what the records
    are, and what makes tokens of them. UsageError where these do not go together.
    """
    if is_tokenized(files):
        shape, chosen = choose_tokenized(files, config, tokenizer_name, notify)
        return files, for_shape(config, shape), shape, chosen
    refuse_view(config)
    unused, lacking = dict[str, list[str]](), dict[str, DataError]()
    files, shape = detect_shape(files, config, known, unused, lacking)
    own = [one.columns for one in shape.members.values() or [shape]]
    for name, error in lacking.items():
        if not any(columns.get(name) == config.renamed[name] for columns in own):
            raise error
    name_columns(unused, config.shape, notify, warn)
    for member in shape.members:
        some = [file.path for file in files if file.shape == member]
        if some:
            rest = f" and {len(some) - 1:,} more" if len(some) > 1 else ""
            notify(f"{some[0]}{rest}: {member}")
    refuse_idle(config, shape)
    config = for_shape(config, shape)
    return files, config, shape, choose_encoding(shape, config, tokenizer_name, notify, warn)


@dataclass(frozen=True)
class _Job:
    """What to pack, and with which options and tokenizer."""

    config: DocumentConfig
    shape: Shape
    files: list[InputFile]
    chosen: Chosen
    options: RunOptions
    notify: Notify
    stop: threading.Event
    early: EarlyReference | None
    before_switch: Callable[[], None]

    def to_url(self, url: str, staging: Path | None) -> Result:
        """Pack into a staging directory and upload that."""
        run = self._run(self.files, work_units(self.files, self.config))

        def pack_staged(folder: Path) -> Result:
            with output.claimed(
                folder,
                self.files,
                may_replace=False,
                notify=self.notify,
                no_lock=self.options.no_lock,
            ) as claim:
                manifest = self._pack_claimed(claim, run, None, lambda: None)
            return manifest or load_any(folder, incomplete_too=True, half_too=True)

        return publish(
            url, staging, run, pack_staged, overwrite=self.options.overwrite,
            no_lock=self.options.no_lock, notify=self.notify, show_progress=self.options.progress,
            before_switch=self.before_switch,
        )  # fmt: skip

    def to_directory(self, destination: Path) -> Result | None:
        """Pack all, or this rank's share, or what an update calls for."""
        rank, options = self.options.as_rank, self.options
        with output.claimed(
            destination, self.files, may_replace=True, notify=self.notify, rank=rank,
            no_lock=options.no_lock,
        ) as claim:  # fmt: skip
            update, is_there = None, holds_result(destination)
            if is_there and (options.update or rank):
                earlier = load_any(destination, incomplete_too=True, half_too=True)
                update = self._update(destination, earlier)
                if not update.changed:
                    if not rank:
                        output.forget(claim)
                    return earlier
                if rank:
                    raise output.finished(destination)
            elif options.update and not options.prune:
                refuse_to_forget(destination, self.files)
            run = (
                self._run(update.files, update.units, update.shape)
                if update
                else self._run(self.files, work_units(self.files, self.config))
            )
            if is_there and not (update or options.overwrite or claim.ended):
                earlier = load_any(destination, incomplete_too=True, half_too=True)
                refuse_other_result(destination, earlier, run)
                self.notify(f"{destination}: up to date")
                return earlier
            manifest = self._pack_claimed(claim, run, update, self.before_switch)
            if manifest is not None:
                return manifest
        return finalize_if_last(destination, self.notify, no_lock=options.no_lock)

    def _run(
        self, files: Iterable[InputFile], units: Iterable[WorkUnit], shape: Shape | None = None
    ) -> Run:
        return Run(
            self.config, shape or self.shape, tuple(files), tuple(units), self.chosen.name,
            self.chosen.hashes,
        )  # fmt: skip

    def _update(self, destination: Path, earlier: Result) -> Update:
        """What has changed since an earlier result; notifies the user of it."""
        update = plan_update(
            destination, earlier, self.files, self.shape, self.config, self.chosen.name,
            self.chosen.hashes, checksum=self.options.checksum, unnamed=self.options.unnamed,
        )  # fmt: skip
        rank = self.options.as_rank
        if update.dropped and not rank:
            self.notify(f"{destination}: drops {described(update.dropped)}")
        if update.moved:
            self.notify(f"{destination}: {moves(update.moved)}")
        if update.copies:
            self.notify(f"{destination}: has these inputs already: {left_out(update.copies)}")
        if update.kept:
            self.notify(f"{destination}: keeps {described(update.kept)}")
        if not update.changed:
            self.notify(f"{destination}: {'already finished' if rank else 'up to date'}")
        return update

    def _pack_claimed(
        self,
        claim: output.Claim,
        run: Run,
        update: Update | None,
        before_switch: Callable[[], None],
    ) -> Result | None:
        """Pack what is not packed yet, and finish; gives the manifest, or None to ranks."""
        # an update without an earlier result is a plain run: it discards nobody else's units
        may_replace = self.options.overwrite or update is not None
        side_files = self.chosen.side_files
        if not output.begin(claim, run, side_files, may_replace=may_replace):
            self.notify(f"{claim.output}: was complete except for its last step")
            return load_any(claim.output, incomplete_too=True, half_too=True)
        if update is not None:
            update.keep(claim.work)
        try:
            self._pack_rest(run, claim.work)
        except PackerError as error:
            raise _with_progress(error, run, claim.work, may_replace) from error
        return None if self.options.as_rank else finalize(run, claim, before_switch)

    def _pack_rest(self, run: Run, work: Path) -> None:
        """Pack the units, and hash the inputs, that have no record in the work folder."""
        options, stop = self.options, self.stop
        ours = slice(options.rank, None, options.world_size)
        units, inputs = left_to_do(run, work, ours)
        mine = len(run.units[ours])
        if len(units) < mine:
            done = mine - len(units)
            self.notify(f"{work.parents[1]}: continuing: {done} of {mine} units are already packed")
        inputs.sort(key=lambda file: -file.size)  # so that workers, at the end, end together
        tasks: list[Task] = [partial(commit_input, file, work, stop) for file in inputs]
        if not units:
            run_all(tasks, options.workers, stop)
            return
        with ExitStack() as stack:
            progress = stack.enter_context(_progress(run, units, options))
            if options.engine == "ray":
                from packer_cli.run.ray_engine import pack_on_ray  # noqa: PLC0415 an extra

                run_all(tasks, options.workers, stop)
                pack_on_ray(run, units, work, options, self.notify, progress)
                return
            worker = Worker(
                run, self.chosen, units, work, options, self.notify, stop, progress, self.early
            )
            stack.enter_context(closing(worker))
            stack.enter_context(as_flag())  # for the storage threads, too
            if options.workers == 1:
                packing: list[Task] = [partial(worker.pack_and_commit, unit) for unit in units]
            else:
                # threads of their own bring shards to the disk and hash them: workers go on
                count = -(-options.workers // _WORKERS_PER_STORAGE_THREAD)
                committing = stack.enter_context(ThreadPoolExecutor(count, "packer-storage"))
                packing = [partial(_pack_then_commit, worker, unit, committing) for unit in units]
            run_all([*packing, *tasks], options.workers, stop, worker.stop)


def _pack_then_commit(
    worker: Worker, unit: WorkUnit, committing: ThreadPoolExecutor
) -> list[Future[Any]]:
    return [committing.submit(worker.commit, worker.pack(unit))]


def _progress(run: Run, units: list[WorkUnit], options: RunOptions) -> Progress:
    """Progress that counts what is packed already as read."""
    weight = {unit.index: sum(part.weight for part in unit.slices) for unit in run.units}
    size = sum(weight.values() if run.is_tokenized else (file.size for file in run.files))
    doing = "tokenizing" if run.is_to_tokenize else "packing"
    progress = Progress(size, show=options.progress, doing=doing)
    left = sum(weight[unit.index] for unit in units)
    if len(units) < len(run.units):
        progress.skip(1 - left / sum(weight.values()))
    return progress


def _with_progress(error: PackerError, run: Run, work: Path, may_replace: bool) -> PackerError:
    """The error, with a tip that says how much of the run is kept."""
    done = sum(1 for _ in work.glob(UNIT_RECORDS)) if run.resumable else 0
    kept = f"{done} of {len(run.units)} units are packed and kept"
    if isinstance(error, Interrupted):
        tip = f"{kept}; run the same command again to continue"
        tip = tip if done else "run the same command again to start over"
    elif isinstance(error, InputChangedError):  # the next run would refuse the units as another's
        tip = error.tip if may_replace or not done else f"{error.tip}, with --overwrite"
    else:
        tip = f"{error.tip}; {kept}" if done else error.tip
    return type(error)(error.message, tip)


def _refuse_shared_stdin(inputs: list[str], options: RunOptions) -> None:
    """UsageError for stdin that several processes would share: none can read all of it."""
    if STDIN in inputs:
        for option, given in (
            ("--rank", options.as_rank is not None),
            ("--engine ray", options.engine == "ray"),
        ):
            if given:
                raise UsageError(
                    f"{option}: does not go with stdin, which only one process can read",
                    "write the data to a file, and name that",
                )


def _refuse_other_than_utf8(config: DocumentConfig, tokenizer: str | None) -> None:
    """UsageError for an option that no manifest can hold, before all the work rather than after."""
    options = config.as_json() | {"tokenizer": choose(tokenizer)[0]}
    options["field"], options["role"] = options.pop("fields"), options.pop("roles")
    options["template_arg"] = options.pop("template_args")
    for name, value in options.items():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"--{name.replace('_', '-')}: {value!r} is not UTF-8, so no manifest can hold it",
                "use a name that is UTF-8",
            ) from None
