"""How long steps of training wait for their costliest rank: `packer stats --ranks`.

In random order, and in both even ones of `PackedSampler`: `Schedule` makes the steps of an epoch,
and their costs are compared. Of many rows, some stretches of steps are taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from packer_cli import storage
from packer_cli.errors import DataError
from packer_cli.reports.report import Table
from packer_cli.result.layout import SQUARED_LENGTHS
from packer_cli.result.manifest import Manifest
from packer_cli.result.reader import PackedDirectory, parsed_squares, squared_lengths
from packer_cli.result.wording import percent, plural
from packer_cli.steps.schedule import Balance, Float64, Order, Schedule, StepSizes, row_costs

_STRETCH = 64  # steps that are looked at together: as many as a window has
_MOST_ROWS = 1 << 22  # that are looked at
_MEANING: dict[Balance | None, str] = {
    None: "random order",
    "step": 'balance="step": the rows of each step, dealt evenly to ranks',
    "order": 'balance="order": rows of like cost meet in a step',
}


class TooFewRowsError(DataError):
    """A result has fewer rows than a step takes."""


class Prediction(NamedTuple):
    """`steps`: whole ones in an epoch, of which `counted` were looked at.

    orders  of each order of rows (max_over_mean, time). A step takes as long as its costliest rank:
            max_over_mean is the mean over steps of what that has, divided by the mean rank's, and
            time that of all steps, where 1 is that of steps in which no rank waits
    """

    sizes: StepSizes
    hidden_size: int
    steps: int
    counted: int
    orders: dict[Balance | None, tuple[float, float]]

    def saved(self, balance: Balance) -> float:
        """The share of the time in random order that this one saves."""
        return 1 - self.orders[balance][1] / self.orders[None][1]

    def as_json(self) -> dict[str, Any]:
        orders: dict[str, Any] = {"random": {"max_over_mean": self.orders[None][0]}}
        for one, (ratio, _) in self.orders.items():
            if one:
                orders[one] = {"max_over_mean": ratio, "time_saved": self.saved(one)}
        sizes = {
            "ranks": self.sizes.world_size,
            "micro_batches": self.sizes.micro_batches,
            "batch_size": self.sizes.batch_size,
            "hidden_size": self.hidden_size,
            "rows_per_step": self.sizes.rows,
        }
        return sizes | {"steps": self.steps, "steps_counted": self.counted} | orders

    def table(self) -> Table:
        """A line for each order."""
        some = f", {self.counted:,} of them counted" if self.counted < self.steps else ""
        title = (
            f"a step waits for its costliest rank: {str(self.sizes).replace(' x ', ' × ')}, hidden "
            f"size {self.hidden_size:,} ({plural(self.steps, 'step')}{some})"
        )
        # a saved share may be less than nothing by a hair
        rows = [
            [_MEANING[one], f"{ratio:.3f}", percent(round(self.saved(one), 4) + 0.0) if one else ""]
            for one, (ratio, _) in self.orders.items()
        ]
        return Table(title, ["rows", "costliest / mean rank", "time saved"], rows)


def predict(
    directory: Path | str, manifest: Manifest, sizes: StepSizes, hidden_size: int
) -> Prediction:
    """Predict what steps of a packed directory or a view cost; a URL's side file is read.

    Raises TooFewRowsError for fewer rows than a step takes, and DataError where squared lengths
    cannot be had.
    """
    if manifest.rows < sizes.rows:
        raise TooFewRowsError(
            f"{directory}: has {plural(manifest.rows, 'row')}, a step of {sizes} takes "
            f"{sizes.rows:,}",
            "fewer --ranks, --micro-batches or --batch-size make smaller steps",
        )
    if storage.is_url(str(directory)):
        place = storage.join(str(directory), SQUARED_LENGTHS)
        with storage.open_bytes(place) as file:
            sums = parsed_squares(file.read(), place, manifest)
    else:
        sums = squared_lengths(PackedDirectory(Path(directory), manifest))
    costs = row_costs(sums, manifest.config.max_length, hidden_size)
    order = Order(manifest.rows, stages=[one.rows for one in manifest.stages])
    schedules = {
        balance: Schedule(order, sizes, balance=balance, costs=costs) for balance in _MEANING
    }
    steps = schedules[None].grid.epoch_at(0).end // sizes.rows
    stretches = [*_stretches(steps, sizes.rows)]
    orders = {balance: _waiting(one, costs, stretches) for balance, one in schedules.items()}
    return Prediction(sizes, hidden_size, steps, sum(map(len, stretches)), orders)


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
