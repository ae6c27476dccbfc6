"""`--update`: which units of an earlier result stay, and which are packed.

    plan_update(...) -> Update(files, units, reused)

A unit stays when all inputs that it reads are unchanged, or are kept without being named
(`unnamed.py`). Files and units keep their numbers, because rows name them; what is new gets
numbers that are free. So an update may give other rows than packing everything again, but holds
the same documents, each once.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import msgspec

import packer_cli
from packer_cli import storage
from packer_cli.config.documents import DocumentConfig
from packer_cli.config.shape_rules import for_member
from packer_cli.config.shapes import Shape, joined
from packer_cli.errors import DataError, UsageError
from packer_cli.inputs.detection import shapes_of
from packer_cli.inputs.pairs import is_pair
from packer_cli.mixing.units import work_units
from packer_cli.records import InputFile, WorkUnit
from packer_cli.result.layout import INFO, REJECTED, SQUARED_LENGTHS, STATE, UNITS
from packer_cli.result.manifest import Input, Manifest, Result
from packer_cli.result.manifest_check import document_config_of, shape_of
from packer_cli.result.shards import digest
from packer_cli.run import commits
from packer_cli.run.commits import UnitRecord
from packer_cli.run.directory import finished
from packer_cli.run.identity import (
    Run,
    differing_options,
    differing_packers,
    differing_tokenizers,
)
from packer_cli.run.input_times import load_identities
from packer_cli.run.unnamed import (
    Unnamed,
    find_contents,
    find_unnamed,
    kept_file,
    read_again,
    refuse_changed,
    refuse_loss,
    refuse_loss_of_stdin,
    refuse_other_names,
    refuse_to_forget,
    renamed,
)

_NOT_OF_TOKENIZER = {STATE, INFO, REJECTED, UNITS, SQUARED_LENGTHS}
_ANEW = "to pack everything again, use --overwrite"


@dataclass(frozen=True)
class Update:
    """What an update consists of.

    files    by index; those that are gone have no format
    units    all, by index
    reused   records of those that stay
    digests  of the inputs that these read
    changed  whether there is anything to do
    shape    of the records, with what files have that are read again without being named
    kept     inputs that are not named and stay as they are
    dropped  inputs that are not named and go with their documents
    moved    earlier names -> those by which inputs with the same content are named now
    copies   named files that are not added -> inputs of the result with the same content
    """

    files: list[InputFile]
    units: list[WorkUnit]
    reused: list[UnitRecord]
    digests: dict[int, commits.Digest]
    changed: bool
    shape: Shape
    kept: Unnamed
    dropped: Unnamed
    moved: dict[str, str] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)

    def keep(self, work: Path) -> None:
        """Record the units that stay, except those that an earlier run packed again.

        Without a sync, which for a million units would take an hour: the records of the
        result stay where they are, and a record that a power loss has cost counts as none.
        """
        for record in self.reused:
            if commits.read_unit(work, record.work_unit) is None:
                commits.write_unit(work, record, durable=False)
        for index, contents in self.digests.items():
            commits.write_input(work, index, *contents)


def plan_update(
    directory: Path,
    manifest: Result,
    current: list[InputFile],
    shape: Shape,
    config: DocumentConfig,
    tokenizer: str | None,
    side_files: dict[str, str],
    *,
    checksum: bool,
    unnamed: str,
) -> Update:
    """Compare an earlier result with the `current` inputs.

    An input is unchanged when its size and time of change are, or with `checksum` its digest.
    `unnamed`: what becomes of inputs that are not among `current`, as in `RunOptions`. Raises
    UsageError when documents would be lost, or the options or the tokenizer are others; DataError
    when the result lacks what is needed.
    """
    if isinstance(manifest, Manifest) and manifest.sources:
        settled = replace(config, shape=shape.kind)
        return _of_mixture(manifest, current, shape, settled)
    _refuse_other_options(directory, manifest, shape, config, tokenizer, side_files)
    same = _same_inputs(directory, manifest, current, checksum)
    moved, copies = find_contents(manifest, current, config, same, adding=unnamed == "kept")
    current = [file for file in current if file.path not in copies]
    names = {manifest.inputs[index].path: path for index, path in moved.items()}
    if moved:
        manifest = renamed(manifest, moved)
        # rejected.jsonl names the input of each record: such a unit is packed again
        same |= {index for index in moved if not manifest.inputs[index].rejected_records}
    others = find_unnamed(manifest, current)
    if unnamed != "dropped":
        refuse_loss_of_stdin(manifest, current)
        refuse_other_names(others, current)
    if unnamed == "refused":
        refuse_loss(directory, others)
    kept, dropped = (others, Unnamed()) if unnamed == "kept" else (Unnamed(), others)
    records = _reusable(_records(directory, manifest), directory, same | kept.keys())
    standing = {index for record in records for index in _inputs(record)}
    kept_files, shape = _kept_files(directory, manifest, kept, standing, shape, config, checksum)
    files = _numbered(manifest, [*current, *kept_files])
    if unnamed != "dropped":
        refuse_to_forget(directory, files)
    rest = [file for file in files if file.format and file.index not in standing]
    new: list[WorkUnit] = []
    if rest:
        free = _free({record.unit for record in records})
        weight = sum(part[-1] for record in records for part in record.slices)
        new = [replace(unit, index=next(free)) for unit in work_units(rest, config, weight)]
    units = sorted([*new, *(record.work_unit for record in records)], key=lambda unit: unit.index)
    digests = {
        index: (manifest.inputs[index].size, manifest.inputs[index].sha256)
        for index in standing - {index for record in records for index, *_ in record.inputs}
    }
    changed = bool(new or dropped or moved)
    return Update(files, units, records, digests, changed, shape, kept, dropped, names, copies)


def _of_mixture(
    manifest: Manifest, current: list[InputFile], shape: Shape, config: DocumentConfig
) -> Update:
    """Everything anew, or nothing: a change of one source changes what is taken of the others."""
    changed = not is_same_mixture(manifest, current, config)
    units = work_units(current, config)
    return Update(current, units, [], {}, changed, shape, Unnamed(), Unnamed())


def refuse_other_result(place: Path | str, manifest: Result, run: Run) -> None:
    """UsageError for a finished result, in a directory or at a URL, that is not what `run` makes:
    of the same inputs and options, with all its shards.
    """
    try:
        earlier = document_config_of(manifest)
    except ValueError as error:
        raise finished(place, f"its options are damaged: {error}") from error
    config = replace(run.config, shape=run.shape.kind)
    differ = differing_packers(manifest.packer_version, str(packer_cli.__version__))
    differ += differing_options(earlier, config, limits=True)
    if not differ:
        differ = differing_tokenizers(*_tokenizer_of(manifest), run.tokenizer, run.side_files)
    if differ:
        raise finished(place, "; ".join(differ))
    if not run.resumable:
        raise finished(place, "stdin cannot be compared with what it was made of")
    is_remote = storage.is_url(str(place))
    if text := _differing_inputs(place, manifest, run, by_content=is_remote):
        raise finished(place, text, may_update=not is_remote)


def _differing_inputs(place: Path | str, manifest: Result, run: Run, *, by_content: bool) -> str:
    """How the inputs of a result differ from those of a run with the same options, or what of the
    result is lost; "" for nothing.
    """
    paths = [one.path for one in manifest.inputs_now.values()]
    now = [file.path for file in run.files]
    for names, others, text in ((now, {*paths}, "is new"), (paths, {*now}, "is not named")):
        if text_of := [name for name in names if name not in others]:
            more = f" and {len(text_of) - 1:,} more" if len(text_of) > 1 else ""
            return f"{text_of[0]}{more} {text}"
    try:
        same = _same_inputs(Path(place), manifest, list(run.files), by_content)
    except DataError as error:
        return error.message
    if changed := [one.path for i, one in manifest.inputs_now.items() if i not in same]:
        return f"{changed[0]} has changed"
    units = [(one.index, [(s.file, s.start, s.stop) for s in one.slices]) for one in run.units]
    if paths != now or [(one.unit, one.slices) for one in manifest.units] != units:
        return "its inputs were packed one after another, or in another order"
    sizes = storage.sizes(str(place)) if by_content else _sizes(Path(place))
    lost = [shard.file for shard in manifest.shards if sizes.get(shard.file) != shard.bytes]
    return f"{lost[0]} is missing or damaged" if lost else ""


def _sizes(folder: Path) -> dict[str, int | None]:
    with os.scandir(folder) as entries:
        return {entry.name: entry.stat().st_size for entry in entries}


def _tokenizer_of(manifest: Result) -> tuple[str | None, dict[str, str]]:
    """The tokenizer's name, and the digests of the files that a result keeps of it."""
    files = {n: s for n, s in manifest.side_files.items() if n not in _NOT_OF_TOKENIZER}
    return manifest.tokenizer.source if manifest.tokenizer else None, files


