"""The code of docs/training.md and README's loader run as written and print what they show."""

from __future__ import annotations

import re
import shutil
import textwrap
from pathlib import Path

import pytest
from conftest import packer
from transformers import LlamaConfig, LlamaForCausalLM

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


def test_the_page_on_training(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "training.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(blocks) == 6
    names: dict[str, object] = {}
    for block in blocks:
        capsys.readouterr()
        exec(compile(block, "docs/training.md", "exec"), names)  # noqa: S102
        printed = capsys.readouterr().out.splitlines()
        for line in shown_by(block):
            assert line in printed, block


def test_the_loader_of_readme(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = (ROOT / "README.md").read_text()
    section = readme.split("\nOr with PyTorch")[1].split("\n\n| column |")[0]
    code = textwrap.dedent("\n".join(
        line for line in section.splitlines() if line.startswith("    ") or not line
    ))  # fmt: skip
    config = LlamaConfig(vocab_size=259, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    names: dict[str, object] = {"model": LlamaForCausalLM(config)}
    exec(compile(code, "README.md", "exec"), names)  # noqa: S102
    shown = shown_by(code)
    assert shown
    assert capsys.readouterr().out.splitlines() == shown
