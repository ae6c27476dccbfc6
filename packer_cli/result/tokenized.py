"""Reading tokenized directories: indexes in memory, documents memory-mapped.

    open_tokenized(path) -> TokenizedDirectory    lengths, orders, and where documents come from

Shards are named by their content and their sizes compared on open, as those of packed directories
are; what is in them is checked when they are mapped. `tokenized_tokens.py` gathers their tokens.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from packer_cli import storage
from packer_cli._kernels import documents as kernels
from packer_cli.config.shapes import PREFERENCE
from packer_cli.errors import DataError
from packer_cli.records import Int32, Int64, UInt64
from packer_cli.result.content_order import spread_order
from packer_cli.result.document_writer import documents_schema, index_schema
from packer_cli.result.layout import DOCUMENTS, INDEX, MANIFEST, kind_of
from packer_cli.result.manifest import TokenizedManifest
from packer_cli.result.manifest_check import wrong_pairs
from packer_cli.result.manifest_file import load_tokenized
from packer_cli.result.reader import first_line
from packer_cli.result.shards import Shard, problem_of

AGAIN = "copy the directory again, or run packer tokenize again with --overwrite"


class TokenizedDirectory:
    """A finished tokenized directory. Documents are numbered over all shards, from 0.

    path   the directory
    facts  what its manifest says
    """

    def __init__(self, path: Path, facts: TokenizedManifest) -> None:
        self.path = path
        self.facts = facts
        self.shards = [one for one in facts.shards if kind_of(one.file) == DOCUMENTS]
        self.indexes = [one for one in facts.shards if kind_of(one.file) == INDEX]
        if wrong := wrong_pairs(facts.shards):
            raise DataError(f"{path / MANIFEST}: {wrong}", AGAIN)
        self.firsts = np.concatenate([[0], np.cumsum([one.rows for one in self.shards])])
        self.firsts = self.firsts.astype(np.int64)

    def __len__(self) -> int:
        """Documents in all shards."""
        return int(self.firsts[-1])

    @cached_property
    def lengths(self) -> Int32:
        """int32[n], tokens in each document, at least 1."""
        parts = [_values(index.column("length"), np.int32) for index in self._index()]
        lengths: Int32 = np.concatenate(parts)
        if lengths.min() < 1:
            raise DataError(f"{self.path}: an index holds a length below 1", AGAIN)
        return lengths

    @property
    def trained(self) -> Int32:
        """int32[n], how many tokens of each document are trained on."""
        parts = [_values(index.column("trained_tokens"), np.int32) for index in self._index()]
        trained: Int32 = np.concatenate(parts)
        return trained

    @property
    def has_pairs(self) -> bool:
        """Whether documents are records of preference."""
        return self.facts.config.shape == PREFERENCE

    @cached_property
    def chosen(self) -> Int32:
        """int32[n] of pairs: as in `TokenBatch`. DataError for more than a document's tokens."""
        parts = [_values(index.column("chosen"), np.int32) for index in self._index()]
        chosen: Int32 = np.concatenate(parts)
        if ((chosen < 0) | (chosen > self.lengths)).any():
            raise DataError(f"{self.path}: an index holds a chosen side beyond its document", AGAIN)
        return chosen

    @property
    def has_labels(self) -> set[bool]:
        """Of records of preference: whether documents are single answers with a label. Both where
        some are and others are pairs.
        """
        return {*np.unique((self.chosen == 0) | (self.chosen == self.lengths)).tolist()}

    @property
    def content_hashes(self) -> UInt64:
        """uint64[n, 2], the same for documents with the same tokens, in any directory."""
        parts = [_values(index.column("content_hash"), np.uint64, 2) for index in self._index()]
        hashes: UInt64 = np.concatenate(parts)
        return hashes

    def order(self, seed: int, some: Int64 | None = None) -> Int64:
        """int64[n], the documents, or `some` of them, in the order of `seed`: the same wherever
        they lie. Equal documents are as far from each other as others are.
        """
        keys = np.empty(len(self), np.uint64)
        at = 0
        for index in self._index():
            hashes = _values(index.column("content_hash"), np.uint64, 2)
            kernels.order_keys(hashes, seed, keys[at : at + len(hashes)])
            at += len(hashes)
        return spread_order(keys) if some is None else some[spread_order(keys[some])]

    def _index(self) -> Iterator[Any]:
        """The record batches of all indexes."""
        for number in range(len(self.shards)):
            yield from self.index_batches(number)

    def index_batches(self, number: int) -> list[Any]:
        """The record batches of the index of shard `number`, mapped. Raises DataError."""
        shard = self.indexes[number]
        batches = list(self._mapped(shard, index_schema(has_chosen=self.has_pairs)))
        if sum(batch.num_rows for batch in batches) != shard.rows:
            raise DataError(
                f"{self.path / shard.file}: holds {sum(map(len, batches))} documents, the "
                f"manifest says {shard.rows}",
                AGAIN,
            )
        for name, listed in (("length", shard.tokens), ("trained_tokens", shard.trained_tokens)):
            values = [_values(batch.column(name), np.int32) for batch in batches]
            total = sum(int(one.sum(dtype=np.int64)) for one in values)
            if total != listed:  # a damaged length would lose tokens, or find those of others
                raise DataError(
                    f"{self.path / shard.file}: the sum of {name} is {total}, the manifest says "
                    f"{listed}",
                    AGAIN,
                )
        return batches

    def batches(self, shard: Shard, maps: list[mmap.mmap] | None = None) -> Iterator[Any]:
        """The record batches of a shard of documents, mapped. Raises DataError.

        OUT maps: that of the file.
        """
        sha256 = self.facts.tokenizer.sha256 if self.facts.tokenizer else ""
        schema = documents_schema(
            sha256, has_trained=self.facts.config.shape != "text", has_chosen=self.has_pairs
        )
        for batch in self._mapped(shard, schema, maps):
            _check_lists(self.path / shard.file, batch)
            yield batch

    def _mapped(
        self, shard: Shard, expected: Any, maps: list[mmap.mmap] | None = None
    ) -> Iterator[Any]:
        path = self.path / shard.file
        try:
            with open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if maps is not None:
                maps.append(mapped)
            with pa.ipc.open_stream(pa.py_buffer(mapped)) as stream:
                if not stream.schema.equals(expected):
                    raise DataError(
                        f"{path}: has the columns {stream.schema.names}, not {expected.names}",
                        AGAIN,
                    )
                for batch in stream:
                    batch.validate(full=True)  # of lists that is their offsets, not their tokens
                    yield batch
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{path}: not a readable shard: {first_line(error)}", AGAIN) from error

    def place(self, document: int) -> tuple[int, int]:
        """(file, position): the input of a document by its number in the manifest, and where in
        it the document is, as in `records.TokenBatch`. Raises as `places`.
        """
        (file,), (position,) = self.places(np.array([document], np.int64)).tolist()
        return file, position

    def places(self, documents: Int64) -> Int64:
        """int64[2, n], the same of n documents; each shard is gone through once.

        Raises DataError for one that is not there.
        """
        if len(documents) and not 0 <= documents.min() <= documents.max() < len(self):
            absent = documents[(documents < 0) | (documents >= len(self))]
            raise self._no_document(int(absent[0]))
        places = np.empty((2, len(documents)), np.int64)
        of_shard = np.searchsorted(self.firsts, documents, side="right") - 1
        for number in np.unique(of_shard).tolist():
            here = np.flatnonzero(of_shard == number)
            rows = documents[here] - self.firsts[number]
            for batch in self.batches(self.shards[number]):
                inside = (rows >= 0) & (rows < len(batch))
                files = _values(batch.column("file"), np.int32)
                positions = _values(batch.column("position"), np.int64)
                places[:, here[inside]] = files[rows[inside]], positions[rows[inside]]
                rows = rows - len(batch)
                if (rows < 0).all():
                    break
            else:
                raise self._no_document(int(documents[here].max()))
        return places

    def documents_of(self, file: int) -> Int64:
        """int64[2, n] (number, position) of the documents of an input, by number. Only the shards
        of units that read the input are looked at. Raises DataError.
        """
        units = {
            one.unit for one in self.facts.units if any(part[0] == file for part in one.slices)
        }
        found = [np.empty((2, 0), np.int64)]
        for first, shard in zip(self.firsts.tolist(), self.shards, strict=False):
            if shard.unit in units:
                at = first
                for batch in self.batches(shard):
                    its = np.flatnonzero(_values(batch.column("file"), np.int32) == file)
                    positions = _values(batch.column("position"), np.int64)[its]
                    found.append(np.stack([at + its, positions]))
                    at += len(batch)
        return np.concatenate(found, axis=1)

    def _no_document(self, document: int) -> DataError:
        return DataError(
            f"{self.path}: has no document {document}, expected numbers below {len(self)}", AGAIN
        )

    def check_sizes(self) -> None:
        """Raise DataError when a shard is missing or not as long as the manifest says."""
        for shard in self.facts.shards:
            self.check_size(shard)

    def check_size(self, shard: Shard) -> None:
        """The same of one shard."""
        file = self.path / shard.file
        if problem := problem_of(file, shard):
            raise DataError(f"{file}: {problem}", AGAIN)


