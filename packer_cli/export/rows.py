"""Take a directory apart for an export: its batches, its rows without padding, its documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from packer_cli._kernels import filling
from packer_cli.errors import DataError
from packer_cli.options.value_columns import ValueColumn
from packer_cli.packing.labels import labels_of
from packer_cli.records import Int32, Int64, offsets_of
from packer_cli.result.columns import (
    lists_of,
    places_in,
    rows_of,
    rows_per_batch,
    segments_of,
    values_in,
)
from packer_cli.result.layout import Shard
from packer_cli.result.manifest import Manifest
from packer_cli.result.opening import View
from packer_cli.result.reader import PACK_AGAIN, PackedDirectory
from packer_cli.result.rules import damage, documents_of, labels_in, segments_in, sound_batches
from packer_cli.result.tokenized import TokenizedDirectory

Read = Callable[[int], None]  # called with how many bytes of shards were read
_Pieces = Callable[[Int64], tuple[Int32, Int32 | None, Callable[[ValueColumn], Any]]]

_CHUNK_TOKENS = 1 << 20


@dataclass(frozen=True)
class UnpaddedRows:
    """Some rows, their segments end to end.

    ids      int32[T]
    labels   int32[T], unshifted; None when the directory has none
    lengths  int64[s], tokens of each segment
    first    int64[rows + 1]: row r has the segments first[r] .. first[r + 1]
    values   gives a column of values as it is stored: [T], or of records [s]; each with K values or
             with one
    origins  int64[2, s], the input and the position in it of documents; None of rows
    """

    ids: Int32
    labels: Int32 | None
    lengths: Int64
    first: Int64
    values: Callable[[ValueColumn], Any]
    origins: Int64 | None = None

    @cached_property
    def segment_offsets(self) -> Int64:
        """int64[s + 1]: segment k has the tokens segment_offsets[k] .. segment_offsets[k + 1]."""
        return offsets_of(self.lengths)

    @cached_property
    def offsets(self) -> Int64:
        """int64[rows + 1]: row r has the tokens offsets[r] .. offsets[r + 1]."""
        return self.segment_offsets[self.first]


def compare(
    place: Path, facts: Shard | Manifest, segments: int, tokens: int, trained: int | None = None
) -> None:
    """Raise DataError if the counts of a shard, or of all, differ from the manifest."""
    for name, count in (("segments", segments), ("tokens", tokens), ("trained_tokens", trained)):
        if count not in (None, expected := getattr(facts, name)):
            raise DataError(
                f"{place}: holds {count} {name}, the manifest says {expected}", PACK_AGAIN
            )


def units(packed: PackedDirectory, read: Read) -> Iterator[list[Shard]]:
    """Yield the shards of each unit, to be read by the writer."""
    for shards in packed.facts.shards_of_units():
        yield shards
        read(sum(shard.bytes for shard in shards))


def batches(packed: PackedDirectory, read: Read, order: Int64 | None = None) -> Iterator[Any]:
    """Yield the record batches of all shards, mapped, or copies of rows in an `order`, int64[rows].

    Raises DataError if a shard is damaged, or has lost segments or tokens that the manifest counts.
    """
    if order is None:
        for shard in packed.facts.shards:
            yield from _batches(packed, shard, read)
        return
    size = sum(shard.bytes for shard in packed.facts.shards)
    yield from _sound(packed, packed.path, packed.facts, size, _taken(packed, order), read)


def _batches(packed: PackedDirectory, shard: Shard, read: Read) -> Iterator[Any]:
    place, mapped = packed.path / shard.file, packed.batches(shard)
    return _sound(packed, place, shard, shard.bytes, mapped, read)


def _taken(packed: PackedDirectory, order: Int64) -> Iterator[Any]:
    """Yield rows in an order, as many at a time as runs write."""
    step = rows_per_batch(packed.facts.config)
    for numbers in np.split(order, range(step, len(order), step)):
        try:
            yield packed.take(numbers)
        except ValueError as error:
            raise DataError(f"{packed.path}: {error}", PACK_AGAIN) from error


def _sound(
    packed: PackedDirectory,
    place: Path,
    facts: Shard | Manifest,
    size: int,
    stored: Iterable[Any],
    read: Read,
) -> Iterator[Any]:
    """Yield the batches that are `stored` at a place, compared with the manifest. `size`: bytes."""
    segments = tokens = 0
    for batch in stored:
        if problem := damage(batch, packed):
            raise DataError(f"{place}: {problem}", PACK_AGAIN)
        _, length, _ = segments_of(batch)
        segments, tokens = segments + len(length), tokens + int(length.sum())
        if segments > facts.segments or tokens > facts.tokens:
            break
        yield batch
        read(size * batch.num_rows // facts.rows)
    compare(place, facts, segments, tokens)


def rows(packed: PackedDirectory, read: Read, order: Int64 | None = None) -> Iterator[UnpaddedRows]:
    """Yield the rows of all shards, a record batch at a time; `order`: as in `batches`."""
    for batch in batches(packed, read, order):
        begin, length, first = places_in(batch, packed.max_length)

        def column(name: str, begin: Int64 = begin, length: Int64 = length, of: Any = batch) -> Any:
            flat = _flat(of, name)
            out = np.empty((int(length.sum()), *flat.shape[1:]), flat.dtype)
            there, here = (array.reshape(-1).view(np.uint8) for array in (flat, out))
            lengths = length.astype(np.int32)
            filling.gather_pieces(there, flat[:1].nbytes, begin, lengths, here)
            return out

        def values(kind: ValueColumn, column: Any = column, of: Any = batch) -> Any:
            return values_in(of, kind) if kind.is_of_segments else column(kind.name)

        labels = column("labels") if has_labels(packed) else None
        yield UnpaddedRows(column("input_ids"), labels, length, first, values)


def _flat(batch: Any, name: str) -> Any:
    """Return the values of a column, all rows end to end with their padding: [n], or [n, K]."""
    values = rows_of(batch.column(name))
    return values.reshape(-1, *values.shape[2:])


def documents(packed: PackedDirectory, read: Read) -> Iterator[UnpaddedRows]:
    """Yield whole documents, each as a row of one segment, unit by unit in the order of the inputs.

    A document's pieces lie in one unit, so memory holds the places of one unit's segments and about
    a million tokens. The first token of a piece has no label.
    """
    count, expected, labeled = 0, packed.facts.documents, has_labels(packed)
    for shards in packed.facts.shards_of_units():
        if isinstance(packed, View):
            segments, pieces = _of_view(packed, shards, read)
        else:
            segments, pieces = _of_rows(packed, shards, read)
        order, (file, position, start, _), first = grouped = documents_of(segments)
        wrong = start != grouped.expected_starts(whole=False)
        if wrong.any():
            at = np.argmax(wrong)
            raise DataError(
                f"{packed.path}: is damaged: the pieces of the document at {position[at]} of "
                f"{packed.facts.inputs[file[at]].name} do not fit together",
                PACK_AGAIN,
            )
        tokens = grouped.tokens
        count += len(tokens)
        cuts = np.flatnonzero(np.diff(np.cumsum(tokens) // _CHUNK_TOKENS)) + 1
        for chunk in np.split(np.arange(len(tokens)), cuts):
            ids, labels, of_pieces = pieces(order[first[chunk[0]] : first[chunk[-1] + 1]])
            labels = labels if labeled else None
            begins = first[chunk] - first[chunk[0]]

            def values(kind: ValueColumn, of: Any = of_pieces, begins: Int64 = begins) -> Any:
                values = of(kind)
                return values[begins] if kind.is_of_segments else values

            yield UnpaddedRows(
                ids,
                labels,
                tokens[chunk],
                np.arange(len(chunk) + 1),
                values,
                grouped.segments[:2, first[chunk]],
            )
    if count != expected:
        raise DataError(
            f"{packed.path}: holds {count} documents, the manifest says {expected}", PACK_AGAIN
        )


def _of_rows(packed: PackedDirectory, shards: list[Shard], read: Read) -> tuple[Int64, _Pieces]:
    """Return the segments of a unit, and a function of segments' numbers: (ids, labels, values)."""
    unit = [batch for shard in shards for batch in _batches(packed, shard, read)]  # mapped
    places = []
    for number, batch in enumerate(unit):
        begin, length = places_in(batch, packed.max_length)[:2]
        places.append(np.stack([np.full(len(begin), number), begin, length]))
    where = np.concatenate(places, axis=1)

    def column(name: str, which: Int64) -> Any:
        """Return the values of a column in pieces of several batches, end to end."""
        numbers, begins, lengths = where[:, which].tolist()
        flat = {number: _flat(unit[number], name) for number in {*numbers}}
        parts = zip(numbers, begins, lengths, strict=True)
        return np.concatenate([flat[n][begin : begin + length] for n, begin, length in parts])

    def values(which: Int64, kind: ValueColumn) -> Any:
        if not kind.is_of_segments:
            return column(kind.name, which)
        return np.concatenate([values_in(batch, kind) for batch in unit])[which]

    def pieces(which: Int64) -> tuple[Int32, Int32 | None, Callable[[ValueColumn], Any]]:
        labels = column("labels", which) if has_labels(packed) else None
        return column("input_ids", which), labels, partial(values, which)

    return np.concatenate([segments_in(batch) for batch in unit], axis=1), pieces


