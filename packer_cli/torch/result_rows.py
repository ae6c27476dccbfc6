"""`ResultRows`: the rows of one result, gathered from what this process has mapped of it."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from packer_cli import storage
from packer_cli.errors import DataError, UsageError
from packer_cli.records import Int32, Int64
from packer_cli.result.joined import fingerprint_of, stages_of
from packer_cli.result.layout import MANIFEST
from packer_cli.result.manifest import TrainingStage
from packer_cli.result.opening import Paths, open_packed
from packer_cli.result.reader import PACK_AGAIN, PackedDirectory
from packer_cli.result.shards import Shard
from packer_cli.result.view import View
from packer_cli.torch.maps import MappedRows, MappedViewRows
from packer_cli.torch.rows import RAGGED, SOURCE, Lists, RowBatch

SHIFTED = "shift_labels"
_LOCAL = "rows are only read from local directories"
Mapped = MappedRows | MappedViewRows


class ResultRows:
    """A packed directory or a view: `path`, and of a view perhaps where its `tokens` are.

    `columns` are those that rows get; set before the first row is read. It pickles as its path.
    Raises as `PackedDataset`.
    """

    def __init__(self, path: str | os.PathLike[str], tokens: Paths | None) -> None:
        # absolute: shards are mapped later, perhaps by a worker elsewhere
        self.path: Path | str = storage.local(path, _LOCAL).absolute()
        self.columns: tuple[str, ...] = ()
        self._digest: str | None = None
        self._tokens: Paths | None = tokens
        self._digest = self.packed.facts.sha256
        if isinstance(self.packed, View):
            self._tokens = [one.path.absolute() for one in self.packed.directories.values()]

    @cached_property
    def packed(self) -> PackedDirectory:
        """The directory, opened once in each process."""
        self._stamp = self._manifest_stamp()
        packed = open_packed(self.path, self._tokens)
        if self._digest not in (None, packed.facts.sha256):
            raise DataError(
                f"{self._manifest}: changed since the dataset was opened",
                "open it again; pack into a new directory while one is in use",
            )
        return packed

    @property
    def _manifest(self) -> str:
        return storage.join(str(self.path), MANIFEST)

    def _manifest_stamp(self) -> tuple[int, ...] | None:
        """What distinguishes a manifest from one that has replaced it, without reading it."""
        try:
            status = os.stat(self._manifest)
        except OSError:
            return None  # whoever reads it reports the problem
        return status.st_ino, status.st_mtime_ns, status.st_size

    def __getstate__(self) -> dict[str, Any]:
        names = "path", "columns", "_digest", "_tokens"
        return {name: self.__dict__[name] for name in names}

    def __len__(self) -> int:
        return len(self.packed)

    @property
    def fingerprint(self) -> str:
        """The same for the same rows in the same order, wherever they lie."""
        return fingerprint_of(self.packed.facts)

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of a recipe's sources; none without a recipe."""
        return tuple(one.name for one in self.packed.facts.sources)

    @property
    def stages(self) -> tuple[TrainingStage, ...]:
        """As `stages_of`."""
        return stages_of(self.packed)

    def columns_present(self) -> tuple[str, ...]:
        """The columns that rows may get, but for `source`."""
        return tuple(n for n in self.packed.facts.config.columns if n != "segments")

    def check_sources(self) -> None:
        """Raise UsageError where rows cannot say what source a segment is of."""
        if not self.sources:
            raise UsageError(
                f"columns: {SOURCE!r}: {self.path} has no sources, since no recipe made it",
                "leave it out, or pack a recipe",
            )
        if "segments" not in self.packed.facts.config.columns:
            raise UsageError(
                f"columns: {SOURCE!r}: {self.path} was packed without the column segments, by "
                "which sources are found",
                "leave it out, or pack again with that column",
            )

    def gather(self, rows: Int64) -> RowBatch:
        """Rows 0 <= row < len(self), copied into one tensor for each column."""
        mapped = self._mapped  # the same to the end, whatever other threads map
        while (absent := mapped.first_absent(rows)) >= 0:
            mapped = self._mapped = self._map(int(rows[absent]), mapped)
        columns, ragged = {}, {}
        for name, values in mapped.gather(rows).items():
            if name == SOURCE:
                ragged[name] = Lists(self._sources_of(values.values), values.ends)
            elif name in RAGGED:
                ragged[name] = values
            else:
                columns[self._given_name(name)] = torch.from_numpy(values)
        return RowBatch(columns, ragged)

    def _given_name(self, column: str) -> str:
        shifted = column == "labels" and self.packed.label_shift == "pre"
        return SHIFTED if shifted else column

    @cached_property
    def _source_of_input(self) -> Int32:
        """int32[inputs], the number of each input's source; -1: none."""
        numbers = np.full(len(self.packed.facts.inputs), -1, np.int32)
        for number, one in enumerate(self.packed.facts.sources):
            numbers[slice(*one.inputs)] = number
        return numbers

    def _sources_of(self, inputs: Int32) -> Int32:
        """The numbers of the sources of inputs. Raises DataError for one of no source."""
        known = self._source_of_input
        sources = known[np.clip(inputs, 0, len(known) - 1)]
        wrong = (sources < 0) | (inputs < 0) | (inputs >= len(known))
        if wrong.any():
            raise DataError(
                f"{self.path}: a segment is of input {inputs[wrong][0]}, which no source in "
                f"{MANIFEST} has",
                PACK_AGAIN,
            )
        return sources

    def _map(self, row: int, mapped: Mapped) -> Mapped:
        """`mapped`, with the shard of a row added that it lacks."""
        entry, within = self.packed.find(row)
        self._check(entry)  # the dataset may have been opened long ago
        batches = list(self.packed.stored(entry))
        self._check(entry)  # or the shard was replaced meanwhile
        stored = {"segments" if name == SOURCE else name for name in self.columns}
        for batch in batches:
            absent = stored - set(batch.schema.names)
            if absent and not isinstance(self.packed, View):
                raise DataError(
                    f"{self.packed.place_of(entry.file)}: has no column {min(absent)}, "
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
    def _mapped(self) -> Mapped:
        """What this process has mapped."""
        if isinstance(self.packed, View):
            return MappedViewRows(self.columns, self.packed)
        return MappedRows(self.columns, self.packed.max_length)
