"""What every packed row must satisfy, and every document of a tokenized directory, written once:
for packer verify, stats, show and export, and for the tests, which hold every result to it.

cu_seqlens      0 first, increasing, at most max_length last, at most max_segments steps
cu_seqlens_padded  with a segment multiple: 0 first, each step that of cu_seqlens rounded up to
                the multiple, at most max_length last
segments        as many as boundaries less one, each of an input of its unit
attention_mask  1 in segments, 0 in padding
input_ids       >= 0; pad_token_id in padding
labels          the token or -100; -100 on padding and on each segment's first token
position_ids    restart at 0 in every segment, go on in its padding, restart in the row's
values          0 outside segments; finite; a bool 0 or 1; of records a value for each segment

Segments lead back to documents: a document's pieces lie in the rows of one unit. Segments of a unit
are kept as int64[4, segments]: the input, the document's position in it, the segment's first token
in the document, its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packer_cli.errors import DataError
from packer_cli.options.options import PADDED_BOUNDARIES
from packer_cli.options.value_columns import ValueColumn
from packer_cli.packing.fitting import padded
from packer_cli.packing.labels import labels_of, trained_tokens
from packer_cli.records import IGNORED, Int32, Int64
from packer_cli.result.columns import as_numbers, lists_of, rows_of, segments_of, values_in
from packer_cli.result.manifest import Manifest
from packer_cli.result.reader import PackedDirectory
from packer_cli.result.shard_writer import content_hashes
from packer_cli.result.tokenized import AGAIN, TokenizedDirectory

_Flags = npt.NDArray[np.bool_]


class Broken(NamedTuple):
    """A broken rule: the first row (counted in the batch) that breaks it, and how many do."""

    row: int
    rule: str
    detail: str
    rows: int

    def __str__(self) -> str:
        return f"row {self.row}: {self.rule}{self.detail} ({self.rows} rows)"


@dataclass(frozen=True)
class RowLimits:
    """What rules depend on. `highest_id`: the tokenizer's, None when not known."""

    max_length: int
    pad_token_id: int
    max_segments: int | None = None
    segment_multiple: int = 1
    highest_id: int | None = None
    columns: Sequence[ValueColumn] = ()

    @classmethod
    def of(cls, facts: Manifest, highest_id: int | None = None) -> RowLimits:
        config = facts.config
        return cls(
            config.max_length, facts.pad_token_id, config.max_segments_per_row,
            config.segment_multiple, highest_id, (*config.value_columns.values(),),
        )  # fmt: skip


def broken_rules(batch: Any, limits: RowLimits) -> list[Broken]:
    """All rules but those of where segments come from: see `broken_sources`."""
    if broken := _broken_places(batch, limits):  # segments cannot be located
        return broken
    names, ids = batch.schema.names, rows_of(batch.column("input_ids"))
    position, real = _positions(batch, limits)
    pad, highest = limits.pad_token_id, limits.highest_id
    # (rule, bool where it holds, values that it is of, what was expected)
    rules: list[tuple[str, _Flags, Any, Any]] = []
    rules.append(("input_ids holds a negative id", ids >= 0, ids, None))
    if highest is not None:
        rule = f"input_ids holds an id above the tokenizer's highest, {highest}"
        rules.append((rule, ~real | (ids <= highest), ids, None))
    rule = f"input_ids holds something other than pad_token_id {pad} in padding"
    rules.append((rule, real | (ids == pad), ids, None))
    if "attention_mask" in names:
        mask, rule = rows_of(batch.column("attention_mask")), "differs from the boundaries"
        rules.append((f"attention_mask {rule}", mask == real, mask, real.view(np.uint8)))
    if "labels" in names:
        labels = rows_of(batch.column("labels"))
        ignored = labels == IGNORED
        rule = "labels holds neither the token nor -100"
        rules.append((rule, ignored | (labels == ids), labels, ids))
        rule = "labels trains on padding or on a segment's first token"
        rules.append((rule, ignored | (real & (position > 0)), labels, None))
    if "position_ids" in names:
        found, rule = rows_of(batch.column("position_ids")), "does not restart in every segment"
        rules.append((f"position_ids {rule}", found == position, found, position))
    for one in limits.columns:
        if not one.is_of_segments:
            values = rows_of(batch.column(one.name))
            rule = f"{one.name} holds something other than 0 in padding"
            rules.append((rule, real | _each(one, values == 0), values, None))
            rules += [(*its, values, None) for its in _of_values(one, values)]
    broken = [one for rule in rules for one in _broken(*rule)]
    of_segments = broken_segments(batch, limits.columns)
    for one in limits.columns if not of_segments else ():
        if one.is_of_segments:
            values, edges = lists_of(batch, one.name)
            for rule, holds in _of_values(one, values):
                of_row = np.logical_and.reduceat(holds, edges[:-1])
                broken += _broken(rule, of_row, example=values[np.argmin(holds)])
    return [*broken, *of_segments]


