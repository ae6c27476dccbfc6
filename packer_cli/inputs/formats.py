"""Readers by format: each turns a slice of a file into `Records`. Adding one: CONTRIBUTING.md.

detect_shape(files, config)            what the records are, from the first one of each file
read(file, slice, shape, config)       batches of records, in bounded memory
describe(file, position)               a record's place, in words
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from typing import Protocol, cast

from packer_cli import storage
from packer_cli.config.documents import DocumentConfig
from packer_cli.config.formats import format_named
from packer_cli.config.shapes import PREFERENCE, Shape, find_shape, joined
from packer_cli.errors import DataError
from packer_cli.records import Documents, Group, InputFile, Records, Slice

_BEGINNING = 1 << 16
_REQUESTS = 16  # at a time, to a store that answers each after a while


class Reader(Protocol):
    """What a format must offer.

    `holds_tokens`: records can be token ids. `fields` gives the names in the first record, None
    when there is none. `read` yields Records in the file's order; with `peek`, what it takes
    from stdin is read again by the run. `groups` gives the row groups of a file, where its slices
    count these.
    """

    holds_tokens: bool

    def fields(self, file: InputFile, config: DocumentConfig) -> list[str] | None: ...
    def read(
        self,
        file: InputFile,
        part: Slice,
        shape: Shape,
        config: DocumentConfig,
        *,
        peek: bool = False,
    ) -> Iterator[Records]: ...
    def describe(self, file: InputFile, position: int) -> str: ...
    def groups(self, file: InputFile) -> list[Group]: ...


class DocumentReader(Reader, Protocol):
    """A reader of a format that holds token ids, and whose slices count documents, from 0.

    `documents` is what a file has. `edges` gives at most `parts` + 1 ascending numbers of
    documents, from 0 to their count, between which lie about as many bytes each.
    """

    def documents(self, file: InputFile) -> Documents: ...
    def edges(self, file: InputFile, parts: int) -> list[int]: ...


class RecordReader(Reader, Protocol):
    """A reader of a format whose slices begin where records do. `edges`: as `record_edges`."""

    def edges(self, file: InputFile, parts: int) -> list[int]: ...


@cache
def reader_for(name: str) -> Reader:
    """The reader of a format; imports only what that format needs. UsageError for no format."""
    module, reader = format_named(name).reader.split(".")
    made: Reader = getattr(import_module(f"packer_cli.inputs.{module}"), reader)()
    return made


def groups_of(file: InputFile) -> list[Group] | None:
    """The row groups that slices of a file count; None where they count something else."""
    if format_named(file.format).cut_by != "row group":
        return None
    return reader_for(file.format).groups(file)


def documents_of(file: InputFile) -> Documents | None:
    """The documents that slices of a file count; None where they count something else."""
    reader = _document_reader(file)
    return None if reader is None else reader.documents(file)


def record_edges(file: InputFile, parts: int) -> list[int] | None:
    """The bytes at which a file is cut into up to `parts`, from 0 on; None where any byte does, or
    slices count something else. Reads the file.
    """
    if format_named(file.format).cut_by != "record":
        return None
    return cast("RecordReader", reader_for(file.format)).edges(file, parts)


def document_edges(file: InputFile, parts: int) -> list[int] | None:
    """The documents at which a file is cut into `parts`; None where slices count something else."""
    reader = _document_reader(file)
    return None if reader is None else reader.edges(file, parts)


def _document_reader(file: InputFile) -> DocumentReader | None:
    if format_named(file.format).cut_by != "document":
        return None
    return cast("DocumentReader", reader_for(file.format))


def beginning(file: InputFile, size: int) -> Slice:
    """The first `size` bytes of a file, where slices count bytes; else all of it, of which the
    first records are read soon.
    """
    cut = format_named(file.format).counts_bytes
    return Slice(file.index, 0, size if cut else None, 0)


def detect_shape(
    files: list[InputFile],
    config: DocumentConfig,
    others: dict[str, Shape] | None = None,
    unused: dict[str, list[str]] | None = None,
) -> tuple[list[InputFile], Shape]:
    """What the records are, from the first one of each file: the files, which say which of several
    shapes they have, and their shape. `others`: those of files that are not read. DataError when
    the shape of a file is unknown, or where files cannot be packed together.

    OUT unused: by path, the fields of supervised records that no field of their shape is.
    """
    shapes = shapes_of(files, config, unused)
    if not shapes:
        raise _nothing_in(files, config)
    found = {shape.described(): shape for shape in shapes.values()}
    first = next(iter(found))
    # others' fields may have other names: they are not read
    if set(others or ()) <= {found[first].name} and len(found) == 1:
        return files, found[first]
    # files without records go with the first
    labels = {index: shape.described() for index, shape in shapes.items()}
    named = [replace(file, shape=labels.get(file.index, first)) for file in files]
    return named, joined((others or {}) | found)


def shapes_of(
    files: list[InputFile], config: DocumentConfig, unused: dict[str, list[str]] | None = None
) -> dict[int, Shape]:
    """The shape of each file that has a record, by its index. DataError and `unused` as
    `detect_shape`.
    """
    unused = {} if unused is None else unused
    left = iter(files)
    for file in left:
        if (shape := _shape_of(file, config, unused)) is not None:
            break
    else:
        return {}
    (_refuse_text_formats if shape.kind == "tokens" else _refuse_token_formats)(files, file)
    shapes, rest = {file.index: shape}, list(left)
    if any(storage.is_url(file.path) for file in rest):
        with ThreadPoolExecutor(_REQUESTS) as pool:
            more = list(pool.map(partial(_shape_of, config=config, unused=unused), rest))
    else:
        more = [_shape_of(file, config, unused) for file in rest]
    for other, one in zip(rest, more, strict=True):
        if one is not None:
            if "tokens" in (one.kind, shape.kind) and one.kind != shape.kind:
                raise _tokens_and_texts(other, one, file, shape)
            shapes[other.index] = one
    return shapes


def _shape_of(
    file: InputFile, config: DocumentConfig, unused: dict[str, list[str]]
) -> Shape | None:
    """Of the first record of a file; None when it has none. OUT unused."""
    reader = reader_for(file.format)
    fields = reader.fields(file, config)
    if fields is None:
        return None
    shape = find_shape(fields, config.shape, config.renamed, file.path, tokens=reader.holds_tokens)
    if shape.is_supervised:
        used = shape.columns.values()
        unused[file.path] = [name for name in fields if name not in used]
    if shape.kind in ("prompt-completion", PREFERENCE) and reader.holds_tokens:
        return replace(shape, of_messages=_pairs_messages(file, shape, config))
    return shape


def _nothing_in(files: list[InputFile], config: DocumentConfig) -> DataError:
    where = files[0].path if len(files) == 1 else f"{files[0].path} to {files[-1].path}"
    return DataError(
        f"{where}: no records in {len(files)} input file{'s' * (len(files) != 1)}"
        + (" that can be read" if config.on_error == "skip" else ""),
        "leave out --on-error skip to see what is wrong with the first record"
        if config.on_error == "skip"
        else "check the paths; the files are empty or hold only blank lines",
    )


def _tokens_and_texts(file: InputFile, shape: Shape, other: InputFile, its: Shape) -> DataError:
    return DataError(
        f"{file.path}: holds {shape.kind}, {other.path} holds {its.kind}",
        "pack texts and token ids with two commands",
    )


def _pairs_messages(file: InputFile, shape: Shape, config: DocumentConfig) -> bool:
    """Whether the prompt or an answer of the first good record is a list of messages."""
    if "messages" in shape.columns:
        return True
    part = beginning(file, _BEGINNING)
    for records in reader_for(file.format).read(file, part, shape, config, peek=True):
        for fields in records.fields or []:
            return any(isinstance(fields[own], list) for own in shape.required)
    return False


def _refuse_token_formats(files: list[InputFile], texts: InputFile) -> None:
    for file in files:
        if _document_reader(file) is not None:
            raise DataError(
                f"{file.path}: {file.format} files hold token ids, {texts.path} does not",
                "pack texts and token ids with two commands",
            )


def _refuse_text_formats(files: list[InputFile], tokens: InputFile) -> None:
    for file in files:
        if not reader_for(file.format).holds_tokens:
            raise DataError(
                f"{file.path}: {file.format} files hold texts, {tokens.path} holds input_ids",
                "pack texts and token ids with two commands",
            )
