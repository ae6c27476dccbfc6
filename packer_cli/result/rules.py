"""Rules that every packed row satisfies, and every document of a tokenized directory, written once:
for packer verify, stats, show and export, and for the tests, which check every result by them.

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

All rules of a row cost about as much as packing it; the boundaries alone cost a tenth.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packer_cli.options.options import PADDED_BOUNDARIES
from packer_cli.options.value_columns import ValueColumn
from packer_cli.packing.fitting import padded
from packer_cli.packing.labels import labels_of, trained_tokens
from packer_cli.records import IGNORED, Int32, Int64
from packer_cli.result.columns import as_numbers, lists_of, rows_of, segments_of, values_in
from packer_cli.result.manifest import Manifest
from packer_cli.result.reader import PackedDirectory
from packer_cli.result.shard_writer import content_hashes
from packer_cli.result.tokenized import TokenizedDirectory

_Flags = npt.NDArray[np.bool_]


class Violation(NamedTuple):
    """A rule that some rows break: the first of them (counted in the batch), and their number."""

    row: int
    rule: str
    detail: str
    rows: int

    def __str__(self) -> str:
        return f"row {self.row}: {self.rule}{self.detail} ({self.rows} rows)"


@dataclass(frozen=True)
class RowLimits:
    """Limits that rules compare rows with. `highest_id`: the tokenizer's, None if unknown."""

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


def broken_rules(batch: Any, limits: RowLimits) -> list[Violation]:
    """Check all rules, except where segments come from: see `broken_sources`."""
    if broken := _broken_places(batch, limits):  # segments cannot be located
        return broken
    names, ids = batch.schema.names, rows_of(batch.column("input_ids"))
    position, real = _positions(batch, limits)
    pad, highest = limits.pad_token_id, limits.highest_id
    broken = list[Violation]()

    def check(rule: str, holds: _Flags, values: Any, expected: Any = None) -> None:
        broken.extend(_violations(rule, holds, values, expected))

    check("input_ids holds a negative id", ids >= 0, ids)
    if highest is not None:
        above = f"input_ids holds an id above the tokenizer's highest, {highest}"
        check(above, ~real | (ids <= highest), ids)
    padding = f"input_ids holds something other than pad_token_id {pad} in padding"
    check(padding, real | (ids == pad), ids)
    if "attention_mask" in names:
        mask = rows_of(batch.column("attention_mask"))
        check("attention_mask differs from the boundaries", mask == real, mask, real.view(np.uint8))
    if "labels" in names:
        labels = rows_of(batch.column("labels"))
        ignored = labels == IGNORED
        check("labels holds neither the token nor -100", ignored | (labels == ids), labels, ids)
        is_later = ignored | (real & (position > 0))
        check("labels trains on padding or on a segment's first token", is_later, labels)
    if "position_ids" in names:
        stored, rule = rows_of(batch.column("position_ids")), "does not restart in every segment"
        check(f"position_ids {rule}", stored == position, stored, position)
    for column in limits.columns:
        if not column.is_of_segments:
            values = rows_of(batch.column(column.name))
            zeros = real | _every(column, values == 0)
            check(f"{column.name} holds something other than 0 in padding", zeros, values)
            for rule, holds in _value_rules(column, values):
                check(rule, holds, values)
    if of_segments := _broken_segments(batch, limits.columns):
        return [*broken, *of_segments]
    for column in limits.columns:
        if column.is_of_segments:
            values, edges = lists_of(batch, column.name)
            for rule, holds in _value_rules(column, values):
                broken += _violations_in_lists(rule, holds, edges, values)
    return broken


def broken_boundaries(batch: Any, limits: RowLimits) -> list[Violation]:
    """Check the rules that locate segments; much faster than all rules."""
    return _broken_places(batch, limits) or _broken_segments(batch, limits.columns)


