"""`packer show`: rows located in the shards and taken apart. Drawing: `text.py`.

Reads the manifest and the mapped pages of the requested rows, so it is instant on any size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packer_cli.errors import DataError, UsageError
from packer_cli.records import IGNORED, Int32
from packer_cli.result.documents import Side, sides_in, sources_of
from packer_cli.result.manifest import Manifest
from packer_cli.result.origins import Origin, Origins, origin_as_json
from packer_cli.result.reader import PACK_AGAIN, PackedDirectory, metadata_of, rows_of, segments_of
from packer_cli.result.rules import RowLimits, broken_boundaries, broken_sources
from packer_cli.tokenization.decoding import Decoder

_ROWS = re.compile(r"(-?\d+)(?:-(-?\d+))?", re.ASCII)


@dataclass(frozen=True)
class Segment:
    """One segment of a row.

    origin   None when the column segments was not written
    ids      int32[tokens]
    trained  bool[tokens], or None when the column labels was not written
    side     of its pair; None where records are not of preference
    """

    index: int
    origin: Origin | None
    ids: Int32
    trained: npt.NDArray[np.bool_] | None
    side: Side | None = None

    def trained_tokens(self) -> int | None:
        return None if self.trained is None else int(np.count_nonzero(self.trained))


@dataclass(frozen=True)
class Row:
    """A row, its number over all shards and in its shard, and its positions without a token."""

    index: int
    shard: str
    shard_row: int
    segments: list[Segment]
    padding: int


@dataclass(frozen=True)
class Span:
    """Tokens next to each other that are all trained or all not, all special or all not."""

    ids: list[int]
    text: str
    trained: bool | None
    special: bool


def parse_rows(texts: list[str], rows: int, what: str = "row") -> Iterator[int]:
    """Row numbers from "7", "-1" (the last) and "3-5". UsageError if there is no such row.

    `what`: they may be those of documents.
    """
    ranges = []
    for text in texts:
        match = _ROWS.fullmatch(text)
        if not match:
            raise UsageError(
                f"ROW: {text!r} is not a {what} number",
                f"{what}s are written like 7, -1 (the last) or 3-5; options: packer show --help",
            )
        numbers = [int(number) for number in match.groups() if number is not None]
        for number in numbers:
            if not -rows <= number < rows:
                raise UsageError(
                    f"ROW: {text}: there is no {what} {number}, only 0 to {rows - 1}",
                    f"{what}s count from 0 over all shards, negative ones from the end",
                )
        first, last = numbers[0] % rows, numbers[-1] % rows
        if first > last:
            raise UsageError(f"ROW: {text}: ends before it begins", "write the lower row first")
        ranges.append(range(first, last + 1))
    return (row for chosen in ranges for row in chosen)


def pick(row: Row, segment: int) -> Segment:
    """One segment of a row; negative numbers count from the end. UsageError if there is none."""
    count = len(row.segments)
    if not -count <= segment < count:
        raise UsageError(
            f"--segment: {segment} is not in row {row.index}, which has 0 to {count - 1}",
            "segments count from 0, negative ones from the end",
        )
    return row.segments[segment]


def read_row(packed: PackedDirectory, index: int, origins: Origins | None = None) -> Row:
    """Find a row and take it apart. DataError when its shard is missing or damaged."""
    shard, shard_row = packed.find(index)
    origins = origins or Origins(packed.facts)
    try:
        batch = packed.take(np.array([index]))
        segments = list(_segments(batch, packed.facts, origins))
    except (ValueError, KeyError, pa.ArrowException) as error:
        place = f"{packed.path / shard.file}: row {shard_row}"
        reason = str(error).removeprefix(f"row {index}: ")  # it has another number in its shard
        raise DataError(f"{place}: is damaged: {reason}", PACK_AGAIN) from error
    used = sum(len(segment.ids) for segment in segments)
    return Row(index, shard.file, shard_row, segments, packed.max_length - used)


def _segments(batch: Any, manifest: Manifest, origins: Origins) -> Iterator[Segment]:
    """The segments of a batch of one row. Raises ValueError for a row that breaks a rule."""
    has_sources = "segments" in batch.schema.names
    broken = broken_boundaries(batch, RowLimits.of(manifest))
    if not broken and has_sources:
        broken = broken_sources(batch, np.arange(len(manifest.inputs)))
    if broken:
        raise ValueError(f"{broken[0].rule}{broken[0].detail}")
    ids, trained = rows_of(batch.column("input_ids"))[0], _trained(batch)
    shift = metadata_of(batch.schema).get("label_shift")
    begins, lengths, _ = segments_of(batch)
    places: list[Any] = origins.of(sources_of(batch)) if has_sources else []
    sides: list[Any] = sides_in(batch)
    for index, (begin, end) in enumerate(zip(begins, begins + lengths, strict=True)):
        if trained is None:
            flags = None
        elif shift == "pre":  # a label stands where its token is predicted
            flags = np.concatenate([[False], trained[begin : end - 1]])
        else:
            flags = trained[begin:end]
        origin, side = (some[index] if some else None for some in (places, sides))
        yield Segment(index, origin, ids[begin:end], flags, side)


def _trained(batch: Any) -> npt.NDArray[np.bool_] | None:
    if "labels" not in batch.schema.names:
        return None
    trained: npt.NDArray[np.bool_] = rows_of(batch.column("labels"))[0] != IGNORED
    return trained


def spans_of(segment: Segment, decoder: Decoder | None) -> list[Span]:
    """The segment cut where trained or special changes; texts are "" without a decoder."""
    ids = segment.ids
    different, which = np.unique(ids, return_inverse=True)
    names = [decoder.special(token) if decoder else None for token in different.tolist()]
    special = np.array([name is not None for name in names])[which]
    changes = special[1:] != special[:-1]
    if segment.trained is not None:
        changes = changes | (segment.trained[1:] != segment.trained[:-1])
    name_of = dict(zip(different.tolist(), names, strict=True))
    cuts = [0, *(np.flatnonzero(changes) + 1).tolist(), len(ids)]
    spans = []
    for begin, end in pairwise(cuts):
        tokens = ids[begin:end].tolist()
        if decoder is None:
            text = ""
        elif special[begin]:
            text = "".join(str(name_of[token]) for token in tokens)
        else:
            text = decoder.decode(tokens, int(ids[begin - 1]) if begin else None)
        trained = None if segment.trained is None else bool(segment.trained[begin])
        spans.append(Span(tokens, text, trained, bool(special[begin])))
    return spans


def row_as_json(row: Row, segments: list[Segment], decoder: Decoder | None) -> str:
    """One JSON object on one line; without a decoder, with ids instead of text."""
    return json.dumps(
        {
            "row": row.index,
            "shard": row.shard,
            "shard_row": row.shard_row,
            "segments": [_segment_as_json(segment, decoder) for segment in segments],
            "padding": row.padding,
        }
    )


def _segment_as_json(segment: Segment, decoder: Decoder | None) -> dict[str, Any]:
    of_pair = {"pair": segment.side.pair, "side": str(segment.side)} if segment.side else {}
    return {"segment": segment.index} | of_pair | content_as_json(segment, decoder)


def content_as_json(segment: Segment, decoder: Decoder | None) -> dict[str, Any]:
    """Where a segment came from, and what it holds."""
    whole = spans_of(Segment(segment.index, None, segment.ids, None), decoder)
    spans: list[dict[str, Any]] = []
    for trained, group in groupby(spans_of(segment, decoder), key=lambda span: span.trained):
        run = list(group)
        content: dict[str, Any] = (
            {"text": "".join(span.text for span in run)}
            if decoder
            else {"ids": [token for span in run for token in span.ids]}
        )
        spans.append(content | {"trained": trained})
    return {
        **origin_as_json(segment.origin),
        "tokens": len(segment.ids),
        "trained_tokens": segment.trained_tokens(),
        "text": "".join(span.text for span in whole) if decoder else None,
        "spans": spans,
    }
