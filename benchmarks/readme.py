"""Write the figures of results/latest.json into docs/benchmarks.md.

python benchmarks/readme.py    (`make bench` does it; tests/test_docs.py holds them equal)
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
# Why a target that two honest tries have missed stays missed, by row.
_FLAT = "no step takes more than a fifth of the time"
FLOORS = {
    "pack 66 MB of text, against datasets + tokenizers + TRL": "1.6 s are the start, by "
    "this row and that of 670 MB",
    "chat with assistant masks, against TRL's way": "1.0 s is the start, by this row and that of "
    "174 MB; beyond it 11 x",
    "21 MB of prompts and completions, against TRL's way": "1.3 s are the start, by this row "
    "and that of 4 MB; beyond it 16 x",
    "174 MB of conversations (qwen3), against TRL's way": _FLAT,
    "174 MB of conversations (llama3), against TRL's way": _FLAT,
    "pack, 200 million token ids, 4 bytes a token carried": "a row has 13 instead of 9 bytes a "
    "token; to write and hash these 4 alone is 10% of a run",
    "packer audit, 200 million tokens, Parquet, one core": "half of it is what pyarrow takes to "
    "read the file",
    "the same on sample_data": "noise: both take the same processor time, 0.32 s",
    "memory of a further worker, 670 MB of text": "the tokenizer's cache of words and one window",
    "100,000 files of 500 bytes": "0.6 ms of processor time a file, in small steps, "
    "none above a quarter",
    "rows, every text file (8), L = 2048, 4096, 8192": "1,488 where documents run on from row to "
    "row: the last row of each of 13 units",
    "checks of the fast engine, code and English, 154 MB": "noise: 2.4% by "
    "hand, each step timed over all batches by itself",
    "checks of the fast engine, a hundred languages, 96 MB": "a look at every character: 0.9 ns a "
    "byte",
}
PAGE = ROOT / "docs" / "benchmarks.md"


def _result(row: dict[str, Any]) -> str:
    floor = FLOORS.get(row["what"])
    missed = f"missed: {floor}" if floor else "missed"
    reached = {True: "ok", False: missed, None: ""}[row.get("reached")]
    return f"skipped: {row['skipped']}" if "skipped" in row else reached


def _parts(row: dict[str, Any]) -> tuple[str, str]:
    """What was measured, and in which case: what follows a colon, or else the last comma."""
    what, _, case = row["what"].rpartition(": " if ": " in row["what"] else ", ")
    return (what, case) if what else (case, "")


def _kind(row: dict[str, Any]) -> tuple[str, str, str]:
    return _parts(row)[0], row["target"], _result(row)


def _lines(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of the table: cases of one thing with the same target and result share one."""
    lines = list[str]()
    for (what, target, result), group in groupby(rows, _kind):
        first, *others = group
        if others:
            cases = [
                f"{_parts(row)[1]}: {row['measured']}".rstrip(": ") for row in (first, *others)
            ]
            lines.append(f"| {what} | {target} | {' · '.join(cases)} | {result} |")
        else:
            lines.append(f"| {first['what']} | {target} | {first['measured']} | {result} |")
    return lines


def _table(results: dict[str, Any]) -> str:
    machine = results["machine"]
    lines = [line for answer in results["answers"] for line in _lines(answer["rows"])]
    return "\n".join(
        [
            f"On {machine['cores']} cores of {machine['cpu']}, Python {machine['python']}, by "
            "`make bench` ([results](../benchmarks/results/latest.json)):",
            "",
            "| what | target | measured | |",
            "|---|---|---|---|",
            *lines,
        ]
    )


def updated(text: str, results: dict[str, Any]) -> str:
    """The text of the page with the figures of `results` between its two markers."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{_table(results)}\n{END}{after}"


def main() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "latest.json").read_text())
    PAGE.write_text(updated(PAGE.read_text(), results))


if __name__ == "__main__":
    main()
