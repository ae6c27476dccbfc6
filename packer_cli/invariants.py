"""What every packed row must satisfy. The tests hold every result to it.

cu_seqlens      0 first, increasing, at most max_length last, at most max_segments steps
cu_seqlens_padded  with a segment multiple: 0 first, each step that of cu_seqlens rounded up to
                the multiple, at most max_length last
attention_mask  1 in segments, 0 in padding
input_ids       >= 0; pad_token_id in padding
labels          the token or -100; -100 on padding and on each segment's first token; with
                label_shift "pre" all one place earlier
position_ids    restart at 0 in every segment, go on in its padding, restart in the row's
segments        as many as boundaries less one
"""

from __future__ import annotations

from typing import Any

import numpy as np

from packer_cli.config import PADDED_BOUNDARIES
from packer_cli.fitting import padded
from packer_cli.packed import ragged_of, rows_of, segments_of
from packer_cli.records import IGNORED


def broken_invariants(  # noqa: PLR0915 one rule after the other
    batch: Any,
    max_length: int,
    pad_token_id: int,
    *,
    max_segments: int | None = None,
    segment_multiple: int = 1,
    label_shift: str = "none",
) -> list[str]:
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
    if max_segments:
        rule(f"cu_seqlens has more than {max_segments} segments", sizes - 1 <= max_segments)
    if segment_multiple > 1 and not problems:
        places, place_edges = ragged_of(batch.column(PADDED_BOUNDARIES))
        if (np.diff(place_edges) != sizes).any():
            wrong = np.flatnonzero(np.diff(place_edges) != sizes)
            return [f"row {wrong[0]}: {PADDED_BOUNDARIES} does not match cu_seqlens"]
        places = places[place_edges[0] : place_edges[-1]]
        follows = np.diff(places, prepend=0) == padded(step, segment_multiple)
        aligned = np.ones(rows, bool)
        aligned[row_of[~follows & ~first]] = False
        rule(f"{PADDED_BOUNDARIES} does not begin with 0", places[first] == 0)
        rule(f"{PADDED_BOUNDARIES} is not cu_seqlens in multiples of {segment_multiple}", aligned)
        ends = places[edges[1:] - edges[0] - 1]
        rule(f"{PADDED_BOUNDARIES} ends beyond {max_length}", ends <= max_length)
        boundaries = places
    if problems:
        return problems
    place = np.arange(max_length)
    restarts = np.zeros((rows, max_length + 1), bool)  # segments and the row's padding
    restarts[row_of, boundaries] = True
    restarts = restarts[:, :max_length]
    position = place - np.maximum.accumulate(np.where(restarts, place, 0), axis=1)
    begin, length, of_row = segments_of(batch)
    length_at = np.zeros((rows, max_length), np.int32)
    length_at[np.repeat(np.arange(rows), np.diff(of_row)), begin] = length
    real = position < np.take_along_axis(length_at, place - position, axis=1)
    ids = rows_of(batch.column("input_ids"))
    rule("input_ids holds a negative id", (ids >= 0).all(1))
    rule("input_ids holds something other than pad_token_id in padding",
         (real | (ids == pad_token_id)).all(1))  # fmt: skip
    if "attention_mask" in names:
        mask = rows_of(batch.column("attention_mask"))
        rule("attention_mask differs from the boundaries", (mask == real).all(1))
    if "labels" in names:
        labels = rows_of(batch.column("labels"))
        if label_shift == "pre":  # back to the tokens that they are of
            rule("labels trains on what follows the row", labels[:, -1] == IGNORED)
            labels = np.concatenate([np.full((rows, 1), IGNORED), labels[:, :-1]], axis=1)
        ignored = labels == IGNORED
        rule("labels holds neither the token nor -100", (ignored | (labels == ids)).all(1))
        rule("labels trains on padding or on a segment's first token",
             (ignored | (real & ~restarts)).all(1))  # fmt: skip
    if "position_ids" in names:
        rule("position_ids does not restart in every segment",
             (rows_of(batch.column("position_ids")) == position).all(1))  # fmt: skip
    if "segments" in names:
        counts = np.diff(batch.column("segments").offsets.to_numpy())
        rule("segments does not match cu_seqlens", counts == sizes - 1)
    return problems
