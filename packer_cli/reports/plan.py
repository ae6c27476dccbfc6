"""`packer plan`: what would come out of inputs, for each length of rows and each strategy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from msgspec import to_builtins

import packer_cli
from packer_cli.inputs.tokenized import is_tokenized
from packer_cli.options.shape_rules import trained_on
from packer_cli.options.shapes import kinds_of
from packer_cli.plan import LENGTHS, Outcome, Plan
from packer_cli.reports import (
    Aligned,
    Cell,
    Fact,
    Part,
    Report,
    Section,
    Table,
    Text,
    document_lengths,
    row_fill,
    tables_of_sources,
)
from packer_cli.reports.stats import figures_of_rows
from packer_cli.result.manifest import sources_as_json
from packer_cli.result.wording import count, directories, percent, plural, size

_BOUND = "The lower bound is a number of rows below which no packer can go."
_Figures = dict[str, Any]  # of an outcome, as in JSON
_Cells = dict[str, Cell]  # of a line, by the titles of columns


def plan_report(plan: Plan, title: str) -> Report:
    """Report a plan. `title`: of the report."""
    outcomes = [_figures(outcome) for outcome in plan.outcomes]
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
    bars = [[1 - outcome["utilization"]] for outcome in outcomes]
    drawn = _table(named, [{"utilization": outcome["utilization"]} for outcome in outcomes])
    used = replace(drawn, drawn="padding", bars=bars)
    lengths = sorted({outcome["max_length"] for outcome in outcomes})
    losses: list[Part] = [_table(named, cells) for cells in _losses(plan, outcomes)]
    costs = [*map(_costs, outcomes)]
    if plan.shape.kind == LENGTHS:  # of samples whose tokens are not stored
        for line in costs:
            del line["on disk"]
    tables = [_table(named, [*map(_rows, outcomes)]), _table(named, costs)]
    fills = [
        row_fill(outcome["histograms"]["row_fill"], ", ".join(map(str, name.values())))
        for outcome, name in zip(outcomes, named, strict=True)
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


def _figures(outcome: Outcome) -> _Figures:
    """Return an outcome for JSON; names that `packer stats --json` has mean the same.

    attention_span: E[l²]/E[l], the tokens in the segment of the average token
    """
    counts, config = outcome.planned, outcome.config
    figures = figures_of_rows(outcome.totals, config) | {
        "overlong": config.overlong,
        "shards": counts.shards,
        "bytes": counts.bytes,
        "cut_documents": counts.cut_documents,
        "segments_per_row": counts.segments / max(counts.rows, 1),
        "attention_span": counts.attention / max(counts.tokens, 1),
        "units_read": outcome.units[0],
        "units": outcome.units[1],
        "share_read": outcome.share,
        "standard_errors": outcome.standard_errors,
        "histograms": outcome.totals["histograms"],
    }
    if choice := outcome.choice:
        figures |= {
            "sources": sources_as_json(choice.sources),
            "by_source": outcome.by_source,
            "missed_shares": to_builtins([share for share in choice.shares if share.is_missed]),
        }
    return figures


def _facts(plan: Plan, content: dict[str, Any]) -> Iterator[Fact]:
    """Yield facts about what was read."""
    number, first = len(plan.files), content["outcomes"][0]
    if is_tokenized(plan.files):  # directories differ in what is trained on
        yield Fact("made from", directories(number))
    else:
        yield Fact("made from", f"{plural(number, 'input')}, {size(content['inputs']['bytes'])}")
        words = f"{kinds_of(plan.shape)}; trained on: {trained_on(plan.config, plan.shape)}"
        if plan.shape.kind == LENGTHS:
            words = f"lengths: {' + '.join(plan.shape.columns)}"
        yield Fact("records", words)
    yield Fact("tokenizer", plan.tokenizer or "none needed")
    yield Fact("documents", f"{content['documents']:,} with {content['tokens']:,} tokens")
    if empty := first["empty_documents"]:
        yield Fact("empty", f"{empty:,} documents without a token")
    if filtered := first.get("filtered_documents"):
        yield Fact("filtered", f"{filtered:,} documents left out by conditions")
    if bad := first["rejected_records"]:
        yield Fact("rejected", f"{bad:,} bad records")
    if plan.sample is not None:
        yield Fact("sample", _sampled(content["outcomes"]))


def _sampled(outcomes: Sequence[_Figures]) -> str:
    if all(outcome["share_read"] == 1 for outcome in outcomes):
        return "everything was read: nothing is estimated"
    shown = ", ".join(dict.fromkeys(
        f"{percent(outcome['share_read'])} of the bytes, from {outcome['units_read']:,} of "
        f"{outcome['units']:,} work units"
        for outcome in outcomes
    ))  # fmt: skip
    if not any(outcome["standard_errors"] for outcome in outcomes):
        return f"{shown}: all figures are estimates"
    return f"{shown}; ± is a standard error"


def _named(outcomes: Sequence[_Figures]) -> Iterator[_Cells]:
    """Yield the names of outcomes in tables."""
    has_several = len({outcome["strategy"] for outcome in outcomes}) > 1
    for outcome in outcomes:
        length = {"max length": Aligned(count(outcome["max_length"]))}
        yield length | ({"strategy": outcome["strategy"]} if has_several else {})


def _table(named: Sequence[_Cells], lines: Sequence[_Cells]) -> Table:
    """Return a table with a line for each outcome."""
    together = [name | line for name, line in zip(named, lines, strict=True)]
    return Table("", together, names_first=True)


def _rows(outcome: _Figures) -> _Cells:
    def with_error(name: str, figure: str, form: str) -> Aligned:
        if name not in outcome["standard_errors"]:
            return Aligned(figure)
        error = outcome["standard_errors"][name]
        return Aligned(f"{figure} ± {'?' if error is None else form.format(error)}")

    return {
        "rows": with_error("rows", count(outcome["rows"]), "{:,.0f}"),
        "utilization": with_error("utilization", percent(outcome["utilization"]), "{:.2%}"),
        "above bound": outcome["rows_over_bound"] - 1 if outcome["rows"] else 0.0,
        "of one length": outcome["mixedness"]["one_length"],
    }


def _costs(outcome: _Figures) -> _Cells:
    return {
        "segments in a row": Aligned(f"{outcome['segments_per_row']:,.2f}"),
        "on disk": Aligned(size(outcome["bytes"])),
        "attention span": Aligned(f"{outcome['attention_span']:,.0f}"),
    }


def _losses(plan: Plan, outcomes: Sequence[_Figures]) -> Iterator[list[_Cells]]:
    """Yield tables of what is cut, truncated and dropped; tables of zeros are left out."""
    tables = [{"documents cut": "cut_documents"}]
    for loss, tokens in (("truncated", "tokens cut off"), ("dropped", "their tokens")):
        tables.append({f"documents {loss}": f"{loss}_documents", tokens: f"{loss}_tokens"})
        if plan.config.train_on != "all":
            tables[-1]["of these trained"] = f"{loss}_trained_tokens"
    for names in tables:
        documents = next(iter(names.values()))
        if any(outcome[documents] for outcome in outcomes):
            yield [{title: outcome[name] for title, name in names.items()} for outcome in outcomes]


def _sources(plan: Plan, outcomes: Sequence[_Figures]) -> Iterator[Section]:
    """Yield tables of sources in rows, one for all lengths that give the same. Trained tokens
    differ with the length, since the first token of a segment is not trained on.
    """
    groups, tables = dict[str, list[_Figures]](), list[Part]()
    for outcome in outcomes:
        if "sources" in outcome:
            groups.setdefault(repr((outcome["sources"], outcome["by_source"])), []).append(outcome)
    counted = plan.config.mixture.counted if plan.config.mixture else "tokens"
    for group in groups.values():
        lengths = ", ".join(dict.fromkeys(count(outcome["max_length"]) for outcome in group))
        at = f" at max_length {lengths}" if len(groups) > 1 else ""
        lines = group[0]["sources"], group[0]["by_source"]
        tables += tables_of_sources(f"sources{at}", counted, *lines)
    if tables:
        yield Section("Sources", tables)
