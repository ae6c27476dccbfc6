"""How soon does `packer` answer: --help, stats of a finished directory, packing the sample data?

Processor time of whole processes, the least of 20 (quick: of two) and the median. The directory is
sample_data packed into one shard, and once more into hundreds. Half a minute.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import inputs
from measuring import report, run
from runs import pack
from settings import CHECKOUT, from_environment

SAMPLES = CHECKOUT / "sample_data"
HELP_SECONDS, STATS_SECONDS, TEXT_SECONDS, CHAT_SECONDS = 0.15, 0.2, 0.5, 0.8
RUNS = 20


def _measure(what: str, limit: float, command: list[str | Path], runs: int) -> None:
    run(command, settle=False)
    seconds = [run(command, settle=False).processor_seconds for _ in range(runs)]
    report(
        what,
        f"<= {limit} s of processor time",
        f"{min(seconds):.3f} s, median {median(seconds):.3f} s",
        min(seconds) <= limit,
        best_processor_seconds=min(seconds),
        median_processor_seconds=median(seconds),
    )


def main() -> None:
    settings = from_environment()
    runs = 2 if settings.quick else RUNS
    _measure("packer --help", HELP_SECONDS, [settings.packer, "--help"], runs)
    text, chat = SAMPLES / "documents.jsonl", SAMPLES / "chat.jsonl"
    for options in ((), ("--unit-bytes", "1K")):
        with inputs.Output(settings) as output:
            packed = pack(
                settings, [text], output, tokenizer="bytes", max_length=256, options=options
            )
            shards = packed.figures["shards"]
            what = f"packer stats, {shards} shard{'s' if shards > 1 else ''}"
            _measure(what, STATS_SECONDS, [settings.packer, "stats", output], runs)
    of_text = ("--max-length", "1024")
    of_chat = ("--max-length", "512", "--chat-template", SAMPLES / "chat.jinja")
    for data, limit, given in ((text, TEXT_SECONDS, of_text), (chat, CHAT_SECONDS, of_chat)):
        with inputs.Output(settings) as output:
            what = f"packer pack sample_data/{data.name}"
            command = [settings.packer, "pack", data, *given, "-o", output, "--overwrite"]
            _measure(what, limit, command, runs)


if __name__ == "__main__":
    main()
