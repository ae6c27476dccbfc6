"""Work units of a run: of a mixture each has the same share of every source, stage after stage.

A unit has no document twice, however often sources are taken, so its pieces still tell documents
apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from packer_cli.config.documents import DocumentConfig
from packer_cli.config.options import PackConfig
from packer_cli.inputs.tokenized import opened
from packer_cli.inputs.work_units import plan_units, unit_bytes_of
from packer_cli.mixing.choice import Choice, choose
from packer_cli.records import InputFile, Slice, WorkUnit

_BYTES_PER_TOKEN = 4


def work_units(
    files: Sequence[InputFile], config: DocumentConfig, standing: int = 0
) -> list[WorkUnit]:
    """What `files` are cut into: see `inputs.work_units.plan_units`."""
    choice = choice_of(files, config)
    if choice is None:
        return plan_units(list(files), config, standing)
    units: list[WorkUnit] = []
    for _, some in _units_of_stages(files, config, choice):
        units += some
    return units


def choice_of(files: Sequence[InputFile], config: DocumentConfig) -> Choice | None:
    """What the options choose of tokenized directories; None: all of them."""
    if not isinstance(config, PackConfig) or config.mixture is None:
        return None
    return _choice_of(tuple(files), config)


@lru_cache(maxsize=2)
def _choice_of(files: tuple[InputFile, ...], config: PackConfig) -> Choice:
    return choose([opened(file) for file in files], config)


def first_units_of(files: Sequence[InputFile], config: PackConfig) -> list[int]:
    """The number of the first unit of every stage."""
    choice = choice_of(files, config)
    return [first for first, _ in _units_of_stages(files, config, choice)] if choice else []


def _units_of_stages(
    files: Sequence[InputFile], config: DocumentConfig, choice: Choice
) -> list[tuple[int, list[WorkUnit]]]:
    """(number of the first unit, units) of every stage."""
    each = [_BYTES_PER_TOKEN * opened(file).facts.tokens / max(len(opened(file)), 1)
            for file in files]  # fmt: skip
    total = sum(
        each[place] * (stop - start)
        for stage in choice.stages for place, (start, stop) in stage.items()
    )  # fmt: skip
    unit_bytes = unit_bytes_of(config, int(total))
    stages: list[tuple[int, list[WorkUnit]]] = []
    first = 0
    for stage in choice.stages:
        weight = sum(each[place] * (stop - start) for place, (start, stop) in stage.items())
        epochs = max((stop - start) / len(choice.pools[place])
                     for place, (start, stop) in stage.items())  # fmt: skip
        parts = max(1, math.ceil(weight / unit_bytes), math.ceil(epochs))
        units: list[WorkUnit] = []
        for part in range(parts):
            slices = []
            for place, (start, stop) in stage.items():
                low = start + (stop - start) * part // parts
                high = start + (stop - start) * (part + 1) // parts
                if low < high:
                    size = max(1, int(each[place] * (high - low)))
                    slices.append(Slice(files[place].index, low, high, size))
            if slices:
                units.append(WorkUnit(first + len(units), tuple(slices)))
        stages.append((first, units))
        first += len(units)
    return stages
