"""`packer verify --against-inputs`: documents read and encoded again, then compared.

    a sample       documents that rows name, and records drawn from the inputs: both must agree
    --sample all   every unit is packed again: documents, plan, counts, rejected records

Readers, templates and policies are those of a run, so an error that they repeat goes unnoticed;
whatever was lost, moved or changed since is noticed. The reference engine's offsets, which a run
hardly uses, show what is trained on.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import packer_cli
from packer_cli.config.options import PackConfig
from packer_cli.config.shapes import Shape
from packer_cli.errors import PackerError
from packer_cli.inputs.byte_streams import STDIN
from packer_cli.inputs.discovery import input_file
from packer_cli.inputs.formats import detect_shape, documents_of, groups_of, reader_for
from packer_cli.progress import Progress
from packer_cli.records import InputFile, Int64, Records, Slice
from packer_cli.result.layout import MANIFEST, REJECTED, TEMPLATE, TOOL_TEMPLATE
from packer_cli.result.manifest import Input, Manifest, Unit
from packer_cli.result.reader import PackedDirectory
from packer_cli.result.shards import digest
from packer_cli.run.encoder import source_again
from packer_cli.run.unit import Job
from packer_cli.threads import run_all
from packer_cli.tokenization.encoding import Encode
from packer_cli.verify.documents import Documents
from packer_cli.verify.drawing import (
    Shares,
    are_among,
    drawn_records,
    draws,
    records_at,
    shares,
    together,
)
from packer_cli.verify.findings import CHANGED, DIFFERENT, Findings
from packer_cli.verify.kept_tokenizer import kept_tokenizer, other_tokenizer
from packer_cli.verify.manifest import left_out, unshaped
from packer_cli.verify.packed_again import compare_packed
from packer_cli.verify.reading import is_file, lines_of, path_of
from packer_cli.verify.rows import load_rows
from packer_cli.verify.unit_records import unit_records

_Notify = Callable[[str], None]
_TOO_SLOW = re.compile(
    rb"takes more than ([0-9]{1,6}(?:\.[0-9]{1,9})?) s \(--max-seconds-per-record\)"
)


def compare_inputs(
    packed: PackedDirectory,
    config: PackConfig,
    findings: Findings,
    workers: int,
    sample: int | None,
    seed: int,
    stop: threading.Event,
    notify: _Notify,
) -> None:
    """Add to `findings` every input that changed, and every document that differs."""
    manifest = packed.facts
    files = _unchanged(packed, config, findings, workers, stop, notify)
    findings.documents_compared, findings.inputs_compared = 0, len(files)
    if not files:
        return
    _check_ends(manifest, files, findings)
    documents = sum(manifest.inputs[file].documents for file in files)
    everything = sample is None or sample >= documents
    if "segments" not in config.columns and not everything:
        notify(
            "documents are not compared: the column segments was not written, so a sample of them "
            "cannot be found in the rows; --sample all compares whole units"
        )
        return
    try:
        shape = detect_shape(list(files.values()), config)
        tokenizer, tokenizer_files = kept_tokenizer(packed, shape, config, fast=sample is None)
    except PackerError as error:
        findings.add(MANIFEST, f"config: {error.message}", remedy=DIFFERENT)
        return
    findings.add(MANIFEST, *unshaped(config, shape), remedy=DIFFERENT)
    findings.add(MANIFEST, *other_tokenizer(manifest, tokenizer), remedy=DIFFERENT)
    if findings.problems:
        if tokenizer:
            tokenizer.close()
        return
    with closing(tokenizer) if tokenizer else nullcontext():
        used, limit = _with_its_template(packed, config), _limit_of_time(packed)
        source = source_again(shape, used, tokenizer, tokenizer_files, limit)
        comparison = _Comparison(packed, config, shape, source.encode, files, findings, stop)
        if everything:
            tasks = comparison.of_everything(notify)
        else:
            wanted = shares(manifest, set(files), sample or 0, seed)
            tasks = comparison.of_sample(
                wanted, draws(manifest, set(files), wanted, sample or 0, seed), seed
            )
        with closing(source):
            run_all(tasks, workers, stop, source.stop)
        if tokenizer:
            tokenizer.finish()


def _with_its_template(packed: PackedDirectory, config: PackConfig) -> PackConfig:
    """`config` with the template in the result; where it has two, they are its tokenizer's own."""
    alone = is_file(packed, TEMPLATE) and not is_file(packed, TOOL_TEMPLATE)
    return replace(config, chat_template=str(path_of(packed, TEMPLATE)) if alone else None)


def _limit_of_time(packed: PackedDirectory) -> float | None:
    """The run's --max-seconds-per-record, which only its rejected records show."""
    if REJECTED not in packed.facts.side_files:
        return None
    with suppress(PackerError):
        for line in lines_of(packed, REJECTED):
            if match := _TOO_SLOW.search(line):
                return float(match[1])
    return None


