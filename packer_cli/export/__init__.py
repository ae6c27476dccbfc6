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

from packer_cli.errors import UsageError, one_of
from packer_cli.export import formats
from packer_cli.export.destination import new_directory
from packer_cli.export.formats import Exported, Writer
from packer_cli.export.packed import Packed
from packer_cli.export.rows import batches, documents, rows, tokenized_documents, units
from packer_cli.options.options import PAIR
from packer_cli.progress import Progress
from packer_cli.records import Int64
from packer_cli.result.manifest import TokenizedManifest, checksum, load_any
from packer_cli.result.opening import Paths, open_packed
from packer_cli.result.reader import PackedDirectory
from packer_cli.result.tokenized import open_tokenized
from packer_cli.steps.schedule import Order, Schedule, Sizes, row_costs

FORMATS: dict[str, type[Writer]] = {
    "trl": formats.Trl,
    "llamafactory": formats.LlamaFactory,
    "axolotl": formats.Axolotl,
    "megatron": formats.Megatron,
    "megatron-bridge": formats.MegatronBridge,
    "nanotron": formats.Nanotron,
    "numpy": formats.Numpy,
    "parquet": formats.Parquet,
    "unpacked": formats.Unpacked,
    "packed": Packed,
}
# Those whose readers can be told to take rows as they lie, and the writers of such rows.
IN_ORDER: dict[str, type[Writer]] = {
    "trl": formats.Trl,
    "llamafactory": formats.LlamaFactory,
    "axolotl": formats.AxolotlInOrder,
    "numpy": formats.Numpy,
    "parquet": formats.Parquet,
}
_FEEDS: dict[str, Callable[..., Iterable[Any]]] = {
    "batches": batches,
    "units": units,
    "rows": rows,
    "documents": documents,
}


