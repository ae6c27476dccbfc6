"""How fast is `packer verify`, beside reading the same files from the same place?

The result of 670 MB of text (1.6 GB of shards, in memory), llama3_1, L = 4096. Half a minute.
"""

from __future__ import annotations

import time
from pathlib import Path

import inputs
from measuring import report, run, say, skip
from runs import pack
from settings import from_environment

LEAST_GB = 0.5  # a second: a good SATA disk's
RUNS = 3


def _read(files: list[Path]) -> float:
    """Seconds that reading takes, with nothing done to the bytes."""
    begun, buffer = time.perf_counter(), bytearray(1 << 20)
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - begun


def main() -> None:
    settings = from_environment()
    what, target = "packer verify", f">= {LEAST_GB} GB/s"
    if why := inputs.missing(settings):
        skip(what, target, why)
        return
    with inputs.Output(settings) as output:
        pack(settings, inputs.tenfold(settings), output, tokenizer=settings.tokenizer)
        shards = sorted(output.glob("*.arrow"))
        size = sum(path.stat().st_size for path in shards)
        reading = min(_read(shards) for _ in range(RUNS))
        command: list[str | Path] = [settings.packer, "verify", output, "--quiet"]
        seconds = [run(command, settle=False).seconds for _ in range(RUNS)]
    say(f"verify: {min(seconds):.2f} s for {size / 1e9:.2f} GB")
    rate = size / min(seconds) / 1e9
    report(
        f"{what}, {size / 1e9:.2f} GB",
        "" if settings.quick else target,
        f"{rate:.2f} GB/s; only reading them, from memory: {size / reading / 1e9:.1f} GB/s",
        None if settings.quick else rate >= LEAST_GB,
        seconds=seconds,
        bytes=size,
    )


if __name__ == "__main__":
    main()
