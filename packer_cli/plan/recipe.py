"""Planning a recipe: each side of its split from the indexes of its tokenized sources.

Sources that were never tokenized are, as a sample in memory: see `untokenized.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from packer_cli.config.options import PackConfig
from packer_cli.config.recipe import Recipe
from packer_cli.config.run_options import EncodingOptions
from packer_cli.config.shape_rules import for_shape
from packer_cli.errors import UsageError
from packer_cli.inputs.discovery import find_inputs
from packer_cli.inputs.tokenized import is_tokenized, opened, shape_of
from packer_cli.plan.outcome import estimated, grown_documents
from packer_cli.plan.run import Plan, plan, plan_files
from packer_cli.plan.sample import weight_of
from packer_cli.plan.untokenized import Sample, held, lessened, samples_of
from packer_cli.records import Notify
from packer_cli.run.chosen import Chosen
from packer_cli.run.recipe import Raw, rows_of, tokenized_before, untokenized

_MOST_BYTES = 256 << 20  # of raw text that is read whole into memory


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
    is one, of no side. Sources that a run into one of `destinations` has tokenized are read as they
    are. If one is not tokenized, a sample of all of them is, in memory: nothing is written.
    """
    # what it has to say of the inputs was said when they were tokenized
    directories, raw = untokenized(recipe, destinations)
    if raw:
        return _estimated(recipe, directories, raw, configs, options, sample, notify, warn)
    directories = tokenized_before(recipe, destinations, lambda message: None, warn)
    return [
        (part, plan(inputs, of_part, options, None, sample, notify, warn,
                    show_progress=show_progress))
        for part, inputs, of_part in rows_of(recipe, directories, configs)
    ]  # fmt: skip


def _refuse_large(samples: Sequence[Sample]) -> None:
    """Raise UsageError for more raw text than is to be held in memory beside a directory."""
    size = sum(weight_of(unit.slices) for one in samples for unit in one.units)
    if size > _MOST_BYTES:
        raise UsageError(
            f"{samples[0].run.files[0].path}: not tokenized yet, beside a source that is a "
            f"tokenized directory: {size >> 20:,} MB of raw text would be read into memory, "
            f"expected at most {_MOST_BYTES >> 20} MB",
            "run packer tokenize first, and name its output directories in the recipe",
        )


def _estimated(
    recipe: Recipe,
    directories: list[list[str]],
    raw: list[Raw],
    configs: Sequence[PackConfig],
    options: EncodingOptions,
    sample: float | None,
    notify: Notify,
    warn: Notify,
) -> list[tuple[str | None, Plan]]:
    """Plans of a recipe, from a sample of its sources."""
    every = [one for its in directories for one in its]
    is_mixed = len(every) > len(raw)  # of a directory, no sample can be taken
    samples = samples_of(recipe, raw, 1.0 if is_mixed else sample, notify, warn)
    if is_mixed:
        _refuse_large(samples)
    if is_mixed and sample is not None and sample < 1:
        warn("warning: --sample is not followed: a source is a tokenized directory, so all is read")
    share = min(one.weight for one in samples)
    units = sum(len(one.units) for one in samples), sum(len(one.run.units) for one in samples)
    whole = "everything, and is exact" if share == 1 else f"{share:.1%}, and is an estimate"
    notify(f"the sources are not tokenized yet: the plan is made from {whole}")
    stop, by_path, files = threading.Event(), {str(one.to): one for one in samples}, []
    for index, path in enumerate(every):
        if path in by_path:
            files.append(held(by_path[path], index, share, options, notify, stop))
        else:
            (file,) = find_inputs([path], configs[0], notify)
            files.append(replace(file, index=index))
    is_tokenized(files)  # with one tokenizer, or UsageError
    facts, shape = opened(files[0]).facts, shape_of(files)
    chosen = Chosen(facts.tokenizer.source if facts.tokenizer else None)
    plans = []
    for part, _, of_part in rows_of(recipe, directories, configs):
        lesser = [
            replace(one, mixture=lessened(one.mixture, share)) if one.mixture else one
            for one in of_part
        ]
        try:
            made = plan_files(
                files, for_shape(lesser[0], shape), lesser, shape, chosen, options, None, notify,
                stop,
            )  # fmt: skip
        except UsageError as error:
            if share == 1:
                raise
            where = f"in a sample of {share:.1%}: "
            raise UsageError(where + error.message, error.tip) from error
        if share < 1:
            made = replace(
                made,
                documents=grown_documents(made.documents, 1 / share),
                outcomes=[estimated(one, share, units) for one in made.outcomes],
                sample=share,
            )
        plans.append((part, made))
    return plans
