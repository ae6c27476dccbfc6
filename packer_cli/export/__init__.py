"""`packer export`: a packed or tokenized directory in the formats of other trainers.

Shards are mapped and written a batch at a time, so memory does not grow with the data. An output
with its final name is complete. Token counts are checked against the manifest.

    OUT.packer-partial/ID/new     what is being written, in a folder of packer's (ownership.py)
    OUT.packer-partial/ID/old     what --overwrite is replacing, where it cannot be exchanged
    OUT                           gets its name by one rename, once everything is on the disk

An earlier export and the new one change places in one step where the system can (RENAME_EXCHANGE:
ext4, XFS, Btrfs, tmpfs), and by two renames elsewhere. `.packer-export.json` in an export lists its
files with their sizes. An export in which there is anything else is not replaced. Trainers do not
look at hidden files.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from packer_cli.errors import UsageError, from_os_error, named, one_of
from packer_cli.export.formats import FORMATS, Exported, Packed, Writer
from packer_cli.export.rows import batches, documents, tokenized_documents, units
from packer_cli.options.option import refuse
from packer_cli.options.options import COLUMNS
from packer_cli.options.run_options import RunOptions, StepOptions
from packer_cli.ownership import (
    LOCK,
    Folder,
    in_the_way,
    make_folders,
    own_folder,
    put_file,
    remove_own,
    sync,
)
from packer_cli.progress import Progress
from packer_cli.records import Int64, Notify
from packer_cli.result.layout import (
    DATASET_DICT,
    INCOMPLETE,
    MANIFEST,
    SHARD_NAME,
    SIDE_FILES,
)
from packer_cli.result.manifest import TokenizedManifest, checksum, load_any
from packer_cli.result.opening import Paths, View, open_packed
from packer_cli.result.reader import PackedDirectory
from packer_cli.result.tokenized import open_tokenized
from packer_cli.run.destination import clean, holds_result
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
        stop, read = threading.Event(), [exported]
        if isinstance(exported, View):
            read += exported.directories.values()
        # beside the export, which uses one core: what is exported gets digests of its own
        with ThreadPoolExecutor(1) as pool:
            compared = [pool.submit(one.check_digests, stop.is_set) for one in read]
            try:
                for part in parts(lambda size: progress.read(size, 0)):
                    writer.write(part)
                for one in compared:
                    one.result()
            finally:
                stop.set()
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


# The output

MARKER = ".packer-export.json"
_PARTIAL, _NEW, _OLD = ".packer-partial", "new", "old"
_OWN_FILES = re.compile(LOCK)
_OF_TRAIN = "train/state.json"  # in the only folder that an export has
_HALF_MADE = re.compile(
    r"data-[0-9]{5,20}\.arrow|packed-[0-9]{5,20}(\.idx)?\.parquet|documents\.(bin|idx)"
    r"|packer\.json"
    rf"|({'|'.join(COLUMNS)}|carried_[\w.~%-]+)(_offsets)?\.npy"
    rf"|({SHARD_NAME}|{re.escape(MARKER)})(\.part)?"
    rf"|{'|'.join(map(re.escape, sorted(SIDE_FILES | {DATASET_DICT, MANIFEST, INCOMPLETE})))}"
)  # what exports write
_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)


@contextmanager
def new_directory(
    output: Path,
    source: Path,
    details: dict[str, str] | None,
    *,
    overwrite: bool,
    no_lock: bool = False,
) -> Iterator[Path]:
    """An empty folder that becomes `output` at the end; on failure nothing is left.

    `details`: what the marker records about the export; None: there is no marker, and no export
    replaces it. Raises UsageError for an output that must not be replaced, InUseError when another
    export is writing to it.
    """
    real = Path(os.path.realpath(output))
    if real.is_relative_to(os.path.realpath(source)):
        raise UsageError(
            f"{output}: lies in the directory that is exported", "choose another --output"
        )
    if os.path.ismount(real):  # nothing can be renamed to it
        raise UsageError(f"{output}: is a mount point", "choose a directory inside it")
    if real.exists() and not real.is_dir():
        raise UsageError(f"{output}: exists and is not a directory", "choose another --output")
    clean(real, RunOptions(no_lock=no_lock))
    name = real.name + _PARTIAL
    try:
        make_folders(real.parent)
        with ExitStack() as stack:
            parent = stack.enter_context(Folder(real.parent, no_lock=no_lock))
            inside = stack.enter_context(own_folder(parent, name, output))
            stack.callback(remove_own, parent, name, inside, _OWN_FILES)
            stack.callback(_settle, parent, inside, real)
            _settle(parent, inside, real)
            _refuse_taken(output, overwrite)
            work = inside.path / _NEW
            work.mkdir()
            yield work
            if details is not None:
                paths = [path for path in sorted(work.rglob("*")) if path.is_file()]
                files = {str(path.relative_to(work)): path.stat().st_size for path in paths}
                put_file(work / MARKER, json.dumps(details | {"files": files}, indent=1).encode())
            for path in (*work.rglob("*"), work):
                sync(path)
            _refuse_taken(output, overwrite)  # the last check may have been hours ago
            _put_in_place(parent, inside, real, output)
            if os.access(real.parent, os.R_OK):
                parent.sync()
    except OSError as error:
        raise from_os_error(error, output, "write") from error


def _settle(parent: Folder, inside: Folder, real: Path) -> None:
    """Put an export that was being replaced back in its place, or remove it if it was replaced;
    remove what was not finished.
    """
    taken = parent.status(real.name) is not None and os.listdir(real)
    if inside.status(_OLD) is not None and not taken:
        inside.rename(_OLD, parent, real.name)
    for path in (inside.path / _NEW, inside.path / _OLD):
        if path.exists():
            if names := _strangers(path):
                raise in_the_way(path, names)
            with suppress(OSError):  # the next export will do it
                shutil.rmtree(path)


def _put_in_place(parent: Folder, inside: Folder, real: Path, output: Path) -> None:
    if not (real.exists() and os.listdir(real)):
        inside.rename(_NEW, parent, real.name)  # replaces an empty directory, and no other
    elif not _exchange(inside, _NEW, parent, real.name):
        parent.rename(real.name, inside, _OLD)
        inside.rename(_NEW, parent, real.name)
    elif names := _strangers(inside.path / _NEW):  # files that were added at this very moment
        _exchange(inside, _NEW, parent, real.name)
        raise in_the_way(output, names)


def _exchange(folder: Folder, name: str, other: Folder, new: str) -> bool:
    """Exchange two directories in one step; False where the system cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    places = folder.descriptor, os.fsencode(name), other.descriptor, os.fsencode(new)
    if call(*places, _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), new)


