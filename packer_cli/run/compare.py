"""Compare a run with what lies in its output: may it continue an unfinished run, is a finished
result that of the run, and what of it stays with `--add`?

    begin(output, run)            makes it the run of the work folder, or raises UsageError
    refuse_other_result(...)      raises UsageError if the result is not that of the run
    plan_addition(...)            with --add: the run that packs what is new, and keeps the rest

An input is unchanged if its absolute path or URL, its size and its modification time (or ETag) are
those in the manifest. A unit stays if none of its inputs has changed. Inputs and units keep their
numbers, because rows refer to them, and new ones follow. So the result may have other rows than
one that is packed at once, but it holds the same documents, each once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache, partial
from itertools import chain, count
from pathlib import Path

import packer_cli
from packer_cli import storage
from packer_cli.errors import PackerError, UsageError, named
from packer_cli.inputs.byte_streams import STDIN
from packer_cli.inputs.detection import NOTHING_KNOWN, KnownShapes, shapes_of
from packer_cli.inputs.discovery import input_file
from packer_cli.mixing.units import work_units
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.formats import companion, format_of
from packer_cli.options.option import options_of
from packer_cli.options.options import Amount, Mixture, PackConfig
from packer_cli.options.run_options import RunOptions
from packer_cli.options.shape_rules import for_member
from packer_cli.options.shapes import Shape, joined, shape_again, shape_named
from packer_cli.records import InputFile
from packer_cli.result.existing import MANIFESTS, find_own, holds_result, listed, look
from packer_cli.result.layout import (
    INCOMPLETE,
    INFO,
    REJECTED,
    SIDE_FILES,
    SQUARED_LENGTHS,
    STATE,
    TOKENIZER,
    TOKENIZER_FILES,
    UNITS,
    WORK,
    digest,
)
from packer_cli.result.manifest import LIMITS, Input, Result, load_as_is, shape_of
from packer_cli.result.reader import PACK_AGAIN
from packer_cli.result.wording import plural
from packer_cli.run.place import LOCK, LockedOutput, discard, is_begun
from packer_cli.run.run_plan import (
    RUN,
    RunPlan,
    TokenizerSelection,
    UnitRecord,
    kept_units,
    load_run,
    units_in,
)
from packer_cli.storage import put_file, sync, write_file

_NOT_OF_TOKENIZER = {STATE, INFO, REJECTED, UNITS, SQUARED_LENGTHS}
_OF_WHOLE = {*LIMITS} - {"on_error"}  # limits of a whole result, also of one with nothing new
_ANEW = "to pack everything again, use --overwrite"
_MOST_NAMED = 3
_OTHER_ORDER = "the inputs are named in another order"
_KEYS = {
    "validation_share": "[validation] share",
    "validation_documents": "[validation] documents",
    "held_out": "is in [validation]:",
}


class OtherInputsError(UsageError):
    """A tokenized directory has no input of a source, so another recipe may need it."""


# An unfinished run


def begin(output: LockedOutput, run: RunPlan) -> None:
    """Make `run` the run of the work folder. Units of it that are packed already stay there.

    Raises UsageError for packed units of another run, unless the result may be replaced, and for
    files of others where the result is to be.
    """
    work = output.work
    with output.begin_lock():
        look(output.path).refuse_foreign(names_of(run))
        if not _continues(output, run):
            discard(work)
            for name, content in run.chosen.side_files.items():
                write_file(work / name, content)
        put_file(work / RUN, run.to_bytes())  # its limits may be others
        sync(work.parent)
        sync(output.path)


def _continues(output: LockedOutput, run: RunPlan) -> bool:
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
    if differ and not output.may_replace:
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


def differences(old: RunPlan, new: RunPlan) -> list[str]:
    """Describe how runs differ, in phrases for users; [] if their identities are equal."""
    if old.identity == new.identity:
        return []
    differing = differing_packers(old.packer_version)
    differing += differing_options(old.config, new.config)
    differing += differing_tokenizers(old.chosen, new.chosen)
    if old.shape != new.shape:
        differing.append(f"records were {old.shape.described()}, are now {new.shape.described()}")
    return differing + differing_files(old.files, new.files)


def _differing_origin(manifest: Result, run: RunPlan, *, limits: bool = False) -> list[str]:
    """Describe how a result differs from a run in packer, options and tokenizer. If there are
    several shapes, those that the result has are compared. `limits`: as in `differing_options`.
    """
    before, differ = shape_of(manifest), list[str]()
    kinds = {shape.kind for shape in before.members.values() or [before]}
    shapes = [shape for shape in run.shape.members.values() or [run.shape] if shape.kind in kinds]
    for shape in shapes:
        configs = (for_member(config, shape) for config in (manifest.config, run.config))
        old, new = (replace(config, shape=None) for config in configs)
        differ += differing_options(old, new, limits=limits)
    if not shapes:
        differ = [f"--shape was {before.kind}, is now {run.shape.kind}"]
    differ = [*differing_packers(manifest.packer_version), *dict.fromkeys(differ)]
    return differ + differing_tokenizers(_tokenizer_of(manifest), run.chosen)


def differing_packers(then: str) -> list[str]:
    """Describe another version of packer, which may make other bytes; [] if it is this one."""
    now = str(packer_cli.__version__)
    return [f"packer was {then}, is now {now}"] if then != now else []


def differing_options(
    old: DocumentConfig, new: DocumentConfig, *, limits: bool = False
) -> list[str]:
    """List the options that differ, each as "--name was OLD, is now NEW".

    `limits`: include options that change no unit's bytes.
    """
    differing = []
    if type(old) is not type(new):
        kinds = "documents were tokenized", "rows were packed"
        return [f"{kinds[isinstance(old, PackConfig)]}, now it is the other"]
    for item in fields(new):
        before, now = getattr(old, item.name), getattr(new, item.name)
        if item.name == "mixture":
            differing += _differing_amounts(before, now)
        elif before != now and (limits or item.name not in LIMITS):
            option = options_of(PackConfig).get(item.name)
            name = option.flag if option else item.name
            if name == "tiers":
                before, now = (tuple(map(" and ".join, tiers)) for tiers in (before, now))
            differing.append(f"{name} was {_shown(before)}, is now {_shown(now)}")
    return differing


def _differing_amounts(old: Mixture | None, new: Mixture | None) -> list[str]:
    """List the keys of a recipe that differ, each with its source."""
    if old is None or new is None:
        return [] if old is new else [f"it was {'not ' if new else ''}packed from a recipe"]
    before, now = map(_amounts_by_place, (old, new))
    differing = [f"{place} is not named now" for place in before if place not in now]
    differing += [f"{place} is new" for place in now if place not in before]
    both = [(f"{place}: ", before[place], now[place]) for place in now if place in before]
    for place, one, other in [*both, ("", old, new)]:
        differing += [
            f"{place}{_KEYS.get(key, key)} {_shown(getattr(other, key))}, was {_shown(value)}"
            for key, value in vars(one).items()
            if key not in ("sources", "tiers") and value != getattr(other, key)
        ]
    if not differing and [*before] != [*now]:
        return ["the sources are named in another order"]
    return differing


def _amounts_by_place(mixture: Mixture) -> dict[str, Amount]:
    """Return the amounts of all sources and their tiers."""
    amounts = chain.from_iterable((source, *source.tiers) for source in mixture.sources)
    return {
        f'source "{amount.name}"' + f", tier {amount.tier}" * (amount.tier > 0): amount
        for amount in amounts
    }


def differing_tokenizers(old: TokenizerSelection, new: TokenizerSelection) -> list[str]:
    """Describe how tokenizers and templates differ in the contents of their files."""
    names = old.hashes.keys() | new.hashes.keys()
    differ = sorted(name for name in names if old.hashes.get(name) != new.hashes.get(name))
    if differ:
        return [f"another tokenizer: {' and '.join(differ)} differ"]
    # it has no files of its own, so its name identifies it
    if old.name != new.name and TOKENIZER not in new.hashes:
        return [f"the tokenizer was {_shown(old.name)}, is now {_shown(new.name)}"]
    return []


def _shown(value: object) -> str:
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return ",".join("=".join(v) if isinstance(v, tuple) else v for v in value) or "not given"
    return str(value)


def differing_files(old: Sequence[InputFile], new: Sequence[InputFile]) -> list[str]:
    """Describe how inputs differ. `old`: inputs without a format if that is unknown."""
    before, now = ({file.known_as: file for file in files} for files in (old, new))
    differing = [
        f"{file.path} is not named now" for path, file in before.items() if path not in now
    ]
    differing += [f"{file.path} is new" for path, file in now.items() if path not in before]
    for path in before.keys() & now.keys():
        a, b = before[path], now[path]
        if a.format and (a.format, a.compression) != (b.format, b.compression):
            differing.append(f"{b.path} was read as {a.format}, is now {b.format}")
        elif a.has_changed(b):
            sizes = f": {a.size:,} bytes then, {b.size:,} now" if a.size != b.size else ""
            differing.append(f"{b.path} has changed{sizes}")
    if not differing and [*before] != [*now]:
        differing.append(_OTHER_ORDER)
    if len(differing) > _MOST_NAMED:
        differing[_MOST_NAMED:] = [f"and {len(differing) - _MOST_NAMED} more inputs differ"]
    return sorted(differing[:_MOST_NAMED]) + differing[_MOST_NAMED:]


# A finished result


def refuse_other_result(
    place: Path | str, manifest: Result, run: RunPlan, *, in_any_order: bool = False
) -> None:
    """Raise UsageError if a finished result, in a directory or at a URL, is not that of `run`: of
    the same inputs and options, with all its files.

    `in_any_order`: accept the result of several runs, with the same documents in other rows.
    """
    differ = _differing_origin(manifest, run, limits=True)
    before, after = (getattr(config, "mixture", None) for config in (manifest.config, run.config))
    if before and after and before != after:
        raise UsageError(
            f"{place}: its recipe has changed: {'; '.join(differ)}",
            "add --overwrite to pack it again, or choose another --output",
        )
    if differ:
        raise _other_result(place, differ)
    if not run.resumable:
        raise _other_result(place, ["stdin cannot be compared with what it was made of"])
    inputs = [InputFile(index, storage.shown(entry.path), "", None, entry.size, entry.version)
              for index, entry in enumerate(manifest.inputs)]  # fmt: skip
    differ = differing_files(inputs, run.files)
    if differ and differ != [_OTHER_ORDER]:
        raise _other_result(place, differ, may_add=not storage.is_url(str(place)))
    if lost := _lost_files(place, manifest):
        raise UsageError(f"{place}: holds a finished result that differs: {lost[0]}", PACK_AGAIN)
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

    Raises DataError if the manifest cannot be read.
    """
    if options.overwrite or not holds_result(directory):
        return NOTHING_KNOWN
    manifest = load_as_is(directory)
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


