"""What all work units share, packed or tokenized: their documents read, their bad records kept.

documents_of(unit, job, ...)   batches of documents as tokens, in the unit's order
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from packer_cli.config.documents import DocumentConfig
from packer_cli.config.shapes import Shape
from packer_cli.errors import DamagedInputError, DataError, Interrupted
from packer_cli.inputs.byte_streams import STDIN
from packer_cli.inputs.formats import reader_for
from packer_cli.inputs.input_files import check_unchanged
from packer_cli.inputs.tokenized import TokenizedInputs
from packer_cli.packing.fitting import first_overlong
from packer_cli.packing.pairs import rooms
from packer_cli.progress import Progress
from packer_cli.records import (
    BadRecord,
    InputFile,
    Records,
    Slice,
    Stretch,
    TokenBatch,
    WorkUnit,
    record_position,
)
from packer_cli.result.counts import Counts
from packer_cli.result.parts import LazyFile
from packer_cli.result.shards import Shard
from packer_cli.run.commits import rejected_name
from packer_cli.tokenization.encoding import Encode, Read
from packer_cli.tokenization.tokenizer import Tokenizer, TokenizerInfo


@dataclass(frozen=True)
class Job:
    """What all units of a run share.

    info       of the tokenizer that made, or makes, the tokens; None where none is named
    tokenized  where the inputs are tokenized directories; `read` and `encode` are not used then
    folder     where a unit's files are written
    damaged    why inputs, by index, cannot be decoded: a unit is made without them
    is_sample  of units, parts of files are read: others need not have found the same damage
    """

    files: Sequence[InputFile]
    config: DocumentConfig
    shape: Shape
    tokenizer: Tokenizer | None
    info: TokenizerInfo | None
    read: Read
    encode: Encode
    folder: Path
    progress: Progress
    stop: threading.Event = field(default_factory=threading.Event)
    tokenized: TokenizedInputs | None = None
    damaged: Mapping[int, str] = field(default_factory=dict)
    is_sample: bool = False

    @property
    def pad_token_id(self) -> int:
        """What rows are padded with: 0 for ids that came without a tokenizer."""
        return self.info.pad_token_id if self.info else 0

    @property
    def tokenizer_sha256(self) -> str:
        return self.info.sha256 if self.info else ""

    def stop_if_asked(self) -> None:
        """Raise Interrupted once `stop` is set."""
        if self.stop.is_set():
            raise Interrupted("stopped")


@dataclass(frozen=True)
class UnitResult:
    """A unit that is done: its shards in `Job.folder`, its rejected records' file, and that of its
    rows' squared lengths.

    `stretches`: the parts of inputs that it has read, as far as readers know.
    """

    unit: WorkUnit
    shards: list[Shard]
    counts: Counts
    rejected: Path | None
    stretches: dict[int, list[Stretch]]
    squared_lengths: Path | None = None


_Made = TypeVar("_Made")


class _LeftOutError(Exception):
    """An input of a unit that cannot be decoded, though what was read of it seemed right."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index, self.reason = index, reason


def without_damaged(unit: WorkUnit, job: Job, make: Callable[[WorkUnit, Job], _Made]) -> _Made:
    """What `make` makes of a unit; where bad records are skipped, without inputs that cannot be
    decoded. It is made anew then, so that nothing depends on how much could be read of them.
    """
    while True:
        try:
            return make(unit, job)
        except _LeftOutError as error:
            job = replace(job, damaged={**job.damaged, error.index: error.reason})


