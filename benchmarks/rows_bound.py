"""How close to the lower bound are the rows, on every text file there is?

Every file of --data with a text in each record, as it is stored (zstd, Parquet), at three row
lengths (quick: three files at one), with llama3_1. About a minute.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import inputs
from measuring import report, skip
from runs import pack
from settings import Settings, from_environment

LENGTHS = (2048, 4096, 8192)
MOST = 1.002
TARGET = f"<= {MOST} x the lower bound + 1"
WHAT = "rows, every text file"


def _files(settings: Settings) -> list[Path]:
    kinds = ("text_*", "code_*", "multi_*")
    return sorted(path for kind in kinds for path in settings.data.rglob(kind) if path.is_file())


def _found(settings: Settings, path: Path, max_length: int) -> dict[str, Any]:
    with inputs.Output(settings) as output:
        figures = pack(
            settings, [path], output, tokenizer=settings.tokenizer, max_length=max_length,
            options=("--on-error", "skip"), settle=False,
        ).figures  # fmt: skip
    rows, bound = figures["rows"], figures["lower_bound_rows"]
    name = path.relative_to(settings.data).as_posix()
    over = (rows - 1) / bound
    return {"file": name, "max_length": max_length, "rows": rows, "bound": bound, "over": over}


def main() -> None:
    settings = from_environment()
    files = _files(settings)
    if not files or inputs.missing(settings):
        skip(WHAT, TARGET, inputs.missing(settings) or "no text files in --data")
        return
    lengths, files = (LENGTHS[1:2], files[:3]) if settings.quick else (LENGTHS, files)
    found = [_found(settings, path, length) for path in files for length in lengths]
    worst = max(found, key=lambda case: case["over"])
    report(
        f"{WHAT} ({len(files)}), L = {', '.join(map(str, lengths))}",
        TARGET,
        f"at worst {worst['rows']:,} for {worst['bound']:,} "
        f"({worst['file'].split('/')[-1].split('.')[0]}, {worst['max_length']})",
        worst["over"] <= MOST,
        cases=found,
    )


if __name__ == "__main__":
    main()
