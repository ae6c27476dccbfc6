"""Opening results of `packer pack`: packed directories and views."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from packer_cli import storage
from packer_cli.errors import DataError, UsageError
from packer_cli.result.manifest import Manifest
from packer_cli.result.manifest_file import load
from packer_cli.result.reader import PackedDirectory
from packer_cli.result.view import View

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def open_packed(path: str | os.PathLike[str], tokens: Paths | None = None) -> PackedDirectory:
    """Open a directory written by `packer pack`, also a view.

    `tokens`: of a view, where its tokenized directories are, if they are no longer where they were
    packed from; one or several, in any order.

    Raises DataError when it is unfinished, of another format version, or when a shard is
    missing or has another size than the manifest says, and for a view whose tokenized directories
    are gone or changed; UsageError for `tokens` of what is no view.
    """
    directory = storage.local(path, "rows are only read from local directories")
    while True:
        packed = opened(directory, load(directory), tokens)
        try:
            for shard in packed.facts.shards:
                packed.check_size(shard)
        except DataError:
            if packed.replaced() is None:
                raise
            continue  # another, complete result is there by now
        return packed


def opened(path: Path, facts: Manifest, tokens: Paths | None = None) -> PackedDirectory:
    """The same with its manifest read already, and without a look at its shards."""
    given = [tokens] if isinstance(tokens, str | os.PathLike) else list(tokens or ())
    if facts.config.view:
        return View(path, facts, given)
    if given:
        raise UsageError(f"--tokens: {path} is no view: it has its tokens itself", "leave it out")
    return PackedDirectory(path, facts)
