"""What commands print, held by texts that are read once and approved: tests/approved/NAME.txt.

`PACKER_APPROVE=1 pytest FILE` writes what is printed now; `git diff tests/approved` is to be read.
"""

from __future__ import annotations

import os
from pathlib import Path

_FOLDER = Path(__file__).parent / "approved"


def assert_approved(name: str, *texts: str) -> None:
    """Compare texts, one after another, with the approved one of a name."""
    text, path = "\n\n\n".join(texts), _FOLDER / f"{name}.txt"
    if "PACKER_APPROVE" in os.environ:
        _FOLDER.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), "if this is right: PACKER_APPROVE=1 pytest"