def is_same_mixture(manifest: Manifest, current: list[InputFile], config: DocumentConfig) -> bool:
    """Whether a recipe's result is what these tokenized directories and options give."""
    try:
        earlier = document_config_of(manifest)
    except ValueError:
        return False
    return (
        not differing_packers(manifest.packer_version, str(packer_cli.__version__))
        and not differing_options(earlier, config)
        and [(one.path, one.sha256) for one in manifest.inputs]
        == [(file.path, digest(file.path)[1]) for file in current]
    )


def _kept_files(
    directory: Path,
    manifest: Result,
    kept: Unnamed,
    standing: set[int],
    shape: Shape,
    config: DocumentConfig,
    checksum: bool,
) -> tuple[list[InputFile], Shape]:
    """The inputs that are kept: as they were, except those whose units do not stay. `shape` gets
    those of these.
    """
    if not kept:
        return [], shape
    anew = read_again({index: kept[index] for index in kept if index not in standing}, config)
    if anew:
        refuse_changed(anew, _same_inputs(directory, manifest, anew, checksum), checksum=checksum)
    times = {one.index: one.mtime_ns for one in usable_identities(directory, manifest.inputs)}
    names = _names(manifest, kept, shape)
    if shape.members:
        found = shapes_of(anew, config)
        shape = joined(shape.members | {one.described(): one for one in found.values()})
        labels = names | {index: one.described() for index, one in found.items()}
        anew = [replace(file, shape=labels[file.index]) for file in anew]
    standing_files = [
        replace(
            kept_file(index, one, config, times.get(index, 0)),
            shape=names[index] if shape.members else None,
        )
        for index, one in kept.items()
        if index in standing
    ]
    return anew + standing_files, shape


