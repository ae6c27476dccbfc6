"""`packer recipe`: a first recipe for data, and the schema by which editors complete recipes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from packer_cli.cli.runs import refuse_no_tokenizer
from packer_cli.cli.shared import Debug, Quiet, print_note
from packer_cli.cli.values import refuse_name
from packer_cli.config.command_options import TokenizerName
from packer_cli.config.documents import DocumentConfig
from packer_cli.config.option import OUTPUT, SUPERVISED, Option
from packer_cli.errors import DataError, UsageError, from_os_error

if TYPE_CHECKING:
    from packer_cli.mixing.groups import TokensOf
    from packer_cli.tokenization.locate import TokenizerFiles


def recipe(
    inputs: Annotated[
        list[str] | None,
        typer.Argument(metavar="INPUT", help="Files, directories, globs, and URLs of these."),
    ] = None,
    *,
    tokenizer: TokenizerName = None,
    chat_template: Annotated[
        str | None,
        Option("Template of messages, to be written down.", SUPERVISED, metavar="FILE|NAME"),
    ] = None,
    output: Annotated[
        str | None,
        Option("File to write. Default: stdout.", OUTPUT, short="-o", metavar="FILE"),
    ] = None,
    overwrite: Annotated[bool, Option("Replace a file that is there.", OUTPUT)] = False,
    schema: Annotated[
        bool, Option("Write the JSON schema of recipes instead, for editors.", OUTPUT)
    ] = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write a first recipe from what files hold: a source for files of the same shape and fields.

    With the shape, fields, size and estimated tokens of each source, and its share by size. Edit
    it, then packer pack FILE.

    Example: packer recipe data/ -t ./my-model -o mix.toml
    """
    refuse_no_tokenizer(tokenizer)
    refuse_name("--output", output)
    if schema:
        from packer_cli.config.recipe_schema import SCHEMA

        if inputs:
            raise UsageError("--schema: is the same for all inputs", "leave the inputs out")
        _write(SCHEMA.read_text(encoding="utf-8"), output, overwrite=overwrite)
        return
    if not inputs:
        raise UsageError(
            "Missing argument 'INPUT...'.", "name files or folders: packer recipe data/"
        )
    _refuse_existing(output, overwrite=overwrite)
    text = _recipe(inputs, tokenizer, chat_template, os.path.dirname(output or ""), quiet=quiet)
    _write(text, output, overwrite=overwrite)


def _recipe(
    inputs: list[str], tokenizer: str | None, template: str | None, folder: str, *, quiet: bool
) -> str:
    from packer_cli.inputs.byte_streams import STDIN
    from packer_cli.inputs.discovery import find_inputs
    from packer_cli.mixing.first_recipe import written
    from packer_cli.mixing.groups import groups_of
    from packer_cli.supervised.templates import find_template
    from packer_cli.tokenization.locate import BYTES, locate

    if STDIN in inputs:
        raise UsageError("-: a recipe names files", "write the data to a file")
    files = None if tokenizer in (None, BYTES) else locate(str(tokenizer))
    can_render = find_template(template, files) is not None
    config = DocumentConfig()
    found = find_inputs(inputs, config, (lambda message: None) if quiet else print_note)
    groups = groups_of(found, config, _counter(tokenizer, files))
    if not groups:
        raise DataError(f"{inputs[0]}: no records in {len(found)} files", "name other inputs")
    return written(
        groups, folder or ".", tokenizer=tokenizer, template=template, can_render=can_render
    )


def _counter(tokenizer: str | None, files: TokenizerFiles | None) -> TokensOf:
    """What counts the tokens of texts: as the tokenizer has them, or by their bytes."""
    from packer_cli.mixing.groups import tokens_by_length

    if files is None:
        if tokenizer is None:
            return tokens_by_length
        return lambda texts: [len(text.encode()) + 1 for text in texts]
    from tokenizers import Tokenizer

    engine = Tokenizer.from_str(files.json.decode())
    return lambda texts: [len(one.ids) + 1 for one in engine.encode_batch(texts)]


def _refuse_existing(output: str | None, *, overwrite: bool) -> None:
    if output is not None and os.path.lexists(output) and not overwrite:
        raise UsageError(f"{output}: is there already", "replace it with --overwrite")


def _write(text: str, output: str | None, *, overwrite: bool) -> None:
    if output is None:
        print(text, end="")
        return
    _refuse_existing(output, overwrite=overwrite)
    try:
        with open(output, "w" if overwrite else "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise from_os_error(error, output, "write") from error
