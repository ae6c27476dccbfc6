"""The figures that `packer stats` shows, as numbers and as JSON. The table: `report_table.py`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from packer_cli.result.manifest import TOTALS
from packer_cli.stats.origin import inputs_of, origin


def figures(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest's totals and what follows from them.

    `rows_over_bound`: rows divided by the lower bound.
    """
    rows, bound = manifest["rows"], manifest["lower_bound_rows"]
    names = ("rows", *TOTALS, "padding_tokens", "utilization", "lower_bound_rows")
    return {name: manifest.get(name, 0) for name in names} | {  # older ones lack some
        "max_length": manifest["config"]["max_length"],
        "strategy": manifest["config"]["strategy"],
        "rows_over_bound": rows / bound,
        "unpacked_ratio": manifest["unpacked_rows"] / rows,
        "shards": len(manifest["shards"]),
        "bytes": sum(shard["bytes"] for shard in manifest["shards"]),
        **_attention(manifest),
    }


def _attention(manifest: dict[str, Any]) -> dict[str, Any]:
    """How uneven the rows' attention costs are, before balancing and after."""
    costs = manifest.get("attention_cost")
    if costs is None:
        return {}
    return {"attention_cost": {when: spread(cost) for when, cost in costs.items()}}


def spread(cost: dict[str, int]) -> dict[str, float]:
    """Coefficient of variation, and max / mean, of sums as `AttentionCost` has them."""
    rows, total = cost["rows"], cost["sum"]
    return {
        "cv": math.sqrt(max(rows * cost["sum_of_squares"] - total * total, 0)) / total,
        "max_over_mean": cost["max"] * rows / total,
    }


def as_json(directory: Path | str, manifest: dict[str, Any], *, by: str | None = None) -> str:
    content = {"directory": str(directory)} | origin(manifest) | figures(manifest)
    content["histograms"] = manifest["histograms"]
    if by == "shard":
        content["by_shard"] = manifest["shards"]
    elif by == "input":
        content["by_input"] = inputs_of(manifest)
    return json.dumps(content, indent=1)