def _names(manifest: Result, unnamed: Unnamed, shape: Shape) -> dict[int, str]:
    """What inputs are called among the members of `shape`."""
    then = shape_of(manifest)
    if then.name not in shape.members:
        then = replace(then, of_messages=False)
    return {index: one.shape or then.name for index, one in unnamed.items()}


def usable_identities(directory: Path, inputs: list[Input]) -> list[InputFile]:
    """As `load_identities`; none where these cannot be used."""
    try:
        return load_identities(directory, inputs)
    except DataError:
        return []


def _refuse_other_options(
    directory: Path,
    manifest: Result,
    shape: Shape,
    config: DocumentConfig,
    tokenizer: str | None,
    side_files: dict[str, str],
) -> None:
    refuse_other_packer(directory, manifest)
    try:
        differ = _differing_options(manifest, shape, config)
    except ValueError as error:
        raise DataError(f"{directory}: damaged: config: {error}", _ANEW) from error
    differ += differing_tokenizers(*_tokenizer_of(manifest), tokenizer, side_files)
    if differ:
        raise UsageError(
            f"{directory}: was packed with other options: {'; '.join(differ)}",
            f"give those options again; {_ANEW}",
        )


def refuse_other_packer(directory: Path, manifest: Result) -> None:
    """UsageError for a result of another version, which may make other bytes of the same inputs."""
    then, now = manifest.packer_version, str(packer_cli.__version__)
    if then != now:
        raise UsageError(
            f"{directory}: was packed by packer {then}, and this is packer {now}, which may make "
            "other documents and rows of the same inputs",
            f"{_ANEW}, or go on with packer {then}",
        )


