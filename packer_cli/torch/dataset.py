"""`PackedDataset`: a directory of `packer pack` as a map-style dataset.

Rows are gathered from memory-mapped shards, a whole batch at a time; nothing else is ever read
into memory. Those of a view are filled from memory-mapped documents. Shards are mapped in the
process that reads them, on first use.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from operator import index as as_index
from typing import Any

import numpy as np
import torch

from packer_cli import storage
from packer_cli.config.columns import PADDED_BOUNDARIES
from packer_cli.errors import DataError, UsageError, one_of
from packer_cli.result.layout import MANIFEST
from packer_cli.result.opening import Paths, open_packed
from packer_cli.result.reader import PACK_AGAIN, PackedDirectory
from packer_cli.result.shards import Shard
from packer_cli.result.view import View
from packer_cli.torch.maps import MappedRows, MappedViewRows
from packer_cli.torch.rows import RAGGED, RowBatch

SHIFTED = "shift_labels"
_Mapped = MappedRows | MappedViewRows


class PackedDataset:
    """The rows of a packed directory or a view, in the order of its shards.

    path      the --output of `packer pack`
    columns   which columns rows have, of those in the directory; None: all but `segments`
    tokenizer_sha256   digest of the tokenizer.json that training uses; checked when given
    tokens    of a view: where its tokenized directories are, if no longer where they were packed
              from; one or several, in any order

    `dataset[i]` is a dict of tensors: input_ids, labels, position_ids int32[L], attention_mask
    uint8[L], cu_seqlens int32[segments + 1]. `dataset.__getitems__([i, ...])`, which DataLoader
    calls, is a `RowBatch` for the collators of this package. Labels that the directory holds
    already shifted (`--label-shift pre`) are named shift_labels, never labels.

    It pickles as its path, and threads may share it. Raises DataError when the directory is not
    finished, of another format version, packed with another tokenizer or changed since it was
    pickled, a shard is missing or cut short, or a tokenized directory of a view is gone or changed;
    UsageError for a column that is not there.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        columns: Sequence[str] | None = None,
        *,
        tokenizer_sha256: str | None = None,
        tokens: Paths | None = None,
    ) -> None:
        # absolute: shards are mapped later, perhaps by a worker elsewhere
        self.path = storage.local(path, "rows are only read from local directories").absolute()
        self._digest: str | None = None
        self._tokens: Paths | None = tokens
        self._digest = self.packed.facts.sha256
        if isinstance(self.packed, View):
            self._tokens = [one.path.absolute() for one in self.packed.directories.values()]
        self.columns = self._chosen(columns)
        if tokenizer_sha256 is not None:
            self._check_tokenizer(tokenizer_sha256)

    @cached_property
    def packed(self) -> PackedDirectory:
        """The directory, opened once in each process."""
        self._stamp = self._manifest_stamp()
        packed = open_packed(self.path, self._tokens)
        if self._digest not in (None, packed.facts.sha256):
            raise DataError(
                f"{self.path / MANIFEST}: changed since the dataset was opened",
                "open it again; pack into a new directory while one is in use",
            )
        return packed

    def _manifest_stamp(self) -> tuple[int, ...] | None:
        """What distinguishes a manifest from one that has replaced it, without reading it."""
        try:
            status = (self.path / MANIFEST).stat()
        except OSError:
            return None  # whoever reads it reports the problem
        return status.st_ino, status.st_mtime_ns, status.st_size

    def __getstate__(self) -> dict[str, Any]:
        names = "path", "columns", "_digest", "_tokens"
        return {name: self.__dict__[name] for name in names}

    @property
    def fingerprint(self) -> str:
        """The same for the same rows in the same order, wherever they lie."""
        facts = self.packed.facts
        digests = "".join(shard.sha256 for shard in facts.shards)
        if facts.config.view:  # whose shards hold no tokens
            digests += "".join(one.sha256 for one in facts.inputs_now.values())
        return sha256(digests.encode()).hexdigest()

    @property
    def max_length(self) -> int:
        """Tokens in a row, L."""
        return self.packed.max_length

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> RowBatch:
        """The rows with these numbers, copied into one tensor for each column."""
        try:
            wanted = np.fromiter(map(as_index, rows), np.int64, len(rows))
        except OverflowError:
            raise IndexError(f"row {max(rows, key=abs)} of {len(self)}") from None
        mapped = self._mapped  # the same to the end, whatever other threads map
        while (absent := mapped.first_absent(wanted)) >= 0:
            row = int(wanted[absent])
            if -len(self) <= row < 0:
                wanted[absent] = row + len(self)
            else:
                mapped = self._mapped = self._map(row, mapped)
        columns, ragged = {}, {}
        for name, values in mapped.gather(wanted).items():
            if name in RAGGED:
                ragged[name] = values
            else:
                columns[self._given_name(name)] = torch.from_numpy(values)
        return RowBatch(columns, ragged)

    def _given_name(self, column: str) -> str:
        shifted = column == "labels" and self.packed.label_shift == "pre"
        return SHIFTED if shifted else column

    def _map(self, row: int, mapped: _Mapped) -> _Mapped:
        """`mapped`, with the shard of a row added that it lacks."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        entry, within = self.packed.find(row)
        self._check(entry)  # the dataset may have been opened long ago
        batches = list(self.packed.stored(entry))
        self._check(entry)  # or the shard was replaced meanwhile
        for batch in batches:
            absent = set(self.columns) - set(batch.schema.names)
            if absent and not isinstance(self.packed, View):
                raise DataError(
                    f"{self.path / entry.file}: has no column {min(absent)}, "
                    f"{MANIFEST} says it has",
                    PACK_AGAIN,
                )
        return mapped.added(row - within, batches)

    def _check(self, entry: Shard) -> None:
        """Raise DataError when the manifest, or this shard, is not what it was."""
        stamp = self._manifest_stamp()
        if stamp is None:
            self.packed.check_size(entry)  # names the missing shard, where everything is gone
        if stamp != self._stamp:
            # opened again: shards of another run may have the same sizes
            self.__dict__.pop("packed", None)
        self.packed.check_size(entry)

    @cached_property
    def _mapped(self) -> _Mapped:
        """What this process has mapped."""
        if isinstance(self.packed, View):
            return MappedViewRows(self.columns, self.packed)
        return MappedRows(self.columns, self.max_length)

    def _chosen(self, columns: Sequence[str] | None) -> tuple[str, ...]:
        present = [n for n in self.packed.facts.config.columns if n != "segments"]
        if columns is None:
            return tuple(present)
        if isinstance(columns, str):
            columns = [columns]
        if not columns:
            raise UsageError(f"columns: is empty; the directory has {', '.join(present)}")
        for name in columns:
            if name not in present:
                raise one_of("columns", name, present)
        both = "cu_seqlens" in columns and PADDED_BOUNDARIES in present
        return tuple(dict.fromkeys([*columns, PADDED_BOUNDARIES] if both else columns))

    def _check_tokenizer(self, expected: str) -> None:
        if not re.fullmatch("([0-9a-fA-F]{64})?", expected):
            raise UsageError(
                f"tokenizer_sha256: {expected!r} is not a digest",
                "sha256sum tokenizer.json prints it",
            )
        tokenizer = self.packed.facts.tokenizer
        if tokenizer is None:
            description = "was packed from token ids, without a tokenizer"
        elif tokenizer.sha256 == expected.lower():
            return
        else:
            description = f"was packed with {tokenizer.source}, sha256 {tokenizer.sha256}"
        raise DataError(
            f"{self.path}: {description}; the trainer's tokenizer has {expected}",
            "pack again with --tokenizer set to the trainer's; one that was only saved again may "
            "have another digest and the same tokens",
        )
