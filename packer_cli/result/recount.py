"""`stats --deep`: the manifest's figures counted again from the shards alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import UNSET
from msgspec.structs import asdict

from packer_cli.config.columns import PAIR
from packer_cli.errors import DataError
from packer_cli.packing.attention_cost import AttentionCost
from packer_cli.packing.lower_bound import lower_bound_rows
from packer_cli.packing.pairs import item_lengths
from packer_cli.records import IGNORED, Int64
from packer_cli.result import document_rules
from packer_cli.result.counts import Counts, fill_histogram, powers_histogram
from packer_cli.result.document_rules import sound_batches
from packer_cli.result.documents import Documents, documents_of, segments_in, sources_of
from packer_cli.result.opening import Paths, open_packed
from packer_cli.result.reader import (
    PackedDirectory,
    metadata_of,
    rows_of,
    segments_of,
)
from packer_cli.result.rules import RowLimits, broken_boundaries, broken_last_labels
from packer_cli.result.shards import Shard
from packer_cli.result.tokenized import AGAIN, open_tokenized


def check_recount(directory: Path, tokens: Paths | None = None) -> None:
    """Raise DataError naming every figure in which shards and manifest differ. `tokens`: as in
    `open_packed`.

    Figures that need a column which was not written (labels, segments) are left out.
    """
    packed = open_packed(directory, tokens)
    counts = Counts()
    for shards in packed.facts.shards_of_units():
        parts = [part for shard in shards for part in _count_shard(packed, shard, counts)]
        if parts and "segments" in packed.facts.config.columns:
            documents = documents_of(np.concatenate(parts, axis=1))
            count_documents(documents, counts, packed.max_length)
    wrong = differences(counts, packed)
    if wrong:
        raise DataError(
            f"{directory}: the shards and the manifest differ: {'; '.join(wrong)}",
            "pack the data again with --overwrite",
        )


def check_document_recount(directory: Path) -> None:
    """The same of a tokenized directory, whose documents must agree with their index besides."""
    tokenized, counts = open_tokenized(directory), Counts()
    for number in range(len(tokenized.shards)):
        for batch, index in sound_batches(tokenized, number):
            document_rules.count_documents(batch, index, counts)
    wrong = document_rules.document_differences(counts, tokenized.facts)
    if wrong:
        raise DataError(
            f"{directory}: the shards and the manifest differ: {'; '.join(wrong)}", AGAIN
        )


def differences(counts: Counts, packed: PackedDirectory) -> list[str]:
    """Every figure in which what was counted and the manifest differ."""
    facts = packed.facts
    names = facts.config.columns
    counted: dict[str, Any] = {
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
        counted["trained_tokens"] = counts.trained_tokens
    if facts.histograms.one_length:
        counted["length_squares"] = counts.length_squares
        counted["length_squares_in_rows"] = counts.length_squares_in_rows
        counted["one_length"] = counts.one_length.tolist()
        if "segments" in names:
            counted["one_input"] = counts.one_input.tolist()
    if "segments" in names:
        counted["documents"] = counts.documents
        counted["unpacked_rows"] = counts.unpacked_rows
        counted["document_length"] = counts.document_length.tolist()
    expected = asdict(facts) | asdict(facts.histograms)
    if facts.attention_cost is not UNSET:
        counted["attention_cost"] = counts.attention_after.as_json()
        expected["attention_cost"] = asdict(facts.attention_cost.after)
    return [
        f"{name}: {value} in the shards, {expected[name]} in the manifest"
        for name, value in counted.items()
        if expected[name] != value
    ]


def _count_shard(packed: PackedDirectory, shard: Shard, counts: Counts) -> Iterator[Int64]:
    """Add a shard's rows to `counts`; gives their segments, see `documents`."""
    for batch in packed.batches(shard):
        if problem := damage(batch, packed):
            raise DataError(
                f"{packed.path / shard.file}: {problem}",
                "copy the directory again, or pack the data again with --overwrite",
            )
        counts.add(count_rows(batch, packed.max_length))
        if "segments" in batch.schema.names:
            yield segments_in(batch)


def count_rows(batch: Any, max_length: int) -> Counts:
    """The counts of a sound batch of rows."""
    _, length, offsets = segments_of(batch)
    used = np.add.reduceat(length, offsets[:-1])
    whole = length
    if PAIR in batch.schema.names:
        begins = np.diff(batch.column(PAIR).flatten().to_numpy(), prepend=-1) != 0
        begins[offsets[:-1]] = True
        whole = item_lengths(length, begins)
    counts = Counts(
        rows=batch.num_rows,
        segments=len(length),
        tokens=int(used.sum()),
        row_fill=fill_histogram(used, max_length),
        segments_per_row=powers_histogram(np.diff(offsets)),
        attention_after=AttentionCost.of(length, offsets),
        piece_length=np.bincount(whole, minlength=max_length + 1).astype(np.int64),
    )
    counts.add_mixedness(length, sources_of(batch)[0], offsets)
    if "labels" in batch.schema.names:
        labels = rows_of(batch.column("labels"))
        counts.trained_tokens = int(np.count_nonzero(labels != IGNORED))
    return counts


def damage(batch: Any, packed: PackedDirectory) -> str:
    """What makes a batch impossible to count or to take apart; "" for nothing."""
    names = packed.facts.config.columns
    if batch.schema.names != names:
        return f"has the columns {', '.join(batch.schema.names)}, not {', '.join(names)}"
    content = metadata_of(batch.schema)
    stated = content.get("label_shift", "none"), content.get("segment_multiple", 1)
    if stated != (packed.label_shift, packed.segment_multiple):
        return "says another label_shift or segment_multiple than the manifest"
    limits = RowLimits.of(packed.facts)
    broken = broken_boundaries(batch, limits) or broken_last_labels(batch, limits)
    return f"is damaged: {broken[0].rule}{broken[0].detail}" if broken else ""


def count_documents(documents: Documents, counts: Counts, max_length: int) -> None:
    """Add the documents of a unit."""
    tokens = documents.tokens
    counts.documents += len(tokens)
    counts.unpacked_rows += int((-(-tokens // max_length)).sum())
    counts.document_length += powers_histogram(tokens)
