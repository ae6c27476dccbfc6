"""`Report`: what a command has to tell, as data. `terminal.py` prints it, `page.py` makes a page of
it, and `content` is its JSON.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from packer_cli.result.wording import count, percent

_LEAST_BUCKETS = 6  # or a bar would be as wide as the chart
_BINARY = ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "k"))


class Fact(NamedTuple):
    """How something was, in words. `is_doubtful`: it may be an oversight."""

    what: str
    how: str
    is_doubtful: bool = False


class Figure(NamedTuple):
    """A headline figure. `is_loss`: it counts what is lost or may be wrong."""

    title: str
    figure: str
    meaning: str
    is_loss: bool = False


class Bucket(NamedTuple):
    """A bar of a histogram. `edge`: its least value on an axis; "" where it has no room."""

    label: str
    number: int
    edge: str


class Mark(NamedTuple):
    """A line down a histogram with its label. `at`: 0 is the left end, 1 the right."""

    at: float
    label: str


@dataclass(frozen=True)
class Table:
    """Lines of figures, each with a name, which is the first cell.

    text         columns that hold words, by their titles
    names_first  in the terminal, too, where names otherwise come last: long ones move no figure
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: Sequence[str] = ()
    names_first: bool = False


@dataclass(frozen=True)
class Histogram:
    """How many there are `of` something in each bucket: rows, or documents; `among`: which of them.

    title    in the terminal; `name`: what the chart is a histogram of
    what     buckets are of, as the title of a column
    unit     said behind the label of a bucket
    axis     what the axis shows
    marks    lengths of rows
    is_small it is one of several, which have a table together
    """

    title: str
    name: str
    buckets: Sequence[Bucket]
    of: str
    what: str
    unit: str
    axis: str
    marks: Sequence[Mark] = ()
    is_small: bool = False
    among: str = ""

    @property
    def caption(self) -> str:
        """The bucket that holds most, in words."""
        peak, whole = max(self.buckets, key=lambda bucket: bucket.number), self.whole
        if not whole:
            return f"There are no {self.of}{self.among}."
        unit = "" if peak.label == "full" else self.unit
        unit = unit.removesuffix("s") if peak.label == "1" else unit
        share = (
            f"{count(peak.number)} of the {self.of}{self.among} ({percent(peak.number / whole)})"
        )
        return f"Most often {peak.label}{unit}: {share}."

    @property
    def whole(self) -> int:
        return sum(bucket.number for bucket in self.buckets)


class Curve(NamedTuple):
    """`points`: (length of rows, share)."""

    name: str
    points: list[tuple[int, float]]


@dataclass(frozen=True)
class Curves:
    """Shares over the length of rows."""

    title: str
    caption: str
    axis: str
    curves: Sequence[Curve]


class Share(NamedTuple):
    """What is asked of a source and what rows reach, as shares of all."""

    name: str
    asked: float
    reached: float


@dataclass(frozen=True)
class Shares:
    """What rows have of each source. `counted`: what shares are of; `rows`: which ones, where there
    are several kinds.
    """

    shares: Sequence[Share]
    table: Table
    counted: str
    rows: str = ""


@dataclass(frozen=True)
class Text:
    """Lines of words, which pages have, or the terminal, too."""

    text: str
    only_page: bool = True


Part = Text | Table | Histogram | Curves | Shares


@dataclass(frozen=True)
class Section:
    """Parts that belong together. Pages show the title, the terminal those of the parts."""

    title: str
    parts: Sequence[Part]
    only: Literal["page", "terminal"] | None = None


@dataclass(frozen=True)
class Report:
    """What a command has to tell.

    facts       what it is about was made of
    about       lines below the title
    content     for programs
    made_by     the foot of a page
    incomplete  that it is so and why, where it is; the terminal says it as an error
    """

    title: str
    facts: Sequence[Fact]
    content: dict[str, Any]
    made_by: str
    figures: Sequence[Figure] = ()
    warnings: Sequence[str] = ()
    sections: Sequence[Section] = ()
    incomplete: str = ""
    about: Sequence[str] = ()


def document_lengths(counts: Sequence[int], max_lengths: Sequence[int] = ()) -> Histogram:
    """Documents by length, int[32] by powers of two, with the lengths of rows, if any, marked."""
    ends = [max(length - 1, 1).bit_length() - 1 for length in max_lengths]
    first, buckets = _used(counts, ends)
    prefix = "max_length " if len(max_lengths) == 1 else ""
    return Histogram(
        "document length in tokens (documents)", "document lengths", buckets, "documents",
        "tokens", " tokens", "tokens in a document (1k is 1,024)",
        [
            Mark((math.log2(length) - first) / len(buckets), f"{prefix}{count(length)}")
            for length in sorted(max_lengths)
        ],
    )  # fmt: skip


def segments_per_row(counts: Sequence[int]) -> Histogram:
    """Rows by their number of segments, int[32] by powers of two."""
    return Histogram(
        "segments per row (rows)", "segments in a row", _used(counts)[1], "rows", "segments",
        " segments", "segments in a row",
    )  # fmt: skip


def row_fill(counts: Sequence[int], of: str = "") -> Histogram:
    """Rows by how full they are, int[21] in steps of five percent. `of`: which rows, of several."""
    return Histogram(
        of or "row fill (rows)", f"row fill{of and ', '}{of}", _fills(counts, "full"), "rows",
        "full", " full", "tokens in a row, of max_length", is_small=bool(of),
    )  # fmt: skip


def alike(what: str, like: str, counts: Sequence[int]) -> Histogram:
    """Rows by the share of their segments that are alike, int[21] in steps of five percent."""
    return Histogram(
        "", f"rows of one {what}", _fills(counts, "all"), "rows", like, f" {like}",
        f"share of a row's segments {like}", among=" with four segments or more",
    )  # fmt: skip


def _fills(counts: Sequence[int], last: str) -> list[Bucket]:
    *partly, full = counts
    buckets = [
        Bucket(f"{5 * i}-{5 * i + 5}%", number, "" if i % 5 else f"{5 * i}%")
        for i, number in enumerate(partly)
    ]
    return [*buckets, Bucket(last, full, last)]


def _used(counts: Sequence[int], also: Sequence[int] = ()) -> tuple[int, list[Bucket]]:
    """The number of the first bucket that is shown, and all to the last, where bucket i holds 2**i
    up to 2**(i+1) - 1. `also`: shown, too.
    """
    shown = [i for i, number in enumerate(counts) if number] + list(also) or [0]
    first = min(*shown, len(counts) - _LEAST_BUCKETS)
    last = max(*shown, first + _LEAST_BUCKETS - 1)
    return first, [
        Bucket(f"{2**i:,}-{2 ** (i + 1) - 1:,}" if i else "1", counts[i], _binary(2**i))
        for i in range(first, last + 1)
    ]


def _binary(number: int) -> str:
    for unit, suffix in _BINARY:
        if number >= unit and number % unit == 0:
            return f"{number // unit}{suffix}"
    return str(number)
