"""`--add`: which units of an earlier result stay, and what is packed beside them; and whether a
finished result is that of a run.

    plan_addition(...) -> Addition(run, kept, ...)
    refuse_other_result(...)    without --add

An input is what it was if its absolute path or URL, its size and its modification time (or ETag)
are those in the manifest. A unit stays if none of its inputs has changed. Files and units keep
their numbers, because rows name them, and new ones follow. So the result may have other rows than
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
    Chosen,
    Run,
    differing_files,
    differing_options,
    differing_origin,
    differing_tokenizers,
    load_run,
    refuse_other_packer,
)

_NOT_OF_TOKENIZER = {STATE, INFO, REJECTED, UNITS, SQUARED_LENGTHS}
_OF_WHOLE = {*LIMITS} - {"on_error"}  # limits of a whole result, which another one is held to, too
_ANEW = "to pack everything again, use --overwrite"
_MOST_NAMED = 3


class OtherInputsError(UsageError):
    """A tokenized directory has no input of a source, so another recipe may need it."""


class OtherMixtureError(UsageError):
    """A finished result was packed with other amounts. The message says which."""


@dataclass(frozen=True)
class Addition:
    """What --add makes of a result.

    run      what the result is to be
    kept     records of the units that stay, by their index
    changed  whether there is anything to do
    """

    run: Run
    kept: dict[int, UnitRecord]
    changed: bool


def plan_addition(directory: Path, manifest: Result, now: Run, options: RunOptions) -> Addition:
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
    moved = _find_moved(manifest, now.files)
    current, changed = _numbered(manifest, now.files, moved)
    if options.exact and min(current) >= len(inputs):
        raise OtherInputsError(
            f"{directory}: holds documents of other inputs, among them {inputs[0].name}",
            "name another directory: tokenized = DIR, or give the source another name; if nothing "
            "needs those documents any more, remove the directory",
        )
    _refuse_other_options(directory, manifest, now)
    if lost := _lost(directory, manifest):
        raise UsageError(f"{directory}: {lost[0]}", _ANEW)
    records = _kept(commits.placed_units(directory, manifest), changed)
    standing = {index for record in records for index in _inputs(record)}
    unnamed = {index: one for index, one in enumerate(inputs) if index not in current}
    if unnamed and options.exact:
        names = named([one.name for one in unnamed.values()], _MOST_NAMED)
        options.notify(f"{directory}: is made again, without what is not named any more: {names}")
        return Addition(now.cut(), {}, changed=True)
    others, shape = _not_named(unnamed, manifest, now, standing)
    files = sorted([*current.values(), *others], key=lambda file: file.index)
    _refuse_to_forget(directory, files)
    to_pack = [file for file in files if file.index not in standing]
    weight = sum(record.work_unit.weight for record in records)
    cut = work_units(to_pack, now.config, weight) if to_pack else []
    stay = {record.unit: record for record in records}
    free = (number for number in count() if number not in stay)
    new = [replace(unit, index=next(free)) for unit in cut]
    units = sorted([*new, *(one.work_unit for one in records)], key=lambda unit: unit.index)
    run = replace(now, shape=shape, files=tuple(files), units=tuple(units))
    for note in _notes(moved, [current[index].path for index in sorted(changed)], unnamed, inputs):
        options.notify(f"{directory}: {note}")
    has_moved = any(index is not None for index in moved.values())
    is_limited = any(getattr(manifest.config, n, None) != getattr(now.config, n, None)
                     for n in _OF_WHOLE)  # fmt: skip
    return Addition(run, stay, bool(new) or has_moved or is_limited)


def _find_moved(manifest: Result, files: Iterable[InputFile]) -> dict[str, int | None]:
    """The files whose content the result has by another path: by their own, the number of that
    input, which has this path from now on; None for a copy of one that is named, too.

    Only files of a size that the result has are read.
    """
    inputs, moved = manifest.inputs, dict[str, int | None]()
    current, known = {file.known_as: file for file in files}, {one.path for one in inputs}
    sizes, held = {one.size for one in inputs}, dict[tuple[object, ...], list[int]]()
    for index, one in enumerate(inputs):
        if one.sha256 and (one.path not in current or _is_same(one, current[one.path])):
            held.setdefault((one.sha256, format_of(one.path)), []).append(index)
    for path, file in current.items():
        is_other = path in known or file.size not in sizes or companion(path, file.format)
        if is_other or path == STDIN or storage.is_url(path):
            continue
        places = held.get((digest(path)[1], format_of(path)))
        if places:
            free = (i for i in places if inputs[i].path not in current
                    and i not in moved.values())  # fmt: skip
            moved[path] = next(free, None)
    return moved


def _numbered(
    manifest: Result, files: Iterable[InputFile], moved: Mapping[str, int | None]
) -> tuple[dict[int, InputFile], set[int]]:
    """The files by number, those that are new after all others; and the numbers of those that have
    changed. Copies are left out. UsageError for stdin, where it would replace an earlier one.
    """
    numbers = {one.path: index for index, one in enumerate(manifest.inputs)}
    current, changed, free = dict[int, InputFile](), set[int](), count(len(manifest.inputs))
    for file in files:
        path = file.known_as
        if path == STDIN and path in numbers:
            raise UsageError(
                "-: stdin would replace the documents that came from stdin before",
                "write the data to a file, and name that",
            )
        index = moved[path] if path in moved else numbers.get(path, -1)
        if index is None:
            continue
        if path in numbers and not _is_same(manifest.inputs[index], file):
            changed.add(index)
        index = index if index >= 0 else next(free)
        current[index] = replace(file, index=index)
    return current, changed


def _is_same(then: Input, now: InputFile) -> bool:
    return (then.size, then.version) == (now.size, now.version)


def _kept(records: Iterable[UnitRecord], changed: set[int]) -> list[UnitRecord]:
    """The units that stay: where one unit of an input is packed again, all of them are."""
    again, left = set(changed), [*records]
    while True:
        stay = list[UnitRecord]()
        for one in left:
            if again.isdisjoint(_inputs(one)):
                stay.append(one)
            else:
                again |= _inputs(one)
        if len(stay) == len(left):
            return [msgspec.structs.replace(one, reused=True) for one in stay]
        left = stay[::-1]  # units that hang together like a chain fall in one pass or two


def _inputs(record: UnitRecord) -> set[int]:
    return {part.file for part in record.slices}


def _not_named(
    unnamed: Mapping[int, Input], manifest: Result, now: Run, standing: set[int]
) -> tuple[list[InputFile], Shape]:
    """The inputs that are not named: as they were, except those whose units do not stay, which are
    read again. And the shape of the run, with those of these. UsageError for one that is to be read
    again and is not as it was.
    """
    shape, config = now.shape, now.config
    if not unnamed:
        return [], shape
    files = [_again(i, one, config) for i, one in unnamed.items() if i not in standing]
    then = shape_of(manifest)
    if then.name not in shape.members:
        then = replace(then, of_messages=False)
    names = {index: one.shape or then.name for index, one in unnamed.items()}
    if shape.members:
        found = shapes_of(files, config)
        shape = joined(shape.members | {one.described(): one for one in found.values()})
        labels = names | {index: one.described() for index, one in found.items()}
        files = [replace(file, shape=labels[file.index]) for file in files]
    for index in unnamed.keys() & standing:
        one = unnamed[index]
        files.append(InputFile(
            index, storage.shown(one.path), one.format_then(config.input_format) or "jsonl",
            format_of(one.path)[1], one.size, one.version,
            shape=names[index] if shape.members else None,
        ))  # fmt: skip
    return files, shape


def _again(index: int, then: Input, config: DocumentConfig) -> InputFile:
    """An input that is not named, to be packed again. UsageError if it is not what it was."""
    reason = "is gone or cannot be read"
    if then.path != STDIN:
        with suppress(PackerError):
            file = input_file(index, storage.shown(then.path), config)
            if _is_same(then, file):
                return file
            reason = "has changed"
    raise UsageError(
        f"{then.name}: is not named, {reason}, and would have to be packed again: its unit holds "
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
        have, its = ("has", "its") if len(changed) == 1 else ("have", "their")
        names = named(changed, _MOST_NAMED)
        yield f"{names} {have} changed: {its} documents replace the earlier ones"
    if unnamed:
        documents = sum(one.documents for one in unnamed.values())
        of = f"{plural(documents, 'document')} of {plural(len(unnamed), 'input')}"
        names = named([one.name for one in unnamed.values()], _MOST_NAMED)
        yield f"keeps {of}: {names}"


def refuse_other_result(
    place: Path | str, manifest: Result, run: Run, *, in_any_order: bool = False
) -> None:
    """UsageError for a finished result, in a directory or at a URL, that is not what `run` makes:
    of the same inputs and options, with all its files. `in_any_order`: also the result of several
    runs, with the same documents in other rows.
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
    mixtures = [getattr(one.config, "mixture", None) for one in (manifest, run)]
    if all(mixtures) and mixtures[0] != mixtures[1]:
        tip = "add --overwrite to pack it again, or choose another --output"
        raise OtherMixtureError("; ".join(differ), tip)
    if differ:
        raise _finished(place, "; ".join(differ))
    if not run.resumable:
        raise _finished(place, "stdin cannot be compared with what it was made of")
    then = [InputFile(index, storage.shown(one.path), "", None, one.size, one.version)
            for index, one in enumerate(manifest.inputs)]  # fmt: skip
    differ = differing_files(then, run.files)
    lost = _lost(place, manifest)
    if differ != [OTHER_ORDER] and (differ or lost):
        may_add = bool(differ) and not storage.is_url(str(place))
        raise _finished(place, "; ".join(differ or lost[:1]), may_add=may_add)
    units = [(one.index, [part[:3] for part in one.slices]) for one in run.units]
    is_same = not differ and units == [(one.unit, one.slices) for one in manifest.units]
    if not (is_same or in_any_order):
        raise UsageError(
            f"{place}: the result already holds these inputs, in another order",
            "add --overwrite to pack them again, or choose another --output",
        )


