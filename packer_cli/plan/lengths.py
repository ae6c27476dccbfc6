"""`packer plan --lengths`: plan rows of samples whose tokens are made while a model is trained.

A table has the length of each sample, in one column or in several that are added up. `plan_packing`
makes rows of all samples at once, and index.parquet gets a line for each row, with its samples by
key or by number. Only the columns that are named are read. Needs about 50 bytes of memory a sample,
and twice the bytes of its key.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import packer_cli
from packer_cli.errors import DataError, UsageError, cut, named, nearest
from packer_cli.inputs.byte_streams import open_source
from packer_cli.inputs.columnar import ColumnarReader, fields_at, reading
from packer_cli.inputs.discovery import check_unchanged, find_inputs
from packer_cli.inputs.formats import reader_for
from packer_cli.inputs.jsonl import JsonlReader
from packer_cli.inputs.text import CsvReader
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.option import refuse
from packer_cli.options.options import PackConfig
from packer_cli.options.run_options import StepOptions
from packer_cli.options.shapes import Shape, may_hold
from packer_cli.packing.figures import squared_sums
from packer_cli.packing.fitting import MAX_DOCUMENT_TOKENS, Loss
from packer_cli.packing.plan import plan_packing
from packer_cli.packing.window import rows_taken
from packer_cli.plan import LENGTHS, Outcome, Plan, PlannedTotals
from packer_cli.progress import Progress
from packer_cli.records import InputFile, Int32, Int64, Notify, Slice
from packer_cli.result.columns import kind_in
from packer_cli.result.counts import Counts, powers_histogram
from packer_cli.run.finalize import nothing_to_pack, totals_of_rows
from packer_cli.steps import even_order
from packer_cli.storage import OTHER, local, replacing, size_of

OWN_COLUMNS = ("row", "keys", "lengths", "used")  # of index.parquet
_KIND = "plan"  # in its metadata
_OPTIONS = (
    "max_length", "strategy", "seed", "overlong", "max_segments_per_row", "segment_multiple",
    "balance",
)  # fmt: skip
_AT_ONCE = 1 << 19  # samples that are counted or written together
# Types of keys, by the one that they are stored in. Arrow cannot put views into another order.
_KEY_TYPES = {
    pa.large_string(): pa.string(), pa.string_view(): pa.string(), pa.binary_view(): pa.binary(),
    **dict.fromkeys((pa.int8(), pa.int16(), pa.int32()), pa.int64()),
    **dict.fromkeys((pa.uint8(), pa.uint16(), pa.uint32()), pa.int64()),
}  # fmt: skip
_CORRECT = "correct the table, or write it again"
# Samples and row_offsets: row r has samples[row_offsets[r]:row_offsets[r + 1]].
_Rows = tuple[Int64, Int64]


@dataclass(frozen=True)
class LengthTable:
    """Lengths of n samples.

    file     int32[n], the input of each
    columns  by name, int32[n]
    keys     Arrow's, [n]; None: samples are numbered
    """

    file: Int32
    columns: dict[str, Int32]
    keys: Any

    @cached_property
    def total(self) -> Int32 | Int64:
        """Sum of the lengths of each sample, [n]."""
        first, *others = self.columns.values()
        return sum(others, first.astype(np.int64)) if others else first


def plan_lengths(
    inputs: list[str],
    columns: Sequence[str],
    configs: Sequence[PackConfig],
    *,
    key: str | None = None,
    even: StepOptions | None = None,
    output: Path | None = None,
    show_progress: bool = False,
    notify: Notify = lambda message: None,
) -> Plan:
    """Plan rows of the samples in tables, with each of `configs`: several lengths and strategies.

    columns  names of the columns of lengths
    configs  options as of `plan_packing`; `overlong` is "drop" or "error"
    key      name of the column that identifies a sample; None: its number, from 0 over all inputs
    even     sizes of a training whose steps are to be even: rows are put in an order for it
    output   a file for the rows of the only configuration, from `index_place`

    Raises UsageError for inputs that are not tables or lack a column, and for `even` if a step has
    more rows than there are; DataError for a sample without a valid length or key, under "error"
    for one that is longer than a row, and if nothing is left to pack.
    """
    files = find_inputs(inputs, configs[0], notify)
    with Progress(sum(file.size for file in files), show=show_progress, doing="reading") as bar:
        table = _read(files, columns, key, bar)
    pa.default_memory_pool().release_unused()  # or it would stay, unused, beside what plans need
    outcomes = list[Outcome]()
    for config in configs:
        rows = _rows_of(table, config, even, named(inputs, 1))
        with ThreadPoolExecutor(1) as pool:  # rows are counted while they are written
            counting = pool.submit(_counted, table, rows, config.max_length)
            if output is not None and len(rows[0]):
                made_with = {name: getattr(config, name) for name in _OPTIONS}
                made_with |= {"lengths": columns, "key": key}
                made_with |= {} if even is None else asdict(even)
                _write(output, table, rows, made_with)
            counts = counting.result()
        outcomes.append(Outcome(config, totals_of_rows(config, counts), counts, (1, 1)))
    if not any(outcome.planned.rows for outcome in outcomes):
        problem, _ = nothing_to_pack(outcomes[0].planned, configs[0])
        raise DataError(problem, "check --lengths, --max-length and the input")
    return Plan(files, Shape(LENGTHS, {name: name for name in columns}), None, outcomes)


def _rows_of(
    table: LengthTable, config: PackConfig, even: StepOptions | None, origin: str
) -> _Rows:
    """Plan the rows of a table. `origin`: its name, for errors."""
    lengths = table.total
    if config.overlong == "error" and (longer := lengths > config.max_length).any():
        at = int(longer.argmax())
        name = at if table.keys is None else table.keys[at].as_py()
        raise DataError(
            f"{origin}: sample {name!r} has {lengths[at]} tokens, --max-length is "
            f"{config.max_length}",
            "choose --overlong drop, or a larger --max-length",
        )
    if len(table.columns) > 1:  # sums may be more than a plan takes
        lengths = np.minimum(lengths, MAX_DOCUMENT_TOKENS)
    plan = plan_packing(
        lengths, config.max_length, strategy=config.strategy, seed=config.seed, overlong="drop",
        max_segments_per_row=config.max_segments_per_row,
        segment_multiple=config.segment_multiple, balance=config.balance,
    )  # fmt: skip
    samples, row_offsets = plan.order, plan.row_offsets
    if len(samples) < len(lengths):  # or pieces are numbered as samples are
        samples = plan.pieces.document[samples]
    if even is None:
        return samples, row_offsets
    squares = squared_sums(lengths[samples], row_offsets)
    order = even_order(squares, config.max_length, even, origin)
    return rows_taken(samples, row_offsets, order)


def _counted(table: LengthTable, rows: _Rows, max_length: int) -> PlannedTotals:
    """Count the samples of a table, and its rows."""
    counts = PlannedTotals(piece_length=np.zeros(max_length + 1, np.int64))
    for first in range(0, len(table.file), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        lengths: Int64 = table.total[part].astype(np.int64)
        is_dropped = lengths > max_length
        dropped = lengths[is_dropped]
        counts.add_documents(table.file[part], lengths, np.where(is_dropped, 0, lengths))
        counts.add_loss(Loss(dropped_documents=len(dropped), dropped_tokens=int(dropped.sum())))
        counts.add_dropped(dropped)
        counts.read_lengths += powers_histogram(lengths[lengths > 0])
    counts.unpacked_rows = counts.documents
    for _, edges, samples in _parts(rows):
        of_rows = table.total[samples]
        counts.add(Counts.of_rows(of_rows, table.file[samples], edges, max_length))
        counts.attention += int(squared_sums(of_rows, edges).sum())
    return counts


def _parts(rows: _Rows) -> Iterator[tuple[int, Int64, Int64]]:
    """Yield rows that are held together: the first one's number, their offsets, their samples."""
    samples, row_offsets = rows
    firsts = np.searchsorted(row_offsets, np.arange(0, len(samples), _AT_ONCE))
    for begin, end in pairwise(np.unique(np.append(firsts, len(row_offsets) - 1)).tolist()):
        edges = row_offsets[begin : end + 1]
        yield begin, edges - edges[0], samples[edges[0] : edges[-1]]


