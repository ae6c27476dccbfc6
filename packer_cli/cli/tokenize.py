"""`packer tokenize`: documents as tokens, once, to be packed at any length afterwards."""

from __future__ import annotations

from typing import Annotated

import typer

from packer_cli.cli import startup
from packer_cli.cli.reports import print_packed
from packer_cli.cli.runs import (
    Inputs,
    Rank,
    WorldSize,
    default_output,
    notes,
    options_of_run,
    place_of,
    refuse_no_tokenizer,
    with_text_field,
)
from packer_cli.cli.shared import AsJson, Debug, Quiet, print_note
from packer_cli.config.command_options import (
    Staging,
    TextField,
    TokenizerName,
    output_option,
)
from packer_cli.config.documents import DocumentConfig
from packer_cli.config.run_options import RunOptions


def tokenize(
    ctx: typer.Context,
    inputs: Inputs,
    config: DocumentConfig,
    *,
    tokenizer: TokenizerName = None,
    output: Annotated[str | None, output_option("INPUT-tokenized")] = None,
    text_field: TextField = None,
    staging: Staging = None,
    options: RunOptions,
    rank: Rank = None,
    world_size: WorldSize = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Tokenize data once, to pack it at any length and in any mixture.

    Reads what packer pack reads, and gives documents the same tokens. The directory it writes is
    an INPUT of packer pack, packer plan and a view.

    Example: packer tokenize data.jsonl --tokenizer ./my-model --output tokens
    """
    startup.prepare_run()
    from packer_cli.run import pipeline

    refuse_no_tokenizer(tokenizer)
    place = place_of(output or default_output(inputs, "tokenized"), staging)
    manifest = pipeline.pack(
        inputs, place.destination, with_text_field(config, text_field),
        options_of_run(options, rank=rank, world_size=world_size, quiet=quiet), tokenizer,
        notes(quiet=quiet), print_note, ctx.obj, place.staging,
    )  # fmt: skip
    if manifest is not None:  # other ranks have units to tokenize
        print_packed(place.destination, manifest, as_json=as_json, state=place.state)
