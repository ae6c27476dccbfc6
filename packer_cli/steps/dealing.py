"""Dealing rows to ranks: as many to each, at costs that are as even as may be.

A step of W ranks, M micro-batches and B rows in each is M micro-steps of W · B rows. Rows of like
cost make a micro-step; then they are dealt so that the sums of ranks are even, in each micro-step
and in the whole step. Which rows meet is decided before: `WithinSteps` makes micro-steps of a
step's own rows, `WithinWindows` of those of a window of steps, and then shuffles micro-steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packer_cli._kernels import dealing
from packer_cli.records import Int64
from packer_cli.steps.costs import Float64
from packer_cli.steps.grid import Sizes
from packer_cli.steps.order import permutation


@dataclass(frozen=True)
class Unbalanced:
    """Leaves rows in their order."""

    def __call__(self, rows: Int64, begin: int, sizes: Sizes) -> Int64:
        return rows


@dataclass(frozen=True)
class WithinSteps:
    """Deals the rows of steps. `costs` is float64[all rows].

    Of int64[n], the rows of steps one after another, of which the last may be shorter, it makes
    the same rows by places: in each step, row i of rank r is at i * world_size + r.
    """

    costs: Float64

    def __call__(self, rows: Int64, begin: int, sizes: Sizes) -> Int64:
        rows = rows[_costliest_first(self.costs[rows], sizes.step)]
        return rows[_dealt(self.costs[rows], sizes, exchange=True)]


@dataclass(frozen=True)
class WithinWindows:
    """Deals the rows of a window of steps in the same way, after those of like cost have met in
    micro-steps, which are shuffled. The window begins at the place `begin`.
    """

    costs: Float64
    seed: int | None

    def __call__(self, rows: Int64, begin: int, sizes: Sizes) -> Int64:
        rows = rows[_costliest_first(self.costs[rows], len(rows))]
        size = min(sizes.micro_step, len(rows))
        whole = len(rows) // size
        cut = whole * size
        order = permutation(whole, f"{self.seed}/micro-steps from {begin}")
        shuffled = rows[:cut].reshape(whole, size)[order]
        rows = np.concatenate([shuffled.ravel(), rows[cut:]])
        return rows[_dealt(self.costs[rows], sizes, exchange=False)]


def _costliest_first(costs: Float64, size: int) -> Int64:
    order = np.empty(len(costs), np.int64)
    dealing.costliest_first(costs, min(size, len(costs)), order)
    return order


def _dealt(costs: Float64, sizes: Sizes, *, exchange: bool) -> Int64:
    order, turns = np.empty(len(costs), np.int64), len(costs) // sizes.world_size
    batch_size, micro_batches = min(sizes.batch_size, turns), min(sizes.micro_batches, turns)
    dealing.deal(costs, sizes.world_size, batch_size, micro_batches, exchange, order)
    return order
