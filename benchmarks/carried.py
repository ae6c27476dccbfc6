"""What does it cost to carry values beside tokens, and how fast are agent traces?

200 million token ids in documents of 670 on average, from Arrow, with 0, 4 and 8 bytes of values
for each token: processor time of whole processes, in turn. Then 100 MB of traces in JSON lines, of
nodes with 300 tokens on average, without and with log-probabilities: the time of whole processes
with two workers. Two minutes; 6 GB of disk.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

import inputs
import numpy as np
import pyarrow as pa
from measuring import report, run
from runs import pack
from settings import CHECKOUT, Settings, from_environment

MOST, RUNS, LEAST_MB = 1.1, 3, 100.0
_NODE = 300  # tokens, on average
_DOCUMENTS, _MEAN = 2000, 670  # of a record batch
_CARRY = (
    (),
    ("--carry", "logprobs:float32"),
    ("--carry", "logprobs:float32", "--carry", "weights:float32"),
)


def _write(path: Path, tokens: int) -> None:
    random, left = np.random.default_rng(0), tokens
    numbers = pa.large_list(pa.float32())
    schema = pa.schema(
        [("input_ids", pa.large_list(pa.int32())), ("logprobs", numbers), ("weights", numbers)]
    )
    with pa.ipc.new_stream(str(path), schema) as writer:
        while left > 0:
            lengths = random.integers(1, 2 * _MEAN, _DOCUMENTS)
            offsets = pa.array(np.append(0, np.cumsum(lengths)))
            total = int(lengths.sum())
            values = [random.integers(0, 256, total, np.int32)]
            values += [random.random(total, np.float32) for _ in range(2)]
            arrays = [pa.LargeListArray.from_arrays(offsets, pa.array(one)) for one in values]
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
            left -= total


def _traces(settings: Settings) -> None:
    """Rows of agent traces, without a tokenizer."""
    most = 2_000_000 if settings.quick else 100_000_000
    with inputs.Output(settings) as output:
        path = output.with_name("traces.jsonl")
        run([sys.executable, CHECKOUT / "tests" / "traces.py", path, str(most), str(_NODE)])
        size = path.stat().st_size
        command = [settings.packer, "pack", path, "--max-length", "8192", "--workers", "2",
                   "--output", output, "--overwrite", "--quiet", "--json"]  # fmt: skip
        for what, carry in (("", ()), (" with log-probabilities", ("--carry", "logprobs:float32"))):
            runs = [run([*map(str, command), *carry]) for _ in range(1 if settings.quick else RUNS)]
            best = min(runs, key=lambda one: one.seconds)
            rate = size / best.seconds / 1e6
            report(
                f"pack, {size / 1e6:.0f} MB of agent traces{what}",
                "" if carry or settings.quick else f">= {LEAST_MB:.0f} MB/s on two cores",
                f"{rate:.0f} MB/s ({best.seconds:.2f} s, {best.processor_seconds:.2f} s of "
                "processor time)",
                None if carry or settings.quick else rate >= LEAST_MB,
                mb_s=rate,
                share_of_target=rate / LEAST_MB,
                seconds=[one.seconds for one in runs],
                processor_seconds=[one.processor_seconds for one in runs],
            )
        path.unlink()


def main() -> None:
    settings = from_environment()
    _of_columns(settings)
    _traces(settings)


def _of_columns(settings: Settings) -> None:
    """Rows of token ids from Arrow."""
    tokens = 4_000_000 if settings.quick else 200_000_000
    with inputs.Output(settings) as output:
        path = output.with_name("carried.arrow")
        _write(path, tokens)
        seconds: list[list[float]] = [[] for _ in _CARRY]
        for _ in range(1 if settings.quick else RUNS):
            for own, options in zip(seconds, _CARRY, strict=True):
                packed = pack(settings, [path], output, tokenizer="bytes", options=options)
                own.append(packed.finished.processor_seconds)
        path.unlink()
    plain, *others = map(median, seconds)
    for number, carrying in enumerate(others, 1):
        report(
            f"pack, {tokens / 1e6:.0f} million token ids, {4 * number} bytes a token carried",
            f"<= {MOST} x the processor time of none" if number == 1 else "",
            f"{carrying / plain:.2f} x ({carrying:.1f} s, {plain:.1f} s without)",
            carrying / plain <= MOST if number == 1 and not settings.quick else None,
            seconds=carrying,
            plain_seconds=plain,
        )


if __name__ == "__main__":
    main()
