"""Every shard of a tokenized directory read once: its digest, its documents, their index.

A document is named by its number in its shard, from 0.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from packer_cli._kernels import documents as kernels
from packer_cli.errors import Interrupted, PackerError
from packer_cli.progress import Progress
from packer_cli.records import Int64
from packer_cli.result.counts import Counts, powers_histogram
from packer_cli.result.document_writer import INDEX_SCHEMA, documents_schema
from packer_cli.result.layout import MANIFEST
from packer_cli.result.manifest import DocumentHistograms
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
        )
        self._highest = highest_of(tokenized, findings)
        self._files = {unit.unit: [part[0] for part in unit.slices] for unit in facts.units}
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
        for shard, schema in ((documents, self._schema), (index, INDEX_SCHEMA)):
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
            where = index.file
            indexed = self._tokenized.index_batches(self._number[documents.file])
            where = documents.file
            texts += self._documents(documents, indexed, mine, places)
        except PackerError as error:
            path = path_of(self._tokenized, where)
            texts.append(error.message.removeprefix(f"{path}: "))
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

    def _documents(
        self, shard: Shard, indexed: list[Any], counts: Counts, places: list[Int64]
    ) -> list[str]:
        """What is wrong with a shard's documents: the first of each kind. OUT counts, places."""
        index, first = pa.Table.from_batches(indexed).combine_chunks(), 0
        for batch in self._tokenized.batches(shard):
            if self._stop.is_set():
                raise Interrupted("stopped")
            own = index.slice(first, len(batch))
            texts = [
                f"document {first + at}: {text}"
                for at, text in chain(self._broken(batch), _other_index(batch, own))
            ]
            if texts:
                return texts
            first += len(batch)
            place = [batch.column(name).to_numpy() for name in ("file", "position")]
            places.append(np.stack(place).astype(np.int64))
            _count(batch, own, counts)
            self._progress.wrote(len(batch.column("input_ids").values), 0)
        return []

    def _broken(self, batch: Any) -> Iterator[tuple[int, str]]:
        """(document, what is wrong with it) of a batch, at most one of each kind."""
        for column in batch.columns:
            inner = column.values if isinstance(column, pa.ListArray) else column
            if inner.null_count or (column.null_count and inner is column):
                yield 0, "a null in its shard"
                return
        ids, offsets = _lists(batch, "input_ids")
        if batch.column("input_ids").null_count:
            yield 0, "a null in its shard"
            return
        highest = np.iinfo(np.int32).max if self._highest is None else self._highest
        wrong = np.flatnonzero((ids < 0) | (ids > highest))
        if len(wrong):
            at = int(np.searchsorted(offsets, wrong[0], side="right")) - 1
            yield at, f"holds the id {ids[wrong[0]]}, the tokenizer's are 0 to {highest}"
        file, inputs = batch.column("file").to_numpy(), len(self._tokenized.facts.inputs)
        nowhere = np.flatnonzero((file < 0) | (file >= inputs))
        if len(nowhere):
            yield int(nowhere[0]), f"is of input {file[nowhere[0]]}, there are {inputs}"
        empty = np.flatnonzero(np.diff(offsets) == 0)
        if len(empty):
            yield int(empty[0]), "has no tokens"
        if "trained" in batch.schema.names:
            yield from _broken_stretches(batch, np.diff(offsets))

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
            self._findings.add(MANIFEST, *differences(self._counts, self._tokenized))


def differences(counts: Counts, tokenized: TokenizedDirectory) -> list[str]:
    """Every figure in which what was counted and the manifest differ."""
    facts = tokenized.facts
    pairs: list[tuple[str, Any, Any]] = [
        (name, getattr(counts, name), getattr(facts, name))
        for name in ("documents", "tokens", "trained_tokens")
    ]
    pairs += [
        (name, getattr(counts, name).tolist(), getattr(facts.histograms, name))
        for name in DocumentHistograms.__struct_fields__
    ]
    for index, one in enumerate(facts.inputs):
        counted = counts.file(index)
        pairs += [
            (f"{name} of the input {one.path}", getattr(counted, name), getattr(one, name))
            for name in ("documents", "tokens")
        ]
    return [
        f"{name}: {value} in the shards, {listed} in the manifest"
        for name, value, listed in pairs
        if value != listed
    ]


