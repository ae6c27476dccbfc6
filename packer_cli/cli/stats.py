"""`packer stats`: what a result was made with, and how full its rows are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packer_cli.cli.pages import STDOUT, Html, check_page, save_page
from packer_cli.cli.shared import LOCAL_ONLY, AsJson, Debug, TokensOf, print_note
from packer_cli.cli.values import refuse_name
from packer_cli.config.option import Option, plain
from packer_cli.errors import ThresholdMissed, UsageError

if TYPE_CHECKING:
    from packer_cli.result.manifest import Result


def stats(
    name: Annotated[
        str, typer.Argument(metavar="DIR", help="A packed or tokenized directory, or its URL.")
    ],
    min_utilization: Annotated[
        float | None,
        Option(
            "Exit 1 when less than this share of the rows is tokens: 0.95 or 95%.",
            value="share",
            least=0,
            most=1,
        ),
    ] = None,
    by: Annotated[
        str | None,
        Option(
            "Also a line for each",
            metavar="WHAT",
            choices=plain(("shard", "input", "source")),
            aliases={"shards": "shard", "inputs": "input", "file": "input", "sources": "source"},
        ),
    ] = None,
    html: Html = None,
    deep: Annotated[bool, Option("Recount from the shards; exit 1 on any difference.")] = False,
    tokens: TokensOf = (),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show what a result was made with, and how much of each row is real tokens.

    Reads the manifest only, so it is instant on any size; --deep reads every shard. Of a directory
    that holds train/ and validation/, both.
    """
    from packer_cli.cli.reports import print_reports
    from packer_cli.result.manifest import Manifest, load_any, splits_of
    from packer_cli.storage import is_url, local

    directory = name if is_url(name) else Path(name)
    refuse_name("DIR", name)
    check_page(html, as_json=as_json)
    if deep:
        local(name, LOCAL_ONLY)
    places = [type(directory)(part) for part in splits_of(directory)] or [directory]
    results = [(place, load_any(place, incomplete_too=True)) for place in places]
    for place, manifest in results:
        _refuse(place, manifest, min_utilization, by, html)
        if manifest.incomplete:
            print_note(f"{place} is marked incomplete: {manifest.incomplete}")
    if html is not None and len(results) > 1:
        raise UsageError(
            f"--html: {directory} holds {len(results)} results, and a page shows one",
            f"name one: {' or '.join(map(str, places))}",
        )
    if deep:
        for place, manifest in results:
            _recount(Path(place), manifest, tokens)
    if html is not None and isinstance(manifest, Manifest):
        from packer_cli.stats.page import stats_page

        save_page(html, stats_page(places[0], manifest))
    if html != STDOUT:
        print_reports(results, as_json=as_json, detail=True, by=by, deep=deep)
    for place, manifest in results:
        _refuse_below(place, manifest, min_utilization)


def _refuse(
    directory: Path | str,
    manifest: Result,
    min_utilization: float | None,
    by: str | None,
    html: str | None,
) -> None:
    """UsageError for what this result does not have."""
    from packer_cli.result.manifest import Manifest

    if by == "source" and not getattr(manifest, "sources", ()):
        raise UsageError(
            f"--by source: {directory} has no sources: it was not made from a recipe",
            "see --by input",
        )
    if isinstance(manifest, Manifest):
        return
    if min_utilization is not None:
        raise UsageError(
            f"--min-utilization: {directory} holds documents, which are not in rows yet",
            f"leave it out, or pack them: packer pack {directory} --max-length 4096",
        )
    if html is not None:
        raise UsageError(
            f"--html: {directory} holds documents, and pages show rows",
            f"see packer plan {directory} --max-length 4096 --html FILE",
        )


def _recount(directory: Path, manifest: Result, tokens: tuple[str, ...]) -> None:
    from packer_cli.result.manifest import Manifest
    from packer_cli.result.recount import check_document_recount, check_recount

    if isinstance(manifest, Manifest):
        check_recount(directory, tokens)
    else:
        check_document_recount(directory)


def _refuse_below(directory: Path | str, manifest: Result, least: float | None) -> None:
    """ThresholdMissed for rows that are less full."""
    utilization = getattr(manifest, "utilization", 1.0)
    if least is not None and utilization < least:
        raise ThresholdMissed(
            f"{directory}: utilization {utilization:.4f} is below --min-utilization {least}",
            "the histograms show whether the data or the packing is the cause",
        )
