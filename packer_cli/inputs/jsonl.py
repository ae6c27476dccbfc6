"""Read JSON: one object per line, or a file that is one array of records.

    {"text": "..."}             [{"text": "..."},
    {"text": "..."}              {"text": "..."}]

Lines are split at "\\n" only, since strings may hold U+2028. In an array, a kernel finds where each
record ends. A record that is closed but invalid is bad like any other. If its strings or brackets
do not match, nothing shows where the next record begins, so the run ends, even if bad records are
skipped.

A typed msgspec decoder reads only the fields that are used. A block that holds a bad record is read
again record by record. Texts of plain lines never become Python objects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain, pairwise
from typing import Any, NamedTuple, overload

import msgspec
import numpy as np

from packer_cli._kernels.inputs import find_elements, find_texts
from packer_cli.errors import UsageError, named
from packer_cli.inputs import byte_streams
from packer_cli.inputs.byte_streams import (
    BYTE_ORDER_MARK,
    COMPRESSED,
    Lines,
    OpenInput,
    cut,
    invalid_utf8,
    nonblank,
    open_source,
    peeking,
    read_lines,
    too_long,
)
from packer_cli.inputs.formats import BEGINNING_BYTES, FirstRecords, LineReader
from packer_cli.inputs.record_columns import NAMES, ReadColumns
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.shapes import (
    ABSENT,
    MASKS,
    TRACE,
    Shape,
    fits_a_shape,
    may_hold,
    value_at,
)
from packer_cli.records import BadRecord, InputFile, Int64, Slice, Texts, offsets_of

_MOST_SEARCHED = 16 << 20  # bytes of bad records; of stdin they are kept for the run
_MOST_DECODED = 1 << 20  # bytes of a record whose values all become objects
_MOST_ELEMENTS = 1 << 15  # of an array that are found together
_MOST_HELD = 1 << 30  # bytes of an array in which a record must end
_DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_JOINED = "(echo [; cat FILE; echo ]) | jq -c '.[]'"  # by commas
_FIX = "fix the {}, or use --on-error skip"
_Decode = Callable[[bytes | memoryview], Any]
_Fields = dict[str, msgspec.Raw]  # of a record, not decoded yet


class Block(NamedTuple):
    """Records in a part of a file, not decoded yet. Blank lines are left out.

    positions  int64[n], in bytes of the uncompressed file
    pieces     n records, some of them longer than the limit
    bad        records that are not among the n
    """

    positions: Int64
    pieces: Sequence[bytes | memoryview]
    bad: list[BadRecord]


class _ByteRanges(Sequence[memoryview]):
    """Parts begins[i] : ends[i] of some bytes, which are not copied."""

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
    """Reader of `.jsonl` and `.ndjson` files, and of `.json` files that do not hold an array.

    unit  a record fills: a line, or only its part of an array
    """

    holds_tokens = True
    unit, before, tip = "line", 1, _FIX.format("line")

    def blocks(self, file: InputFile, source: OpenInput, part: Slice) -> Iterator[Block]:
        """Return the records that begin in a slice. `source` stands `before` bytes before it."""

        def lines_of(block: Lines) -> Block:
            offset, data = block
            if data is None:
                return Block(np.empty(0, np.int64), [], [too_long(offset)])
            positions, begins, ends = cut(offset, data)
            kept = nonblank(data, begins, ends)
            return Block(positions[kept], _ByteRanges(data, begins[kept], ends[kept]), [])

        return map(lines_of, read_lines(source, part.start, part.stop))

    def split(self, file: InputFile, parts: int) -> list[Slice]:
        """Split a file at any bytes: a line belongs to the slice in which it begins."""
        edges = [file.size * i // parts for i in range(parts + 1)]
        return [Slice(file.index, a, b, b - a) for a, b in pairwise(edges)]

    def is_open(self, piece: bytes) -> bool:
        """Tell whether a bad record does not show where the next one begins."""
        return False

    def first(self, file: InputFile, config: DocumentConfig) -> FirstRecords | None:
        """Return the records that begin in the first `BEGINNING_BYTES`.

        If bad records are skipped, the names are those of the first record that can be packed,
        which is searched for further on if none of these can.
        """

        def fits(fields: _Fields) -> bool:
            is_any = config.on_error == "fail"
            return is_any or fits_a_shape([*fields], config.shape, config.renamed)

        for stop in (BEGINNING_BYTES, None):
            records, longest, fitting = list[_Fields](), 0, None
            part = Slice(file.index, 0, stop, 0)
            for position, size, fields in self._readable(file, part, config):
                if fitting is not None and position >= BEGINNING_BYTES:
                    break
                if fitting is None and fits(fields):
                    fitting = fields
                if not records or position < BEGINNING_BYTES:
                    records.append(fields)
                    longest = max(longest, size)
            if records and (fitting is not None or stop is None):
                names = [*(records[0] if fitting is None else fitting)]
                later = dict.fromkeys(name for record in records for name in record)
                later = {name: None for name in later if name not in names}
                are_long, read = longest > _MOST_DECODED, partial(_columns_of, records)
                return FirstRecords(names, read, [*later], are_long=are_long)
        return None

    def _readable(
        self, file: InputFile, part: Slice, config: DocumentConfig
    ) -> Iterator[tuple[int, int, _Fields]]:
        """Yield position, size and fields of the records that can be read. Raises DataError."""
        may_skip = config.on_error == "skip"
        with open_source(file) as source:
            for positions, pieces, bad in self.blocks(file, source, part):
                for position, piece in zip(positions.tolist(), map(bytes, pieces), strict=True):
                    try:
                        fields = _fields_in(piece)
                    except _DECODE_ERRORS:
                        if may_skip and not self.is_open(piece):
                            continue
                        reason = self._explained(file, piece, piece, position, _any_decoder)
                        raise self.refused(file, reason) from None
                    yield position, len(piece), fields
                    may_skip = True
                if bad and not may_skip:
                    raise self.refused(file, bad[0])
                if len(positions) and positions[-1] > _MOST_SEARCHED:
                    return

    def columns(
        self, file: InputFile, source: OpenInput, part: Slice, shape: Shape, config: DocumentConfig
    ) -> Iterator[ReadColumns]:
        decode = _decoder(shape, config)
        fields = NAMES if shape.kind == "tokens" else tuple(shape.columns)
        values = _own_names(shape, config)

        def columns_of(block: Block) -> ReadColumns:
            if shape.kind == "text" and not config.value_columns:
                plain = _plain_texts(block, shape, config.where_fields)
                if plain is not None:
                    texts, of_conditions = plain
                    return ReadColumns(block.positions, {"text": texts}, of_conditions, block.bad)
            positions, decoded, bad = self._decoded(file, block, decode, shape, config)
            if shape.kind == TRACE:
                return ReadColumns(positions, {}, {}, bad, fields=decoded)
            return ReadColumns(
                positions,
                {field: [getattr(record, field, None) for record in decoded] for field in fields},
                {
                    name: [getattr(r, field, None) for r in decoded]
                    for name, field in values.items()
                },
                bad,
            )

        return map(columns_of, self.blocks(file, source, part))

    def _decoded(
        self, file: InputFile, block: Block, decode: _Decode, shape: Shape, config: DocumentConfig
    ) -> tuple[Int64, list[Any], list[BadRecord]]:
        """Return the positions of the good records, these, and the bad ones."""
        limit = byte_streams.MAX_LINE_BYTES
        if max(map(len, block.pieces), default=0) <= limit:
            with suppress(*_DECODE_ERRORS):
                return block.positions, [decode(piece) for piece in block.pieces], block.bad
        good, decoded, bad = list[int](), [], list(block.bad)
        pieces = zip(block.positions.tolist(), map(bytes, block.pieces), strict=True)
        for position, piece in pieces:
            if len(piece) > limit:
                bad.append(too_long(position, self.unit))
                continue
            record = _without_constants(piece, [*shape.columns.values(), *config.beside])
            try:
                decoded.append(decode(record))
                good.append(position)
            except _DECODE_ERRORS:
                bad.append(self._explained(file, piece, record, position, decode))
        return np.array(good, np.int64), decoded, bad

    def _explained(
        self, file: InputFile, piece: bytes, record: bytes, position: int, decode: _Decode
    ) -> BadRecord:
        """Return what is wrong with a record. Raises DataError if its end is not clear."""
        bad = BadRecord(position, *_mistake(record, decode, self.unit))
        if self.is_open(piece):
            tip = "fix it: nothing shows where the next record begins, so it cannot be skipped"
            raise self.refused(file, replace(bad, tip=tip))
        return bad


# --- arrays


def holds_array(file: InputFile) -> bool:
    """Tell whether the first byte of a file that is not blank opens an array. Raises DataError."""
    beginning = b""
    with peeking(), open_source(file) as source:
        while not beginning and (data := source.read(byte_streams.OVERRUN_BYTES)):
            beginning = data.removeprefix(BYTE_ORDER_MARK).lstrip()
    return beginning[:1] == b"["


class JsonArrayReader(JsonlReader):
    """Reader of `.json` files that begin with "[": a file is one slice."""

    unit, before, tip = "record", 0, _FIX.format("record")

    def blocks(self, file: InputFile, source: OpenInput, part: Slice) -> Iterator[Block]:
        """Yield the records of the array, holding one block and the record that continues."""
        room = np.empty((_MOST_ELEMENTS, 2), np.int64)
        data, offset, is_open, is_first = b"", 0, False, True
        while len(data) < _MOST_HELD:
            # as many bytes again as are held, so that a long record is searched only a few times
            more = source.read(max(byte_streams.BLOCK_BYTES, len(data)))
            if not more:
                break
            data, at = data + more, 0
            if not is_open:
                at = data.find(b"[") + 1
                is_open = at > 0
            while is_open and (count := find_elements(np.frombuffer(data, np.uint8), at, room)):
                places, at = room[:count], int(room[count - 1, 1]) + 1
                has_ended = data[at - 1 : at] != b","
                if has_ended and is_first and count == 1 and places[0, 0] < 0:
                    places = room[:0]  # an array without records
                yield _elements(data, offset, places)
                if has_ended:
                    self._refuse_more(file, source, data[at - 1 :], offset + at - 1)
                    return
                is_first = False
            data, offset = data[at:], offset + at
        begin, end = offset + len(data) - len(data.lstrip()), offset + len(data)
        reason = "the file ends before its array does, expected a record or ]"
        if begin < end:
            where = f"where the file ends, byte {end}"
            if len(data) >= _MOST_HELD:
                where = f"within {_MOST_HELD:,} bytes"
            reason = f"the record that begins here, or the array, is not closed {where}"
        tip = "fetch or write the file again: it was cut short, or a quote or bracket is missing"
        raise self.refused(file, BadRecord(begin, reason, tip))

    def _refuse_more(self, file: InputFile, source: OpenInput, after: bytes, at: int) -> None:
        """Raise DataError if anything but blanks follows the array.

        The array closes with the first byte of `after`, byte `at` of the file, unless that is a
        brace.
        """
        blanks = after.removeprefix(b"]")
        at += len(after) - len(blanks)
        while blanks or (blanks := source.read(byte_streams.BLOCK_BYTES)):
            if more := blanks.lstrip():
                at += len(blanks) - len(more)
                reason = (
                    "more after the end of the array, expected one array of records in the file"
                )
                tip = "make one of several: jq -c '.[]' FILE > FILE.jsonl, and pack that"
                raise self.refused(file, BadRecord(at, reason, tip))
            at, blanks = at + len(blanks), b""

    def split(self, file: InputFile, parts: int) -> list[Slice]:
        return []

    def is_open(self, piece: bytes) -> bool:
        """Tell whether a string or a bracket does not end within the record."""
        try:
            json.loads(piece.decode(errors="replace"), strict=False)
        except json.JSONDecodeError:
            return True
        except (ValueError, RecursionError):  # a number of thousands of digits
            return False
        return False


def _elements(data: bytes, offset: int, places: Int64) -> Block:
    """Return the elements at these places of `data`, which begins at byte `offset` of the file."""
    there = places[:, 0] >= 0
    begins, ends = np.ascontiguousarray(places[there].T)
    bad = list[BadRecord]()
    for end in places[~there, 1].tolist():
        comma = data[end : end + 1] == b","
        before = "this comma" if comma else "the end of the array, after a comma"
        tip = "remove the comma, or use --on-error skip"
        bad.append(BadRecord(offset + end, f"no record before {before}", tip))
    return Block(begins + offset, _ByteRanges(data, begins, ends), bad)


# --- decoders


def _plain_texts(
    block: Block, shape: Shape, fields: Sequence[str] = ()
) -> tuple[Texts, dict[str, list[Any]]] | None:
    """Return the texts of lines, without a Python object for any, and the values of more `fields`,
    None for a record without one; None if a line is unusual.
    """
    pieces, name = block.pieces, shape.columns["text"]
    # a field may be called so, or lie in an object that is
    outer = [[field[:at] for at, end in enumerate(f"{field}.") if end == "."] for field in fields]
    names = [name, *dict.fromkeys(chain.from_iterable(outer))]
    keys = [msgspec.json.encode(one) for one in names]
    if not isinstance(pieces, _ByteRanges) or "." in name or any(b"\\" in key for key in keys):
        return None
    sizes = pieces.ends - pieces.begins
    if name in names[1:] or sizes.max(initial=0) > byte_streams.MAX_LINE_BYTES:
        return None
    out, offsets = np.empty(int(sizes.sum()), np.uint8), np.zeros(len(pieces) + 1, np.int64)
    places = np.empty((len(names) - 1, len(pieces), 2), np.int64)
    data, joined = np.frombuffer(pieces.data, np.uint8), np.frombuffer(b"".join(keys), np.uint8)
    found = find_texts(
        data, pieces.begins, pieces.ends, joined, offsets_of([*map(len, keys)]), out, offsets,
        places,
    )  # fmt: skip
    if found < len(pieces):
        return None
    try:
        decoded = [_decoded_at(pieces.data, of_name) for of_name in places]
    except _DECODE_ERRORS:
        return None
    there = dict(zip(names[1:], decoded, strict=True))
    values = {tops[-1]: _of_field(tops, there) for tops in outer}
    return Texts(out[: offsets[-1]], offsets), values


def _decoded_at(data: memoryview, places: Int64) -> list[Any]:
    """Return the JSON values at int64[n, 2]; ABSENT where a place begins below 0."""
    there = [data[begin:end] for begin, end in places.tolist() if begin >= 0]
    decoded = iter(_value_decoder(b"[" + b",".join(there) + b"]"))
    return [next(decoded) if begin >= 0 else ABSENT for begin in places[:, 0].tolist()]


def _of_field(tops: list[str], there: dict[str, list[Any]]) -> list[Any]:
    """Return the values of the last of some fields of n records, which lies in those before it."""
    values = there[tops[-1]]
    if len(tops) > 1:
        rows = [zip(tops, row, strict=True) for row in zip(*map(there.get, tops), strict=True)]
        records = ({name: value for name, value in row if value is not ABSENT} for row in rows)
        values = [value_at(record, tops[-1]) for record in records]
    return [None if value is ABSENT else value for value in values]


_any_decoder: Callable[[bytes | memoryview], dict[str, Any]]
_any_decoder = msgspec.json.Decoder(dict[str, Any]).decode
# a document of nested values is ten times its size once they are objects
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_value_decoder = msgspec.json.Decoder().decode


_VALUES = "values_{}"  # the own name of a column of values, or of a field of a condition


def _own_names(shape: Shape, config: DocumentConfig) -> dict[str, str]:
    """Return the own name of each field that is read beside what becomes tokens, by its name."""
    of_shape = {name: own for own, name in shape.columns.items()}
    return {name: of_shape.get(name, _VALUES.format(number))
            for number, name in enumerate(config.beside)}  # fmt: skip


def _decoder(shape: Shape, config: DocumentConfig) -> _Decode:
    """Return a decoder to structs with the shape's own names; for traces, to dicts of JSON."""
    if shape.kind == TRACE:
        return _fields_decoder
    values = [(own, name) for name, own in _own_names(shape, config).items()
              if own not in shape.columns]  # fmt: skip
    optional = *shape.optional, *(own for own, _ in values)
    # values of other fields contain each other, as in messages, so the garbage collector
    # may track them
    gc = shape.kind != "text"
    columns = *shape.columns.items(), *values
    return _decoder_of((*shape.required,), optional, columns, gc)


