"""`State`: what a sampler's `state_dict` says of the run that saved it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from packer_cli.config.loop import Loop
from packer_cli.config.option import options_of
from packer_cli.errors import DataError, UsageError, from_os_error
from packer_cli.result.shards import AtLeastOne, Count
from packer_cli.trace.results import Results

_SIZES = ("world_size", "batch_size", "micro_batches")
_SAVE = "save it so: json.dump(sampler.state_dict(), file)"


class State(Struct, frozen=True):
    """The keys of `PackedSampler.state_dict()`; the last four are there where it balances.

    samples  the rows that all ranks had taken
    cost     the hidden size, or the digest of the costs that a function gave
    dealt    (place, world_size, batch_size, micro_batches) of those that dealt the rows from each
             place on, as far as rows to come depend on it
    """

    samples: Count
    rows: Count
    seed: int | None
    block_rows: AtLeastOne
    window_blocks: AtLeastOne
    stages: list[Count] | None = None
    data: str | None = None
    balance: Literal["step", "order"] | None = None
    window: AtLeastOne = 64
    cost: AtLeastOne | str | None = None
    dealt: list[tuple[Count, AtLeastOne, AtLeastOne, AtLeastOne]] = []

    @classmethod
    def of(cls, content: Any, results: Results) -> State:
        """The state that `content` is, or that it holds, as checkpoints of the Trainer do.

        Raises DataError for what is no state, and for one of other rows than these.
        """
        saved = list(_states_in(content))
        if any(one != saved[0] for one in saved):
            raise DataError(
                f"the file holds {len(saved)} states of samplers, which differ", "give one of them"
            )
        try:
            state = msgspec.convert(saved[0] if saved else content, cls)
        except msgspec.ValidationError as error:
            raise DataError(f"the state is not one of a PackedSampler: {error}", _SAVE) from error
        known = {
            "data": results.fingerprint,
            "rows": len(results),
            "stages": results.stages or None,
        }
        for name, value in known.items():
            its = getattr(state, name)
            if its != value and not (name == "data" and its is None):
                raise DataError(
                    f"the state has {name} {its}, the result has {value}",
                    "name the results that the run read, in its order",
                )
        return state

    @property
    def first_known(self) -> int:
        """The place from which on it is known how rows were dealt."""
        return self.dealt[0][0] if self.dealt else 0

    @property
    def begin(self) -> int:
        """The place from which on the run that saved it had these sizes, as far as it tells."""
        return self.dealt[-1][0] if self.dealt else 0

    def loop(self, given: Mapping[str, Any], *, same: bool) -> dict[str, Any]:
        """The fields of a `Loop` that are given, and those that the state knows.

        `same`: the loop is the one that saved the state, not one that goes on from it.
        Raises UsageError for one that is given and that the state has otherwise.
        """
        fixed = {name: getattr(self, name) for name in ("seed", "block_rows", "window_blocks")}
        if self.balance is not None:
            fixed |= {"balance": self.balance, "window": self.window}
            fixed |= {"hidden_size": self.cost} if isinstance(self.cost, int) else {}
        sizes = dict(zip(_SIZES, self.dealt[-1][1:], strict=True)) if self.dealt else {}
        if same:
            fixed |= sizes
        for name, value in fixed.items():
            if given.get(name, value) != value:
                option = options_of(Loop)[name].name(name)
                raise UsageError(
                    f"{option}: {given[name]}, and the state has {value}", "leave it out"
                )
        return sizes | dict(given) | fixed


def _states_in(content: Any) -> Iterator[Any]:
    if isinstance(content, dict) and content.keys() >= {"samples", "rows", "block_rows"}:
        yield content
    elif isinstance(content, dict | list):
        for one in content.values() if isinstance(content, dict) else content:
            yield from _states_in(one)


def read_state(path: str) -> Any:
    """The content of a JSON file. Raises DataError."""
    try:
        with open(path, "rb") as file:
            return json.load(file)
    except OSError as error:
        raise from_os_error(error, path, "read") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is not JSON: {error}", _SAVE) from error
