"""`packer verify`: a result checked against its manifest and its inputs.

    the manifest's checksum, the names of all files, their digests
    the rules of every row or document, and figures that are counted again
    units that are packed again from their inputs, if all of that is in order: again.py

Whatever is wrong becomes a `Problem`, one for each rule that a file breaks; only an unusable
manifest raises an error. A shard whose bytes are not those of the manifest is not looked into.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import to_builtins
from msgspec.structs import astuple

from packer_cli.errors import DataError, PackerError, os_errors
from packer_cli.interrupts import run_all
from packer_cli.options.options import PackConfig
from packer_cli.options.run_options import EncodingOptions
from packer_cli.packing.figures import AttentionCost
from packer_cli.progress import Progress
from packer_cli.records import IGNORED, Int64
from packer_cli.result.counts import Counts
from packer_cli.result.layout import (
    INCOMPLETE,
    INDEX,
    MANIFEST,
    TOKENIZER,
    WORK,
    Measured,
    Shard,
    add_measured,
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
from packer_cli.result.reader import PackedDirectory, Stored, measured_in, rows_of, segments_of
from packer_cli.result.rules import (
    Broken,
    RowLimits,
    broken_rules,
    broken_sources,
    documents_of,
    segments_in,
    sound_batches,
    sources_of,
)
from packer_cli.result.tokenized import TokenizedDirectory
from packer_cli.run.destination import is_replacing
from packer_cli.run.finalize import totals_of_documents, totals_of_rows
from packer_cli.run.identity import refuse_other_packer
from packer_cli.storage import read_bytes
from packer_cli.tokenization.engines import BytesEngine
from packer_cli.tokenization.locate import highest_id
from packer_cli.verify.findings import FOREIGN, Against, Findings, Problem

__all__ = ["Against", "Findings", "Problem", "recount", "verify"]

_CHUNK_TOKENS = 1 << 16  # that the rules look at together: they stay in the cache
_OTHER_VALUES = "holds other values in carried columns than the manifest says"


def verify(
    directory: Path,
    options: EncodingOptions,
    *,
    progress: bool = False,
    tokens: Paths | None = None,
    against: Against | None = None,
) -> Findings:
    """Check a finished directory, and with `against` pack its units again.

    Inputs are only compared with a result that has no problem by itself. `tokens`: as in
    `open_packed`. Raises DataError when there is no usable manifest, or a view's tokenized
    directories are not there; UsageError to pack units of another version again.
    """
    facts, notify = load_any(directory, incomplete_too=True), options.notify
    findings = Findings(facts.command, notify, options.stop)
    with Progress(sum(one.bytes for one in facts.shards), show=progress, doing="verifying") as bar:
        check = _checks(directory, facts, tokens, findings, bar)
        if against is not None:
            then = facts.packer_version
            tip = f"verify it without --against-inputs, or with packer {then}; packer pack "
            refuse_other_packer(directory, then, f"{tip}--overwrite packs it again")
        if facts.incomplete:
            notify(f"{directory} is marked incomplete: {facts.incomplete}")
        _check_files(directory, facts, findings)
        units = (partial(check.check_unit, unit) for unit in facts.shards_of_units())
        run_all(units, options.workers, options.stop)
        check.check_totals()
    if against is not None and findings.problems:
        notify("not compared with the inputs: the result itself has problems")
    elif against is not None:
        from packer_cli.verify.again import compare_inputs  # noqa: PLC0415 needs a tokenizer

        compare_inputs(check.stored, against, findings, options.workers)
    if findings.problems:  # which may be those of a mix of two results
        if error := replaced(directory, facts):
            raise error
        if is_replacing(directory):
            raise DataError(
                f"{directory}: another result is being put in its place, or that was interrupted",
                f"run the packer {facts.command} that was interrupted again, then verify",
            )
    return findings


def recount(directory: Path, tokens: Paths | None = None) -> None:
    """Count the figures of a result again from its shards, whose bytes are not compared with their
    digests. Raises DataError that names every rule that is broken, or every figure in which shards
    and manifest differ. `tokens`: as in `open_packed`.
    """
    facts = load_any(directory, incomplete_too=True)
    findings = Findings(facts.command)
    check = _checks(directory, facts, tokens, findings, Progress(0, show=False))
    for unit in facts.shards_of_units():
        check.check_unit(unit, bytes_too=False)
    check.check_totals()
    if not findings.problems:
        return
    of_shards = [f"{directory / one.file}: {one.problem}" for one in findings.problems]
    texts = "; ".join(one.problem for one in findings.problems)
    if findings.problems[0].file == MANIFEST:
        of_shards = [f"{directory}: the shards and the manifest differ: {texts}"]
    raise DataError("; ".join(of_shards), findings.tip())


def _checks(
    directory: Path,
    facts: Manifest | TokenizedManifest,
    tokens: Paths | None,
    findings: Findings,
    progress: Progress,
) -> Checks:
    """What checks the rows or documents of a result."""
    if isinstance(facts, Manifest):
        return RowChecks(opened(directory, facts, tokens), findings, progress)
    return DocumentChecks(TokenizedDirectory(directory, facts), findings, progress)


# The manifest and the files


def _check_files(directory: Path, facts: Result, findings: Findings) -> None:
    """Check the manifest's checksum, the digests of side files, and the names of all files."""
    if (sha256 := checksum(facts.document)) != facts.sha256:
        text = f"was edited: its contents have the sha256 {sha256}, it says {facts.sha256}"
        findings.add(MANIFEST, text)
    for name, expected in facts.side_files.items():
        if (directory / name).is_file():
            size = facts.side_file_bytes.get(name, 0)
            findings.is_as_listed(name, directory / name, expected, size)
        else:
            findings.add(name, "is missing")
    with os_errors(directory):
        names = set(os.listdir(directory))
    own = INCOMPLETE if facts.incomplete else MANIFEST
    for name in names - {own, *facts.side_files, *(one.file for one in facts.shards)}:
        if name == WORK:
            findings.notify(
                f"{directory / name}: belongs to a run that is writing here, or that ended "
                "before it could remove it; the next packer pack to this directory removes it"
            )
        else:
            text = "a foreign file: the manifest does not list it"
            findings.add(name, text, kind=FOREIGN)


