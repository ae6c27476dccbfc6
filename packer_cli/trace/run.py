"""`Run`: a training run that is traced: the results that it read, its steps, and their rows."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from packer_cli.config.loop import Loop
from packer_cli.config.option import refuse_missing
from packer_cli.errors import UsageError
from packer_cli.records import Int64
from packer_cli.result.opening import Paths
from packer_cli.result.squared_lengths import squared_lengths
from packer_cli.steps.costs import Float64, digest_of, row_costs
from packer_cli.steps.schedule import Schedule
from packer_cli.trace.counting import Steps
from packer_cli.trace.results import Results
from packer_cli.trace.state import State


class Run:
    """A run over results, from its beginning, or from a sampler's state on.

    paths, tokens   the results, as `PackedDataset` takes them
    state           a sampler's `state_dict()`; what it knows need not be given
    resumed         whether the run is one that goes on from the state, whose steps count from
                    there; else it is the one that saved it
    given           fields of a `Loop`

    Raises UsageError for options that are missing or do not fit, DataError for results that cannot
    be read, a state of others, and fewer rows than ranks.
    """

    def __init__(
        self,
        paths: Paths,
        *,
        state: Any = None,
        resumed: bool = True,
        tokens: Paths | None = None,
        **given: Any,
    ) -> None:
        self.results = Results(paths, tokens)
        self.state = None if state is None else State.of(state, self.results)
        self.begin = 0  # where steps begin to count
        if self.state is not None:
            given = self.state.loop(given, same=not resumed)
            self.begin = self.state.samples if resumed else self.state.begin
        refuse_missing(Loop, given)
        self.loop = Loop(**given)
        self.steps = Steps(len(self.results), self.loop, self.begin)

    @cached_property
    def schedule(self) -> Schedule:
        """The rows of places."""
        loop = self.loop
        return Schedule(
            len(self.results),
            seed=loop.seed,
            stages=self.results.stages,
            block_rows=loop.block_rows,
            window_blocks=loop.window_blocks,
            world_size=loop.world_size,
            batch_size=loop.batch_size,
            micro_batches=loop.micro_batches,
            balance=loop.balance,
            window=loop.window,
            costs=None if loop.balance is None else self._costs(),
            begin=self.begin,
            dealt=() if self.state is None else self.state.dealt,
        )

    def _costs(self) -> Float64:
        sums: Int64 = np.concatenate([squared_lengths(one) for one in self.results.parts])
        length = self.results.parts[0].max_length
        costs = row_costs(sums, length, self.loop.hidden_size, self.loop.cost)
        known = self.state.cost if self.state else None
        if isinstance(known, str) and known != digest_of(costs):
            raise UsageError(
                "the costs of rows are not those that the sampler's state was saved with",
                "give the function that the sampler had, cost=... in Python",
            )
        return costs

    def refuse_rank(self, rank: int) -> None:
        """Raise UsageError for a rank that there is not."""
        if not 0 <= rank < self.loop.world_size:
            raise UsageError(
                f"--rank: {rank} is not between 0 and {self.loop.world_size - 1}, of --ranks "
                f"{self.loop.world_size}"
            )
