"""A first recipe, written from what files hold; it is read and packed as it is written."""

from __future__ import annotations

import json
import os

from packer_cli import storage
from packer_cli.errors import named
from packer_cli.mixing.groups import Group
from packer_cli.records import InputFile

_LENGTH = 4096
# Shares come out within 0.1% of what is asked, to half a document: none may be as large as that.
_MOST_OF_ALL = 0.001


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
    usable = [one for one in groups if _problem(one, can_render=can_render) is None]
    total = sum(one.tokens for one in usable) or 1.0
    by_weight = len(usable) > 1 and all(
        one.largest <= _MOST_OF_ALL * total and one.tokens / total >= 0.001 for one in usable
    )
    for group in groups:
        problem = _problem(group, can_render=can_render)
        share = group.tokens / total
        lines += ["", *_comments(group, share if problem is None else None)]
        source = [
            "[[source]]",
            f"name = {_text(group.name)}",
            *_inputs(group.files, folder),
            f"weight = {share:.3g}" if by_weight else "epochs = 1",
        ]
        if group.text_field:
            source.append(f"text_field = {_text(group.text_field)}")
        elif group.shape and group.files[0].format != "tokenized":
            source.append(f"shape = {_text(group.shape.kind)}")
        if template and _has_messages(group):
            source.append(f"chat_template = {_text(_relative(template, folder))}")
        if group.bad:
            source.append(f'on_error = "skip"     # {group.bad:,} bad records in a sample')
        if problem:
            lines += [f"# left out: {problem}", *(f"# {line}" for line in source)]
        else:
            lines += source
    lines += ["", "# [validation]", '# share = "0.5%"']
    return "\n".join(lines) + "\n"


def _problem(group: Group, *, can_render: bool) -> str | None:
    """Why a source cannot be packed as it is, None where it can."""
    if group.shape is None:
        return "no field is known to hold text: name it with text_field, or map fields with field"
    if _has_messages(group) and not can_render:
        return "messages need a chat template: name a tokenizer that has one, or a chat_template"
    if group.shape.kind == "tokens":
        return "its tokens must be of the same tokenizer as those of the other sources"
    return None


def _has_messages(group: Group) -> bool:
    return bool(group.shape and (group.shape.is_chat or group.shape.of_messages))


def _comments(group: Group, share: float | None) -> list[str]:
    size = f"{group.bytes / 1e6:,.1f} MB in {len(group.files):,} file{'s' * (len(group.files) > 1)}"
    of_all = f", {share:.1%} of all" if share is not None else ""
    shape = group.shape.described() if group.shape else "of no known shape"
    lines = [f"# {_comment(shape)}; {size}; fields: {_comment(named(group.fields))}"]
    if group.shape:
        lines.append(
            f"# about {group.documents:,.0f} documents and {group.tokens:,.0f} tokens{of_all}"
        )
    return lines


def _inputs(files: list[InputFile], folder: str) -> list[str]:
    paths = [_text(_relative(_named(file), folder)) for file in files]
    if len(paths) == 1:
        return [f"inputs = [{paths[0]}]"]
    return ["inputs = [", *(f"    {path}," for path in paths), "]"]


def _named(file: InputFile) -> str:
    return os.path.dirname(file.path) if file.format == "tokenized" else file.path


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
