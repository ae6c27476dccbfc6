"""Planning what packing would give, for several lengths of rows at once, with nothing written.

Inputs become documents and rows, of which only the figures are kept. Lengths whose work units are
cut in the same way are planned from one pass over the inputs. A recipe is planned from the indexes
of its tokenized sources, each side of its split.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Hashable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import structs

from packer_cli.errors import DataError, Interrupted, UsageError, named
from packer_cli.inputs.byte_streams import STDIN, begin_stdin
from packer_cli.inputs.discovery import find_inputs
from packer_cli.inputs.tokenized import is_tokenized
from packer_cli.interrupts import as_flag, run_all
from packer_cli.mixing import Choice
from packer_cli.mixing.units import choice_of, unit_bytes_of, work_units
from packer_cli.options.options import PADDED_BOUNDARIES, PackConfig
from packer_cli.options.recipe import Recipe
from packer_cli.options.run_options import EncodingOptions, RunOptions
from packer_cli.options.shape_rules import for_shape
from packer_cli.options.shapes import Shape
from packer_cli.packing.window import trained_in
from packer_cli.plan.sample import Part, PartReader, begun_in_the_middle, sampled, weight_of
from packer_cli.progress import Progress
from packer_cli.records import FILE, POSITION, TURNS, Documents, InputFile, Int64, Notify, WorkUnit
from packer_cli.result.counts import Counts, InputTotals, powers_histogram
from packer_cli.result.layout import Shard
from packer_cli.result.manifest import ReachedShare, SourceStats, load_tokenized
from packer_cli.result.reader import plain_type, values_type
from packer_cli.result.shard_writer import fixed, ragged, stored_batch_rows, stored_schema
from packer_cli.run.additions import plan_addition
from packer_cli.run.finalize import check_limits, nothing_to_pack, totals_of_rows
from packer_cli.run.identity import Run
from packer_cli.run.pipeline import settle
from packer_cli.run.recipe import naming, rows_of, tokens_of, tokens_root
from packer_cli.run.source import prepare
from packer_cli.run.unit import NOWHERE, Job, UnitMaker, UnitRows, pack_unit

_OF_SOURCE = ("documents", "tokens", "trained_tokens")  # what is counted of each in rows
_END = 8  # bytes of a shard after its last batch
_BATCH_TOKENS = 1 << 20


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
    sources: Sequence[SourceStats] = ()
    by_source: Sequence[dict[str, Any]] = ()
    shares: Sequence[ReachedShare] = ()


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
        found = find_inputs(inputs, configs[0], self.options.notify)
        run = settle(found, configs[0], tokenizer, self.options)
        first, files = run.row_config, [*run.files]
        configs = [first, *(for_shape(config, run.shape) for config in configs[1:])]
        passes = _passes(files, configs, self.sample)
        if len(passes) > 1 and any(file.path == STDIN for file in files):
            raise UsageError(
                "-: stdin can be read once, and these lengths or strategies have other work units",
                "write the data to a file and name that, or plan one --max-length at a time",
            )
        if len(passes) > 1 and not is_tokenized(files):
            why = "what a work unit holds differs with the length of rows and the strategy"
            self.options.notify(f"reads the inputs {len(passes)} times: {why}")
        _note_beginnings(files, passes, self.options.notify)
        # what tokenizers say, each pass would
        its = replace(self, options=replace(self.options, notify=cache(self.options.notify)))
        size = sum(int(sum(file.size for file in files) * one.share) for one in passes)
        outcomes: dict[PackConfig, Outcome] = {}
        with Progress(size, show=self.show_progress, doing="planning") as progress:
            for one in passes:
                own = replace(run, config=one.configs[0], units=one.units)
                plans = its._plans_of(own, one, progress)
                for place, config in enumerate(one.configs):
                    _check(config, [(plan.planned[place], plan.copies) for plan in plans])
                    outcome = _outcome_of(config, plans, place, one)
                    if choice := choice_of(files, config):
                        outcome = _of_mixture(outcome, choice)
                    outcomes[config] = outcome
        every = [outcomes[config] for config in configs]
        if not any(outcome.planned.rows for outcome in every):
            raise DataError(*nothing_to_pack(every[0].planned, first))
        return Plan(files, run.shape, run.chosen.name, every, self.sample)

    def plan_recipe(
        self, recipe: Recipe, destination: Path | str, configs: Sequence[PackConfig]
    ) -> list[tuple[str | None, Plan]]:
        """(side, plan) of what `pack_recipe` would make with each of `configs`; without a split
        there is one, of no side. UsageError for a source that no run into `destination` has
        tokenized, or that has changed since.
        """
        # what it has to say of the inputs was said when they were tokenized
        options = replace(self.options, warn=cache(self.options.warn))
        silent = replace(options, notify=lambda message: None)
        tokens = tokens_of(recipe, tokens_root(recipe, destination), silent.notify)
        for one in tokens:
            if not one.files:
                continue
            with naming(recipe, one.source):
                (to,) = map(Path, one.directories)
                if not one.is_there:
                    raise UsageError(
                        f"{to}: not there yet: a recipe is planned from its tokenized sources",
                        f"run packer pack {recipe.path}, which tokenizes them; if it did so "
                        "elsewhere, name the folder: --tokenized DIR",
                    )
                run = settle(one.files, one.config, recipe.tokenizer, silent)
                _refuse_stale(to, run, recipe.path)
        its = replace(self, options=options)
        sides = rows_of(recipe, tokens, configs)
        return [(side, its.plan(inputs, of_side)) for side, inputs, of_side in sides]

    def _plans_of(self, run: Run, what: _Pass, progress: Progress) -> list[UnitPlan]:
        """Plans of the parts of a pass, in their order."""
        planned = dict[int, UnitPlan]()
        source = prepare(run, [part.unit for part in what.parts], self.options)
        job = Job(run, source, NOWHERE, self.options, progress)

        def task(place: int, part: Part) -> None:
            planned[place] = job.make(
                part.unit, partial(plan_unit, configs=what.configs, part=part)
            )

        with closing(job.source), as_flag():
            try:
                every = [partial(task, *one) for one in enumerate(what.parts)]
                run_all(every, self.options.workers, self.options.stop, job.source.stop)
            except Interrupted as error:
                again = "nothing was written; run the same command again"
                raise Interrupted(error.message, again) from error
        return [planned[place] for place in range(len(what.parts))]


def _refuse_stale(to: Path, run: Run, recipe: str) -> None:
    """UsageError where a tokenized directory is not what `run`, of its source, would make now."""
    why = "its inputs have changed, or its limits, since they were tokenized"
    tip = f"run packer pack {recipe} --add, which tokenizes what is new or has changed"
    try:
        adding = RunOptions(add=True, exact=True)  # as sources of a recipe are tokenized
        if not plan_addition(to, load_tokenized(to), run, adding).changed:
            return
    except UsageError as error:
        why = f"was tokenized otherwise: {error.message}"
        tip = f"to tokenize it again, run packer pack {recipe} --overwrite"
    raise UsageError(f"{to}: {why}", tip)


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
    # in thousandths: none of many small counts is rounded off
    fine = _sum(config, [one.times(f * 1000) for one, f in zip(planned, factors, strict=True)])
    bound = round(totals_of_rows(config, fine)["lower_bound_rows"] / 1000)
    total = fine.times(1 / 1000)
    totals = totals_of_rows(config, total) | {"lower_bound_rows": bound}
    return Outcome(config, totals, total, counted, share, errors)


def _sum(config: PackConfig, planned: Sequence[Planned]) -> Planned:
    total = Planned(piece_length=np.zeros(config.max_length + 1, np.int64))
    for one in planned:
        total.add(one)
    return total


def _of_mixture(outcome: Outcome, choice: Choice) -> Outcome:
    """With what its rows have of each source."""
    by_source = list[dict[str, Any]]()
    for one in choice.sources:
        counts = [outcome.planned.file(index) for index in range(*one.inputs)]
        by_source.append({"name": one.name} | {
            name: sum(getattr(own, name) for own in counts) for name in _OF_SOURCE
        })  # fmt: skip
    return replace(outcome, sources=choice.sources, by_source=by_source, shares=choice.shares)


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


# A work unit, planned for several configurations: its documents, or some, are read once


class Planned(Counts):
    """Figures of what would be written with one configuration; those of units add up.

    shards, bytes  files, and their sizes
    attention      the sum of the squared segment lengths
    cut_documents  those in several segments
    read_lengths   int64[32], documents with tokens before any is cut, truncated or dropped, by
                   powers of two of their lengths; their tokens are `encoded_tokens`
    """

    shards: int = 0
    bytes: int = 0
    attention: int = 0
    cut_documents: int = 0
    read_lengths: Int64 = msgspec.field(
        default_factory=lambda: powers_histogram(np.empty(0, np.int64))
    )

    def times(self, factor: float) -> Planned:
        """Figures of `factor` times as many records; attention costs between rows stay."""

        def times(value: Any) -> Any:
            if isinstance(value, int):
                return round(value * factor)
            if isinstance(value, np.ndarray):
                return np.rint(value * factor).astype(np.int64)
            if isinstance(value, InputTotals):
                return InputTotals(*map(times, structs.astuple(value)))
            if isinstance(value, dict):
                return {name: times(one) for name, one in value.items()}
            return value

        return Planned(**{name: times(value) for name, value in structs.asdict(self).items()})


@dataclass(frozen=True)
class UnitPlan:
    """Plan of a unit, for each configuration.

    unit    its index
    weight  bytes of text that the figures are of
    copies  how often what was read was planned
    """

    unit: int
    weight: float
    copies: int
    planned: list[Planned]


def plan_unit(unit: WorkUnit, job: Job, configs: Sequence[PackConfig], part: Part) -> UnitPlan:
    """Plan the rows that `pack_unit` writes with each of the configurations, which differ in
    nothing that concerns documents. Raises what that does.

    `part`: what is read of the unit.
    """
    reader = PartReader(job.source.read, part)
    source = replace(job.source, read=reader)
    job = replace(job, source=source, is_sample=not part.is_whole)
    planning = _Planning(job, configs, part, reader)
    pack_unit(unit, job, planning)
    job.source.confirm()
    return planning.plan()


class _Planning(UnitMaker):
    """Takes the documents of a part, and plans their rows with each of the configurations.

    A part is planned as often as makes up its unit, or a small one: rows that are not full, and
    whatever else depends on how many documents there are, are then as they are in the unit.
    """

    def __init__(
        self, job: Job, configs: Sequence[PackConfig], part: Part, reader: PartReader
    ) -> None:
        super().__init__(part.unit, job)
        self._configs, self._part, self._reader = configs, part, reader
        # the tokens of all configurations together would be counted as progress
        silent = replace(job, progress=Progress(0, show=False))
        self._planned = [Planned() for _ in configs]
        self._rows = [
            UnitRows(part.unit, job if planned is self._planned[0] else silent, config,
                     _Unwritten(config, job, planned))
            for config, planned in zip(configs, self._planned, strict=True)
        ]  # fmt: skip
        self._kept, self._read = list[Documents](), Planned()
        self._copies, self._weight = 1, float(part.unit_weight)

    def add(self, batch: Documents) -> None:
        own = np.diff(batch.offsets)
        self._read.read_lengths += powers_histogram(own[own > 0])
        # rows are planned from lengths, and a window without tokens is small
        trained, job = batch.trained, self.job
        if trained is None and job.source.tokenized is None and job.run.shape.kind != "text":
            # other batches may say what of them is trained on
            trained = np.ones(int(batch.offsets[-1]), np.uint8)
        places = {name: batch.of_documents[name] for name in (FILE, POSITION, TURNS)
                  if name in batch.of_documents}  # fmt: skip
        lengths = Documents.of(None, batch.offsets, trained).beside({}, places)
        if not self._part.is_whole:
            self._kept.append(lengths)
            return
        for one in self._rows:
            one.add(lengths)

    def close(self) -> list[Shard]:
        if not self._part.is_whole and self._reader.weight:  # none where all is damaged
            least = max(unit_bytes_of(config, 0) for config in self._configs)
            weight = self._reader.weight + self._part.weight_of(self.job.damaged)
            self._copies = max(round(min(self._weight, least) / weight), 1)
            self._weight = weight
        for batch in _repeated(self._kept, self._copies):
            for one in self._rows:
                one.add(batch)
        return [shard for one in self._rows for shard in one.close()]

    def abandon(self) -> None:
        super().abandon()
        for one in self._rows:
            one.abandon()

    def plan(self) -> UnitPlan:
        """The plan, once all is closed."""
        copies = self._copies
        self._read.add(self.counts)
        read = self._read.times(copies)
        again = read.rejected_files - read.rejected_files // copies  # those left out are so once
        read.rejected_records -= again
        read.rejected_files -= again
        for planned, rows in zip(self._planned, self._rows, strict=True):
            planned.add(rows.counts)
            planned.add(read)
            planned.cut_documents = rows.cut_documents
        return UnitPlan(self._part.unit.index, self._weight * copies, copies, self._planned)


def _repeated(batches: Sequence[Documents], copies: int) -> Iterator[Documents]:
    """All batches so many times, in batches of no more tokens than a run has. They have no ids."""
    tokens = sum(int(batch.offsets[-1]) for batch in batches)
    most = max(_BATCH_TOKENS // max(tokens, 1), 1)
    for first in range(0, copies, most):
        times = min(most, copies - first)
        yield from (batch.repeat(times) for batch in batches)


class _Unwritten:
    """Counts rows instead of writing them. OUT planned: their shards, and what attention costs."""

    rows_at_once = 0  # it needs no tokens

    def __init__(self, config: PackConfig, job: Job, planned: Planned) -> None:
        self._planned = planned
        self._batch, self._most = stored_batch_rows(config), config.shard_bytes
        if config.view:
            self._most = sys.maxsize
        self._schema = stored_schema(config, job.pad_token_id, job.tokenizer_sha256)
        self._size = lru_cache(1 << 16)(partial(_batch_bytes, self._schema))
        self._shards: list[Shard] = []

    def write(self, documents: Documents, order: Int64, row_offsets: Int64) -> None:
        rows = len(row_offsets) - 1
        if not rows:
            return
        self._planned.attention += int(np.square(documents.lengths[order], dtype=np.int64).sum())
        edges = np.append(np.arange(0, rows, self._batch), rows)
        batches = np.diff(edges).tolist(), np.diff(row_offsets[edges]).tolist()
        for size in map(self._size, *batches):
            # a writer continues in a new file before it has written the end of a full one
            if not self._shards or self._shards[-1].bytes - _END >= self._most:
                self._shards.append(Shard.begun("", 0))
                self._shards[-1].bytes = self._schema.serialize().size + _END
            self._shards[-1].bytes += size
        self._shards[-1].trained_tokens += int(trained_in(documents, order).sum())

    def close(self) -> list[Shard]:
        self._planned.shards = len(self._shards)
        self._planned.bytes = sum(shard.bytes for shard in self._shards)
        return self._shards

    def abandon(self) -> None:
        """Nothing is open."""


def _batch_bytes(schema: Any, rows: int, segments: int) -> int:
    """How many bytes a record batch of so many rows has in a shard. Pages of its zeros are never
    touched.
    """
    columns = []
    for column in schema:
        kind = column.type
        if pa.types.is_fixed_size_list(kind):
            columns.append(fixed(kind, np.zeros((rows, kind.list_size), values_type(kind))))
            continue
        ends = np.zeros(rows + 1, np.int32)
        ends[-1] = segments + (rows if column.name in ("cu_seqlens", PADDED_BOUNDARIES) else 0)
        of_structs = pa.types.is_struct(kind.value_type)
        types = [plain_type(one.type) for one in kind.value_type] if of_structs else []
        types = types or [values_type(kind)]
        parts = [np.zeros(ends[-1], one) for one in types]
        columns.append(ragged(kind, ends, parts))
    return int(pa.ipc.get_record_batch_size(pa.record_batch(columns, schema=schema)))
