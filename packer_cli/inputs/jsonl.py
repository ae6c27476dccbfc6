"""JSON lines: one object per line, split at "\\n" only (U+2028 lives inside strings)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from packer_cli.config.documents import DocumentConfig
from packer_cli.inputs.byte_streams import Lines, Source, read_lines, too_long
from packer_cli.inputs.encodings import BYTE_ORDER_MARK, refuse_other_than_utf8
from packer_cli.inputs.json_records import Found, JsonReader
from packer_cli.records import InputFile, Slice


class JsonlReader(JsonReader):
    """`.jsonl` and `.ndjson` files, and `.json` files that hold no array."""

    what = "line"

    def begins_at(self, start: int) -> int:
        """At the byte before, which tells whether a line begins at `start`."""
        return max(start - 1, 0)

    def found(
        self, file: InputFile, source: Source, part: Slice, config: DocumentConfig
    ) -> Iterator[Found]:
        """The lines that begin in the slice, blank ones too."""
        limit = config.max_line_bytes

        def lines_of(block: Lines) -> Found:
            refuse_other_than_utf8(file, block)
            if block.data is None:
                bad = [too_long(block.offset, limit)]
                return Found(np.empty(0, np.int64), [], bad)
            lines = _split(block.data)
            sizes = np.fromiter(map(len, lines), np.int64, count=len(lines))
            if not block.offset:
                lines[0] = lines[0].removeprefix(BYTE_ORDER_MARK)
            return Found(np.cumsum(sizes + 1) - (sizes + 1) + block.offset, lines, [])

        return map(lines_of, read_lines(source, part.start, part.stop, limit))


def _split(data: bytes) -> list[bytes]:
    """The lines, without a copy of one that is a block of its own."""
    if data.find(b"\n", 0, -1) < 0 and data.strip():
        return [data]
    lines = data.split(b"\n")
    return lines if lines[-1] else lines[:-1]
