"""Readers by format: each turns a slice of a file into `Records`. Adding one: CONTRIBUTING.md.

read(file, slice, shape, config)       batches of records, in bounded memory
describe(file, position)               a record's place, in words
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Protocol, cast

from packer_cli.config.documents import DocumentConfig
from packer_cli.config.formats import format_named
from packer_cli.config.shapes import Shape
from packer_cli.records import Documents, Group, InputFile, Records, Slice


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


def holds_documents(file: InputFile) -> bool:
    """Whether slices of a file count documents, which are token ids."""
    return _document_reader(file) is not None


def beginning(file: InputFile, size: int) -> Slice:
    """The first `size` bytes of a file, where slices count bytes; else all of it, of which the
    first records are read soon.
    """
    cut = format_named(file.format).counts_bytes
    return Slice(file.index, 0, size if cut else None, 0)
