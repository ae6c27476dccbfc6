"""`packer verify --against-inputs`: pack work units again from their inputs, and compare digests.

A unit is a pure function of its slices and the options, so the code of a run makes the same shards
once more, in a temporary directory beside the result, or in that of the system if the folder is
read-only. It holds the shards of one unit a worker. Where a digest differs, the first row or
document that differs is named.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
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
from packer_cli.inputs.tokenized import is_tokenized, opened, shape_of
from packer_cli.options.options import PackConfig
from packer_cli.options.run_options import EncodingOptions
from packer_cli.records import InputFile, WorkUnit
from packer_cli.result.layout import TEMPLATE, Shard, difference, digest, name_by_content
from packer_cli.result.manifest import Result
from packer_cli.result.reader import Stored
from packer_cli.run.pool import Pool
from packer_cli.run.run_plan import RunPlan, TokenizerSelection, UnitRecord, read_units
from packer_cli.run.source import choose_encoding
from packer_cli.run.unit import UnitContext
from packer_cli.tokenization.locate import BYTES
from packer_cli.verify import CHANGED, DIFFERENT, Findings


def compare_inputs(
    stored: Stored,
    findings: Findings,
    *,
    options: EncodingOptions,
    inputs: Sequence[str] = (),
    sample: int | None = None,
    seed: int = 0,
) -> None:
    """Add to `findings` each input that changed, and the first difference in each unit.

    inputs  where inputs are now, if they have moved
    sample  compare random units, drawn with `seed`, of at least so many documents; None: all units

    Raises UsageError if one of `inputs` is not an input of the result.
    """
    facts, place = stored.facts, stored.path.absolute()
    files = _unchanged_inputs(facts, inputs, findings, options)
    options = EncodingOptions(workers=options.workers)  # without the notes of packing
    are_mixed = isinstance(facts.config, PackConfig) and facts.config.mixture is not None
    if len(files) < len(facts.inputs) and (are_mixed or any(file.shape for file in facts.inputs)):
        return  # every unit depends on all of them
    every = read_units(stored.path, facts)
    units = [unit for unit in every if {part.file for part in unit.slices} <= files.keys()]
    if sample is not None:
        order = np.random.default_rng(seed).permutation(len(units)).tolist()
        documents = np.cumsum([units[number].counts.get("documents", 0) for number in order])
        units = [
            units[number] for number in sorted(order[: np.searchsorted(documents, sample) + 1])
        ]
    findings.packed_again = len(units)
    if not units:
        return
    run = _run_of(stored, files, units, options)
    if run.shape.is_supervised:  # the reference decides what is trained, not the code that packed
        options = replace(options, tokenizer_backend="tokenizers")
    beside = place.parent if os.access(place.parent, os.W_OK) else None
    shards = {of_unit[0].unit: of_unit for of_unit in facts.shards_of_units()}
    with TemporaryDirectory(prefix=f"{place.name}.verify-", dir=beside) as folder:
        context = UnitContext.reporting(run, Path(folder), options)
        pool = context.pool(partial(_compare_unit, stored, context, shards), context.described)
        cut = [unit.work_unit for unit in units]
        with closing(pool), closing(pool.map(cut)) as differences:
            for number, (name, text) in differences:
                findings.add(name or f"unit {units[number].unit}", text, kind=DIFFERENT)


def _unchanged_inputs(
    facts: Result, names: Sequence[str], findings: Findings, options: EncodingOptions
) -> dict[int, InputFile]:
    """Return the inputs that are as they were, by index, and add the others to `findings`."""
    known = {key for listed in facts.inputs for key in (listed.path, listed.sha256)}
    moved, files = dict[str, InputFile](), dict[int, InputFile]()
    for file in find_inputs([*names], facts.config) if names else ():
        keys = {file.known_as} | (
            {digest(file.path)[1]} if not storage.is_url(file.path) else set()
        )
        if not keys & known:
            tip = "leave it out; or restore what has changed"
            raise UsageError(f"{file.path}: is not an input of the result, or has changed", tip)
        moved |= dict.fromkeys(keys, file)

    def check(index: int) -> InputFile | str:
        """Return an unchanged input, or an error that begins with the name of a file."""
        listed, problem = facts.inputs[index], ""
        try:
            file = moved.get(listed.path) or moved.get(listed.sha256)
            file = file or input_file(index, storage.shown(listed.path), facts.config)
            if listed.sha256:
                problem = difference(file.path, listed.sha256, listed.size)
            elif (file.size, file.version) != (listed.size, listed.version):
                problem = "has another size or version now"
            if problem:
                return f"{file.path}: {problem}"
            if is_tokenized([file]):
                tokens = opened(file)
                for shard in tokens.facts.shards:
                    tokens.check_digest(shard)
            return replace(file, index=index)
        except PackerError as error:
            return error.message

    readable = [index for index, listed in enumerate(facts.inputs) if listed.path != STDIN]
    if len(readable) < len(facts.inputs):
        options.notify("-: came from stdin, which cannot be read again: not compared")
    pool = Pool(check, workers=options.workers, may_run_here=True)
    with closing(pool), closing(pool.map(readable)) as checked:
        for _, unchanged in checked:
            if isinstance(unchanged, InputFile):
                files[unchanged.index] = unchanged
            else:
                name, _, text = unchanged.partition(": ")
                findings.add(name, text, kind=CHANGED)
    return files


def _run_of(
    stored: Stored, files: dict[int, InputFile], units: list[UnitRecord], options: EncodingOptions
) -> RunPlan:
    """Return the run of these units, with the tokenizer and the template that the result keeps."""
    config, info = stored.facts.config, stored.facts.tokenizer
    ordered = [files[index] for index in sorted(files)]
    if is_tokenized(ordered):
        shape, chosen = shape_of(ordered), TokenizerSelection(None)
    else:
        tokenizer = (str(stored.path) if info.sha256 else BYTES) if info else None
        if config.chat_template:  # a tokenizer has it among its files
            template = None if info is None or info.sha256 else str(stored.path / TEMPLATE)
            config = replace(config, chat_template=template)
        # not settled anew: the options that are stored are those for this shape already
        detected = detect_shape(ordered, config)
        shape, ordered = detected.shape, [*detected.files]
        chosen = choose_encoding(shape, config, tokenizer, options)
    by_index = {file.index: file for file in ordered}
    unread = InputFile(-1, "", "", None, 0, 0)  # no unit reads it
    every = tuple(by_index.get(index, unread) for index in range(len(stored.facts.inputs)))
    return RunPlan(
        stored.facts.config, shape, every, tuple(unit.work_unit for unit in units), chosen
    )


def _compare_unit(
    stored: Stored, context: UnitContext, of_units: dict[int, list[Shard]], unit: WorkUnit
) -> tuple[str, str]:
    """Pack a unit again. Return the first shard that differs and a description: "" and "" if none
    does; a shard of "" if it cannot be packed.
    """
    shards, name, text = of_units.get(unit.index, []), "", ""
    try:
        repacked = context.pack(unit).shards
        context.source.confirm()
    except (DataError, UsageError) as error:
        return "", f"cannot be packed again: {error.message}"
    for shard in repacked:
        name_by_content(context.folder, shard)
    for before, now in zip(shards, repacked, strict=False):
        if before.sha256 != now.sha256 and not text:
            with pa.memory_map(str(context.folder / now.file)) as file:
                table = pa.ipc.open_stream(file).read_all()
            name = before.file
            text = _difference(pa.Table.from_batches([*stored.stored(before)]), table)
        (context.folder / now.file).unlink()
    if len(shards) != len(repacked) and not text:
        text = f"has {len(shards)} shards, its inputs give {len(repacked)}"
    return name, text


def _difference(stored: Any, expected: Any) -> str:
    """Describe the first row that differs; "" if only bytes do, as with another Arrow version."""
    noun = "row" if "cu_seqlens" in expected.schema.names else "document"
    prefixes = range(1, min(len(stored), len(expected)) + 1)
    row = bisect_left(
        prefixes, True, key=lambda rows: not stored.slice(0, rows).equals(expected.slice(0, rows))
    )
    if row < len(prefixes):
        columns = expected.schema.names
        name = next(one for one in columns if not stored[one][row].equals(expected[one][row]))
        return f"{noun} {row}: its inputs give another {name}"
    if len(stored) != len(expected):
        return f"has {len(stored)} {noun}s, its inputs give {len(expected)}"
    return ""
