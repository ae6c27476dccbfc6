"""Reports as data: sections of labelled figures, tables and histograms.

`terminal.py` prints a `Report`, `page.py` draws it as an HTML page, and `content` is its JSON. It
costs next to nothing: reports are made from a manifest or from what was counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from packer_cli.options.options import tier_label
from packer_cli.result.counts import SHOWN_TOTALS
from packer_cli.result.wording import count, percent


class Fact(NamedTuple):
    """What something was made from, in words. `is_doubtful`: it may be an oversight."""

    label: str
    words: str
    is_doubtful: bool = False


class Figure(NamedTuple):
    """A headline figure. `is_loss`: it counts what is lost or may be wrong."""

    label: str
    figure: str
    meaning: str
    is_loss: bool = False


class Aligned(str):
    """A cell of a table that is aligned like figures."""

    __slots__ = ()


# A count, a share, nothing, or text.
Cell = int | float | None | str


@dataclass(frozen=True)
class Table:
    """Lines of labelled cells; the first cell of a line is its name.

    names_first    names come first in the terminal, too; otherwise last, since they may be long
    drawn, bars    meaning of the bars on a page, and for each line the shares that they show
    linked, links  meaning of the links on a page, and for each line the rows that they lead to
    """

    title: str
    lines: Sequence[Mapping[str, Cell]]
    names_first: bool = False
    drawn: str = ""
    bars: Sequence[Sequence[float]] = ()
    linked: str = ""
    links: Sequence[Sequence[int]] = ()

    @property
    def head(self) -> list[str]:
        """Titles of the columns."""
        return [*self.lines[0]] if self.lines else []

    @property
    def rows(self) -> list[list[str]]:
        """Cells as text: 1,234 for a count, 81.25% for a share."""
        return [[_written(cell) for cell in line.values()] for line in self.lines]

    @property
    def text(self) -> list[str]:
        """Titles of the columns that hold words, which are aligned to the left."""
        return [name for name in self.head if any(type(line[name]) is str for line in self.lines)]


def _written(cell: Cell) -> str:
    if cell is None:
        return "-"
    return cell if isinstance(cell, str) else percent(cell) if type(cell) is float else f"{cell:,}"


class Bucket(NamedTuple):
    """A bar of a histogram. `mark`: words about something that lies in it."""

    label: str
    number: int
    mark: str = ""


@dataclass(frozen=True)
class Histogram:
    """Counts of rows or documents in buckets.

    what, of  titles of the columns of labels and of counts
    """

    title: str
    what: str
    of: str
    buckets: Sequence[Bucket]


@dataclass(frozen=True)
class Text:
    """A paragraph, which pages show, or the terminal, too."""

    words: str
    only_page: bool = True


Part = Text | Table | Histogram


@dataclass(frozen=True)
class Section:
    """Parts that belong together. Pages show the title, the terminal the parts' titles."""

    title: str
    parts: Sequence[Part]
    only: Literal["page", "terminal"] | None = None


class PageRow(NamedTuple):
    """A row of tokens on a page, with its counts and remarks. `is_open`: it shows its text."""

    number: int
    counts: str
    about: tuple[str, ...]
    is_open: bool


@dataclass(frozen=True)
class PageRows:
    """Rows of tokens, which pages show.

    blob      their tokens, see `page.py`
    why       reason for ids in place of text; "" if there is text
    left_out  number of rows for which there is no room
    """

    rows: Sequence[PageRow]
    blob: str
    why: str = ""
    left_out: int = 0


@dataclass(frozen=True)
class Report:
    """The report of a command.

    facts       what the data was made from
    rows        rows of tokens, which pages show below all sections
    content     values for JSON
    made_by     foot of a page
    incomplete  why the result is incomplete; the terminal prints it as an error
    """

    title: str
    facts: Sequence[Fact] = ()
    content: Any = None
    made_by: str = ""
    figures: Sequence[Figure] = ()
    warnings: Sequence[str] = ()
    sections: Sequence[Section] = ()
    incomplete: str = ""
    rows: PageRows | None = None


# Totals that tables of sources have.
OF_SOURCES = ("documents", "tokens", "trained_tokens")


def tables_of_sources(
    title: str, counted: str, sources: Sequence[dict[str, Any]], by_source: Sequence[dict[str, Any]]
) -> list[Table]:
    """Return a line for each source, with bars of its shares, and one for each of their tiers, if
    there are any.

    counted             unit of amounts
    sources, by_source  as in the JSON of reports
    """
    lines = [
        {"source": source["name"]}
        | {SHOWN_TOTALS[name].column: totals[name] for name in OF_SOURCES if name in totals}
        | {"epochs": Aligned(f"{source['epochs']:.2f}")}
        | {"asked": source["share_asked"], "reached": source["share_reached"]}
        for source, totals in zip(sources, by_source, strict=True)
    ]
    shares = [(source["share_asked"], source["share_reached"]) for source in sources]
    tiers = [
        {"tier": f"{source['name']}, {tier_label(tier['tier'], tier['where'])}"}
        | {"documents": tier["documents"], counted: tier["available"]}
        | {"epochs": Aligned(f"{tier['epochs']:.2f}")}
        | {"asked": round(tier["asked"]), "taken": tier["taken"]}
        for source in sources
        for tier in source.get("tiers", ())
    ]
    tables = [
        Table(f"{title}, in shares of {counted}", lines, drawn="asked, and below it reached",
              bars=shares),
        Table(f"one epoch of each tier, and {counted} asked of it and taken", tiers),
    ]  # fmt: skip
    return tables if tiers else tables[:1]


def document_lengths(counts: Sequence[int], max_lengths: Sequence[int] = ()) -> Histogram:
    """Return documents by length, int[32] by powers of two; the lengths of rows are marked."""
    marks: dict[int, str] = {}
    for length in sorted(max_lengths):
        place = length.bit_length() - 1
        before = f"{marks[place]}, " if place in marks else "max_length "
        marks[place] = before + count(length)
    title = "document length in tokens (documents)"
    return Histogram(title, "tokens", "documents", powers(counts, marks))


def row_fill(counts: Sequence[int], title: str = "row fill (rows)") -> Histogram:
    """Return rows by how full they are, int[21] in steps of five percent."""
    return Histogram(title, "full", "rows", _shares(counts, "full"))


def alike(what: str, like: str, counts: Sequence[int]) -> Histogram:
    """Return rows by the share of their segments that are alike, int[21] in steps of 5%."""
    title = f"rows of one {what}, among those with four segments or more"
    return Histogram(title, f"segments {like}", "rows", _shares(counts, "all"))


def _shares(counts: Sequence[int], last: str) -> list[Bucket]:
    labels = [*(f"{5 * i}-{5 * i + 5}%" for i in range(len(counts) - 1)), last]
    return [Bucket(label, number) for label, number in zip(labels, counts, strict=True) if number]


def powers(counts: Sequence[int], marks: Mapping[int, str] | None = None) -> list[Bucket]:
    """Return bars of int[32] by powers of two: i holds 2**i up to 2**(i+1) - 1."""
    marked = marks or {}
    return [
        Bucket(f"{2**i:,}-{2 ** (i + 1) - 1:,}" if i else "1", number, marked.get(i, ""))
        for i, number in enumerate(counts)
        if number or i in marked
    ]
