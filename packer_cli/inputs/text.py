"""Plain text: a document per line (as `datasets` reads it), per paragraph, or per file."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from packer_cli.config.documents import DocumentConfig
from packer_cli.config.shapes import Shape
from packer_cli.inputs.byte_streams import open_source
from packer_cli.inputs.encodings import (
    BYTE_ORDER_MARK,
    other_encoding,
    refuse_other_than_utf8,
)
from packer_cli.inputs.line_positions import LinePositions
from packer_cli.inputs.lines import Lines, read_lines, taken, too_long
from packer_cli.records import BadRecord, InputFile, Int64, Records, Slice

_Document = tuple[int, bytes | None]  # position and bytes; None: longer than the limit


class TextReader(LinePositions):
    """`.txt` and `.text` files; sources and the like as documents. Lines and paragraphs lose their
    line end, documents do not.
    """

    holds_tokens = False

    def fields(self, file: InputFile, config: DocumentConfig) -> list[str] | None:
        return [config.renamed.get("text", "text")]

    def read(
        self,
        file: InputFile,
        part: Slice,
        shape: Shape,
        config: DocumentConfig,
        *,
        peek: bool = False,
    ) -> Iterator[Records]:
        limit, what = config.max_line_bytes, config.sample_by

        def checked(block: Lines) -> Lines:
            if what != "document":  # a file that is one document is a bad record instead
                refuse_other_than_utf8(file, block)
            return block

        def records_of(documents: list[_Document]) -> Records:
            positions, texts, bad = _decoded(documents, limit, what)
            return Records(positions, texts=texts, bad=bad, consumed=source.consumed())

        with open_source(file, peek=peek) as source:
            # holds no bytes and no texts while they are worked on, which a loop would
            blocks = map(checked, read_lines(source, 0, None, limit))
            yield from map(records_of, _documents(blocks, limit, what))
            yield source.end()


def _decoded(
    documents: list[_Document], limit: int, what: str
) -> tuple[Int64, list[str], list[BadRecord]]:
    positions, texts, bad = list[int](), list[str](), list[BadRecord]()
    for position, data in documents:
        if data is None or len(data) > limit:
            bad.append(too_long(position, limit, what))
            continue
        if what == "document" and (found := _no_text(data)):
            bad.append(BadRecord(position, *found))
            continue
        try:
            texts.append(data.decode())
            positions.append(position)
        except UnicodeDecodeError as error:
            bad.append(
                BadRecord(
                    position,
                    f"invalid UTF-8 at byte {error.start} of the {what}: 0x{data[error.start]:02x}",
                    "convert it: iconv -f ORIGINAL_ENCODING -t utf-8",
                )
            )
    return np.array(positions, np.int64), texts, bad


def _no_text(data: bytes) -> tuple[str, str] | None:
    """What a file is instead of text, as far as bytes tell that UTF-8 allows, and a tip."""
    if found := other_encoding(data):
        return found
    if (at := data.find(b"\0")) >= 0:
        tip = "name only texts, or leave other files out with --on-error skip"
        return f"not text: a NUL byte at byte {at} of the document", tip
    return None


def _documents(blocks: Iterator[Lines], limit: int, what: str) -> Iterator[list[_Document]]:
    if what == "line":
        return map(_lines, blocks)
    return _paragraphs(blocks, limit) if what == "paragraph" else _whole(blocks, limit)


def _lines(block: Lines) -> list[_Document]:
    if block.data is None:
        return [(block.offset, None)]
    documents: list[_Document] = []
    position = block.offset
    data = block.data if position else block.data.removeprefix(BYTE_ORDER_MARK)
    mark = len(block.data) - len(data)  # it is no text, but the first line begins with it
    lines = data.split(b"\n")
    for line in lines if lines[-1] else lines[:-1]:
        documents.append((position, line.removesuffix(b"\r")))
        position += len(line) + 1 + mark
        mark = 0
    return documents


def _paragraphs(blocks: Iterator[Lines], limit: int) -> Iterator[list[_Document]]:
    """Ended by blank lines, never held beyond `limit` bytes."""
    held: list[bytes] = []
    size, begin, overlong = 0, 0, False

    def document() -> _Document:
        return begin, None if overlong else b"\n".join(held)

    for block in blocks:
        finished: list[_Document] = []
        for position, line in _lines(block):
            if line is not None and not line.strip():
                if held or overlong:
                    finished.append(document())
                held, size, overlong = [], 0, False
                continue
            if not held and not overlong:
                begin = position
            size += len(line or b"") + 1
            if line is None or size - 1 > limit:
                held, overlong = [], True
            elif not overlong:
                held.append(line)
        yield finished
    if held or overlong:
        yield [document()]


def _whole(blocks: Iterator[Lines], limit: int) -> Iterator[list[_Document]]:
    """The file as it is, if it is not longer than `limit` bytes."""
    held = bytearray()
    for block in blocks:
        if block.data is None or len(held) + len(block.data) > limit:
            yield [(0, None)]
            return
        held += block.data
        del block
    if held:
        yield [(0, taken(held).removeprefix(BYTE_ORDER_MARK))]