def export(
    directory: str | os.PathLike[str],
    to: str,
    output: str | os.PathLike[str],
    *,
    even: tuple[Sizes, int] | None = None,
    tokens: Paths | None = None,
    overwrite: bool = False,
    no_lock: bool = False,
    show_progress: bool = False,
) -> Exported:
    """Write `directory` in the format `to` into the new or empty directory `output`, or, with
    `overwrite`, in place of an earlier export. `no_lock`: also where there are no locks. `tokens`:
    as in `open_packed`. `even`: sizes of steps and the hidden size of a model, for rows in an order
    that makes its steps even instead of that of the shards.

    Returns the opened directory. Raises UsageError for an unknown format, an output that must not
    be replaced, a directory that lacks what the format needs, and even steps of a format whose
    readers do not keep an order or of fewer rows than a step has; DataError for a directory that
    is unfinished or damaged, and when the disk is full.
    """
    if to not in FORMATS:
        raise one_of("--to", to, FORMATS)
    kind, exported = FORMATS[to], _opened(directory, tokens)
    if even and to not in IN_ORDER:
        raise _unordered(to, kind)
    _refuse(exported, to, kind)
    if isinstance(exported, PackedDirectory):
        shards = exported.facts.shards
        parts: Callable[..., Iterable[Any]] = partial(_FEEDS[kind.takes], exported)
        if even:
            kind = IN_ORDER[to]
            parts = partial(
                parts, order=_even_order(exported, kind.squared_lengths(exported), *even)
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
        writer = kind(folder, exported)
        try:
            for part in parts(lambda size: progress.read(size, 0)):
                writer.write(part)
        finally:
            writer.close()
    return exported


def _opened(directory: str | os.PathLike[str], tokens: Paths | None) -> Exported:
    if isinstance(load_any(directory), TokenizedManifest):
        return open_tokenized(directory)
    return open_packed(directory, tokens)


def _unordered(to: str, kind: type[Writer]) -> UsageError:
    why = {
        "documents": "is a format of documents, of which its readers make rows of their own",
        "units": "is a result of packer, in the order of its work units",
    }
    return UsageError(
        f"--order even: --to {to} {why.get(kind.takes, 'is read by a trainer that shuffles rows')}",
        f"choose one of {', '.join(IN_ORDER)}, or leave out --order",
    )


def _refuse(exported: Exported, to: str, kind: type[Writer]) -> None:
    """UsageError for a directory that has not what a format needs, or what it cannot keep."""
    place, facts = exported.path, exported.facts
    of_documents = kind.takes == "documents"
    if isinstance(exported, PackedDirectory):
        columns = exported.facts.config.columns
        if missing := [name for name in kind.needs if name not in columns]:
            raise UsageError(
                f"{place}: has no column {missing[0]}, which --to {to} needs",
                f"pack the data again with {missing[0]} among the --columns",
            )
        has_pairs, pieces = PAIR in columns, exported.facts.segments
        keeps_mask = "labels" in columns or kind.takes in ("batches", "units")
    else:
        if not of_documents:
            names = [name for name, one in FORMATS.items() if one.takes == "documents"]
            raise UsageError(
                f"{place}: holds documents, and --to {to} is a format of rows",
                f"pack them first: packer pack {place} --max-length 4096; or export the "
                f"documents: --to {' or '.join(names)}",
            )
        has_pairs, pieces, keeps_mask = exported.has_pairs, facts.documents, True
    if has_pairs and not kind.keeps_pairs:
        names = [name for name, one in FORMATS.items() if one.keeps_pairs]
        raise UsageError(
            f"{place}: holds records of preference, and --to {to} cannot say which answers are the "
            "rejected ones: all of them would be trained on",
            f"train with packer_cli.torch; or choose {' or '.join(names)}, which keep the columns "
            "pair and side",
        )
    # the first token of a piece is never trained on, whatever the format
    untrained = facts.tokens - pieces - facts.trained_tokens
    if untrained > 0 and not (kind.keeps_mask and keeps_mask):
        raise UsageError(
            f"{place}: {untrained:,} of its tokens are not to be trained on, which --to {to} "
            "cannot say",
            "choose a format with labels or a loss mask, such as megatron-bridge or trl",
        )


def _even_order(
    packed: PackedDirectory, squared_lengths: Int64, sizes: Sizes, hidden_size: int
) -> Int64:
    """int64[rows]: the rows of a directory in the order in which they are to be read, those that
    meet in a step chosen as by `PackedSampler(balance="order")`. Stages stay apart; rows that are
    left over, fewer than there are ranks, and those that the reader drops are the last ones.

    The reader fills batches of B rows in turn, and gives batch i to process i % W, as Accelerate's
    `BatchSamplerShard` does. A step of M micro-batches is therefore W * B * M neighboring rows.

    squared_lengths  int64[rows], as `Writer.squared_lengths` gives them

    Raises UsageError for a step of more rows than there are.
    """
    read = np.flatnonzero(squared_lengths >= 0)
    if sizes.step > len(read):
        raise UsageError(
            f"{packed.path}: has {len(read):,} rows to train on, fewer than a step of "
            f"{sizes.step:,}: {sizes}",
            "give the sizes that the trainer is going to have, or pack more data",
        )
    ends = [stage.first_row + stage.rows for stage in packed.facts.stages]
    stages = np.diff(np.searchsorted(read, [0, *ends]))
    costs = row_costs(squared_lengths[read], packed.max_length, hidden_size)
    order = Order(len(read), stages=stages[stages > 0].tolist())
    schedule = Schedule(order, sizes, balance="order", costs=costs)
    taken, place, end = list[Int64](), 0, schedule.grid.epoch_at(0).end
    while place < end:
        begin, place = schedule.grid.step_at(place)
        step = schedule.rows_at(begin, place)
        micro_steps = np.split(step, range(sizes.micro_step, len(step), sizes.micro_step))
        # row i of rank r is at i * ranks + r there
        taken += [one.reshape(-1, sizes.world_size).T.ravel() for one in micro_steps]
    rows = read[np.concatenate(taken)]
    return np.concatenate([rows, np.setdiff1d(np.arange(len(packed)), rows)])
