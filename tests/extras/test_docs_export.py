"""docs/export.md: its commands run, its Python prints what it shows."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from support import packer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "export.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


@pytest.mark.filterwarnings("ignore")
def test_the_page_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(ROOT / "sample_data", folder / "sample_data")
    for command in re.findall(r"^    packer (.*)$", PAGE, re.M):
        result = packer(*command.split())
        assert result.exit_code == 0, (command, result.stderr)
    capsys.readouterr()
    names: dict[str, object] = {"__name__": "page"}
    for block in BLOCKS:
        exec(compile(block, "export.md", "exec", dont_inherit=True), names)  # noqa: S102
    shown = re.findall(r"^print\(.*\)  # (.*)$", "".join(BLOCKS), re.M)
    assert len(shown) >= 6
    assert capsys.readouterr().out.splitlines() == shown
