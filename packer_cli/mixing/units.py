"""From input files to work units: of a mixture each has the same share of every source.

The units depend on the inputs and options only, never on the machine, so that the same command
makes the same shards everywhere. A unit of a mixture has no document twice, however often sources
are taken, so its pieces still tell documents apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from packer_cli.errors import DamagedInputError
from packer_cli.inputs.byte_streams import STDIN
from packer_cli.inputs.formats import reader_for
from packer_cli.inputs.tokenized import opened
from packer_cli.mixing import Choice, choose
from packer_cli.options.documents import GIB, MIB, DocumentConfig
from packer_cli.options.options import PackConfig
from packer_cli.records import InputFile, Slice, WorkUnit
from packer_cli.result.manifest import TOKENIZED

_BYTES_PER_TOKEN = 4
_MOST_FILES = 4096  # of a unit, so that a change of one packs no more of them again
_BytesEach = dict[int, float]  # place among the files -> bytes of a document's tokens, on average


def work_units(
    files: Sequence[InputFile], config: DocumentConfig, standing: int = 0
) -> list[WorkUnit]:
    """What `files` are cut into. `standing`: the weight of inputs that are packed already."""
    choice = choice_of(files, config)
    if choice is None:
        return plan_units(list(files), config, standing)
    return _units_of(files, config, choice)


def choice_of(files: Sequence[InputFile], config: DocumentConfig) -> Choice | None:
    """What the options choose of tokenized directories; None: all of them."""
    if not isinstance(config, PackConfig) or config.mixture is None:
        return None
    return _choice_of(tuple(files), config)


@lru_cache(maxsize=2)
def _choice_of(files: tuple[InputFile, ...], config: PackConfig) -> Choice:
    return choose([opened(file) for file in files], config)


def _units_of(files: Sequence[InputFile], config: DocumentConfig, choice: Choice) -> list[WorkUnit]:
    each = {place: _bytes_each(files[place]) for place in choice.taken}
    weight = sum(each[place] * count for place, count in choice.taken.items())
    epochs = max(count / len(choice.pools[place]) for place, count in choice.taken.items())
    parts = max(1, math.ceil(weight / unit_bytes_of(config, int(weight))), math.ceil(epochs))
    return _even_units(files, each, choice.taken, parts)


def _bytes_each(file: InputFile) -> float:
    """Bytes of a document's tokens, on average. Opens directories beyond those that stay open."""
    directory = opened(file)
    return _BYTES_PER_TOKEN * directory.facts.tokens / max(len(directory), 1)


def _even_units(
    files: Sequence[InputFile],
    each: _BytesEach,
    counts: dict[int, int],
    parts: int,
) -> list[WorkUnit]:
    """Up to so many units, each with the same share of the documents of every file. `counts`: how
    many there are, by the file's place.
    """
    units = list[WorkUnit]()
    for part in range(parts):
        slices = []
        for place, count in counts.items():
            low, high = count * part // parts, count * (part + 1) // parts
            if low < high:
                size = max(1, int(each[place] * (high - low)))
                slices.append(Slice(files[place].index, low, high, size))
        if slices:
            units.append(WorkUnit(len(units), tuple(slices)))
    return units


def plan_units(files: list[InputFile], config: DocumentConfig, standing: int = 0) -> list[WorkUnit]:
    """Cut the inputs into work units of about equal weight, in input order.

    Units hold about `unit_bytes` of text. By default a thousand rows' worth, so that a unit's
    unfilled last row is noise, and more for inputs of many gigabytes, so that there are at
    most about a thousand shards; but of at most `_MOST_FILES` files.
    """
    weights = {file.index: _weight(file, config) for file in files}
    total = sum(weights.values())
    count = max(1, -(-total // unit_bytes_of(config, total + standing)))
    if isinstance(config, PackConfig) and config.shuffle and files[0].format == TOKENIZED:
        every = {place: len(opened(file)) for place, file in enumerate(files)}
        each = {place: _bytes_each(file) for place, file in enumerate(files)}
        return _even_units(files, each, every, max(1, min(count, max(every.values()))))
    target = max(1, -(-total // count))
    most_files = -(-len(files) // -(-len(files) // _MOST_FILES))  # as many in each
    units: list[WorkUnit] = []
    current: list[Slice] = []
    room = target
    for part in (
        part for file in files for part in _slices(file, weights[file.index], target, config)
    ):
        is_full = config.unit_bytes is None and len(current) == most_files
        if current and (is_full or part.weight > room + target // 8):
            units.append(WorkUnit(len(units), tuple(current)))
            current, room = [], target
        room -= part.weight
        if current and (current[-1].file, current[-1].stop) == (part.file, part.start):
            before = current.pop()  # row groups side by side are opened once
            part = part._replace(  # noqa: PLW2901
                start=before.start, weight=before.weight + part.weight
            )
        current.append(part)
    units.append(WorkUnit(len(units), tuple(current)))
    return units


def unit_bytes_of(config: DocumentConfig, total: int) -> int:
    """About how much a work unit reads of inputs of `total` bytes."""
    if config.unit_bytes is not None:
        return config.unit_bytes
    least_tokens = config.least_unit_tokens if isinstance(config, PackConfig) else 0
    rows = max(16 * MIB, _BYTES_PER_TOKEN * least_tokens)
    few = 1 << max(0, (total // 1024 - 1).bit_length())
    return min(max(rows, few), GIB)


def _weight(file: InputFile, config: DocumentConfig) -> int:
    try:
        return max(1, reader_for(file.format).weight(file))
    except DamagedInputError:
        if config.on_error == "fail":
            raise
        return max(1, file.size)  # the unit that reads it leaves it out


def _slices(file: InputFile, weight: int, target: int, config: DocumentConfig) -> list[Slice]:
    whole = [Slice(file.index, 0, None, weight)]
    if file.path == STDIN or file.compression or weight <= target + target // 8:
        return whole
    try:
        return reader_for(file.format).split(file, -(-weight // target)) or whole
    except DamagedInputError:
        if config.on_error == "fail":
            raise
        return whole
