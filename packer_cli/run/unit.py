"""Packing one work unit: read, encode, fit, plan, fill, write. No unit knows of another."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from packer_cli.config.options import PackConfig
from packer_cli.config.shapes import Shape
from packer_cli.errors import DataError, Interrupted, from_os_error
from packer_cli.inputs.discovery import check_unchanged
from packer_cli.inputs.formats import reader_for
from packer_cli.packing.attention_cost import AttentionCost
from packer_cli.packing.fitting import (
    MAX_DOCUMENT_TOKENS,
    Loss,
    cut_stream,
    first_overlong,
    fit,
    loss_of,
    padded,
    trained_documents,
    without_untrained,
)
from packer_cli.packing.window import PlannedRows, Window
from packer_cli.progress import Progress
from packer_cli.records import (
    BadRecord,
    InputFile,
    Int64,
    Pieces,
    Stock,
    Stretch,
    TokenBatch,
    WorkUnit,
)
from packer_cli.result.counts import Counts, fill_histogram, powers_histogram
from packer_cli.result.shard_writer import ShardWriter
from packer_cli.result.shards import Shard
from packer_cli.run.commits import rejected_name
from packer_cli.tokenization.encoding import Encode, Read
from packer_cli.tokenization.tokenizer import Tokenizer

# What `fit` does where a document of these policies is still too long.
_POLICIES = {"error": "split", "truncate-turns": "drop"}


@dataclass(frozen=True)
class Job:
    """What all units of a run share. `folder`: where a unit's files are written."""

    files: Sequence[InputFile]
    config: PackConfig
    shape: Shape
    tokenizer: Tokenizer | None
    pad_token_id: int
    read: Read
    encode: Encode
    schema: Any
    folder: Path
    progress: Progress
    stop: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class UnitResult:
    """A packed unit: its shards in `Job.folder`, and its rejected records' file.

    `stretches`: the parts of inputs that it has read, as far as readers know.
    """

    unit: WorkUnit
    shards: list[Shard]
    counts: Counts
    rejected: Path | None
    stretches: dict[int, list[Stretch]]


class RowWriter(Protocol):
    """Where the rows of a unit go. `close` gives the shards, whose trained tokens are counted."""

    def write(self, stock: Stock, order: Int64, row_offsets: Int64) -> None: ...
    def close(self) -> list[Shard]: ...
    def abandon(self) -> None: ...


def pack_unit(unit: WorkUnit, job: Job, writer: RowWriter | None = None) -> UnitResult:
    """Read the unit's slices and write its shards. Raises Interrupted once `job.stop` is set.

    `writer`: takes the rows instead of shards.
    """
    rejections = _Rejections(unit, job)
    if writer is None:
        writer = ShardWriter(job.folder, unit.index, job.config, job.schema, job.pad_token_id)
    counts, window, stream_position = Counts(), Window(job.config, unit.index), 0
    stretches: dict[int, list[Stretch]] = {part.file: [] for part in unit.slices}
    try:
        for batch in _batches(unit, job, rejections, counts, stretches):
            _refuse_overlong(batch, job)
            if job.config.strategy == "wrap":
                pieces, untrained = _wrapped(batch, job.config, stream_position)
                multiple = job.config.segment_multiple
                stream_position += int(padded(pieces.length, multiple).sum())
            else:
                pieces, untrained = pieces_of(batch, job.config)
            counts.add_loss(untrained)
            counts.add_loss(loss_of(pieces, batch.offsets, batch.trained))
            _count_documents(counts, batch, pieces.document, pieces.length, job.config.max_length)
            window.add(batch, pieces)
            del batch, pieces  # the window holds what goes into rows, and frees it when written
            if window.tokens >= (job.config.window_tokens or 0):
                _write(writer, counts, job, window.rows())
        if window.tokens:
            _write(writer, counts, job, window.rows(last=True))
        shards = writer.close()
    finally:
        writer.abandon()
        rejections.close()
    counts.trained_tokens = sum(shard.trained_tokens for shard in shards)
    return UnitResult(unit, shards, counts, rejections.path, stretches)


def pieces_of(batch: TokenBatch, config: PackConfig) -> tuple[Pieces, Loss]:
    """The pieces that go into rows, except for "wrap"; the Loss counts only untrained documents."""
    policy = _POLICIES.get(config.overlong or "", config.overlong or "")
    pieces = fit(batch.offsets, config.max_length, policy, config.truncate_side)
    if batch.trained is None or config.keep_untrained:
        return pieces, Loss()
    return without_untrained(pieces, batch.offsets, batch.trained)


