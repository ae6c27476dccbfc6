"""Reading tokenized directories: indexes in memory, documents memory-mapped; orders of documents by
their content, and which are equal.

    open_tokenized(path) -> TokenizedDirectory    lengths, orders, and where documents come from

Shards are named by their content and their sizes compared on open, as those of packed directories
are; what is in them is checked when they are mapped. `Tokens` gathers the tokens of pieces.
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
import numpy.typing as npt
import pyarrow as pa

from packer_cli import storage
from packer_cli._kernels import documents as kernels
from packer_cli.errors import DataError, InternalError
from packer_cli.options.value_columns import ValueColumn
from packer_cli.records import Documents, Int32, Int64, UInt8, UInt32, UInt64, offsets_of
from packer_cli.result.columns import INDEX_SCHEMA, default_of, documents_schema, plain_values
from packer_cli.result.layout import DOCUMENTS, INDEX, MANIFEST, Shard, kind_of
from packer_cli.result.manifest import TokenizedManifest, load_tokenized
from packer_cli.result.reader import Stored

Bool = npt.NDArray[np.bool_]
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
        self.shards = [one for one in facts.shards if kind_of(one.file) == DOCUMENTS]
        self.indexes = [one for one in facts.shards if kind_of(one.file) == INDEX]
        said = [[(one.file.split("-")[1:3], one.unit, one.rows, one.tokens, one.trained_tokens)
                 for one in some] for some in (self.shards, self.indexes)]  # fmt: skip
        kinds = [kind_of(one.file) for one in facts.shards]
        if kinds != [DOCUMENTS, INDEX] * len(self.shards) or said[0] != said[1]:
            text = "not every shard of documents is followed by its index, with as much in it"
            raise DataError(f"{path / MANIFEST}: {text}", AGAIN)
        self.firsts = np.concatenate([[0], np.cumsum([one.rows for one in self.shards])])
        self.firsts = self.firsts.astype(np.int64)
        self._parts = dict[str, tuple[Int64, list[Any]]]()

    def __len__(self) -> int:
        return int(self.firsts[-1])

    @cached_property
    def lengths(self) -> Int32:
        """int32[n], tokens in each document, at least 1."""
        lengths: Int32 = self._indexed("length", np.int32)
        if lengths.min() < 1:
            raise DataError(f"{self.path}: an index holds a length below 1", AGAIN)
        return lengths

    @property
    def trained(self) -> Int32:
        """int32[n], how many tokens of each document are trained on."""
        trained: Int32 = self._indexed("trained_tokens", np.int32)
        return trained

    @property
    def content_hashes(self) -> UInt64:
        """uint64[n, 2], the same for documents with the same tokens, in any directory."""
        hashes: UInt64 = self._indexed("content_hash", np.uint64, 2)
        return hashes

    def indexed_at(self, name: str, documents: Int64) -> Any:
        """[n], or [n, 2] of content hashes, a column of the indexes at n documents."""
        width = 2 if name == "content_hash" else 1
        kind = np.uint64 if width > 1 else np.int32
        if name not in self._parts:  # mapped, not copied: there may be billions
            parts = [_values(one.column(name), kind, width) for one in self._index()]
            self._parts[name] = offsets_of([*map(len, parts)]), parts
        firsts, parts = self._parts[name]
        found = np.empty((len(documents), 2)[:width], kind)
        of_part = np.searchsorted(firsts, documents, side="right") - 1
        for number in np.unique(of_part).tolist():
            here = of_part == number
            found[here] = parts[number][documents[here] - firsts[number]]
        return found

    def _indexed(self, name: str, kind: Any, width: int = 1) -> Any:
        """A column of all indexes."""
        return np.concatenate([_values(one.column(name), kind, width) for one in self._index()])

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
        for number in range(len(self.shards)):
            yield from self.index_batches(number)

    def index_batches(self, number: int) -> list[Any]:
        """The record batches of the index of shard `number`, mapped. Raises DataError."""
        shard = self.indexes[number]
        batches = list(self.stored(shard))
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

    def _stored_schema(self, shard: Shard) -> Any:
        if kind_of(shard.file) == INDEX:
            return INDEX_SCHEMA
        return documents_schema(
            self.facts.tokenizer_sha256,
            has_trained=self.facts.config.shape != "text",
            columns=self.value_columns.values(),
        )

    @property
    def value_columns(self) -> dict[str, ValueColumn]:
        """Columns of values, by name."""
        return self.facts.config.value_columns

    def _map(self, shard: Shard, maps: list[mmap.mmap] | None = None) -> Any:
        """The shard's bytes; unlike Arrow's own mapping, no pages are asked for before they are
        read. OUT maps.
        """
        with storage.open_bytes(str(self.path / shard.file)) as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if maps is not None:
            maps.append(mapped)
        return pa.BufferReader(pa.py_buffer(mapped))

    def documents_by_index(self, maps: list[mmap.mmap]) -> Iterator[Any]:
        """The record batches of all shards, whose documents have as many tokens as the indexes say,
        and as many values in each column of tokens. OUT maps: those of the files.
        """
        first, of_tokens = 0, {"input_ids": "tokens"}
        of_tokens |= {one.name: f"values of {one.name}"
                      for one in self.value_columns.values() if not one.is_of_segments}  # fmt: skip
        for shard in self.shards:
            with self._readable(shard):
                source = self._map(shard, maps)
            for batch in self._batches(shard, source):
                indexed = self.lengths[first : first + len(batch)]
                for name, what in of_tokens.items():
                    lengths = np.diff(batch.column(name).offsets.to_numpy())
                    if not np.array_equal(lengths, indexed):
                        at = int(np.argmax(lengths != indexed))
                        raise DataError(
                            f"{self.path / shard.file}: its document {first + at} has "
                            f"{lengths[at]} {what}, its index says {indexed[at]}",
                            AGAIN,
                        )
                first += len(batch)
                yield batch

    def places(self, documents: Int64) -> Int64:
        """int64[2, n] (file, position) of n documents: the input by its number in the manifest, and
        where in it the document is, as POSITION of `records.Documents`. Each shard is gone through
        once.

        Raises DataError for one that is not there.
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
            places[:, here] = self._places_in(number)[:, documents[here] - self.firsts[number]]
        return places

    def _places_in(self, number: int) -> Int64:
        """int64[2, n], as `places`, of all documents of a shard."""
        table = pa.Table.from_batches(self.stored(self.shards[number]))
        return np.stack([table[name].to_numpy().astype(np.int64) for name in ("file", "position")])