def broken_boundaries(batch: Any, limits: RowLimits) -> list[Broken]:
    """The broken rules that prevent taking segments out of rows; much faster than all rules."""
    return _broken_places(batch, limits) or broken_segments(batch, limits.columns)


def damage(batch: Any, packed: PackedDirectory) -> str:
    """What makes a batch impossible to count or to take apart; "" for nothing."""
    limits = RowLimits.of(packed.facts)
    broken = broken_boundaries(batch, limits)
    return f"is damaged: {broken[0].rule}{broken[0].detail}" if broken else ""


def broken_sources(batch: Any, files: Int64) -> list[Broken]:
    """The broken rules of where segments come from. `files`: the inputs that are possible.

    `segments` must match `cu_seqlens`.
    """
    file, position, start = sources_of(batch)
    edges = batch.column("segments").offsets.to_numpy()
    return [
        broken
        for name, holds, values in (
            ("file is not an input of its unit", np.isin(file, files), file),
            ("position is negative", position >= 0, position),
            ("start is negative", start >= 0, start),
        )
        if not holds.all()
        for broken in _broken(
            f"segments: {name}",
            np.logical_and.reduceat(holds, edges[:-1] - edges[0]),
            example=values[np.argmin(holds)],
        )
    ]


def _broken(
    name: str, holds: _Flags, values: Any = None, expected: Any = None, example: Any = None
) -> list[Broken]:
    """`holds` bool[rows], or bool[rows, max_length]; `values` and `expected` like it."""
    of_row = holds if holds.ndim == 1 else holds.all(1)
    wrong = np.flatnonzero(~of_row)
    if not len(wrong):
        return []
    row = int(wrong[0])
    text = "" if example is None else f": {example}"
    if holds.ndim == 2:
        place = int(np.argmin(holds[row]))
        text = f": place {place} has {values[row, place]}"
        if expected is not None:
            text += f", expected {expected[row, place]}"
    elif values is not None:
        text = f": {values[row]}"
    return [Broken(row, name, text, len(wrong))]


def _broken_places(batch: Any, limits: RowLimits) -> list[Broken]:
    """The broken rules of boundaries, by which segments are located."""
    broken, multiple = broken_cu_seqlens(batch, limits), limits.segment_multiple
    if broken or (multiple == 1 and PADDED_BOUNDARIES not in batch.schema.names):
        return broken
    boundaries, edges = lists_of(batch, "cu_seqlens")
    places, own_edges = lists_of(batch, PADDED_BOUNDARIES)
    as_many = np.diff(own_edges) == np.diff(edges)
    if not as_many.all():
        return _broken(f"{PADDED_BOUNDARIES} does not match cu_seqlens", as_many)
    follows = np.diff(places, prepend=0) == padded(np.diff(boundaries, prepend=0), multiple)
    first, ends, most = places[edges[:-1]], places[edges[1:] - 1], limits.max_length
    name = f"{PADDED_BOUNDARIES} is not cu_seqlens in multiples of {multiple}"
    return [
        *_broken(f"{PADDED_BOUNDARIES} does not begin with 0", first == 0, first),
        *_broken(name, _but_first(follows, edges)),
        *_broken(f"{PADDED_BOUNDARIES} ends beyond {most}", ends <= most, ends),
    ]


