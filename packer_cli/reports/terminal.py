"""A report in the terminal, as wide as that is; or in a pipe, where a line stays a line."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from textwrap import wrap

from rich.console import Console
from rich.text import Text as Line

from packer_cli.errors import one_line
from packer_cli.reports import Histogram, Part, Report, Table, Text
from packer_cli.result.wording import count

_PIPED = 10_000  # columns
_TITLE = len("utilization")
_GAP = "  "
_BAR = 40
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_IN_ASCII = {"×": "x", "±": "+-"}


def print_report(report: Report) -> None:
    """Print to stdout."""
    console = Console(
        highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _PIPED
    )
    for line in _lines(report, console.width):
        line.rstrip()
        console.print(line)


def is_plain() -> bool:
    """Tell whether stdout can show no more than ASCII."""
    return not (sys.stdout.encoding or "").lower().startswith("utf")


def _lines(report: Report, width: int) -> Iterator[Line]:
    yield Line(_plain(report.title), "bold")
    facts = [(fact.label, _plain(fact.words)) for fact in report.facts]
    styles = ["yellow" if fact.is_doubtful else "" for fact in report.facts]
    yield from _grid(facts, ("dim", ""), "<<", styles, least=_TITLE, width=width)
    figures = [figure for figure in report.figures if not figure.is_loss or figure.figure != "0"]
    if figures:
        yield Line()
    losses = ["yellow" if figure.is_loss else "" for figure in figures]
    looks = ("dim", "bold", "")
    cells = [(_plain(figure.label), figure.figure, _plain(figure.meaning)) for figure in figures]
    yield from _grid(cells, looks, "<><", losses, least=_TITLE, width=width)
    for warning in report.warnings:
        yield Line()
        yield Line(f"warning: {_plain(warning)}", "yellow")
    for section in report.sections:
        if section.only != "page":
            for part in section.parts:
                if not (isinstance(part, Text) and part.only_page):
                    yield Line()
                    yield from _part(part, width)


def _part(part: Part, width: int) -> Iterator[Line]:
    if isinstance(part, Text):
        yield from (Line(_plain(line)) for line in part.words.split("\n"))
        return
    if part.title:
        yield Line(_plain(part.title), "dim")
    if isinstance(part, Histogram):
        shown = [bucket for bucket in part.buckets if bucket.number]
        highest = max((bucket.number for bucket in shown), default=1)
        rows = [
            (bucket.label, count(bucket.number), _bar(bucket.number / highest)) for bucket in shown
        ]
        yield from _grid(rows, ("", "", "cyan"), ">><")
    else:
        yield from _table(part, width)


def _table(table: Table, width: int) -> Iterator[Line]:
    """Yield a table. Titles that need more than the width are broken between words."""
    sides = ["<" if title in table.text else ">" for title in table.head]
    head = [*table.head]
    rows = [[_plain(cell) for cell in row] for row in table.rows]
    if not table.names_first:
        sides, head = [*sides[1:], "<"], [*head[1:], head[0]]
        rows = [[*row[1:], row[0]] for row in rows]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(len(head))]
    needed = [max(cells, len(title)) for cells, title in zip(widths, head, strict=True)]
    titles = [[title] for title in head]
    if sum(needed) + len(_GAP) * (len(head) - 1) > width:
        titles = [
            wrap(title, max(cells, *map(len, title.split())), break_long_words=False)
            for title, cells in zip(head, widths, strict=True)
        ]
    high = max(map(len, titles))
    top = zip(*([*[""] * (high - len(lines)), *lines] for lines in titles), strict=True)
    yield from _grid([*top, *rows], [""] * len(head), sides, ["dim"] * high)


def _grid(
    rows: Sequence[Sequence[str]],
    looks: Sequence[str],
    sides: Sequence[str],
    styles: Sequence[str] = (),
    *,
    least: int = 0,
    width: int = _PIPED,
) -> Iterator[Line]:
    """Yield lines of cells; the last cell is wrapped into what is left of the width.

    looks, styles  of columns and of rows; `sides`: alignment of the cells of a column, < or >
    least          characters of the first column
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[:1] = [max(least, width) for width in widths[:1]]
    left = max(width - sum(widths[:-1]) - len(_GAP) * (len(widths) - 1), _TITLE)
    for (*cells, last), style in zip(rows, [*styles, *[""] * len(rows)], strict=False):
        lines = [last] if len(last) <= left else wrap(
            last, left, replace_whitespace=False, break_on_hyphens=False
        )  # fmt: skip
        for place, text in enumerate(lines or [""]):
            line = Line()
            shown = [*("" if place else cell for cell in cells), text]
            for cell, wide, side, look in zip(shown, widths, sides, looks, strict=True):
                line.append(f"{cell:{side}{wide}}{_GAP}", f"{look} {style}".strip())
            yield line


def _bar(share: float) -> str:
    if is_plain():
        return "#" * round(share * _BAR)
    eighths = round(share * _BAR * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip() or ("▏" if share else "")


def _plain(text: str) -> str:
    """Return text as stdout can show it, in one line: names and options may hold any character."""
    for sign, letters in _IN_ASCII.items() if is_plain() else ():
        text = text.replace(sign, letters)
    return one_line(text)
