"""What would keep more cores from packing faster: Python's lock, and memory.

Text (670 MB) and conversations (174 MB), llama3_1, L = 4096. py-spy samples which threads run and
which of them holds the lock; the lock is shared by the workers of one process, at most four. What
that leaves of N cores is estimated from the share by mean value analysis of four threads that each
need the lock for that part of their time (Reiser and Lavenberg, 1980). Memory bandwidth and the
disk are not in it. Memory is the proportional set size of all processes.
Three minutes; shares hold on a busy machine, too, since both samples are taken there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import inputs
from measuring import report, run, say, skip
from runs import MAX_LENGTH, pack
from settings import Settings, from_environment

MOST_LOCKED, MOST_MB = 0.01, 150
SAMPLES_PER_SECOND = 200
FEW, MANY, THREADS = 2, 16, 4


def locked_share(settings: Settings, files: Sequence[Path], options: Sequence[str]) -> float:
    """How often a thread that packs holds the lock, of how often one runs."""
    holding, running = (_samples(settings, files, options, flags) for flags in (["--gil"], []))
    return holding / running


def _samples(
    settings: Settings, files: Sequence[Path], options: Sequence[str], flags: list[str]
) -> int:
    with inputs.Output(settings) as output:
        stacks = output.with_name("stacks")
        command: list[str | Path] = [_py_spy(settings), "record", *flags, "--threads", "--nolineno"]
        command += ["--rate", str(SAMPLES_PER_SECOND), "--format", "raw", "--output", stacks, "--"]
        command += [settings.packer, "pack", *files, "--max-length", str(MAX_LENGTH), *options]
        command += ["--tokenizer", settings.tokenizer, "--workers", str(FEW), "--output", output]
        run([*command, "--quiet"])
        lines = [line.rpartition(" ") for line in stacks.read_text().splitlines()]
    return sum(int(count) for stack, _, count in lines if "packer_" in stack.partition(";")[0])


def _py_spy(settings: Settings) -> Path:
    return settings.peers_python.with_name("py-spy")


def speedup(share: float, threads: int) -> float:
    """Of threads that need one lock for this share of their time, over one of them."""
    waiting = 0.0  # threads at the lock, on average
    for count in range(1, threads + 1):
        at_lock = share * (1 + waiting)
        rate = count / (1 - share + at_lock)
        waiting = rate * at_lock
    return rate


def _report_lock(
    settings: Settings, what: str, files: Sequence[Path], options: Sequence[str]
) -> None:
    share = locked_share(settings, files, options)
    say(f"{what}: {share:.1%}")
    efficiency = speedup(share, THREADS) / THREADS
    report(
        f"{what}: time with Python's lock held, of a process's own",
        f"<= {MOST_LOCKED:.0%}",
        f"{share:.1%}; of any number of cores, an estimated {efficiency:.0%} work",
        share <= MOST_LOCKED,
        share=share,
        efficiency=efficiency,
    )


def _peak_mb(settings: Settings, files: list[Path], workers: int) -> float:
    options = ("--workers", str(workers))
    with inputs.Output(settings) as output:
        packed = pack(
            settings, files, output, tokenizer=settings.tokenizer, options=options, watch=True
        )
    return packed.finished.peak / 1e6


def main() -> None:
    settings = from_environment()
    target = f"<= {MOST_LOCKED:.0%}"
    name, times = "chat_sgd_toolcalls", 12
    template = settings.chat_templates / "trl__llama3_training.jinja"
    why = inputs.missing(settings) or inputs.missing_file(settings, name, template)
    why = why or ("quick" if settings.quick else "")
    if why or not _py_spy(settings).is_file():
        skip("time with Python's lock held", target, why or "no py-spy: make peers")
    else:
        chats = [inputs.repeated(settings, name, times)]
        _report_lock(settings, "670 MB of text", inputs.tenfold(settings), ())
        chat_options = ("--chat-template", str(template), "--overlong", "truncate")
        _report_lock(settings, "174 MB of conversations", chats, chat_options)
    if why:
        skip("memory of a further worker", f"<= {MOST_MB} MB", why)
        return
    few, many = (_peak_mb(settings, inputs.tenfold(settings), count) for count in (FEW, MANY))
    each = (many - few) / (MANY - FEW)
    report(
        "memory of a further worker, 670 MB of text",
        f"<= {MOST_MB} MB",
        f"{each:.0f} MB ({few:.0f} MB with {FEW} workers, {many:.0f} with {MANY})",
        each <= MOST_MB,
        megabytes=[few, many],
    )


if __name__ == "__main__":
    main()
