"""What would come out of a configuration: figures of all units, or estimates from some."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from msgspec import structs

from packer_cli.mixing.choice import Choice, Reached
from packer_cli.options.options import PackConfig
from packer_cli.plan.sample import weight_of
from packer_cli.plan.unit import Planned, UnitPlan
from packer_cli.records import WorkUnit
from packer_cli.result.counts import mixedness
from packer_cli.result.manifest import Source, shares
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

    def attention_share(self, hidden_size: int = HIDDEN_SIZE) -> float:
        """Share of attention in what a step costs, in a model of this hidden size."""
        rest = _PER_HIDDEN * hidden_size * self.rows * self.config.max_length
        return self.planned.attention / max(rest + self.planned.attention, 1)

    def steps(self, batch_tokens: int) -> int:
        """Steps of an epoch; the last one may have fewer rows."""
        return -(-self.rows // (batch_tokens // self.config.max_length))


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
        for figures in (
            [one.rows for one in planned],
            [one.tokens for one in planned],
            [plan.weight for plan in plans],
        )
    )
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
