"""What does it cost to carry values beside tokens, and how fast are agent traces?

200 million token ids in documents of 670 on average, from Arrow, with 0, 4 and 8 bytes of values
for each token: processor time of whole processes, in turn. Then a teacher's 32 ids and
log-probabilities for each of 10 million tokens, attached from Parquet to a tokenized directory,
against pyarrow's reading alone; and 100 MB of traces in JSON lines, of nodes with 300 tokens on
average, without and with log-probabilities: the time of whole processes with two workers. Two
minutes; 6 GB of disk.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

import inputs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from measuring import report, run
from runs import pack
from settings import CHECKOUT, Settings, from_environment

MOST, RUNS, LEAST_MB = 1.1, 3, 100.0
_NODE = 300  # tokens, on average
_DOCUMENTS, _MEAN = 2000, 670  # of a record batch
_K, _MOST_BYTES = 32, 130
_READ = """import sys, pyarrow.parquet as pq
for batch in pq.ParquetFile(sys.argv[1]).iter_batches(100, columns=["ids", "logprobs"]):
    pass
"""
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


def _write_scores(tokenized: Path, path: Path) -> None:
    """A row for each document, as a job writes them that reads the directory's shards."""
    random, kinds = np.random.default_rng(1), {"ids": pa.uint16(), "logprobs": pa.float16()}
    lists = {name: pa.list_(pa.list_(kind, _K)) for name, kind in kinds.items()}
    schema, first = pa.schema([("document", pa.int64()), *lists.items()]), 0
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False) as writer:
        for shard in sorted(tokenized.glob("documents-*.arrow")):
            for batch in pa.ipc.open_stream(shard):
                for begin in range(0, len(batch), 200):
                    ids = batch.column("input_ids").slice(begin, 200)
                    offsets = pa.array(np.append(0, np.cumsum(ids.value_lengths())), pa.int32())
                    shape = offsets[-1].as_py() * _K
                    made = {
                        "ids": random.integers(0, 50_000, shape, np.uint16),
                        "logprobs": (-8 * random.random(shape, np.float32)).astype(np.float16),
                    }
                    columns = [
                        pa.ListArray.from_arrays(
                            offsets, pa.FixedSizeListArray.from_arrays(pa.array(values), _K)
                        ).cast(lists[name])
                        for name, values in made.items()
                    ]
                    numbers = np.arange(first, first := first + len(ids))
                    writer.write_table(pa.table([numbers, *columns], schema=schema))


def _attach(settings: Settings) -> None:
    tokens = 400_000 if settings.quick else 10_000_000
    with inputs.Output(settings) as tokenized:
        records, scores = (tokenized.with_name(f"a.{form}") for form in ("arrow", "parquet"))
        attached = tokenized.with_name("attached")
        _write(records, tokens)
        run([settings.packer, "tokenize", records, "--output", tokenized, "--quiet"])
        records.unlink()
        _write_scores(tokenized, scores)
        carry = [f"--carry=ids:uint16[{_K}]", f"--carry=logprobs:float16[{_K}]"]
        command: list[str | Path] = [settings.packer, "tokenize", tokenized, "--attach", scores]
        command += [*carry, "--output", attached, "--quiet", "--json"]
        reading, attaching = run([sys.executable, "-c", _READ, scores]), run(command)
        found = json.loads(attaching.stdout)
        plain = sum(one.stat().st_size for one in tokenized.glob("*.arrow"))
    seconds, size = attaching.processor_seconds, found["bytes"] - plain
    each = size / found["tokens"]
    report(
        f"attach a teacher's top {_K} to {found['tokens'] / 1e6:.0f} million tokens, from Parquet",
        f"<= {_MOST_BYTES} bytes a token",
        f"{each:.1f} bytes a token, {size / seconds / 1e6:.0f} MB a second of processor time "
        f"({seconds / reading.processor_seconds:.1f} x that of reading with pyarrow)",
        each <= _MOST_BYTES,
        seconds=seconds,
        reading_seconds=reading.processor_seconds,
    )


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
    _attach(settings)
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
