"""Options that several commands share, and the notes that they print."""

from __future__ import annotations

from typing import Annotated

from packer_cli.config.option import RUNNING, Option
from packer_cli.errors import one_line

LOCAL_ONLY = "this command reads shards from local directories only"
Debug = Annotated[bool, Option("Show a traceback with an error.", RUNNING)]
TokensOf = Annotated[
    tuple[str, ...],
    Option(
        "Where a tokenized directory of a view is now. May be given several times.",
        flag="--tokens",
        metavar="DIR",
    ),
]
NoLock = Annotated[
    bool,
    Option("Go on where the file system has no locks; let no other run write there.", RUNNING),
]
AsJson = Annotated[
    bool, Option("Print JSON instead of a table, errors too.", RUNNING, flag="--json")
]
Quiet = Annotated[bool, Option("Show no progress and no notes.", RUNNING, short="-q")]


def print_note(message: str) -> None:
    """Print a note on stderr, above a progress bar if there is one."""
    from packer_cli.progress import print_above

    print_above(one_line(f"packer: {message}"))
