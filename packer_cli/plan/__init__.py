"""`packer plan`: plan what `packer pack` would write, for several lengths of rows at once.

Documents are read and rows are planned as in a run, but only their figures are kept, and nothing is
written. All lengths with the same work units are planned from one pass over the inputs; tokenized
directories are planned from their indexes. A recipe is planned from its tokenized sources, each
side of its split. Needs the memory of a run, once for each length.
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
from packer_cli.mixing import Choice
from packer_cli.mixing.units import choice_of, unit_bytes_of, work_units
from packer_cli.options.options import PADDED_BOUNDARIES, PackConfig
from packer_cli.options.recipe import Recipe
from packer_cli.options.run_options import EncodingOptions, RunOptions
from packer_cli.options.shape_rules import for_shape
from packer_cli.options.shapes import Shape
from packer_cli.packing.window import trained_in
from packer_cli.plan.sample import PartReader, SamplePart, sampled, weight_of
from packer_cli.progress import Progress
from packer_cli.records import FILE, POSITION, TURNS, Documents, InputFile, Int64, Notify, WorkUnit
from packer_cli.result.columns import PARTS, stored_batch_rows, stored_schema, values_type
from packer_cli.result.counts import Counts, InputTotals, powers_histogram
from packer_cli.result.layout import Shard
from packer_cli.result.manifest import by_source, load_tokenized
from packer_cli.result.reader import Lists, as_batch
from packer_cli.run.compare import plan_addition
from packer_cli.run.finalize import check_limits, nothing_to_pack, totals_of_rows
from packer_cli.run.pipeline import resolve_run
from packer_cli.run.pool import Reporter
from packer_cli.run.recipe import naming, rows_of, tokens_of, tokens_root
from packer_cli.run.run_plan import RunPlan
from packer_cli.run.unit import NOWHERE, UnitContext, UnitPacker, UnitRows, pack_unit

LENGTHS = "lengths"  # the kind of shape of a table of lengths, which `lengths.py` plans
_END = 8  # bytes of a shard after its last batch
_BATCH_TOKENS = 1 << 20


@dataclass(frozen=True)
class Plan:
    """Planned outcomes of packing some inputs.

    tokenizer  its name; None if none is needed
    outcomes   one for each configuration; these differ in max_length and strategy
    sample     the requested share of the inputs; None: all
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
    """Planned outcome of one configuration.

    totals           as in a manifest: rows, utilization, lower_bound_rows and so on
    planned          counts of all units
    units            numbers of planned units and of all units
    share            of the inputs' bytes that were read
    standard_errors  of "rows" and "utilization", None if unknown; empty if nothing is estimated
    choice           documents of a recipe's sources
    """

    config: PackConfig
    totals: dict[str, Any]
    planned: PlannedTotals
    units: tuple[int, int]
    share: float = 1.0
    standard_errors: dict[str, float | None] = field(default_factory=dict)
    choice: Choice | None = None

    @property
    def by_source(self) -> list[dict[str, Any]]:
        """Counts of each source in rows."""
        sources = self.choice.sources if self.choice else ()
        return by_source(sources, self.planned.file, ("documents", "tokens", "trained_tokens"))


