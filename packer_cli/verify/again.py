"""`packer verify --against-inputs`: units packed, or tokenized, again from their inputs.

A unit is a pure function of its slices and the options, so the run's own code reads, encodes, fits,
plans and fills it once more; only its shards are not written, but compared with those that are
there, and its figures and rejected records after them. What differs first is named: the row or
document, the segment in it, and the record that it is of.

Readers, templates and policies are those of a run, so an error that they repeat goes unnoticed;
whatever was lost, moved or changed since is noticed. The reference engine's offsets, which a run
hardly uses, show what is trained on. Memory: one window for each worker, as in a run.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import packer_cli
from packer_cli import storage
from packer_cli.errors import DataError, PackerError, UsageError
from packer_cli.inputs.byte_streams import STDIN
from packer_cli.inputs.detection import detect_shape
from packer_cli.inputs.discovery import input_file
from packer_cli.inputs.formats import reader_for
from packer_cli.inputs.tokenized import opened
from packer_cli.inputs.tokenized import shape_of as shape_of_tokenized
from packer_cli.interrupts import run_all
from packer_cli.mixing.units import work_units
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.options import PackConfig
from packer_cli.options.run_options import SECONDS_PER_RECORD, EncodingOptions
from packer_cli.options.shape_rules import for_shape
from packer_cli.options.shapes import Shape, joined, shape_named
from packer_cli.progress import Progress
from packer_cli.records import InputFile, Int64, record_position
from packer_cli.result.layout import (
    INDEX,
    MANIFEST,
    REJECTED,
    ROWS,
    TEMPLATE,
    TOOL_TEMPLATE,
    UNITS,
    Shard,
    kind_of,
    unnamed_shard,
)
from packer_cli.result.manifest import (
    TOKENIZED,
    Input,
    Manifest,
    Result,
    TokenizerInfo,
    run_of_sides,
    shape_of,
)
from packer_cli.result.reader import Stored, segments_of
from packer_cli.result.rules import segments_in
from packer_cli.result.shard_writer import ShardParts
from packer_cli.result.tokenized import TokenizedDirectory, open_tokenized
from packer_cli.run.commits import UnitRecord, counts_of, placed_units, rejected_of
from packer_cli.run.finalize import tables_of
from packer_cli.run.identity import Chosen, Run
from packer_cli.run.source import prepare
from packer_cli.run.unit import NOWHERE, Job
from packer_cli.tokenization.locate import locate
from packer_cli.verify.files import (
    CHANGED,
    DIFFERENT,
    STALE,
    Findings,
    uncovered,
)

_TOO_SLOW = re.compile(
    rb"takes more than ([0-9]{1,6}(?:\.[0-9]{1,9})?) s \(--max-seconds-per-record\)"
)


def compare_inputs(
    stored: Stored,
    findings: Findings,
    workers: int,
    sample: int | None,
    seed: int,
    without: Container[int] = (),
) -> None:
    """Add to `findings` every input that changed, and the first difference in every unit.

    `sample`: how many documents the units that are made again must have; None: all units.
    `without`: the inputs that are known not to be there.
    """
    facts = stored.facts
    files = _unchanged(stored, findings, workers, without)
    findings.count("documents_compared", 0)
    findings.count("inputs_compared", len(files))
    if not files or not _check_slices(facts, files, findings):
        return
    are_tokenized = any(file.format == TOKENIZED for file in files.values())
    units = [
        record
        for record in placed_units(stored.path, facts)
        if {part.file for part in record.slices} <= files.keys()
    ]
    if sample is not None:
        units = _sampled(units, sample, seed)
    if not units:
        return
    try:
        job = _job(stored, files, units, _options(stored, workers, findings), findings)
    except PackerError as error:  # its options were never those of a run with this tokenizer
        findings.add(MANIFEST, f"damaged: config: {error.message}", remedy=DIFFERENT)
        return
    with closing(job.source):
        findings.add(MANIFEST, *_other_tokenizer(facts, job.source.info), remedy=DIFFERENT)
        if findings.problems:
            return
        tasks = (partial(_compare_unit, stored, job, unit, findings) for unit in units)
        run_all(tasks, workers, findings.stop, job.source.stop)
        job.source.confirm()
    if are_tokenized and not findings.problems:
        for file in files.values():
            _trace(opened(file), findings, workers, sample, seed)


def _job(
    stored: Stored,
    files: dict[int, InputFile],
    records: Sequence[UnitRecord],
    options: EncodingOptions,
    findings: Findings,
) -> Job:
    """What makes the units of these records again. Raises PackerError for a result that no run can
    have made.
    """
    facts, config = stored.facts, stored.facts.config
    are_tokenized = any(file.format == TOKENIZED for file in files.values())
    if isinstance(config, PackConfig) and are_tokenized:
        shape, chosen = shape_of_tokenized([*files.values()]), Chosen(None)
        findings.add(MANIFEST, *_other_options(config, shape), remedy=DIFFERENT)
    else:
        files, shape = _with_shapes(facts, files, findings)
        chosen = _chosen(stored, shape)
    if shape.is_supervised:  # the reference's own offsets show what is trained on
        options = replace(options, tokenizer_backend="tokenizers")
    absent = InputFile(-1, "", "", None, 0, 0)  # never read: its units are not packed again
    every = [files.get(index, absent) for index in range(len(facts.inputs))]
    units = tuple(record.work_unit for record in records)
    run = Run(config, shape, tuple(every), units, chosen)
    return Job(run, prepare(run, units, options), NOWHERE, options, Progress(0, show=False))


def _sampled(units: list[UnitRecord], sample: int, seed: int) -> list[UnitRecord]:
    """Units with so many documents, drawn one by one: first those that read further inputs."""
    further, others, seen = list[int](), list[int](), set[int]()
    for number in np.random.default_rng(seed).permutation(len(units)).tolist():
        files = {part.file for part in units[number].slices}
        (others if files <= seen else further).append(number)
        seen |= files
    taken, documents = list[int](), 0
    for number in further + others:
        if documents >= sample:
            break
        taken.append(number)
        documents += max(1, units[number].counts.get("documents", 0))
    return [units[number] for number in sorted(taken)]


def _compare_unit(stored: Stored, job: Job, record: UnitRecord, findings: Findings) -> None:
    """Make a unit again, and add how it differs."""
    add = partial(findings.add, remedy=DIFFERENT)
    again = replace(job, parts=partial(Compared, stored, job, record.shards))
    try:
        made = again.pack(record.work_unit)
    except _DifferentError as error:
        add(error.file, error.text)
        return
    except (DataError, UsageError) as error:
        add(f"unit {record.unit}", f"cannot be packed again: {error.message}")
        return
    theirs, ours = counts_of(record).as_json(), made.counts.as_json()
    for name in sorted(theirs.keys() | ours.keys()):
        listed, value = theirs.get(name, 0), ours.get(name, 0)
        if listed != value:
            shown = isinstance(listed, int) and isinstance(value, int)
            how = f"is {listed}, {value} when" if shown else "is another when"
            add(UNITS, f"unit {record.unit}: {name} {how} packed again")
    rejected = rejected_of(stored.path, record)
    if hashlib.sha256(rejected).digest() != made.rejected.sha.digest():
        text = f"the records of unit {record.unit} are not those rejected when packed again"
        add(REJECTED, f"{text}: {len(rejected)} bytes, {made.rejected.size} expected")
    findings.count("documents_compared", made.counts.records - made.counts.rejected_records)
    findings.count("units_packed_again", 1)


class _DifferentError(Exception):
    """The first difference in a unit, and the file that it is named with."""

    def __init__(self, file: str, text: str) -> None:
        super().__init__(text)
        self.file, self.text = file, text


class Compared(ShardParts):
    """Shards of a unit that are not written, but compared with those of the result, however these
    are cut; but for indexes, which the rules hold against the documents. Raises _DifferentError.
    """

    full = False

    def __init__(
        self,
        stored: Stored,
        job: Job,
        shards: list[Shard],
        folder: Path,
        unit: int,
        kind: str,
        schema: Any,
        *_: object,
    ) -> None:
        super().__init__(folder, unit, kind, schema, 0)
        self.names = [unnamed_shard(kind, unit, 0)]
        self._job, self._kind = job, kind
        self._what = "row" if kind == ROWS else "document"
        self._there = _batches_of(stored, [one for one in shards if kind_of(one.file) == kind])
        self._shard, self._first = f"unit {unit}", 0  # as in _batches_of
        self._left: Any = None
        self._count = 0

    def write(self, batch: Any, **how: Any) -> None:
        """Compare the next rows or documents."""
        while batch.num_rows and self._kind != INDEX:
            if not self._has_more():
                text = f"its {self._what}s end after {self._count}, its inputs make more"
                raise _DifferentError(f"unit {self._unit}", text)
            count = min(batch.num_rows, self._left.num_rows)
            made, there = batch.slice(0, count), self._left.slice(0, count)
            there = there.select(made.schema.names)  # without values that cannot be compared
            if not made.equals(there):
                pairs = ((made.slice(row, 1), there.slice(row, 1)) for row in range(count))
                row, pair = next((at, two) for at, two in enumerate(pairs) if two[0] != two[1])
                raise self._difference(*pair, self._first + row)
            self._left, self._first = self._left.slice(count), self._first + count
            self._count += count
            batch = batch.slice(count)

    def close(self) -> None:
        if self._kind != INDEX and self._has_more():
            text = f"has {self._what} {self._first} and more, the inputs make {self._count}"
            raise _DifferentError(self._shard, f"{text} in this unit")

    def _has_more(self) -> bool:
        while self._left is None or not self._left.num_rows:
            following = next(self._there, None)
            if following is None:
                return False
            self._shard, self._first, self._left = following
        return True

    def _difference(self, made: Any, there: Any, number: int) -> _DifferentError:
        """How row or document `number` of the shard differs, of which both are the only one: in
        the first segment that is another, or else in the first value.
        """
        where = f"{self._what} {number} of {self._shard}"
        ours, theirs = _segments(made), _segments(there)
        both = min(ours.shape[1], theirs.shape[1])
        at = _first_other(ours[:, :both].T.tolist(), theirs[:, :both].T.tolist())
        if at < max(ours.shape[1], theirs.shape[1]):
            its, mine = (self._shown(one, at, there) for one in (theirs, ours))
            text = f"segment {at} of {where} is {its}, {mine} expected by the options of the"
            return _DifferentError(self._shard, f"{text} manifest")
        name = next(n for n in made.schema.names if not made.column(n).equals(there.column(n)))
        values = [one.column(name)[0].as_py() for one in (there, made)]
        own, expected = (
            value if isinstance(value, list) else [] if value is None else [value]
            for value in values
        )
        at = _first_other(own, expected)
        found, right = (str(some[at]) if at < len(some) else "nothing" for some in (own, expected))
        begin = segments_of(made)[0] if self._kind == ROWS else np.zeros(1)
        segment = max(0, int(np.searchsorted(begin, at, side="right")) - 1)
        carried = self._job.run.config.carried.get(name)
        if self._kind == ROWS and carried is not None and carried.is_of_segments:
            segment = at
        text = f"{name} has {found} at place {at} of {where}, {right} expected when encoded again: "
        text += f"in segment {segment}, of {self._shown(ours, segment, there)}"
        return _DifferentError(self._shard, text)

    def _shown(self, segments: Int64, at: int, batch: Any) -> str:
        if at >= segments.shape[1]:
            return "none"
        number, position, start, length = segments[:, at].tolist()
        if self._kind == ROWS and "segments" not in batch.schema.names:
            return f"{length} tokens"
        file = self._job.run.files[number]
        record = record_position(position, self._job.run.config.turns)
        place = f"{file.path}, {reader_for(file.format).describe(file, record)}"
        return f"{length} tokens of {place}{f' from its token {start}' if start else ''}"


def _first_other(one: list[Any], other: list[Any]) -> int:
    """The first place in which two lists differ; where one ends, if it is the other's beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _segments(batch: Any) -> Int64:
    """int64[4, segments] of a row; of a document, which is one segment of itself."""
    if "cu_seqlens" in batch.schema.names:
        return segments_in(batch)
    file, position = (batch.column(name)[0].as_py() for name in ("file", "position"))
    return np.array([[file], [position], [0], [len(batch.column("input_ids")[0])]], np.int64)


