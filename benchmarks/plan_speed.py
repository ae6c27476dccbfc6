"""How long does a plan take a document, and how does that compare with sorting?

Lengths are log-normal (median 245, sigma 1.2, cut at the row), as document lengths are. Timed, for
the default strategy and for the exact order, is `Planner.rows`, the call behind `packer pack` and
`plan_packing`, and in the same minute `numpy.argsort(kind="stable")` of the same array, which a
textbook plan begins with. With the shuffle that `packer pack` adds: in the details.

Then the same of the public function, `plan_packing(...).metrics`: with its checks, overlong
policy, losses and metrics, where every document fits, and where a tenth is up to twice as long
as a row (the slowest policy counts). One thread; 2 GB of memory; about two minutes.
"""

from __future__ import annotations

import numpy as np
from measuring import best_of, on_one_core, report, say
from settings import from_environment

from packer_cli import plan_packing
from packer_cli.packing.plan import Planner, shuffled
from packer_cli.records import Int32

MOST_NS = {"best-fit": 200.0, "best-fit-decreasing": 100.0}  # with the seeded order, 50 of these
MOST_PUBLIC_NS, MOST_OVERLONG_NS = 200.0, 220.0
ROWS_LENGTHS = (4096, 131072)


def log_normal_lengths(count: int, max_length: int, seed: int = 0) -> Int32:
    """int32[count], 1..max_length."""
    lengths = np.random.default_rng(seed).lognormal(5.5, 1.2, count)
    return np.clip(lengths, 1, max_length).astype(np.int32)


def _measure(strategy: str, count: int, max_length: int, times: int) -> None:
    lengths = log_normal_lengths(count, max_length)
    say(f"plan: {count:,} documents, max length {max_length}")
    plan = best_of(times, lambda: Planner(max_length, strategy).rows(lengths, 0)[:2])
    argsort = best_of(3, lambda: np.argsort(lengths, kind="stable"))
    mixed = best_of(3, lambda: shuffled(*Planner(max_length, strategy).rows(lengths, 0)[:2], 0))
    ns, ratio = plan / count * 1e9, plan / argsort
    metrics = plan_packing(lengths, max_length, strategy=strategy).metrics
    report(
        f"plan, {strategy}, n = {count // 1_000_000}M, L = {max_length}",
        f"<= {MOST_NS[strategy]:.0f} ns a document",
        f"{ns:.1f} ns, {ratio:.3f} x argsort",
        ns <= MOST_NS[strategy],
        ns_a_document=ns,
        ratio_to_argsort=ratio,
        argsort_ns_a_document=argsort / count * 1e9,
        with_shuffle_ns_a_document=mixed / count * 1e9,
        rows=metrics.rows,
        lower_bound_rows=metrics.lower_bound_rows,
    )


def with_overlong(lengths: Int32, max_length: int, seed: int = 1) -> Int32:
    """The lengths, but for a tenth of them, which are longer than a row and up to two rows."""
    rng, lengths = np.random.default_rng(seed), lengths.copy()
    chosen = rng.choice(len(lengths), len(lengths) // 10, replace=False)
    lengths[chosen] = rng.integers(max_length + 1, 2 * max_length + 1, len(chosen))
    return lengths


def _measure_public(count: int, max_length: int) -> None:
    say(f"plan_packing: {count:,} documents, max length {max_length}")
    fitting = log_normal_lengths(count, max_length)
    _report_public(fitting, max_length, ("error",), MOST_PUBLIC_NS, "")
    overlong = with_overlong(fitting, max_length)
    policies = ("split", "truncate", "drop")
    _report_public(overlong, max_length, policies, MOST_OVERLONG_NS, ", a tenth overlong")


def _report_public(
    lengths: Int32, max_length: int, policies: tuple[str, ...], most: float, which: str
) -> None:
    count, kernel_input = len(lengths), np.minimum(lengths, max_length)
    argsort = best_of(3, lambda: np.argsort(lengths, kind="stable"))
    kernel = best_of(5, lambda: Planner(max_length, "best-fit").rows(kernel_input, 0)[:2])
    seconds = {
        policy: best_of(9, lambda p=policy: plan_packing(lengths, max_length, overlong=p).metrics)  # type: ignore[misc]
        for policy in policies
    }
    slowest = max(seconds.values())
    ns, ratio = slowest / count * 1e9, slowest / argsort
    report(
        f"plan_packing with metrics, n = {count // 1_000_000}M, L = {max_length}{which}",
        f"<= {most:.0f} ns a document",
        f"{ns:.1f} ns, {ratio:.3f} x argsort",
        ns <= most,
        ns_a_document={policy: one / count * 1e9 for policy, one in seconds.items()},
        ratio_to_argsort=ratio,
        argsort_ns_a_document=argsort / count * 1e9,
        kernel_ns_a_document=kernel / count * 1e9,
    )


def main() -> None:
    on_one_core()
    quick = from_environment().quick
    for max_length in ROWS_LENGTHS:
        _measure_public(1_000_000 if quick else 5_000_000, max_length)
    counts = (1_000_000,) if quick else (1_000_000, 10_000_000)
    for count in counts:
        for strategy in MOST_NS:
            for max_length in ROWS_LENGTHS:
                _measure(strategy, count, max_length, times=15 if count <= 1_000_000 else 5)


if __name__ == "__main__":
    main()
