"""Read plain text, with a document per line (as `datasets` does), per paragraph or per file; and
CSV and TSV with a header line, through Python's csv module.

Memory holds one block of lines, or one document of at most `MAX_LINE_BYTES`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from packer_cli.errors import DataError, named
from packer_cli.inputs import byte_streams
from packer_cli.inputs.byte_streams import (
    BYTE_ORDER_MARK,
    Lines,
    OpenInput,
    cut,
    invalid_utf8,
    nonblank,
    open_source,
    other_content,
    read_lines,
    too_long,
)
from packer_cli.inputs.formats import FIRST, FirstRecords, LineReader
from packer_cli.inputs.record_columns import ReadColumns
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.shapes import Shape
from packer_cli.records import BadRecord, InputFile, Slice

_Document = tuple[int, bytes | None]  # position, and bytes; None if longer than the limit
_Batch = tuple[list[_Document], int]  # documents, and the number of empty ones, left out
_RETURN = ord("\r")


class TextReader(LineReader):
    """Reader of `.txt` and `.text` files, and of source files as documents. Lines and paragraphs
    lose their line end, documents do not.
    """

    def first(self, file: InputFile, config: DocumentConfig) -> FirstRecords | None:
        return FirstRecords([config.renamed.get("text", "text")])

    def columns(
        self, file: InputFile, source: OpenInput, part: Slice, shape: Shape, config: DocumentConfig
    ) -> Iterator[ReadColumns]:
        if config.sample_by == "document":
            batches = _whole(source)
        else:
            blocks = read_lines(source, 0, None)
            batches = (
                _paragraphs(blocks) if config.sample_by == "paragraph" else map(_lines, blocks)
            )
        return map(partial(_texts_of, config.sample_by), batches)


def _texts_of(unit: str, batch: _Batch) -> ReadColumns:
    """Return the texts of documents. `unit`: line, paragraph or document."""
    documents, empty = batch
    positions, texts, bad = list[int](), list[str](), list[BadRecord]()
    for position, data in documents:
        if data is None or len(data) > byte_streams.MAX_LINE_BYTES:
            bad.append(too_long(position, unit))
        elif unit == "document" and (reason := _not_text(data)):
            bad.append(BadRecord(position, *reason))
        else:
            try:
                texts.append(data.decode())
                positions.append(position)
            except UnicodeDecodeError as error:
                bad.append(BadRecord(position, *invalid_utf8(error, data, unit)))
    return ReadColumns(np.array(positions, np.int64), {"text": texts}, {}, bad, empty)


def _not_text(data: bytes) -> tuple[str, str] | None:
    """Return what bytes are that are not a text, though UTF-8 may allow them, and a tip."""
    if content := other_content(data):
        return content
    if (at := data.find(b"\0")) >= 0:
        tip = "name only texts, or leave other files out with --on-error skip"
        return f"not text: a NUL byte at byte {at} of the document", tip
    return None


def _lines(block: Lines, *, with_gaps: bool = False) -> _Batch:
    """Return the lines of a block. `with_gaps`: the first of several blank lines stays."""
    data = block.data
    if data is None:
        return [(block.offset, None)], 0
    if data == BYTE_ORDER_MARK and not block.offset:  # and not one line
        return [], 0
    positions, begins, ends = cut(block.offset, data)
    ends -= (begins < ends) & (np.frombuffer(data, np.uint8)[ends - 1] == _RETURN)
    kept = begins < ends
    if with_gaps:
        kept = nonblank(data, begins, ends)
        kept[1:] |= kept[:-1].copy()
        kept[0] = True
    places = (column[kept].tolist() for column in (positions, begins, ends))
    documents: list[_Document] = [(at, data[a:b]) for at, a, b in zip(*places, strict=True)]
    return documents, len(kept) - len(documents)


def _paragraphs(blocks: Iterator[Lines]) -> Iterator[_Batch]:
    """Yield documents that end with a blank line, holding at most MAX_LINE_BYTES."""
    held, size, begin, overlong = list[bytes](), 0, 0, False

    def ended() -> list[_Document]:
        if not held and not overlong:
            return []
        return [(begin, None if overlong else b"\n".join(held))]

    for block in blocks:
        finished = list[_Document]()
        for position, line in _lines(block, with_gaps=True)[0]:
            if line is not None and not line.strip():
                finished += ended()
                held, size, overlong = [], 0, False
                continue
            if not held and not overlong:
                begin = position
            size += len(line or b"") + 1
            overlong = overlong or line is None or size - 1 > byte_streams.MAX_LINE_BYTES
            if overlong or line is None:
                held = []
            else:
                held.append(line)
        yield finished, 0
    yield ended(), 0


def _whole(source: OpenInput) -> Iterator[_Batch]:
    """Yield the whole file as one document, if it is not longer than MAX_LINE_BYTES."""
    limit = byte_streams.MAX_LINE_BYTES
    held = bytearray()
    while len(held) <= limit and (data := source.read(byte_streams.BLOCK_BYTES)):
        held += data
    whole = None if len(held) > limit else bytes(held).removeprefix(BYTE_ORDER_MARK)
    held.clear()
    if whole != b"":
        yield [(0, whole)], 0


# --- CSV and TSV

_BATCH_CHARACTERS = 4 << 20
_PER_RECORD = 64  # so that batches of short or bad records are bounded too
_CLOSE = "close the quote that this record opens, or cut its text into parts"
_FIX = "fix the line, or use --on-error skip"


class CsvReader(LineReader):
    """Reader of `.csv` files. A record may span lines inside quotes, so a file is one slice."""

    delimiter, tip = ",", _FIX

    def first(self, file: InputFile, config: DocumentConfig) -> FirstRecords | None:
        with open_source(file) as source:
            header = _CsvRows(source, config, file, self.delimiter).header
        if header is None:
            return None

        def read(columns: list[str]) -> dict[str, list[str]]:
            with open_source(file) as source:
                rows = next(_CsvRows(source, config, file, self.delimiter).batches()).rows[:FIRST]
            return {
                name: [row[header.index(name)] for _, row in rows]
                for name in columns
                if name in header
            }

        return FirstRecords(header, read)

    def columns(
        self, file: InputFile, source: OpenInput, part: Slice, shape: Shape, config: DocumentConfig
    ) -> Iterator[ReadColumns]:
        rows = _CsvRows(source, config, file, self.delimiter)
        header = rows.header or []
        for field in shape.required:
            if shape.columns[field] not in header:
                raise DataError(
                    f"{file.path}: no column '{shape.columns[field]}'; columns found: "
                    f"{named(header)}",
                    "name the right one with --text-field, or with --field NAME=COLUMN",
                )
        for name in config.beside:
            if header.count(name) > 1:
                raise DataError(
                    f"{file.path}: {header.count(name)} columns {name!r}", "rename one of them"
                )
        places = {
            field: header.index(name) for field, name in shape.columns.items() if name in header
        }
        values = {name: header.index(name) for name in config.beside if name in header}

        def columns_of(batch: _CsvBatch) -> ReadColumns:
            return ReadColumns(
                np.array([position for position, _ in batch.rows], np.int64),
                {field: [row[at] for _, row in batch.rows] for field, at in places.items()},
                {name: [_value(row[at]) for _, row in batch.rows] for name, at in values.items()},
                batch.bad,
            )

        return map(columns_of, rows.batches())


def _value(cell: str) -> Any:
    """Return the number or list that a cell holds, None if it is blank, or else its text."""
    if not cell.strip():
        return None
    try:
        return json.loads({"True": "true", "False": "false"}.get(cell, cell))
    except (ValueError, RecursionError):
        return cell


class TsvReader(CsvReader):
    """Reader of `.tsv` files."""

    delimiter = "\t"


class _CsvBatch(NamedTuple):
    """Rows, each with its position, and bad records."""

    rows: list[tuple[int, list[str]]]
    bad: list[BadRecord]


class _CsvRows:
    """Rows of the csv module, with their positions.

    header  the first row that is not blank; None if all are
    begin   position of the row that was read last
    """

    def __init__(
        self, source: OpenInput, config: DocumentConfig, file: InputFile, delimiter: str
    ) -> None:
        """Raises DataError for a header that is not valid."""
        self.begin = 0
        self._begins = False  # a row, with the next line that is not blank
        self._has_ended = False
        self._file = file
        csv.field_size_limit(max(byte_streams.MAX_LINE_BYTES, csv.field_size_limit()))
        lines = self._decoded(source)
        self._rows: Iterator[list[str]] = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            self.header = self._next(self._rows)
        except csv.Error as error:
            raise self._refused(_invalid(self.begin, error, "fix the header")) from error

    def _decoded(self, source: OpenInput) -> Iterator[str]:
        """Yield the lines of the file, with their ends: CR, LF or both."""
        for offset, data in read_lines(source, 0, None):
            if data is None:
                raise self._refused(too_long(offset))
            begin = offset
            for line in iter(data.splitlines(keepends=True)):
                if self._begins and line.strip(b"\r\n"):
                    self.begin, self._begins = begin, False
                limit = byte_streams.MAX_LINE_BYTES
                if len(line) > limit and len(line.rstrip(b"\r\n")) > limit:
                    raise self._refused(too_long(begin))
                try:
                    # Excel begins its files with a byte order mark.
                    yield line.decode("utf-8" if begin else "utf-8-sig")
                except UnicodeDecodeError as error:
                    wrong = BadRecord(begin, *invalid_utf8(error, line, "line"))
                    raise self._refused(wrong) from None
                begin += len(line)
        self._has_ended = True

    def _next(self, rows: Iterator[list[str]]) -> list[str] | None:
        """Return the next row that is not blank; None after the last. Raises csv.Error."""
        row: list[str] | None = []
        while row == []:
            self._begins = True
            row = next(rows, None)
        return row

    def _refused(self, bad: BadRecord) -> DataError:
        """Return the error that ends the run: nothing shows where the record ends, to skip it."""
        return LineReader().refused(self._file, bad)

    def batches(self) -> Iterator[_CsvBatch]:
        """Yield all rows after the header, in batches."""
        # The reader refers to this object: held here, too, its buffer would wait for the collector.
        rows, self._rows = self._rows, iter(())
        width = len(self.header or ())
        batch, size = _CsvBatch([], []), 0
        while True:
            try:
                row = self._next(rows)
            except csv.Error as error:  # after which the csv module goes on
                if self._has_ended or "field limit" in str(error):
                    # an open quote has taken in all that follows, good records too
                    raise self._refused(_invalid(self.begin, error, _CLOSE)) from error
                batch.bad.append(_invalid(self.begin, error, _FIX))
                size += _PER_RECORD
                continue
            if row is None:
                yield batch
                return
            if len(row) == width:
                batch.rows.append((self.begin, row))
            else:
                reason = f"{len(row)} field{'s' * (len(row) != 1)}, the header has {width}"
                batch.bad.append(BadRecord(self.begin, reason, _FIX))
            size += sum(map(len, row)) + _PER_RECORD
            del row
            if size > _BATCH_CHARACTERS:
                yield batch
                batch, size = _CsvBatch([], []), 0


def _invalid(position: int, error: csv.Error, tip: str) -> BadRecord:
    return BadRecord(position, f"not valid CSV: {error}", tip)