@dataclass(frozen=True)
class Planning:
    """A request to plan, without writing anything.

    options  as in `pipeline.pack`, whose errors are raised, too
    sample   share of the inputs to read, about, more than 0: figures are estimates. None: all
    """

    options: EncodingOptions
    sample: float | None = None
    show_progress: bool = False

    def plan(
        self, inputs: list[str], configs: Sequence[PackConfig], tokenizer: str | None = None
    ) -> Plan:
        """Plan the outcome of `inputs` with each of `configs`: several lengths and strategies."""
        begin_stdin()
        discovered = find_inputs(inputs, configs[0], self.options.notify)
        run = resolve_run(discovered, configs[0], tokenizer, self.options)
        first, files = run.row_config, [*run.files]
        configs = [first, *(for_shape(config, run.shape) for config in configs[1:])]
        passes = _passes(files, configs, self.sample)
        if len(passes) > 1 and any(file.path == STDIN for file in files):
            raise UsageError(
                "-: stdin can be read once, and these lengths or strategies have other work units",
                "write the data to a file and name that, or plan one --max-length at a time",
            )
        if len(passes) > 1 and not is_tokenized(files):
            why = "work units differ with the length of rows and the strategy"
            self.options.notify(f"reads the inputs {len(passes)} times: {why}")
        _note_beginnings(files, passes, self.options.notify)
        # each pass would repeat the notes of tokenizers
        once = replace(self, options=replace(self.options, notify=cache(self.options.notify)))
        size = sum(int(sum(file.size for file in files) * pass_.share) for pass_ in passes)
        by_config: dict[PackConfig, Outcome] = {}
        with Progress(size, show=self.show_progress, doing="planning") as progress:
            for pass_ in passes:
                run = replace(run, config=pass_.configs[0], units=pass_.units)
                plans = once._plans_of(run, pass_, progress)
                for place, config in enumerate(pass_.configs):
                    _check(config, [(plan.planned[place], plan.copies) for plan in plans])
                    outcome = _outcome_of(config, plans, place, pass_)
                    by_config[config] = replace(outcome, choice=choice_of(files, config))
        outcomes = [by_config[config] for config in configs]
        if any(outcome.planned.rows for outcome in outcomes):
            return Plan(files, run.shape, run.chosen.name, outcomes, self.sample)
        if any(outcome.share < 1 for outcome in outcomes):  # documents are larger than the sample
            return replace(self, sample=None).plan(inputs, configs, tokenizer)
        raise DataError(*nothing_to_pack(outcomes[0].planned, first))

    def plan_recipe(
        self, recipe: Recipe, destination: Path | str, configs: Sequence[PackConfig]
    ) -> list[tuple[str | None, Plan]]:
        """Plan the outcome of `pack_recipe` with each of `configs`.

        Returns (side, plan) for each side of the split, or one plan with side None. Raises
        UsageError if a source was not tokenized by a run into `destination`, or has changed since.
        """
        # notes about the inputs were printed when these were tokenized
        options = replace(self.options, warn=cache(self.options.warn))
        silent = replace(options, notify=lambda message: None)
        tokens = tokens_of(recipe, tokens_root(recipe, destination), silent.notify)
        for source in tokens:
            if not source.files:
                continue
            with naming(recipe, source.source):
                (to,) = map(Path, source.directories)
                if not source.is_tokenized:
                    raise UsageError(
                        f"{to}: not there yet: a recipe is planned from its tokenized sources",
                        f"run packer pack {recipe.path}, which tokenizes them; if it did so "
                        "elsewhere, name the folder: --tokenized DIR",
                    )
                run = resolve_run(source.files, source.config, recipe.tokenizer, silent)
                _refuse_stale(to, run, recipe.path)
        once = replace(self, options=options)
        sides = rows_of(recipe, tokens, configs)
        return [(side, once.plan(inputs, of_side)) for side, inputs, of_side in sides]

    def _plans_of(self, run: RunPlan, pass_: _PlanPass, progress: Progress) -> list[PartPlan]:
        """Plan the parts of a pass, in their order."""
        context = UnitContext.reporting(run, NOWHERE, self.options, progress)
        plan = partial(plan_part, context, pass_.configs, pass_.full_weight)
        pool = context.pool(plan, partial(_described, context))
        try:
            with closing(pool), closing(pool.map(pass_.parts)) as planned:
                plans = dict(planned)
        except Interrupted as error:
            again = "nothing was written; run the same command again"
            raise Interrupted(error.message, again) from error
        return [plans[place] for place in range(len(pass_.parts))]


def _refuse_stale(to: Path, run: RunPlan, recipe: str) -> None:
    """Raise UsageError if a run of its source would write another tokenized directory now."""
    why = "its inputs have changed, or its limits, since they were tokenized"
    tip = f"run packer pack {recipe} --add, which tokenizes what is new or has changed"
    try:
        adding = RunOptions(add=True, exact=True)  # as sources of a recipe are tokenized
        if plan_addition(to, load_tokenized(to), run, adding) is None:
            return
    except UsageError as error:
        why = f"was tokenized otherwise: {error.message}"
        tip = f"to tokenize it again, run packer pack {recipe} --overwrite"
    raise UsageError(f"{to}: {why}", tip)


