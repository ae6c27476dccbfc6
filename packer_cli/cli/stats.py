"""`packer stats`: what a result was made with, and how full its rows are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from packer_cli.cli.reports import (
    LOCAL_ONLY,
    Page,
    TokensOf,
    check_page,
    print_note,
    refuse_name,
    show_reports,
)
from packer_cli.errors import ThresholdMissed, UsageError
from packer_cli.options.option import Share, apart, option, refuse
from packer_cli.options.run_options import Reporting, Sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from packer_cli.result.manifest import Result


@dataclass(frozen=True)
class StatsOptions(Page, Sizes, TokensOf, Reporting):
    min_utilization: Share | None = option(
        None, "Exit 1 when less than this share of the rows is tokens: 0.95 or 95%."
    )
    by: str | None = option(
        None,
        "Also a line for each",
        metavar="WHAT",
        choices=("shard", "input", "source"),
        meant={"input": ("file",)},
    )
    deep: bool = option(False, "Recount from the shards; exit 1 on any difference.")


def stats(
    name: Annotated[
        str, typer.Argument(metavar="DIR", help="A packed or tokenized directory, or its URL.")
    ],
    options: StatsOptions,
) -> None:
    """Show what a result was made with, and how much of each row is real tokens.

    Reads the manifest only, so it is instant on any size; --deep reads every shard, --ranks the
    costs of rows. Of a directory that holds train/ and validation/, both.
    """
    from packer_cli.reports.stats import stats_report
    from packer_cli.result.manifest import load_any, splits_of
    from packer_cli.storage import base_name, is_url, local

    html = options.html
    directory = name if is_url(name) else Path(name)
    refuse_name("DIR", name)
    check_page(html, as_json=options.as_json)
    is_table = html is not None and not options.as_json
    refuse([apart("--by", options.by is not None, "--html without --json", is_table)])
    if options.deep:
        local(name, LOCAL_ONLY)
    places = [type(directory)(part) for part in splits_of(directory)] or [directory]
    results = [(place, load_any(place, incomplete_too=True)) for place in places]
    for place, manifest in results:
        _refuse(place, manifest, options)
        if manifest.incomplete:
            print_note(f"{place} is marked incomplete: {manifest.incomplete}")
    if html is not None and len(results) > 1:
        raise UsageError(
            f"--html: {directory} holds {len(results)} results, and a page shows one",
            f"name one: {' or '.join(map(str, places))}",
        )
    if options.deep:
        from packer_cli.verify import recount  # which needs Arrow

        for place, _ in results:
            recount(Path(place), options.tokens)
    steps = _steps(results, options)
    reports = {
        base_name(str(place)): stats_report(
            place, one, by=options.by, steps=its, is_recounted=options.deep
        )
        for (place, one), its in zip(results, steps, strict=True)
    }
    show_reports(reports, as_json=options.as_json, html=html)
    least = options.min_utilization
    for place, manifest in results:
        utilization = getattr(manifest, "utilization", 1.0)
        if least is not None and utilization < least:
            raise ThresholdMissed(
                f"{place}: utilization {utilization:.4f} is below --min-utilization {least}",
                "the histograms show whether the data or the packing is the cause",
            )


def _refuse(directory: Path | str, manifest: Result, options: StatsOptions) -> None:
    """UsageError for what this result does not have."""
    from packer_cli.result.manifest import Manifest

    of_rows = {
        "--min-utilization": options.min_utilization,
        "--ranks": options.ranks,
        "--html": options.html,
    }
    given = [name for name, value in of_rows.items() if value is not None]
    refuse([
        (
            options.by == "source" and not getattr(manifest, "sources", ()),
            f"--by source: {directory} has no sources: it was not made from a recipe",
            "see --by input",
        ),
        (
            given and not isinstance(manifest, Manifest),
            f"{', '.join(given)}: {directory} holds documents, which are not in rows yet",
            f"pack them, or see packer plan {directory} --max-length 4096",
        ),
    ])  # fmt: skip


def _steps(
    results: Sequence[tuple[Path | str, Result]], sizes: Sizes
) -> list[dict[str, Any] | None]:
    """What steps of each result would cost. Of several, those too small for a step are noted."""
    if sizes.ranks is None or sizes.hidden_size is None:
        return [None] * len(results)
    from packer_cli.result.manifest import Manifest
    from packer_cli.steps.schedule import StepSizes, predict

    of_step = StepSizes(sizes.ranks, sizes.batch_size, sizes.micro_batches)
    skip = print_note if len(results) > 1 else None
    return [
        predict(place, one, of_step, sizes.hidden_size, skip) if isinstance(one, Manifest) else None
        for place, one in results
    ]
