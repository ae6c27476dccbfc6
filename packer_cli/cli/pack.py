"""`packer pack`: options, and a recipe if there is one, to configurations; then a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from packer_cli.cli import startup
from packer_cli.cli.declared import Partly
from packer_cli.cli.reports import print_results
from packer_cli.cli.runs import (
    Inputs,
    Rank,
    WorldSize,
    default_output,
    notes,
    options_of_run,
    place_of,
    refuse_no_tokenizer,
)
from packer_cli.cli.shared import AsJson, Debug, Quiet, print_note
from packer_cli.config.command_options import (
    MaxShareError,
    PositionIds,
    Staging,
    TextField,
    TokenizerName,
    output_option,
)
from packer_cli.config.options import PackConfig
from packer_cli.config.run_options import RunOptions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from packer_cli.cli.runs import Place
    from packer_cli.config.orders import Order
    from packer_cli.early import EarlyReference
    from packer_cli.result.manifest import Manifest

_LEAST_UTILIZATION = 0.5  # packing alone reaches more, whatever the documents


def pack(
    ctx: typer.Context,
    inputs: Inputs,
    config: Partly[PackConfig],
    *,
    tokenizer: TokenizerName = None,
    output: Annotated[str | None, output_option("INPUT-packed-MAX_LENGTH")] = None,
    text_field: TextField = None,
    position_ids: PositionIds = False,
    staging: Staging = None,
    max_share_error: MaxShareError = None,
    options: Partly[RunOptions],
    rank: Rank = None,
    world_size: WorldSize = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Tokenize and pack data into Arrow shards.

    Reads JSON lines, Parquet, Arrow, text, CSV and Hugging Face dataset directories, also
    through .gz .zst .bz2 .xz .lz4. Records are {"text": ...}, {"messages": [...]} or
    conversations, a prompt and its completion, alpaca instructions, preference pairs, or
    {"input_ids": [...]}. Directories of packer tokenize are packed without tokenizing them again.
    A recipe, INPUT.toml, says what to pack and how, from one source or from many.

    Example: packer pack data.jsonl --max-length 4096 --tokenizer ./my-model
    """
    startup.prepare_run()
    from packer_cli.config.orders import order_of
    from packer_cli.config.recipe_tables import Given, with_text

    command = {
        "tokenizer": tokenizer, "output": output, "staging": staging,
        "position_ids": position_ids or None, "max_share_error": max_share_error,
    }  # fmt: skip
    given = {name: value for name, value in command.items() if value is not None}
    order = order_of(
        inputs, Given(with_text(config.values, text_field), options.values, given), RunOptions
    )
    refuse_no_tokenizer(order.tokenizer)
    length = order.config.max_length
    output = default_output(inputs, f"packed-{length}") if order.output is None else order.output
    place = place_of(output, order.staging)
    run = options_of_run(order.options, rank=rank, world_size=world_size, quiet=quiet)
    results = list(_results(order, place, run, ctx.obj, quiet=quiet))
    if not quiet:
        for _, manifest in results:
            if concern := _concern_of(length, manifest):
                print_note(concern)
    print_results(results, as_json=as_json, state=place.state)


def _results(
    order: Order[RunOptions],
    place: Place,
    options: RunOptions,
    early: EarlyReference | None,
    *,
    quiet: bool,
) -> Iterator[tuple[Path | str, Manifest]]:
    """Where a result is, and its manifest; none of a rank that leaves units to others."""
    from packer_cli.result.manifest import Manifest

    notify = notes(quiet=quiet)
    made: list[tuple[Path | str, object]] = []
    if order.recipe:
        from packer_cli.run.recipe import pack_recipe

        made += pack_recipe(
            order.recipe, place.destination, options, notify, print_note, early, place.staging,
            order.max_share_error,
        )  # fmt: skip
    else:
        from packer_cli.run import pipeline

        manifest = pipeline.pack(
            order.inputs, place.destination, order.config, options, order.tokenizer, notify,
            print_note, early, place.staging,
        )  # fmt: skip
        made.append((place.destination, manifest))
    for directory, one in made:
        if isinstance(one, Manifest):
            yield directory, one


def _concern_of(max_length: int, manifest: Manifest) -> str:
    """A warning about the chosen row length, or ""."""
    if max_length == 1:
        return (
            "--max-length is 1: in a row of one token there is no next one to predict; use the "
            "context length of the model that you train"
        )
    if manifest.utilization >= _LEAST_UTILIZATION:
        return ""
    return (
        f"{1 - manifest.utilization:.0%} of the rows is padding: a row has {max_length:,} "
        f"tokens, all documents together {manifest.tokens:,}; a shorter --max-length wastes less"
    )
