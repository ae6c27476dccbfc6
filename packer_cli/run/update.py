"""`--update` and `--add`: which units of an earlier result stay, and which are packed.

    plan_update(...) -> Update(run, reused, ...)

A unit stays when all inputs that it reads are unchanged, or are kept without being named. Usually
the user forgot those, or packs only one night's new files: so no document goes unless `--prune`
says so, and `--add` keeps them as they are packed, whether their files still exist or not.

Files and units keep their numbers, because rows name them; what is new gets numbers that are free.
So an update may give other rows than packing everything again, but holds the same documents, each
once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator
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
from packer_cli.inputs.discovery import input_file, is_pair
from packer_cli.mixing.units import work_units
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.formats import JSON, format_of
from packer_cli.options.run_options import RunOptions
from packer_cli.options.shape_rules import for_member
from packer_cli.options.shapes import MIXED, Shape, joined, shape_again, shape_named
from packer_cli.ownership import Folder, Listed, unchanged
from packer_cli.records import InputFile
from packer_cli.result.layout import (
    INCOMPLETE,
    INFO,
    MANIFEST,
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
from packer_cli.result.tokenized import open_tokenized
from packer_cli.result.wording import plural
from packer_cli.run import commits
from packer_cli.run.commits import UnitRecord, as_packed, load_identities
from packer_cli.run.destination import finished, holds_result, listed, work_of
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
    may_exist,
    refuse_other_packer,
)

_NOT_OF_TOKENIZER = {STATE, INFO, REJECTED, UNITS, SQUARED_LENGTHS}
_OF_WHOLE = {*LIMITS} - {"on_error"}  # a result is looked at by them, when nothing is packed, too
_ANEW = "to pack everything again, use --overwrite"
_MOST_NAMED = 3
_Unnamed = dict[int, Input]  # inputs of the earlier result that are not named, by index


@dataclass(frozen=True)
class Update:
    """An update: what stays of a result, and what it is to be.

    run      what the result is to be; files that are gone have no format
    reused   records of the units that stay, by their index
    changed  whether there is anything to do
    """

    run: Run
    reused: dict[int, UnitRecord]
    changed: bool


def plan_update(directory: Path, manifest: Result, now: Run, options: RunOptions) -> Update:
    """Compare an earlier result with what a run of its inputs as they are `now` would be, whose
    units do not matter.

    An input is unchanged when its size and time of change are, or with --checksum its digest.
    Raises UsageError when documents would be lost, or the options or the tokenizer are others;
    DataError when the result lacks what is needed.
    """
    if isinstance(manifest, Manifest) and manifest.sources:
        # everything anew, or nothing: a change of one source changes what is taken of the others
        run, changed = now.cut(), False
        try:
            refuse_other_result(directory, manifest, run)
        except UsageError:
            changed = True
        return Update(run, {}, changed)
    _refuse_other_options(directory, manifest, now)
    return _Comparison(directory, manifest, now, options).update()


class _Comparison:
    """An earlier result, and the inputs as they are named now. Inputs of the result go by their
    index.
    """

    def __init__(self, directory: Path, manifest: Result, now: Run, options: RunOptions) -> None:
        self.directory, self.manifest, self.now, self.options = directory, manifest, now, options
        # ranks only look whether their result is finished already
        self.may_drop = options.prune or options.as_rank is not None
        self.then = manifest.inputs_now
        self.current = {file.path: file for file in now.files}
        self.is_same = as_packed(directory, manifest, checksum=options.checksum)

    def update(self) -> Update:
        then, current = self.then, self.current
        found = {i: current[one.path] for i, one in then.items() if one.path in current}
        same = {i for i, file in found.items() if self.is_same(replace(file, index=i), file)}
        moved, copies = self._find_contents(same)
        for path in copies:
            del current[path]
        names = [one.path for one in self.manifest.inputs]
        for index, path in moved.items():
            if path in names:  # of one that was removed: no two have the same name
                names[names.index(path)] = names[index]
            names[index] = path
        # rejected.jsonl names the input of each record: such a unit is packed again
        same |= {index for index in moved if not then[index].rejected_records}
        unnamed = {index: one for index, one in then.items() if names[index] not in current}
        kept, dropped = (unnamed, {}) if self.options.add else ({}, unnamed)
        self._refuse_to_drop(unnamed)
        lost = _lost(self.directory, self.manifest)
        records = _reusable(_records(self.directory, self.manifest), {*lost}, same | kept.keys())
        standing = {index for record in records for index in _inputs(record)}
        again, shape = self._kept(kept, standing)
        files = _numbered(names, [*current.values(), *again])
        if not self.may_drop:
            refuse_to_forget(self.directory, files)
        to_pack = [file for file in files if file.format and file.index not in standing]
        weight = sum(record.work_unit.weight for record in records)
        cut = work_units(to_pack, self.now.config, weight) if to_pack else []
        free = _free({record.unit for record in records})
        new = [replace(unit, index=next(free)) for unit in cut]
        units = sorted([*new, *(one.work_unit for one in records)], key=lambda unit: unit.index)
        earlier, config = self.manifest.config, self.now.config
        is_limited = any(getattr(earlier, n, None) != getattr(config, n, None) for n in _OF_WHOLE)
        run = replace(self.now, shape=shape, files=tuple(files), units=tuple(units))
        changed = bool(new or dropped or moved or lost or is_limited)
        self._tell(dropped, moved, copies, kept)
        return Update(run, {one.unit: one for one in records}, changed)

    def _find_contents(self, same: Container[int]) -> tuple[dict[int, str], dict[str, str]]:
        """Inputs by new names whose content the result holds, so that no document is there twice.

        (moved, copies): the new names of inputs that are not named any more; and, with --add, the
        files that are left out, with the name of their content in the result, or of the file that
        is added. `same`: the inputs that are named and have not changed. Only files of a size that
        the result, or another of them, has are read.
        """
        then, current, adding = self.then, self.current, self.options.add
        old = {one.path for one in then.values()} | {STDIN}
        new = [file for path, file in current.items() if path not in old and not is_pair(file)]
        sizes = Counter(one.size for one in new) if adding else Counter[int]()
        sizes.update({one.size: 2 for one in then.values()})
        new = [file for file in new if sizes[file.size] > 1]
        held = dict[tuple[object, ...], list[int]]()
        for index, one in then.items() if new else ():
            if one.path not in current or index in same:
                held.setdefault((one.sha256, *self._read_as(one.path)), []).append(index)
        moved, copies, added = dict[int, str](), dict[str, str](), dict[tuple[object, ...], str]()
        for file in new:
            content = digest(file.path)[1], *self._read_as(file.path)
            places = held.get(content, [])
            free = [i for i in places if then[i].path not in current and i not in moved
                    and not (adding and may_exist(then[i].path))]  # fmt: skip
            if free:
                base = storage.base_name(file.path)
                moved[min(free, key=lambda i: storage.base_name(then[i].path) != base)] = file.path
            elif adding:
                first = then[places[0]].path if places else added.setdefault(content, file.path)
                if first != file.path:
                    copies[file.path] = first
        return moved, copies

    def _read_as(self, path: str) -> tuple[str, str | None]:
        """The format, by its name, and the compression of an input: what its bytes mean."""
        config = self.now.config
        name, compression = format_of(path, documents=config.whole_files)
        name = config.input_format or name or JSON
        return "jsonl" if name == JSON else name, compression

    def _refuse_to_drop(self, unnamed: _Unnamed) -> None:
        """UsageError where documents would go that nobody has asked to drop, or be there twice: by
        two names of a file.
        """
        if self.may_drop:
            return
        if STDIN in self.current and any(one.path == STDIN for one in self.then.values()):
            raise UsageError(
                "-: stdin would replace the documents that came from stdin before",
                "write the data to a file and name that, or use --prune to drop the earlier ones",
            )
        now = {storage.identity(path): path for path in self.current if unnamed and path != STDIN}
        for path in (one.path for one in unnamed.values()):
            # no file has a null byte in its name, whatever a damaged manifest says
            if path != STDIN and "\0" not in path and storage.identity(path) in now:
                raise UsageError(
                    f"{now[storage.identity(path)]}: is {path} in the result, by another name",
                    "use the name that the result has, from the same directory",
                )
        if unnamed and not self.options.add:
            raise UsageError(
                f"{self.directory}: the update would drop {_described(unnamed)}",
                "use --add to keep what is not named as it is packed, or --prune to drop its "
                "documents",
            )

    def _kept(self, kept: _Unnamed, standing: set[int]) -> tuple[list[InputFile], Shape]:
        """The inputs that are kept: as they were, except those whose units do not stay, which are
        read again. And the shape of the run, with those of these. UsageError for one that is not as
        it was.
        """
        shape, config = self.now.shape, self.now.config
        if not kept:
            return [], shape
        files = [self._again(i, one.path) for i, one in kept.items() if i not in standing]
        then = shape_of(self.manifest)
        if then.name not in shape.members:
            then = replace(then, of_messages=False)
        names = {index: one.shape or then.name for index, one in kept.items()}
        if shape.members:
            found = shapes_of(files, config)
            shape = joined(shape.members | {one.described(): one for one in found.values()})
            labels = names | {index: one.described() for index, one in found.items()}
            files = [replace(file, shape=labels[file.index]) for file in files]
        known = load_identities(self.directory, self.manifest.inputs)
        times = {one.index: one.mtime_ns for one in known}
        for index in kept.keys() & standing:
            one = kept[index]
            files.append(InputFile(
                index, one.path, one.format_then(config.input_format) or "jsonl",
                format_of(one.path)[1], one.size, times.get(index, 0),
                shape=names[index] if shape.members else None,
            ))  # fmt: skip
        return files, shape

    def _again(self, index: int, path: str) -> InputFile:
        """An input that is not named, to be packed again. UsageError if it is not what it was."""
        reason = "is gone or cannot be read"
        if path != STDIN:
            with suppress(PackerError):
                if self.is_same(file := input_file(index, path, self.now.config), file):
                    return file
                reason = "has changed"
        raise UsageError(
            f"{path}: is not named, {reason}, and would have to be packed again: its unit holds "
            "another input that has changed, or a lost shard",
            "restore the file, or, to pack it as it is now, name it; to compare contents rather "
            "than times, --checksum; to drop everything that is not named, --update --prune",
        )

    def _tell(
        self, dropped: _Unnamed, moved: dict[int, str], copies: dict[str, str], kept: _Unnamed
    ) -> None:
        moves = [f"{self.then[index].path} is now {path}" for index, path in moved.items()]
        have = "s have" if len(moved) != 1 else " has"
        held = [f"{path} (as {name})" for path, name in copies.items()]
        notes = [
            dropped and self.options.prune and f"drops {_described(dropped)}",
            moved and f"{len(moved):,} input{have} moved: {named(moves, _MOST_NAMED)}",
            held and f"has these inputs already: {named(held, _MOST_NAMED)}",
            kept and f"keeps {_described(kept)}",
        ]
        for note in filter(None, notes):
            self.options.notify(f"{self.directory}: {note}")


def _described(unnamed: _Unnamed) -> str:
    """How many documents and inputs, and the first of these with why they are among them."""
    documents = sum(one.documents for one in unnamed.values())
    paths = [one.path for one in unnamed.values()]
    # of those alone that are shown: to look at each of a million inputs takes long
    shown = [f"{path} ({'not named' if may_exist(path) else 'no longer exists'})"
             for path in paths[:_MOST_NAMED]]  # fmt: skip
    of = f"{plural(documents, 'document')} of {plural(len(unnamed), 'input')}"
    return f"{of}: {named([*shown, *paths[_MOST_NAMED:]], _MOST_NAMED)}"


def refuse_other_result(place: Path | str, manifest: Result, run: Run) -> None:
    """UsageError for a finished result, in a directory or at a URL, that is not what `run` makes:
    of the same inputs and options, with all its files.
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
    if differ:
        raise finished(place, "; ".join(differ))
    if not run.resumable:
        raise finished(place, "stdin cannot be compared with what it was made of")
    is_remote = storage.is_url(str(place))
    # of a tokenized directory its manifest is read, which is small
    is_same = as_packed(Path(place), manifest, checksum=is_remote or run.is_tokenized)
    then = [InputFile(i, one.path, "", None, one.size, 0) for i, one in manifest.inputs_now.items()]
    try:
        differ = differing_files(then, run.files, is_same)
    except DataError as error:
        differ = [error.message]
    lost = [f"{name} is missing or damaged" for name in _lost(place, manifest)]
    if differ != [OTHER_ORDER] and (differ or lost):
        raise finished(place, "; ".join(differ or lost[:1]), may_update=not is_remote)
    units = [(one.index, [part[:3] for part in one.slices]) for one in run.units]
    if differ or units != [(one.unit, one.slices) for one in manifest.units]:
        raise UsageError(
            f"{place}: holds a finished result of these inputs, which were packed one after "
            "another, or in another order",
            "nothing need be done to have their documents; for the rows that this command gives, "
            "choose another --output, or replace it with --overwrite",
        )