def open_tokenized(path: str | os.PathLike[str]) -> TokenizedDirectory:
    """Open a directory written by `packer tokenize`.

    Raises DataError when it is unfinished, of another format version, or when a shard is missing
    or has another size than the manifest says.
    """
    directory = storage.local(path, "documents are only read from local directories")
    tokenized = TokenizedDirectory(directory, load_tokenized(directory))
    for shard in tokenized.facts.shards:
        tokenized.check_size(shard)
    return tokenized


def _values(column: Any, kind: Any, width: int = 1) -> Any:
    """The values of a column without nulls as an array, without a copy."""
    if not len(column):
        return np.empty((0, width) if width > 1 else 0, kind)  # which may have no buffers
    item = np.dtype(kind).itemsize * width
    data = np.frombuffer(column.buffers()[1], kind, len(column) * width, column.offset * item)
    return data.reshape(len(column), width) if width > 1 else data


class Tokens:
    """The tokens of documents of several directories, by the numbers that these have as inputs;
    mapped on first use. Threads may share it.

    documents  int64[inputs, 2], the first document of each directory over all, and how many it has
    """

    def __init__(
        self,
        directories: Mapping[int, TokenizedDirectory],
        columns: Iterable[ValueColumn] = (),
    ) -> None:
        """`columns`: those that `fetch` gives, with defaults if a directory lacks them."""
        self._directories, self._columns = directories, list(columns)
        self.documents = np.zeros((max(directories, default=-1) + 1, 2), np.int64)
        first = 0
        for number, directory in directories.items():
            self.documents[number] = first, len(directory)
            first += len(directory)

    @cached_property
    def spans(self) -> Spans:
        """Where the record batches of all documents lie in memory."""
        maps: list[mmap.mmap] = []
        batches = [batch for one in self._directories.values()
                   for batch in one.documents_by_index(maps)]  # fmt: skip
        return Spans(batches, maps)

    def _gathered(
        self, kind: Any, kernel: Any, columns: Any, number: Int64, start: Int32, length: Int32
    ) -> tuple[Any, int]:
        """(a value of this kind for each token of pieces, the first piece that is not there or -1).
        Pages are given back after a few pieces.
        """
        spans, ends = self.spans, np.cumsum(length, dtype=np.int64)
        out = np.empty(int(length.sum(dtype=np.int64)), kind)
        step = _PIECES_AT_ONCE if spans.mapped_bytes > _MOST_MAPPED else max(len(length), 1)
        for first in range(0, len(length), step):
            some = slice(first, min(first + step, len(length)))
            tokens = out[ends[first] - length[first] : ends[some.stop - 1]]
            tokens = tokens.reshape(-1).view(np.uint8)
            wrong = kernel(number[some], start[some], length[some], spans.firsts, *columns, tokens)
            if wrong >= 0:
                return out, first + wrong
            spans.give_back()
        return out, -1

    def _found(
        self, kind: Any, kernel: Any, columns: Any, number: Int64, start: Int32, length: Int32
    ) -> Any:
        """A value of this kind for each token of pieces, all of which are there."""
        found, at = self._gathered(kind, kernel, columns, number, start, length)
        if at >= 0:
            raise InternalError(f"no tokenized directory has the document {number[at]}")
        return found

    def numbered(self, directory: Int32 | Int64, document: Int64) -> Int64:
        """int64[p], the documents' numbers over all directories."""
        numbers: Int64 = self.documents[directory, 0] + document
        return numbers

    def gather(
        self, directory: Int32 | Int64, document: Int64, start: Int32, length: Int32
    ) -> UInt32:
        """uint32[sum of length], the tokens of pieces, end to end.

        Piece i is the `length[i]` tokens from `start[i]` on of a document. Raises DataError when
        there are none such.
        """
        number = self.numbered(directory, document)
        columns = self.spans.offsets, self.spans.values, 4
        ids: UInt32
        ids, at = self._gathered(
            np.uint32, kernels.gather_documents, columns, number, start, length
        )
        if at >= 0:
            raise DataError(
                f"{self._directories[int(directory[at])].path / MANIFEST}: its document "
                f"{document[at]} has no {length[at]} tokens from token {start[at]} on",
                AGAIN,
            )
        return ids

    def trained_of(self, number: Int64, start: Int32, length: Int32) -> UInt8 | None:
        """uint8 of the tokens of pieces, by `numbered` documents, 1 where one is trained on; None:
        everywhere.
        """
        if all(one.facts.config.shape == "text" for one in self._directories.values()):
            return None
        columns = self.spans.trained_offsets, self.spans.trained, self.spans.valid
        flags: UInt8 = self._found(np.uint8, kernels.gather_trained, columns, number, start, length)
        return flags

    def fetch(self, pieces: Documents) -> Documents:
        """Return pieces with their ids and columns, by their FILE, POSITION and START.

        Raises as `gather`.
        """
        ids = self.gather(pieces.file, pieces.position, pieces.start, pieces.lengths)
        number = self.numbered(pieces.file, pieces.position)
        return self.with_columns(replace(pieces, ids=ids), number)

    def with_columns(self, pieces: Documents, number: Int64) -> Documents:
        """Return pieces, with their START, of `numbered` documents with the columns of these."""
        if not self._columns:
            return pieces
        span = np.searchsorted(self.spans.firsts, number, side="right") - 1
        of_tokens, of_documents = dict[str, Any](), dict[str, Any]()
        for one in self._columns:
            if one.is_of_segments:
                of_documents[one.name] = self._of_documents(one, number, span)
            else:
                places = number, pieces.start, pieces.lengths
                of_tokens[one.name] = self._of_tokens(one, span, *places)
        return pieces.beside(of_tokens, of_documents)

    def _of_documents(self, column: ValueColumn, number: Int64, span: Int64) -> Any:
        """The values [n], or [n, K], of a column of records, by documents and their spans."""
        there = self.spans.column(column.name)[1][span] != 0
        out = np.empty((len(number), *column.dtype.shape), column.dtype.base)
        if there.any():
            out[there] = self.spans.of_documents(column, number[there], span[there])
        if not there.all():
            out[~there] = default_of(column)
        return out

    def _of_tokens(
        self, column: ValueColumn, span: Int64, number: Int64, start: Int32, length: Int32
    ) -> Any:
        """The values [T], or [T, K], of a column of tokens; where a directory has values of records
        alone, each of their tokens has them.
        """
        offsets, values, _ = self.spans.column(column.name)
        columns, has_lists = (offsets, values, column.dtype.itemsize), offsets[span] != 0
        if has_lists.all():
            places = number, start, length
            return self._found(column.dtype, kernels.gather_documents, columns, *places)
        out = np.empty((int(length.sum(dtype=np.int64)), *column.dtype.shape), column.dtype.base)
        of_documents = self._of_documents(column, number[~has_lists], span[~has_lists])
        out[np.repeat(~has_lists, length)] = np.repeat(of_documents, length[~has_lists], axis=0)
        places = number[has_lists], start[has_lists], length[has_lists]
        found = self._found(column.dtype, kernels.gather_documents, columns, *places)
        out[np.repeat(has_lists, length)] = found
        return out


