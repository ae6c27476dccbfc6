"""Runs over two small inputs, among things that are not packer's."""

from __future__ import annotations

from altered import altered

OPTIONS = ("-l", 16, "-t", "bytes", "-q", "-o", "out")
TEXTS = ["first", "second"]

# A program that is packer, but is killed at one of its steps on the disk, if it gets there.
CRASHING = """
import os
step = {step}
def counted(call):
    def count(*arguments, **options):
        global step
        step -= 1
        if not step:
            os.kill(os.getpid(), 9)
        return call(*arguments, **options)
    return count
for name in ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync"):
    setattr(os, name, counted(getattr(os, name)))
from packer_cli.cli import app as cli
cli.main()
"""


def killed(command: list[str], step: int) -> None:
    """Run it in a process of its own."""
    altered(CRASHING.format(step=step), *command)
