"""`packer finalize`: finish a result that was packed by ranks."""

from __future__ import annotations

from typing import Annotated

import typer

from packer_cli.cli.reports import print_packed
from packer_cli.cli.shared import AsJson, Debug, NoLock


def finalize(
    name: Annotated[
        str,
        typer.Argument(metavar="DIR", help="The --output of the ranks, all of which have ended."),
    ],
    no_lock: NoLock = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Finish a result that was packed by ranks, once all of its units are packed.

    The last rank does this itself; use this command if it could not.
    """
    from packer_cli.run import ranks
    from packer_cli.storage import local

    directory = local(name, "ranks only share local directories")
    print_packed(directory, ranks.finalize_now(directory, no_lock=no_lock), as_json=as_json)