def _lost(place: Path | str, manifest: Result) -> list[str]:
    """The files of a result that are not there any more as its manifest lists them. Only those that
    were written after the manifest are read; at a URL none are.
    """
    files = listed(manifest)
    if storage.is_url(url := str(place)):
        sizes = storage.sizes(url)
        return [n for n, one in files.items() if one.size not in (None, sizes.get(n))]
    with Folder(Path(place)) as folder:
        manifests = filter(None, map(folder.status, (MANIFEST, INCOMPLETE)))
        written_ns = max((one.st_mtime_ns for one in manifests), default=0)

        def is_there(name: str, file: Listed) -> bool:
            status = folder.status(name)
            if status and status.st_size == file.size and status.st_mtime_ns <= written_ns:
                return folder.is_file(name)
            return unchanged(folder, name, file)

        return [name for name, file in files.items() if not is_there(name, file)]


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


def _records(directory: Path, manifest: Result) -> Iterator[UnitRecord]:
    for record in commits.placed_units(directory, manifest):
        yield msgspec.structs.replace(record, reused=True)


def _reusable(records: Iterable[UnitRecord], missing: set[str], same: set[int]) -> list[UnitRecord]:
    """Units none of whose files is missing and that only read inputs all of whose units stay."""
    usable, left = set(same), [*records]
    while True:
        stay = list[UnitRecord]()
        for one in left:
            inputs, files = _inputs(one), {shard.file for shard in one.shards}
            files |= {REJECTED} if one.rejected else set()
            if missing.isdisjoint(files) and inputs <= usable:
                stay.append(one)
            else:
                usable -= inputs
        if len(stay) == len(left):
            return stay
        left = stay[::-1]  # units that hang together like a chain fall in one pass or two


