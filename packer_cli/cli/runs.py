"""What the commands that start a run have in common: `packer pack` and `packer tokenize`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from packer_cli.cli.shared import print_note
from packer_cli.cli.values import refuse_name
from packer_cli.config.documents import DocumentConfig
from packer_cli.config.option import DOCUMENTS, INPUT, OUTPUT, RUNNING, Option
from packer_cli.config.run_options import RunOptions
from packer_cli.errors import UsageError

if TYPE_CHECKING:
    from packer_cli.result.manifest import Result

_Config = TypeVar("_Config", bound=DocumentConfig)

Inputs = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUT",
        help="Files, directories, globs, URLs of these, @FILE that lists such, or - for stdin.",
    ),
]
TokenizerName = Annotated[
    str | None,
    Option(
        "Folder, tokenizer.json, hub name, or bytes. Default: $PACKER_TOKENIZER, then bytes.",
        DOCUMENTS,
        first=2,
        short="-t",
        metavar="NAME",
        elsewhere=("--model", "--tokenizer-path", "--tokenizer-name", "--tokenizer-model"),
    ),
]
TextField = Annotated[
    str | None,
    Option(
        "Field or column that holds the text. Default: text.",
        INPUT,
        first=4,
        metavar="COLUMN",
        elsewhere=("--text-column", "--text-key", "--json-keys"),
    ),
]
Staging = Annotated[
    str | None,
    Option(
        "Where to pack a result for a URL first. Default: in the temporary directory.",
        OUTPUT,
        metavar="DIR",
    ),
]
Rank = Annotated[
    str | None,
    Option(
        "Pack only every WORLD_SIZE-th unit, from the R-th on; the last rank finishes. auto: "
        "from SLURM and the like.",
        RUNNING,
        metavar="R|auto",
    ),
]
WorldSize = Annotated[str | None, Option("How many ranks there are.", RUNNING, metavar="W|auto")]


def output_option(default: str) -> Option:
    """The declaration of --output."""
    return Option(
        f"Directory to write, or a URL. Default: {default}.",
        OUTPUT,
        first=3,
        short="-o",
        metavar="DIR",
        elsewhere=("--out", "--output-dir", "--save-dir", "--output-path", "--output-prefix"),
    )


def default_output(inputs: list[str], ending: str) -> str:
    """`data-ENDING` for `some/where/data.jsonl` or a URL, in the current directory."""
    from packer_cli.config.formats import belongs_to, format_of
    from packer_cli.storage import base_name

    name = base_name(belongs_to(inputs[0]) or inputs[0].removeprefix("@"))
    if inputs[0] == "-":
        name = "stdin"
    elif format_of(name, documents=True)[0]:
        stem = Path(name).stem
        name = Path(stem).stem if format_of(stem)[0] else stem
    stem = "".join(c for c in name if c not in "*?[]") or "data"
    return f"{stem}-{ending}"


def with_text_field(config: _Config, text_field: str | None) -> _Config:
    if text_field is None:
        return config
    fields = {"text": text_field} | config.renamed
    return replace(config, fields=tuple(sorted(fields.items())))


def run_to(
    ctx: typer.Context,
    inputs: list[str],
    output: str,
    config: DocumentConfig,
    options: RunOptions,
    *,
    tokenizer: str | None,
    staging: str | None,
    rank: str | None,
    world_size: str | None,
    quiet: bool,
) -> tuple[Path | str, Result | None, str]:
    """(where the result is, its manifest, the state it is in if it is incomplete). None to a rank
    that leaves units to others.
    """
    from packer_cli.run import pipeline
    from packer_cli.run.ranks import find_rank
    from packer_cli.run.staging import default_staging
    from packer_cli.storage import is_url

    ranks = find_rank(rank, world_size)
    options = replace(
        options, progress=not quiet, rank=ranks["rank"], world_size=ranks["world_size"]
    )
    if tokenizer == "":
        raise UsageError("--tokenizer: is empty", "is a variable of your script unset?")
    refuse_name("--output", output)
    refuse_name("--staging", staging)
    if staging is not None and (not staging or is_url(staging)):
        raise UsageError(f"--staging: {staging!r} is not a local path", "name a directory")
    folder = None if staging is None else Path(staging)
    destination: Path | str = output
    if is_url(output):
        state = f"not uploaded, but kept in {folder or default_staging(output)}"
    else:
        destination, state = Path(output), "kept, marked incomplete"
        if folder:
            raise UsageError("--staging: is for an --output that is a URL", "leave it out")
    notify = (lambda message: None) if quiet else print_note
    manifest = pipeline.pack(
        inputs, destination, config, options, tokenizer, notify, print_note, ctx.obj, folder
    )
    return destination, manifest, state
