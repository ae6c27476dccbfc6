"""`--html FILE`: reports as pages for a browser."""

from __future__ import annotations

import sys
from typing import Annotated

from packer_cli.cli.shared import print_note
from packer_cli.cli.values import refuse_name
from packer_cli.config.option import Option
from packer_cli.errors import UsageError, one_line

STDOUT = "-"
Html = Annotated[
    str | None,
    Option(
        "Write a page with charts, one file for any browser, and print no table; -: to stdout.",
        metavar="FILE",
    ),
]


def check_page(name: str | None, *, as_json: bool) -> None:
    """UsageError where `save_page` would fail, before any work is done."""
    refuse_name("--html", name)
    if name == STDOUT and as_json:
        raise UsageError("--html - and --json both write to stdout", "name a file for the page")
    if name not in (None, STDOUT):
        from packer_cli.page.saving import check_place

        check_place(name)


def save_page(name: str, page: bytes, *, as_json: bool) -> None:
    """Write a page to the file of that name and say so, or to stdout for `-`."""
    if name == STDOUT:
        sys.stdout.buffer.write(page)
        sys.stdout.buffer.flush()
        return
    from packer_cli.page.saving import save

    save(name, page)
    if as_json:
        print_note(f"wrote {name}")
    else:
        print(one_line(f"wrote {name}"))
