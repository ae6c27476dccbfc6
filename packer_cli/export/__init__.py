"""`packer export`: a packed or tokenized directory in the formats of other trainers.

Shards are mapped and written a batch at a time, so memory does not grow with the data. An output
with its final name is complete: see `destination.py`. Token counts are checked against the
manifest.

A format is a `Writer`, in `datasets.py` or `files.py`; `writing.py` says what it must do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from packer_cli.config.columns import PAIR
from packer_cli.errors import UsageError, one_of
from packer_cli.export.datasets import Axolotl, AxolotlInOrder, LlamaFactory, Trl, Unpacked
from packer_cli.export.destination import new_directory
from packer_cli.export.even import EvenSteps, even_order
from packer_cli.export.files import Megatron, MegatronBridge, Nanotron, Numpy, Parquet
from packer_cli.export.packed import Packed
from packer_cli.export.rows import Read, batches, documents, rows, shards, tokenized_documents
from packer_cli.export.writing import Writer
from packer_cli.progress import Progress
from packer_cli.result.manifest import TokenizedManifest
from packer_cli.result.manifest_bytes import checksum
from packer_cli.result.manifest_file import load_any
from packer_cli.result.opening import Paths, open_packed
from packer_cli.result.reader import PackedDirectory
from packer_cli.result.tokenized import TokenizedDirectory, open_tokenized

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
    "packed": Packed,
}
# Those whose readers can be told to take rows as they lie, and the writers of such rows.
IN_ORDER: dict[str, type[Writer]] = {
    "trl": Trl,
    "llamafactory": LlamaFactory,
    "axolotl": AxolotlInOrder,
    "numpy": Numpy,
    "parquet": Parquet,
}
_FEEDS: dict[str, Callable[..., Iterable[Any]]] = {
    "batches": batches,
    "shards": shards,
    "rows": rows,
    "documents": documents,
}


def export(
    directory: str | os.PathLike[str],
    to: str,
    output: str | os.PathLike[str],
    *,
    even: EvenSteps | None = None,
    tokens: Paths | None = None,
    overwrite: bool = False,
    no_lock: bool = False,
    show_progress: bool = False,
) -> PackedDirectory | TokenizedDirectory:
    """Write `directory` in the format `to` into the new or empty directory `output`, or, with
    `overwrite`, in place of an earlier export. `no_lock`: also where there are no locks. `tokens`:
    as in `open_packed`. `even`: rows in an order that makes even steps of such a trainer, instead
    of that of the shards.

    Returns the opened directory. Raises UsageError for an unknown format, an output that must not
    be replaced, a directory that lacks what the format needs, and even steps of a format whose
    readers do not keep an order or of fewer rows than a step has; DataError for a directory that
    is unfinished or damaged, and when the disk is full.
    """
    if to not in FORMATS:
        raise one_of("--to", to, FORMATS)
    exported, kind = _opened(directory, tokens), FORMATS[to]
    if even and to not in IN_ORDER:
        raise _unordered(to, kind)
    parts: Callable[[Read], Iterable[Any]]
    if isinstance(exported, PackedDirectory):
        _refuse(exported, to, kind)
        parts, files = partial(_FEEDS[kind.takes], exported), exported.facts.shards
        if even:
            kind = IN_ORDER[to]
            parts = partial(parts, order=even_order(exported, kind.squared_lengths(exported), even))
    else:
        _refuse_documents(exported, to, kind)
        parts, files = partial(tokenized_documents, exported), exported.shards
    details = {"format": to, "manifest_sha256": checksum(exported.facts.document)}
    marker = None if kind is Packed else details  # a result lists its files in its manifest
    total = sum(shard.bytes for shard in files)
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


def _opened(
    directory: str | os.PathLike[str], tokens: Paths | None
) -> PackedDirectory | TokenizedDirectory:
    if isinstance(load_any(directory), TokenizedManifest):
        return open_tokenized(directory)
    return open_packed(directory, tokens)


def _unordered(to: str, kind: type[Writer]) -> UsageError:
    why = {
        "documents": "is a format of documents, of which its readers make rows of their own",
        "shards": "is a result of packer, in the order of its work units",
    }
    return UsageError(
        f"--order even: --to {to} {why.get(kind.takes, 'is read by a trainer that shuffles rows')}",
        f"choose one of {', '.join(IN_ORDER)}, or leave out --order",
    )


def _refuse_documents(tokenized: TokenizedDirectory, to: str, kind: type[Writer]) -> None:
    if kind.takes != "documents":
        of_documents = [name for name, one in FORMATS.items() if one.takes == "documents"]
        raise UsageError(
            f"{tokenized.path}: holds documents, and --to {to} is a format of rows",
            f"pack them first: packer pack {tokenized.path} --max-length 4096; or export the "
            f"documents: --to {' or '.join(of_documents)}",
        )
    if tokenized.has_pairs and not kind.keeps_pairs:
        raise _of_pairs(tokenized.path, to)
    facts = tokenized.facts
    untrained = facts.tokens - facts.documents - facts.trained_tokens
    if untrained > 0 and not kind.keeps_mask:
        raise _unmasked(tokenized.path, untrained, to)


def _refuse(packed: PackedDirectory, to: str, kind: type[Writer]) -> None:
    facts = packed.facts
    columns = facts.config.columns
    if PAIR in columns and not kind.keeps_pairs:
        raise _of_pairs(packed.path, to)
    for name in kind.needs:
        if name not in columns:
            raise UsageError(
                f"{packed.path}: has no column {name}, which --to {to} needs",
                f"pack the data again with {name} among the --columns",
            )
    # a segment's first token is never trained on, whatever the format
    untrained = facts.tokens - facts.segments - facts.trained_tokens
    keeps_mask = kind.keeps_mask and (kind.takes in ("batches", "shards") or "labels" in columns)
    if untrained > 0 and not keeps_mask:
        raise _unmasked(packed.path, untrained, to)


def _of_pairs(path: Path, to: str) -> UsageError:
    keeping = [name for name, one in FORMATS.items() if one.keeps_pairs]
    return UsageError(
        f"{path}: holds records of preference, and --to {to} cannot say which answers are the "
        "rejected ones: all of them would be trained on",
        f"train with packer_cli.torch; or choose {' or '.join(keeping)}, which keep the columns "
        "pair and side",
    )


def _unmasked(path: Path, untrained: int, to: str) -> UsageError:
    return UsageError(
        f"{path}: {untrained:,} of its tokens are not to be trained on, which --to {to} cannot say",
        "choose a format with labels or a loss mask, such as megatron-bridge or trl",
    )
