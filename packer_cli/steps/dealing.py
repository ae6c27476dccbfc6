"""Dealing rows to ranks: as many to each, at costs that are as even as may be.

A step of W ranks, M micro-batches and B rows in each is M micro-steps of W · B rows. Rows of like
cost make a micro-step; then they are dealt so that the sums of ranks are even, in each micro-step
and in the whole step. Which rows meet is decided before: `balance="step"` makes micro-steps of a
step's own rows, `balance="order"` of those of a window of steps, and then shuffles micro-steps.
"""

from __future__ import annotations

import numpy as np

from packer_cli._kernels import dealing
from packer_cli.records import Int64
from packer_cli.steps.costs import Float64
from packer_cli.steps.grid import Sizes
from packer_cli.steps.order import permutation


def dealt_steps(rows: Int64, costs: Float64, sizes: Sizes) -> Int64:
    """int64[n], the same rows by places: in each step, row i of rank r is at i * world_size + r.

    rows   int64[n], of steps one after another; the last may be shorter
    costs  float64[all rows]
    """
    rows = rows[_costliest_first(costs[rows], sizes.step)]
    return rows[_dealt(costs[rows], sizes)]


def dealt_window(rows: Int64, costs: Float64, sizes: Sizes, name: str) -> Int64:
    """The same, where rows of like cost meet in micro-steps, which `name` then shuffles."""
    rows = rows[_costliest_first(costs[rows], len(rows))]
    whole = len(rows) // sizes.micro_step
    cut = whole * sizes.micro_step
    shuffled = rows[:cut].reshape(whole, sizes.micro_step)[permutation(whole, name)]
    rows = np.concatenate([shuffled.ravel(), rows[cut:]])
    return rows[_dealt(costs[rows], sizes)]


def _costliest_first(costs: Float64, size: int) -> Int64:
    order = np.empty(len(costs), np.int64)
    dealing.costliest_first(costs, size, order)
    return order


def _dealt(costs: Float64, sizes: Sizes) -> Int64:
    order = np.empty(len(costs), np.int64)
    dealing.deal(costs, sizes.world_size, sizes.batch_size, sizes.micro_batches, order)
    return order
