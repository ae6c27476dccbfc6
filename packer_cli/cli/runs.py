"""What the commands that start a run have in common: `packer pack` and `packer tokenize`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from packer_cli.cli.shared import print_note
from packer_cli.cli.values import refuse_name
from packer_cli.config.documents import DocumentConfig
from packer_cli.config.option import RUNNING, Option
from packer_cli.config.run_options import RunOptions
from packer_cli.errors import UsageError

_Config = TypeVar("_Config", bound=DocumentConfig)

Inputs = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUT",
        help="Files, directories, globs, URLs of these, @FILE that lists such, or - for stdin.",
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


def default_output(inputs: list[str], ending: str) -> str:
    """`data-ENDING` for `some/where/data.jsonl` or a URL, in the current directory."""
    from packer_cli.config.formats import belongs_to, format_of
    from packer_cli.config.orders import is_recipe
    from packer_cli.result.manifest_file import as_named
    from packer_cli.storage import base_name

    name = base_name(belongs_to(inputs[0]) or as_named(inputs[0].removeprefix("@")))
    if inputs[0] == "-":
        name = "stdin"
    elif is_recipe(name):
        name = Path(name).stem
    elif format_of(name, documents=True)[0]:
        stem = Path(name).stem
        name = Path(stem).stem if format_of(stem)[0] else stem
    stem = "".join(c for c in name if c not in "*?[]") or "data"
    return f"{stem}-{ending}"


def with_text_field(config: _Config, text_field: str | None) -> _Config:
    if text_field is None:
        return config
    fields = {"text": text_field} | dict(config.fields)
    return replace(config, fields=tuple(sorted(fields.items())))


@dataclass(frozen=True)
class Place:
    """Where a result goes. `staging`: where it is made first, if that is a URL. `state`: what it is
    in when it is incomplete.
    """

    destination: Path | str
    staging: Path | None
    state: str


def place_of(output: str, staging: str | None) -> Place:
    """UsageError for names to which nothing can be written."""
    from packer_cli.run.staging import default_staging
    from packer_cli.storage import is_url

    refuse_name("--output", output)
    refuse_name("--staging", staging)
    if staging is not None and (not staging or is_url(staging)):
        raise UsageError(f"--staging: {staging!r} is not a local path", "name a directory")
    folder = None if staging is None else Path(staging)
    if is_url(output):
        kept = f"not uploaded, but kept in {folder or default_staging(output)}"
        return Place(output, folder, kept)
    if folder:
        raise UsageError("--staging: is for an --output that is a URL", "leave it out")
    return Place(Path(output), None, "kept, marked incomplete")


def options_of_run(
    options: RunOptions, *, rank: str | None, world_size: str | None, quiet: bool
) -> RunOptions:
    """With what the command itself takes."""
    from packer_cli.run.ranks import find_rank

    ranks = find_rank(rank, world_size)
    return replace(options, progress=not quiet, rank=ranks["rank"], world_size=ranks["world_size"])


def refuse_no_tokenizer(tokenizer: str | None) -> None:
    if tokenizer == "":
        raise UsageError("--tokenizer: is empty", "is a variable of your script unset?")


def notes(*, quiet: bool) -> Callable[[str], None]:
    """What prints notes, which nobody needs to see."""
    return (lambda message: None) if quiet else print_note
