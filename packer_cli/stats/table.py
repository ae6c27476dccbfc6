"""The figures and histograms of a manifest drawn in the terminal."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from textwrap import wrap

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from packer_cli.errors import one_line
from packer_cli.result.layout import short_name
from packer_cli.result.manifest import Manifest
from packer_cli.result.wording import Bucket, count, fill_buckets, power_buckets
from packer_cli.stats.headline import headline, losses
from packer_cli.stats.origin import BUILT_IN, origin_lines

_BAR = 40
_TITLE = len("utilization")
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def print_report(
    directory: Path | str,
    manifest: Manifest,
    *,
    detail: bool,
    by: str | None = None,
    deep: bool = False,
) -> None:
    """Print to stdout. `detail`: histograms too; `deep`: say that a recount agreed."""
    # a pipe has no width: a line is a line, without the spaces that fill up a table's
    piped = None if sys.stdout.isatty() else io.StringIO()
    width = None if piped is None else 10_000
    console = Console(file=piped, highlight=False, soft_wrap=True, width=width)
    plain = not (sys.stdout.encoding or "").lower().startswith("utf")
    times = "x" if plain else "×"
    console.print(f"[bold]{escape(one_line(str(directory)))}[/bold]")
    _print_origin(console, manifest)
    console.print()
    console.print(_figures_table(manifest, times))
    if detail:
        _histograms(console, manifest, plain)
    if by:
        _breakdown(console, manifest, by)
    if deep:
        console.print("\nrecounted from the shards: all figures agree")
    if piped is not None:
        sys.stdout.write("\n".join(line.rstrip() for line in piped.getvalue().split("\n")))


def _figures_table(manifest: Manifest, times: str) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="left", style="dim")
    table.add_column(justify="right", style="bold")
    table.add_column()
    for line in headline(manifest, times=times):
        table.add_row(*line)
    for line in losses(manifest):
        table.add_row(*line, style="yellow")
    return table


def _print_origin(console: Console, manifest: Manifest) -> None:
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


def _histograms(console: Console, manifest: Manifest, plain: bool) -> None:
    histograms = manifest.histograms
    for title, buckets in (
        ("row fill (rows)", fill_buckets(histograms.row_fill)),
        ("document length in tokens (documents)", power_buckets(histograms.document_length)),
        ("segments per row (rows)", power_buckets(histograms.segments_per_row)),
    ):
        _histogram(console, title, buckets, plain)


def _histogram(console: Console, title: str, buckets: list[Bucket], plain: bool) -> None:
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
        bar = _bar(bucket.number / highest, plain)
        table.add_row(bucket.label, count(bucket.number), bar)
    console.print(table)


def _breakdown(console: Console, manifest: Manifest, by: str) -> None:
    """Names come last, where long ones stay whole and move no figure."""
    if by == "shard":
        rows = [["rows", "segments", "tokens", "utilization", "bytes", "shard"]]
        for s in manifest.shards:
            share = f"{s.tokens / (s.rows * manifest.config.max_length):.2%}"
            counts = f"{s.rows:,}", f"{s.segments:,}", f"{s.tokens:,}", share, f"{s.bytes:,}"
            rows.append([*counts, short_name(s.file)])
    else:
        rows = [["documents", "tokens", "empty", "rejected", "bytes", "input"]]
        for i in manifest.inputs_now.values():
            figures = i.documents, i.tokens, i.empty_documents, i.rejected_records, i.size
            rows.append([*(f"{figure:,}" for figure in figures), i.path])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    console.print()
    for number, row in enumerate(rows):
        cells = [cell.rjust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True)]
        console.print(Text("  ".join([*cells, one_line(row[-1])]), style="" if number else "dim"))
