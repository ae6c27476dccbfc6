"""`packer tokenize`: documents as tokens, once, to be packed at any length afterwards."""

from __future__ import annotations

from typing import Annotated

import typer

from packer_cli.cli import startup
from packer_cli.cli.reports import print_packed
from packer_cli.cli.runs import (
    Inputs,
    Rank,
    Staging,
    TextField,
    TokenizerName,
    WorldSize,
    default_output,
    output_option,
    run_to,
    with_text_field,
)
from packer_cli.cli.shared import AsJson, Debug, Quiet
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
    destination, manifest, state = run_to(
        ctx, inputs, output or default_output(inputs, "tokenized"),
        with_text_field(config, text_field), options, tokenizer=tokenizer, staging=staging,
        rank=rank, world_size=world_size, quiet=quiet,
    )  # fmt: skip
    if manifest is not None:  # other ranks have units to tokenize
        print_packed(destination, manifest, as_json=as_json, state=state)
