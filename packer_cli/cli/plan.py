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
from packer_cli.options.option import (
    SHARE,
    Rule,
    Values,
    as_option,
    mutually_exclusive,
    names,
    needs,
    options_of,
    refuse,
)
from packer_cli.options.options import ALIASES, NAMES, PackConfig
from packer_cli.options.run_options import (
    EncodingOptions,
    ProgressOptions,
    StepOptions,
    TokenizerOptions,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from packer_cli.options.recipe import PackRequest
    from packer_cli.plan import Plan

_OF_PACK = options_of(PackConfig)
_SEVERAL = ("strategy", "max_length")  # all combinations are planned
# Options that --lengths goes with, beside these and its own.
_OF_LENGTHS = {"seed", "overlong", "max_segments_per_row", "segment_multiple", "balance",
               "input_format"}  # fmt: skip


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
    lengths: Annotated[
        tuple[str, ...] | None,
        names(),
        Option(
            metavar="COLUMN[,COLUMN]",
            help="INPUT is a table with the length of each sample in this column, or in several "
            "that are added up.",
        ),
    ] = None
    key: Annotated[
        str | None,
        Option(
            metavar="COLUMN",
            help="With --output: the column that identifies a sample. Default: its number, from 0.",
        ),
    ] = None
    output: Annotated[
        str | None,
        Option(
            "--output",
            "-o",
            metavar="FILE",
            help="With --lengths: write the rows to this Parquet file, with the keys of their "
            "samples.",
        ),
    ] = None
    overwrite: Annotated[bool, Option(help="Replace an earlier plan in FILE.")] = False

    def _rules(self) -> Iterator[Rule]:
        yield from super()._rules()
        has_lengths, has_output = self.lengths is not None, self.output is not None
        yield needs("--output", has_output, "--lengths", has_lengths)
        yield needs("--key", self.key is not None, "--output", has_output)
        yield needs("--overwrite", self.overwrite, "--output", has_output)
        for name in ("sample", "tokenized"):
            is_given = getattr(self, name) is not None
            yield mutually_exclusive(as_option(name), is_given, "--lengths", has_lengths)
        several = max(len(self.max_length or ()), len(self.strategy or ())) > 1
        yield (
            has_output and several,
            "--output: holds the rows of one --max-length and one --strategy",
            "name one of each, or leave --output out to compare several",
        )


def plan(
    inputs: Inputs,
    options: PlanOptions,
    sizes: StepOptions,
    given: Annotated[Values, PackConfig, TokenizerOptions, EncodingOptions],
) -> None:
    """Show what packer pack would make of data, without writing anything.

    For each length of rows: how many there are and how full, what is cut, truncated or dropped,
    bytes on disk, and what attention costs. Takes what packer pack takes; directories of packer
    tokenize are planned at once, from their index, and so is a recipe once packer pack has
    tokenized its sources. With --lengths, plans rows of samples from a table of their lengths,
    for a loader that makes their tokens; with --ranks, in an order for even steps.

    Example: packer plan data.jsonl --max-length 2048,4096,8k -t ./my-model
    """
    from packer_cli.run.pool import tune_process

    tune_process()
    from packer_cli.options.recipe import is_recipe
    from packer_cli.reports.plan import plan_report

    html, as_json = options.html, options.as_json
    if not options.max_length and not any(map(is_recipe, inputs)):
        raise options_of(PlanOptions)["max_length"].missing()
    if options.sample == 0:
        raise UsageError("--sample: 0 reads nothing to plan from", "for example 5%")
    refuse([needs("--ranks", sizes.ranks, "--output", options.output)])
    check_page(html, as_json=as_json)
    if options.lengths is None:
        plans = _plans(inputs, options, given)
    else:
        plans = [(None, _plan_of_lengths(inputs, options, sizes, given))]
    if html is not None and len(plans) > 1:
        print_note(f"the page shows the rows of {plans[0][0]} only")
    title = options.output or named(inputs, 1)
    reports = {
        side or "": plan_report(side_plan, title + (f": {side}" if side else ""))
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


def _plans(inputs: list[str], options: PlanOptions, given: Values) -> list[tuple[str | None, Plan]]:
    """Return plans of the result, or of each side of a recipe's split with its name."""
    from packer_cli.plan import Planning

    requests = _requests(inputs, options, given)
    request, configs = requests[0], [item.config for item in requests]
    refuse_name("--tokenizer", request.command.tokenizer)
    if options.tokenized is not None:
        refuse_name("--tokenized", options.tokenized)
        if request.recipe is None:
            raise UsageError("--tokenized: is for recipes with sources", "leave it out")
        request = replace(request, recipe=replace(request.recipe, tokenized=options.tokenized))
    quiet = options.quiet
    encoding = replace(request.options, notify=notes(quiet=quiet), warn=print_note)
    planning = Planning(encoding, options.sample, show_progress=not quiet)
    if request.recipe is None:
        return [(None, planning.plan(request.inputs, configs, request.command.tokenizer))]
    output = request.command.output or default_output(inputs, "packed")
    return planning.plan_recipe(request.recipe, output, configs)


def _plan_of_lengths(
    inputs: list[str], options: PlanOptions, sizes: StepOptions, given: Values
) -> Plan:
    """Return the plan of samples by a table of their lengths, after writing it to the output."""
    from packer_cli.options.recipe import is_recipe
    from packer_cli.plan.lengths import OWN_COLUMNS, index_place, plan_lengths

    refuse_name("--output", options.output)
    columns, overlong = options.lengths or (), given.get("overlong", "drop")
    of_plan = [*columns, *(OWN_COLUMNS if len(columns) > 1 else ())]
    twice = next((name for name in columns if of_plan.count(name) > 1), "")
    declared = options_of(PackConfig, TokenizerOptions, EncodingOptions)
    idle = [declared[name].flag_for(value) for name, value in given.items()
            if name not in _OF_LENGTHS.union(_SEVERAL)]  # fmt: skip
    cut = "samples are not cut: choose"
    refuse([
        (any(map(is_recipe, inputs)), "--lengths does not go with a recipe", "name a table"),
        ("-" in inputs, "-: tables are not read from stdin", "write it to a file, and name that"),
        (not columns, "--lengths: is empty", "name the column of lengths"),
        (twice, f"--lengths: the plan would have two columns {twice!r}", "name each column once, "
         f"and call none {', '.join(OWN_COLUMNS)}"),
        ("wrap" in (options.strategy or ()), "--strategy wrap does not go with --lengths",
         f"{cut} another strategy"),
        (overlong not in ("drop", "error"), f"--overlong {overlong} does not go with --lengths",
         f"{cut} drop or error"),
        *(mutually_exclusive(flag, True, "--lengths", True) for flag in idle),
    ])  # fmt: skip
    requests = _requests(inputs, options, given | {"overlong": overlong, "train_on": "all"})
    output = None
    if options.output is not None:
        output = index_place(options.output, overwrite=options.overwrite)
    return plan_lengths(
        inputs,
        columns,
        [request.config for request in requests],
        key=options.key,
        even=None if sizes.ranks is None else sizes,
        output=output,
        show_progress=not options.quiet,
        notify=notes(quiet=options.quiet),
    )


def _refuse_incomplete(result: Plan) -> None:
    """Raise ThresholdMissed if --max-loss would mark a result incomplete."""
    for outcome in result.outcomes:
        if incomplete := outcome.totals.get("incomplete"):
            raise ThresholdMissed(
                f"--max-length {outcome.config.max_length}: {incomplete}",
                "packer pack would mark the output incomplete; see --overlong and --max-length",
            )