def plan_addition(
    directory: Path, manifest: Result, now: RunPlan, options: RunOptions
) -> RunPlan | None:
    """Compare an earlier result with the inputs as they are `now`, which is not cut into units.

    Returns the run of what the result is to be; None if it is that already.

    Raises UsageError if documents would be lost, or the options or the tokenizer are others;
    DataError if the result lacks what is needed.
    """
    inputs = manifest.inputs
    current, changed, moved = _match(manifest, now.files)
    if options.exact and min(current) >= len(inputs):
        raise OtherInputsError(
            f"{directory}: holds documents of other inputs, among them {inputs[0].name}",
            "name another directory: tokenized = DIR, or give the source another name; if nothing "
            "needs those documents any more, remove the directory",
        )
    if differ := _differing_origin(manifest, now):
        raise UsageError(
            f"{directory}: was packed with other options: {'; '.join(differ)}",
            f"give those options again; {_ANEW}",
        )
    if lost := _lost_files(directory, manifest):
        raise UsageError(f"{directory}: {lost[0]}", PACK_AGAIN)
    kept = _unchanged_units(kept_units(directory, manifest), changed)
    standing = {index for record in kept for index in record.inputs}
    unnamed = {index: entry for index, entry in enumerate(inputs) if index not in current}
    if unnamed and options.exact:
        names = named([entry.name for entry in unnamed.values()], _MOST_NAMED)
        options.notify(f"{directory}: is made again, without what is not named any more: {names}")
        return now.cut()
    others, shape = _unnamed_files(unnamed, manifest, now, standing)
    files = sorted([*current.values(), *others], key=lambda file: file.index)
    _refuse_unfinished(directory, files)
    to_pack = [file for file in files if file.index not in standing]
    weight = sum(record.work_unit.weight for record in kept)
    cut = work_units(to_pack, now.config, weight) if to_pack else []
    taken = {record.unit for record in kept}
    free = (number for number in count() if number not in taken)
    units = tuple(replace(unit, index=next(free)) for unit in cut)
    for note in _notes(moved, [current[index].path for index in sorted(changed)], unnamed, inputs):
        options.notify(f"{directory}: {note}")
    has_moved = any(index is not None for index in moved.values())
    is_limited = any(getattr(manifest.config, name, None) != getattr(now.config, name, None)
                     for name in _OF_WHOLE)  # fmt: skip
    if not (units or has_moved or is_limited):
        return None
    return replace(now, shape=shape, files=tuple(files), units=units, kept=tuple(kept))


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


