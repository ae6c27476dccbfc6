"""`trace`: the rows of a step, by rank and micro-batch, with the documents in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from packer_cli.errors import DataError, UsageError
from packer_cli.records import Int64
from packer_cli.result.opening import Paths
from packer_cli.trace.counting import Step
from packer_cli.trace.results import TracedRow
from packer_cli.trace.run import Run

_AT_ONCE = 1024  # rows that are read together


@dataclass(frozen=True)
class Place:
    """Where a row was: its place in the order, the rank and the micro-batch that took it, counted
    from 0; None where the loader dropped it.
    """

    place: int
    rank: int | None
    micro_batch: int | None
    row: TracedRow


class TracedStep:
    """A step of a run. `step` has its number, its epoch and its places."""

    def __init__(self, run: Run, step: Step) -> None:
        self.run, self.step = run, step

    @property
    def taken(self) -> tuple[int, int]:
        """How many of its rows were taken when the state was saved, and how many it has."""
        places, state = self.run.steps.places(self.step), self.run.state
        return int((places < state.samples).sum()) if state else len(places), len(places)

    @property
    def doubt(self) -> str:
        """What is not certain of its rows, or ""."""
        state = self.run.state
        if not state or not state.first_known or self.step.end > state.samples:
            return ""
        return (
            f"the run went on at place {state.first_known:,} with other sizes: a step or window "
            "that this interrupted had other rows, which the state does not tell any more"
        )

    def rows(self, rank: int | None = None) -> Iterator[Place]:
        """Its rows, by rank and then in the order of the rank's batches; of one rank alone.

        Raises UsageError for a rank that there is not, DataError for rows that cannot be read.
        """
        if rank is not None:
            self.run.refuse_rank(rank)
        places = self.run.steps.places(self.step)
        number, of_rank = np.divmod(places - self.step.begin, self.run.loop.world_size)
        if rank is not None:
            places, number = places[of_rank == rank], number[of_rank == rank]
            of_rank = np.full(len(places), rank)
        order = np.lexsort((number, of_rank))
        rows = self.run.schedule.rows_at(self.step.begin, self.step.end)
        for begin in range(0, len(order), _AT_ONCE):
            some = order[begin : begin + _AT_ONCE]
            yield from self._read(
                places[some], of_rank[some], number[some], rows[places[some] - self.step.begin]
            )

    def _read(self, places: Int64, ranks: Int64, numbers: Int64, rows: Int64) -> Iterator[Place]:
        batches = (numbers // self.run.loop.batch_size).tolist()
        read = self.run.results.rows(rows)
        yield from map(Place, places.tolist(), ranks.tolist(), batches, read)


def trace(
    paths: Paths,
    *,
    step: int | None = None,
    state: Any = None,
    tokens: Paths | None = None,
    **loop: Any,
) -> TracedStep:
    """The rows of a step of a training run that read `paths` with `PackedSampler`.

    step    its number; 0 is the first, and an epoch follows the other
    state   a sampler's `state_dict()`. With `step`, steps count from there, as in a run that was
            resumed from it. Without, the step is the one that it was saved in or after.
    tokens  of views: where their tokenized directories are now
    loop    fields of `config.loop.Loop`: world_size, batch_size, micro_batches, seed, ...

    Raises UsageError for options that are missing or do not fit, and DataError for results that
    cannot be read, a state of others, and fewer rows than ranks.
    """
    if step is None and state is None:
        raise UsageError("which step is not said", "give --step, or --state with a sampler's state")
    if step is not None and step < 0:
        raise UsageError(f"--step: {step} is negative", "steps count from 0, the first one")
    run = Run(paths, state=state, resumed=step is not None, tokens=tokens, **loop)
    if step is not None:
        return TracedStep(run, run.steps.of(step))
    last = run.steps.last_before(run.state.samples) if run.state else None
    if last is None:
        raise DataError(
            "the state was saved before the first step, or the first that it knows of",
            "--step 0 shows the one that follows",
        )
    return TracedStep(run, last)
