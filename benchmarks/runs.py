"""One `packer pack` as a user runs it: the installed command, a process of its own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import Finished, run
from settings import Settings

MAX_LENGTH = 4096


@dataclass(frozen=True)
class Packed:
    """What a run took, and the JSON it printed."""

    finished: Finished
    figures: dict[str, Any]


def pack(
    settings: Settings,
    files: list[Path],
    output: Path,
    *,
    tokenizer: str | Path,
    max_length: int = MAX_LENGTH,
    options: tuple[str, ...] = (),
    watch: bool = False,
    settle: bool = True,
) -> Packed:
    """Pack `files` into `output`."""
    command: list[str | Path] = [settings.packer, "pack", *files, "--max-length", str(max_length)]
    command += ["--tokenizer", tokenizer, "--output", output, "--overwrite", "--quiet", "--json"]
    finished = run([*command, *options], watch=watch, settle=settle)
    return Packed(finished, json.loads(finished.stdout))
