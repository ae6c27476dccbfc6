"""The page of `packer plan`: what would come out, for each length of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import packer_cli
from packer_cli.page.charts import Curve, curves, legend
from packer_cli.page.document import boxes, facts, page, section, table
from packer_cli.page.histograms import document_lengths, row_fill_caption, row_fill_chart
from packer_cli.page.markup import Markup, element
from packer_cli.page.sources import Portion, sources
from packer_cli.result.wording import count, percent, size


@dataclass(frozen=True)
class Outcome:
    """What would come out of one max_length, strategy and way with overlong documents.

    The totals are those of the same names in a manifest; `tokens` are those placed in rows.

    cut_documents    split over several rows
    bytes            of the shards
    row_fill         int[21], as in a manifest
    attention_span   E[l²] / E[l] over segments: tokens in the segment of the average token
    attention_share  of attention in what a step costs, 0 to 1; None: not known
    steps            of an epoch; None: no batch size was given
    standard_errors  name of a field, or "utilization" -> its standard error, of a sample
    """

    max_length: int
    strategy: str
    overlong: str
    rows: int
    lower_bound_rows: int
    documents: int
    segments: int
    tokens: int
    bytes: int
    row_fill: Sequence[int]
    cut_documents: int = 0
    truncated_documents: int = 0
    truncated_tokens: int = 0
    truncated_trained_tokens: int = 0
    dropped_documents: int = 0
    dropped_tokens: int = 0
    dropped_trained_tokens: int = 0
    attention_span: float | None = None
    attention_share: float | None = None
    steps: int | None = None
    standard_errors: Mapping[str, float] = field(default_factory=dict)

    @property
    def utilization(self) -> float:
        """0 where nothing is left to pack."""
        return self.tokens / max(self.rows * self.max_length, 1)


@dataclass(frozen=True)
class PlanReport:
    """What the page shows. Nothing is computed from it but shares and distances.

    title            whose plan it is: the inputs
    made_from        (what, how it was), as `stats.origin.origin_lines` gives them
    documents        that rows are planned of, before any is cut, truncated or dropped
    tokens           of these documents
    document_length  int[32], as in a manifest
    outcomes         in the order of the table, at least one
    sample           the share of the inputs that was read; None: all of them
    sources          (of which max_lengths, portions), once for lengths where they are the same
    counted          what the shares of sources are of
    """

    title: str
    made_from: Sequence[tuple[str, str]]
    documents: int
    tokens: int
    document_length: Sequence[int]
    outcomes: Sequence[Outcome]
    sample: float | None = None
    sources: Sequence[tuple[str, Sequence[Portion]]] = ()
    counted: str = "tokens"


class _Column(NamedTuple):
    """Of the table. A column that `is_shown` for no outcome is left out."""

    title: str
    written: Callable[[Outcome], str]
    is_shown: Callable[[Outcome], bool] = lambda _: True


def plan_page(report: PlanReport) -> bytes:
    """The page as a file's content."""
    outcomes = report.outcomes
    known = [
        ("documents", count(report.documents), "before any is cut, truncated or dropped"),
        ("tokens", count(report.tokens), "of these documents"),
    ]
    if report.sample is not None:
        known.append(("sample", percent(report.sample), "of the inputs; ± is a standard error"))
    lengths = sorted({outcome.max_length for outcome in outcomes})
    return page(
        f"Plan of {report.title}",
        boxes(known),
        section("Utilization", *_utilization(outcomes)),
        section("What would come out", _table(_ROWS, outcomes), element("p", _BOUND)),
        section("Cut, truncated or dropped", _losses(outcomes)),
        *_sources(report),
        section("Document lengths", document_lengths(report.document_length, lengths)),
        section("Row fill", *_row_fill(outcomes)),
        section("Made from", facts(report.made_from)),
        footer=f"planned by packer {packer_cli.__version__}",
    )


def _sources(report: PlanReport) -> list[Markup]:
    if not report.sources:
        return []
    several = len(report.sources) > 1
    drawn = [
        sources(f"sources-{number}", portions, report.counted,
                f"max_length {lengths}" if several else "")
        for number, (lengths, portions) in enumerate(report.sources)
    ]  # fmt: skip
    return [section("Sources", *drawn)]


def _utilization(outcomes: Sequence[Outcome]) -> list[Markup]:
    shown: dict[str, Curve] = {}
    for one in outcomes:
        name = _way(one, outcomes) or one.strategy
        shown.setdefault(name, Curve(name, [])).points.append((one.max_length, one.utilization))
    lines = list(shown.values())
    best = max(outcomes, key=lambda one: one.utilization)
    caption = (
        f"The share of all positions in rows that hold real tokens: at most "
        f"{percent(best.utilization)}, with max_length {_name(best, outcomes)}."
    )
    chart = curves(
        "utilization", "Utilization over row length", caption, lines, "max_length (logarithmic)"
    )
    return [element("figure", element("figcaption", caption), legend(lines), chart)]


