"""`packer plan`: options to configurations, one for each length and strategy."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from packer_cli.cli import startup
from packer_cli.cli.declared import Partly
from packer_cli.cli.pages import Html, check_page, save_page
from packer_cli.cli.runs import Inputs, default_output, notes, refuse_no_tokenizer
from packer_cli.cli.shared import AsJson, Debug, Quiet, print_note
from packer_cli.cli.values import refuse_name
from packer_cli.config.command_options import MaxShareError, TextField, TokenizerName
from packer_cli.config.option import INPUT, OUTPUT, ROWS, RUNNING, Option, options_of, plain
from packer_cli.config.options import PackConfig
from packer_cli.config.run_options import EncodingOptions
from packer_cli.config.strategies import BY_ALIAS, NAMES
from packer_cli.config.values import refuse_twice
from packer_cli.errors import ThresholdMissed, UsageError

if TYPE_CHECKING:
    from packer_cli.config.orders import Order
    from packer_cli.early import EarlyReference
    from packer_cli.plan.run import Plan

_OF_PACK = options_of(PackConfig)
_LENGTHS = Option(
    "Tokens in a packed row, one or several lengths: 2048,4096,8k (8k is 8,192).",
    ROWS,
    first=1,
    short="-l",
    metavar="N[,N]",
    value="counts",
    elsewhere=_OF_PACK["max_length"].elsewhere,
)


def plan(
    ctx: typer.Context,
    inputs: Inputs,
    config: Partly[PackConfig],
    *,
    max_length: Annotated[tuple[int, ...] | None, _LENGTHS] = None,
    strategy: Annotated[
        tuple[str, ...] | None,
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
    ] = None,
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
            "Read about this share of the inputs, 5% or 0.05, and estimate the figures.",
            RUNNING,
            first=3,
            value="share",
            least=0,
            most=1,
        ),
    ] = None,
    max_share_error: MaxShareError = None,
    tokenized: Annotated[
        str | None,
        Option(
            "Where packer pack has tokenized the sources of a recipe. Default: as the recipe says, "
            "or beside its output.",
            INPUT,
            metavar="DIR",
        ),
    ] = None,
    options: Partly[EncodingOptions],
    html: Html = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show what packer pack would make of data, without writing anything.

    For each length of rows: how many there are and how full, what is cut, truncated or dropped,
    bytes on disk, and what attention costs. Takes what packer pack takes; directories of packer
    tokenize are planned at once, from their index, and so is a recipe once packer pack has
    tokenized its sources; before, it is planned from a sample of them.

    Example: packer plan data.jsonl --max-length 2048,4096,8k -t ./my-model
    """
    startup.prepare_run()
    from packer_cli.config.orders import order_of
    from packer_cli.config.recipe_tables import Given, with_text
    from packer_cli.plan.report import as_json as render
    from packer_cli.plan.table import print_plan

    _refuse_missing_length(max_length, inputs)
    if sample == 0:
        raise UsageError("--sample: 0 reads nothing to plan from", "for example 5%")
    check_page(html, as_json=as_json)
    refuse_twice("--strategy", strategy or ())
    values = with_text(config.values, text_field)
    command = {"tokenizer": tokenizer, "position_ids": position_ids or None,
               "max_share_error": max_share_error}  # fmt: skip
    given = {name: value for name, value in command.items() if value is not None}
    orders = [
        order_of(inputs, Given(values | way, options.values, given), EncodingOptions)
        for way in _ways(strategy, max_length)
    ]
    order, configs = orders[0], [one.config for one in orders]
    refuse_no_tokenizer(order.tokenizer)
    _check_batch(batch_tokens, [one.max_length for one in configs])
    if tokenized is not None:
        order = _tokenized_at(tokenized, order)
    plans = _plans(inputs, order, configs, sample, ctx.obj, quiet=quiet)
    if html is not None:
        from packer_cli.cli.plan_page import page_of

        side, first = plans[0]
        if len(plans) > 1:
            print_note(f"the page shows the rows of {side} only")
        save_page(
            html, page_of(first, _title(inputs, side), batch_tokens, hidden_size), as_json=as_json
        )
    if as_json:
        content = {side: render(one, batch_tokens, hidden_size) for side, one in plans}
        print(json.dumps(content if len(content) > 1 else content[plans[0][0]], indent=1))
    elif html is None:
        for number, (side, one) in enumerate(plans):
            print(end="\n" if number else "")
            print_plan(one, _title(inputs, side), batch_tokens, hidden_size)
    for _, one in plans:
        _refuse_losses(one)
        _refuse_shares(one, order.max_share_error)


def _tokenized_at(directory: str, order: Order[EncodingOptions]) -> Order[EncodingOptions]:
    """With the sources' tokens in this directory."""
    refuse_name("--tokenized", directory)
    if order.recipe is None:
        raise UsageError("--tokenized: is for recipes with sources", "leave it out")
    return replace(order, recipe=replace(order.recipe, tokenized=directory))


def _ways(
    strategies: tuple[str, ...] | None, lengths: tuple[int, ...] | None
) -> list[dict[str, Any]]:
    """What tells the configurations apart. None: as the recipe has it, or the default."""
    return [
        ({} if strategy is None else {"strategy": strategy})
        | ({} if length is None else {"max_length": length})
        for strategy in strategies or [None]
        for length in lengths or [None]
    ]


def _plans(
    inputs: list[str],
    order: Order[EncodingOptions],
    configs: list[PackConfig],
    sample: float | None,
    early: EarlyReference | None,
    *,
    quiet: bool,
) -> list[tuple[str | None, Plan]]:
    """Of the result, or of each side of a recipe's split with its name."""
    notify = notes(quiet=quiet)
    if order.recipe is None:
        from packer_cli.plan.run import plan as planned

        result = planned(
            order.inputs, configs, order.options, order.tokenizer, sample, notify, print_note,
            early, show_progress=not quiet,
        )  # fmt: skip
        return [(None, result)]
    from packer_cli.plan.recipe import plan_recipe

    lengths = dict.fromkeys(one.max_length for one in configs)
    outputs = [order.output] if order.output else [
        default_output(inputs, f"packed-{length}") for length in lengths
    ]  # fmt: skip
    return plan_recipe(
        order.recipe, outputs, configs, order.options, sample, notify, print_note,
        show_progress=not quiet,
    )  # fmt: skip


def _refuse_missing_length(lengths: tuple[int, ...] | None, inputs: list[str]) -> None:
    from packer_cli.config.orders import is_recipe

    if lengths is None and not any(map(is_recipe, inputs)):
        raise UsageError(
            "Missing option '--max-length' / '-l'.",
            f"add --max-length {_LENGTHS.metavar}. {_LENGTHS.help}",
        )


def _title(inputs: list[str], side: str | None) -> str:
    more = f" and {len(inputs) - 1:,} more" if len(inputs) > 1 else ""
    return f"{inputs[0]}{more}{f': {side}' if side else ''}"


def _check_batch(batch_tokens: int | None, lengths: list[int]) -> None:
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


def _refuse_shares(result: Plan, most: float | None) -> None:
    """Raise ThresholdMissed where --max-share-error would end a run."""
    from packer_cli.mixing.shares import refuse_missed

    for one in result.outcomes:
        if one.config.mixture and one.shares and most is not None:
            refuse_missed(one.config.mixture, one.shares, most)
