"""Read tokenized directories: indexes in memory, documents memory-mapped.

    open_tokenized(path) -> TokenizedDirectory    lengths, orders, and where documents come from
    Tokens(directories).fetch(pieces)             ids and columns of pieces of documents

Shards are named by their content and their sizes compared on open, as those of packed directories
are. What is in them is checked when they are mapped. Indexes take 24 bytes a document.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from packer_cli import storage
from packer_cli._kernels import documents as kernels
from packer_cli.errors import DataError, InternalError
from packer_cli.options.value_columns import ValueColumn
from packer_cli.records import Documents, Int32, Int64, UInt8, UInt32, UInt64, offsets_of
from packer_cli.result.columns import (
    HASH_BYTES,
    as_numbers,
    default_of,
    documents_schema,
    index_schema,
    plain_values,
)
from packer_cli.result.layout import DOCUMENTS, INDEX, MANIFEST, Shard, kind_of
from packer_cli.result.manifest import TokenizedManifest, load_tokenized
from packer_cli.result.reader import Stored

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio
AGAIN = (
    "copy the directory again, or move what is damaged and run packer tokenize again with "
    "--overwrite"
)
# Pages that are mapped count as memory of this process; up to two megabytes around what is read
# are. Beyond this they are given back, and stay in the system's cache.
_MOST_MAPPED, _PIECES_AT_ONCE = 640 << 20, 64


class TokenizedDirectory(Stored):
    """A finished tokenized directory. Documents are numbered over all shards, from 0."""

    facts: TokenizedManifest
    what, again = "documents", AGAIN

    def __init__(self, path: Path, facts: TokenizedManifest) -> None:
        super().__init__(path)
        self.facts = facts
        kinds = [kind_of(shard.file) for shard in facts.shards]
        self.shards, self.indexes = facts.shards[::2], facts.shards[1::2]
        counts, indexed = ([*map(_counts_of, part)] for part in (self.shards, self.indexes))
        if kinds != [DOCUMENTS, INDEX] * len(self.shards) or counts != indexed:
            text = "not every shard of documents is followed by its index, with as much in it"
            raise DataError(f"{path / MANIFEST}: {text}", AGAIN)
        self.firsts = offsets_of([shard.rows for shard in self.shards])
        self._parts = dict[str, tuple[Int64, list[Any]]]()

    def __len__(self) -> int:
        return int(self.firsts[-1])

    @property
    def value_columns(self) -> dict[str, ValueColumn]:
        """Columns of values, by name."""
        return self.facts.config.value_columns

    # -- indexes

    @cached_property
    def lengths(self) -> Int32:
        """Tokens of each document, int32[n], at least 1."""
        lengths: Int32 = self._indexed("length")
        if lengths.min() < 1:
            raise DataError(f"{self.path}: an index holds a length below 1", AGAIN)
        return lengths

    @property
    def trained(self) -> Int32:
        """Trained tokens of each document, int32[n]."""
        trained: Int32 = self._indexed("trained_tokens")
        return trained

    @property
    def content_hashes(self) -> UInt64:
        """Hashes of the documents' tokens, uint64[n, 2], the same in any directory."""
        hashes: UInt64 = self._indexed("content_hash")
        return hashes

    @property
    def tiers(self) -> UInt8:
        """Tier of each document, uint8[n], from 0, if its source has tiers."""
        tiers: UInt8 = self._indexed("tier")
        if tiers.max() >= len(self.facts.config.tiers):
            raise DataError(f"{self.path}: an index holds a tier that there is not", AGAIN)
        return tiers

    def indexed_at(self, name: str, documents: Int64) -> Any:
        """Return a column of the indexes at n documents, [n], or [n, 2] of content hashes."""
        if name not in self._parts:  # mapped, not copied: there may be billions
            parts = [_index_column(batch, name) for batch in self._index()]
            self._parts[name] = offsets_of([*map(len, parts)]), parts
        return self._at(name, documents)

    def carried_at(self, name: str, documents: Int64 | None = None) -> Any:
        """Return the values of a carried column of records at n documents, or of all, [n], or
        [n, K].
        """
        column = self.value_columns[name]
        if name not in self._parts:
            batches = (batch for shard in self.shards for batch in self.stored(shard))
            parts = [as_numbers(column, plain_values(batch.column(name))) for batch in batches]
            self._parts[name] = offsets_of([*map(len, parts)]), parts
        return self._at(name, np.arange(len(self)) if documents is None else documents)

    def _at(self, name: str, documents: Int64) -> Any:
        firsts, parts = self._parts[name]
        values = np.empty((len(documents), *parts[0].shape[1:]), parts[0].dtype)
        of_part = np.searchsorted(firsts, documents, side="right") - 1
        for number in np.unique(of_part).tolist():
            here = of_part == number
            values[here] = parts[number][documents[here] - firsts[number]]
        return values

    def _indexed(self, name: str) -> Any:
        return np.concatenate([_index_column(batch, name) for batch in self._index()])

    def order(self, seed: int, chosen: Int64 | None = None) -> Int64:
        """Return the documents, or the `chosen`, in the order of `seed`, int64[n]."""
        keys = np.empty(len(self), np.uint64)
        at = 0
        for index in self._index():
            hashes = _index_column(index, "content_hash")
            kernels.order_keys(hashes, seed, keys[at : at + len(hashes)])
            at += len(hashes)
        return spread_order(keys) if chosen is None else chosen[spread_order(keys[chosen])]

    def _index(self) -> Iterator[Any]:
        for number in range(len(self.shards)):
            yield from self.index_batches(number)

    def index_batches(self, number: int) -> list[Any]:
        """Map the record batches of the index of shard `number`. Raises DataError."""
        shard = self.indexes[number]
        batches = list(self.stored(shard))
        for name, listed in (("length", shard.tokens), ("trained_tokens", shard.trained_tokens)):
            total = sum(int(_index_column(batch, name).sum(dtype=np.int64)) for batch in batches)
            if total != listed:  # a damaged length would lose tokens, or take those of others
                text = f"the sum of {name} is {total}, the manifest says {listed}"
                raise self.damaged(shard, text)
        return batches

    # -- documents

    def _stored_schema(self, shard: Shard) -> Any:
        if kind_of(shard.file) == INDEX:
            return index_schema(self.facts.config)
        return documents_schema(
            self.facts.tokenizer_sha256,
            has_trained=self.facts.config.shape != "text",
            columns=self.value_columns.values(),
        )

    def _map(self, shard: Shard, maps: list[mmap.mmap] | None) -> Any:
        """Map a shard's bytes. Unlike in Arrow's own mapping, no page is read ahead. OUT maps."""
        with storage.open_bytes(str(self.path / shard.file)) as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if maps is not None:
            maps.append(mapped)
        return pa.BufferReader(pa.py_buffer(mapped))

    def documents_by_index(self, maps: list[mmap.mmap]) -> Iterator[Any]:
        """Yield the record batches of all documents, compared with the indexes. OUT maps."""
        first, of_tokens = 0, {"input_ids": "tokens"}
        of_tokens |= {name: f"values of {name}" for name, column in self.value_columns.items()
                      if not column.is_of_segments}  # fmt: skip
        for shard in self.shards:
            for batch in self.stored(shard, maps):
                indexed = self.lengths[first : first + len(batch)]
                for name, what in of_tokens.items():
                    lengths = np.diff(batch.column(name).offsets.to_numpy())
                    if not np.array_equal(lengths, indexed):
                        at = int(np.argmax(lengths != indexed))
                        text = f"{lengths[at]} {what}, its index says {indexed[at]}"
                        raise self.damaged(shard, f"its document {first + at} has {text}")
                first += len(batch)
                yield batch

    def places(self, documents: Int64) -> Int64:
        """Return FILE and POSITION of n documents, int64[2, n]. Each shard is read once.

        Raises DataError for a number that no document has, and for an input that is none.
        """
        absent = documents[(documents < 0) | (documents >= len(self))]
        if len(absent):
            raise DataError(
                f"{self.path}: has no document {absent[0]}, expected numbers below {len(self)}",
                AGAIN,
            )
        places = np.empty((2, len(documents)), np.int64)
        of_shard = np.searchsorted(self.firsts, documents, side="right") - 1
        for number in np.unique(of_shard).tolist():
            here = np.flatnonzero(of_shard == number)
            table = pa.Table.from_batches(self.stored(self.shards[number]))
            for row, name in enumerate(("file", "position")):
                places[row, here] = table[name].to_numpy()[documents[here] - self.firsts[number]]
        inputs = len(self.facts.inputs)
        for at in np.flatnonzero((places[0] < 0) | (places[0] >= inputs))[:1].tolist():
            text = f"document {documents[at]} is of input {places[0, at]}, there are {inputs}"
            raise self.damaged(self.shards[of_shard[at]], text)
        return places


