"""Planning a whole run: inputs to documents to rows, of which only the figures are kept.

Lengths whose work units are cut in the same way are planned from one pass over the inputs. A recipe
is planned from the indexes of its tokenized sources, each side of its split; sources that were
never tokenized are, as a sample in memory.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from packer_cli.errors import DataError, UsageError
from packer_cli.inputs.byte_streams import STDIN, begin_stdin
from packer_cli.inputs.discovery import find_inputs
from packer_cli.inputs.tokenized import is_tokenized, opened, shape_of
from packer_cli.mixing.choice import Choice, Reached
from packer_cli.mixing.units import choice_of, work_units
from packer_cli.options.options import PackConfig
from packer_cli.options.recipe import Recipe
from packer_cli.options.run_options import EncodingOptions, RunOptions
from packer_cli.options.shape_rules import for_shape
from packer_cli.options.shapes import Shape
from packer_cli.plan.sample import Part, begun_in_the_middle, sampled, some_of, weight_of
from packer_cli.plan.unit import Planned, UnitPlan, held, made_of, plan_unit
from packer_cli.progress import Progress
from packer_cli.records import InputFile, Notify, WorkUnit
from packer_cli.result.counts import mixedness
from packer_cli.result.manifest import Source, load_tokenized, shares
from packer_cli.run.finalize import check_limits, nothing_to_pack, sources_of, totals_of_rows
from packer_cli.run.identity import Chosen, Run
from packer_cli.run.pipeline import settle
from packer_cli.run.recipe import Tokens, naming, once, rows_of, tokens_of, tokens_root
from packer_cli.run.update import plan_update

_READ_BYTES = 64 << 20  # of raw text, where nobody says how much
_MOST_BYTES = 256 << 20  # of raw text that is read whole into memory
_PER_HIDDEN = 6  # what a token costs, but for attention, for each hidden unit of a model


@dataclass(frozen=True)
class Plan:
    """A plan: what would come out of the inputs.

    config     of the outcomes, which differ in max_length and strategy
    tokenizer  as it was named; None where none is needed
    outcomes   in the order of the configurations
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
class PlannedSource:
    """A source, and what rows have of it. `facts`: as in a manifest."""

    facts: Source
    documents: int
    tokens: int
    trained_tokens: int


