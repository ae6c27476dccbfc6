"""`packer recipe`: a first recipe for data, and the schema by which editors complete recipes.

A first recipe has a source for files with the same shape and fields. It is read and packed as it is
written.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from packer_cli import storage
from packer_cli.cli.reports import notes, refuse_name
from packer_cli.errors import DataError, UsageError, from_os_error, named
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.option import OUTPUT, SUPERVISED, Options, Values, option
from packer_cli.options.run_options import PackOptions, Progress

if TYPE_CHECKING:
    from packer_cli.options.shapes import Shape
    from packer_cli.records import InputFile

_LENGTH = 4096
# where text is, in records that say nothing else of their shape
_TEXT_FIELDS = (
    "content", "raw_content", "body", "document", "article", "code", "markdown", "story",
)  # fmt: skip


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
    """The text of a recipe that is kept in `folder`. What cannot be packed yet is a comment."""
    from packer_cli.chat.templates import find_template
    from packer_cli.inputs.byte_streams import STDIN
    from packer_cli.inputs.discovery import find_inputs
    from packer_cli.tokenization.locate import BYTES, locate

    if STDIN in inputs:
        raise UsageError("-: a recipe names files", "write the data to a file")
    files = None if tokenizer in (None, BYTES) else locate(str(tokenizer))
    can_render = find_template(template, files) is not None
    found = find_inputs(inputs, DocumentConfig(), notes(quiet=quiet))
    groups = _groups_of(found)
    if not groups:
        raise DataError(f"{inputs[0]}: no records in {len(found)} files", "name other inputs")
    lines = [
        "# Written by packer recipe; to pack it: packer pack FILE -o OUT",
        "# Editors complete keys: packer recipe --schema -o recipe.schema.json, and here a line",
        "# that begins with #:schema ./recipe.schema.json",
        f"max_length = {_LENGTH}",
        f"tokenizer = {_text(_relative(tokenizer, folder))}" if tokenizer
        else '# tokenizer = "org/model"     without one, every byte is a token',
    ]  # fmt: skip
    size = sum(group.bytes for group in groups)
    for group, name in zip(groups, _names(groups), strict=True):
        lines += ["", *_source(group, name, size, folder, template, can_render=can_render)]
    lines += ["", "# [validation]", '# share = "0.5%"']
    return "\n".join(lines) + "\n"


@dataclass
class _Group:
    """Files that make a source.

    shape       None: the records have none that is known
    text_field  the field that holds the text, where that is not "text"
    fields      of the first record
    """

    folder: str
    shape: Shape | None
    text_field: str | None
    fields: tuple[str, ...]
    files: list[InputFile] = field(default_factory=list)

    @property
    def is_tokenized(self) -> bool:
        return self.files[0].format == "tokenized"

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def paths(self) -> list[str]:
        return [os.path.dirname(one.path) if self.is_tokenized else one.path for one in self.files]

    def problem(self, *, can_render: bool) -> str:
        """Why the source cannot be packed as it is; "" where it can."""
        if self.shape is None:
            return (
                "no field is known to hold text: name it with text_field, or map fields with field"
            )
        if (self.shape.is_chat or self.shape.of_messages) and not can_render:
            return (
                "messages need a chat template: name a tokenizer that has one, or a chat_template"
            )
        if self.shape.kind == "tokens":
            return "its tokens must be of the same tokenizer as those of the other sources"
        return ""


def _groups_of(files: list[InputFile]) -> list[_Group]:
    """The groups of files. Those without records are left out."""
    from packer_cli.inputs.detection import detect_shape
    from packer_cli.inputs.formats import reader_for
    from packer_cli.options.shapes import find_shape

    groups: dict[Any, _Group] = {}
    for file in files:
        fields = reader_for(file.format).fields(file, DocumentConfig())
        if fields is None:
            continue
        shape = text_field = None
        try:
            shape = detect_shape([file], DocumentConfig()).shape
        except DataError:
            text_field = next((one for one in _TEXT_FIELDS if one in fields), None)
            if text_field is not None:
                own = {"text": text_field}
                shape = find_shape(fields, "text", own, file.path, tokens=False)
        folder = file.path[: len(file.path) - len(storage.base_name(file.path))].rstrip("/")
        if file.format == "tokenized":
            folder = os.path.dirname(folder)
        kind = shape.kind if shape else None
        key = folder, file.format == "tokenized", kind, text_field, tuple(fields)
        made = groups.setdefault(key, _Group(folder, shape, text_field, tuple(fields)))
        made.files.append(file)
    return list(groups.values())


def _names(groups: list[_Group]) -> list[str]:
    """What files' names begin with, or their folder; each differently."""
    folders, names = Counter(group.folder for group in groups), list[str]()
    for group in groups:
        stems = [os.path.basename(os.path.abspath(path)).split(".")[0] for path in group.paths]
        # without what only numbers files
        shared = os.path.commonprefix(stems).strip("-_.0123456789")  # noqa: RUF071 (of names)
        name = stems[0] if len(stems) == 1 else shared
        if len(stems) > 1 and folders[group.folder] == 1:
            name = os.path.basename(os.path.abspath(group.folder))
        name = re.sub(r"[^\w.-]", "-", name or (group.shape.kind if group.shape else "unknown"))
        count = sum(re.sub(r"-\d+$", "", one) == name for one in names)
        names.append(f"{name}-{count + 1}" if count else name)
    return names


def _source(
    group: _Group, name: str, size: int, folder: str, template: str | None, *, can_render: bool
) -> list[str]:
    """The lines of a source. `size`: bytes of all of them."""
    paths = [_text(_relative(path, folder)) for path in group.paths]
    source = ["[[source]]", f"name = {_text(name)}"]
    source += [f"inputs = [{paths[0]}]"] if len(paths) == 1 else [
        "inputs = [", *(f"    {path}," for path in paths), "]"
    ]  # fmt: skip
    share = group.bytes / max(size, 1)
    source.append(f"epochs = 1     # or weight = {share:.3g}, its share of all by size")
    if group.text_field:
        source.append(f"text_field = {_text(group.text_field)}")
    elif group.shape and not group.is_tokenized:
        source.append(f"shape = {_text(group.shape.kind)}")
    if template and group.shape and (group.shape.is_chat or group.shape.of_messages):
        source.append(f"chat_template = {_text(_relative(template, folder))}")
    if problem := group.problem(can_render=can_render):
        source = [f"# left out: {problem}", *(f"# {line}" for line in source)]
    shape = group.shape.described() if group.shape else "of no known shape"
    count = f"{len(paths):,} file{'s' * (len(paths) > 1)}"
    about = f"{shape}; {group.bytes / 1e6:,.1f} MB in {count}; fields: {named(group.fields)}"
    return [f"# {''.join(c if c.isprintable() else '?' for c in about)}", *source]


def _relative(path: str, folder: str) -> str:
    """A path from the recipe's folder; what is no local path stays."""
    if storage.is_url(path) or os.path.isabs(path) or not os.path.exists(path):
        return path
    found = os.path.relpath(path, folder)
    return found if os.sep in found or not os.path.isdir(path) else f"./{found}"


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
