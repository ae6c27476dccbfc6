"""How much memory does `packer pack` take, and does it grow with the input?

66 MB of text and ten times as much, llama3_1, L = 4096. Counted is the whole process tree,
every process at its own peak. Half a minute, 1.6 GB of disk.
"""

from __future__ import annotations

import inputs
from measuring import report, say, skip
from runs import pack
from settings import from_environment

MOST_GB, MOST_GROWTH = 1.5, 1.15
RUNS = 2


def main() -> None:
    settings = from_environment()
    target = f"<= {MOST_GB} GB"
    if not settings.quick:  # so little input does not fill the buffers
        target += f", 10 x the input <= {MOST_GROWTH:.2f} x the memory"
    what = f"peak memory of pack, {'2 and 20' if settings.quick else '66 and 670'} MB of text"
    if why := inputs.missing(settings):
        skip(what, target, why)
        return
    peaks = []
    for files in (inputs.once(settings), inputs.tenfold(settings)):
        found = []
        for _ in range(1 if settings.quick else RUNS):
            with inputs.Output(settings) as output:
                packed = pack(settings, files, output, tokenizer=settings.tokenizer, watch=True)
            found.append(packed.finished.peak)
            say(f"{inputs.size(files) / 1e6:.0f} MB: {found[-1] / 1e6:.0f} MB of memory")
        peaks.append(max(found))
    once, tenfold = peaks
    growth = tenfold / once
    report(
        what,
        target,
        f"{once / 1e9:.2f} and {tenfold / 1e9:.2f} GB, {growth:.2f} x",
        max(peaks) <= MOST_GB * 1e9 and (settings.quick or growth <= MOST_GROWTH),
        peak_bytes=once,
        tenfold_peak_bytes=tenfold,
        growth=growth,
    )


if __name__ == "__main__":
    main()
