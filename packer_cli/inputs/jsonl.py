"""JSON: one object per line, or a file that is one array of records.

    {"text": "..."}             [{"text": "..."},
    {"text": "..."}              {"text": "..."}]

Lines are split at "\\n" only: U+2028 lives inside strings. Of an array, a kernel finds where each
record ends, in blocks: never more than a block and a record are held. A record that is closed but
wrong is bad like any other; where strings or brackets do not match, where the next record begins is
unknown, so that the run ends, whatever becomes of bad records.

Records are decoded by a typed msgspec decoder, which reads nothing but the fields wanted; only
when a block holds a bad record is it read one by one to find the place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, overload

import msgspec
import numpy as np

from packer_cli._kernels.inputs import find_elements, find_texts
from packer_cli.errors import UsageError, named
from packer_cli.inputs import byte_streams
from packer_cli.inputs.byte_streams import (
    BYTE_ORDER_MARK,
    Lines,
    Source,
    cut,
    filled,
    invalid_utf8,
    next_size,
    open_source,
    peeking,
    read_lines,
    taken,
    too_long,
)
from packer_cli.inputs.formats import LineReader
from packer_cli.inputs.token_columns import NAMES, Given, token_records, with_carried
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.shapes import (
    ABSENT,
    TRACE,
    Shape,
    fits_a_shape,
    may_hold,
    value_at,
)
from packer_cli.records import BadRecord, InputFile, Int64, Records, Slice, Texts

_MOST_SEARCHED = 16 << 20  # bytes of bad records; of stdin they are kept for the run
_DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_Decode = Callable[[bytes | memoryview], Any]


class Block(NamedTuple):
    """Records that are found in a stretch of a file, and not decoded yet; blank ones do not count.

    positions  int64[n], in bytes of the uncompressed file
    pieces     n stretches of bytes, each of one record, some of them longer than the limit
    bad        those that are not among the n
    """

    positions: Int64
    pieces: Sequence[bytes | memoryview]
    bad: list[BadRecord]


class _Pieces(Sequence[memoryview]):
    """The stretches begins[i] : ends[i] of some bytes, which are not copied."""

    def __init__(self, data: bytes, begins: Int64, ends: Int64) -> None:
        self.data, self.begins, self.ends = memoryview(data), begins, ends

    def __len__(self) -> int:
        return len(self.begins)

    def __iter__(self) -> Iterator[memoryview]:
        for begin, end in zip(self.begins.tolist(), self.ends.tolist(), strict=True):
            yield self.data[begin:end]

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> list[memoryview]: ...
    def __getitem__(self, index: int | slice) -> memoryview | list[memoryview]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.data[self.begins[index] : self.ends[index]]


class JsonlReader(LineReader):
    """`.jsonl` and `.ndjson` files, and `.json` that hold no array.

    what    that a record fills
    before  bytes before a slice that are read with it: they tell whether a line begins there
    """

    holds_tokens = True
    what, before = "line", 1

    def found(
        self, file: InputFile, source: Source, part: Slice, config: DocumentConfig
    ) -> Iterator[Block]:
        """The lines that begin in the slice; `source` stands `before` it."""
        limit = config.max_line_bytes

        def lines_of(block: Lines) -> Block:
            offset, data = block
            if data is None:
                return Block(np.empty(0, np.int64), [], [too_long(offset, limit)])
            positions, begins, ends = cut(offset, data)
            kept = filled(data, begins, ends)
            return Block(positions[kept], _Pieces(data, begins[kept], ends[kept]), [])

        return map(lines_of, read_lines(source, part.start, part.stop, limit))

    def split(self, file: InputFile, parts: int) -> list[Slice]:
        """Slices may end at any byte."""
        edges = [file.size * i // parts for i in range(parts + 1)]
        return [Slice(file.index, a, b, b - a) for a, b in pairwise(edges)]

    def is_open(self, piece: bytes) -> bool:
        """True where a bad record hides where the next one begins."""
        return False

    def fields(self, file: InputFile, config: DocumentConfig) -> list[str] | None:
        """The field names of the first record, or None when there is none.

        Where bad records are skipped: of the first record that can be packed, if any can, and
        there is one in the file's beginning.
        """
        skip, first, reached = config.on_error == "skip", None, 0
        whole = Slice(file.index, 0, None, 0)
        with open_source(file) as source:
            for positions, pieces, bad in self.found(file, source, whole, config):
                for reached, piece in zip(positions.tolist(), map(bytes, pieces), strict=True):
                    try:
                        names = _names_in(piece)
                    except _DECODE_ERRORS:
                        if skip and not self.is_open(piece):
                            continue
                        why = self._explained(file, piece, piece, reached, _any_decoder)
                        raise self.refused(file, why) from None
                    if not skip or fits_a_shape(names, config.shape, config.renamed):
                        return names
                    first = first or names
                if bad and not skip:
                    raise self.refused(file, bad[0])
                if first is not None or (skip and reached > _MOST_SEARCHED):
                    return first
        return None

    def read(
        self, file: InputFile, part: Slice, shape: Shape, config: DocumentConfig
    ) -> Iterator[Records]:
        decode = _decoder(shape, config)
        carried, tip = [*config.carried], _MEND.format(self.what)

        def records_of(found: Block) -> Records:
            consumed = source.consumed()
            is_plain = shape.kind == "text" and not carried
            texts = _plain_texts(found, shape, config) if is_plain else None
            if texts is not None:
                return Records(found.positions, texts=texts, bad=found.bad, consumed=consumed)
            positions, decoded, bad = self._decoded(file, found, decode, shape, config)
            if shape.kind == "tokens":
                rows = [(r.input_ids, *(getattr(r, name, None) for name in NAMES[1:]))
                        for r in decoded]  # fmt: skip
                records = token_records(rows, positions, tip, consumed)
                bad = sorted([*bad, *records.bad], key=lambda record: record.position)
                records = replace(records, bad=bad)
                if not carried:
                    return records
                sizes = np.array([*map(len, (row[0] for row in rows))], np.int64)
                masks = [row[2] for row in rows]
                given = Given(positions, _given(decoded, carried), sizes, masks)
                return with_carried(records, given, config, tip)
            if shape.kind == TRACE:
                return Records(positions, fields=decoded, bad=bad, consumed=consumed)
            strings = [record.text for record in decoded] if shape.kind == "text" else None
            fields = [*map(msgspec.structs.asdict, decoded)] if strings is None else None
            records = Records(positions, texts=strings, fields=fields, bad=bad, consumed=consumed)
            if not carried:
                return records
            given = Given(positions, _given(decoded, carried))
            for record in fields or []:
                for number in range(len(carried)):
                    del record[_CARRIED.format(number)]
            return with_carried(records, given, config, tip)

        with open_source(file, max(part.start - self.before, 0)) as source:
            # holds no bytes and no records while they are worked on, which a loop would
            yield from map(records_of, self.found(file, source, part, config))

    def _decoded(
        self, file: InputFile, found: Block, decode: _Decode, shape: Shape, config: DocumentConfig
    ) -> tuple[Int64, list[Any], list[BadRecord]]:
        positions, pieces, refused = found.positions, [*found.pieces], found.bad
        limit = config.max_line_bytes
        if max(map(len, pieces), default=0) <= limit:
            with suppress(*_DECODE_ERRORS):
                return positions, [decode(piece) for piece in pieces], refused
        good, decoded, bad = list[int](), [], list(refused)
        for position, piece in zip(positions.tolist(), map(bytes, pieces), strict=True):
            if len(piece) > limit:
                bad.append(too_long(position, limit, self.what))
                continue
            record = _without_constants(piece, [*shape.columns.values(), *config.carried])
            try:
                decoded.append(decode(record))
                good.append(position)
            except _DECODE_ERRORS:
                bad.append(self._explained(file, piece, record, position, decode))
        bad.sort(key=lambda record: record.position)
        return np.array(good, np.int64), decoded, bad

    def _explained(
        self, file: InputFile, piece: bytes, record: bytes, position: int, decode: _Decode
    ) -> BadRecord:
        """A bad record, of which `piece` is in the file. DataError where it hides where the next
        one begins.
        """
        bad = BadRecord(position, *_mistake(record, decode, self.what))
        if self.is_open(piece):
            tip = "mend it: where the next record begins is unknown, so that none can be skipped"
            raise self.refused(file, replace(bad, tip=tip))
        return bad


# --- arrays


def holds_array(file: InputFile) -> bool:
    """True where the first byte of a file that is not blank opens an array. Raises DataError."""
    beginning = b""
    with peeking(), open_source(file) as source:
        while not beginning and (data := source.read(byte_streams.OVERRUN_BYTES)):
            beginning = data.removeprefix(BYTE_ORDER_MARK).lstrip()
    return beginning[:1] == b"["


class JsonArrayReader(JsonlReader):
    """`.json` files that begin with "[". Slices begin after a comma between records."""

    what, before = "record", 0

    def found(
        self, file: InputFile, source: Source, part: Slice, config: DocumentConfig
    ) -> Iterator[Block]:
        """The records that begin in the slice."""
        elements = _Elements(part.start, part.stop, config.max_line_bytes)
        while data := source.read(next_size(part.stop, elements.reached)):
            offset = elements.reached
            yield from elements.records(data)
            if elements.has_ended:
                return
            if (end := elements.closed_at) is not None:
                self._refuse_more(file, source, data[end - offset :], end)
                return
        at, reason = elements.reached, "the file ends before its array does, expected a record or ]"
        if elements.begin >= 0:
            at, reason = elements.begin, (
                "the record that begins here, or the array, is not closed where the file ends, "
                f"byte {elements.reached}"
            )  # fmt: skip
        tip = "fetch or write the file again: it was cut short, or a quote or bracket is missing"
        raise self.refused(file, BadRecord(at, reason, tip))

    def _refuse_more(self, file: InputFile, source: Source, rest: bytes, at: int) -> None:
        """Read to the end. Raises DataError for anything but blanks after the array, which closes
        with the first byte of `rest`, byte `at` of the file; also for a brace in its place.
        """
        blanks = rest.removeprefix(b"]")
        at += len(rest) - len(blanks)
        while blanks or (blanks := source.read(byte_streams.BLOCK_BYTES)):
            if more := blanks.lstrip():
                at += len(blanks) - len(more)
                what = "more after the end of the array, expected one array of records in the file"
                tip = "make one of several: jq -c '.[]' FILE > FILE.jsonl, and pack that"
                raise self.refused(file, BadRecord(at, what, tip))
            at, blanks = at + len(blanks), b""

    def split(self, file: InputFile, parts: int) -> list[Slice]:
        """Slices begin where records do: reads the file; damage is left to `read`."""
        wanted, edges = [file.size * i // parts for i in range(1, parts)], [0]
        elements = _Elements(0)
        with open_source(file) as source:
            while len(edges) <= len(wanted) and (data := source.read(byte_streams.BLOCK_BYTES)):
                for places in elements.places(data):
                    after = places[:, 1] + 1
                    for target in wanted[len(edges) - 1 :]:
                        at = int(np.searchsorted(after, target))
                        if at == len(after):
                            break
                        edges.append(int(after[at]))
        last = elements.closed_at
        begins = sorted({edge for edge in edges if last is None or edge <= last})
        return [
            Slice(file.index, a, b, (b or file.size) - a)
            for a, b in zip(begins, [*begins[1:], None], strict=True)
        ]

    def is_open(self, piece: bytes) -> bool:
        """True where strings or brackets do not end within it."""
        try:
            json.loads(piece.decode(errors="replace"), strict=False)
        except json.JSONDecodeError:
            return True
        except (ValueError, RecursionError):  # a number of thousands of digits
            return False
        return False


class _Elements:
    """The elements of an array, block by block from byte `start` to the one that reaches `stop`.

    reached    the byte after those that were looked at
    begin      where the element begins that has not ended yet; -1: it has not begun
    closed_at  where the array ends, once it has
    has_ended  the last element of the slice was found
    """

    _AT_ONCE = 1 << 15  # that are found together, so that batches of short ones are bounded

    def __init__(self, start: int, stop: int | None = None, limit: int = 0) -> None:
        # the kernel says what these are; a slice that begins later begins after a comma
        self._state = np.array([0, start > 0, 0, 0, -1, start > 0], np.int64)
        self._room = np.empty((self._AT_ONCE, 2), np.int64)
        self._stop, self._limit = stop, limit
        self._held, self._overlong = bytearray(), False  # of the element that has not ended yet
        self.reached = start
        self.closed_at: int | None = None
        self.has_ended = False

    @property
    def begin(self) -> int:
        return int(self._state[4])

    def places(self, data: bytes) -> Iterator[Int64]:
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

    def records(self, data: bytes) -> Iterator[Block]:
        """The elements that end in the next block, up to the slice's last."""
        offset = self.reached
        for places in self.places(data):
            last = len(places)
            if self._stop is not None:
                last = int(np.searchsorted(places[:, 1] + 1, self._stop))
                self.has_ended = last < len(places)
            yield self._cut(data, offset, places[: last + 1])
            if self.has_ended:
                return
        if self.begin >= 0 and not self._overlong:
            self._held += memoryview(data)[max(self.begin - offset, 0) :]
            self._overlong = len(self._held) > self._limit
            if self._overlong:
                self._held.clear()

    def _cut(self, data: bytes, offset: int, places: Int64) -> Block:
        """The elements that end at these places in the block, which begins at `offset`."""
        bad, kept, pieces = list[BadRecord](), list[int](), list[bytes | memoryview]()
        for begin, end in places.tolist():
            if begin < 0:
                comma = data[end - offset : end - offset + 1] == b","
                before = "this comma" if comma else "the end of the array, after a comma"
                tip = "remove the comma, or use --on-error skip"
                bad.append(BadRecord(end, f"no record before {before}", tip))
            elif self._overlong:  # only the first of a block began before it
                bad.append(too_long(begin, self._limit, "record"))
                self._overlong = False
            else:
                kept.append(begin)
                pieces.append(taken(self._held, data[max(begin - offset, 0) : end - offset]))
        return Block(np.array(kept, np.int64), pieces, bad)