def _counts_of(shard: Shard) -> tuple[object, ...]:
    """Return what a shard of documents and its index have in common."""
    parts = shard.file.split("-")[1:3]
    return parts, shard.unit, shard.rows, shard.tokens, shard.trained_tokens


def open_tokenized(path: str | os.PathLike[str]) -> TokenizedDirectory:
    """Open a directory written by `packer tokenize`. Raises DataError as `open_packed`."""
    directory = storage.local(path, "documents are only read from local directories")
    tokenized = TokenizedDirectory(directory, load_tokenized(directory))
    for shard in tokenized.facts.shards:
        tokenized.check_size(shard)
    return tokenized


def _index_column(batch: Any, name: str) -> Any:
    """Return a column of an index without a copy, [n], or [n, 2] of content hashes."""
    column = batch.column(name)
    if name != "content_hash":
        return column.to_numpy()
    values, size = column.buffers()[1], 2 * len(column)
    return np.frombuffer(values, np.uint64, size, column.offset * HASH_BYTES).reshape(-1, 2)


def spread_order(keys: UInt64) -> Int64:
    """Order documents by their keys, int64[n]. Equal keys are spread evenly over all of them."""
    order = np.argsort(keys, kind="stable")
    same = np.zeros(len(keys), bool)
    same[1:] = np.diff(keys[order]) == 0
    if not same.any():
        return order
    number = np.arange(len(keys))
    earlier = number - np.maximum.accumulate(np.where(same, 0, number))
    spread = np.copy(keys)
    spread[order] += earlier.astype(np.uint64) * _GOLDEN
    return np.argsort(spread, kind="stable")


