"""What files hold, for a first recipe: groups of files with the same shape and fields, estimated.

groups_of(files, config, tokens_of) -> list[Group]
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packer_cli import storage
from packer_cli.config.documents import DocumentConfig
from packer_cli.config.shapes import Shape, find_shape
from packer_cli.errors import DataError
from packer_cli.inputs.detection import detect_shape
from packer_cli.inputs.formats import beginning, reader_for
from packer_cli.records import InputFile, Records

TokensOf = Callable[[list[str]], list[int]]
# where text is, in records that say nothing else of their shape
TEXT_FIELDS = ("content", "raw_content", "body", "document", "article", "code", "markdown", "story")
_SAMPLED = 1 << 20  # characters read of a file
_FILES_SAMPLED = 8
_BEGINNING = 1 << 20
_BYTES_PER_TOKEN = 4


@dataclass
class Group:
    """Files that make a source.

    shape      None: the records have none, and `why` says so
    text_field  the field that holds the text, where that is not "text"
    fields     of the first record
    documents, tokens  estimated from a sample; `largest` document in it, in tokens
    bad        records in the sample that cannot be read
    """

    shape: Shape | None
    text_field: str | None
    fields: tuple[str, ...]
    why: str = ""
    files: list[InputFile] = field(default_factory=list)
    name: str = ""
    documents: float = 0.0
    tokens: float = 0.0
    largest: int = 0
    bad: int = 0

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)


def groups_of(files: list[InputFile], config: DocumentConfig, tokens_of: TokensOf) -> list[Group]:
    """The groups of files, named and measured. Files without records are left out.

    `tokens_of`: of texts, how many tokens each has.
    """
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
        _measure(group, config, tokens_of)
    _name(list(groups.values()))
    return list(groups.values())


def _group(file: InputFile, fields: tuple[str, ...], config: DocumentConfig) -> Group:
    try:
        return Group(detect_shape([file], config)[1], None, fields)
    except DataError as error:
        name = next((one for one in TEXT_FIELDS if one in fields), None)
        if name is None:
            return Group(None, None, fields, error.message)
    shape = find_shape(list(fields), "text", {"text": name}, file.path, tokens=False)
    return Group(shape, name, fields)


def _measure(group: Group, config: DocumentConfig, tokens_of: TokensOf) -> None:
    """Estimate documents and tokens from the beginnings of the first files."""
    files = group.files[:_FILES_SAMPLED]
    if group.shape is None:
        return
    counts: list[int] = []
    read = 0
    for file in files:
        texts: list[str] = []
        most, consumed = len(counts) + _SAMPLED, 0
        for records in reader_for(file.format).read(
            file, beginning(file, _BEGINNING), group.shape, config
        ):
            group.bad += len(records.bad)
            texts += _texts(records)
            if records.tokens is not None:
                counts += np.diff(records.tokens[1]).tolist()
            consumed = max(consumed, records.consumed)
            if sum(map(len, texts)) > _SAMPLED or len(counts) > most:
                break
        counts += tokens_of(texts)
        read += min(consumed, file.size)
    # what is left of the files, and the other files, are taken to be alike
    share = max(read, 1) / max(group.bytes, 1)
    group.documents, group.tokens = len(counts) / share, sum(counts) / share
    group.largest = max(counts, default=0)


def _texts(records: Records) -> Iterator[str]:
    """A text for each record: all that its fields say."""
    yield from records.texts or ()
    for fields in records.fields or ():
        yield "\n".join(_strings(fields))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _strings(one)
    elif isinstance(value, list):
        for one in value:
            yield from _strings(one)


def _folder(file: InputFile) -> str:
    folder = file.path[: len(file.path) - len(storage.base_name(file.path))].rstrip("/")
    return os.path.dirname(folder) if file.format == "tokenized" else folder


def _name(groups: list[Group]) -> None:
    """Name groups by what their files' names begin with, or by their folder; each differently."""
    folders = Counter(_folder(group.files[0]) for group in groups)
    taken: Counter[str] = Counter()
    for group in groups:
        folder = _folder(group.files[0])
        stems = [_stem(file) for file in group.files]
        shared = _plain(os.path.commonprefix(stems))  # noqa: RUF071 (of names, not of paths)
        name = stems[0] if len(stems) == 1 else shared
        if len(stems) > 1 and folders[folder] == 1:
            name = os.path.basename(os.path.abspath(folder))
        name = name or (group.shape.kind if group.shape else "unknown")
        taken[name] += 1
        name = name if taken[name] == 1 else f"{name}-{taken[name]}"
        group.name = re.sub(r"[^\w.-]", "-", name)


def _stem(file: InputFile) -> str:
    if file.format == "tokenized":
        return os.path.basename(os.path.dirname(os.path.abspath(file.path)))
    return storage.base_name(file.path).split(".")[0]


def _plain(name: str) -> str:
    """A name without what only numbers files."""
    return name.strip("-_.0123456789")


def tokens_by_length(texts: list[str]) -> list[int]:
    """Tokens of texts, four bytes each."""
    return [max(1, len(text.encode("utf-8", "replace")) // _BYTES_PER_TOKEN) for text in texts]