def broken_cu_seqlens(batch: Any, limits: RowLimits) -> list[Broken]:
    """The broken rules of `cu_seqlens`, which the batches that a view stores have, too."""
    boundaries, edges = lists_of(batch, "cu_seqlens")
    sizes = np.diff(edges)
    if (sizes < 2).any():
        return _broken("cu_seqlens has fewer than two boundaries", sizes >= 2)
    first, used, most = boundaries[edges[:-1]], boundaries[edges[1:] - 1], limits.max_length
    increases = np.diff(boundaries, prepend=0) > 0
    broken = [
        *_broken("cu_seqlens does not begin with 0", first == 0, first),
        *_broken("cu_seqlens does not increase", _but_first(increases, edges)),
        *_broken(f"cu_seqlens ends outside 1..{most}", (used >= 1) & (used <= most), used),
    ]
    if limits.max_segments:
        name = f"cu_seqlens has more than {limits.max_segments} segments"
        broken += _broken(name, sizes - 1 <= limits.max_segments, sizes - 1)
    return broken


def _but_first(holds: _Flags, edges: Int64) -> _Flags:
    """bool[rows]: whether it holds for all values of a row but its first."""
    holds[edges[:-1]] = True
    of_row: _Flags = np.logical_and.reduceat(holds, edges[:-1])
    return of_row


def _positions(batch: Any, limits: RowLimits) -> tuple[Int32, _Flags]:
    """What the boundaries say about each place, [rows, max_length]: how many tokens after its
    segment or the row's padding begins, and whether there is a token.
    """
    length, shape = limits.max_length, (batch.num_rows, limits.max_length)
    name = PADDED_BOUNDARIES if PADDED_BOUNDARIES in batch.schema.names else "cu_seqlens"
    begin, edges = lists_of(batch, name)
    last = edges[1:] - 1  # where a row's padding begins
    end = np.append(begin[1:], 0)
    end[last] = length
    tokens = np.zeros(len(begin), np.int32)
    tokens[np.delete(np.arange(len(begin)), last)] = segments_of(batch)[1]
    lengths = end - begin
    position = np.arange(length, dtype=np.int32) - np.repeat(begin, lengths).reshape(shape)
    return position, position < np.repeat(tokens, lengths).reshape(shape)


def _of_values(column: ValueColumn, values: Any) -> Iterator[tuple[str, _Flags]]:
    """(rule, where it holds) of what a column of values has for tokens, or for records."""
    if column.is_float:
        finite = np.isfinite(as_numbers(column, values))
        yield f"{column.name} holds a value that is not finite", _each(column, finite)
    if column.type == "bool":
        yield f"{column.name} holds neither 0 nor 1", _each(column, values <= 1)


def _each(column: ValueColumn, holds: _Flags) -> _Flags:
    """Whether it holds for all values of a token, or of a record."""
    return holds if column.count is None else np.asarray(holds.all(-1))


def broken_segments(batch: Any, columns: Sequence[ValueColumn] = ()) -> list[Broken]:
    """The broken rules of columns with a value for each segment. The boundaries must be sound."""
    offsets = segments_of(batch)[2]
    for name in ("segments", *(one.name for one in columns if one.is_of_segments)):
        if name in batch.schema.names:
            counts = np.diff(batch.column(name).offsets.to_numpy())
            holds = counts == np.diff(offsets)
            if broken := _broken(f"{name} does not match cu_seqlens", holds, counts):
                return broken
    return []


