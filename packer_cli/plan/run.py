"""Planning a whole run: inputs to documents to rows, of which only the figures are kept.

Lengths whose work units are cut in the same way are planned from one pass over the inputs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from packer_cli.config.options import PackConfig
from packer_cli.config.run_options import EncodingOptions
from packer_cli.config.shape_rules import for_shape
from packer_cli.config.shapes import Shape
from packer_cli.early import EarlyReference
from packer_cli.errors import DataError, InternalError, Interrupted, UsageError
from packer_cli.inputs.byte_streams import STDIN, begin_stdin
from packer_cli.inputs.discovery import find_inputs
from packer_cli.inputs.tokenized import is_tokenized
from packer_cli.interrupts import as_flag
from packer_cli.mixing.units import choice_of, work_units
from packer_cli.plan.outcome import Outcome, documents_in, outcome_of, with_sources
from packer_cli.plan.sample import Part, begun_in_the_middle, sampled, weight_of
from packer_cli.plan.unit import Documents, UnitPlan, plan_unit
from packer_cli.progress import Progress
from packer_cli.records import InputFile, LookedAt, Notify, WorkUnit
from packer_cli.result.counts import Counts
from packer_cli.result.warnings import why_too_much_unused
from packer_cli.run.chosen import Chosen
from packer_cli.run.identity import Run
from packer_cli.run.pipeline import settled
from packer_cli.run.worker import Worker
from packer_cli.threads import run_all

NOWHERE = Path(os.devnull)  # in which no file can be created


@dataclass(frozen=True)
class Plan:
    """What would come out of the inputs.

    config     of the outcomes, which differ in max_length and strategy
    tokenizer  as it was named; None where none is needed
    documents  before any is cut, truncated or dropped
    outcomes   in the order of the configurations
    sample     the share of the inputs that was asked for; None: all
    """

    files: Sequence[InputFile]
    shape: Shape
    tokenizer: str | None
    documents: Documents
    outcomes: list[Outcome]
    sample: float | None = None

    @property
    def config(self) -> PackConfig:
        """Of the first outcome."""
        return self.outcomes[0].config


def plan(
    inputs: list[str],
    configs: Sequence[PackConfig],
    options: EncodingOptions,
    tokenizer_name: str | None = None,
    sample: float | None = None,
    notify: Notify = lambda message: None,
    warn: Notify = lambda message: None,
    early: EarlyReference | None = None,
    *,
    show_progress: bool = False,
) -> Plan:
    """What `packer pack` would make of `inputs` with each of `configs`, which differ in max_length
    and strategy only. Nothing is written anywhere.

    `sample`: about the share of the inputs to read, more than 0; the figures are then estimates.
    The other parameters, and what is raised, are those of `pipeline.pack`.
    """
    stop = threading.Event()
    begin_stdin(stop.is_set)
    files = find_inputs(inputs, configs[0], notify)
    files, first, shape, chosen = settled(files, configs[0], tokenizer_name, notify, warn)
    return plan_files(
        files, first, configs, shape, chosen, options, sample, notify, stop, early,
        show_progress=show_progress,
    )  # fmt: skip


def plan_files(
    files: list[InputFile],
    first: PackConfig,
    configs: Sequence[PackConfig],
    shape: Shape,
    chosen: Chosen,
    options: EncodingOptions,
    sample: float | None,
    notify: Notify,
    stop: threading.Event,
    early: EarlyReference | None = None,
    *,
    show_progress: bool = False,
) -> Plan:
    """The plan of inputs that are found. `first`: the first of `configs`, settled."""
    configs = [first, *(for_shape(config, shape) for config in configs[1:])]
    passes = _passes(files, configs, sample)
    if len(passes) > 1 and any(file.path == STDIN for file in files):
        raise UsageError(
            "-: stdin can be read once, and these lengths are cut into different work units",
            "write the data to a file and name that, or plan one --max-length at a time",
        )
    if len(passes) > 1 and not is_tokenized(files):
        why = (
            "conversations are shortened to each length"
            if first.shortens_conversations
            else "longer rows have larger work units"
        )
        notify(f"reads the inputs {len(passes)} times: {why}")
    _note_beginnings(files, passes, notify)
    notify = _once(notify)  # what the tokenizer has to say, each pass would
    size = sum(int(sum(file.size for file in files) * one.share) for one in passes)
    outcomes: dict[PackConfig, Outcome] = {}
    documents = None
    with Progress(size, show=show_progress, doing="planning") as progress:
        for one in passes:
            run = Run(one.configs[0], shape, tuple(files), one.units, chosen.name, chosen.hashes)
            plans = _planned(run, one, chosen, options, notify, stop, progress, early)
            documents = documents or documents_in(plans, one.units)
            for place, config in enumerate(one.configs):
                _check(config, [(plan.planned[place].counts, plan.copies) for plan in plans])
                outcome = outcome_of(config, plans, place, one.units, one.share)
                choice = choice_of(files, config)
                outcomes[config] = with_sources(outcome, choice) if choice else outcome
    result = Plan(
        files, shape, chosen.name, documents or Documents(), [outcomes[c] for c in configs], sample
    )
    _refuse_nothing(result)
    return result


def _once(notify: Notify) -> Notify:
    said = set[str]()

    def say(message: str) -> None:
        if message not in said:
            said.add(message)
            notify(message)

    return say


@dataclass(frozen=True)
class _Pass:
    """Configurations that have these work units, and the parts of these that are read."""

    units: tuple[WorkUnit, ...]
    parts: list[Part]
    configs: list[PackConfig]

    @property
    def share(self) -> float:
        """Of the inputs' bytes that are read, about."""
        if all(part.is_whole for part in self.parts) and len(self.parts) == len(self.units):
            return 1.0
        read = sum(part.weight for part in self.parts)
        return min(read / sum(weight_of(unit.slices) for unit in self.units), 1.0)


