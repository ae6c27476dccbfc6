"""Sources of a recipe that were never tokenized: a sample of each, tokenized in memory.

Of every source the same share is kept, so the recipe with that share of its amounts makes that
share of the rows. Nothing is written. Where the sample is everything, nothing is estimated.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from packer_cli.config.mixture import Mixture
from packer_cli.config.recipe import Recipe, Source
from packer_cli.config.run_options import EncodingOptions
from packer_cli.errors import DataError
from packer_cli.inputs.tokenized import hold
from packer_cli.interrupts import as_flag
from packer_cli.mixing.units import work_units
from packer_cli.plan.run import NOWHERE
from packer_cli.plan.sample import LEAST_UNITS, spread, weight_of
from packer_cli.plan.unit import Unkept
from packer_cli.progress import Progress
from packer_cli.records import InputFile, Notify, TokenBatch, WorkUnit
from packer_cli.result.counts import Counts
from packer_cli.result.document_writer import DocumentWriter, documents_schema
from packer_cli.result.layout import MANIFEST, PART
from packer_cli.result.manifest import TOKENIZED, TokenizedManifest
from packer_cli.result.shards import Shard
from packer_cli.result.tokenized import TokenizedDirectory
from packer_cli.run.chosen import Chosen
from packer_cli.run.documents import tokenize_unit
from packer_cli.run.finalize import manifest_of
from packer_cli.run.identity import Run
from packer_cli.run.pipeline import settled
from packer_cli.run.recipe import options_of_source
from packer_cli.run.unit import Job
from packer_cli.run.worker import Worker
from packer_cli.threads import run_all

_READ_BYTES = 64 << 20  # of text, where nobody says how much


@dataclass(frozen=True)
class Sample:
    """What is read of a source. `weight`: the share of its text that `units` have."""

    source: Source
    to: Path
    run: Run
    chosen: Chosen
    units: list[WorkUnit]

    @property
    def weight(self) -> float:
        return _weight(self.units) / _weight(self.run.units)


def samples_of(
    recipe: Recipe,
    raw: Sequence[tuple[Source, list[InputFile], Path]],
    share: float | None,
    notify: Notify,
    warn: Notify,
) -> list[Sample]:
    """What to read of sources. `share`: None: as much as takes seconds."""
    runs = []
    for source, files, to in raw:
        config = options_of_source(source, files)
        found, config, shape, chosen = settled(files, config, recipe.tokenizer, notify, warn)
        units = tuple(work_units(found, config))
        runs.append((source, to, chosen, Run(
            config, shape, tuple(found), units, chosen.name, chosen.hashes
        )))  # fmt: skip
    if share is None:
        share = min(1.0, _READ_BYTES / sum(_weight(run.units) for *_, run in runs))
    return [
        Sample(source, to, run, chosen, [
            *spread(run.units, max(LEAST_UNITS, ceil(share * len(run.units))), recipe.config.seed)
        ])
        for source, to, chosen, run in runs
    ]  # fmt: skip


def held(
    sample: Sample, index: int, share: float, options: EncodingOptions, notify: Notify,
    stop: threading.Event,
) -> InputFile:  # fmt: skip
    """The input number `index` of the rows: `share` of a source, tokenized in memory."""
    run, keep = sample.run, min(1.0, share / sample.weight)
    done: dict[int, tuple[_Kept, Counts, Any]] = {}
    with ExitStack() as stack:
        worker = Worker(
            run, sample.chosen, sample.units, NOWHERE, options, notify, stop,
            Progress(0, show=False),
        )  # fmt: skip
        stack.enter_context(closing(worker))
        stack.enter_context(as_flag())

        def tokenize(unit: WorkUnit, job: Job) -> None:
            writer = _Kept(unit, job, keep)
            result = tokenize_unit(unit, job, writer, Unkept(unit, job))
            if job.tokenizer is not None:
                job.tokenizer.finish()
            done[unit.index] = writer, result.counts, job.info

        def task(unit: WorkUnit) -> None:
            worker.make(unit, tokenize)

        tasks = [lambda unit=unit: task(unit) for unit in sample.units]
        run_all(tasks, options.workers, stop, worker.stop)
    total, shards, content = Counts(), list[Shard](), dict[str, Any]()
    for number in sorted(done):
        writer, counts, info = done[number]
        total.add(counts)
        shards += writer.shards
        content |= writer.content
    if not shards:
        raise DataError(
            f"source {sample.source.name!r}: no documents in what was read of it",
            "read more: --sample 100%",
        )
    digests = {file.index: (file.size, "") for file in run.files}
    facts = manifest_of(
        replace(run, side_files={}), info.as_json() if info else None, digests, shards, total, {}
    )
    kept = facts.document | {"tokens": sum(one.tokens for one in shards[::2])}
    directory = _InMemory(sample.to, TokenizedManifest.of(kept), content)
    size = sum(len(one) for one in content.values())
    file = InputFile(index, str(sample.to / MANIFEST), TOKENIZED, None, size, 0)
    hold(file, directory)
    return file


def lessened(mixture: Mixture, share: float) -> Mixture:
    """A recipe for a share of all its documents."""

    def part(tokens: int | None) -> int | None:
        return None if tokens is None else max(1, round(tokens * share))

    return replace(
        mixture,
        tokens=part(mixture.tokens),
        validation_documents=part(mixture.validation_documents),
        sources=tuple(replace(one, tokens=part(one.tokens)) for one in mixture.sources),
        stages=tuple(replace(one, tokens=part(one.tokens) or 1) for one in mixture.stages),
    )


class _Kept(DocumentWriter):
    """Keeps a share of a unit's documents, in memory. `content`: by the names of files."""

    def __init__(self, unit: WorkUnit, job: Job, share: float) -> None:
        schema = documents_schema(
            job.tokenizer_sha256,
            has_trained=job.shape.kind != "text",
            has_chosen=job.shape.has_pairs,
        )
        super().__init__(NOWHERE, unit.index, job.config.shard_bytes, schema, self._opened)
        self._share, self._drawn = share, np.random.default_rng(unit.index)
        self._sinks: dict[str, Any] = {}
        self.content: dict[str, Any] = {}
        self.shards: list[Shard] = []

    def _opened(self, name: str) -> Any:
        self._sinks[name] = pa.BufferOutputStream()
        return self._sinks[name]

    def write(self, batch: TokenBatch) -> None:
        if self._share < 1:
            batch = _some(batch, self._drawn.random(len(batch.position)) < self._share)
        super().write(batch)

    def close(self) -> list[Shard]:
        shards = super().close()
        self.content = {
            name.removesuffix(PART): sink.getvalue() for name, sink in self._sinks.items()
        }
        for shard in shards:
            shard.file = shard.file.removesuffix(PART)
            shard.bytes = max(1, len(self.content[shard.file]))
        self.shards = shards
        return shards


def _some(batch: TokenBatch, kept: Any) -> TokenBatch:
    lengths = np.diff(batch.offsets)
    tokens = np.repeat(kept, lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths[kept])]).astype(np.int64)
    return replace(
        batch,
        ids=batch.ids[batch.offsets[0] : batch.offsets[-1]][tokens],
        offsets=offsets,
        trained=None if batch.trained is None else batch.trained[tokens],
        file=batch.file[kept],
        position=batch.position[kept],
        chosen=None if batch.chosen is None else batch.chosen[kept],
    )


class _InMemory(TokenizedDirectory):
    """A tokenized directory whose files lie in memory."""

    def __init__(self, path: Path, facts: TokenizedManifest, content: dict[str, Any]) -> None:
        super().__init__(path, facts)
        self._content = content

    def _mapped(self, shard: Shard, expected: Any, maps: Any = None) -> Any:
        with pa.ipc.open_stream(self._content[shard.file]) as stream:
            yield from stream


def _weight(units: Sequence[WorkUnit]) -> int:
    return sum(weight_of(unit.slices) for unit in units)
