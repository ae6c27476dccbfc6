"""`packer recipe`: a first recipe for data, and the schema by which editors complete recipes.

A first recipe has a source for files with the same shape and fields. It is read and packed as it is
written.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packer_cli.cli.reports import notes, refuse_name
from packer_cli.errors import DataError, UsageError, from_os_error, named
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.option import Options, Values, option, refuse
from packer_cli.options.run_options import PackOptions, Progress
from packer_cli.ownership import put_file
from packer_cli.storage import base_name, is_url, read_bytes

if TYPE_CHECKING:
    from packer_cli.options.shapes import Shape
    from packer_cli.records import InputFile

_BEGIN = """\
# Written by packer recipe; to pack it: packer pack FILE -o OUT
# Editors complete keys: packer recipe --schema -o recipe.schema.json, and here a line
# that begins with #:schema ./recipe.schema.json
max_length = 4096
"""
_SAME_BYTES = 20  # which all recipes begin with, and all schemas
_BYTES = '# tokenizer = "org/model"     without one, every byte is a token\n'
_END = '\n# [validation]\n# share = "0.5%"\n'


@dataclass(frozen=True)
class RecipeOptions(Options):
    chat_template: str | None = option(
        None, "Template of messages, to be written down.", metavar="FILE|NAME"
    )
    output: str | None = option(None, "File to write. Default: stdout.", short="-o", metavar="FILE")
    overwrite: bool = option(False, "Replace a file that is there.")
    schema: bool = option(False, "Write the JSON schema of recipes instead, for editors.")


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
    missing, names = not schema and not inputs, "name files or folders: packer recipe data/"
    is_there = output is not None and os.path.lexists(output)
    is_other = output is not None and os.path.exists(output) and not os.path.isfile(output)
    refuse([
        (schema and inputs, "--schema: is the same for all inputs", "leave the inputs out"),
        (missing, "Missing argument 'INPUT...'.", names),
        ("-" in (inputs or ()), "-: a recipe names files", "write the data to a file"),
        (is_other, f"{output}: is not a regular file", "leave out --output to write to stdout"),
        (is_there and not options.overwrite, f"{output}: is there already",
         "replace it with --overwrite"),
    ])  # fmt: skip
    if schema:
        from packer_cli.options import recipe as recipes

        text = json.dumps(recipes.schema(), indent=1) + "\n"
    else:
        text = _recipe(inputs or [], tokenizer, options, quiet="quiet" in given)
    if output is None:
        print(text, end="")
        return
    _save(Path(os.path.realpath(output)), text.encode())


def _save(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all, through a `.part` beside it, which may be
    there already if a kill left it. Raises PackerError.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        begin = read_bytes(part)[:_SAME_BYTES]
    except FileNotFoundError:
        begin = b""
    except OSError as error:
        raise from_os_error(error, part, "read") from error
    if not content.startswith(begin):
        raise UsageError(
            f"{part}: is there, and is not of packer recipe",
            "move it elsewhere, or choose another --output",
        )
    put_file(path, content)


def _recipe(
    inputs: list[str], tokenizer: str | None, options: RecipeOptions, *, quiet: bool
) -> str:
    """The text of a recipe. What cannot be packed yet is a comment."""
    from packer_cli.chat.templates import find_template
    from packer_cli.inputs.discovery import find_inputs
    from packer_cli.tokenization.locate import BYTES, locate

    folder, template = os.path.dirname(options.output or "") or ".", options.chat_template
    files = None if tokenizer in (None, BYTES) else locate(str(tokenizer))
    found = find_inputs(inputs, DocumentConfig(), notes(quiet=quiet))
    has_template = find_template(template, files) is not None
    sources = _sources_of(found)
    if not sources:
        raise DataError(f"{inputs[0]}: no records in {len(found)} files", "name other inputs")
    text = _BEGIN + (f"tokenizer = {_text(tokenizer, folder)}\n" if tokenizer else _BYTES)
    size = sum(file.size for file in found)
    for source, name in zip(sources, _names(sources), strict=True):
        lines = source.lines(name, size, folder)
        if source.of_messages and template:
            lines.append(f"chat_template = {_text(template, folder)}")
        if problem := source.problem(has_template=has_template):
            lines = [f"# left out: {problem}", *(f"# {line}" for line in lines)]
        text += "\n".join(["", source.described, *lines, ""])
    return text + _END


@dataclass
class _Source:
    """Files of one folder with the same shape and fields.

    shape       None: the records have none that is known
    text_field  the field that holds the text, where that is not "text"
    size        of all files, in bytes
    """

    shape: Shape | None
    text_field: str | None
    fields: list[str]
    folder: str
    paths: list[str] = field(default_factory=list)
    size: int = 0

    @property
    def of_messages(self) -> bool:
        return self.shape is not None and (self.shape.is_chat or self.shape.of_messages)

    @property
    def described(self) -> str:
        shape = self.shape.described() if self.shape else "of no known shape"
        count = f"{len(self.paths):,} file{'s' * (len(self.paths) > 1)}"
        about = f"{shape}; {self.size / 1e6:,.1f} MB in {count}; fields: {named(self.fields)}"
        return f"# {''.join(c if c.isprintable() else '?' for c in about)}"

    def problem(self, *, has_template: bool) -> str:
        """Why the source cannot be packed as it is; "" where it can."""
        if self.shape is None:
            return "no field is known to hold text: name it with text_field"
        if self.of_messages and not has_template:
            return "messages need a chat template: name chat_template, or a tokenizer that has one"
        return "its tokens must be of the tokenizer of the others" * self.shape.is_of_tokens

    def lines(self, name: str, size: int, folder: str) -> list[str]:
        """The lines in a recipe that is kept in `folder`. `size`: bytes of all sources."""
        paths = [_text(path, folder) for path in self.paths]
        inputs = [f"inputs = [{paths[0]}]"]
        if len(paths) > 1:
            inputs = ["inputs = [", *(f"    {path}," for path in paths), "]"]
        share = self.size / max(size, 1)
        lines = ["[[source]]", f"name = {_text(name)}", *inputs]
        lines.append(f"epochs = 1     # or weight = {share:.3g}, its share of all by size")
        if self.text_field:
            lines.append(f"text_field = {_text(self.text_field)}")
        elif self.shape and self.shape.kind != "tokens":
            lines.append(f"shape = {_text(self.shape.kind)}")
        return lines


def _sources_of(files: list[InputFile]) -> list[_Source]:
    """A source for each group of files; those without records are left out."""
    from packer_cli.inputs.detection import detect_shape
    from packer_cli.inputs.formats import reader_for
    from packer_cli.options.shapes import find_shape, options_for

    sources = dict[object, _Source]()
    for file in files:
        fields = reader_for(file.format).fields(file, DocumentConfig())
        if fields is None:
            continue
        shape = text_field = None
        try:
            shape = detect_shape([file], DocumentConfig()).shape
        except DataError:
            if own := options_for(dict.fromkeys(fields, ""), "text"):
                text_field = own.fields["text"]
                shape = find_shape(fields, "text", own.fields, file.path, tokens=False)
        path = os.path.dirname(file.path) if file.format == "tokenized" else file.path
        folder = path[: len(path) - len(base_name(path))].rstrip("/")
        key = folder, path == file.path, shape and shape.described(), text_field, *fields
        made = sources.setdefault(key, _Source(shape, text_field, fields, folder))
        made.paths.append(path)
        made.size += file.size
    return list(sources.values())


def _names(sources: list[_Source]) -> list[str]:
    """Folders of files that are alone there, or what names begin with; each differently."""
    names, folders = list[str](), [source.folder for source in sources]
    for source in sources:
        stem = os.path.basename(os.path.abspath(source.paths[0])).split(".")[0]
        name = os.path.basename(os.path.abspath(source.folder))
        if len(source.paths) == 1:
            name = stem
        elif folders.count(source.folder) > 1:
            name = stem.rstrip("-_.0123456789")  # without what only numbers files
        name = re.sub(r"[^\w.-]", "-", name or "unknown")
        count = sum(re.sub(r"-\d+$", "", one) == name for one in names)
        names.append(f"{name}-{count + 1}" if count else name)
    return names


def _text(value: str, folder: str | None = None) -> str:
    """A text of TOML; a path that is there begins at `folder`, what is no local path stays."""
    is_here = folder is not None and not os.path.isabs(value) and not is_url(value)
    if is_here and os.path.exists(value):
        found = os.path.relpath(value, folder)
        value = found if os.sep in found or not os.path.isdir(value) else f"./{found}"
    text = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)
