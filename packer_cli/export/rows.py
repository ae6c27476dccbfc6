"""A directory taken apart: its batches, its rows without padding, its documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from packer_cli._kernels import filling
from packer_cli.errors import DataError
from packer_cli.records import IGNORED, Int32, Int64
from packer_cli.result.document_rules import lists_of, sound_batches, trained_flags
from packer_cli.result.documents import documents_of, segments_in
from packer_cli.result.manifest import Manifest
from packer_cli.result.reader import PACK_AGAIN, PackedDirectory, rows_of, segments_of
from packer_cli.result.recount import damage
from packer_cli.result.shard_writer import rows_per_batch
from packer_cli.result.shards import Shard
from packer_cli.result.tokenized import TokenizedDirectory
from packer_cli.result.view import View

Read = Callable[[int], None]  # called with how many bytes of shards were read
_Picked = Callable[[Int64], tuple[Int32, Int32 | None]]

_CHUNK_TOKENS = 1 << 20


@dataclass(frozen=True)
class Rows:
    """Some rows, their segments end to end.

    ids      int32[T]
    labels   int32[T], unshifted whatever the directory has; None when it has none
    lengths  int64[s], tokens of each segment
    first    int64[rows + 1]: row r has the segments first[r] .. first[r + 1]
    """

    ids: Int32
    labels: Int32 | None
    lengths: Int64
    first: Int64

    @cached_property
    def segment_offsets(self) -> Int64:
        """int64[s + 1]: segment k has the tokens segment_offsets[k] .. segment_offsets[k + 1]."""
        return _ends(self.lengths)

    @cached_property
    def offsets(self) -> Int64:
        """int64[rows + 1]: row r has the tokens offsets[r] .. offsets[r + 1]."""
        return self.segment_offsets[self.first]

    @cached_property
    def positions(self) -> Int32:
        """int32[T], restarting at 0 in every segment."""
        begins = np.repeat(self.segment_offsets[:-1], self.lengths)
        return (np.arange(len(self.ids)) - begins).astype(np.int32)


def batches(packed: PackedDirectory, read: Read, order: Int64 | None = None) -> Iterator[Any]:
    """The record batches of all shards, mapped and compared with the manifest; or, with an order of
    all rows, int64[rows], copies of rows in it.

    Raises DataError for a damaged shard, and for one with more or fewer segments or tokens than
    the manifest says: that is how a lost token would show.
    """
    if order is not None:
        yield from _in_order(packed, order, read)
        return
    for shard in packed.facts.shards:
        yield from _batches(packed, shard, read)


def _in_order(packed: PackedDirectory, order: Int64, read: Read) -> Iterator[Any]:
    facts, step = packed.facts, rows_per_batch(packed.max_length)
    size = sum(shard.bytes for shard in facts.shards)
    segments = tokens = 0
    for numbers in np.split(order, range(step, len(order), step)):
        try:
            batch = packed.take(numbers)
        except ValueError as error:
            raise DataError(f"{packed.path}: {error}", PACK_AGAIN) from error
        if problem := damage(batch, packed):
            raise DataError(f"{packed.path}: {problem}", PACK_AGAIN)
        _, length, _ = segments_of(batch)
        segments, tokens = segments + len(length), tokens + int(length.sum())
        yield batch
        read(size * len(numbers) // len(order))
    _compare(packed.path, facts, segments, tokens)


def shards(packed: PackedDirectory, read: Read) -> Iterator[Shard]:
    """The shards themselves."""
    for shard in packed.facts.shards:
        yield shard
        read(shard.bytes)


def _batches(packed: PackedDirectory, shard: Shard, read: Read) -> Iterator[Any]:
    path, segments, tokens = packed.path / shard.file, 0, 0
    for batch in packed.batches(shard):
        if problem := damage(batch, packed):
            raise DataError(f"{path}: {problem}", PACK_AGAIN)
        _, length, _ = segments_of(batch)
        segments += len(length)
        tokens += int(length.sum())
        if segments > shard.segments or tokens > shard.tokens:
            break
        yield batch
        read(shard.bytes * batch.num_rows // shard.rows)
    _compare(path, shard, segments, tokens)


def _compare(path: Path, shard: Shard | Manifest, segments: int, tokens: int) -> None:
    for name, count, expected in (
        ("segments", segments, shard.segments),
        ("tokens", tokens, shard.tokens),
    ):
        if count != expected:
            raise DataError(
                f"{path}: holds {count} {name}, the manifest says {expected}", PACK_AGAIN
            )


def rows(packed: PackedDirectory, read: Read, order: Int64 | None = None) -> Iterator[Rows]:
    """The rows of all shards in their order, or in the one given, those of a record batch at a
    time.
    """
    for batch in batches(packed, read, order):
        begin, length, first = segments_of(batch)
        row_of = np.repeat(np.arange(batch.num_rows), np.diff(first))
        begin += row_of * packed.max_length
        ids = _gathered(batch, "input_ids", begin, length)
        labels = _gathered(batch, "labels", begin, length) if _has_labels(packed) else None
        yield Rows(ids, _unshifted(labels, length, packed), length, first)


def documents(packed: PackedDirectory, read: Read) -> Iterator[Rows]:
    """Whole documents, each as a row of one segment, in the order of the inputs.

    A document's pieces lie in one unit, so memory holds the places of one unit's segments and about
    a million tokens. The first token of a piece has no label.
    """
    count, expected = 0, packed.facts.documents
    for some in packed.facts.shards_of_units():
        segments, picked = (
            _of_view(packed, some, read)
            if isinstance(packed, View)
            else _of_rows(packed, some, read)
        )
        for part in _documents_of(segments, picked, packed):
            count += len(part.lengths)
            yield part
    if count != expected:
        raise DataError(
            f"{packed.path}: holds {count} documents, the manifest says {expected}", PACK_AGAIN
        )


def tokenized_documents(tokenized: TokenizedDirectory, read: Read) -> Iterator[Rows]:
    """The documents of a tokenized directory, as `documents`, those of a record batch at a time.

    Labels only where it says what is trained on. Raises DataError for a damaged shard.
    """
    for number, shard in enumerate(tokenized.shards):
        for batch, _ in sound_batches(tokenized, number):
            ids, offsets = lists_of(batch, "input_ids")
            labels = None
            if "trained" in batch.schema.names:
                labels = np.where(trained_flags(batch), ids, np.int32(IGNORED))
                labels[offsets[:-1]] = IGNORED  # nothing predicts it
            yield Rows(ids, labels, np.diff(offsets), np.arange(len(batch) + 1))
            read(shard.bytes * len(batch) // shard.rows)


def _of_rows(packed: PackedDirectory, shards: list[Shard], read: Read) -> tuple[Int64, _Picked]:
    """The segments of a unit, and what gives (ids, labels) of some of them by their numbers."""
    unit = [batch for shard in shards for batch in _batches(packed, shard, read)]  # mapped
    parts, places = [], []
    for number, batch in enumerate(unit):
        begin, length, first = segments_of(batch)
        begin += np.repeat(np.arange(batch.num_rows), np.diff(first)) * packed.max_length
        places.append(np.stack([np.full(len(begin), number), begin, length]))
        parts.append(segments_in(batch))
    where = np.concatenate(places, axis=1)

    def picked(which: Int64) -> tuple[Int32, Int32 | None]:
        ids = _picked(unit, "input_ids", *where[:, which])
        labels = _picked(unit, "labels", *where[:, which]) if _has_labels(packed) else None
        return ids, _unshifted(labels, where[2, which], packed)

    return np.concatenate(parts, axis=1), picked


def _of_view(view: View, shards: list[Shard], read: Read) -> tuple[Int64, _Picked]:
    """The same of a view, whose rows need not be filled for it."""
    parts = []
    for shard in shards:
        parts.append(view.segments(shard))
        _compare(view.path / shard.file, shard, parts[-1].shape[1], int(parts[-1][3].sum()))
        read(shard.bytes)
    segments = np.concatenate(parts, axis=1)

    def picked(which: Int64) -> tuple[Int32, Int32 | None]:
        ids, labels = view.taken(segments[:, which])
        return ids, labels if _has_labels(view) else None

    return segments, picked


def _documents_of(segments: Int64, picked: _Picked, packed: PackedDirectory) -> Iterator[Rows]:
    order, (file, position, start, _), first = grouped = documents_of(segments)
    wrong = start != grouped.expected_starts(whole=False)
    if wrong.any():
        at = np.argmax(wrong)
        raise DataError(
            f"{packed.path}: is damaged: the pieces of the document at {position[at]} of "
            f"{packed.facts.inputs[file[at]].path} do not fit together",
            PACK_AGAIN,
        )
    tokens = grouped.tokens
    cuts = np.flatnonzero(np.diff(np.cumsum(tokens) // _CHUNK_TOKENS)) + 1
    for some in np.split(np.arange(len(tokens)), cuts):
        ids, labels = picked(order[first[some[0]] : first[some[-1] + 1]])
        yield Rows(ids, labels, tokens[some], np.arange(len(some) + 1))


def _has_labels(packed: PackedDirectory) -> bool:
    return "labels" in packed.facts.config.columns


def _gathered(batch: Any, column: str, begin: Int64, length: Int64) -> Int32:
    """The values of pieces of a column, end to end."""
    out = np.empty(int(length.sum()), np.uint32)
    flat = rows_of(batch.column(column)).reshape(-1).view(np.uint32)
    filling.gather_pieces(flat, begin, length.astype(np.int32), out)
    return out.view(np.int32)


def _picked(unit: list[Any], column: str, which: Int64, begin: Int64, length: Int64) -> Int32:
    """The values of pieces that lie in several batches, end to end."""
    out = np.empty(int(length.sum()), np.int32)
    flat = {int(i): rows_of(unit[i].column(column)).reshape(-1) for i in np.unique(which)}
    end = 0
    pieces = zip(which.tolist(), begin.tolist(), length.tolist(), strict=True)
    for number, place, count in pieces:
        out[end : end + count] = flat[number][place : place + count]
        end += count
    return out


def _unshifted(labels: Int32 | None, length: Int64, packed: PackedDirectory) -> Int32 | None:
    """Labels of pieces end to end, each at its own token again."""
    if labels is None or packed.label_shift == "none":
        return labels
    own = np.empty_like(labels)
    own[1:] = labels[:-1]
    own[_ends(length)[:-1]] = IGNORED
    return own


def _ends(lengths: Int64) -> Int64:
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    return ends
