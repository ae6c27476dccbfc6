"""What `packer stats` shows of a tokenized directory."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from packer_cli.result.layout import DOCUMENTS, kind_of
from packer_cli.result.manifest import DOCUMENT_TOTALS, TOKENIZED, Result


def figures(manifest: Result) -> dict[str, Any]:
    """The manifest's totals, and what follows from them."""
    return {name: getattr(manifest, name) for name in DOCUMENT_TOTALS} | {
        "tokens_per_document": manifest.tokens / max(manifest.documents, 1),
        "shards": sum(kind_of(shard.file) == DOCUMENTS for shard in manifest.shards),
        "bytes": sum(shard.bytes for shard in manifest.shards),
    }


def as_json(directory: Path | str, manifest: Result, *, by: str | None = None) -> str:
    """The report as JSON."""
    document = manifest.document
    content = {"directory": str(directory), "kind": TOKENIZED} | figures(manifest)
    content["histograms"] = document["histograms"]
    if by == "shard":
        content["by_shard"] = document["shards"]
    elif by == "input":
        content["by_input"] = [document["inputs"][index] for index in manifest.inputs_now]
    return json.dumps(content, indent=1)


def print_documents(directory: Path | str, manifest: Result, **how: Any) -> None:
    """The report as a table."""
    lines = (f"{name:28}{value:>20,}" for name, value in figures(manifest).items())
    sys.stdout.write("\n".join([str(directory), *lines, ""]))
