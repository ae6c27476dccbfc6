"""`packer export`: a packed directory in the formats of other trainers.

Shards are read as maps and written a batch at a time, so memory does not grow with the data.
Everything is written under a temporary name beside the output and renamed when all of it is on
the disk: what has the output's name is whole. Token counts are held against the manifest.

A format is a file here with one `Writer`; see `writing.py` for what it must do.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from packer_cli.errors import UsageError, from_os_error, one_of
from packer_cli.export.axolotl import Axolotl
from packer_cli.export.columns import Numpy, Parquet
from packer_cli.export.llamafactory import LlamaFactory
from packer_cli.export.megatron import Megatron
from packer_cli.export.megatron_bridge import MegatronBridge
from packer_cli.export.nanotron import Nanotron
from packer_cli.export.rows import batches, documents, rows
from packer_cli.export.trl import Trl
from packer_cli.export.unpacked import Unpacked
from packer_cli.export.writing import Writer
from packer_cli.output import sync
from packer_cli.packed import PackedDirectory, open_packed

FORMATS: dict[str, type[Writer]] = {
    "trl": Trl,
    "llamafactory": LlamaFactory,
    "axolotl": Axolotl,
    "megatron": Megatron,
    "megatron-bridge": MegatronBridge,
    "nanotron": Nanotron,
    "numpy": Numpy,
    "parquet": Parquet,
    "unpacked": Unpacked,
}
_FEEDS: dict[str, Callable[[PackedDirectory], Iterable[Any]]] = {
    "batches": batches,
    "rows": rows,
    "documents": documents,
}


def export(
    directory: str | os.PathLike[str], to: str, output: str | os.PathLike[str]
) -> PackedDirectory:
    """Write `directory` in the format `to` into the new or empty directory `output`.

    Returns the opened directory. Raises UsageError for an unknown format, an output that is not
    empty, and a directory that lacks what the format needs; DataError for a directory that is
    unfinished or damaged, and when the disk is full.
    """
    if to not in FORMATS:
        raise one_of("--to", to, FORMATS)
    packed, kind = open_packed(directory), FORMATS[to]
    _refuse(packed, to, kind)
    with _new_directory(Path(output), packed.path) as folder:
        writer = kind(folder, packed)
        try:
            for part in _FEEDS[kind.takes](packed):
                writer.write(part)
        finally:
            writer.close()
    return packed


def _refuse(packed: PackedDirectory, to: str, kind: type[Writer]) -> None:
    manifest = packed.manifest
    columns = manifest["config"]["columns"]
    for name in kind.needs:
        if name not in columns:
            raise UsageError(
                f"{packed.path}: has no column {name}, which --to {to} needs",
                f"pack the data again with {name} among the --columns",
            )
    # a segment's first token is never trained on, and no format can tell
    untrained = manifest["tokens"] - manifest["segments"] - manifest["trained_tokens"]
    if untrained > 0 and not kind.keeps_mask:
        raise UsageError(
            f"{packed.path}: {untrained} of its tokens are not to be trained on, which --to {to} "
            "cannot say",
            "choose a format with labels or a loss mask, such as megatron-bridge or trl",
        )


@contextmanager
def _new_directory(output: Path, source: Path) -> Iterator[Path]:
    """A folder that becomes `output` at the end, and nothing when that is not reached."""
    real = os.path.realpath(output)
    if real == os.path.realpath(source) or real.startswith(os.path.realpath(source) + os.sep):
        raise UsageError(
            f"{output}: lies in the directory that is exported", "choose another --output"
        )
    work = Path(f"{real}.{os.getpid()}.partial")
    try:
        if output.exists() and (not output.is_dir() or os.listdir(output)):
            what = "is not empty" if output.is_dir() else "exists and is not a directory"
            raise UsageError(f"{output}: {what}", "choose another --output")
        work.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir()
        try:
            yield work
            for path in sorted(work.rglob("*")):
                sync(path)
            sync(work)
            os.rename(work, real)  # takes the place of an empty directory, and of no other
            sync(Path(real).parent)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise from_os_error(error, output, "write") from error
