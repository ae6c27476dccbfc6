"""The figures and histograms of a manifest drawn in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from packer_cli.result.layout import short_name
from packer_cli.result.manifest import Manifest
from packer_cli.stats.drawing import (
    DOCUMENT_LENGTH,
    figures_grid,
    histogram,
    input_rows,
    is_plain,
    powers,
    print_rows,
    report,
    unusual,
)
from packer_cli.stats.report import figures


def print_report(
    directory: Path | str,
    manifest: Manifest,
    *,
    detail: bool,
    by: str | None = None,
    deep: bool = False,
) -> None:
    """Print to stdout. `detail`: histograms too; `deep`: say that a recount agreed."""
    times = "x" if is_plain() else "×"
    with report(directory, manifest) as console:
        console.print(_figures_table(manifest, times))
        if detail:
            _histograms(console, manifest)
        if by:
            print_rows(console, _shard_rows(manifest) if by == "shard" else input_rows(manifest))
        if deep:
            console.print("\nrecounted from the shards: all figures agree")


def _figures_table(manifest: Manifest, times: str) -> Table:
    f = figures(manifest)
    table = figures_grid()
    size = f"{f['bytes'] / 1e6:,.1f} MB in {f['shards']} shard{'s' * (f['shards'] != 1)}"
    table.add_row("utilization", f"{f['utilization']:.2%}", "of all positions hold real tokens")
    table.add_row(
        "rows", f"{f['rows']:,}", f"of {f['max_length']:,} tokens, {f['strategy']}; {size}"
    )
    over = f["rows"] - f["lower_bound_rows"]
    table.add_row(
        "lower bound", f"{f['lower_bound_rows']:,}",
        "rows; no packer can do better" if not over
        else f"rows; at most {over:,} ({over / f['lower_bound_rows']:.2%}) could be saved",
    )  # fmt: skip
    table.add_row(
        "unpacked", f"{f['unpacked_rows']:,}",
        f"rows if each document were padded alone: {f['unpacked_ratio']:.1f}{times} fewer rows",
    )  # fmt: skip
    table.add_row("documents", f"{f['documents']:,}", f"in {f['segments']:,} segments")
    share = f["trained_tokens"] / max(f["tokens"], 1)
    table.add_row("tokens", f"{f['tokens']:,}", f"{f['trained_tokens']:,} trained on ({share:.2%})")
    if f["trained_turns"]:
        table.add_row("turns", f"{f['trained_turns']:,}", "written by the assistant")
    table.add_row("padding", f"{f['padding_tokens']:,}", "positions without a token")
    if "attention_cost" in f:
        before, after = f["attention_cost"]["before"], f["attention_cost"]["after"]
        for name, title, meaning in (
            ("cv", "attention", "variation of cost between rows"),
            ("max_over_mean", "", "costliest row / mean"),
        ):
            text = f"{meaning}; {before[name]:.3f} without --balance"
            table.add_row(title, f"{after[name]:.3f}", text)
    for name, count, rest in _losses(f, manifest.config.train_on):
        table.add_row(name, f"{count:,}", rest, style="yellow")
    return table


def _losses(f: dict[str, Any], train_on: str) -> list[tuple[str, int, str]]:
    def trained(what: str) -> str:
        return f", {f[f'{what}_trained_tokens']:,} of them trained" if train_on != "all" else ""

    untrained = f["untrained_documents"]
    rows = [
        ("truncated", f["truncated_documents"],
         f"documents, {f['truncated_tokens']:,} tokens cut off{trained('truncated')}"),
        ("dropped", f["dropped_documents"],
         f"documents, {f['dropped_tokens']:,} tokens{trained('dropped')}"),
        ("untrained", untrained, "of the dropped documents, without a token to train on"),
        *unusual(f),
    ]  # fmt: skip
    return [row for row in rows if row[1]]


def _histograms(console: Console, manifest: Manifest) -> None:
    histograms = manifest.histograms
    last = len(histograms.row_fill) - 1
    fill = [
        (f"{5 * i}-{5 * i + 5}%" if i < last else "full", count)
        for i, count in enumerate(histograms.row_fill)
    ]
    histogram(console, "row fill (rows)", fill)
    histogram(console, DOCUMENT_LENGTH, powers(histograms.document_length))
    histogram(console, "segments per row (rows)", powers(histograms.segments_per_row))


def _shard_rows(manifest: Manifest) -> list[list[str]]:
    rows = [["rows", "segments", "tokens", "utilization", "bytes", "shard"]]
    for s in manifest.shards:
        share = f"{s.tokens / (s.rows * manifest.config.max_length):.2%}"
        counts = f"{s.rows:,}", f"{s.segments:,}", f"{s.tokens:,}", share, f"{s.bytes:,}"
        rows.append([*counts, short_name(s.file)])
    return rows