def _unchanged_units(records: Iterable[UnitRecord], changed: set[int]) -> list[UnitRecord]:
    """Return the units that stay: if one unit of an input is packed again, all its units are."""
    again, left = set(changed), [*records]
    while True:
        stay = list[UnitRecord]()
        for record in left:
            if again.isdisjoint(record.inputs):
                stay.append(record)
            else:
                again |= record.inputs
        if len(stay) == len(left):
            return sorted(stay, key=lambda record: record.unit)
        left = stay[::-1]  # units that hang together like a chain fall in one pass or two


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
    with suppress(PackerError):
        file = None if entry.path == STDIN else input_file(index, storage.shown(entry.path), config)
        if file is not None and _is_unchanged(entry, file):
            return file
    raise UsageError(
        f"{entry.name}: is not named, is gone or has changed, and would have to be packed again: "
        "its unit holds another input that has changed",
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
        names = named(changed, _MOST_NAMED)
        yield f"documents of inputs that have changed replace the earlier ones: {names}"
    if unnamed:
        documents = sum(entry.documents for entry in unnamed.values())
        counts = f"{plural(documents, 'document')} of {plural(len(unnamed), 'input')}"
        names = named([entry.name for entry in unnamed.values()], _MOST_NAMED)
        yield f"keeps {counts}: {names}"


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
