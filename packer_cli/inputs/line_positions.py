"""Telling a person where a record of a line format is."""

from __future__ import annotations

from packer_cli.inputs.byte_streams import BLOCK_BYTES, STDIN, open_source
from packer_cli.records import Group, InputFile


class LinePositions:
    """Positions are byte offsets in the uncompressed file; people want line numbers."""

    def describe(self, file: InputFile, position: int) -> str:
        """Such as "line 17 (byte 1234)": counts the lines before, so for errors only."""
        if file.path == STDIN:
            return f"byte {position}"
        line, left = 1, position
        with open_source(file) as source:
            while left and (chunk := source.read(min(left, BLOCK_BYTES))):
                line += chunk.count(b"\n")
                left -= len(chunk)
        return f"line {line} (byte {position})"

    def groups(self, file: InputFile) -> list[Group]:
        return []
