"""Output of commands: notes, and reports as tables, as JSON, or as a page with `--html FILE`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from packer_cli.errors import ThresholdMissed, UsageError, one_line
from packer_cli.options.option import OptionGroup

if TYPE_CHECKING:
    from packer_cli.reports import Report
    from packer_cli.result.manifest import Result

LOCAL_ONLY = "this command reads shards from local directories only"
Directory = Annotated[str, Argument(metavar="DIR", help="A packed or tokenized directory.")]
_STDOUT = "-"


@dataclass(frozen=True)
class ViewOptions(OptionGroup):
    """Options of commands that read rows; rows of views are in tokenized directories."""

    tokens: Annotated[
        tuple[str, ...],
        Option(
            metavar="DIR",
            help="Where a tokenized directory of a view is now. May be given several times.",
        ),
    ] = ()


@dataclass(frozen=True)
class PageOptions(OptionGroup):
    """Options of commands whose report can be a page."""

    html: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="Write a page with charts, one file for any browser, and print no table; -: to "
            "stdout.",
        ),
    ] = None


def print_note(message: str) -> None:
    """Print a note on stderr, above a progress bar if there is one."""
    from packer_cli.progress import print_above

    print_above(one_line(f"packer: {message}"))


def notes(*, quiet: bool) -> Callable[[str], None]:
    """Return a function that prints notes, or none if they are not wanted."""
    return (lambda message: None) if quiet else print_note


def refuse_name(option: str, name: str | None) -> None:
    """Raise UsageError for a name that nothing can have: an empty one, or one that is not UTF-8."""
    if name == "":
        raise UsageError(f"{option}: is empty", "is a variable of your script unset?")
    from packer_cli.storage import refuse_other_than_utf8

    refuse_other_than_utf8(f"{option}: ", name or "")


def print_results(results: Sequence[tuple[Path | str, Result]], *, as_json: bool) -> None:
    """Print the reports of a run. Raises ThresholdMissed when one is incomplete."""
    from packer_cli.reports.stats import stats_report
    from packer_cli.storage import base_name

    show_reports(
        {base_name(str(place)): stats_report(place, manifest, is_detailed=False)
         for place, manifest in results},
        as_json=as_json,
    )  # fmt: skip
    for directory, manifest in results:
        if manifest.incomplete:
            raise ThresholdMissed(
                f"{directory}: {manifest.incomplete}",
                "the output is kept, marked incomplete; see --overlong and --max-length",
            )


def show_reports(reports: Mapping[str, Report], *, as_json: bool, html: str | None = None) -> None:
    """Print reports one after the other; as JSON, several as one object by their names. With
    `html`, the first becomes a page in the file of that name, or on stdout for `-`.
    """
    if html is not None:
        from packer_cli.reports.page import page, save

        content = page(next(iter(reports.values())))
        if html == _STDOUT:
            sys.stdout.buffer.write(content)
            sys.stdout.buffer.flush()
        else:
            save(html, content)
            (print_note if as_json else print)(one_line(f"wrote {html}"))
    if as_json:
        shown = {name: report.content for name, report in reports.items()}
        print(json.dumps(shown if len(shown) > 1 else next(iter(shown.values())), indent=1))
    elif html is None:
        from packer_cli.reports.terminal import print_report

        for number, report in enumerate(reports.values()):
            print(end="\n" if number else "")
            print_report(report)


def check_page(name: str | None, *, as_json: bool) -> None:
    """Raise UsageError if no page of that name can be written, before any work is done."""
    refuse_name("--html", name)
    if name == _STDOUT and as_json:
        raise UsageError("--html - and --json both write to stdout", "name a file for the page")
    if name not in (None, _STDOUT):
        from packer_cli.reports.page import check_place

        check_place(name)
