"""How many megabytes of text a second does `packer pack` take in, when it runs for long?

670 MB (the 66 MB ten times, each with words never seen before), llama3_1, L = 4096. Whole
processes; the input is in memory, the output fsynced. Half a minute, 1.6 GB of disk.
"""

from __future__ import annotations

import os

import inputs
from measuring import report, say, skip
from runs import pack
from settings import from_environment

LEAST_MB = 60.0
RUNS = 3
TARGET = f">= {LEAST_MB:.0f} MB/s on two cores"


def main() -> None:
    settings = from_environment()
    what = f"pack {'20' if settings.quick else '670'} MB of text"
    target = "" if settings.quick else TARGET  # so little input is mostly start-up
    if why := inputs.missing(settings):
        skip(what, target, why)
        return
    files = inputs.tenfold(settings)
    seconds = []
    for _ in range(1 if settings.quick else RUNS):
        with inputs.Output(settings) as output:
            packed = pack(settings, files, output, tokenizer=settings.tokenizer)
        seconds.append(packed.finished.seconds)
        say(f"packer: {seconds[-1]:.2f} s")
    size, best = inputs.size(files), min(seconds)
    rate = size / best / 1e6
    report(
        what,
        target,
        f"{rate:.0f} MB/s ({best:.1f} s)",
        rate >= LEAST_MB if target else None,
        mb_s=rate,
        tokens_s=packed.figures["tokens"] / best,
        seconds=seconds,
        input_bytes=size,
        output_bytes=packed.figures["bytes"],
        cores=len(os.sched_getaffinity(0)),
    )


if __name__ == "__main__":
    main()
