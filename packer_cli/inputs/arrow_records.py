"""Columns of Arrow: which ones are read, and how a record batch becomes records."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from packer_cli.config.shapes import Shape
from packer_cli.errors import DataError, named
from packer_cli.inputs.token_columns import Tokens, check_tokens, clipped, faultless
from packer_cli.records import BadRecord, InputFile, Int64, Records

_SKIP = "mend the row, or use --on-error skip"


def columns_to_read(file: InputFile, schema: Any, shape: Shape) -> list[str]:
    """The columns to read, checked for presence and type."""
    is_text, is_tokens = shape.kind == "text", shape.kind == "tokens"
    wanted = [shape.columns[own] for own in shape.required]
    columns = (shape.columns[own] for own in shape.optional)
    wanted += [name for name in columns if fields_at(schema, name)]
    for name in wanted:
        fields = fields_at(schema, name)
        count = len(fields)
        if count != 1:
            raise DataError(
                f"{file.path}: {count or 'no'} column{'s' * (count > 1)} '{name}'; "
                f"columns found: {named(schema.names)}",
                "write the file again"
                if is_tokens
                else "name the right one with --text-field, or with --field NAME=COLUMN",
            )
        kind = fields[0][-1].type
        if (is_text and not is_text_type(kind)) or (is_tokens and not is_integer_list(kind)):
            raise DataError(
                f"{file.path}: column '{name}' has type {kind}, expected "
                f"{'a string' if is_text else 'a list of integers'}",
                "name the right column with --text-field"
                if is_text
                else "cast it, for example with pyarrow or datasets",
            )
    return wanted


def fields_at(fields: Iterable[Any], column: str) -> list[tuple[Any, ...]]:
    """The ways to a column, each as Arrow's fields from the outermost one on: those whose very name
    it is, or else those that its dots lead to in structs.
    """
    fields = list(fields)
    if own := [(one,) for one in fields if one.name == column]:
        return own
    within = [one for one in fields if column.startswith(f"{one.name}.")]
    return [
        (outer, *way)
        for outer in within
        if pa.types.is_struct(outer.type)
        for way in fields_at(outer.type, column[len(outer.name) + 1 :])
    ]


def by_columns(batch: Any, columns: list[str]) -> Any:
    """A batch of these columns, wherever they are in the structs of another."""
    if all(column in batch.schema.names for column in columns):
        return batch.select(columns)
    arrays = []
    for column in columns:
        outer, *way = (one.name for one in fields_at(batch.schema, column)[0])
        array = batch.column(outer)
        arrays.append(pc.struct_field(array, way) if way else array)
    return pa.RecordBatch.from_arrays(arrays, names=columns)


def is_text_type(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    is_view = getattr(pa.types, "is_string_view", lambda kind: False)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or is_view(kind))


def is_integer_list(kind: Any) -> bool:
    is_list = (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )
    return bool(is_list and pa.types.is_integer(kind.value_type))


def texts_of(column: Any, first_row: int, consumed: int) -> Records:
    positions = np.arange(first_row, first_row + len(column), dtype=np.int64)
    bad: dict[int, str] = {}
    try:
        texts: list[str | None] = column.to_pylist()
    except UnicodeDecodeError:
        texts = []
        for i, scalar in enumerate(column):
            try:
                texts.append(scalar.as_py())
            except UnicodeDecodeError as error:
                texts.append(None)
                bad[i] = f"invalid UTF-8 at byte {error.start} of the text"
    good = [text for text in texts if text is not None]
    if len(good) < len(texts):
        for i, text in enumerate(texts):
            if text is None:
                bad.setdefault(i, "the text is null")
        positions = np.delete(positions, list(bad))
    return Records(positions, texts=good, bad=_bad_rows(bad, first_row), consumed=consumed)


def fields_of(batch: Any, shape: Shape, first_row: int, consumed: int) -> Records:
    positions = np.arange(first_row, first_row + batch.num_rows, dtype=np.int64)
    columns = {
        own: batch.column(name) for own, name in shape.columns.items() if name in batch.schema.names
    }
    bad: dict[int, str] = {}
    try:
        values = {own: column.to_pylist() for own, column in columns.items()}
    except UnicodeDecodeError:
        values = {own: [None] * batch.num_rows for own in columns}
        for i in range(batch.num_rows):
            try:
                for own, column in columns.items():
                    values[own][i] = column[i].as_py()
            except UnicodeDecodeError as error:
                bad[i] = f"invalid UTF-8 at byte {error.start} of a text"
    records = [
        {own: _without_nulls(values[own][i]) for own in values}
        for i in range(batch.num_rows)
        if i not in bad
    ]
    positions = np.delete(positions, list(bad))
    return Records(positions, fields=records, bad=_bad_rows(bad, first_row), consumed=consumed)


def _without_nulls(value: Any) -> Any:
    """Without the nulls: Arrow gives every struct all the fields that any in its column has."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def tokens_of(batch: Any, first_row: int, consumed: int) -> Records:
    """Rows of lists of token ids, and of labels and masks if there are any."""
    tokens = _faultless_tokens(batch)
    if tokens is None:
        return _tokens_looked_at(batch, first_row, consumed)
    positions = np.arange(first_row, first_row + batch.num_rows, dtype=np.int64)
    return Records(positions, tokens=tokens, consumed=consumed)


