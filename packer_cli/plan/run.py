"""Planning a whole run: inputs to documents to rows, of which only the figures are kept.

Lengths whose work units are cut in the same way are planned from one pass over the inputs. A recipe
is planned from the indexes of its tokenized sources, each side of its split; sources that were
never tokenized are, as a sample in memory.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import structs

from packer_cli.errors import DataError, Interrupted, UsageError, named
from packer_cli.inputs.byte_streams import STDIN, begin_stdin
from packer_cli.inputs.discovery import find_inputs
from packer_cli.inputs.tokenized import hold, is_tokenized, opened, shape_of
from packer_cli.interrupts import as_flag, run_all
from packer_cli.mixing.choice import Choice
from packer_cli.mixing.units import choice_of, work_units
from packer_cli.options.options import PackConfig
from packer_cli.options.recipe import Recipe
from packer_cli.options.run_options import EncodingOptions, RunOptions
from packer_cli.options.shape_rules import for_shape
from packer_cli.options.shapes import Shape
from packer_cli.plan.sample import Part, begun_in_the_middle, sampled, some_of, weight_of
from packer_cli.plan.unit import (
    InMemory,
    PartsInMemory,
    Planned,
    Thinned,
    UnitPlan,
    plan_unit,
)
from packer_cli.progress import Progress
from packer_cli.records import InputFile, Notify, WorkUnit
from packer_cli.result.counts import Counts
from packer_cli.result.layout import MANIFEST, Shard
from packer_cli.result.manifest import TOKENIZED, Share, Source, TokenizedManifest, load_tokenized
from packer_cli.run.finalize import (
    check_limits,
    manifest_of,
    nothing_to_pack,
    totals_of_rows,
)
from packer_cli.run.identity import Chosen, Run
from packer_cli.run.pipeline import settle
from packer_cli.run.recipe import Tokens, naming, rows_of, tokens_of, tokens_root
from packer_cli.run.source import prepare
from packer_cli.run.unit import NOWHERE, Job, UnitResult, pack_unit
from packer_cli.run.update import plan_update

_READ_BYTES = 64 << 20  # of raw text, where nobody says how much
_MOST_BYTES = 256 << 20  # of raw text that is read whole into memory
_OF_SOURCE = ("documents", "tokens", "trained_tokens")  # what is counted of each in rows
_Made = TypeVar("_Made")
_Read = tuple[float, tuple[int, int]]  # the share that is read, and units as in `Outcome`


@dataclass(frozen=True)
class Plan:
    """A plan: what would come out of the inputs.

    tokenizer  as it was named; None where none is needed
    outcomes   in the order of the configurations, which differ in max_length and strategy
    sample     the share of the inputs that was asked for; None: all
    """

    files: Sequence[InputFile]
    shape: Shape
    tokenizer: str | None
    outcomes: list[Outcome]
    sample: float | None = None

    @property
    def config(self) -> PackConfig:
        """Options of the first outcome."""
        return self.outcomes[0].config


@dataclass(frozen=True)
class Outcome:
    """The outcome of one configuration.

    totals           as in a manifest: rows, utilization, lower_bound_rows and so on
    planned          of all units
    units            those of which something was read, and all there are
    share            of the inputs' bytes that were read
    standard_errors  of "rows" and "utilization", None where unknown; empty where nothing is
                     estimated
    sources          of a recipe, in its order; `by_source`: what rows have of each, and its name
    shares           how near whole documents come to what is asked of these
    """

    config: PackConfig
    totals: dict[str, Any]
    planned: Planned
    units: tuple[int, int]
    share: float = 1.0
    standard_errors: dict[str, float | None] = field(default_factory=dict)
    sources: Sequence[Source] = ()
    by_source: Sequence[dict[str, Any]] = ()
    shares: Sequence[Share] = ()


@dataclass(frozen=True)
class Planning:
    """Plans what `packer pack` would make. Nothing is written anywhere.

    sample        about the share of the inputs to read, more than 0; figures are then estimates
    options       as in `pipeline.pack`, which says what is raised, too
    """

    options: EncodingOptions
    sample: float | None = None
    show_progress: bool = False

    def plan(
        self, inputs: list[str], configs: Sequence[PackConfig], tokenizer: str | None = None
    ) -> Plan:
        """Plan what would come out of `inputs` with each of `configs`, which differ in max_length
        and strategy only.
        """
        begin_stdin(self.options.stop.is_set)
        files = find_inputs(inputs, configs[0], self.options.notify)
        return self._of(settle(files, configs[0], tokenizer, self.options), configs)

    def plan_recipe(
        self, recipe: Recipe, destinations: Sequence[Path | str], configs: Sequence[PackConfig]
    ) -> list[tuple[str | None, Plan]]:
        """(side, plan) of what `pack_recipe` would make with each of `configs`; without a split
        there is one, of no side. Sources that a run into one of `destinations` has tokenized are
        read as they are. If one is not tokenized, a sample of all of them is, in memory.
        """
        # what it has to say of the inputs was said when they were tokenized
        options = replace(self.options, warn=cache(self.options.warn))
        its, silent = replace(self, options=options), replace(options, notify=lambda message: None)
        tokens = tokens_of(recipe, tokens_root(recipe, *destinations), silent.notify)
        raw = [one for one in tokens if one.files]
        if not all(one.is_there for one in raw):
            return its._estimated(recipe, tokens, raw, configs)
        for one in raw:
            with naming(recipe, one.source):
                run = settle(one.files, one.config, recipe.tokenizer, silent)
                _refuse_stale(Path(one.directories[0]), run, recipe.path)
        sides = rows_of(recipe, tokens, configs)
        return [(side, its.plan(inputs, of_side)) for side, inputs, of_side in sides]

    def _estimated(
        self,
        recipe: Recipe,
        tokens: list[Tokens],
        raw: list[Tokens],
        configs: Sequence[PackConfig],
    ) -> list[tuple[str | None, Plan]]:
        """Plans of a recipe, from a sample of its sources: of each the same share is kept, so the
        recipe with that share of its amounts makes that share of the rows. Where the sample is
        everything, nothing is estimated.
        """
        paths = [path for one in tokens for path in one.directories]
        runs = [settle(one.files, one.config, recipe.tokenizer, self.options).cut() for one in raw]
        read = self._read_of(recipe, runs, is_mixed=len(paths) > len(raw))
        share = min(
            weight_of(some) / weight_of(run.units) for some, run in zip(read, runs, strict=True)
        )
        whole = "everything, and is exact" if share == 1 else f"{share:.1%}, and is an estimate"
        self.options.notify(f"the sources are not tokenized yet: the plan is made from {whole}")
        files, made = list[InputFile](), {one.directories[0]: n for n, one in enumerate(raw)}
        for path in paths:
            if path in made:
                number = made[path]
                with naming(recipe, raw[number].source):
                    file = self._held(runs[number], read[number], share, path, len(files))
            else:
                (file,) = find_inputs([path], configs[0], self.options.notify)
            files.append(replace(file, index=len(files)))
        is_tokenized(files)  # with one tokenizer, or UsageError
        facts, shape = opened(files[0]).facts, shape_of(files)
        chosen = Chosen(facts.tokenizer.source if facts.tokenizer else None)
        read_of_it = (share, (sum(map(len, read)), sum(len(run.units) for run in runs)))
        its = replace(self, sample=None, show_progress=False)
        plans = []
        for side, _, of_side in rows_of(recipe, tokens, configs):
            lesser = [_lessened(one, share) for one in of_side]
            try:
                run = Run(for_shape(lesser[0], shape), shape, tuple(files), (), chosen)
                plan = its._of(run, lesser, read_of_it if share < 1 else None)
            except UsageError as error:
                if share == 1:
                    raise
                where = f"in a sample of {share:.1%}: "
                raise UsageError(where + error.message, error.tip) from error
            plans.append((side, replace(plan, sample=share) if share < 1 else plan))
        return plans

    def _read_of(self, recipe: Recipe, runs: list[Run], *, is_mixed: bool) -> list[list[WorkUnit]]:
        """The units that are read of each source. `is_mixed`: some are tokenized directories, of
        which no sample can be taken. UsageError for more raw text than is then to be held in
        memory.
        """
        size, sample = sum(weight_of(run.units) for run in runs), self.sample
        if is_mixed and size > _MOST_BYTES:
            raise UsageError(
                f"{runs[0].files[0].path}: not tokenized yet, beside a source that is a "
                f"tokenized directory: {size >> 20:,} MB of raw text would be read into memory, "
                f"expected at most {_MOST_BYTES >> 20} MB",
                "run packer tokenize first, and name its output directories in the recipe",
            )
        if is_mixed and sample is not None and sample < 1:
            self.options.warn(
                "warning: --sample is not followed: a source is a tokenized directory, so all is "
                "read"
            )
        share = min(1.0, _READ_BYTES / size) if sample is None else sample
        return [some_of(run.units, 1.0 if is_mixed else share, recipe.config.seed) for run in runs]

    def _held(
        self, run: Run, units: Sequence[WorkUnit], share: float, to: str, index: int
    ) -> InputFile:
        """An input of the rows: what a run into `to` would tokenize, in memory. Of the documents of
        `units`, so many are kept that they are a `share` of all.
        """
        keep = min(1.0, share * weight_of(run.units) / weight_of(units))
        content: dict[str, list[Any]] = {}

        def tokenize(unit: WorkUnit, job: Job) -> tuple[UnitResult, Any]:
            job = replace(job, parts=partial(PartsInMemory, content))
            result = pack_unit(unit, job, Thinned(unit, job, keep))
            job.source.confirm()
            return result, job.source.info

        tasks = [(unit, tokenize) for unit in units]
        total, shards, info = Counts(), list[Shard](), None
        for result, info in self._made(run, tasks, Progress(0, show=False)):  # noqa: B007 one for all
            total.add(result.counts)
            shards += result.shards
        if not shards:
            raise DataError("no documents in what was read of it", "read more: --sample 100%")
        for shard in shards:
            shard.bytes = sum(batch.nbytes for batch in content[shard.file])
        digests = {file.index: (file.size, "") for file in run.files}
        facts = manifest_of(run, msgspec.to_builtins(info), digests, shards, total, {})
        size = sum(shard.bytes for shard in shards)
        file = InputFile(index, str(Path(to, MANIFEST)), TOKENIZED, None, size, 0)
        hold(file, InMemory(Path(to), TokenizedManifest.of(facts.document), content))
        return file

    def _made(
        self,
        run: Run,
        tasks: Sequence[tuple[WorkUnit, Callable[[WorkUnit, Job], _Made]]],
        progress: Progress,
    ) -> list[_Made]:
        """Give what is made of units, in their order."""
        made, units = dict[int, _Made](), [unit for unit, _ in tasks]
        source = prepare(run, units, self.options)
        job = Job(run, source, NOWHERE, self.options, progress)
        with closing(job.source), as_flag():

            def task(place: int) -> None:
                made[place] = job.make(*tasks[place])

            try:
                every = [partial(task, place) for place in range(len(tasks))]
                run_all(every, self.options.workers, self.options.stop, job.source.stop)
            except Interrupted as error:
                again = "nothing was written; run the same command again"
                raise Interrupted(error.message, again) from error
        return [made[place] for place in range(len(tasks))]

    def _of(self, run: Run, configs: Sequence[PackConfig], read: _Read | None = None) -> Plan:
        """The plan of a run's inputs. Its options are the first of `configs`, settled. `read`: as
        `_of_mixture` takes it.
        """
        first, files = run.row_config, [*run.files]
        configs = [first, *(for_shape(config, run.shape) for config in configs[1:])]
        passes = _passes(files, configs, self.sample)
        if len(passes) > 1 and any(file.path == STDIN for file in files):
            raise UsageError(
                "-: stdin can be read once, and these lengths are cut into different work units",
                "write the data to a file and name that, or plan one --max-length at a time",
            )
        if len(passes) > 1 and not is_tokenized(files):
            why = "what a work unit holds differs with the length of rows"
            self.options.notify(f"reads the inputs {len(passes)} times: {why}")
        _note_beginnings(files, passes, self.options.notify)
        # what tokenizers say, each pass would
        its = replace(self, options=replace(self.options, notify=cache(self.options.notify)))
        size = sum(int(sum(file.size for file in files) * one.share) for one in passes)
        outcomes: dict[PackConfig, Outcome] = {}
        with Progress(size, show=self.show_progress, doing="planning") as progress:
            for one in passes:
                own = replace(run, config=one.configs[0], units=one.units)
                tasks = [(part.unit, partial(plan_unit, configs=one.configs, part=part))
                         for part in one.parts]  # fmt: skip
                plans = its._made(own, tasks, progress)
                for place, config in enumerate(one.configs):
                    _check(config, [(plan.planned[place], plan.copies) for plan in plans])
                    outcome = _outcome_of(config, plans, place, one)
                    if choice := choice_of(files, config):
                        outcome = _of_mixture(outcome, choice, read)
                    outcomes[config] = outcome
        every = [outcomes[config] for config in configs]
        if not any(outcome.planned.rows for outcome in every):
            raise DataError(*nothing_to_pack(every[0].planned, first))
        return Plan(files, run.shape, run.chosen.name, every, self.sample)


def _refuse_stale(to: Path, run: Run, recipe: str) -> None:
    """UsageError where a tokenized directory is not what `run`, of its source, would make now."""
    why = "its inputs have changed, or its files or limits, since they were tokenized"
    tip = f"run packer pack {recipe} --update, which tokenizes what is new, has changed or is lost"
    try:
        if not plan_update(to, load_tokenized(to), run, RunOptions(update=True)).changed:
            return
    except UsageError as error:
        why = f"was tokenized otherwise: {error.message}"
        tip = f"to tokenize it again, run packer pack {recipe} --overwrite"
    raise UsageError(f"{to}: {why}", tip)


def _lessened(config: PackConfig, share: float) -> PackConfig:
    """Options of rows for a share of all documents of a recipe."""

    def part(tokens: int | None) -> int | None:
        return None if tokens is None else max(1, round(tokens * share))

    mixture = config.mixture
    return config if mixture is None else replace(config, mixture=replace(
        mixture,
        tokens=part(mixture.tokens),
        validation_documents=part(mixture.validation_documents),
        sources=tuple(replace(one, tokens=part(one.tokens)) for one in mixture.sources),
        stages=tuple(replace(one, tokens=part(one.tokens) or 1) for one in mixture.stages),
    ))  # fmt: skip


@dataclass(frozen=True)
class _Pass:
    """Configurations that have these work units, and the parts of these that are read."""

    units: tuple[WorkUnit, ...]
    parts: list[Part]
    configs: list[PackConfig]

    @property
    def share(self) -> float:
        """About the share of the inputs' bytes that is read."""
        if all(part.is_whole for part in self.parts) and len(self.parts) == len(self.units):
            return 1.0
        read = sum(part.weight_of() for part in self.parts)
        return min(read / weight_of(self.units), 1.0)