# The shards


class Checks(ABC):
    """Checks units, and adds up what is in them."""

    def __init__(self, stored: Stored, findings: Findings, progress: Progress) -> None:
        self.stored, self.path, self.facts = stored, stored.path, stored.facts
        self.findings, self.progress = findings, progress
        self.highest = self._highest_id()
        inputs = range(len(self.facts.inputs))  # a damaged manifest may name others
        self.files = {
            unit.unit: [part[0] for part in unit.slices if part[0] in inputs]
            for unit in self.facts.units
        }
        self._counts = Counts()
        self._complete = True  # whether everything was counted

    def check_unit(self, shards: list[Shard], *, bytes_too: bool = True) -> None:
        """Check the shards of a unit, each alone, and what lies in them together. `bytes_too`:
        whether digests are compared; of a unit that is not whole nothing else is looked at.
        """
        if False in [self._is_whole(shard, bytes_too=bytes_too) for shard in shards]:
            self._complete = False
            return
        findings, counts, places, texts = self.findings, Counts(), list[Int64](), list[str]()
        each = [shard for shard in shards if kind_of(shard.file) != INDEX]
        for shard in each:
            name = shard.file
            try:
                own = [*self.read(shard, counts, places)]
            except PackerError as error:
                findings.stop_if_asked()
                name, _, text = error.message.removeprefix(f"{self.path}/").partition(": ")
                own = [text]
            findings.add(name, *own)
            texts += own
        for figure in {"rows", "documents", "tokens"} & findings.figures.keys():
            findings.count(figure, getattr(counts, figure))
        findings.count("shards", len(each))
        if places and not texts:
            where = each[0].file if len(each) == 1 else f"unit {each[0].unit}"
            texts += self.misplaced(each[0].unit, np.concatenate(places, axis=1), counts)
            findings.add(where, *texts)
        with findings.lock:
            self._counts.add(counts)
            self._complete = self._complete and not texts

    def _is_whole(self, shard: Shard, *, bytes_too: bool) -> bool:
        path = self.path / shard.file
        self.findings.count("bytes", shard.bytes)
        self.progress.read(shard.bytes, 0)
        if problem := problem_of(path, shard):
            self.findings.add(shard.file, problem)
            return False
        return not bytes_too or self.findings.is_as_listed(shard.file, path, shard.sha256)

    def check_totals(self) -> None:
        """Check the manifest's figures, if everything could be counted."""
        if not self._complete:
            return
        names, counts = sorted(self.counted()), self._counts
        facts, config = self.facts, self.facts.config
        if isinstance(config, PackConfig):
            made = totals_of_rows(config, counts)
        else:
            made = totals_of_documents(counts)
        own = made | made["histograms"]
        figures = dict[str, tuple[Any, Any]]()
        for name in names:
            listed = getattr(facts.histograms, name, None) or getattr(facts, name, None)
            figures[name] = own.get(name), to_builtins(listed) if listed else None
        for index, one in enumerate(facts.inputs if counts.files else ()):
            for name in ("documents", "tokens"):
                pair = getattr(counts.file(index), name), getattr(one, name)
                figures[f"{name} of {one.name}"] = pair
        for name, (figure, said) in figures.items():
            if (figure or None) != (said or None):
                text = f"{name}: {figure} in the shards, {said} in the manifest"
                self.findings.add(MANIFEST, text)

    def _highest_id(self) -> int | None:
        """The highest id that the tokenizer gives; None when that is not known."""
        tokenizer = self.facts.tokenizer
        if tokenizer is None or any(one.file == TOKENIZER for one in self.findings.problems):
            return None
        if not tokenizer.sha256:
            return BytesEngine.VOCAB_SIZE - 1
        try:
            return highest_id(read_bytes(self.path / TOKENIZER))
        except (OSError, ValueError, RecursionError):
            return None

    @abstractmethod
    def read(self, shard: Shard, counts: Counts, places: list[Int64]) -> Iterator[str]:
        """Errors in a shard. OUT counts, places: where what it holds comes from."""

    @abstractmethod
    def misplaced(self, unit: int, places: Int64, counts: Counts) -> Iterator[str]:
        """Errors in how a unit follows its inputs. OUT counts, of what only a unit shows."""

    @abstractmethod
    def counted(self) -> set[str]:
        """The manifest's figures and histograms that shards tell."""


