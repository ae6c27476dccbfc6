"""`packer plan`: what would come out of inputs, for each length of rows and each strategy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from msgspec.structs import asdict

import packer_cli
from packer_cli.inputs.tokenized import is_tokenized
from packer_cli.options.shape_rules import trained_on
from packer_cli.options.shapes import kinds_of
from packer_cli.plan import Outcome, Plan
from packer_cli.reports import (
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
_Figures = dict[str, Any]  # of an outcome, as programs get them
_Cells = dict[str, str]  # of a line, by the titles of columns


def plan_report(plan: Plan, title: str) -> Report:
    """`title`: whose plan it is."""
    outcomes = [_figures(one) for one in plan.outcomes]
    files, read = plan.files, plan.outcomes[0].planned
    content = {
        "inputs": {"count": len(files), "bytes": sum(file.size for file in files)},
        "tokenizer": plan.tokenizer,
        "shape": plan.shape.kind,
        "documents": int(read.read_lengths.sum()),
        "tokens": read.encoded_tokens,
        "document_length": read.read_lengths.tolist(),
        "sample": plan.sample,
        "outcomes": outcomes,
    }
    named = [*_named(outcomes)]
    shares = [percent(one["utilization"]) for one in outcomes]
    drawn = _table(named, [{"utilization": share} for share in shares])
    bars = [[1 - one["utilization"]] for one in outcomes]
    used = replace(drawn, drawn="padding", bars=bars)
    lengths = sorted({one["max_length"] for one in outcomes})
    losses: list[Part] = [_table(named, cells) for cells in _losses(plan, outcomes)]
    tables = [_table(named, [*map(cells, outcomes)]) for cells in (_rows, _costs)]
    fills = [
        row_fill(one["histograms"]["row_fill"], ", ".join(its.values()))
        for one, its in zip(outcomes, named, strict=True)
    ]
    return Report(
        title,
        [*_facts(plan, content)],
        content,
        f"planned by packer {packer_cli.__version__}",
        sections=[
            Section("Utilization", [used], only="page"),
            Section("What would come out", [*tables, Text(_BOUND)]),
            Section("Cut, truncated or dropped",
                    losses or [Text("No document is cut, truncated or dropped.")]),
            *_sources(plan, outcomes),
            Section("Document length", [document_lengths(content["document_length"], lengths)],
                    only="page"),
            Section("Row fill", fills, only="page"),
        ],
    )  # fmt: skip


def _figures(one: Outcome) -> _Figures:
    """An outcome for programs; names that `packer stats --json` has mean the same.

    attention_span: E[l²]/E[l]: how many tokens the segment of the average token has
    """
    counts, config = one.planned, one.config
    figures = figures_of_rows(one.totals, config) | {
        "overlong": config.overlong,
        "shards": counts.shards,
        "bytes": counts.bytes,
        "cut_documents": counts.cut_documents,
        "segments_per_row": counts.segments / max(counts.rows, 1),
        "attention_span": counts.attention / max(counts.tokens, 1),
        "units_read": one.units[0],
        "units": one.units[1],
        "share_read": one.share,
        "standard_errors": one.standard_errors,
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


def _named(outcomes: Sequence[_Figures]) -> Iterator[_Cells]:
    """The names of outcomes in tables."""
    several = len({one["strategy"] for one in outcomes}) > 1
    for one in outcomes:
        yield {"max length": count(one["max_length"])} | (
            {"strategy": one["strategy"]} if several else {}
        )


def _table(named: Sequence[_Cells], lines: Sequence[_Cells]) -> Table:
    """A line for each outcome."""
    head = [*named[0], *lines[0]]
    rows = [[*its.values(), *line.values()] for its, line in zip(named, lines, strict=True)]
    return Table("", head, rows, text=["strategy"], names_first=True)


def _rows(one: _Figures) -> _Cells:
    def with_error(name: str, figure: str, form: str) -> str:
        if name not in one["standard_errors"]:
            return figure
        error = one["standard_errors"][name]
        return f"{figure} ± {'?' if error is None else form.format(error)}"

    alike = one["mixedness"]["one_length"]
    return {
        "rows": with_error("rows", count(one["rows"]), "{:,.0f}"),
        "utilization": with_error("utilization", percent(one["utilization"]), "{:.2%}"),
        "above bound": percent(one["rows_over_bound"] - 1 if one["rows"] else 0),
        "of one length": "-" if alike is None else percent(alike),
    }


def _costs(one: _Figures) -> _Cells:
    return {
        "segments in a row": f"{one['segments_per_row']:,.2f}",
        "on disk": size(one["bytes"]),
        "attention span": f"{one['attention_span']:,.0f}",
    }


def _losses(plan: Plan, outcomes: Sequence[_Figures]) -> Iterator[list[_Cells]]:
    """Tables of what is cut, truncated and dropped, where anything is."""
    tables = [{"documents cut": "cut_documents"}]
    for what, tokens in (("truncated", "tokens cut off"), ("dropped", "their tokens")):
        tables.append({f"documents {what}": f"{what}_documents", tokens: f"{what}_tokens"})
        if plan.config.train_on != "all":
            tables[-1]["of these trained"] = f"{what}_trained_tokens"
    for names in tables:
        documents = next(iter(names.values()))
        if any(one[documents] for one in outcomes):
            yield [{title: count(one[name]) for title, name in names.items()} for one in outcomes]


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