def documents_of(
    unit: WorkUnit,
    job: Job,
    rejections: Rejections,
    counts: Counts,
    stretches: dict[int, list[Stretch]],
) -> Iterator[TokenBatch]:
    """The unit's documents. OUT counts, stretches: what there is to know of what was read."""
    if job.tokenized is not None:
        for batch in job.tokenized.read(unit):
            job.stop_if_asked()
            job.progress.read(0, len(batch.position))
            yield batch
        stretches |= job.tokenized.stretches(unit)
        job.progress.read(sum(part.weight for part in unit.slices), 0)
        return
    left_out = set[int]()
    for part in unit.slices:
        file = job.files[part.file]
        if part.file in left_out:  # a sample has several slices of it
            continue
        if part.file in job.damaged:
            left_out.add(part.file)
            rejections.leave_out(file, job.damaged[part.file])
            for figures in (counts, counts.file(file.index)):
                figures.rejected_records += 1
                figures.rejected_files += 1
            continue
        for records in _decoded(file, part, job):
            job.stop_if_asked()
            stretches[part.file] += records.stretches
            batch, bad, more = job.encode(records, file)
            counts.add(more)
            counts.add_looked_at(records.looked_at)
            if bad:
                rejections.add(file, bad)
                counts.rejected_records += len(bad)
                counts.file(file.index).rejected_records += len(bad)
            job.progress.read(records.consumed, len(batch.position))
            del records  # neither these nor their tokens are held while the next are read
            if len(batch.position):
                yield batch
            del batch
        check_unchanged(file)


def _decoded(file: InputFile, part: Slice, job: Job) -> Iterator[Records]:
    """The records of a slice. Raises _LeftOutError for an input that is to be left out."""
    try:
        yield from job.read(file, part)
    except DamagedInputError as error:
        check_unchanged(file)  # a file being written to looks cut short; that is the cause
        if job.config.on_error == "fail" or file.path == STDIN:
            raise
        if not (part.is_whole or job.is_sample):  # other units may have packed the rest of it
            raise DataError(
                f"{error.message}; only files that one work unit reads are skipped",
                "fetch or write it again, leave it out, or give --unit-bytes more than it has",
            ) from error
        reason = error.message.removeprefix(f"{file.path}: ")
        raise _LeftOutError(part.file, reason) from error


def refuse_longer(
    batch: TokenBatch, job: Job, most: int, most_is: str, tip: str, multiple: int = 1
) -> None:
    """Raise DataError for a document of more than `most` tokens; of a pair, both sides in segments
    that are padded to a `multiple`.
    """
    offsets = batch.offsets
    if batch.chosen is not None:
        offsets = np.cumsum([0, *rooms(np.diff(offsets), batch.chosen, multiple)])
    document = first_overlong(offsets, most)
    if document < 0:
        return
    file = job.files[batch.file[document]]
    position = record_position(int(batch.position[document]), job.config.turns)
    place = reader_for(file.format).describe(file, position)
    length = offsets[document + 1] - offsets[document]
    what = "document has" if batch.chosen is None else "two sides of the pair have"
    raise DataError(f"{file.path}, {place}: the {what} {length} tokens, {most_is} {most}", tip)


class Rejections(LazyFile):
    """Bad records: the first ends the run, or each becomes a line of the unit's own file."""

    def __init__(self, unit: WorkUnit, job: Job) -> None:
        super().__init__(job.folder / rejected_name(unit.index))
        self._job = job

    def add(self, file: InputFile, bad: list[BadRecord]) -> None:
        if self._job.config.on_error == "fail":
            check_unchanged(file)  # a file being written to looks cut short; that is the cause
            place = reader_for(file.format).describe(file, bad[0].position)
            raise DataError(f"{file.path}, {place}: {bad[0].reason}", bad[0].tip)
        self._keep(file, bad)

    def leave_out(self, file: InputFile, reason: str) -> None:
        """List a whole file."""
        self._keep(file, [BadRecord(-1, reason)])

    def _keep(self, file: InputFile, bad: list[BadRecord]) -> None:
        for record in bad:
            position = record.position if record.position >= 0 else None  # the whole file
            line = {"file": file.path, "position": position, "reason": record.reason}
            self.write(msgspec.json.encode(line) + b"\n")
