"""Options that several commands have, and what they print on the way."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from packer_cli.errors import one_line

UNREAD = "shards are only read from local directories"
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback with an error.")]
NoLock = Annotated[
    bool,
    typer.Option(
        "--no-lock",
        help="Go on where the file system has no locks; let no other run write there.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no notes.")]


def say(message: str) -> None:
    """A note on stderr."""
    print(one_line(f"packer: {message}"), file=sys.stderr)