@lru_cache  # a class takes longer to make than a small file to read
def _decoder_of(
    required: tuple[str, ...], optional: tuple[str, ...], columns: tuple[tuple[str, str], ...],
    gc: bool,
) -> _Decode:  # fmt: skip
    numbers = list[int] | None
    kinds: dict[str, Any] = {
        "text": str, "input_ids": list[int], "labels": numbers, "attention_mask": numbers,
        **dict.fromkeys(MASKS, list[bool | float] | None),
    }  # fmt: skip
    always = [(field, kinds.get(field, Any)) for field in required]
    perhaps = [(field, kinds.get(field, Any), None) for field in optional]
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
        """Decode the columns of a record, which may lie within objects."""
        top = {
            name: _value_decoder(raw)
            for name, raw in _fields_decoder(piece).items()
            if any(may_hold((name,), column) for column in names)
        }
        there = {column: value_at(top, column) for column in names}
        there = {column: value for column, value in there.items() if value is not ABSENT}
        return msgspec.convert(there, record)

    return decode_by_dots


def _fields_in(piece: bytes) -> _Fields:
    """Return the fields of a record, not decoded yet, with 0 for NaN and Infinity."""
    with suppress(*_DECODE_ERRORS):
        return _fields_decoder(piece)
    return _fields_decoder(_without_constants(piece, ()))


