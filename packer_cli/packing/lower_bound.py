"""The fewest rows that any packer could need: padding beyond these is the plan's."""

from __future__ import annotations

import numpy as np

from packer_cli.records import Int32, Int64


def lower_bound_rows(
    counts: Int32 | Int64,
    max_length: int,
    *,
    max_segments: int | None = None,
    segment_multiple: int = 1,
) -> int:
    """A number of rows below which nothing can pack these lengths.

    counts            [max_length + 1]: counts[s] documents have s tokens; counts[0] is
                      ignored
    max_segments      that a row may hold; None: any number
    segment_multiple  that segments are padded to; divides max_length

    The largest of ceil(documents / max_segments), ceil(tokens / max_length), tokens counted with
    their padding, and the L2 bound of Martello and Toth 1990 ("Lower bounds and reduction
    procedures for the bin packing problem"): for a threshold a,
    documents above max_length - a stand alone, those above half a row need one each, and
    those from a to half a row can only use what the latter leave. Here for all a at once, by
    prefix sums over lengths: O(max_length).
    """
    of_length, max_length = _in_units(counts[: max_length + 1], max_length, segment_multiple)
    lengths = np.arange(len(of_length), dtype=np.int64)
    documents = np.concatenate([[0], np.cumsum(of_length)])  # documents[s]: shorter than s
    tokens = np.concatenate([[0], np.cumsum(of_length * lengths)])
    half = max_length // 2
    a = np.arange(1, half + 1)
    alone = documents[-1] - documents[max_length - a + 1]
    above_half = documents[-1] - documents[half + 1]
    paired = above_half - alone
    paired_tokens = tokens[max_length - a + 1] - tokens[half + 1]
    middle_tokens = tokens[half + 1] - tokens[a]
    spill = middle_tokens - (paired * max_length - paired_tokens)
    l2 = above_half + np.maximum(0, -(-spill // max_length))
    by_volume = -(-int(tokens[-1]) // max_length)
    by_number = -(-int(of_length[1:].sum()) // max_segments) if max_segments else 0
    return max(by_volume, by_number, int(above_half), int(l2.max(initial=0)))


def _in_units(counts: Int32 | Int64, max_length: int, unit: int) -> tuple[Int64, int]:
    """Counts of the lengths rounded up to whole units, and the row, in units."""
    of_length = counts.astype(np.int64)
    if unit == 1:
        return of_length, max_length
    padded = np.zeros(max_length // unit + 1, np.int64)
    np.add.at(padded, -(-np.arange(len(of_length)) // unit), of_length)
    return padded, max_length // unit
