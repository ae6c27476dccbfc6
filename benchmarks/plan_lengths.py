"""How long does `packer plan --lengths` take for a table, and how much memory?

10 million log-normal lengths (median 245, sigma 1.2, cut at the row) with integers and texts as
keys, planned into rows of 8,192 and written as index.parquet. The table is Parquet. Best of three,
and the highest peak. A minute; 1 GB of disk.
"""

from __future__ import annotations

from pathlib import Path

import inputs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from measuring import report, run
from plan_speed import log_normal_lengths
from settings import from_environment

MOST_SECONDS, MOST_GB, LENGTH = 5.0, 1.0, 8192
KEYS = {"without keys": None, "integers as keys": "number", "texts as keys": "name"}


def _table(samples: int) -> pa.Table:
    numbers = np.random.default_rng(1).permutation(samples)
    names = pa.array([f"sample-{number:012d}" for number in range(samples)])
    lengths = log_normal_lengths(samples, LENGTH)
    return pa.table({"number": numbers, "name": names, "tokens": lengths})


def main() -> None:
    settings = from_environment()
    samples = 500_000 if settings.quick else 10_000_000
    with inputs.Output(settings) as output:
        output.mkdir(parents=True, exist_ok=True)
        pq.write_table(_table(samples), output / "lengths.parquet")
        for words, key in KEYS.items():
            command: list[str | Path] = [
                settings.packer, "plan", output / "lengths.parquet", "--lengths", "tokens",
                "-l", str(LENGTH), "-o", output / "index.parquet", "--overwrite", "-q",
                *(["--key", key] if key else []),
            ]  # fmt: skip
            finished = [run(command, watch=True) for _ in range(3)]
            seconds, peak = (
                min(one.seconds for one in finished),
                max(one.peak for one in finished),
            )
            has_target = not settings.quick and key != "name"
            report(
                f"packer plan --lengths, {samples / 1e6:g} million, {words}",
                f"<= {MOST_SECONDS:g} s, <= {MOST_GB:g} GB" if has_target else "",
                f"{seconds:.2f} s, {peak / 1e9:.2f} GB",
                seconds <= MOST_SECONDS and peak <= MOST_GB * 1e9 if has_target else None,
                seconds=[one.seconds for one in finished],
                processor_seconds=[one.processor_seconds for one in finished],
                peak=peak,
            )


if __name__ == "__main__":
    main()