def _batches_of(stored: Stored, shards: list[Shard]) -> Iterator[tuple[str, int, Any]]:
    """(shard, number of the first row in it, record batch) of what is stored."""
    for shard in shards:
        first = 0
        for batch in stored.stored(shard):
            yield shard.file, first, batch
            first += batch.num_rows


# What is packed again: the inputs, and what makes tokens of them


def _unchanged(
    stored: Stored,
    findings: Findings,
    workers: int,
    without: Container[int],
) -> dict[int, InputFile]:
    """The inputs that have not changed; the others become problems."""
    files: dict[int, InputFile] = {}

    def check(index: int, then: Input) -> None:
        path = storage.shown(then.path)
        try:
            file = input_file(index, path, stored.facts.config)
            listed = [(path, then.sha256, then.size)] if then.sha256 else []  # none of a URL
            if file.format == TOKENIZED:
                folder = Path(path).parent
                listed += [(str(folder / one.file), one.sha256, one.bytes)
                           for one in open_tokenized(folder).facts.shards]  # fmt: skip
            if all(findings.is_as_listed(one[0], *one, CHANGED) for one in listed):
                files[index] = file
        except PackerError as error:
            findings.stop_if_asked()
            findings.add(path, error.message.removeprefix(f"{path}: "), remedy=CHANGED)

    inputs = {i: one for i, one in enumerate(stored.facts.inputs) if i not in without}
    if any(one.path == STDIN for one in inputs.values()):
        findings.notify("-: came from stdin, which cannot be read again: not compared")
    again = (partial(check, *one) for one in inputs.items() if one[1].path != STDIN)
    run_all(again, workers, findings.stop)
    return dict(sorted(files.items()))


