"""`packer plan`: what would come out of inputs, for each length of rows and each strategy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from typing import Any

import packer_cli
from packer_cli.inputs.tokenized import is_tokenized
from packer_cli.options.shape_rules import trained_on
from packer_cli.options.shapes import kinds_of
from packer_cli.plan.run import Outcome, Plan, by_sources
from packer_cli.reports.report import (
    Fact,
    Part,
    Report,
    Section,
    SourceLine,
    Table,
    Text,
    document_lengths,
    row_fill,
    table_of_sources,
)
from packer_cli.reports.stats import figures_of_rows
from packer_cli.result.manifest import sources_as_json
from packer_cli.result.wording import count, directories, percent, plural, size

_BOUND = "The lower bound is a number of rows below which no packer can go."
_Columns = dict[str, Callable[[Outcome], str]]  # by their titles


def plan_report(plan: Plan, title: str, batch_tokens: int | None, hidden_size: int) -> Report:
    """`title`: whose plan it is. With `batch_tokens` in a step, the steps of an epoch are told."""
    outcomes = plan.outcomes
    lengths = {one.config.max_length for one in outcomes}
    documents = document_lengths(outcomes[0].planned.read_lengths.tolist(), sorted(lengths))
    losses: list[Part] = [_table(columns, outcomes) for columns in _losses(plan)]
    fills = [
        row_fill(one.totals["histograms"]["row_fill"], _name(one, outcomes)) for one in outcomes
    ]
    parts = [_table(_ROWS, outcomes), _table(_costs(batch_tokens, hidden_size), outcomes)]
    return Report(
        title,
        [*_facts(plan)],
        _content(plan, batch_tokens, hidden_size),
        f"planned by packer {packer_cli.__version__}",
        sections=[
            Section("Utilization", [_utilization(outcomes)], only="page"),
            Section("What would come out", [*parts, Text(_BOUND)]),
            Section("Cut, truncated or dropped",
                    losses or [Text("No document is cut, truncated or dropped.")]),
            *_sources(plan),
            Section("Document length", [documents], only="page"),
            Section("Row fill", fills, only="page"),
        ],
    )  # fmt: skip


def _facts(plan: Plan) -> Iterator[Fact]:
    """Facts about what was read."""
    number, taken = len(plan.files), sum(file.size for file in plan.files)
    if is_tokenized(plan.files):  # what is trained on is each directory's own
        yield Fact("made from", directories(number))
    else:
        yield Fact("made from", f"{plural(number, 'input')}, {size(taken)}")
        trained = trained_on(plan.config, plan.shape)
        yield Fact("records", f"{kinds_of(plan.shape)}; trained on: {trained}")
    yield Fact("tokenizer", plan.tokenizer or "none needed")
    read = plan.outcomes[0].planned
    yield Fact("documents", f"{read.read_documents:,} with {read.read_tokens:,} tokens")
    totals = plan.outcomes[0].totals
    if empty := totals["empty_documents"]:
        yield Fact("empty", f"{empty:,} documents without a token")
    if bad := totals["rejected_records"]:
        yield Fact("rejected", f"{bad:,} bad records")
    if plan.sample is not None:
        yield Fact("sample", _sampled(plan))


def _sampled(plan: Plan) -> str:
    counts = dict.fromkeys((*one.units, one.share) for one in plan.outcomes)
    if all(share == 1 for *_, share in counts):
        return "everything was read: nothing is estimated"
    shown = ", ".join(
        f"{percent(share)} of the bytes, from {read:,} of {units:,} work units"
        for read, units, share in counts
    )
    if not any(one.standard_errors for one in plan.outcomes):
        return f"{shown}: all figures are estimates"
    return f"{shown}; ± is a standard error"


def _table(columns: _Columns, outcomes: Sequence[Outcome]) -> Table:
    """A line for each outcome."""
    shown: _Columns = {"max length": lambda one: count(one.config.max_length)}
    if len({one.config.strategy for one in outcomes}) > 1:
        shown["strategy"] = lambda one: one.config.strategy
    shown |= columns
    rows = [[written(one) for written in shown.values()] for one in outcomes]
    return Table("", [*shown], rows, text=["strategy"], names_first=True)


def _utilization(outcomes: Sequence[Outcome]) -> Table:
    table = _table({"utilization": lambda one: percent(one.utilization)}, outcomes)
    bars = [[1 - one.utilization] for one in outcomes]
    return Table("", table.head, table.rows, table.text, drawn="padding", bars=bars)


def _with_error(one: Outcome, name: str, figure: str, form: str) -> str:
    error = one.standard_errors.get(name)
    if error is None:
        return figure
    return f"{figure} ± {'?' if math.isnan(error) else form.format(error)}"


def _of_one_length(one: Outcome) -> str:
    share = one.mixedness.get("one_length")
    return "-" if share is None else percent(share)


_ROWS: _Columns = {
    "rows": lambda one: _with_error(one, "rows", count(one.rows), "{:,.0f}"),
    "utilization": lambda one: _with_error(one, "utilization", percent(one.utilization), "{:.2%}"),
    "above bound": lambda one: percent(one.above_bound),
    "of one length": _of_one_length,
}


def _costs(batch_tokens: int | None, hidden_size: int) -> _Columns:
    columns: _Columns = {
        "segments in a row": lambda one: f"{one.segments_per_row:,.2f}",
        "on disk": lambda one: size(one.planned.bytes),
        "attention span": lambda one: f"{one.attention_span:,.0f}",
        "attention share": lambda one: percent(one.attention_share(hidden_size)),
    }
    if batch_tokens is not None:
        columns["steps of an epoch"] = lambda one: count(one.steps(batch_tokens))
    return columns


def _losses(plan: Plan) -> Iterator[_Columns]:
    """Tables of what is cut, truncated and dropped, where anything is."""
    if any(one.planned.cut_documents for one in plan.outcomes):
        yield {"documents cut": lambda one: count(one.planned.cut_documents)}
    for what, tokens in (("truncated", "tokens cut off"), ("dropped", "their tokens")):
        if any(one.totals[f"{what}_documents"] for one in plan.outcomes):
            columns = {
                f"documents {what}": _total(f"{what}_documents"),
                tokens: _total(f"{what}_tokens"),
            }
            if plan.config.train_on != "all":
                columns["of these trained"] = _total(f"{what}_trained_tokens")
            yield columns


def _total(name: str) -> Callable[[Outcome], str]:
    return lambda one: count(one.totals[name])


def _name(one: Outcome, outcomes: Sequence[Outcome]) -> str:
    """A name that tells an outcome from the others."""
    several = len({other.config.strategy for other in outcomes}) > 1
    return f"{count(one.config.max_length)}{', ' + one.config.strategy if several else ''}"


def _sources(plan: Plan) -> Iterator[Section]:
    """Tables of what rows have of sources, once for lengths where it is the same."""
    groups, tables = by_sources(plan.outcomes), list[Part]()
    counted = plan.config.mixture.counted if plan.config.mixture else "tokens"
    for outcomes, sources in groups:
        lengths = ", ".join(dict.fromkeys(count(one.config.max_length) for one in outcomes))
        at = f" at max_length {lengths}" if len(groups) > 1 else ""
        lines = [
            SourceLine(
                one.facts.name,
                {"documents": one.documents, "tokens": one.tokens, "trained": one.trained_tokens},
                one.facts.epochs, asked, reached,
            )
            for one, asked, reached in sources
        ]  # fmt: skip
        tables.append(table_of_sources(f"sources{at}, in shares of {counted}", lines))
    if tables:
        yield Section("Sources", tables)


def _content(plan: Plan, batch_tokens: int | None, hidden_size: int) -> dict[str, Any]:
    """The plan for programs; names that `packer stats --json` has mean the same."""
    files, read = plan.files, plan.outcomes[0].planned
    return {
        "inputs": {"count": len(files), "bytes": sum(file.size for file in files)},
        "tokenizer": plan.tokenizer,
        "shape": plan.shape.kind,
        "documents": read.read_documents,
        "tokens": read.read_tokens,
        "document_length": read.read_lengths.tolist(),
        "sample": plan.sample,
        "hidden_size": hidden_size,
        "batch_tokens": batch_tokens,
        "outcomes": [_figures(one, batch_tokens, hidden_size) for one in plan.outcomes],
    }


def _figures(one: Outcome, batch_tokens: int | None, hidden_size: int) -> dict[str, Any]:
    counts, costs = one.planned, dict[str, tuple[int, ...]]()
    if one.config.balance != "none" and one.rows:
        sides = {"before": counts.attention_before, "after": counts.attention_after}
        costs = {side: astuple(cost) for side, cost in sides.items()}
    return figures_of_rows(one.totals, one.config, costs) | {
        "overlong": one.config.overlong,
        "shards": one.planned.shards,
        "bytes": one.planned.bytes,
        "cut_documents": one.planned.cut_documents,
        "segments_per_row": one.segments_per_row,
        "attention_span": one.attention_span,
        "attention_share": one.attention_share(hidden_size),
        "steps": None if batch_tokens is None else one.steps(batch_tokens),
        "units_read": one.units[0],
        "units": one.units[1],
        "share_read": one.share,
        "standard_errors": {
            name: None if math.isnan(error) else error
            for name, error in one.standard_errors.items()
        },
        "histograms": one.totals["histograms"],
        **_figures_of_sources(one),
    }


def _figures_of_sources(one: Outcome) -> dict[str, Any]:
    if not one.sources:
        return {}
    names = "documents", "tokens", "trained_tokens"
    return {
        "sources": sources_as_json([source.facts for source in one.sources]),
        "by_source": [
            {"name": source.facts.name} | {name: getattr(source, name) for name in names}
            for source in one.sources
        ],
        "missed_shares": [vars(share) for share in one.shares if share.is_missed],
    }
