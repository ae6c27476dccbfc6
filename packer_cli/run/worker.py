"""Packing and committing the units of a run, one call each.

    result = worker.pack(unit)     its shards lie in the work folder
    worker.commit(result)          they are on the disk, hashed, and its record is written

The engine decides who calls these, and how many at a time. Nothing else is passed on
between two units, so a run is as safe as its records are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TypeVar

from packer_cli.child_process import LostChildError
from packer_cli.config.options import PackConfig
from packer_cli.config.run_options import EncodingOptions
from packer_cli.durable import sync
from packer_cli.early import EarlyReference
from packer_cli.errors import DataError, Interrupted
from packer_cli.inputs.byte_streams import STDIN, stdin_digest
from packer_cli.inputs.input_files import changed, check_unchanged
from packer_cli.progress import Progress
from packer_cli.records import InputFile, Notify, Stretch, WorkUnit
from packer_cli.result.counts import Counts
from packer_cli.result.shards import Shard, digest, name_by_content
from packer_cli.run import commits
from packer_cli.run.chosen import Chosen
from packer_cli.run.commits import UnitRecord
from packer_cli.run.contents import digest_of, holds
from packer_cli.run.documents import tokenize_unit
from packer_cli.run.encoder import prepare
from packer_cli.run.identity import Run
from packer_cli.run.rows import pack_unit
from packer_cli.run.tokenized_source import tokenized_source
from packer_cli.run.unit import Job, UnitResult, without_damaged

_Made = TypeVar("_Made")
_ATTEMPTS = 3
_OTHER_BYTES = "what was packed is not what it holds now"


class Worker:
    """Safe to share between threads; `close` at the end."""

    def __init__(
        self,
        run: Run,
        chosen: Chosen,
        units: Sequence[WorkUnit],
        folder: Path,
        options: EncodingOptions,
        notify: Notify,
        stop: threading.Event,
        progress: Progress,
        early: EarlyReference | None = None,
    ) -> None:
        """`units`: those that it will pack, at least one. Raises UsageError."""
        self._source = (
            tokenized_source(run, folder)
            if run.is_tokenized
            else prepare(run, chosen, units, options, early, notify)
        )
        self._rejected, self._counting = 0, threading.Lock()
        self._resumable = run.resumable
        self._notify = notify
        self._job = Job(
            run.files,
            run.config,
            run.shape,
            self._source.tokenizer,
            self._source.info,
            self._source.read,
            self._source.encode,
            folder,
            progress,
            stop,
            self._source.tokenized,
        )

    def slots_of(self, counts: Counts) -> int:
        """The places for tokens in what was written."""
        config = self._job.config
        return counts.rows * config.max_length if isinstance(config, PackConfig) else counts.tokens

    def pack(self, unit: WorkUnit) -> UnitResult:
        """Write the unit's shards."""
        return self.make(unit, make_unit)

    def make(self, unit: WorkUnit, make: Callable[[WorkUnit, Job], _Made]) -> _Made:
        """What `make` makes of a unit. A process that is lost on the way is replaced, and the
        unit read again, before the run fails.
        """
        lost = 0
        while True:
            try:
                return without_damaged(unit, self._job, make)
            except LostChildError as error:
                self._stop_if_asked()
                lost += 1
                what = f"unit {unit.index} ({_place(unit, self._job.files)}): {error.message}"
                if not self._resumable:  # stdin cannot be read a second time
                    raise DataError(what, error.tip) from error
                if lost == _ATTEMPTS:
                    raise DataError(
                        f"{what}, {_ATTEMPTS} times",
                        "if memory ran out, use fewer --workers; run the same command again to "
                        "continue",
                    ) from error
                self._notify(f"{what}; packing it again")

    def commit(self, result: UnitResult) -> UnitRecord:
        """Sync the unit to the disk, its record last."""
        job, unit = self._job, result.unit
        for shard in result.shards:
            self._name(shard)
        if result.squared_lengths is not None:
            sync(result.squared_lengths)
        rejected = 0
        if result.rejected is not None:
            sync(result.rejected)
            rejected = result.rejected.stat().st_size
        alone, stopped = set(_alone(unit)), job.stop.is_set
        inputs, shared = list[tuple[int, int, str]](), list[tuple[int, int, int, str]]()
        for index, stretches in result.stretches.items():
            if index in alone:
                inputs.append((index, *_digest(job.files[index], stretches, stopped)))
            else:
                _hold(job.files[index], stretches, stopped)
                shared += [(index, *astuple(stretch)) for stretch in stretches]
        if job.tokenizer is not None:
            job.tokenizer.finish()  # the fast engine's tokens are confirmed before a commit
        self._stop_if_asked()  # digests end early then
        record = UnitRecord(
            unit.index,
            commits.slices_of(unit),
            result.shards,
            result.counts.as_json(),
            job.info.as_json() if job.info else None,
            rejected,
            inputs,
            stretches=shared,
        )
        commits.write_unit(job.folder, record)
        self._count_rejected(result.counts.rejected_records)
        return record

    def _name(self, shard: Shard) -> None:
        """Sync a shard to the disk and name it by its digest."""
        job = self._job
        sync(job.folder / shard.file)
        if not name_by_content(job.folder, shard, job.stop.is_set):
            self._stop_if_asked()

    def _count_rejected(self, count: int) -> None:
        """Raise DataError as soon as there are too many; a share is known only at the end."""
        limit = self._job.config.max_errors
        with self._counting:
            self._rejected += count
            if isinstance(limit, int) and self._rejected > limit:
                raise DataError(
                    f"{self._rejected:,} records are bad so far; --max-errors is {limit}",
                    f"see {self._job.folder}/rejected-*.jsonl, or raise --max-errors",
                )

    def pack_and_commit(self, unit: WorkUnit) -> None:
        self.commit(self.pack(unit))

    def stop(self) -> None:
        """End the processes that `pack` may be waiting for; `close` must still be called."""
        self._source.stop()

    def close(self) -> None:
        self._source.close()

    def _stop_if_asked(self) -> None:
        _raise_if(self._job.stop)