@dataclass(frozen=True)
class _PlanPass:
    """A pass over the inputs: work units, planned parts, and configurations with these units."""

    units: tuple[WorkUnit, ...]
    parts: list[SamplePart]
    configs: list[PackConfig]

    @property
    def share(self) -> float:
        """Estimated share of the inputs' bytes that is read."""
        if all(part.is_work_unit for part in self.parts) and len(self.parts) == len(self.units):
            return 1.0
        read = sum(part.weight_of() for part in self.parts)
        return min(read / weight_of(self.units), 1.0)

    @property
    def full_weight(self) -> float:
        """Bytes of text that a part is repeated to, as many as in a unit, or in a small one."""
        small = max(unit_bytes_of(config, 0) for config in self.configs)
        return min(weight_of(self.units) / len(self.units), small)


def _passes(
    files: list[InputFile], configs: Sequence[PackConfig], sample: float | None
) -> list[_PlanPass]:
    by_cut: dict[Hashable, _PlanPass] = {}
    for config in configs:
        units = tuple(work_units(files, config))
        length = config.max_length if config.overlong == "truncate-turns" else None
        # options that decide which documents a unit has, and their order; with a mixture, all may
        key: Hashable = config
        if not config.mixture:
            key = length, config.shuffle and is_tokenized(files)
        if (units, key) not in by_cut:
            by_cut[units, key] = _PlanPass(units, sampled(files, units, sample, config), [])
        by_cut[units, key].configs.append(config)
    return list(by_cut.values())


def _note_beginnings(
    files: Sequence[InputFile], passes: Sequence[_PlanPass], notify: Notify
) -> None:
    """Notify of files that are read from their beginning, because they cannot be cut."""
    parts = [part for pass_ in passes for part in pass_.parts if part.limits]
    read = {slice_.file for part in parts for slice_ in part.unit.slices if slice_.is_whole}
    if begun := [file for file in files if file.index in read]:
        kind = "compressed" if begun[0].compression else begun[0].format
        notify(
            f"{named([file.path for file in begun], 1)}: sampled from the beginning on: {kind} "
            "files cannot be read from the middle"
        )


