"""Cut input files into work units. Each unit of a mixture has the same share of every source.

Units depend on inputs and options only, not on the machine, so that a command makes the same shards
everywhere. A unit of a mixture does not have a document twice, however often sources are taken, so
its pieces still identify documents.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain
from operator import itemgetter

from packer_cli.errors import DamagedInputError
from packer_cli.inputs.byte_streams import STDIN
from packer_cli.inputs.formats import reader_for
from packer_cli.inputs.tokenized import opened
from packer_cli.mixing import Choice, choose
from packer_cli.options.documents import GIB, MIB, DocumentConfig
from packer_cli.options.formats import format_named
from packer_cli.options.options import PackConfig
from packer_cli.records import InputFile, Slice, WorkUnit
from packer_cli.result.manifest import TOKENIZED

_BYTES_PER_TOKEN = 4
_MOST_SLICES = 4096  # of a unit, so that a change of a file packs no more of them again
_DEALT_SLICES = 16  # of a unit, beside whole files
_LEAST_BYTES = 4 << 10  # of one of several slices that a unit has of an input
_PLACES = 16  # of a unit that a slice can be in, at least
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio
_WHOLE = 1 << 64
_BytesEach = dict[int, float]  # place among the files -> bytes of a document's tokens, on average


def work_units(
    files: Sequence[InputFile], config: DocumentConfig, standing: int = 0
) -> list[WorkUnit]:
    """Cut files into work units. `standing`: weight of inputs that are packed already."""
    choice = choice_of(files, config)
    if choice is None:
        return plan_units(list(files), config, standing)
    taken = {number: [pool.taken for pool in pools] for number, pools in enumerate(choice.pools)}
    taken = {number: counts for number, counts in taken.items() if any(counts)}
    each = {number: _bytes_each(files[number]) for number in taken}
    weight = sum(each[number] * sum(counts) for number, counts in taken.items())
    epochs = max(pool.taken / max(len(pool), 1) for pool in chain.from_iterable(choice.pools))
    parts = max(1, math.ceil(weight / unit_bytes_of(config, int(weight))), math.ceil(epochs))
    return _even_units(files, each, taken, parts)


def choice_of(files: Sequence[InputFile], config: DocumentConfig) -> Choice | None:
    """Choose documents of tokenized directories; None if the options take all of them."""
    if not isinstance(config, PackConfig) or config.mixture is None:
        return None
    return _choice_of(tuple(files), config)


@lru_cache(maxsize=2)
def _choice_of(files: tuple[InputFile, ...], config: PackConfig) -> Choice:
    return choose([opened(file) for file in files], config)


def _bytes_each(file: InputFile) -> float:
    """Return the bytes of a document's tokens, on average. This may open the directory."""
    directory = opened(file)
    return _BYTES_PER_TOKEN * directory.facts.tokens / max(len(directory), 1)