def make_unit(unit: WorkUnit, job: Job) -> UnitResult:
    """Write the unit's shards: rows, or documents where there are no options of rows."""
    if isinstance(job.config, PackConfig):
        return pack_unit(unit, job, job.config)
    return tokenize_unit(unit, job)


def commit_input(file: InputFile, folder: Path, stop: threading.Event) -> None:
    """Record the digest of an input that several units read. Raises InputChangedError.

    Where its identity cannot tell, what was packed of it is compared with it: so far by units that
    have a record, by those to come.
    """

    def holding_all() -> commits.Digest | None:
        return digest_of(file.path, commits.stretches_in(folder).get(file.index, ()), stop.is_set)

    is_clear = check_unchanged(file) and not file.racy
    digest = digest_of(file.path, (), stop.is_set) if is_clear else holding_all()
    if not check_unchanged(file) and is_clear:  # meanwhile
        digest = holding_all()
    _raise_if(stop)
    if digest is None:
        raise changed(file, _OTHER_BYTES)
    commits.write_input(folder, file.index, *digest)


def _digest(
    file: InputFile, stretches: Sequence[Stretch], stopped: Callable[[], bool]
) -> commits.Digest:
    """The digest of the very bytes that a unit read. Raises InputChangedError."""
    if file.path == STDIN:
        return stdin_digest()
    read = [(stretch.offset, stretch.size) for stretch in stretches]
    whole = read == [(0, file.size)]
    bytes_digest = (
        (file.size, stretches[0].sha256) if whole else digest_of(file.path, stretches, stopped)
    )
    if bytes_digest is None or not (
        check_unchanged(file) or digest(file.path, stopped) == bytes_digest
    ):
        raise changed(file, _OTHER_BYTES)
    return bytes_digest


def _hold(file: InputFile, stretches: Sequence[Stretch], stopped: Callable[[], bool]) -> None:
    """Raise InputChangedError if a file no longer holds what was read from it."""
    unclear = not check_unchanged(file) or file.racy
    if unclear and not holds(file.path, stretches, stopped):
        raise changed(file, _OTHER_BYTES)


def _raise_if(stop: threading.Event) -> None:
    if stop.is_set():
        raise Interrupted("stopped")


def _alone(unit: WorkUnit) -> list[int]:
    """The inputs that no other unit reads."""
    return [part.file for part in unit.slices if part.is_whole]


def shared_inputs(run: Run) -> list[InputFile]:
    """The inputs that several units read: they are hashed by themselves."""
    alone = {index for unit in run.units for index in _alone(unit)}
    return [file for file in run.files if file.format and file.index not in alone]


def left_to_do(
    run: Run, work: Path, part: slice = slice(None)
) -> tuple[list[WorkUnit], list[InputFile]]:
    """The units, and the inputs to be hashed by themselves, that have no record yet. `part`: of
    all such units and inputs.
    """
    units = [unit for unit in run.units[part] if commits.read_unit(work, unit) is None]
    inputs = shared_inputs(run)[part]
    return units, [file for file in inputs if commits.read_input(work, file.index) is None]


def _place(unit: WorkUnit, files: Sequence[InputFile]) -> str:
    first = unit.slices[0]
    rest = f" and {len(unit.slices) - 1} more" if len(unit.slices) > 1 else ""
    return f"{files[first.file].path} from {first.start:,}{rest}"
