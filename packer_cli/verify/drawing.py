"""Samples of the inputs' records: those that rows name, and those drawn at random places.

Rows only show the documents that are there; only the inputs show those that are missing. Neither
sample reads more of a file than its format requires.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from packer_cli.config.formats import format_named
from packer_cli.inputs.formats import documents_of, groups_of
from packer_cli.records import InputFile, Int64, Records, Slice
from packer_cli.result.manifest import Result

Read = Callable[[InputFile, Slice], Iterator[Records]]
Shares = dict[tuple[int, int], int]  # (unit, file) -> how many records of it
_FIRST_BYTES = 1 << 12  # read of a line format at first; most records end within so many
_TOGETHER = 1 << 20  # characters of texts that are encoded together


def shares(manifest: Result, files: set[int], sample: int, seed: int) -> Shares:
    """How many documents to take: spread evenly over files, then over units."""
    rng = np.random.default_rng(seed)
    units: dict[int, list[int]] = {}
    for unit in manifest.units:
        for file in {part[0] for part in unit.slices} & files:
            units.setdefault(file, []).append(unit.unit)
    order = rng.permutation(sorted(units)).tolist()
    order.sort(key=lambda file: manifest.inputs[file].documents)  # the smallest first
    counts: Shares = {}
    left = sample
    for number, file in enumerate(order):
        documents = manifest.inputs[file].documents
        share = min(documents, -(-left // (len(order) - number)))
        left -= share
        among = rng.permutation(units[file]).tolist()
        for place, unit in enumerate(among):
            count = share // len(among) + (place < share % len(among))
            if count:
                counts[unit, file] = count
    return counts


def draws(
    manifest: Result,
    files: set[int],
    wanted: Shares,
    sample: int,
    seed: int,
) -> Shares:
    """How many records to draw: as many as `wanted`, and one from each of up to `sample` other
    files, which may have lost all their documents.
    """
    without = sorted(files - {file for _, file in wanted})
    rng = np.random.default_rng([seed, len(without)])
    chosen = set(rng.permutation(without)[:sample].tolist())
    more = {}
    for unit in manifest.units:
        for file in {part[0] for part in unit.slices} & chosen:
            more[unit.unit, file] = 1
            chosen.remove(file)
    return wanted | more


def are_among(positions: Int64, known: Int64) -> npt.NDArray[np.bool_]:
    """bool[n]: which of the positions are among the known ones, which ascend."""
    if not len(known):
        return np.zeros(len(positions), bool)
    at = np.minimum(np.searchsorted(known, positions), len(known) - 1)
    among: npt.NDArray[np.bool_] = known[at] == positions
    return among


def together(records: Iterable[Records]) -> Iterator[Records]:
    """The same records; texts that were read one by one are joined to batches, for the engine."""
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
            places = np.flatnonzero(are_among(records.positions, positions))
            if len(places):
                yield records.take(places)
                left -= set(records.positions[places].tolist())
            if not left:
                return


def _parts(file: InputFile, positions: Int64) -> list[Slice]:
    """The smallest slices of a file that hold the records at these positions."""
    if not file.compression and format_named(file.format).cut_by in ("byte", "record"):
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
    """Up to `count` good records, each once, from random places in the slices of one file.

    Where reading can begin at any byte, a record is as likely as the one before it is long (for the
    first, the last one of its slice); elsewhere all are equally likely.
    """
    if not count:
        return  # or files that are only read as a whole would be read for nothing
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
    # the records with the smallest keys: of any number read, `count` stay in memory
    smallest: list[tuple[float, Records]] = []
    for part in parts:
        for records in read(file, part):
            keys = rng.random(len(records.positions))
            least = np.argsort(keys, kind="stable")[:count]
            smallest += [(float(keys[i]), records.take(np.array([i]))) for i in least.tolist()]
            smallest = sorted(smallest, key=lambda one: one[0])[:count]
    yield from (records for _, records in smallest)


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
        # after the last record comes the first
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
