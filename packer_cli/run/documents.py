"""Tokenizing one work unit: its documents written as they are, with an index beside them."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from packer_cli.packing.fitting import MAX_DOCUMENT_TOKENS
from packer_cli.records import Stretch, TokenBatch, WorkUnit
from packer_cli.result.counts import Counts, powers_histogram
from packer_cli.result.document_writer import DocumentWriter, documents_schema
from packer_cli.result.layout import DOCUMENTS, kind_of
from packer_cli.result.shards import Shard
from packer_cli.run.unit import Job, Rejections, UnitResult, documents_of, refuse_longer


class Sink(Protocol):
    """Where the documents of a unit go, as to a `DocumentWriter`."""

    def write(self, batch: TokenBatch) -> None: ...
    def close(self) -> list[Shard]: ...
    def abandon(self) -> None: ...


def tokenize_unit(
    unit: WorkUnit, job: Job, writer: Sink | None = None, rejections: Rejections | None = None
) -> UnitResult:
    """Read the unit's documents and write its shards. Raises Interrupted once `job.stop` is set.

    `writer`: takes the documents instead of shards. `rejections`: takes bad records.
    """
    rejections, counts = rejections or Rejections(unit, job), Counts()
    writer = writer or _writer(unit, job)
    stretches: dict[int, list[Stretch]] = {part.file: [] for part in unit.slices}
    try:
        for batch in documents_of(unit, job, rejections, counts, stretches):
            refuse_longer(batch, job, MAX_DOCUMENT_TOKENS, "the most is", "cut it in the input")
            lengths = np.diff(batch.offsets)
            tokens = int(lengths.sum())
            counts.encoded_tokens += tokens
            counts.tokens += tokens
            counts.documents += int((lengths > 0).sum())
            counts.empty_documents += int((lengths == 0).sum())
            counts.document_length += powers_histogram(lengths[lengths > 0])
            counts.add_files(batch.file, lengths, lengths)
            writer.write(batch)
            job.progress.wrote(tokens, tokens)
        shards = writer.close()
        rejections.close()
    finally:
        writer.abandon()
        rejections.abandon()
    counts.trained_tokens = sum(s.trained_tokens for s in shards if kind_of(s.file) == DOCUMENTS)
    return UnitResult(unit, shards, counts, rejections.path, stretches)


def _writer(unit: WorkUnit, job: Job) -> DocumentWriter:
    schema = documents_schema(
        job.tokenizer_sha256, has_trained=job.shape.kind != "text", has_chosen=job.shape.has_pairs
    )
    return DocumentWriter(job.folder, unit.index, job.config.shard_bytes, schema)