# --- decoders


def _plain_texts(found: Block, shape: Shape, config: DocumentConfig) -> Texts | None:
    """The texts of lines, without a Python object for any of them; None where one is odd."""
    pieces, name = found.pieces, msgspec.json.encode(shape.columns["text"])
    if not isinstance(pieces, _Pieces) or b"." in name or b"\\" in name:
        return None
    sizes = pieces.ends - pieces.begins
    if sizes.max(initial=0) > config.max_line_bytes:
        return None
    out, offsets = np.empty(int(sizes.sum()), np.uint8), np.zeros(len(pieces) + 1, np.int64)
    data, key = np.frombuffer(pieces.data, np.uint8), np.frombuffer(name, np.uint8)
    if find_texts(data, pieces.begins, pieces.ends, key, out, offsets) < len(pieces):
        return None
    return Texts(out[: offsets[-1]], offsets)


_any_decoder: Callable[[bytes | memoryview], dict[str, Any]]
_any_decoder = msgspec.json.Decoder(dict[str, Any]).decode
# a document of nested values is ten times its size once they are objects
_names_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_value_decoder = msgspec.json.Decoder().decode


def _given(decoded: list[Any], carried: list[str]) -> dict[str, list[Any]]:
    """The values of carried columns in records."""
    fields = [(name, _CARRIED.format(number)) for number, name in enumerate(carried)]
    return {name: [getattr(record, field) for record in decoded] for name, field in fields}


