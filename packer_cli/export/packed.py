"""A view as a packed directory of the same rows: what the same run without --view would write of
the same work units.
"""

from __future__ import annotations

import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
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
    named_by_digest,
    unnamed_shard,
)
from packer_cli.result.manifest_bytes import to_bytes
from packer_cli.result.manifest_check import config_of
from packer_cli.result.reader import PACK_AGAIN, PackedDirectory, segments_of
from packer_cli.result.saved_dataset import saved_dataset
from packer_cli.result.shards import Shard, digest
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
        self._sink: Any = None
        self._stream: Any = None
        self._shards: list[Shard] = []
        self._parts = 0  # of the unit
        self._sums = open(folder / SQUARED_LENGTHS, "wb")  # noqa: SIM115
        self._sums.write(header(packed.facts.rows))

    def write(self, part: Shard) -> None:
        """Raises DataError for a shard that does not hold what the manifest says."""
        view, before = self._view, self._totals()
        for batch, trained in view.counted(part):
            self._append(part.unit, batch, trained)
        for name, total, old in zip(_COUNTED, self._totals(), before, strict=True):
            if total - old != getattr(part, name):
                raise DataError(
                    f"{view.path / part.file}: holds {total - old} {name}, the manifest says "
                    f"{getattr(part, name)}",
                    PACK_AGAIN,
                )

    def _totals(self) -> list[int]:
        return [sum(getattr(shard, name) for shard in self._shards) for name in _COUNTED]

    def _append(self, unit: int, batch: Any, trained: int) -> None:
        if self._sink is None or self._shards[-1].unit != unit:
            self._finish()
            self._parts = 0
            self._start(unit, batch.schema)
        elif self._sink.tell() >= self._shard_bytes:
            self._finish()
            self._start(unit, batch.schema)
        self._stream.write_batch(batch)
        _, lengths, offsets = segments_of(batch)
        self._sums.write(squared_sums(lengths, offsets).astype("<i8", copy=False).data)
        shard = self._shards[-1]
        shard.rows += batch.num_rows
        shard.segments += len(lengths)
        shard.tokens += int(lengths.sum())
        shard.trained_tokens += trained

    def _start(self, unit: int, schema: Any) -> None:
        name = unnamed_shard(ROWS, unit, self._parts)
        self._parts += 1
        self._shards.append(Shard.begun(name, unit))
        self._sink = pa.OSFile(str(self._folder / name), "wb")
        self._stream = pa.ipc.new_stream(self._sink, schema)

    def _finish(self) -> None:
        """End the open shard, and name it by its content."""
        if self._sink is None:
            return
        sink, self._sink = self._sink, None
        try:
            self._stream.close()
        finally:
            sink.close()
        shard = self._shards[-1]
        shard.bytes, shard.sha256 = digest(self._folder / shard.file)
        name = named_by_digest(shard.file, shard.sha256)
        (self._folder / shard.file).rename(self._folder / name)
        shard.file = name

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
