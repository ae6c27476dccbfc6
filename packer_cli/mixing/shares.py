"""How much of each source is taken: from amounts as a recipe gives them to counts of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from packer_cli.config.mixture import Amount, Mixture
from packer_cli.errors import ThresholdMissed, UsageError

_CLOSE = 0.001  # shares of the whole that are farther off are told
_ROUNDING = 1e-9


def amounts_of(mixture: Mixture, available: Sequence[int]) -> list[list[float]]:
    """For every stage, what is taken of each source, in tokens as `mixture.count` counts them.

    `available`: of each source, in one epoch. Raises UsageError for a source that is too small.
    """
    for one, has in zip(mixture.sources, available, strict=True):
        if not has and mixture.takes(one):
            raise UsageError(
                f"source {one.name!r}: has no {mixture.counted} to take",
                "its documents are held out, dropped, duplicates, or there are none",
            )
    if not mixture.stages:
        amounts = _without_stages(mixture, available)
        _refuse_too_much(mixture, available, amounts)
        return [amounts]
    stages = [_of_stage(mixture, number) for number in range(len(mixture.stages))]
    _refuse_too_much(mixture, available, [sum(column) for column in zip(*stages, strict=True)])
    return stages


@dataclass(frozen=True)
class Reached:
    """How near whole documents come to what is asked of a source, in a stage if there are any.

    asked, taken  as a manifest's `Source` has them
    off           by how much its share of the whole is off
    document      what the document at the end of what is taken counts for: with it, or without it,
                  the source would be farther off; 0 where others make its share what it is
    """

    source: str
    stage: int | None
    asked: float
    taken: int
    off: float
    document: int

    @property
    def is_missed(self) -> bool:
        """Whether the share is so far off that it is told."""
        return self.off > _CLOSE


def reached(
    mixture: Mixture,
    stage: int,
    asked: Sequence[float],
    taken: Sequence[int],
    documents: Sequence[int],
) -> list[Reached]:
    """Of every source. `documents`: what those at the ends of what is taken count for."""
    whole, got = sum(asked), max(sum(taken), 1)
    found = []
    for one, wanted, has, document in zip(mixture.sources, asked, taken, documents, strict=True):
        off = abs(has / got - wanted / whole) if whole else 0.0
        is_own = abs(has - wanted) >= off * whole / 2
        number = stage if mixture.stages else None
        found.append(Reached(one.name, number, wanted, has, off, document if is_own else 0))
    return found


def refuse_none(mixture: Mixture, asked: Sequence[float], taken: Sequence[int]) -> None:
    """Raise UsageError for a source of which something is asked and nothing would be taken: the
    result would lack it altogether, and a word in the recipe mends that.
    """
    for one, wanted, has in zip(mixture.sources, asked, taken, strict=True):
        if wanted and not has:
            raise UsageError(
                f"source {one.name!r}: {wanted:,.2f} {mixture.counted} are asked of it, and "
                "every document of it has more than twice as many: nothing of it would be taken",
                "ask for more, or leave the source out",
            )


def refuse_missed(mixture: Mixture, shares: Sequence[Reached], most: float) -> None:
    """Raise ThresholdMissed for a share that is more than `most` off. It names the worst."""
    worst = max(shares, key=lambda one: one.off)
    if worst.off > most:
        raise ThresholdMissed(
            f"{told(mixture, worst)}, --max-share-error is {most:.2%}",
            "take more in all, choose other weights, or allow more: --max-share-error "
            f"{math.ceil(worst.off * 1000) / 10:g}%",
        )


def told(mixture: Mixture, share: Reached) -> str:
    """A share that is off, in a line: asked, got, and why."""
    where = "" if share.stage is None else f"stage {stage_name(mixture, share.stage)}, "
    why = "since the documents of others are whole"
    if share.document:
        why = f"since documents are whole and the one at its end has {share.document:,}"
    return (
        f"{where}source {share.source!r}: {share.asked:,.0f} {mixture.counted} are asked of it, "
        f"{share.taken:,} are taken, {why}: its share is {share.off:.2%} off"
    )


def stage_name(mixture: Mixture, number: int) -> str:
    """What a stage is called in reports."""
    return mixture.stages[number].name or str(number + 1)


def _without_stages(mixture: Mixture, available: Sequence[int]) -> list[float]:
    """Epochs and tokens as they are given; what they leave is shared by weight."""
    fixed = [_fixed(one, has) for one, has in zip(mixture.sources, available, strict=True)]
    shares = _shares([one.weight or 0.0 for one in mixture.sources])
    if not any(shares):
        return fixed
    if mixture.tokens is not None:
        left = mixture.tokens - sum(fixed)
        if left <= 0:
            raise UsageError(
                f"tokens: {mixture.tokens:,} in all, and sources with epochs or tokens of their "
                f"own have {sum(fixed):,.0f}: nothing is left for the weights",
                "raise tokens, or give those sources less",
            )
    else:  # the most that needs no source more often than it may be taken
        left = min(
            one.max_epochs * has / share
            for one, has, share in zip(mixture.sources, available, shares, strict=True)
            if share
        )
    return [known + left * share for known, share in zip(fixed, shares, strict=True)]


def _fixed(one: Amount, available: int) -> float:
    if one.weight is not None:
        return 0.0
    if one.tokens is not None:
        return float(one.tokens)
    return (1.0 if one.epochs is None else one.epochs) * available


def _of_stage(mixture: Mixture, number: int) -> list[float]:
    stage = mixture.stages[number]
    shares = _shares([stage.weight_of(one) for one in mixture.sources])
    if not any(shares):
        raise UsageError(
            f"stage {stage.name or number + 1}: all weights are 0", "give one source more than 0"
        )
    return [stage.tokens * share for share in shares]


def _shares(weights: Sequence[float]) -> list[float]:
    """Shares of the whole by weight, all 0 where these are. However large weights are, their sum
    is a number.
    """
    largest = max(weights) or 1.0
    scaled = [weight / largest for weight in weights]
    total = sum(scaled) or 1.0
    return [weight / total for weight in scaled]


def _refuse_too_much(mixture: Mixture, available: Sequence[int], amounts: Sequence[float]) -> None:
    """Raise UsageError for a source of which more is asked than it may give."""
    for one, has, amount in zip(mixture.sources, available, amounts, strict=True):
        if one.epochs is None and amount > one.max_epochs * has * (1 + _ROUNDING):
            epochs = "1 epoch has" if one.max_epochs == 1 else f"{one.max_epochs:g} epochs have"
            raise UsageError(
                f"source {one.name!r}: too small: {amount:,.0f} {mixture.counted} are asked of "
                f"it, {epochs} {one.max_epochs * has:,.0f}",
                f"ask for less, or let it be taken more often: max_epochs = {amount / has:.2f}",
            )
