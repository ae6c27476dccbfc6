"""The report of a result, at the end of a run and in `packer stats`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from packer_cli.errors import ThresholdMissed

if TYPE_CHECKING:
    from packer_cli.result.manifest import Result


def print_packed(
    directory: Path | str,
    manifest: Result,
    *,
    as_json: bool,
    state: str = "kept, marked incomplete",
) -> None:
    """Print the report of a run. Raises ThresholdMissed when its result is incomplete."""
    print_report(directory, manifest, as_json=as_json, detail=False)
    if manifest.incomplete:
        raise ThresholdMissed(
            f"{directory}: {manifest.incomplete}",
            f"the output is {state}; see --overlong and --max-length",
        )


def print_report(directory: Path | str, manifest: Result, *, as_json: bool, **how: Any) -> None:
    from packer_cli.result.manifest import Manifest, TokenizedManifest

    if isinstance(manifest, TokenizedManifest):
        from packer_cli.stats import tokenized

        if as_json:
            print(tokenized.as_json(directory, manifest, by=how.get("by")))
        else:
            tokenized.print_documents(directory, manifest, **how)
    elif isinstance(manifest, Manifest):
        if as_json:
            from packer_cli.stats.report import as_json as render

            print(render(directory, manifest, by=how.get("by")))
        else:
            from packer_cli.stats import table

            table.print_report(directory, manifest, **how)