# --- the table


def _read(
    files: Sequence[InputFile], columns: Sequence[str], key: str | None, bar: Progress
) -> LengthTable:
    """Read tables. Raises PackerError."""
    lengths: dict[str, list[Int32]] = {name: [np.empty(0, np.int32)] for name in columns}
    counts, keys = [0] * len(files), list[Any]()
    for file in files:
        try:
            for values, consumed in _batches(file, columns, key):
                row = counts[file.index]
                for name in columns:
                    valid = _valid_lengths(values[name])
                    expected = f"a whole number from 0 to {MAX_DOCUMENT_TOKENS}"
                    _refuse_nulls(file, row, name, values[name], valid, expected)
                    lengths[name].append(valid.cast(pa.int32()).to_numpy(zero_copy_only=False))
                if key is not None:
                    keys.append(_valid_keys(values[key]))
                    expected = "a whole number of 64 bits, or text, as in the rows before"
                    _refuse_nulls(file, row, key, values[key], keys[-1], expected)
                counts[file.index] += len(lengths[columns[0]][-1])
                bar.read(consumed, counts[file.index] - row)
        except DataError as error:
            if "--on-error" not in error.tip:
                raise
            raise DataError(error.message, _CORRECT) from error
        check_unchanged(file)
    if len(types := {str(part.type) for part in keys}) > 1:
        problem = f"{key}: has values of the types {named(sorted(types))}, expected one type"
        raise DataError(problem, _CORRECT)
    return LengthTable(
        np.repeat(np.arange(len(files), dtype=np.int32), counts),
        {name: np.concatenate(parts) for name, parts in lengths.items()},
        # one chunk, or several of 2 GB
        pa.table({"": pa.chunked_array(keys)}).combine_chunks().column(0) if keys else None,
    )


