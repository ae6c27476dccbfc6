"""A view as a packed directory of the same rows: what the same run without --view would write of
the same work units.
"""

from __future__ import annotations

import shutil
from hashlib import sha256
from pathlib import Path

import numpy as np
from msgspec.structs import asdict, replace

from packer_cli.errors import UsageError
from packer_cli.export.formats import Writer
from packer_cli.export.rows import compare
from packer_cli.packing.figures import squared_sums
from packer_cli.result.layout import (
    INFO,
    INPUT_TIMES,
    MANIFEST,
    ROWS,
    SQUARED_LENGTHS,
    STATE,
    UNITS,
    Shard,
    digest,
    name_by_content,
    saved_dataset,
)
from packer_cli.result.manifest import config_of, to_bytes
from packer_cli.result.opening import View
from packer_cli.result.reader import PackedDirectory, segments_of, squares_header
from packer_cli.result.shard_writer import ShardParts
from packer_cli.run.commits import as_line, read_units


class Packed(Writer):
    """Shards of complete rows, cut as runs cut them, with a manifest of their own."""

    takes = "units"
    keeps_pairs = True

    def __init__(self, folder: Path, packed: PackedDirectory) -> None:
        super().__init__(folder, packed)
        if not isinstance(packed, View):
            raise UsageError(f"{packed.path}: is packed, and no view", "copy the directory")
        self._view, self._shards = packed, list[Shard]()
        self._sums = open(folder / SQUARED_LENGTHS, "wb")  # noqa: SIM115
        self._sums.write(squares_header(packed.facts.rows))

    def write(self, part: list[Shard]) -> None:
        """Raises DataError for a shard that does not hold what the manifest says."""
        view, parts = self._view, None
        try:
            for shard in part:
                counts = np.zeros(3, np.int64)
                for batch, trained in view.counted(shard):
                    if parts is None:
                        limit = config_of(view.facts).shard_bytes
                        parts = ShardParts(self.folder, shard.unit, ROWS, batch.schema, limit)
                    _, lengths, offsets = segments_of(batch)
                    counted = len(lengths), int(lengths.sum()), trained
                    parts.write_rows(batch, *counted)
                    counts += counted
                    self._sums.write(squared_sums(lengths, offsets).astype("<i8", copy=False).data)
                compare(view.path / shard.file, shard, *counts.tolist())
            if parts is not None:
                parts.close()
                for shard in parts.shards:
                    name_by_content(self.folder, shard)
                self._shards += parts.shards
        finally:
            if parts is not None:
                parts.abandon()

    def close(self) -> None:
        """Write the manifest and the side files, if nothing failed."""
        self._sums.close()
        view, facts = self._view, self._view.facts
        if sum(shard.rows for shard in self._shards) != facts.rows:
            return
        files = [shard.file for shard in self._shards]
        made = saved_dataset(files, "".join(shard.sha256 for shard in self._shards))
        records = (
            replace(one, shards=[shard for shard in self._shards if shard.unit == one.unit])
            for one in read_units(view.path / UNITS)
        )
        made[UNITS] = b"".join(map(as_line, records))
        for name, content in made.items():
            (self.folder / name).write_bytes(content)
        others = facts.side_files.keys() - {STATE, INFO, UNITS, SQUARED_LENGTHS}
        for name in [*sorted(others), INPUT_TIMES]:
            if name != INPUT_TIMES or (view.path / name).exists():
                shutil.copyfile(view.path / name, self.folder / name)
        hashes = {name: sha256(content).hexdigest() for name, content in made.items()}
        hashes[SQUARED_LENGTHS] = digest(self.folder / SQUARED_LENGTHS)[1]
        document = view.manifest | {
            "config": view.manifest["config"] | {"view": False},
            "shards": [asdict(shard) for shard in self._shards],
            "side_files": facts.side_files | hashes,
        }
        (self.folder / MANIFEST).write_bytes(to_bytes(document))