def _unchanged(
    packed: PackedDirectory,
    config: PackConfig,
    findings: Findings,
    workers: int,
    stop: threading.Event,
    notify: _Notify,
) -> dict[int, InputFile]:
    """The inputs that have not changed; the others become problems."""
    files: dict[int, InputFile] = {}

    def check(index: int, packed_then: Input) -> None:
        path = packed_then.path
        try:
            file = input_file(index, path, config)
            size, sha256 = file.size, packed_then.sha256
            if size == packed_then.size:
                size, sha256 = digest(path, stop.is_set)
        except PackerError as error:
            text = f"an input: {error.message.removeprefix(f'{path}: ')}"
            findings.add(path, text, remedy=CHANGED)
            return
        if size != packed_then.size:
            text = f"has {size} bytes, it had {packed_then.size} when it was packed"
        elif sha256 != packed_then.sha256:
            text = f"its sha256 is {sha256}, it was {packed_then.sha256} when it was packed"
        else:
            files[index] = file
            return
        findings.add(path, text, remedy=CHANGED)

    inputs = packed.facts.inputs_now
    if any(one.path == STDIN for one in inputs.values()):
        notify("-: came from stdin, which cannot be read again: not compared")
    again = (partial(check, *one) for one in inputs.items() if one[1].path != STDIN)
    run_all(again, workers, stop)
    return dict(sorted(files.items()))


def _check_ends(manifest: Manifest, files: dict[int, InputFile], findings: Findings) -> None:
    """Whether slices that count row groups or documents go on to the last one."""
    for index, file in files.items():
        text = ""
        try:
            if (groups := groups_of(file)) is not None:
                text = left_out(manifest, index, len(groups), "row group")
            elif (documents := documents_of(file)) is not None:
                text = left_out(manifest, index, documents.count, "document")
        except PackerError as error:
            text = error.message
        findings.add(file.path, *([text] if text else []), remedy=DIFFERENT)


class _Comparison:
    """Compares units, one after the other on each thread."""

    def __init__(
        self,
        packed: PackedDirectory,
        config: PackConfig,
        shape: Shape,
        encode: Encode,
        files: dict[int, InputFile],
        findings: Findings,
        stop: threading.Event,
    ) -> None:
        self._packed = packed
        self._shards = {some[0].unit: some for some in packed.facts.shards_of_units()}
        self._config = config
        self._shape = shape
        self._encode = encode
        self._files = files
        self._findings = findings
        self._stop = stop
        absent = InputFile(-1, "", "", None, 0, 0)  # never read: its units are not packed again
        self._job = Job(
            [files.get(index, absent) for index in range(len(packed.facts.inputs))],
            config, shape, None, None, self._read, encode, Path(), Progress(0, show=False), stop,
        )  # fmt: skip

    def of_everything(self, notify: _Notify) -> Iterator[Callable[[], None]]:
        """A task for each unit that reads any of the files."""
        version = self._packed.facts.packer_version
        same_plan = version == packer_cli.__version__
        if not same_plan:
            notify(
                f"packed by packer {version}, this is {packer_cli.__version__}: which rows "
                "documents are in is not compared"
            )
        rejected_from = 0
        units = self._packed.facts.units
        for about, record in zip(units, unit_records(self._packed), strict=True):
            read = {part[0] for part in about.slices}
            if read <= self._files.keys():
                yield partial(self._pack_again, about, record, rejected_from, same_plan)
            elif read & self._files.keys() and "segments" in self._config.columns:
                yield partial(self._compare_files, about)
            rejected_from += record.rejected

    def of_sample(self, wanted: Shares, drawn: Shares, seed: int) -> Iterator[Callable[[], None]]:
        """A task for each unit with a share of the sample."""
        chosen = {unit for unit, _ in [*wanted, *drawn]}
        for about in self._packed.facts.units:
            if about.unit in chosen:
                yield partial(self._compare_some, about, wanted, drawn, seed)

    def _documents(self, unit: int) -> tuple[Any, Documents]:
        rows = load_rows(self._packed, self._shards.get(unit, []))
        return rows, Documents(rows, self._config, self._encode, self._findings, self._stop)

    def _pack_again(self, about: Unit, record: Any, rejected_from: int, same_plan: bool) -> None:
        rows, documents = self._documents(about.unit)
        compare_packed(
            about, record, rejected_from, rows, documents, self._job, self._config, self._packed,
            self._findings,
            same_plan=same_plan,
        )  # fmt: skip
        self._findings.count("documents_compared", documents.finish())

    def _compare_files(self, about: Unit) -> None:
        """Compare the documents of the unchanged files of a unit."""
        rows, documents = self._documents(about.unit)
        for index in sorted({part[0] for part in about.slices} & self._files.keys()):
            file = self._files[index]
            for part in _slices(about, index):
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
            file, positions = self._files[index], rows.positions(index)
            rng = np.random.default_rng([seed, number, index])
            count = min(wanted.get((number, index), 0), len(positions))
            chosen = np.sort(rng.choice(positions, count, replace=False))
            if count:
                for records in together(records_at(self._read, file, chosen)):
                    documents.encode(records, file)
                documents.expect(file, chosen)
            compared += count
            slices, number_drawn = _slices(about, index), drawn.get((number, index), 0)
            drawn_here = drawn_records(self._read, file, slices, number_drawn, rng)
            for unknown in together(self._unknown(drawn_here, positions)):
                documents.encode(unknown, file)
        documents.finish()
        self._findings.count("documents_compared", compared)

    def _unknown(self, drawn: Iterator[Records], positions: Int64) -> Iterator[Records]:
        """Count the drawn records; give those that are not in the rows: dropped, or lost."""
        self._findings.count("records_drawn", 0)
        for records in drawn:
            self._findings.count("records_drawn", 1)
            if not are_among(records.positions, positions).any():
                yield records

    def _read(self, file: InputFile, part: Slice) -> Iterator[Records]:
        return reader_for(file.format).read(file, part, self._shape, self._config)


def _slices(about: Unit, file: int) -> list[Slice]:
    return [Slice(index, start, stop, 0) for index, start, stop in about.slices if index == file]
