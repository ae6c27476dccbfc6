"""Checks of what the command line alone takes: names of places to write to."""

from __future__ import annotations

from packer_cli.errors import UsageError


def refuse_name(option: str, name: str | None) -> None:
    """Raise UsageError for a name to which nothing can be written."""
    if name == "":
        raise UsageError(f"{option}: is empty", "is a variable of your script unset?")
    from packer_cli.storage import refuse_other_than_utf8

    refuse_other_than_utf8(f"{option}: ", name or "")
