"""The tokens of documents in tokenized directories, gathered by piece.

Shards are memory-mapped on first use; what is in them is checked then.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from packer_cli._kernels import documents as kernels
from packer_cli.errors import DataError, InternalError
from packer_cli.records import Int32, Int64, UInt8, UInt32
from packer_cli.result.layout import MANIFEST
from packer_cli.result.tokenized import AGAIN, TokenizedDirectory, edges_of

# Pages that are mapped count as memory of this process; up to two megabytes around what is read
# are. Beyond this they are given back, and stay in the system's cache.
_MOST_MAPPED, _PIECES_AT_ONCE = 640 << 20, 64


class Tokens:
    """The tokens of documents of several directories, mapped on first use.

    Threads may share it.
    """

    def __init__(self, directories: Sequence[TokenizedDirectory]) -> None:
        self._directories = directories
        self._bases = np.concatenate([[0], np.cumsum([len(one) for one in directories])])
        self._bases = self._bases.astype(np.int64)

    @cached_property
    def spans(self) -> Spans:
        """Where the record batches of all documents lie in memory."""
        maps: list[mmap.mmap] = []
        batches = [batch for one in self._directories for batch in _all_batches(one, maps)]
        return Spans(batches, maps)

    def _parts(self, length: Int32) -> Iterator[tuple[slice, slice]]:
        """What to gather at once: (pieces, their tokens). Afterwards pages are given back."""
        spans, ends = self.spans, np.cumsum(length, dtype=np.int64)
        step = _PIECES_AT_ONCE if spans.mapped_bytes > _MOST_MAPPED else max(len(length), 1)
        for first in range(0, len(length), step):
            last = min(first + step, len(length))
            yield slice(first, last), slice(ends[first] - length[first], ends[last - 1])
            spans.give_back()

    def numbered(self, directory: Int32 | Int64, document: Int64) -> Int64:
        """int64[p], the documents' numbers over all directories."""
        numbers: Int64 = self._bases[directory] + document
        return numbers

    def gather(self, directory: Int32, document: Int64, start: Int32, length: Int32) -> UInt32:
        """uint32[sum of length], the tokens of pieces, end to end.

        Piece i is the `length[i]` tokens from `start[i]` on of a document. Raises DataError when
        there are none such.
        """
        out, wrong = self._gathered(self.numbered(directory, document), start, length)
        if wrong >= 0:
            path = self._directories[int(directory[wrong])].path
            raise DataError(
                f"{path / MANIFEST}: its document {document[wrong]} has no {length[wrong]} tokens "
                f"from token {start[wrong]} on",
                AGAIN,
            )
        return out

    def ids_of(self, number: Int64, start: Int32, length: Int32) -> UInt32:
        """The same of pieces that are known to be there, by `numbered` documents."""
        out, wrong = self._gathered(number, start, length)
        if wrong >= 0:
            raise DataError(f"document {number[wrong]} changed while it was read", AGAIN)
        return out

    def _gathered(self, number: Int64, start: Int32, length: Int32) -> tuple[UInt32, int]:
        """The tokens, and the first piece that is not in its document, or -1."""
        out, spans = np.empty(int(length.sum(dtype=np.int64)), np.uint32), self.spans
        for part, tokens in self._parts(length):
            wrong = kernels.gather_documents(
                number[part], start[part], length[part], spans.firsts, spans.offsets,
                spans.values, out[tokens],
            )  # fmt: skip
            if wrong >= 0:
                return out, part.start + wrong
        return out, -1

    def gather_trained(
        self, directory: Int32, document: Int64, start: Int32, length: Int32
    ) -> UInt8 | None:
        """uint8 of the same tokens, 1 where one is trained on; None: everywhere."""
        return self.trained_of(self.numbered(directory, document), start, length)

    def trained_of(self, number: Int64, start: Int32, length: Int32) -> UInt8 | None:
        """The same by `numbered` documents."""
        if not self._has_untrained:
            return None
        out = np.empty(int(length.sum(dtype=np.int64)), np.uint8)
        spans = self.spans
        for part, tokens in self._parts(length):
            wrong = kernels.gather_trained(
                number[part], start[part], length[part], spans.firsts, spans.trained_offsets,
                spans.trained, spans.valid, out[tokens],
            )  # fmt: skip
            if wrong >= 0:
                missing = number[part.start + wrong]
                raise InternalError(f"no tokenized directory has the document {missing}")
        return out

    @cached_property
    def _has_untrained(self) -> bool:
        return any(one.facts.config.shape != "text" for one in self._directories)


class Spans:
    """Addresses of the columns of record batches, which stay mapped as long as this lives.

    firsts           int64[spans + 1], the first document of each, and how many there are
    offsets, values  int64[spans], of the lists of tokens
    tokens           int64[4, spans]: firsts, offsets, values, and how many tokens there are
    trained_offsets, trained, valid  int64[spans], of the lists of what is trained on; 0: no such
    """

    def __init__(self, batches: list[Any], maps: list[mmap.mmap]) -> None:
        self._batches, self._maps = batches, maps
        self.mapped_bytes = sum(map(len, maps))
        self.firsts = np.concatenate([[0], np.cumsum([len(one) for one in batches])])
        self.firsts = self.firsts.astype(np.int64)
        self.offsets, self.values, _ = _addresses(batches, "input_ids")
        totals = np.array([len(one.column("input_ids").values) for one in batches], np.int64)
        self.tokens = np.stack([self.firsts[:-1], self.offsets, self.values, totals])
        self.trained_offsets, self.trained, self.valid = _addresses(batches, "trained")
        self.give_back()

    def give_back(self) -> None:
        """Unmap all pages when too many are mapped."""
        if self.mapped_bytes > _MOST_MAPPED < _resident_bytes():
            for one in self._maps:
                one.madvise(mmap.MADV_DONTNEED)


def _resident_bytes() -> int:
    """Of files, mapped in this process; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[2]) * mmap.PAGESIZE
    except OSError:
        return 0


def _addresses(batches: list[Any], name: str) -> tuple[Int64, Int64, Int64]:
    """(offsets, values, validity bitmap) int64[batches] of a list column; 0 where there is none."""
    rows = np.zeros((3, len(batches)), np.int64)
    for i, batch in enumerate(batches):
        if name not in batch.schema.names:
            continue
        column = batch.column(name)
        validity, offsets = column.buffers()[:2]
        values = column.values.buffers()[1]
        rows[0, i] = offsets.address + 4 * column.offset
        # a column of nothing but nulls has no values; any address does, but none is no column
        rows[1, i] = values.address if values is not None and values.size else offsets.address
        rows[2, i] = validity.address if validity is not None else 0
    return rows[0], rows[1], rows[2]


def _all_batches(directory: TokenizedDirectory, maps: list[mmap.mmap]) -> Iterator[Any]:
    """The record batches of all documents, which are as long as the indexes say."""
    first = 0
    for shard in directory.shards:
        batches = list(directory.batches(shard, maps))
        if sum(map(len, batches)) != shard.rows:
            raise DataError(
                f"{directory.path / shard.file}: holds {sum(map(len, batches))} documents, the "
                f"manifest says {shard.rows}",
                AGAIN,
            )
        for batch in batches:
            lengths = np.diff(edges_of(batch.column("input_ids")))
            indexed = directory.lengths[first : first + len(batch)]
            if not np.array_equal(lengths, indexed):
                at = int(np.argmax(lengths != indexed))
                raise DataError(
                    f"{directory.path / shard.file}: its document {first + at} has {lengths[at]} "
                    f"tokens, its index says {indexed[at]}",
                    AGAIN,
                )
            first += len(batch)
            yield batch
