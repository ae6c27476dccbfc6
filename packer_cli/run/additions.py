"""Compare a finished result with a run: is it the result of that run, and which of its units stay
with `--add`?

    refuse_other_result(...)            raises UsageError if it is not the result of the run
    plan_addition(...) -> Addition      with --add: the units that stay, and what is packed

An input is unchanged if its absolute path or URL, its size and its modification time (or ETag) are
those in the manifest. A unit stays if none of its inputs has changed. Inputs and units keep their
numbers, because rows refer to them, and new ones follow. So the result may have other rows than
one that is packed at once, but it holds the same documents, each once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count
from pathlib import Path

import msgspec

from packer_cli import storage
from packer_cli.errors import DataError, PackerError, UsageError, named
from packer_cli.inputs.byte_streams import STDIN
from packer_cli.inputs.detection import NOTHING_KNOWN, KnownShapes, shapes_of
from packer_cli.inputs.discovery import input_file
from packer_cli.mixing.units import work_units
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.formats import companion, format_of
from packer_cli.options.run_options import RunOptions
from packer_cli.options.shape_rules import for_member
from packer_cli.options.shapes import MIXED, Shape, joined, shape_again, shape_named
from packer_cli.records import InputFile
from packer_cli.result.existing import find_own, holds_result, listed
from packer_cli.result.layout import (
    INFO,
    REJECTED,
    SQUARED_LENGTHS,
    STATE,
    UNITS,
    WORK,
    digest,
)
from packer_cli.result.manifest import (
    LIMITS,
    Input,
    Manifest,
    Result,
    load_as_is,
    shape_of,
)
from packer_cli.result.wording import plural
from packer_cli.run import commits
from packer_cli.run.commits import UnitRecord
from packer_cli.run.identity import (
    OTHER_ORDER,
    RUN,
    RunPlan,
    TokenizerSelection,
    differing_files,
    differing_options,
    differing_origin,
    differing_tokenizers,
    load_run,
    refuse_other_packer,
)

_NOT_OF_TOKENIZER = {STATE, INFO, REJECTED, UNITS, SQUARED_LENGTHS}
_OF_WHOLE = {*LIMITS} - {"on_error"}  # limits of a whole result, also of one with nothing new
_ANEW = "to pack everything again, use --overwrite"
_MOST_NAMED = 3


class OtherInputsError(UsageError):
    """A tokenized directory has no input of a source, so another recipe may need it."""


class OtherMixtureError(UsageError):
    """A finished result was packed with the amounts that the message names."""


# Is it the result of this run?


def refuse_other_result(
    place: Path | str, manifest: Result, run: RunPlan, *, in_any_order: bool = False
) -> None:
    """Raise UsageError if a finished result, in a directory or at a URL, is not that of `run`: of
    the same inputs and options, with all its files.

    `in_any_order`: accept the result of several runs, with the same documents in other rows.
    """
    origin = replace(
        run,
        packer_version=manifest.packer_version,
        config=manifest.config,
        chosen=_tokenizer_of(manifest),
    )
    shape = None if run.shape.kind == MIXED else run.shape.kind
    now = replace(run, config=replace(run.config, shape=shape))
    differ = differing_origin(origin, now, limits=True)
    before, after = (getattr(config, "mixture", None) for config in (manifest.config, run.config))
    if before and after and before != after:
        tip = "add --overwrite to pack it again, or choose another --output"
        raise OtherMixtureError("; ".join(differ), tip)
    if differ:
        raise _other_result(place, differ)
    if not run.resumable:
        raise _other_result(place, ["stdin cannot be compared with what it was made of"])
    inputs = [InputFile(index, storage.shown(entry.path), "", None, entry.size, entry.version)
              for index, entry in enumerate(manifest.inputs)]  # fmt: skip
    differ = differing_files(inputs, run.files)
    if differ and differ != [OTHER_ORDER]:
        raise _other_result(place, differ, may_add=not storage.is_url(str(place)))
    if lost := _lost_files(place, manifest):
        raise _other_result(place, lost[:1])
    slices = [(unit.index, [part[:3] for part in unit.slices]) for unit in run.units]
    is_same = not differ and slices == [(unit.unit, unit.slices) for unit in manifest.units]
    if not (is_same or in_any_order):
        raise UsageError(
            f"{place}: the result already holds these inputs, in another order",
            "add --overwrite to pack them again, or choose another --output",
        )


def _other_result(place: Path | str, differ: list[str], *, may_add: bool = False) -> UsageError:
    """The error for a result that differs from what was to be packed; `may_add`: only in inputs."""
    add = "pack what is new or has changed, with --add; " if may_add else ""
    return UsageError(
        f"{place}: holds a finished result that differs: {'; '.join(differ)}",
        f"{add}choose another --output, or replace it with --overwrite",
    )


def _lost_files(place: Path | str, manifest: Result) -> list[str]:
    """List the files of a result that are missing or have another size."""
    sizes = storage.sizes(str(place))
    lost = [name for name, size in listed(manifest).items() if size != sizes.get(name)]
    return [f"{name} is {'damaged' if name in sizes else 'missing'}" for name in lost]


def _tokenizer_of(manifest: Result) -> TokenizerSelection:
    """Return the tokenizer and the template of a result, with the digests of their files."""
    digests = manifest.side_files.items()
    files = {name: sha256 for name, sha256 in digests if name not in _NOT_OF_TOKENIZER}
    return TokenizerSelection(
        manifest.tokenizer.source if manifest.tokenizer else None, known=files
    )


def known_shapes(
    directory: Path, current: list[InputFile], config: DocumentConfig, options: RunOptions
) -> KnownShapes:
    """Return the shapes and columns of values that a finished result knows: of `current` inputs
    that have not changed, and of those that --add keeps though they are not named.

    Raises DataError with --add, if the manifest cannot be read.
    """
    if options.overwrite or not holds_result(directory):
        return NOTHING_KNOWN
    try:
        manifest = load_as_is(directory)
    except DataError:
        if options.add:
            raise
        return NOTHING_KNOWN
    whole = shape_of(manifest)
    if config.prompt_template == "chat":  # by the option, not because prompts are messages
        whole = replace(whole, of_messages=False)
    named_now, is_adding = {file.known_as for file in current}, options.add and not options.exact
    kept = [entry for entry in manifest.inputs if is_adding and entry.path not in named_now]
    others = {name: shape_named(name) for name in (entry.shape or whole.name for entry in kept)}
    files = dict[int, Shape]()
    if dict(config.fields) == dict(manifest.config.fields):
        shape_by_name = cache(partial(shape_again, renamed=config.renamed))
        entries = {entry.path: entry for entry in manifest.inputs}
        for file in current:
            entry = entries.get(file.known_as)
            if entry is not None and _is_unchanged(entry, file):
                name = entry.shape or manifest.config.shape
                shape = shape_by_name(name)
                if shape is not None and config.shape in (None, name):
                    files[file.index] = shape
    return KnownShapes(files, others, manifest.config.value_columns)


# What stays, with --add


@dataclass(frozen=True)
class Addition:
    """The plan of --add for a result.

    run      what the result is to be
    kept     records of the units that stay, by their index
    changed  whether there is anything to do
    """

    run: RunPlan
    kept: dict[int, UnitRecord]
    changed: bool


def plan_addition(directory: Path, manifest: Result, now: RunPlan, options: RunOptions) -> Addition:
    """Compare an earlier result with the inputs as they are `now`, which is not cut into units.

    Raises UsageError if documents would be lost, or the options or the tokenizer are others;
    DataError if the result lacks what is needed.
    """
    if isinstance(manifest, Manifest) and manifest.sources:
        # a change of one source changes what is taken of the others
        run = now.cut()
        try:
            refuse_other_result(directory, manifest, run)
        except UsageError:
            return Addition(run, {}, changed=True)
        return Addition(run, {}, changed=False)
    inputs = manifest.inputs
    current, changed, moved = _match(manifest, now.files)
    if options.exact and min(current) >= len(inputs):
        raise OtherInputsError(
            f"{directory}: holds documents of other inputs, among them {inputs[0].name}",
            "name another directory: tokenized = DIR, or give the source another name; if nothing "
            "needs those documents any more, remove the directory",
        )
    _refuse_other_options(directory, manifest, now)
    if lost := _lost_files(directory, manifest):
        raise UsageError(f"{directory}: {lost[0]}", _ANEW)
    kept = _kept_units(commits.placed_units(directory, manifest), changed)
    standing = {index for record in kept for index in _inputs(record)}
    unnamed = {index: entry for index, entry in enumerate(inputs) if index not in current}
    if unnamed and options.exact:
        names = named([entry.name for entry in unnamed.values()], _MOST_NAMED)
        options.notify(f"{directory}: is made again, without what is not named any more: {names}")
        return Addition(now.cut(), {}, changed=True)
    others, shape = _unnamed_files(unnamed, manifest, now, standing)
    files = sorted([*current.values(), *others], key=lambda file: file.index)
    _refuse_unfinished(directory, files)
    to_pack = [file for file in files if file.index not in standing]
    weight = sum(record.work_unit.weight for record in kept)
    cut = work_units(to_pack, now.config, weight) if to_pack else []
    by_unit = {record.unit: record for record in kept}
    free = (number for number in count() if number not in by_unit)
    new = [replace(unit, index=next(free)) for unit in cut]
    units = sorted([*new, *(record.work_unit for record in kept)], key=lambda unit: unit.index)
    run = replace(now, shape=shape, files=tuple(files), units=tuple(units))
    for note in _notes(moved, [current[index].path for index in sorted(changed)], unnamed, inputs):
        options.notify(f"{directory}: {note}")
    has_moved = any(index is not None for index in moved.values())
    is_limited = any(getattr(manifest.config, name, None) != getattr(now.config, name, None)
                     for name in _OF_WHOLE)  # fmt: skip
    return Addition(run, by_unit, bool(new) or has_moved or is_limited)


def _match(
    manifest: Result, files: Iterable[InputFile]
) -> tuple[dict[int, InputFile], set[int], dict[str, int | None]]:
    """Number the files as the result does: by their paths, else by their content, new ones after
    all others. Only files of a size that the result has are read for it.

    Returns the files by number; the numbers of those that have changed; and for each path whose
    content the result has under another one its number, or None for a copy of an input that is
    named, too, which is left out. Raises UsageError if stdin would replace an earlier one.
    """
    inputs, by_path = manifest.inputs, {file.known_as: file for file in files}
    sizes, by_content = {entry.size for entry in inputs}, dict[tuple[object, ...], list[int]]()
    for index, entry in enumerate(inputs):
        file = by_path.get(entry.path)
        if entry.sha256 and (file is None or _is_unchanged(entry, file)):
            by_content.setdefault((entry.sha256, format_of(entry.path)), []).append(index)
    numbers, free = {entry.path: index for index, entry in enumerate(inputs)}, count(len(inputs))
    current, changed, moved = dict[int, InputFile](), set[int](), dict[str, int | None]()
    for path, file in by_path.items():
        number = numbers.get(path)
        if number is None and file.size in sizes and _has_digest(file):
            if same := by_content.get((digest(path)[1], format_of(path))):
                unnamed = (index for index in same if inputs[index].path not in by_path)
                number = moved[path] = next((n for n in unnamed if n not in current), None)
                if number is None:
                    continue
        elif number is not None and path == STDIN:
            raise UsageError(
                "-: stdin would replace the documents that came from stdin before",
                "write the data to a file, and name that",
            )
        elif number is not None and not _is_unchanged(inputs[number], file):
            changed.add(number)
        number = next(free) if number is None else number
        current[number] = replace(file, index=number)
    return current, changed, moved


def _has_digest(file: InputFile) -> bool:
    """True for a local file whose documents depend on its own bytes alone."""
    path = file.known_as
    return path != STDIN and not storage.is_url(path) and not companion(path, file.format)


def _is_unchanged(entry: Input, file: InputFile) -> bool:
    return (entry.size, entry.version) == (file.size, file.version)


def _kept_units(records: Iterable[UnitRecord], changed: set[int]) -> list[UnitRecord]:
    """Return the units that stay: if one unit of an input is packed again, all its units are."""
    again, left = set(changed), [*records]
    while True:
        stay = list[UnitRecord]()
        for record in left:
            if again.isdisjoint(_inputs(record)):
                stay.append(record)
            else:
                again |= _inputs(record)
        if len(stay) == len(left):
            return [msgspec.structs.replace(record, reused=True) for record in stay]
        left = stay[::-1]  # units that hang together like a chain fall in one pass or two


def _inputs(record: UnitRecord) -> set[int]:
    return {part.file for part in record.slices}


def _unnamed_files(
    unnamed: Mapping[int, Input], manifest: Result, now: RunPlan, standing: set[int]
) -> tuple[list[InputFile], Shape]:
    """Return the inputs that are not named, and the shape of the run with those of these inputs.

    `standing`: the numbers of inputs whose units stay; the others are read again. Raises UsageError
    if one of these has changed.
    """
    shape, config = now.shape, now.config
    if not unnamed:
        return [], shape
    files = [_unchanged_file(index, entry, config) for index, entry in unnamed.items()
             if index not in standing]  # fmt: skip
    whole = shape_of(manifest)
    if whole.name not in shape.members:
        whole = replace(whole, of_messages=False)
    names = {index: entry.shape or whole.name for index, entry in unnamed.items()}
    if shape.members:
        shapes = shapes_of(files, config)
        shape = joined(shape.members | {each.described(): each for each in shapes.values()})
        labels = names | {index: each.described() for index, each in shapes.items()}
        files = [replace(file, shape=labels[file.index]) for file in files]
    for index in unnamed.keys() & standing:
        entry = unnamed[index]
        files.append(InputFile(
            index, storage.shown(entry.path), entry.format_then(config.input_format) or "jsonl",
            format_of(entry.path)[1], entry.size, entry.version,
            shape=names[index] if shape.members else None,
        ))  # fmt: skip
    return files, shape


def _unchanged_file(index: int, entry: Input, config: DocumentConfig) -> InputFile:
    """Return an input that is not named, to pack it again. Raises UsageError if it has changed."""
    reason = "is gone or cannot be read"
    if entry.path != STDIN:
        with suppress(PackerError):
            file = input_file(index, storage.shown(entry.path), config)
            if _is_unchanged(entry, file):
                return file
            reason = "has changed"
    raise UsageError(
        f"{entry.name}: is not named, {reason}, and would have to be packed again: its unit holds "
        "another input that has changed",
        "restore the file; or name it, to pack it as it is now",
    )


def _notes(
    moved: Mapping[str, int | None],
    changed: Sequence[str],
    unnamed: Mapping[int, Input],
    inputs: Sequence[Input],
) -> Iterator[str]:
    if moved:
        paths = [f"{storage.shown(path)} (as {inputs[index].name})" if index is not None
                 else storage.shown(path) for path, index in moved.items()]  # fmt: skip
        yield f"has the content of these inputs already: {named(paths, _MOST_NAMED)}"
    if changed:
        have, their = ("has", "its") if len(changed) == 1 else ("have", "their")
        names = named(changed, _MOST_NAMED)
        yield f"{names} {have} changed: {their} documents replace the earlier ones"
    if unnamed:
        documents = sum(entry.documents for entry in unnamed.values())
        counts = f"{plural(documents, 'document')} of {plural(len(unnamed), 'input')}"
        names = named([entry.name for entry in unnamed.values()], _MOST_NAMED)
        yield f"keeps {counts}: {names}"


def _refuse_other_options(directory: Path, manifest: Result, now: RunPlan) -> None:
    """Raise UsageError if options, tokenizer or packer are not those of the result. If there are
    several shapes, those that the result has are compared.
    """
    packer = manifest.packer_version
    refuse_other_packer(directory, packer, f"{_ANEW}, or go on with packer {packer}")
    before = shape_of(manifest)
    kinds = {shape.kind for shape in before.members.values() or [before]}
    shapes = [shape for shape in now.shape.members.values() or [now.shape] if shape.kind in kinds]
    configs = [[replace(for_member(config, shape), shape=None)
                for config in (manifest.config, now.config)] for shape in shapes]  # fmt: skip
    differ = [*dict.fromkeys(text for pair in configs for text in differing_options(*pair))]
    if not shapes:
        differ = [f"--shape was {before.kind}, is now {now.shape.kind}"]
    differ += differing_tokenizers(_tokenizer_of(manifest), now.chosen)
    if differ:
        raise UsageError(
            f"{directory}: was packed with other options: {'; '.join(differ)}",
            f"give those options again; {_ANEW}",
        )


def _refuse_unfinished(directory: Path, files: Iterable[InputFile]) -> None:
    """Raise UsageError for an unfinished run with inputs that are not among `files`: they would
    never be packed, without a word.
    """
    work = find_own(directory, WORK)
    unfinished = load_run(work / RUN) if work else None
    if unfinished is None:
        return
    known = {file.known_as for file in files}
    if lost := [file.path for file in unfinished.files if file.known_as not in known]:
        raise UsageError(
            f"{directory}: holds an unfinished run with other inputs: {named(lost, _MOST_NAMED)}",
            "first run its command again, which continues it; to give these inputs up, remove "
            f"{directory / WORK}",
        )