_CARRIED = "carried_{}"  # the own name of a carried column


def _decoder(shape: Shape, config: DocumentConfig) -> _Decode:
    """A decoder of records to structs with the shape's own names; of traces, whose parts are not
    all decoded, to dicts from the input's names to JSON.
    """
    if shape.kind == TRACE:
        return _names_decoder
    carried = [(_CARRIED.format(number), name) for number, name in enumerate(config.carried)]
    optional = *shape.optional, *(own for own, _ in carried)
    # values of other fields contain each other, as in messages, so the garbage collector
    # may track them
    gc = shape.kind != "text"
    columns = *shape.columns.items(), *carried
    return _decoder_of((*shape.required,), optional, columns, gc)


@lru_cache  # a class takes longer to make than a small file to read
def _decoder_of(
    required: tuple[str, ...], optional: tuple[str, ...], columns: tuple[tuple[str, str], ...],
    gc: bool,
) -> _Decode:  # fmt: skip
    numbers = list[int] | None
    kinds: dict[str, Any] = {
        "text": str, "input_ids": list[int], "labels": numbers, "attention_mask": numbers,
    }  # fmt: skip
    always = [(own, kinds.get(own, Any)) for own in required]
    perhaps = [(own, kinds.get(own, Any), None) for own in optional]
    try:
        record = msgspec.defstruct("Record", [*always, *perhaps], rename=dict(columns), gc=gc)
    except ValueError as error:
        raise UsageError(
            f"a field among {', '.join(repr(name) for _, name in columns)} cannot be read from "
            "JSON: its name holds a quote, a backslash or a control character",
            "rename the field",
        ) from error
    names = tuple(name for _, name in columns)
    if not any("." in name for name in names):
        return msgspec.json.Decoder(record).decode

    def decode_by_dots(piece: bytes | memoryview) -> Any:
        """A record of columns that may be within objects; no others are decoded."""
        top = {
            name: _value_decoder(raw)
            for name, raw in _names_decoder(piece).items()
            if any(may_hold((name,), column) for column in names)
        }
        there = {column: value_at(top, column) for column in names}
        there = {column: value for column, value in there.items() if value is not ABSENT}
        return msgspec.convert(there, record)

    return decode_by_dots


