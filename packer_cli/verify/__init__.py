"""`packer verify`: check a result against its manifest, its rules and, if asked, its inputs.

1. The manifest's checksum, the names of all files and their digests.
2. The rules of every row or document, and the manifest's figures, counted again.
3. Only if all of that is right, work units packed again from their inputs (`again.py`).

Everything that is wrong becomes a `Problem`, one for each rule that a file breaks; only an unusable
manifest raises an error. A shard whose digest differs is not read further. Reads each shard twice,
and needs the memory of one record batch a worker.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import to_builtins

from packer_cli.errors import DataError, PackerError, UsageError, named, os_errors
from packer_cli.options.options import PackConfig
from packer_cli.options.run_options import EncodingOptions
from packer_cli.packing.figures import AttentionCost
from packer_cli.progress import Progress
from packer_cli.records import IGNORED, Int64, Notify
from packer_cli.result.columns import measured_in, rows_of, segments_of
from packer_cli.result.counts import Counts
from packer_cli.result.layout import (
    INCOMPLETE,
    INDEX,
    MANIFEST,
    MISSING,
    TOKENIZER,
    WORK,
    Measured,
    Shard,
    add_measured,
    difference,
    kind_of,
    problem_of,
)
from packer_cli.result.manifest import (
    Manifest,
    Result,
    TokenizedManifest,
    checksum,
    load_any,
    replaced,
)
from packer_cli.result.opening import Paths, opened
from packer_cli.result.reader import PackedDirectory, Stored
from packer_cli.result.rules import (
    RowLimits,
    Violation,
    broken_rules,
    broken_sources,
    documents_of,
    segments_in,
    sound_batches,
    sources_of,
)
from packer_cli.result.tokenized import TokenizedDirectory
from packer_cli.result.wording import plural
from packer_cli.run.compare import differing_packers
from packer_cli.run.finalize import totals_of_documents, totals_of_rows
from packer_cli.run.place import is_replacing
from packer_cli.run.pool import Pool, Reporter
from packer_cli.storage import read_bytes
from packer_cli.tokenization.engines import BytesEngine
from packer_cli.tokenization.locate import highest_id

_CHUNK_TOKENS = 1 << 16  # checked together: they stay in the cache

# Kinds of problems, and what to do about each; {} is the command that makes such results.
DAMAGED, FOREIGN, CHANGED, DIFFERENT = TIPS = {
    "a damaged result": "copy the directory again, or move what is damaged and {} again with "
    "--overwrite",
    "foreign files": "move them elsewhere: trainers may take them for part of the result",
    "changed inputs": "restore them, or name them after --against-inputs if they have moved, or "
    "need credentials, which no manifest keeps; or run packer {} --add with them as they are now",
    "a result that differs from what its inputs and options give": "{} again with --overwrite; if "
    "that differs, too, report it as a bug in packer",
}


class Problem(NamedTuple):
    """A problem, the file that has it, and its kind: one of `TIPS`."""

    file: str
    problem: str
    kind: str = DAMAGED


class Findings:
    """Figures that were checked, and all problems.

    command       that made the result: pack or tokenize
    figures       numbers of checked shards, bytes, tokens, and rows or documents
    packed_again  number of units; None if inputs are not compared
    """

    def __init__(self, command: str) -> None:
        self.command = command
        self.problems: list[Problem] = []
        self.noun = "document" if command == "tokenize" else "row"
        self.figures = dict.fromkeys(("shards", "bytes", f"{self.noun}s", "tokens"), 0)
        self.packed_again: int | None = None

    def add(self, file: str, *texts: str, kind: str = DAMAGED) -> None:
        """Add a problem of a file for each text that is not empty."""
        self.problems.extend(Problem(file, text, kind) for text in texts if text)

    def extend(self, other: Findings) -> None:
        """Add the problems and figures of other findings."""
        self.problems += other.problems
        for figure, number in other.figures.items():
            self.figures[figure] += number

    def lines(self, directory: Path) -> list[str]:
        """Return a line for each problem, or one that says what was checked."""
        if self.problems:
            return [f"{directory}: {one.file}: {one.problem}" for one in sorted(self.problems)]
        noun, rows = self.noun, self.figures[f"{self.noun}s"]
        line = f"{directory}: {plural(self.figures['shards'], 'shard')}, {plural(rows, noun)}: OK"
        if self.packed_again is not None:
            again = "tokenized" if self.command == "tokenize" else "packed"
            line += f"; {plural(self.packed_again, 'unit')} {again} again: the same {noun}s"
        return [line]

    def tip(self) -> str:
        """Return what to do about every kind of problem that was found."""
        kinds = sorted({problem.kind for problem in self.problems})
        tips = [TIPS[kind].format(self.command) for kind in kinds]
        named = "; ".join(f"{kind}: {tip}" for kind, tip in zip(kinds, tips, strict=True))
        return tips[0] if len(tips) == 1 else named

    def as_json(self) -> dict[str, Any]:
        """Return the object of `--json`."""
        problems = [
            {"file": file, "problem": problem, "tip": TIPS[kind].format(self.command)}
            for file, problem, kind in sorted(self.problems)
        ]
        checked = {**self.figures, "units_packed_again": self.packed_again}
        return {"ok": not problems, "problems": problems, **checked}


def _difference(path: Path, sha256: str, size: int | None = None) -> str:
    """Describe how a file differs from what the manifest lists; "" if it does not."""
    try:
        return difference(path, sha256, size)
    except DataError as error:
        return error.message.removeprefix(f"{path}: ")


def verify(
    directory: Path,
    options: EncodingOptions,
    *,
    progress: bool = False,
    tokens: Paths | None = None,
    compare: Callable[[Stored, Findings], None] | None = None,
) -> Findings:
    """Check a finished directory.

    tokens   as in `open_packed`
    compare  compares a result that has no problem by itself with its inputs

    Raises DataError if there is no usable manifest, or a view's tokenized directories are missing;
    UsageError to compare a result of another version of packer.
    """
    facts, notify = load_any(directory, incomplete_too=True), options.notify
    findings = Findings(facts.command)
    with Progress(sum(one.bytes for one in facts.shards), show=progress, doing="verifying") as bar:
        reporter = Reporter(notify, options.warn, bar)
        checks = _checks(directory, facts, tokens, reporter)
        if compare is not None and (differ := differing_packers(facts.packer_version)):
            raise UsageError(
                f"{directory}: {differ[0]}, which may make other rows of the same inputs",
                "verify it without --against-inputs, or pack it again with --overwrite",
            )
        if facts.incomplete:
            notify(f"{directory} is marked incomplete: {facts.incomplete}")
        _check_files(directory, facts, findings, notify)
        pool = Pool(
            checks.check_unit, workers=options.workers, reporter=reporter, may_run_here=True
        )
        with closing(pool), closing(pool.map([*facts.shards_of_units()])) as checked:
            checks.add_up((unit for _, unit in checked), findings)
    if compare is not None and findings.problems:
        notify("not compared with the inputs: the result itself has problems")
    elif compare is not None:
        compare(checks.stored, findings)
    if findings.problems:  # they may be those of a mix of two results
        if error := replaced(directory, facts):
            raise error
        if is_replacing(directory):
            raise DataError(
                f"{directory}: another result is being put in its place, or that was interrupted",
                f"run the packer {facts.command} that was interrupted again, then verify",
            )
    return findings


def recount(directory: Path, tokens: Paths | None = None) -> None:
    """Count the figures of a result again from its shards, without their digests.

    Raises DataError with every broken rule, or every figure in which shards and manifest differ.
    """
    facts = load_any(directory, incomplete_too=True)
    findings = Findings(facts.command)
    checks = _checks(directory, facts, tokens, Reporter())
    units = (checks.check_unit(shards, bytes_too=False) for shards in facts.shards_of_units())
    checks.add_up(units, findings)
    if not findings.problems:
        return
    of_shards = [f"{directory / one.file}: {one.problem}" for one in findings.problems]
    texts = "; ".join(one.problem for one in findings.problems)
    if findings.problems[0].file == MANIFEST:
        of_shards = [f"{directory}: the shards and the manifest differ: {texts}"]
    raise DataError("; ".join(of_shards), findings.tip())


def _checks(
    directory: Path, facts: Manifest | TokenizedManifest, tokens: Paths | None, progress: Reporter
) -> Checks:
    """Return the checks of the rows or documents of a result."""
    if isinstance(facts, Manifest):
        return RowChecks(opened(directory, facts, tokens), progress)
    return DocumentChecks(TokenizedDirectory(directory, facts), progress)


def _check_files(directory: Path, facts: Result, findings: Findings, notify: Notify) -> None:
    """Check the manifest's checksum, the digests of side files, and the names of all files."""
    if (sha256 := checksum(facts.document)) != facts.sha256:
        text = f"was edited: its contents have the sha256 {sha256}, it says {facts.sha256}"
        findings.add(MANIFEST, text)
    for name, expected in facts.side_files.items():
        path, size = directory / name, facts.side_file_bytes.get(name, 0)
        findings.add(name, _difference(path, expected, size) if path.is_file() else MISSING)
    with os_errors(directory):
        names = set(os.listdir(directory))
    manifest = INCOMPLETE if facts.incomplete else MANIFEST
    for name in names - {manifest, *facts.side_files, *(one.file for one in facts.shards)}:
        if name == WORK:
            notify(
                f"{directory / name}: belongs to a run that is writing here, or that ended "
                "before it could remove it; the next packer pack to this directory removes it"
            )
        else:
            text = "a foreign file: the manifest does not list it"
            findings.add(name, text, kind=FOREIGN)


