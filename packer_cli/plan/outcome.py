"""What would come out of a configuration: figures of all units, or estimates from some."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from msgspec import structs

from packer_cli.config.options import PackConfig
from packer_cli.mixing.choice import Choice
from packer_cli.mixing.shares import Reached
from packer_cli.plan.sample import weight_of
from packer_cli.plan.unit import Documents, Planned, UnitPlan, scaled
from packer_cli.records import WorkUnit
from packer_cli.result.counts import Counts, mixedness
from packer_cli.result.manifest import Source
from packer_cli.result.sources import shares
from packer_cli.result.wording import count
from packer_cli.run.finalize import sources_of, totals_of_rows

HIDDEN_SIZE = 4096
_PER_HIDDEN = 6  # what a token costs, but for attention, for each hidden unit of a model


@dataclass(frozen=True)
class PlannedSource:
    """What rows have of a source. `facts`: as in a manifest."""

    facts: Source
    documents: int
    tokens: int
    trained_tokens: int


@dataclass(frozen=True)
class Outcome:
    """What would come out of one configuration.

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
        return self.planned.counts.rows

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
        return self.planned.counts.segments / max(self.rows, 1)

    @property
    def mixedness(self) -> dict[str, Any]:
        """As `packer stats` has it."""
        return mixedness(self.totals, self.totals["histograms"])

    @property
    def attention_span(self) -> float:
        """E[l²]/E[l]: how many tokens the segment of the average token has."""
        return self.planned.attention / max(self.planned.counts.tokens, 1)

    def attention_share(self, hidden_size: int = HIDDEN_SIZE) -> float:
        """Of attention in what a step costs, in a model of this hidden size."""
        rest = _PER_HIDDEN * hidden_size * self.rows * self.config.max_length
        return self.planned.attention / max(rest + self.planned.attention, 1)

    def steps(self, batch_tokens: int) -> int:
        """Of an epoch, the last one maybe with fewer rows."""
        return -(-self.rows // (batch_tokens // self.config.max_length))


def outcome_of(
    config: PackConfig, plans: Sequence[UnitPlan], place: int, units: Sequence[WorkUnit],
    share: float,
) -> Outcome:  # fmt: skip
    """Of all `units`, from the plans of some, or of parts of some, that are a `share` of their
    bytes. `place`: of the configuration in the plans.
    """
    planned = [plan.planned[place] for plan in plans]
    counted = len({plan.unit for plan in plans}), len(units)
    if share == 1:
        total = _sum(config, planned)
        return Outcome(config, totals_of_rows(config, total.counts), total, counted)
    factors = _factors_of(plans, units)
    # in thousandths: none of many small counts is rounded off
    fine = _sum(config, [_scaled(one, f * 1000) for one, f in zip(planned, factors, strict=True)])
    bound = round(totals_of_rows(config, fine.counts)["lower_bound_rows"] / 1000)
    estimated = _scaled(fine, 1 / 1000)
    rows, tokens, weights = (
        [factor * figure for factor, figure in zip(factors, figures, strict=True)]
        for figures in (
            [one.counts.rows for one in planned],
            [one.counts.tokens for one in planned],
            [plan.weight for plan in plans],
        )
    )
    of = [plan.unit for plan in plans]
    errors = {
        "rows": _error_of_ratio(rows, weights, of, share) * sum(weights),
        "utilization": _error_of_ratio(tokens, rows, of, share) / config.max_length,
    }
    totals = totals_of_rows(config, estimated.counts) | {"lower_bound_rows": bound}
    return Outcome(config, totals, estimated, counted, share, errors)


def _factors_of(plans: Sequence[UnitPlan], units: Sequence[WorkUnit]) -> list[float]:
    """What makes of the figures of each plan a part of those of all `units`. Those of a unit
    together stand for it, however many they are, and the units for those that were not read.
    """
    weights = {unit.index: weight_of(unit.slices) for unit in units}
    of_plans = dict.fromkeys((plan.unit for plan in plans), 0.0)
    for plan in plans:
        of_plans[plan.unit] += plan.weight
    more = sum(weights.values()) / (sum(weights[unit] for unit in of_plans) or 1)
    of_each = {unit: more * weights[unit] / (weight or 1) for unit, weight in of_plans.items()}
    return [of_each[plan.unit] for plan in plans]


def _sum(config: PackConfig, planned: Sequence[Planned]) -> Planned:
    total = Planned(Counts(piece_length=np.zeros(config.max_length + 1, np.int64)))
    for one in planned:
        total.add(one)
    return total


def with_sources(outcome: Outcome, choice: Choice) -> Outcome:
    """With what its rows have of each source."""
    planned = outcome.planned
    found = []
    for one in sources_of(choice):
        counts = [planned.counts.file(index) for index in range(*one.inputs)]
        names = ("documents", "tokens", "trained_tokens")
        found.append(
            PlannedSource(one, *(sum(getattr(own, name) for own in counts) for name in names))
        )
    return replace(outcome, sources=found, shares=choice.shares)


def estimated(outcome: Outcome, share: float, units: tuple[int, int]) -> Outcome:
    """Of all there is, from the outcome of a `share` of it. `units`: as in `Outcome`."""
    factor = 1 / share
    scaled = _scaled(outcome.planned, factor)
    bound = round(outcome.lower_bound_rows * factor)
    return replace(
        outcome,
        totals=totals_of_rows(outcome.config, scaled.counts) | {"lower_bound_rows": bound},
        planned=scaled,
        units=units,
        share=share,
        sources=[_grown(one, factor) for one in outcome.sources],
        shares=[
            replace(one, asked=one.asked * factor, taken=round(one.taken * factor))
            for one in outcome.shares
        ],
    )


def _grown(one: PlannedSource, factor: float) -> PlannedSource:
    names = ("documents", "available", "taken", "held_out_documents", "duplicate_documents")
    counts = {name: round(getattr(one.facts, name) * factor) for name in names}
    facts = structs.replace(one.facts, asked=one.facts.asked * factor, **counts)
    figures = (round(part * factor) for part in (one.documents, one.tokens, one.trained_tokens))
    return PlannedSource(facts, *figures)


def grown_documents(documents: Documents, factor: float) -> Documents:
    """Figures of `factor` times as many documents."""
    counts = round(documents.count * factor), round(documents.tokens * factor)
    return Documents(*counts, np.rint(documents.length * factor).astype(np.int64))


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


def lengths_of(outcomes: Sequence[Outcome]) -> str:
    """512, 1,024."""
    return ", ".join(dict.fromkeys(count(one.config.max_length) for one in outcomes))


def documents_in(plans: Sequence[UnitPlan], units: Sequence[WorkUnit]) -> Documents:
    """Those of all `units`, from the plans of some, or of parts of some."""
    of_all = [
        plan.documents.times(factor)
        for plan, factor in zip(plans, _factors_of(plans, units), strict=True)
    ]
    return Documents(
        sum(one.count for one in of_all),
        sum(one.tokens for one in of_all),
        np.sum([one.length for one in of_all], axis=0),
    )


def _scaled(planned: Planned, factor: float) -> Planned:
    """As of `factor` times as many units."""
    names = ("shards", "bytes", "attention", "cut_documents")
    others = {name: round(getattr(planned, name) * factor) for name in names}
    return replace(planned, counts=scaled(planned.counts, factor), **others)


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
