"""What every packed row must satisfy, written once: for packer verify, stats, show and export, and
for the tests, which hold every result to it.

cu_seqlens      0 first, increasing, at most max_length last, at most max_segments steps
cu_seqlens_padded  with a segment multiple: 0 first, each step that of cu_seqlens rounded up to
                the multiple, at most max_length last
segments        as many as boundaries less one, each of an input of its unit
attention_mask  1 in segments, 0 in padding
input_ids       >= 0; pad_token_id in padding
labels          the token or -100; -100 on padding and on each segment's first token; with
                label_shift "pre" all one place earlier
position_ids    restart at 0 in every segment, go on in its padding, restart in the row's
pair, side      see `pair_rules.py`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from packer_cli.config.columns import PADDED_BOUNDARIES
from packer_cli.packing.fitting import padded
from packer_cli.records import IGNORED, Int32, Int64
from packer_cli.result.documents import sources_of
from packer_cli.result.manifest import Manifest
from packer_cli.result.pair_rules import broken_pairs
from packer_cli.result.reader import ragged_of, rows_of, segments_of

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
    """The values that rules depend on. `highest_id`: the tokenizer's, None when not known."""

    max_length: int
    pad_token_id: int
    max_segments: int | None = None
    segment_multiple: int = 1
    label_shift: str = "none"
    highest_id: int | None = None

    @classmethod
    def of(cls, facts: Manifest, highest_id: int | None = None) -> RowLimits:
        config = facts.config
        return cls(
            config.max_length, facts.pad_token_id, config.max_segments_per_row,
            config.segment_multiple, config.label_shift, highest_id,
        )  # fmt: skip


def broken_rules(batch: Any, limits: RowLimits) -> list[Broken]:
    """All rules but those of where segments come from: see `broken_sources`."""
    broken = broken_cu_seqlens(batch, limits) or _cu_seqlens_padded(batch, limits)
    if broken:  # segments cannot be located
        return broken
    places = _places(batch, limits)
    names = batch.schema.names
    return [
        *_input_ids(places, limits),
        *(_attention_mask(batch, places) if "attention_mask" in names else ()),
        *(_labels(batch, places, limits) if "labels" in names else ()),
        *(_position_ids(batch, places) if "position_ids" in names else ()),
        *(_segments(batch) if "segments" in names else ()),
        *_pairs(batch),
    ]


def broken_boundaries(batch: Any, limits: RowLimits) -> list[Broken]:
    """The broken rules that prevent taking segments out of rows; much faster than all rules."""
    return (
        broken_cu_seqlens(batch, limits)
        or _cu_seqlens_padded(batch, limits)
        or (_segments(batch) if "segments" in batch.schema.names else [])
        or _pairs(batch)
    )


def broken_sources(batch: Any, files: Int64) -> list[Broken]:
    """The broken rules of where segments come from. `files`: the inputs that are possible.

    `segments` must match `cu_seqlens`.
    """
    file, position, start = sources_of(batch)
    edges = batch.column("segments").offsets.to_numpy()
    first = edges[:-1] - edges[0]
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
            np.logical_and.reduceat(holds, first),
            example=values[np.argmin(holds)],
        )
    ]


def broken_last_labels(batch: Any, limits: RowLimits) -> list[Broken]:
    """The rule of shifted labels: none in a segment's last place, where it would be another's."""
    if limits.label_shift != "pre" or "labels" not in batch.schema.names:
        return []
    begin, length, of_row = segments_of(batch)
    row_of = np.repeat(np.arange(batch.num_rows), np.diff(of_row))
    last = rows_of(batch.column("labels"))[row_of, begin + length - 1]
    holds = np.logical_and.reduceat(last == IGNORED, of_row[:-1])
    return _broken("labels has one of another segment at a segment's end", holds)


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


def _own(column: Any) -> tuple[Int32, Int64]:
    """(values, offsets from 0) of a list column: those of the batch's own rows."""
    values, edges = ragged_of(column)
    return values[edges[0] : edges[-1]], (edges - edges[0]).astype(np.int64)


def broken_cu_seqlens(batch: Any, limits: RowLimits) -> list[Broken]:
    """The broken rules of `cu_seqlens`, which the batches that a view stores have, too."""
    boundaries, edges = _own(batch.column("cu_seqlens"))
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


