"""Rows in an order that makes even steps of trainers which read rows one after another.

Such a trainer fills batches of B rows in turn, and gives batch i to process i % W, as Accelerate's
`BatchSamplerShard` does. A step of M micro-batches is therefore W * B * M neighboring rows, which
stand here as processes take them: micro-batch after micro-batch, and in each process after process.
Which rows meet is a matter of `packer_cli.steps`, as with `PackedSampler(balance="order")`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packer_cli.errors import UsageError
from packer_cli.records import Int64
from packer_cli.result.reader import PackedDirectory
from packer_cli.result.wording import plural
from packer_cli.steps.costs import row_costs
from packer_cli.steps.schedule import Schedule


@dataclass(frozen=True)
class EvenSteps:
    """How a trainer is going to read rows.

    ranks          processes that share them
    hidden_size    of the model, by which a row's cost is known
    batch_size     rows of a micro-batch
    micro_batches  of a step
    """

    ranks: int
    hidden_size: int
    batch_size: int = 1
    micro_batches: int = 1


def even_order(packed: PackedDirectory, squared_lengths: Int64, steps: EvenSteps) -> Int64:
    """int64[rows]: the rows of a directory in the order in which they are to be read. Stages stay
    apart; rows that are left over, fewer than there are ranks, and those that the reader drops are
    the last ones.

    squared_lengths  int64[rows], as `Writer.squared_lengths` gives them

    Raises UsageError for sizes below 1 and for a step of more rows than there are.
    """
    read = np.flatnonzero(squared_lengths >= 0)
    size = steps.ranks * steps.batch_size * steps.micro_batches
    if size > len(read):
        micro_batches = plural(steps.micro_batches, "micro-batch", "micro-batches")
        raise UsageError(
            f"{packed.path}: has {len(read):,} rows to train on, fewer than a step of {size:,}: "
            f"{plural(steps.ranks, 'rank')} x {micro_batches} x {plural(steps.batch_size, 'row')}",
            "give the sizes that the trainer is going to have, or pack more data",
        )
    ends = [stage.first_row + stage.rows for stage in packed.facts.stages]
    stages = np.diff(np.searchsorted(read, [0, *ends]))
    schedule = Schedule(
        len(read),
        stages=stages[stages > 0].tolist(),
        world_size=steps.ranks,
        batch_size=steps.batch_size,
        micro_batches=steps.micro_batches,
        balance="order",
        costs=row_costs(squared_lengths[read], packed.max_length, steps.hidden_size),
    )
    order, place = [], 0
    end = schedule.epoch_at(0).end
    while place < end:
        begin, place = schedule.step_at(place)
        order.append(_as_read(schedule.rows_at(begin, place), steps))
    taken = read[np.concatenate(order)]
    return np.concatenate([taken, np.setdiff1d(np.arange(len(packed)), taken)])


def _as_read(rows: Int64, steps: EvenSteps) -> Int64:
    """The rows of a step, from row i of rank r at i * ranks + r to one batch after another."""
    micro_step = steps.ranks * steps.batch_size
    micro_steps = [rows[k : k + micro_step] for k in range(0, len(rows), micro_step)]
    return np.concatenate([one.reshape(-1, steps.ranks).T.ravel() for one in micro_steps])
