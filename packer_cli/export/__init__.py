"""Export a packed or tokenized directory in the formats of other trainers (`packer export`).

Shards are mapped and written a batch at a time, so memory does not grow with the data. An output
with its final name is complete. Token counts are compared with the manifest.

    OUT.packer-partial/ID/new     what is being written, in a folder of packer's (run/place.py)
    OUT.packer-partial/ID/old     what --overwrite is replacing, where it cannot be exchanged
    OUT                           gets its name by one rename, once everything is on the disk

An earlier export and the new one change places in one step where the system can (RENAME_EXCHANGE:
ext4, XFS, Btrfs, tmpfs), and by two renames elsewhere. `.packer-export` in an export lists its
files with their sizes. An export that holds anything else is not replaced. Trainers do not look
at hidden files.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

import msgspec

from packer_cli.errors import from_os_error, one_of
from packer_cli.export.document_formats import DocumentParquet, Olmo
from packer_cli.export.formats import (
    Automodel,
    Axolotl,
    Exported,
    LlamaFactory,
    Megatron,
    MegatronBridge,
    MegatronRows,
    Numpy,
    PackedCopy,
    Parquet,
    Trl,
    Unpacked,
    Writer,
)
from packer_cli.export.rows import batches, documents, parts_of, units
from packer_cli.options.option import refuse
from packer_cli.options.options import COLUMNS
from packer_cli.options.run_options import FormatOptions, RunOptions, StepOptions
from packer_cli.progress import Progress
from packer_cli.records import Notify
from packer_cli.result.existing import holds_result, in_the_way
from packer_cli.result.layout import INCOMPLETE, MANIFEST, SHARD_NAME, SIDE_FILES
from packer_cli.result.manifest import TokenizedManifest, checksum, load_any
from packer_cli.result.opening import Paths, View, open_packed
from packer_cli.result.reader import PackedDirectory
from packer_cli.result.tokenized import open_tokenized
from packer_cli.run.place import clean, own_folder, remove_own
from packer_cli.steps import even_order
from packer_cli.storage import OTHER, make_folders, put_file, read_bytes, size_of, sync

FORMATS: dict[str, type[Writer]] = {
    "trl": Trl,
    "llamafactory": LlamaFactory,
    "axolotl": Axolotl,
    "automodel": Automodel,
    "documents": DocumentParquet,
    "olmo": Olmo,
    "megatron": Megatron,
    "megatron-bridge": MegatronBridge,
    "numpy": Numpy,
    "parquet": Parquet,
    "unpacked": Unpacked,
    "packed": PackedCopy,
}


def export(
    directory: str | os.PathLike[str],
    to: str,
    output: str | os.PathLike[str],
    *,
    options: FormatOptions = FormatOptions(),  # noqa: B008 it is immutable
    even: StepOptions | None = None,
    tokens: Paths | None = None,
    overwrite: bool = False,
    no_lock: bool = False,
    show_progress: bool = False,
    notify: Notify = lambda message: None,
) -> Exported:
    """Write `directory` in the format `to`; returns the opened directory.

    output     a new or empty directory, or with `overwrite` an earlier export, which is replaced
    options    of some formats
    even       sizes of a training whose steps are to be even: rows are written in an order for it,
               not in that of the shards
    tokens     as in `open_packed`
    no_lock    go on if the file system has no locks
    notify     is called with what the format cannot hold, before anything is written

    Raises UsageError for an unknown format or an option that it has no use for, an output that must
    not be replaced, a directory that lacks what the format needs, and `even` if readers of the
    format do not keep an order or a step has more rows than there are; DataError for a directory
    that is unfinished or damaged, and if the disk is full.
    """
    if to not in FORMATS:
        raise one_of("--to", to, FORMATS)
    kind, is_tokenized = FORMATS[to], isinstance(load_any(directory), TokenizedManifest)
    if options.rows and kind is Megatron:
        kind = MegatronRows
    exported = open_tokenized(directory) if is_tokenized else open_packed(directory, tokens)
    _refuse(exported, to, kind, options, even=even is not None)
    for note in kind.notes(exported, options):
        notify(f"--to {to}: {note}")
    parts = parts_of(exported, kind.takes)
    if isinstance(exported, PackedDirectory):
        shards = exported.facts.shards
        if even:
            squared, length = kind.squared_lengths(exported), exported.max_length
            parts = partial(parts, order=even_order(squared, length, even, exported.path))
    else:
        shards = exported.shards
    details = {"format": to, "manifest_sha256": checksum(exported.facts.document)}
    marker = None if kind is PackedCopy else details  # a result lists its files in its manifest
    total = sum(shard.bytes for shard in shards)
    with (
        new_directory(
            Path(output), exported.path, marker, overwrite=overwrite, no_lock=no_lock
        ) as folder,
        Progress(total, show=show_progress, doing="exporting") as progress,
    ):
        writer = kind(folder, exported, even=even is not None, options=options)
        read = [exported]
        if isinstance(exported, View):
            read += exported.directories.values()
        # beside the export, which uses one core: what is exported gets digests of its own
        with ThreadPoolExecutor(1) as pool:
            digests = [pool.submit(source.check_digest, shard)
                       for source in read for shard in source.facts.shards]  # fmt: skip
            try:
                for part in parts(lambda size: progress.read(size, 0)):
                    writer.write(part)
                for compared in digests:
                    compared.result()
            finally:
                pool.shutdown(cancel_futures=True)
                writer.close()
    return exported


def _refuse(
    exported: Exported, to: str, kind: type[Writer], options: FormatOptions, *, even: bool
) -> None:
    """Raise UsageError if a directory lacks what a format needs, or has what it cannot keep."""
    place, facts = exported.path, exported.facts
    if isinstance(exported, PackedDirectory):
        of_rows, columns = True, exported.facts.config.columns
    else:
        of_rows, columns = False, kind.needs
    missing = next((name for name in kind.needs if name not in columns), "")
    with_documents = " or ".join(n for n, other in FORMATS.items() if other.takes is documents)
    ordered = ", ".join(name for name, other in FORMATS.items() if other.in_order)
    keeps_mask = not of_rows or "labels" in columns or kind.takes in (batches, units)
    # the first token of a piece is never trained on, whatever the format
    pieces = facts.segments if of_rows else facts.documents
    untrained = facts.tokens - pieces - facts.trained_tokens
    given = (name for name, value in asdict(options).items() if value)
    foreign = next((name for name in given if name not in kind.takes_options), "")
    with_it = ", ".join(n for n, other in FORMATS.items() if foreign in other.takes_options)
    refuse([
        (foreign, f"--{foreign}: --to {to} has no use for it", f"it is for --to {with_it}"),
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
            f"{place}: holds documents, and --to {to}{' --rows' * options.rows} is a format of "
            "rows",
            f"pack them first: packer pack {place} --max-length 4096; or export the "
            f"documents: --to {with_documents}{', without --rows' * options.rows}",
        ),
        (
            untrained > 0 and not (kind.keeps_mask and keeps_mask),
            f"{place}: {untrained:,} of its tokens are not to be trained on, which --to {to} "
            "cannot say",
            "choose a format with labels or a loss mask, such as megatron-bridge or trl",
        ),
    ])  # fmt: skip


# The output

MARKER = ".packer-export"
_PARTIAL, _NEW, _OLD = ".packer-partial", "new", "old"
_OF_TRAIN = "train/state.json"  # in the only folder that an export has
_HALF_MADE = re.compile(
    r"(train/)?(data-[0-9]{5,20}\.arrow|dataset_info\.json|state\.json|dataset_dict\.json)"
    r"|(packed|part)-[0-9]{5,20}\.(idx\.parquet|parquet|npy|mask\.npy|csv\.gz)"
    rf"|(documents|rows)\.(bin|idx)|packer\.json|({'|'.join(COLUMNS)}|carried_[\w.~%-]+)"
    rf"(_offsets)?\.npy|({SHARD_NAME}|{re.escape(MARKER)})(\.part)?"
    rf"|{'|'.join(map(re.escape, sorted(SIDE_FILES | {MANIFEST, INCOMPLETE})))}"
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
    """Make an empty folder that becomes `output` at the end; on failure nothing is left.

    `details`: what the marker records; None: no marker, so no export replaces it. Raises UsageError
    for an output that must not be replaced, InUseError if another export is writing to it.
    """
    real, options = Path(os.path.realpath(output)), RunOptions(no_lock=no_lock)
    refuse([
        (real.is_relative_to(os.path.realpath(source)),
         f"{output}: lies in the directory that is exported", "choose another --output"),
        (os.path.ismount(real), f"{output}: is a mount point",  # nothing can be renamed to it
         "choose a directory inside it"),
        (real.exists() and not real.is_dir(), f"{output}: exists and is not a directory",
         "choose another --output"),
    ])  # fmt: skip
    clean(real, options)
    try:
        make_folders(real.parent)
        with own_folder(real.parent, real.name + _PARTIAL, output, options) as folder:
            new, old = folder / _NEW, folder / _OLD
            try:
                _settle(real, new, old)
                _refuse_taken(output, overwrite)
                new.mkdir()
                yield new
                for path in new.rglob("*"):
                    sync(path)
                if details is not None:  # last: files that a marker lists are whole
                    sizes = _sizes_below(new).items()
                    marker = details | {"files": {n: size for n, size in sizes if size != OTHER}}
                    put_file(new / MARKER, json.dumps(marker, indent=1).encode())
                sync(new)
                _refuse_taken(output, overwrite)  # the last check may have been hours ago
                _put_in_place(new, real, old)
                if os.access(real.parent, os.R_OK):
                    sync(real.parent)
            finally:
                try:
                    _settle(real, new, old)
                finally:
                    remove_own(folder)
    except OSError as error:
        raise from_os_error(error, output, "write") from error


def _settle(real: Path, new: Path, old: Path) -> None:
    """Put an export that was being replaced back in its place, and remove what was not finished."""
    if old.exists() and not (real.exists() and os.listdir(real)):
        os.rename(old, real)
    for path in filter(Path.exists, (new, old)):
        _refuse_foreign(path)
        with suppress(OSError):  # the next export will do it
            shutil.rmtree(path)


def _put_in_place(new: Path, real: Path, old: Path) -> None:
    if not (real.exists() and os.listdir(real)):
        os.rename(new, real)  # replaces an empty directory, and no other
    elif not _exchange(new, real):
        os.rename(real, old)
        os.rename(new, real)


def _exchange(new: Path, old: Path) -> bool:
    """Exchange two directories in one step; False if the system cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here = -100  # AT_FDCWD
    if call is None or call(here, os.fsencode(new), here, os.fsencode(old), _EXCHANGE) == 0:
        return call is not None
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), old)


