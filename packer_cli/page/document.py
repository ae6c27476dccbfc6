"""What pages are made of: figures in boxes, tables, charts with their tables, and the frame."""

from __future__ import annotations

import re
from collections.abc import Sequence

from packer_cli.page.markup import Markup, element, escaped, joined
from packer_cli.page.style import WIDTHS, style
from packer_cli.result.wording import Bucket, count, percent

# What every page begins with: the sign that packer may replace it.
START = '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n' + (
    '<meta name="generator" content="packer">\n'
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_CHARACTER, _PADDING = 7.9, 16  # pixels
_NAME = 24  # characters of a name that wraps
_LINE = Markup("\n")
_LONG = 11  # characters of a figure that needs a wider box


def page(title: str, *content: Markup, footer: str) -> bytes:
    """A whole page. Characters that UTF-8 cannot write are escaped, as \\udc80."""
    body = joined(content)
    folds = {int(width) for width in re.findall(r'<table class="fold(\d+)"', body)}
    parts = (
        START,
        f'<meta http-equiv="Content-Security-Policy" content="{escaped(_POLICY)}">\n',
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
        element("title", title) + "\n",
        f"<style>\n{style(folds)}\n</style>\n</head>\n<body>\n",
        element("main", element("h1", title), *content),
        element("footer", footer),
        "\n</body>\n</html>\n",
    )
    return "".join(parts).encode("utf-8", "backslashreplace")


def section(title: str, *content: str) -> Markup:
    return joined((element("section", element("h2", title), *content), _LINE))


def boxes(lines: Sequence[tuple[str, str, str]]) -> Markup:
    """Headline figures: (what, figure, meaning)."""
    drawn = [
        element("div", element("dt", title), element("dd", figure, class_="figure"),
                element("dd", meaning, class_="meaning"))
        for title, figure, meaning in lines
    ]  # fmt: skip
    long = any(len(figure) > _LONG for _, figure, _ in lines)
    return element("dl", *drawn, class_="long" if long else "")


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    """The first cell of a line is what the line is about, in text; the others hold figures."""
    kinds = ["text", *["number"] * (len(head) - 1)]
    top = [
        element("th", name, class_=kind, scope="col", role="columnheader")
        for name, kind in zip(head, kinds, strict=True)
    ]
    width = _width(head, rows)
    body = []
    for first, *rest in rows:
        name = "text name" if len(first) > _NAME else "text"
        cells = [
            element("td", cell, class_=kind, role="cell", data_of=title)
            for cell, kind, title in zip(rest, kinds[1:], head[1:], strict=True)
        ]
        cells.insert(0, element("th", first, class_=name, scope="row", role="rowheader"))
        body += [element("tr", *cells, role="row"), _LINE]
    # roles, since a folded table is none to a screen reader otherwise
    drawn = element(
        "table",
        element("caption", caption) if caption else "",
        element("thead", element("tr", *top, role="row"), role="rowgroup"),
        element("tbody", *body, role="rowgroup"),
        class_=f"fold{width}", role="table",
    )  # fmt: skip
    return element("div", drawn, class_="table")


def facts(lines: Sequence[tuple[str, str]]) -> Markup:
    """(what, how it is) in words, as a table that is narrow enough for every page."""
    rows = [
        element("tr", element("th", what, class_="text", scope="row"),
                element("td", how, class_="text"))
        for what, how in lines
    ]  # fmt: skip
    return element("table", element("tbody", *rows), class_="facts")


def _width(head: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """How wide it must be for every figure to stay in one line."""
    pixels = -_PADDING / 2
    for column, title in enumerate(head):
        cells = max((len(row[column]) for row in rows), default=0)
        if column == 0:
            cells = min(cells, _NAME)
        words = max(map(len, title.split()), default=0)
        pixels += max(cells, words) * _CHARACTER + _PADDING
    return next((width for width in WIDTHS if width >= pixels), WIDTHS[-1])


def chart_with_table(chart: Markup, caption: str, figures: Markup) -> Markup:
    """A chart beside its figures, or above them where there is no room."""
    return element(
        "figure", element("figcaption", caption), element("div", chart, figures, class_="pair")
    )


def buckets_table(what: str, of: str, buckets: Sequence[Bucket]) -> Markup:
    """The buckets of a histogram that hold anything. `what` is counted by how many `of`."""
    whole = max(sum(bucket.number for bucket in buckets), 1)
    rows = [
        (bucket.label, count(bucket.number), percent(bucket.number / whole))
        for bucket in buckets
        if bucket.number
    ]
    return table("", (of, what, "share"), rows)
