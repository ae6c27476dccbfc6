"""Records of JSON: what the readers of lines and of arrays share, once they have found each record.

Records are decoded by a typed msgspec decoder, which reads nothing but the fields wanted; only
when a block holds a blank or bad record is it read one by one to find the place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np

from packer_cli.config.documents import DocumentConfig
from packer_cli.config.field_tips import options_for, written
from packer_cli.config.shapes import ABSENT, Shape, fits_a_shape, may_hold, value_at
from packer_cli.errors import DataError, UsageError
from packer_cli.inputs.byte_streams import Source, open_source
from packer_cli.inputs.json_mistakes import (
    DECODE_ERRORS,
    explain,
    mend,
    without_constants,
    without_idle_constants,
)
from packer_cli.inputs.line_positions import LinePositions
from packer_cli.inputs.lines import too_long
from packer_cli.inputs.looked_at import Sample
from packer_cli.inputs.token_columns import BEYOND, check_tokens
from packer_cli.records import BadRecord, InputFile, Int64, Records, Slice

_MOST_SEARCHED = 16 << 20  # bytes of bad records; of stdin they are kept for the run
_Decode = Callable[[bytes | memoryview], Any]
_LOOKED_AT = 1 << 10  # of a value, to see what it is
_MOST_DECODED = 1 << 20  # bytes of a list, to see whether it is of messages
_MOST_LOOKED_AT = 1 << 20  # bytes of a record, of which all fields become objects


class Found(NamedTuple):
    """Records that are found, not decoded yet. Those that are blank do not count.

    positions  int64[n]
    pieces     n stretches of bytes, each of one record
    bad        those that are not among the n
    """

    positions: Int64
    pieces: Sequence[bytes | memoryview]
    bad: list[BadRecord]


class JsonReader(LinePositions):
    """`found` finds the records of a slice, in blocks; `what` is what a record fills."""

    holds_tokens = True
    what: str

    def found(
        self, file: InputFile, source: Source, part: Slice, config: DocumentConfig
    ) -> Iterator[Found]:
        """The records that begin in the slice; `source` stands at `begins_at` of its start."""
        raise NotImplementedError

    def begins_at(self, start: int) -> int:
        """Where reading must begin for the slice that begins at `start`."""
        raise NotImplementedError

    def goes_on_after(self, piece: bytes) -> bool:
        """Whether the records after a bad one are found."""
        return True

    def refuse(self, file: InputFile, piece: bytes, bad: BadRecord) -> None:
        """Raises DataError where they are not."""

    def fields(self, file: InputFile, config: DocumentConfig) -> list[str] | None:
        """The field names of the first record, or None when there is none.

        Where bad records are skipped: of the first record that can be packed, if any can, and
        there is one in the file's beginning.
        """
        skip, first = config.on_error == "skip", None
        whole = Slice(file.index, 0, None, 0)
        with open_source(file, peek=True) as source:
            for positions, stretches, bad in self.found(file, source, whole, config):
                pieces = list(map(bytes, stretches))
                if bad and not skip and not any(piece.strip() for piece in pieces):
                    raise self.refused(file, bad[0])
                for position, piece in zip(positions.tolist(), pieces, strict=True):
                    if not piece.strip():
                        continue
                    try:
                        values = _names_in(piece)
                    except DECODE_ERRORS:
                        if skip and self.goes_on_after(piece):
                            continue
                        bad_one = explain(piece, position, _any_decoder, self.what)
                        self.refuse(file, piece, bad_one)
                        raise self.refused(file, bad_one) from None
                    names = list(values)
                    fits = fits_a_shape(names, config.shape, config.renamed)
                    is_record = fits or fits_a_shape(names, None, {})
                    if not is_record and sum(map(bool, map(bytes.strip, pieces))) == 1:
                        self.refuse_object_of_records(file, position, values)
                    if not skip or fits:
                        return names
                    first = first or names
                reached = int(positions[-1]) if len(positions) else 0
                if first is not None or (skip and reached > _MOST_SEARCHED):
                    return first
        return None

    def refused(self, file: InputFile, bad: BadRecord) -> DataError:
        """The error that ends a run at a bad record."""
        place = self.describe(file, bad.position)
        return DataError(f"{file.path}, {place}: {bad.reason}", bad.tip)

    def refuse_object_of_records(
        self, file: InputFile, position: int, values: dict[str, msgspec.Raw]
    ) -> None:
        """Raises DataError for the only record of a file, where that holds others in a list."""
        for name, value in values.items() if self.what == "line" else ():
            beginning = bytes(memoryview(value)[:_LOOKED_AT])
            if beginning[:1] == b"[" and beginning[1:].lstrip()[:1] == b"{":
                what = f"one object, with a list of objects in '{name}'"
                options = {"--field": {"messages": name}}
                if len(value) <= _MOST_DECODED:
                    with suppress(*DECODE_ERRORS):
                        options = options_for({name: _value_decoder(value)}, "messages") or options
                bad = BadRecord(
                    position,
                    f"{what}; expected a record on each line, or an array of records",
                    f"if these are the records: jq -c '.[\"{name}\"][]' FILE > FILE.jsonl; if it "
                    f"is one conversation: {written(options)}",
                )
                raise self.refused(file, bad)

    def read(
        self,
        file: InputFile,
        part: Slice,
        shape: Shape,
        config: DocumentConfig,
        *,
        peek: bool = False,
    ) -> Iterator[Records]:
        decode, sample = _decoder(shape), Sample(shape, config)

        def records_of(found: Found) -> Records:
            return replace(
                decoded_of(found), looked_at=sample.of(len(found.pieces), partial(_all_of, found))
            )

        def decoded_of(found: Found) -> Records:
            positions, decoded, bad = self._decoded(
                file, found, decode, shape, config.max_line_bytes
            )
            consumed = source.consumed()
            if shape.kind == "text":
                texts = [record.text for record in decoded]
                return Records(positions, texts=texts, bad=bad, consumed=consumed)
            if shape.kind == "tokens":
                return _token_records(positions, decoded, bad, consumed, mend(self.what))
            fields = [msgspec.structs.asdict(record) for record in decoded]
            return Records(positions, fields=fields, bad=bad, consumed=consumed)

        with open_source(file, self.begins_at(part.start), peek=peek) as source:
            # holds no bytes and no records while they are worked on, which a loop would
            yield from map(records_of, self.found(file, source, part, config))
            yield source.end()

    def _decoded(
        self, file: InputFile, found: Found, decode: _Decode, shape: Shape, limit: int
    ) -> tuple[Int64, list[Any], list[BadRecord]]:
        positions, pieces, refused = found
        if max(map(len, pieces), default=0) <= limit:
            try:
                return positions, [decode(piece) for piece in pieces], refused
            except DECODE_ERRORS:
                pass
        good: list[int] = []
        decoded, bad = [], list(refused)
        for position, piece in zip(positions.tolist(), map(bytes, pieces), strict=True):
            if not piece.strip():
                continue
            if len(piece) > limit:
                bad.append(too_long(position, limit, self.what))
                continue
            record = without_idle_constants(piece, shape.columns.values())
            try:
                decoded.append(decode(record))
                good.append(position)
            except DECODE_ERRORS:
                bad.append(explain(record, position, decode, self.what))
                self.refuse(file, piece, bad[-1])
        bad.sort(key=lambda record: record.position)
        return np.array(good, np.int64), decoded, bad


def _decoder(shape: Shape) -> _Decode:
    """Of records as structs that have the shape's own names."""
    # values of other fields contain each other, as in messages, so the garbage collector
    # may track them
    gc = shape.kind != "text"
    return _decoder_of((*shape.required,), (*shape.optional,), (*shape.columns.items(),), gc)


