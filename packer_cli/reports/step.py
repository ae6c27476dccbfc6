"""`packer show --step`: the rows and documents of a training step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from packer_cli.errors import DataError, from_os_error
from packer_cli.records import Int64
from packer_cli.reports.report import Report, Section, Table
from packer_cli.result.opening import Joined, View
from packer_cli.result.origins import Origin, Origins, sound_rows
from packer_cli.result.reader import PackedDirectory, segments_of
from packer_cli.result.rules import segments_in
from packer_cli.steps import Order, Schedule, Steps, StepSizes, row_costs
from packer_cli.storage import read_bytes

SIZES = ("world_size", "batch_size", "micro_batches")
PLACE = ("rank", "micro_batch", "row")
# a row's rank, micro-batch and number, and (origin, tokens) of its segments; origin None: not known
StepRow = tuple[tuple[int, int, int], list[tuple[Origin | None, int]]]


def saved_in(checkpoint: str) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Read a checkpoint of a Trainer with PackedTrainerMixin, a directory.

    Returns options of its PackedSampler (the SIZES only with balance), the state of that, and the
    number of steps done. Raises DataError.
    """
    path = Path(checkpoint, "trainer_state.json")
    try:
        content = json.loads(read_bytes(str(path)))
        position = content["stateful_callbacks"]["PackedRows"]["attributes"]["position"]
        state = position["sampler"]
        sampler = {"seed": state["seed"]}
        if "balance" in state:
            sampler |= {"balance": state["balance"], "hidden_size": state["cost"]}
            sampler |= zip(SIZES, state["dealt"][-1][1:], strict=True)
        return sampler, state, content["global_step"]
    except OSError as error:
        raise from_os_error(error, str(path), "read") from error
    except (ValueError, LookupError, TypeError) as error:
        tip = "give a checkpoint that a Trainer with PackedTrainerMixin wrote"
        raise DataError(f"{path}: has no position of packed rows", tip) from error


def ranks_in(
    packed: PackedDirectory,
    step: int,
    sampler: dict[str, Any],
    state: dict[str, Any] | None = None,
    done: int = 0,
) -> list[Int64]:
    """Return the row numbers of each rank in a step, int64[n].

    sampler      options of a PackedSampler: seed, SIZES, balance, hidden_size
    state, done  of a checkpoint, as `saved_in` returns them

    Raises UsageError for options that do not fit, DataError for the state of another run.
    """
    whole, sizes = Joined([packed]), StepSizes(*(sampler[name] for name in SIZES))
    order = Order(len(packed), sampler["seed"])
    balance, costs = sampler.get("balance"), None
    if balance:
        costs = row_costs(whole.squared_lengths, packed.max_length, sampler["hidden_size"])
    schedule = Schedule(order, sizes, balance=balance, costs=costs)
    if state is None:
        return Steps(schedule).rows_of(step)
    # all epochs of a Trainer have as many batches as the first
    batches = -(-(len(packed) // sizes.world_size) // sizes.batch_size)
    steps = Steps(schedule, most_batches=batches)
    expected = schedule.name() | {"data": whole.fingerprint, "samples": steps.begin_of(done)}
    expected |= {"dealt": schedule.history(expected["samples"])} if balance else {}
    for name, value in expected.items():
        if state.get(name) != value:
            raise DataError(
                f"the checkpoint has {name} {state.get(name)}, a run over {packed.path} with these "
                f"sizes would have {value}",
                "give that run's rows and sizes; PackedSampler.rows_of also knows other options",
            )
    return steps.rows_of(step)


def rows_in(
    packed: PackedDirectory, ranks: list[Int64], batch_size: int, note: Callable[[str], None]
) -> Iterator[StepRow]:
    """Yield the rows of each rank; `note` hears which origins are unknown. Raises DataError."""
    columns = [one for one in packed.stored_columns if one.startswith(("cu_seqlens", "segments"))]
    origins = Origins(packed.facts, packed.directories if isinstance(packed, View) else None)
    for rank, numbers in enumerate(ranks):
        if not len(numbers):
            continue
        batch = sound_rows(packed, numbers, columns)
        segments, edges = segments_in(batch), segments_of(batch)[2].tolist()
        known: list[Any] = [None] * segments.shape[1]
        if "segments" in columns:
            known = origins.of(segments[:3])
        while origins.notes:
            note(origins.notes.pop())
        every = list(zip(known, segments[3].tolist(), strict=True))
        for at, (number, edge) in enumerate(zip(numbers.tolist(), pairwise(edges), strict=True)):
            yield (rank, at // batch_size, number), every[slice(*edge)]


def step_report(step: int, sampler: dict[str, Any], rows: Iterator[StepRow]) -> Report:
    """Report a line for each segment; the first one has the place of the row."""
    lines = list[list[str]]()
    for place, segments in rows:
        cells = [*map(str, place)]
        for origin, tokens in segments:
            lines.append(["" if origin is None else str(origin), *cells, f"{tokens:,}"])
            cells = [""] * len(cells)
    options = ", ".join(f"{name}={value!r}" for name, value in sampler.items())
    table = Table("", ["document", "rank", "micro-batch", "row", "tokens"], lines)
    title = f"step {step:,} of PackedSampler(dataset, {options})"
    return Report(title, sections=[Section("", [table])])
