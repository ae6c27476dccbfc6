"""Interface of a format: a `Reader` turns slices of a file into `Records`.

The table of formats is `options/formats.py`; CONTRIBUTING.md describes how to add one. Readers open
paths and URLs alike. Their memory does not depend on the size of a file, except for an index of a
few bytes per document.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import Any

from packer_cli.errors import DataError, UsageError
from packer_cli.inputs import byte_streams
from packer_cli.inputs.byte_streams import STDIN, OpenInput, open_source, peeking
from packer_cli.inputs.record_columns import ReadColumns, records_of
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.formats import format_named
from packer_cli.options.shapes import Shape
from packer_cli.records import BadRecord, DocumentCounts, InputFile, Records, RowGroup, Slice

FIRST = 64  # records at a file's beginning that show what it holds
BEGINNING_BYTES = 1 << 16  # in which these begin
_COMPRESSION_RATIO = 4  # of text, about


class FirstRecords:
    """The records at the beginning of a file: of JSON those in 64 KiB, else 64 of at most 4 MB. A
    column is read once, when it is first needed.

    names  fields of the first record
    later  fields that only later records have
    """

    def __init__(
        self,
        names: list[str],
        read: Callable[[list[str]], Mapping[str, Sequence[Any]]] = lambda columns: {},
        later: Collection[str] = (),
        *,
        are_long: bool = False,
    ) -> None:
        """`read` returns the values of some columns, None for each record without one. `are_long`:
        a record has so many bytes that not all of its values should become objects.
        """
        self.names, self.later, self.are_long = names, later, are_long
        self._read, self._columns = read, dict[str, Sequence[Any]]()

    def record(self, columns: Sequence[str]) -> dict[str, Any]:
        """Return these columns of the first record; {} if they cannot be read."""
        return next(iter(self.rows(columns, most=1)), {})

    def rows(self, columns: Sequence[str], most: int | None = FIRST) -> list[dict[str, Any]]:
        """Return columns of the first records; [] if they cannot be read."""
        missing = [name for name in dict.fromkeys(columns) if name not in self._columns]
        values: Mapping[str, Sequence[Any]] = {}
        with suppress(DataError, UsageError), peeking():
            values = self._read(missing) if missing else {}
        self._columns |= {name: values.get(name, ()) for name in missing}
        read = {name: self._columns[name][:most] for name in columns}
        count = min((len(column) for column in read.values() if column), default=0)
        return [
            {name: column[number] if column else None for name, column in read.items()}
            for number in range(count)
        ]


class Reader:
    """Reader of one format.

    holds_tokens  records can be token ids
    """

    holds_tokens = False

    def first(self, file: InputFile, config: DocumentConfig) -> FirstRecords | None:
        """Return the records at the beginning of a file; None if it has no record.

        Raises DataError if the first record cannot be read and bad records are not skipped.
        """
        raise NotImplementedError

    def read(
        self, file: InputFile, part: Slice, shape: Shape, config: DocumentConfig
    ) -> Iterator[Records]:
        """Yield the records of a slice in batches, in the file's order."""
        raise NotImplementedError

    def describe(self, file: InputFile, position: int) -> str:
        """Describe where a record is. This may read the file, so it is for errors only."""
        raise NotImplementedError

    def weight(self, file: InputFile) -> int:
        """Estimate the bytes of text in a file."""
        return file.size * (_COMPRESSION_RATIO if file.compression else 1)

    def split(self, file: InputFile, parts: int) -> list[Slice]:
        """Split a file into about `parts` slices of similar weight; [] if it is read whole."""
        return []

    def groups(self, file: InputFile) -> list[RowGroup] | None:
        """Return the row groups that slices count; None if they count something else."""
        return None

    def documents(self, file: InputFile) -> DocumentCounts | None:
        """Return the numbers of documents that slices count; None if they count something else."""
        return None


class LineReader(Reader):
    """Reader of a stream of bytes: positions are byte offsets in the uncompressed file.

    tip     for a record that cannot be used
    before  bytes before a slice that are read with it: they show whether a line begins there
    """

    tip, before = "", 0

    def columns(
        self, file: InputFile, source: OpenInput, part: Slice, shape: Shape, config: DocumentConfig
    ) -> Iterator[ReadColumns]:
        """Return the records of a slice, in batches. `source` stands `before` bytes before it.

        An iterator that holds no bytes of a batch while others work on the batch.
        """
        raise NotImplementedError

    def read(
        self, file: InputFile, part: Slice, shape: Shape, config: DocumentConfig
    ) -> Iterator[Records]:
        with open_source(file, max(part.start - self.before, 0)) as source:

            def records(columns: ReadColumns) -> Records:
                return records_of(columns, shape, config, self.tip, source.consumed())

            yield from map(records, self.columns(file, source, part, shape, config))

    def describe(self, file: InputFile, position: int) -> str:
        """Return a place such as "line 17 (byte 1234)". It counts the lines before the position."""
        if file.path == STDIN:
            return f"byte {position}"
        line, left = 1, position
        with open_source(file) as source:
            while left and (chunk := source.read(byte_streams.BLOCK_BYTES)[:left]):
                line += chunk.count(b"\n")
                left -= len(chunk)
        return f"line {line} (byte {position})"

    def refused(self, file: InputFile, bad: BadRecord) -> DataError:
        """Return the error that ends a run at a bad record."""
        place = self.describe(file, bad.position)
        return DataError(f"{file.path}, {place}: {bad.reason}", bad.tip)


class DocumentReader(Reader):
    """Reader of token ids; its slices count documents from 0."""

    holds_tokens = True

    def documents(self, file: InputFile) -> DocumentCounts:
        raise NotImplementedError

    def edges(self, file: InputFile, parts: int) -> Sequence[int]:
        """Return document numbers, 0 to the count, with about as many bytes between them."""
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
    """Return the reader of a format, importing only what it needs. Raises UsageError."""
    module, class_name = format_named(name).reader.split(".")
    reader: Reader = getattr(import_module(f"packer_cli.inputs.{module}"), class_name)()
    return reader


def beginning(file: InputFile, size: int) -> Slice:
    """Return a file's first `size` bytes as a slice; all of it if slices do not count bytes."""
    cut = format_named(file.format).cut_by == "byte"
    return Slice(file.index, 0, size if cut else None, 0)
