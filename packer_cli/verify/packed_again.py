"""A unit packed, or tokenized, again: its documents, plan and counts compared with the result.

The run's own code reads, encodes, fits and plans; only the rows come here instead of going to a
shard. So a seed, a strategy, an order or a figure that is not that of the inputs is noticed.
Memory: one window, as in a run.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from packer_cli.config.options import PackConfig
from packer_cli.errors import DataError, PackerError, UsageError
from packer_cli.inputs.tokenized import TokenizedInputs
from packer_cli.packing.window import trained_in
from packer_cli.records import (
    InputFile,
    Int64,
    Records,
    Slice,
    Stock,
    WorkUnit,
    record_position,
)
from packer_cli.result.counts import Counts
from packer_cli.result.layout import REJECTED, UNITS
from packer_cli.result.manifest import OF_INPUTS, TOTALS, Unit
from packer_cli.result.shards import Shard
from packer_cli.run.commits import UnitRecord, counts_of
from packer_cli.run.documents import tokenize_unit
from packer_cli.run.rows import pack_unit
from packer_cli.run.unit import Job, UnitResult, without_damaged
from packer_cli.tokenization.encoding import Encoded
from packer_cli.verify.documents import Documents, piece_difference
from packer_cli.verify.findings import DIFFERENT, Findings
from packer_cli.verify.reading import Stored, part_of
from packer_cli.verify.rows import UnitRows
from packer_cli.verify.tokenized_unit import CountingSink, TokenizedUnit


class PlanComparison:
    """A `RowWriter` that compares planned rows with the unit's, segment by segment.

    `difference`: the first one, "" for none.
    """

    def __init__(self, unit: int, rows: UnitRows, config: PackConfig, paths: list[str]) -> None:
        self._rows = rows
        self._config = config
        self._paths = paths
        self._edges = np.concatenate([[0], np.cumsum(rows.row_sizes)])
        self._row = 0
        self._shard = Shard.begun("", unit)
        self.difference = ""

    @property
    def rows_at_once(self) -> int:
        """Places tell rows apart; where there are none, tokens do."""
        return 0 if self._rows.by_place else 1 << 8

    def write(self, stock: Stock, order: Int64, row_offsets: Int64) -> None:
        places = np.stack([stock.file[order], stock.position[order], stock.start[order]])
        planned = np.concatenate([places, stock.length[order][None]]).astype(np.int64)
        if not self._rows.by_place:
            planned[:3] = 0
        self._shard.trained_tokens += trained_in(stock, order)
        rows = len(row_offsets) - 1
        if not self.difference:
            self._compare(planned, row_offsets, rows)
        if not self.difference and not self._rows.by_place:
            self._compare_tokens(stock, order)
        if not self.difference and stock.side is not None and self._rows.sides is not None:
            first = int(self._edges[self._row])
            if not np.array_equal(self._rows.sides[first : first + len(order)], stock.side[order]):
                self.difference = "its column side is not that of the inputs' answers"
        self._row += rows

    def _compare(self, planned: Int64, row_offsets: Int64, rows: int) -> None:
        there = self._rows.in_order[:, self._edges[min(self._row, len(self._edges) - 1)] :]
        sizes = self._rows.row_sizes[self._row : self._row + rows]
        if np.array_equal(sizes, np.diff(row_offsets)) and np.array_equal(
            there[:, : planned.shape[1]], planned
        ):
            return
        for row in range(rows):
            wanted = planned[:, row_offsets[row] : row_offsets[row + 1]]
            if self._row + row == len(self._rows.row_sizes):
                self.difference = f"has {self._row + row} rows, the inputs make more"
                return
            edges = self._edges[self._row + row : self._row + row + 2]
            segments = self._rows.in_order[:, edges[0] : edges[1]]
            if not np.array_equal(segments, wanted):
                shard, number = self._rows.place(self._row + row)
                self.difference = (
                    f"row {number} of {shard} holds {self._shown(segments)}, "
                    f"{self._shown(wanted)} expected by the options of the manifest"
                )
                return

    def _compare_tokens(self, stock: Stock, order: Int64) -> None:
        """Where segments do not say whose they are, their tokens do."""
        first = int(self._edges[self._row])
        if stock.ids is None:
            return
        for i, begin in enumerate(stock.begin[order].tolist(), first):
            self.difference = piece_difference(
                self._rows, i, stock.ids, stock.trained, begin, self._config
            )
            if self.difference:
                return

    def _shown(self, segments: Int64) -> str:
        file, position, start, length = segments[:, 0].tolist()
        if not self._rows.by_place:
            return f"{segments.shape[1]} segments, the first of {length} tokens"
        piece = f"token {start} of " if start else ""
        what = "1 segment" if segments.shape[1] == 1 else f"{segments.shape[1]} segments, the first"
        at = record_position(position, self._config.turns)
        return f"{what} from {piece}{self._paths[file]} at {at}"

    def close(self) -> list[Shard]:
        if not self.difference and self._row < len(self._rows.row_sizes):
            self.difference = f"has {len(self._rows.row_sizes)} rows, the inputs make {self._row}"
        return [self._shard]

    def abandon(self) -> None:
        pass


def compare_packed(
    about: Unit,
    record: UnitRecord,
    rejected_from: int,
    rows: UnitRows | TokenizedUnit,
    documents: Documents,
    job: Job,
    stored: Stored,
    findings: Findings,
) -> None:
    """Make a unit of the manifest again and add the differences, those of documents first.

    `rejected_from`: where its part of rejected.jsonl begins.
    """

    def make(unit: WorkUnit, job: Job) -> tuple[UnitResult, str]:
        if isinstance(rows, UnitRows) and isinstance(job.config, PackConfig):
            paths = [one.path for one in stored.facts.inputs]
            plan = PlanComparison(number, rows, job.config, paths)
            return pack_unit(unit, job, job.config, plan), plan.difference
        return tokenize_unit(unit, job, CountingSink(number)), ""

    def encode(records: Records, file: InputFile) -> Encoded:
        left_out = stored.facts.inputs[file.index].rejected_files
        return (job if left_out else documents).encode(records, file)

    number = about.unit
    slices = tuple(Slice(file, start, stop, 0) for file, start, stop in about.slices)
    unit = WorkUnit(number, slices)
    if job.tokenized is not None:  # rows are made again without looking at tokens
        _compare_tokenized(unit, job, job.tokenized, documents)
    with tempfile.TemporaryDirectory(prefix="packer-verify-") as folder:
        again = replace(job, encode=encode, folder=Path(folder))
        try:
            result, difference = without_damaged(unit, again, make)
        except (DataError, UsageError) as error:
            if not documents.differing:
                findings.add(
                    f"unit {number}", f"cannot be packed again: {error.message}", remedy=DIFFERENT
                )
            return
        for file in sorted({part.file for part in slices} if rows.by_place else ()):
            documents.expect(job.files[file], rows.positions(file))
        if documents.differing:
            return
        if difference:
            findings.add(f"unit {number}", difference, remedy=DIFFERENT)
            return
        left_out = (
            set(TOTALS) - stored.facts.document.keys()
        )  # what an earlier packer did not count
        if "unshown_documents" in left_out:  # `unshown_tools` counted calls, too
            left_out |= {"unshown_tools", "unread"}
        recorded = counts_of(record)
        for file in {*recorded.files, *result.counts.files}:
            for name in set(OF_INPUTS) - set(stored.facts.counted_by_input):
                setattr(recorded.file(file), name, 0)
                setattr(result.counts.file(file), name, 0)
        texts = _other_counts(recorded, result.counts, left_out)
        findings.add(UNITS, *(f"unit {number}: {text}" for text in texts), remedy=DIFFERENT)
        _compare_rejected(result, record, rejected_from, stored, findings)
    findings.count("units_packed_again", 1)


def _compare_tokenized(
    unit: WorkUnit, job: Job, tokenized: TokenizedInputs, documents: Documents
) -> None:
    """Compare the documents that a unit takes from tokenized directories."""
    for part in unit.slices:
        for batch in tokenized.documents(part.file, np.sort(tokenized.numbers(part))):
            documents.compare(batch, job.files[part.file])


def _other_counts(recorded: Counts, repacked: Counts, left_out: set[str]) -> list[str]:
    """The counts that differ."""
    theirs, ours = recorded.as_json(), repacked.as_json()
    texts = []
    for name in sorted((theirs.keys() | ours.keys()) - left_out):
        a, b = theirs.get(name, 0), ours.get(name, 0)
        if a != b:
            shown = isinstance(a, int) and isinstance(b, int)
            text = f"{name} is {a}, {b} when packed again" if shown else f"{name} differs"
            texts.append(text if shown else f"{text} from what packing again gives")
    return texts


def _compare_rejected(
    result: UnitResult,
    record: UnitRecord,
    start: int,
    stored: Stored,
    findings: Findings,
) -> None:
    expected = b"" if result.rejected is None else result.rejected.read_bytes()
    try:
        rejected = part_of(stored, REJECTED, start, record.rejected) if record.rejected else b""
    except PackerError as error:
        findings.add(REJECTED, error.message)
        return
    if rejected == expected:
        return
    pairs = zip(rejected.splitlines(), expected.splitlines(), strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), -1)
    difference = f"{len(rejected)} bytes, {len(expected)} expected"
    if at >= 0 and (line := expected.splitlines()[at].decode("utf-8", "replace")):
        difference = f"{line} expected"
    findings.add(
        REJECTED,
        f"the records of unit {result.unit.index} are not those rejected when packed again: "
        f"{difference}",
        remedy=DIFFERENT,
    )