class Tokens:
    """Tokens and columns of documents of several directories, by the numbers that these have as
    inputs; mapped on first use. Threads may share it.

    documents  int64[inputs, 2], the first document of each directory over all, and their number
    """

    def __init__(
        self, directories: Mapping[int, TokenizedDirectory], columns: Iterable[ValueColumn] = ()
    ) -> None:
        """`columns`: those that `fetch` gives, with defaults if a directory lacks them."""
        self._directories, self._columns = directories, list(columns)
        self.documents = np.zeros((max(directories, default=-1) + 1, 2), np.int64)
        first = 0
        for number, directory in directories.items():
            self.documents[number] = first, len(directory)
            first += len(directory)

    @cached_property
    def spans(self) -> MappedDocuments:
        """Record batches of all documents."""
        maps: list[mmap.mmap] = []
        batches = [batch for directory in self._directories.values()
                   for batch in directory.documents_by_index(maps)]  # fmt: skip
        return MappedDocuments(batches, maps)

    def numbered(self, directory: Int32 | Int64, document: Int64) -> Int64:
        """Number documents over all directories, int64[p]."""
        numbers: Int64 = self.documents[directory, 0] + document
        return numbers

    def fetch(self, pieces: Documents) -> Documents:
        """Return pieces with their ids and columns, by their FILE, POSITION and START."""
        ids = self.gather(pieces.file, pieces.position, pieces.start, pieces.lengths)
        number = self.numbered(pieces.file, pieces.position)
        return self.with_columns(replace(pieces, ids=ids), number)

    def gather(
        self, directory: Int32 | Int64, document: Int64, start: Int32, length: Int32
    ) -> UInt32:
        """Copy the tokens of pieces end to end, uint32[sum of length]."""
        number, columns = self.numbered(directory, document), self.spans.column("input_ids")[:2]
        ids: UInt32 = self._gathered(
            np.uint32, kernels.gather_documents, (*columns, 4), number, start, length
        )
        return ids

    def trained_of(self, number: Int64, start: Int32, length: Int32) -> UInt8 | None:
        """Return TRAINED of pieces of `numbered` documents; None if all tokens are trained on."""
        if all(one.facts.config.shape == "text" for one in self._directories.values()):
            return None
        columns = self.spans.column("trained")
        flags: UInt8 = self._gathered(
            np.uint8, kernels.gather_trained, columns, number, start, length
        )
        return flags

    def with_columns(self, pieces: Documents, number: Int64) -> Documents:
        """Return pieces, with their START, of `numbered` documents with the columns of these."""
        if not self._columns:
            return pieces
        span = np.searchsorted(self.spans.firsts, number, side="right") - 1
        of_tokens, of_documents = dict[str, Any](), dict[str, Any]()
        for column in self._columns:
            if column.is_of_segments:
                of_documents[column.name] = self._of_documents(column, number, span)
            else:
                places = number, pieces.start, pieces.lengths
                of_tokens[column.name] = self._of_tokens(column, span, *places)
        return pieces.beside(of_tokens, of_documents)

    def _of_documents(self, column: ValueColumn, number: Int64, span: Int64) -> Any:
        """Return values [n], or [n, K], of a column of records, by documents and their spans."""
        has_values = self.spans.column(column.name)[1][span] != 0
        values = np.empty((len(number), *column.dtype.shape), column.dtype.base)
        if has_values.any():
            values[has_values] = self.spans.of_documents(
                column, number[has_values], span[has_values]
            )
        if not has_values.all():
            values[~has_values] = default_of(column)
        return values

    def _of_tokens(
        self, column: ValueColumn, span: Int64, number: Int64, start: Int32, length: Int32
    ) -> Any:
        """Return the values [T], or [T, K], of a column of tokens, or the record's for each."""
        offsets, values, _ = self.spans.column(column.name)
        addresses, has_lists = (offsets, values, column.dtype.itemsize), offsets[span] != 0
        gather = kernels.gather_documents
        if has_lists.all():
            return self._gathered(column.dtype, gather, addresses, number, start, length)
        out = np.empty((int(length.sum(dtype=np.int64)), *column.dtype.shape), column.dtype.base)
        of_documents = self._of_documents(column, number[~has_lists], span[~has_lists])
        out[np.repeat(~has_lists, length)] = np.repeat(of_documents, length[~has_lists], axis=0)
        places = number[has_lists], start[has_lists], length[has_lists]
        out[np.repeat(has_lists, length)] = self._gathered(column.dtype, gather, addresses, *places)
        return out

    def _gathered(
        self, kind: Any, kernel: Any, addresses: Any, number: Int64, start: Int32, length: Int32
    ) -> Any:
        """Copy a value for each token of pieces that are known to exist, a few at a time."""
        spans, ends = self.spans, np.cumsum(length, dtype=np.int64)
        out = np.empty(int(length.sum(dtype=np.int64)), kind)
        step = _PIECES_AT_ONCE if spans.mapped_bytes > _MOST_MAPPED else max(len(length), 1)
        for first in range(0, len(length), step):
            part = slice(first, min(first + step, len(length)))
            to = out[ends[first] - length[first] : ends[part.stop - 1]].reshape(-1).view(np.uint8)
            places = number[part], start[part], length[part]
            if (wrong := kernel(*places, spans.firsts, *addresses, to)) >= 0:
                raise InternalError(
                    f"no tokenized directory has the tokens of piece {first + wrong}"
                )
            spans.give_back()
        return out


