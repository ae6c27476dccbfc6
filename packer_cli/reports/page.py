"""A report as a page for a browser: one file that asks for nothing from elsewhere.

The page is `page.html.jinja`, which escapes whatever it is given: names of inputs are anybody's.
Its file is there whole or not at all, and in the place of nothing but an earlier page.

Charts are inline SVG. They are as wide as the page leaves them: so places across are in percent of
their width, those down in pixels, and labels are placed so that they have room on a phone.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from packer_cli.durable import put_file
from packer_cli.errors import UsageError, from_os_error, one_line
from packer_cli.reports.report import (
    Curves,
    Histogram,
    Mark,
    Part,
    Report,
    Shares,
    Table,
    Text,
)
from packer_cli.result.layout import INCOMPLETE, MANIFEST
from packer_cli.result.manifest import is_manifest
from packer_cli.result.wording import count, percent, plural
from packer_cli.storage import is_url

# What every page begins with: the sign that packer may replace it.
_START = b'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n' + (
    b'<meta name="generator" content="packer">\n'
)
_CELL, _PADDING, _STEP = 7.9, 16, 40  # pixels, of a character in a table, and around it
_LEAST, _MOST = 240, 1400  # pixels of a table
_NAME = 24  # characters of a name that wraps
_LONG = 11  # characters of a figure that needs a wider box
_LEFT, _RIGHT = 14.0, 98.5  # percent
_TOP, _BELOW = 14, 44  # pixels, of what is above the plot and under it
_HEIGHT, _SMALL = 180, 100  # pixels of a plot
_CHARACTER, _GAP, _LINE = 6.6, 10, 16  # pixels
_PHONE = 300 * (_RIGHT - _LEFT) / 100  # pixels across the plot
_MOST_STEPS = 5
_LEAST_HEIGHT = 1.5  # pixels of a bar that stands for anything
# Around 0, 0: curves are told apart by these and their dashes, not by color alone.
_SHAPES = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z", "M-4-4h8v8h-8z", "M0-5L5 4H-5z",
    "M0-5.5L5.5 0L0 5.5L-5.5 0z", "M0 5L5-4H-5z", "M-4-4L4 4M-4 4L4-4",
)  # fmt: skip
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 4", "1 5")
_MOST_BARS = 40  # sources that are drawn; the table has all
_WIDEST = 78.0  # percent, which leaves room for the figure beside the longest bar
_CLOSE = 0.0001
_SOURCE, _BAR, _LABEL = 58, 13, 17  # pixels down: of a source, of a bar, of its name above
_LONGEST = 40  # characters of a name above its bars


class Chart(NamedTuple):
    """A chart with what is said of it and which line or bar is which."""

    caption: str
    drawing: Markup
    legend: Sequence[tuple[Markup, str]] = ()


class _Shown(NamedTuple):
    """A part of a section, as the template takes it. `is_beside`: the table is beside the chart."""

    text: str = ""
    title: str = ""
    chart: Chart | None = None
    table: Table | None = None
    is_beside: bool = False
    is_small: bool = False


def page(report: Report) -> bytes:
    """The page as a file's content. Characters that UTF-8 cannot write are escaped, as \\udc80."""
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined,
        finalize=lambda value: one_line(value) if type(value) is str else value,
    )  # fmt: skip
    source = Path(__file__).with_name("page.html.jinja").read_text(encoding="utf-8")
    sections = [
        (one.title, [_shown(part, one.parts, f"chart-{place}-{number}")
                     for number, part in enumerate(one.parts)])
        for place, one in enumerate(report.sections) if one.only != "terminal"
    ]  # fmt: skip
    folds = {fold(one.table) for _, parts in sections for one in parts if one.table is not None}
    text = environment.from_string(source).render(
        report=report, sections=sections, folds=sorted(folds), fold=fold, most=_NAME,
        is_long=any(len(one.figure) > _LONG for one in report.figures),
    )  # fmt: skip
    return text.encode("utf-8", "backslashreplace")


def _shown(part: Part, parts: Sequence[Part], name: str) -> _Shown:
    if isinstance(part, Text):
        return _Shown(part.text)
    if isinstance(part, Table):
        return _Shown(title=part.title, table=_short(part))
    chart = draw(part, name)
    if isinstance(part, Shares):
        return _Shown(title=part.rows, chart=chart, table=_short(part.table))
    if not isinstance(part, Histogram):
        return _Shown(chart=chart)
    if part.is_small:
        return _Shown(title=part.title, chart=chart, is_small=True)
    rows = [
        (one.label, count(one.number), percent(one.number / part.whole))
        for one in part.buckets
        if one.number
    ]
    table = Table("", (part.what, part.of, "share"), rows)
    return _Shown(chart=chart, table=table, is_beside=True)