def _lost(place: Path | str, manifest: Result) -> list[str]:
    """Return what is wrong with the files of a result, by their sizes."""
    sizes = storage.sizes(str(place))
    lost = [name for name, size in listed(manifest).items() if size != sizes.get(name)]
    return [f"{name} is {'damaged' if name in sizes else 'missing'}" for name in lost]


def _finished(place: Path | str, differs: str, *, may_add: bool = False) -> UsageError:
    """The error for a result that is not to be replaced, and how it differs from what was to be
    packed. `may_add`: only in its inputs.
    """
    add = "pack what is new or has changed, with --add; " if may_add else ""
    return UsageError(
        f"{place}: holds a finished result that differs: {differs}",
        f"{add}choose another --output, or replace it with --overwrite",
    )


def _tokenizer_of(manifest: Result) -> Chosen:
    """The tokenizer and the template of a result, of which their digests are known."""
    files = {n: s for n, s in manifest.side_files.items() if n not in _NOT_OF_TOKENIZER}
    return Chosen(manifest.tokenizer.source if manifest.tokenizer else None, known=files)


def _refuse_other_options(directory: Path, manifest: Result, now: Run) -> None:
    """UsageError for options, a tokenizer or a packer other than those of the result. Of several
    shapes, those count that are there as before.
    """
    packer, shape = manifest.packer_version, now.shape
    refuse_other_packer(directory, packer, f"{_ANEW}, or go on with packer {packer}")
    its_shape = shape_of(manifest)
    kinds = {one.kind for one in its_shape.members.values() or [its_shape]}
    both = [one for one in shape.members.values() or [shape] if one.kind in kinds]
    configs = [[replace(for_member(c, one), shape=None) for c in (manifest.config, now.config)]
               for one in both]  # fmt: skip
    differ = [*dict.fromkeys(text for pair in configs for text in differing_options(*pair))]
    if not both:
        differ = [f"--shape was {its_shape.kind}, is now {shape.kind}"]
    differ += differing_tokenizers(_tokenizer_of(manifest), now.chosen)
    if differ:
        raise UsageError(
            f"{directory}: was packed with other options: {'; '.join(differ)}",
            f"give those options again; {_ANEW}",
        )