def _passes(
    files: list[InputFile], configs: Sequence[PackConfig], sample: float | None
) -> list[_Pass]:
    by_cut: dict[tuple[tuple[WorkUnit, ...], Hashable], _Pass] = {}
    for config in configs:
        units = tuple(work_units(files, config))
        key = units, _documents_by(config, files)
        if key not in by_cut:
            by_cut[key] = _Pass(units, sampled(files, units, sample, config), [])
        by_cut[key].configs.append(config)
    return list(by_cut.values())


def _documents_by(config: PackConfig, files: list[InputFile]) -> Hashable:
    """What else decides which documents a unit has, and their order."""
    if config.mixture:  # which documents are chosen depends on what rows take of each
        return config
    length = config.max_length if config.shortens_conversations else None
    return length, config.documents_shuffled and is_tokenized(files)


def _planned(
    run: Run,
    one: _Pass,
    chosen: Chosen,
    options: EncodingOptions,
    notify: Notify,
    stop: threading.Event,
    progress: Progress,
    early: EarlyReference | None,
) -> list[UnitPlan]:
    """The plans of the parts of a pass that are read, in their order."""
    units, plans = [part.unit for part in one.parts], dict[int, UnitPlan]()
    with ExitStack() as stack:
        worker = Worker(run, chosen, units, NOWHERE, options, notify, stop, progress, early)
        stack.enter_context(closing(worker))
        stack.enter_context(as_flag())

        def task(place: int, part: Part) -> None:
            make = partial(plan_unit, configs=one.configs, part=part)
            plans[place] = worker.make(part.unit, make)

        tasks = [partial(task, place, part) for place, part in enumerate(one.parts)]
        try:
            run_all(tasks, options.workers, stop, worker.stop)
        except Interrupted as error:
            again = "nothing was written; run the same command again"
            raise Interrupted(error.message, again) from error
    return [plans[place] for place in range(len(units))]


def _note_beginnings(files: Sequence[InputFile], passes: Sequence[_Pass], notify: Notify) -> None:
    """Say which files are read from their beginning, in the place of pieces of all of them."""
    indices = {
        one.file
        for each in passes for part in each.parts if not part.is_whole
        for one in part.unit.slices if not begun_in_the_middle(files[one.file])
    }  # fmt: skip
    if indices:
        first = files[min(indices)]
        more = f" and {len(indices) - 1:,} more" if len(indices) > 1 else ""
        kind = "compressed" if first.compression else first.format
        notify(
            f"{first.path}{more}: sampled from the beginning on: {kind} files cannot be entered in "
            "the middle"
        )


def _check(config: PackConfig, counts: Sequence[tuple[Counts, int]]) -> None:
    """Raise what a run that packs would raise at its end. `counts`: (of a part, how many times)."""
    bad, records, total = 0, 0, Counts()
    for one, copies in counts:
        total.add_looked_at(LookedAt(one.looked_at_records, one.looked_at_characters, one.unused))
        if not one.conserved():
            raise InternalError(
                f"{one.encoded_tokens} tokens were encoded, but {one.tokens} placed, "
                f"{one.truncated_tokens} truncated and {one.dropped_tokens} dropped"
            )
        bad += -(-one.rejected_records // copies)  # files that are left out count once
        records += (one.documents + one.empty_documents + one.dropped_documents) // copies
    unused = total.looked_at_characters, total.unused
    if reason := why_too_much_unused(config.max_unused, *unused):
        raise DataError(reason, "name fields with --field, or leave them out of the input")
    limit, records = config.max_errors, records + bad
    if limit is not None and bad > (limit * records if isinstance(limit, float) else limit):
        raise DataError(
            f"{bad:,} of {records:,} records are bad; --max-errors is {limit}",
            "packer pack writes them to rejected.jsonl; raise --max-errors, or mend the input",
        )


def _refuse_nothing(plan: Plan) -> None:
    if any(outcome.rows for outcome in plan.outcomes):
        return
    counts = plan.outcomes[0].planned.counts
    raise DataError(
        f"nothing to pack: {counts.empty_documents} empty, {counts.dropped_documents} dropped and "
        f"{counts.rejected_records} rejected records, no tokens",
        "check --shape, --field, --overlong and the input",
    )
