"""JSON lines: one object per line, split at "\\n" only (U+2028 lives inside strings)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from packer_cli.config.documents import DocumentConfig
from packer_cli.inputs.byte_streams import Source
from packer_cli.inputs.encodings import BYTE_ORDER_MARK, refuse_other_than_utf8
from packer_cli.inputs.json_records import Found, JsonReader
from packer_cli.inputs.lines import Lines, read_lines, too_long
from packer_cli.records import InputFile, Slice

_LINE_END = ord("\n")


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
            ends = np.flatnonzero(np.frombuffer(block.data, np.uint8) == _LINE_END)
            if not block.data.endswith(b"\n"):
                ends = np.append(ends, len(block.data))
            begins = np.concatenate([[0], ends[:-1] + 1])
            positions = begins + block.offset
            if not block.offset and block.data.startswith(BYTE_ORDER_MARK):
                begins[0] = len(BYTE_ORDER_MARK)
            view = memoryview(block.data)  # copies would take a third of the time of decoding
            places = zip(begins.tolist(), ends.tolist(), strict=True)
            return Found(positions, [view[begin:end] for begin, end in places], [])

        return map(lines_of, read_lines(source, part.start, part.stop, limit))