def _passes(
    files: list[InputFile], configs: Sequence[PackConfig], sample: float | None
) -> list[_Pass]:
    by_cut: dict[Hashable, _Pass] = {}
    for config in configs:
        units = tuple(work_units(files, config))
        length = config.max_length if config.overlong == "truncate-turns" else None
        # besides, what decides which documents a unit has, and their order; a mixture chooses them
        # by what rows take of each
        ordered = config.shuffle and is_tokenized(files)
        by = config if config.mixture else (length, ordered)
        if (units, by) not in by_cut:
            by_cut[units, by] = _Pass(units, sampled(files, units, sample, config), [])
        by_cut[units, by].configs.append(config)
    return list(by_cut.values())


def _note_beginnings(files: Sequence[InputFile], passes: Sequence[_Pass], notify: Notify) -> None:
    """Say that files are read from their beginning, in the place of pieces of all of them."""
    parts = [part for each in passes for part in each.parts if not part.is_whole]
    read = {one.file for part in parts for one in part.unit.slices}
    begun = [file for file in files if file.index in read and not begun_in_the_middle(file)]
    if begun:
        kind = "compressed" if begun[0].compression else begun[0].format
        notify(
            f"{named([file.path for file in begun], 1)}: sampled from the beginning on: {kind} "
            "files cannot be entered in the middle"
        )


