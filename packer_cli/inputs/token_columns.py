"""Records that are token ids already: checking them, and the flat arrays they become."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from packer_cli._kernels import inputs as kernels
from packer_cli.records import HIGHEST_ID, IGNORED, Int64, UInt8, UInt32, wrong_ids

# A number beyond int64 cannot be valid; clipping to this keeps it invalid without an overflow.
BEYOND = 1 << 62
Tokens = tuple[UInt32, Int64, UInt8 | None]


def clipped(values: npt.NDArray[Any]) -> Int64:
    """Integers of any type as int64, those beyond `BEYOND` as that."""
    if values.dtype == np.uint64:
        values = np.minimum(values, BEYOND)
    return values.astype(np.int64)


def _shown(value: Any) -> str:
    return "a number of 63 bits or more" if abs(int(value)) >= BEYOND else str(value)


def faultless(
    ids: npt.NDArray[Any],
    offsets: Int64,
    labels: npt.NDArray[Any] | None,
    mask: npt.NDArray[Any] | None,
) -> Tokens | None:
    """What `check_tokens` gives if no record is bad, in one pass over each array; None otherwise.

    The arrays are of integers of any type. Labels of tokens that the mask leaves out count here,
    too, so None does not say that a record is bad.
    """
    if labels is not None and labels.dtype == np.uint64:
        return None  # as int64 they could seem to be -100
    made, trained = np.empty(len(ids), np.uint32), None
    if not kernels.copy_ids(ids, made):
        return None
    if labels is not None:
        trained = np.empty(len(ids), np.uint8)
        if not kernels.copy_trained(labels, made, trained):
            return None
    if mask is None:
        return made, offsets, trained
    real = kernels.count_real(mask)
    if real < 0:
        return None
    if real == len(made):
        return made, offsets, trained
    kept_offsets = np.empty_like(offsets)
    kernels.keep_real(mask, offsets, made, trained, kept_offsets)
    return made[:real].copy(), kept_offsets, None if trained is None else trained[:real].copy()


def check_tokens(
    ids: Int64, offsets: Int64, labels: Int64 | None, mask: Int64 | None
) -> tuple[Tokens, dict[int, str]]:
    """Flat ids, labels and masks of n records -> (tokens without the bad records, reasons).

    offsets int64[n + 1] is common to all three. Tokens with attention_mask 0 are padding and
    are left out. Labels must be -100 or the token itself (unshifted): they say what is trained
    on. The second result maps the index of each bad record to its reason.
    """
    bad: dict[int, str] = {}

    def mark(wrong: npt.NDArray[np.bool_], describe: Callable[[int, int], str]) -> None:
        places = np.flatnonzero(wrong)
        records, first = np.unique(
            np.searchsorted(offsets, places, side="right") - 1, return_index=True
        )
        for record, at in zip(records.tolist(), places[first].tolist(), strict=True):
            if record not in bad:
                bad[record] = describe(at, at - int(offsets[record]))

    mark(
        wrong_ids(ids),
        lambda at, i: f"input_ids[{i}] is {_shown(ids[at])}, not between 0 and {HIGHEST_ID}",
    )
    if mask is not None:
        mark(
            (mask != 0) & (mask != 1),
            lambda at, i: f"attention_mask[{i}] is {_shown(mask[at])}, not 0 or 1",
        )
    if labels is not None:
        real = (labels != IGNORED) & (True if mask is None else mask == 1)
        mark(
            real & (labels != ids),
            lambda at, i: (
                f"labels[{i}] is {_shown(labels[at])}, neither -100 nor "
                f"input_ids[{i}] = {ids[at]}; labels must be unshifted"
            ),
        )
    trained = None if labels is None else (labels != IGNORED).astype(np.uint8)
    if not bad and mask is None:
        return (ids.astype(np.uint32), offsets, trained), bad
    return _kept(ids, offsets, trained, mask, list(bad)), bad


def _kept(
    ids: Int64, offsets: Int64, trained: UInt8 | None, mask: Int64 | None, bad: list[int]
) -> Tokens:
    """Without the bad records, and without padding."""
    keep = np.ones(len(ids), bool) if mask is None else mask == 1
    lengths = np.diff(np.concatenate([[0], np.cumsum(keep)])[offsets])
    good = np.ones(len(lengths), bool)
    good[bad] = False
    keep &= np.repeat(good, np.diff(offsets))
    kept_offsets = np.concatenate([[0], np.cumsum(lengths[good])])
    return (
        ids[keep].astype(np.uint32),
        kept_offsets.astype(np.int64),
        None if trained is None else trained[keep],
    )
