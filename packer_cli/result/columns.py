"""Columns of rows and of documents: their Arrow types, and arrays to Arrow and back without copies.

schema(config, ...)        Arrow schema of rows, documents_schema(...) of documents
fixed, ragged              arrays to Arrow columns
rows_of, lists_of          Arrow columns to arrays
segments_of(batch)         where segments lie in rows
stored, measured           values of `--carry`: checked for storage, and counted
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packer_cli.errors import UsageError
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.options import COLUMNS, PADDED_BOUNDARIES, VIEW_COLUMNS, PackConfig
from packer_cli.options.value_columns import ValueColumn
from packer_cli.records import Int32, Int64
from packer_cli.result.layout import FORMAT_VERSION, Measured
from packer_cli.result.manifest import TOKENIZED

_BATCH_TOKENS = 1 << 20  # a record batch of 4 to 9 MB: small buffers, still cheap to index
_VIEW_BATCH_ROWS = 1 << 16
# columns padded to max_length, with the types of their values
PADDED = {name: np.dtype(kind) for name, kind in COLUMNS.items() if kind in ("int32", "uint8")}
PARTS = {"file": np.int32, "position": np.int64, "start": np.int32}  # of the column `segments`
HASH_BYTES = 16
INDEX_SCHEMA = pa.schema(
    [
        pa.field("length", pa.int32(), nullable=False),
        pa.field("trained_tokens", pa.int32(), nullable=False),
        pa.field("content_hash", pa.binary(HASH_BYTES), nullable=False),
    ]
)


# --- schemas


def _list_of(kind: Any, size: int = -1) -> Any:
    return pa.list_(pa.field("item", kind, nullable=False), size)


def column_type(name: str, config: PackConfig) -> Any:
    """Return the Arrow type of a column of rows. Its values are never null."""
    column = config.value_columns.get(name)
    if column is not None:
        return _list_of(column.arrow_type, -1 if column.is_of_segments else config.max_length)
    if name in PADDED:
        return _list_of(pa.from_numpy_dtype(PADDED[name]), config.max_length)
    if name in ("cu_seqlens", PADDED_BOUNDARIES):
        return _list_of(pa.int32())
    parts = [pa.field(part, pa.from_numpy_dtype(kind), nullable=False)
             for part, kind in PARTS.items()]  # fmt: skip
    return _list_of(pa.struct(parts))


def schema(
    config: PackConfig, pad_token_id: int, tokenizer_sha256: str, columns: Sequence[str] = ()
) -> Any:
    """Return the Arrow schema of complete rows, or of some `columns`.

    Its metadata is what a reader needs to know to use rows without their manifest.
    """
    metadata = {
        "format_version": FORMAT_VERSION,
        "max_length": config.max_length,
        "pad_token_id": pad_token_id,
        "label_shift": "none",
        "tokenizer_sha256": tokenizer_sha256,
    }
    if config.segment_multiple > 1:
        metadata["segment_multiple"] = config.segment_multiple
    fields = [pa.field(name, column_type(name, config), nullable=False)
              for name in columns or config.columns]  # fmt: skip
    return pa.schema(fields, metadata={"packer": json.dumps(metadata)})


def stored_schema(config: PackConfig, pad_token_id: int, tokenizer_sha256: str) -> Any:
    """Return the Arrow schema of shards: `schema`, or for a view the schema of references."""
    if not config.view:
        return schema(config, pad_token_id, tokenizer_sha256)
    return schema(config, 0, tokenizer_sha256, VIEW_COLUMNS)


def documents_schema(
    tokenizer_sha256: str, *, has_trained: bool, columns: Iterable[ValueColumn] = ()
) -> Any:
    """Return the Arrow schema of document shards.

    `trained` lists [start, stop, ...] of the tokens trained on; null, or no such column: all of
    them. A column of values has a list with a value for each token, or the value of the record.
    """
    fields = [
        pa.field("input_ids", _list_of(pa.int32()), nullable=False),
        *([pa.field("trained", _list_of(pa.int32()))] if has_trained else []),
        pa.field("file", pa.int32(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),
        *(
            pa.field(
                column.name,
                column.arrow_type if column.is_of_segments else _list_of(column.arrow_type),
                nullable=False,
            )
            for column in columns
        ),
    ]
    metadata = {
        "format_version": FORMAT_VERSION,
        "kind": TOKENIZED,
        "tokenizer_sha256": tokenizer_sha256,
    }
    return pa.schema(fields, metadata={"packer": json.dumps(metadata)})


def index_schema(config: DocumentConfig) -> Any:
    """Return the Arrow schema of the indexes of documents: with their tiers if there are any."""
    tier = pa.field("tier", pa.uint8(), nullable=False)
    return INDEX_SCHEMA.append(tier) if config.tiers else INDEX_SCHEMA


def schema_problem(written: Any, expected: Any) -> str:
    """Describe how the Arrow schema of a shard differs from `expected`; "" if it does not."""
    if written.names != expected.names:
        return f"has the columns {', '.join(written.names)}, not {', '.join(expected.names)}"
    for field, right in zip(written, expected, strict=True):
        if field != right:
            return f"{field.name} is {field.type}, not {right.type} without nulls"
    if written.metadata == expected.metadata:
        return ""
    return (
        f"its metadata is {_metadata_of(written)}, written otherwise than {_metadata_of(expected)}"
    )


def _metadata_of(schema: Any) -> dict[str, Any]:
    """Return packer's metadata of a shard; {} if there is none."""
    try:
        metadata = json.loads((schema.metadata or {}).get(b"packer", b"{}"))
    except (ValueError, RecursionError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


def kind_in(schema: Any) -> str | None:
    """Return the kind of a shard with this Arrow schema; None if its metadata has none."""
    kind = _metadata_of(schema).get("kind")
    return None if kind is None else str(kind)


def rows_per_batch(config: PackConfig) -> int:
    """Return the most rows in a record batch: fewer if columns of values need memory."""
    more = sum(column.bytes for column in config.value_columns.values())
    return max(1, 8 * _BATCH_TOKENS // (8 + more) // config.max_length)


def stored_batch_rows(config: PackConfig) -> int:
    """Return the most rows in a record batch of a shard."""
    return _VIEW_BATCH_ROWS if config.view else rows_per_batch(config)


def batch_tokens(columns: Iterable[ValueColumn]) -> int:
    """Return about how many tokens a record batch of documents with these columns has."""
    return 8 * _BATCH_TOKENS // (8 + sum(column.bytes for column in columns))


# --- arrays to Arrow


def fixed(kind: Any, rows: Any) -> Any:
    """Make a column of lists of one length from an array [rows, length], or [rows, length, K]."""
    values = flat(kind.value_type, rows.reshape(-1, *rows.shape[2:]))
    return pa.Array.from_buffers(kind, len(rows), [None], children=[values])


def flat(kind: Any, values: Any) -> Any:
    """Make a column from an array [n], or [n, K] as lists of K."""
    if pa.types.is_fixed_size_list(kind):
        return fixed(kind, values)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def ragged(kind: Any, offsets: Int32, parts: Sequence[Any]) -> Any:
    """Make a list column of offsets and one array of values, or one for each field of structs."""
    if pa.types.is_struct(kind.value_type):
        children = [flat(kind.value_type.field(i).type, part) for i, part in enumerate(parts)]
        size = len(parts[0])
        values = pa.Array.from_buffers(kind.value_type, size, [None], children=children)
    else:
        values = flat(kind.value_type, parts[0])
    buffers = [None, pa.py_buffer(offsets)]
    return pa.Array.from_buffers(kind, len(offsets) - 1, buffers, children=[values])


# --- Arrow to arrays


def values_type(kind: Any) -> np.dtype[Any]:
    """Return the numpy type of a value in a list column, of shape (K,) if it is a list of K."""
    item, shape = kind.value_type, tuple[int, ...]()
    if pa.types.is_fixed_size_list(item):
        item, shape = item.value_type, (item.list_size,)
    return np.dtype((plain_type(item), shape))


def plain_type(kind: Any) -> np.dtype[Any]:
    """Return the numpy type of an Arrow type of numbers."""
    # `to_pandas_dtype` of pyarrow 20 imports pandas
    return np.asarray(pa.array([], kind).to_numpy()).dtype


def rows_of(column: Any) -> npt.NDArray[Any]:
    """Return a fixed-size column as an array [rows, max_length], or [rows, max_length, K]."""
    width, values = column.type.list_size, plain_values(column.values)
    inside = values[column.offset * width : (column.offset + len(column)) * width]
    rows: npt.NDArray[Any] = inside.reshape(len(column), width, *values.shape[1:])
    return rows


def plain_values(values: Any) -> npt.NDArray[Any]:
    """Return an Arrow array without nulls as [n], or [n, K] of lists of K."""
    if pa.types.is_fixed_size_list(values.type):
        return rows_of(values)
    plain: npt.NDArray[Any] = values.to_numpy()
    return plain


def lists_of(batch: Any, name: str) -> tuple[Any, Int64]:
    """Return (values, offsets int64[rows + 1] into them) of a list column."""
    column = batch.column(name)
    offsets = column.offsets.to_numpy().astype(np.int64)
    return plain_values(column.values)[offsets[0] : offsets[-1]], offsets - offsets[0]


def segments_of(batch: Any) -> tuple[Int64, Int64, Int64]:
    """Locate segments: (begin int64[s], length int64[s], offsets int64[rows + 1]).

    Segment k, offsets[r] <= k < offsets[r + 1], is in the places begin[k] .. begin[k] + length[k]
    of row r. With a segment multiple these are not its boundaries in cu_seqlens, which leave the
    padding between segments out.
    """
    name = PADDED_BOUNDARIES if PADDED_BOUNDARIES in batch.schema.names else "cu_seqlens"
    places, edges = lists_of(batch, name)
    boundaries, _ = lists_of(batch, "cu_seqlens")
    last = edges[1:] - 1
    begin = np.delete(places, last)
    length = np.delete(np.diff(boundaries), last[:-1])
    return begin.astype(np.int64), length.astype(np.int64), edges - np.arange(len(edges))


def places_in(batch: Any, max_length: int) -> tuple[Int64, Int64, Int64]:
    """Locate segments as `segments_of`, with `begin` counted over all rows of the batch."""
    begin, length, first = segments_of(batch)
    rows = np.repeat(np.arange(batch.num_rows), np.diff(first))
    return begin + rows * max_length, length, first


def values_in(batch: Any, column: ValueColumn) -> npt.NDArray[Any]:
    """Return a column of values as it is stored.

    Of rows: [rows, max_length], or [segments] if records have the values. Of documents: [T], or
    [n]. With K values each has another dimension.
    """
    column_of_batch = batch.column(column.name)
    is_list = pa.types.is_list(column_of_batch.type)
    return lists_of(batch, column.name)[0] if is_list else plain_values(column_of_batch)


# --- values of --carry


def check_defaults(columns: Mapping[str, ValueColumn], config: DocumentConfig) -> None:
    """Raise UsageError for a `--carry-default` without a column, and for an invalid value."""
    for name, text in config.carry_default:
        if name not in columns:
            raise UsageError(f"--carry-default: nothing carries {name!r}", "leave it out")
        _default(columns[name], text)


def default_of(column: ValueColumn) -> Any:
    """Return the stored value of `--carry-default`; None without one. Raises UsageError."""
    return None if column.default is None else _default(column, column.default)


@lru_cache  # looked up for each span, and for each batch of rows
def _default(column: ValueColumn, text: str) -> Any:
    try:
        value = np.asarray(json.loads(text))
        if value.shape != column.dtype.shape:
            value = np.broadcast_to(value[()], column.dtype.shape)  # a number stands for all K
        return stored(column, value)
    except (ValueError, TypeError, OverflowError) as error:
        raise UsageError(
            f"--carry-default: {column.name}: {text} is not a value of {column.type}",
            f"give a number: --carry-default {column.name}=0",
        ) from error


def stored(column: ValueColumn, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert values to the stored type. Raises ValueError, with a reason, if it does not fit."""
    kind = values.dtype.kind
    if column.type == "bool":
        if kind != "b":
            raise ValueError(f"{column.name} is not true or false")
        return values.astype(np.uint8)
    if kind not in ("iuf" if column.is_float else "iu"):
        expected = "numbers" if column.is_float else "whole numbers"
        raise ValueError(f"{column.name} does not hold {expected}")
    if column.is_float and kind != "f":  # the same, whatever else is read with it
        values = values.astype(np.float64)
    if column.type == "bfloat16":
        halves = _bfloat16(values)
        _check(column, values, np.isfinite(values) & ((halves & 0x7F80) != 0x7F80))
        return halves
    with np.errstate(over="ignore"):
        converted = values.astype(column.dtype.base, copy=False)
    holds = np.isfinite(converted) if column.is_float else converted == values
    _check(column, values, holds)
    return converted


def _check(column: ValueColumn, values: npt.NDArray[Any], holds: npt.NDArray[np.bool_]) -> None:
    if not holds.all():
        wrong = values[~holds].flat[0]
        raise ValueError(f"{column.name} holds {wrong}, which no {column.type} is")


def _bfloat16(values: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """Return the upper halves of float32, rounded to the nearest, ties to even."""
    with np.errstate(over="ignore"):
        bits = values.astype(np.float32).reshape(-1).view(np.uint32).astype(np.uint64)
    upper = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    halves: npt.NDArray[np.uint16] = upper.astype(np.uint16).reshape(values.shape)
    return halves


def as_numbers(column: ValueColumn, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert stored values to numbers that numpy knows: bfloat16 to float32, a bool to bool."""
    if column.type == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(bool) if column.type == "bool" else values


def measured(
    column: ValueColumn, values: npt.NDArray[Any], begin: Any = None, length: Any = None
) -> Measured:
    """Count stored values [n], or [n, K], with their minimum, maximum and sum: the same on every
    machine.

    begin, length  int64[s], ascending: where there are values, and 0 elsewhere; None: everywhere
    """
    numbers = (as_numbers(column, values) if column.is_float else values).reshape(-1)
    if numbers.dtype == np.float16:  # slow
        numbers = numbers.astype(np.float32)
    low, high, count = numbers, numbers, len(numbers)
    if begin is not None:
        width = column.count or 1
        edges = np.stack([begin, begin + length], axis=1).reshape(-1) * width
        edges = edges[: len(edges) - (edges[-1] == len(numbers))]
        low, high = (least.reduceat(numbers, edges)[::2] for least in (np.minimum, np.maximum))
        count = int(length.sum()) * width
    return count, low.min().item(), high.max().item(), float(numbers.sum(dtype=np.float64))


def measured_in(batch: Any, columns: Iterable[ValueColumn]) -> dict[str, Measured]:
    """Return the `measured` columns of values of a valid batch of rows or documents."""
    found = dict[str, Measured]()
    for column in columns:
        values, where = values_in(batch, column), tuple[Int64, ...]()
        if "cu_seqlens" in batch.schema.names and not column.is_of_segments:
            where = places_in(batch, values.shape[1])[:2]
            values = values.reshape(-1, *values.shape[2:])
        found[column.name] = measured(column, values, *where)
    return found