@dataclass(frozen=True)
class Outcome:
    """The outcome of one configuration.

    totals           as in a manifest: rows, utilization, lower_bound_rows and so on
    planned          of all units
    units            those of which something was read, and all there are
    share            of the inputs' bytes that were read
    standard_errors  of "rows" and "utilization"; empty where nothing is estimated
    sources          of a recipe, in its order
    shares           how near whole documents come to what is asked of these
    """

    config: PackConfig
    totals: dict[str, Any]
    planned: Planned
    units: tuple[int, int]
    share: float = 1.0
    standard_errors: dict[str, float] = field(default_factory=dict)
    sources: Sequence[PlannedSource] = ()
    shares: Sequence[Reached] = ()

    @property
    def rows(self) -> int:
        return self.planned.rows

    @property
    def utilization(self) -> float:
        """0 where nothing is left to pack."""
        return float(self.totals["utilization"])

    @property
    def lower_bound_rows(self) -> int:
        return int(self.totals["lower_bound_rows"])

    @property
    def above_bound(self) -> float:
        """The share of the lower bound by which there are more rows."""
        return (self.rows - self.lower_bound_rows) / max(self.lower_bound_rows, 1)

    @property
    def segments_per_row(self) -> float:
        return self.planned.segments / max(self.rows, 1)

    @property
    def mixedness(self) -> dict[str, Any]:
        """How mixed rows are, as `packer stats` says it."""
        return mixedness(self.totals, self.totals["histograms"])

    @property
    def attention_span(self) -> float:
        """E[l²]/E[l]: how many tokens the segment of the average token has."""
        return self.planned.attention / max(self.planned.tokens, 1)

    def attention_share(self, hidden_size: int) -> float:
        """Share of attention in what a step costs, in a model of this hidden size."""
        rest = _PER_HIDDEN * hidden_size * self.rows * self.config.max_length
        return self.planned.attention / max(rest + self.planned.attention, 1)

    def steps(self, batch_tokens: int) -> int:
        """Steps of an epoch; the last one may have fewer rows."""
        return -(-self.rows // (batch_tokens // self.config.max_length))


def plan(
    inputs: list[str],
    configs: Sequence[PackConfig],
    options: EncodingOptions,
    tokenizer_name: str | None = None,
    sample: float | None = None,
    notify: Notify = lambda message: None,
    warn: Notify = lambda message: None,
    *,
    show_progress: bool = False,
) -> Plan:
    """Plan what `packer pack` would make of `inputs` with each of `configs`, which differ in
    max_length and strategy only. Nothing is written anywhere.

    `sample`: about the share of the inputs to read, more than 0; the figures are then estimates.
    The other parameters, and what is raised, are those of `pipeline.pack`.
    """
    stop = threading.Event()
    begin_stdin(stop.is_set)
    files = find_inputs(inputs, configs[0], notify)
    run = settle(files, configs[0], tokenizer_name, replace(options, notify=notify, warn=warn))
    return plan_files(run, configs, options, sample, notify, stop, show_progress=show_progress)


def plan_recipe(
    recipe: Recipe,
    destinations: Sequence[Path | str],
    configs: Sequence[PackConfig],
    options: EncodingOptions,
    sample: float | None = None,
    notify: Notify = lambda message: None,
    warn: Notify = lambda message: None,
    *,
    show_progress: bool = False,
) -> list[tuple[str | None, Plan]]:
    """(side, plan) of what `pack_recipe` would make with each of `configs`; without a split there
    is one, of no side. Sources that a run into one of `destinations` has tokenized are read as they
    are. If one is not tokenized, a sample of all of them is, in memory: nothing is written.
    """
    # what it has to say of the inputs was said when they were tokenized
    silent, warn = (lambda message: None), once(warn)
    tokens = tokens_of(recipe, tokens_root(recipe, *destinations), silent)
    raw = [one for one in tokens if one.files]
    if not all(one.is_there for one in raw):
        return _estimated(recipe, tokens, raw, configs, options, sample, notify, warn)
    for one in raw:
        with naming(recipe, one.source):
            silently = replace(options, notify=silent, warn=warn)
            _refuse_stale(one, settle(one.files, one.config, recipe.tokenizer, silently))
    return [
        (part, plan(inputs, of_part, options, None, sample, notify, warn,
                    show_progress=show_progress))
        for part, inputs, of_part in rows_of(recipe, tokens, configs)
    ]  # fmt: skip


def _refuse_stale(tokens: Tokens, run: Run) -> None:
    """UsageError where a tokenized directory is not what `run`, of its source, would make now."""
    to, again = Path(tokens.directories[0]), f"packer pack {tokens.recipe.path}"
    try:
        update = plan_update(to, load_tokenized(to), run, RunOptions(update=True))
    except UsageError as error:
        tip = f"to tokenize it again, run {again} --overwrite"
        raise UsageError(f"was tokenized otherwise: {error.message}", tip) from error
    if update.changed:
        raise UsageError(
            f"{to}: its inputs have changed, or its files or limits, since they were tokenized",
            f"run {again} --update, which tokenizes what is new, has changed or is lost",
        )


def _estimated(
    recipe: Recipe,
    tokens: list[Tokens],
    raw: list[Tokens],
    configs: Sequence[PackConfig],
    options: EncodingOptions,
    sample: float | None,
    notify: Notify,
    warn: Notify,
) -> list[tuple[str | None, Plan]]:
    """Plans of a recipe, from a sample of its sources: of each the same share is kept, so the
    recipe with that share of its amounts makes that share of the rows. Where the sample is
    everything, nothing is estimated.
    """
    paths = [path for one in tokens for path in one.directories]
    options = replace(options, notify=notify, warn=warn)
    runs = [settle(one.files, one.config, recipe.tokenizer, options).cut() for one in raw]
    read = _read_of(recipe, runs, sample, warn, is_mixed=len(paths) > len(raw))
    share = min(
        weight_of(some) / weight_of(run.units) for some, run in zip(read, runs, strict=True)
    )
    whole = "everything, and is exact" if share == 1 else f"{share:.1%}, and is an estimate"
    notify(f"the sources are not tokenized yet: the plan is made from {whole}")
    stop, files = threading.Event(), list[InputFile]()
    made = {one.directories[0]: place for place, one in enumerate(raw)}
    for path in paths:
        if path in made:
            run, some, one = runs[made[path]], read[made[path]], raw[made[path]]
            with naming(recipe, one.source):
                file = held(run, some, share, Path(path), len(files), options, notify, stop)
            files.append(file)
        else:
            (file,) = find_inputs([path], configs[0], notify)
            files.append(replace(file, index=len(files)))
    is_tokenized(files)  # with one tokenizer, or UsageError
    facts, shape = opened(files[0]).facts, shape_of(files)
    chosen = Chosen(facts.tokenizer.source if facts.tokenizer else None)
    units = (sum(map(len, read)), sum(len(run.units) for run in runs)) if share < 1 else None
    plans = []
    for part, _, of_part in rows_of(recipe, tokens, configs):
        lesser = [_lessened(one, share) for one in of_part]
        try:
            run = Run(for_shape(lesser[0], shape), shape, tuple(files), (), chosen)
            made_plan = plan_files(
                run, lesser, options, None, notify, stop, share=share, units=units
            )
        except UsageError as error:
            if share == 1:
                raise
            where = f"in a sample of {share:.1%}: "
            raise UsageError(where + error.message, error.tip) from error
        plans.append((part, replace(made_plan, sample=share) if share < 1 else made_plan))
    return plans


def _read_of(
    recipe: Recipe, runs: list[Run], sample: float | None, warn: Notify, *, is_mixed: bool
) -> list[list[WorkUnit]]:
    """The units that are read of each source. `is_mixed`: some are tokenized directories, of which
    no sample can be taken. UsageError for more raw text than is then to be held in memory.
    """
    size = sum(weight_of(run.units) for run in runs)
    if is_mixed and size > _MOST_BYTES:
        raise UsageError(
            f"{runs[0].files[0].path}: not tokenized yet, beside a source that is a "
            f"tokenized directory: {size >> 20:,} MB of raw text would be read into memory, "
            f"expected at most {_MOST_BYTES >> 20} MB",
            "run packer tokenize first, and name its output directories in the recipe",
        )
    if is_mixed and sample is not None and sample < 1:
        warn("warning: --sample is not followed: a source is a tokenized directory, so all is read")
    share = min(1.0, _READ_BYTES / size) if sample is None else sample
    return [some_of(run.units, 1.0 if is_mixed else share, recipe.config.seed) for run in runs]


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


def plan_files(
    run: Run,
    configs: Sequence[PackConfig],
    options: EncodingOptions,
    sample: float | None,
    notify: Notify,
    stop: threading.Event,
    *,
    share: float = 1.0,
    units: tuple[int, int] | None = None,
    show_progress: bool = False,
) -> Plan:
    """The plan of a run's inputs. Its options are the first of `configs`, settled; `share` and
    `units`: as in `of_mixture`.
    """
    first, files = run.row_config, [*run.files]
    configs = [first, *(for_shape(config, run.shape) for config in configs[1:])]
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
    notify = once(notify)  # what the tokenizer has to say, each pass would
    size = sum(int(sum(file.size for file in files) * one.share) for one in passes)
    outcomes: dict[PackConfig, Outcome] = {}
    with Progress(size, show=show_progress, doing="planning") as progress:
        for one in passes:
            own = replace(run, config=one.configs[0], units=one.units)
            tasks = [(part.unit, partial(plan_unit, configs=one.configs, part=part))
                     for part in one.parts]  # fmt: skip
            plans = made_of(own, tasks, options, notify, stop, progress)
            for place, config in enumerate(one.configs):
                _check(config, [(plan.planned[place], plan.copies) for plan in plans])
                outcome = outcome_of(config, plans, place, one.units, one.share)
                choice = choice_of(files, config)
                if choice:
                    outcome = of_mixture(outcome, choice, share, units)
                outcomes[config] = outcome
    result = Plan(
        files, run.shape, run.chosen.name, [outcomes[config] for config in configs], sample
    )
    if not any(outcome.rows for outcome in result.outcomes):
        raise DataError(*nothing_to_pack(result.outcomes[0].planned, first))
    return result


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
        length = config.max_length if config.shortens_conversations else None
        # besides, what decides which documents a unit has, and their order; a mixture chooses them
        # by what rows take of each
        ordered = config.documents_shuffled and is_tokenized(files)
        by = config if config.mixture else (length, ordered)
        if (units, by) not in by_cut:
            by_cut[units, by] = _Pass(units, sampled(files, units, sample, config), [])
        by_cut[units, by].configs.append(config)
    return list(by_cut.values())


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


def _check(config: PackConfig, planned: Sequence[tuple[Planned, int]]) -> None:
    """Raise what a run that packs would raise at its end. `planned`: (a part, how many times)."""
    bad, records, total = 0, 0, Planned()
    for one, copies in planned:
        total.add(one)
        bad += -(-one.rejected_records // copies)  # files that are left out count once
        records += (one.documents + one.empty_documents + one.dropped_documents) // copies
    tip = "or name a larger limit"
    check_limits(config, total, bad, records + bad, f"mend the input, {tip}", tip)


def outcome_of(
    config: PackConfig, plans: Sequence[UnitPlan], place: int, units: Sequence[WorkUnit],
    share: float,
) -> Outcome:  # fmt: skip
    """Outcome of all `units`, from plans of some, or of parts of some, that are a `share` of their
    bytes. `place`: of the configuration in the plans.
    """
    planned, of = [plan.planned[place] for plan in plans], [plan.unit for plan in plans]
    counted = len({*of}), len(units)
    if share == 1:
        total = _sum(config, planned)
        return Outcome(config, totals_of_rows(config, total), total, counted)
    # figures of a unit together stand for it, however many they are, and the units that were read
    # for those that were not
    weights, read = {unit.index: weight_of([unit]) for unit in units}, dict.fromkeys(of, 0.0)
    for plan in plans:
        read[plan.unit] += plan.weight
    more = sum(weights.values()) / (sum(weights[unit] for unit in read) or 1)
    factors = [more * weights[unit] / (read[unit] or 1) for unit in of]
    rows, tokens, sizes = (
        [factor * figure for factor, figure in zip(factors, figures, strict=True)]
        for figures in zip(*((one.rows, one.tokens, plan.weight)
                             for one, plan in zip(planned, plans, strict=True)), strict=True)
    )  # fmt: skip
    errors = {
        "rows": _error_of_ratio(rows, sizes, of, share) * sum(sizes),
        "utilization": _error_of_ratio(tokens, rows, of, share) / config.max_length,
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


def of_mixture(
    outcome: Outcome, choice: Choice, share: float, units: tuple[int, int] | None
) -> Outcome:
    """With what its rows have of each source. It is of a recipe for a `share` of all there is, and
    becomes an estimate of that, where `units` are given: as in `Outcome`.
    """
    factor = 1 / share
    if units is not None:
        totals, planned = _estimate(outcome.config, [outcome.planned], [factor])
        outcome = replace(outcome, totals=totals, planned=planned, units=units, share=share)
    found, names = [], ("documents", "tokens", "trained_tokens")
    counted = ("documents", "available", "taken", "held_out_documents", "duplicate_documents")
    for one in sources_of(choice):
        grown = {name: round(getattr(one, name) * factor) for name in counted}
        counts = [outcome.planned.file(index) for index in range(*one.inputs)]
        figures = (sum(getattr(own, name) for own in counts) for name in names)
        facts = structs.replace(one, asked=one.asked * factor, **grown)
        found.append(PlannedSource(facts, *figures))
    reached = [
        replace(one, asked=one.asked * factor, taken=round(one.taken * factor))
        for one in choice.shares
    ]
    return replace(outcome, sources=found, shares=reached)


def by_sources(
    outcomes: Sequence[Outcome],
) -> list[tuple[list[Outcome], list[tuple[PlannedSource, float, float]]]]:
    """(outcomes, their sources with the shares asked and reached), once for outcomes whose sources
    have the same; [] without a recipe.

    Trained tokens differ with the length: the first token of a segment is not trained on.
    """
    groups: dict[tuple[PlannedSource, ...], list[Outcome]] = {}
    for one in outcomes:
        if one.sources:
            groups.setdefault(tuple(one.sources), []).append(one)
    return [
        (group, [(source, *of_all) for source, of_all in zip(
            sources, shares([source.facts for source in sources]), strict=True)])
        for sources, group in groups.items()
    ]  # fmt: skip


def _error_of_ratio(
    parts: Sequence[float], sizes: Sequence[float], of: Sequence[int], share: float
) -> float:
    """The standard error of sum(parts) / sum(sizes) of a sample without replacement that is a
    `share` of all (Cochran 1977, "Sampling techniques", sections 5.4 and 6.4). NaN for one part.

    `of`: the units of the parts; differences between units count only where one has one part.
    """
    whole = sum(sizes)
    if len(parts) < 2 or not whole:
        return math.nan
    ratio = sum(parts) / whole
    left: dict[int, list[float]] = {}
    for part, size, unit in zip(parts, sizes, of, strict=True):
        left.setdefault(unit, []).append(part - ratio * size)
    strata = [*left.values()]
    if min(map(len, strata)) < 2:
        strata = [[one for stratum in strata for one in stratum]]
    variance = sum(len(stratum) * statistics.variance(stratum) for stratum in strata)
    return math.sqrt((1 - share) * variance) / whole
