"""`stats --deep`: the manifest's figures counted again from the shards alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from msgspec import UNSET
from msgspec.structs import asdict

from packer_cli.config.options import PADDED_BOUNDARIES
from packer_cli.errors import DataError
from packer_cli.packing.attention_cost import AttentionCost
from packer_cli.packing.fitting import padded
from packer_cli.packing.lower_bound import lower_bound_rows
from packer_cli.records import IGNORED, Int64
from packer_cli.result.counts import Counts, fill_histogram, powers_histogram
from packer_cli.result.reader import PackedDirectory, open_packed, ragged_of, rows_of, segments_of
from packer_cli.result.shards import Shard


def check_recount(directory: Path) -> None:
    """Raise DataError naming every figure in which shards and manifest differ.

    Figures that need a column which was not written (labels, segments) are left out.
    """
    packed = open_packed(directory)
    counts = Counts()
    for shards in packed.facts.shards_of_units():
        parts = [part for shard in shards for part in _count_shard(packed, shard, counts)]
        if parts and "segments" in packed.facts.config.columns:
            count_documents(np.concatenate(parts, axis=1), counts, packed.max_length)
    wrong = differences(counts, packed)
    if wrong:
        raise DataError(
            f"{directory}: the shards and the manifest differ: {'; '.join(wrong)}",
            "pack the data again with --overwrite",
        )


def differences(counts: Counts, packed: PackedDirectory) -> list[str]:
    """Every figure in which what was counted and the manifest differ."""
    facts = packed.facts
    names = facts.config.columns
    found: dict[str, Any] = {
        "rows": counts.rows,
        "segments": counts.segments,
        "tokens": counts.tokens,
        "padding_tokens": counts.rows * packed.max_length - counts.tokens,
        "utilization": counts.tokens / max(counts.rows * packed.max_length, 1),
        "lower_bound_rows": lower_bound_rows(
            counts.piece_length,
            packed.max_length,
            max_segments=packed.max_segments_per_row,
            segment_multiple=packed.segment_multiple,
        ),
        "row_fill": counts.row_fill.tolist(),
        "segments_per_row": counts.segments_per_row.tolist(),
    }
    if "labels" in names:
        found["trained_tokens"] = counts.trained_tokens
    if "segments" in names:
        found["documents"] = counts.documents
        found["unpacked_rows"] = counts.unpacked_rows
        found["document_length"] = counts.document_length.tolist()
    expected = asdict(facts) | asdict(facts.histograms)
    if facts.attention_cost is not UNSET:
        found["attention_cost"] = counts.attention_after.as_json()
        expected["attention_cost"] = asdict(facts.attention_cost.after)
    return [
        f"{name}: {value} in the shards, {expected[name]} in the manifest"
        for name, value in found.items()
        if expected[name] != value
    ]


def _count_shard(packed: PackedDirectory, shard: Shard, counts: Counts) -> Iterator[Int64]:
    """Add a shard's rows to `counts`; gives int64[3, segments]: file, position, length."""
    for batch in packed.batches(shard):
        if problem := damage(batch, packed):
            raise DataError(
                f"{packed.path / shard.file}: {problem}",
                "copy the directory again, or pack the data again with --overwrite",
            )
        _, length, _ = segments_of(batch)
        counts.add(count_rows(batch, packed.max_length))
        if "segments" in batch.schema.names:
            segments = batch.column("segments").values
            file, position = (segments.field(i).to_numpy() for i in (0, 1))
            yield np.stack([file.astype(np.int64), position, length])


def count_rows(batch: Any, max_length: int) -> Counts:
    """The counts of a sound batch of rows."""
    _, length, offsets = segments_of(batch)
    used = np.add.reduceat(length, offsets[:-1])
    counts = Counts(
        rows=batch.num_rows,
        segments=len(length),
        tokens=int(used.sum()),
        row_fill=fill_histogram(used, max_length),
        segments_per_row=powers_histogram(np.diff(offsets)),
        attention_after=AttentionCost.of(length, offsets),
        piece_length=np.bincount(length, minlength=max_length + 1).astype(np.int64),
    )
    if "labels" in batch.schema.names:
        labels = rows_of(batch.column("labels"))
        counts.trained_tokens = int(np.count_nonzero(labels != IGNORED))
    return counts


def damage(batch: Any, packed: PackedDirectory) -> str:
    """What makes a batch impossible to count; "" for nothing."""
    names = packed.facts.config.columns
    if batch.schema.names != names:
        return f"has the columns {', '.join(batch.schema.names)}, not {', '.join(names)}"
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        return f"is damaged: {error}"
    said = json.loads((batch.schema.metadata or {}).get(b"packer", b"{}"))
    found = said.get("label_shift", "none"), said.get("segment_multiple", 1)
    if found != (packed.label_shift, packed.segment_multiple):
        return "says another label_shift or segment_multiple than the manifest"
    boundaries, edges = ragged_of(batch.column("cu_seqlens"))
    broken = f"is damaged: a row of cu_seqlens does not go up from 0 to {packed.max_length}"
    if (np.diff(edges) < 2).any():
        return broken
    starts, length = boundaries[edges[:-1]], np.delete(np.diff(boundaries), edges[1:-1] - 1)
    most = boundaries.max(initial=0)
    if starts.any() or (length < 1).any() or most > packed.max_length:
        return broken
    limit = packed.max_segments_per_row
    if limit and (np.diff(edges) - 1 > limit).any():
        return f"has a row of more than {limit} segments"
    if packed.segment_multiple > 1:
        places, place_edges = ragged_of(batch.column(PADDED_BOUNDARIES))
        if not np.array_equal(place_edges, edges):
            return f"is damaged: {PADDED_BOUNDARIES} does not match cu_seqlens"
        taken, steps = padded(np.diff(boundaries), packed.segment_multiple), np.diff(places)
        within = np.delete(taken == steps, edges[1:-1] - 1)
        if places[edges[:-1]].any() or not within.all() or places.max() > packed.max_length:
            return f"is damaged: {PADDED_BOUNDARIES} is not cu_seqlens with its padding"
    if "segments" in names and len(batch.column("segments").values) != len(length):
        return "is damaged: segments does not match cu_seqlens"
    if packed.label_shift == "pre" and "labels" in names:
        begin, length, of_row = segments_of(batch)
        row_of = np.repeat(np.arange(batch.num_rows), np.diff(of_row))
        if (rows_of(batch.column("labels"))[row_of, begin + length - 1] != IGNORED).any():
            return "is damaged: a segment's last label is of another segment"
    return ""


def count_documents(segments: Int64, counts: Counts, max_length: int) -> None:
    """Add the documents of a unit's segments, int64[3, segments]: file, position, length."""
    file, position, length = segments
    order = np.lexsort((position, file))
    changes = (np.diff(file[order]) != 0) | (np.diff(position[order]) != 0)
    begins = np.concatenate([[0], np.flatnonzero(changes) + 1])
    lengths = np.add.reduceat(length[order], begins)
    counts.documents += len(lengths)
    counts.unpacked_rows += int((-(-lengths // max_length)).sum())
    counts.document_length += powers_histogram(lengths)