def _differing_options(manifest: Result, shape: Shape, config: DocumentConfig) -> list[str]:
    """The options that differ for records of the shapes that are there as before. ValueError as
    `document_config_of`.
    """
    then, its_shape = document_config_of(manifest), shape_of(manifest)
    if not (shape.members or its_shape.members):
        return differing_options(then, replace(config, shape=shape.kind))
    kinds = {one.kind for one in its_shape.members.values() or [its_shape]}
    both = [one for one in shape.members.values() or [shape] if one.kind in kinds]
    if not both:
        return [f"--shape was {its_shape.kind}, is now {shape.kind}"]
    differ = dict[str, None]()
    for one in both:
        before, now = (replace(for_member(c, one), shape=None) for c in (then, config))
        differ |= dict.fromkeys(differing_options(before, now))
    return list(differ)


def _same_inputs(
    directory: Path, manifest: Result, current: list[InputFile], checksum: bool
) -> set[int]:
    """The indices of the earlier inputs that have not changed."""
    inputs = manifest.inputs
    # a digest is of one file: whether an index beside it is another, only times tell
    paired = {file.path for file in current if is_pair(file)}
    then = [] if checksum and not paired else load_identities(directory, inputs)
    now = {file.path: file for file in current}

    def is_same(index: int, file: InputFile) -> bool:
        if file.size != inputs[index].size:
            return False
        by_times = not checksum or file.path in paired
        if by_times and (then[index].has_changed(file) or then[index].is_surely(file)):
            return not then[index].has_changed(file)
        return digest(file.path)[1] == inputs[index].sha256

    named = {i: now[one.path] for i, one in enumerate(inputs) if one.path in now}
    return {
        index for index, file in named.items() if not inputs[index].removed and is_same(index, file)
    }


def _numbered(manifest: Result, current: list[InputFile]) -> list[InputFile]:
    """The inputs with the numbers that they had; those that are gone without a format."""
    earlier = {one.path: index for index, one in enumerate(manifest.inputs)}
    known = {earlier[file.path] for file in current if file.path in earlier}
    free = _free(known)
    files = [replace(file, index=earlier.get(file.path, -1)) for file in current]
    files = [replace(file, index=next(free)) if file.index < 0 else file for file in files]
    taken = {file.index: file for file in files}
    return [
        taken.get(index) or InputFile(index, manifest.inputs[index].path, "", None, 0, 0)
        for index in range(max(taken) + 1)
    ]


def _records(directory: Path, manifest: Result) -> Iterator[UnitRecord]:
    """The records of the result's units."""
    # with one record more or less, documents would be there twice or never, unnoticed
    if digest(directory / UNITS)[1] != manifest.side_files.get(UNITS):
        raise DataError(f"{directory / UNITS}: damaged: not what the manifest says", _ANEW)
    rejected_from = 0
    try:
        for record in commits.read_units(directory / UNITS):
            yield msgspec.structs.replace(record, reused=True, rejected_from=rejected_from)
            rejected_from += record.rejected
    except (ValueError, RecursionError) as error:
        raise DataError(f"{directory / UNITS}: damaged: {error}", _ANEW) from error


def _reusable(records: Iterable[UnitRecord], directory: Path, same: set[int]) -> list[UnitRecord]:
    """Those whose files are there and that only read inputs all of whose units stay."""
    usable, left, stale = set(same), list[UnitRecord](), set[int]()
    units_of = defaultdict[int, list[int]](list)  # input -> places in `left` of those that read it
    for record in records:
        if commits.files_are_there(record, directory):
            for index in _inputs(record):
                units_of[index].append(len(left))
            left.append(record)
        else:
            usable -= _inputs(record)
    lost = [index for index in units_of if index not in usable]
    while lost:  # each unit is looked at once, however many small inputs it has
        for place in units_of.pop(lost.pop(), ()):
            if place not in stale:
                stale.add(place)
                inputs = _inputs(left[place]) & usable
                usable -= inputs
                lost += inputs
    return [record for place, record in enumerate(left) if place not in stale]


def _inputs(record: UnitRecord) -> set[int]:
    return {part[0] for part in record.slices}


def _free(taken: set[int]) -> Iterator[int]:
    return (number for number in count() if number not in taken)
