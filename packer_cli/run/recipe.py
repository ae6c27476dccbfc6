"""Pack a recipe: tokenize every source, choose documents, pack rows.

    Recipe -> TOKENIZED/NAME for every source       as by packer tokenize --add
           -> OUT, or OUT/train and OUT/validation  as by packer pack, from those directories

Each directory is the result of a run of its own. A run without work ends at once, so other
amounts, another length or another split cost only the packing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

from packer_cli import storage
from packer_cli.errors import (
    InternalError,
    Interrupted,
    PackerError,
    UsageError,
    named,
    os_errors,
)
from packer_cli.inputs.byte_streams import STDIN
from packer_cli.inputs.detection import detect_shape
from packer_cli.inputs.discovery import find_inputs
from packer_cli.inputs.tokenized import check_stored, is_tokenized, new_conditions, opened
from packer_cli.mixing import missed_share
from packer_cli.options.documents import OF_ROWS_TOO, DocumentConfig
from packer_cli.options.options import TRAIN, VALIDATION, PackConfig
from packer_cli.options.recipe import Recipe, RecipeSource, in_terms_of_keys
from packer_cli.options.run_options import RunOptions
from packer_cli.options.shape_rules import without_idle
from packer_cli.records import InputFile, Notify
from packer_cli.result.existing import holds_result
from packer_cli.result.layout import DATASET_DICT, MANIFEST
from packer_cli.result.manifest import Manifest, Result, TokenizedManifest, as_named, load_any
from packer_cli.run.compare import OtherInputsError
from packer_cli.run.pipeline import pack
from packer_cli.run.place import InUseError, clean
from packer_cli.storage import put_file, read_bytes, sync

_SPLITS = json.dumps({"splits": [TRAIN, VALIDATION]}).encode()  # as datasets writes it
Side = tuple[str | None, list[str], list[PackConfig]]


@dataclass(frozen=True)
class SourceTokens:
    """Tokenized directories of one source.

    files  inputs from which packer makes the only directory; [] if the inputs of the source are
           tokenized directories
    """

    recipe: Recipe
    source: RecipeSource
    directories: list[str]
    files: list[InputFile]

    @property
    def config(self) -> DocumentConfig:
        """Options of the source, without inherited ones that do not apply to its records."""
        config, inherited = self.source.config, self.source.inherited
        if not inherited:
            return config
        return without_idle(config, detect_shape(self.files, config).shape, inherited)

    @property
    def is_tokenized(self) -> bool:
        """True if all directories are finished."""
        return all(map(holds_result, map(Path, self.directories)))


def pack_recipe(
    recipe: Recipe, destination: Path | str, options: RunOptions
) -> list[tuple[Path | str, Manifest | None]]:
    """Pack a recipe into `destination`, a directory or a URL; with a split, into a directory in it
    for each side.

    Returns the place of each result with its manifest; None to a rank if other ranks have units to
    pack. Options and errors are those of `pipeline.pack`.
    """
    # sources and sides may repeat a message
    mixture = recipe.config.mixture
    options = replace(options, warn=cache(options.warn), notify=cache(options.notify))
    joined = Path(destination) / DATASET_DICT  # joins both sides to one dataset
    is_joined = bool(mixture and mixture.is_split) and not storage.is_url(str(destination))
    if is_joined:
        _refuse_in_the_way(joined)
        clean(joined.parent, options)
    tokens = tokens_of(recipe, tokens_root(recipe, destination), options.notify)
    sides = rows_of(recipe, tokens, [recipe.config])
    places = [_inside(destination, side) for side, *_ in sides]
    may_change = options.overwrite or options.add or not all(map(_is_finished, places))
    for source_tokens in tokens:
        if source_tokens.files:
            with naming(recipe, source_tokens.source):
                _tokenize(source_tokens, options, may_change=may_change)
    if options.as_rank and not all(source_tokens.is_tokenized for source_tokens in tokens):
        return [(place, None) for place in places]
    results = _pack_sides(sides, places, joined if is_joined else None, options)
    if may_change and mixture and (first := results.get(0)):
        for share in first.missed_shares:
            options.notify(missed_share(mixture, share))
        portions = chain.from_iterable(source.portions for source in first.sources)
        too_small = [
            amount.label.removeprefix("source ")
            for stats, amount in zip(portions, mixture.portions, strict=True)
            if amount.held_out and amount.weight != 0 and not stats.held_out_documents
        ]
        if mixture.is_split and too_small:
            few = "too few documents to hold any out, so all stay in train"
            options.notify(f"{recipe.path}, source {named(too_small, 3)}: {few}")
    return [(place, results.get(number)) for number, place in enumerate(places)]


def _pack_sides(
    sides: Sequence[Side], places: Sequence[Path | str], joined: Path | None, options: RunOptions
) -> dict[int, Manifest | None]:
    """Pack each side to its place. Returns the manifests by number.

    `joined`: the file that joins both sides to one dataset.
    """
    # until that file is there, an interrupted run may have finished only some of the sides
    goes_on = not (joined.exists() if joined else all(map(_is_finished, places)))
    results: dict[int, Manifest | None] = {}

    def pack_side(number: int) -> None:
        """Pack a side and, before its switch, all sides after it. So a first side that is in its
        place shows that the others are.
        """
        if number == len(places) or number in results:
            return

        def before_switch() -> None:
            pack_side(number + 1)
            if joined and joined.exists():  # the sides come from two runs for a moment
                joined.unlink()
                sync(joined.parent)

        (_, inputs, (config,)), place = sides[number], places[number]
        own = replace(options, before_switch=before_switch)
        done = _packed(partial(pack, inputs, place, config), place, own, goes_on=goes_on)
        results[number] = cast("Manifest | None", done)  # its options are those of rows
        if results[number] is not None:
            pack_side(number + 1)

    pack_side(0)
    is_whole = all(results.get(number) for number in range(len(places)))
    if joined and is_whole and not joined.exists():
        put_file(joined, _SPLITS)
    return results


def _packed(
    packed: Callable[[RunOptions], Result | None],
    place: Path | str,
    options: RunOptions,
    *,
    goes_on: bool,
) -> Result | None:
    """Pack the rows of one side. The last rank, after each has tokenized its share, packs them all.

    `goes_on`: an interrupted run may have finished them.
    """
    is_rank, options = bool(options.as_rank), replace(options, rank=None, world_size=None)
    may_replace = options.overwrite or options.add
    as_it_is = replace(options, overwrite=False, add=False)
    try:
        if not may_replace or (goes_on and _is_finished(place)):
            try:
                return packed(as_it_is)
            except UsageError:
                if not may_replace and not (is_rank and _is_finished(place)):
                    raise
        return packed(options)  # also if another rank has finished it meanwhile
    except InUseError:
        if not is_rank:
            raise
        options.notify(f"{place}: another rank packs the rows")
        return None


def tokens_of(recipe: Recipe, root: Path, notify: Notify) -> list[SourceTokens]:
    """Return the tokenized directories of every source; packer makes its own below `root`.

    Raises UsageError for a file in two sources.
    """
    every, owners = list[SourceTokens](), dict[str, str]()
    for source in recipe.sources:
        with naming(recipe, source):
            files = find_inputs(list(source.inputs), source.config, notify)
            if any(file.path == STDIN for file in files):
                raise UsageError("-: a recipe reads files", "write the data to a file")
            directories, to_tokenize = [str(root / source.name)], files
            if is_tokenized(files):
                paths = [file.path.removesuffix(MANIFEST).rstrip("/") for file in files]
                directories, to_tokenize = [path or "." for path in paths], []
                for file in files:
                    new = new_conditions(opened(file), source.config)
                    check_stored([file], new.where_fields)
        every.append(SourceTokens(recipe, source, directories, to_tokenize))
        for file in files:
            owner = owners.setdefault(storage.identity(file.path), source.name)
            if owner != source.name:
                raise UsageError(
                    f"{recipe.path}, sources {owner!r} and {source.name!r}: "
                    f"both have {as_named(file.path)}",
                    "leave it to one of them",
                )
    return every


def rows_of(
    recipe: Recipe, tokens: Sequence[SourceTokens], configs: Sequence[PackConfig]
) -> list[Side]:
    """Return (side, inputs, options) of each result that a recipe makes from tokenized directories,
    for each of `configs`, the options of rows. The side is None without a split.
    """
    mixture = recipe.config.mixture
    if mixture is None:
        raise InternalError("a recipe without a mixture")
    amounts = zip(mixture.sources, tokens, strict=True)
    sources = tuple(
        replace(amount, inputs=len(its.directories), where=its.source.config.where)
        for amount, its in amounts
    )
    # documents are tokens by now: only options of rows still apply
    defaults: dict[str, Any] = {
        option.name: option.default
        for option in fields(DocumentConfig)
        if option.name not in OF_ROWS_TOO
    }
    inputs = [path for source in tokens for path in source.directories]
    sides = [TRAIN, VALIDATION] if mixture.is_split else [None]
    return [
        (side, inputs, [
            replace(
                config, **defaults, mixture=replace(mixture, sources=sources, part=side or TRAIN)
            )
            for config in configs
        ])
        for side in sides
    ]  # fmt: skip


def tokens_root(recipe: Recipe, destination: Path | str) -> Path:
    """Return the folder of the sources' tokenized directories, for a run into `destination`."""
    if recipe.tokenized is not None:
        return Path(storage.local(recipe.tokenized, "documents are tokenized into local files"))
    if storage.is_url(str(destination)):
        raise UsageError(
            f"{recipe.path}: does not say where sources are tokenized, and {destination} is a URL",
            'name a local directory: tokenized = "DIR"',
        )
    # not named by the output: results of other lengths and mixtures share the tokens
    beside = os.path.dirname(os.fspath(destination).rstrip("/"))
    return Path(beside, f"{Path(recipe.path).stem}-tokenized")


