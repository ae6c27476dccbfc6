"""Commit records: a unit is done if and only if its record exists and its files match.

Each is sealed: one that is damaged counts as none, and its unit is packed again.

.packer/unit-00005.json   written once all files of unit 5 are on the disk
.packer/input-00003.json  the digest of an input that several units read
units.jsonl               the units' records of a finished result, which `--update` reads

Is an input what it was? Size and times tell, as in git's index; where they do not, its content. The
bytes of an input are hashed as they are read for packing, as stretches. A unit that reads a whole
file from one end to the other thereby knows its digest, with no second read. Elsewhere the file is
read once more for its digest and, where size and times do not tell, what was packed is compared
with it. `input_times.json` of a result says how file systems identified its inputs when they were
packed:

    {"inputs": [[mtime_ns, ctime_ns, device, inode], ...], "racy": [index, ...]}
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from packer_cli import storage
from packer_cli.errors import DataError, InputChangedError, os_errors
from packer_cli.inputs.byte_streams import STDIN, stdin_digest
from packer_cli.inputs.discovery import changed, check_unchanged, is_pair
from packer_cli.ownership import Folder, put_file
from packer_cli.records import InputFile, Slice, Stretch, WorkUnit
from packer_cli.result.counts import Counts
from packer_cli.result.layout import (
    INPUT_TIMES,
    REJECTED,
    ROWS,
    UNITS,
    Shard,
    built,
    digest,
    kind_of,
)
from packer_cli.result.manifest import Input, Result, load_as_is
from packer_cli.result.reader import PACK_AGAIN, compare_digest
from packer_cli.run.identity import RUN, IsSame, Run, sealed, unsealed

UNIT_RECORDS = "unit-*.json"
Digest = tuple[int, str]  # size in bytes, sha256
_BLOCK_BYTES = 1 << 20
_FETCHED_BYTES = 4 << 20
_Stopped = Callable[[], bool]


@built
class UnitRecord(msgspec.Struct, frozen=True):
    """The record of a packed unit.

    slices      as in the WorkUnit
    shards      as in the manifest
    counts      `Counts.as_json()`
    tokenizer   what the manifest says about it
    rejected    size in bytes of the unit's part of rejected.jsonl
    inputs      [file, size, sha256] of the inputs that this unit alone has read
    reused      the shards belong to the result that is updated, and stay where they are
    rejected_from   where that part begins in the rejected.jsonl of that result
    stretches   [file, offset, size, sha256] of what it has read of others; not in units.jsonl
    """

    unit: int
    slices: tuple[Slice, ...]
    shards: list[Shard]
    counts: dict[str, Any]
    tokenizer: dict[str, Any] | None = None
    rejected: int = 0
    inputs: list[tuple[int, int, str]] = []
    reused: bool = False
    rejected_from: int = 0
    stretches: list[tuple[int, int, int, str]] = []

    @property
    def work_unit(self) -> WorkUnit:
        return WorkUnit(self.unit, self.slices)


def rejected_name(unit: int) -> str:
    """The name, in the work folder, of the file with the unit's rejected records."""
    return f"rejected-{unit:05d}.jsonl"


def squared_lengths_name(unit: int) -> str:
    """The name, in the work folder, of the file with an int64 for each of the unit's rows."""
    return f"squared_lengths-{unit:05d}.bin"


def write_unit(folder: Path, record: UnitRecord) -> None:
    put_file(_unit_path(folder, record.unit), sealed(msgspec.json.encode(record)))


def read_unit(folder: Path, unit: WorkUnit) -> UnitRecord | None:
    """The record of a unit whose files are all there, at their full size; None otherwise."""
    record: UnitRecord | None = _decoded(_unit_path(folder, unit.index), UnitRecord)
    if record is None or record.work_unit != unit:
        return None
    sizes = {shard.file: shard.bytes for shard in record.shards}
    rows = sum(shard.rows for shard in record.shards if kind_of(shard.file) == ROWS)
    if record.rejected:
        sizes[rejected_name(record.unit)] = record.rejected
    if rows:
        sizes[squared_lengths_name(record.unit)] = 8 * rows
    return record if all(_size(folder / name) == sizes[name] for name in sizes) else None


def units_in(folder: Path) -> Iterator[UnitRecord]:
    """All valid records, whether the units' files are there or not."""
    return filter(None, (_decoded(path, UnitRecord) for path in folder.glob(UNIT_RECORDS)))


