"""`packer verify --against-inputs`: units packed, or tokenized, again from their inputs.

A unit is a pure function of its slices and the options, so the run's own code makes the same shards
of it once more, in a temporary directory, beside the result where that can be written to. Of one
with another digest the first row or document that differs is named, with its segment and the record
that this is of.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa

from packer_cli import storage
from packer_cli.errors import DataError, PackerError, UsageError
from packer_cli.inputs.byte_streams import STDIN
from packer_cli.inputs.detection import detect_shape
from packer_cli.inputs.discovery import find_inputs, input_file
from packer_cli.inputs.formats import reader_for
from packer_cli.inputs.tokenized import is_tokenized, opened, shape_of
from packer_cli.interrupts import run_all
from packer_cli.options.options import PackConfig
from packer_cli.options.run_options import EncodingOptions
from packer_cli.progress import Progress
from packer_cli.records import InputFile, record_position
from packer_cli.result.layout import TEMPLATE, Shard, digest, name_by_content
from packer_cli.result.manifest import Result
from packer_cli.result.reader import Stored, segments_of
from packer_cli.run.commits import UnitRecord, read_units
from packer_cli.run.identity import Chosen, Run
from packer_cli.run.source import choose_encoding, prepare
from packer_cli.run.unit import Job
from packer_cli.tokenization.locate import BYTES
from packer_cli.verify.findings import CHANGED, DIFFERENT, Against, Findings

_BOUNDARIES = "cu_seqlens"


def compare_inputs(stored: Stored, against: Against, findings: Findings, workers: int) -> None:
    """Add to `findings` every input that changed, and the first difference in every unit."""
    facts, place = stored.facts, stored.path.absolute()
    options = EncodingOptions(workers=workers, stop=findings.stop)  # which has no notes to tell
    files = _unchanged(facts, against.inputs, findings, options)
    are_mixed = isinstance(facts.config, PackConfig) and facts.config.mixture is not None
    if len(files) < len(facts.inputs) and (are_mixed or any(one.shape for one in facts.inputs)):
        return  # every unit depends on all of them
    every = read_units(stored.path, facts)
    units = [unit for unit in every if {part.file for part in unit.slices} <= files.keys()]
    if against.sample is not None:
        order = np.random.default_rng(against.seed).permutation(len(units)).tolist()
        documents = np.cumsum([units[number].counts.get("documents", 0) for number in order])
        taken = order[: int(np.searchsorted(documents, against.sample)) + 1]
        units = [units[number] for number in sorted(taken)]
    findings.count("units_packed_again", len(units))
    if not units:
        return
    run = _run(stored, files, units, options)
    if run.shape.is_supervised:  # its own offsets, which a run hardly uses, tell what is trained on
        options = replace(options, tokenizer_backend="tokenizers")
    beside = place.parent if os.access(place.parent, os.W_OK) else None  # None: of the system
    with (
        TemporaryDirectory(prefix=f"{place.name}.verify-", dir=beside) as folder,
        closing(prepare(run, run.units, options)) as source,
    ):
        job = Job(run, source, Path(folder), options, Progress(0, show=False))
        shards = {some[0].unit: some for some in facts.shards_of_units()}
        tasks = (
            partial(_compare_unit, stored, job, unit, shards.get(unit.unit, []), findings)
            for unit in units
        )
        run_all(tasks, options.workers, options.stop, source.stop)
        source.confirm()


def _unchanged(
    facts: Result, names: Sequence[str], findings: Findings, options: EncodingOptions
) -> dict[int, InputFile]:
    """The inputs that are as they were, by index; the others become problems."""
    files, now = dict[int, InputFile](), dict(enumerate(facts.inputs))
    named = find_inputs([*names], facts.config) if names else []
    given = {file.known_as: file for file in named}
    given |= {digest(one.path)[1]: one for one in named if not storage.is_url(one.path)}
    known = {name for one in facts.inputs for name in (one.path, one.sha256)}
    for file in named:
        if not known & {name for name, one in given.items() if one is file}:
            tip = "leave it out; or restore what has changed"
            raise UsageError(f"{file.path}: is not an input of the result, or has changed", tip)

    def check(index: int) -> None:
        then = now[index]
        try:
            file = given.get(then.path) or given.get(then.sha256)
            file = file or input_file(index, storage.shown(then.path), facts.config)
            listed = [(file.path, then.sha256, then.size)] if then.sha256 else []  # none of a URL
            if not then.sha256 and (file.size, file.version) != (then.size, then.version):
                findings.add(then.name, "has another size or version now", kind=CHANGED)
                return
            if is_tokenized([file]):
                tokens = opened(file)
                listed += [(str(tokens.path / one.file), one.sha256, one.bytes)
                           for one in tokens.facts.shards]  # fmt: skip
            if all(findings.is_as_listed(one[0], *one, CHANGED) for one in listed):
                files[index] = replace(file, index=index)
        except PackerError as error:
            findings.stop_if_asked()
            text = error.message.removeprefix(f"{storage.shown(then.path)}: ")
            findings.add(then.name, text, kind=CHANGED)

    there = [index for index, one in now.items() if one.path != STDIN]
    if len(there) < len(now):
        findings.notify("-: came from stdin, which cannot be read again: not compared")
    run_all((partial(check, index) for index in there), options.workers, options.stop)
    return files


def _run(
    stored: Stored, files: dict[int, InputFile], units: list[UnitRecord], options: EncodingOptions
) -> Run:
    """The run of these units, with the tokenizer and the template that the result keeps."""
    config, info, chosen = stored.facts.config, stored.facts.tokenizer, Chosen(None)
    some = [files[index] for index in sorted(files)]
    if is_tokenized(some):
        shape = shape_of(some)
    else:
        some, shape, *_ = detect_shape(some, config)
        if info is not None:
            name, template = (str(stored.path), None) if info.sha256 else (BYTES, TEMPLATE)
            is_given = template and config.chat_template  # and not among a tokenizer's files
            own = replace(config, chat_template=str(stored.path / TEMPLATE) if is_given else None)
            chosen = choose_encoding(shape, own, name, options)
    known = {file.index: file for file in some}
    absent = InputFile(-1, "", "", None, 0, 0)  # read by none of the units
    every = tuple(known.get(index, absent) for index in range(len(stored.facts.inputs)))
    return Run(config, shape, every, tuple(unit.work_unit for unit in units), chosen)


def _compare_unit(
    stored: Stored, job: Job, unit: UnitRecord, shards: list[Shard], findings: Findings
) -> None:
    """Pack a unit again, and add where it first differs."""
    name, text = f"unit {unit.unit}", ""
    try:
        made = job.pack(unit.work_unit).shards
    except (DataError, UsageError) as error:
        findings.add(name, f"cannot be packed again: {error.message}", kind=DIFFERENT)
        return
    for shard in made:
        name_by_content(job.folder, shard, findings.stop.is_set)
    findings.stop_if_asked()
    for there, own in zip(shards, made, strict=False):
        if there.sha256 != own.sha256 and not text:
            with pa.memory_map(str(job.folder / own.file)) as file:
                ours = pa.ipc.open_stream(file).read_all()
            theirs = pa.Table.from_batches([*stored.stored(there)])
            name, text = there.file, _difference(theirs, ours, job.run)
        (job.folder / own.file).unlink()
    if len(shards) != len(made) and not text:
        text = f"has {len(shards)} shards, its inputs give {len(made)}"
    findings.add(name, *filter(None, [text]), kind=DIFFERENT)


def _difference(theirs: Any, ours: Any, run: Run) -> str:
    """How a shard differs from what its inputs give; "" if only its bytes do, as with another
    version of Arrow.
    """
    each = "row" if _BOUNDARIES in ours.schema.names else "document"
    both = range(min(len(theirs), len(ours)))
    row = bisect_left(
        both, True, key=lambda row: not theirs.slice(0, row + 1).equals(ours.slice(0, row + 1))
    )
    if row == len(theirs) == len(ours):
        return ""
    if row == len(both):
        return f"has {len(theirs)} {each}s, its inputs give {len(ours)}"
    there, own = (_segments(table.slice(row, 1)) for table in (theirs, ours))
    pairs = enumerate(zip_longest(there, own, fillvalue=dict[str, Any]()))
    number, (its, right) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
    found, segment = f"segment {number} of {each} {row}", right or its
    if "file" in (source := segment.get("segments", segment)):  # else its rows do not say
        file = run.files[source["file"]]
        position = record_position(source["position"], run.config.turns)
        found += f", of {file.path}, {reader_for(file.format).describe(file, position)}"
    if len(there) != len(own) and not (its and right):
        return f"{found}: the {each} has {len(there)} segments, its inputs give {len(own)}"
    return f"{found}: its inputs give another {next(n for n in right if its[n] != right[n])}"


def _segments(row: Any) -> list[dict[str, Any]]:
    """What a row has of each segment, by column; a document is one segment."""
    (batch,) = row.combine_chunks().to_batches()
    values = {name: batch.column(name)[0].as_py() for name in batch.schema.names}
    if _BOUNDARIES not in values:
        return [values]
    begins, lengths, _ = segments_of(batch)
    are_padded = {one.name for one in batch.schema if pa.types.is_fixed_size_list(one.type)}
    return [
        {"length": length}
        | {
            name: some[begin : begin + length] if name in are_padded else some[number]
            for name, some in values.items()
        }
        for number, (begin, length) in enumerate(
            zip(begins.tolist(), lengths.tolist(), strict=True)
        )
    ]
