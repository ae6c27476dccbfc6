"""`packer plan`: options to configurations, one for each length and strategy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from packer_cli.cli import startup
from packer_cli.cli.declared import Partly
from packer_cli.cli.runs import Inputs, with_text_field
from packer_cli.cli.shared import AsJson, Debug, Quiet, print_note
from packer_cli.config.command_options import TextField, TokenizerName
from packer_cli.config.option import OUTPUT, ROWS, RUNNING, Option, options_of, plain
from packer_cli.config.options import PackConfig
from packer_cli.config.run_options import EncodingOptions
from packer_cli.config.strategies import BY_ALIAS, NAMES
from packer_cli.config.values import refuse_twice
from packer_cli.errors import ThresholdMissed, UsageError

if TYPE_CHECKING:
    from packer_cli.plan.run import Plan

_OF_PACK = options_of(PackConfig)


def plan(
    ctx: typer.Context,
    inputs: Inputs,
    config: Partly[PackConfig],
    *,
    max_length: Annotated[
        tuple[int, ...],
        Option(
            "Tokens in a packed row, one or several lengths: 2048,4096,8k.",
            ROWS,
            first=1,
            short="-l",
            value="counts",
            elsewhere=_OF_PACK["max_length"].elsewhere,
        ),
    ],
    strategy: Annotated[
        tuple[str, ...],
        Option(
            "How documents are put into rows, one or several ways with commas between:",
            ROWS,
            first=8,
            metavar="NAMES",
            choices=plain(NAMES),
            aliases=BY_ALIAS,
            value="list",
            elsewhere=_OF_PACK["strategy"].elsewhere,
        ),
    ] = ("best-fit",),
    tokenizer: TokenizerName = None,
    text_field: TextField = None,
    position_ids: Annotated[bool, Option("Count the column position_ids, too.", OUTPUT)] = False,
    batch_tokens: Annotated[
        int | None,
        Option(
            "Say how many steps an epoch has when a step has rows of N tokens together.",
            ROWS,
            first=10,
            value="count",
            least=1,
        ),
    ] = None,
    hidden_size: Annotated[
        int,
        Option(
            "Of the model. A step costs, for each token, 6 times this, and for attention the "
            "length of its segment, whose mean E[l^2]/E[l] is the attention span.",
            ROWS,
            value="count",
            least=1,
        ),
    ] = 4096,
    sample: Annotated[
        float | None,
        Option(
            "Read this share of the work units, 5% or 0.05, and estimate the figures.",
            RUNNING,
            first=3,
            value="share",
            least=0,
            most=1,
        ),
    ] = None,
    options: EncodingOptions,
    html: Annotated[
        str | None,
        Option(
            "Also write a page with charts, one file for any browser; -: to stdout, without the "
            "table.",
            metavar="FILE",
        ),
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show what packer pack would make of data, without writing anything.

    For each length of rows: how many there are and how full, what is cut, truncated or dropped,
    bytes on disk, and what attention costs. Takes what packer pack takes; directories of packer
    tokenize are planned at once, from their index.

    Example: packer plan data.jsonl --max-length 2048,4096,8k -t ./my-model
    """
    startup.prepare_run()
    from packer_cli.plan.report import as_json as render
    from packer_cli.plan.run import plan as planned
    from packer_cli.plan.table import print_plan

    refuse_twice("--strategy", strategy)
    if sample == 0:
        raise UsageError("--sample: 0 reads nothing to plan from", "for example 5%")
    _check_batch(batch_tokens, max_length)
    if html is not None:
        from packer_cli.cli.pages import check_page, save_page

        check_page(html, as_json=as_json)
    configs = []
    for name in strategy:
        for length in max_length:
            one = with_text_field(config.completed(max_length=length, strategy=name), text_field)
            columns = (*one.columns, "position_ids") if position_ids else one.columns
            configs.append(replace(one, columns=columns))
    notify = (lambda message: None) if quiet else print_note
    result = planned(
        inputs, configs, options, _named(tokenizer), sample, notify, print_note, ctx.obj,
        show_progress=not quiet,
    )  # fmt: skip
    if html is not None:
        from packer_cli.cli.plan_page import page_of

        save_page(html, page_of(result, _title(inputs), batch_tokens, hidden_size))
    if as_json:
        print(render(result, batch_tokens, hidden_size))
    elif html != "-":
        print_plan(result, _title(inputs), batch_tokens, hidden_size)
    _refuse_losses(result)


def _title(inputs: list[str]) -> str:
    return inputs[0] + (f" and {len(inputs) - 1:,} more" if len(inputs) > 1 else "")


def _named(tokenizer: str | None) -> str | None:
    if tokenizer == "":
        raise UsageError("--tokenizer: is empty", "is a variable of your script unset?")
    return tokenizer


def _check_batch(batch_tokens: int | None, lengths: tuple[int, ...]) -> None:
    if batch_tokens is not None and batch_tokens < max(lengths):
        raise UsageError(
            f"--batch-tokens: {batch_tokens:,} is less than a row of {max(lengths):,}",
            "name the tokens that one step of the optimizer reads, over all ranks",
        )


def _refuse_losses(result: Plan) -> None:
    """Raise ThresholdMissed where --max-loss would mark a result incomplete."""
    for one in result.outcomes:
        if incomplete := one.totals.get("incomplete"):
            raise ThresholdMissed(
                f"--max-length {one.config.max_length}: {incomplete}",
                "packer pack would mark the output incomplete; see --overlong and --max-length",
            )