def _check_slices(facts: Result, files: dict[int, InputFile], findings: Findings) -> bool:
    """Whether units take what they must of the inputs, as far as that can be told."""
    if isinstance(facts, Manifest) and facts.config.mixture:
        if len(files) < len(facts.inputs):
            return False  # what is taken of one source depends on all of them
        texts = _other_units(facts, list(files.values()))
    else:
        ends = dict[int, int]()
        for index, file in files.items():
            try:
                if (groups := reader_for(file.format).groups(file)) is not None:
                    ends[index] = len(groups)
                elif (documents := reader_for(file.format).documents(file)) is not None:
                    ends[index] = documents.count
            except PackerError as error:
                if not facts.inputs[index].rejected_files:
                    findings.add(file.path, error.message, remedy=DIFFERENT)
        texts = uncovered(facts, ends)
    findings.add(MANIFEST, *texts, remedy=DIFFERENT)
    return not texts


def _other_units(facts: Manifest, files: list[InputFile]) -> list[str]:
    """How the units of a recipe's result do not take what the recipe says, or its tables do not
    say so.
    """
    try:
        expected = [
            (unit.index, [(part.file, part.start, part.stop) for part in unit.slices])
            for unit in work_units(files, facts.config)
        ]
        if expected != [(unit.unit, unit.slices) for unit in facts.units]:
            return ["units: are not those that the recipe gives for these tokenized directories"]
        tables: dict[str, Any] = {**tables_of(files, facts.config)}
        tables["run"] = run_of_sides(facts.document) if facts.side and facts.run else ""
        wrong = [name for name, table in tables.items() if getattr(facts, name) != table]
        text = f"{' and '.join(wrong)}: are not those of what the recipe takes"
        return [text] if wrong else []
    except PackerError as error:
        return [error.message]


