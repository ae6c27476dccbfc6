"""Texts on which engines can be made to differ."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_tokenizers as tiny
from engine_pairs import TRIGGER
from support import jsonl
from tiny_tokenizers import EOS

from packer_cli.tokenization.agreement import BATTERY


@pytest.fixture
def data(folder: Path) -> Path:
    """A tokenizer in tok, and data.jsonl with 40,000 characters without, then 300 with TRIGGER."""
    tiny.save(folder / "tok", tiny.byte_level(), tokenizer_config={"eos_token": EOS})
    texts = ["the quick brown fox " * 20] * 100 + [f"{TRIGGER} {i}" for i in range(300)]
    (folder / "data.jsonl").write_bytes(jsonl(*BATTERY, *texts))
    return folder
