"""How much of each source is taken: from amounts as a recipe gives them to counts of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from packer_cli.config.mixture import Amount, Mixture
from packer_cli.errors import UsageError

_CLOSE = 0.001  # how near to what is asked for a share of the whole must come
_ROUNDING = 1e-9


def amounts_of(mixture: Mixture, available: Sequence[int]) -> list[list[float]]:
    """For every stage, what is taken of each source, in tokens as `mixture.count` counts them.

    `available`: of each source, in one epoch. Raises UsageError for a source that is too small.
    """
    for one, has in zip(mixture.sources, available, strict=True):
        if not has and mixture.takes(one):
            raise UsageError(
                f"source {one.name!r}: has no {_counted(mixture)} to take",
                "its documents are held out, dropped, duplicates, or there are none",
            )
    if not mixture.stages:
        amounts = _without_stages(mixture, available)
        _refuse_too_much(mixture, available, amounts)
        return [amounts]
    stages = [_of_stage(mixture, number) for number in range(len(mixture.stages))]
    _refuse_too_much(mixture, available, [sum(column) for column in zip(*stages, strict=True)])
    return stages


def refuse_missed(
    mixture: Mixture, stage: int, asked: Sequence[float], taken: Sequence[int]
) -> None:
    """Raise UsageError for shares that documents cannot come near enough to. It names the source
    that is the farthest from what is asked of it.
    """
    for one, wanted, has in zip(mixture.sources, asked, taken, strict=True):
        if one.weight is None and not mixture.stages and wanted and not has:
            raise UsageError(
                f"source {one.name!r}: {wanted:,.2f} {_counted(mixture)} are asked of it, and "
                "every document of it has more than twice as many: nothing of it would be taken",
                "ask for more, or leave the source out",
            )
    whole, reached = sum(asked), max(sum(taken), 1)
    missed = max(
        abs(has / reached - wanted / whole) if one.weight is not None or mixture.stages else 0.0
        for one, wanted, has in zip(mixture.sources, asked, taken, strict=True)
    )
    if missed <= _CLOSE:
        return
    far = [abs(wanted - has) for wanted, has in zip(asked, taken, strict=True)]
    cause = far.index(max(far))
    where = f"stage {mixture.stages[stage].name or stage + 1}, " if mixture.stages else ""
    raise UsageError(
        f"{where}source {mixture.sources[cause].name!r}: its documents are too long for its share: "
        f"{asked[cause]:,.0f} {_counted(mixture)} are asked of it, whole documents come to "
        f"{taken[cause]:,}, so shares are up to {missed:.2%} off, expected at most {_CLOSE:.1%}",
        "take more in all, choose other weights, or give every source epochs or tokens, which may "
        "be off by a document",
    )


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
                f"source {one.name!r}: too small: {amount:,.0f} {_counted(mixture)} are asked of "
                f"it, {epochs} {one.max_epochs * has:,.0f}",
                f"ask for less, or let it be taken more often: max_epochs = {amount / has:.2f}",
            )


def _counted(mixture: Mixture) -> str:
    return "trained tokens" if mixture.count == "trained" else "tokens"
