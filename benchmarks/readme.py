"""Put the figures of results/latest.json into README.md, between its two markers.

python benchmarks/readme.py    (`make bench` does it; tests/test_docs.py holds them equal)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def table(results: dict[str, Any]) -> str:
    """The result file as Markdown."""
    machine = results["machine"]
    lines = [
        f"On {machine['cores']} cores of {machine['cpu']}, Python {machine['python']}, by "
        "`make bench` ([results](benchmarks/results/latest.json)):",
        "",
        "| what | target | measured | |",
        "|---|---|---|---|",
    ]
    for answer in results["answers"]:
        for row in answer["rows"]:
            reached = {True: "ok", False: "missed", None: ""}[row.get("reached")]
            result = f"skipped: {row['skipped']}" if "skipped" in row else reached
            lines.append(f"| {row['what']} | {row['target']} | {row['measured']} | {result} |")
    return "\n".join(lines)


def updated(readme: str, results: dict[str, Any]) -> str:
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(results)}\n{END}{after}"


def main() -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "latest.json").read_text())
    readme = ROOT / "README.md"
    readme.write_text(updated(readme.read_text(), results))


if __name__ == "__main__":
    main()
