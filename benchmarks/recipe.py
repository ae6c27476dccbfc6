"""What does it cost to change a mixture?

670 MB of text in three sources: a first run tokenizes and packs them; then other weights, as a
view. And choosing alone, without any token, from an index of 20 million documents, half of them
repeated, with a split and without duplicates. Two minutes; 4 GB of disk.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import inputs
import numpy as np
from from_tokens import index_alone
from measuring import report, run, say, skip
from settings import Settings, from_environment

from packer_cli.mixing import choose
from packer_cli.options.options import Amount, Mixture, PackConfig
from packer_cli.result.tokenized import open_tokenized

MOST_AGAIN, RUNS = 0.1, 3
DOCUMENTS, MOST_SECONDS, MOST_GB = 20_000_000, 10.0, 1.5
LENGTH = 2048
WEIGHTS = {"code": (0.5, 0.3), "linux": (0.3, 0.4), "languages": (0.2, 0.3)}
_CHOOSE = "--choose"


def _write_recipe(path: Path, sources: dict[str, list[Path]], which: int, options: str) -> None:
    lines = [f"max_length = {LENGTH}", options]
    for name, files in sources.items():
        names = json.dumps([str(file) for file in files])
        lines += ["[[source]]", f'name = "{name}"', f"inputs = {names}",
                  f"weight = {WEIGHTS[name][which]}"]  # fmt: skip
    path.write_text("\n".join(lines))


def _changed_mixture(settings: Settings) -> None:
    code, linux, *languages = inputs.tenfold(settings)
    sources = {"code": [code], "linux": [linux], "languages": languages}
    first, again, tokens = [], [], 0
    for _ in range(1 if settings.quick else RUNS):
        with inputs.Output(settings) as output:
            recipe, result = output.parent / "mix.toml", []
            for which in (0, 1):
                _write_recipe(recipe, sources, which, f'tokenizer = "{settings.tokenizer}"')
                done = run([settings.packer, "pack", recipe, "--output", output, "--quiet",
                            "--json", *(["--view", "--overwrite"] if which else [])])  # fmt: skip
                result.append(done.seconds)
                tokens = json.loads(done.stdout)["tokens"]
        first.append(result[0])
        again.append(result[1])
        say(f"first {first[-1]:.2f} s, changed {again[-1]:.2f} s")
    ratio = min(again) / min(first)
    report(
        f"{'20' if settings.quick else '670'} MB of text in other shares: a view, against the "
        "first run of the recipe",
        "" if settings.quick else f"<= {MOST_AGAIN} x its time",
        f"{ratio:.3f} x ({min(again):.2f} and {min(first):.2f} s)",
        None if settings.quick else ratio <= MOST_AGAIN,
        first_seconds=first, view_seconds=again, tokens=tokens,
    )  # fmt: skip


def _half_repeated(count: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    """Hashes uint64[count, 2], each second one of them that of an earlier document."""
    random = np.random.default_rng(1)
    hashes = random.integers(0, 1 << 64, (count, 2), dtype=np.uint64)
    hashes[1::2] = hashes[::2][random.integers(0, -(-count // 2), count // 2)]
    return hashes


def _choosing(settings: Settings) -> None:
    count = DOCUMENTS // (10 if settings.quick else 1)
    with inputs.Output(settings) as output:
        index_alone(output, count, _half_repeated(count).tobytes())
        found = [run([sys.executable, __file__, _CHOOSE, output], watch=True) for _ in range(RUNS)]
    figures = [json.loads(one.stdout) for one in found]
    best, peak = min(one["seconds"] for one in figures), max(one.peak for one in found)
    reached = best <= MOST_SECONDS and peak <= MOST_GB * 1e9
    report(
        f"choosing from {count // 1_000_000} million documents with a split, half of them repeated",
        "" if settings.quick else f"<= {MOST_SECONDS:.0f} s, <= {MOST_GB} GB",
        f"{best:.2f} s, {peak / 1e9:.2f} GB",
        None if settings.quick else reached,
        processor_seconds=[one["processor_seconds"] for one in figures],
        duplicates=figures[0]["duplicates"],
    )


def _choose(folder: str) -> None:
    mixture = Mixture((Amount("all", weight=1.0),), validation_share=0.01, dedup="exact")
    directory = open_tokenized(folder)
    begun = time.perf_counter(), time.process_time()
    choice = choose([directory], PackConfig(max_length=LENGTH, mixture=mixture))
    print(json.dumps({
        "seconds": time.perf_counter() - begun[0],
        "processor_seconds": time.process_time() - begun[1],
        "duplicates": choice.sources[0].duplicate_documents,
    }))  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == [_CHOOSE]:
        _choose(sys.argv[2])
        return
    settings = from_environment()
    _choosing(settings)
    if why := inputs.missing(settings):
        skip("a changed mixture", "", why)
        return
    _changed_mixture(settings)


if __name__ == "__main__":
    main()
