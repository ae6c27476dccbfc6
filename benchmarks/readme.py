"""Write the figures of results/latest.json into docs/benchmarks.md, and six into README.md.

python benchmarks/readme.py    (`make bench` does it; tests/test_docs.py holds them equal)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
README_ROWS = (
    "pack 670 MB of text",
    "pack 670 MB of text, against TRL's way on a tenth of it",
    "174 MB of conversations (qwen3), against TRL's way",
    "174 MB of conversations (llama3), against TRL's way",
    "peak memory of pack, 66 and 670 MB of text",
    "loader, rows of 4,096 in batches of 8: ids, labels and mask, against datasets",
)
# page -> the rows that it shows, None for all, and its link to the results
PAGES: dict[str, tuple[tuple[str, ...] | None, str]] = {
    "README.md": (README_ROWS, "benchmarks/results/latest.json"),
    "docs/benchmarks.md": (None, "../benchmarks/results/latest.json"),
}


def _lines(results: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(what was measured, its line of the table)."""
    for answer in results["answers"]:
        for row in answer["rows"]:
            reached = {True: "ok", False: "missed", None: ""}[row.get("reached")]
            result = f"skipped: {row['skipped']}" if "skipped" in row else reached
            line = f"| {row['what']} | {row['target']} | {row['measured']} | {result} |"
            yield row["what"], line


def _table(results: dict[str, Any], rows: tuple[str, ...] | None, link: str) -> str:
    machine, lines = results["machine"], dict(_lines(results))
    return "\n".join(
        [
            f"On {machine['cores']} cores of {machine['cpu']}, Python {machine['python']}, by "
            f"`make bench` ([results]({link})):",
            "",
            "| what | target | measured | |",
            "|---|---|---|---|",
            *(lines.values() if rows is None else [lines[what] for what in rows]),
        ]
    )


def updated(page: str, text: str, results: dict[str, Any]) -> str:
    """The text of a page with the figures of `results` between its two markers."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{_table(results, *PAGES[page])}\n{END}{after}"


def main() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "latest.json").read_text())
    for page in PAGES:
        path = ROOT / page
        path.write_text(updated(page, path.read_text(), results))


if __name__ == "__main__":
    main()