def open_tokenized(path: str | os.PathLike[str]) -> TokenizedDirectory:
    """Open a directory written by `packer tokenize`.

    Raises DataError when it is unfinished, of another format version, or when a shard is missing
    or has another size than the manifest says.
    """
    directory = storage.local(path, "documents are only read from local directories")
    tokenized = TokenizedDirectory(directory, load_tokenized(directory))
    tokenized.check_sizes()
    return tokenized


def _check_lists(path: Path, batch: Any) -> None:
    """Raise DataError for lists that are not in their values: kernels take them by address."""
    for name in ("input_ids", "trained"):
        if name in batch.schema.names and len(batch):
            column = batch.column(name)
            edges = edges_of(column)
            if edges[0] < 0 or (np.diff(edges) < 0).any() or edges[-1] > len(column.values):
                raise DataError(f"{path}: damaged: a list of {name} is not in the file", AGAIN)


def edges_of(column: Any) -> Int32:
    """int32[n + 1], where the lists of a column begin and end, without a copy."""
    edges: Int32 = np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, 4 * column.offset)
    return edges


def _values(column: Any, kind: Any, width: int = 1) -> Any:
    """The values of a column without nulls as an array, without a copy."""
    if not len(column):
        return np.empty((0, width) if width > 1 else 0, kind)  # which may have no buffers
    item = np.dtype(kind).itemsize * width
    data = np.frombuffer(column.buffers()[1], kind, len(column) * width, column.offset * item)
    return data.reshape(len(column), width) if width > 1 else data