def _faultless_tokens(batch: Any) -> Tokens | None:
    """The tokens, straight from Arrow's buffers; None where a row must be looked at by itself."""
    columns = {name: batch.column(name) for name in batch.schema.names}
    if any(column.null_count for column in columns.values()):
        return None
    flat = {name: column.flatten() for name, column in columns.items()}
    if any(values.null_count for values in flat.values()):
        return None
    offsets = _offsets(columns["input_ids"])
    if any(not np.array_equal(_offsets(column), offsets) for column in columns.values()):
        return None
    values = {name: one.to_numpy(zero_copy_only=True) for name, one in flat.items()}
    return faultless(
        values["input_ids"], offsets, values.get("labels"), values.get("attention_mask")
    )


def _offsets(column: Any) -> Int64:
    """int64[n + 1], where each list begins in the column's own values; it has no nulls."""
    if pa.types.is_fixed_size_list(column.type):
        return np.arange(len(column) + 1, dtype=np.int64) * int(column.type.list_size)
    offsets: Int64 = column.offsets.to_numpy().astype(np.int64)
    offsets -= offsets[0]
    return offsets


def _tokens_looked_at(batch: Any, first_row: int, consumed: int) -> Records:
    bad: dict[int, str] = {}
    columns: dict[str, Any] = {name: batch.column(name) for name in batch.schema.names}
    ids = columns["input_ids"]
    if ids.null_count:  # a null in labels or attention_mask counts as a missing field
        nulls = np.flatnonzero(ids.is_null().to_numpy(zero_copy_only=False))
        bad.update({int(i): "input_ids is null" for i in nulls})
    for name, column in columns.items():
        uneven = pc.not_equal(pc.list_value_length(column), pc.list_value_length(ids))
        for i in np.flatnonzero(uneven.fill_null(False).to_numpy(zero_copy_only=False)).tolist():
            bad.setdefault(i, f"{name} has {len(column[i])} values, input_ids {len(ids[i])}")
        if pc.list_flatten(column).null_count:
            for i, row in enumerate(column):
                if row.is_valid and row.values.null_count:
                    bad.setdefault(i, f"{name} holds a null")
    keep = np.delete(np.arange(batch.num_rows), list(bad))
    arrays = {name: column.take(pa.array(keep)) for name, column in columns.items()}
    offsets = np.zeros(len(keep) + 1, np.int64)
    np.cumsum(
        pc.list_value_length(arrays["input_ids"]).to_numpy(zero_copy_only=False), out=offsets[1:]
    )

    def flat(name: str) -> Int64:
        return clipped(pc.list_flatten(arrays[name]).to_numpy(zero_copy_only=False))

    def flat_or(name: str, absent: Int64) -> Int64 | None:
        if name not in arrays:
            return None
        if not arrays[name].null_count:
            return flat(name)
        there = arrays[name].is_valid().to_numpy(zero_copy_only=False)
        values: Int64 = absent.copy()
        values[np.repeat(there, np.diff(offsets))] = flat(name)
        return values

    values = flat("input_ids")
    labels, mask = flat_or("labels", values), flat_or("attention_mask", np.ones_like(values))
    tokens, wrong = check_tokens(values, offsets, labels, mask)
    bad.update({int(keep[i]): reason for i, reason in wrong.items()})
    positions = np.delete(np.arange(first_row, first_row + batch.num_rows), list(bad))
    return Records(positions, tokens=tokens, bad=_bad_rows(bad, first_row), consumed=consumed)


def _bad_rows(reasons: dict[int, str], first_row: int) -> list[BadRecord]:
    return [BadRecord(first_row + i, reasons[i], _SKIP) for i in sorted(reasons)]
