"""A sample: parts of work units, of which each stands for its unit.

Of many units, some are read whole. Of few, pieces are read of each, spread over all of it by the
seed: bytes, or row groups. A record belongs to the piece that it begins in, so any is as likely to
be read as any other. Files that cannot be entered in the middle, such as compressed ones, are read
from their beginning, as far as needed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from packer_cli import storage
from packer_cli.inputs.byte_streams import STDIN
from packer_cli.inputs.formats import reader_for
from packer_cli.inputs.tokenized import is_tokenized
from packer_cli.options.documents import MIB
from packer_cli.options.formats import format_named
from packer_cli.options.options import PackConfig
from packer_cli.records import InputFile, Records, Slice, WorkUnit
from packer_cli.tokenization.encoding import Read

_PART_BYTES = MIB // 2  # so that a part has documents of many lengths
_FEWEST, _MOST = 8, 64  # parts: fewer tell too little of the error, more tell little more
_LEAST_PART_BYTES = MIB // 4
_PIECE_BYTES = MIB // 32
_LINE_BYTES = 4 << 10  # read at a time, and ever more, to find where a line begins
_BEGINNING_BYTES = 4 * MIB  # of a file that is read from its beginning: in blocks
_LEAST_UNITS = 2  # of those read whole: fewer have no standard error
_BYTES_PER_TOKEN = 4
_One = TypeVar("_One")


@dataclass(frozen=True)
class Part:
    """The slices of a work unit that are read at once.

    unit         with these slices alone
    unit_weight  bytes of text of the whole unit
    limits       for each slice the share of it that is read, from its beginning; () for a unit
                 that is read whole
    """

    unit: WorkUnit
    unit_weight: int
    limits: tuple[float, ...] = ()

    @property
    def is_whole(self) -> bool:
        return not self.limits

    def weight_of(self, files: Container[int] | None = None) -> float:
        """Bytes of text that are read of some inputs, about. None: of all."""
        each = zip(self.unit.slices, self.limits or [1.0] * len(self.unit.slices), strict=True)
        return sum(one.weight * min(share, 1.0) for one, share in each
                   if files is None or one.file in files)  # fmt: skip


class PartReader:
    """Reads the slices of a part, as far as it says. `weight`: bytes of text that were read."""

    def __init__(self, read: Read, part: Part) -> None:
        self._read = read
        self._limits = dict(zip(part.unit.slices, part.limits, strict=False))
        self.weight = 0.0

    def __call__(self, file: InputFile, one: Slice) -> Iterator[Records]:
        share, consumed = self._limits.get(one, 1.0), 0
        stored = _stored(file, one) if share < 1 else 0.0
        for records in self._read(file, one):
            yield records
            consumed += records.consumed
            if share < 1 and consumed >= share * stored:
                self.weight += one.weight * min(consumed / stored, 1)
                return
        self.weight += one.weight


def weight_of(units: Sequence[WorkUnit]) -> int:
    """About how many bytes of text they have."""
    return sum(part.weight for unit in units for part in unit.slices)


def _some_of(units: Sequence[WorkUnit], share: float, seed: int) -> list[WorkUnit]:
    """A share of the units, at least two."""
    return _spread(units, max(_LEAST_UNITS, math.ceil(share * len(units))), seed)


def sampled(
    files: Sequence[InputFile],
    units: Sequence[WorkUnit],
    share: float | None,
    config: PackConfig,
) -> list[Part]:
    """The parts of `units` that are read, in their order: all units whole where there is no sample,
    and where the inputs are too small for one.
    """
    if share is None or any(file.path == STDIN for file in files):
        return _whole(units)
    if is_tokenized(files):  # of these, only the index is read
        return _whole(_some_of(units, share, config.seed))
    whole = weight_of(units)
    wanted = max(share, _FEWEST * _LEAST_PART_BYTES / whole)  # of all
    if wanted >= 1:
        return _whole(units)
    count = int(min(max(wanted * whole / _PART_BYTES, _FEWEST), _MOST))
    if wanted * len(units) >= count:
        return _whole(_some_of(units, wanted, config.seed))
    chosen = _spread(units, count, config.seed)
    of_each = max(count // len(chosen), 1)
    own = min(wanted * len(units) / len(chosen), 1)
    parts = [part for unit in chosen for part in _parts(files, unit, own, of_each, config)]
    return parts or _whole(units)  # for one long line


def begun_in_the_middle(file: InputFile) -> bool:
    """True if records are read from the middle of a file without what comes before them."""
    cut_by = format_named(file.format).cut_by
    return not file.compression and cut_by in ("byte", "row group", "document")


def _whole(units: Sequence[WorkUnit]) -> list[Part]:
    return [Part(unit, weight_of([unit])) for unit in units]


def _spread(ones: Sequence[_One], count: int, *seed: object) -> list[_One]:
    """`count` of these, as far from each other as can be."""
    count, first = min(count, len(ones)), _drawn(*seed)
    return [ones[int((place + first) * len(ones) / count)] for place in range(count)]


def _drawn(*seed: object) -> float:
    """A number from 0 to 1, without the latter."""
    key = hashlib.sha256("/".join(map(str, ("sample", *seed))).encode()).digest()
    return int.from_bytes(key[:6], "big") / (1 << 48)


def _parts(
    files: Sequence[InputFile], unit: WorkUnit, share: float, count: int, config: PackConfig
) -> list[Part]:
    """Cut `count` parts from a unit, together a share of it. One where it is not entered: some of
    its files, and of each as much as makes up the share together.
    """
    weight = weight_of([unit])
    if not all(begun_in_the_middle(files[one.file]) for one in unit.slices):
        some = _spread(unit.slices, math.ceil(share * len(unit.slices)), config.seed, unit.index)
        begun = WorkUnit(unit.index, tuple(some))
        each = share * weight / max(weight_of([begun]), 1)
        sizes = [max(_stored(files[one.file], one), 1) for one in some]
        return [Part(begun, weight, tuple(max(each, _BEGINNING_BYTES / size) for size in sizes))]
    most = share * weight / _PIECE_BYTES
    named = [(files[one.file], one) for one in unit.slices]
    groups = sum(
        len((reader_for(file.format).groups(file) or [])[one.start : one.stop])
        for file, one in named
    )
    if groups:  # of which no less than a few megabytes are decoded
        most = min(max(math.ceil(share * groups), 2), groups)
    count = max(1, min(count, int(most)))
    pieces = max(1, int(most / count))  # of each part
    size = share * weight / (count * pieces)
    # lengths may drift in a file, and what is planned together are documents of one window
    step = max(min(weight, _BYTES_PER_TOKEN * (config.window_tokens or 0)) / pieces, size)
    parts: list[Part] = []
    for number in range(count):
        found = list[tuple[Slice, float]]()
        first = (number + _drawn(config.seed, unit.index, number)) / count * weight
        for place in range(pieces):
            drawn = _drawn(config.seed, unit.index, number, place)
            begin = (first + place * step + drawn * (step - size)) % weight
            found += _between(files, unit, begin, begin + size)
        if found:
            slices, cut = zip(*found, strict=True)
            parts.append(Part(WorkUnit(unit.index, slices), weight, cut))
    return parts


def _between(
    files: Sequence[InputFile], unit: WorkUnit, begin: float, end: float
) -> Iterator[tuple[Slice, float]]:
    """Slices of what lies from `begin` to `end` in the unit, counted in weight, each with its limit
    as `Part` has it.
    """
    for one in unit.slices:
        low, high = max(begin, 0.0), min(end, float(one.weight))
        begin, end = begin - one.weight, end - one.weight
        if low >= high:
            continue
        file = files[one.file]
        groups = reader_for(file.format).groups(file)
        if groups is None:
            size = _stop(file, one) - one.start
            start, stop = (one.start + round(size * at / one.weight) for at in (low, high))
            weight = high - low
            if format_named(file.format).cut_by == "byte":  # lines may be longer than a piece
                start, stop = _line_from(file, start), _line_from(file, stop)
                weight = stop - start
            if start < stop:
                yield Slice(one.file, start, stop, max(round(weight), 1)), 1.0
            continue
        own = groups[one.start : one.stop]
        begins = list(accumulate((group.bytes for group in own), initial=0))
        inside = [place for place, at in enumerate(begins[:-1]) if low <= at < high]
        if inside:
            first, last, share = inside[0], inside[-1] + 1, 1.0
        else:
            last = next(place for place, at in enumerate(begins) if at > low)
            first = last - 1
            share = (high - low) / max(begins[last] - begins[first], 1)
        size = begins[last] - begins[first]
        yield Slice(one.file, one.start + first, one.start + last, size), share


def _stored(file: InputFile, one: Slice) -> float:
    """Bytes of a slice in its file."""
    reader = reader_for(file.format)
    if (groups := reader.groups(file)) is not None:
        rows = [group.rows for group in groups]
        return file.size * sum(rows[one.start : one.stop]) / max(sum(rows), 1)
    documents = reader.documents(file)
    return (_stop(file, one) - one.start) * (file.size / documents.count if documents else 1.0)


def _stop(file: InputFile, one: Slice) -> int:
    """Where a slice of bytes or documents ends."""
    if one.stop is not None:
        return one.stop
    documents = reader_for(file.format).documents(file)
    return file.size if documents is None else documents.count


def _line_from(file: InputFile, start: int) -> int:
    """Where the first line begins that begins at a byte or after it; the file's end for none."""
    if not start:
        return 0
    with storage.open_bytes(file.path, found=file.status()) as stored:
        at, size = stored.seek(start - 1), _LINE_BYTES
        while data := stored.read(size):
            if newline := data.find(b"\n") + 1:
                return at + newline
            at, size = at + len(data), min(2 * size, MIB)
    return at