class UnitCheck(NamedTuple):
    """Findings in a work unit, and its counts; None if a problem left something uncounted."""

    findings: Findings
    counts: Counts | None


class Checks(ABC):
    """Checks of work units, each by itself, and of the manifest's figures."""

    def __init__(self, stored: Stored, progress: Reporter) -> None:
        self.stored, self.path, self.facts = stored, stored.path, stored.facts
        self.progress, self.highest = progress, self._highest_id()
        inputs = range(len(self.facts.inputs))  # a damaged manifest may name others
        self.files = {
            unit.unit: [part[0] for part in unit.slices if part[0] in inputs]
            for unit in self.facts.units
        }

    def check_unit(self, shards: list[Shard], *, bytes_too: bool = True) -> UnitCheck:
        """Check each shard of a unit, its digest if `bytes_too`, and all contents together."""
        findings, counts, places = Findings(self.facts.command), Counts(), list[Int64]()
        for shard in shards:
            path = self.path / shard.file
            findings.figures["bytes"] += shard.bytes
            self.progress.read(shard.bytes, 0)
            problem = problem_of(path, shard)
            if bytes_too and not problem:
                problem = _difference(path, shard.sha256)
            findings.add(shard.file, problem)
        if findings.problems:
            return UnitCheck(findings, None)
        each = [shard for shard in shards if kind_of(shard.file) != INDEX]
        for shard in each:
            name = shard.file
            try:
                errors = [*self.read(shard, counts, places)]
            except PackerError as error:
                name, _, text = error.message.removeprefix(f"{self.path}/").partition(": ")
                errors = [text]
            findings.add(name, *errors)
        checked = {"shards": len(each), "tokens": counts.tokens}
        checked[f"{findings.noun}s"] = getattr(counts, f"{findings.noun}s")
        findings.figures |= checked
        if places and not findings.problems:
            name = each[0].file if len(each) == 1 else f"unit {each[0].unit}"
            findings.add(
                name, *self.misplaced(each[0].unit, np.concatenate(places, axis=1), counts)
            )
        return UnitCheck(findings, None if findings.problems else counts)

    def add_up(self, units: Iterable[UnitCheck], findings: Findings) -> None:
        """Add the findings of all units, and compare the manifest's figures with their counts."""
        counts, is_complete = Counts(), True
        for unit in units:
            findings.extend(unit.findings)
            if unit.counts is None:
                is_complete = False
            else:
                counts.add(unit.counts)
        if not is_complete:
            return
        names = sorted(self.counted(counts))
        facts, config = self.facts, self.facts.config
        if isinstance(config, PackConfig):
            totals = totals_of_rows(config, counts)
        else:
            totals = totals_of_documents(counts)
        counted = totals | totals["histograms"]
        figures = dict[str, tuple[Any, Any]]()
        for name in names:
            listed = getattr(facts.histograms, name, None) or getattr(facts, name, None)
            figures[name] = counted.get(name), to_builtins(listed) if listed else None
        for index, one in enumerate(facts.inputs if counts.files else ()):
            for name in ("documents", "tokens"):
                pair = getattr(counts.file(index), name), getattr(one, name)
                figures[f"{name} of {one.name}"] = pair
        for name, (figure, expected) in figures.items():
            if (figure or None) != (expected or None):
                text = f"{name}: {figure} in the shards, {expected} in the manifest"
                findings.add(MANIFEST, text)

    def _highest_id(self) -> int | None:
        """Return the highest id that the tokenizer gives; None if that is not known."""
        tokenizer = self.facts.tokenizer
        if tokenizer is None:
            return None
        if not tokenizer.sha256:
            return BytesEngine.VOCAB_SIZE - 1
        try:
            return highest_id(read_bytes(self.path / TOKENIZER))
        except (OSError, ValueError, RecursionError):
            return None

    @abstractmethod
    def read(self, shard: Shard, counts: Counts, places: list[Int64]) -> Iterator[str]:
        """Yield the errors in a shard. OUT counts, places: the origins of its contents."""

    @abstractmethod
    def misplaced(self, unit: int, places: Int64, counts: Counts) -> Iterator[str]:
        """Yield the errors in the order of a unit. OUT counts: figures that need a whole unit."""

    @abstractmethod
    def counted(self, counts: Counts) -> set[str]:
        """Name the figures that shards determine. OUT counts: figures of the manifest alone."""


