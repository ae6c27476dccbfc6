"""Planning a recipe: each side of its split from the indexes of its tokenized sources."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from packer_cli.config.options import PackConfig
from packer_cli.config.recipe import Recipe
from packer_cli.config.run_options import EncodingOptions
from packer_cli.plan.run import Plan, plan
from packer_cli.records import Notify
from packer_cli.run.recipe import rows_of, tokenized_before


def plan_recipe(
    recipe: Recipe,
    destinations: Sequence[Path | str],
    configs: Sequence[PackConfig],
    options: EncodingOptions,
    sample: float | None = None,
    notify: Notify = lambda message: None,
    warn: Notify = lambda message: None,
    *,
    show_progress: bool = False,
) -> list[tuple[str | None, Plan]]:
    """(side, plan) of what `pack_recipe` would make with each of `configs`; without a split there
    is one, of no side. Nothing is tokenized: that was done by a run into one of `destinations`.
    """
    # what it has to say of the inputs was said when they were tokenized
    directories = tokenized_before(recipe, destinations, lambda message: None, warn)
    return [
        (part, plan(inputs, of_part, options, None, sample, notify, warn,
                    show_progress=show_progress))
        for part, inputs, of_part in rows_of(recipe, directories, configs)
    ]  # fmt: skip
