"""One work unit, planned for several configurations: its documents, or some, are read once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from packer_cli.config.options import PackConfig
from packer_cli.inputs.work_units import unit_bytes_of
from packer_cli.packing.window import trained_in
from packer_cli.plan.sample import Part, PartReader, repeated
from packer_cli.plan.sizes import ShardSizes
from packer_cli.progress import Progress
from packer_cli.records import BadRecord, InputFile, Int64, Stock, Stretch, TokenBatch, WorkUnit
from packer_cli.result.counts import Counts, FileCounts, powers_histogram
from packer_cli.result.shard_writer import rows_per_batch, schema
from packer_cli.result.shards import Shard
from packer_cli.result.view_writer import ROWS_PER_BATCH, view_schema
from packer_cli.run.rows import UnitRows
from packer_cli.run.unit import Job, Rejections, documents_of


@dataclass
class Planned:
    """What would be written with one configuration; those of units add up.

    shards, bytes  files, and their sizes
    attention      the sum of the squared segment lengths
    cut_documents  those in several segments
    """

    counts: Counts
    shards: int = 0
    bytes: int = 0
    attention: int = 0
    cut_documents: int = 0

    def add(self, other: Planned) -> None:
        self.counts.add(other.counts)
        self.shards += other.shards
        self.bytes += other.bytes
        self.attention += other.attention
        self.cut_documents += other.cut_documents


@dataclass
class Documents:
    """The documents of a unit before any is cut, truncated or dropped; `length` int64[32] is a
    histogram by powers of two.
    """

    count: int = 0
    tokens: int = 0
    length: Int64 = field(default_factory=lambda: powers_histogram(np.empty(0, np.int64)))

    def add(self, lengths: Int64) -> None:
        """Empty documents do not count."""
        lengths = lengths[lengths > 0]
        self.count += len(lengths)
        self.tokens += int(lengths.sum())
        self.length += powers_histogram(lengths)

    def times(self, factor: float) -> Documents:
        """As many times as many."""
        length = np.rint(self.length * factor).astype(np.int64)
        return Documents(round(self.count * factor), round(self.tokens * factor), length)


@dataclass(frozen=True)
class UnitPlan:
    """What is planned of a unit: an outcome for each configuration.

    unit    its index
    weight  bytes of text that the figures are of
    copies  how often what was read was planned
    """

    unit: int
    weight: float
    copies: int
    documents: Documents
    planned: list[Planned]


def plan_unit(unit: WorkUnit, job: Job, configs: Sequence[PackConfig], part: Part) -> UnitPlan:
    """The same rows as `pack_unit` writes with each of the configurations, which differ in nothing
    that concerns documents. Raises what that does.

    `part`: what is read of the unit. It is planned as often as makes up the unit, or a small one.
    """
    reader = PartReader(job.read, part)
    job = replace(job, read=reader, is_sample=not part.is_whole)
    rejections, read, documents = Unkept(unit, job), Counts(), Documents()
    silent = replace(job, progress=Progress(0, show=False))
    # the tokens of all configurations together would be counted as progress
    jobs = [job, *[silent] * (len(configs) - 1)]
    writers = [_Unwritten(config, job) for config in configs]
    rows = [
        UnitRows(unit, job, config, writer)
        for config, job, writer in zip(configs, jobs, writers, strict=True)
    ]
    stretches: dict[int, list[Stretch]] = {one.file: [] for one in unit.slices}
    kept = list[TokenBatch]()
    for batch in documents_of(unit, job, rejections, read, stretches):
        documents.add(np.diff(batch.offsets))
        # rows are planned from lengths, and a window without tokens is small
        trained = batch.trained
        if trained is None and job.tokenized is None and job.shape.kind != "text":
            # other batches may say what of them is trained on
            trained = np.ones(len(batch.ids), np.uint8)
        lengths = replace(batch, ids=np.empty(0, np.uint32), trained=trained, tokens_elsewhere=True)
        if not part.is_whole:
            kept.append(lengths)
            continue
        for one in rows:
            one.add(lengths)
    if job.tokenizer is not None:
        job.tokenizer.finish()  # the fast engine's tokens are confirmed
    weight, copies = float(part.unit_weight), 1
    if not part.is_whole and reader.weight:  # none where all is damaged
        enough = min(weight, max(unit_bytes_of(config, 0) for config in configs))
        weight = reader.weight + part.weight_of(job.damaged)
        copies = max(round(enough / weight), 1)
    for batch in repeated(kept, copies):
        for one in rows:
            one.add(batch)
    planned = [
        _closed(one, writer, _times(read, copies))
        for one, writer in zip(rows, writers, strict=True)
    ]
    return UnitPlan(unit.index, weight * copies, copies, documents.times(copies), planned)


def scaled(counts: Counts, factor: float) -> Counts:
    """Counts of `factor` times as many records; attention costs between rows are not scaled."""
    figures: dict[str, Any] = {}
    for item in fields(Counts):
        value = getattr(counts, item.name)
        if isinstance(value, int):
            figures[item.name] = round(value * factor)
        elif isinstance(value, np.ndarray):
            figures[item.name] = np.rint(value * factor).astype(np.int64)
    figures["files"] = {
        index: FileCounts(**{name: round(figure * factor) for name, figure in vars(one).items()})
        for index, one in counts.files.items()
    }
    return replace(counts, **figures)


def _times(read: Counts, copies: int) -> Counts:
    """What was read so many times; files that are left out are so once."""
    again = read.rejected_files * (copies - 1)
    more = scaled(read, copies)
    return replace(
        more,
        rejected_records=more.rejected_records - again,
        rejected_files=more.rejected_files - again,
    )


def _closed(rows: UnitRows, writer: _Unwritten, read: Counts) -> Planned:
    shards = rows.close()
    rows.counts.add(read)
    sizes = sum(shard.bytes for shard in shards)
    return Planned(rows.counts, len(shards), sizes, writer.attention, rows.cut_documents)


class Unkept(Rejections):
    """Bad records are counted, or end the run, and are not kept."""

    def _keep(self, file: InputFile, bad: list[BadRecord]) -> None:
        pass


class _Unwritten:
    """Counts rows instead of writing them. `attention`: the sum of squared segment lengths."""

    rows_at_once = 0  # it needs no tokens

    def __init__(self, config: PackConfig, job: Job) -> None:
        if config.view:
            self._batch, self._most = ROWS_PER_BATCH, None
            kind = view_schema(config, job.tokenizer_sha256)
        else:
            self._batch, self._most = rows_per_batch(config.max_length), config.shard_bytes
            kind = schema(config, job.pad_token_id, job.tokenizer_sha256)
        self._sizes = ShardSizes(kind)
        self._shards: list[Shard] = []
        self.attention = 0

    def write(self, stock: Stock, order: Int64, row_offsets: Int64) -> None:
        rows = len(row_offsets) - 1
        if not rows:
            return
        self.attention += int(np.square(stock.length[order], dtype=np.int64).sum())
        edges = np.append(np.arange(0, rows, self._batch), rows)
        sizes = self._sizes.batches(np.diff(edges), np.diff(row_offsets[edges]))
        for size in sizes.tolist():
            if not self._shards or self._is_full(self._shards[-1]):
                self._shards.append(Shard.begun("", 0))
                self._shards[-1].bytes = self._sizes.around
            self._shards[-1].bytes += size
        self._shards[-1].trained_tokens += trained_in(stock, order)

    def _is_full(self, shard: Shard) -> bool:
        """Whether a writer continues in a new file; it has not written the end of this one yet."""
        return self._most is not None and shard.bytes - self._sizes.end >= self._most

    def close(self) -> list[Shard]:
        return self._shards

    def abandon(self) -> None:
        """Nothing is open."""
