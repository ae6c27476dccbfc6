"""The figures that `packer stats` shows, as numbers and as JSON. The table: `table.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import UNSET
from msgspec.structs import asdict

from packer_cli.packing.attention_cost import spread
from packer_cli.result.counts import mixedness
from packer_cli.result.manifest import TOTALS, Cost, Manifest, Result
from packer_cli.result.sources import by_source, sources_as_json
from packer_cli.result.warnings import warnings_of
from packer_cli.stats.origin import origin

if TYPE_CHECKING:
    from packer_cli.stats.waiting import Prediction


def figures(manifest: Manifest) -> dict[str, Any]:
    """The manifest's totals and what follows from them.

    `rows_over_bound`: rows divided by the lower bound.
    """
    names = ("rows", *TOTALS, "padding_tokens", "utilization", "lower_bound_rows")
    return {name: getattr(manifest, name) for name in names} | {
        "max_length": manifest.config.max_length,
        "strategy": manifest.config.strategy,
        "rows_over_bound": manifest.rows / manifest.lower_bound_rows,
        "unpacked_ratio": manifest.unpacked_rows / manifest.rows,
        "shards": len(manifest.shards),
        "bytes": sum(shard.bytes for shard in manifest.shards),
        **_mixedness(manifest),
        **_attention(manifest),
    }


def _mixedness(manifest: Manifest) -> dict[str, Any]:
    found = mixedness(asdict(manifest), asdict(manifest.histograms))
    return {"mixedness": found} if found else {}


def _attention(manifest: Manifest) -> dict[str, Any]:
    """How uneven the rows' attention costs are, before balancing and after."""
    costs = manifest.attention_cost
    if costs is UNSET:
        return {}
    return {"attention_cost": {"before": _spread(costs.before), "after": _spread(costs.after)}}


def _spread(cost: Cost) -> dict[str, float]:
    return spread(cost.rows, cost.sum, cost.sum_of_squares, cost.max)


def as_json(
    directory: Path | str,
    manifest: Manifest,
    *,
    by: str | None = None,
    steps: Prediction | None = None,
) -> str:
    """The report as JSON; what newer packers add to histograms, shards and inputs is kept."""
    content = {"directory": str(directory)} | origin(manifest) | figures(manifest)
    if steps is not None:
        content["steps"] = steps.as_json()
    if manifest.sources:
        content["sources"] = sources_as_json(manifest.sources)
        content["stages"] = manifest.document["stages"]
        for name in ("missed_shares", "source_records"):
            content[name] = manifest.document.get(name, [])
    if by == "source":
        content["by_source"] = by_source(manifest)
    return rendered(content, manifest, by)


def rendered(content: dict[str, Any], manifest: Result, by: str | None) -> str:
    """A report as JSON, with the histograms, and what each shard or input has if that is asked."""
    document = manifest.document
    content["warnings"] = [one._asdict() for one in warnings_of(manifest)]
    content["histograms"] = document["histograms"]
    if by == "shard":
        content["by_shard"] = document["shards"]
    elif by == "input":
        content["by_input"] = [document["inputs"][index] for index in manifest.inputs_now]
    return json.dumps(content, indent=1)
