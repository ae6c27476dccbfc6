"""`find`: in which steps a document was, on which rank and in which micro-batch.

Of shards whose units read the document's input, only the column `segments` is read; then the order
of the run is gone through.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from packer_cli.errors import DataError, UsageError
from packer_cli.records import Int64
from packer_cli.result.opening import Paths
from packer_cli.trace.absence import absent
from packer_cli.trace.counting import Step
from packer_cli.trace.naming import Named, named
from packer_cli.trace.results import TracedSegment
from packer_cli.trace.rows import rows_with
from packer_cli.trace.run import Run
from packer_cli.trace.step import Place

_AT_ONCE = 1 << 20  # places whose rows are looked at together


@dataclass(frozen=True)
class Found:
    """A row that has pieces of the document, and the step that took it; None where the loader
    dropped its batch.
    """

    step: Step | None
    place: Place
    segments: tuple[TracedSegment, ...]


class Search:
    """A document in the rows of a run.

    document  what the name means
    rows      int64[n], the rows that have pieces of it, ascending

    Raises UsageError for a name that is none, DataError for a document that is in no row, and for
    results that do not say where segments come from.
    """

    def __init__(self, run: Run, text: str) -> None:
        self.run = run
        for packed in run.results.parts:
            if "segments" not in packed.facts.config.columns:
                raise DataError(
                    f"{packed.path}: was packed without the column segments, by which documents "
                    "are found",
                    "pack again with that column; packer trace --step names rows",
                )
        self.document = named(run.results, text)
        self._sought = _sought(self.document)
        rows = [
            run.results.firsts[part] + rows_with(run.results.parts[part], its)
            for part, its in self._sought.items()
        ]
        self.rows: Int64 = np.concatenate(rows)
        if not len(self.rows):
            raise absent(run.results, self.document)

    def places(self, epochs: int = 1) -> Iterator[Found]:
        """Where those rows are in the next epochs, in the order in which the run takes them.

        Raises DataError for rows that cannot be read.
        """
        begin = self.run.begin
        end = (self.run.steps.first_epoch + epochs) * len(self.run.results)
        read = dict(zip(self.rows.tolist(), self.run.results.rows(self.rows), strict=True))
        while begin < end:
            stop = min(begin + _AT_ONCE, end)
            rows = self.run.schedule.rows_at(begin, stop)
            for place in (begin + np.flatnonzero(np.isin(rows, self.rows))).tolist():
                row = int(rows[place - begin])
                part = int(np.searchsorted(self.run.results.firsts, row, side="right")) - 1
                yield self._found(place, read[row], part)
            begin = stop

    def _found(self, place: int, row: Any, part: int) -> Found:
        pieces = tuple(one for one in row.segments if self._is_it(one))
        at = self.run.steps.at(place)
        if at is None:
            return Found(None, Place(place, None, None, row), pieces)
        step, rank, number = at
        batch = number // self.run.loop.batch_size
        return Found(step, Place(place, rank, batch, row), pieces)

    def _is_it(self, segment: TracedSegment) -> bool:
        origin, document = segment.origin, self.document
        if origin is None:
            return False
        places = {(origin.file, origin.position), origin.tokenized}
        is_turn = document.turn in (None, origin.turn)
        return is_turn and (document.path, document.position) in places


def _sought(document: Named) -> dict[int, dict[int, Int64]]:
    """By result and its input: the positions that rows have of a document."""
    sought: dict[int, dict[int, Int64]] = {}
    for one in document.candidates:
        sought.setdefault(one.part, {})[one.number] = one.positions(
            document.position, document.turn
        )
    return sought


def search(
    paths: Paths, document: str, *, state: Any = None, tokens: Paths | None = None, **loop: Any
) -> Search:
    """A document in a training run. As `find`."""
    return Search(Run(paths, state=state, tokens=tokens, **loop), document)


def find(paths: Paths, document: str, *, epochs: int = 1, **run: Any) -> list[Found]:
    """Where the pieces of a document are in a training run, in the order in which it takes them.

    document  "FILE:POSITION": the input, or an end of its path that no other has, and the position
              as `packer show` gives it
    epochs    that are gone through, the one that a `state` is in with what is left of it
    run       state, tokens and the fields of a `Loop`, as `trace` takes them

    Raises as `trace`; besides, UsageError for a name that no input has, and DataError for a
    document that is in no row: why, where the results tell.
    """
    if epochs < 1:
        raise UsageError(f"epochs: {epochs} is not positive")
    return list(search(paths, document, **run).places(epochs))
