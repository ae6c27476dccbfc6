"""What a row costs in training: its places, and attention between the tokens of each segment.

`linear · L + Σ l²`: everything but attention costs as much for each of the L places, padding too;
attention costs a segment the square of its length. For a transformer, `linear` is about six times
its hidden size: its matrices against the two products of attention.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from operator import index as as_index

import numpy as np
import numpy.typing as npt

from packer_cli.errors import UsageError
from packer_cli.records import Int64

Float64 = npt.NDArray[np.float64]
Cost = Callable[[Int64], npt.ArrayLike]

_LINEAR = 6  # for each unit of the hidden size


def row_costs(
    squared_lengths: Int64,
    max_length: int,
    hidden_size: int | None = None,
    cost: Cost | None = None,
) -> Float64:
    """float64[rows], what each row costs, in no unit: only ratios count.

    squared_lengths  int64[rows], the sum of the squared segment lengths of each row
    hidden_size      of the model; or else
    cost             a function that takes int64[n] of those sums, and returns n costs. They are
                     rounded to float32: processors differ in the last bits of powers and the like,
                     and ranks that deal differently would take rows twice

    Raises UsageError where not exactly one of both is given, and for costs that are none.
    """
    if (hidden_size is None) == (cost is None):
        raise UsageError(
            "hidden_size and cost: " + ("neither" if cost is None else "both") + " given",
            "give the model's hidden size, hidden_size=config.hidden_size; or cost=, a function of "
            "the sums of squared segment lengths",
        )
    if hidden_size is not None:
        linear = _LINEAR * whole_size("hidden_size", hidden_size)
        return np.add(squared_lengths, linear * max_length, dtype=np.float64)
    assert cost is not None  # noqa: S101 for mypy
    return _checked(cost(squared_lengths), len(squared_lengths))


def whole_size(name: str, size: object) -> int:
    """A size as a plain int, which a state in JSON can hold. Raises UsageError for one below 1."""
    try:
        plain = as_index(size)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{name}: {size!r} is not a whole number") from None
    if plain < 1:
        raise UsageError(f"{name}: {plain} is less than 1")
    return plain


def digest_of(costs: Float64) -> str:
    """By which states tell costs apart."""
    return hashlib.sha256(costs.astype("<f8", copy=False).data).hexdigest()


def _checked(given: npt.ArrayLike, rows: int) -> Float64:
    try:
        with np.errstate(over="ignore"):  # to inf, which is refused below
            costs = np.array(given, np.float32).astype(np.float64)
    except (TypeError, ValueError):
        raise UsageError(
            f"cost: returned {type(given).__name__}, which is no array of numbers",
            "return a cost for each of the sums",
        ) from None
    if costs.shape != (rows,):
        raise UsageError(
            f"cost: returned an array of shape {costs.shape} for {rows} rows, not ({rows},)",
            "return a cost for each of the sums",
        )
    wrong = ~(np.isfinite(costs) & (costs >= 0))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise UsageError(
            f"cost: is {costs[row]} for row {row}; costs are finite, and not negative",
            "only their ratios count: any unit will do",
        )
    return costs
