"""What a recipe says of amounts: how much of each source, in which stages, and what is held out.

It is part of the options of rows, since other amounts make other rows. Documents are chosen by
`mixing`, from the indexes of the tokenized directories that are a run's inputs.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from packer_cli.errors import UsageError

TRAIN, VALIDATION = "train", "validation"
COUNTS = ("tokens", "trained")
DEDUPS = ("none", "exact")


@dataclass(frozen=True)
class Amount:
    """How much of a source is taken. At most one of `weight`, `epochs` and `tokens` is given; none
    is one epoch.

    name        of the source
    weight      its share, against the other weights, of what epochs and tokens of others leave
    epochs      how often it is taken; the fraction chooses documents
    tokens      as many, in whole epochs and a fraction of one
    max_epochs  the most of it that `weight` or `tokens` may take
    inputs      how many of the run's inputs it is; those of the sources follow one another
    held_out    whether documents of it go to the validation split
    """

    name: str
    weight: float | None = None
    epochs: float | None = None
    tokens: int | None = None
    max_epochs: float = 1.0
    inputs: int = 1
    held_out: bool = True


@dataclass(frozen=True)
class Stage:
    """A part of the training: `tokens` in all, of which sources have shares by their weights.

    weights  (source, weight), for sources whose own weight does not hold in this stage
    """

    tokens: int
    weights: tuple[tuple[str, float], ...] = ()
    name: str | None = None

    def weight_of(self, source: Amount) -> float:
        """The weight that holds in this stage."""
        return dict(self.weights).get(source.name, source.weight or 0.0)


@dataclass(frozen=True)
class Mixture:
    """The amounts of all sources of a recipe. Raises UsageError where they make no sense.

    tokens                how much in all; None: by the sources, or the stages
    count                 what amounts count: "tokens", or "trained" ones only
    validation_share      of the documents of every source, by content; None: no such split
    validation_documents  or as many of every source
    part                  which side of the split this result is
    dedup                 "exact": of equal documents, within and across sources, one is taken
    mix_within_rows       whether a row may hold documents of several sources
    """

    sources: tuple[Amount, ...]
    stages: tuple[Stage, ...] = ()
    tokens: int | None = None
    count: str = "tokens"
    validation_share: float | None = None
    validation_documents: int | None = None
    part: str = TRAIN
    dedup: str = "none"
    mix_within_rows: bool = True

    def __post_init__(self) -> None:
        names = [one.name for one in self.sources]
        for name, times in Counter(names).items():
            if times > 1:
                raise UsageError(f"source {name!r}: {times} sources have this name", _ONE_NAME)
        for one in self.sources:
            _check_amount(one)
        for number, stage in enumerate(self.stages, 1):
            _check_stage(stage, number, names)
        self._check_weights()

    @property
    def is_split(self) -> bool:
        """Whether documents are held out for validation."""
        return self.validation_share is not None or self.validation_documents is not None

    @property
    def counted(self) -> str:
        """What amounts count, in words."""
        return "trained tokens" if self.count == "trained" else "tokens"

    def takes(self, source: Amount) -> bool:
        """Whether anything is asked of a source, in any stage."""
        if self.stages:
            return any(stage.weight_of(source) for stage in self.stages)
        return source.weight != 0

    def _check_weights(self) -> None:
        weights = [one.weight for one in self.sources if one.weight is not None]
        if weights and not self.stages and not any(weights):
            raise UsageError("weight: all weights are 0", "give one source more than 0")
        if not weights and self.tokens is not None and not self.stages:
            raise UsageError(
                "tokens: says how much there is in all, but no source has a weight",
                "give sources a weight, or leave tokens out",
            )
        if not self.stages:
            return
        for one in self.sources:
            if one.epochs is not None or one.tokens is not None:
                raise UsageError(
                    f"source {one.name!r}: has epochs or tokens, and there are stages",
                    "give it a weight: how much of it is taken follows from the stages' tokens",
                )
        if self.tokens is not None:
            raise UsageError(
                "tokens: how much there is in all is the sum of the stages' tokens", "leave it out"
            )


_MOST_EPOCHS = 10_000
_ONE_NAME = "give each source a name of its own"


def _check_amount(one: Amount) -> None:
    given = [name for name in ("weight", "epochs", "tokens") if getattr(one, name) is not None]
    if len(given) > 1:
        raise UsageError(
            f"source {one.name!r}: has {' and '.join(given)}", "an amount is given in one way"
        )
    for name, least in (("weight", 0.0), ("epochs", None), ("tokens", None), ("max_epochs", None)):
        value = getattr(one, name)
        if value is None:
            continue
        if not math.isfinite(value) or value < 0 or (value == 0 and least is None):
            what = "not a finite number" if not math.isfinite(value) else (
                "negative" if value < 0 else "nothing"
            )  # fmt: skip
            raise UsageError(f"source {one.name!r}: {name} is {value:g}, {what}")
        if name.endswith("epochs") and value > _MOST_EPOCHS:
            raise UsageError(
                f"source {one.name!r}: {name} is {value:g}, the most is {_MOST_EPOCHS:,}",
                "each epoch has work units of its own",
            )


def _check_stage(stage: Stage, number: int, names: list[str]) -> None:
    which = f"stage {stage.name or number}"
    if stage.tokens < 1:
        raise UsageError(f"{which}: tokens is {stage.tokens}", "say how many tokens it has")
    for name, weight in stage.weights:
        if name not in names:
            raise UsageError(
                f"{which}: there is no source {name!r}", f"sources are {', '.join(names)}"
            )
        if not math.isfinite(weight) or weight < 0:
            raise UsageError(f"{which}: the weight of {name!r} is {weight:g}")
