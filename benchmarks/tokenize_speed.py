"""How fast is `packer tokenize`, against gigatoken's own file reader and against `packer pack`?

670 MB of text, llama3_1. The peer encodes the JSON lines with `encode_files` and writes one flat
.bin/.idx, as Megatron-LM's tools/preprocess_data_fast.py does, with everything in memory. Whole
processes, in turn; the fastest of each counts. Two minutes, 3 GB of disk.
"""

from __future__ import annotations

from pathlib import Path

import inputs
from measuring import Finished, report, run, say, skip
from runs import pack
from settings import BENCHMARKS, Settings, from_environment

LEAST_PEER = 1.0
RUNS = 3


def _tokenized(settings: Settings, files: list[Path]) -> Finished:
    with inputs.Output(settings) as output:
        command: list[str | Path] = [settings.packer, "tokenize", *files, "--output", output]
        command += ["--tokenizer", settings.tokenizer, "--quiet", "--json"]
        return run(command, watch=True)


def _peer(settings: Settings, files: list[Path]) -> Finished:
    script = BENCHMARKS / "peers" / "tokenize_files.py"
    with inputs.Output(settings) as output:
        output.mkdir()
        command: list[str | Path] = [settings.peers_python, script, output / "all"]
        return run([*command, settings.tokenizer, *files], watch=True)


def main() -> None:
    settings = from_environment()
    size = "20" if settings.quick else "670"
    against_pack = f"tokenize {size} MB of text, against packing it"
    against_peer = (
        f"tokenize {size} MB of text, against gigatoken's encode_files and one flat write"
    )
    if why := inputs.missing(settings):
        skip(against_pack, "", why)
        return
    files = inputs.tenfold(settings)
    with_peer = settings.peers_python.is_file() and not settings.quick
    ours, theirs, packs = [], [], []
    for _ in range(1 if settings.quick else RUNS):
        ours.append(_tokenized(settings, files))
        with inputs.Output(settings) as output:
            packs.append(pack(settings, files, output, tokenizer=settings.tokenizer).finished)
        if with_peer:
            theirs.append(_peer(settings, files))
        say(f"tokenize {ours[-1].seconds:.2f} s, pack {packs[-1].seconds:.2f} s"
            + (f", gigatoken {theirs[-1].seconds:.2f} s" if theirs else ""))  # fmt: skip
    best = min(one.seconds for one in ours)
    peak = max(one.peak for one in ours)
    ratio = min(one.seconds for one in packs) / best
    report(
        against_pack,
        "",  # both take the tokenizer's time
        f"{ratio:.2f} x ({best:.2f} s, {inputs.size(files) / best / 1e6:.0f} MB/s)",
        None,
        seconds=[one.seconds for one in ours],
        pack_seconds=[one.seconds for one in packs],
    )
    target = f">= {LEAST_PEER} x as fast, bounded memory"
    if not theirs:
        skip(against_peer, target, "quick" if settings.quick else "no peers' environment")
        return
    theirs_best, their_peak = min(one.seconds for one in theirs), max(one.peak for one in theirs)
    ratio = theirs_best / best
    report(
        against_peer,
        target,
        f"{ratio:.2f} x ({best:.2f} and {theirs_best:.2f} s; {peak / 1e9:.2f} and "
        f"{their_peak / 1e9:.2f} GB)",
        ratio >= LEAST_PEER,
        seconds=[one.seconds for one in ours],
        their_seconds=[one.seconds for one in theirs],
        peak=peak,
        their_peak=their_peak,
    )


if __name__ == "__main__":
    main()
