"""A recipe's run: every source tokenized, documents chosen, rows packed.

    Recipe -> TOKENIZED/NAME for every source      as packer tokenize --update does it
           -> OUT, or OUT/train and OUT/validation  as packer pack does it, of those directories

Each of these is a run of its own, with all that runs promise. One that has nothing to do is over
at once, so that other amounts, another length or another split take the time of packing alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from packer_cli import storage
from packer_cli.config.documents import DocumentConfig
from packer_cli.config.mixture import TRAIN, VALIDATION, Mixture
from packer_cli.config.options import PackConfig
from packer_cli.config.recipe import Recipe, Source
from packer_cli.config.run_options import RunOptions
from packer_cli.config.shape_rules import without_idle
from packer_cli.durable import put_file
from packer_cli.early import EarlyReference
from packer_cli.errors import InternalError, PackerError, UsageError, from_os_error
from packer_cli.inputs.byte_streams import STDIN
from packer_cli.inputs.detection import detect_shape
from packer_cli.inputs.discovery import find_inputs
from packer_cli.inputs.tokenized import is_tokenized
from packer_cli.locks import InUseError
from packer_cli.mixing.shares import refuse_missed, told
from packer_cli.mixing.units import choice_of, work_units
from packer_cli.ownership import Folder
from packer_cli.records import InputFile, Notify
from packer_cli.result.layout import DATASET_DICT, MANIFEST
from packer_cli.result.manifest import Manifest, TokenizedManifest
from packer_cli.result.manifest_file import as_named, load, load_any, load_tokenized
from packer_cli.run.directory import clean, is_begun, is_replacing, work_of
from packer_cli.run.identity import Run
from packer_cli.run.pipeline import pack, settled
from packer_cli.run.replacing import holds_result
from packer_cli.run.update import plan_update, refuse_other_result

_SPLITS = json.dumps({"splits": [TRAIN, VALIDATION]}).encode()  # as datasets writes it
Raw = tuple[Source, list[InputFile], Path]  # a source, and where its tokens are to be
_OF_RUN = {"unit_bytes", "shard_bytes"}  # options of documents that rows have, too


def pack_recipe(
    recipe: Recipe,
    destination: Path | str,
    options: RunOptions,
    notify: Notify = lambda message: None,
    warn: Notify = lambda message: None,
    early: EarlyReference | None = None,
    staging: Path | None = None,
    max_share_error: float | None = None,
) -> list[tuple[Path | str, Manifest | None]]:
    """Pack a recipe into `destination`, a directory or a URL, or into a directory for each side of
    its split in there; gives where each result is, and its manifest, or None to a rank that leaves
    work to others. Parameters and errors are those of `pipeline.pack`; ThresholdMissed for a share
    that is off by more than `max_share_error`.
    """
    if options.add:
        raise UsageError("--add: a recipe names all of its inputs", "add them there, and --update")
    mixture = recipe.config.mixture
    is_local_split = mixture and mixture.is_split and not storage.is_url(str(destination))
    if is_local_split:
        _refuse_in_the_way(destination)
    job = _Job(recipe, destination, options, notify, warn)
    directories = job.tokenized(early)
    mixture = job.mixture(directories)
    parts = _sides(mixture)
    places = [_inside(destination, part) if part else destination for part in parts]
    if options.as_rank and not all(holds_result(Path(one)) for its in directories for one in its):
        return [(place, None) for place in places]
    job.tell_shares(directories, _of_rows(recipe.config, mixture), max_share_error)
    # as long as the directory of both sides does not open, a run is putting them in their places
    is_whole = all(map(_is_finished, places)) and (
        not is_local_split or _joined(destination).exists()
    )
    # without traces of an interrupted run, whose finished sides stay, all are to be replaced
    goes_on = not is_whole and (
        not (options.overwrite and is_local_split)
        or all(map(_is_finished, places))
        or any(map(_is_unfinished, places))
    )
    results: dict[int, Manifest | None] = {}

    def pack_side(number: int) -> None:
        """Pack a side, and before it takes its place, all that follow. So the first side that is in
        its place says that all of them are.
        """
        if number == len(places) or number in results:
            return

        def before_switch() -> None:
            pack_side(number + 1)
            if is_local_split:
                _part_sides(destination)

        part, place = parts[number], places[number]
        config = _of_rows(recipe.config, replace(mixture, part=part or TRAIN))
        own_staging = staging / part if staging and part else staging
        results[number] = job.packed(
            directories, place, config, own_staging, before_switch, goes_on=goes_on
        )
        if results[number] is not None:
            pack_side(number + 1)

    pack_side(0)
    if is_local_split and all(results.get(number) for number in range(len(places))):
        _join_sides(destination)
    return [(place, results.get(number)) for number, place in enumerate(places)]


@dataclass(frozen=True)
class _Job:
    """A recipe's run. `warned`: what the user has been warned of, for several sources once."""

    recipe: Recipe
    destination: Path | str
    options: RunOptions
    notify: Notify
    warn_user: Notify
    warned: set[str] = field(default_factory=set)

    def warn(self, message: str) -> None:
        if message not in self.warned:
            self.warned.add(message)
            self.warn_user(message)

    def tokenized(self, early: EarlyReference | None) -> list[list[str]]:
        """For every source, the tokenized directories that it consists of, brought up to date."""
        begun = [early]  # for the first source that is tokenized

        def tokenize(source: Source, files: list[InputFile], to: Path) -> None:
            self._tokenize(source, files, to, begun.pop() if begun else None)

        return self.directories(_root(self.recipe, self.destination), tokenize)

    def directories(
        self, root: Path, prepare: Callable[[Source, list[InputFile], Path], None]
    ) -> list[list[str]]:
        """For every source, the tokenized directories that it consists of. `prepare`: one below
        `root`, of a source whose inputs are no such directories themselves.
        """
        files = [self.found(source) for source in self.recipe.sources]
        _refuse_shared(self.recipe, files)
        directories = []
        for source, its in zip(self.recipe.sources, files, strict=True):
            with self.naming(source):
                if is_tokenized(its):
                    directories.append([_folder_of(file) for file in its])
                else:
                    prepare(source, its, root / source.name)
                    directories.append([str(root / source.name)])
        return directories

    def mixture(self, directories: list[list[str]]) -> Mixture:
        """The recipe's amounts, of as many directories."""
        mixture = self.recipe.config.mixture
        if mixture is None:
            raise InternalError("a recipe without a mixture")
        amounts = zip(mixture.sources, directories, strict=True)
        return replace(
            mixture, sources=tuple(replace(one, inputs=len(its)) for one, its in amounts)
        )

    def tell_shares(
        self, directories: list[list[str]], config: PackConfig, most: float | None
    ) -> None:
        """Say which sources' shares are off, since documents stay whole."""
        inputs = [one for its in directories for one in its]
        files = find_inputs(inputs, config, lambda _: None)
        files, config, *_ = settled(files, config, None, lambda _: None, self.warn)
        choice, mixture = choice_of(files, config), config.mixture
        if choice is None or mixture is None:
            return
        if most is not None:
            refuse_missed(mixture, choice.shares, most)
        for share in choice.shares:
            if share.is_missed:
                self.notify(told(mixture, share))

    def packed(
        self,
        directories: list[list[str]],
        to: Path | str,
        config: PackConfig,
        staging: Path | None,
        before_switch: Callable[[], None],
        *,
        goes_on: bool,
    ) -> Manifest | None:
        """The rows of one side. `goes_on`: an interrupted run may have finished them. Of several
        ranks, each of which has tokenized its share, the last packs all of them.
        """
        inputs, options = [one for its in directories for one in its], self.options
        is_rank = options.as_rank is not None
        if _is_finished(to):
            may_replace = options.overwrite or options.update
            work = work_of(Path(to))
            looks_done = goes_on and not (may_replace and work and is_begun(work))
            if looks_done:
                clean(Path(to), no_lock=options.no_lock)
            if is_rank or looks_done:
                try:
                    return self._finished(inputs, to, config)
                except UsageError:
                    if is_rank or not may_replace:
                        raise
        options = replace(options, rank=None, world_size=None)
        try:
            packed = pack(
                inputs, to, config, options, None, self.notify, self.warn, staging=staging,
                before_switch=before_switch,
            )  # fmt: skip
        except (InUseError, UsageError) as error:
            if is_rank and _is_finished(to):
                return self._finished(inputs, to, config)
            if is_rank and isinstance(error, InUseError):
                self.notify(f"{to}: another rank packs the rows")
                return None
            raise
        if packed is not None and not isinstance(packed, Manifest):
            raise InternalError(f"{to}: rows were to be packed")
        return packed

    def _finished(self, inputs: list[str], to: Path | str, config: PackConfig) -> Manifest:
        """What is there. UsageError if that is not what the recipe gives."""
        files = find_inputs(inputs, config, self.notify)
        files, config, shape, chosen = settled(files, config, None, lambda _: None, self.warn)
        manifest, units = load(to, incomplete_too=True, half_too=True), work_units(files, config)
        run = Run(config, shape, tuple(files), tuple(units), chosen.name, chosen.hashes)
        refuse_other_result(to, manifest, run)
        self.notify(f"{to}: is finished already")
        return manifest

    def found(self, source: Source) -> list[InputFile]:
        with self.naming(source):
            files = find_inputs(list(source.inputs), source.config, self.notify)
            if any(file.path == STDIN for file in files):
                raise UsageError("-: a recipe reads files", "write the data to a file")
            return files

    @contextmanager
    def naming(self, source: Source) -> Iterator[None]:
        """Errors say which source of which recipe they are about."""
        try:
            yield
        except PackerError as error:
            place = f"{self.recipe.path}, source {source.name!r}"
            tip = error.tip
            if not any(one.startswith("@") for one in source.inputs):  # lists are as anywhere else
                tip = tip.replace("start at the current directory", "start at the recipe's folder")
            raise type(error)(f"{place}: {error.message}", tip) from error

    def _tokenize(
        self, source: Source, files: list[InputFile], to: Path, early: EarlyReference | None
    ) -> None:
        """Bring the tokenized directory of a source up to date."""
        config, tokenizer = options_of_source(source, files), self.recipe.tokenizer
        options, finished = self.options, holds_result(to)
        if finished and not isinstance(load_any(to, incomplete_too=True), TokenizedManifest):
            raise UsageError(f"{to}: holds packed rows", "name another directory: tokenized = DIR")
        if finished and not options.as_rank:
            options = replace(options, update=True, add=False, overwrite=False)
        arguments = list(source.inputs), to, config

        def notify(message: str) -> None:  # what does not name the directory names the source
            named = message.startswith(f"{to}: ")
            self.notify(message if named else f"source {source.name!r}: {message}")

        try:
            done = pack(*arguments, options, tokenizer, notify, self.warn, early)
        except UsageError:
            if not (finished and self.options.overwrite):
                raise
            _refuse_anothers(to, files)
            done = pack(*arguments, self.options, tokenizer, notify, self.warn, early)
        if done is None:
            self.notify(f"{to}: the ranks that tokenize the rest go on with it")

    def refuse_stale(self, source: Source, files: list[InputFile], to: Path) -> None:
        """UsageError where a tokenized directory is not what a run would make of a source now."""
        again = f"packer pack {self.recipe.path}"
        files, config, shape, chosen = settled(
            files, options_of_source(source, files), self.recipe.tokenizer, self.notify, self.warn
        )
        try:
            update = plan_update(
                to, load_tokenized(to), files, shape, config, chosen.name, chosen.hashes,
                checksum=False, unnamed="refused",
            )  # fmt: skip
        except UsageError as error:
            tip = f"to tokenize it again, run {again} --overwrite"
            raise UsageError(f"was tokenized otherwise: {error.message}", tip) from error
        if update.changed:
            raise UsageError(
                f"{to}: its inputs have changed, or its files or limits, since they were tokenized",
                f"run {again} --update, which tokenizes what is new, has changed or is lost",
            )


