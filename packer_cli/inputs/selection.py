"""Choose records and documents by the conditions of `--where`, or of the tiers of a source.

    Selection.of(config)     None if the options choose everything
    .records(...)            before they are tokenized, by their own fields
    .documents(...)          by their tokens, and which tier each belongs to

Between the two, a record has the column FITS: a bit for each tier whose conditions hold so far.
Without tiers there is one, of all. Numbers are compared a column at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packer_cli.options.documents import DocumentConfig
from packer_cli.options.where import (
    COMPARISONS,
    DIFFERS,
    HOLDS,
    LACKS,
    TOKENS,
    Condition,
    condition_of,
)
from packer_cli.packing.labels import trained_tokens
from packer_cli.records import TIER, Documents, Filtered, Int64, UInt8, UInt64
from packer_cli.result.tokenized import TokenizedDirectory

FITS = "\0fits"  # as no field of a record is called
_EXACT = 1 << 53  # up to which floats are whole numbers
_Values = Callable[[Condition], Any]  # n values: a list, or an array of Arrow or numpy
_Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Judged:
    """What conditions say of n records or documents.

    fits     uint64[n], bit i is set if all conditions of tier i hold
    lacks    bool[n], lacks the field of a condition
    differs  bool[n], has a value of another type than a condition
    """

    fits: UInt64
    lacks: npt.NDArray[np.bool_]
    differs: npt.NDArray[np.bool_]

    @property
    def kept(self) -> Int64:
        """Indices of those that fit a tier, int64[m]."""
        return np.flatnonzero(self.fits)

    def of(self, wanted: Int64) -> Judged:
        """Return what is said of those at indices, int64[m]."""
        return Judged(self.fits[wanted], self.lacks[wanted], self.differs[wanted])

    def left_out(self, lengths: Any = 0) -> Filtered:
        """Count those that fit no tier. `lengths`: their tokens, int[n], or 0 if not known."""
        out = self.fits == 0
        tokens = int((np.asarray(lengths) * out).sum())
        lacks = int((out & self.lacks).sum())
        return Filtered(int(out.sum()), tokens, lacks, int((out & self.differs).sum()))


@dataclass(frozen=True)
class Selection:
    """Conditions of each tier."""

    tiers: tuple[tuple[Condition, ...], ...]
    stores_tiers: bool

    @classmethod
    def of(cls, config: DocumentConfig) -> Selection | None:
        """Return the selection of the options; None if they choose everything."""
        if not config.where and not config.tiers:
            return None
        return _selection(tuple(config.where), tuple(config.tiers))

    @property
    def is_of_records(self) -> bool:
        """True if there are conditions on fields of records."""
        return any(not one.is_of_document for tier in self.tiers for one in tier)

    def judged(self, count: int, values: _Values, of_documents: bool | None = None) -> Judged:
        """Judge `count` records or documents by all conditions; or by those alone that are, or are
        not, `of_documents`.
        """
        said = dict[str, UInt8]()
        fits = np.zeros(count, np.uint64)
        lacks, differs = np.zeros(count, bool), np.zeros(count, bool)
        for number, tier in enumerate(self.tiers):
            holds = np.ones(count, bool)
            for one in tier:
                if of_documents not in (None, one.is_of_document):
                    continue
                if one.text not in said:
                    said[one.text] = judge(one, values(one), count)
                    lacks |= said[one.text] == LACKS
                    differs |= said[one.text] == DIFFERS
                holds &= said[one.text] == HOLDS
            fits |= holds.astype(np.uint64) << np.uint64(number)
        return Judged(fits, lacks, differs)

    def records(self, count: int, values: Callable[[str], Any]) -> Judged:
        """Judge records by their own fields.

        `values`: gives the values of a field, one for each record; None: no record has it
        """
        return self.judged(count, lambda one: values(one.field), of_documents=False)

    def of_stored(self, directory: TokenizedDirectory) -> UInt64:
        """Judge all documents of a tokenized directory: `fits` of `Judged`."""

        def values(one: Condition) -> Any:
            if not one.is_of_document:
                return directory.carried_at(one.field)
            return directory.lengths if one.field == TOKENS else directory.trained

        return self.judged(len(directory), values).fits

    def documents(
        self, batch: Documents, carried: Callable[[str], Any] | None = None
    ) -> tuple[Documents, Filtered]:
        """Return the documents that fit a tier, with TIER if there are tiers, and count the others.

        `carried`: returns the values of a column of records, for documents that were stored: all
        conditions are on these. Without, FITS says what the records' own fields fit.
        """

        def values(one: Condition) -> Any:
            if not one.is_of_document:
                return carried and carried(one.field)
            if one.field == TOKENS:
                return batch.lengths
            return trained_tokens(batch.trained, batch.offsets[:-1], batch.offsets[1:])

        judged = self.judged(len(batch), values, None if carried else True)
        if FITS in batch.of_documents:
            judged = replace(judged, fits=judged.fits & batch.of_documents[FITS])
        left_out = judged.left_out(batch.lengths)
        columns = {name: own for name, own in batch.of_documents.items() if name != FITS}
        if self.stores_tiers:
            columns[TIER] = first_bits(judged.fits)
        batch = replace(batch, of_documents=columns)
        return batch.take(judged.kept) if left_out.documents else batch, left_out


@lru_cache
def _selection(where: tuple[str, ...], tiers: tuple[tuple[str, ...], ...]) -> Selection:
    of_all = tuple(map(condition_of, where))
    every = tuple((*of_all, *map(condition_of, tier)) for tier in tiers or ((),))
    return Selection(every, bool(tiers))


def first_bits(fits: UInt64) -> UInt8:
    """Return the number of the lowest bit that is set, uint8[n]; of none, 0."""
    lowest = fits & (~fits + np.uint64(1))
    numbers: UInt8 = np.log2(np.maximum(lowest, 1).astype(np.float64)).astype(np.uint8)
    return numbers


def judge(condition: Condition, values: Any, count: int) -> UInt8:
    """Return what a condition says of n values, uint8[n], as `Condition.judge` does. None: there
    are none.
    """
    if values is None:
        return np.full(count, LACKS, np.uint8)
    numbers, is_null = _numbers(values)
    operands = condition.value if isinstance(condition.value, tuple) else (condition.value,)
    are_numbers = all(type(one) in (int, float) and abs(one) <= _EXACT for one in operands)
    if numbers is None or not are_numbers:
        if numbers is not None:
            is_short = numbers.dtype.kind == "f" and numbers.itemsize < 8
            values = numbers.astype(str).astype(np.float64) if is_short else numbers
        values = values.tolist() if isinstance(values, np.ndarray | pa.Array) else values
        said = np.fromiter(map(condition.judge, values), np.uint8, count)
    elif condition.op in COMPARISONS:
        said = _compared(condition.op, numbers, condition.value)
    else:
        said = np.any([_compared("==", numbers, one) for one in operands], axis=0)
        said ^= condition.op == "not in"
    said = said.astype(np.uint8)
    if is_null is not None:
        said[is_null] = LACKS
    return said


def _numbers(values: Any) -> tuple[_Array | None, _Array | None]:
    """Return numbers as an array, [n], and which are null; (None, None) for other values."""
    if isinstance(values, np.ndarray):
        is_number = values.ndim == 1 and values.dtype.kind in "iuf"
        return (values, None) if is_number else (None, None)
    if isinstance(values, pa.Array):
        if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
            return None, None
        is_null = np.asarray(values.is_null()) if values.null_count else None
        return values.fill_null(0).to_numpy(zero_copy_only=False), is_null
    if {*map(type, values)} <= {int, float} and max(map(abs, values), default=0) <= _EXACT:
        return np.array(values, np.float64), None
    return None, None


def _compared(op: str, numbers: _Array, value: float) -> _Array:
    """Compare numbers with one of at most 2**53, exactly. Floats of 32 and 16 bits are compared as
    such: a 0.9 that is stored in one equals 0.9.
    """
    compare: Callable[[Any, Any], _Array] = COMPARISONS[op]
    if numbers.dtype.kind in "iu":
        if not float(value).is_integer():
            if op in ("==", "!="):
                return np.full(len(numbers), op == "!=")
            value = math.floor(value)
            compare = COMPARISONS["<=" if op[0] == "<" else ">"]
        bounds = np.iinfo(numbers.dtype)
        if not bounds.min <= value <= bounds.max:
            return np.full(len(numbers), compare(0, value))
        return compare(numbers, numbers.dtype.type(int(value)))
    with np.errstate(over="ignore"):  # beyond what a float16 holds
        return compare(numbers, numbers.dtype.type(value))
