"""What does it cost to choose records by their fields?

150 MB of English, code and a hundred languages with a score and an object beside each text, in JSON
lines and in Parquet, with conditions that hold for all: processor time of whole processes, in turn.
And a filter on `tokens` of their tokenized directory, with `packer plan`. Two minutes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import inputs
import pyarrow as pa
import pyarrow.parquet as pq
from measuring import report, run, skip
from runs import pack
from settings import Settings, from_environment

MOST, RUNS, MOST_BYTES = 1.03, 5, 150_000_000
ONE, TWO = ("--where", "score >= 0"), ("--where", 'meta.lang in ["en", "de", "zh"]')


def _records(settings: Settings) -> Iterator[dict[str, Any]]:
    """Texts with fields beside them."""
    languages = cycle(("en", "de", "zh"))
    files = inputs.once(settings) if settings.quick else inputs.tenfold(settings)
    left, number = [MOST_BYTES // (20 if settings.quick else 1) // len(files)] * len(files), 0
    for place, path in enumerate(files):
        with open(path, "rb") as source:
            for line in source:
                left[place] -= len(line)
                if left[place] < 0:
                    break
                number += 1
                about = {"lang": next(languages), "page": number}
                yield {"score": number % 97 / 96, "meta": about} | json.loads(line)


def _write(settings: Settings, lines: Path, table: Path) -> None:
    rows = [*_records(settings)]
    with open(lines, "w") as target:
        target.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    names = ("score", "meta", "text")
    pq.write_table(
        pa.Table.from_pylist([{name: row[name] for name in names} for row in rows]), table,
        row_group_size=10_000,
    )  # fmt: skip


def _compared(settings: Settings, path: Path, output: Path) -> None:
    """Report the processor time with conditions over that without, by the median of rounds."""
    seconds: list[list[float]] = [[], [], []]
    for _ in range(1 if settings.quick else RUNS):
        for own, options in zip(seconds, ((), ONE, ONE + TWO), strict=True):
            packed = pack(settings, [path], output, tokenizer=settings.tokenizer, options=options)
            own.append(packed.finished.processor_seconds)
    plain, *others = seconds
    for words, own in zip(("a number", "a number and a field of an object"), others, strict=True):
        ratio = median(one / without for one, without in zip(own, plain, strict=True))
        report(
            f"pack, {path.stat().st_size / 1e6:.0f} MB of {path.suffix[1:]}, filtered by {words}",
            "" if settings.quick else f"<= {MOST} x the processor time of no filter",
            f"{ratio:.3f} x ({median(own):.2f} s, {median(plain):.2f} s without)",
            None if settings.quick else ratio <= MOST,
            ratio=ratio,
            seconds=own,
            plain_seconds=plain,
        )


def _of_tokens(settings: Settings, path: Path, output: Path) -> None:
    """A filter on lengths reads the index alone."""
    tokens = output.with_name("filtered-tokens")
    command: list[str | Path] = [
        settings.packer,
        "tokenize",
        path,
        "-t",
        settings.tokenizer,
        "-q",
        "-o",
        tokens,
    ]
    run([*command, "--overwrite"])
    shards = [*tokens.glob("documents-*")]
    planning: list[str | Path] = [
        settings.packer,
        "plan",
        tokens,
        "-l",
        "4096",
        "-q",
        "--where",
        "tokens >= 64",
    ]
    finished = run(planning)
    report(
        f"plan, filtered by tokens, {sum(one.stat().st_size for one in shards) / 1e6:.0f} MB of "
        "tokenized documents", "", f"{finished.seconds:.2f} s", None, seconds=finished.seconds,
    )  # fmt: skip


def main() -> None:
    settings = from_environment()
    if why := inputs.missing(settings):
        skip("filters", f"<= {MOST} x the processor time of no filter", why)
        return
    with inputs.Output(settings) as output:
        lines, table = output.with_name("filters.jsonl"), output.with_name("filters.parquet")
        _write(settings, lines, table)
        for path in (lines, table):
            _compared(settings, path, output)
        _of_tokens(settings, table, output)
        lines.unlink()
        table.unlink()


if __name__ == "__main__":
    main()
