"""Cutting the bytes of a file into whole lines, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from packer_cli.inputs import byte_streams
from packer_cli.inputs.byte_streams import Source
from packer_cli.records import BadRecord


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
    offset, held, skipping = start, bytearray(), False  # which grows without a copy of itself
    for position, chunk in _own_bytes(source, start, stop):
        if skipping:
            newline = chunk.find(b"\n") + 1
            if not newline or newline == len(chunk):
                skipping = not newline
                continue
            position, chunk, skipping = position + newline, chunk[newline:], False  # noqa: PLW2901
        if not held:
            offset = position
        newline = chunk.rfind(b"\n") + 1
        if newline:
            rest = chunk[newline:]
            yield Lines(offset, taken(held, memoryview(chunk)[:newline]))
            offset = position + newline
            held += rest
        else:
            held += chunk
        if len(held) > max_line_bytes:
            yield Lines(offset, None)
            skipping = True
            held.clear()
    if held:
        yield Lines(offset, taken(held))


def taken(held: bytearray, more: bytes | memoryview = b"") -> bytes:
    """The bytes of `held`, which is empty afterwards, and `more`."""
    whole = b"".join((held, more))
    held.clear()
    return whole


def _own_bytes(source: Source, start: int, stop: int | None) -> Iterator[tuple[int, bytes]]:
    """(position, chunk) from the first line that begins at or after `start` to the end of the
    last line that begins before `stop`.
    """
    position = max(start - 1, 0)
    seeking = start > 0

    def size() -> int:
        """Up to the slice's end, then in small steps to the end of its last line."""
        left = byte_streams.BLOCK_BYTES if stop is None else stop - position
        return min(left if left > 0 else byte_streams.OVERRUN_BYTES, byte_streams.BLOCK_BYTES)

    while chunk := source.read(size()):
        begin = 0
        if seeking:
            begin = chunk.find(b"\n") + 1
            seeking = not begin
            after = position + (len(chunk) if seeking else begin)
            if stop is not None and after >= stop:
                return  # no line begins in the slice
        if not seeking:
            if stop is not None and position + len(chunk) >= stop:
                newline = chunk.find(b"\n", max(begin, stop - 1 - position))
                if newline >= 0:
                    yield position + begin, chunk[begin : newline + 1]
                    return
            if begin < len(chunk):
                yield position + begin, chunk[begin:]
        position += len(chunk)