def damage(batch: Any, packed: PackedDirectory) -> str:
    """Describe why a batch cannot be counted or taken apart; "" if it can."""
    broken = broken_boundaries(batch, RowLimits.of(packed.facts))
    return f"is damaged: {broken[0].rule}{broken[0].detail}" if broken else ""


def broken_sources(batch: Any, files: Int64) -> list[Violation]:
    """Check that segments, which match `cu_seqlens`, come from one of the inputs `files`."""
    file, position, start = sources_of(batch)
    edges = batch.column("segments").offsets.to_numpy()
    rules = (
        ("file is not an input of its unit", np.isin(file, files), file),
        ("position is negative", position >= 0, position),
        ("start is negative", start >= 0, start),
    )
    return [
        violation
        for name, holds, values in rules
        for violation in _violations_in_lists(f"segments: {name}", holds, edges - edges[0], values)
    ]


def _violations(
    rule: str, holds: _Flags, values: Any = None, expected: Any = None
) -> list[Violation]:
    """`holds` bool[rows], or bool[rows, max_length]; `values` and `expected` alike."""
    of_row = holds if holds.ndim == 1 else holds.all(1)
    wrong = np.flatnonzero(~of_row)
    if not len(wrong):
        return []
    row, text = int(wrong[0]), ""
    if holds.ndim == 2:
        place = int(np.argmin(holds[row]))
        text = f": place {place} has {values[row, place]}"
        if expected is not None:
            text += f", expected {expected[row, place]}"
    elif values is not None:
        text = f": {values[row]}"
    return [Violation(row, rule, text, len(wrong))]


def _violations_in_lists(rule: str, holds: _Flags, edges: Any, values: Any) -> list[Violation]:
    """`holds` and `values` [s], of lists that begin at edges[:-1]."""
    if holds.all():
        return []
    of_row = np.logical_and.reduceat(holds, edges[:-1])
    found = _violations(rule, of_row)
    return [one._replace(detail=f": {values[np.argmin(holds)]}") for one in found]


def _broken_places(batch: Any, limits: RowLimits) -> list[Violation]:
    """Check the boundaries by which segments are located."""
    broken, multiple = _broken_cu_seqlens(batch, limits), limits.segment_multiple
    if broken or (multiple == 1 and PADDED_BOUNDARIES not in batch.schema.names):
        return broken
    boundaries, edges = lists_of(batch, "cu_seqlens")
    places, edges_of_places = lists_of(batch, PADDED_BOUNDARIES)
    as_many = np.diff(edges_of_places) == np.diff(edges)
    if not as_many.all():
        return _violations(f"{PADDED_BOUNDARIES} does not match cu_seqlens", as_many)
    follows = np.diff(places, prepend=0) == padded(np.diff(boundaries, prepend=0), multiple)
    first, ends, most = places[edges[:-1]], places[edges[1:] - 1], limits.max_length
    name = f"{PADDED_BOUNDARIES} is not cu_seqlens in multiples of {multiple}"
    return [
        *_violations(f"{PADDED_BOUNDARIES} does not begin with 0", first == 0, first),
        *_violations(name, _but_first(follows, edges)),
        *_violations(f"{PADDED_BOUNDARIES} ends beyond {most}", ends <= most, ends),
    ]


def _broken_cu_seqlens(batch: Any, limits: RowLimits) -> list[Violation]:
    boundaries, edges = lists_of(batch, "cu_seqlens")
    sizes = np.diff(edges)
    if (sizes < 2).any():
        return _violations("cu_seqlens has fewer than two boundaries", sizes >= 2)
    first, used, most = boundaries[edges[:-1]], boundaries[edges[1:] - 1], limits.max_length
    increases = np.diff(boundaries, prepend=0) > 0
    broken = [
        *_violations("cu_seqlens does not begin with 0", first == 0, first),
        *_violations("cu_seqlens does not increase", _but_first(increases, edges)),
        *_violations(f"cu_seqlens ends outside 1..{most}", (used >= 1) & (used <= most), used),
    ]
    if limits.max_segments:
        name = f"cu_seqlens has more than {limits.max_segments} segments"
        broken += _violations(name, sizes - 1 <= limits.max_segments, sizes - 1)
    return broken


