"""Every shard of a tokenized directory read once: its digest, its documents, their index.

A document is named by its number in its shard, from 0.
"""

from __future__ import annotations

import threading

import numpy as np
import pyarrow as pa

from packer_cli.errors import Interrupted, PackerError
from packer_cli.progress import Progress
from packer_cli.records import Int64
from packer_cli.result.counts import Counts
from packer_cli.result.document_rules import (
    count_documents,
    document_differences,
    sound_batches,
)
from packer_cli.result.document_writer import documents_schema, index_schema
from packer_cli.result.layout import MANIFEST
from packer_cli.result.reader import first_line
from packer_cli.result.shards import Shard, digest
from packer_cli.result.tokenized import TokenizedDirectory
from packer_cli.verify.findings import Findings
from packer_cli.verify.reading import path_of
from packer_cli.verify.shards import highest_of, schema_differences


class DocumentChecks:
    """Checks units, and adds up what is in them."""

    def __init__(
        self,
        tokenized: TokenizedDirectory,
        findings: Findings,
        progress: Progress,
        stop: threading.Event,
    ) -> None:
        facts = tokenized.facts
        self._tokenized = tokenized
        self._findings = findings
        self._progress = progress
        self._stop = stop
        self._schema = documents_schema(
            facts.tokenizer.sha256 if facts.tokenizer else "",
            has_trained=facts.config.shape != "text",
            has_chosen=tokenized.has_pairs,
        )
        self._index_schema = index_schema(has_chosen=tokenized.has_pairs)
        self._highest = highest_of(tokenized, findings)
        inputs = range(len(facts.inputs))  # a damaged manifest may name others
        self._files = {
            unit.unit: [part[0] for part in unit.slices if part[0] in inputs]
            for unit in facts.units
        }
        self._number = {shard.file: i for i, shard in enumerate(tokenized.shards)}
        self._counts = Counts()
        self._complete = True  # whether every document was counted

    def check_unit(self, shards: list[Shard]) -> None:
        """The shards of one unit, each followed by its index."""
        counts, places, sound = Counts(), [np.empty((2, 0), np.int64)], True
        for documents, index in zip(shards[::2], shards[1::2], strict=True):
            sound &= self._check_pair(documents, index, counts, places)
        if sound:
            where = shards[0].file if len(shards) == 2 else f"unit {shards[0].unit}"
            self._findings.add(where, *self._misplaced(shards[0].unit, np.concatenate(places, 1)))
        with self._findings.lock:
            self._counts.add(counts)
            self._complete = self._complete and sound

    def _check_pair(
        self, documents: Shard, index: Shard, counts: Counts, places: list[Int64]
    ) -> bool:
        """Whether a shard of documents and its index are sound. OUT counts, places."""
        # a file with other bytes than the manifest says is not looked into
        same = [self._is_unchanged(shard) for shard in (documents, index)]
        if not all(same):
            return False
        mine, texts = Counts(), list[str]()
        for shard, schema in ((documents, self._schema), (index, self._index_schema)):
            try:
                with pa.memory_map(str(path_of(self._tokenized, shard.file))) as file:
                    texts = schema_differences(pa.ipc.read_schema(file), schema)
            except (pa.ArrowException, OSError) as error:
                texts = [f"not a readable shard: {first_line(error)}"]
            self._findings.add(shard.file, *texts)
            if texts:
                return False
        where = documents.file
        try:
            self._count(self._number[where], mine, places)
        except Interrupted:
            raise
        except PackerError as error:
            in_index = error.message.startswith(f"{path_of(self._tokenized, index.file)}: ")
            where = index.file if in_index else where
            path = path_of(self._tokenized, where)
            self._findings.add(where, error.message.removeprefix(f"{path}: "))
            return False
        texts = texts or [
            f"holds {value} {figure}, the manifest says {listed}"
            for figure, value, listed in (
                ("documents", mine.documents, documents.rows),
                ("tokens", mine.tokens, documents.tokens),
                ("trained_tokens", mine.trained_tokens, documents.trained_tokens),
            )
            if value != listed
        ]
        self._findings.add(where, *texts)
        with self._findings.lock:
            self._findings.shards += 1
            self._findings.documents += mine.documents
            self._findings.tokens += mine.tokens
        counts.add(mine)
        return not texts

    def _is_unchanged(self, shard: Shard) -> bool:
        path = path_of(self._tokenized, shard.file)
        try:
            self._tokenized.check_size(shard)
            found = digest(path, self._stop.is_set)[1]
        except PackerError as error:
            self._findings.add(shard.file, error.message.removeprefix(f"{path}: "))
            return False
        if self._stop.is_set():
            raise Interrupted("stopped")
        if found != shard.sha256:
            self._findings.add(
                shard.file, f"its sha256 is {found}, the manifest says {shard.sha256}"
            )
        self._progress.read(shard.bytes, 0)
        with self._findings.lock:
            self._findings.bytes += shard.bytes
        return found == shard.sha256

    def _count(self, number: int, counts: Counts, places: list[Int64]) -> None:
        """Check the documents of a shard. Raises DataError. OUT counts, places."""
        for batch, index in sound_batches(self._tokenized, number, self._highest):
            if self._stop.is_set():
                raise Interrupted("stopped")
            place = [batch.column(name).to_numpy() for name in ("file", "position")]
            places.append(np.stack(place).astype(np.int64))
            count_documents(batch, index, counts)
            self._progress.wrote(len(batch.column("input_ids").values), 0)

    def _misplaced(self, unit: int, places: Int64) -> list[str]:
        """Documents that are not in the order of the unit's slices and of their positions."""
        file, position = places
        files = self._files.get(unit, [])
        rank = np.full(len(self._tokenized.facts.inputs), -1, np.int64)
        rank[np.array(files[::-1], np.int64)] = np.arange(len(files))[::-1]
        foreign = np.flatnonzero(rank[file] < 0)
        if len(foreign):
            at = int(foreign[0])
            path = self._tokenized.facts.inputs[int(file[at])].path
            return [f"its document {at} is of {path}, which the unit does not read"]
        order = rank[file]
        back = np.flatnonzero(
            (np.diff(order) < 0) | ((np.diff(order) == 0) & (np.diff(position) <= 0))
        )
        if not len(back) and not (position < 0).any():
            return []
        at = int(back[0]) + 1 if len(back) else int(np.argmax(position < 0))
        path = self._tokenized.facts.inputs[int(file[at])].path
        return [f"its document {at} is at {position[at]} of {path}, not after the one before it"]

    def check_totals(self) -> None:
        """Check the manifest's figures, if every document could be counted."""
        if self._complete:
            self._findings.add(MANIFEST, *document_differences(self._counts, self._tokenized.facts))
