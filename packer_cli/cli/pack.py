"""`packer pack`: options to a configuration, then a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packer_cli.cli import startup
from packer_cli.cli.reports import print_packed
from packer_cli.cli.shared import AsJson, Debug, Quiet, say
from packer_cli.cli.values import refuse_name
from packer_cli.config.option import DOCUMENTS, INPUT, OUTPUT, RUNNING, Option
from packer_cli.config.options import PackConfig, RunOptions
from packer_cli.errors import UsageError

if TYPE_CHECKING:
    from packer_cli.result.manifest import Manifest

_MOSTLY = 0.5  # of the places hold tokens; packing alone reaches more, whatever the documents


def default_output(inputs: list[str], max_length: int) -> Path:
    """`data-packed-4096` for `some/where/data.jsonl` or a URL, in the current directory."""
    from packer_cli.config.formats import belongs_to, format_of
    from packer_cli.storage import base_name

    name = base_name(belongs_to(inputs[0]) or inputs[0])
    if inputs[0] == "-":
        name = "stdin"
    elif format_of(name)[0]:
        stem = Path(name).stem
        name = Path(stem).stem if format_of(stem)[0] else stem
    stem = "".join(c for c in name if c not in "*?[]") or "data"
    return Path(f"{stem}-packed-{max_length}")


def pack(
    ctx: typer.Context,
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT", help="Files, directories, globs, URLs of these, or - for stdin."
        ),
    ],
    config: PackConfig,
    *,
    tokenizer: Annotated[
        str | None,
        Option(
            "Folder, tokenizer.json, hub name, or bytes. Default: $PACKER_TOKENIZER, then bytes.",
            DOCUMENTS,
            first=2,
            short="-t",
            metavar="NAME",
            elsewhere=("--model", "--tokenizer-path", "--tokenizer-name", "--tokenizer-model"),
        ),
    ] = None,
    output: Annotated[
        str | None,
        Option(
            "Directory to write, or a URL. Default: INPUT-packed-MAX_LENGTH.",
            OUTPUT,
            first=3,
            short="-o",
            metavar="DIR",
            elsewhere=("--out", "--output-dir", "--save-dir", "--output-path", "--output-prefix"),
        ),
    ] = None,
    text_field: Annotated[
        str | None,
        Option(
            "Field or column that holds the text. Default: text.",
            INPUT,
            first=4,
            metavar="COLUMN",
            elsewhere=("--text-column", "--text-key", "--json-keys"),
        ),
    ] = None,
    position_ids: Annotated[bool, Option("Also write the column position_ids.", OUTPUT)] = False,
    staging: Annotated[
        str | None,
        Option(
            "Where a result for a URL is packed first. Default: in the temporary directory.",
            OUTPUT,
            metavar="DIR",
        ),
    ] = None,
    options: RunOptions,
    rank: Annotated[
        str | None,
        Option(
            "Pack only every WORLD_SIZE-th unit, from the R-th on; the last rank finishes. auto: "
            "from SLURM and the like.",
            RUNNING,
            metavar="R|auto",
        ),
    ] = None,
    world_size: Annotated[
        str | None, Option("How many ranks there are.", RUNNING, metavar="W|auto")
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Tokenize and pack data into Arrow shards.

    Reads JSON lines, Parquet, Arrow, text, CSV and Hugging Face dataset directories, also
    through .gz .zst .bz2 .xz .lz4. Records are {"text": ...}, {"messages": [...]} or
    conversations, a prompt and its completion, alpaca instructions, or {"input_ids": [...]}.

    Example: packer pack data.jsonl --max-length 4096 --tokenizer ./my-model
    """
    startup.prepare_run()
    from packer_cli.run import pipeline
    from packer_cli.run.ranks import find_rank
    from packer_cli.run.staging import default_staging
    from packer_cli.storage import is_url

    if position_ids:
        config = replace(config, columns=(*config.columns, "position_ids"))
    if text_field is not None:
        fields = {"text": text_field} | config.renamed
        config = replace(config, fields=tuple(sorted(fields.items())))
    ranks = find_rank(rank, world_size)
    options = replace(
        options, progress=not quiet, rank=ranks["rank"], world_size=ranks["world_size"]
    )
    if tokenizer == "":
        raise UsageError("--tokenizer: is empty", "is a variable of your script unset?")
    refuse_name("--output", output)
    refuse_name("--staging", staging)
    destination: Path | str = output or default_output(inputs, config.max_length)
    if staging is not None and (not staging or is_url(staging)):
        raise UsageError(f"--staging: {staging!r} is not a local path", "name a directory")
    folder = None if staging is None else Path(staging)
    if is_url(str(destination)):
        kept = f"not uploaded, but kept in {folder or default_staging(str(destination))}"
    else:
        destination, kept = Path(destination), "kept, marked incomplete"
        if folder:
            raise UsageError("--staging: is for an --output that is a URL", "leave it out")
    notify = (lambda message: None) if quiet else say
    manifest = pipeline.pack(
        inputs, destination, config, options, tokenizer, notify, say, ctx.obj, folder
    )
    if manifest is None:  # there is more for other ranks to do
        return
    if concern := _concern_of(config.max_length, manifest):
        notify(concern)
    print_packed(destination, manifest, as_json=as_json, kept=kept)


def _concern_of(max_length: int, manifest: Manifest) -> str:
    """What speaks against the length of rows that was chosen, or ""."""
    if max_length == 1:
        return (
            "--max-length is 1: in a row of one token there is no next one to predict; use the "
            "context length of the model that will train"
        )
    if manifest.utilization >= _MOSTLY:
        return ""
    return (
        f"{1 - manifest.utilization:.0%} of the rows is padding: a row has {max_length:,} "
        f"tokens, all documents have {manifest.tokens:,}; a shorter --max-length wastes less"
    )
