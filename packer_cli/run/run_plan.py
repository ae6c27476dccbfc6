"""The plan of a run, and the records of its units. Equal runs write equal bytes.

.packer/ID/run.json          the RunPlan, before any unit is packed
.packer/ID/unit-00005.json   a UnitRecord, once all files of unit 5 are on the disk
units.jsonl                  the records of a finished result, which `--add` reads

Each process that packs a unit (a worker, a rank, a Ray worker, the same command after a crash)
works from an equal plan. A unit is done if and only if its record exists and its files match. A
record has a checksum and names its run: a unit whose record is damaged, or of another run, is
packed again. A plan of a million units takes seconds to write and to read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType, structs

import packer_cli
from packer_cli import storage
from packer_cli.errors import InternalError, UsageError, os_errors
from packer_cli.inputs.byte_streams import STDIN
from packer_cli.mixing.units import work_units
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.options import PackConfig
from packer_cli.options.shapes import Shape
from packer_cli.records import InputFile, Slice, WorkUnit
from packer_cli.result.layout import (
    ROWS,
    TEMPLATE,
    TOKENIZER,
    TOOL_TEMPLATE,
    UNITS,
    Shard,
    built,
    kind_of,
)
from packer_cli.result.manifest import LIMITS, TOKENIZED, Result, TokenizerInfo
from packer_cli.result.reader import check_side_file
from packer_cli.storage import put_file, size_of

if TYPE_CHECKING:
    from packer_cli.chat.templates import TemplateChoice
    from packer_cli.tokenization.locate import TokenizerFiles

RUN, UNIT_RECORDS = "run.json", "unit-*.json"


@dataclass(frozen=True)
class TokenizerSelection:
    """Tokenizer and chat template of a run, not loaded.

    name      the tokenizer as the user named it; None if the inputs hold token ids
    files     files of the tokenizer; None for the built-in one
    template  the chat template, if one is used
    copies    contents of side files, by name, if another run has selected them
    known     sha256 of side files, which are not hashed again
    """

    name: str | None
    files: TokenizerFiles | None = None
    template: TemplateChoice | None = None
    copies: dict[str, bytes] = field(default_factory=dict, repr=False)
    known: dict[str, str] = field(default_factory=dict)

    @property
    def side_files(self) -> dict[str, bytes]:
        """The files that a result keeps of them, so that it explains itself."""
        contents = dict(self.copies)
        if self.files is not None:
            contents = {TOKENIZER: self.files.json, **self.files.companions}
        if self.template is not None:
            contents[TEMPLATE] = self.template.source.encode()
            contents.pop(TOOL_TEMPLATE, None)
            if self.template.tool_use is not None:
                contents[TOOL_TEMPLATE] = self.template.tool_use.encode()
        return contents

    @cached_property
    def hashes(self) -> dict[str, str]:
        """The sha256 of each side file, by name."""
        known = self.known | ({TOKENIZER: self.files.sha256} if self.files else {})
        new = {n: content for n, content in self.side_files.items() if n not in known}
        return known | {n: hashlib.sha256(content).hexdigest() for n, content in new.items()}


@dataclass(frozen=True)
class RunPlan:
    """All that a run's bytes depend on.

    config  as `shape_rules.for_shape` gives it
    files   by index
    units   to pack, by ascending index
    kept    records of the units that stay of an earlier result, with --add; likewise
    """

    config: DocumentConfig
    shape: Shape
    files: tuple[InputFile, ...]
    units: tuple[WorkUnit, ...]
    chosen: TokenizerSelection
    packer_version: str = field(default_factory=lambda: packer_cli.__version__)
    kept: tuple[UnitRecord, ...] = ()

    @property
    def row_config(self) -> PackConfig:
        """Its options, of a run that packs rows."""
        if not isinstance(self.config, PackConfig):
            raise InternalError("a run that tokenizes has no options of rows")
        return self.config

    @property
    def is_to_tokenize(self) -> bool:
        """True if it writes documents rather than rows."""
        return not isinstance(self.config, PackConfig)

    @property
    def is_tokenized(self) -> bool:
        """True if its inputs are tokenized directories."""
        return any(file.format == TOKENIZED for file in self.files)

    @property
    def resumable(self) -> bool:
        """True if its inputs can be read a second time."""
        return all(file.path != STDIN for file in self.files)

    @cached_property
    def identity(self) -> str:
        """Digest of all that the bytes of its units depend on, but for their slices."""
        options = {one.name: getattr(self.config, one.name) for one in fields(self.config)}
        files = [
            (one.known_as, one.format, one.compression, one.size, one.version,
             one.shape)
            for one in self.files
        ]  # fmt: skip
        content = (
            self.packer_version, {n: one for n, one in options.items() if n not in LIMITS},
            self.shape, files, sorted(self.chosen.hashes.items()),
            None if TOKENIZER in self.chosen.hashes else self.chosen.name,
        )  # fmt: skip
        return hashlib.sha256(msgspec.json.encode(content)).hexdigest()

    def cut(self) -> RunPlan:
        """The run with its inputs cut into work units."""
        return replace(self, units=tuple(work_units(self.files, self.config)))

    def to_bytes(self) -> bytes:
        """The content of its record."""
        names = ("config", "shape", "files", "units", "packer_version")
        own = {name: getattr(self, name) for name in names}
        own |= {"tokenizer": self.chosen.name, "side_files": self.chosen.hashes}
        return sealed(msgspec.json.encode(own))


def load_run(path: Path) -> RunPlan | None:
    """The run that `to_bytes` wrote; None when there is none that this packer can read."""
    try:
        content = msgspec.json.decode(unsealed(storage.read_bytes(path)))
        kinds: dict[str, Any] = {
            "config": PackConfig if "max_length" in content["config"] else DocumentConfig,
            "shape": Shape, "files": tuple[InputFile, ...], "units": tuple[WorkUnit, ...],
            "packer_version": str, "tokenizer": str | None, "side_files": dict[str, str],
        }  # fmt: skip
        own = {name: msgspec.convert(content[name], kind) for name, kind in kinds.items()}
    except (OSError, LookupError, ValueError, TypeError, RecursionError, UsageError):
        return None
    return RunPlan(
        chosen=TokenizerSelection(own.pop("tokenizer"), known=own.pop("side_files")), **own
    )


def sealed(content: bytes) -> bytes:
    """The content, after a first line that holds its checksum."""
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def unsealed(data: bytes) -> bytes:
    """Return the data that was sealed. Raises ValueError if it has changed."""
    seal, _, content = data.partition(b"\n")
    if seal != hashlib.sha256(content).hexdigest().encode():
        raise ValueError("not what was written")
    return content


@built
class UnitRecord(msgspec.Struct, frozen=True):
    """The record of a packed unit.

    slices      as in the WorkUnit
    shards      as in the manifest
    counts      `Counts.as_json()`
    tokenizer   as in the manifest
    rejected    size in bytes of the unit's part of rejected.jsonl
    run         `RunPlan.identity`; this and the fields below are empty in units.jsonl
    digests     (file, sha256) of the inputs whose beginning the unit has read
    before      of a unit that stays of an earlier result: bytes of rejected.jsonl, and rows, that
                lie there before those of the unit
    stdin_bytes  that the unit has read
    sessions    (file, digest) of sessions of calls that another unit must not have, too
    """

    unit: int
    slices: tuple[Slice, ...]
    shards: list[Shard]
    counts: dict[str, Any]
    tokenizer: TokenizerInfo | None = None
    rejected: int = 0
    run: str = ""
    digests: list[tuple[int, str]] = []
    before: tuple[int, int] | None = None
    stdin_bytes: int = 0
    sessions: list[tuple[int, int]] | UnsetType = UNSET

    @property
    def work_unit(self) -> WorkUnit:
        return WorkUnit(self.unit, self.slices)

    @property
    def inputs(self) -> set[int]:
        """Numbers of the inputs that the unit reads."""
        return {part.file for part in self.slices}

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards if kind_of(shard.file) == ROWS)


def common_tokenizer(infos: Sequence[TokenizerInfo | None]) -> TokenizerInfo | None:
    """Return the description of a tokenizer; the tokens around documents only if all agree."""
    known = [info for info in infos if info is not None]
    differ = {
        name: UNSET
        for name in ("prefix", "suffix")
        if any(getattr(info, name) != getattr(known[0], name) for info in known)
    }
    return structs.replace(known[0], **differ) if known else None


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
    if record.rejected:
        sizes[rejected_name(record.unit)] = record.rejected
    if record.rows:
        sizes[squared_lengths_name(record.unit)] = 8 * record.rows
    return record if all(size_of(folder / name) == sizes[name] for name in sizes) else None


def units_in(folder: Path, run: str) -> Iterator[UnitRecord]:
    """Yield the valid records of this run, whether the units' files are there or not."""
    records = filter(None, map(_decoded, folder.glob(UNIT_RECORDS)))
    return (record for record in records if record.run == run)