def _chosen(stored: Stored, shape: Shape) -> Chosen:
    """The tokenizer and the template that the result keeps. Raises PackerError."""
    info, files = stored.facts.tokenizer, None
    if info is None:
        return Chosen(None)
    if info.sha256:
        files = locate(str(stored.path))
    if not shape.is_supervised:
        return Chosen(info.source, files)
    from packer_cli.chat.templates import find_template  # noqa: PLC0415

    # where a result has two templates, they are its tokenizer's own
    alone = [(stored.path / name).is_file() for name in (TEMPLATE, TOOL_TEMPLATE)] == [True, False]
    template = find_template(str(stored.path / TEMPLATE) if alone else None, files)
    return Chosen(info.source, files, template)


def _options(stored: Stored, workers: int, findings: Findings) -> EncodingOptions:
    """The limit of the run, which only rejected records show. Without one no record was too slow
    for it, on a machine that was perhaps faster.
    """
    limit = 6 * SECONDS_PER_RECORD
    with suppress(OSError), storage.open_lines(stored.path / REJECTED) as file:
        limit = next((float(match[1]) for match in map(_TOO_SLOW.search, file) if match), limit)
    return EncodingOptions(
        workers=workers,
        max_seconds_per_record=limit,
        stop=findings.stop,
    )