class MappedDocuments:
    """Addresses of the columns of record batches, which stay mapped as long as this lives.

    firsts  int64[spans + 1], the first document of each batch, and how many there are
    tokens  int64[4, spans]: firsts, addresses of offsets and of values of `input_ids`, and the
            number of tokens
    """

    def __init__(self, batches: list[Any], maps: list[mmap.mmap]) -> None:
        self._batches, self._maps = batches, maps
        self._columns = dict[str, tuple[Int64, Int64, Int64]]()
        self.mapped_bytes = sum(map(len, maps))
        self.firsts = offsets_of([*map(len, batches)])
        totals = np.array([len(one.column("input_ids").values) for one in batches], np.int64)
        self.tokens = np.stack([self.firsts[:-1], *self.column("input_ids")[:2], totals])
        self.give_back()

    def column(self, name: str) -> tuple[Int64, Int64, Int64]:
        """Return the addresses of a list column's (offsets, values, validity bitmap), int64[spans]
        each; 0 if a batch has none. A column of records has 1 for values and no other address.
        """
        if name not in self._columns:  # threads that ask at the same time compute the same
            self._columns[name] = _addresses(self._batches, name)
        return self._columns[name]

    def of_documents(self, column: ValueColumn, number: Int64, span: Int64) -> Any:
        """Return the values [n], or [n, K], of a column of records."""
        out = np.empty(len(number), column.dtype)
        for which in np.unique(span).tolist():
            values, here = plain_values(self._batches[which].column(column.name)), span == which
            out[here] = values[number[here] - self.firsts[which]]
        return out

    def give_back(self) -> None:
        """Unmap all pages if too many are mapped, on systems that report it."""
        if self.mapped_bytes <= _MOST_MAPPED:
            return
        with suppress(OSError), open("/proc/self/statm", "rb") as file:
            if int(file.read().split()[2]) * mmap.PAGESIZE > _MOST_MAPPED:
                for mapped in self._maps:
                    mapped.madvise(mmap.MADV_DONTNEED)


def _addresses(batches: list[Any], name: str) -> tuple[Int64, Int64, Int64]:
    """Return addresses as `MappedDocuments.column` does."""
    rows = np.zeros((3, len(batches)), np.int64)
    for i, batch in enumerate(batches):
        if name not in batch.schema.names:
            continue
        column = batch.column(name)
        validity, offsets = column.buffers()[:2]
        if not pa.types.is_list(column.type):
            rows[1, i] = 1
            continue
        values = column.values.buffers()[-1]  # the last of nested lists
        rows[0, i] = offsets.address + 4 * column.offset
        # a column of nothing but nulls has no values; any address does, but 0 means no column
        rows[1, i] = values.address if values is not None and values.size else offsets.address
        rows[2, i] = validity.address if validity is not None else 0
    return rows[0], rows[1], rows[2]
