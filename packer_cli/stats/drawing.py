"""What the reports of all results share: where they are printed, histograms, lists by part."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import wrap

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from packer_cli.errors import one_line
from packer_cli.result.manifest import Manifest, Result, TokenizedManifest
from packer_cli.result.warnings import warnings_of
from packer_cli.result.wording import Bucket, aligned, count
from packer_cli.stats.origin import BUILT_IN, origin_lines

_BAR = 40
_TITLE = len("utilization")
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LOSSES = {
    "truncated_documents": "truncated", "truncated_tokens": "(tokens)",
    "dropped_documents": "dropped", "dropped_tokens": "(tokens)",
    "untrained_documents": "untrained",
}  # fmt: skip
DOCUMENT_LENGTH = "document length in tokens (documents)"


@contextmanager
def report(directory: Path | str, manifest: Manifest | TokenizedManifest) -> Iterator[Console]:
    """A console for a report to stdout, which begins with what the result was made of."""
    # a pipe has no width: a line is a line, without the spaces that fill up a table's
    piped = None if sys.stdout.isatty() else io.StringIO()
    width = None if piped is None else 10_000
    console = Console(file=piped, highlight=False, soft_wrap=True, width=width)
    console.print(f"[bold]{escape(one_line(str(directory)))}[/bold]")
    _print_origin(console, manifest)
    console.print()
    yield console
    if piped is not None:
        sys.stdout.write("\n".join(line.rstrip() for line in piped.getvalue().split("\n")))


def is_plain() -> bool:
    """Whether stdout can show no more than ASCII."""
    return not (sys.stdout.encoding or "").lower().startswith("utf")


def figures_grid() -> Table:
    """For rows of a title, a figure and what it means."""
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="left", style="dim", min_width=_TITLE)
    table.add_column(justify="right", style="bold")
    table.add_column()
    return table


def _print_origin(console: Console, manifest: Manifest | TokenizedManifest) -> None:
    width = max(console.width - _TITLE - 2, _TITLE)
    for name, text in origin_lines(manifest):
        lines = wrap(text, width, replace_whitespace=False, break_on_hyphens=False)
        for title, line in zip([name, *[""] * len(lines)], lines, strict=False):
            style = "yellow" if text.startswith(BUILT_IN) else ""
            console.print(Text.assemble((f"{title:<{_TITLE}}  ", "dim"), (line, style)))


def _bar(share: float, plain: bool) -> str:
    if plain:
        return "#" * round(share * _BAR)
    eighths = round(share * _BAR * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip() or ("▏" if share else "")


def histogram(console: Console, title: str, buckets: list[Bucket]) -> None:
    """Those of its buckets that hold anything."""
    buckets = [bucket for bucket in buckets if bucket.number]
    if not buckets:
        return
    console.print(f"\n[dim]{title}[/dim]")
    highest = max(bucket.number for bucket in buckets)
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column(style="cyan")
    for bucket in buckets:
        bar = _bar(bucket.number / highest, is_plain())
        table.add_row(bucket.label, count(bucket.number), bar)
    console.print(table)


def print_rows(console: Console, rows: list[list[str]], title: str = "") -> None:
    """Columns as `aligned` makes them."""
    console.print(f"\n[dim]{title}[/dim]" if title else "")
    for number, line in enumerate(aligned(rows)):
        console.print(Text(line, style="" if number else "dim"))


def print_warnings(console: Console, manifest: Result) -> None:
    for one in warnings_of(manifest):
        console.print(Text(f"\nwarning: {one}", style="yellow"))


def input_rows(manifest: Result) -> list[list[str]]:
    """For `print_rows`: what each input has."""
    names = ("documents", "tokens", "empty_documents", "rejected_records")
    inputs = manifest.inputs_now.values()
    shapes = any(one.shape for one in inputs)
    titles = ["documents", "tokens", "empty", "rejected", "bytes", *["shape"] * shapes, "input"]
    rows = [titles]
    for one in inputs:
        figures = (f"{figure:,}" for figure in (*(getattr(one, name) for name in names), one.size))
        rows.append([*figures, *[one.shape or ""] * shapes, one.path])
    return rows


def loss_rows(manifest: Result) -> list[list[str]]:
    """For `print_rows`: what inputs have lost on the way to rows; [] for nothing."""
    inputs = manifest.inputs_now.values()
    names = [
        name for name in manifest.counted_by_input
        if name in _LOSSES and any(getattr(one, name) for one in inputs)
    ]  # fmt: skip
    rows = [[*(f"{getattr(one, name):,}" for name in names), one.path]
            for one in inputs if any(getattr(one, name) for name in names)]  # fmt: skip
    return [[*(_LOSSES[name] for name in names), "input"], *rows] if rows else []