def _short(table: Table) -> Table:
    rows = [(shortened(name), *cells) for name, *cells in table.rows]
    return Table(table.title, table.head, rows, table.text)


def fold(table: Table) -> int:
    """How many pixels wide it must be for every figure to stay in one line: where there is less, it
    becomes a block for each of its lines.
    """
    pixels = -_PADDING / 2
    for column, title in enumerate(table.head):
        cells = max((len(row[column]) for row in table.rows), default=0)
        if column == 0:
            cells = min(cells, _NAME)
        words = max(map(len, title.split()), default=0)
        pixels += max(cells, words) * _CELL + _PADDING
    return min(max(-int(-pixels // _STEP) * _STEP, _LEAST), _MOST)


def check_place(name: str) -> None:
    """UsageError for a name that no page can be written to. Nothing but a page is replaced."""
    if is_url(name):
        raise UsageError(
            f"--html: {name}: pages are only written to local files", "name a file here"
        )
    path = _path(name)
    if os.path.isdir(path):
        raise UsageError(f"--html: {name} is a directory", f"name a file: {path / 'page.html'}")
    if not os.path.isdir(path.parent):
        raise UsageError(f"--html: {path.parent} is no directory", f"mkdir -p {path.parent}")
    if any(is_manifest(path.parent / file) for file in (MANIFEST, INCOMPLETE)):
        raise UsageError(
            f"--html: {name} would be in a result of packer, which holds nothing else",
            f"name a file beside it: {path.parent}.html",
        )
    for file in (path, path.with_name(f"{path.name}.part")):
        _refuse_other_files(file)


def save(name: str, content: bytes) -> None:
    """Write a page where `check_place` allows one. DataError: the file system does not."""
    put_file(_path(name), content)


def _path(name: str) -> Path:
    """With the file that a link leads to, rather than the link, to be replaced."""
    return Path(os.path.realpath(name)) if os.path.islink(name) else Path(name)


def _refuse_other_files(path: Path) -> None:
    """UsageError for what is there, unless it is a page or empty."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(
                f"--html: {path} is not a regular file", "--html - writes the page to stdout"
            )
        with open(path, "rb") as file:
            begin = file.read(len(_START))
    except FileNotFoundError:
        return
    except OSError as error:
        raise from_os_error(error, path, "read") from error
    if begin and begin != _START:
        raise UsageError(
            f"--html: {path} is there, and is not a page of packer's",
            "nothing was changed; choose another name, or move that file",
        )


# Charts


def shortened(text: str, most: int = 90) -> str:
    """A name in one line, of at most so many characters: a longer one loses its middle."""
    text = one_line(text)
    if len(text) <= most:
        return text
    begin = (most - 1) // 3
    return f"{text[:begin]}…{text[begin + 1 - most :]}"


def draw(part: Histogram | Curves | Shares, name: str) -> Chart:
    """A chart. `name`: no other in the page has it."""
    if isinstance(part, Histogram):
        return _histogram(part, name)
    return _curves(part, name) if isinstance(part, Curves) else _shares(part, name)


def _element(tag: str, *content: str, **attributes: str | float) -> Markup:
    """`class_` is the attribute class, and `text_anchor` is text-anchor."""
    named = Markup("").join(
        Markup(' {}="{}"').format(
            name.rstrip("_").replace("_", "-"), value if isinstance(value, str) else f"{value:.6g}"
        )
        for name, value in attributes.items()
        if value != ""
    )
    inside = Markup("").join(
        one if isinstance(one, Markup) else escape(one_line(one)) for one in content
    )
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(tag), named, inside)  # noqa: S704


def _svg(name: str, title: str, description: str, height: float, parts: Iterable[Markup]) -> Markup:
    return _element(
        "svg",
        _element("title", title, id=f"{name}-title"),
        _element("desc", description, id=f"{name}-desc"),
        *parts,
        class_="chart", role="img", width="100%", height=height,
        aria_labelledby=f"{name}-title {name}-desc",
    )  # fmt: skip


class _Scale(NamedTuple):
    """Shares up the side of a plot of `height` pixels that begins `top` pixels down."""

    low: float
    high: float
    step: float
    height: float
    top: float

    def y(self, share: float) -> float:
        return self.top + self.height * (self.high - share) / (self.high - self.low)

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def lines(self) -> Iterator[Markup]:
        """Lines across, each with its share."""
        digits = max(0, -math.floor(math.log10(self.step * 100) + 1e-9))
        for number in range(round((self.high - self.low) / self.step) + 1):
            share = self.low + number * self.step
            y, label = self.y(share), f"{share * 100:.{digits}f}%"
            yield _element("line", class_="grid", x1=_x(0), x2=_x(1), y1=y, y2=y)
            yield _element(
                "text", label, class_="tick", x=f"{_LEFT - 1.5:g}%", y=y + 4, text_anchor="end"
            )


def _scale(low: float, high: float, least: float, height: float, top: float) -> _Scale:
    """In round steps from `low` or below to `high` or above; they differ by `least` or more."""
    low = max(min(low, high - least), 0)
    high = max(high, low + least)
    power = 10.0 ** math.floor(math.log10((high - low) / _MOST_STEPS))
    step = next(power * n for n in (1, 2, 5, 10, 20) if power * n * _MOST_STEPS >= high - low)
    below, above = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return _Scale(below * step, above * step, step, height, top)


def _x(at: float) -> str:
    return f"{_LEFT + at * (_RIGHT - _LEFT):.2f}%"


def _axis(labels: Iterable[tuple[float, str]], title: str, bottom: float) -> Iterator[Markup]:
    """Labels below the plot, without those that would cover one before, and what they are of."""
    y, free = bottom + 16, -math.inf
    for at, label in labels:
        half = len(label) * _CHARACTER / 2
        if at * _PHONE - half >= free:
            yield _element("text", label, class_="tick", x=_x(at), y=y, text_anchor="middle")
            free = at * _PHONE + half + _GAP
    yield _element("text", title, class_="axis", x=_x(0.5), y=y + 20, text_anchor="middle")


def _marks(marks: Sequence[Mark], height: float) -> tuple[list[Markup], float]:
    """The marks' lines and labels, and how much room the latter take above the plot.

    All labels stand on one side of their lines, each above those that it would cover, whose lines
    begin below it: so no line crosses a label.
    """
    widths = [len(mark.label) * _CHARACTER + _GAP for mark in marks]
    spans = [
        (mark.at * _PHONE, mark.at * _PHONE + w) for mark, w in zip(marks, widths, strict=True)
    ]
    is_before = any(end > _PHONE for _, end in spans)
    if is_before:
        spans = [(begin - w, begin) for (begin, _), w in zip(spans, widths, strict=True)]
    levels: dict[int, int] = {}
    for i in sorted(range(len(marks)), key=lambda i: marks[i].at, reverse=not is_before):
        covered = [
            level for j, level in levels.items()
            if spans[i][0] < spans[j][1] and spans[j][0] < spans[i][1]
        ]  # fmt: skip
        levels[i] = max(covered, default=-1) + 1
    top = _TOP + _LINE * (max(levels.values(), default=-1) + 1)
    side, anchor = (-4, "end") if is_before else (4, "start")
    drawn = []
    for i, mark in enumerate(marks):
        y, across = top - _LINE * levels[i] - 4, _x(mark.at)
        drawn += [
            _element("line", class_="mark", x1=across, x2=across, y1=y - 11, y2=top + height),
            _element("text", mark.label, class_="name", x=across, y=y, dx=side, text_anchor=anchor),
        ]
    return drawn, top


def _histogram(part: Histogram, name: str) -> Chart:
    """Bars in shares of all."""
    height, buckets, whole = _SMALL if part.is_small else _HEIGHT, part.buckets, max(part.whole, 1)
    marked, top = _marks(part.marks, height)
    highest = max(bucket.number for bucket in buckets) / whole
    sides = _scale(0, highest, 0.01, height, top)
    bars, wide = [], 0.86 * (_RIGHT - _LEFT) / len(buckets)
    for i, bucket in enumerate(buckets):
        share = bucket.number / whole
        if share:
            tall = max(sides.bottom - sides.y(share), _LEAST_HEIGHT)
            tip = f"{bucket.label}: {count(bucket.number)} ({percent(share)})"
            bars.append(
                _element("rect", _element("title", tip), class_="bar", y=sides.bottom - tall,
                         x=_x((i + 0.07) / len(buckets)), width=f"{wide:.2f}%", height=tall)
            )  # fmt: skip
    edges = [
        ((i + 0.5 * bucket.edge.isalpha()) / len(buckets), bucket.edge)
        for i, bucket in enumerate(buckets)
        if bucket.edge
    ]
    described = caption = part.caption
    if part.marks:
        several = "max_length" if len(part.marks) == 1 else "the lengths of rows compared"
        caption += f" Dashed: {several}."
        described += f" Dashed: {', '.join(mark.label for mark in part.marks)}."
    parts = [*sides.lines(), *bars, *marked, *_axis(edges, part.axis, sides.bottom)]
    title = f"Histogram of {part.name}"
    return Chart(caption, _svg(name, title, described, sides.bottom + _BELOW, parts))


def _curves(part: Curves, name: str) -> Chart:
    """Lines over row lengths, which are on a logarithmic axis."""
    points = [point for curve in part.curves for point in curve.points]
    lengths = sorted({length for length, _ in points})
    sides = _scale(min(share for _, share in points), 1, 0.001, _HEIGHT, _TOP)
    begin, end = math.log2(lengths[0]), math.log2(lengths[-1])

    def place(length: int) -> float:
        return 0.06 + 0.88 * (math.log2(length) - begin) / (end - begin) if end > begin else 0.5

    lines, spots, legend = [], [], []
    for number, curve in enumerate(part.curves):
        dashes = _DASHES[number % len(_DASHES)]
        how = {"class_": f"curve c{number % len(_SHAPES)}", "stroke_dasharray": dashes}
        ordered = [(length, _x(place(length)), sides.y(share), share)
                   for length, share in sorted(curve.points)]  # fmt: skip
        lines += [
            _element("line", **how, x1=a, y1=b, x2=c, y2=d)
            for (_, a, b, _), (_, c, d, _) in pairwise(ordered)
        ]
        large = 1 + 0.3 * (len(part.curves) - 1 - number)  # where curves meet, each shape is seen
        for length, x, y, share in ordered:
            tip = _element("title", f"{curve.name}, {count(length)}: {percent(share)}")
            shape = _shape(number, large, tip)
            spots.append(_element("svg", shape, x=x, y=y, overflow="visible"))
        line = _element("line", **how, x1=0, x2=36, y1=7, y2=7)
        spot = _element("svg", _shape(number, 1), x=18, y=7, overflow="visible")
        legend.append((_sample(line, spot, width=36), curve.name))
    labels = [(place(length), count(length)) for length in lengths]
    parts = [*sides.lines(), *lines, *spots, *_axis(labels, part.axis, sides.bottom)]
    drawing = _svg(name, part.title, part.caption, sides.bottom + _BELOW, parts)
    return Chart(part.caption, drawing, legend)


def _shape(number: int, size: float, tip: str = "") -> Markup:
    kind = number % len(_SHAPES)
    return _element("path", tip, class_=f"curve c{kind} shape", d=_SHAPES[kind],
                    transform=f"scale({size:.2g})")  # fmt: skip


def _sample(*parts: Markup, width: int) -> Markup:
    """What a line or bar looks like, for a legend."""
    return _element("svg", *parts, width=width, height=14, aria_hidden="true")


def _shares(part: Shares, name: str) -> Chart:
    """Two bars for each source: what is asked, and what is reached."""
    every = part.shares
    largest = sorted(every, key=lambda one: -one.reached)[:_MOST_BARS]
    shown = [one for one in every if one in largest]
    far = max(every, key=lambda one: abs(one.reached - one.asked))
    off = abs(far.reached - far.asked)
    said = f"Farthest from what is asked: {shortened(far.name, _LONGEST)}, by {off:.2%}."
    if off < _CLOSE:
        said = f"Each is within {_CLOSE:.2%} of what is asked."
    caption = f"{plural(len(every), 'source')}, in shares of {part.counted}. {said}"
    if len(shown) < len(every):
        caption += f" Drawn: the {count(len(shown))} largest of {count(len(every))}."
    widest, drawn = max(max(one.asked, one.reached) for one in shown) or 1.0, []
    for number, one in enumerate(shown):
        top, label = number * _SOURCE + _LABEL, shortened(one.name, _LONGEST)
        drawn.append(_element("text", label, class_="source", x=0, y=top - 5))
        for y, kind, what, share in (
            (top, "asked", "asked", one.asked), (top + _BAR + 2, "bar", "reached", one.reached)
        ):  # fmt: skip
            tip = _element("title", f"{one.name}: {percent(share)} {what}")
            wide = f"{_WIDEST * share / widest:.2f}%"
            drawn += [
                _element("rect", tip, class_=kind, x=0, y=y, width=wide, height=_BAR),
                _element("text", percent(share), class_="tick", x=wide, dx=5, y=y + _BAR - 3),
            ]
    legend = [
        (_sample(_element("rect", class_=kind, x=1, y=2, width=22, height=10), width=24), what)
        for kind, what in (("asked", "asked"), ("bar", "reached"))
    ]
    title = f"Shares of sources{part.rows and ', '}{part.rows}"
    return Chart(caption, _svg(name, title, caption, _SOURCE * len(shown), drawn), legend)
