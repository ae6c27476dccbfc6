"""How soon does `packer` answer: --help, and stats on a finished directory?

Whole processes, the fastest of 20 (quick: of two) and their median. The directory is sample_data
packed into one shard, and once more into hundreds. A quarter of a minute.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import inputs
from measuring import report, run
from runs import pack
from settings import CHECKOUT, from_environment

HELP_SECONDS, STATS_SECONDS = 0.25, 0.5
RUNS = 20


def _measure(what: str, limit: float, command: list[str | Path], runs: int) -> None:
    run(command, settle=False)
    seconds = [run(command, settle=False).seconds for _ in range(runs)]
    report(
        what,
        f"< {limit} s",
        f"{min(seconds):.3f} s, median {median(seconds):.3f} s",
        min(seconds) < limit,
        best_seconds=min(seconds),
        median_seconds=median(seconds),
    )


def main() -> None:
    settings = from_environment()
    runs = 2 if settings.quick else RUNS
    _measure("packer --help", HELP_SECONDS, [settings.packer, "--help"], runs)
    sample = [CHECKOUT / "sample_data" / "documents.jsonl"]
    for options in ((), ("--unit-bytes", "1K")):
        with inputs.Output(settings) as output:
            packed = pack(
                settings, sample, output, tokenizer="bytes", max_length=256, options=options
            )
            shards = packed.figures["shards"]
            what = f"packer stats, {shards} shard{'s' if shards > 1 else ''}"
            _measure(what, STATS_SECONDS, [settings.packer, "stats", output], runs)


if __name__ == "__main__":
    main()