def sources_of(batch: Any) -> Int64:
    """int64[3, segments] (file, position, start) of a batch's rows; 0 where they do not say."""
    if "segments" not in batch.schema.names:
        return np.zeros((3, len(segments_of(batch)[0])), np.int64)
    parts = batch.column("segments").flatten().flatten()
    return np.stack([part.to_numpy().astype(np.int64) for part in parts])


def segments_in(batch: Any) -> Int64:
    """int64[4, segments] (file, position, start, length) of a batch's rows."""
    return np.concatenate([sources_of(batch), segments_of(batch)[1][None]])


class GroupedSegments(NamedTuple):
    """How a unit's segments make documents.

    order     int64[segments]: by input, position and start
    segments  int64[4, segments] in this order
    first     int64[documents + 1]: document d has the segments first[d] .. first[d + 1] of these
    """

    order: Int64
    segments: Int64
    first: Int64

    @property
    def tokens(self) -> Int64:
        """int64[documents] in rows."""
        tokens: Int64 = np.add.reduceat(self.segments[3], self.first[:-1])
        return tokens

    def expected_starts(self, *, whole: bool) -> Int64:
        """int64[segments]: where the segment before it in its document ends. `whole`: the first
        one starts at the document's first token; else where it does.
        """
        _, _, start, length = self.segments
        first = self.first[:-1]
        expected: Int64 = np.roll(start + length, 1)
        expected[first] = 0 if whole else start[first]
        return expected


def documents_of(segments: Int64) -> GroupedSegments:
    """The documents of one unit's segments."""
    file, position, start, _ = segments
    order = np.lexsort((start, position, file))
    ordered = segments[:, order]
    begins = np.ones(len(order), bool)
    begins[1:] = (np.diff(ordered[:2]) != 0).any(0)
    return GroupedSegments(order, ordered, np.append(np.flatnonzero(begins), len(order)))


# Documents of tokenized directories


def sound_batches(
    tokenized: TokenizedDirectory, number: int, highest: int | None = None
) -> Iterator[tuple[Any, Any]]:
    """(batch, the same documents' part of the index) of shard `number`.

    Raises DataError for the first document that breaks a rule, or that the index has otherwise.
    """
    shard, first = tokenized.shards[number], 0
    path, inputs = tokenized.path / shard.file, len(tokenized.facts.inputs)
    index = pa.Table.from_batches(tokenized.index_batches(number)).combine_chunks()
    for batch in tokenized.stored(shard):
        own = index.slice(first, len(batch))
        for at, text in chain(
            _broken_documents(batch, highest, inputs, tokenized.value_columns.values()),
            _other_index(batch, own),
        ):
            raise DataError(f"{path}: document {first + at}: {text}", AGAIN)
        first += len(batch)
        yield batch, own


def _broken_documents(
    batch: Any, highest: int | None, inputs: int, columns: Iterable[ValueColumn]
) -> Iterator[tuple[int, str]]:
    """(document, what is wrong with it) of a batch, at most one of each kind.

    highest  the highest id there may be; None where that is not known
    inputs   how many inputs there are
    columns  its columns of values
    """
    ids, offsets = lists_of(batch, "input_ids")
    highest = np.iinfo(np.int32).max if highest is None else highest
    lengths, file = np.diff(offsets), batch.column("file").to_numpy()
    wrong = np.flatnonzero((ids < 0) | (ids > highest))
    if len(wrong):
        at = int(np.searchsorted(offsets, wrong[0], side="right")) - 1
        yield at, f"holds the id {ids[wrong[0]]}, the tokenizer's are 0 to {highest}"
    for at in np.flatnonzero((file < 0) | (file >= inputs))[:1].tolist():
        yield at, f"is of input {file[at]}, there are {inputs}"
    for at in np.flatnonzero(lengths == 0)[:1].tolist():
        yield at, "has no tokens"
    for one in columns:
        yield from _broken_values(batch, one, offsets)
    if "trained" not in batch.schema.names:
        return
    edges, offsets = lists_of(batch, "trained")
    of = np.repeat(np.arange(len(lengths)), np.diff(offsets))
    for at in np.flatnonzero(np.diff(offsets) % 2)[:1].tolist():
        yield at, "its trained has an odd number of edges"
    outside = (edges < 0) | (edges > lengths[of])
    outside[:-1] |= (edges[1:] <= edges[:-1]) & (of[1:] == of[:-1])
    for at in of[outside][:1].tolist():
        shown = edges[offsets[at] : offsets[at + 1]][:6].tolist()
        yield at, f"its trained is {shown}, not ascending within its {lengths[at]} tokens"


