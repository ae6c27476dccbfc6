"""`packer stats`: what a result was made with, and how full its rows are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from packer_cli.cli.reports import (
    LOCAL_ONLY,
    PageOptions,
    ViewOptions,
    check_page,
    print_note,
    refuse_name,
    show_reports,
)
from packer_cli.errors import ThresholdMissed, UsageError
from packer_cli.options.option import SHARE, Rule, choice, mutually_exclusive, needs, refuse
from packer_cli.options.run_options import ReportOptions, StepOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from packer_cli.result.manifest import Result


_MOST_ROWS = 1 << 22  # at most, whose costs are compared


@dataclass(frozen=True)
class StatsOptions(PageOptions, StepOptions, ViewOptions, ReportOptions):
    min_utilization: Annotated[
        float | None,
        SHARE,
        Option(help="Exit 1 when less than this share of the rows is tokens: 0.95 or 95%."),
    ] = None
    by: Annotated[
        str | None,
        choice(("shard", "input", "source")),
        Option(metavar="WHAT", help="Also a line for each {}."),
    ] = None
    deep: Annotated[bool, Option(help="Recount from the shards; exit 1 on any difference.")] = False

    def _rules(self) -> Iterator[Rule]:
        yield from super()._rules()
        yield needs("--ranks", self.ranks, "--hidden-size", self.hidden_size)


def stats(
    name: Annotated[
        str, Argument(metavar="DIR", help="A packed or tokenized directory, or its URL.")
    ],
    options: StatsOptions,
) -> None:
    """Show what a result was made with, and how much of each row is real tokens.

    Reads the manifest only, so it is instant on any size; --deep reads every shard, --ranks shows
    how uneven training steps are. Of a directory that holds train/ and validation/, both.
    """
    from packer_cli.reports.stats import stats_report
    from packer_cli.result.manifest import load_any, splits_of
    from packer_cli.storage import base_name, is_url, local

    html = options.html
    directory = name if is_url(name) else Path(name)
    refuse_name("DIR", name)
    check_page(html, as_json=options.as_json)
    is_table = html is not None and not options.as_json
    refuse([mutually_exclusive("--by", options.by is not None, "--html without --json", is_table)])
    if options.deep or options.ranks is not None:
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
    reports = {
        base_name(str(place)): stats_report(
            place,
            manifest,
            by=options.by,
            steps=_steps(place, manifest, options),
            is_recounted=options.deep,
        )
        for place, manifest in results
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
    """Raise UsageError for options that do not suit this result."""
    from packer_cli.result.manifest import Manifest

    of_rows = {
        "--min-utilization": options.min_utilization,
        "--ranks": options.ranks,
        "--html": options.html,
    }
    of_rows_given = [name for name, value in of_rows.items() if value is not None]
    refuse([
        (
            options.by == "source" and not getattr(manifest, "sources", ()),
            f"--by source: {directory} has no sources: it was not made from a recipe",
            "see --by input",
        ),
        (
            of_rows_given and not isinstance(manifest, Manifest),
            f"{', '.join(of_rows_given)}: {directory} holds documents, which are not in rows yet",
            f"pack them, or see packer plan {directory} --max-length 4096",
        ),
    ])  # fmt: skip


def _steps(directory: Path | str, facts: Result, options: StepOptions) -> dict[str, Any] | None:
    """Compare the slowest rank of a step with the mean one, in an epoch of each order of rows.

    Returns ratios as means over steps, none if there are fewer rows than a step takes; of more than
    4 M rows, the first steps are counted.
    """
    from packer_cli.result.manifest import Manifest

    if options.ranks is None or options.hidden_size is None or not isinstance(facts, Manifest):
        return None
    from packer_cli.result.reader import PackedDirectory, squared_lengths
    from packer_cli.steps import BALANCES, Order, Schedule, StepSizes, row_costs

    packed = PackedDirectory(Path(directory), facts)
    sizes = StepSizes(options.ranks, options.batch_size, options.micro_batches)
    costs = row_costs(squared_lengths(packed), packed.max_length, options.hidden_size)
    order = Order(len(packed))
    steps = len(packed) // sizes.rows
    counted = min(steps, max(1, _MOST_ROWS // sizes.rows))
    ratios = {"sizes": str(sizes), "hidden_size": options.hidden_size, "steps": steps,
             "steps_counted": counted}  # fmt: skip
    for balance in (None, *BALANCES) if counted else ():
        schedule = Schedule(order, sizes, balance=balance, costs=costs)
        rows = schedule.rows_at(0, counted * sizes.rows)
        of_ranks = costs[rows].reshape(counted, -1, sizes.world_size).sum(1)
        ratios[balance or "random"] = float((of_ranks.max(1) / of_ranks.mean(1)).mean())
    return ratios
