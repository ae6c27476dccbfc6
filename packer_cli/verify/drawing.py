"""Some records of the inputs: those that rows name, and those at drawn places.

Rows tell of documents that are there; only the inputs tell of those that are missing. Neither
reads more of a file than its format makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from packer_cli.config.formats import format_named
from packer_cli.inputs.formats import documents_of, groups_of
from packer_cli.records import InputFile, Int64, Records, Slice
from packer_cli.result.manifest import Manifest

Read = Callable[[InputFile, Slice], Iterator[Records]]
_FIRST_BYTES = 1 << 12  # of a line format; most records begin within so many
_TOGETHER = 1 << 20  # characters of texts that are encoded at once


def shares(
    manifest: Manifest, files: set[int], sample: int, seed: int
) -> dict[tuple[int, int], int]:
    """How many documents to take of which (unit, file): even over files, then over its units."""
    rng = np.random.default_rng(seed)
    units: dict[int, list[int]] = {}
    for unit in manifest.units:
        for file in {part[0] for part in unit.slices} & files:
            units.setdefault(file, []).append(unit.unit)
    order = rng.permutation(sorted(units)).tolist()
    order.sort(key=lambda file: manifest.inputs[file].documents)  # the least first
    found: dict[tuple[int, int], int] = {}
    left = sample
    for number, file in enumerate(order):
        documents = manifest.inputs[file].documents
        share = min(documents, -(-left // (len(order) - number)))
        left -= share
        among = rng.permutation(units[file]).tolist()
        for place, unit in enumerate(among):
            count = share // len(among) + (place < share % len(among))
            if count:
                found[unit, file] = count
    return found


def draws(
    manifest: Manifest,
    files: set[int],
    found: dict[tuple[int, int], int],
    sample: int,
    seed: int,
) -> dict[tuple[int, int], int]:
    """How many records to draw of which (unit, file): the `shares`, and one of each of `sample`
    files without any, which may have lost all that they had.
    """
    without = sorted(files - {file for _, file in found})
    rng = np.random.default_rng([seed, len(without)])
    chosen = set(rng.permutation(without)[:sample].tolist())
    more = {}
    for unit in manifest.units:
        for file in {part[0] for part in unit.slices} & chosen:
            more[unit.unit, file] = 1
            chosen.remove(file)
    return found | more


def are_among(positions: Int64, known: Int64) -> npt.NDArray[np.bool_]:
    """bool[n]: which of the positions are among those known, which ascend and may be many."""
    if not len(known):
        return np.zeros(len(positions), bool)
    at = np.minimum(np.searchsorted(known, positions), len(known) - 1)
    found: npt.NDArray[np.bool_] = known[at] == positions
    return found


def together(records: Iterable[Records]) -> Iterator[Records]:
    """The same records; texts that were read one by one come in few batches, as engines want."""
    held: list[Records] = []
    size = 0
    for some in records:
        if some.texts is None or some.bad:
            yield some
            continue
        held.append(some)
        size += sum(map(len, some.texts))
        if size > _TOGETHER:
            yield _joined(held)
            held, size = [], 0
    if held:
        yield _joined(held)


def _joined(held: list[Records]) -> Records:
    positions = np.concatenate([some.positions for some in held])
    return Records(positions, texts=[text for some in held for text in some.texts or []])


def records_at(read: Read, file: InputFile, positions: Int64) -> Iterator[Records]:
    """The records at these positions, which ascend, in order."""
    left = set(positions.tolist())
    for part in _parts(file, positions):
        for records in read(file, part):
            found = np.flatnonzero(are_among(records.positions, positions))
            if len(found):
                yield records.take(found)
                left -= set(records.positions[found].tolist())
            if not left:
                return


def _parts(file: InputFile, positions: Int64) -> list[Slice]:
    """The least of a file that holds the records at these positions."""
    if _by_bytes(file):
        return [Slice(file.index, at, at + 1, 0) for at in positions.tolist()]
    if (row_groups := groups_of(file)) is not None:
        edges = np.cumsum([group.rows for group in row_groups])
        groups = np.unique(np.searchsorted(edges, positions, side="right")).tolist()
        return [Slice(file.index, group, group + 1, 0) for group in groups if group < len(edges)]
    if (documents := documents_of(file)) is not None:
        there = positions[positions < documents.count].tolist()
        return [Slice(file.index, at, at + 1, 0) for at in there]
    return [Slice(file.index, 0, None, 0)]


def _by_bytes(file: InputFile) -> bool:
    """Whether reading can begin at any byte."""
    return format_named(file.format).cut_by == "byte" and not file.compression


def drawn_records(
    read: Read, file: InputFile, slices: list[Slice], count: int, rng: np.random.Generator
) -> Iterator[Records]:
    """Up to `count` good records, each once, from drawn places of the slices of one file.

    A record is as likely as the one before it is long where any byte can be read from (as the last
    of its slice for the first); else all are equally likely.
    """
    if not count:
        return  # or files that cannot be read from anywhere would be read for nothing
    if _by_bytes(file):
        yield from _drawn_by_bytes(read, file, slices, count, rng)
        return
    parts = slices
    if (row_groups := groups_of(file)) is not None:
        rows = [group.rows for group in row_groups]
        groups = [
            group for part in slices
            for group in range(part.start, len(rows) if part.stop is None else part.stop)
            if rows[group]
        ]  # fmt: skip
        if not groups:
            return
        weights = np.array([rows[group] for group in groups], float)
        number = min(count, len(groups))
        chosen = rng.choice(groups, number, replace=False, p=weights / weights.sum())
        parts = [Slice(file.index, group, group + 1, 0) for group in sorted(chosen.tolist())]
    elif (documents := documents_of(file)) is not None:
        stops = [documents.count if part.stop is None else part.stop for part in slices]
        parts = _drawn_documents(slices, stops, count, rng)
    # the smallest keys of all records read: any number of them in memory for `count`
    kept: list[tuple[float, Records]] = []
    for part in parts:
        for records in read(file, part):
            keys = rng.random(len(records.positions))
            least = np.argsort(keys, kind="stable")[:count]
            kept += [(float(keys[i]), records.take(np.array([i]))) for i in least.tolist()]
            kept = sorted(kept, key=lambda one: one[0])[:count]
    yield from (records for _, records in kept)


def _drawn_documents(
    slices: list[Slice], stops: list[int], count: int, rng: np.random.Generator
) -> list[Slice]:
    """Up to `count` documents of the slices, each a slice of its own, in order."""
    sizes = [stop - part.start for part, stop in zip(slices, stops, strict=True)]
    ends = np.cumsum(sizes)
    total = int(ends[-1])
    chosen = np.sort(rng.choice(total, min(count, total), replace=False))
    which = np.searchsorted(ends, chosen, side="right")
    starts = np.array([part.start for part in slices])
    numbers = chosen - (ends[which] - np.array(sizes)[which]) + starts[which]
    return [Slice(slices[0].file, at, at + 1, 0) for at in numbers.tolist()]


def _drawn_by_bytes(
    read: Read, file: InputFile, slices: list[Slice], count: int, rng: np.random.Generator
) -> Iterator[Records]:
    ends = [file.size if part.stop is None else part.stop for part in slices]
    sizes = np.array([end - part.start for part, end in zip(slices, ends, strict=True)], float)
    if not sizes.sum():
        return
    seen = set[int]()
    for which in np.sort(rng.choice(len(slices), count, p=sizes / sizes.sum())).tolist():
        start, end = slices[which].start, ends[which]
        # behind the last record comes the first
        records = _first_from(read, file, int(rng.integers(start, end)), end)
        records = records or _first_from(read, file, start, end)
        if records is not None and int(records.positions[0]) not in seen:
            seen.add(int(records.positions[0]))
            yield records


def _first_from(read: Read, file: InputFile, at: int, end: int) -> Records | None:
    """The first good record that begins at `at` or later; None when there is none before `end`."""
    size = _FIRST_BYTES
    while at < end:
        for records in read(file, Slice(file.index, at, min(at + size, end), 0)):
            if len(records.positions):
                return records.take(np.array([0]))
        at, size = at + size, size * 16
    return None
