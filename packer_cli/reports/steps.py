"""How long steps of training wait for their costliest rank: `packer stats --ranks`.

In random order, and in both even ones of `PackedSampler`: `Schedule` makes the steps of an epoch,
and their costs are compared. Of many rows, some stretches of steps are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from packer_cli import storage
from packer_cli.errors import DataError
from packer_cli.result.layout import SQUARED_LENGTHS
from packer_cli.result.manifest import Manifest
from packer_cli.result.reader import PackedDirectory, parsed_squares, squared_lengths
from packer_cli.result.wording import plural
from packer_cli.steps.schedule import Balance, Float64, Order, Schedule, StepSizes, row_costs

_STRETCH = 64  # steps that are looked at together: as many as a window has
_MOST_ROWS = 1 << 22  # that are looked at


def predict(
    directory: Path | str,
    manifest: Manifest,
    sizes: StepSizes,
    hidden_size: int,
    skip: Callable[[str], None] | None = None,
) -> dict[str, Any] | None:
    """Predict what steps of a packed directory or a view cost, for programs; a URL's side file is
    read.

    steps          whole ones in an epoch, of which `steps_counted` were looked at
    max_over_mean  mean over steps of what the costliest rank has, divided by the mean rank's
    time_saved     share of the time in random order, where a step takes as long as its costliest
                   rank

    Raises DataError where squared lengths cannot be had, and for fewer rows than a step takes, or
    gives None once `skip` was told.
    """
    if manifest.rows < sizes.rows:
        rows = plural(manifest.rows, "row")
        few = f"{directory}: has {rows}, a step of {sizes} takes {sizes.rows:,}"
        if skip is None:
            tip = "fewer --ranks, --micro-batches or --batch-size make smaller steps"
            raise DataError(few, tip)
        skip(few)
        return None
    if storage.is_url(str(directory)):
        place = storage.join(str(directory), SQUARED_LENGTHS)
        with storage.open_bytes(place) as file:
            sums = parsed_squares(file.read(), place, manifest)
    else:
        sums = squared_lengths(PackedDirectory(Path(directory), manifest))
    costs = row_costs(sums, manifest.config.max_length, hidden_size)
    order = Order(manifest.rows, stages=[one.rows for one in manifest.stages])
    balances: tuple[Balance | None, ...] = (None, "step", "order")
    schedules = [Schedule(order, sizes, balance=one, costs=costs) for one in balances]
    steps = schedules[0].grid.epoch_at(0).end // sizes.rows
    stretches = [*_stretches(steps, sizes.rows)]
    (ratio, time), *even = (_waiting(one, costs, stretches) for one in schedules)
    return {
        "ranks": sizes.world_size,
        "micro_batches": sizes.micro_batches,
        "batch_size": sizes.batch_size,
        "hidden_size": hidden_size,
        "rows_per_step": sizes.rows,
        "steps": steps,
        "steps_counted": sum(map(len, stretches)),
        "random": {"max_over_mean": ratio},
    } | {
        str(balance): {"max_over_mean": its, "time_saved": 1 - own / time}
        for balance, (its, own) in zip(balances[1:], even, strict=True)
    }


def _stretches(steps: int, rows: int) -> Iterator[range]:
    """Numbers of steps to look at: all of them or, of many, stretches of the whole epoch."""
    count = max(1, _MOST_ROWS // (_STRETCH * rows))
    if steps <= count * _STRETCH:
        yield range(steps)
        return
    for number in range(count):
        begin = (steps - _STRETCH) * number // max(1, count - 1)
        yield range(begin, begin + _STRETCH)


def _waiting(schedule: Schedule, costs: Float64, stretches: Sequence[range]) -> tuple[float, float]:
    sizes = schedule.sizes
    ranks: list[Float64] = []  # [steps, ranks]
    for steps in stretches:
        rows = schedule.rows_at(steps.start * sizes.rows, steps.stop * sizes.rows)
        ranks.append(costs[rows].reshape(len(steps), -1, sizes.world_size).sum(1))
    of_ranks = np.concatenate(ranks)
    costliest, mean = of_ranks.max(1), of_ranks.mean(1)
    return float((costliest / mean).mean()), float(costliest.sum() / mean.sum())
