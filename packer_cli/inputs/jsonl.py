"""JSON lines: one object per line, split at "\\n" only (U+2028 lives inside strings).

Lines are decoded by a typed msgspec decoder, which reads nothing but the fields wanted; only
when a block holds a blank or bad line is it read line by line to find the place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from packer_cli.config.documents import DocumentConfig
from packer_cli.config.shapes import Shape, fits_a_shape
from packer_cli.errors import DataError, UsageError
from packer_cli.inputs.byte_streams import Lines, open_source, read_lines, too_long
from packer_cli.inputs.json_mistakes import DECODE_ERRORS, MEND, explain
from packer_cli.inputs.line_positions import LinePositions
from packer_cli.inputs.token_columns import BEYOND, check_tokens
from packer_cli.records import BadRecord, InputFile, Int64, Records, Slice

_MOST_SEARCHED = 16 << 20  # bytes of bad records; of stdin they are kept for the run


class JsonlReader(LinePositions):
    """`.jsonl`, `.ndjson` and `.json` files."""

    holds_tokens = True

    def fields(self, file: InputFile, config: DocumentConfig) -> list[str] | None:
        """The field names of the first record, or None when there is none.

        Where bad records are skipped: of the first record that can be packed, if any can, and
        there is one in the file's beginning.
        """
        skip, first = config.on_error == "skip", None
        with open_source(file, peek=True) as source:
            for block in read_lines(source, 0, None, config.max_line_bytes):
                if block.data is None and not skip:
                    raise self._refused(file, too_long(block.offset, config.max_line_bytes))
                for start, line in _lines(block):
                    try:
                        names = list(_names_decoder(line))
                    except DECODE_ERRORS:
                        if skip:
                            continue
                        raise self._refused(file, explain(line, start, _any_decoder)) from None
                    if not skip or fits_a_shape(names, config.shape, config.renamed):
                        return names
                    first = first or names
                if first is not None or (skip and block.offset > _MOST_SEARCHED):
                    return first
        return None

    def _refused(self, file: InputFile, bad: BadRecord) -> DataError:
        place = self.describe(file, bad.position)
        return DataError(f"{file.path}, {place}: {bad.reason}", bad.tip)

    def read(
        self,
        file: InputFile,
        part: Slice,
        shape: Shape,
        config: DocumentConfig,
        *,
        peek: bool = False,
    ) -> Iterator[Records]:
        decode, limit = _decoder(shape), config.max_line_bytes

        def records_of(block: Lines) -> Records:
            positions, decoded, bad = _decode_block(block, decode, limit)
            consumed = source.consumed()
            if shape.kind == "text":
                texts = [record.text for record in decoded]
                return Records(positions, texts=texts, bad=bad, consumed=consumed)
            if shape.kind == "tokens":
                return _token_records(positions, decoded, bad, consumed)
            fields = [msgspec.structs.asdict(record) for record in decoded]
            return Records(positions, fields=fields, bad=bad, consumed=consumed)

        with open_source(file, max(part.start - 1, 0), peek=peek) as source:
            # holds no lines and no records while they are worked on, which a loop would
            yield from map(records_of, read_lines(source, part.start, part.stop, limit))
            yield source.end()


def _decoder(shape: Shape) -> Callable[[bytes | memoryview], Any]:
    """Of records as structs that have the shape's own names."""
    numbers = list[int] | None
    kinds: dict[str, Any] = {
        "text": str, "input_ids": list[int], "labels": numbers, "attention_mask": numbers,
    }  # fmt: skip
    required = [(own, kinds.get(own, Any)) for own in shape.required]
    optional = [(own, kinds.get(own, Any), None) for own in shape.optional]
    # values of other fields contain each other, as in messages, so the garbage collector
    # may track them
    gc = shape.kind != "text"
    try:
        record = msgspec.defstruct("Record", [*required, *optional], rename=shape.columns, gc=gc)
    except ValueError as error:
        raise UsageError(
            f"a field among {', '.join(map(repr, shape.columns.values()))} cannot be read from "
            "JSON: its name holds a quote, a backslash or a control character",
            "rename the field",
        ) from error
    return msgspec.json.Decoder(record).decode


_any_decoder = msgspec.json.Decoder(dict[str, Any]).decode
# a document of nested values is ten times its size once they are objects
_names_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def _lines(block: Lines) -> Iterator[tuple[int, bytes]]:
    """(position, line) of the lines that are not blank."""
    position = block.offset
    for line in (block.data or b"").split(b"\n"):
        if line.strip():
            yield position, line
        position += len(line) + 1


def _decode_lines(
    data: bytes, decode: Callable[[bytes | memoryview], Any], max_line_bytes: int
) -> tuple[list[int], list[Any]] | None:
    """(where each line begins, records) of `data`; None where a line is no record.

    Lines are decoded where they are: with copies of lines of 8 kB it takes a quarter to a half
    longer, and all of it while no other thread can go on.
    """
    view, begins, records = memoryview(data), list[int](), list[Any]()
    begin = 0
    while begin < len(data):
        end = data.find(b"\n", begin)
        end = len(data) if end < 0 else end
        if end - begin > max_line_bytes:
            return None
        try:
            records.append(decode(view[begin:end]))
        except DECODE_ERRORS:
            return None
        begins.append(begin)
        begin = end + 1
    return begins, records


def _decode_block(
    block: Lines, decode: Callable[[bytes | memoryview], Any], max_line_bytes: int
) -> tuple[Int64, list[Any], list[BadRecord]]:
    if block.data is None:
        return np.empty(0, np.int64), [], [too_long(block.offset, max_line_bytes)]
    whole = _decode_lines(block.data, decode, max_line_bytes)
    if whole is not None:
        return np.array(whole[0], np.int64) + block.offset, whole[1], []
    good: list[int] = []
    decoded: list[Any] = []
    bad: list[BadRecord] = []
    for position, line in _lines(block):
        if len(line) > max_line_bytes:
            bad.append(too_long(position, max_line_bytes))
            continue
        try:
            decoded.append(decode(line))
            good.append(position)
        except DECODE_ERRORS:
            bad.append(explain(line, position, decode))
    return np.array(good, np.int64), decoded, bad


def _token_records(
    positions: Int64, decoded: list[Any], bad: list[BadRecord], consumed: int
) -> Records:
    bad = list(bad)
    reasons = {i: reason for i, record in enumerate(decoded) if (reason := _uneven(record))}
    records = [record for i, record in enumerate(decoded) if i not in reasons]
    bad.extend(BadRecord(int(positions[i]), reason, MEND) for i, reason in reasons.items())
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
    bad.extend(BadRecord(int(positions[i]), reason, MEND) for i, reason in wrong.items())
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