def _valid_lengths(column: Any) -> Any:
    """Return lengths as an Arrow array of int64, with null for each that is not valid."""
    if isinstance(column, list):
        column = _integers(column)
    elif pa.types.is_string(column.type):  # CSV
        is_number = pc.match_substring_regex(column, "^[0-9]{1,18}$")
        column = pc.if_else(is_number, column, None)
    column = column.cast(pa.int64(), safe=False)  # huge numbers of uint64 become negative
    is_valid = pc.and_(pc.greater_equal(column, 0), pc.less_equal(column, MAX_DOCUMENT_TOKENS))
    return pc.if_else(is_valid, column, None)


def _valid_keys(column: Any) -> Any:
    """Return keys as an Arrow array, with null for each that is not valid."""
    if isinstance(column, list):
        if type(column[0]) is int:
            return _integers(column)
        return pa.array([value if type(value) is str else None for value in column], pa.string())
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(_KEY_TYPES.get(column.type, column.type))


def _integers(values: list[Any]) -> Any:
    """Return values of JSON as an Arrow array of int64, with null for all others."""
    return pa.array(
        [value if type(value) is int and value.bit_length() < 64 else None for value in values],
        pa.int64(),
    )


def _refuse_nulls(
    file: InputFile, first: int, name: str, column: Any, valid: Any, expected: str
) -> None:
    """Raise DataError for the first null of `valid`. `first`: row of the file that it begins at."""
    if valid.null_count:
        at = pc.index(valid.is_valid(), False).as_py()
        value = column[at] if isinstance(column, list) else column[at].as_py()
        shown = "null" if value is None else cut(repr(value), 100)
        problem = f"{name} is {shown}, expected {expected}"
        raise DataError(f"{file.path}, row {first + at}, counted from 0: {problem}", _CORRECT)


# Values of columns by name, as Arrow arrays or of JSON as lists; the bytes read for them.
_Read = tuple[dict[str, Any], int]


