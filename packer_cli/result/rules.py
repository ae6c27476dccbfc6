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

from typing import Any, NamedTuple

import numpy as np

from packer_cli.config.options import PADDED_BOUNDARIES
from packer_cli.packing.fitting import padded
from packer_cli.records import IGNORED
from packer_cli.result.reader import ragged_of, rows_of, segments_of


class Broken(NamedTuple):
    """A broken rule: the first row (counted in the batch) that breaks it, and how many do."""

    row: int
    rule: str
    found: str
    rows: int

    def __str__(self) -> str:
        return f"row {self.row}: {self.rule}{self.found} ({self.rows} rows)"


def broken_invariants(batch: Any, max_length: int, pad_token_id: int, **how: Any) -> list[str]:
    """What is wrong with the rows of a record batch, one message per broken rule; [] if nothing.

    Every message names the first row (counted in the batch) that breaks the rule, and what was
    found there. The rest as in `broken_rules`.
    """
    return [str(broken) for broken in broken_rules(batch, max_length, pad_token_id, **how)]


def broken_rules(  # noqa: PLR0915 one rule after the other
    batch: Any,
    max_length: int,
    pad_token_id: int,
    *,
    max_segments: int | None = None,
    segment_multiple: int = 1,
    label_shift: str = "none",
    highest_id: int | None = None,
) -> list[Broken]:
    """The broken rules. `highest_id`: of the tokenizer, None when it is not known."""
    problems: list[Broken] = []

    def rule(name: str, holds: Any, values: Any = None, expected: Any = None) -> None:
        """`holds` bool[rows], or bool[rows, max_length] with `values` like it."""
        of_row = holds if holds.ndim == 1 else holds.all(1)
        wrong = np.flatnonzero(~of_row)
        if not len(wrong):
            return
        row, found = int(wrong[0]), ""
        if holds.ndim == 2:
            place = int(np.argmin(holds[row]))
            found = f": place {place} has {values[row, place]}"
            if expected is not None:
                found += f", expected {expected[row, place]}"
        elif values is not None:
            found = f": {values[row]}"
        problems.append(Broken(row, name, found, len(wrong)))

    rows = batch.num_rows
    names = batch.schema.names
    boundaries, edges = ragged_of(batch.column("cu_seqlens"))
    sizes = np.diff(edges)
    if (sizes < 2).any():
        rule("cu_seqlens has fewer than two boundaries", sizes >= 2)
        return problems
    row_of = np.repeat(np.arange(rows), sizes)
    first = np.zeros(len(row_of), bool)
    first[edges[:-1] - edges[0]] = True
    boundaries = boundaries[edges[0] : edges[-1]]
    used = boundaries[edges[1:] - edges[0] - 1]
    step = np.diff(boundaries, prepend=0)
    increasing = np.ones(rows, bool)
    increasing[row_of[(step <= 0) & ~first]] = False
    rule("cu_seqlens does not begin with 0", boundaries[first] == 0, boundaries[first])
    rule("cu_seqlens does not increase", increasing)
    rule(f"cu_seqlens ends outside 1..{max_length}", (used >= 1) & (used <= max_length), used)
    if max_segments:
        rule(
            f"cu_seqlens has more than {max_segments} segments",
            sizes - 1 <= max_segments,
            sizes - 1,
        )
    if segment_multiple > 1 and not problems:
        places, place_edges = ragged_of(batch.column(PADDED_BOUNDARIES))
        if (np.diff(place_edges) != sizes).any():
            rule(f"{PADDED_BOUNDARIES} does not match cu_seqlens", np.diff(place_edges) == sizes)
            return problems
        places = places[place_edges[0] : place_edges[-1]]
        follows = np.diff(places, prepend=0) == padded(step, segment_multiple)
        aligned = np.ones(rows, bool)
        aligned[row_of[~follows & ~first]] = False
        rule(f"{PADDED_BOUNDARIES} does not begin with 0", places[first] == 0, places[first])
        rule(f"{PADDED_BOUNDARIES} is not cu_seqlens in multiples of {segment_multiple}", aligned)
        ends = places[edges[1:] - edges[0] - 1]
        rule(f"{PADDED_BOUNDARIES} ends beyond {max_length}", ends <= max_length, ends)
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
    rule("input_ids holds a negative id", ids >= 0, ids)
    if highest_id is not None:
        name = f"input_ids holds an id above the tokenizer's highest, {highest_id}"
        rule(name, ~real | (ids <= highest_id), ids)
    rule(f"input_ids holds something other than pad_token_id {pad_token_id} in padding",
         real | (ids == pad_token_id), ids)  # fmt: skip
    if "attention_mask" in names:
        mask = rows_of(batch.column("attention_mask"))
        rule("attention_mask differs from the boundaries", mask == real, mask, real.view(np.uint8))
    if "labels" in names:
        labels = rows_of(batch.column("labels"))
        if label_shift == "pre":  # back to the tokens that they are of
            rule("labels trains on what follows the row", labels[:, -1] == IGNORED, labels[:, -1])
            labels = np.concatenate([np.full((rows, 1), IGNORED), labels[:, :-1]], axis=1)
        ignored = labels == IGNORED
        rule("labels holds neither the token nor -100", ignored | (labels == ids), labels, ids)
        rule("labels trains on padding or on a segment's first token",
             ignored | (real & ~restarts), labels)  # fmt: skip
    if "position_ids" in names:
        found = rows_of(batch.column("position_ids"))
        rule("position_ids does not restart in every segment", found == position, found, position)
    if "segments" in names:
        counts = np.diff(batch.column("segments").offsets.to_numpy())
        rule("segments does not match cu_seqlens", counts == sizes - 1, counts)
    return problems
