"""Runs over two small inputs, among things that are not packer's."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from altered import faulty

OPTIONS = ("-l", 16, "-t", "bytes", "-q", "-o", "out")
TEXTS = ["first", "second"]


def killed(command: Sequence[object], step: int) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own, killed at one of its steps on the disk; at 0 at none."""
    return faulty(f"at_step({step}, kill)", *command)