def rows_of(
    recipe: Recipe, directories: list[list[str]], configs: Sequence[PackConfig]
) -> list[tuple[str | None, list[str], list[PackConfig]]]:
    """(side, inputs, options) of what a recipe makes of tokenized directories, with each of these
    options of rows. The side is None without a split.
    """
    mixture = _Job(recipe, "", RunOptions(), print, print).mixture(directories)
    inputs = [one for its in directories for one in its]
    return [
        (part, inputs, [_of_rows(one, replace(mixture, part=part or TRAIN)) for one in configs])
        for part in _sides(mixture)
    ]


def tokenized_before(
    recipe: Recipe, destinations: Sequence[Path | str], notify: Notify, warn: Notify
) -> list[list[str]]:
    """For every source, the tokenized directories that it consists of, as a run into one of
    `destinations` has left them. Writes nothing. UsageError for a source that is not tokenized, or
    was before it changed.
    """
    roots = [_root(recipe, one) for one in destinations]
    job = _Job(recipe, destinations[0], RunOptions(), notify, warn)
    root = next((one for one in roots if one.exists()), roots[0])
    return job.directories(root, job.refuse_stale)


def untokenized(
    recipe: Recipe, destinations: Sequence[Path | str]
) -> tuple[list[list[str]], list[Raw]]:
    """(directories of every source, as a run would make them; all sources that are to be tokenized
    for that, if one of them is not yet).
    """
    root = next((one for one in (_root(recipe, to) for to in destinations) if one.exists()),
                _root(recipe, destinations[0]))  # fmt: skip
    raw: list[Raw] = []
    job = _Job(recipe, destinations[0], RunOptions(), lambda _: None, lambda _: None)
    directories = job.directories(root, lambda *one: raw.append(one))
    return directories, raw if any(not holds_result(to) for *_, to in raw) else []