def _check(config: PackConfig, planned: Sequence[tuple[PlannedTotals, int]]) -> None:
    """Raise the errors of the end of a run. `planned`: totals and copies of each part."""
    bad, records, total = 0, 0, PlannedTotals()
    for part, copies in planned:
        total.add(part)
        bad += -(-part.rejected_records // copies)  # files that are left out count once
        records += (part.documents + part.empty_documents + part.dropped_documents) // copies
    check_limits(config, total, bad, records + bad, "fix the input, or name a larger limit")


def _outcome_of(
    config: PackConfig, plans: Sequence[PartPlan], place: int, pass_: _PlanPass
) -> Outcome:
    """Add up the plans of all units, or estimate them from some. `place`: of the configuration."""
    planned, share = [plan.planned[place] for plan in plans], pass_.share
    counted = min(len(plans), len(pass_.units)), len(pass_.units)
    if share == 1:
        total = _sum(config, planned)
        return Outcome(config, totals_of_rows(config, total), total, counted)
    weight = weight_of(pass_.units)
    factor = weight / (sum(plan.weight for plan in plans) or 1)
    rows, tokens, sizes = (
        [factor * figure for figure in figures]
        for figures in zip(
            *((part.rows, part.tokens, plan.weight)
              for part, plan in zip(planned, plans, strict=True)), strict=True
        )
    )  # fmt: skip
    errors = {
        "rows": _error_of_ratio(rows, sizes, share, weight),
        "utilization": _error_of_ratio(tokens, rows, share, 1 / config.max_length),
    }
    # in thousandths, so that many small counts are not all rounded
    fine = _sum(config, [part.times(factor * 1000) for part in planned])
    bound = round(totals_of_rows(config, fine)["lower_bound_rows"] / 1000)
    total = fine.times(1 / 1000)
    totals = totals_of_rows(config, total) | {"lower_bound_rows": bound}
    return Outcome(config, totals, total, counted, share, errors)


def _sum(config: PackConfig, planned: Sequence[PlannedTotals]) -> PlannedTotals:
    total = PlannedTotals(piece_length=np.zeros(config.max_length + 1, np.int64))
    for part in planned:
        total.add(part)
    return total


def _error_of_ratio(
    parts: Sequence[float], sizes: Sequence[float], share: float, times: float
) -> float | None:
    """Return the standard error of sum(parts) / sum(sizes), multiplied by `times`.

    The sample is without replacement and a `share` of all (Cochran 1977, "Sampling techniques",
    section 6.4). Returns None for a single part.
    """
    whole = sum(sizes)
    if len(parts) < 2 or not whole:
        return None
    ratio = sum(parts) / whole
    left = [part - ratio * size for part, size in zip(parts, sizes, strict=True)]
    return times * math.sqrt((1 - share) * len(parts) * statistics.variance(left)) / whole


# Parts: documents are read once and planned for several configurations


class PlannedTotals(Counts):
    """Counts of the planned result of one configuration; they add up over units.

    shards, bytes  number of files, and their size
    attention      the sum of the squared segment lengths
    cut_documents  documents in several segments
    read_lengths   int64[32], documents by powers of two of their lengths, before any is cut,
                   truncated or dropped; their tokens are `encoded_tokens`
    """

    shards: int = 0
    bytes: int = 0
    attention: int = 0
    cut_documents: int = 0
    read_lengths: Int64 = msgspec.field(
        default_factory=lambda: powers_histogram(np.empty(0, np.int64))
    )

    def times(self, factor: float) -> PlannedTotals:
        """Return the counts of `factor` times as many records; costs between rows stay."""

        def times(value: Any) -> Any:
            if isinstance(value, int):
                return round(value * factor)
            if isinstance(value, np.ndarray):
                return np.rint(value * factor).astype(np.int64)
            if isinstance(value, InputTotals):
                return InputTotals(*map(times, structs.astuple(value)))
            if isinstance(value, dict):
                return {name: times(part) for name, part in value.items()}
            return value

        return PlannedTotals(**{name: times(value) for name, value in structs.asdict(self).items()})


@dataclass(frozen=True)
class PartPlan:
    """Plan of a part, for each configuration. `weight`: bytes of text that the counts stand for;
    `copies`: how often the documents were planned.
    """

    weight: float
    copies: int
    planned: list[PlannedTotals]


def plan_part(
    context: UnitContext, configs: Sequence[PackConfig], full: float, part: SamplePart
) -> PartPlan:
    """Plan, in a worker, the rows that `pack_unit` writes with each of the configurations, which
    differ in nothing that concerns documents. `full`: bytes of text to repeat a smaller part to.
    """

    def plan(unit: WorkUnit, context: UnitContext) -> PartPlan:
        planner = PartPlanner(context, configs, part, full)
        pack_unit(unit, context, planner)
        return planner.plan()

    planned = context.without_damaged(part.unit, plan)
    context.source.confirm()
    return planned


def _described(context: UnitContext, part: SamplePart) -> str:
    return context.described(part.unit)


class PartPlanner(UnitPacker):
    """Plans the rows of the documents of a part, with each of the configurations.

    A part is repeated to about the size of its unit, or of a small unit: the share of rows that are
    not full, and all else that depends on the number of documents, is then as in the unit.
    """

    def __init__(
        self, context: UnitContext, configs: Sequence[PackConfig], part: SamplePart, full: float
    ) -> None:
        super().__init__(part.unit, context)
        self._part, self._full = part, full
        self._reader = self.read = PartReader(context.source.read, part)
        self.is_sample = not part.is_work_unit
        self._planned = [PlannedTotals() for _ in configs]
        self._rows = [
            UnitRows(part.unit, context, config, RowCounter(config, context, planned))
            for config, planned in zip(configs, self._planned, strict=True)
        ]
        for rows in self._rows[1:]:  # progress counts the tokens of one configuration
            rows.progress = Reporter()
        self._kept, self._read = list[Documents](), PlannedTotals()
        self._copies, self._weight = 1, float(weight_of([part.unit]))

    def add(self, batch: Documents) -> None:
        sizes = np.diff(batch.offsets)
        self._read.read_lengths += powers_histogram(sizes[sizes > 0])
        # rows are planned from lengths, and a window without tokens is small
        trained, context = batch.trained, self.context
        if (
            trained is None
            and context.source.tokenized is None
            and context.run.shape.kind != "text"
        ):
            # other batches may have untrained tokens
            trained = np.ones(int(batch.offsets[-1]), np.uint8)
        places = {name: batch.of_documents[name] for name in (FILE, POSITION, TURNS)
                  if name in batch.of_documents}  # fmt: skip
        lengths = Documents.of(None, batch.offsets, trained).beside({}, places)
        if not self._part.is_work_unit:
            self._kept.append(lengths)
            return
        for rows in self._rows:
            rows.add(lengths)

    def close(self) -> list[Shard]:
        if not self._part.is_work_unit and self._reader.weight:  # 0 if all is damaged
            self._weight = self._reader.weight + self._part.weight_of(self.context.damaged)
            self._copies = max(round(self._full / self._weight), 1)
        for batch in _repeated(self._kept, self._copies):
            for rows in self._rows:
                rows.add(batch)
        return [shard for rows in self._rows for shard in rows.close()]

    def abandon(self) -> None:
        super().abandon()
        for rows in self._rows:
            rows.abandon()

    def plan(self) -> PartPlan:
        """Return the plan, after `close`."""
        copies = self._copies
        self._read.add(self.counts)
        read = self._read.times(copies)
        again = read.rejected_files - read.rejected_files // copies  # files are left out once
        read.rejected_records -= again
        read.rejected_files -= again
        for planned, rows in zip(self._planned, self._rows, strict=True):
            planned.add(rows.counts)
            planned.add(read)
            planned.cut_documents = rows.cut_documents
        return PartPlan(self._weight * copies, copies, self._planned)


def _repeated(batches: Sequence[Documents], copies: int) -> Iterator[Documents]:
    """Yield all batches `copies` times, in batches of no more tokens than a run has."""
    tokens = sum(int(batch.offsets[-1]) for batch in batches)
    most = max(_BATCH_TOKENS // max(tokens, 1), 1)
    for first in range(0, copies, most):
        times = min(most, copies - first)
        yield from (batch.repeat(times) for batch in batches)


class RowCounter:
    """A writer that counts rows. OUT planned: shards, and the cost of attention."""

    rows_at_once = 0  # no tokens are needed

    def __init__(self, config: PackConfig, context: UnitContext, planned: PlannedTotals) -> None:
        self._planned = planned
        self._batch, self._most = stored_batch_rows(config), config.shard_bytes
        if config.view:
            self._most = sys.maxsize
        self._schema = stored_schema(config, context.pad_token_id, context.tokenizer_sha256)
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
        """Do nothing: no file is open."""


def _batch_bytes(schema: Any, rows: int, segments: int) -> int:
    """Return the bytes of a record batch in a shard, from zeros that are never touched."""
    columns = dict[str, Any]()
    for column in schema:
        name, kind = column.name, column.type
        if pa.types.is_fixed_size_list(kind):
            columns[name] = np.zeros((rows, kind.list_size), values_type(kind))
            continue
        ends = np.zeros(rows + 1, np.int64)
        ends[-1] = segments + (rows if name in ("cu_seqlens", PADDED_BOUNDARIES) else 0)
        parts = PARTS if name == "segments" else {name: values_type(kind)}
        columns |= {part: Lists(np.zeros(ends[-1], type_), ends) for part, type_ in parts.items()}
    return int(pa.ipc.get_record_batch_size(as_batch(columns, schema)))