def _cu_seqlens_padded(batch: Any, limits: RowLimits) -> list[Broken]:
    multiple, most = limits.segment_multiple, limits.max_length
    if multiple == 1 and PADDED_BOUNDARIES not in batch.schema.names:
        return []
    boundaries, edges = _own(batch.column("cu_seqlens"))
    places, own_edges = _own(batch.column(PADDED_BOUNDARIES))
    as_many = np.diff(own_edges) == np.diff(edges)
    if not as_many.all():
        return _broken(f"{PADDED_BOUNDARIES} does not match cu_seqlens", as_many)
    follows = np.diff(places, prepend=0) == padded(np.diff(boundaries, prepend=0), multiple)
    first, ends = places[edges[:-1]], places[edges[1:] - 1]
    name = f"{PADDED_BOUNDARIES} is not cu_seqlens in multiples of {multiple}"
    return [
        *_broken(f"{PADDED_BOUNDARIES} does not begin with 0", first == 0, first),
        *_broken(name, _but_first(follows, edges)),
        *_broken(f"{PADDED_BOUNDARIES} ends beyond {most}", ends <= most, ends),
    ]


def _but_first(holds: _Flags, edges: Int64) -> _Flags:
    """bool[rows]: whether it holds for all values of a row but its first."""
    holds[edges[:-1]] = True
    of_row: _Flags = np.logical_and.reduceat(holds, edges[:-1])
    return of_row


def _segments(batch: Any) -> list[Broken]:
    counts, boundaries = (
        np.diff(batch.column(name).offsets.to_numpy()) for name in ("segments", "cu_seqlens")
    )
    return _broken("segments does not match cu_seqlens", counts == boundaries - 1, counts)


def _pairs(batch: Any) -> list[Broken]:
    return [one for rule, holds in broken_pairs(batch) for one in _broken(rule, holds)]


class _Places(NamedTuple):
    """What the boundaries say about each place, [rows, max_length].

    restarts  bool, where a segment or the row's padding begins
    position  since then, in tokens
    real      bool, whether there is a token
    """

    ids: Int32
    restarts: _Flags
    position: Int32
    real: _Flags


def _places(batch: Any, limits: RowLimits) -> _Places:
    rows, length = batch.num_rows, limits.max_length
    name = PADDED_BOUNDARIES if PADDED_BOUNDARIES in batch.schema.names else "cu_seqlens"
    begin, edges = _own(batch.column(name))
    last = edges[1:] - 1  # where a row's padding begins
    end = np.append(begin[1:], 0)
    end[last] = length
    tokens = np.zeros(len(begin), np.int32)
    tokens[np.delete(np.arange(len(begin)), last)] = segments_of(batch)[1]
    lengths, shape = end - begin, (rows, length)
    position = np.arange(length, dtype=np.int32) - np.repeat(begin, lengths).reshape(shape)
    real = position < np.repeat(tokens, lengths).reshape(shape)
    restarts = position == 0
    return _Places(rows_of(batch.column("input_ids")), restarts, position, real)


def _input_ids(places: _Places, limits: RowLimits) -> list[Broken]:
    ids, pad, highest = places.ids, limits.pad_token_id, limits.highest_id
    broken = _broken("input_ids holds a negative id", ids >= 0, ids)
    if highest is not None:
        name = f"input_ids holds an id above the tokenizer's highest, {highest}"
        broken += _broken(name, ~places.real | (ids <= highest), ids)
    name = f"input_ids holds something other than pad_token_id {pad} in padding"
    return broken + _broken(name, places.real | (ids == pad), ids)


def _attention_mask(batch: Any, places: _Places) -> list[Broken]:
    mask, real = rows_of(batch.column("attention_mask")), places.real
    name = "attention_mask differs from the boundaries"
    return _broken(name, mask == real, mask, real.view(np.uint8))


def _labels(batch: Any, places: _Places, limits: RowLimits) -> list[Broken]:
    labels, broken = rows_of(batch.column("labels")), list[Broken]()
    if limits.label_shift == "pre":  # back to the tokens that they are of
        last = labels[:, -1]
        broken = _broken("labels trains on what follows the row", last == IGNORED, last)
        labels = np.concatenate([np.full((len(labels), 1), IGNORED), labels[:, :-1]], axis=1)
    ignored = labels == IGNORED
    of_token, ids = ignored | (labels == places.ids), places.ids
    broken += _broken("labels holds neither the token nor -100", of_token, labels, ids)
    trainable = ignored | (places.real & ~places.restarts)
    name = "labels trains on padding or on a segment's first token"
    return broken + _broken(name, trainable, labels)


def _position_ids(batch: Any, places: _Places) -> list[Broken]:
    ids, position = rows_of(batch.column("position_ids")), places.position
    name = "position_ids does not restart in every segment"
    return _broken(name, ids == position, ids, position)