def _but_first(holds: _Flags, edges: Int64) -> _Flags:
    """Return bool[rows]: True if `holds` is for all values of a row but its first."""
    holds[edges[:-1]] = True
    of_row: _Flags = np.logical_and.reduceat(holds, edges[:-1])
    return of_row


def _positions(batch: Any, limits: RowLimits) -> tuple[Int32, _Flags]:
    """Return the tokens since each place's segment, or padding, began, and if it has a token."""
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


def _value_rules(column: ValueColumn, values: Any) -> Iterator[tuple[str, _Flags]]:
    """Yield (rule, where it holds) of a column's values, of tokens or of records."""
    if column.is_float:
        finite = np.isfinite(as_numbers(column, values))
        yield f"{column.name} holds a value that is not finite", _every(column, finite)
    if column.type == "bool":
        yield f"{column.name} holds neither 0 nor 1", _every(column, values <= 1)


def _every(column: ValueColumn, holds: _Flags) -> _Flags:
    """Reduce the K values of a token, or of a record, to one flag."""
    return holds if column.count is None else np.asarray(holds.all(-1))


def _broken_segments(batch: Any, columns: Sequence[ValueColumn]) -> list[Violation]:
    """Check how many values columns of segments have. The boundaries are valid."""
    expected = np.diff(segments_of(batch)[2])
    for name in ("segments", *(column.name for column in columns if column.is_of_segments)):
        if name in batch.schema.names:
            counts = np.diff(batch.column(name).offsets.to_numpy())
            if broken := _violations(
                f"{name} does not match cu_seqlens", counts == expected, counts
            ):
                return broken
    return []


# --- segments of rows, and documents of segments


def sources_of(batch: Any) -> Int64:
    """Return (file, position, start) of segments, int64[3, segments]; 0 in rows without them."""
    if "segments" not in batch.schema.names:
        return np.zeros((3, len(segments_of(batch)[0])), np.int64)
    parts = batch.column("segments").flatten().flatten()
    return np.stack([part.to_numpy().astype(np.int64) for part in parts])


def segments_in(batch: Any) -> Int64:
    """Return (file, position, start, length) of the segments of a batch, int64[4, segments]."""
    return np.concatenate([sources_of(batch), segments_of(batch)[1][None]])


class GroupedSegments(NamedTuple):
    """Segments of a unit, grouped to documents.

    order     int64[segments]: by input, position and start
    segments  int64[4, segments] in this order
    first     int64[documents + 1]: document d has the segments first[d] .. first[d + 1] of these
    """

    order: Int64
    segments: Int64
    first: Int64

    @property
    def tokens(self) -> Int64:
        """Tokens of each document in rows, int64[documents]."""
        tokens: Int64 = np.add.reduceat(self.segments[3], self.first[:-1])
        return tokens

    def expected_starts(self, *, whole: bool) -> Int64:
        """Return where each segment must start, int64[segments]; with `whole`, the first at 0."""
        _, _, start, length = self.segments
        first = self.first[:-1]
        expected: Int64 = np.roll(start + length, 1)
        expected[first] = 0 if whole else start[first]
        return expected


def documents_of(segments: Int64) -> GroupedSegments:
    """Group the segments of one unit to documents."""
    file, position, start, _ = segments
    order = np.lexsort((start, position, file))
    ordered = segments[:, order]
    begins = np.ones(len(order), bool)
    begins[1:] = (np.diff(ordered[:2]) != 0).any(0)
    return GroupedSegments(order, ordered, np.append(np.flatnonzero(begins), len(order)))


# --- documents of tokenized directories


