"""`input_times.json` of a result: how file systems identified its inputs when they were packed.

    {"inputs": [[mtime_ns, ctime_ns, device, inode], ...], "racy": [index, ...]}

Results of earlier packers know times only, {"mtime_ns": [...]}: where these are the same, the
contents of the inputs decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from packer_cli.durable import put_file
from packer_cli.records import InputFile
from packer_cli.result.layout import INPUT_TIMES
from packer_cli.result.manifest import Input


class _Identities(msgspec.Struct, omit_defaults=True):
    inputs: list[tuple[int, int, int, int]] | None = None
    racy: list[int] = []
    mtime_ns: list[int] | None = None


def identities(files: Iterable[InputFile]) -> bytes:
    """The content of the file, of inputs by index."""
    files = list(files)
    times = [(file.mtime_ns, file.ctime_ns, file.device, file.inode) for file in files]
    racy = [file.index for file in files if file.racy]
    return msgspec.json.encode(_Identities(times, racy))


def write_lost(directory: Path, inputs: list[Input], files: Sequence[InputFile]) -> None:
    """Write the file if there is none. `files`: which are still what a manifest's `inputs` were."""
    path = directory / INPUT_TIMES
    if not path.exists() and len(inputs) == len(files):
        put_file(path, identities(files))


def load_identities(directory: Path, inputs: list[Input]) -> list[InputFile]:
    """The inputs that a manifest names, as they were when packed; none where the file is missing or
    damaged: then their contents decide.
    """
    try:
        document = msgspec.json.decode((directory / INPUT_TIMES).read_bytes(), type=_Identities)
        # no file has an inode of 0: the contents decide
        times = document.inputs or [(time, 0, 0, 0) for time in document.mtime_ns or ()]
        if len(times) != len(inputs):
            raise ValueError(f"it holds {len(times)} inputs")
    except (OSError, ValueError, RecursionError):
        return []
    racy = set(document.racy)
    return [
        InputFile(index, one.path, "", None, one.size, *identity, racy=index in racy)
        for index, (one, identity) in enumerate(zip(inputs, times, strict=True))
    ]
