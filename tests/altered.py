"""Programs that are packer, or packer with a fault, in processes that begin at once.

done = altered(PROGRAM, "pack", "a.jsonl", ...)      as subprocess.run([python, "-c", PROGRAM])
done = unaltered("pack", "a.jsonl", ...)             as subprocess.run([packer, ...])
done = faulty("at_step(5, kill)", "pack", ...)       with a fault of `faults.py`
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence

from copies import Copy

_SECONDS = 300


def altered(
    program: str, *arguments: str, stdin: str | bytes = b""
) -> subprocess.CompletedProcess[str]:
    """Run `program`, which calls `cli.main` in the end, in the current directory."""
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryFile("w+") as error,
    ):
        given.write(stdin.encode() if isinstance(stdin, str) else stdin)
        given.seek(0)
        run = Copy(program, [file.fileno() for file in (given, output, error)], arguments)
        try:
            status = run.wait(_SECONDS)
        finally:
            run.kill()
        output.seek(0)
        error.seek(0)
        return subprocess.CompletedProcess(program, status, output.read(), error.read())


_PACKER = "from packer_cli.__main__ import main; main()"


def begun(
    arguments: Sequence[object], *, stdout: int | None = None, stderr: int | None = None
) -> Copy:
    """Begin to run packer. `stdout`, `stderr`: descriptors, or None, and nothing is kept."""
    with open(os.devnull, "r+b") as nothing:
        none = nothing.fileno()
        streams = [none if one is None else one for one in (None, stdout, stderr)]
        return Copy(_PACKER, streams, [*map(str, arguments)])


def unaltered(*arguments: object, stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
    """Run packer where a process, and all that it prints, is what is tested."""
    return altered(_PACKER, *map(str, arguments), stdin=stdin)


_FAULTY = """
from faults import *
from packer_cli.__main__ import main
{fault}
main()
"""


def faulty(fault: str, *arguments: object, stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
    """Run packer with a fault of `faults.py`."""
    return altered(_FAULTY.format(fault=fault), *map(str, arguments), stdin=stdin)
