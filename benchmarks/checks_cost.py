"""What does it cost to hold the fast engine to the reference while packing?

The CPU seconds of all that the checks do with a batch over those of encoding it, for llama3_1: code
and English, which are ASCII mostly, and a hundred languages. The steps are timed one by one,
because encoding the same twice differs by more than all of them. That every character is compared
once, when it is met first, is a cost per run, not per
byte: it has a row of its own. Loading is not counted. Half a minute.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import inputs
import msgspec
from measuring import report, skip
from settings import Settings, from_environment

from packer_cli.inputs.byte_streams import BLOCK_BYTES
from packer_cli.records import Texts
from packer_cli.tokenization.locate import TokenizerFiles, locate
from packer_cli.tokenization.tokenizer import Tokenizer, load_tokenizer
from packer_cli.tokenization.trust import TrustedEngine, differing

MOST = 0.03
MOST_BYTES = 150 << 20
CORPORA = {"code and English": inputs.SOURCES[:2], "a hundred languages": inputs.SOURCES[2:]}
ENCODING, CHECKS, COMPARING = "encoding", "checks", "comparing"


def _batches(settings: Settings, sources: tuple[str, ...]) -> Iterator[Texts]:
    """As `packer pack` reads them, of all files in turn."""
    decode = msgspec.json.Decoder().decode
    files = [path for path in inputs.tenfold(settings) if path.stem in sources]
    for path in files:
        left = MOST_BYTES // len(files)
        with open(path, "rb") as source:
            while left > 0 and (lines := source.readlines(BLOCK_BYTES)):
                left -= sum(map(len, lines))
                yield Texts.of([decode(line)["text"] for line in lines])


def _measure(batches: Iterator[Texts], tokenizer: Tokenizer) -> dict[str, float]:
    """CPU seconds of each, the bytes encoded, and the characters compared."""
    found: defaultdict[str, float] = defaultdict(float)
    assert isinstance(tokenizer.engine, TrustedEngine)
    checks = tokenizer.engine  # its parts are timed one by one
    fast, reference = checks._fast, checks._reference

    def check(batch: Texts) -> None:
        if sample := checks.sample(batch, checks.untrusted(batch)):
            differing(fast, reference, [sample])

    def timed(name: str, work: Callable[..., object], *arguments: Any) -> None:
        begun = time.process_time()
        work(*arguments)
        found[name] += time.process_time() - begun

    characters: set[str] = set()
    for batch in batches:
        timed(COMPARING, checks.untrusted, batch)
        timed(ENCODING, fast.encode, batch)
        timed(CHECKS, check, batch)
        found["bytes"] += sum(len(text.encode()) for text in batch)
        characters.update(*batch)
    found["characters"] = sum(character > "\xff" for character in characters)
    return found


def _report(name: str, files: TokenizerFiles, batches: Iterator[Texts]) -> None:
    found = _measure(batches, load_tokenizer(files, backend="gigatoken"))
    share = found[CHECKS] / found[ENCODING]
    report(
        f"checks of the fast engine, {name}, {found['bytes'] / 1e6:.0f} MB",
        f"< {MOST:.0%} of encoding",
        f"{share:.2%}",
        share < MOST,
        **found,
    )
    report(
        f"comparing {found['characters']:,} characters once, {name}",
        "",
        f"{found[COMPARING] * 1e3:.0f} ms ({found[COMPARING] / found[ENCODING]:.1%} of encoding)",
        None,
        seconds=found[COMPARING],
    )


def main() -> None:
    os.environ["XDG_CACHE_HOME"] = os.devnull  # where no agreement is remembered
    settings = from_environment()
    if why := inputs.missing(settings):
        skip("checks of the fast engine", f"< {MOST:.0%} of encoding", why)
        return
    files = locate(str(settings.tokenizer))
    for name, sources in CORPORA.items():
        _report(name, files, _batches(settings, sources))


if __name__ == "__main__":
    main()
