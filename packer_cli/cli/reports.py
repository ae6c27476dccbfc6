"""The report of a result, at the end of a run and in `packer stats`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from packer_cli.errors import ThresholdMissed
from packer_cli.storage import base_name

if TYPE_CHECKING:
    from packer_cli.result.manifest import Result, TokenizedManifest
    from packer_cli.stats.waiting import Prediction


def print_packed(
    directory: Path | str,
    manifest: Result,
    *,
    as_json: bool,
    state: str = "kept, marked incomplete",
) -> None:
    """Print the report of a run. Raises ThresholdMissed when its result is incomplete."""
    print_results([(directory, manifest)], as_json=as_json, state=state)


def print_results(
    results: Sequence[tuple[Path | str, Result]], *, as_json: bool, state: str
) -> None:
    """Print the reports of a run. Raises ThresholdMissed when one is incomplete."""
    print_reports(results, as_json=as_json, detail=False)
    for directory, one in results:
        if one.incomplete:
            raise ThresholdMissed(
                f"{directory}: {one.incomplete}",
                f"the output is {state}; see --overlong and --max-length",
            )


def print_reports(
    results: Sequence[tuple[Path | str, Result]],
    *,
    as_json: bool,
    steps: Sequence[Prediction | None] = (),
    **how: Any,
) -> None:
    """One after the other; as JSON, several as one object by the names of their directories.

    `steps`: what those of each result would cost, if that was asked.
    """
    steps = steps or [None] * len(results)
    if as_json and len(results) > 1:
        reports = {
            base_name(str(directory)): json.loads(rendered(directory, one, how.get("by"), its))
            for (directory, one), its in zip(results, steps, strict=True)
        }
        print(json.dumps(reports, indent=1))
        return
    for number, ((directory, one), its) in enumerate(zip(results, steps, strict=True)):
        print(end="\n" if number else "")
        print_report(directory, one, as_json=as_json, steps=its, **how)


def rendered(
    directory: Path | str,
    manifest: Result,
    by: str | None = None,
    steps: Prediction | None = None,
) -> str:
    """The report of a result as JSON."""
    from packer_cli.result.manifest import Manifest
    from packer_cli.stats import report, tokenized

    if isinstance(manifest, Manifest):
        return report.as_json(directory, manifest, by=by, steps=steps)
    return tokenized.as_json(directory, cast("TokenizedManifest", manifest), by=by)


def print_report(
    directory: Path | str,
    manifest: Result,
    *,
    as_json: bool,
    steps: Prediction | None = None,
    **how: Any,
) -> None:
    from packer_cli.result.manifest import Manifest, TokenizedManifest

    if as_json:
        print(rendered(directory, manifest, how.get("by"), steps))
    elif isinstance(manifest, TokenizedManifest):
        from packer_cli.stats import tokenized

        tokenized.print_documents(directory, manifest, **how)
    elif isinstance(manifest, Manifest):
        from packer_cli.stats import table

        table.print_report(directory, manifest, steps=steps, **how)
