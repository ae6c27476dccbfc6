"""`packer plan`: what would come out of inputs, for each length of rows and each strategy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from typing import Any

from msgspec.structs import asdict

import packer_cli
from packer_cli.inputs.tokenized import is_tokenized
from packer_cli.options.shape_rules import trained_on
from packer_cli.options.shapes import kinds_of
from packer_cli.plan.run import Outcome, Plan
from packer_cli.reports.report import (
    Fact,
    Part,
    Report,
    Section,
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
_PER_HIDDEN = 6  # what a token costs, but for attention, for each hidden unit of a model
_Figures = dict[str, Any]  # of an outcome, as programs get them
_Columns = dict[str, Callable[[_Figures], str]]  # by their titles


def plan_report(plan: Plan, title: str, batch_tokens: int | None, hidden_size: int) -> Report:
    """`title`: whose plan it is. With `batch_tokens` in a step, the steps of an epoch are told."""
    outcomes = [_figures(one, batch_tokens, hidden_size) for one in plan.outcomes]
    files, read = plan.files, plan.outcomes[0].planned
    content = {
        "inputs": {"count": len(files), "bytes": sum(file.size for file in files)},
        "tokenizer": plan.tokenizer,
        "shape": plan.shape.kind,
        "documents": read.read_documents,
        "tokens": read.read_tokens,
        "document_length": read.read_lengths.tolist(),
        "sample": plan.sample,
        "hidden_size": hidden_size,
        "batch_tokens": batch_tokens,
        "outcomes": outcomes,
    }
    several = len({one["strategy"] for one in outcomes}) > 1
    fills = [
        row_fill(
            one["histograms"]["row_fill"],
            count(one["max_length"]) + (f", {one['strategy']}" if several else ""),
        )
        for one in outcomes
    ]
    drawn = _table({"utilization": lambda one: percent(one["utilization"])}, outcomes)
    bars = [[1 - one["utilization"]] for one in outcomes]
    used = Table("", drawn.head, drawn.rows, drawn.text, drawn="padding", bars=bars)
    lengths = sorted({one["max_length"] for one in outcomes})
    losses: list[Part] = [_table(columns, outcomes) for columns in _losses(plan, outcomes)]
    costs = _COSTS | _STEPS if batch_tokens is not None else _COSTS
    return Report(
        title,
        [*_facts(plan, content)],
        content,
        f"planned by packer {packer_cli.__version__}",
        sections=[
            Section("Utilization", [used], only="page"),
            Section("What would come out",
                    [_table(_ROWS, outcomes), _table(costs, outcomes), Text(_BOUND)]),
            Section("Cut, truncated or dropped",
                    losses or [Text("No document is cut, truncated or dropped.")]),
            *_sources(plan, outcomes),
            Section("Document length", [document_lengths(content["document_length"], lengths)],
                    only="page"),
            Section("Row fill", fills, only="page"),
        ],
    )  # fmt: skip


def _figures(one: Outcome, batch_tokens: int | None, hidden_size: int) -> _Figures:
    """An outcome for programs; names that `packer stats --json` has mean the same.

    attention_span   E[l²]/E[l]: how many tokens the segment of the average token has
    attention_share  of attention in what a step costs, in a model of this hidden size
    steps            of an epoch; the last one may have fewer rows
    """
    counts, config, costs = one.planned, one.config, dict[str, tuple[int, ...]]()
    if config.balance != "none" and counts.rows:
        sides = {"before": counts.attention_before, "after": counts.attention_after}
        costs = {side: astuple(cost) for side, cost in sides.items()}
    rest = _PER_HIDDEN * hidden_size * counts.rows * config.max_length
    figures = figures_of_rows(one.totals, config, costs) | {
        "overlong": config.overlong,
        "shards": counts.shards,
        "bytes": counts.bytes,
        "cut_documents": counts.cut_documents,
        "segments_per_row": counts.segments / max(counts.rows, 1),
        "attention_span": counts.attention / max(counts.tokens, 1),
        "attention_share": counts.attention / max(rest + counts.attention, 1),
        "steps": batch_tokens and -(-counts.rows // (batch_tokens // config.max_length)),
        "units_read": one.units[0],
        "units": one.units[1],
        "share_read": one.share,
        "standard_errors": {
            name: None if math.isnan(error) else error
            for name, error in one.standard_errors.items()
        },
        "histograms": one.totals["histograms"],
    }
    if one.sources:
        figures |= {
            "sources": sources_as_json(one.sources),
            "by_source": one.by_source,
            "missed_shares": [asdict(share) for share in one.shares if share.is_missed],
        }
    return figures


def _facts(plan: Plan, content: dict[str, Any]) -> Iterator[Fact]:
    """Facts about what was read."""
    number, first = len(plan.files), content["outcomes"][0]
    if is_tokenized(plan.files):  # what is trained on is each directory's own
        yield Fact("made from", directories(number))
    else:
        yield Fact("made from", f"{plural(number, 'input')}, {size(content['inputs']['bytes'])}")
        trained = trained_on(plan.config, plan.shape)
        yield Fact("records", f"{kinds_of(plan.shape)}; trained on: {trained}")
    yield Fact("tokenizer", plan.tokenizer or "none needed")
    yield Fact("documents", f"{content['documents']:,} with {content['tokens']:,} tokens")
    if empty := first["empty_documents"]:
        yield Fact("empty", f"{empty:,} documents without a token")
    if bad := first["rejected_records"]:
        yield Fact("rejected", f"{bad:,} bad records")
    if plan.sample is not None:
        yield Fact("sample", _sampled(content["outcomes"]))


def _sampled(outcomes: Sequence[_Figures]) -> str:
    if all(one["share_read"] == 1 for one in outcomes):
        return "everything was read: nothing is estimated"
    shown = ", ".join(dict.fromkeys(
        f"{percent(one['share_read'])} of the bytes, from {one['units_read']:,} of "
        f"{one['units']:,} work units"
        for one in outcomes
    ))  # fmt: skip
    if not any(one["standard_errors"] for one in outcomes):
        return f"{shown}: all figures are estimates"
    return f"{shown}; ± is a standard error"


def _table(columns: _Columns, outcomes: Sequence[_Figures]) -> Table:
    """A line for each outcome."""
    shown: _Columns = {"max length": lambda one: count(one["max_length"])}
    if len({one["strategy"] for one in outcomes}) > 1:
        shown["strategy"] = lambda one: one["strategy"]
    shown |= columns
    rows = [[written(one) for written in shown.values()] for one in outcomes]
    return Table("", [*shown], rows, text=["strategy"], names_first=True)


def _with_error(one: _Figures, name: str, figure: str, form: str) -> str:
    if name not in one["standard_errors"]:
        return figure
    error = one["standard_errors"][name]
    return f"{figure} ± {'?' if error is None else form.format(error)}"


def _of_one_length(one: _Figures) -> str:
    share = one.get("mixedness", {}).get("one_length")
    return "-" if share is None else percent(share)


def _total(name: str) -> Callable[[_Figures], str]:
    return lambda one: count(one[name])


_ROWS: _Columns = {
    "rows": lambda one: _with_error(one, "rows", count(one["rows"]), "{:,.0f}"),
    "utilization": lambda one: _with_error(
        one, "utilization", percent(one["utilization"]), "{:.2%}"
    ),
    "above bound": lambda one: percent(one["rows_over_bound"] - 1 if one["rows"] else 0),
    "of one length": _of_one_length,
}
_COSTS: _Columns = {
    "segments in a row": lambda one: f"{one['segments_per_row']:,.2f}",
    "on disk": lambda one: size(one["bytes"]),
    "attention span": lambda one: f"{one['attention_span']:,.0f}",
    "attention share": lambda one: percent(one["attention_share"]),
}
_STEPS: _Columns = {"steps of an epoch": _total("steps")}


def _losses(plan: Plan, outcomes: Sequence[_Figures]) -> Iterator[_Columns]:
    """Tables of what is cut, truncated and dropped, where anything is."""
    if any(one["cut_documents"] for one in outcomes):
        yield {"documents cut": _total("cut_documents")}
    for what, tokens in (("truncated", "tokens cut off"), ("dropped", "their tokens")):
        if any(one[f"{what}_documents"] for one in outcomes):
            columns = {
                f"documents {what}": _total(f"{what}_documents"),
                tokens: _total(f"{what}_tokens"),
            }
            if plan.config.train_on != "all":
                columns["of these trained"] = _total(f"{what}_trained_tokens")
            yield columns


def _sources(plan: Plan, outcomes: Sequence[_Figures]) -> Iterator[Section]:
    """Tables of what rows have of sources, once for lengths where it is the same. Trained tokens
    differ with the length: the first token of a segment is not trained on.
    """
    groups, tables = dict[str, list[_Figures]](), list[Part]()
    for one in outcomes:
        if "sources" in one:
            groups.setdefault(repr((one["sources"], one["by_source"])), []).append(one)
    counted = plan.config.mixture.counted if plan.config.mixture else "tokens"
    for group in groups.values():
        lengths = ", ".join(dict.fromkeys(count(one["max_length"]) for one in group))
        at = f" at max_length {lengths}" if len(groups) > 1 else ""
        title = f"sources{at}, in shares of {counted}"
        tables.append(table_of_sources(title, group[0]["sources"], group[0]["by_source"]))
    if tables:
        yield Section("Sources", tables)
