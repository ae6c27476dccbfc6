"""`packer plan --html FILE`: a plan as the page that `packer_cli.page.plan` draws."""

from __future__ import annotations

import math

from packer_cli.page.plan import Outcome, PlanReport, plan_page
from packer_cli.page.sources import Portion
from packer_cli.plan.outcome import Outcome as Planned
from packer_cli.plan.outcome import PlannedSource, by_sources, lengths_of
from packer_cli.plan.report import made_from
from packer_cli.plan.run import Plan

_TOTALS = (
    "lower_bound_rows", "documents", "segments", "tokens", "truncated_documents",
    "truncated_tokens", "truncated_trained_tokens", "dropped_documents", "dropped_tokens",
    "dropped_trained_tokens",
)  # fmt: skip


def page_of(plan: Plan, title: str, batch_tokens: int | None, hidden_size: int) -> bytes:
    """The page as a file's content. `title`: whose plan it is."""
    is_estimate = any(one.standard_errors for one in plan.outcomes)
    report = PlanReport(
        title=title,
        made_from=made_from(plan),
        documents=plan.documents.count,
        tokens=plan.documents.tokens,
        document_length=plan.documents.length.tolist(),
        outcomes=[_outcome(one, batch_tokens, hidden_size) for one in plan.outcomes],
        sample=plan.sample if is_estimate else None,
        sources=[
            (lengths_of(outcomes), [_portion(*one) for one in sources])
            for outcomes, sources in by_sources(plan.outcomes)
        ],
        counted=plan.config.mixture.counted if plan.config.mixture else "tokens",
    )
    page: bytes = plan_page(report)
    return page


def _portion(one: PlannedSource, asked: float, reached: float) -> Portion:
    return Portion(
        one.facts.name, one.documents, one.tokens, one.trained_tokens, one.facts.epochs, asked,
        reached,
    )  # fmt: skip


def _outcome(one: Planned, batch_tokens: int | None, hidden_size: int) -> Outcome:
    errors = one.standard_errors.items()
    return Outcome(
        max_length=one.config.max_length,
        strategy=one.config.strategy,
        overlong=one.config.overlong or "",
        rows=one.rows,
        bytes=one.planned.bytes,
        row_fill=one.totals["histograms"]["row_fill"],
        cut_documents=one.planned.cut_documents,
        attention_span=one.attention_span,
        attention_share=one.attention_share(hidden_size),
        steps=None if batch_tokens is None else one.steps(batch_tokens),
        standard_errors={name: error for name, error in errors if not math.isnan(error)},
        **{name: one.totals[name] for name in _TOTALS},
    )