class Spans:
    """Addresses of the columns of record batches, which stay mapped as long as this lives.

    firsts           int64[spans + 1], the first document of each, and how many there are
    offsets, values  int64[spans], of the lists of tokens
    tokens           int64[4, spans]: firsts, offsets, values, and how many tokens there are
    trained_offsets, trained, valid  int64[spans], of the lists of what is trained on; 0: no such
    """

    def __init__(self, batches: list[Any], maps: list[mmap.mmap]) -> None:
        self._batches, self._maps = batches, maps
        self._columns = dict[str, tuple[Int64, Int64, Int64]]()
        self.mapped_bytes = sum(map(len, maps))
        self.firsts = np.concatenate([[0], np.cumsum([len(one) for one in batches])])
        self.firsts = self.firsts.astype(np.int64)
        self.offsets, self.values, _ = _addresses(batches, "input_ids")
        totals = np.array([len(one.column("input_ids").values) for one in batches], np.int64)
        self.tokens = np.stack([self.firsts[:-1], self.offsets, self.values, totals])
        self.trained_offsets, self.trained, self.valid = _addresses(batches, "trained")
        self.give_back()

    def column(self, name: str) -> tuple[Int64, Int64, Int64]:
        """`_addresses` of a column; threads that ask at once find the same."""
        if name not in self._columns:
            self._columns[name] = _addresses(self._batches, name)
        return self._columns[name]

    def of_documents(self, column: ValueColumn, number: Int64, span: Int64) -> Any:
        """The values [n], or [n, K], of a column of records: of documents by number, and the spans
        that they are in.
        """
        out = np.empty(len(number), column.dtype)
        for one in np.unique(span).tolist():
            values = plain_values(self._batches[one].column(column.name))
            out[span == one] = values[number[span == one] - self.firsts[one]]
        return out

    def give_back(self) -> None:
        """Unmap all pages when too many are mapped, as far as the system tells."""
        if self.mapped_bytes <= _MOST_MAPPED:
            return
        with suppress(OSError), open("/proc/self/statm", "rb") as file:
            if int(file.read().split()[2]) * mmap.PAGESIZE > _MOST_MAPPED:
                for one in self._maps:
                    one.madvise(mmap.MADV_DONTNEED)


