"""`State`: what a sampler's `state_dict` says of the run that saved it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packer_cli.config.loop import Loop
from packer_cli.config.option import options_of
from packer_cli.errors import DataError, UsageError, from_os_error
from packer_cli.trace.results import Results

_NAMES = ("seed", "block_rows", "window_blocks")
_OF_BALANCE = ("balance", "window")
_NUMBERS = ("samples", "rows", "block_rows", "window_blocks")


@dataclass(frozen=True)
class State:
    """`samples`: the rows that all ranks had taken. `dealt`: [place, world_size, batch_size,
    micro_batches] of each stretch that rows to come depend on, where a sampler balanced; else ().
    `order`: what the order depends on, named as in `Loop`. `cost`: the digest of the costs that a
    function gave, or "".
    """

    samples: int
    dealt: tuple[tuple[int, ...], ...]
    order: dict[str, Any]
    cost: str

    @classmethod
    def of(cls, content: Any, results: Results) -> State:
        """Raises DataError for what is no state, and for one of other rows than these."""
        if not isinstance(content, Mapping) or any(
            type(content.get(name)) is not int or content[name] < 0 for name in _NUMBERS
        ):
            raise DataError(
                "the state is not one of a PackedSampler, which has "
                f"{', '.join(_NUMBERS)} as numbers",
                "save sampler.state_dict(): json.dump(sampler.state_dict(), file)",
            )
        stages = results.stages or None
        for name, value in (("data", results.fingerprint), ("rows", len(results)),
                            ("stages", stages)):  # fmt: skip
            known = content.get(name)
            if known != value and not (name == "data" and known is None):
                raise DataError(
                    f"the state has {name} {known}, the result has {value}",
                    "name the results that the run read, in its order",
                )
        balanced = bool(content.get("balance"))
        names = (*_NAMES, *(_OF_BALANCE if balanced else ()))
        order = {name: content[name] for name in names if name in content}
        cost = content.get("cost", "")
        if isinstance(cost, int):
            order, cost = order | {"hidden_size": cost}, ""
        dealt = tuple(tuple(one) for one in content.get("dealt") or ())
        return cls(content["samples"], dealt, order, cost)

    def loop(self, given: Mapping[str, Any], *, same: bool) -> dict[str, Any]:
        """The fields of a `Loop` that are given, and those that the state knows.

        `same`: the loop is the one that saved the state, not one that goes on from it.
        Raises UsageError for one that is given and that the state has otherwise.
        """
        names = ("world_size", "batch_size", "micro_batches")
        sizes = dict(zip(names, self.dealt[-1][1:], strict=True)) if self.dealt else {}
        fixed = self.order | (sizes if same else {})
        options = options_of(Loop)
        for name, value in fixed.items():
            if given.get(name, value) != value:
                raise UsageError(
                    f"{options[name].name(name)}: {given[name]}, and the state has {value}",
                    "leave it out",
                )
        return sizes | dict(given) | fixed


def read_state(path: str) -> Any:
    """The content of a JSON file. Raises DataError."""
    try:
        with open(path, "rb") as file:
            return json.load(file)
    except OSError as error:
        raise from_os_error(error, path, "read") from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: is not JSON: {error}",
            "save it so: json.dump(sampler.state_dict(), file)",
        ) from error
