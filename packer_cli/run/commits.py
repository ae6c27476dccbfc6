"""Records of a run: a unit is done if and only if its record exists and its files match.

.packer/ID/run.json          the run, written by `begin` before its first unit
.packer/ID/unit-00005.json   written once all files of unit 5 are on the disk
units.jsonl                  the records of a finished result, which `--add` reads

A record has a checksum and names its run. The unit of a record that is damaged, or of another run,
is packed again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from packer_cli import storage
from packer_cli.errors import DataError, UsageError, os_errors
from packer_cli.records import Slice, WorkUnit
from packer_cli.result.counts import Counts
from packer_cli.result.existing import MANIFESTS, look
from packer_cli.result.layout import (
    INCOMPLETE,
    REJECTED,
    ROWS,
    SIDE_FILES,
    SQUARED_LENGTHS,
    TOKENIZER_FILES,
    UNITS,
    Shard,
    built,
    kind_of,
)
from packer_cli.result.manifest import Result
from packer_cli.result.reader import PACK_AGAIN, check_side_file
from packer_cli.run.identity import (
    RUN,
    RunPlan,
    differences,
    differing_options,
    load_run,
    sealed,
    unsealed,
)
from packer_cli.run.place import LOCK, UNIT_RECORDS, LockedOutput, discard, is_begun
from packer_cli.storage import put_file, size_of, sync, write_file


def begin(output: LockedOutput, run: RunPlan, *, may_replace: bool) -> None:
    """Make `run` the run of the work folder. Units of it that are packed already stay there.

    `may_replace`: units of another run may be discarded; otherwise they are a UsageError. Raises
    UsageError for files of others where the result is to be, too.
    """
    work = output.work
    with output.begin_lock():
        look(output.path).refuse_foreign(names_of(run))
        if not _continues(output, run, may_replace):
            discard(work)
            for name, content in run.chosen.side_files.items():
                write_file(work / name, content)
        put_file(work / RUN, run.to_bytes())  # its limits may be others
        sync(work.parent)
        sync(output.path)


def _continues(output: LockedOutput, run: RunPlan, may_replace: bool) -> bool:
    """True if `run` continues the run of the work folder."""
    place, work, options = output.path, output.work, output.options
    shared = options.as_rank is not None
    if not run.resumable or not (is_begun(work) or (shared and (work / RUN).exists())):
        if any(not name.endswith(LOCK) for name in os.listdir(work)):
            options.notify(f"{place} holds an unfinished run; starting it again from the beginning")
        return False
    earlier = load_run(work / RUN)
    if earlier is None:
        differ = ["it is damaged, or of another packer"]
    else:
        differ = differences(earlier, run) or _skipped(earlier, run, work)
    if differ and not may_replace:
        again = f"remove {work.parent} when no rank is at work" if shared else "--overwrite"
        raise UsageError(
            f"{place}: holds an unfinished run that differs: {'; '.join(differ)}",
            f"to continue it, give its options and inputs; to start over, {again}",
        )
    if differ:
        options.notify(f"{place}: the unfinished run is discarded: {'; '.join(differ)}")
    return not differ


def _skipped(earlier: RunPlan, run: RunPlan, work: Path) -> list[str]:
    """Name the options that differ if units have skipped bad records, on which `run` is to fail."""
    if (earlier.config.on_error, run.config.on_error) != ("skip", "fail"):
        return []
    is_skipped = any(record.rejected for record in units_in(work, earlier.identity))
    return differing_options(earlier.config, run.config, limits=True) if is_skipped else []


def names_of(run: RunPlan) -> set[str]:
    """Return the names of files that the result of a run may have beside shards."""
    names = {*SIDE_FILES, *MANIFESTS} - ({*TOKENIZER_FILES} - run.chosen.hashes.keys())
    if run.config.on_error != "skip":
        names -= {REJECTED}
    if run.is_to_tokenize:
        names -= {SQUARED_LENGTHS}
    if run.is_to_tokenize or run.row_config.max_loss is None:
        names -= {INCOMPLETE}
    return names


@built
class UnitRecord(msgspec.Struct, frozen=True):
    """The record of a packed unit.

    slices      as in the WorkUnit
    shards      as in the manifest
    counts      `Counts.as_json()`
    tokenizer   what the manifest says about it
    rejected    size in bytes of the unit's part of rejected.jsonl
    run         `RunPlan.identity`; this and the fields below are empty in units.jsonl
    digests     (file, sha256) of the inputs whose beginning the unit has read
    reused      the shards belong to the result that is added to, and stay where they are
    rejected_from   where the unit's part begins in the rejected.jsonl of that result
    """

    unit: int
    slices: tuple[Slice, ...]
    shards: list[Shard]
    counts: dict[str, Any]
    tokenizer: dict[str, Any] | None = None
    rejected: int = 0
    run: str = ""
    digests: list[tuple[int, str]] = []
    reused: bool = False
    rejected_from: int = 0

    @property
    def work_unit(self) -> WorkUnit:
        return WorkUnit(self.unit, self.slices)


def rejected_name(unit: int) -> str:
    """Name the file, in the work folder, of the unit's rejected records."""
    return f"rejected-{unit:05d}.jsonl"