def left_to_do(
    run: Run, folder: Path, part: slice = slice(None)
) -> tuple[list[WorkUnit], list[InputFile]]:
    """The units, and the inputs to be hashed by themselves since several units read them, that have
    no record yet. `part`: of all such units and inputs.
    """
    slices = [one for unit in run.units for one in unit.slices]
    several = {one.file for one in slices} - {one.file for one in slices if one.is_whole}
    shared = [run.files[index] for index in sorted(several)]
    units = [unit for unit in run.units[part] if read_unit(folder, unit) is None]
    return units, [one for one in shared[part] if read_input(folder, one.index) is None]


def forget_input(folder: Folder, file: int) -> None:
    """Discard the records of what was packed of an input: its bytes were perhaps not its own."""
    for record in [*units_in(folder.path)]:
        if file in {one.file for one in record.slices}:
            folder.unlink(_unit_path(folder.path, record.unit).name)
    if folder.is_file(name := _input_path(folder.path, file).name):
        folder.unlink(name)


def read_input(folder: Path, file: int) -> Digest | None:
    record: Digest | None = _decoded(_input_path(folder, file), Digest)
    return record


def stretches_in(folder: Path) -> dict[int, list[Stretch]]:
    """What units have read of inputs, by all records in the folder."""
    stretches = defaultdict[int, list[Stretch]](list)
    for record in units_in(folder):
        wholes = [(index, 0, size, sha256) for index, size, sha256 in record.inputs]
        for index, offset, size, sha256 in wholes + record.stretches:
            stretches[index].append(Stretch(offset, size, sha256))
    return stretches


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


def read_units(directory: Path, facts: Result) -> Iterator[UnitRecord]:
    """The records of a finished result. Raises DataError, also for those of another one: with a
    record more or less, documents would be there twice or never, unnoticed.
    """
    path = directory / UNITS
    compare_digest(path, digest(path)[1], facts, UNITS)
    decode = msgspec.json.Decoder(UnitRecord).decode
    try:
        with os_errors(path), storage.open_lines(path) as lines:
            yield from map(decode, lines)
    except (ValueError, RecursionError) as error:
        message = f"{path}: has a line that is not the record of a unit: {error}"
        raise DataError(message, PACK_AGAIN) from error


def placed_units(directory: Path, facts: Result) -> Iterator[UnitRecord]:
    """`read_units`, each with where its part of rejected.jsonl begins."""
    begin = 0
    for record in read_units(directory, facts):
        yield replace(record, rejected_from=begin)
        begin += record.rejected


def rejected_of(directory: Path, record: UnitRecord) -> bytes:
    """The unit's part of rejected.jsonl; `record` as `placed_units` gives it."""
    if not record.rejected:
        return b""
    with open(directory / REJECTED, "rb") as file:
        file.seek(record.rejected_from)
        return file.read(record.rejected)


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
        return msgspec.json.decode(unsealed(storage.read_bytes(path)), type=kind)
    except (OSError, ValueError, RecursionError):
        return None


# What inputs were


def as_packed(folder: Path, manifest: Result | None = None, *, checksum: bool = False) -> IsSame:
    """A function that says whether an input, by its index, is what was packed: by the result in a
    directory, whose `manifest` may be known, or by the run in a work folder, where one of which
    nothing was packed counts as the same. It raises DataError for inputs that cannot be read.
    `checksum`: by content, whatever the times of a result's inputs say.
    """
    if manifest is None and not (folder / RUN).exists():
        manifest = load_as_is(folder)
    packed = cache(partial(stretches_in, folder))
    known = {one.index: one for one in load_identities(folder, manifest.inputs)} if manifest else {}

    def has_same_content(index: int, now: InputFile) -> bool:
        if manifest is not None:
            then = manifest.inputs[index]
            return now.size == then.size and digest(now.path) == (then.size, then.sha256)
        whole = read_input(folder, index)
        return _holds(now.path, [Stretch(0, *whole)] if whole else packed().get(index, ()))

    def is_same(named: InputFile, now: InputFile) -> bool:
        then = named if manifest is None else known.get(named.index)
        if then is None and is_pair(now):  # a digest is of one file: of its index, only times tell
            return False
        is_told = then is not None and (is_pair(now) or not checksum)
        if then is not None and is_told and (then.has_changed(now) or then.is_surely(now)):
            return not then.has_changed(now)
        return has_same_content(named.index, now)

    return is_same


def commit_input(file: InputFile, folder: Path, stopped: _Stopped) -> None:
    """Record the digest of an input that several units read. Raises InputChangedError where it does
    not hold what those that have a record have packed of it; those to come look themselves.
    """

    def packed() -> list[Stretch]:
        return stretches_in(folder).get(file.index, [])

    at_url = storage.is_url(file.path)  # all is compared: what is told of versions may be wrong
    compared = packed() if at_url else []
    found = _digest_holding(file.path, compared, stopped)
    if found is None:
        raise _other_bytes(file)
    refuse_other_bytes(file, lambda: set(packed()).difference(compared), stopped, told=not at_url)
    if not stopped():
        put_file(_input_path(folder, file.index), sealed(msgspec.json.encode(found)))


