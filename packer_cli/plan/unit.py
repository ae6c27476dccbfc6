"""One work unit, planned for several configurations: its documents, or some, are read once. And
what a source of a recipe would be, tokenized in memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from msgspec import field, structs

from packer_cli.mixing.units import unit_bytes_of
from packer_cli.options.options import PADDED_BOUNDARIES, PackConfig
from packer_cli.packing.window import trained_in
from packer_cli.plan.sample import Part, PartReader
from packer_cli.progress import Progress
from packer_cli.records import Int64, Stock, TokenBatch, WorkUnit, offsets_of
from packer_cli.result.counts import Counts, InputTotals, powers_histogram
from packer_cli.result.layout import PART, Shard, named_by_digest
from packer_cli.result.manifest import TokenizedManifest
from packer_cli.result.reader import plain_type, values_type
from packer_cli.result.shard_writer import (
    ShardParts,
    fixed,
    ragged,
    stored_batch_rows,
    stored_schema,
)
from packer_cli.result.tokenized import TokenizedDirectory
from packer_cli.run.unit import (
    Job,
    UnitDocuments,
    UnitMaker,
    UnitRows,
    pack_unit,
)

_END = 8  # bytes of a shard after its last batch
_BATCH_TOKENS = 1 << 20
_Made = TypeVar("_Made")


class Planned(Counts):
    """Figures of what would be written with one configuration; those of units add up.

    shards, bytes  files, and their sizes
    attention      the sum of the squared segment lengths
    cut_documents  those in several segments
    read_lengths   int64[32], documents with tokens before any is cut, truncated or dropped, by
                   powers of two of their lengths; their tokens are `encoded_tokens`
    """

    shards: int = 0
    bytes: int = 0
    attention: int = 0
    cut_documents: int = 0
    read_lengths: Int64 = field(default_factory=lambda: powers_histogram(np.empty(0, np.int64)))

    def times(self, factor: float) -> Planned:
        """Figures of `factor` times as many records; attention costs between rows stay."""

        def times(value: Any) -> Any:
            if isinstance(value, int):
                return round(value * factor)
            if isinstance(value, np.ndarray):
                return np.rint(value * factor).astype(np.int64)
            if isinstance(value, InputTotals):
                return InputTotals(*map(times, structs.astuple(value)))
            if isinstance(value, dict):
                return {name: times(one) for name, one in value.items()}
            return value

        return Planned(**{name: times(value) for name, value in structs.asdict(self).items()})


@dataclass(frozen=True)
class UnitPlan:
    """Plan of a unit, for each configuration.

    unit    its index
    weight  bytes of text that the figures are of
    copies  how often what was read was planned
    """

    unit: int
    weight: float
    copies: int
    planned: list[Planned]


def plan_unit(unit: WorkUnit, job: Job, configs: Sequence[PackConfig], part: Part) -> UnitPlan:
    """Plan the rows that `pack_unit` writes with each of the configurations, which differ in
    nothing that concerns documents. Raises what that does.

    `part`: what is read of the unit.
    """
    reader = PartReader(job.source.read, part)
    source = replace(job.source, read=reader)
    job = replace(job, source=source, is_sample=not part.is_whole)
    planning = _Planning(job, configs, part, reader)
    pack_unit(unit, job, planning)
    job.source.confirm()
    return planning.plan()


class _Planning(UnitMaker):
    """Takes the documents of a part, and plans their rows with each of the configurations.

    A part is planned as often as makes up its unit, or a small one: rows that are not full, and
    whatever else depends on how many documents there are, are then as they are in the unit.
    """

    def __init__(
        self, job: Job, configs: Sequence[PackConfig], part: Part, reader: PartReader
    ) -> None:
        super().__init__(part.unit, job)
        self._configs, self._part, self._reader = configs, part, reader
        # the tokens of all configurations together would be counted as progress
        silent = replace(job, progress=Progress(0, show=False))
        self._planned = [Planned() for _ in configs]
        self._rows = [
            UnitRows(part.unit, job if planned is self._planned[0] else silent, config,
                     _Unwritten(config, job, planned))
            for config, planned in zip(configs, self._planned, strict=True)
        ]  # fmt: skip
        self._kept, self._read = list[TokenBatch](), Planned()
        self._copies, self._weight = 1, float(part.unit_weight)

    def add(self, batch: TokenBatch) -> None:
        own = np.diff(batch.offsets)
        self._read.read_lengths += powers_histogram(own[own > 0])
        # rows are planned from lengths, and a window without tokens is small
        trained, job = batch.trained, self.job
        if trained is None and job.source.tokenized is None and job.run.shape.kind != "text":
            # other batches may say what of them is trained on
            trained = np.ones(len(batch.ids), np.uint8)
        lengths = replace(batch, ids=np.empty(0, np.uint32), trained=trained, tokens_elsewhere=True)
        if not self._part.is_whole:
            self._kept.append(lengths)
            return
        for one in self._rows:
            one.add(lengths)

    def close(self) -> list[Shard]:
        if not self._part.is_whole and self._reader.weight:  # none where all is damaged
            least = max(unit_bytes_of(config, 0) for config in self._configs)
            weight = self._reader.weight + self._part.weight_of(self.job.damaged)
            self._copies = max(round(min(self._weight, least) / weight), 1)
            self._weight = weight
        for batch in _repeated(self._kept, self._copies):
            for one in self._rows:
                one.add(batch)
        return [shard for one in self._rows for shard in one.close()]

    def abandon(self) -> None:
        super().abandon()
        for one in self._rows:
            one.abandon()

    def plan(self) -> UnitPlan:
        """The plan, once all is closed."""
        copies = self._copies
        self._read.add(self.counts)
        read = self._read.times(copies)
        again = read.rejected_files - read.rejected_files // copies  # those left out are so once
        read.rejected_records -= again
        read.rejected_files -= again
        for planned, rows in zip(self._planned, self._rows, strict=True):
            planned.add(rows.counts)
            planned.add(read)
            planned.cut_documents = rows.cut_documents
        return UnitPlan(self._part.unit.index, self._weight * copies, copies, self._planned)


def _repeated(batches: Sequence[TokenBatch], copies: int) -> Iterator[TokenBatch]:
    """All batches so many times, in batches of no more tokens than a run has. They have no ids."""
    tokens = sum(int(batch.offsets[-1] - batch.offsets[0]) for batch in batches)
    most = max(_BATCH_TOKENS // max(tokens, 1), 1)
    for first in range(0, copies, most):
        times = min(most, copies - first)
        for batch in batches:
            lengths = np.tile(np.diff(batch.offsets), times)
            yield replace(
                batch,
                offsets=offsets_of(lengths),
                trained=None if batch.trained is None else np.tile(batch.trained, times),
                file=np.tile(batch.file, times),
                position=np.tile(batch.position, times),
                chosen=None if batch.chosen is None else np.tile(batch.chosen, times),
            )


class _Unwritten:
    """Counts rows instead of writing them. OUT planned: their shards, and what attention costs."""

    rows_at_once = 0  # it needs no tokens

    def __init__(self, config: PackConfig, job: Job, planned: Planned) -> None:
        self._planned = planned
        self._batch, self._most = stored_batch_rows(config), config.shard_bytes
        if config.view:
            self._most = sys.maxsize
        self._schema = stored_schema(config, job.pad_token_id, job.tokenizer_sha256)
        self._size = lru_cache(1 << 16)(partial(_batch_bytes, self._schema))
        self._shards: list[Shard] = []

    def write(self, stock: Stock, order: Int64, row_offsets: Int64) -> None:
        rows = len(row_offsets) - 1
        if not rows:
            return
        self._planned.attention += int(np.square(stock.length[order], dtype=np.int64).sum())
        edges = np.append(np.arange(0, rows, self._batch), rows)
        batches = np.diff(edges).tolist(), np.diff(row_offsets[edges]).tolist()
        for size in map(self._size, *batches):
            # a writer continues in a new file before it has written the end of a full one
            if not self._shards or self._shards[-1].bytes - _END >= self._most:
                self._shards.append(Shard.begun("", 0))
                self._shards[-1].bytes = self._schema.serialize().size + _END
            self._shards[-1].bytes += size
        self._shards[-1].trained_tokens += trained_in(stock, order)

    def close(self) -> list[Shard]:
        self._planned.shards = len(self._shards)
        self._planned.bytes = sum(shard.bytes for shard in self._shards)
        return self._shards

    def abandon(self) -> None:
        """Nothing is open."""


def _batch_bytes(schema: Any, rows: int, segments: int) -> int:
    """How many bytes a record batch of so many rows has in a shard. Pages of its zeros are never
    touched.
    """
    columns = []
    for column in schema:
        kind = column.type
        if pa.types.is_fixed_size_list(kind):
            columns.append(fixed(kind, np.zeros((rows, kind.list_size), values_type(kind))))
            continue
        ends = np.zeros(rows + 1, np.int32)
        ends[-1] = segments + (rows if column.name in ("cu_seqlens", PADDED_BOUNDARIES) else 0)
        of_structs = pa.types.is_struct(kind.value_type)
        types = [plain_type(one.type) for one in kind.value_type] if of_structs else []
        types = types or [values_type(kind)]
        parts = [np.zeros(ends[-1], one) for one in types]
        columns.append(ragged(kind, ends, parts))
    return int(pa.ipc.get_record_batch_size(pa.record_batch(columns, schema=schema)))


class Thinned(UnitDocuments):
    """The documents of a unit, of which a share is kept."""

    def __init__(self, unit: WorkUnit, job: Job, share: float) -> None:
        super().__init__(unit, job)
        self._share, self._drawn = share, np.random.default_rng(unit.index)

    def add(self, batch: TokenBatch) -> None:
        super().add(batch.take(self._drawn.random(len(batch.position)) < self._share))


class InMemory(TokenizedDirectory):
    """A tokenized directory whose files are record batches in memory, by name."""

    def __init__(self, path: Path, facts: TokenizedManifest, content: dict[str, list[Any]]) -> None:
        super().__init__(path, facts)
        self._content = content

    def _map(self, shard: Shard, maps: Any = None) -> Any:
        return shard

    def _batches(self, shard: Shard, source: Any) -> Iterator[Any]:
        return iter(self._content[shard.file])


class PartsInMemory(ShardParts):
    """Shards of a unit that go into the `content` of a directory in memory."""

    def __init__(self, content: dict[str, list[Any]], *of_unit: Any) -> None:
        super().__init__(*of_unit)
        self._content = content

    def write(self, batch: Any, **how: Any) -> None:
        if not self.names:
            self.names.append(named_by_digest(self._name(0).removesuffix(PART), "0" * 16))
            self._content[self.names[0]] = []
        # a copy: the writer fills the same memory again
        copied = pa.ipc.read_record_batch(batch.serialize(), batch.schema)
        self._content[self.names[0]].append(copied)
