"""A first recipe, written from what files hold: a source for files with the same shape and fields.

It is read and packed as it is written.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from packer_cli import storage
from packer_cli.errors import DataError, named
from packer_cli.inputs.detection import detect_shape
from packer_cli.inputs.formats import beginning, reader_for
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.shapes import Shape, find_shape
from packer_cli.records import InputFile

_LENGTH = 4096
_FILES_SAMPLED, _BEGINNING = 8, 1 << 20  # what of each source is looked at for bad records
# where text is, in records that say nothing else of their shape
_TEXT_FIELDS = (
    "content", "raw_content", "body", "document", "article", "code", "markdown", "story",
)  # fmt: skip


@dataclass
class Group:
    """Files that make a source.

    shape       None: the records have none that is known
    text_field  the field that holds the text, where that is not "text"
    fields      of the first record
    bad         records that cannot be read, at the beginnings of the first files
    """

    shape: Shape | None
    text_field: str | None
    fields: tuple[str, ...]
    files: list[InputFile] = field(default_factory=list)
    name: str = ""
    bad: int = 0

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def has_messages(self) -> bool:
        return bool(self.shape and (self.shape.is_chat or self.shape.of_messages))


def groups_of(files: list[InputFile], config: DocumentConfig) -> list[Group]:
    """The groups of files, named. Files without records are left out."""
    groups: dict[Any, Group] = {}
    for file in files:
        fields = reader_for(file.format).fields(file, config)
        if fields is None:
            continue
        made = _group(file, tuple(fields), config)
        kind = made.shape.kind if made.shape else None
        key = _folder(file), file.format == "tokenized", kind, made.text_field, made.fields
        groups.setdefault(key, made).files.append(file)
    for group in groups.values():
        group.bad = _bad(group, config)
    _name(list(groups.values()))
    return list(groups.values())


def written(
    groups: list[Group],
    folder: str,
    *,
    tokenizer: str | None,
    template: str | None,
    can_render: bool,
) -> str:
    """The text of a recipe that is kept in `folder`. What cannot be packed yet is a comment.

    `can_render`: whether there is a chat template, without which messages cannot be packed.
    """
    lines = [
        "# Written by packer recipe; to pack it: packer pack FILE -o OUT",
        "# Editors complete keys: packer recipe --schema -o recipe.schema.json, and here a line",
        "# that begins with #:schema ./recipe.schema.json",
        f"max_length = {_LENGTH}",
        f"tokenizer = {_text(_relative(tokenizer, folder))}" if tokenizer
        else '# tokenizer = "org/model"     without one, every byte is a token',
    ]  # fmt: skip
    size = sum(group.bytes for group in groups) or 1
    for group in groups:
        count = f"{len(group.files):,} file{'s' * (len(group.files) > 1)}"
        shape = group.shape.described() if group.shape else "of no known shape"
        source = [
            "[[source]]",
            f"name = {_text(group.name)}",
            *_inputs(group.files, folder),
            f"epochs = 1     # or weight = {group.bytes / size:.3g}, its share of all by size",
        ]
        if group.text_field:
            source.append(f"text_field = {_text(group.text_field)}")
        elif group.shape and group.files[0].format != "tokenized":
            source.append(f"shape = {_text(group.shape.kind)}")
        if template and group.has_messages:
            source.append(f"chat_template = {_text(_relative(template, folder))}")
        if group.bad:
            source.append(f'on_error = "skip"     # {group.bad:,} bad records in a sample')
        if problem := _problem(group, can_render=can_render):
            source = [f"# left out: {problem}", *(f"# {line}" for line in source)]
        about = f"{shape}; {group.bytes / 1e6:,.1f} MB in {count}; fields: {named(group.fields)}"
        lines += ["", f"# {_comment(about)}", *source]
    lines += ["", "# [validation]", '# share = "0.5%"']
    return "\n".join(lines) + "\n"


def _group(file: InputFile, fields: tuple[str, ...], config: DocumentConfig) -> Group:
    try:
        return Group(detect_shape([file], config).shape, None, fields)
    except DataError:
        name = next((one for one in _TEXT_FIELDS if one in fields), None)
        if name is None:
            return Group(None, None, fields)
    shape = find_shape(list(fields), "text", {"text": name}, file.path, tokens=False)
    return Group(shape, name, fields)


def _bad(group: Group, config: DocumentConfig) -> int:
    if group.shape is None:
        return 0
    return sum(
        len(records.bad)
        for file in group.files[:_FILES_SAMPLED]
        for records in reader_for(file.format).read(
            file, beginning(file, _BEGINNING), group.shape, config
        )
    )


def _problem(group: Group, *, can_render: bool) -> str | None:
    """Why a source cannot be packed as it is, None where it can."""
    if group.shape is None:
        return "no field is known to hold text: name it with text_field, or map fields with field"
    if group.has_messages and not can_render:
        return "messages need a chat template: name a tokenizer that has one, or a chat_template"
    if group.shape.kind == "tokens":
        return "its tokens must be of the same tokenizer as those of the other sources"
    return None


def _name(groups: list[Group]) -> None:
    """Name groups by what their files' names begin with, or by their folder; each differently."""
    folders = Counter(_folder(group.files[0]) for group in groups)
    taken: Counter[str] = Counter()
    for group in groups:
        folder = _folder(group.files[0])
        stems = [_stem(file) for file in group.files]
        # without what only numbers files
        shared = os.path.commonprefix(stems).strip("-_.0123456789")  # noqa: RUF071 (of names)
        name = stems[0] if len(stems) == 1 else shared
        if len(stems) > 1 and folders[folder] == 1:
            name = os.path.basename(os.path.abspath(folder))
        name = name or (group.shape.kind if group.shape else "unknown")
        taken[name] += 1
        name = name if taken[name] == 1 else f"{name}-{taken[name]}"
        group.name = re.sub(r"[^\w.-]", "-", name)


def _folder(file: InputFile) -> str:
    folder = file.path[: len(file.path) - len(storage.base_name(file.path))].rstrip("/")
    return os.path.dirname(folder) if file.format == "tokenized" else folder


def _stem(file: InputFile) -> str:
    if file.format == "tokenized":
        return os.path.basename(os.path.dirname(os.path.abspath(file.path)))
    return storage.base_name(file.path).split(".")[0]


def _inputs(files: list[InputFile], folder: str) -> list[str]:
    paths = [
        os.path.dirname(file.path) if file.format == "tokenized" else file.path for file in files
    ]
    shown = [_text(_relative(path, folder)) for path in paths]
    if len(shown) == 1:
        return [f"inputs = [{shown[0]}]"]
    return ["inputs = [", *(f"    {path}," for path in shown), "]"]


def _relative(path: str, folder: str) -> str:
    """A path from the recipe's folder; what is no local path stays."""
    if storage.is_url(path) or os.path.isabs(path) or not os.path.exists(path):
        return path
    found = os.path.relpath(path, folder)
    return found if os.sep in found or not os.path.isdir(path) else f"./{found}"


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _comment(value: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in value)
