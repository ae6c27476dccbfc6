"""Rows drawn in the terminal: trained tokens green, the others dim; brackets without color.

Text from data is hostile: no control character of it reaches the terminal.
"""

from __future__ import annotations

import sys
from itertools import groupby

from rich.console import Console
from rich.segment import Segment as Piece
from rich.segment import Segments
from rich.style import Style

from packer_cli.errors import visible
from packer_cli.result.layout import short_name
from packer_cli.show.documents import Document
from packer_cli.show.rows import Row, Segment, Span, spans_of
from packer_cli.tokenization.decoding import Decoder

_IDS_PER_LINE = 16


class RowPrinter:
    """Prints rows to stdout, with a legend before the first.

    decoder  None: token ids instead of text
    labels   whether the data says what is trained
    """

    def __init__(self, rows: int, decoder: Decoder | None, *, labels: bool) -> None:
        self._rows = rows
        self._decoder = decoder
        self._console = Console(highlight=False)
        self._coloured = bool(self._console.color_system) and not self._console.no_color
        self._ascii = not (sys.stdout.encoding or "").lower().startswith("utf")
        self._open, self._close = ("[[", "]]") if self._ascii else ("⟦", "⟧")
        self._pieces: list[Piece] = []
        if labels and self._coloured:
            self._add("trained tokens", "green")
            self._add(", others, ", "dim")
            self._add("special ones", "reverse")
            self._add("\n\n")
        elif labels:
            self._add(f"{self._open}trained tokens{self._close}, others\n\n")

    def print(self, row: Row, segments: list[Segment], *, whole: bool) -> None:
        """`whole`: these are all segments, so the padding is printed, too."""
        count = len(row.segments)
        self._add(f"row {row.index} of {self._rows:,}", "bold")
        self._add(
            f": {count:,} segment{'s' * (count != 1)}, {_counts(row.segments)}; "
            f"{visible(short_name(row.shard))} row {row.shard_row}\n"
        )
        for segment in segments:
            self._add(f"{'--' if self._ascii else '──'} segment {segment.index}", "bold cyan")
            if segment.side:
                self._add(f", pair {segment.side.pair} {segment.side}", "cyan")
            self._add(f": {_about(segment)}\n", "cyan")
            self._segment(spans_of(segment, self._decoder))
        if whole and row.padding:
            self._add(f"... {row.padding:,} padding token{'s' * (row.padding != 1)}\n", "dim")
        self._flush()

    def print_document(self, document: Document) -> None:
        """A document of a tokenized directory."""
        self._add(f"document {document.index} of {self._rows:,}", "bold")
        self._add(f": {_about(document.content)}; ")
        self._add(f"{visible(short_name(document.shard))} document {document.shard_document}\n")
        for side, content in document.sides or [("", document.content)]:
            if side:
                self._add(f"{'--' if self._ascii else '──'} {side}", "bold cyan")
                self._add(f": {_counts([content])}\n", "cyan")
            self._segment(spans_of(content, self._decoder))
        self._flush()

    def _flush(self) -> None:
        self._console.print(Segments(self._pieces), soft_wrap=True, end="")
        self._pieces = [Piece("\n")]  # between rows

    def _segment(self, spans: list[Span]) -> None:
        place, text = 0, ""
        for trained, run in groupby(spans, key=lambda span: span.trained):
            style = "" if trained is None else "green" if trained else "dim"
            bracketed = bool(trained) and not self._coloured
            for number, span in enumerate(run):
                if self._decoder is None and place:
                    self._add(_gap(place))
                if bracketed and number == 0:
                    self._add(self._open)
                text = self._text(span, place)
                self._add(text, f"{style} reverse" if span.special else style, data=True)
                place += len(span.ids)
            if bracketed:
                text = self._close
                self._add(text)
        if not text.endswith("\n"):
            self._add("\n")

    def _text(self, span: Span, place: int) -> str:
        if self._decoder is not None:
            return visible(span.text, "" if self._coloured else self._open[0] + self._close[0])
        return "".join(
            (_gap(place + i) if i else "") + str(token) for i, token in enumerate(span.ids)
        )

    def _add(self, text: str, style: str = "", *, data: bool = False) -> None:
        """Add text line by line, since pagers end a style there; line ends in `data` are shown."""
        look = Style.parse(style) if style and self._coloured else None
        mark = "↵" if data and self._decoder and self._coloured and not self._ascii else ""
        *lines, last = text.split("\n")
        for line in lines:
            self._pieces += [Piece(line + mark, look), Piece("\n")]
        if last:
            self._pieces.append(Piece(last, look))


def _gap(place: int) -> str:
    return " " if place % _IDS_PER_LINE else "\n"


def _counts(segments: list[Segment]) -> str:
    tokens = sum(len(segment.ids) for segment in segments)
    trained = [count for one in segments if (count := one.trained_tokens()) is not None]
    text = f"{tokens:,} token{'s' * (tokens != 1)}"
    return f"{text}, {sum(trained):,} trained" if trained else text


def _about(segment: Segment) -> str:
    counts = _counts([segment])
    return counts if segment.origin is None else f"{segment.origin}, {counts}"