def _inputs(record: UnitRecord) -> set[int]:
    return {part.file for part in record.slices}


def _numbered(names: list[str], current: list[InputFile]) -> list[InputFile]:
    """The inputs with the numbers that they had by these names; those that are gone without a
    format.
    """
    earlier = {name: index for index, name in enumerate(names)}
    free = _free({earlier[file.path] for file in current if file.path in earlier})
    taken = dict[int, InputFile]()
    for file in current:
        index = earlier[file.path] if file.path in earlier else next(free)
        taken[index] = replace(file, index=index)
    return [taken.get(index) or InputFile(index, names[index], "", None, 0, 0)
            for index in range(max(taken) + 1)]  # fmt: skip


def _free(taken: set[int]) -> Iterator[int]:
    return (number for number in count() if number not in taken)


def refuse_to_forget(directory: Path, files: Iterable[InputFile]) -> None:
    """UsageError for an unfinished run with inputs that are not among `files`: nobody would notice
    that they were never packed.
    """
    work = work_of(directory)
    unfinished = load_run(work / RUN) if work else None
    if unfinished is None:
        return
    there = {file.path for file in files}
    lost = [file.path for file in unfinished.files if file.format and file.path not in there]
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
    an update keeps without their being named; and what it carries. Raises DataError as `load_any`,
    for an update.
    """
    if options.overwrite or not holds_result(directory):
        return NOTHING_KNOWN
    try:
        manifest = load_as_is(directory)
    except DataError:
        if options.update:
            raise
        return NOTHING_KNOWN
    then = shape_of(manifest)
    if config.prompt_template == "chat":  # as was asked for, not because prompts are messages
        then = replace(then, of_messages=False)
    now = {file.path for file in current}
    unnamed = [one for one in manifest.inputs_now.values() if options.add and one.path not in now]
    names = dict.fromkeys(one.shape or then.name for one in unnamed)
    others = {name: _with_form(shape_named(name), directory, manifest) for name in names}
    files, carried = dict[int, Shape](), manifest.config.carried
    if options.checksum or dict(config.fields) != dict(manifest.config.fields):
        return KnownShapes(files, others, carried)
    again = cache(partial(shape_again, renamed=config.renamed))
    before = {one.path: one for one in load_identities(directory, manifest.inputs)}
    for file in current:
        earlier = before.get(file.path)
        if earlier is not None and earlier.is_surely(file):
            name = manifest.inputs[earlier.index].shape or manifest.config.shape
            shape = again(name)
            if shape is not None and config.shape in (None, name):
                files[file.index] = shape
    return KnownShapes(files, others, carried)


def _with_form(shape: Shape, directory: Path, manifest: Result) -> Shape:
    """Shape of preference with the field `label` where its records have one."""
    if not shape.has_pairs:
        return shape
    if isinstance(manifest, Manifest):
        has_labels = manifest.segments == manifest.documents
    else:
        has_labels = open_tokenized(directory).has_labels == {True}
    return replace(shape, columns={"label": "label"} if has_labels else {})