def options_of_source(source: Source, files: list[InputFile]) -> DocumentConfig:
    """Its options, without those that it has inherited and has no use for."""
    if not source.inherited:
        return source.config
    return without_idle(source.config, detect_shape(files, source.config)[1], source.inherited)


def _sides(mixture: Mixture) -> list[str | None]:
    """Of the split, or None alone without one."""
    return [TRAIN, VALIDATION] if mixture.is_split else [None]


def _of_rows(config: PackConfig, mixture: Mixture) -> PackConfig:
    """The options that are left for rows once documents are tokens."""
    defaults: dict[str, Any] = {
        one.name: one.default for one in fields(DocumentConfig) if one.name not in _OF_RUN
    }
    return replace(config, **defaults, mixture=mixture)


def _refuse_shared(recipe: Recipe, files: list[list[InputFile]]) -> None:
    """UsageError for a file that is in two sources."""
    owners: dict[str, str] = {}
    for source, its in zip(recipe.sources, files, strict=True):
        for file in its:
            owner = owners.setdefault(storage.identity(file.path), source.name)
            if owner != source.name:
                raise UsageError(
                    f"{recipe.path}, sources {owner!r} and {source.name!r}: "
                    f"both have {as_named(file.path)}",
                    "leave it to one of them",
                )


