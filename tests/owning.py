"""Runs over two small inputs, among things that are not packer's."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from altered import altered
from disk import IMPORTED

OPTIONS = ("-l", 16, "-t", "bytes", "-q", "-o", "out")
TEXTS = ["first", "second"]

# A program that is packer, but is killed at one of its steps on the disk, if it gets there; in the
# end it says in a file how many there were.
CRASHING = (
    IMPORTED
    + """
import os
step, end = {step}, os._exit
def counted(call):
    def count(*arguments, **options):
        global step
        step -= 1
        if not step:
            os.kill(os.getpid(), 9)
        return call(*arguments, **options)
    return count
def ended(code):
    with open(os.environ["STEPS"], "w") as file:
        file.write(str({step} - step))
    end(code)
for name in ("rename", "replace", "remove", "unlink", "rmdir", "mkdir", "fsync"):
    setattr(os, name, counted(getattr(os, name)))
if "STEPS" in os.environ:
    os._exit = ended
from packer_cli.cli import app as cli
from packer_cli.run import upload
upload._THREADS = 1
cli.main()
"""
)


def killed(
    command: Sequence[object], step: int, stdin: bytes = b""
) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own; at step 0 it is not killed."""
    return altered(CRASHING.replace("{step}", str(step)), *map(str, command), stdin=stdin)
