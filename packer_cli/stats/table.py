"""The figures and histograms of a manifest drawn in the terminal."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from textwrap import wrap
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from packer_cli.errors import one_line
from packer_cli.result.layout import short_name
from packer_cli.result.manifest import Manifest
from packer_cli.stats.origin import BUILT_IN, origin_lines
from packer_cli.stats.report import figures

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
    f = figures(manifest)
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="left", style="dim")
    table.add_column(justify="right", style="bold")
    table.add_column()
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


def _print_origin(console: Console, manifest: Manifest) -> None:
    width = max(console.width - _TITLE - 2, _TITLE)
    for name, text in origin_lines(manifest):
        lines = wrap(text, width, replace_whitespace=False, break_on_hyphens=False)
        for title, line in zip([name, *[""] * len(lines)], lines, strict=False):
            style = "yellow" if text.startswith(BUILT_IN) else ""
            console.print(Text.assemble((f"{title:<{_TITLE}}  ", "dim"), (line, style)))


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
        ("empty", f["empty_documents"], "documents without a token, not packed"),
        ("rejected", f["rejected_records"], "bad records, see rejected.jsonl"),
        ("no end", f["turns_without_end"], f"of {f['trained_turns']:,} trained turns end in no "
         "special token: the model may not learn to stop"),
        ("not shown", f["unshown_tools"], "conversations have tool calls or tools, which the chat "
         "template leaves out"),
        ("special", f["special_tokens_in_text"], "special tokens that the content of "
         "records spells out, see --special-tokens-in-text"),
        ("double BOS", f["double_bos_documents"], "documents begin with BOS twice"),
    ]  # fmt: skip
    return [row for row in rows if row[1]]


def _bar(share: float, plain: bool) -> str:
    if plain:
        return "#" * round(share * _BAR)
    eighths = round(share * _BAR * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip() or ("▏" if share else "")


def _histograms(console: Console, manifest: Manifest, plain: bool) -> None:
    histograms = manifest.histograms
    last = len(histograms.row_fill) - 1
    fill = [
        (f"{5 * i}-{5 * i + 5}%" if i < last else "full", count)
        for i, count in enumerate(histograms.row_fill)
    ]
    _histogram(console, "row fill (rows)", fill, plain)
    for title, counts in (
        ("document length in tokens (documents)", histograms.document_length),
        ("segments per row (rows)", histograms.segments_per_row),
    ):
        bins = [
            (f"{2**i:,}" if i == 0 else f"{2**i:,}-{2 ** (i + 1) - 1:,}", count)
            for i, count in enumerate(counts)
        ]
        _histogram(console, title, bins, plain)


def _histogram(console: Console, title: str, bins: list[tuple[str, int]], plain: bool) -> None:
    bins = [(label, count) for label, count in bins if count]
    if not bins:
        return
    console.print(f"\n[dim]{title}[/dim]")
    highest = max(count for _, count in bins)
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column(style="cyan")
    for label, count in bins:
        table.add_row(label, f"{count:,}", _bar(count / highest, plain))
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