def _refuse_anothers(to: Path, files: list[InputFile]) -> None:
    """UsageError for a tokenized directory of other files: another recipe names it, too, and views
    may refer to it.
    """
    theirs = {one.path for one in load_tokenized(to).inputs_now.values()}
    if theirs.isdisjoint(file.path for file in files):
        raise UsageError(
            f"{to}: holds documents of other inputs, among them {as_named(min(theirs))}",
            "name another directory: tokenized = DIR, or give the source another name; if nothing "
            "needs those documents any more, remove the directory",
        )


def _root(recipe: Recipe, destination: Path | str) -> Path:
    """Where tokenized directories of sources lie."""
    if recipe.tokenized is not None:
        return Path(storage.local(recipe.tokenized, "documents are tokenized into local files"))
    if storage.is_url(str(destination)):
        raise UsageError(
            f"{recipe.path}: does not say where sources are tokenized, and {destination} is a URL",
            'name a local directory: tokenized = "DIR"',
        )
    # not by the output's name: one of another length or mixture is made of the same tokens
    beside = os.path.dirname(os.fspath(destination).rstrip("/"))
    return Path(beside, f"{Path(recipe.path).stem}-tokenized")


def _folder_of(file: InputFile) -> str:
    return file.path.removesuffix(MANIFEST).rstrip("/") or "."


def _inside(destination: Path | str, part: str) -> Path | str:
    return storage.join(destination, part) if isinstance(destination, str) else destination / part


def _is_finished(place: Path | str) -> bool:
    if isinstance(place, str) and storage.is_url(place):
        return storage.is_file(storage.join(place, MANIFEST))
    return holds_result(Path(place))


def _is_unfinished(place: Path | str) -> bool:
    """Whether an interrupted run has left units there that it has not put in their place."""
    work = work_of(Path(place))
    return work is not None and (is_begun(work) or is_replacing(Path(place)))


def _refuse_in_the_way(destination: Path | str) -> None:
    """UsageError where the directory of both sides cannot be."""
    folder = Path(destination)
    if holds_result(folder):
        raise UsageError(
            f"{folder}: holds a result, and the recipe makes one for each side of its split",
            "choose another --output",
        )
    file = _joined(destination)
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        raise from_os_error(error, file, "read") from error
    if content != _SPLITS:
        raise UsageError(f"{file}: is of another dataset", "choose another --output")


def _joined(destination: Path | str) -> Path:
    """What makes one dataset of both sides."""
    return Path(destination) / DATASET_DICT


def _part_sides(destination: Path | str) -> None:
    """Have it open no more: one side is of another run for a moment."""
    if _joined(destination).exists():
        with Folder(Path(destination)) as folder:
            folder.unlink(DATASET_DICT)
            folder.sync()


def _join_sides(destination: Path | str) -> None:
    """Have the directory of both sides, which are finished, open as a datasets.DatasetDict."""
    if not _joined(destination).exists():
        put_file(_joined(destination), _SPLITS)
