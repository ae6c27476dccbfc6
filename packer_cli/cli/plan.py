"""`packer plan`: options to configurations, one for each length and strategy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from typer import Option

from packer_cli.cli.pack import Inputs, default_output
from packer_cli.cli.reports import (
    PageOptions,
    check_page,
    notes,
    print_note,
    refuse_name,
    show_reports,
)
from packer_cli.errors import ThresholdMissed, UsageError, named
from packer_cli.options.option import SHARE, Values, names, options_of
from packer_cli.options.options import ALIASES, NAMES, PackConfig
from packer_cli.options.run_options import EncodingOptions, ProgressOptions, TokenizerOptions

if TYPE_CHECKING:
    from packer_cli.options.recipe import PackRequest
    from packer_cli.plan import Plan

_OF_PACK = options_of(PackConfig)
_SEVERAL = ("strategy", "max_length")  # all combinations are planned


@dataclass(frozen=True)
class PlanOptions(PageOptions, ProgressOptions):
    """Options of `packer plan`, beside those of `packer pack`."""

    max_length: Annotated[
        tuple[str, ...] | None,
        names(),
        Option(
            "--max-length",
            "-l",
            metavar="N[,N]",
            help="Tokens in a packed row, one or several lengths: 2048,4096,8k (8k is 8,192).",
        ),
    ] = None
    strategy: Annotated[
        tuple[str, ...] | None,
        names(NAMES, aliases=ALIASES),
        Option(
            help="How documents are put into rows, one or several ways with commas between: {}."
        ),
    ] = None
    sample: Annotated[
        float | None,
        SHARE,
        Option(help="Read about this share of the inputs, 5% or 0.05, and estimate the figures."),
    ] = None
    tokenized: Annotated[
        str | None,
        Option(
            metavar="DIR",
            help="Where packer pack has tokenized the sources of a recipe. Default: as the recipe "
            "says, or beside its output.",
        ),
    ] = None


def plan(
    inputs: Inputs,
    options: PlanOptions,
    given: Annotated[Values, PackConfig, TokenizerOptions, EncodingOptions],
) -> None:
    """Show what packer pack would make of data, without writing anything.

    For each length of rows: how many there are and how full, what is cut, truncated or dropped,
    bytes on disk, and what attention costs. Takes what packer pack takes; directories of packer
    tokenize are planned at once, from their index, and so is a recipe once packer pack has
    tokenized its sources.

    Example: packer plan data.jsonl --max-length 2048,4096,8k -t ./my-model
    """
    from packer_cli.run.pool import tune_process

    tune_process()
    from packer_cli.options.recipe import is_recipe
    from packer_cli.reports.plan import plan_report

    html, as_json, quiet = options.html, options.as_json, options.quiet
    if not options.max_length and not any(map(is_recipe, inputs)):
        raise options_of(PlanOptions)["max_length"].missing()
    if options.sample == 0:
        raise UsageError("--sample: 0 reads nothing to plan from", "for example 5%")
    check_page(html, as_json=as_json)
    requests = _requests(inputs, options, given)
    request, configs = requests[0], [item.config for item in requests]
    refuse_name("--tokenizer", request.command.tokenizer)
    if options.tokenized is not None:
        refuse_name("--tokenized", options.tokenized)
        if request.recipe is None:
            raise UsageError("--tokenized: is for recipes with sources", "leave it out")
        request = replace(request, recipe=replace(request.recipe, tokenized=options.tokenized))
    plans = _plans(inputs, request, configs, options.sample, quiet=quiet)
    if html is not None and len(plans) > 1:
        print_note(f"the page shows the rows of {plans[0][0]} only")
    reports = {
        side or "": plan_report(side_plan, named(inputs, 1) + (f": {side}" if side else ""))
        for side, side_plan in plans
    }
    show_reports(reports, as_json=as_json, html=html)
    for _, side_plan in plans:
        _refuse_incomplete(side_plan)


def _requests(
    inputs: list[str], options: PlanOptions, given: Values
) -> list[PackRequest[EncodingOptions]]:
    """Return a request for each strategy and length."""
    from packer_cli.options.recipe import request_of

    given = {name: value for name, value in given.items() if name not in _SEVERAL}
    lengths = [_OF_PACK["max_length"].read_argument(length) for length in options.max_length or ()]
    requests = []
    for strategy in dict.fromkeys(options.strategy or [None]):
        for length in dict.fromkeys(lengths or [None]):
            values = {"strategy": strategy, "max_length": length}
            # without a value, the recipe decides, or the default
            named = {name: value for name, value in values.items() if value is not None}
            requests.append(request_of(inputs, given | named, EncodingOptions))
    return requests


def _plans(
    inputs: list[str],
    request: PackRequest[EncodingOptions],
    configs: list[PackConfig],
    sample: float | None,
    *,
    quiet: bool,
) -> list[tuple[str | None, Plan]]:
    """Return plans of the result, or of each side of a recipe's split with its name."""
    from packer_cli.plan import Planning

    options = replace(request.options, notify=notes(quiet=quiet), warn=print_note)
    planning = Planning(options, sample, show_progress=not quiet)
    if request.recipe is None:
        return [(None, planning.plan(request.inputs, configs, request.command.tokenizer))]
    output = request.command.output or default_output(inputs, "packed")
    return planning.plan_recipe(request.recipe, output, configs)


def _refuse_incomplete(result: Plan) -> None:
    """Raise ThresholdMissed if --max-loss would mark a result incomplete."""
    for outcome in result.outcomes:
        if incomplete := outcome.totals.get("incomplete"):
            raise ThresholdMissed(
                f"--max-length {outcome.config.max_length}: {incomplete}",
                "packer pack would mark the output incomplete; see --overlong and --max-length",
            )
