"""What a recipe says of amounts: how much of each source, in which stages, and what is held out.

It is part of the options of rows, since other amounts make other rows. Documents are chosen by
`mixing`, from the indexes of the tokenized directories that are a run's inputs.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from itertools import chain
from typing import Any

from packer_cli.options.option import Options, Rule, Tokens, Weight, Weights, option

TRAIN, VALIDATION = "train", "validation"
_HOW_MUCH = "How much {}: 2B, 200M, 500k (500,000)."
_MOST_EPOCHS = 10_000  # each has work units of its own


def max_epochs(default: float | None) -> Any:
    """The field of that name: of a source, and of all sources of a recipe."""
    about = "The most of a source that weight or tokens may take. Default: 1."
    return option(default, about, least=0, most=_MOST_EPOCHS)


@dataclass(frozen=True)
class Amount:
    """How much of a source is taken. At most one of `weight`, `epochs` and `tokens` is given; none
    is one epoch.

    weight    against the other weights, of what epochs and tokens of others leave
    tokens    as many, in whole epochs and a fraction of one
    inputs    how many of the run's inputs it is; those of the sources follow one another
    held_out  whether documents of it go to the validation split
    """

    name: str = option(MISSING, "What the source is called in all reports.")
    weight: Weight | None = option(None, "Its share, against the weights of other sources.")
    epochs: float | None = option(
        None,
        "How often all of it is taken; a fraction chooses documents.",
        least=0,
        most=_MOST_EPOCHS,
    )
    tokens: Tokens | None = option(None, _HOW_MUCH.format("of it is taken"))
    max_epochs: float = max_epochs(1.0)
    inputs: int = 1
    held_out: bool = True


@dataclass(frozen=True)
class Stage:
    """A part of the training. `weights`: (source, weight)."""

    tokens: Tokens = option(MISSING, _HOW_MUCH.format("there is in this stage"))
    weights: Weights = option((), "Weights of sources in this stage, where they differ.")
    name: str | None = option(None, "What the stage is called in reports.")

    def weight_of(self, source: Amount) -> float:
        """The weight that holds in this stage."""
        return dict(self.weights).get(source.name, source.weight or 0.0)


@dataclass(frozen=True)
class Mixture(Options):
    """The amounts of all sources of a recipe. Raises UsageError where they make no sense.

    tokens                None: by the sources, or the stages
    count                 "trained": tokens that are trained on only
    validation_share      of the documents of every source, by content; None: no such split
    validation_documents  or as many of every source
    part                  which side of the split this result is
    dedup                 of equal documents, within and across sources, one is taken
    """

    sources: tuple[Amount, ...]
    stages: tuple[Stage, ...] = ()
    tokens: Tokens | None = option(
        None,
        "How much there is in all: 2B, 200M, 500k (500,000). What epochs and tokens of sources "
        "leave of it is shared by weight. Default: the most that needs no source more than "
        "max_epochs times.",
    )
    count: str = option("tokens", "What amounts count:", choices=("tokens", "trained"))
    validation_share: float | None = None
    validation_documents: int | None = None
    part: str = TRAIN
    dedup: str = option(
        "none",
        "Which documents are left out as duplicates:",
        choices={"none": "", "exact": "all but one of equal ones, whatever their source"},
    )
    mix_within_rows: bool = option(
        True, "Whether a row may hold documents of several sources. Default: true."
    )

    def _rules(self) -> Iterator[Rule]:
        return chain(self._of_sources(), self._of_stages(), self._of_all())

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

    def _of_sources(self) -> Iterator[Rule]:
        for name, times in Counter(one.name for one in self.sources).items():
            what = f"source {name!r}: {times} sources have this name"
            yield times > 1, what, "give each source a name of its own"
        for one in self.sources:
            source, ways = f"source {one.name!r}", _ways(one)
            yield (
                len(ways) > 1,
                f"{source}: has {' and '.join(ways)}",
                "an amount is given in one way",
            )
            yield (
                self.stages and {"epochs", "tokens"} & {*ways},
                f"{source}: has epochs or tokens, and there are stages",
                "give it a weight: how much of it is taken follows from the stages' tokens",
            )
            for name in (*ways, "max_epochs"):
                value, least = getattr(one, name), 0 if name == "weight" else math.ulp(0)
                most = _MOST_EPOCHS if name.endswith("epochs") else sys.float_info.max
                yield (
                    not least <= value <= most,
                    f"{source}: {name} is {value:g}",
                    f"an amount is more than 0; epochs are at most {_MOST_EPOCHS:,}",
                )

    def _of_stages(self) -> Iterator[Rule]:
        names = [one.name for one in self.sources]
        for number, stage in enumerate(self.stages, 1):
            which = f"stage {stage.name or number}"
            tokens = f"{which}: tokens is {stage.tokens}"
            yield stage.tokens < 1, tokens, "say how many tokens it has"
            for name, weight in stage.weights:
                there_are = f"sources are {', '.join(names)}"
                yield name not in names, f"{which}: there is no source {name!r}", there_are
                bad = not 0 <= weight <= sys.float_info.max
                yield bad, f"{which}: the weight of {name!r} is {weight:g}", "give 0 or more"

    def _of_all(self) -> Iterator[Rule]:
        weights = [one.weight for one in self.sources if one.weight is not None]
        yield (
            weights and not self.stages and not any(weights),
            "weight: all weights are 0",
            "give one source more than 0",
        )
        yield (
            not weights and self.tokens is not None and not self.stages,
            "tokens: says how much there is in all, but no source has a weight",
            "give sources a weight, or leave tokens out",
        )
        yield (
            self.stages and self.tokens is not None,
            "tokens: how much there is in all is the sum of the stages' tokens",
            "leave it out",
        )


def _ways(amount: Amount) -> list[str]:
    """How an amount is given."""
    return [name for name in ("weight", "epochs", "tokens") if getattr(amount, name) is not None]