def digest_as_read(file: InputFile, stretches: Sequence[Stretch], stopped: _Stopped) -> Digest:
    """The digest of an input that one unit has read; a wrong one once `stopped` says so. Raises
    InputChangedError.
    """
    if file.path == STDIN:
        return stdin_digest()
    read: Digest | None
    if [(one.offset, one.size) for one in stretches] == [(0, file.size)]:
        read = file.size, stretches[0].sha256
    else:
        is_told = not (file.racy or storage.is_url(file.path))
        read = _digest_holding(file.path, () if is_told else stretches, stopped)
    if read and (check_unchanged(file) or _digest_holding(file.path, stretches, stopped) == read):
        return read
    raise _other_bytes(file)


def _other_bytes(file: InputFile) -> InputChangedError:
    error = changed(file, "what was packed is not what it holds now")
    error.file = file.index
    return error


def refuse_other_bytes(
    file: InputFile,
    stretches: Callable[[], Iterable[Stretch]],
    stopped: _Stopped,
    *,
    told: bool = True,
) -> None:
    """Raise InputChangedError if a file no longer holds what was packed of it. `stretches`: these
    bytes, which are asked for where its identity cannot tell. `told`: whether it may.
    """
    unclear = not check_unchanged(file) or file.racy or not told
    if unclear and not _holds(file.path, stretches(), stopped):
        raise _other_bytes(file)


def _digest_holding(path: str, stretches: Iterable[Stretch], stopped: _Stopped) -> Digest | None:
    """The digest of a file that has these stretches, read once; None if it has others."""
    whole, position, active = hashlib.sha256(), 0, list[tuple[Stretch, Any]]()
    left = sorted((one for one in stretches if one.size), key=lambda one: -one.offset)
    with os_errors(path), storage.open_bytes(path, _FETCHED_BYTES) as file:
        while (data := file.read(_BLOCK_BYTES)) and not stopped():
            whole.update(data)
            end = position + len(data)
            while left and left[-1].offset < end:
                active.append((left.pop(), hashlib.sha256()))
            for one, sha in active:
                begin = max(one.offset - position, 0)
                sha.update(memoryview(data)[begin : one.offset + one.size - position])
                if one.offset + one.size <= end and sha.hexdigest() != one.sha256:
                    return None
            active = [(one, sha) for one, sha in active if one.offset + one.size > end]
            position = end
    return None if (left or active) and not stopped() else (position, whole.hexdigest())


def _holds(path: str, stretches: Iterable[Stretch], stopped: _Stopped = lambda: False) -> bool:
    """Tell whether a file has these stretches; reads no more of it. Raises DataError."""
    with os_errors(path), storage.open_bytes(path, _FETCHED_BYTES) as file:
        for stretch in stretches:
            file.seek(stretch.offset)
            sha, left = hashlib.sha256(), stretch.size
            while left and (data := file.read(min(left, _BLOCK_BYTES))):
                if stopped():
                    return True
                sha.update(data)
                left -= len(data)
            if left or sha.hexdigest() != stretch.sha256:
                return False
    return True


class _Identities(msgspec.Struct, omit_defaults=True):
    inputs: list[tuple[int, int, int, int]]
    racy: list[int] = []


def identities(files: Iterable[InputFile]) -> bytes:
    """The content of the file, of inputs by index."""
    files = list(files)
    times = [(file.mtime_ns, file.ctime_ns, file.device, file.inode) for file in files]
    racy = [file.index for file in files if file.racy]
    return msgspec.json.encode(_Identities(times, racy))


def write_lost(directory: Path, inputs: list[Input], files: Sequence[InputFile]) -> None:
    """Write the file if there is none. `files`: which are still what a manifest's `inputs` were."""
    path = directory / INPUT_TIMES
    if not path.exists() and len(inputs) == len(files):
        put_file(path, identities(files))


def load_identities(directory: Path, inputs: list[Input]) -> list[InputFile]:
    """The inputs that a manifest names, as they were when packed; none where the file is missing or
    damaged: then their contents decide.
    """
    try:
        document = msgspec.json.decode(
            storage.read_bytes(directory / INPUT_TIMES), type=_Identities
        )
        if len(document.inputs) != len(inputs):
            raise ValueError(f"it holds {len(document.inputs)} inputs")
    except (OSError, ValueError, RecursionError):
        return []
    racy = set(document.racy)
    return [
        InputFile(index, one.path, "", None, one.size, *identity, racy=index in racy)
        for index, (one, identity) in enumerate(zip(inputs, document.inputs, strict=True))
    ]
