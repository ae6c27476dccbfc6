"""What `packer stats` shows of a tokenized directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from packer_cli.result.layout import DOCUMENTS, kind_of, short_name
from packer_cli.result.manifest import DOCUMENT_TOTALS, TOKENIZED, TokenizedManifest
from packer_cli.result.wording import count, percent, plural, power_buckets, size
from packer_cli.stats.drawing import (
    DOCUMENT_LENGTH,
    figures_grid,
    histogram,
    input_rows,
    print_rows,
    print_warnings,
    report,
)
from packer_cli.stats.headline import unusual
from packer_cli.stats.origin import origin
from packer_cli.stats.report import rendered


def figures(manifest: TokenizedManifest) -> dict[str, Any]:
    """The manifest's totals, and what follows from them. `bytes`: of documents and indexes."""
    return {name: getattr(manifest, name) for name in DOCUMENT_TOTALS} | {
        "tokens_per_document": manifest.tokens / max(manifest.documents, 1),
        "shards": sum(kind_of(shard.file) == DOCUMENTS for shard in manifest.shards),
        "bytes": sum(shard.bytes for shard in manifest.shards),
    }


def as_json(directory: Path | str, manifest: TokenizedManifest, *, by: str | None = None) -> str:
    """The report as JSON; what newer packers add to histograms, shards and inputs is kept."""
    content = {"directory": str(directory), "kind": TOKENIZED} | origin(manifest)
    content |= figures(manifest)
    return rendered(content, manifest, by)


def print_documents(
    directory: Path | str,
    manifest: TokenizedManifest,
    *,
    detail: bool,
    by: str | None = None,
    deep: bool = False,
) -> None:
    """Print to stdout. `detail`: the histogram too; `deep`: say that a recount agreed."""
    with report(directory, manifest) as console:
        console.print(_figures_table(manifest))
        if detail:  # the end of a run says them on stderr
            print_warnings(console, manifest)
        if detail:
            lengths = power_buckets(manifest.histograms.document_length)
            histogram(console, DOCUMENT_LENGTH, lengths)
        if by:
            print_rows(console, _shard_rows(manifest) if by == "shard" else input_rows(manifest))
        if deep:
            console.print("\nrecounted from the shards: all figures agree")


def _figures_table(manifest: TokenizedManifest) -> Table:
    f, table = figures(manifest), figures_grid()
    disk = f"{size(f['bytes'])} in {plural(f['shards'], 'shard')}"
    mean = f"{f['tokens_per_document']:,.1f} tokens each"
    table.add_row("documents", f"{f['documents']:,}", f"{mean}; {disk}")
    share = percent(f["trained_tokens"] / max(f["tokens"], 1))
    trained = f"{count(f['trained_tokens'])} trained on ({share})"
    table.add_row("tokens", count(f["tokens"]), trained)
    if f["trained_turns"]:
        table.add_row("turns", f"{f['trained_turns']:,}", "written by the assistant")
    for name, number, rest in unusual(f):
        if number:
            table.add_row(name, count(number), rest, style="yellow")
    return table


def _shard_rows(manifest: TokenizedManifest) -> list[list[str]]:
    rows = [["documents", "tokens", "trained", "bytes", "shard"]]
    for shard in manifest.shards:
        if kind_of(shard.file) == DOCUMENTS:
            counts = shard.rows, shard.tokens, shard.trained_tokens, shard.bytes
            rows.append([*map(count, counts), short_name(shard.file)])
    return rows
