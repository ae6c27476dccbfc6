"""`packer export`: a packed or tokenized directory in the formats of other trainers.

Shards are mapped and written a batch at a time, so memory does not grow with the data. An output
with its final name is complete: see `destination.py`. Token counts are checked against the
manifest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from packer_cli.errors import UsageError, named, one_of
from packer_cli.export.destination import new_directory
from packer_cli.export.formats import FORMATS, Exported, Packed, Writer
from packer_cli.export.rows import batches, documents, tokenized_documents, units
from packer_cli.options.option import refuse
from packer_cli.options.run_options import StepOptions
from packer_cli.progress import Progress
from packer_cli.records import Int64, Notify
from packer_cli.result.manifest import TokenizedManifest, checksum, load_any
from packer_cli.result.opening import Paths, open_packed
from packer_cli.result.reader import PackedDirectory
from packer_cli.result.tokenized import open_tokenized
from packer_cli.steps import Order, Schedule, StepSizes, row_costs


def export(
    directory: str | os.PathLike[str],
    to: str,
    output: str | os.PathLike[str],
    *,
    even: StepOptions | None = None,
    tokens: Paths | None = None,
    overwrite: bool = False,
    no_lock: bool = False,
    show_progress: bool = False,
    notify: Notify = lambda message: None,
) -> Exported:
    """Write `directory` in the format `to` into the new or empty directory `output`, or, with
    `overwrite`, in place of an earlier export. `no_lock`: also where there are no locks. `tokens`:
    as in `open_packed`. `even`: rows in an order that makes even steps of a training of such
    sizes, which gives batches in turn to its processes, instead of that of the shards. `notify`:
    told of carried columns for which the format has no place.

    Returns the opened directory. Raises UsageError for an unknown format, an output that must not
    be replaced, a directory that lacks what the format needs, and even steps of a format whose
    readers do not keep an order or of fewer rows than a step has; DataError for a directory that
    is unfinished or damaged, and when the disk is full.
    """
    if to not in FORMATS:
        raise one_of("--to", to, FORMATS)
    kind, is_tokenized = FORMATS[to], isinstance(load_any(directory), TokenizedManifest)
    exported = open_tokenized(directory) if is_tokenized else open_packed(directory, tokens)
    _refuse(exported, to, kind, even=even is not None)
    carried = exported.facts.config.carried
    if carried and not kind.keeps_carried:
        notify(f"--to {to} has no place for carried columns, left out: {named(carried)}")
    if isinstance(exported, PackedDirectory):
        shards = exported.facts.shards
        parts: Callable[..., Iterable[Any]] = partial(kind.takes, exported)
        if even:
            parts = partial(
                parts, order=_even_order(exported, kind.squared_lengths(exported), even)
            )
    else:
        shards, parts = exported.shards, partial(tokenized_documents, exported)
    details = {"format": to, "manifest_sha256": checksum(exported.facts.document)}
    marker = None if kind is Packed else details  # a result lists its files in its manifest
    total = sum(shard.bytes for shard in shards)
    with (
        new_directory(
            Path(output), exported.path, marker, overwrite=overwrite, no_lock=no_lock
        ) as folder,
        Progress(total, show=show_progress, doing="exporting") as progress,
    ):
        writer = kind(folder, exported, even=even is not None)
        try:
            for part in parts(lambda size: progress.read(size, 0)):
                writer.write(part)
        finally:
            writer.close()
    return exported


def _refuse(exported: Exported, to: str, kind: type[Writer], *, even: bool) -> None:
    """UsageError for a directory that has not what a format needs, or what it cannot keep."""
    place, facts = exported.path, exported.facts
    if isinstance(exported, PackedDirectory):
        of_rows, columns = True, exported.facts.config.columns
    else:
        of_rows, columns = False, kind.needs
    missing = next((name for name in kind.needs if name not in columns), "")
    with_documents = " or ".join(n for n, one in FORMATS.items() if one.takes is documents)
    ordered = ", ".join(name for name, one in FORMATS.items() if one.in_order)
    keeps_mask = not of_rows or "labels" in columns or kind.takes in (batches, units)
    # the first token of a piece is never trained on, whatever the format
    pieces = facts.segments if of_rows else facts.documents
    untrained = facts.tokens - pieces - facts.trained_tokens
    refuse([
        (
            even and not kind.in_order,
            f"--order even: rows of --to {to} are not read in an order of ours",
            f"choose one of {ordered}, or leave out --order",
        ),
        (
            missing,
            f"{place}: has no column {missing}, which --to {to} needs",
            f"pack the data again with {missing} among the --columns",
        ),
        (
            not of_rows and kind.takes is not documents,
            f"{place}: holds documents, and --to {to} is a format of rows",
            f"pack them first: packer pack {place} --max-length 4096; or export the "
            f"documents: --to {with_documents}",
        ),
        (
            untrained > 0 and not (kind.keeps_mask and keeps_mask),
            f"{place}: {untrained:,} of its tokens are not to be trained on, which --to {to} "
            "cannot say",
            "choose a format with labels or a loss mask, such as megatron-bridge or trl",
        ),
    ])  # fmt: skip


def _even_order(packed: PackedDirectory, squared_lengths: Int64, sizes: StepOptions) -> Int64:
    """int64[rows]: the rows of a directory in the order in which they are to be read, those that
    meet in a step chosen as by `PackedSampler(balance="order")`. Rows that are left over, fewer
    than there are ranks, and those that the reader drops are the last ones.

    squared_lengths  int64[rows], as `Writer.squared_lengths` gives them
    sizes            of a trainer that fills batches of B rows in turn, and gives batch i to process
                     i % W, as Accelerate's `BatchSamplerShard` does: a step of M micro-batches is
                     W * B * M neighboring rows

    Raises UsageError for a step of more rows than there are.
    """
    read = np.flatnonzero(squared_lengths >= 0)
    of_step = StepSizes(sizes.ranks or 1, sizes.batch_size, sizes.micro_batches)
    if of_step.rows > len(read):
        raise UsageError(
            f"{packed.path}: has {len(read):,} rows to train on, fewer than a step of "
            f"{of_step.rows:,}: {of_step}",
            "give the sizes that the trainer is going to have, or pack more data",
        )
    costs = row_costs(squared_lengths[read], packed.max_length, sizes.hidden_size or 1)
    schedule = Schedule(Order(len(read)), of_step, balance="order", costs=costs)
    taken, place, end = list[Int64](), 0, schedule.grid.epoch_at(0).end
    while place < end:
        begin, place = schedule.grid.step_at(place)
        step = schedule.rows_at(begin, place)
        micro_steps = np.split(step, range(of_step.micro_step, len(step), of_step.micro_step))
        # row i of rank r is at i * ranks + r there
        taken += [one.reshape(-1, of_step.world_size).T.ravel() for one in micro_steps]
    rows = read[np.concatenate(taken)]
    return np.concatenate([rows, np.setdiff1d(np.arange(len(packed)), rows)])
