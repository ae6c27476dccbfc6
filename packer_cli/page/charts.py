"""Charts as inline SVG: a histogram, and curves over row lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from packer_cli.page.axes import (
    BELOW,
    LEFT,
    RIGHT,
    TOP,
    Mark,
    grid,
    marks,
    scale,
    under,
    x,
)
from packer_cli.page.markup import Markup, element, joined
from packer_cli.result.wording import Bucket, count, percent

_LEAST_HEIGHT = 1.5  # pixels of a bar that stands for anything
# Around 0, 0: curves are told apart by these and their dashes, not by color alone.
_SHAPES = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "M-4-4h8v8h-8z",
    "M0-5L5 4H-5z",
    "M0-5.5L5.5 0L0 5.5L-5.5 0z",
    "M0 5L5-4H-5z",
    "M-4-4L4 4M-4 4L4-4",
)
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 4", "1 5")


class Curve(NamedTuple):
    """`points`: (row length, share)."""

    name: str
    points: list[tuple[int, float]]


def histogram(
    name: str, title: str, description: str, buckets: Sequence[Bucket], of: str,
    placed: Sequence[Mark] = (), *, height: float = 180,
) -> Markup:  # fmt: skip
    """Bars in shares of all. `name`: of this chart in the page; `of`: what the axis below is of;
    `height`: of the bars, in pixels.
    """
    whole = max(sum(bucket.number for bucket in buckets), 1)
    sides = scale(0, max(bucket.number for bucket in buckets) / whole, least=0.01, height=height)
    drawn, top = marks(placed, height)
    bars = []
    for i, bucket in enumerate(buckets):
        share = bucket.number / whole
        if share:
            tall = max(height - sides.y(share), _LEAST_HEIGHT)
            wide = 0.86 * (RIGHT - LEFT) / len(buckets)
            tip = f"{bucket.label}: {count(bucket.number)} ({percent(share)})"
            bars.append(
                element("rect", element("title", tip), class_="bar", y=top + height - tall,
                        x=x((i + 0.07) / len(buckets)), width=f"{wide:.2f}%", height=tall)
            )  # fmt: skip
    edges = [
        ((i + 0.5 * bucket.edge.isalpha()) / len(buckets), bucket.edge)
        for i, bucket in enumerate(buckets)
        if bucket.edge
    ]
    bottom = top + height
    parts = grid(sides, top), bars, drawn, under(edges, of, bottom)
    return svg(name, title, description, bottom, *parts)


def curves(name: str, title: str, description: str, shown: Sequence[Curve], of: str) -> Markup:
    """Lines over row lengths, which are on a logarithmic axis."""
    points = [point for curve in shown for point in curve.points]
    lengths = sorted({length for length, _ in points})
    sides, top = scale(min(share for _, share in points), 1, least=0.001), TOP
    begin, end = math.log2(lengths[0]), math.log2(lengths[-1])

    def place(length: int) -> float:
        return 0.06 + 0.88 * (math.log2(length) - begin) / (end - begin) if end > begin else 0.5

    lines = []
    for number, curve in enumerate(shown):
        ordered = sorted(curve.points)
        spots = [(x(place(length)), top + sides.y(share)) for length, share in ordered]
        lines += [
            element("line", class_=_style(number), stroke_dasharray=_dashes(number),
                    x1=a[0], y1=a[1], x2=b[0], y2=b[1])
            for a, b in pairwise(spots)
        ]  # fmt: skip
    for number, curve in enumerate(shown):
        size = 1 + 0.3 * (len(shown) - 1 - number)  # where curves meet, each shape is seen
        for length, share in sorted(curve.points):
            tip = element("title", f"{curve.name}, {count(length)}: {percent(share)}")
            spot = _shape(number, size, tip)
            lines.append(
                element("svg", spot, x=x(place(length)), y=top + sides.y(share), overflow="visible")
            )
    labels = [(place(length), count(length)) for length in lengths]
    bottom = top + sides.height
    parts = grid(sides, top), lines, under(labels, of, bottom)
    return svg(name, title, description, bottom, *parts)


def legend(shown: Sequence[Curve]) -> Markup:
    """Which line is which."""
    items = []
    for number, curve in enumerate(shown):
        sample = element(
            "svg",
            element("line", class_=_style(number), stroke_dasharray=_dashes(number),
                    x1=0, x2=36, y1=7, y2=7),
            element("svg", _shape(number, 1), x=18, y=7, overflow="visible"),
            width=36, height=14, aria_hidden="true",
        )  # fmt: skip
        items.append(element("li", sample, " ", curve.name))
    return element("ul", *items, class_="legend")


def _shape(number: int, size: float, tip: str = "") -> Markup:
    outline = _SHAPES[number % len(_SHAPES)]
    return element("path", tip, class_=f"{_style(number)} shape", d=outline,
                   transform=f"scale({size:.2g})")  # fmt: skip


def _style(number: int) -> str:
    return f"curve c{number % len(_SHAPES)}"


def _dashes(number: int) -> str:
    return _DASHES[number % len(_DASHES)]


def svg(
    name: str, title: str, description: str, bottom: float, *parts: Sequence[Markup],
    below: float = BELOW,
) -> Markup:  # fmt: skip
    """A chart of parts that reach down to `bottom`, with so many pixels `below` for an axis.
    `name`: of this chart in the page.
    """
    return element(
        "svg",
        element("title", title, id=f"{name}-title"),
        element("desc", description, id=f"{name}-desc"),
        *map(joined, parts),
        class_="chart", role="img", width="100%", height=bottom + below,
        aria_labelledby=f"{name}-title {name}-desc",
    )  # fmt: skip