def _refuse_to_forget(directory: Path, files: Iterable[InputFile]) -> None:
    """UsageError for an unfinished run with inputs that are not among `files`: nobody would notice
    that they were never packed.
    """
    work = find_own(directory, WORK)
    unfinished = load_run(work / RUN) if work else None
    there = {file.known_as for file in files}
    lost = [file.path for file in unfinished.files if file.known_as not in there
            ] if unfinished else []  # fmt: skip
    if lost:
        raise UsageError(
            f"{directory}: holds an unfinished run with other inputs: {named(lost, _MOST_NAMED)}",
            "first run its command again, which continues it; to give these inputs up, remove "
            f"{directory / WORK}",
        )


def known_shapes(
    directory: Path, current: list[InputFile], config: DocumentConfig, options: RunOptions
) -> KnownShapes:
    """Shapes that an earlier result tells: of inputs that have not changed, and of those that
    --add keeps without their being named; and what it carries. Raises DataError as `load_any`, for
    --add.
    """
    if options.overwrite or not holds_result(directory):
        return NOTHING_KNOWN
    try:
        manifest = load_as_is(directory)
    except DataError:
        if options.add:
            raise
        return NOTHING_KNOWN
    then = shape_of(manifest)
    if config.prompt_template == "chat":  # as was asked for, not because prompts are messages
        then = replace(then, of_messages=False)
    now, is_adding = {file.known_as for file in current}, options.add and not options.exact
    unnamed = [one for one in manifest.inputs if is_adding and one.path not in now]
    names = dict.fromkeys(one.shape or then.name for one in unnamed)
    others = {name: shape_named(name) for name in names}
    files, carried = dict[int, Shape](), manifest.config.value_columns
    if dict(config.fields) != dict(manifest.config.fields):
        return KnownShapes(files, others, carried)
    again = cache(partial(shape_again, renamed=config.renamed))
    before = {one.path: one for one in manifest.inputs}
    for file in current:
        one = before.get(file.known_as)
        if one is not None and _is_same(one, file):
            name = one.shape or manifest.config.shape
            shape = again(name)
            if shape is not None and config.shape in (None, name):
                files[file.index] = shape
    return KnownShapes(files, others, carried)
