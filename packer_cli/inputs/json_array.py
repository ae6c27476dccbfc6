"""A JSON file that is one array of records, read in blocks: never more than a block and a record.

    [{"text": "..."},
     {"text": "..."}]

A kernel finds where each record ends; the decoder says whether it is one. A record that is closed
but wrong is bad like any other. Where strings or brackets do not match, where the next record
begins is unknown, so that the run ends, whatever becomes of bad records.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from packer_cli._kernels.inputs import find_elements
from packer_cli.config.documents import DocumentConfig
from packer_cli.errors import DataError
from packer_cli.inputs import byte_streams
from packer_cli.inputs.byte_streams import Source, open_source
from packer_cli.inputs.encodings import BYTE_ORDER_MARK
from packer_cli.inputs.json_mistakes import is_closed
from packer_cli.inputs.json_records import Found, JsonReader
from packer_cli.inputs.lines import taken, too_long
from packer_cli.records import BadRecord, InputFile, Int64, Slice

_AT_ONCE = 1 << 15  # records that are found together, so that batches of short ones are bounded
_SEEN_BYTES = 64 << 10


def holds_array(file: InputFile) -> bool:
    """Whether the first byte of a JSON file that is not blank opens an array. Raises DataError."""
    beginning = b""
    with open_source(file, peek=True) as source:
        while not beginning and (data := source.read(_SEEN_BYTES)):
            beginning = data.removeprefix(BYTE_ORDER_MARK).lstrip()
    return beginning[:1] == b"["


class JsonArrayReader(JsonReader):
    """`.json` files that begin with "[". Slices begin after a comma between records."""

    what = "record"

    def begins_at(self, start: int) -> int:
        """There: it is known that a record follows."""
        return start

    def found(
        self, file: InputFile, source: Source, part: Slice, config: DocumentConfig
    ) -> Iterator[Found]:
        """The records that begin in the slice."""
        elements, cut = _Elements(part.start), _Cut(part.stop, config.max_line_bytes)
        while data := source.read(cut.next_size(elements.reached)):
            offset = elements.reached
            for places in elements.of(data):
                yield cut.records(data, offset, places)
                if cut.ended:
                    return
            if elements.closed_at is not None:
                self._refuse_more(file, source, data[elements.closed_at - offset :], elements)
                return
            cut.hold(data, offset, elements.begin)
        raise self._not_closed(file, elements)

    def edges(self, file: InputFile, parts: int) -> list[int]:
        """Where at most `parts` slices of about as many bytes begin, from 0 on; reads the file.

        Damage is left to whoever reads the records.
        """
        wanted, edges = [file.size * i // parts for i in range(1, parts)], [0]
        elements = _Elements(0)
        with open_source(file) as source:
            while len(edges) <= len(wanted) and (data := source.read(byte_streams.BLOCK_BYTES)):
                for places in elements.of(data):
                    after = places[:, 1] + 1
                    for target in wanted[len(edges) - 1 :]:
                        at = int(np.searchsorted(after, target))
                        if at == len(after):
                            break
                        edges.append(int(after[at]))
        last = elements.closed_at
        return sorted({edge for edge in edges if last is None or edge <= last})

    def goes_on_after(self, piece: bytes) -> bool:
        """Whether strings and brackets of a record match."""
        return is_closed(piece)

    def refuse(self, file: InputFile, piece: bytes, bad: BadRecord) -> None:
        """Raises DataError where they do not."""
        if not self.goes_on_after(piece):
            tip = "mend it: where the next record begins is unknown, so that none can be skipped"
            raise self.refused(file, replace(bad, tip=tip))

    def _refuse_more(
        self, file: InputFile, source: Source, rest: bytes, elements: _Elements
    ) -> None:
        """Read to the end. Raises DataError for what is no end of an array, and for what follows.

        `rest`: from the closing bracket on.
        """
        at = elements.closed_at or 0
        if rest[:1] != b"]":
            wrong = "a closing brace, expected a comma or the end of the array"
            raise self.refused(file, BadRecord(at, wrong, "mend the record before it"))
        at, rest = at + 1, rest[1:]
        while rest or (rest := source.read(byte_streams.BLOCK_BYTES)):
            if more := rest.lstrip():
                bad = BadRecord(
                    at + len(rest) - len(more),
                    "more after the end of the array, expected one array of records in the file",
                    "make one of several: jq -c '.[]' FILE > FILE.jsonl, and pack that",
                )
                raise self.refused(file, bad)
            at, rest = at + len(rest), b""

    def _not_closed(self, file: InputFile, elements: _Elements) -> DataError:
        where = end = elements.reached
        what = "the file ends before its array does, expected a record or ]"
        if elements.begin >= 0:
            where = elements.begin
            what = (
                "the record that begins here, or the array, is not closed where the file ends, "
                f"byte {end}"
            )
        tip = "fetch or write the file again: it was cut short, or a quote or bracket is missing"
        return self.refused(file, BadRecord(where, what, tip))


class _Elements:
    """Where the elements of an array are, found block by block from byte `start` on.

    reached    the byte after those that were looked at
    begin      where the element begins that has not ended yet; -1: it has not begun
    closed_at  where the array ends, once it has
    """

    def __init__(self, start: int) -> None:
        # the kernel says what these are; a slice that begins later begins after a comma
        self._state = np.array([0, start > 0, 0, 0, -1, start > 0], np.int64)
        self._room = np.empty((_AT_ONCE, 2), np.int64)
        self.reached = start
        self.closed_at: int | None = None

    @property
    def begin(self) -> int:
        return int(self._state[4])

    def of(self, data: bytes) -> Iterator[npt.NDArray[np.int64]]:
        """int64[n, 2] of the elements that end in the next block, as `find_elements` gives them."""
        view, offset = np.frombuffer(data, np.uint8), self.reached
        self.reached += len(data)
        self._state[0] = 0
        while self._state[0] < len(data) and self.closed_at is None:
            count = find_elements(view, offset, self._state, self._room)
            if self._state[1] < 0:
                self.closed_at = offset + int(self._state[0]) - 1
            if count:
                yield self._room[:count]


class _Cut:
    """Cuts the bytes of elements out of blocks, and ends with the one that reaches `stop`."""

    def __init__(self, stop: int | None, limit: int) -> None:
        self._stop, self._limit = stop, limit
        self._held, self._overlong = bytearray(), False
        self.ended = False

    def next_size(self, reached: int) -> int:
        """How many bytes to read next: up to the slice's end, then in small steps."""
        left = byte_streams.BLOCK_BYTES if self._stop is None else self._stop - reached
        return min(left if left > 0 else byte_streams.OVERRUN_BYTES, byte_streams.BLOCK_BYTES)

    def records(self, data: bytes, offset: int, places: Int64) -> Found:
        """The elements that end at these places in the block, which begins at `offset`."""
        if self._stop is not None:
            last = int(np.searchsorted(places[:, 1] + 1, self._stop))
            self.ended = last < len(places)
            places = places[: last + 1]
        bad = list[BadRecord]()
        kept, pieces = list[int](), list[bytes]()
        for begin, end in places.tolist():
            if begin < 0:
                bad.append(_missing(end, data[end - offset : end - offset + 1]))
            elif begin >= offset:
                kept.append(begin)
                pieces.append(data[begin - offset : end - offset])
            elif self._overlong:
                bad.append(too_long(begin, self._limit, "record"))
                self._overlong = False
            else:
                kept.append(begin)
                pieces.append(taken(self._held, data[: end - offset]))
        return Found(np.array(kept, np.int64), pieces, bad)

    def hold(self, data: bytes, offset: int, begin: int) -> None:
        """Keep the bytes of the element that begins at `begin` and has not ended in the block."""
        if begin < 0 or self._overlong:
            return
        self._held += memoryview(data)[max(begin - offset, 0) :]
        if len(self._held) > self._limit:
            self._overlong = True
            self._held.clear()


def _missing(position: int, ended_by: bytes) -> BadRecord:
    """An element without a byte."""
    before = "this comma" if ended_by == b"," else "the end of the array, after a comma"
    return BadRecord(
        position,
        f"no record before {before}",
        "remove the comma, or use --on-error skip",
    )
