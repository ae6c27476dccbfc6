"""Do N workers use N cores? The parent's share of the processor time, and memory.

Text (670 MB) and conversations (174 MB), llama3_1, L = 4096. The parent loads the tokenizer, hands
out units and writes the manifest while its workers pack; what it takes beyond the start of a run of
one record is the serial share, which limits how many cores help (Amdahl, 1967). Memory bandwidth
and the disk are not in it. Memory is the proportional set size of all processes. Two minutes;
shares hold on a busy machine, too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import inputs
from measuring import Finished, report, say, skip
from runs import pack
from settings import Settings, from_environment

MOST_SERIAL, MOST_MB = 0.04, 80
FEW, MANY = 2, 16
CORES = (16, 64)


def _packed(
    settings: Settings,
    files: Sequence[Path],
    workers: int,
    options: Sequence[str] = (),
    *,
    watch: bool = True,
) -> Finished:
    with inputs.Output(settings) as output:
        every = ("--workers", str(workers), *options)
        return pack(
            settings, [*files], output, tokenizer=settings.tokenizer, options=every, watch=watch
        ).finished


def _report_serial_share(
    settings: Settings, what: str, files: Sequence[Path], start: Path, options: Sequence[str] = ()
) -> None:
    small, large = (_packed(settings, some, FEW, options) for some in ([start], files))
    serial = large.root_seconds - small.root_seconds
    share = max(serial / (large.processor_seconds - small.processor_seconds), 0.0)
    say(f"{what}: {share:.1%}")
    speedups = [1 / (share + (1 - share) / cores) for cores in CORES]
    follows = ", ".join(f"{s:.0f} x with {n}" for s, n in zip(speedups, CORES, strict=True))
    report(
        f"{what}: the parent's share of the processor time, start apart",
        f"<= {MOST_SERIAL:.0%}",
        f"{share:.2%}; at most {follows} cores",
        share <= MOST_SERIAL,
        share=share,
    )


def _report_workers(
    settings: Settings, what: str, files: Sequence[Path], options: Sequence[str] = ()
) -> None:
    seconds = [
        _packed(settings, files, workers, options, watch=False).seconds for workers in (1, 2, 4)
    ]
    cores = len(os.sched_getaffinity(0))
    measured = ", ".join(f"{s:.2f}" for s in seconds)
    report(f"{what}, {cores} cores, 1, 2 and 4 workers", "", f"{measured} s", None, seconds=seconds)


def main() -> None:
    settings = from_environment()
    name, times = "chat_sgd_toolcalls", 12
    template = settings.chat_templates / "trl__llama3_training.jinja"
    why = inputs.missing(settings) or inputs.missing_file(settings, name, template)
    if why := why or ("quick" if settings.quick else ""):
        skip("the parent's share of the processor time", f"<= {MOST_SERIAL:.0%}", why)
        skip("memory of a further worker", f"<= {MOST_MB} MB", why)
        return
    text, chats = inputs.tenfold(settings), [inputs.repeated(settings, name, times)]
    of_chats = ("--chat-template", str(template), "--overlong", "truncate")
    start = settings.cache / "one-record.jsonl"
    start.write_text('{"text": "some words"}\n')
    _report_serial_share(settings, "670 MB of text", text, start)
    start = settings.cache / "one-conversation.jsonl"
    with open(chats[0], encoding="utf-8") as file:
        start.write_text(file.readline())
    _report_serial_share(settings, "174 MB of conversations", chats, start, of_chats)
    _report_workers(settings, "670 MB of text", text)
    _report_workers(settings, "174 MB of conversations", chats, of_chats)
    few, many = (_packed(settings, text, workers).peak / 1e6 for workers in (FEW, MANY))
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
