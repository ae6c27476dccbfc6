"""The Python of docs/training.md, docs/python.md and README runs and prints what it shows."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import tomllib
from recipes import pack_sources
from support import packer

from packer_cli.config.documents import DocumentConfig
from packer_cli.config.mixture import Stage

ROOT = Path(__file__).parents[2]


@pytest.fixture
def packed(folder: Path) -> Path:
    """Where a reader is who has packed the sample."""
    shutil.copytree(ROOT / "sample_data", folder / "sample_data")
    result = packer("pack", "sample_data/documents.jsonl", "--max-length", "1024")
    assert result.exit_code == 0, result.stderr
    return folder


def shown_by(code: str) -> list[str]:
    return re.findall(r"^print\(.*\)  # (.*)$", code, re.M)


def pack_recipe_of(page: str) -> None:
    """Pack the recipe that a page shows into `mix`."""
    recipe = tomllib.loads(re.findall(r"```toml\n(.*?)```", page, re.S)[0])
    tables = {table.pop("name"): table for table in recipe.pop("source")}
    pack_sources(
        Path("mix"),
        {name: Path(*table.pop("inputs")) for name, table in tables.items()},
        {name: {"weight": table.pop("weight")} for name, table in tables.items()},
        {name: DocumentConfig(**table) for name, table in tables.items()},
        mixture={
            "stages": tuple(
                Stage(one["tokens"], tuple(one.get("weights", {}).items()), one["name"])
                for one in recipe.pop("stage")
            )
        },
        **recipe,
    )


def test_the_page_on_training(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "training.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(blocks) == 10
    pack_recipe_of(page)
    names: dict[str, object] = {}
    for block in blocks:
        capsys.readouterr()
        exec(compile(block, "docs/training.md", "exec"), names)  # noqa: S102
        printed = capsys.readouterr().out.splitlines()
        for line in shown_by(block):
            assert line in printed, block


def test_training_as_readme_shows_it(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = (ROOT / "README.md").read_text()
    code = re.findall(r"```python\n(.*?)```", readme.split("### 4. Train")[1], re.S)[0]
    exec(compile(code, "README.md", "exec"), {})  # noqa: S102
    assert capsys.readouterr().out.splitlines() == shown_by(code) != []


def test_the_page_on_python(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What of it needs extras; tests/test_docs.py runs the rest."""
    page = (ROOT / "docs" / "python.md").read_text().split("## PyTorch")[1]
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)  # noqa: S102
    shown = shown_by("".join(blocks))
    assert len(shown) == 4
    assert capsys.readouterr().out.splitlines() == shown
