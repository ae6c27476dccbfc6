"""`squared_lengths.npy` counted again from the rows, while they are checked."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from packer_cli.errors import PackerError
from packer_cli.packing.attention_cost import squared_sums
from packer_cli.records import Int64
from packer_cli.result.layout import SQUARED_LENGTHS
from packer_cli.result.reader import PackedDirectory, segments_of
from packer_cli.result.shards import Shard
from packer_cli.verify.findings import Findings
from packer_cli.verify.reading import path_of, squared_lengths_of


class SumChecks:
    """Compares the figures of rows, batch by batch, on any thread."""

    def __init__(self, packed: PackedDirectory, findings: Findings) -> None:
        self._findings = findings
        self._sums = _listed(packed, findings)
        self._first, row = dict[str, int](), 0  # the first row of each shard
        for shard in packed.facts.shards:
            self._first[shard.file] = row
            row += shard.rows
        self._wrong = list[tuple[int, str]]()  # (row, what is wrong with it), one for each batch
        self._count, self._lock = 0, threading.Lock()

    def compare(self, batch: Any, shard: Shard, first_row: int) -> None:
        """Compare those of a sound batch, whose first row is the shard's row `first_row`."""
        if self._sums is None:
            return
        first = self._first[shard.file]
        listed = self._sums[first : first + shard.rows][first_row : first_row + batch.num_rows]
        _, length, offsets = segments_of(batch)
        made = squared_sums(length, offsets)[: len(listed)]  # more rows are another problem
        wrong = np.flatnonzero(listed != made)
        if not len(wrong):
            return
        row = int(wrong[0])
        text = f"{listed[row]} for row {first_row + row} of {shard.file}, whose segments make "
        with self._lock:
            self._wrong.append((first + first_row + row, f"{text}{made[row]}"))
            self._count += len(wrong)

    def report(self) -> None:
        """Add what was found, once every row was compared."""
        if self._wrong:
            self._findings.add(SQUARED_LENGTHS, f"has {min(self._wrong)[1]} ({self._count} rows)")


def _listed(packed: PackedDirectory, findings: Findings) -> Int64 | None:
    """What the side file says; None where there is none, or it is a problem already."""
    listed = SQUARED_LENGTHS in packed.facts.side_files
    if not listed or any(one.file == SQUARED_LENGTHS for one in findings.problems):
        return None
    try:
        return squared_lengths_of(packed)
    except PackerError as error:
        place = path_of(packed, SQUARED_LENGTHS)
        findings.add(SQUARED_LENGTHS, error.message.removeprefix(f"{place}: "))
        return None