def _columns_of(records: Sequence[_Fields], columns: list[str]) -> dict[str, list[Any]]:
    """Return the values of some columns, None for each record without a readable one."""

    def value_of(record: _Fields, column: str) -> Any:
        with suppress(*_DECODE_ERRORS):
            outer = {
                name: _value_decoder(value)
                for name, value in record.items()
                if may_hold((name,), column)
            }
            value = value_at(outer, column)
            return None if value is ABSENT else value
        return None

    return {column: [value_of(record, column) for record in records] for column in columns}


# a string comes first, so that what it holds stays; JSON has no other words that begin so
_CONSTANT = re.compile(rb'("[^"\\]*(?:\\.[^"\\]*)*")|-?Infinity|NaN', re.DOTALL)
_NO_NUMBER = object()


def _without_constants(record: bytes, columns: Collection[str]) -> bytes:
    """Replace NaN and Infinity by 0, unless one of these columns holds one."""
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


# --- what is wrong with a record


def _not_a_line(record: bytes) -> tuple[str, str] | None:
    """Return why a line is not JSON lines at all, and a tip; None for other mistakes."""
    begin = record.strip()
    if COMPRESSED.match(record) or b"\0" in record:
        return "compressed or other data, not JSON in UTF-8", (
            "name a compressed file as FILE.jsonl.gz or the like, and do not compress stdin; "
            "convert text, for example: iconv -f UTF-16 -t UTF-8 FILE > FILE.jsonl"
        )
    if begin.startswith(b"["):
        return "a JSON array, expected one object per line", (
            "if the whole file is one array of records, name it FILE.json or give "
            "--input-format json; otherwise convert it: jq -c '.[]' FILE > FILE.jsonl"
        )
    if not begin.startswith(b"{"):
        return None
    with suppress(ValueError, RecursionError):
        text = begin.decode()
        after = text[json.JSONDecoder().raw_decode(text)[1] :].lstrip()
        if after == ",":
            return "a comma after the object, expected one object per line", (
                "convert it: sed 's/,[[:space:]]*$//' FILE > FILE.jsonl"
            )
        if after.startswith((",", "{")):
            convert = "jq -c . FILE" if after[0] == "{" else _JOINED
            problem = "several objects on one line, expected one object per line"
            return problem, f"convert it: {convert} > FILE.jsonl"
    if begin.endswith((b"{", b"[", b",")):
        return "an object over several lines, expected one object per line", (
            "convert it: jq -c . FILE > FILE.jsonl; if its records are in a list of it: "
            "jq -c '.NAME[]' FILE > FILE.jsonl"
        )
    return None


def _mistake(record: bytes, decode: _Decode, unit: str) -> tuple[str, str]:
    """Return why `decode` refuses a line or record, and a tip."""
    if unit == "line" and (mistake := _not_a_line(record)):
        return mistake
    tip = _FIX.format(unit)

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a JSON value")

    try:
        fields = json.loads(record.decode(), parse_constant=refuse)
        decode(record)
    except UnicodeDecodeError as error:
        return invalid_utf8(error, record, unit)
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" at").removesuffix(" starting")
        return f"not valid JSON: {reason} at character {error.pos + 1} of the {unit}", tip
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
