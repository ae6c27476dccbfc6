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
TOP, BELOW = 14, 44  # pixels, of what is above the plot and under it
_CHARACTER, _GAP = 6.6, 10  # pixels
_PHONE = 300 * (RIGHT - LEFT) / 100  # pixels across the plot
_MOST_STEPS = 5


class Mark(NamedTuple):
    """A line down a chart, with its label above. `at`: 0 is the left end, 1 the right."""

    at: float
    label: str


class Scale(NamedTuple):
    """Shares up the side of a plot of `height` pixels."""

    low: float
    high: float
    step: float
    height: float

    def y(self, share: float) -> float:
        """In pixels below the top of the plot."""
        return self.height * (self.high - share) / (self.high - self.low)

    def steps(self) -> list[float]:
        number = round((self.high - self.low) / self.step)
        return [self.low + i * self.step for i in range(number + 1)]


def scale(low: float, high: float, *, least: float, height: float = 180) -> Scale:
    """In round steps from `low` or below to `high` or above; they differ by `least` or more."""
    low = max(min(low, high - least), 0)
    high = max(high, low + least)
    power = 10.0 ** math.floor(math.log10((high - low) / _MOST_STEPS))
    step = next(power * n for n in (1, 2, 5, 10, 20) if power * n * _MOST_STEPS >= high - low)
    below, above = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Scale(below * step, above * step, step, height)


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


def under(labels: Sequence[tuple[float, str]], title: str, bottom: float) -> list[Markup]:
    """Labels below the plot, without those that would cover one before, and what they are of."""
    y, free, texts = bottom + 16, -math.inf, []
    for at, label in labels:
        half = len(label) * _CHARACTER / 2
        if at * _PHONE - half >= free:
            texts.append(element("text", label, class_="tick", x=x(at), y=y, text_anchor="middle"))
            free = at * _PHONE + half + _GAP
    middle = x(0.5)
    texts.append(element("text", title, class_="axis", x=middle, y=y + 20, text_anchor="middle"))
    return texts


def marks(placed: Sequence[Mark], height: float) -> tuple[list[Markup], float]:
    """The marks' lines and labels, and how much room the latter take above the plot."""
    befores = _befores(placed)
    levels = _levels(placed, befores)
    top = TOP + 16 * (max(levels, default=-1) + 1)
    drawn = []
    for mark, before, level in zip(placed, befores, levels, strict=True):
        y, across = top - 16 * level - 4, x(mark.at)
        side, anchor = (-4, "end") if before else (4, "start")
        drawn += [
            element("line", class_="mark", x1=across, x2=across, y1=y - 11, y2=top + height),
            element("text", mark.label, class_="name", x=across, y=y, dx=side, text_anchor=anchor),
        ]
    return drawn, top


def _befores(placed: Sequence[Mark]) -> list[bool]:
    """Whether each label stands left of its line: where there is room, all stand on one side, since
    no line then crosses a label.
    """
    if not any(_span(mark, before=False)[1] > _PHONE for mark in placed):
        return [False] * len(placed)
    if not any(_span(mark, before=True)[0] < 0 for mark in placed):
        return [True] * len(placed)
    return [_span(mark, before=False)[1] > _PHONE for mark in placed]


def _levels(placed: Sequence[Mark], befores: Sequence[bool]) -> list[int]:
    """How high each label stands: above those that it would cover, whose lines start below it."""
    levels: dict[int, int] = {}
    spans = [_span(mark, before=before) for mark, before in zip(placed, befores, strict=True)]
    order = sorted(range(len(placed)), key=lambda i: placed[i].at)
    after = [i for i in reversed(order) if not befores[i]]
    for i in [*after, *(i for i in order if befores[i])]:
        begin, end = spans[i]
        covered = [
            level for j, level in levels.items() if begin < spans[j][1] and spans[j][0] < end
        ]
        levels[i] = max(covered, default=-1) + 1
    return [levels[i] for i in range(len(placed))]


def _span(mark: Mark, *, before: bool) -> tuple[float, float]:
    """From where to where a label stands on a phone, in pixels."""
    at, width = mark.at * _PHONE, len(mark.label) * _CHARACTER + _GAP
    return (at - width, at) if before else (at, at + width)