class RowChecks(Checks):
    """Checks of the rows of a packed directory or a view."""

    def __init__(self, packed: PackedDirectory, *context: Any) -> None:
        super().__init__(packed, *context)
        self._packed, self._config = packed, packed.facts.config
        self._limits = RowLimits.of(packed.facts, self.highest)

    def read(self, shard: Shard, counts: Counts, places: list[Int64]) -> Iterator[str]:
        config, rules, first = self._config, dict[str, Violation](), 0
        values = dict[str, Measured]()
        for batch in self._packed.batches(shard):
            broken = self._broken(batch, shard.unit)
            for error in broken:
                if before := rules.get(error.rule):
                    rules[error.rule] = before._replace(rows=before.rows + error.rows)
                else:
                    rules[error.rule] = error._replace(row=first + error.row)
            if not broken:
                counts.add(_of_rows(batch, config.max_length))
                add_measured(values, measured_in(batch, config.value_columns.values()))
                if "segments" in config.columns:
                    places.append(segments_in(batch))
            first += batch.num_rows
            self.progress.wrote(counts.tokens, batch.num_rows * config.max_length)
        yield from map(str, rules.values())
        if not rules and not config.view:
            yield from _other_values(values, shard)

    def _broken(self, batch: Any, unit: int) -> list[Violation]:
        step = max(1, _CHUNK_TOKENS // self._config.max_length)
        broken = [
            error._replace(row=begin + error.row)
            for begin in range(0, batch.num_rows, step)
            for error in broken_rules(batch.slice(begin, step), self._limits)
        ]
        if broken or "segments" not in self._config.columns:
            return broken
        return broken_sources(batch, np.array(self.files.get(unit, []), np.int64))

    def misplaced(self, unit: int, places: Int64, counts: Counts) -> Iterator[str]:
        """Pieces of a document follow one another."""
        documents = documents_of(places)
        tokens = documents.tokens
        file, position, start, _ = documents.segments
        counts.unpacked_rows += int((-(-tokens // self._config.max_length)).sum())
        counts.add_documents(file[documents.first[:-1]].astype(np.int32), tokens, tokens)
        expected = documents.expected_starts(whole=self._config.truncate_side != "left")
        wrong = np.flatnonzero(start != expected)
        for at in wrong[:1].tolist():
            yield (
                f"the document at position {position[at]} of {self.facts.inputs[file[at]].name} "
                f"has a piece from token {start[at]}, expected from {expected[at]} "
                f"({len(wrong)} pieces)"
            )

    def counted(self, counts: Counts) -> set[str]:
        names = {"rows", "segments", "tokens", "padding_tokens", "utilization", "lower_bound_rows",
                 "row_fill", "segments_per_row", "length_squares", "length_squares_in_rows",
                 "one_length"}  # fmt: skip
        if costs := self._packed.facts.attention_cost:
            names.add("attention_cost")
            counts.attention_before = costs.before
        if "labels" in self._config.columns:
            names.add("trained_tokens")
        if "segments" in self._config.columns:
            names |= {"documents", "unpacked_rows", "document_length", "one_input"}
        return names


def _other_values(values: Mapping[str, Measured], shard: Shard) -> Iterator[str]:
    """Yield a text if the values in a shard are not those that the manifest says."""
    different = {name for name in values if values[name] != shard.values.get(name)}
    if different := different | (shard.values.keys() - values.keys()):
        yield f"holds other values of {named(sorted(different))} than the manifest says"


def _of_rows(batch: Any, max_length: int) -> Counts:
    """Return the counts of a valid batch of rows."""
    _, length, offsets = segments_of(batch)
    counts = Counts.of_rows(length, sources_of(batch)[0], offsets, max_length)
    counts.attention_after = AttentionCost.of(length, offsets)
    if "labels" in batch.schema.names:
        labels = rows_of(batch.column("labels"))
        counts.trained_tokens = int(np.count_nonzero(labels != IGNORED))
    return counts


class DocumentChecks(Checks):
    """Checks of the documents of a tokenized directory."""

    def __init__(self, tokenized: TokenizedDirectory, *context: Any) -> None:
        super().__init__(tokenized, *context)
        self._tokenized = tokenized
        self._number = {shard.file: i for i, shard in enumerate(tokenized.shards)}

    def read(self, shard: Shard, counts: Counts, places: list[Int64]) -> Iterator[str]:
        number, values = self._number[shard.file], dict[str, Measured]()
        for batch, index in sound_batches(self._tokenized, number, self.highest):
            file, position = (batch.column(name).to_numpy() for name in ("file", "position"))
            places.append(np.stack([file, position]).astype(np.int64))
            lengths = index.column("length").to_numpy().astype(np.int64)
            counts.tokens += int(lengths.sum())
            counts.trained_tokens += int(index.column("trained_tokens").to_numpy().sum(dtype=int))
            counts.add_documents(file, lengths, lengths)
            add_measured(values, measured_in(batch, self.facts.config.value_columns.values()))
            self.progress.wrote(len(batch.column("input_ids").values), 0)
        yield from _other_values(values, shard)

    def misplaced(self, unit: int, places: Int64, counts: Counts) -> Iterator[str]:
        """Yield an error if documents do not follow the unit's slices and their positions."""
        file, position = places
        files = self.files.get(unit, [])
        rank = np.full(len(self.facts.inputs), -1, np.int64)
        rank[np.array(files[::-1], np.int64)] = np.arange(len(files))[::-1]
        order = rank[file]
        back = (np.diff(order) < 0) | ((np.diff(order) == 0) & (np.diff(position) <= 0))
        wrong = np.flatnonzero((order < 0) | (position < 0) | np.append(False, back))
        for at in wrong[:1].tolist():
            path = self.facts.inputs[int(file[at])].name
            if order[at] < 0:
                yield f"its document {at} is of {path}, which the unit does not read"
            else:
                yield f"its document {at} is at {position[at]} of {path}, not after the one before"

    def counted(self, counts: Counts) -> set[str]:
        return {"documents", "tokens", "trained_tokens", "document_length"}
