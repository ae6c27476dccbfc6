"""The answers of records of preference, each tokens by itself, put together as documents.

A pair is one document: its chosen side, and after that its rejected one. `TokenBatch.chosen` says
where the second begins.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from packer_cli.packing.fitting import trained_between
from packer_cli.records import BadRecord, Int64, TokenBatch, UInt8

MEND = "mend the record, or use --on-error skip"


def joined_sides(
    batch: TokenBatch, sides: UInt8, bad: list[BadRecord]
) -> tuple[TokenBatch, list[BadRecord]]:
    """One document for each record that is not among the `bad`, and all that are bad.

    batch  a document for each side, those of a record one after the other
    sides  uint8[n], 1 for a chosen or desirable answer
    """
    bad = [*bad, *_without_answer(batch, {one.position for one in bad})]
    bad.sort(key=lambda record: record.position)
    wrong = np.array([one.position for one in bad], np.int64)
    batch, kept = _without(batch, ~np.isin(batch.position, wrong))
    sides, lengths = sides[kept], np.diff(batch.offsets)
    first = np.flatnonzero(np.diff(batch.position, prepend=-1))
    chosen = np.where(sides[first] == 1, lengths[first], 0).astype(np.int32)
    return (
        replace(
            batch,
            offsets=np.append(batch.offsets[:-1][first], batch.offsets[-1]),
            file=batch.file[first],
            position=batch.position[first],
            chosen=chosen,
        ),
        bad,
    )


def _without_answer(batch: TokenBatch, known: set[int]) -> list[BadRecord]:
    """Records of which a side has no token to train on. OUT batch: nor is its first one any more,
    which nothing predicts.
    """
    if batch.trained is None:
        return []
    begins, ends = batch.offsets[:-1], batch.offsets[1:]
    batch.trained[begins[begins < ends]] = 0
    nothing = trained_between(batch.trained, begins, ends) == 0
    positions = dict.fromkeys(batch.position[nothing].tolist())
    reason = "one of its answers has no token that something comes before, expected a longer one"
    return [BadRecord(one, reason, MEND) for one in positions if one not in known]


def _without(batch: TokenBatch, kept: np.ndarray) -> tuple[TokenBatch, Int64]:
    """Some of the documents, and their indices."""
    indices = np.flatnonzero(kept)
    if kept.all():
        return batch, indices
    lengths = np.diff(batch.offsets)
    tokens = np.repeat(kept, lengths)
    offsets = np.zeros(len(indices) + 1, np.int64)
    np.cumsum(lengths[kept], out=offsets[1:])
    return (
        replace(
            batch, ids=batch.ids[tokens], offsets=offsets,
            trained=None if batch.trained is None else batch.trained[tokens],
            file=batch.file[kept], position=batch.position[kept],
        ),
        indices,
    )  # fmt: skip
