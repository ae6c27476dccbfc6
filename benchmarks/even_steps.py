"""How even are steps, what does balance cost, and how soon is its first row there?

The table of even steps: document lengths are log-normal (mu 6.2, sigma 1.6), split where they are
longer than a row, and packed with best-fit; a row costs 6 · 4096 · L + Σ l². Of each step, the
costliest rank against the mean rank, mean over steps: in random order, dealt within steps, and with
rows of like cost in a step. In the details, the same of micro-steps, for trainers that wait there.

Then a million rows: seconds until the first is there, and until all are dealt. Last, in the peers'
environment, which has torch (peers/even_steps.py): rows a second of processor time out of a
DataLoader whose sampler balances, against one whose sampler does not. Half a minute; 1 GB of
memory.
"""

from __future__ import annotations

import json
import time
from typing import Any

import inputs
import numpy as np
from measuring import report, run, say, skip
from runs import pack
from settings import BENCHMARKS, Settings, from_environment

from packer_cli import plan_packing
from packer_cli.packing.figures import squared_sums
from packer_cli.records import Int64
from packer_cli.steps import Float64, Order, Schedule, StepSizes, row_costs

HIDDEN_SIZE, RANKS, STEPS = 4096, 64, 128
LENGTHS, MICRO_BATCHES = (4096, 32_768, 131_072), (1, 4)
MOST = {
    (32_768, 1, "order"): 1.02,
    (32_768, 4, "step"): 1.04,
    (131_072, 1, "order"): 1.05,
}
NAMES = {None: "random order", "step": "dealt within a step", "order": "like cost in a step"}
READY_ROWS, READY_SECONDS, LEAST = 1_000_000, 2.0, 0.95
# rows of, ranks, rows of a micro-batch
LOADERS = ((4096, 8, 8), (32_768, 64, 1))


def squared_lengths(max_length: int, rows: int) -> Int64:
    """int64[about so many rows], of best-fit rows of log-normal lengths."""
    mean = np.exp(6.2 + 1.6**2 / 2)
    drawn = np.random.default_rng(0).lognormal(6.2, 1.6, int(rows * max_length / mean))
    lengths = np.clip(drawn, 1, 2**30).astype(np.int32)
    plan = plan_packing(lengths, max_length, seed=0, overlong="split")
    return squared_sums(plan.pieces.length[plan.order], plan.row_offsets)


def schedule(costs: Float64, micro_batches: int, balance: Any) -> Schedule:
    sizes = StepSizes(RANKS, 1, micro_batches)
    return Schedule(Order(len(costs)), sizes, balance=balance, costs=costs)


def unevenness(costs: Float64, micro_batches: int, balance: Any) -> tuple[float, float]:
    """The costliest rank by the mean rank, mean over steps; of a step, and of its micro-steps."""
    size = RANKS * micro_batches
    steps = len(costs) // size
    rows = schedule(costs, micro_batches, balance).rows_at(0, steps * size)
    by_rank = costs[rows].reshape(steps, micro_batches, RANKS)
    mean = by_rank.mean(axis=2).sum(axis=1)
    step = by_rank.sum(axis=1).max(axis=1) / mean
    micro_steps = by_rank.max(axis=2).sum(axis=1) / mean
    return float(step.mean()), float(micro_steps.mean())


def report_table(settings: Settings) -> None:
    for length in LENGTHS[:2] if settings.quick else LENGTHS:
        steps = STEPS // 2 if settings.quick or length > 100_000 else STEPS
        say(f"even steps: rows of {length:,}")
        squared = squared_lengths(length, RANKS * max(MICRO_BATCHES) * steps)
        costs = row_costs(squared, length, HIDDEN_SIZE)
        for micro_batches in MICRO_BATCHES:
            for balance, name in NAMES.items():
                step, micro_steps = unevenness(costs, micro_batches, balance)
                most = MOST.get((length, micro_batches, str(balance)))
                report(
                    f"costliest rank of {RANKS} x {micro_batches}, rows of {length:,}: {name}",
                    f"<= {most} x the mean rank" if most else "",
                    f"{step:.3f} x" + ("" if micro_batches == 1 else
                                       f"; {micro_steps:.3f} x with a wait in each micro-step"),
                    None if most is None else step <= most,
                    step=step, micro_steps=micro_steps, rows=len(costs),
                )  # fmt: skip


def report_ready() -> None:
    squared = np.random.default_rng(0).lognormal(18, 1.2, READY_ROWS).astype(np.int64)
    for balance in ("step", "order"):
        begun = time.perf_counter()
        costs = row_costs(squared, 32_768, HIDDEN_SIZE)
        one = schedule(costs, 4, balance)
        one.rows_at(0, RANKS)
        ready = time.perf_counter() - begun
        for first in range(0, READY_ROWS - 4096, 4096):
            one.rows_at(first, first + 4096)
        dealt = time.perf_counter() - begun
        report(
            f"a million rows, balance={balance!r}: until the first is there",
            f"<= {READY_SECONDS:.0f} s",
            f"{ready:.3f} s; all are dealt in {dealt:.2f} s, {costs.nbytes / READY_ROWS:.0f} bytes "
            "a row",
            ready <= READY_SECONDS,
            ready=ready,
            dealt=dealt,
        )


def report_loaders(settings: Settings) -> None:
    target = f">= {LEAST} x the rows/s without"
    rows = {
        (case, balance): f"loader, rows of {case[0]:,}, rank 0 of {case[1]}, balance={balance!r}"
        for case in LOADERS
        for balance in ("step", "order")
    }
    why = inputs.missing(settings)
    if not settings.peers_python.is_file():
        why = "no peers' environment: make peers"
    if why:
        for row in rows.values():
            skip(row, target, why)
        return
    for case in LOADERS:
        length, ranks, batch_size = case
        with inputs.Output(settings) as output:
            pack(settings, inputs.once(settings), output, tokenizer=settings.tokenizer,
                 max_length=length)  # fmt: skip
            script = BENCHMARKS / "peers" / "even_steps.py"
            sizes = [str(ranks), str(batch_size)]
            found = json.loads(run([settings.peers_python, script, output, *sizes]).stdout)
        rates = found["rows_per_second"]
        for balance in ("step", "order"):
            ours, plain = rates[f"loader, {balance}"], rates["loader, None"]
            alone = rates[f"sampler, {balance}"], rates["sampler, None"]
            measured = (
                f"{ours / plain:.3f} x ({ours:,.0f} and {plain:,.0f} rows/s); the sampler alone "
                f"{alone[0]:,.0f} and {alone[1]:,.0f}"
            )
            report(rows[case, balance], target, measured, ours >= LEAST * plain, **found)


def main() -> None:
    settings = from_environment()
    report_table(settings)
    report_ready()
    report_loaders(settings)


if __name__ == "__main__":
    main()
