"""What `--carry` names, out of records: values of a record, or one for each of its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packer_cli.options.carried import MESSAGE, TOKEN, Carried
from packer_cli.options.documents import DocumentConfig
from packer_cli.records import BadRecord, Int64, Records
from packer_cli.result.carried import default_of, row_type, stored, together
from packer_cli.result.reader import plain_values

_Array = npt.NDArray[Any]


def with_carried(
    records: Records,
    read: Int64,
    given: Mapping[str, Any],
    config: DocumentConfig,
    sizes: Int64 | None = None,
    real: npt.NDArray[np.bool_] | None = None,
    tip: str = "",
) -> Records:
    """Records with what follows them; those with values that cannot be carried join `bad`.

    read   int64[m], the positions of all that were read, of which some are in `records`
    given  by name, m values as Python has them, None where there is none; or an array of Arrow
    sizes  int64[m], of token ids how many there are in the input; None: other records
    real   bool[sum(sizes)], which tokens are no padding; None: all of them
    """
    columns = config.carried.values()
    kept = np.flatnonzero(np.isin(read, records.positions))
    lengths = np.ones(len(kept), np.int64) if sizes is None else sizes[kept]
    values = np.zeros(int(lengths.sum()), row_type([*columns]))
    bad, defaults = dict[int, str](), dict(config.carry_default)
    for one in columns:
        if one.of == MESSAGE:  # which what renders messages finds in them
            continue
        column = given.get(one.name)
        found = None if column is None else _together(one, column, kept, lengths)
        if found is None:
            default = default_of(one, defaults[one.name]) if one.name in defaults else None
            found, wrong = _one_by_one(one, column, kept, lengths, default)
            bad = wrong | bad
        of_records = one.of != TOKEN and sizes is not None
        values[one.name] = np.repeat(found, lengths, axis=0) if of_records else found
    carried = together(values)
    if real is not None and sizes is not None:
        of_kept = np.repeat(np.isin(np.arange(len(read)), kept), sizes)
        carried = carried[real[of_kept]]
    records = replace(records, carried=carried)
    if not bad:
        return records
    good = records.take(np.delete(np.arange(len(kept)), list(bad)))
    refused = [BadRecord(int(records.positions[i]), reason, tip) for i, reason in bad.items()]
    return replace(
        records, positions=good.positions, texts=good.texts, tokens=good.tokens,
        fields=good.fields, carried=good.carried,
        bad=sorted([*records.bad, *refused], key=lambda record: record.position),
    )  # fmt: skip


def real_tokens(masks: Iterable[Any], sizes: Int64) -> npt.NDArray[np.bool_]:
    """bool[sum(sizes)], which tokens of records are no padding, by their attention masks."""
    parts = [
        np.array(mask) == 1 if mask is not None and len(mask) == size else np.ones(size, bool)
        for mask, size in zip(masks, sizes.tolist(), strict=True)
    ]
    return np.concatenate([np.empty(0, bool), *parts])


def _together(column: Carried, given: Any, kept: Int64, lengths: Int64) -> _Array | None:
    """The values of all kept records; None where one of them may be bad."""
    try:
        if isinstance(given, pa.Array):
            given = given if len(kept) == len(given) else given.take(pa.array(kept))
            return stored(column, _of_arrow(column, given, lengths))
        lists = [given[i] for i in kept.tolist()]
        if column.of == TOKEN:
            if not np.array_equal([*map(len, lists)], lengths):
                return None
            lists = [*chain.from_iterable(lists)]
        return _of_shape(column, stored(column, np.array(lists)), len(lists))
    except (TypeError, ValueError, OverflowError):  # nulls, other values, or lists of other lengths
        return None


def _of_arrow(column: Carried, given: Any, lengths: Int64) -> _Array:
    """The values of an array of Arrow. Raises ValueError where they are not all there."""
    if column.of == TOKEN:
        if not np.array_equal(given.value_lengths().fill_null(-1).to_numpy(), lengths):
            raise ValueError("other lengths")
        given = given.flatten()
    if given.null_count or (column.count is not None and given.flatten().null_count):
        raise ValueError("nulls")
    if column.count is not None and not pa.types.is_fixed_size_list(given.type):
        given = given.cast(pa.list_(given.type.value_type, column.count))
    if pa.types.is_boolean(given.type):
        return np.asarray(given.to_numpy(zero_copy_only=False))
    return _of_shape(column, plain_values(given), len(given))


def _of_shape(column: Carried, values: _Array, number: int) -> _Array:
    if values.shape != (number, *column.dtype.shape):
        raise ValueError("another number of values")
    return values


def _one_by_one(
    column: Carried, given: Any, kept: Int64, lengths: Int64, default: Any
) -> tuple[_Array, dict[int, str]]:
    """The values of all kept records, and what is wrong with some of them, by their numbers."""
    found, bad = list[_Array](), dict[int, str]()
    for number, (index, length) in enumerate(zip(kept.tolist(), lengths.tolist(), strict=True)):
        shape = (length, *column.dtype.shape) if column.of == TOKEN else column.dtype.shape
        value = None if given is None else given[index]
        value = value.as_py() if isinstance(value, pa.Scalar) else value
        made = np.zeros(shape, column.dtype.base)
        if value is None and default is not None:
            made[...] = default
        else:
            try:
                made = value_of(column, value, shape)
            except ValueError as error:
                bad[number] = str(error)
        found.append(made if column.of == TOKEN else made[None])
    nothing = np.empty((0, *column.dtype.shape), column.dtype.base)
    return np.concatenate([nothing, *found]), bad


def value_of(column: Carried, value: Any, shape: Sequence[int]) -> _Array:
    """A value as it is stored. Raises ValueError, with a reason, for what it cannot be."""
    if value is None:
        raise ValueError(f"no value of '{column.name}', expected {_expected(column, shape)}")
    try:
        values = np.array(value)
    except (ValueError, OverflowError):
        values = np.array(None)
    if values.shape != tuple(shape):
        what = f"{len(value)} values" if isinstance(value, list) else "no list"
        what = "lists of unlike lengths" if values.dtype == object else what
        raise ValueError(f"{column.name} has {what}, expected {_expected(column, shape)}")
    if not values.size:
        return values.astype(column.dtype.base)
    return stored(column, values)


def _expected(column: Carried, shape: Sequence[int]) -> str:
    each = "" if column.count is None else f" {column.count} of"
    if column.of != TOKEN:
        return f"{each} {column.type}".strip()
    return f"{shape[0]}, one for each token, of{each} {column.type}"