def _refuse_taken(output: Path, overwrite: bool) -> None:
    tip = "choose another --output"
    if not output.exists() or not os.listdir(output):
        return
    refuse([
        (holds_result(output),
         f"{output}: holds a finished result, and --overwrite replaces exports only", tip),
        (_listed(output) is None, f"{output}: is not empty, and not an export of packer",
         f"{tip}; --overwrite only replaces what packer made"),
        (not overwrite, f"{output}: holds a finished export",
         f"{tip}, or replace it with --overwrite"),
    ])  # fmt: skip
    _refuse_foreign(output)


class _Marker(msgspec.Struct):
    files: dict[str, int]


def _listed(export: Path) -> dict[str, int] | None:
    """Return the files that the marker of an export lists, with their sizes; None without one."""
    try:
        if size_of(export / MARKER) in (None, OTHER):
            return None
        return msgspec.json.decode(read_bytes(export / MARKER), type=_Marker).files
    except (ValueError, RecursionError):
        return None


def _sizes_below(export: Path) -> dict[str, int]:
    """Return the sizes of all in an export by their paths in it, OTHER for what is not a file."""
    sizes = {str(path.relative_to(export)): size_of(path) for path in sorted(export.rglob("*"))}
    return {name: size for name, size in sizes.items() if size is not None}


def _refuse_foreign(export: Path) -> None:
    """Raise UsageError for what an export's marker does not list; without one, if it is half made,
    for what exports do not write.
    """
    found, listed = _sizes_below(export), _listed(export)
    if listed is None:
        listed = {name: size for name, size in found.items() if _HALF_MADE.fullmatch(name)}
        listed |= {_OF_TRAIN: found.get(_OF_TRAIN, 0)}  # whose folder may be empty yet
    folders = {str(parent) for name in listed for parent in Path(name).parents}
    expected = listed | {name: OTHER for name in folders if not (export / name).is_symlink()}
    if names := [name for name, size in found.items()
                 if name != MARKER and size != expected.get(name)]:  # fmt: skip
        raise in_the_way(export, names)