def _names_in(piece: bytes) -> list[str]:
    with suppress(*_DECODE_ERRORS):
        return list(_names_decoder(piece))
    return list(_names_decoder(_without_constants(piece, ())))


# a string comes first, so that what it holds stays; JSON has no other words that begin so
_CONSTANT = re.compile(rb'("[^"\\]*(?:\\.[^"\\]*)*")|-?Infinity|NaN', re.DOTALL)
_NO_NUMBER = object()


def _without_constants(record: bytes, columns: Collection[str]) -> bytes:
    """The record with 0 for NaN and Infinity, which Python writes and JSON has not; as it is where
    one of these columns holds one.
    """
    if b"NaN" not in record and b"Infinity" not in record:
        return record
    try:
        parsed = json.loads(record, parse_constant=lambda constant: _NO_NUMBER)
        if any(_holds_constant(value_at(parsed, column)) for column in columns):
            return record
    except (ValueError, RecursionError):
        return record
    return _CONSTANT.sub(lambda match: match[1] or b"0".ljust(len(match[0])), record)


def _holds_constant(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_constant, value.values()))
    return any(map(_holds_constant, value)) if isinstance(value, list) else value is _NO_NUMBER


# --- what is wrong with a line or a record, in words for the person who must mend it


_MEND = "mend the {}, or use --on-error skip"
# how gzip, zstd, bzip2, xz and lz4 begin
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ", b"\x04\x22\x4d\x18")


