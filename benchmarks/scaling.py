"""Are two workers nearly twice as fast as one, and never slower?

670 MB of text with llama3_1 at L = 4096, and inputs so small or so odd that a second worker has
next to nothing to do. One worker is kept on one core, all of its processes too. Two minutes.
"""

from __future__ import annotations

import os
from pathlib import Path

import inputs
from measuring import report, say, skip
from runs import pack
from settings import CHECKOUT, Settings, from_environment

LEAST, SLOWER = 1.7, 1.05
RUNS = 3


def _seconds(settings: Settings, files: list[Path], tokenizer: str | Path, workers: int) -> float:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(cores)[:workers]))
    try:
        with inputs.Output(settings) as output:
            options = ("--workers", str(workers))
            packed = pack(settings, files, output, tokenizer=tokenizer, options=options)
    finally:
        os.sched_setaffinity(0, cores)
    say(f"{workers} workers: {packed.finished.seconds:.2f} s")
    return packed.finished.seconds


def _compare(
    settings: Settings,
    what: str,
    target: str,
    files: list[Path],
    tokenizer: str | Path,
    least: float,
) -> None:
    runs = 1 if settings.quick else RUNS
    pairs = [
        tuple(_seconds(settings, files, tokenizer, workers) for workers in (1, 2))
        for _ in range(runs)
    ]
    one, two = (min(times) for times in zip(*pairs, strict=True))
    measured = f"{one / two:.2f} x ({one:.2f} and {two:.2f} s)"
    report(what, target, measured, None if settings.quick else one / two >= least, seconds=pairs)


def main() -> None:
    settings = from_environment()
    size = "20" if settings.quick else "670"
    what, target = f"two workers on {size} MB of text, against one", f">= {LEAST} x"
    if len(os.sched_getaffinity(0)) < 2:
        skip(what, target, "this machine has one core")
        return
    if why := inputs.missing(settings):
        skip(what, target, why)
        return
    _compare(settings, what, target, inputs.tenfold(settings), settings.tokenizer, LEAST)
    sample = [CHECKOUT / "sample_data" / "documents.jsonl"]
    never = f">= {1 / SLOWER:.2f} x"
    _compare(settings, "the same on sample_data", never, sample, "bytes", 1 / SLOWER)
    one_line = settings.cache / "one-document.jsonl"
    if not one_line.is_file():
        one_line.write_text('{"text": "' + "some words " * 3_000_000 + '"}\n')
    what = "the same on one document of 33 MB"
    _compare(settings, what, never, [one_line], settings.tokenizer, 1 / SLOWER)


if __name__ == "__main__":
    main()
