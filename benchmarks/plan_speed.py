"""How long does a best-fit plan take a document, and how does that compare with sorting?

Lengths are log-normal (median 245, sigma 1.2, cut at the row), as document lengths are. Timed
is `plan_rows`, the call behind `packer pack` and `plan_packing`, and in the same minute
`numpy.argsort(kind="stable")` of the same int32 array, which a textbook plan begins with.
With the shuffle that `packer pack` adds, and through `plan_packing` with its checks and
overlong policy: in the details. One thread; 2 GB of memory; about a minute.
"""

from __future__ import annotations

import numpy as np
from measuring import best_of, on_one_core, report, say
from settings import from_environment

from packer_cli import plan_packing
from packer_cli.packing.planning import plan_rows
from packer_cli.records import Int32

MOST_NS, MOST_OF_ARGSORT = 8.0, 0.2
ROWS_LENGTHS = (4096, 131072)


def log_normal_lengths(count: int, max_length: int, seed: int = 0) -> Int32:
    """int32[count], 1..max_length."""
    lengths = np.random.default_rng(seed).lognormal(5.5, 1.2, count)
    return np.clip(lengths, 1, max_length).astype(np.int32)


def _measure(count: int, max_length: int, times: int) -> None:
    lengths = log_normal_lengths(count, max_length)
    say(f"plan: {count:,} documents, max length {max_length}")
    plan = best_of(times, lambda: plan_rows(lengths, max_length, "best-fit", 0, False))
    argsort = best_of(3, lambda: np.argsort(lengths, kind="stable"))
    shuffled = best_of(3, lambda: plan_rows(lengths, max_length, "best-fit", 0, True))
    public = best_of(3, lambda: plan_packing(lengths, max_length))
    ns, ratio = plan / count * 1e9, plan / argsort
    metrics = plan_packing(lengths, max_length).metrics
    report(
        f"plan, best-fit, n = {count // 1_000_000}M, L = {max_length}",
        f"<= {MOST_NS:.0f} ns a document, <= {MOST_OF_ARGSORT} x argsort",
        f"{ns:.1f} ns, {ratio:.3f} x",
        ns <= MOST_NS and ratio <= MOST_OF_ARGSORT,
        ns_a_document=ns,
        ratio_to_argsort=ratio,
        argsort_ns_a_document=argsort / count * 1e9,
        with_shuffle_ns_a_document=shuffled / count * 1e9,
        plan_packing_ns_a_document=public / count * 1e9,
        rows=metrics.rows,
        lower_bound_rows=metrics.lower_bound_rows,
    )


def main() -> None:
    on_one_core()
    counts = (1_000_000,) if from_environment().quick else (1_000_000, 10_000_000)
    for count in counts:
        for max_length in ROWS_LENGTHS:
            _measure(count, max_length, times=15 if count <= 1_000_000 else 5)


if __name__ == "__main__":
    main()
