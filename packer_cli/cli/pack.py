"""`packer pack`: options to a configuration, then a run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

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
from packer_cli.cli.shared import AsJson, Debug, Quiet, print_note
from packer_cli.config.option import OUTPUT, Option
from packer_cli.config.options import PackConfig
from packer_cli.config.run_options import RunOptions

if TYPE_CHECKING:
    from packer_cli.result.manifest import Manifest

_LEAST_UTILIZATION = 0.5  # packing alone reaches more, whatever the documents


def pack(
    ctx: typer.Context,
    inputs: Inputs,
    config: PackConfig,
    *,
    tokenizer: TokenizerName = None,
    output: Annotated[str | None, output_option("INPUT-packed-MAX_LENGTH")] = None,
    text_field: TextField = None,
    position_ids: Annotated[bool, Option("Also write the column position_ids.", OUTPUT)] = False,
    staging: Staging = None,
    options: RunOptions,
    rank: Rank = None,
    world_size: WorldSize = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Tokenize and pack data into Arrow shards.

    Reads JSON lines, Parquet, Arrow, text, CSV and Hugging Face dataset directories, also
    through .gz .zst .bz2 .xz .lz4. Records are {"text": ...}, {"messages": [...]} or
    conversations, a prompt and its completion, alpaca instructions, or {"input_ids": [...]}.
    Directories of packer tokenize are packed without tokenizing them again.

    Example: packer pack data.jsonl --max-length 4096 --tokenizer ./my-model
    """
    startup.prepare_run()
    from packer_cli.result.manifest import Manifest

    if position_ids:
        config = replace(config, columns=(*config.columns, "position_ids"))
    if output is None:
        output = default_output(inputs, f"packed-{config.max_length}")
    destination, manifest, state = run_to(
        ctx, inputs, output, with_text_field(config, text_field), options, tokenizer=tokenizer,
        staging=staging, rank=rank, world_size=world_size, quiet=quiet,
    )  # fmt: skip
    if not isinstance(manifest, Manifest):  # other ranks have units to pack
        return
    if not quiet and (concern := _concern_of(config.max_length, manifest)):
        print_note(concern)
    print_packed(destination, manifest, as_json=as_json, state=state)


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