def _check(config: PackConfig, planned: Sequence[tuple[Planned, int]]) -> None:
    """Raise what a run that packs would raise at its end. `planned`: (a part, how many times)."""
    bad, records, total = 0, 0, Planned()
    for one, copies in planned:
        total.add(one)
        bad += -(-one.rejected_records // copies)  # files that are left out count once
        records += (one.documents + one.empty_documents + one.dropped_documents) // copies
    check_limits(config, total, bad, records + bad, "fix the input, or name a larger limit")


def _outcome_of(config: PackConfig, plans: Sequence[UnitPlan], place: int, read: _Pass) -> Outcome:
    """Outcome of all units, from plans of some, or of parts of some. `place`: of the configuration
    in the plans.
    """
    planned, of = [plan.planned[place] for plan in plans], [plan.unit for plan in plans]
    units, share = read.units, read.share
    counted = len({*of}), len(units)
    if share == 1:
        total = _sum(config, planned)
        return Outcome(config, totals_of_rows(config, total), total, counted)
    # figures of a unit together stand for it, however many they are, and the units that were read
    # for those that were not
    weights, weighed = {unit.index: weight_of([unit]) for unit in units}, dict.fromkeys(of, 0.0)
    for plan in plans:
        weighed[plan.unit] += plan.weight
    more = sum(weights.values()) / (sum(weights[unit] for unit in weighed) or 1)
    factors = [more * weights[unit] / (weighed[unit] or 1) for unit in of]
    rows, tokens, sizes = (
        [factor * figure for factor, figure in zip(factors, figures, strict=True)]
        for figures in zip(*((one.rows, one.tokens, plan.weight)
                             for one, plan in zip(planned, plans, strict=True)), strict=True)
    )  # fmt: skip
    errors = {
        "rows": _error_of_ratio(rows, sizes, share, sum(sizes)),
        "utilization": _error_of_ratio(tokens, rows, share, 1 / config.max_length),
    }
    return Outcome(config, *_estimate(config, planned, factors), counted, share, errors)


def _estimate(
    config: PackConfig, planned: Sequence[Planned], factors: Sequence[float]
) -> tuple[dict[str, Any], Planned]:
    """(totals, planned) of what each stands for, so many times."""
    # in thousandths: none of many small counts is rounded off
    fine = _sum(config, [one.times(f * 1000) for one, f in zip(planned, factors, strict=True)])
    bound = round(totals_of_rows(config, fine)["lower_bound_rows"] / 1000)
    total = fine.times(1 / 1000)
    return totals_of_rows(config, total) | {"lower_bound_rows": bound}, total


def _sum(config: PackConfig, planned: Sequence[Planned]) -> Planned:
    total = Planned(piece_length=np.zeros(config.max_length + 1, np.int64))
    for one in planned:
        total.add(one)
    return total


def _of_mixture(outcome: Outcome, choice: Choice, read: _Read | None) -> Outcome:
    """With what its rows have of each source. `read`: the outcome is of a recipe for a share of all
    there is, from some of all units, and becomes an estimate of that.
    """
    factor = 1.0
    if read is not None:
        share, units = read
        factor = 1 / share
        totals, planned = _estimate(outcome.config, [outcome.planned], [factor])
        outcome = replace(outcome, totals=totals, planned=planned, units=units, share=share)
    sources, by_source = list[Source](), list[dict[str, Any]]()
    counted = ("documents", "available", "taken", "held_out_documents", "duplicate_documents")
    for one in choice.sources:
        grown = {name: round(getattr(one, name) * factor) for name in counted}
        sources.append(structs.replace(one, asked=one.asked * factor, **grown))
        counts = [outcome.planned.file(index) for index in range(*one.inputs)]
        by_source.append({"name": one.name} | {
            name: sum(getattr(own, name) for own in counts) for name in _OF_SOURCE
        })  # fmt: skip
    reached = [
        structs.replace(one, asked=one.asked * factor, taken=round(one.taken * factor))
        for one in choice.shares
    ]
    return replace(outcome, sources=sources, by_source=by_source, shares=reached)


def _error_of_ratio(
    parts: Sequence[float], sizes: Sequence[float], share: float, times: float
) -> float | None:
    """The standard error of sum(parts) / sum(sizes) of a sample without replacement that is a
    `share` of all (Cochran 1977, "Sampling techniques", section 6.4), so many times. None for one
    part.
    """
    whole = sum(sizes)
    if len(parts) < 2 or not whole:
        return None
    ratio = sum(parts) / whole
    left = [part - ratio * size for part, size in zip(parts, sizes, strict=True)]
    return times * math.sqrt((1 - share) * len(parts) * statistics.variance(left)) / whole
