"""A result's figures counted again from its shards alone, for `stats --deep` and packer verify; and
what the documents of a tokenized directory and their index must satisfy.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec import UNSET
from msgspec.structs import asdict

from packer_cli.errors import DataError
from packer_cli.options.options import PAIR
from packer_cli.packing.figures import AttentionCost, lower_bound_rows
from packer_cli.packing.fitting import item_lengths
from packer_cli.records import IGNORED, Int64
from packer_cli.result.counts import Counts, fill_histogram, powers_histogram
from packer_cli.result.manifest import DocumentHistograms, TokenizedManifest
from packer_cli.result.opening import Paths, open_packed
from packer_cli.result.reader import PACK_AGAIN, PackedDirectory, rows_of, segments_of
from packer_cli.result.rules import (
    Documents,
    RowLimits,
    broken_boundaries,
    broken_last_labels,
    documents_of,
    segments_in,
    sources_of,
)
from packer_cli.result.shard_writer import content_hashes
from packer_cli.result.tokenized import AGAIN, TokenizedDirectory, open_tokenized


def check_recount(directory: Path, tokens: Paths | None = None) -> None:
    """Raise DataError naming every figure in which shards and manifest differ. `tokens`: as in
    `open_packed`.

    Figures that need a column which was not written (labels, segments) are left out.
    """
    packed = open_packed(directory, tokens)
    counts, has_segments = Counts(), "segments" in packed.facts.config.columns
    for shards in packed.facts.shards_of_units():
        segments = list[Int64]()
        for shard in shards:
            for batch in packed.batches(shard):
                if problem := damage(batch, packed):
                    raise DataError(f"{packed.path / shard.file}: {problem}", PACK_AGAIN)
                counts.add(count_rows(batch, packed.max_length))
                segments += [segments_in(batch)] if has_segments else []
        if segments:
            documents = documents_of(np.concatenate(segments, axis=1))
            count_documents(documents, counts, packed.max_length)
    _raise_for(directory, differences(counts, packed), "pack the data again with --overwrite")


def check_document_recount(directory: Path) -> None:
    """Recount a tokenized directory, whose documents must agree with their index besides."""
    tokenized, counts = open_tokenized(directory), Counts()
    for number in range(len(tokenized.shards)):
        for batch, index in sound_batches(tokenized, number):
            count_tokenized(batch, index, counts)
    _raise_for(directory, document_differences(counts, tokenized.facts), AGAIN)


def _raise_for(directory: Path, wrong: list[str], tip: str) -> None:
    if wrong:
        raise DataError(f"{directory}: the shards and the manifest differ: {'; '.join(wrong)}", tip)


def differences(counts: Counts, packed: PackedDirectory) -> list[str]:
    """Every figure in which what was counted and the manifest differ."""
    facts = packed.facts
    names = facts.config.columns
    places = counts.rows * packed.max_length
    counted: dict[str, Any] = {
        "rows": counts.rows,
        "segments": counts.segments,
        "tokens": counts.tokens,
        "padding_tokens": places - counts.tokens,
        "utilization": counts.tokens / max(places, 1),
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
    return _different((name, value, expected[name]) for name, value in counted.items())


def _different(figures: Iterator[tuple[str, Any, Any]]) -> list[str]:
    return [
        f"{name}: {value} in the shards, {listed} in the manifest"
        for name, value, listed in figures
        if value != listed
    ]


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
    limits = RowLimits.of(packed.facts)
    broken = broken_boundaries(batch, limits) or broken_last_labels(batch, limits)
    return f"is damaged: {broken[0].rule}{broken[0].detail}" if broken else ""


def count_documents(documents: Documents, counts: Counts, max_length: int) -> None:
    """Add the documents of a unit."""
    tokens = documents.tokens
    counts.documents += len(tokens)
    counts.unpacked_rows += int((-(-tokens // max_length)).sum())
    counts.document_length += powers_histogram(tokens)


def sound_batches(
    tokenized: TokenizedDirectory, number: int, highest: int | None = None
) -> Iterator[tuple[Any, Any]]:
    """(batch, the same documents' part of the index) of shard `number`.

    Raises DataError for the first document that breaks a rule, or that the index has otherwise.
    """
    shard, first = tokenized.shards[number], 0
    path, inputs = tokenized.path / shard.file, len(tokenized.facts.inputs)
    index = pa.Table.from_batches(tokenized.index_batches(number)).combine_chunks()
    for batch in tokenized.batches(shard):
        own = index.slice(first, len(batch))
        for at, text in chain(_broken_documents(batch, highest, inputs), _other_index(batch, own)):
            raise DataError(f"{path}: document {first + at}: {text}", AGAIN)
        first += len(batch)
        yield batch, own
    if first != shard.rows:
        raise DataError(f"{path}: holds {first} documents, the manifest says {shard.rows}", AGAIN)


def _broken_documents(batch: Any, highest: int | None, inputs: int) -> Iterator[tuple[int, str]]:
    """(document, what is wrong with it) of a batch, at most one of each kind.

    highest  the highest id there may be; None where that is not known
    inputs   how many inputs there are
    """
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        inner = column.values if isinstance(column, pa.ListArray) else column
        if inner.null_count or (column.null_count and name != "trained"):
            yield 0, "a null in its shard"
            return
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
    if "chosen" in batch.schema.names:
        chosen = batch.column("chosen").to_numpy()
        for at in np.flatnonzero((chosen < 0) | (chosen > lengths))[:1].tolist():
            yield at, f"its chosen side has {chosen[at]} of {lengths[at]} tokens"
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


def _other_index(batch: Any, index: Any) -> Iterator[tuple[int, str]]:
    """(document, text) where a batch and its part of the index differ, one of each kind."""
    ids, offsets = lists_of(batch, "input_ids")
    made = {"length": np.diff(offsets), "trained_tokens": _trained_tokens(batch)}
    if "chosen" in batch.schema.names:
        made["chosen"] = batch.column("chosen").to_numpy()
    for name, own in made.items():
        listed = index.column(name).to_numpy()
        if len(own) != len(listed):
            yield 0, f"its index has {len(listed)} of {len(own)} documents"
            return
        for at in np.flatnonzero(own != listed)[:1].tolist():
            yield at, f"its {name} is {own[at]}, the index says {listed[at]}"
    hashes = content_hashes(ids.view(np.uint32), offsets, made.get("chosen"))
    stored = b"".join(index.column("content_hash").to_pylist())
    different = (hashes != np.frombuffer(stored, np.uint64).reshape(-1, 2)).any(axis=1)
    for at in np.flatnonzero(different)[:1].tolist():
        yield at, "its content_hash is not that of its tokens"


def lists_of(batch: Any, name: str) -> tuple[Any, Any]:
    """(values, offsets int64[documents + 1] into them) of a list column, without a copy."""
    column = batch.column(name)
    offsets = column.offsets.to_numpy().astype(np.int64)
    values = column.values.to_numpy()[offsets[0] : offsets[-1]] if len(offsets) else np.empty(0)
    return values, offsets - offsets[:1]


def trained_flags(batch: Any) -> npt.NDArray[np.bool_]:
    """bool[tokens] of a batch whose stretches are sound: what is trained on."""
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
    """int64[documents], the tokens of a batch that are trained on, first ones left out."""
    lengths: Int64 = np.diff(lists_of(batch, "input_ids")[1])
    if "trained" not in batch.schema.names:
        return lengths - 1
    edges, offsets = lists_of(batch, "trained")
    starts, stops = np.maximum(edges[::2], 1), np.maximum(edges[1::2], 1)
    sums = np.concatenate([[0], np.cumsum(stops - starts, dtype=np.int64)])
    counted = sums[offsets[1:] // 2] - sums[offsets[:-1] // 2]
    everywhere = batch.column("trained").is_null().to_numpy(zero_copy_only=False)
    trained: Int64 = np.where(everywhere, lengths - 1, counted)
    return trained


def count_tokenized(batch: Any, index: Any, counts: Counts) -> None:
    """Add the documents of a sound batch."""
    lengths = index.column("length").to_numpy().astype(np.int64)
    counts.documents += len(batch)
    counts.tokens += int(lengths.sum())
    counts.trained_tokens += int(index.column("trained_tokens").to_numpy().sum(dtype=np.int64))
    counts.document_length += powers_histogram(lengths)
    counts.add_files(batch.column("file").to_numpy(), lengths, lengths)


def document_differences(counts: Counts, facts: TokenizedManifest) -> list[str]:
    """Every figure in which what was counted and the manifest differ."""
    totals = ("documents", "tokens", "trained_tokens")
    histograms = DocumentHistograms.__struct_fields__
    inputs = [(counts.file(index), one) for index, one in enumerate(facts.inputs)]
    return _different(
        chain(
            ((name, getattr(counts, name), getattr(facts, name)) for name in totals),
            ((name, getattr(counts, name).tolist(), getattr(facts.histograms, name))
             for name in histograms),
            ((f"{name} of the input {one.path}", getattr(counted, name), getattr(one, name))
             for counted, one in inputs for name in totals[:2]),
        )
    )  # fmt: skip
