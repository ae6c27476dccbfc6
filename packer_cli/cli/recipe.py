"""`packer recipe`: a first recipe for data, and the schema by which editors complete recipes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated

import typer

from packer_cli.cli.reports import notes, refuse_name
from packer_cli.errors import DataError, UsageError, from_os_error
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.option import OUTPUT, SUPERVISED, Options, Values, option
from packer_cli.options.run_options import PackOptions, Progress


@dataclass(frozen=True)
class RecipeOptions(Options):
    """Options of `packer recipe`."""

    chat_template: str | None = option(
        None, "Template of messages, to be written down.", SUPERVISED, metavar="FILE|NAME"
    )
    output: str | None = option(
        None, "File to write. Default: stdout.", OUTPUT, short="-o", metavar="FILE"
    )
    overwrite: bool = option(False, "Replace a file that is there.", OUTPUT)
    schema: bool = option(False, "Write the JSON schema of recipes instead, for editors.", OUTPUT)


def recipe(
    inputs: Annotated[
        list[str] | None,
        typer.Argument(metavar="INPUT", help="Files, directories, globs, and URLs of these."),
    ] = None,
    *,
    options: RecipeOptions,
    given: Annotated[Values, (PackOptions, "tokenizer"), (Progress, "quiet", "debug")],
) -> None:
    """Write a first recipe from what files hold: a source for files of the same shape and fields.

    With the shape, fields and size of each source, and its share by size. Edit it, then packer pack
    FILE.

    Example: packer recipe data/ -t ./my-model -o mix.toml
    """
    tokenizer, output, schema = given.get("tokenizer"), options.output, options.schema
    refuse_name("--tokenizer", tokenizer)
    refuse_name("--output", output)
    if schema and inputs:
        raise UsageError("--schema: is the same for all inputs", "leave the inputs out")
    if not schema and not inputs:
        raise UsageError(
            "Missing argument 'INPUT...'.", "name files or folders: packer recipe data/"
        )
    if output is not None and os.path.lexists(output) and not options.overwrite:
        raise UsageError(f"{output}: is there already", "replace it with --overwrite")
    if schema:
        from packer_cli.options.recipe import schema_text

        text = schema_text()
    else:
        folder = os.path.dirname(output or "") or "."
        quiet = "quiet" in given
        text = _recipe(inputs or [], tokenizer, options.chat_template, folder, quiet=quiet)
    if output is None:
        print(text, end="")
        return
    try:
        with open(output, "w" if options.overwrite else "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise from_os_error(error, output, "write") from error


def _recipe(
    inputs: list[str], tokenizer: str | None, template: str | None, folder: str, *, quiet: bool
) -> str:
    from packer_cli.chat.templates import find_template
    from packer_cli.inputs.byte_streams import STDIN
    from packer_cli.inputs.discovery import find_inputs
    from packer_cli.mixing.first_recipe import groups_of, written
    from packer_cli.tokenization.locate import BYTES, locate

    if STDIN in inputs:
        raise UsageError("-: a recipe names files", "write the data to a file")
    files = None if tokenizer in (None, BYTES) else locate(str(tokenizer))
    can_render = find_template(template, files) is not None
    config = DocumentConfig()
    found = find_inputs(inputs, config, notes(quiet=quiet))
    groups = groups_of(found, config)
    if not groups:
        raise DataError(f"{inputs[0]}: no records in {len(found)} files", "name other inputs")
    return written(groups, folder, tokenizer=tokenizer, template=template, can_render=can_render)