def _wrapped(batch: TokenBatch, config: PackConfig, position: int) -> tuple[Pieces, Loss]:
    documents, untrained = None, Loss()
    if batch.trained is not None and not config.keep_untrained:
        documents, untrained = trained_documents(batch.offsets, batch.trained)
    multiple = config.segment_multiple
    return cut_stream(batch.offsets, config.max_length, position, multiple, documents), untrained


def _batches(
    unit: WorkUnit,
    job: Job,
    rejections: _Rejections,
    counts: Counts,
    stretches: dict[int, list[Stretch]],
) -> Iterator[TokenBatch]:
    for part in unit.slices:
        file = job.files[part.file]
        for records in job.read(file, part):
            if job.stop.is_set():
                raise Interrupted("stopped")
            stretches[part.file] += records.stretches
            batch, bad, more = job.encode(records, file)
            counts.add(more)
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


_OVERLONG = "choose --overlong {}, or a larger --max-length"
_HUGE = "cut it in the input"


def _refuse_overlong(batch: TokenBatch, job: Job) -> None:
    """Raise DataError for documents that may not be cut or are too long to number."""
    limit, limit_is, tip = MAX_DOCUMENT_TOKENS, "the most is", _HUGE
    if job.config.overlong == "error":
        others = "drop, truncate or truncate-turns" if job.shape.is_chat else "drop or truncate"
        others = others if job.shape.is_supervised else "split, truncate or drop"
        limit, limit_is = job.config.max_length, "--max-length is"
        tip = _OVERLONG.format(others)
    elif job.config.overlong != "split" and job.config.truncate_side == "right":
        return  # pieces begin at 0
    document = first_overlong(batch.offsets, limit)
    if document < 0:
        return
    file = job.files[batch.file[document]]
    place = reader_for(file.format).describe(file, int(batch.position[document]))
    length = batch.offsets[document + 1] - batch.offsets[document]
    raise DataError(
        f"{file.path}, {place}: the document has {length} tokens, {limit_is} {limit}", tip
    )


def _count_documents(
    counts: Counts, batch: TokenBatch, document: Int64, length: Any, max_length: int
) -> None:
    lengths = np.diff(batch.offsets)
    placed = np.bincount(document, weights=length, minlength=len(lengths)).astype(np.int64)
    of_file = counts.file(int(batch.file[0]))
    empty = int((lengths == 0).sum())
    documents = int((placed > 0).sum())
    counts.documents += documents
    counts.unpacked_rows += int((-(-placed // max_length)).sum())
    counts.empty_documents += empty
    counts.encoded_tokens += int(lengths.sum())
    counts.document_length += powers_histogram(placed[placed > 0])
    of_file.documents += documents
    of_file.empty_documents += empty
    of_file.tokens += int(placed.sum())


def _write(writer: RowWriter, counts: Counts, job: Job, planned: PlannedRows) -> None:
    stock, order, row_offsets = planned.stock, planned.order, planned.row_offsets
    if job.stop.is_set():
        raise Interrupted("stopped")
    writer.write(stock, order, row_offsets)
    lengths = stock.length[order]
    used = np.zeros(len(order) + 1, np.int64)
    np.cumsum(lengths, out=used[1:])
    rows, max_length = len(row_offsets) - 1, job.config.max_length
    more = Counts(
        segments=len(order),
        rows=rows,
        tokens=int(used[-1]),
        row_fill=fill_histogram(np.diff(used[row_offsets]), max_length),
        segments_per_row=powers_histogram(np.diff(row_offsets)),
        piece_length=np.bincount(lengths, minlength=max_length + 1).astype(np.int64, copy=False),
    )
    if planned.unbalanced is not None:
        more.attention_before = planned.unbalanced
        more.attention_after = AttentionCost.of(lengths, row_offsets)
    counts.add(more)
    job.progress.wrote(more.tokens, rows * max_length)


class _Rejections:
    """Bad records: the first ends the run, or each becomes a line of the unit's own file."""

    def __init__(self, unit: WorkUnit, job: Job) -> None:
        self._job = job
        self._name = job.folder / rejected_name(unit.index)
        self._file: Any = None
        self.path: Path | None = None

    def add(self, file: InputFile, bad: list[BadRecord]) -> None:
        if self._job.config.on_error == "fail":
            check_unchanged(file)  # a file being written to looks cut short; that is the cause
            place = reader_for(file.format).describe(file, bad[0].position)
            raise DataError(f"{file.path}, {place}: {bad[0].reason}", bad[0].tip)
        try:
            if self._file is None:
                self._file, self.path = open(self._name, "wb"), self._name  # noqa: SIM115
            for record in bad:
                line = {"file": file.path, "position": record.position, "reason": record.reason}
                self._file.write(msgspec.json.encode(line) + b"\n")
        except OSError as error:
            raise from_os_error(error, self._name, "write") from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
