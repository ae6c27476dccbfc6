"""The rule of labels: which tokens of a segment a model is trained to predict.

A token is trained on if its document says so and it is not the first of its segment, which nothing
in its row precedes. Rows get their labels from `filling.fill_rows`, the only other place that
applies this rule; whatever counts or makes labels without filling rows calls these functions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from packer_cli._kernels import filling
from packer_cli.records import IGNORED, Int32, Int64, UInt8


def trained_tokens(trained: UInt8 | None, begin: Int64, end: Int64) -> Int64:
    """Count the tokens that are trained on in n segments, int64[n].

    trained     uint8[T], 1 where a document says to train; None: everywhere
    begin, end  int64[n], where segments lie in it
    """
    if trained is None:
        counts: Int64 = np.maximum(end - begin - 1, 0)
        return counts
    return flagged_between(trained, np.minimum(begin + 1, end), end)


def flagged_between(trained: UInt8, begin: Int64, end: Int64) -> Int64:
    """Count the tokens of [begin, end) that documents say to train on, first ones too, int64[n]."""
    counts = np.empty(len(begin), np.int64)
    filling.count_trained(trained, begin, end, counts)
    return counts


def trained_flags(trained: Any, begin: Int64, tokens: int) -> npt.NDArray[np.bool_]:
    """Return bool[tokens], which are trained on, of segments that begin at int64[n] `begin`.

    trained  uint8 or bool[tokens], as of `trained_tokens`; None: everywhere
    """
    flags = np.ones(tokens, bool) if trained is None else np.array(trained, bool)
    flags[begin] = False
    return flags


def labels_of(ids: Int32, trained: Any, begin: Int64) -> Int32:
    """Return the unshifted labels int32[tokens] of segments: the token, or IGNORED."""
    return np.where(trained_flags(trained, begin, len(ids)), ids, np.int32(IGNORED))
