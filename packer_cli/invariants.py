"""What every packed row must satisfy. The tests hold every result to it.

cu_seqlens      0 first, increasing, at most max_length last
attention_mask  1 before the last boundary, 0 from there
input_ids       >= 0; pad_token_id from the last boundary
labels          the token or -100; -100 on padding and on each segment's first token
position_ids    restart at 0 in every segment and in the padding
segments        as many as boundaries less one
"""

from __future__ import annotations

from typing import Any

import numpy as np

from packer_cli.packed import ragged_of, rows_of
from packer_cli.records import IGNORED


def broken_invariants(batch: Any, max_length: int, pad_token_id: int) -> list[str]:
    """What is wrong with the rows of a record batch, one message per broken rule; [] if nothing.

    Every message names the first row (counted in the batch) that breaks the rule.
    """
    problems: list[str] = []

    def rule(name: str, holds: Any) -> None:
        wrong = np.flatnonzero(~holds)
        if len(wrong):
            problems.append(f"row {wrong[0]}: {name} ({len(wrong)} rows)")

    rows = batch.num_rows
    names = batch.schema.names
    boundaries, edges = ragged_of(batch.column("cu_seqlens"))
    sizes = np.diff(edges)
    if (sizes < 2).any():
        return [f"row {np.flatnonzero(sizes < 2)[0]}: cu_seqlens has fewer than two boundaries"]
    row_of = np.repeat(np.arange(rows), sizes)
    first = np.zeros(len(row_of), bool)
    first[edges[:-1] - edges[0]] = True
    boundaries = boundaries[edges[0] : edges[-1]]
    used = boundaries[edges[1:] - edges[0] - 1]
    step = np.diff(boundaries, prepend=0)
    increasing = np.ones(rows, bool)
    increasing[row_of[(step <= 0) & ~first]] = False
    rule("cu_seqlens does not begin with 0", boundaries[first] == 0)
    rule("cu_seqlens does not increase", increasing)
    rule(f"cu_seqlens ends outside 1..{max_length}", (used >= 1) & (used <= max_length))
    if problems:
        return problems
    place = np.arange(max_length)
    real = place < used[:, None]
    begins = np.zeros((rows, max_length + 1), bool)
    begins[row_of, boundaries] = True
    begins = begins[:, :max_length]
    ids = rows_of(batch.column("input_ids"))
    rule("input_ids holds a negative id", (ids >= 0).all(1))
    rule("input_ids holds something other than pad_token_id after the last boundary",
         (real | (ids == pad_token_id)).all(1))  # fmt: skip
    if "attention_mask" in names:
        mask = rows_of(batch.column("attention_mask"))
        rule("attention_mask differs from the boundaries", (mask == real).all(1))
    if "labels" in names:
        labels = rows_of(batch.column("labels"))
        ignored = labels == IGNORED
        rule("labels holds neither the token nor -100", (ignored | (labels == ids)).all(1))
        rule("labels trains on padding or on a segment's first token",
             (ignored | (real & ~begins)).all(1))  # fmt: skip
    if "position_ids" in names:
        starts = np.maximum.accumulate(np.where(begins, place, 0), axis=1)
        rule("position_ids does not restart in every segment",
             (rows_of(batch.column("position_ids")) == place - starts).all(1))  # fmt: skip
    if "segments" in names:
        counts = np.diff(batch.column("segments").offsets.to_numpy())
        rule("segments does not match cu_seqlens", counts == sizes - 1)
    return problems
