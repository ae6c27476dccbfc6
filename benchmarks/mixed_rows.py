"""How mixed are rows, and what does that cost against the exact order?

Four sets of lengths, of which one is a single window. Rows beyond those of best-fit-decreasing, and
the share of rows of three documents or more that have over 80% of these within 5% of their median
length. A few seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from measuring import report

from packer_cli import PackPlan, plan_packing
from packer_cli.records import Int32

MOST_ALIKE = 0.001
DATA: dict[str, tuple[Callable[[np.random.Generator], Any], int, float]] = {
    "200k log-normal (5.5, 1)": (lambda rng: rng.lognormal(5.5, 1, 200_000), 4096, 0.1),
    "100k log-normal (6.2, 1.6)": (lambda rng: rng.lognormal(6.2, 1.6, 100_000), 32768, 0.1),
    "100k uniform 100 to 700": (lambda rng: rng.integers(100, 701, 100_000), 4096, 0.3),
    "5k log-normal (6.8, 0.7)": (lambda rng: rng.lognormal(6.8, 0.7, 5000), 4096, 0.3),
}


def of_one_length(lengths: Int32, plan: PackPlan) -> float:
    """The share of rows that hold documents of nearly one length."""
    rows = [lengths[plan.order[a:b]] for a, b in pairwise(plan.row_offsets)]
    alike = [len(row) > 2 and (abs(row / np.median(row) - 1) <= 0.05).mean() > 0.8 for row in rows]
    return float(np.mean(alike))


def main() -> None:
    for name, (draw, max_length, most) in DATA.items():
        lengths = np.clip(draw(np.random.default_rng(0)), 1, max_length).astype(np.int32)
        mixed, exact = (
            plan_packing(lengths, max_length, strategy=strategy, seed=0)
            for strategy in ("best-fit", "best-fit-decreasing")
        )
        more = 100 * (len(mixed) / len(exact) - 1)
        alike = [of_one_length(lengths, plan) for plan in (mixed, exact)]
        report(
            f"mixed rows, {name}, L = {max_length}",
            f"<= {most}% more rows than the exact order, <= {MOST_ALIKE:.1%} of one length",
            f"{more:+.2f}%; {alike[0]:.2%} of one length (exact order: {alike[1]:.0%})",
            more <= most and alike[0] <= MOST_ALIKE,
            rows=[len(mixed), len(exact)],
            of_one_length=alike,
        )


if __name__ == "__main__":
    main()
