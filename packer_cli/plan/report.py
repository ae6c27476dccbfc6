"""The figures of a plan, as numbers and as JSON. The table: `table.py`."""

from __future__ import annotations

import math
from dataclasses import astuple
from typing import Any

from packer_cli.config.shape_rules import trained_on
from packer_cli.config.shapes import kinds_of
from packer_cli.errors import one_line
from packer_cli.inputs.tokenized import is_tokenized
from packer_cli.packing.attention_cost import spread
from packer_cli.plan.outcome import Outcome
from packer_cli.plan.run import Plan
from packer_cli.result.manifest import TOTALS
from packer_cli.result.sources import sources_as_json
from packer_cli.result.wording import directories, plural, size


def as_json(plan: Plan, batch_tokens: int | None, hidden_size: int) -> dict[str, Any]:
    """The plan for programs; names that `packer stats --json` has mean the same."""
    files = plan.files
    return {
        "inputs": {"count": len(files), "bytes": sum(file.size for file in files)},
        "tokenizer": plan.tokenizer,
        "shape": plan.shape.kind,
        "documents": plan.documents.count,
        "tokens": plan.documents.tokens,
        "document_length": plan.documents.length.tolist(),
        "sample": plan.sample,
        "hidden_size": hidden_size,
        "batch_tokens": batch_tokens,
        "outcomes": [figures(one, batch_tokens, hidden_size) for one in plan.outcomes],
    }


def made_from(plan: Plan) -> list[tuple[str, str]]:
    """(title, text) of what is planned, each on one line."""
    count, taken = len(plan.files), sum(file.size for file in plan.files)
    tokenizer = ("tokenizer", one_line(plan.tokenizer or "none needed"))
    if is_tokenized(plan.files):  # what is trained on is each directory's own
        return [("made from", directories(count)), tokenizer]
    return [
        ("made from", f"{plural(count, 'input')}, {size(taken)}"),
        ("records", f"{kinds_of(plan.shape)}; trained on: {trained_on(plan.config, plan.shape)}"),
        tokenizer,
    ]


def figures(one: Outcome, batch_tokens: int | None, hidden_size: int) -> dict[str, Any]:
    """Of one outcome. `rows_over_bound`: rows divided by the lower bound."""
    names = ("rows", *TOTALS, "padding_tokens", "utilization", "lower_bound_rows")
    config, errors = one.config, one.standard_errors
    return {name: one.totals[name] for name in names} | {
        "max_length": config.max_length,
        "strategy": config.strategy,
        "overlong": config.overlong,
        "rows_over_bound": one.rows / max(one.lower_bound_rows, 1),
        "unpacked_ratio": one.totals["unpacked_rows"] / max(one.rows, 1),
        "shards": one.planned.shards,
        "bytes": one.planned.bytes,
        "cut_documents": one.planned.cut_documents,
        "segments_per_row": one.segments_per_row,
        "attention_span": one.attention_span,
        "attention_share": one.attention_share(hidden_size),
        "steps": None if batch_tokens is None else one.steps(batch_tokens),
        "units_read": one.units[0],
        "units": one.units[1],
        "share_read": one.share,
        "standard_errors": {
            name: None if math.isnan(error) else error for name, error in errors.items()
        },
        "histograms": one.totals["histograms"],
        **({"mixedness": one.mixedness} if one.mixedness else {}),
        **_attention(one),
        **_sources(one),
    }


def _sources(one: Outcome) -> dict[str, Any]:
    if not one.sources:
        return {}
    names = "documents", "tokens", "trained_tokens"
    return {
        "sources": sources_as_json([source.facts for source in one.sources]),
        "by_source": [
            {"name": source.facts.name} | {name: getattr(source, name) for name in names}
            for source in one.sources
        ],
        "missed_shares": [vars(share) for share in one.shares if share.is_missed],
    }


def _attention(one: Outcome) -> dict[str, Any]:
    """How uneven the rows' attention costs are, before balancing and after."""
    counts = one.planned.counts
    if one.config.balance == "none" or not one.rows:
        return {}
    before, after = counts.attention_before, counts.attention_after
    return {
        "attention_cost": {
            "before": spread(*astuple(before)),
            "after": spread(*astuple(after)),
        }
    }