def _mistake(record: bytes, decode: _Decode, what: str) -> tuple[str, str]:
    """The reason for which `decode` refuses a line or record, and a tip."""
    begin, tip = record.strip(), _MEND.format(what)
    if what == "line":
        if record.startswith(_COMPRESSED) or b"\0" in record:
            return "compressed or other data, not JSON in UTF-8", (
                "name a compressed file as FILE.jsonl.gz or the like, and do not compress stdin; "
                "convert text, for example: iconv -f UTF-16 -t UTF-8 FILE > FILE.jsonl"
            )
        if begin[:1] == b"[":
            return "a JSON array, expected one object per line", (
                "if the whole file is one array of records, name it FILE.json or give "
                "--input-format json; otherwise convert it: jq -c '.[]' FILE > FILE.jsonl"
            )
        if begin[:1] == b"{" and begin[-1:] in (b"{", b"[", b","):
            return "an object over several lines, expected one object per line", (
                "convert it: jq -c . FILE > FILE.jsonl; if its records are in a list of it: "
                "jq -c '.NAME[]' FILE > FILE.jsonl"
            )

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a JSON value")

    try:
        fields = json.loads(record.decode(), parse_constant=refuse)
        decode(record)
    except UnicodeDecodeError as error:
        return invalid_utf8(error, record, what)
    except json.JSONDecodeError as error:
        mistake = error.msg.removesuffix(" at").removesuffix(" starting")
        return f"not valid JSON: {mistake} at character {error.pos + 1} of the {what}", tip
    except msgspec.MsgspecError as error:
        if missing := re.fullmatch(r"Object missing required field `(.*)`", str(error)):
            return f"no field '{missing[1]}'; fields found: {named(fields)}", tip
        if not isinstance(error, msgspec.ValidationError):
            return "a string with a lone surrogate, which is not valid Unicode", tip
        return str(error), tip  # such as: Expected `str`, got `int` - at `$.text`
    except ValueError as error:  # NaN, or a number of thousands of digits
        return f"not valid JSON: {error}", tip
    except RecursionError:
        pass
    # Or it failed and now does not: how deep is too deep depends on the calls above.
    return "JSON nested too deeply", tip
