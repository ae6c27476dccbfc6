"""`Report`: what a command has to tell, as data. `terminal.py` prints it, `page.py` makes a page of
it, and `content` is its JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from packer_cli.result.wording import count, percent


class Fact(NamedTuple):
    """Something that was so, in words. `is_doubtful`: it may be an oversight."""

    what: str
    how: str
    is_doubtful: bool = False


class Figure(NamedTuple):
    """A headline figure. `is_loss`: it counts what is lost or may be wrong."""

    title: str
    figure: str
    meaning: str
    is_loss: bool = False


@dataclass(frozen=True)
class Table:
    """Lines of figures, each with a name, which is the first cell.

    text         columns that hold words, by their titles
    names_first  in the terminal, too, where names otherwise come last: long ones move no figure
    drawn, bars  on a page, for each line shares that are drawn as bars, and what they are
    linked, links  on a page, for each line the numbers of rows that it leads to, and what they are
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: Sequence[str] = ()
    names_first: bool = False
    drawn: str = ""
    bars: Sequence[Sequence[float]] = ()
    linked: str = ""
    links: Sequence[Sequence[int]] = ()


class Bucket(NamedTuple):
    """A bar of a histogram. `mark`: what lies in it, beside what is counted."""

    label: str
    number: int
    mark: str = ""


@dataclass(frozen=True)
class Histogram:
    """Counts of rows or documents in buckets.

    what  buckets are of, and `of`: what is counted, as titles of columns
    """

    title: str
    what: str
    of: str
    buckets: Sequence[Bucket]


@dataclass(frozen=True)
class Text:
    """Words, which pages have, or the terminal, too."""

    words: str
    only_page: bool = True


Part = Text | Table | Histogram


@dataclass(frozen=True)
class Section:
    """Parts that belong together. Pages show the title, the terminal those of the parts."""

    title: str
    parts: Sequence[Part]
    only: Literal["page", "terminal"] | None = None


class PageRow(NamedTuple):
    """A row of tokens on a page: its number, how much is in it, words about it, and whether it is
    open at first.
    """

    number: int
    counts: str
    about: tuple[str, ...]
    is_open: bool


@dataclass(frozen=True)
class Rows:
    """Rows of tokens, which pages show.

    blob      what is in them, see `page.py`
    why       why there are ids in place of text; "" where there is text
    left_out  rows for which there is no room
    """

    rows: Sequence[PageRow]
    blob: str
    why: str = ""
    left_out: int = 0


@dataclass(frozen=True)
class Report:
    """Everything that a command has to tell.

    facts       what it is about was made of
    rows        of tokens, which pages show below all sections
    content     for programs
    made_by     the foot of a page
    incomplete  that it is so and why, where it is; the terminal says it as an error
    """

    title: str
    facts: Sequence[Fact] = ()
    content: Any = None
    made_by: str = ""
    figures: Sequence[Figure] = ()
    warnings: Sequence[str] = ()
    sections: Sequence[Section] = ()
    incomplete: str = ""
    rows: Rows | None = None


# What sources are counted by, with the titles of columns.
OF_SOURCES = {"documents": "documents", "tokens": "tokens", "trained_tokens": "trained"}


def table_of_sources(
    title: str, sources: Sequence[dict[str, Any]], by_source: Sequence[dict[str, Any]]
) -> Table:
    """A line for each source, and bars of its shares; both as in the JSON of reports."""
    names = [name for name in OF_SOURCES if all(name in one for one in by_source)]
    shares = [(one["share_asked"], one["share_reached"]) for one in sources]
    rows = [
        [one["name"], *(count(own[name]) for name in names), f"{one['epochs']:.2f}",
         *map(percent, its)]
        for one, own, its in zip(sources, by_source, shares, strict=True)
    ]  # fmt: skip
    head = ["source", *map(OF_SOURCES.__getitem__, names), "epochs", "asked", "reached"]
    return Table(title, head, rows, drawn="asked, and below it reached", bars=shares)


def document_lengths(counts: Sequence[int], max_lengths: Sequence[int] = ()) -> Histogram:
    """Documents by length, int[32] by powers of two, with the lengths of rows, if any, marked."""
    marks: dict[int, str] = {}
    for length in sorted(max_lengths):
        place = length.bit_length() - 1
        before = f"{marks[place]}, " if place in marks else "max_length "
        marks[place] = before + count(length)
    title = "document length in tokens (documents)"
    return Histogram(title, "tokens", "documents", powers(counts, marks))


def row_fill(counts: Sequence[int], title: str = "row fill (rows)") -> Histogram:
    """Rows by how full they are, int[21] in steps of five percent."""
    return Histogram(title, "full", "rows", _fills(counts, "full"))


def alike(what: str, like: str, counts: Sequence[int]) -> Histogram:
    """Rows by the share of their segments that are alike, int[21] in steps of five percent."""
    title = f"rows of one {what}, among those with four segments or more"
    return Histogram(title, f"segments {like}", "rows", _fills(counts, "all"))


def _fills(counts: Sequence[int], last: str) -> list[Bucket]:
    labels = [*(f"{5 * i}-{5 * i + 5}%" for i in range(len(counts) - 1)), last]
    return [Bucket(label, number) for label, number in zip(labels, counts, strict=True) if number]


def powers(counts: Sequence[int], marks: Mapping[int, str] | None = None) -> list[Bucket]:
    """Bars of int[32] by powers of two: i holds 2**i up to 2**(i+1) - 1."""
    marked = marks or {}
    return [
        Bucket(f"{2**i:,}-{2 ** (i + 1) - 1:,}" if i else "1", number, marked.get(i, ""))
        for i, number in enumerate(counts)
        if number or i in marked
    ]
