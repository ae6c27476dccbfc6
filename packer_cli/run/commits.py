"""Commit records: a unit is done if and only if its record exists and its files match.

Each is sealed: one that is damaged counts as none, and its unit is packed again.

.packer/unit-00005.json   written once all files of unit 5 are on the disk
.packer/input-00003.json  the digest of an input that several units read
units.jsonl               the units' records of a finished result, which `--update` reads
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from packer_cli.durable import put_file
from packer_cli.errors import DataError, InternalError, from_os_error
from packer_cli.records import Slice, Stretch, WorkUnit
from packer_cli.result.counts import Counts
from packer_cli.result.layout import ROWS, is_shard_of, kind_of
from packer_cli.result.shards import Shard
from packer_cli.run.identity import sealed, unsealed
from packer_cli.threads import built

UNIT_RECORDS = "unit-*.json"
Digest = tuple[int, str]  # size in bytes, sha256


@built
class UnitRecord(msgspec.Struct, frozen=True):
    """The record of a packed unit.

    slices      as in the WorkUnit: [file, start, stop, weight]
    shards      as in the manifest
    counts      `Counts.as_json()`
    tokenizer   what the manifest says about it
    rejected    size in bytes of the unit's part of rejected.jsonl
    inputs      [file, size, sha256] of the inputs that this unit alone has read
    stretches   [file, offset, size, sha256] of what it has read of others; not in units.jsonl
    reused      the shards belong to the result being updated, and stay where they are
    rejected_from   where that part begins in the rejected.jsonl of that result
    """

    unit: int
    slices: list[tuple[int, int, int | None, int]]
    shards: list[Shard]
    counts: dict[str, Any]
    tokenizer: dict[str, Any] | None = None
    rejected: int = 0
    inputs: list[tuple[int, int, str]] = []
    reused: bool = False
    rejected_from: int = 0
    stretches: list[tuple[int, int, int, str]] = []

    def is_of(self, unit: WorkUnit) -> bool:
        if (self.unit, self.slices) != (unit.index, slices_of(unit)):
            return False
        parts = Counter[str]()  # of each kind
        for shard in self.shards:
            kind = kind_of(shard.file)
            if shard.unit != self.unit or not is_shard_of(
                shard.file, self.unit, parts[kind], shard.sha256
            ):
                return False
            parts[kind] += 1
        return True

    @property
    def work_unit(self) -> WorkUnit:
        return WorkUnit(self.unit, tuple(Slice(*part) for part in self.slices))


@built
class _InputRecord(msgspec.Struct, frozen=True):
    size: int
    sha256: str


def slices_of(unit: WorkUnit) -> list[tuple[int, int, int | None, int]]:
    return [(part.file, part.start, part.stop, part.weight) for part in unit.slices]


def rejected_name(unit: int) -> str:
    """The name, in the work folder, of the file with the unit's rejected records."""
    return f"rejected-{unit:05d}.jsonl"


def squared_lengths_name(unit: int) -> str:
    """The name, in the work folder, of the file with an int64 for each of the unit's rows."""
    return f"squared_lengths-{unit:05d}.bin"


def write_unit(folder: Path, record: UnitRecord, *, durable: bool = True) -> None:
    content = sealed(msgspec.json.encode(record))
    put_file(_unit_path(folder, record.unit), content, durable=durable)


def write_input(folder: Path, file: int, size: int, sha256: str) -> None:
    content = msgspec.json.encode(_InputRecord(size, sha256))
    put_file(_input_path(folder, file), sealed(content))


def read_unit(folder: Path, unit: WorkUnit) -> UnitRecord | None:
    """The record of a unit whose files are all there, at their full size; None otherwise."""
    record = read_unit_record(_unit_path(folder, unit.index))
    if record is None or not record.is_of(unit):
        return None
    # the result's own folder is the one that holds .packer
    return (
        record if files_are_there(record, folder.parents[1] if record.reused else folder) else None
    )


def read_unit_record(path: Path) -> UnitRecord | None:
    """A unit's record, whether its files are there or not; None if there is no valid one."""
    record: UnitRecord | None = _decoded(path, UnitRecord)
    return record


def files_are_there(record: UnitRecord, folder: Path) -> bool:
    """Whether the unit's files in `folder` have the sizes that its record gives."""
    sizes = {shard.file: shard.bytes for shard in record.shards}
    if record.rejected and not record.reused:
        sizes[rejected_name(record.unit)] = record.rejected
    rows = sum(shard.rows for shard in record.shards if kind_of(shard.file) == ROWS)
    if rows and not record.reused:
        sizes[squared_lengths_name(record.unit)] = 8 * rows
    return all(_size(folder / name) == size for name, size in sizes.items())


def read_input(folder: Path, file: int) -> Digest | None:
    record = _decoded(_input_path(folder, file), _InputRecord)
    return None if record is None else (record.size, record.sha256)


def digests_in(folder: Path) -> dict[int, Digest]:
    """The digests of whole inputs, collected from all records in the folder."""
    digests = {
        index: (size, sha256)
        for record in _units_in(folder)
        for index, size, sha256 in record.inputs
    }
    for path in folder.glob("input-*.json"):
        index = int(path.stem.partition("-")[2])
        if (digest := read_input(folder, index)) is not None:
            digests[index] = digest
    return digests


def stretches_in(folder: Path) -> dict[int, list[Stretch]]:
    """What units have read of inputs that they share with others, by all records in the folder."""
    stretches = defaultdict[int, list[Stretch]](list)
    for record in _units_in(folder):
        for index, offset, size, sha256 in record.stretches:
            stretches[index].append(Stretch(offset, size, sha256))
    return stretches


def _units_in(folder: Path) -> Iterator[UnitRecord]:
    for path in folder.glob("unit-*.json"):
        record = _decoded(path, UnitRecord)
        if record is not None:
            yield record


def require_unit(folder: Path, unit: WorkUnit) -> UnitRecord:
    """The record of a unit that is known to have one. Raises InternalError if it is gone."""
    record = read_unit(folder, unit)
    if record is None:
        raise InternalError(
            f"unit {unit.index} was packed, but its files in {folder} are not right"
        )
    return record


def counts_of(record: UnitRecord) -> Counts:
    """The counts in a record. Raises DataError when they cannot be counts."""
    try:
        return Counts.from_json(record.counts)
    except (ValueError, TypeError) as error:
        raise DataError(
            f"the record of unit {record.unit} is damaged: {error}",
            "to pack everything again, use --overwrite",
        ) from error


def as_line(record: UnitRecord) -> bytes:
    """The record as a line of units.jsonl, which must not show what a run has reused."""
    return msgspec.json.encode(replace(record, reused=False, rejected_from=0, stretches=[])) + b"\n"


def read_units(path: Path) -> Iterator[UnitRecord]:
    """The records of a finished result. Raises ValueError for a line that is none, or DataError."""
    decode = msgspec.json.Decoder(UnitRecord).decode
    try:
        with open(path, "rb") as file:
            yield from map(decode, file)
    except OSError as error:
        raise from_os_error(error, path, "read") from error


def _unit_path(folder: Path, unit: int) -> Path:
    return folder / f"unit-{unit:05d}.json"


def _input_path(folder: Path, file: int) -> Path:
    return folder / f"input-{file:05d}.json"


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def _decoded(path: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(unsealed(path.read_bytes()), type=kind)
    except (OSError, ValueError, RecursionError):
        return None
