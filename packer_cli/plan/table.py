"""The figures of a plan as tables of at most 80 columns, or as lines in a pipe."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from packer_cli.errors import one_line
from packer_cli.plan.outcome import Outcome, by_sources, lengths_of
from packer_cli.plan.report import made_from
from packer_cli.plan.run import Plan
from packer_cli.result.wording import aligned, count, percent, size

_Written = Callable[[Outcome], str]


class _Column(NamedTuple):
    title: str
    written: _Written


def print_plan(plan: Plan, title: str, batch_tokens: int | None, hidden_size: int) -> None:
    """Print to stdout. `title`: whose plan it is."""
    # a pipe has no width: a line is a line, without the spaces that fill up a table's
    piped = None if sys.stdout.isatty() else io.StringIO()
    width = None if piped is None else 10_000
    console = Console(file=piped, highlight=False, soft_wrap=True, width=width)
    plain = not (sys.stdout.encoding or "").lower().startswith("utf")
    plus_minus = "+-" if plain else "±"
    console.print(f"[bold]{escape(one_line(title))}[/bold]")
    for line in _read(plan, plus_minus):
        console.print(escape(line))
    ways = [_Column("max\nlength", lambda one: f"{one.config.max_length:,}")]
    if len({one.config.strategy for one in plan.outcomes}) > 1:
        ways.append(_Column("strategy", lambda one: one.config.strategy))
    for columns in (_rows(plus_minus), _costs(batch_tokens, hidden_size), *_losses(plan)):
        console.print()
        console.print(_table([*ways, *columns], plan.outcomes, is_piped=piped is not None))
    for lines in _sources(plan):
        console.print()
        for number, line in enumerate(lines):
            console.print(Text(line, style="" if number > 1 else "dim"))
    if piped is not None:
        sys.stdout.write("\n".join(line.rstrip() for line in piped.getvalue().split("\n")))


def _table(columns: Sequence[_Column], outcomes: Sequence[Outcome], *, is_piped: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title, _ in columns:
        shown = title.replace("\n", " ") if is_piped else title
        table.add_column(shown, justify="left" if title == "strategy" else "right", no_wrap=True)
    for one in outcomes:
        table.add_row(*(column.written(one) for column in columns))
    return table


def _read(plan: Plan, plus_minus: str) -> list[str]:
    """What was read, in lines."""
    documents = plan.documents
    lines = [f"{title:<11}  {text}" for title, text in made_from(plan)]
    lines.append(f"documents    {documents.count:,} with {documents.tokens:,} tokens")
    totals = plan.outcomes[0].totals
    if empty := totals["empty_documents"]:
        lines.append(f"empty        {empty:,} documents without a token")
    if bad := totals["rejected_records"]:
        lines.append(f"rejected     {bad:,} bad records")
    if plan.sample is None:
        return lines
    counts = dict.fromkeys((*one.units, one.share) for one in plan.outcomes)
    if all(share == 1 for *_, share in counts):
        return [*lines, "sample       everything was read: nothing is estimated"]
    shown = ", ".join(
        f"{share:.2%} of the bytes, from {read:,} of {units:,} work units"
        for read, units, share in counts
    )
    if not any(one.standard_errors for one in plan.outcomes):
        return [*lines, f"sample       {shown}: all figures are estimates"]
    return [*lines, f"sample       {shown}; {plus_minus} is a standard error"]


def _rows(plus_minus: str) -> list[_Column]:
    def rows(one: Outcome) -> str:
        return f"{one.rows:,}" + _error(one, "rows", "{:,.0f}", plus_minus)

    def utilization(one: Outcome) -> str:
        return f"{one.utilization:.2%}" + _error(one, "utilization", "{:.2%}", plus_minus)

    return [
        _Column("rows", rows),
        _Column("utilization", utilization),
        _Column("above\nbound", lambda one: f"{one.above_bound:.2%}"),
        _Column("of one\nlength", lambda one: _share(one.mixedness.get("one_length"))),
    ]


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}"


def _error(one: Outcome, name: str, form: str, plus_minus: str) -> str:
    error = one.standard_errors.get(name)
    if error is None:
        return ""
    return f" {plus_minus} " + ("?" if math.isnan(error) else form.format(error))


def _costs(batch_tokens: int | None, hidden_size: int) -> list[_Column]:
    columns = [
        _Column("segments\nin a row", lambda one: f"{one.segments_per_row:,.2f}"),
        _Column("on disk", lambda one: size(one.planned.bytes)),
        _Column("attention\nspan", lambda one: f"{one.attention_span:,.0f}"),
        _Column("attention\nshare", lambda one: f"{one.attention_share(hidden_size):.2%}"),
    ]
    if batch_tokens is not None:
        columns.append(_Column("steps of\nan epoch", lambda one: f"{one.steps(batch_tokens):,}"))
    return columns


def _losses(plan: Plan) -> list[list[_Column]]:
    """Tables of what is cut, truncated and dropped, where anything is."""
    cut = _Column("documents\ncut", lambda one: f"{one.planned.cut_documents:,}")
    tables = [[cut]] if any(one.planned.cut_documents for one in plan.outcomes) else []
    for what in ("truncated", "dropped"):
        columns = [_total(f"documents\n{what}", f"{what}_documents"),
                   _total("their tokens" if what == "dropped" else "tokens\ncut off",
                          f"{what}_tokens")]  # fmt: skip
        if plan.config.train_on != "all":
            columns.append(_total("of these\ntrained", f"{what}_trained_tokens"))
        if any(one.totals[f"{what}_documents"] for one in plan.outcomes):
            tables.append(columns)
    return tables


def _sources(plan: Plan) -> list[list[str]]:
    """A title and a table of what rows have of sources, once for lengths where it is the same."""
    groups, lines = by_sources(plan.outcomes), []
    counted = plan.config.mixture.counted if plan.config.mixture else ""
    for outcomes, sources in groups:
        at = f" at max_length {lengths_of(outcomes)}" if len(groups) > 1 else ""
        rows = [["documents", "tokens", "trained", "epochs", "asked", "reached", "source"]]
        for one, asked, reached in sources:
            figures = map(count, (one.documents, one.tokens, one.trained_tokens))
            epochs, name = f"{one.facts.epochs:.2f}", one.facts.name
            rows.append([*figures, epochs, percent(asked), percent(reached), name])
        lines.append([f"sources{at}, in shares of {counted}", *aligned(rows)])
    return lines


def _total(title: str, name: str) -> _Column:
    return _Column(title, lambda one: f"{one.totals[name]:,}")