@contextmanager
def naming(recipe: Recipe, source: RecipeSource) -> Iterator[None]:
    """Name the recipe and the source in errors."""
    try:
        yield
    except Interrupted:
        raise
    except PackerError as error:
        tip = in_terms_of_keys(error.tip)
        if not any(one.startswith("@") for one in source.inputs):  # lists are as anywhere else
            tip = tip.replace("start at the current directory", "start at the recipe's folder")
        place = f"{recipe.path}, source {source.name!r}"
        raise type(error)(f"{place}: {error.message}", tip) from error


def _tokenize(tokens: SourceTokens, options: RunOptions, *, may_change: bool) -> None:
    """Bring the tokenized directory of a source up to date.

    `may_change`: rows may be packed again, so documents may change. If not, views that refer to
    them would be lost: raises UsageError.
    """
    config, name, to = tokens.config, tokens.recipe.tokenizer, Path(tokens.directories[0])
    source = tokens.source
    finished, notify = holds_result(to), options.notify
    if finished and not isinstance(load_any(to, incomplete_too=True), TokenizedManifest):
        raise UsageError(f"{to}: holds packed rows", "name another directory: tokenized = DIR")

    def note(message: str) -> None:  # with the name of the source, unless it has the directory's
        named = message.startswith(f"{to}: ")
        notify(message if named else f"source {source.name!r}: {in_terms_of_keys(message)}")

    def warn(message: str) -> None:
        options.warn(in_terms_of_keys(message))

    inputs, anew = list(source.inputs), replace(options, notify=note, warn=warn)
    now = anew
    if finished and not options.as_rank:
        now = replace(anew, add=may_change, exact=True, overwrite=False)
    try:
        done = pack(inputs, to, config, now, name)
    except OtherInputsError:
        raise
    except UsageError:
        if not (finished and options.overwrite):
            raise
        done = pack(inputs, to, config, anew, name)
    if done is None:
        notify(f"{to}: the ranks that tokenize the rest go on with it")


def _inside(destination: Path | str, side: str | None) -> Path | str:
    if side is None:
        return destination
    return storage.join(destination, side) if isinstance(destination, str) else destination / side


def _is_finished(place: Path | str) -> bool:
    if isinstance(place, str) and storage.is_url(place):
        return storage.is_file(storage.join(place, MANIFEST))
    return holds_result(Path(place))


def _refuse_in_the_way(joined: Path) -> None:
    """Raise UsageError if another result or file is in the way of both sides and this file."""
    if holds_result(joined.parent):
        raise UsageError(
            f"{joined.parent}: holds a result, and the recipe makes one for each side of its split",
            "choose another --output",
        )
    with os_errors(joined):
        if os.path.lexists(joined) and (joined.is_symlink() or read_bytes(joined) != _SPLITS):
            raise UsageError(f"{joined}: is of another dataset", "choose another --output")
