"""Where charts put things: steps of a scale, and labels that do not cover each other.

Charts are as wide as the page leaves them. So places across are in percent of their width, those
down are in pixels, and labels are placed so that they have room on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from packer_cli.page.markup import Markup, element

LEFT, RIGHT = 14.0, 98.5  # percent
TOP, HEIGHT, BELOW = 14, 180, 44  # pixels: above the plot, of it, and of what is under it
_CHARACTER, _GAP = 6.6, 10  # pixels
_PHONE = 300 * (RIGHT - LEFT) / 100  # pixels across the plot
_MOST_STEPS = 5


class Mark(NamedTuple):
    """A line down a chart, with its label above. `at`: 0 is the left end, 1 the right."""

    at: float
    label: str


class Scale(NamedTuple):
    """Shares up the side of a chart."""

    low: float
    high: float
    step: float

    def y(self, share: float) -> float:
        """In pixels below the top of the plot."""
        return HEIGHT * (self.high - share) / (self.high - self.low)

    def steps(self) -> list[float]:
        number = round((self.high - self.low) / self.step)
        return [self.low + i * self.step for i in range(number + 1)]


def scale(low: float, high: float, least: float) -> Scale:
    """In round steps from `low` or below to `high` or above; they differ by `least` or more."""
    low = max(min(low, high - least), 0)
    power = 10.0 ** math.floor(math.log10((high - low) / _MOST_STEPS))
    step = next(power * n for n in (1, 2, 5, 10, 20) if power * n * _MOST_STEPS >= high - low)
    below, above = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Scale(below * step, above * step, step)


def x(at: float) -> str:
    return f"{LEFT + at * (RIGHT - LEFT):.2f}%"


def grid(sides: Scale, top: float) -> list[Markup]:
    """Lines across, each with its share."""
    digits = max(0, -math.floor(math.log10(sides.step * 100) + 1e-9))
    lines = []
    for share in sides.steps():
        y = top + sides.y(share)
        lines.append(element("line", class_="grid", x1=x(0), x2=x(1), y1=y, y2=y))
        label = f"{share * 100:.{digits}f}%"
        at = f"{LEFT - 1.5:g}%"
        lines.append(element("text", label, class_="tick", x=at, y=y + 4, text_anchor="end"))
    return lines


def under(labels: Sequence[tuple[float, str]], title: str, top: float) -> list[Markup]:
    """Labels below the plot, without those that would cover one before, and what they are of."""
    y, free, texts = top + HEIGHT + 16, -math.inf, []
    for at, label in labels:
        half = len(label) * _CHARACTER / 2
        if at * _PHONE - half >= free:
            texts.append(element("text", label, class_="tick", x=x(at), y=y, text_anchor="middle"))
            free = at * _PHONE + half + _GAP
    middle = x(0.5)
    texts.append(element("text", title, class_="axis", x=middle, y=y + 20, text_anchor="middle"))
    return texts


def marks(placed: Sequence[Mark]) -> tuple[list[Markup], float]:
    """The marks' lines and labels, and how much room the latter take above the plot."""
    levels = _levels(placed)
    top = TOP + 16 * (max(levels, default=-1) + 1)
    drawn = []
    for mark, level in zip(placed, levels, strict=True):
        y, before = top - 16 * level - 4, _is_before(mark)
        drawn.append(
            element("line", class_="mark", x1=x(mark.at), x2=x(mark.at), y1=y - 11, y2=top + HEIGHT)
        )
        side, anchor = (-4, "end") if before else (4, "start")
        drawn.append(
            element("text", mark.label, class_="name", x=x(mark.at), y=y, dx=side,
                    text_anchor=anchor)
        )  # fmt: skip
    return drawn, top


def _is_before(mark: Mark) -> bool:
    """Whether the label stands left of its line: it would not fit on the right."""
    return mark.at * _PHONE + _width(mark) > _PHONE


def _width(mark: Mark) -> float:
    return len(mark.label) * _CHARACTER + _GAP


def _levels(placed: Sequence[Mark]) -> list[int]:
    """How high each label stands: above those that it would cover, whose lines start below it."""
    levels: dict[int, int] = {}
    order = sorted(range(len(placed)), key=lambda i: placed[i].at)
    after = [i for i in reversed(order) if not _is_before(placed[i])]
    for i in [*after, *(i for i in order if _is_before(placed[i]))]:
        covered = [level for j, level in levels.items() if _meet(placed[i], placed[j])]
        levels[i] = max(covered, default=-1) + 1
    return [levels[i] for i in range(len(placed))]


def _meet(one: Mark, other: Mark) -> bool:
    (a, b), (c, d) = _span(one), _span(other)
    return a < d and c < b


def _span(mark: Mark) -> tuple[float, float]:
    at, width = mark.at * _PHONE, _width(mark)
    return (at - width, at) if _is_before(mark) else (at, at + width)