def _lists(batch: Any, name: str) -> tuple[Any, Any]:
    """(values, offsets int64[documents + 1] into them) of a list column, without a copy."""
    column = batch.column(name)
    offsets = column.offsets.to_numpy().astype(np.int64)
    values = column.values.to_numpy()[offsets[0] : offsets[-1]] if len(offsets) else np.empty(0)
    return values, offsets - offsets[:1]


def _broken_stretches(batch: Any, lengths: Int64) -> Iterator[tuple[int, str]]:
    """Stretches of what is trained on that no document of such a length can have."""
    edges, offsets = _lists(batch, "trained")
    of = np.repeat(np.arange(len(lengths)), np.diff(offsets))
    odd = np.flatnonzero(np.diff(offsets) % 2)
    if len(odd):
        yield int(odd[0]), "its trained has an odd number of edges"
    within = np.append(of[1:] == of[:-1], False) if len(of) else np.empty(0, bool)
    wrong = (edges < 0) | (edges > lengths[of])
    wrong |= np.append(edges[1:] <= edges[:-1], False) & within
    if wrong.any():
        at = int(of[np.argmax(wrong)])
        shown = edges[offsets[at] : offsets[at + 1]][:6].tolist()
        yield at, f"its trained is {shown}, not ascending within its {lengths[at]} tokens"


def trained_tokens(batch: Any) -> Int64:
    """int64[documents], the tokens of a batch that are trained on, first ones left out."""
    lengths: Int64 = np.diff(_lists(batch, "input_ids")[1])
    if "trained" not in batch.schema.names:
        return lengths - 1
    column = batch.column("trained")
    edges, offsets = _lists(batch, "trained")
    starts, stops = np.maximum(edges[::2], 1), np.maximum(edges[1::2], 1)
    sums = np.concatenate([[0], np.cumsum(stops - starts, dtype=np.int64)])
    counted = sums[offsets[1:] // 2] - sums[offsets[:-1] // 2]
    everywhere = column.is_null().to_numpy(zero_copy_only=False)
    trained: Int64 = np.where(everywhere, lengths - 1, counted)
    return trained


def _other_index(batch: Any, index: Any) -> Iterator[tuple[int, str]]:
    """(document, text) where a batch and its part of the index differ, one of each kind."""
    ids, offsets = _lists(batch, "input_ids")
    hashes = np.empty((len(batch), 2), np.uint64)
    kernels.hash_documents(ids.view(np.uint32), offsets, hashes)
    stored = b"".join(index.column("content_hash").to_pylist())
    pairs = (
        ("length", np.diff(offsets), index.column("length").to_numpy()),
        ("trained_tokens", trained_tokens(batch), index.column("trained_tokens").to_numpy()),
    )
    for name, own, listed in pairs:
        if len(own) != len(listed):
            yield 0, f"its index has {len(listed)} of {len(own)} documents"
            return
        if (own != listed).any():
            at = int(np.argmax(own != listed))
            yield at, f"its {name} is {own[at]}, the index says {listed[at]}"
    different = (hashes != np.frombuffer(stored, np.uint64).reshape(-1, 2)).any(axis=1)
    if different.any():
        yield int(np.argmax(different)), "its content_hash is not that of its tokens"


def _count(batch: Any, index: Any, counts: Counts) -> None:
    lengths = index.column("length").to_numpy().astype(np.int64)
    counts.documents += len(batch)
    counts.tokens += int(lengths.sum())
    counts.trained_tokens += int(index.column("trained_tokens").to_numpy().sum(dtype=np.int64))
    counts.document_length += powers_histogram(lengths)
    counts.add_files(batch.column("file").to_numpy(), lengths, lengths)