def sound_batches(
    tokenized: TokenizedDirectory, number: int, highest: int | None = None
) -> Iterator[tuple[Any, Any]]:
    """Yield (batch, its part of the index) of shard `number`. `highest`: id of the tokenizer.

    Raises DataError for the first document that breaks a rule, or that differs from the index.
    """
    shard, first = tokenized.shards[number], 0
    inputs = len(tokenized.facts.inputs)
    index = pa.Table.from_batches(tokenized.index_batches(number)).combine_chunks()
    for batch in tokenized.stored(shard):
        indexed = index.slice(first, len(batch))
        for at, text in chain(
            _broken_documents(batch, highest, inputs, tokenized.value_columns.values()),
            _index_differences(batch, indexed, len(tokenized.facts.config.tiers)),
        ):
            raise tokenized.damaged(shard, f"document {first + at}: {text}")
        first += len(batch)
        yield batch, indexed


def _broken_documents(
    batch: Any, highest: int | None, inputs: int, columns: Iterable[ValueColumn]
) -> Iterator[tuple[int, str]]:
    """Yield (document, broken rule) of a batch, at most one of each kind."""
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
    for column in columns:
        yield from _broken_values(batch, column, offsets)
    if "trained" not in batch.schema.names:
        return
    edges, offsets = lists_of(batch, "trained")
    of = np.repeat(np.arange(len(lengths)), np.diff(offsets))
    for at in np.flatnonzero(np.diff(offsets) % 2)[:1].tolist():
        yield at, "its trained has an odd number of edges"
    outside = (edges < 0) | (edges > lengths[of])
    outside[:-1] |= (edges[1:] <= edges[:-1]) & (of[1:] == of[:-1])
    for at in of[outside][:1].tolist():
        first_edges = edges[offsets[at] : offsets[at + 1]][:6].tolist()
        yield at, f"its trained is {first_edges}, not ascending within its {lengths[at]} tokens"


def _broken_values(batch: Any, column: ValueColumn, offsets: Int64) -> Iterator[tuple[int, str]]:
    """Yield (document, broken rule of its values), at most one of each kind."""
    values, edges = values_in(batch, column), np.arange(len(offsets))
    if not column.is_of_segments:
        edges = lists_of(batch, column.name)[1]
        counts, lengths = np.diff(edges), np.diff(offsets)
        for at in np.flatnonzero(counts != lengths)[:1].tolist():
            yield at, f"has {counts[at]} values of {column.name}, and {lengths[at]} tokens"
    for rule, holds in _value_rules(column, values):
        for at in np.flatnonzero(~holds)[:1].tolist():
            yield int(np.searchsorted(edges, at, side="right")) - 1, f"{rule}: {values[at]}"


def _index_differences(batch: Any, index: Any, tiers: int) -> Iterator[tuple[int, str]]:
    """Yield (document, text) for differences of a batch from the index, one of each kind, and for
    a tier that is not one of as many as there are.
    """
    ids, offsets = lists_of(batch, "input_ids")
    counts = {"length": np.diff(offsets), "trained_tokens": _trained_tokens(batch)}
    for name, counted in counts.items():
        listed = index.column(name).to_numpy()
        for at in np.flatnonzero(counted != listed)[:1].tolist():
            yield at, f"its {name} is {counted[at]}, the index says {listed[at]}"
    if "tier" in index.schema.names:
        tier = index.column("tier").to_numpy()
        for at in np.flatnonzero(tier >= tiers)[:1].tolist():
            yield at, f"the index says that it is in tier {tier[at]}, there are {tiers} from 0 on"
    hashes = content_hashes(ids.view(np.uint32), offsets)
    stored = b"".join(index.column("content_hash").to_pylist())
    different = (hashes != np.frombuffer(stored, np.uint64).reshape(-1, 2)).any(axis=1)
    for at in np.flatnonzero(different)[:1].tolist():
        yield at, "its content_hash is not that of its tokens"


def labels_in(batch: Any) -> Int32 | None:
    """Return the labels int32[tokens] of valid documents; None if every token is trained on."""
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