def _way(one: Outcome, outcomes: Sequence[Outcome]) -> str:
    """What tells the outcomes of one length apart: "" where there is nothing to tell."""
    ways = (one.strategy, one.overlong)
    differ = (
        len({other.strategy for other in outcomes}) > 1,
        len({other.overlong for other in outcomes}) > 1,
    )
    return ", ".join(
        way for way, is_one_of_several in zip(ways, differ, strict=True) if is_one_of_several
    )


def _name(one: Outcome, outcomes: Sequence[Outcome]) -> str:
    way = _way(one, outcomes)
    return f"{count(one.max_length)}{way and ', '}{way}"


def _table(columns: Sequence[_Column], outcomes: Sequence[Outcome]) -> Markup:
    columns = [column for column in columns if any(map(column.is_shown, outcomes))]
    rows = [
        (_name(one, outcomes), *(column.written(one) for column in columns)) for one in outcomes
    ]
    return table("", ("max_length", *(column.title for column in columns)), rows)


def _counted(name: str) -> Callable[[Outcome], str]:
    """A figure with its standard error, if it has one."""

    def written(one: Outcome) -> str:
        error = one.standard_errors.get(name)
        figure = count(getattr(one, name))
        return figure if error is None else f"{figure} ± {error:,.0f}"

    return written


def _filled(one: Outcome) -> str:
    error = one.standard_errors.get("utilization")
    return percent(one.utilization) + ("" if error is None else f" ± {percent(error)}")


def _loss(title: str, name: str) -> _Column:
    return _Column(title, _counted(name), lambda one: getattr(one, name) > 0)


def _known(title: str, name: str, form: Callable[[Any], str]) -> _Column:
    """Of what is not known of every outcome."""

    def written(one: Outcome) -> str:
        figure = getattr(one, name)
        return "" if figure is None else form(figure)

    return _Column(title, written, lambda one: getattr(one, name) is not None)


def _trained(one: Outcome) -> int:
    return one.truncated_trained_tokens + one.dropped_trained_tokens


def _above(one: Outcome) -> str:
    return percent((one.rows - one.lower_bound_rows) / max(one.lower_bound_rows, 1))


_BOUND = "The lower bound is a number of rows below which no packer can go."
_ROWS = (
    _Column("rows", _counted("rows")),
    _Column("utilization", _filled),
    _Column("above the lower bound", _above),
    _Column("segments in a row", lambda one: f"{one.segments / max(one.rows, 1):,.2f}"),
    _Column("on disk", lambda one: size(one.bytes)),
    _known("attention span in tokens", "attention_span", lambda tokens: f"{tokens:,.0f}"),
    _known("attention in a step's cost", "attention_share", percent),
    _known("steps", "steps", count),
)
_LOSSES = (
    _loss("documents cut", "cut_documents"),
    _loss("documents truncated", "truncated_documents"),
    _loss("tokens cut off", "truncated_tokens"),
    _loss("documents dropped", "dropped_documents"),
    _loss("tokens dropped", "dropped_tokens"),
    _Column("trained tokens lost", lambda one: count(_trained(one)), lambda one: _trained(one) > 0),
)


def _losses(outcomes: Sequence[Outcome]) -> Markup:
    if not any(column.is_shown(one) for column in _LOSSES for one in outcomes):
        return element("p", "No document is cut, truncated or dropped.")
    return _table(_LOSSES, outcomes)


def _row_fill(outcomes: Sequence[Outcome]) -> list[Markup]:
    """A small chart for each outcome, and one table of all."""
    charts = []
    for number, one in enumerate(outcomes):
        name = _name(one, outcomes)
        heading = element("h3", name)
        caption = element("figcaption", row_fill_caption(one.row_fill))
        chart = row_fill_chart(one.row_fill, f"row-fill-{number}", name, height=100)
        charts.append(element("figure", heading, caption, chart))
    steps = (("below 50%", 0, 10), ("50-75%", 10, 15), ("75-90%", 15, 18), ("90-95%", 18, 19),
             ("95-100%", 19, 20), ("full", 20, 21))  # fmt: skip
    rows = [
        (_name(one, outcomes), *(count(sum(one.row_fill[a:b])) for _, a, b in steps))
        for one in outcomes
    ]
    figures = table("rows by how full they are", ("max_length", *(s[0] for s in steps)), rows)
    return [element("div", *charts, class_="several"), figures]
