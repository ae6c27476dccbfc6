"""Every shard of a result read once: its digest, the rules of its rows or documents, their figures.

A shard whose bytes are not those of the manifest is not looked into. Units are checked on threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET
from msgspec.structs import astuple

from packer_cli.errors import PackerError
from packer_cli.options.options import PackConfig
from packer_cli.packing.figures import AttentionCost, squared_sums
from packer_cli.progress import Progress
from packer_cli.records import IGNORED, Int64
from packer_cli.result.counts import Counts
from packer_cli.result.layout import (
    MANIFEST,
    SQUARED_LENGTHS,
    TOKENIZER,
    Measured,
    Shard,
    add_measured,
    problem_of,
)
from packer_cli.result.reader import (
    PackedDirectory,
    Stored,
    measured_in,
    rows_of,
    segments_of,
    squared_lengths,
)
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
from packer_cli.result.wording import plural
from packer_cli.storage import read_bytes
from packer_cli.tokenization.engines import BytesEngine
from packer_cli.tokenization.locate import highest_id
from packer_cli.verify.files import Findings, other_figures

_STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_CHUNK_TOKENS = 1 << 16  # that the rules look at together: they stay in the cache


class Checks(ABC):
    """Checks units, and adds up what is in them.

    figures    of a shard, which are counted again
    together   shards that are read at once: one of documents has its index beside it
    bytes_too  whether digests, ends of streams and side files are compared, too
    """

    figures: tuple[str, ...] = ("documents", "tokens", "trained_tokens")
    together = 2

    def __init__(
        self,
        stored: Stored,
        findings: Findings,
        progress: Progress,
        *,
        bytes_too: bool = True,
    ) -> None:
        facts = stored.facts
        self._config = facts.config
        self._facts, self._path = facts, stored.path
        self._findings, self._progress, self._bytes_too = findings, progress, bytes_too
        self._highest = self._highest_id()
        inputs = range(len(facts.inputs))  # a damaged manifest may name others
        self._files = {
            unit.unit: [part[0] for part in unit.slices if part[0] in inputs]
            for unit in facts.units
        }
        self._counts = Counts()
        self._complete = True  # whether everything was counted

    def check_unit(self, shards: list[Shard]) -> None:
        """The shards of one unit, each alone, and what lies in them together."""
        counts, places = Counts(), list[Int64]()
        each = [shards[at : at + self.together] for at in range(0, len(shards), self.together)]
        sound = False not in [self._is_sound(some, counts, places) for some in each]
        if sound and places:
            where = shards[0].file if len(each) == 1 else f"unit {shards[0].unit}"
            every = np.concatenate(places, axis=1)
            self._findings.add(where, *self._misplaced(shards[0].unit, every, counts))
        with self._findings.lock:
            self._counts.add(counts)
            self._complete = self._complete and sound

    def check_totals(self) -> None:
        """Check the manifest's figures, if everything could be counted."""
        if self._complete:
            others = other_figures(self._facts, self._counts, self._counted())
            texts = (f"{name}: {value} in the shards, {listed} in the manifest"
                     for name, value, listed in others)  # fmt: skip
            self._findings.add(MANIFEST, *texts)

    def _is_sound(self, shards: list[Shard], counts: Counts, places: list[Int64]) -> bool:
        """Whether shards that are read together are sound. OUT counts, places."""
        findings, mine, first = self._findings, Counts(), shards[0]
        if False in [self._is_unchanged(shard) for shard in shards]:
            return False
        where, texts = first.file, list[str]()
        try:
            texts += self._read(shards, mine, places)
        except PackerError as error:
            findings.stop_if_asked()
            where, _, text = error.message.removeprefix(f"{self._path}/").partition(": ")
            texts = [text]
        listed = {name: getattr(first, name.replace("documents", "rows")) for name in self.figures}
        texts = texts or [
            f"holds {getattr(mine, name)} {name}, the manifest says {value}"
            for name, value in listed.items()
            if getattr(mine, name) != value
        ]
        findings.add(where, *texts)
        counts.add(mine)
        findings.count("shards", 1)
        for name in {"rows", "documents", "tokens"} & findings.figures.keys():
            findings.count(name, getattr(mine, name))
        return not texts

    def _is_unchanged(self, shard: Shard) -> bool:
        path, findings = self._path / shard.file, self._findings
        self._progress.read(shard.bytes, 0)
        findings.count("bytes", shard.bytes)
        if problem := problem_of(path, shard):
            findings.add(shard.file, problem)
            return False
        if not self._bytes_too:
            return True
        if not findings.is_as_listed(shard.file, path, shard.sha256):
            return False
        with open(path, "rb") as file:
            file.seek(max(0, shard.bytes - len(_STREAM_END)))
            if is_whole := file.read() == _STREAM_END:
                return is_whole
        findings.add(shard.file, "does not end with the end marker of an Arrow stream")
        return False

    def _highest_id(self) -> int | None:
        """The highest id that the tokenizer gives; None when that is not known."""
        tokenizer = self._facts.tokenizer
        if tokenizer is None or any(one.file == TOKENIZER for one in self._findings.problems):
            return None
        if not tokenizer.sha256:
            return BytesEngine.VOCAB_SIZE - 1
        try:
            return highest_id(read_bytes(self._path / TOKENIZER))
        except OSError:
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._findings.add(TOKENIZER, f"is not a tokenizer: {error}")
            return None

    @abstractmethod
    def _read(self, shards: list[Shard], counts: Counts, places: list[Int64]) -> list[str]:
        """Errors in shards. OUT counts, places: where what they hold comes from."""

    @abstractmethod
    def _misplaced(self, unit: int, places: Int64, counts: Counts) -> Iterator[str]:
        """Errors in how a unit follows its inputs. OUT counts, of what only a unit shows."""

    @abstractmethod
    def _counted(self) -> set[str]:
        """The manifest's figures and histograms that shards tell."""


