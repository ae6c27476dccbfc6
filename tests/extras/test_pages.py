"""The pages of docs/ whose Python needs extras run, and print what they show."""

from __future__ import annotations

from pathlib import Path

import docs_runner
import pytest


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("page", "begin", "end"),
    [
        ("README.md", "### 1. Pack text", "## How data flows"),
        ("docs/training.md", "", ""),
        ("docs/carried.md", "", ""),
        ("docs/python.md", "", ""),
        ("docs/export.md", "", ""),
    ],
    ids=lambda value: Path(str(value)).name,
)
def test_a_page_runs_as_written(
    monkeypatch: pytest.MonkeyPatch, page: str, begin: str, end: str
) -> None:
    docs_runner.prepare(monkeypatch)
    docs_runner.run(docs_runner.page(page, begin, end), skip=["DIR"])