def _of_view(view: View, shards: list[Shard], read: Read) -> tuple[Int64, _Pieces]:
    """Do the same as `_of_rows` for a view, without filling its rows."""
    parts = []
    for shard in shards:
        parts.append(view.segments(shard))
        compare(view.path / shard.file, shard, parts[-1].shape[1], int(parts[-1][3].sum()))
        read(shard.bytes)
    segments = np.concatenate(parts, axis=1)

    def pieces(which: Int64) -> tuple[Int32, Int32 | None, Callable[[ValueColumn], Any]]:
        pieces = view.fetch(segments[:, which])
        ids = pieces.token_ids.view(np.int32)
        columns = {**pieces.of_tokens, **pieces.of_documents}
        labels = labels_of(ids, pieces.trained, pieces.offsets[:-1])
        return ids, labels, lambda kind: columns[kind.name]

    return segments, pieces


def tokenized_documents(tokenized: TokenizedDirectory, read: Read) -> Iterator[UnpaddedRows]:
    """Yield the documents of a tokenized directory, a record batch at a time. Raises DataError."""
    for number, shard in enumerate(tokenized.shards):
        for batch, _ in sound_batches(tokenized, number):
            ids, offsets = lists_of(batch, "input_ids")
            values = partial(values_in, batch)
            yield UnpaddedRows(
                ids,
                labels_in(batch),
                np.diff(offsets),
                np.arange(len(batch) + 1),
                values,
                np.stack([batch.column(name).to_numpy() for name in ("file", "position")]),
            )
            read(shard.bytes * len(batch) // shard.rows)


def parts_of(
    exported: PackedDirectory | TokenizedDirectory, takes: Callable[..., Iterable[Any]]
) -> Callable[..., Iterable[Any]]:
    """Return the function of `Read` that yields the parts that a format takes of a directory."""
    if isinstance(exported, PackedDirectory):
        return partial(takes, exported)
    return partial(tokenized_documents, exported)


def has_labels(packed: PackedDirectory) -> bool:
    """Tell if rows have labels; otherwise all tokens are trained on, or exports are refused."""
    return "labels" in packed.facts.config.columns
