"""`packer plan --sample`: plan a few work units, or miniatures of them, in the place of all.

If there are many work units, some of them are planned. If there are few, the inputs are cut into
smaller units in the same way, and some of these are planned. With shuffling each has its share of
every input, from everywhere in it, as work units do; without, it has pieces of one window. Slices
that cannot be cut further, such as compressed files, are read from their beginning, as far as
needed. Reads at least 2 MB.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from packer_cli.inputs.byte_streams import STDIN
from packer_cli.inputs.formats import reader_for
from packer_cli.inputs.tokenized import is_tokenized
from packer_cli.mixing.units import work_units
from packer_cli.options.documents import MIB
from packer_cli.options.options import PackConfig
from packer_cli.records import InputFile, Records, Slice, WorkUnit
from packer_cli.tokenization.encoding import Read

_PART_BYTES = MIB // 2  # for documents of many lengths in each part
_FEWEST, _MOST = 8, 64  # parts: with fewer the error is uncertain, with more hardly smaller
_LEAST_PART_BYTES = MIB // 4
_BEGINNING_BYTES = 4 * MIB  # of a slice that is read from its beginning: in blocks
_LEAST_UNITS = 2  # fewer have no standard error
_PIECES = 16  # of a window that rows keep in order, in a part
_MOST_CUT = 1 << 16  # pieces
_BYTES_PER_TOKEN = 4
Unit = TypeVar("Unit", WorkUnit, int)


@dataclass(frozen=True)
class SamplePart:
    """A work unit, or a smaller one that stands for it. `limits`: shares of slices that are read,
    from their beginning; empty: all of them.
    """

    unit: WorkUnit
    is_work_unit: bool
    limits: tuple[float, ...] = ()

    def weight_of(self, files: Container[int] | None = None) -> float:
        """Estimate the bytes of text that are read, in some inputs or in all."""
        limits = self.limits or [1.0] * len(self.unit.slices)
        return sum(
            part.weight * limit
            for part, limit in zip(self.unit.slices, limits, strict=True)
            if files is None or part.file in files
        )


class PartReader:
    """Reads the slices of a part up to their limits. `weight` counts the bytes of text read."""

    def __init__(self, read: Read, part: SamplePart) -> None:
        self._read = read
        self._limits = dict(zip(part.unit.slices, part.limits, strict=False))
        self.weight = 0.0

    def __call__(self, file: InputFile, part: Slice) -> Iterator[Records]:
        limit, consumed = self._limits.get(part, 1.0), 0
        stored = _stored_bytes(file, part) if limit < 1 else 0.0
        for records in self._read(file, part):
            yield records
            consumed += records.consumed
            if limit < 1 and consumed >= limit * stored:
                self.weight += part.weight * min(consumed / stored, 1)
                return
        self.weight += part.weight


def weight_of(units: Sequence[WorkUnit]) -> int:
    """Estimate the bytes of text in work units."""
    return sum(part.weight for unit in units for part in unit.slices)


def sampled(
    files: Sequence[InputFile], units: Sequence[WorkUnit], share: float | None, config: PackConfig
) -> list[SamplePart]:
    """Choose the parts to plan in the place of `units`, spread evenly by the seed of `config`.

    Returns all units if no `share` is asked for, and of stdin and of inputs that are too small.
    """
    if share is None or any(file.path == STDIN for file in files):
        return _whole(units)
    if is_tokenized(files):  # only their index is read
        return _whole(_spread(units, max(_LEAST_UNITS, math.ceil(share * len(units))), config.seed))
    total = weight_of(units)
    share = max(share, _FEWEST * _LEAST_PART_BYTES / total)
    if share >= 1:
        return _whole(units)
    count = min(max(share * total / _PART_BYTES, _FEWEST), _MOST)
    if share * len(units) >= count:
        return _whole(_spread(units, math.ceil(share * len(units)), config.seed))
    size = share * total / count
    least = size if config.shuffle else size / _PIECES
    small = work_units(
        files, replace(config, unit_bytes=int(max(least, _PIECES * total / _MOST_CUT)))
    )
    each = total / len(small)
    pieces = 1 if config.shuffle else max(1, min(_PIECES, round(size / each)))
    # slices that cannot be cut as small are read in part
    readable = max(size, min(each * pieces, _BEGINNING_BYTES))
    count = max(_LEAST_UNITS, math.ceil(share * total / readable))
    window = _BYTES_PER_TOKEN * (config.window_tokens or 0)
    step = max(1, int(min(window, total) / pieces / each))
    parts = list[SamplePart]()
    for first in _spread(range(len(small)), count, config.seed):
        places = {(first + piece * step) % len(small) for piece in range(pieces)}
        slices = [part for place in sorted(places) for part in small[place].slices]
        unit = WorkUnit(first, tuple(slices))
        parts.append(_limited(files, unit, share * total / count / weight_of([unit])))
    return parts


def _whole(units: Sequence[WorkUnit]) -> list[SamplePart]:
    return [SamplePart(unit, is_work_unit=True) for unit in units]


def _spread(units: Sequence[Unit], count: int, seed: int) -> list[Unit]:
    """Choose `count` units at equal distances."""
    count = min(count, len(units))
    digest = hashlib.sha256(f"sample/{seed}".encode()).digest()
    first = int.from_bytes(digest[:6], "big") / (1 << 48)  # 0 <= first < 1
    return [units[int((place + first) * len(units) / count)] for place in range(count)]


def _limited(files: Sequence[InputFile], unit: WorkUnit, limit: float) -> SamplePart:
    """Return a part that reads a share of each slice, at least a few blocks."""
    if limit >= 1:
        return SamplePart(unit, is_work_unit=False)
    sizes = [max(_stored_bytes(files[part.file], part), 1) for part in unit.slices]
    limits = tuple(min(max(limit, _BEGINNING_BYTES / size), 1.0) for size in sizes)
    return SamplePart(unit, is_work_unit=False, limits=limits)


def _stored_bytes(file: InputFile, part: Slice) -> float:
    """Estimate the bytes of a slice in its file."""
    reader = reader_for(file.format)
    if (groups := reader.groups(file)) is not None:
        rows = [group.rows for group in groups]
        return file.size * sum(rows[part.start : part.stop]) / max(sum(rows), 1)
    documents = reader.documents(file)
    end = file.size if documents is None else documents.count
    read = (end if part.stop is None else part.stop) - part.start
    return read * (file.size / documents.count if documents else 1.0)
