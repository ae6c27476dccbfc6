"""The figures and histograms of a manifest drawn in the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from packer_cli.report import figures, inputs_of

_BAR = 40
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def print_report(
    directory: Path | str,
    manifest: dict[str, Any],
    *,
    detail: bool,
    by: str | None = None,
    deep: bool = False,
) -> None:
    """Print to stdout. `detail`: histograms too; `deep`: say that a recount agreed."""
    width = None if sys.stdout.isatty() else 10_000  # a pipe has none: a line is a line
    console = Console(highlight=False, soft_wrap=True, width=width)
    plain = not (sys.stdout.encoding or "").lower().startswith("utf")
    times = "x" if plain else "×"
    f = figures(manifest)
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="left", style="dim")
    table.add_column(justify="right", style="bold")
    table.add_column()
    size = f"{f['bytes'] / 1e6:,.1f} MB in {f['shards']} shard{'s' * (f['shards'] != 1)}"
    table.add_row("utilization", f"{f['utilization']:.2%}", "of all places hold real tokens")
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
        f"rows if each were padded alone: {f['unpacked_ratio']:.1f}{times} fewer rows",
    )  # fmt: skip
    table.add_row("documents", f"{f['documents']:,}", f"in {f['segments']:,} segments")
    share = f["trained_tokens"] / max(f["tokens"], 1)
    table.add_row("tokens", f"{f['tokens']:,}", f"{f['trained_tokens']:,} trained on ({share:.2%})")
    if f["trained_turns"]:
        table.add_row(
            "turns", f"{f['trained_turns']:,}", "of the assistant to train on, in all that was read"
        )
    table.add_row("padding", f"{f['padding_tokens']:,}", "places without a token")
    if "attention_cost" in f:
        before, after = f["attention_cost"]["before"], f["attention_cost"]["after"]
        for name, title, meaning in (
            ("cv", "attention", "variation of cost between rows"),
            ("max_over_mean", "", "costliest row / mean"),
        ):
            was = f"{meaning}; {before[name]:.3f} without --balance"
            table.add_row(title, f"{after[name]:.3f}", was)
    for name, count, rest in _losses(f, manifest["config"].get("train_on", "all")):
        table.add_row(name, f"{count:,}", rest, style="yellow")
    console.print(f"[bold]{escape(str(directory))}[/bold]")
    console.print(table)
    if detail:
        _histograms(console, manifest, plain)
    if by:
        _breakdown(console, manifest, by)
    if deep:
        console.print("\nrecounted from the shards: all figures agree")


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
        ("special", f.get("special_tokens_in_text", 0), "special tokens that the content of "
         "records spells out, see --special-tokens-in-text"),
        ("double BOS", f["double_bos_documents"], "documents begin with BOS twice"),
    ]  # fmt: skip
    return [row for row in rows if row[1]]


def _bar(share: float, plain: bool) -> str:
    if plain:
        return "#" * round(share * _BAR)
    eighths = round(share * _BAR * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip() or ("▏" if share else "")


def _histograms(console: Console, manifest: dict[str, Any], plain: bool) -> None:
    counts = manifest["histograms"]
    fill = [
        (f"{5 * i}-{5 * i + 5}%" if i < len(counts["row_fill"]) - 1 else "full", count)
        for i, count in enumerate(counts["row_fill"])
    ]
    _histogram(console, "row fill (rows)", fill, plain)
    for title, name in (
        ("document length in tokens (documents)", "document_length"),
        ("segments per row (rows)", "segments_per_row"),
    ):
        bins = [
            (f"{2**i:,}" if i == 0 else f"{2**i:,}-{2 ** (i + 1) - 1:,}", count)
            for i, count in enumerate(counts[name])
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


def _breakdown(console: Console, manifest: dict[str, Any], by: str) -> None:
    table = Table(box=None, header_style="dim", pad_edge=False)
    if by == "shard":
        max_length = manifest["config"]["max_length"]
        for name in ("shard", "rows", "segments", "tokens", "utilization", "bytes"):
            table.add_column(name, justify="left" if name == "shard" else "right")
        for s in manifest["shards"]:
            share = s["tokens"] / (s["rows"] * max_length)
            table.add_row(
                s["file"], f"{s['rows']:,}", f"{s['segments']:,}", f"{s['tokens']:,}",
                f"{share:.2%}", f"{s['bytes']:,}",
            )  # fmt: skip
    else:
        for name in ("input", "documents", "tokens", "empty", "rejected", "bytes"):
            table.add_column(
                name, justify="left" if name == "input" else "right", overflow="fold"
            )  # a path that is cut short names nothing
        for i in inputs_of(manifest):
            table.add_row(
                escape(i["path"]), f"{i['documents']:,}", f"{i['tokens']:,}",
                f"{i['empty_documents']:,}", f"{i['rejected_records']:,}", f"{i['size']:,}",
            )  # fmt: skip
    console.print()
    console.print(table)
