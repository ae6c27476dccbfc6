"""A view as a packed directory of the same rows: what the same run without --view would write of
the same work units.
"""

from __future__ import annotations

import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import asdict, replace

from packer_cli.errors import DataError, UsageError
from packer_cli.export.writing import Writer
from packer_cli.packing.attention_cost import squared_sums
from packer_cli.result.layout import (
    INFO,
    INPUT_TIMES,
    MANIFEST,
    ROWS,
    SQUARED_LENGTHS,
    STATE,
    UNITS,
)
from packer_cli.result.manifest_bytes import to_bytes
from packer_cli.result.manifest_check import config_of
from packer_cli.result.parts import ShardParts
from packer_cli.result.reader import PACK_AGAIN, PackedDirectory, segments_of
from packer_cli.result.saved_dataset import saved_dataset
from packer_cli.result.shards import Shard, digest, name_by_content
from packer_cli.result.squared_lengths import header
from packer_cli.result.view import View
from packer_cli.run.commits import UnitRecord, as_line, read_units

_COUNTED = ("segments", "tokens", "trained_tokens")


class Packed(Writer):
    """Shards of complete rows, cut as runs cut them, with a manifest of their own."""

    takes = "shards"
    keeps_pairs = True

    def __init__(self, folder: Path, packed: PackedDirectory) -> None:
        if not isinstance(packed, View):
            raise UsageError(f"{packed.path}: is packed, and no view", "copy the directory")
        self._folder, self._view = folder, packed
        self._shard_bytes = config_of(packed.facts).shard_bytes
        self._parts: ShardParts | None = None  # of a unit
        self._unit = -1
        self._shards: list[Shard] = []
        self._sums = open(folder / SQUARED_LENGTHS, "wb")  # noqa: SIM115
        self._sums.write(header(packed.facts.rows))

    def write(self, part: Shard) -> None:
        """Raises DataError for a shard that does not hold what the manifest says."""
        view, counts = self._view, np.zeros(len(_COUNTED), np.int64)
        if part.unit != self._unit:
            self._finish()
            self._unit = part.unit
        for batch, trained in view.counted(part):
            counts += self._append(batch, trained)
        for name, count in zip(_COUNTED, counts.tolist(), strict=True):
            if count != getattr(part, name):
                raise DataError(
                    f"{view.path / part.file}: holds {count} {name}, the manifest says "
                    f"{getattr(part, name)}",
                    PACK_AGAIN,
                )

    def _append(self, batch: Any, trained: int) -> tuple[int, int, int]:
        """Write rows; gives how many segments, tokens and trained tokens they have."""
        if self._parts is None:
            unit, limit = self._unit, self._shard_bytes
            self._parts = ShardParts(self._folder, unit, ROWS, batch.schema, limit)
        _, lengths, offsets = segments_of(batch)
        counts = len(lengths), int(lengths.sum()), trained
        self._parts.write_rows(batch, *counts)
        self._sums.write(squared_sums(lengths, offsets).astype("<i8", copy=False).data)
        return counts

    def _finish(self) -> None:
        """End the shards of a unit, and name them by their content."""
        if self._parts is None:
            return
        parts, self._parts = self._parts, None
        parts.close()
        for shard in parts.shards:
            name_by_content(self._folder, shard)
        self._shards += parts.shards

    def close(self) -> None:
        try:
            self._finish()
        finally:
            self._sums.close()
        if sum(shard.rows for shard in self._shards) == self._view.facts.rows:
            self._describe()

    def _describe(self) -> None:
        """Write the manifest and the side files."""
        view, facts = self._view, self._view.facts
        files = [shard.file for shard in self._shards]
        made = saved_dataset(files, "".join(shard.sha256 for shard in self._shards))
        made[UNITS] = b"".join(map(as_line, self._records()))
        for name, content in made.items():
            (self._folder / name).write_bytes(content)
        others = facts.side_files.keys() - {STATE, INFO, UNITS, SQUARED_LENGTHS}
        for name in [*sorted(others), INPUT_TIMES]:
            if name != INPUT_TIMES or (view.path / name).exists():
                shutil.copyfile(view.path / name, self._folder / name)
        hashes = {name: sha256(content).hexdigest() for name, content in made.items()}
        hashes[SQUARED_LENGTHS] = digest(self._folder / SQUARED_LENGTHS)[1]
        document = view.manifest | {
            "config": view.manifest["config"] | {"view": False},
            "shards": [asdict(shard) for shard in self._shards],
            "side_files": facts.side_files | hashes,
        }
        (self._folder / MANIFEST).write_bytes(to_bytes(document))

    def _records(self) -> list[UnitRecord]:
        """Those of the view's units, with the new shards."""
        return [
            replace(one, shards=[shard for shard in self._shards if shard.unit == one.unit])
            for one in read_units(self._view.path / UNITS)
        ]
