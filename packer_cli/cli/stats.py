"""`packer stats`: what a result was made with, and how full its rows are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packer_cli.cli.pages import Html, check_page, save_page
from packer_cli.cli.shared import LOCAL_ONLY, AsJson, Debug, TokensOf, print_note
from packer_cli.cli.values import refuse_name
from packer_cli.config.option import Option, plain
from packer_cli.errors import ThresholdMissed, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from packer_cli.result.manifest import Result
    from packer_cli.stats.waiting import Prediction


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
    ranks: Annotated[
        int | None,
        Option(
            "Also predict how long steps of training wait for the costliest of so many ranks, in "
            "random order and in even ones.",
            value="count",
            least=1,
            elsewhere=("--world-size", "--gpus"),
        ),
    ] = None,
    micro_batches: Annotated[
        int | None,
        Option(
            "With --ranks: micro-batches of a rank in a step.",
            value="count",
            least=1,
            unset="1",
            elsewhere=("--gradient-accumulation-steps",),
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        Option(
            "With --ranks: rows in a micro-batch.",
            value="count",
            least=1,
            unset="1",
            elsewhere=("--micro-batch-size", "--per-device-train-batch-size"),
        ),
    ] = None,
    hidden_size: Annotated[
        int | None,
        Option("With --ranks: that of the model, as in its config.json.", value="count", least=1),
    ] = None,
    deep: Annotated[bool, Option("Recount from the shards; exit 1 on any difference.")] = False,
    tokens: TokensOf = (),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show what a result was made with, and how much of each row is real tokens.

    Reads the manifest only, so it is instant on any size; --deep reads every shard, --ranks the
    costs of rows. Of a directory that holds train/ and validation/, both.
    """
    from packer_cli.cli.reports import print_reports
    from packer_cli.result.manifest import Manifest
    from packer_cli.result.manifest_file import load_any, splits_of
    from packer_cli.storage import is_url, local

    sizes = {"--micro-batches": micro_batches, "--batch-size": batch_size}
    _refuse_sizes(ranks, hidden_size, sizes)
    directory = name if is_url(name) else Path(name)
    refuse_name("DIR", name)
    check_page(html, as_json=as_json)
    if by is not None and html is not None and not as_json:
        raise UsageError(
            "--by and --html: --by adds lines to the table, and --html prints no table",
            "leave one of them out, or add --json",
        )
    if deep:
        local(name, LOCAL_ONLY)
    places = [type(directory)(part) for part in splits_of(directory)] or [directory]
    results = [(place, load_any(place, incomplete_too=True)) for place in places]
    for place, manifest in results:
        _refuse(place, manifest, min_utilization, by, html, ranks)
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
    steps = _steps(results, ranks, micro_batches or 1, batch_size or 1, hidden_size)
    if html is not None and isinstance(manifest, Manifest):
        from packer_cli.stats.page import stats_page

        save_page(html, stats_page(places[0], manifest, steps[0]), as_json=as_json)
    if html is None or as_json:
        print_reports(results, as_json=as_json, steps=steps, detail=True, by=by, deep=deep)
    for place, manifest in results:
        _refuse_below(place, manifest, min_utilization)


def _refuse_sizes(ranks: int | None, hidden_size: int | None, sizes: dict[str, int | None]) -> None:
    """UsageError for sizes of a step that are not all there."""
    for option, value in (sizes | {"--hidden-size": hidden_size}).items():
        if ranks is None and value is not None:
            raise UsageError(
                f"{option}: is a size of training steps, and needs --ranks",
                "say on how many GPUs the model is trained: --ranks 64",
            )
    if ranks is not None and hidden_size is None:
        raise UsageError(
            "--ranks: needs --hidden-size: what attention costs depends on it",
            "give the model's, as in its config.json: --hidden-size 4096",
        )


def _steps(
    results: Sequence[tuple[Path | str, Result]],
    ranks: int | None,
    micro_batches: int,
    batch_size: int,
    hidden_size: int | None,
) -> list[Prediction | None]:
    """What steps of each result would cost. Of several, those too small for a step are noted."""
    if ranks is None or hidden_size is None:
        return [None] * len(results)
    from packer_cli.result.manifest import Manifest
    from packer_cli.stats.waiting import TooFewRowsError, Training, predict

    training = Training(ranks, micro_batches, batch_size, hidden_size)
    steps: list[Prediction | None] = []
    for place, manifest in results:
        assert isinstance(manifest, Manifest)  # noqa: S101 for mypy: `_refuse` refuses others
        try:
            steps.append(predict(place, manifest, training))
        except TooFewRowsError as error:
            if len(results) == 1:
                raise
            print_note(error.message)
            steps.append(None)
    return steps


def _refuse(
    directory: Path | str,
    manifest: Result,
    min_utilization: float | None,
    by: str | None,
    html: str | None,
    ranks: int | None,
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
    if ranks is not None:
        raise UsageError(
            f"--ranks: {directory} holds documents, and steps are made of rows",
            f"pack them: packer pack {directory} --max-length 4096",
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
