"""The sums of squared lengths of rows, from the unit that makes them to the result's side file.

.packer/squared_lengths-00005.bin   those of unit 5, int64, on the disk before its record is

A unit that an update keeps has no such file: the side file of the earlier result has its rows, and
if that has none, or another, its shards do.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import IO

from packer_cli.durable import written
from packer_cli.errors import DataError, InternalError, from_os_error
from packer_cli.records import Int64
from packer_cli.result.layout import SQUARED_LENGTHS
from packer_cli.result.manifest import Manifest
from packer_cli.result.parts import LazyFile
from packer_cli.result.reader import PackedDirectory
from packer_cli.result.shards import Shard
from packer_cli.result.squared_lengths import counted, header, squared_lengths
from packer_cli.run.commits import squared_lengths_name
from packer_cli.run.directory import Claim
from packer_cli.run.replacing import earlier_result


class UnitSums(LazyFile):
    """Takes the sums of one unit as its rows are written."""

    def __init__(self, folder: Path, unit: int) -> None:
        super().__init__(folder / squared_lengths_name(unit))

    def add(self, sums: Int64) -> None:
        self.write(sums.astype("<i8", copy=False).data)


def join(claim: Claim, shards: Sequence[Shard], kept: set[int]) -> None:
    """Write the side file of a result with these shards. `kept`: the units that an update keeps."""
    earlier = _Earlier(claim) if kept else None
    with written(claim.work / SQUARED_LENGTHS) as file:
        file.write(header(sum(shard.rows for shard in shards)))
        for unit, own in groupby(shards, lambda shard: shard.unit):
            if earlier is not None and unit in kept:
                for sums in earlier.of([*own]):
                    file.write(sums.astype("<i8", copy=False).data)
            else:
                _copy(claim.work / squared_lengths_name(unit), file)


def _copy(path: Path, file: IO[bytes]) -> None:
    try:
        with open(path, "rb") as part:
            shutil.copyfileobj(part, file)
    except OSError as error:
        raise from_os_error(error, path, "read") from error


class _Earlier:
    """Those of the result that is updated."""

    def __init__(self, claim: Claim) -> None:
        earlier = earlier_result(claim.folder)
        if earlier is None or not isinstance(earlier.manifest, Manifest):
            raise InternalError(f"{claim.output}: the result that is updated is gone")
        self._packed = PackedDirectory(claim.output, earlier.manifest)
        self._first, row = dict[int, int](), 0  # the first row of each unit
        for shard in earlier.manifest.shards:
            self._first.setdefault(shard.unit, row)
            row += shard.rows
        self._sums: Int64 | None = None
        if SQUARED_LENGTHS in earlier.manifest.side_files:
            with suppress(DataError):  # the shards tell, too
                self._sums = squared_lengths(self._packed)

    def of(self, shards: Sequence[Shard]) -> Iterator[Int64]:
        """Those of a unit's rows. Raises DataError for shards that cannot be read."""
        if self._sums is None:
            yield from counted(self._packed, shards)
            return
        first = self._first[shards[0].unit]
        yield self._sums[first : first + sum(shard.rows for shard in shards)]