@lru_cache  # a class takes longer to make than a small file to read
def _decoder_of(
    required: tuple[str, ...],
    optional: tuple[str, ...],
    columns: tuple[tuple[str, str], ...],
    gc: bool,
) -> _Decode:
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
    if any("." in name for name in names):
        return partial(_decode_by_dots, record, names)
    return msgspec.json.Decoder(record).decode


def _decode_by_dots(record: Any, columns: tuple[str, ...], piece: bytes | memoryview) -> Any:
    """A struct `record` of columns that may be within objects; no others are decoded."""
    top = {
        name: _value_decoder(raw)
        for name, raw in _names_decoder(piece).items()
        if any(may_hold((name,), column) for column in columns)
    }
    found = {column: value_at(top, column) for column in columns}
    there = {column: value for column, value in found.items() if value is not ABSENT}
    return msgspec.convert(there, record)


def _all_of(found: Found, index: int) -> dict[str, Any] | None:
    """All fields of a record; None of one that is bad, or large once it is objects."""
    if len(found.pieces[index]) > _MOST_LOOKED_AT:
        return None
    try:
        return _any_decoder(found.pieces[index])
    except DECODE_ERRORS:
        return None


_any_decoder: Callable[[bytes | memoryview], dict[str, Any]]
_any_decoder = msgspec.json.Decoder(dict[str, Any]).decode
# a document of nested values is ten times its size once they are objects
_names_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_value_decoder = msgspec.json.Decoder().decode


def _names_in(piece: bytes) -> dict[str, msgspec.Raw]:
    try:
        return _names_decoder(piece)
    except DECODE_ERRORS:
        return _names_decoder(without_constants(piece))


def _token_records(
    positions: Int64, decoded: list[Any], bad: list[BadRecord], consumed: int, tip: str
) -> Records:
    bad = list(bad)
    reasons = {i: reason for i, record in enumerate(decoded) if (reason := _uneven(record))}
    records = [record for i, record in enumerate(decoded) if i not in reasons]
    bad.extend(BadRecord(int(positions[i]), reason, tip) for i, reason in reasons.items())
    positions = np.delete(positions, list(reasons))
    offsets = np.zeros(len(records) + 1, np.int64)
    np.cumsum([len(record.input_ids) for record in records], out=offsets[1:])
    ids = _flat((record.input_ids for record in records), int(offsets[-1]))
    labels = mask = None
    if any(record.labels is not None for record in records):
        labels = _flat((r.input_ids if r.labels is None else r.labels for r in records), len(ids))
    if any(record.attention_mask is not None for record in records):
        masks = (
            [1] * len(r.input_ids) if r.attention_mask is None else r.attention_mask
            for r in records
        )
        mask = _flat(masks, len(ids))
    tokens, wrong = check_tokens(ids, offsets, labels, mask)
    bad.extend(BadRecord(int(positions[i]), reason, tip) for i, reason in wrong.items())
    bad.sort(key=lambda record: record.position)
    return Records(np.delete(positions, list(wrong)), tokens=tokens, bad=bad, consumed=consumed)


def _flat(rows: Iterable[list[int]], count: int) -> Int64:
    values = list(chain.from_iterable(rows))
    try:
        return np.fromiter(values, np.int64, count=count)
    except OverflowError:
        return np.fromiter((min(max(value, -BEYOND), BEYOND) for value in values), np.int64)


def _uneven(record: Any) -> str:
    for name in ("labels", "attention_mask"):
        values = getattr(record, name)
        if values is not None and len(values) != len(record.input_ids):
            return f"{name} has {len(values)} values, input_ids {len(record.input_ids)}"
    return ""
