"""Units of a result compared with their inputs: all of them again, or a sample of documents."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from packer_cli.config.documents import DocumentConfig
from packer_cli.config.options import PackConfig
from packer_cli.config.shape_rules import by_file_shape
from packer_cli.config.shapes import Shape
from packer_cli.errors import InternalError
from packer_cli.inputs.formats import reader_for
from packer_cli.progress import Progress
from packer_cli.records import InputFile, Int64, Records, Slice, record_position
from packer_cli.result.manifest import Unit
from packer_cli.result.manifest_check import config_of
from packer_cli.result.reader import PackedDirectory
from packer_cli.result.tokenized import TokenizedDirectory
from packer_cli.result.tokenized_tokens import Tokens
from packer_cli.run.unit import Job
from packer_cli.tokenization.encoding import Encode
from packer_cli.verify.documents import Documents, PackedUnit
from packer_cli.verify.drawing import Shares, are_among, drawn_records, records_at, together
from packer_cli.verify.findings import Findings
from packer_cli.verify.packed_again import compare_packed
from packer_cli.verify.rows import UnitRows, load_rows
from packer_cli.verify.tokenized_unit import TokenizedUnit
from packer_cli.verify.unit_records import unit_records


class Comparison:
    """Compares units, one after the other on each thread."""

    def __init__(
        self,
        stored: PackedDirectory | TokenizedDirectory,
        config: DocumentConfig,
        shape: Shape,
        encode: Encode,
        files: dict[int, InputFile],
        findings: Findings,
        stop: threading.Event,
    ) -> None:
        self._stored = stored
        self._shards = {some[0].unit: some for some in stored.facts.shards_of_units()}
        self._tokens = Tokens([stored]) if isinstance(stored, TokenizedDirectory) else None
        self._config = config
        self._own = by_file_shape(config, shape)
        self._encode = encode
        self._files = files
        self._findings = findings
        self._stop = stop
        absent = InputFile(-1, "", "", None, 0, 0)  # never read: its units are not packed again
        self._job = Job(
            [files.get(index, absent) for index in range(len(stored.facts.inputs))],
            config, shape, None, None, self._read, encode, Path(), Progress(0, show=False), stop,
        )  # fmt: skip

    def of_everything(self) -> Iterator[Callable[[], None]]:
        """A task for each unit that reads any of the files."""
        rejected_from = 0
        units = self._stored.facts.units
        for about, record in zip(units, unit_records(self._stored), strict=True):
            read = {part[0] for part in about.slices}
            if read <= self._files.keys():
                yield partial(self._pack_again, about, record, rejected_from)
            elif read & self._files.keys() and self._by_place:
                yield partial(self._compare_files, about)
            rejected_from += record.rejected

    def of_sample(self, wanted: Shares, drawn: Shares, seed: int) -> Iterator[Callable[[], None]]:
        """A task for each unit with a share of the sample."""
        chosen = {unit for unit, _ in [*wanted, *drawn]}
        for about in self._stored.facts.units:
            if about.unit in chosen:
                yield partial(self._compare_some, about, wanted, drawn, seed)

    @property
    def _by_place(self) -> bool:
        """Whether the result says where its documents come from."""
        return not isinstance(self._config, PackConfig) or "segments" in self._config.columns

    def of_numbers(self, numbers: Int64) -> Iterator[Callable[[], None]]:
        """A task for each unit of a tokenized directory with any of these documents, which ascend,
        that come from the files.
        """
        for about in self._stored.facts.units:
            yield partial(self._compare_numbers, about, numbers)

    def _compare_numbers(self, about: Unit, numbers: Int64) -> None:
        unit, documents = self._documents(about.unit)
        if not isinstance(unit, TokenizedUnit):
            raise InternalError("rows have no numbers of documents")
        for index in sorted({part[0] for part in about.slices} & self._files.keys()):
            file, chosen = self._files[index], unit.positions_of(index, numbers)
            if len(chosen):
                for records in together(self._records_at(file, chosen)):
                    documents.encode(records, file)
                documents.expect(file, chosen)
        self._findings.count("documents_compared", documents.finish())

    def _documents(self, unit: int) -> tuple[UnitRows | TokenizedUnit, Documents]:
        shards, stored = self._shards.get(unit, []), self._stored
        how = self._encode, self._findings, self._stop
        if isinstance(stored, TokenizedDirectory):
            held = TokenizedUnit(stored, self._tokens or Tokens([stored]), shards)
            return held, Documents(held, self._config, *how)
        rows, config = load_rows(stored, shards), config_of(stored.facts)
        return rows, Documents(PackedUnit(rows, config), config, *how)

    def _pack_again(self, about: Unit, record: Any, rejected_from: int) -> None:
        rows, documents = self._documents(about.unit)
        compare_packed(
            about, record, rejected_from, rows, documents, self._job, self._stored, self._findings
        )
        self._findings.count("documents_compared", documents.finish())

    def _compare_files(self, about: Unit) -> None:
        """Compare the documents of the unchanged files of a unit."""
        rows, documents = self._documents(about.unit)
        for index in sorted({part[0] for part in about.slices} & self._files.keys()):
            file = self._files[index]
            if self._stored.facts.inputs[index].rejected_files:
                continue
            for part in slices_of(about, index):
                for records in self._read(file, part):
                    documents.encode(records, file)
            documents.expect(file, rows.positions(index))
        self._findings.count("documents_compared", documents.finish())

    def _compare_some(self, about: Unit, wanted: Shares, drawn: Shares, seed: int) -> None:
        """Compare as many documents of each file as `wanted` says, and records `drawn` from it."""
        number = about.unit
        rows, documents = self._documents(number)
        compared = 0
        for index in sorted({part[0] for part in about.slices} & self._files.keys()):
            if self._stored.facts.inputs[index].rejected_files:
                continue  # it cannot be decoded: only packing its unit again shows as much
            file, positions = self._files[index], rows.positions(index)
            rng = np.random.default_rng([seed, number, index])
            count = min(wanted.get((number, index), 0), len(positions))
            chosen = np.sort(rng.choice(positions, count, replace=False))
            if count:
                for records in together(self._records_at(file, chosen)):
                    documents.encode(records, file)
                documents.expect(file, chosen)
            compared += count
            slices, number_drawn = slices_of(about, index), drawn.get((number, index), 0)
            drawn_here = drawn_records(self._read, file, slices, number_drawn, rng)
            for unknown in together(self._unknown(drawn_here, positions)):
                documents.encode(unknown, file)
        documents.finish()
        self._findings.count("documents_compared", compared)

    def _unknown(self, drawn: Iterator[Records], positions: Int64) -> Iterator[Records]:
        """Count the drawn records; give those that are not in the rows: dropped, or lost."""
        self._findings.count("records_drawn", 0)
        positions = record_position(positions, self._config.turns)
        for records in drawn:
            self._findings.count("records_drawn", 1)
            if not are_among(records.positions, positions).any():
                yield records

    def _records_at(self, file: InputFile, documents: Int64) -> Iterator[Records]:
        """The records that documents at these positions come from, which ascend."""
        positions = np.unique(record_position(documents, self._config.turns))
        return records_at(self._read, file, positions)

    def _read(self, file: InputFile, part: Slice) -> Iterator[Records]:
        return reader_for(file.format).read(file, part, *self._own[file.shape])


def slices_of(about: Unit, file: int) -> list[Slice]:
    return [Slice(index, start, stop, 0) for index, start, stop in about.slices if index == file]
