"""Where a benchmark finds its inputs, and how big it may be: all from the environment.

run.py sets the variables from its options, so that a script alone takes the same ones.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent
CHECKOUT = BENCHMARKS.parent


@dataclass(frozen=True)
class Settings:
    """data, tokenizers  folders as in shared/data and shared/tokenizers
    cache         folder for unpacked inputs and for outputs, outside the checkout
    peers_python  interpreter of the environment with the peers
    quick         smaller sizes, for CI
    """

    data: Path = CHECKOUT.parent / "shared" / "data"
    tokenizers: Path = CHECKOUT.parent / "shared" / "tokenizers"
    cache: Path = Path("/tmp/packer-bench")
    peers_python: Path = CHECKOUT / ".venv-peers" / "bin" / "python"
    quick: bool = False

    @property
    def tokenizer(self) -> Path:
        """The tokenizer of every target that names one."""
        return self.tokenizers / "llama3_1"

    @property
    def chat_templates(self) -> Path:
        """Beside the tokenizers, as in shared."""
        return self.tokenizers.parent / "chat_templates"

    @property
    def packer(self) -> Path:
        """The installed command, beside the running interpreter."""
        return Path(sys.executable).with_name("packer")


def variable(name: str) -> str:
    """PACKER_BENCH_DATA for "data", and so on; the peers' variable has a name of its own."""
    return "PACKER_PEERS_PYTHON" if name == "peers_python" else f"PACKER_BENCH_{name.upper()}"


def from_environment() -> Settings:
    """The settings; what the environment does not give keeps its default."""
    given = {f.name: os.environ.get(variable(f.name), "") for f in fields(Settings)}
    paths = {name: Path(value) for name, value in given.items() if value and name != "quick"}
    return Settings(**paths, quick=given["quick"] == "1")
