"""How much memory does `packer pack` take, and does it grow with the input?

2 GB of text, llama3_1, L = 4096: the 670 MB three times over. Counted is the whole process tree,
every process at its own peak, and how that grows while the second half is packed. Half a minute,
5 GB of disk.
"""

from __future__ import annotations

import shutil

import inputs
from measuring import report, skip
from runs import pack
from settings import from_environment

MOST_GB, MOST_GROWTH, TIMES = 0.9, 1.15, 3


def main() -> None:
    settings = from_environment()
    what = f"peak memory of pack, {'60 MB' if settings.quick else '2 GB'} of text"
    target = f"<= {MOST_GB} GB" + f", second half <= {MOST_GROWTH} x the first"
    if why := inputs.missing(settings):
        skip(what, target, why)
        return
    with inputs.Output(settings) as output:
        files = [
            output.with_name(f"{number}-{file.name}")
            for number in range(TIMES)
            for file in inputs.tenfold(settings)
        ]
        for number, file in enumerate(files):
            shutil.copyfile(inputs.tenfold(settings)[number % (len(files) // TIMES)], file)
        packed = pack(settings, files, output, tokenizer=settings.tokenizer, watch=True)
    peaks = packed.finished.peaks
    half = max(peaks[: len(peaks) // 2], default=1)
    peak = packed.finished.peak
    report(
        what,
        target,
        f"{peak / 1e9:.2f} GB, {peak / half:.2f} x that of the first half",
        peak <= MOST_GB * 1e9 and (settings.quick or peak <= MOST_GROWTH * half),
        peak_bytes=peak,
        half_peak_bytes=half,
    )


if __name__ == "__main__":
    main()
