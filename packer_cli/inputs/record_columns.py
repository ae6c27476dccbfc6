"""Make records of the columns that a reader has read: texts, fields or token ids, with the columns
of values beside them.

Token ids and values are checked and copied a column at a time. Only if a record may be bad,
they are looked at one by one, to name what is wrong. Records are cut into batches of a few
megabytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from packer_cli._kernels import inputs as kernels
from packer_cli.inputs.selection import FITS, Selection
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.shapes import MASKS, TRACE, Shape
from packer_cli.options.value_columns import MESSAGE, TOKEN, ValueColumn
from packer_cli.records import (
    HIGHEST_ID,
    IGNORED,
    BadRecord,
    Documents,
    Int32,
    Int64,
    Records,
    UInt8,
    UInt32,
    offsets_of,
    wrong_ids,
)
from packer_cli.result.columns import default_of, plain_values, stored

BATCH_BYTES = 4 << 20
_BATCH_DOCUMENTS = 1 << 16
# A number beyond int64 cannot be valid; clipping to this keeps it invalid without an overflow.
_BEYOND = 1 << 62
_Array = npt.NDArray[Any]
NAMES = ("input_ids", "labels", "attention_mask", *MASKS)
Tokens = tuple[UInt32, Int64, UInt8 | None]
# The token ids of a record, its labels and its masks, or None: lists of whatever may be there.
Row = Sequence[list[Any] | None]


class ReadColumns(NamedTuple):
    """n records that were read together, as columns. A reader gives no more than this.

    positions  int64[n]
    columns    by the shape's own name of a field: n values as Python has them, None for a record
               without one, or an array of Arrow
    values     by the name of a column of values, or of a field of a condition: the same
    bad        records that are not among the n
    empty      how many more records are blank
    fields     instead of columns, for records that are passed on as they are: n dicts
    """

    positions: Int64
    columns: Mapping[str, Any]
    values: Mapping[str, Any]
    bad: list[BadRecord]
    empty: int = 0
    fields: list[dict[str, Any]] | None = None


def records_of(
    read: ReadColumns, shape: Shape, config: DocumentConfig, tip: str, consumed: int
) -> Records:
    """Return the records that these columns hold, with what follows them.

    tip       for records that turn out to be bad
    consumed  bytes of the file that were read for them
    """
    positions, columns = read.positions, read.columns
    texts = sizes = None
    if shape.kind == "tokens":
        records = token_records(columns, positions, tip, consumed)
    else:
        fields = read.fields
        if shape.kind == "text":
            texts = columns["text"]
        elif fields is None:
            rows = zip(*columns.values(), strict=True)
            fields = [dict(zip(columns, row, strict=True)) for row in rows]
        records = Records(positions, texts=texts, fields=fields, consumed=consumed)
    bad = sorted([*read.bad, *records.bad], key=lambda record: record.position)
    records = replace(records, bad=bad, empty=read.empty)
    if shape.kind == TRACE:
        return records
    records = _selected(records, read, config)
    if not config.value_columns:
        return records
    if shape.kind == "tokens":
        ids = columns["input_ids"]
        lengths = pc.list_value_length(ids).fill_null(0) if isinstance(ids, pa.Array) else None
        sizes = np.array([*map(len, ids)] if lengths is None else lengths, np.int64)
    return _with_values(records, read, sizes, config, tip)


def faultless(
    ids: npt.NDArray[Any],
    offsets: Int64,
    labels: npt.NDArray[Any] | None,
    mask: npt.NDArray[Any] | None,
) -> Tokens | None:
    """Check the flat ids, labels and masks of n records in one pass over each array.

    Returns their tokens, or None if a record may be bad: see `one_by_one`. The arrays are of
    integers of any type. offsets int64[n + 1] is common to all three. Tokens with attention_mask 0
    are padding and are left out. Labels must be the token itself (unshifted), or -100 for a token
    that is not trained on.
    """
    if labels is not None and labels.dtype == np.uint64:
        return None  # as int64 they could seem to be -100
    copied, trained = np.empty(len(ids), np.uint32), None
    if not kernels.copy_ids(ids, copied):
        return None
    if labels is not None:
        trained = np.empty(len(ids), np.uint8)
        if not kernels.copy_trained(labels, copied, trained):
            return None
    real = len(copied) if mask is None else kernels.count_real(mask)
    if real < 0:
        return None
    if mask is None or real == len(copied):
        return copied, offsets, trained
    kept_offsets = np.empty_like(offsets)
    kernels.keep_real(mask, offsets, copied, trained, kept_offsets)
    return copied[:real].copy(), kept_offsets, None if trained is None else trained[:real].copy()


def parts_of(sizes: Int64, largest: Int64, longest: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of records of a few megabytes; one above `longest` bytes is alone."""
    full = np.flatnonzero(np.diff(np.cumsum(sizes) // BATCH_BYTES)) + 1
    alone = np.flatnonzero(largest > longest)
    edges = np.concatenate(
        [np.arange(0, len(sizes), most), full, alone, alone + 1, np.array([len(sizes)])]
    )
    return pairwise(np.unique(edges).tolist())


def batches_of(lengths: Int32) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of documents that are held together. lengths int32[n], in tokens."""
    sizes = lengths.astype(np.int64) * 4
    return parts_of(sizes, sizes, int(sizes.max(initial=0)), _BATCH_DOCUMENTS)


def token_records(
    columns: Mapping[str, Any], positions: Int64, tip: str, consumed: int = 0
) -> Records:
    """Return records of token ids.

    columns    by `NAMES`: n lists as Python has them, None for a null, or an array of Arrow
    positions  int64[n]
    tip        for bad records
    """
    tokens, bad = _all_good(columns), dict[int, str]()
    if tokens is None:
        nothing = [None] * len(positions)
        lists = (columns.get(name, nothing) for name in NAMES)
        lists = (column.to_pylist() if isinstance(column, pa.Array) else column for column in lists)
        tokens, bad = one_by_one([*zip(*lists, strict=True)])
    refused = [BadRecord(int(positions[i]), reason, tip) for i, reason in bad.items()]
    good = np.delete(positions, list(bad))
    return Records(good, documents=Documents.of(*tokens), bad=refused, consumed=consumed)


def _all_good(columns: Mapping[str, Any]) -> Tokens | None:
    """Return the tokens of all records; None if one may be bad, or lacks a list of the others."""
    lists = dict[str, Any]()
    for name, column in columns.items():
        if isinstance(column, pa.Array):
            lists[name] = column
        elif any(values is not None for values in column):
            try:
                lists[name] = _as_arrow(column, np.float64 if name in MASKS else np.int64)
            except (OverflowError, TypeError):  # numbers that are too large, or nulls
                return None
    flat = {name: array.flatten() for name, array in lists.items()}
    if "input_ids" not in lists or any(a.null_count for a in (*lists.values(), *flat.values())):
        return None
    offsets = _offsets(lists["input_ids"])
    if not all(np.array_equal(_offsets(array), offsets) for array in lists.values()):
        return None
    ids, labels, mask, *masks = (
        flat[name].to_numpy(zero_copy_only=False) if name in flat else None for name in NAMES
    )
    if ids is None or any(_wrong_flags(flags).any() for flags in masks if flags is not None):
        return None
    return faultless(ids, offsets, _masked(ids, labels, masks), mask)


def _wrong_flags(mask: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Mark the values that are neither 0 nor 1, bool[n]."""
    wrong: npt.NDArray[np.bool_] = (mask != 0) & (mask != 1)
    return wrong


def _masked(
    ids: npt.NDArray[Any], labels: Any, masks: Iterable[npt.NDArray[Any] | None]
) -> npt.NDArray[Any] | None:
    """Return labels that are -100 where a mask is 0; None without labels and masks."""
    for mask in masks:
        if mask is not None:
            labels = np.where(mask, ids.astype(np.int64) if labels is None else labels, IGNORED)
    return labels  # type: ignore[no-any-return]


def _as_arrow(lists: list[list[int]], kind: type) -> Any:
    lengths = [*map(len, lists)]
    flat: _Array = np.fromiter(chain.from_iterable(lists), kind, count=sum(lengths))
    return pa.LargeListArray.from_arrays(pa.array(offsets_of(lengths)), pa.array(flat))


def _offsets(column: Any) -> Int64:
    """Return where each list of a column without nulls begins in its flat values, int64[n + 1]."""
    if pa.types.is_fixed_size_list(column.type):
        return np.arange(len(column) + 1, dtype=np.int64) * int(column.type.list_size)
    offsets: Int64 = column.offsets.to_numpy().astype(np.int64)
    offsets -= offsets[0]
    return offsets


def one_by_one(rows: Sequence[Row]) -> tuple[Tokens, dict[int, str]]:
    """Return the tokens of the good rows, and what is wrong with each of the others, by index."""
    bad = dict[int, str]()
    ids, flags, lengths = [np.empty(0, np.int64)], [np.empty(0, bool)], list[int]()
    for number, row in enumerate(rows):
        if reason := _misfit(row):
            bad[number] = reason
            continue
        row_ids = _clipped(row[0] or [])
        labels, mask = (None if values is None else _clipped(values) for values in row[1:3])
        flagged = zip(MASKS, row[3:], strict=False)
        masks = {name: np.array(values) for name, values in flagged if values is not None}
        labels = _masked(row_ids, labels, masks.values())
        if reason := _fault(row_ids, labels, mask, masks):
            bad[number] = reason
            continue
        real = np.ones(len(row_ids), bool) if mask is None else mask == 1
        ids.append(row_ids[real])
        flags.append((row_ids if labels is None else labels)[real] != IGNORED)
        lengths.append(len(ids[-1]))
    trained = None
    if any(values is not None for row in rows for values in (row[1], *row[3:])):
        trained = np.concatenate(flags).astype(np.uint8)
    return (np.concatenate(ids).astype(np.uint32), offsets_of(lengths), trained), bad


def _misfit(row: Row) -> str:
    """Return why the lists of a row do not belong together, or ""."""
    ids = row[0]
    if ids is None:
        return "input_ids is null"
    for name, values in zip(NAMES, row, strict=False):
        if values is not None and len(values) != len(ids):
            return f"{name} has {len(values)} values, input_ids {len(ids)}"
        if values is not None and None in values:
            return f"{name} holds a null"
    return ""


def _clipped(values: list[int]) -> Int64:
    try:
        return np.array(values, np.int64)
    except OverflowError:
        return np.array([min(max(value, -_BEYOND), _BEYOND) for value in values], np.int64)


def _fault(
    ids: Int64, labels: Int64 | None, mask: Int64 | None, masks: Mapping[str, npt.NDArray[Any]]
) -> str:
    """Return what is wrong with the first wrong number of a record, or ""."""
    mask = np.ones_like(ids) if mask is None else mask
    labels = ids if labels is None else labels
    checks = (
        ("input_ids", ids, wrong_ids(ids), f"not between 0 and {HIGHEST_ID}"),
        ("attention_mask", mask, _wrong_flags(mask), "not 0 or 1"),
        *((name, flags, _wrong_flags(flags), "not 0 or 1") for name, flags in masks.items()),
        ("labels", labels, (mask == 1) & (labels != IGNORED) & (labels != ids),
         "neither -100 nor input_ids[{at}] = {token}; labels must be unshifted"),
    )  # fmt: skip
    for name, values, wrong, expected in checks:
        if wrong.any():
            at = int(np.argmax(wrong))
            is_huge = np.isfinite(values[at]) and abs(int(values[at])) >= _BEYOND
            shown = "a number of 63 bits or more" if is_huge else values[at]
            return f"{name}[{at}] is {shown}, {expected.format(at=at, token=ids[at])}"
    return ""


# --- conditions on fields


def _selected(records: Records, read: ReadColumns, config: DocumentConfig) -> Records:
    """Return records, which are some of those that were read, that may fit the conditions. With
    FITS if documents are judged further; the others are counted.
    """
    selection = Selection.of(config)
    if selection is None or not selection.is_of_records:
        return records
    judged = selection.records(len(read.positions), read.values.get)
    if len(records.positions) < len(read.positions):
        judged = judged.of(np.flatnonzero(np.isin(read.positions, records.positions)))
    lengths = 0 if records.documents is None else records.documents.lengths
    filtered = judged.left_out(lengths)
    records = replace(records, columns={**records.columns, FITS: judged.fits}, filtered=filtered)
    return records.take(judged.kept) if filtered.documents else records


# --- columns of values beside texts and tokens


def _with_values(
    records: Records, read: ReadColumns, sizes: Int64 | None, config: DocumentConfig, tip: str
) -> Records:
    """Return records, which are some of those that were read, with their values. Those with invalid
    values join `bad`.

    sizes  int64[m], of token ids how many there are in the input; None: other records
    """
    documents = records.documents
    kept = np.flatnonzero(np.isin(read.positions, records.positions))
    lengths = np.ones(len(kept), np.int64) if sizes is None else sizes[kept]
    of_tokens, of_records = dict[str, _Array](), dict[str, _Array]()
    bad = dict[int, str]()
    for name, column in config.value_columns.items():
        if column.of == MESSAGE and records.fields is not None:  # taken when messages are rendered
            of_records[name] = np.zeros((len(kept), *column.dtype.shape), column.dtype.base)
            continue
        values, wrong = _values_of(column, read.values.get(name), kept, lengths)
        bad = wrong | bad
        (of_tokens if column.of == TOKEN and documents is not None else of_records)[name] = values
    if documents is not None and of_tokens:
        if documents.offsets[-1] < lengths.sum():
            real = _real_tokens(read.columns.get("attention_mask"), kept, lengths)
            of_tokens = {name: values[real] for name, values in of_tokens.items()}
        documents = documents.beside(of_tokens, {})
    records = replace(records, documents=documents, columns={**records.columns, **of_records})
    if not bad:
        return records
    refused = [BadRecord(int(records.positions[i]), reason, tip) for i, reason in bad.items()]
    return records.take(np.delete(np.arange(len(records.positions)), list(bad)), refused)


def _values_of(
    column: ValueColumn, read: Any, kept: Int64, lengths: Int64
) -> tuple[_Array, dict[int, str]]:
    """Return the values of the kept records, end to end, and what is wrong with some of them, by
    their numbers. Records without a value are bad if the column has no default.

    read     m values as in `ReadColumns`, or None
    kept     int64[n], indices of these
    lengths  int64[n], tokens of each, if tokens have values
    """
    values = None if read is None else _good_values(column, read, kept, lengths)
    return _values_one_by_one(column, read, kept, lengths) if values is None else (values, {})


def _real_tokens(masks: Any, kept: Int64, lengths: Int64) -> npt.NDArray[np.bool_]:
    """Mark the tokens of the kept records that are not padding, bool[sum(lengths)]."""
    real = [np.empty(0, bool)]
    for index, length in zip(kept.tolist(), lengths.tolist(), strict=True):
        mask = _at(masks, index)
        real.append(np.ones(length, bool) if mask is None else np.array(mask) == 1)
    return np.concatenate(real)


def _at(values: Any, index: int) -> Any:
    """Return an item of a list, or of an array of Arrow, as Python has it."""
    value = values[index]
    return value.as_py() if isinstance(value, pa.Scalar) else value


def is_list(kind: Any) -> bool:
    """Tell an Arrow type of lists from others."""
    checks = pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list
    return any(check(kind) for check in checks)


def _good_values(column: ValueColumn, read: Any, kept: Int64, lengths: Int64) -> _Array | None:
    """Return the values of all kept records; None if one of them may be bad."""
    try:
        if isinstance(read, pa.Array):
            array = read if len(kept) == len(read) else read.take(pa.array(kept))
            return stored(column, _of_arrow(column, array, lengths))
        lists = [read[i] for i in kept.tolist()]
        if column.of == TOKEN:
            if not np.array_equal([*map(len, lists)], lengths):
                return None
            lists = [*chain.from_iterable(lists)]
        return _of_shape(column, _of_python(column, lists), len(lists))
    except (TypeError, ValueError, OverflowError):  # nulls, other values, or lists of other lengths
        return None


def _of_python(column: ValueColumn, value: Any) -> _Array:
    """Return numbers, or lists of them, as they are stored. Raises ValueError with a reason."""
    leaves = [value]
    while leaves and type(leaves[0]) is list:
        leaves = [*chain.from_iterable(leaves)]
    kinds: set[type] = {int}
    expected = "whole numbers"
    if column.type == "bool":
        kinds, expected = {bool}, "true or false"
    elif column.is_float:
        kinds, expected = {int, float, np.float16}, "numbers"  # the last of pyarrow 20
    if not {*map(type, leaves)} <= kinds:
        wrong = next(leaf for leaf in leaves if type(leaf) not in kinds)
        raise ValueError(f"{column.name} holds {wrong!r}, expected {expected}")
    return stored(column, np.array(value, np.float64 if column.is_float else None))


def _of_arrow(column: ValueColumn, array: Any, lengths: Int64) -> _Array:
    """Return the values of an array of Arrow. Raises ValueError if not all are there."""
    if column.of == TOKEN:
        if not is_list(array.type):
            raise ValueError("no lists")
        if not np.array_equal(array.value_lengths().fill_null(-1).to_numpy(), lengths):
            raise ValueError("other lengths")
        array = array.flatten()
    if column.count is not None and not is_list(array.type):
        raise ValueError("no lists")
    if array.null_count or (column.count is not None and array.flatten().null_count):
        raise ValueError("nulls")
    if column.count is not None and not pa.types.is_fixed_size_list(array.type):
        array = array.cast(pa.list_(array.type.value_type, column.count))
    if pa.types.is_boolean(array.type):
        return np.asarray(array.to_numpy(zero_copy_only=False))
    return _of_shape(column, plain_values(array), len(array))


def _of_shape(column: ValueColumn, values: _Array, number: int) -> _Array:
    if values.shape != (number, *column.dtype.shape):
        raise ValueError("another number of values")
    return values


def _values_one_by_one(
    column: ValueColumn, read: Any, kept: Int64, lengths: Int64
) -> tuple[_Array, dict[int, str]]:
    """Return the values of all kept records, and what is wrong with some, by their numbers."""
    bad, default = dict[int, str](), default_of(column)
    parts = [np.empty((0, *column.dtype.shape), column.dtype.base)]
    for number, (index, length) in enumerate(zip(kept.tolist(), lengths.tolist(), strict=True)):
        shape = (length, *column.dtype.shape) if column.of == TOKEN else column.dtype.shape
        value = None if read is None else _at(read, index)
        values = np.zeros(shape, column.dtype.base)
        if value is None and default is not None:
            values[...] = default
        else:
            try:
                values = value_of(column, value, shape)
            except ValueError as error:
                bad[number] = str(error)
        parts.append(values if column.of == TOKEN else values[None])
    return np.concatenate(parts), bad


def value_of(column: ValueColumn, value: Any, shape: Sequence[int]) -> _Array:
    """Return a value as it is stored. Raises ValueError with a reason."""
    if value is None:
        raise ValueError(f"no value of '{column.name}', expected {_expected(column, shape)}")
    sizes, lists = list[int](), [value]
    while lists and type(lists[0]) is list:
        lengths = {len(item) if type(item) is list else -1 for item in lists}
        if len(lengths) > 1:
            raise ValueError(f"{column.name} has lists of unlike lengths")
        sizes += lengths
        lists = [*chain.from_iterable(lists)]
    if value == [] and [*shape[:1]] == [0]:
        return np.zeros(shape, column.dtype.base)
    if sizes != [*shape]:
        has = " x ".join(map(str, sizes)) + f" value{'s' * (sizes != [1])}" if sizes else "no list"
        raise ValueError(f"{column.name} has {has}, expected {_expected(column, shape)}")
    return _of_python(column, value)


def _expected(column: ValueColumn, shape: Sequence[int]) -> str:
    kind = f"of {column.type}" if shape else column.type
    sizes = " x ".join(map(str, shape))
    return f"{sizes} {kind}{', one for each token' * (column.of == TOKEN)}".strip()
