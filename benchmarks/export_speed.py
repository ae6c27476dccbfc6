"""How fast are tokenized documents exported for trainers that pack them?

670 MB of text, tokenized (170 million tokens, 680 MB of ids): to Parquet, against pyarrow writing
the same table from memory, and to OLMo-core's arrays, against a plain write and fsync of as many
bytes. Whole processes, llama3_1. A minute; 3 GB of disk.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import inputs
import pyarrow.parquet as pq
from from_tokens import plain_write
from measuring import report, run, skip
from settings import Settings, from_environment

LEAST = {"documents": 200, "olmo": 500}  # MB of ids, 4 bytes each, a second
LEAST_SHARE, RUNS = 0.8, 3  # of what pyarrow, or the disk, does


def _by_pyarrow(part: Path, target: Path) -> float:
    """Seconds in which pyarrow writes the table of a part alone, as the export does."""
    table = pq.read_table(part)
    rows = pq.ParquetFile(part).metadata.row_group(0).num_rows
    begun = time.perf_counter()
    pq.write_table(table, target, rows, compression="zstd", use_dictionary=False)
    return time.perf_counter() - begun


def _exports(settings: Settings) -> None:
    files, runs = inputs.tenfold(settings), 1 if settings.quick else RUNS
    size = "20" if settings.quick else "670"
    with inputs.Output(settings) as output:
        tokens, other = output.parent / "tokens", output.parent / "other"
        command: list[str | Path] = [settings.packer, "tokenize", *files, "--output", tokens]
        run([*command, "--tokenizer", settings.tokenizer, "--quiet"])
        for to, least in LEAST.items():
            seconds, alone = [], []
            for _ in range(runs):
                shutil.rmtree(output, ignore_errors=True)
                command = [settings.packer, "export", tokens, "--to", to, "--output", output]
                seconds.append(run([*command, "--quiet"]).seconds)
                if to == "olmo":
                    alone.append(plain_write(other, ids := _size(output, ".npy")))
                else:
                    alone.append(sum(_by_pyarrow(part, other) for part in output.glob("*.parquet")))
                    ids = 4 * sum(_tokens(part) for part in output.glob("*.parquet"))
            share, speed = min(alone) / min(seconds), ids / min(seconds) / 1e6
            what = "a plain write of as much" if to == "olmo" else "pyarrow alone"
            report(
                f"{size} MB of text, tokenized, exported to {to}",
                "" if settings.quick else f">= {least} MB of ids/s, or {LEAST_SHARE} x {what}",
                f"{speed:.0f} MB/s, {share:.2f} x",
                None if settings.quick else speed >= least or share >= LEAST_SHARE,
                seconds=seconds, alone_seconds=alone, bytes=ids,
            )  # fmt: skip


def _size(folder: Path, ending: str) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.name.endswith(ending))


def _tokens(part: Path) -> int:
    """Ids in a part: the values of its first column."""
    groups = pq.ParquetFile(part).metadata
    return sum(
        groups.row_group(group).column(0).num_values for group in range(groups.num_row_groups)
    )


def main() -> None:
    settings = from_environment()
    if why := inputs.missing(settings):
        skip("exports of tokenized documents", "", why)
        return
    _exports(settings)


if __name__ == "__main__":
    main()
