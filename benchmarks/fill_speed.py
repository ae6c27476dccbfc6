"""How many bytes a second does one core write when it fills rows from flat ids?

64 million tokens of log-normal documents are planned as one window; the kernel then fills
ids, labels and mask into the same 9 MB of buffers again and again, a record batch at a time,
as `packer pack` does. Counted are the bytes of the three outputs. The same into buffers of 288 MB,
far beyond any cache, is in the details. 1.5 GB of memory, ten seconds.
"""

from __future__ import annotations

import numpy as np
from measuring import best_of, on_one_core, report
from packer_cli._kernels import filling
from plan_speed import log_normal_lengths
from settings import from_environment

from packer_cli.packing.plan import Planner, shuffled

MAX_LENGTH = 4096
LEAST_GB = 2.0
BATCH_TOKENS, LARGE_TOKENS = 1 << 20, 32 << 20


class Filling:
    """A planned window, and one set of output buffers for `buffer_tokens`."""

    def __init__(self, tokens: int, buffer_tokens: int) -> None:
        lengths = log_normal_lengths(tokens // 400, MAX_LENGTH)
        self.length = lengths[: np.searchsorted(np.cumsum(lengths), tokens)]
        self.begin = np.cumsum(self.length, dtype=np.int64) - self.length
        used = int(self.length.sum())
        self.ids = np.random.default_rng(1).integers(0, 128_000, used, np.uint32)
        self.order, self.row_offsets = shuffled(
            *Planner(MAX_LENGTH, "best-fit").rows(self.length, 0)[:2], 0
        )
        rows = self.rows_per_batch = buffer_tokens // MAX_LENGTH
        self.out = [np.zeros((rows, MAX_LENGTH), kind) for kind in (np.int32, np.int32, np.uint8)]
        self.cu_seqlens = np.zeros(len(self.order) + rows, np.int32)
        self.cu_offsets = np.zeros(rows + 1, np.int32)

    def fill(self) -> None:
        rows = len(self.row_offsets) - 1
        for first in range(0, rows, self.rows_per_batch):
            edges = self.row_offsets[first : first + self.rows_per_batch + 1]
            count = len(edges) - 1
            ids, labels, mask = (buffer[:count] for buffer in self.out)
            filling.fill_rows(
                self.ids, None, self.begin, self.length, self.order, edges, MAX_LENGTH, 0,
                ids, labels, mask, None, self.cu_seqlens, self.cu_offsets[: count + 1],
            )  # fmt: skip

    def gigabytes(self) -> float:
        return (len(self.row_offsets) - 1) * MAX_LENGTH * 9 / 1e9


def _rate(tokens: int, buffer_tokens: int) -> float:
    work = Filling(tokens, buffer_tokens)
    work.fill()
    return work.gigabytes() / best_of(10, work.fill)


def main() -> None:
    on_one_core()
    tokens = (16 if from_environment().quick else 64) << 20
    rate, large = _rate(tokens, BATCH_TOKENS), _rate(tokens, LARGE_TOKENS)
    report(
        "fill ids, labels and mask, one core",
        f">= {LEAST_GB:.0f} GB/s written",
        f"{rate:.1f} GB/s",
        rate >= LEAST_GB,
        gb_s=rate,
        large_buffers_gb_s=large,
    )


if __name__ == "__main__":
    main()