def squared_lengths_name(unit: int) -> str:
    """Name the file, in the work folder, that has an int64 for each of the unit's rows."""
    return f"squared_lengths-{unit:05d}.bin"


def write_unit(folder: Path, record: UnitRecord) -> None:
    """Commit a unit, all of whose files are on the disk."""
    put_file(_unit_path(folder, record.unit), sealed(msgspec.json.encode(record)))


def read_unit(folder: Path, unit: WorkUnit, run: str) -> UnitRecord | None:
    """Read the record of a unit of this run; None if there is none, or a file of the unit is
    missing or has another size.
    """
    record = _decoded(_unit_path(folder, unit.index))
    if record is None or (record.work_unit, record.run) != (unit, run):
        return None
    sizes = {shard.file: shard.bytes for shard in record.shards}
    rows = sum(shard.rows for shard in record.shards if kind_of(shard.file) == ROWS)
    if record.rejected:
        sizes[rejected_name(record.unit)] = record.rejected
    if rows:
        sizes[squared_lengths_name(record.unit)] = 8 * rows
    return record if all(size_of(folder / name) == sizes[name] for name in sizes) else None


def units_in(folder: Path, run: str) -> Iterator[UnitRecord]:
    """Yield the valid records of this run, whether the units' files are there or not."""
    records = filter(None, map(_decoded, folder.glob(UNIT_RECORDS)))
    return (record for record in records if record.run == run)


def left_to_do(run: RunPlan, folder: Path, part: slice = slice(None)) -> list[WorkUnit]:
    """Return the units that have no record yet, of `part` of all units."""
    return [unit for unit in run.units[part] if read_unit(folder, unit, run.identity) is None]


def counts_of(record: UnitRecord) -> Counts:
    """Return the counts in a record. Raises DataError if they cannot be counts."""
    try:
        return Counts.from_json(record.counts)
    except (ValueError, TypeError) as error:
        raise DataError(
            f"the record of unit {record.unit} is damaged: {error}",
            "to pack everything again, use --overwrite",
        ) from error


def as_line(record: UnitRecord) -> bytes:
    """Return a line of units.jsonl, which is the same whether the unit was reused or packed."""
    return (
        msgspec.json.encode(replace(record, run="", digests=[], reused=False, rejected_from=0))
        + b"\n"
    )


def read_units(directory: Path, facts: Result) -> Iterator[UnitRecord]:
    """Yield the records of a finished result.

    Raises DataError if they are damaged, or those of another result: with a record more or less,
    documents would be in the next result twice or never.
    """
    path = directory / UNITS
    check_side_file(path, facts, UNITS)
    decode = msgspec.json.Decoder(UnitRecord).decode
    try:
        with os_errors(path), storage.open_lines(path) as lines:
            yield from map(decode, lines)
    except (ValueError, RecursionError) as error:
        message = f"{path}: has a line that is not the record of a unit: {error}"
        raise DataError(message, PACK_AGAIN) from error


def placed_units(directory: Path, facts: Result) -> Iterator[UnitRecord]:
    """Yield the records of `read_units`, each with where its part of rejected.jsonl begins."""
    begin = 0
    for record in read_units(directory, facts):
        yield replace(record, rejected_from=begin)
        begin += record.rejected


def _unit_path(folder: Path, unit: int) -> Path:
    return folder / f"unit-{unit:05d}.json"


def _decoded(path: Path) -> UnitRecord | None:
    try:
        return msgspec.json.decode(unsealed(storage.read_bytes(path)), type=UnitRecord)
    except (OSError, ValueError, RecursionError):
        return None