def _batches(file: InputFile, columns: Sequence[str], key: str | None) -> Iterator[_Read]:
    """Yield columns of a table, some samples at a time. Raises PackerError."""
    names = [*dict.fromkeys((*columns, *([] if key is None else [key])))]
    reader, config, whole = reader_for(file.format), DocumentConfig(), Slice(file.index, 0, None, 0)

    def refuse_missing(missing: list[str], there: list[str]) -> None:
        if missing:
            near = nearest(missing[0], there)
            raise UsageError(
                f"{file.path}: no column '{missing[0]}'; columns found: {named(there)}",
                f"did you mean {near}?" if near else "name columns of it with --lengths and --key",
            )

    if isinstance(reader, ColumnarReader):
        with reading(file), reader.opened(file) as table:
            paths = {name: fields_at(table.schema, name) for name in names}
            refuse_missing([n for n in names if len(paths[n]) != 1], table.schema.names)
            for name in columns:
                if not pa.types.is_integer(kind := paths[name][0][-1].type):
                    problem = f"{file.path}: column '{name}' has type {kind}, expected integers"
                    raise DataError(problem, "cast it, for example with pyarrow or datasets")
            for batch in table.batches(whole, names, _AT_ONCE):
                values = dict(zip(names, batch.columns, strict=True))
                yield values, round(len(batch) * table.row_bytes)
        return
    if not isinstance(reader, CsvReader | JsonlReader):
        raise UsageError(
            f"{file.path}: is {file.format}, expected a table with a line for each sample",
            "name Parquet, Arrow, CSV or JSON lines; documents are planned without --lengths",
        )
    if (first := reader.first(file, config)) is None:
        return
    is_csv = isinstance(reader, CsvReader)
    refuse_missing([
        name for name in names
        if not (first.names.count(name) == 1 if is_csv else may_hold(first.names, name))
    ], first.names)  # fmt: skip
    shape = _TableShape(LENGTHS, {f"column_{at}": name for at, name in enumerate(names)})
    with open_source(file) as opened:
        for read in reader.columns(file, opened, whole, shape, config):
            if read.bad:
                raise reader.refused(file, read.bad[0])
            if len(read.positions):
                values = dict(zip(names, read.columns.values(), strict=True))
                if is_csv:  # as text, so that a key such as 007 stays as it is
                    values = {name: pa.array(cells, pa.string()) for name, cells in values.items()}
                yield values, opened.consumed()


class _TableShape(Shape):
    """The shape of JSON records that have a field for each of `columns`."""

    @property
    def required(self) -> list[str]:
        return [*self.columns]


# --- index.parquet


def index_place(output: str, *, overwrite: bool) -> Path:
    """Return the path of the file for a plan.

    Raises UsageError for a place that none can be written to. Only an earlier plan is replaced.
    """
    path = local(output, "and plans are only written to local files")
    size = size_of(path)
    refuse([
        (not path.parent.is_dir(), f"--output: {path.parent} is not a directory",
         f"mkdir -p {path.parent}"),
        (size is not None and (size == OTHER or not _is_plan(path)),
         f"--output: {path} is there, and is not a plan of packer",
         "name another file, such as index.parquet"),
        (size is not None and not overwrite, f"--output: {path}: holds a finished plan",
         "choose another --output, or replace it with --overwrite"),
    ])  # fmt: skip
    return path


def _is_plan(path: Path) -> bool:
    try:
        return kind_in(pq.read_schema(path)) == _KIND
    except (pa.ArrowException, OSError):
        return False


def _write(path: Path, table: LengthTable, rows: _Rows, made_with: dict[str, Any]) -> None:
    """Write the rows of a plan. Raises DataError."""
    several = table.columns if len(table.columns) > 1 else {}
    key_type = pa.int64() if table.keys is None else table.keys.type
    types = {
        "row": pa.int64(), "keys": pa.list_(key_type), "lengths": pa.list_(pa.int32()),
        "used": pa.int32(), **dict.fromkeys(several, pa.list_(pa.int32())),
    }  # fmt: skip
    made_with |= {"kind": _KIND, "packer_version": packer_cli.__version__}
    schema = pa.schema(types.items(), metadata={"packer": json.dumps(made_with)})
    part = path.with_name(f"{path.name}.packer-partial")
    with (
        replacing(path, part) as file,
        pq.ParquetWriter(file, schema, use_dictionary=False) as writer,
    ):
        for first, edges, samples in _parts(rows):
            lists = partial(pa.ListArray.from_arrays, pa.array(edges, pa.int32()))
            numbers = pa.array(samples)
            columns = {
                "row": np.arange(first, first + len(edges) - 1),
                "keys": lists(
                    numbers if table.keys is None else table.keys.take(numbers).combine_chunks()
                ),
                "used": np.add.reduceat(table.total[samples], edges[:-1]).astype(np.int32),
            }
            for name, lengths in {"lengths": table.total, **several}.items():
                columns[name] = lists(pa.array(lengths[samples], pa.int32()))
            writer.write_batch(pa.RecordBatch.from_pydict(columns, schema=schema))
