"""A format of inputs is a `Reader`, which turns slices of a file into `Records`.

Adding one: CONTRIBUTING.md. The table of formats is `options/formats.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from itertools import pairwise

from packer_cli.errors import DataError
from packer_cli.inputs import byte_streams
from packer_cli.inputs.byte_streams import STDIN, open_source
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.formats import format_named
from packer_cli.options.shapes import Shape
from packer_cli.records import BadRecord, DocumentCounts, InputFile, Records, RowGroup, Slice

_COMPRESSION_RATIO = 4  # of text, about


class Reader:
    """A format. Whatever it opens may be a URL, and memory does not depend on the size of a file.

    holds_tokens  records can be token ids
    """

    holds_tokens = False

    def fields(self, file: InputFile, config: DocumentConfig) -> list[str] | None:
        """The names of fields in the first record; None when there is none."""
        raise NotImplementedError

    def read(
        self, file: InputFile, part: Slice, shape: Shape, config: DocumentConfig
    ) -> Iterator[Records]:
        """The records of a slice in the file's order, in batches."""
        raise NotImplementedError

    def describe(self, file: InputFile, position: int) -> str:
        """The place of a record, in words; it may read the file, so it is for errors only."""
        raise NotImplementedError

    def weight(self, file: InputFile) -> int:
        """About how many bytes of text a file has."""
        return file.size * (_COMPRESSION_RATIO if file.compression else 1)

    def split(self, file: InputFile, parts: int) -> list[Slice]:
        """A file as about so many slices of about one weight; none where it is read whole."""
        return []

    def groups(self, file: InputFile) -> list[RowGroup] | None:
        """The row groups that slices count; None where they count something else."""
        return None

    def documents(self, file: InputFile) -> DocumentCounts | None:
        """The documents that slices count; None where they count something else."""
        return None


class LineReader(Reader):
    """A format of lines: positions are byte offsets in the uncompressed file."""

    def describe(self, file: InputFile, position: int) -> str:
        """Such as "line 17 (byte 1234)": people want line numbers, so the lines before count."""
        if file.path == STDIN:
            return f"byte {position}"
        line, left = 1, position
        with open_source(file) as source:
            while left and (chunk := source.read(byte_streams.BLOCK_BYTES)[:left]):
                line += chunk.count(b"\n")
                left -= len(chunk)
        return f"line {line} (byte {position})"

    def refused(self, file: InputFile, bad: BadRecord) -> DataError:
        """The error that ends a run at a bad record."""
        place = self.describe(file, bad.position)
        return DataError(f"{file.path}, {place}: {bad.reason}", bad.tip)


class DocumentReader(Reader):
    """A format of token ids, whose slices count documents from 0."""

    holds_tokens = True

    def documents(self, file: InputFile) -> DocumentCounts:
        raise NotImplementedError

    def edges(self, file: InputFile, parts: int) -> Sequence[int]:
        """Documents, from 0 to their count, between which lie about as many bytes each."""
        raise NotImplementedError

    def describe(self, file: InputFile, position: int) -> str:
        return f"document {position}"

    def weight(self, file: InputFile) -> int:
        return self.documents(file).bytes

    def split(self, file: InputFile, parts: int) -> list[Slice]:
        edges = self.edges(file, parts)
        each = max(1, self.weight(file)) // max(len(edges) - 1, 1)
        return [Slice(file.index, a, b, each) for a, b in pairwise(edges)]


@cache
def reader_for(name: str) -> Reader:
    """The reader of a format; imports only what that format needs. UsageError for no format."""
    module, reader = format_named(name).reader.split(".")
    made: Reader = getattr(import_module(f"packer_cli.inputs.{module}"), reader)()
    return made


def beginning(file: InputFile, size: int) -> Slice:
    """The first `size` bytes of a file, where slices count bytes; else all of it, of which the
    first records are read soon.
    """
    cut = format_named(file.format).cut_by == "byte"
    return Slice(file.index, 0, size if cut else None, 0)
