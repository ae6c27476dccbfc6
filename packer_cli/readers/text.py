"""Plain text: a document per line (as `datasets` reads it), per paragraph, or per file."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from packer_cli.config import PackConfig
from packer_cli.readers.byte_streams import Lines, open_source, read_lines
from packer_cli.readers.jsonl import too_long
from packer_cli.readers.line_positions import LinePositions
from packer_cli.records import BadRecord, InputFile, Records, Shape, Slice


class TextReader(LinePositions):
    """`.txt`, `.text` and `.md` files. Lines and paragraphs lose their line end, files do not."""

    splittable = False

    def fields(self, file: InputFile, config: PackConfig) -> list[str] | None:
        return [config.text_field]

    def read(
        self, file: InputFile, part: Slice, shape: Shape, config: PackConfig, *, peek: bool = False
    ) -> Iterator[Records]:
        with open_source(file, peek=peek) as source:
            for blocks in self._documents(
                read_lines(source, 0, None, config.max_line_bytes), config
            ):
                positions: list[int] = []
                texts: list[str] = []
                bad: list[BadRecord] = []
                for position, data in blocks:
                    if data is None or len(data) > config.max_line_bytes:
                        bad.append(too_long(position, config.max_line_bytes))
                        continue
                    try:
                        texts.append(data.decode())
                        positions.append(position)
                    except UnicodeDecodeError as error:
                        bad.append(
                            BadRecord(
                                position,
                                f"invalid UTF-8 at byte {error.start}: 0x{data[error.start]:02x}",
                                "convert it: iconv -f ORIGINAL_ENCODING -t utf-8",
                            )
                        )
                yield Records(
                    np.array(positions, np.int64), texts=texts, bad=bad, consumed=source.consumed()
                )

    def _documents(
        self, blocks: Iterator[Lines], config: PackConfig
    ) -> Iterator[list[tuple[int, bytes | None]]]:
        if config.sample_by == "line":
            for block in blocks:
                yield _lines(block)
        else:
            yield from _joined(blocks, config)


def _lines(block: Lines) -> list[tuple[int, bytes | None]]:
    if block.data is None:
        return [(block.offset, None)]
    found: list[tuple[int, bytes | None]] = []
    position = block.offset
    lines = block.data.split(b"\n")
    for line in lines if lines[-1] else lines[:-1]:
        found.append((position, line.removesuffix(b"\r")))
        position += len(line) + 1
    return found


def _joined(
    blocks: Iterator[Lines], config: PackConfig
) -> Iterator[list[tuple[int, bytes | None]]]:
    """Paragraphs (ended by blank lines) or the whole file, never held beyond the limit."""
    by_paragraph = config.sample_by == "paragraph"
    held: list[bytes] = []
    size, begin, overlong = 0, 0, False

    def document() -> tuple[int, bytes | None]:
        data = b"\n".join(held)
        return begin, None if overlong else data if by_paragraph else data + b"\n"

    for block in blocks:
        finished: list[tuple[int, bytes | None]] = []
        for position, line in _lines(block):
            if by_paragraph and line is not None and not line.strip():
                if held or overlong:
                    finished.append(document())
                held, size, overlong = [], 0, False
                continue
            if not held and not overlong:
                begin = position
            overlong = overlong or line is None or size + len(line) > config.max_line_bytes
            held = [] if overlong else [*held, line] if line is not None else held
            size += len(line or b"") + 1
        yield finished
    if held or overlong:
        yield [document()]
