"""What the documents of a tokenized directory and their index must satisfy, and what they count.

Batches are those of `TokenizedDirectory.batches`, sound as Arrow.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packer_cli.errors import DataError
from packer_cli.records import Int64
from packer_cli.result.content_order import content_hashes
from packer_cli.result.counts import Counts, powers_histogram
from packer_cli.result.manifest import DocumentHistograms, TokenizedManifest
from packer_cli.result.tokenized import AGAIN, TokenizedDirectory


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
        for at, text in chain(broken_documents(batch, highest, inputs), other_index(batch, own)):
            raise DataError(f"{path}: document {first + at}: {text}", AGAIN)
        first += len(batch)
        yield batch, own
    if first != shard.rows:
        raise DataError(f"{path}: holds {first} documents, the manifest says {shard.rows}", AGAIN)


def broken_documents(batch: Any, highest: int | None, inputs: int) -> Iterator[tuple[int, str]]:
    """(document, what is wrong with it) of a batch, at most one of each kind.

    highest  the highest id there may be; None where that is not known
    inputs   how many inputs there are
    """
    for column in batch.columns:
        inner = column.values if isinstance(column, pa.ListArray) else column
        if inner.null_count or (column.null_count and inner is column):
            yield 0, "a null in its shard"
            return
    ids, offsets = lists_of(batch, "input_ids")
    if batch.column("input_ids").null_count:
        yield 0, "a null in its shard"
        return
    highest = np.iinfo(np.int32).max if highest is None else highest
    wrong = np.flatnonzero((ids < 0) | (ids > highest))
    if len(wrong):
        at = int(np.searchsorted(offsets, wrong[0], side="right")) - 1
        yield at, f"holds the id {ids[wrong[0]]}, the tokenizer's are 0 to {highest}"
    file = batch.column("file").to_numpy()
    nowhere = np.flatnonzero((file < 0) | (file >= inputs))
    if len(nowhere):
        yield int(nowhere[0]), f"is of input {file[nowhere[0]]}, there are {inputs}"
    empty = np.flatnonzero(np.diff(offsets) == 0)
    if len(empty):
        yield int(empty[0]), "has no tokens"
    if "chosen" in batch.schema.names:
        chosen = batch.column("chosen").to_numpy()
        beyond = np.flatnonzero((chosen < 0) | (chosen > np.diff(offsets)))
        if len(beyond):
            at = int(beyond[0])
            yield at, f"its chosen side has {chosen[at]} of {np.diff(offsets)[at]} tokens"
    if "trained" in batch.schema.names:
        yield from _broken_stretches(batch, np.diff(offsets))


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
    of = np.repeat(np.arange(len(batch)), np.diff(offsets))
    places = begins[of] + edges
    steps = np.zeros(begins[-1] + 1, np.int8)
    np.add.at(steps, places[::2], 1)
    np.add.at(steps, places[1::2], -1)
    everywhere = batch.column("trained").is_null().to_numpy(zero_copy_only=False)
    flags: npt.NDArray[np.bool_] = np.cumsum(steps[:-1]) > 0
    flags |= np.repeat(everywhere, np.diff(begins))
    return flags


def _broken_stretches(batch: Any, lengths: Int64) -> Iterator[tuple[int, str]]:
    """Stretches of what is trained on that no document of such a length can have."""
    edges, offsets = lists_of(batch, "trained")
    of = np.repeat(np.arange(len(lengths)), np.diff(offsets))
    odd = np.flatnonzero(np.diff(offsets) % 2)
    if len(odd):
        yield int(odd[0]), "its trained has an odd number of edges"
    within = np.append(of[1:] == of[:-1], False) if len(of) else np.empty(0, bool)
    wrong = (edges < 0) | (edges > lengths[of])
    wrong |= np.append(edges[1:] <= edges[:-1], False) & within
    if wrong.any():
        at = int(of[np.argmax(wrong)])
        shown = edges[offsets[at] : offsets[at + 1]][:6].tolist()
        yield at, f"its trained is {shown}, not ascending within its {lengths[at]} tokens"


def trained_tokens(batch: Any) -> Int64:
    """int64[documents], the tokens of a batch that are trained on, first ones left out."""
    lengths: Int64 = np.diff(lists_of(batch, "input_ids")[1])
    if "trained" not in batch.schema.names:
        return lengths - 1
    column = batch.column("trained")
    edges, offsets = lists_of(batch, "trained")
    starts, stops = np.maximum(edges[::2], 1), np.maximum(edges[1::2], 1)
    sums = np.concatenate([[0], np.cumsum(stops - starts, dtype=np.int64)])
    counted = sums[offsets[1:] // 2] - sums[offsets[:-1] // 2]
    everywhere = column.is_null().to_numpy(zero_copy_only=False)
    trained: Int64 = np.where(everywhere, lengths - 1, counted)
    return trained


def other_index(batch: Any, index: Any) -> Iterator[tuple[int, str]]:
    """(document, text) where a batch and its part of the index differ, one of each kind."""
    ids, offsets = lists_of(batch, "input_ids")
    has_chosen = "chosen" in batch.schema.names
    chosen = batch.column("chosen").to_numpy() if has_chosen else None
    hashes = content_hashes(ids.view(np.uint32), offsets, chosen)
    stored = b"".join(index.column("content_hash").to_pylist())
    pairs = [
        ("length", np.diff(offsets), index.column("length").to_numpy()),
        ("trained_tokens", trained_tokens(batch), index.column("trained_tokens").to_numpy()),
    ]
    if chosen is not None:
        pairs.append(("chosen", chosen, index.column("chosen").to_numpy()))
    for name, own, listed in pairs:
        if len(own) != len(listed):
            yield 0, f"its index has {len(listed)} of {len(own)} documents"
            return
        if (own != listed).any():
            at = int(np.argmax(own != listed))
            yield at, f"its {name} is {own[at]}, the index says {listed[at]}"
    different = (hashes != np.frombuffer(stored, np.uint64).reshape(-1, 2)).any(axis=1)
    if different.any():
        yield int(np.argmax(different)), "its content_hash is not that of its tokens"


def count_documents(batch: Any, index: Any, counts: Counts) -> None:
    lengths = index.column("length").to_numpy().astype(np.int64)
    counts.documents += len(batch)
    counts.tokens += int(lengths.sum())
    counts.trained_tokens += int(index.column("trained_tokens").to_numpy().sum(dtype=np.int64))
    counts.document_length += powers_histogram(lengths)
    counts.add_files(batch.column("file").to_numpy(), lengths, lengths)


def document_differences(counts: Counts, facts: TokenizedManifest) -> list[str]:
    """Every figure in which what was counted and the manifest differ."""
    pairs: list[tuple[str, Any, Any]] = [
        (name, getattr(counts, name), getattr(facts, name))
        for name in ("documents", "tokens", "trained_tokens")
    ]
    pairs += [
        (name, getattr(counts, name).tolist(), getattr(facts.histograms, name))
        for name in DocumentHistograms.__struct_fields__
    ]
    for index, one in enumerate(facts.inputs):
        counted = counts.file(index)
        pairs += [
            (f"{name} of the input {one.path}", getattr(counted, name), getattr(one, name))
            for name in ("documents", "tokens")
        ]
    return [
        f"{name}: {value} in the shards, {listed} in the manifest"
        for name, value, listed in pairs
        if value != listed
    ]