def _even_units(
    files: Sequence[InputFile], each: _BytesEach, counts: dict[int, list[int]], parts: int
) -> list[WorkUnit]:
    """Return up to `parts` units, each with the same share of the documents of every pool.

    counts  documents of each pool, by number of the file
    each    bytes of a document, likewise
    """
    units = list[WorkUnit]()
    for part in range(parts):
        slices = []
        for place, of_pools in counts.items():
            first = 0
            for count in of_pools:
                low, high = (first + count * edge // parts for edge in (part, part + 1))
                if low < high:
                    size = max(1, int(each[place] * (high - low)))
                    slices.append(Slice(files[place].index, low, high, size))
                first += count
        if slices:
            units.append(WorkUnit(len(units), tuple(slices)))
    return units


def plan_units(files: list[InputFile], config: DocumentConfig, standing: int = 0) -> list[WorkUnit]:
    """Cut the inputs into work units of about equal weight: of all inputs in about their shares, or
    in input order where rows keep it, and for documents.

    Units hold about `unit_bytes` of text. By default a thousand rows' worth, so that a unit's
    unfilled last row is noise, and more for inputs of many gigabytes, so that there are at
    most about a thousand shards; but of at most `_MOST_SLICES` files or parts of them.
    """
    weights = {file.index: _weight(file, config) for file in files}
    total = sum(weights.values())
    count = max(1, -(-total // unit_bytes_of(config, total + standing)))
    dealt = config if isinstance(config, PackConfig) and config.shuffle else None
    if dealt and files[0].format == TOKENIZED:
        every = {place: [len(opened(file))] for place, file in enumerate(files)}
        each = {place: _bytes_each(file) for place, file in enumerate(files)}
        return _even_units(files, each, every, max(1, min(count, max(every.values())[0])))
    target = max(1, -(-total // count))
    parts = list[Slice]()
    if dealt:
        parts = _dealt(files, weights, count, target, dealt)
    for file in () if dealt else files:
        weight = weights[file.index]
        parts += _slices(file, weight, _fewest(weight, target), config)
    most_slices = -(-len(parts) // -(-len(parts) // _MOST_SLICES))  # as many in each
    units: list[WorkUnit] = []
    current: list[Slice] = []
    room, slack = target, target // 8
    for part in parts:
        is_full = config.unit_bytes is None and len(current) == most_slices
        over = min(slack, part.weight // 2) if dealt else slack
        if current and (is_full or part.weight > room + over):
            units.append(WorkUnit(len(units), tuple(current)))
            # of small slices, no unit is left with few
            current, room = [], target + (max(-slack, min(room, slack)) if dealt else 0)
        room -= part.weight
        if current and (current[-1].file, current[-1].stop) == (part.file, part.start):
            before = current.pop()  # row groups side by side are opened once
            part = part._replace(  # noqa: PLW2901
                start=before.start, weight=before.weight + part.weight
            )
        current.append(part)
    units.append(WorkUnit(len(units), tuple(current)))
    return units


def _dealt(
    files: Sequence[InputFile],
    weights: Mapping[int, int],
    units: int,
    target: int,
    config: PackConfig,
) -> list[Slice]:
    """Cut all inputs, and put the slices in a seeded order. Every part of this order has about the
    same share of each input, from everywhere in it.

    1. A slice has a place between 0 and 1. The places of an input are evenly spaced. Fractional
       parts of multiples of the golden ratio decide the first place, and which slice gets which:
       they spread neighbours evenly, and so small files, too.
    2. A slice takes half a millisecond, and two requests at a URL. So an input has a slice for each
       megabyte of a unit only while there are few inputs. Otherwise it has one for each unit, or
       as many as a share of a unit allows.
    3. Slices at nearly the same place are in input order.
    """
    places = units * max(-(-target // MIB), 1 if units == 1 else _PLACES)
    each = _DEALT_SLICES // len(files)
    seed = int.from_bytes(hashlib.sha256(str(config.seed).encode()).digest()[:8], "little")
    dealt = list[tuple[float, Slice]]()
    for file in files:
        weight, first = weights[file.index], (file.index * _GOLDEN + seed) % _WHOLE
        if each:
            wanted = units * max(1, min(places, units * each, weight // _LEAST_BYTES) // units)
            wanted = min(wanted, weight)
        else:
            wanted = min(units, weight * _DEALT_SLICES // target)
        if wanted > 1 and config.on_error == "skip" and format_named(file.format).cut_by != "byte":
            wanted = _fewest(weight, target)  # a damaged file is skipped if one unit reads it
        if wanted < 2:
            dealt.append((first / _WHOLE, Slice(file.index, 0, None, weight)))
            continue
        parts = _neighbours_joined(_slices(file, weight, wanted, config), wanted)
        order = sorted(range(len(parts)), key=lambda number: (number * _GOLDEN + first) % _WHOLE)
        for place, number in sorted(enumerate(order), key=itemgetter(1)):
            dealt.append(((place + first / _WHOLE) / len(parts), parts[number]))
    near = [int(place * places) for place, _ in dealt]
    return [dealt[number][1] for number in sorted(range(len(dealt)), key=near.__getitem__)]


def unit_bytes_of(config: DocumentConfig, total: int) -> int:
    """Return about how many bytes a work unit reads of inputs of `total` bytes."""
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


def _fewest(weight: int, target: int) -> int:
    """Return the number of slices of a file that each fill about a unit."""
    return 1 if weight <= target + target // 8 else -(-weight // target)


def _slices(file: InputFile, weight: int, count: int, config: DocumentConfig) -> list[Slice]:
    """Cut a file into `count` slices, or into all its row groups; one slice if it cannot be cut."""
    whole = [Slice(file.index, 0, None, weight)]
    if file.path == STDIN or file.compression or count < 2:
        return whole
    try:
        return reader_for(file.format).split(file, count) or whole
    except DamagedInputError:
        if config.on_error == "fail":
            raise
        return whole


def _neighbours_joined(parts: list[Slice], count: int) -> list[Slice]:
    """Join the slices of a file to about `count` of equal weight."""
    if len(parts) <= max(count, 1):
        return parts
    joined, last, before_part = list[Slice](), -1, 0
    weight = sum(part.weight for part in parts)
    for part in parts:
        place = (2 * before_part + part.weight) * count // (2 * weight)
        before_part += part.weight
        if place == last:
            before = joined.pop()
            part = part._replace(start=before.start, weight=before.weight + part.weight)  # noqa: PLW2901
        joined.append(part)
        last = place
    return joined