def _refuse_taken(output: Path, overwrite: bool) -> None:
    tip = "choose another --output"
    if not output.exists() or not os.listdir(output):
        return
    refuse([
        (
            holds_result(output),
            f"{output}: holds a finished result, and --overwrite replaces exports only",
            tip,
        ),
        (
            _listed(output) is None,
            f"{output}: is not empty, and not an export of packer",
            f"{tip}; --overwrite only replaces what packer made",
        ),
        (
            not overwrite,
            f"{output}: holds a finished export",
            f"{tip}, or replace it with --overwrite",
        ),
    ])  # fmt: skip
    if names := _strangers(output, by_size=True):
        raise in_the_way(output, names)


class _Marker(msgspec.Struct):
    files: dict[str, int]


def _listed(export: Path) -> dict[str, int] | None:
    try:
        with Folder(export) as folder:
            return msgspec.json.decode(folder.read(MARKER) or b"", type=_Marker).files
    except (ValueError, RecursionError):
        return None


def _strangers(export: Path, *, by_size: bool = False) -> list[str]:
    """The names in an export that are not what its marker lists: by name and kind and, if
    `by_size`, by size. Without a marker: those that exports do not write.
    """
    names, listed = [], _listed(export)
    folders = {str(parent) for name in listed or [_OF_TRAIN] for parent in Path(name).parents}
    for path in sorted(export.rglob("*")):
        name = str(path.relative_to(export))
        with Folder(path.parent) as folder:
            if path.is_dir() and not path.is_symlink():
                own = name in folders
            elif listed is None or name == MARKER:
                own = folder.is_file(path.name) and bool(_HALF_MADE.fullmatch(path.name))
            else:
                own = name in listed and folder.is_file(path.name)
                own = own and (not by_size or path.lstat().st_size == listed[name])
        if not own:
            names.append(name)
    return names
