"""The figures and histograms of a manifest drawn in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from packer_cli.result.layout import short_name
from packer_cli.result.manifest import Manifest
from packer_cli.result.wording import fill_buckets, power_buckets
from packer_cli.stats.drawing import (
    DOCUMENT_LENGTH,
    figures_grid,
    histogram,
    input_rows,
    is_plain,
    loss_rows,
    print_rows,
    print_warnings,
    report,
)
from packer_cli.stats.headline import headline, losses
from packer_cli.stats.sources import tables

if TYPE_CHECKING:
    from packer_cli.stats.waiting import Prediction


def print_report(
    directory: Path | str,
    manifest: Manifest,
    *,
    detail: bool,
    by: str | None = None,
    deep: bool = False,
    steps: Prediction | None = None,
) -> None:
    """Print to stdout. `detail`: histograms too; `deep`: say that a recount agreed; `steps`: what
    steps of training would cost.
    """
    times = "x" if is_plain() else "×"
    with report(directory, manifest) as console:
        console.print(_figures_table(manifest, times))
        if detail:  # the end of a run says them on stderr
            print_warnings(console, manifest)
        for title, rows in tables(manifest, detail=by == "source"):
            print_rows(console, rows, title)
        if detail:
            _histograms(console, manifest)
        if by in ("shard", "input"):
            print_rows(console, _shard_rows(manifest) if by == "shard" else input_rows(manifest))
        if by == "input" and (lost := loss_rows(manifest)):
            print_rows(console, lost)
        if steps is not None:
            print_rows(console, steps.rows(), steps.title(times))
        if deep:
            console.print("\nrecounted from the shards: all figures agree")


def _figures_table(manifest: Manifest, times: str) -> Table:
    table = figures_grid()
    for line in headline(manifest, times=times):
        table.add_row(*line)
    for line in losses(manifest):
        table.add_row(*line, style="yellow")
    return table


def _histograms(console: Console, manifest: Manifest) -> None:
    histograms = manifest.histograms
    histogram(console, "row fill (rows)", fill_buckets(histograms.row_fill))
    histogram(console, DOCUMENT_LENGTH, power_buckets(histograms.document_length))
    histogram(console, "segments per row (rows)", power_buckets(histograms.segments_per_row))


def _shard_rows(manifest: Manifest) -> list[list[str]]:
    rows = [["rows", "segments", "tokens", "utilization", "bytes", "shard"]]
    for s in manifest.shards:
        share = f"{s.tokens / (s.rows * manifest.config.max_length):.2%}"
        counts = f"{s.rows:,}", f"{s.segments:,}", f"{s.tokens:,}", share, f"{s.bytes:,}"
        rows.append([*counts, short_name(s.file)])
    return rows