class RowChecks(Checks):
    """Checks rows of a packed directory or a view."""

    together = 1

    _config: PackConfig

    def __init__(self, packed: PackedDirectory, *how: Any, **more: Any) -> None:
        super().__init__(packed, *how, **more)
        self._packed = packed
        self._limits = RowLimits.of(packed.facts, self._highest)
        self._squares: dict[str, Int64] = {}  # int64[rows] of each shard
        trained = ("trained_tokens",) if "labels" in self._config.columns else ()
        self.figures = ("rows", "segments", "tokens", *trained)

    def _read(self, shards: list[Shard], counts: Counts, places: list[Int64]) -> list[str]:
        (shard,) = shards
        rules, squares = dict[str, Broken](), list[Int64]()
        carried, first = dict[str, Measured](), 0
        for batch in self._packed.batches(shard):
            self._findings.stop_if_asked()
            broken = self._broken(batch, shard.unit)
            for one in broken:
                before, at = rules.get(one.rule), one._replace(row=first + one.row)
                rules[one.rule] = before._replace(rows=before.rows + one.rows) if before else at
            if not broken:
                counts.add(_of_rows(batch, self._config.max_length))
                squares.append(squared_sums(*segments_of(batch)[1:]))
                if not self._config.view:  # which has no such values
                    add_measured(carried, measured_in(batch, self._config.carried.values()))
                if "segments" in self._config.columns:
                    places.append(segments_in(batch))
            first += batch.num_rows
            self._progress.wrote(counts.tokens, batch.num_rows * self._config.max_length)
        if squares:
            self._squares[shard.file] = np.concatenate(squares)
        return [str(one) for one in rules.values()] or _others(shard, carried)

    def _broken(self, batch: Any, unit: int) -> list[Broken]:
        step = max(1, _CHUNK_TOKENS // self._config.max_length)
        broken = [
            one._replace(row=begin + one.row)
            for begin in range(0, batch.num_rows, step)
            for one in broken_rules(batch.slice(begin, step), self._limits)
        ]
        if broken or "segments" not in self._config.columns:
            return broken
        return broken_sources(batch, np.array(self._files.get(unit, []), np.int64))

    def _misplaced(self, unit: int, places: Int64, counts: Counts) -> Iterator[str]:
        documents = documents_of(places)
        tokens = documents.tokens
        file, position, start, _ = documents.segments
        counts.unpacked_rows += int((-(-tokens // self._config.max_length)).sum())
        counts.add_documents(file[documents.first[:-1]].astype(np.int32), tokens, tokens)
        expected = documents.expected_starts(whole=self._config.truncate_side != "left")
        wrong = np.flatnonzero(start != expected)
        for at in wrong[:1].tolist():
            yield (
                f"the document at position {position[at]} of {self._facts.inputs[file[at]].name} "
                f"has a piece from token {start[at]}, expected from {expected[at]} "
                f"({len(wrong)} pieces)"
            )

    def check_totals(self) -> None:
        if self._complete and self._bytes_too:
            self._check_squares()
        super().check_totals()

    def _counted(self) -> set[str]:
        facts, names = self._packed.facts, self._config.columns
        counted = {"rows", "segments", "tokens", "padding_tokens", "utilization",
                   "lower_bound_rows", "row_fill", "segments_per_row"}  # fmt: skip
        if facts.attention_cost is not UNSET:
            counted.add("attention_cost")
            self._counts.attention_before = AttentionCost(*astuple(facts.attention_cost.before))
        if "labels" in names:
            counted.add("trained_tokens")
        if facts.histograms.one_length:
            counted |= {"length_squares", "length_squares_in_rows", "one_length"}
        if "segments" in names:
            counted |= {"documents", "unpacked_rows", "document_length"}
            counted |= {"one_input"} if facts.histograms.one_length else set()
        return counted

    def _check_squares(self) -> None:
        """Compare the side file that has an int64 for each row, unless it is known to be wrong."""
        findings = self._findings
        problems = {one.file for one in findings.problems}
        if SQUARED_LENGTHS not in self._facts.side_files or SQUARED_LENGTHS in problems:
            return
        try:
            listed = squared_lengths(self._packed, compared=True)
        except PackerError as error:
            place = self._path / SQUARED_LENGTHS
            findings.add(SQUARED_LENGTHS, error.message.removeprefix(f"{place}: "))
            return
        made = np.concatenate([self._squares[shard.file] for shard in self._facts.shards])
        wrong = np.flatnonzero(listed[: len(made)] != made[: len(listed)])
        for row in wrong[:1].tolist():
            text = f"has {listed[row]} for row {row}, whose segments make {made[row]}"
            findings.add(SQUARED_LENGTHS, f"{text} ({len(wrong)} rows)")


def _others(shard: Shard, made: dict[str, Measured]) -> list[str]:
    """Carried columns of which a shard says other figures than these."""
    return [
        f"holds {_figures(made.get(name))} of {name}, the manifest says "
        f"{_figures(shard.carried.get(name))}"
        for name in sorted(made.keys() | shard.carried.keys())
        if made.get(name) != shard.carried.get(name)
    ]


def _figures(measured: Measured | None) -> str:
    if measured is None:
        return "no values"
    number, low, high, its_sum = measured
    return f"{plural(number, 'value')} from {low} to {high} with the sum {its_sum}"


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

    def __init__(self, tokenized: TokenizedDirectory, *how: Any, **more: Any) -> None:
        super().__init__(tokenized, *how, **more)
        self._tokenized = tokenized
        self._number = {shard.file: i for i, shard in enumerate(tokenized.shards)}

    def _read(self, shards: list[Shard], counts: Counts, places: list[Int64]) -> list[str]:
        number, carried = self._number[shards[0].file], dict[str, Measured]()
        for batch, index in sound_batches(self._tokenized, number, self._highest):
            self._findings.stop_if_asked()
            file, position = (batch.column(name).to_numpy() for name in ("file", "position"))
            places.append(np.stack([file, position]).astype(np.int64))
            lengths = index.column("length").to_numpy().astype(np.int64)
            counts.tokens += int(lengths.sum())
            trained = index.column("trained_tokens").to_numpy()
            counts.trained_tokens += int(trained.sum(dtype=np.int64))
            counts.add_documents(file, lengths, lengths)
            add_measured(carried, measured_in(batch, self._config.carried.values()))
            self._progress.wrote(len(batch.column("input_ids").values), 0)
        return _others(shards[0], carried)

    def _misplaced(self, unit: int, places: Int64, counts: Counts) -> Iterator[str]:
        """Documents are in the order of the unit's slices, and of their positions."""
        file, position = places
        files = self._files.get(unit, [])
        rank = np.full(len(self._facts.inputs), -1, np.int64)
        rank[np.array(files[::-1], np.int64)] = np.arange(len(files))[::-1]
        order = rank[file]
        back = (np.diff(order) < 0) | ((np.diff(order) == 0) & (np.diff(position) <= 0))
        wrong = np.flatnonzero((order < 0) | (position < 0) | np.append(False, back))
        for at in wrong[:1].tolist():
            path = self._facts.inputs[int(file[at])].name
            if order[at] < 0:
                yield f"its document {at} is of {path}, which the unit does not read"
            else:
                yield f"its document {at} is at {position[at]} of {path}, not after the one before"

    def _counted(self) -> set[str]:
        return {"documents", "tokens", "trained_tokens", "document_length"}