def _broken_values(batch: Any, column: ValueColumn, offsets: Int64) -> Iterator[tuple[int, str]]:
    """(document, what is wrong with its values), at most one of each kind."""
    values, edges = values_in(batch, column), np.arange(len(offsets))
    if not column.is_of_segments:
        edges = lists_of(batch, column.name)[1]
        counts, lengths = np.diff(edges), np.diff(offsets)
        for at in np.flatnonzero(counts != lengths)[:1].tolist():
            yield at, f"has {counts[at]} values of {column.name}, and {lengths[at]} tokens"
    for rule, holds in _of_values(column, values):
        for at in np.flatnonzero(~holds)[:1].tolist():
            yield int(np.searchsorted(edges, at, side="right")) - 1, f"{rule}: {values[at]}"


def _other_index(batch: Any, index: Any) -> Iterator[tuple[int, str]]:
    """(document, text) where a batch and its part of the index differ, one of each kind."""
    ids, offsets = lists_of(batch, "input_ids")
    made = {"length": np.diff(offsets), "trained_tokens": _trained_tokens(batch)}
    for name, own in made.items():
        listed = index.column(name).to_numpy()
        for at in np.flatnonzero(own != listed)[:1].tolist():
            yield at, f"its {name} is {own[at]}, the index says {listed[at]}"
    hashes = content_hashes(ids.view(np.uint32), offsets)
    stored = b"".join(index.column("content_hash").to_pylist())
    different = (hashes != np.frombuffer(stored, np.uint64).reshape(-1, 2)).any(axis=1)
    for at in np.flatnonzero(different)[:1].tolist():
        yield at, "its content_hash is not that of its tokens"


def labels_in(batch: Any) -> Int32 | None:
    """Return the labels int32[tokens] of documents whose stretches are valid; None if the batch
    does not say what is trained on, so that everything is.
    """
    if "trained" not in batch.schema.names:
        return None
    ids, begins = lists_of(batch, "input_ids")
    return labels_of(ids, _document_flags(batch), begins[:-1])


def _document_flags(batch: Any) -> npt.NDArray[np.bool_]:
    """Return bool[tokens], what documents with valid stretches say to train on."""
    _, begins = lists_of(batch, "input_ids")
    edges, offsets = lists_of(batch, "trained")
    places = np.repeat(begins[:-1], np.diff(offsets)) + edges
    steps = np.zeros(begins[-1] + 1, np.int8)
    np.add.at(steps, places[::2], 1)
    np.add.at(steps, places[1::2], -1)
    everywhere = batch.column("trained").is_null().to_numpy(zero_copy_only=False)
    flags: npt.NDArray[np.bool_] = np.cumsum(steps[:-1]) > 0
    flags |= np.repeat(everywhere, np.diff(begins))
    return flags


def _trained_tokens(batch: Any) -> Int64:
    """Count the tokens int64[documents] of a valid batch that are trained on."""
    begins: Int64 = lists_of(batch, "input_ids")[1]
    says = "trained" in batch.schema.names
    flags = _document_flags(batch).view(np.uint8) if says else None
    return trained_tokens(flags, begins[:-1], begins[1:])
