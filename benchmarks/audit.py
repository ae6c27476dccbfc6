"""How fast is `packer audit`, on one core, and how much memory does it take?

200 million tokens in rows of 4,096, with labels and boundaries, as Arrow (a packed directory's
columns) and as Parquet. Half a minute.
"""

from __future__ import annotations

import os
from pathlib import Path

import inputs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from measuring import report, run
from settings import from_environment

LEAST = 50e6  # tokens a second
MOST_GB = 0.5
LENGTH, MEAN = 4096, 400
_BATCH = 1000  # rows, as `datasets` writes them


def _batch(random: np.random.Generator, rows: int) -> pa.RecordBatch:
    """Rows of documents that end with EOS, 2, the first half of which is not trained."""
    total = rows * LENGTH
    ids = random.integers(10, 120_000, total, np.int32)
    cuts = np.unique(np.append(random.integers(2, total, total // MEAN), total))
    cuts = np.unique(np.append(cuts, np.arange(LENGTH, total + 1, LENGTH)))
    ids[cuts - 1] = 2
    lengths = np.diff(cuts, prepend=0)
    half = lengths // 2
    flags = np.repeat(np.tile([False, True], len(lengths)),
                      np.stack([lengths - half, half], axis=1).reshape(-1))  # fmt: skip
    labels = np.where(flags, ids, np.int32(-100)).astype(np.int32)
    first = np.searchsorted(cuts, np.arange(0, total + 1, LENGTH)[1:], side="left") + 1
    offsets = pa.array(np.append(0, first).astype(np.int32))
    return pa.RecordBatch.from_arrays(
        [
            pa.ListArray.from_arrays(np.arange(0, total + 1, LENGTH, dtype=np.int32), values)
            for values in (pa.array(ids), pa.array(labels))
        ]
        + [pa.ListArray.from_arrays(offsets, pa.array(lengths.astype(np.int32)))],
        names=["input_ids", "labels", "seq_lengths"],
    )


def _write(folder: Path, tokens: int) -> None:
    random, rows = np.random.default_rng(0), tokens // LENGTH
    folder.mkdir(parents=True, exist_ok=True)
    schema = _batch(random, 1).schema
    with (
        pa.ipc.new_stream(str(folder / "rows.arrow"), schema) as arrow,
        pq.ParquetWriter(folder / "rows.parquet", schema) as parquet,
    ):
        for begin in range(0, rows, _BATCH):
            batch = _batch(random, min(_BATCH, rows - begin))
            arrow.write_batch(batch)
            parquet.write_batch(batch)


def main() -> None:
    settings = from_environment()
    tokens = 4_000_000 if settings.quick else 200_000_000
    with inputs.Output(settings) as output:
        _write(output, tokens)
        for name in ("arrow", "parquet"):
            command: list[str | Path] = [
                "taskset", "-c", str(max(os.sched_getaffinity(0))), settings.packer, "audit",
                output / f"rows.{name}", "--json",
            ]  # fmt: skip
            finished = [run(command, settle=False, watch=True) for _ in range(3)]
            seconds, peak = min(one.seconds for one in finished), max(one.peak for one in finished)
            rate = tokens / seconds
            report(
                f"packer audit, {tokens / 1e6:.0f} million tokens, {name.title()}, one core",
                "" if settings.quick else f">= {LEAST / 1e6:.0f} M tokens/s, <= {MOST_GB} GB",
                f"{rate / 1e6:.0f} M tokens/s, {peak / 1e9:.2f} GB",
                None if settings.quick else rate >= LEAST and peak <= MOST_GB * 1e9,
                seconds=[one.seconds for one in finished],
                peak=peak,
            )


if __name__ == "__main__":
    main()