def _with_shapes(
    facts: Result, files: dict[int, InputFile], findings: Findings
) -> tuple[dict[int, InputFile], Shape]:
    """The files with the shapes of their records, which are compared with those in the manifest."""
    some, shape, _ = detect_shape(list(files.values()), facts.config)
    then = shape_of(facts)
    differ = _other_options(facts.config, then if then.members else shape)
    findings.add(MANIFEST, *differ, remedy=DIFFERENT)
    if not then.members:
        return {file.index: file for file in some}, shape
    if not shape.members:  # all that are left of the files have one shape
        some = [replace(file, shape=shape.described()) for file in some]
        shape = joined({shape.described(): shape})
    for file in some:
        kind = shape.of(file.shape).kind
        listed = shape_named(facts.inputs[file.index].shape or "").kind
        if kind != listed:
            text = f"its records are {kind}, {listed} in the manifest"
            findings.add(file.path, text, remedy=DIFFERENT)
    return {file.index: file for file in some}, shape


def _other_options(config: DocumentConfig, shape: Shape) -> list[str]:
    """Options that a run with records of this shape would have set differently."""
    try:
        made = dict(vars(for_shape(config, shape)))
    except UsageError as error:
        return [f"config: {error.message}"]
    if not shape.members or config.shape is not None:  # None: each input has its own
        made["shape"] = shape.kind
    return [
        f"config: {name} is {value!r}, a run would have {made[name]!r}"
        for name, value in vars(config).items()
        if made[name] != value
    ]


def _other_tokenizer(facts: Result, own: TokenizerInfo | None) -> Iterator[str]:
    """The errors in the manifest's description of the tokenizer."""
    listed = facts.document["tokenizer"]
    if own is None or listed is None:
        if (own is None) != (listed is None):
            yield f"tokenizer: is {listed}, the inputs give {own}"
        return
    info = msgspec.to_builtins(own)
    # the source says where it was, not what it is; older results lack some of the names
    for name in sorted(info.keys() & listed.keys() - {"source"}):
        if listed[name] != info[name]:
            yield f"tokenizer: {name} is {listed[name]}, its files give {info[name]}"


def _trace(
    tokenized: TokenizedDirectory,
    findings: Findings,
    workers: int,
    sample: int | None,
    seed: int,
) -> None:
    """Compare a tokenized directory with its own inputs, as far as they are there."""
    facts, own = tokenized.facts, Findings("tokenize", findings.notify, findings.stop)
    if facts.packer_version != packer_cli.__version__:
        findings.notify(
            f"{tokenized.path}: was tokenized by packer {facts.packer_version}, so its documents "
            "are not compared with its inputs; packer tokenize --overwrite tokenizes them again"
        )
        return
    gone = {i: one.name for i, one in enumerate(facts.inputs)
            if one.path != STDIN and storage.kind(one.path) is None}  # fmt: skip
    if gone:
        first, more = next(iter(gone.values())), len(gone) - 1
        rest = f" and {more} more inputs are" if more else " is"
        findings.notify(
            f"{first}{rest} not there: documents of {tokenized.path} are not compared with it"
        )
    compare_inputs(tokenized, own, workers, sample, seed, without=gone)
    findings.count("documents_traced", own.figures["documents_compared"] or 0)
    for problem in own.problems:
        text = f"{problem.file}: {problem.problem}"
        findings.add(str(tokenized.path), text, remedy=STALE)
