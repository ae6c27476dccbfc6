"""What does it cost to carry values beside tokens?

200 million token ids in documents of 670 on average, from Arrow, with 0, 4 and 8 bytes of values
for each token: processor time of whole processes, in turn. Half a minute; 6 GB of disk.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import inputs
import numpy as np
import pyarrow as pa
from measuring import report
from runs import pack
from settings import from_environment

MOST, RUNS = 1.1, 3
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


def main() -> None:
    settings = from_environment()
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
