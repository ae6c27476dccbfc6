"""Files of lines: cutting them out in bounded memory, how they begin, and where a record is.

A byte order mark of UTF-8 is no text. Marks of other encodings end the run: no byte of such a file
means what it would in UTF-8.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from packer_cli.errors import DataError
from packer_cli.inputs import byte_streams
from packer_cli.inputs.byte_streams import STDIN, Source, next_size, open_source
from packer_cli.inputs.formats import Reader
from packer_cli.records import BadRecord, InputFile

BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # of UTF-8
_MARKS = {  # the longer ones first, of which others are the beginning
    b"\xff\xfe\0\0": "UTF-32LE",
    b"\0\0\xfe\xff": "UTF-32BE",
    b"\xff\xfe": "UTF-16LE",
    b"\xfe\xff": "UTF-16BE",
}


class LineReader(Reader):
    """A format of lines: positions are byte offsets in the uncompressed file."""

    def describe(self, file: InputFile, position: int) -> str:
        """Such as "line 17 (byte 1234)": people want line numbers, so the lines before count."""
        if file.path == STDIN:
            return f"byte {position}"
        line, left = 1, position
        with open_source(file) as source:
            while left and (chunk := source.read(min(left, byte_streams.BLOCK_BYTES))):
                line += chunk.count(b"\n")
                left -= len(chunk)
        return f"line {line} (byte {position})"

    def refused(self, file: InputFile, bad: BadRecord) -> DataError:
        """The error that ends a run at a bad record."""
        place = self.describe(file, bad.position)
        return DataError(f"{file.path}, {place}: {bad.reason}", bad.tip)


class Lines(NamedTuple):
    """Whole lines: `data` begins at byte `offset` of the uncompressed file.

    `data` None: one line longer than the limit, skipped.
    """

    offset: int
    data: bytes | None


def too_long(position: int, max_line_bytes: int, what: str = "line") -> BadRecord:
    return BadRecord(
        position,
        f"the {what} is longer than {max_line_bytes} bytes",
        "raise --max-line-bytes, or check that the file has line ends",
    )


def read_lines(
    source: Source, start: int, stop: int | None, max_line_bytes: int
) -> Iterator[Lines]:
    """The lines that begin in [start, stop), in blocks; the file's last may lack its newline.

    The source must stand at max(start - 1, 0): the byte before the slice tells whether a line
    begins exactly at `start`. Memory is bounded by the block and the longest line accepted;
    lines up to a block may exceed `max_line_bytes`, which the caller checks line by line.
    """
    position = offset = max(start - 1, 0)
    held = bytearray()  # the beginning of a line, which grows without a copy of itself
    seeking, is_last = start > 0, False  # the line that goes on is another slice's, or overlong
    while not is_last and (chunk := source.read(next_size(stop, position))):
        base, begin, end = position, 0, len(chunk)
        position += end
        if seeking:
            begin = chunk.find(b"\n") + 1
            seeking = not begin
            begin = begin or end
            if stop is not None and base + begin >= stop:
                return  # no line begins in the slice
            if begin == end:
                continue
        if stop is not None and position >= stop:
            newline = chunk.find(b"\n", max(begin, stop - 1 - base)) + 1
            end, is_last = newline or end, newline > 0
        if not held:
            offset = base + begin
        view = memoryview(chunk)
        if newline := chunk.rfind(b"\n", begin, end) + 1:
            yield Lines(offset, taken(held, view[begin:newline]))
            offset = base + newline
            held += view[newline:end]
        else:
            held += view[begin:end]
        if len(held) > max_line_bytes:
            yield Lines(offset, None)
            seeking = True
            held.clear()
    if held:
        yield Lines(offset, taken(held))


def taken(held: bytearray, more: bytes | memoryview = b"") -> bytes:
    """The bytes of `held`, which is empty afterwards, and `more`."""
    whole = b"".join((held, more))
    held.clear()
    return whole


def invalid_utf8(error: UnicodeDecodeError, data: bytes, what: str) -> tuple[str, str]:
    """The reason and tip for bytes of a line, or whatever it is, that are no text."""
    return (
        f"invalid UTF-8 at byte {error.start} of the {what}: 0x{data[error.start]:02x}",
        "convert it: iconv -f ORIGINAL_ENCODING -t utf-8",
    )


def other_encoding(beginning: bytes) -> tuple[str, str] | None:
    """The encoding of a file that is not in UTF-8, by its first bytes, and a tip."""
    for mark, name in _MARKS.items():
        if beginning.startswith(mark):
            what = f"the byte order mark of {name}, expected UTF-8"
            return what, f"convert it: iconv -f {name[:6]} -t UTF-8 FILE > NEW_FILE"
    return None


def refuse_other_than_utf8(file: InputFile, block: Lines) -> None:
    """Raises DataError where the block is the beginning of a file in another encoding."""
    if block.offset or block.data is None:
        return
    if found := other_encoding(block.data[: max(map(len, _MARKS))]):
        what, tip = found
        raise DataError(f"{file.path}: begins with {what}", tip)
