"""`Results`: the rows of one or several results as a sampler counts them, and what is in them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from packer_cli.errors import UsageError
from packer_cli.records import Int64
from packer_cli.result.opening import (
    Paths,
    check_alike,
    fingerprint_of,
    joined_fingerprint,
    joined_stages,
    open_packed,
    stages_of,
    tokens_of_each,
)
from packer_cli.result.origins import Origin, Origins
from packer_cli.result.view import View
from packer_cli.trace.rows import segments_of_rows


@dataclass(frozen=True)
class TracedSegment:
    """One segment of a row. `origin` None: the result has no column `segments`."""

    index: int
    tokens: int
    origin: Origin | None


@dataclass(frozen=True)
class TracedRow:
    """A row: its number in the result `path`, as `packer show` takes it."""

    path: Path
    number: int
    segments: tuple[TracedSegment, ...]


class Results:
    """Finished packed directories and views. Rows are numbered over all, in their order.

    Raises UsageError for no path, and as `PackedDataset` does for what cannot be opened or joined.
    """

    def __init__(self, paths: Paths, tokens: Paths | None = None) -> None:
        names: Sequence[str | os.PathLike[str]]
        names = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
        if not names:
            raise UsageError("there is no result to trace", "give the --output of packer pack")
        its_tokens = tokens_of_each(names, tokens)
        self.parts = [open_packed(*one) for one in zip(names, its_tokens, strict=True)]
        check_alike(self.parts)
        self.origins = [
            Origins(one.facts, one.directories if isinstance(one, View) else None)
            for one in self.parts
        ]
        self.firsts = np.cumsum([0, *map(len, self.parts)])

    def __len__(self) -> int:
        return int(self.firsts[-1])

    @property
    def fingerprint(self) -> str:
        """As that of a `PackedDataset` of the same results."""
        return joined_fingerprint([fingerprint_of(one.facts) for one in self.parts])

    @property
    def stages(self) -> list[int]:
        """How many rows each stage has."""
        found = [stages_of(one) for one in self.parts]
        return [stage.rows for stage in joined_stages(found, list(map(len, self.parts)))]

    def notes(self) -> Iterator[str]:
        """What cannot be told of the rows read so far, each once."""
        for one in self.origins:
            yield from one.notes
            one.notes.clear()

    def rows(self, numbers: Int64) -> list[TracedRow]:
        """The rows of some numbers, in the same order. Raises DataError for what is damaged."""
        found: list[Any] = [None] * len(numbers)
        parts = np.searchsorted(self.firsts, numbers, side="right") - 1
        for part in np.unique(parts).tolist():
            here = np.flatnonzero(parts == part)
            its = numbers[here] - self.firsts[part]
            for place, row in zip(here.tolist(), self._rows_of(part, its), strict=True):
                found[place] = row
        return found

    def _rows_of(self, part: int, numbers: Int64) -> list[TracedRow]:
        packed = self.parts[part]
        segments, first = segments_of_rows(packed, numbers)
        origins: list[Any] = [None] * segments.shape[1]
        if "segments" in packed.facts.config.columns:
            origins = self.origins[part].of(segments[:3])
        lengths, rows = segments[3].tolist(), []
        for number, begin, end in zip(numbers.tolist(), first[:-1], first[1:], strict=True):
            its = zip(lengths[begin:end], origins[begin:end], strict=True)
            pieces = tuple(TracedSegment(i, *one) for i, one in enumerate(its))
            rows.append(TracedRow(packed.path, number, pieces))
        return rows
