"""Values that a job wrote beside documents: found in its Parquet files by content or by place.

    by         columns            what of a document is compared
    input_ids  input_ids          its tokens
    hash       content_hash       as the index of a tokenized directory has it, or in hexadecimal
    document   document           its number
    place      file, position     as the tokenized directory has them

Where a file has several of these, the first counts. Keys of all rows are held, 24 bytes a row, and
some 100 while they are sorted. Values never are: they are read by row group, a few megabytes at
once, forwards in each file. So they come fast in the order of the documents, also where each of
many files has every n-th, and slowly where rows are shuffled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from packer_cli import storage
from packer_cli.errors import DamagedInputError, DataError, UsageError, named
from packer_cli.inputs.columnar import ParquetReader, reading
from packer_cli.inputs.discovery import changed, check_unchanged
from packer_cli.inputs.token_columns import carried_in, faultless, is_list
from packer_cli.options.carried import MESSAGE, RECORD, TOKEN, Carried, carried_columns
from packer_cli.records import InputFile, Int64, Slice, TokenBatch, UInt64, offsets_of
from packer_cli.result.carried import row_type
from packer_cli.result.shard_writer import HASH_BYTES, content_hashes
from packer_cli.result.tokenized import TokenizedDirectory, grouped

_READER = ParquetReader()
_MOST_ROWS = 1 << 16  # that are decoded at once
_MOST_OPEN = 32  # files, of each of which a few megabytes are held
_ODD = np.uint64(0x9E3779B97F4A7C15)  # and so far from any small number
_TIP = "write a value for each token of the document, in its order; or with /record one for all"


class Attached:
    """The rows of Parquet files, by the documents that they belong to. Threads may share it.

    columns, names  whose values they hold
    rows    how many there are
    row     int64[k], the first row of each document that has values
    copies  int64[k], how many rows it has
    firsts  int64[files + 1], the first row of each file
    """

    def __init__(
        self, files: Sequence[InputFile], columns: Sequence[Carried], by: str, *, pairs: bool
    ) -> None:
        """`columns`: with what has a value of them; `by`: one of WAYS; `pairs`: whether documents
        are of preference. Of rows of equal content the first counts. Raises DataError for files
        that cannot be read, and for two rows of one document by its number or place.
        """
        if pairs and by == "input_ids":
            raise UsageError(
                f"--attach: {files[0].path} has input_ids, which do not tell which side of a pair "
                "is the chosen one",
                "give content_hash of the indexes instead",
            )
        self.files, self.columns, self.by = files, columns, by
        self.names = [one.name for one in columns]
        keys = [_keys_in(file, by) for file in files]
        self.firsts = offsets_of([len(one) for one in keys])
        self.rows = int(self.firsts[-1])
        every = np.concatenate([np.empty((0, 2), np.uint64), *keys])
        del keys
        order, same = grouped(every)
        if self.by in ("document", "place"):
            self._refuse_several(order, same)
        self._keys, self.row = every[order[~same]], order[~same]
        self.copies = np.diff(np.append(np.flatnonzero(~same), len(same)))

    def find(self, keys: UInt64) -> Int64:
        """int64[n], where documents are among those that have values; -1: nowhere. `keys`: uint64
        [n, 2] as `keys_of` gives them.
        """
        found = np.full(len(keys), -1, np.int64)
        first, second = self._keys.T
        at, left = np.searchsorted(first, keys[:, 0]), np.arange(len(keys))
        while len(left):  # once, but for halves that several have
            left = left[at[left] < len(first)]
            left = left[first[at[left]] == keys[left, 0]]
            is_it = second[at[left]] == keys[left, 1]
            found[left[is_it]] = at[left[is_it]]
            left = left[~is_it]
            at[left] += 1
        return found

    def keys_of(self, batch: TokenBatch, numbers: Int64) -> UInt64:
        """uint64[n, 2] of documents, which have these numbers."""
        if self.by == "document":
            return pairs_of(numbers)
        if self.by == "place":
            return pairs_of(batch.position, batch.file)
        return content_hashes(batch.ids, batch.offsets, batch.chosen)

    def keys_in(self, directory: TokenizedDirectory) -> UInt64:
        """uint64[n, 2] of all documents of a tokenized directory."""
        numbers = np.arange(len(directory))
        if self.by == "document":
            return pairs_of(numbers)
        if self.by == "place":
            file, position = directory.places(numbers)
            return pairs_of(position, file)
        return directory.content_hashes

    def _refuse_several(self, order: Int64, same: npt.NDArray[np.bool_]) -> None:
        """DataError for two rows of one document. `order`, `same`: as of `grouped`, of all rows."""
        if same.any():
            at = int(np.argmax(same))
            what = " and ".join(WAYS[self.by].columns)
            raise DataError(
                f"{self.place(int(order[at]))}: has the {what} of {self.place(int(order[at - 1]))}",
                "leave one of the two out",
            )

    def file_of(self, row: Int64) -> Int64:
        """int64[n], the numbers of the files that rows are in."""
        return np.searchsorted(self.firsts, row, side="right") - 1

    def place(self, row: int) -> str:
        """Where a row is, for people."""
        file = self.files[number := int(self.file_of(np.int64(row)))]
        return f"{file.path}, {_READER.describe(file, row - int(self.firsts[number]))}"


class _Cursor:
    """A file that is read forwards, from a row group on: `batch` begins at its row `first`."""

    def __init__(self, file: InputFile, names: list[str], row: int) -> None:
        self._edges = np.cumsum([0, *(one.rows for one in _READER.groups(file))])
        group = int(np.searchsorted(self._edges, row, side="right")) - 1
        self.first, self.end = int(self._edges[group]), int(self._edges[group])
        self._file, self._batches = file, _batches(file, names, group)
        self.batch: Any = None

    def is_before(self, row: int) -> bool:
        """Whether a row comes, without a row group before it that need not be read."""
        group = np.searchsorted(self._edges, row, side="right") - 1
        return self.first <= row and bool(self._edges[group] <= self.end)

    def go_on(self) -> None:
        """Read the next rows. Raises DataError where they have gone."""
        self.first = self.end
        self.batch = next(self._batches, None)
        if self.batch is None:
            raise changed(self._file, "it has fewer rows")
        self.end += self.batch.num_rows


class AttachedValues:
    """Reads the values of documents; for one thread."""

    def __init__(self, attached: Attached) -> None:
        self._attached, self._cursors = attached, dict[int, _Cursor]()

    def of(self, found: Int64, lengths: Int64) -> npt.NDArray[Any]:
        """[tokens] of `row_type` of the columns: of documents as `find` found them, -1 for those
        without values, which have zeros; `lengths` int64[n] in tokens.

        Raises DataError where a row has another number of values, or what a column cannot hold.
        """
        columns, offsets = self._attached.columns, offsets_of(lengths)
        out = np.zeros(int(offsets[-1]), row_type([*columns]))
        there = np.flatnonzero(found >= 0)
        rows = self._attached.row[found[there]]
        order = np.argsort(rows, kind="stable")
        rows, there = rows[order], there[order]
        for first, batch, begin, end in self._batches(rows):
            which, taken = there[begin:end], rows[begin:end] - first
            some = batch.take(pa.array(taken))
            if taken[-1] - taken[0] == end - begin - 1 and (np.diff(taken) == 1).all():
                some = batch.slice(int(taken[0]), end - begin)
            for one in columns:
                its, own = lengths[which], some.column(one.name)
                values, bad = carried_in(one, own, np.arange(len(which)), its)
                for at, reason in bad.items():
                    raise DataError(
                        f"{self._attached.place(int(rows[begin + at]))}: {reason}", _TIP
                    )
                values = np.repeat(values, its, axis=0) if one.is_of_segments else values
                if (np.diff(which) == 1).all():
                    out[one.name][offsets[which[0]] : offsets[which[-1] + 1]] = values
                    continue
                ends = offsets_of(its)
                for at, document in enumerate(which.tolist()):
                    place = slice(offsets[document], offsets[document + 1])
                    out[one.name][place] = values[ends[at] : ends[at + 1]]
        return out

    def _batches(self, rows: Int64) -> Iterator[tuple[int, Any, int, int]]:
        """(number of the first row, record batch, begin, end): where rows[begin:end] of ascending
        ones are.
        """
        files, at = self._attached.file_of(rows), 0
        while at < len(rows):
            number = int(files[at])
            before = int(self._attached.firsts[number])
            row, cursor = int(rows[at]) - before, self._cursors.get(number)
            if cursor is None or not cursor.is_before(row):
                self._cursors.pop(number, None)
                while len(self._cursors) >= _MOST_OPEN:
                    self._cursors.pop(next(iter(self._cursors)))
                cursor = _Cursor(self._attached.files[number], self._attached.names, row)
                self._cursors[number] = cursor
            while cursor.end <= row:
                cursor.go_on()
            end = int(np.searchsorted(rows, before + cursor.end))
            yield before + cursor.first, cursor.batch, at, end
            at = end


@contextmanager
def _opened(file: InputFile) -> Iterator[Any]:
    """The table of a file. Raises DataError."""
    try:
        with (
            reading(file),
            storage.open_arrow(file.path, file.status()) as source,
            _READER.opened(file, source) as table,
        ):
            yield table
    except DamagedInputError as error:  # inputs may be left out, but not these
        check_unchanged(file)
        raise DataError(error.message, "write the file again") from error


def _batches(file: InputFile, names: list[str], group: int = 0) -> Iterator[Any]:
    """Record batches of some columns of a file, from a row group on. Raises DataError."""
    with _opened(file) as table:
        _refuse_lacking(file, table.schema.names, names)
        yield from table.batches(Slice(file.index, group, None, 0), names, _MOST_ROWS)


def _refuse_lacking(file: InputFile, found: list[str], names: list[str]) -> None:
    """DataError for columns that a file does not have once."""
    for name in names:
        if (number := found.count(name)) != 1:
            raise DataError(
                f"{file.path}: {number or 'no'} column{'s' * (number > 1)} '{name}'; columns "
                f"found: {named(found)}",
                "name columns that all of the files have with --carry NAME:TYPE",
            )


def _keys_in(file: InputFile, by: str) -> UInt64:
    """uint64[rows, 2], what tells the document of each row. Raises DataError."""
    keys, row = [np.empty((0, 2), np.uint64)], 0
    for batch in _batches(file, [*WAYS[by].columns]):
        if (found := _made(by, batch)) is None:
            single = (_made(by, batch.slice(at, 1)) for at in range(batch.num_rows))
            at = next(at for at, one in enumerate(single) if one is None)
            raise DataError(
                f"{file.path}, {_READER.describe(file, row + at)}: its {WAYS[by].fault}",
                "write what packer's own shards have, or leave the row out",
            )
        keys.append(found)
        row += batch.num_rows
    return np.concatenate(keys)


def _made(by: str, batch: Any) -> UInt64 | None:
    """The keys of a batch; None where one of them is none."""
    try:
        return WAYS[by].keys(*batch.columns)
    except (ValueError, TypeError, AttributeError, pa.ArrowException):
        return None


def _of_tokens(column: Any) -> UInt64:
    offsets = offsets_of(pc.list_value_length(column).to_numpy())
    tokens = faultless(column.flatten().to_numpy(), offsets, None, None)
    if tokens is None:
        raise ValueError
    return content_hashes(*tokens[:2])


def _of_hashes(column: Any) -> UInt64:
    values = [bytes.fromhex(one) if isinstance(one, str) else one for one in column.to_pylist()]
    if any(len(one) != HASH_BYTES for one in values):
        raise ValueError
    return np.frombuffer(b"".join(values), np.uint64).reshape(-1, 2)


def _of_numbers(*columns: Any) -> UInt64:
    numbers = [column.to_numpy() for column in columns]
    if any(one.dtype.kind not in "iu" for one in numbers):
        raise ValueError
    return pairs_of(*reversed(numbers))


def pairs_of(first: Int64, second: Any = 0) -> UInt64:
    """Keys of pairs of numbers, with first halves that hardly any share, as `find` needs them."""
    keys = np.empty((len(first), 2), np.uint64)
    keys[:, 1] = second
    keys[:, 0] = first.astype(np.uint64) + keys[:, 1] * _ODD
    return keys


class Way(NamedTuple):
    """How rows tell the documents that they belong to.

    columns  that tell it
    keys     makes uint64[n, 2] of these; raises ValueError or the like for what they cannot hold
    fault    what is then said of a row
    """

    columns: tuple[str, ...]
    keys: Callable[..., UInt64]
    fault: str


WAYS = {
    "input_ids": Way(("input_ids",), _of_tokens, "input_ids are not a list of token ids"),
    "hash": Way(
        ("content_hash",), _of_hashes, "content_hash is neither 16 bytes nor 32 hexadecimal digits"
    ),
    "document": Way(("document",), _of_numbers, "document is not a number"),
    "place": Way(("file", "position"), _of_numbers, "file and position are not numbers"),
}


def matched_by(file: InputFile, columns: Sequence[Carried]) -> tuple[str, list[Carried]]:
    """How documents are found by the rows of a file, one of WAYS; and the columns with what has a
    value of them. UsageError for a file that does not tell, DataError for one that lacks a column.
    """
    with _opened(file) as table:
        schema = table.schema
    by = next((by for by, way in WAYS.items() if {*way.columns} <= {*schema.names}), "")
    if not by:
        raise UsageError(
            f"--attach: {file.path} does not tell which documents its rows belong to; columns "
            f"found: {named(schema.names)}",
            "write input_ids beside the values; or content_hash, document, or file and position",
        )
    _refuse_lacking(file, schema.names, [one.name for one in columns])
    made = list[Carried]()
    for one in columns:
        kind, depth = schema.field(one.name).type, -int(one.count is not None)
        while is_list(kind):
            kind, depth = kind.value_type, depth + 1
        if one.of == MESSAGE:
            raise UsageError(f"--carry: {one}: documents have no messages", f"leave /{MESSAGE} out")
        made.append(replace(one, of=one.of or (TOKEN if depth > 0 else RECORD)))
    return by, made


@lru_cache(maxsize=1)  # asked for by a run's beginning, and by its units
def attached_of(
    files: tuple[InputFile, ...], columns: tuple[str, ...], by: str, pairs: bool
) -> Attached:
    """`Attached` of columns as --carry writes them."""
    return Attached(files, [*carried_columns(columns).values()], by, pairs=pairs)