def left_to_do(run: RunPlan, folder: Path, part: slice = slice(None)) -> list[WorkUnit]:
    """Return the units that have no record yet, of `part` of all units."""
    return [unit for unit in run.units[part] if read_unit(folder, unit, run.identity) is None]


def as_line(record: UnitRecord) -> bytes:
    """Return a line of units.jsonl, which is the same whether the unit was kept or packed."""
    kept = structs.replace(record, run="", digests=[], before=None, stdin_bytes=0, sessions=UNSET)
    return msgspec.json.encode(kept) + b"\n"


def read_units(directory: Path, facts: Result) -> Iterator[UnitRecord]:
    """Yield the records of a finished result. Raises DataError unless they are those that its
    manifest lists: with one more or less, documents would be in the next result twice or never.
    """
    path = directory / UNITS
    check_side_file(path, facts, UNITS)
    with os_errors(path), storage.open_lines(path) as lines:
        yield from map(msgspec.json.Decoder(UnitRecord).decode, lines)


def kept_units(directory: Path, facts: Result) -> Iterator[UnitRecord]:
    """Yield the records of `read_units` as units that stay: with the digests of their inputs, and
    with what lies before them in the files of the result.
    """
    rejected = rows = 0
    for record in read_units(directory, facts):
        digests = [(index, facts.inputs[index].sha256) for index in record.inputs]
        yield structs.replace(record, digests=digests, before=(rejected, rows))
        rejected, rows = rejected + record.rejected, rows + record.rows


def _unit_path(folder: Path, unit: int) -> Path:
    return folder / f"unit-{unit:05d}.json"


def _decoded(path: Path) -> UnitRecord | None:
    try:
        return msgspec.json.decode(unsealed(storage.read_bytes(path)), type=UnitRecord)
    except (OSError, ValueError, RecursionError):
        return None