class RowChecks(Checks):
    """Checks rows of a packed directory or a view."""

    def __init__(self, packed: PackedDirectory, *how: Any) -> None:
        super().__init__(packed, *how)
        self._packed, self._config = packed, packed.facts.config
        self._limits = RowLimits.of(packed.facts, self.highest)

    def read(self, shard: Shard, counts: Counts, places: list[Int64]) -> Iterator[str]:
        config, rules, first = self._config, dict[str, Broken](), 0
        carried = dict[str, Measured]()
        for batch in self._packed.batches(shard):
            self.findings.stop_if_asked()
            broken = self._broken(batch, shard.unit)
            for one in broken:
                before, at = rules.get(one.rule), one._replace(row=first + one.row)
                rules[one.rule] = before._replace(rows=before.rows + one.rows) if before else at
            if not broken:
                counts.add(_of_rows(batch, config.max_length))
                add_measured(carried, measured_in(batch, config.carried.values()))
                if "segments" in config.columns:
                    places.append(segments_in(batch))
            first += batch.num_rows
            self.progress.wrote(counts.tokens, batch.num_rows * config.max_length)
        yield from map(str, rules.values())
        if not rules and not config.view and carried != shard.carried:
            yield _OTHER_VALUES

    def _broken(self, batch: Any, unit: int) -> list[Broken]:
        step = max(1, _CHUNK_TOKENS // self._config.max_length)
        broken = [
            one._replace(row=begin + one.row)
            for begin in range(0, batch.num_rows, step)
            for one in broken_rules(batch.slice(begin, step), self._limits)
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

    def counted(self) -> set[str]:
        names = {"rows", "segments", "tokens", "padding_tokens", "utilization", "lower_bound_rows",
                 "row_fill", "segments_per_row", "length_squares", "length_squares_in_rows",
                 "one_length"}  # fmt: skip
        if costs := self._packed.facts.attention_cost:
            names.add("attention_cost")
            self._counts.attention_before = AttentionCost(*astuple(costs.before))
        if "labels" in self._config.columns:
            names.add("trained_tokens")
        if "segments" in self._config.columns:
            names |= {"documents", "unpacked_rows", "document_length", "one_input"}
        return names


def _of_rows(batch: Any, max_length: int) -> Counts:
    """The counts of a sound batch of rows."""
    _, length, offsets = segments_of(batch)
    counts = Counts.of_rows(length, sources_of(batch)[0], offsets, max_length)
    counts.attention_after = AttentionCost.of(length, offsets)
    if "labels" in batch.schema.names:
        labels = rows_of(batch.column("labels"))
        counts.trained_tokens = int(np.count_nonzero(labels != IGNORED))
    return counts


class DocumentChecks(Checks):
    """Checks documents of a tokenized directory, each of which has its number in its shard."""

    def __init__(self, tokenized: TokenizedDirectory, *how: Any) -> None:
        super().__init__(tokenized, *how)
        self._tokenized = tokenized
        self._number = {shard.file: i for i, shard in enumerate(tokenized.shards)}

    def read(self, shard: Shard, counts: Counts, places: list[Int64]) -> Iterator[str]:
        number, carried = self._number[shard.file], dict[str, Measured]()
        for batch, index in sound_batches(self._tokenized, number, self.highest):
            self.findings.stop_if_asked()
            file, position = (batch.column(name).to_numpy() for name in ("file", "position"))
            places.append(np.stack([file, position]).astype(np.int64))
            lengths = index.column("length").to_numpy().astype(np.int64)
            counts.tokens += int(lengths.sum())
            counts.trained_tokens += int(index.column("trained_tokens").to_numpy().sum(dtype=int))
            counts.add_documents(file, lengths, lengths)
            add_measured(carried, measured_in(batch, self.facts.config.carried.values()))
            self.progress.wrote(len(batch.column("input_ids").values), 0)
        if carried != shard.carried:
            yield _OTHER_VALUES

    def misplaced(self, unit: int, places: Int64, counts: Counts) -> Iterator[str]:
        """Documents are in the order of the unit's slices, and of their positions."""
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

    def counted(self) -> set[str]:
        return {"documents", "tokens", "trained_tokens", "document_length"}
