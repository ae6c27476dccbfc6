"""CSV and TSV with a header line, read by Python's csv module."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator

import numpy as np

from packer_cli.config.documents import DocumentConfig
from packer_cli.config.shapes import Shape
from packer_cli.errors import DataError, named
from packer_cli.inputs.byte_streams import Source, open_source
from packer_cli.inputs.encodings import refuse_other_than_utf8
from packer_cli.inputs.line_positions import LinePositions
from packer_cli.inputs.lines import read_lines, too_long
from packer_cli.inputs.looked_at import Sample, together
from packer_cli.records import BadRecord, InputFile, LookedAt, Records, Slice

_BATCH_CHARACTERS = 4 << 20
_PER_RECORD = 64  # so that batches of short or bad records are bounded too
_CLOSE = "close the quote that this record opens; if its text is so long, raise --max-line-bytes"
_MEND = "mend the line, or use --on-error skip"


class _Lines:
    """Decoded lines for the csv module, counting the bytes given out so far."""

    def __init__(self, source: Source, config: DocumentConfig, file: InputFile) -> None:
        self.position = 0
        self.ended = False
        self._file = file
        self._limit = config.max_line_bytes
        self._blocks = read_lines(source, 0, None, config.max_line_bytes)
        self._lines: Iterator[bytes] = iter(())

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = next(self._lines, None)
        while line is None:
            block = next(self._blocks, None)
            if block is None:
                self.ended = True
                raise StopIteration
            refuse_other_than_utf8(self._file, block)
            if block.data is None:
                raise self.refused(too_long(block.offset, self._limit))
            self._lines = iter(block.data.splitlines(keepends=True))
            line = next(self._lines, None)
        begin = self.position
        self.position += len(line)
        if len(line) > self._limit and len(line.rstrip(b"\r\n")) > self._limit:
            raise self.refused(too_long(begin, self._limit))
        try:
            # Excel begins its files with a byte order mark.
            return line.decode("utf-8" if begin else "utf-8-sig")
        except UnicodeDecodeError as error:
            reason = f"invalid UTF-8 at byte {error.start} of the line: 0x{line[error.start]:02x}"
            tip = "convert it: iconv -f ORIGINAL_ENCODING -t utf-8"
            raise self.refused(BadRecord(begin, reason, tip)) from None

    def refused(self, bad: BadRecord) -> DataError:
        """The error that ends the run: where the record ends is unknown, so no run can skip it."""
        place = LinePositions().describe(self._file, bad.position)
        return DataError(f"{self._file.path}, {place}: {bad.reason}", bad.tip)


def _invalid(position: int, error: csv.Error, tip: str = _MEND) -> BadRecord:
    return BadRecord(position, f"not valid CSV: {error}", tip)


class _Batch:
    """Records that are read and not yet given out. `columns`: field -> its place in a row."""

    def __init__(self, columns: dict[str, int], header: list[str], sample: Sample) -> None:
        self._columns = columns
        self._header, self._sample = header, sample
        self._empty()

    def _empty(self) -> None:
        self._positions, self._cells, self._bad = list[int](), list[list[str]](), list[BadRecord]()
        self._looked_at = list[LookedAt]()
        self.size = 0  # in characters, about

    def add(self, position: int, row: list[str]) -> None:
        self._positions.append(position)
        one = self._sample.of(1, lambda _: dict(zip(self._header, row, strict=True)))
        if one.records:
            self._looked_at.append(one)
        self._cells.append([row[column] for column in self._columns.values()])
        self.size += sum(map(len, self._cells[-1])) + _PER_RECORD

    def reject(self, bad: BadRecord) -> None:
        self._bad.append(bad)
        self.size += _PER_RECORD

    def taken(self, shape: Shape, consumed: int) -> Records:
        """The records, which are not held here any longer."""
        texts, fields = None, None
        if shape.kind == "text":
            texts = [values[0] for values in self._cells]
        else:
            fields = [dict(zip(self._columns, values, strict=True)) for values in self._cells]
        where = np.array(self._positions, np.int64)
        records = Records(
            where, texts=texts, fields=fields, bad=self._bad, looked_at=together(self._looked_at),
            consumed=consumed,
        )  # fmt: skip
        self._empty()
        return records


class _DelimitedReader(LinePositions):
    """A record may span lines inside quotes, so a file is one slice."""

    holds_tokens = False

    delimiter: str

    def fields(self, file: InputFile, config: DocumentConfig) -> list[str] | None:
        with open_source(file, peek=True) as source:
            lines = _Lines(source, config, file)
            return self._header(self._rows(lines, config), lines)

    def _rows(self, lines: _Lines, config: DocumentConfig) -> Iterator[list[str]]:
        longest = min(config.max_line_bytes, sys.maxsize)  # which a C long holds
        csv.field_size_limit(max(longest, csv.field_size_limit()))
        # Not a generator: csv.reader goes on after an error, a generator would end.
        return csv.reader(lines, delimiter=self.delimiter, strict=True)

    def _header(self, rows: Iterator[list[str]], lines: _Lines) -> list[str] | None:
        begin, header = 0, list[str]()
        try:
            while not header:  # blank lines before it
                begin, header = lines.position, next(rows)
        except StopIteration:
            return None
        except csv.Error as error:
            raise lines.refused(_invalid(begin, error, "mend the header")) from error
        return header

    def read(
        self,
        file: InputFile,
        part: Slice,
        shape: Shape,
        config: DocumentConfig,
        *,
        peek: bool = False,
    ) -> Iterator[Records]:
        with open_source(file, peek=peek) as source:
            lines = _Lines(source, config, file)
            rows = self._rows(lines, config)
            header = self._header(rows, lines) or []
            columns = _columns(file, header, shape)
            batch = _Batch(columns, header, Sample(shape, config))
            while True:
                begin = lines.position
                try:
                    row = next(rows, None)
                except csv.Error as error:
                    if lines.ended or "field limit" in str(error):
                        # an open quote has taken in all that follows, good records too
                        raise lines.refused(_invalid(begin, error, _CLOSE)) from error
                    batch.reject(_invalid(begin, error))
                    continue
                if row is not None and len(row) == len(header):
                    batch.add(begin, row)
                elif row:
                    plural = "s" * (len(row) != 1)
                    reason = f"{len(row)} field{plural}, the header has {len(header)}"
                    batch.reject(BadRecord(begin, reason, _MEND))
                ended = row is None
                del row
                if ended or batch.size > _BATCH_CHARACTERS:
                    yield batch.taken(shape, source.consumed())
                if ended:
                    yield source.end()
                    return


class CsvReader(_DelimitedReader):
    """`.csv` files."""

    delimiter = ","


class TsvReader(_DelimitedReader):
    """`.tsv` files."""

    delimiter = "\t"


def _columns(file: InputFile, header: list[str], shape: Shape) -> dict[str, int]:
    """The shape's own names of fields -> their places in the header."""
    for own in shape.required:
        if shape.columns[own] not in header:
            raise DataError(
                f"{file.path}: no column '{shape.columns[own]}'; columns found: {named(header)}",
                "name the right one with --text-field, or with --field NAME=COLUMN",
            )
    return {own: header.index(name) for own, name in shape.columns.items() if name in header}
