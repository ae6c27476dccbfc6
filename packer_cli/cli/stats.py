"""`packer stats`: what a result was made with, and how full its rows are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packer_cli.cli.pages import STDOUT, Html, check_page, save_page
from packer_cli.cli.reports import print_report
from packer_cli.cli.shared import LOCAL_ONLY, AsJson, Debug, TokensOf, print_note
from packer_cli.cli.values import refuse_name
from packer_cli.config.option import Option, plain
from packer_cli.errors import ThresholdMissed, UsageError


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

    Reads the manifest only, so it is instant on any size; --deep reads every shard.
    """
    from packer_cli.result.manifest import Manifest, load_any
    from packer_cli.storage import is_url, local

    directory = name if is_url(name) else Path(name)
    refuse_name("DIR", name)
    check_page(html, as_json=as_json)
    if deep:
        local(name, LOCAL_ONLY)
    manifest = load_any(directory, incomplete_too=True)
    if min_utilization is not None and not isinstance(manifest, Manifest):
        raise UsageError(
            f"--min-utilization: {directory} holds documents, which are not in rows yet",
            f"leave it out, or pack them: packer pack {directory} --max-length 4096",
        )
    if by == "source" and not getattr(manifest, "sources", ()):
        raise UsageError(
            f"--by source: {directory} has no sources: it was not made from a recipe",
            "see --by input",
        )
    if html is not None and not isinstance(manifest, Manifest):
        raise UsageError(
            f"--html: {directory} holds documents, and pages show rows",
            f"see packer plan {directory} --max-length 4096 --html FILE",
        )
    if manifest.incomplete:
        print_note(f"{directory} is marked incomplete: {manifest.incomplete}")
    if deep:
        from packer_cli.result.recount import check_document_recount, check_recount

        if isinstance(manifest, Manifest):
            check_recount(Path(directory), tokens)
        else:
            check_document_recount(Path(directory))
    if html is not None and isinstance(manifest, Manifest):
        from packer_cli.stats.page import stats_page

        save_page(html, stats_page(directory, manifest))
    if html != STDOUT:
        print_report(directory, manifest, as_json=as_json, detail=True, by=by, deep=deep)
    if not isinstance(manifest, Manifest) or min_utilization is None:
        return
    if manifest.utilization < min_utilization:
        raise ThresholdMissed(
            f"{directory}: utilization {manifest.utilization:.4f} is below --min-utilization "
            f"{min_utilization}",
            "the histograms show whether the data or the packing is the cause",
        )
