"""How much faster is `packer pack` than datasets + tokenizers + trl.pack_dataset, saved?

66 MB of code, documentation and 80 languages, llama3_1, L = 4096. Whole processes, imports
included, alternating; the disk is idle and the input in memory when each starts; the peers'
caches are empty (what packer writes is fsynced, what the peers write is not). The fastest of
each counts. Then ten times as much (see inputs.py), where starting up hardly counts: packer packs
all of it, and the peers are taken to need ten times what they needed for a tenth. About three
minutes, 1.6 GB of disk.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

import inputs
from measuring import report, run, say, skip
from runs import MAX_LENGTH, pack
from settings import BENCHMARKS, Settings, from_environment

LEAST_RATIO, MOST_ROWS = 12.0, 1.002
RUNS, PEER_RUNS = 5, 2
WHAT = "pack 66 MB of text, against datasets + tokenizers + TRL"
TARGET = f">= {LEAST_RATIO:.0f} x, rows <= {MOST_ROWS} x theirs"

LEAST_LARGE_RATIO, LARGE_RUNS = 25.0, 3
LARGE = "pack 670 MB of text, against TRL's way on a tenth of it"
LARGE_TARGET = f">= {LEAST_LARGE_RATIO:.0f} x, with the tenth's time times ten"


def _theirs(settings: Settings, files: list[Path]) -> tuple[float, int]:
    """(seconds, rows) of the peers' run."""
    script = BENCHMARKS / "peers" / "trl_pack.py"
    with inputs.Output(settings) as output, tempfile.TemporaryDirectory() as home:
        command: list[str | Path] = [settings.peers_python, script, output, settings.tokenizer]
        environment = {"HF_HOME": home, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        finished = run([*command, str(MAX_LENGTH), *files], environment=environment)
    return finished.seconds, int(finished.stdout.split()[-2])


def _ours(settings: Settings, files: list[Path]) -> tuple[float, int]:
    with inputs.Output(settings) as output:
        packed = pack(settings, files, output, tokenizer=settings.tokenizer)
    return packed.finished.seconds, packed.figures["rows"]


def main() -> None:
    settings = from_environment()
    why = inputs.missing(settings)
    if settings.quick or not settings.peers_python.is_file():
        why = "quick" if settings.quick else "no peers' environment: make peers"
    if why:
        skip(WHAT, TARGET, why)
        skip(LARGE, LARGE_TARGET, why)
        return
    files = inputs.once(settings)
    ours, theirs = [], []
    for turn in range(RUNS):
        ours.append(_ours(settings, files))
        say(f"packer: {ours[-1][0]:.2f} s")
        if turn < PEER_RUNS:
            theirs.append(_theirs(settings, files))
            say(f"peers: {theirs[-1][0]:.2f} s")
    (our_best, our_rows), (their_best, their_rows) = min(ours), min(theirs)
    ratio, row_ratio = their_best / our_best, our_rows / their_rows
    report(
        WHAT,
        TARGET,
        f"{ratio:.1f} x ({our_best:.2f} s and {their_best:.1f} s), rows {row_ratio:.4f} x",
        ratio >= LEAST_RATIO and row_ratio <= MOST_ROWS,
        ratio=ratio,
        median_ratio=median(s for s, _ in theirs) / median(s for s, _ in ours),
        seconds=[seconds for seconds, _ in ours],
        their_seconds=[seconds for seconds, _ in theirs],
        input_bytes=inputs.size(files),
        mb_s=inputs.size(files) / our_best / 1e6,
        their_mb_s=inputs.size(files) / their_best / 1e6,
        rows=our_rows,
        their_rows=their_rows,
    )
    report_large(settings, their_best)


def report_large(settings: Settings, their_tenth: float) -> None:
    """The row of ten times the input; `their_tenth`: the peers' seconds for a tenth."""
    files = inputs.tenfold(settings)
    seconds = []
    for _ in range(LARGE_RUNS):
        seconds.append(_ours(settings, files)[0])
        say(f"packer: {seconds[-1]:.2f} s")
    best, theirs = min(seconds), inputs.REPETITIONS * their_tenth
    report(
        LARGE,
        LARGE_TARGET,
        f"{theirs / best:.1f} x ({best:.2f} s, and {inputs.REPETITIONS} x {their_tenth:.1f} s)",
        theirs / best >= LEAST_LARGE_RATIO,
        ratio=theirs / best,
        seconds=seconds,
        their_seconds_of_a_tenth=their_tenth,
        input_bytes=inputs.size(files),
        mb_s=inputs.size(files) / best / 1e6,
    )


if __name__ == "__main__":
    main()