def _addresses(batches: list[Any], name: str) -> tuple[Int64, Int64, Int64]:
    """(offsets, values, validity bitmap) int64[batches] of a list column; 0 where there is none. Of
    a column of records its values alone matter, and whether it is there.
    """
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
        # a column of nothing but nulls has no values; any address does, but none is no column
        rows[1, i] = values.address if values is not None and values.size else offsets.address
        rows[2, i] = validity.address if validity is not None else 0
    return rows[0], rows[1], rows[2]


def spread_order(keys: UInt64) -> Int64:
    """int64[n], the documents by their keys; equal keys are spread evenly over all of them."""
    order = np.argsort(keys, kind="stable")
    same = _as_before(keys[order])
    if not same.any():
        return order
    number = np.arange(len(keys))
    earlier = number - np.maximum.accumulate(np.where(same, 0, number))
    spread = np.copy(keys)
    spread[order] += earlier.astype(np.uint64) * _GOLDEN
    return np.argsort(spread, kind="stable")


def repeated(hashes: UInt64) -> Bool:
    """bool[n], which of `hashes` uint64[n, 2] equal an earlier one."""
    order, same = grouped(hashes)
    found = np.zeros(len(hashes), bool)
    found[order[same]] = True
    return found


def among(hashes: UInt64, contents: UInt64) -> Bool:
    """bool[n], which of `hashes` uint64[n, 2] are one of the contents uint64[m, 2]."""
    order, same = grouped(np.concatenate([contents, hashes]))
    begin = np.maximum.accumulate(np.where(same, 0, np.arange(len(order))))
    found = np.zeros(len(order), bool)
    found[order] = order[begin] < len(contents)
    return found[len(contents) :]


def grouped(hashes: UInt64) -> tuple[Int64, Bool]:
    """A stable order of hashes uint64[n, 2], by their first halves, in which equal ones come
    together; and where in it one is that before.
    """
    order = np.argsort(hashes[:, 0], kind="stable")
    same, other = (_as_before(half) for half in hashes[order].T)
    if (same & ~other).any():  # half of a hash does not tell them apart
        order = np.lexsort((hashes[:, 1], hashes[:, 0]))
        same = np.logical_and(*(_as_before(half) for half in hashes[order].T))
    return order, same


def _as_before(values: UInt64) -> Bool:
    """bool[n], which of the values equal the one before."""
    same = np.zeros(len(values), bool)
    same[1:] = values[1:] == values[:-1]
    return same
