"""The counts of what a unit, and by addition a run, read, packed and lost.

Histograms have fixed buckets, so that those of units add up and those of a recount compare.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from packer_cli.config.row_rules import MAX_LENGTH_LIMIT
from packer_cli.packing.attention_cost import AttentionCost
from packer_cli.packing.fitting import Loss, Untrained
from packer_cli.packing.mixedness import (
    ONE_INPUT,
    ONE_LENGTH,
    deviations,
    from_one_input,
    near_median,
    spread,
)
from packer_cli.records import Int32, Int64, LeftOut, LookedAt

ROW_FILL_BUCKETS = 21  # bucket i: i/20 <= fill < (i+1)/20; the last one: exactly full
_MOST_UNREAD, OTHERS = 50, "…"
_POWER_BUCKETS = 32  # bucket i: 2**i <= value < 2**(i+1)


def powers_histogram(values: Int64 | Int32) -> Int64:
    """int64[32]: how many values lie in each [2**i, 2**(i+1)); values >= 1."""
    exponents = np.frexp(values.astype(np.float64))[1] - 1
    return np.bincount(exponents, minlength=_POWER_BUCKETS).astype(np.int64)


def fill_histogram(row_tokens: Int64, max_length: int | Int64) -> Int64:
    """int64[21]: rows by fill in steps of five percent, full rows last."""
    bucket = row_tokens * (ROW_FILL_BUCKETS - 1) // max_length
    return np.bincount(bucket, minlength=ROW_FILL_BUCKETS).astype(np.int64)


def share_from(histogram: Sequence[int], least: float) -> float | None:
    """Share of the rows in such a histogram with at least this share; None of none."""
    first = round(least * (ROW_FILL_BUCKETS - 1))
    return sum(histogram[first:]) / sum(histogram) if sum(histogram) else None


def mixedness(totals: Mapping[str, Any], histograms: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """How mixed rows are, by the totals of a manifest; {} where an earlier packer did not count.

    spread      standard deviation of lengths in a row over that in the data; None without any
    one_length  share of rows with most of their segments within 5% of one length
    one_input   share of rows with most of their segments from one input; None for both: no row has
                segments enough
    """
    if not totals["length_squares"]:
        return {}
    names = ("length_squares", "length_squares_in_rows", "tokens", "segments", "rows")
    of_data = spread(*(totals[name] for name in names))
    shares = {"one_length": ONE_LENGTH, "one_input": ONE_INPUT}
    return {"spread": None if math.isnan(of_data) else of_data} | {
        name: share_from(histograms[name], least) for name, least in shares.items()
    }


def _packed(counts: Int64) -> str:
    """As text: the counts are mostly zeros; only the others are kept, in a byte or two each."""
    where = np.flatnonzero(counts)
    pairs = np.stack([np.diff(where, prepend=0), counts[where]]).astype("<i8")
    return base64.b64encode(zlib.compress(pairs.tobytes())).decode() if len(where) else ""


def _unpacked(text: str) -> Int64:
    try:
        steps, counts = np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i8").reshape(2, -1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if steps.min(initial=0) < 0 or steps.sum() > MAX_LENGTH_LIMIT:
        raise ValueError("lengths beyond any row")
    out = np.zeros(int(steps.sum()) + 1, np.int64)
    out[np.cumsum(steps)] = counts
    return out


def _add_named(totals: dict[str, int], more: Mapping[str, int]) -> None:
    """Add counts of names; of many different ones, the rest is counted as one. INOUT totals."""
    for name, number in sorted(more.items()):
        one = name if name in totals or len(totals) < _MOST_UNREAD else OTHERS
        totals[one] = totals.get(one, 0) + number


def _powers() -> Int64:
    return np.zeros(_POWER_BUCKETS, np.int64)


def _shares() -> Int64:
    return np.zeros(ROW_FILL_BUCKETS, np.int64)


@dataclass
class FileCounts:
    """What was packed of one input file, and what was not.

    New figures go to the end, where records of earlier packers lack them.
    """

    documents: int = 0
    tokens: int = 0
    empty_documents: int = 0
    rejected_records: int = 0
    trained_tokens: int = 0
    truncated_documents: int = 0
    truncated_tokens: int = 0
    dropped_documents: int = 0
    dropped_tokens: int = 0
    untrained_documents: int = 0
    untrained_tokens: int = 0
    unshown_documents: int = 0
    unshown_tokens: int = 0
    rejected_files: int = 0

    def as_json(self) -> list[int]:
        """The figures in their order, without zeros at the end."""
        figures = list(vars(self).values())
        while figures and not figures[-1]:
            figures.pop()
        return figures


@dataclass
class Counts(Loss):
    """Sums over documents and rows. `tokens` are those placed in rows; with the truncated and
    dropped ones they make `encoded_tokens`. `documents` have at least one token in a row.
    `rejected_files` of the rejected records are whole files that cannot be decoded.
    The attention costs are counted where rows are balanced, before and after.

    edge_tokens     hold the end of a prompt and the beginning of its answer
    looked_at_...   records of which all fields were read, and the characters in them
    unused          characters of these that nothing uses, by field
    dropped_length  the tokens of documents that are dropped since they are longer than a row; of
                    those with 2**i <= length < 2**(i+1) in dropped_length[i]
    """

    documents: int = 0
    empty_documents: int = 0
    rejected_records: int = 0
    rejected_files: int = 0
    segments: int = 0
    unpacked_rows: int = 0
    rows: int = 0
    encoded_tokens: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    trained_turns: int = 0
    turns_without_end: int = 0
    double_bos_documents: int = 0
    empty_turns: int = 0
    unshown_documents: int = 0
    unshown_tokens: int = 0
    unshown_reasoning: int = 0
    unshown_reasoning_turns: int = 0
    unshown_reasoning_tokens: int = 0
    unshown_content: int = 0
    unshown_content_turns: int = 0
    unshown_content_tokens: int = 0
    unshown_tool_calls: int = 0
    unshown_tool_calls_turns: int = 0
    unshown_tool_calls_tokens: int = 0
    unshown_tool_results: int = 0
    unshown_tool_results_turns: int = 0
    unshown_tool_results_tokens: int = 0
    unshown_tools: int = 0
    unshown_tools_tokens: int = 0
    unshown_system: int = 0
    unshown_system_turns: int = 0
    unshown_system_tokens: int = 0
    special_tokens_in_text: int = 0
    fim_documents: int = 0
    masked_documents: int = 0
    masked_tokens: int = 0
    repeated_tokens: int = 0
    edge_tokens: int = 0
    looked_at_records: int = 0
    looked_at_characters: int = 0
    length_squares: int = 0
    length_squares_in_rows: int = 0
    document_length: Int64 = field(default_factory=_powers)
    row_fill: Int64 = field(default_factory=_shares)
    segments_per_row: Int64 = field(default_factory=_powers)
    one_length: Int64 = field(default_factory=_shares)
    one_input: Int64 = field(default_factory=_shares)
    piece_length: Int64 = field(default_factory=lambda: np.zeros(1, np.int64))
    attention_before: AttentionCost = field(default_factory=AttentionCost)
    attention_after: AttentionCost = field(default_factory=AttentionCost)
    files: dict[int, FileCounts] = field(default_factory=dict)
    unread: dict[str, int] = field(default_factory=dict)
    unused: dict[str, int] = field(default_factory=dict)
    dropped_length: Int64 = field(default_factory=_powers)

    def file(self, index: int) -> FileCounts:
        return self.files.setdefault(index, FileCounts())

    def add_files(self, file: Int32, lengths: Int64, placed: Int64) -> None:
        """Count n documents of inputs: `file` int32[n], `lengths` int64[n] in tokens, and how many
        of these were `placed`. The others were dropped, with their whole document, or truncated.
        """
        self._of_files("documents", file[placed > 0])
        self._of_files("empty_documents", file[lengths == 0])
        self._of_files("tokens", file, placed)
        lost = lengths - placed
        if not lost.any():  # nearly always
            return
        for what, which in (
            ("truncated", (lost > 0) & (placed > 0)),
            ("dropped", (lost > 0) & (placed == 0)),
        ):
            self._of_files(f"{what}_documents", file[which])
            self._of_files(f"{what}_tokens", file[which], lost[which])

    def add_mixedness(
        self, lengths: Int32 | Int64, file: Int32 | Int64, row_offsets: Int64
    ) -> None:
        """Count how mixed rows are, of their segments row after row."""
        if not len(lengths):  # a window that holds all back
            return
        squares, in_rows = deviations(lengths, row_offsets)
        self.length_squares += squares
        self.length_squares_in_rows += in_rows
        self.one_length += fill_histogram(*near_median(lengths, row_offsets))
        self.one_input += fill_histogram(*from_one_input(file, row_offsets))

    def add_trained(self, file: Int32, trained: Int64) -> None:
        """Count tokens in rows that are trained on, of n pieces of inputs: `file` int32[n]."""
        self._of_files("trained_tokens", file, trained)

    def add_untrained(self, file: Int32, untrained: Untrained) -> None:
        """Count documents without anything to train on; `file` int32[n] as in their batch."""
        self.add_loss(untrained.loss)
        files = file[untrained.documents]
        self._of_files("untrained_documents", files)
        self._of_files("untrained_tokens", files, untrained.tokens)

    def _of_files(self, name: str, file: Int32, each: Int64 | None = None) -> None:
        """Add to a figure of each of the inputs `file`: `each`, or one."""
        if not len(file):
            return
        first = int(file.min())  # of 100,000 inputs a batch has few that follow one another
        sums = np.bincount(file - first, weights=each)
        for place in np.flatnonzero(sums).tolist():
            of_file = self.file(first + place)
            setattr(of_file, name, getattr(of_file, name) + int(sums[place]))

    def add_truncated(self, file: int, loss: Loss) -> None:
        """Count documents of one input that were cut before they got here."""
        self.add_loss(loss)
        self.encoded_tokens += loss.truncated_tokens
        self.file(file).truncated_documents += loss.truncated_documents
        self.file(file).truncated_tokens += loss.truncated_tokens

    def add_unshown(self, file: int, parts: Sequence[LeftOut], tokens: Sequence[int]) -> None:
        """Count what a chat template left out of records of one input; `tokens` of each part."""
        counted_already = set[tuple[int, str]]()  # by the other side of the same pair
        for part, length in zip(parts, tokens, strict=True):
            name, own = f"unshown_{part.what}", (part.record, part.what)
            counted = {f"{name}_tokens": length, "unshown_tokens": length}
            counted[name] = int(own not in counted_already)
            if part.what != "tools":
                counted[f"{name}_turns"] = part.turns
            counted_already.add(own)
            for total, more in counted.items():
                setattr(self, total, getattr(self, total) + more)
        documents = len({part.record for part in parts})
        self.unshown_documents += documents
        self.file(file).unshown_documents += documents
        self.file(file).unshown_tokens += sum(tokens)

    def add_unread(self, names: Mapping[str, int]) -> None:
        """Count fields that nobody reads."""
        _add_named(self.unread, names)

    def add_looked_at(self, sample: LookedAt) -> None:
        """Count what of some records nothing uses."""
        self.looked_at_records += sample.records
        self.looked_at_characters += sample.characters
        _add_named(self.unused, sample.unused)

    def add_dropped(self, lengths: Int64) -> None:
        """Count documents that are dropped since they are longer than a row."""
        if len(lengths):
            exponents = np.frexp(lengths.astype(np.float64))[1] - 1
            sums = np.bincount(exponents, weights=lengths, minlength=_POWER_BUCKETS)
            self.dropped_length += sums.astype(np.int64)

    def add_loss(self, loss: Loss) -> None:
        for item in fields(loss):
            setattr(self, item.name, getattr(self, item.name) + getattr(loss, item.name))

    def add(self, other: Counts) -> None:
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if item.name == "files":
                for index, counts in theirs.items():
                    total = self.file(index)
                    for name, value in vars(counts).items():
                        setattr(total, name, getattr(total, name) + value)
            elif isinstance(theirs, dict):
                _add_named(mine, theirs)
            elif isinstance(theirs, np.ndarray):
                if len(mine) < len(theirs):
                    mine = np.concatenate([mine, np.zeros(len(theirs) - len(mine), np.int64)])
                    setattr(self, item.name, mine)
                mine[: len(theirs)] += theirs  # in place: piece_length is as long as a row
            else:
                setattr(self, item.name, mine + theirs)

    def as_json(self) -> dict[str, Any]:
        """For a unit's record; zeros are left out."""
        figures: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "files":
                value = [[index, *counts.as_json()] for index, counts in sorted(value.items())]
            elif item.name == "piece_length":
                value = _packed(value)
            elif isinstance(value, np.ndarray):
                value = value.tolist() if value.any() else []
            elif isinstance(value, AttentionCost):
                value = list(asdict(value).values()) if value.rows else []
            if value:
                figures[item.name] = value
        return figures

    @classmethod
    def from_json(cls, recorded: dict[str, Any]) -> Counts:
        """The counts that `as_json` gave. Raises ValueError or TypeError for anything else."""
        counts, known = cls(), {item.name for item in fields(cls)}
        for name, value in recorded.items():
            if name not in known:
                raise ValueError(f"{name} is no count")
            mine = getattr(counts, name)
            if name == "files":
                value = {index: FileCounts(*figures) for index, *figures in value}  # noqa: PLW2901
            elif name == "piece_length":
                value = _unpacked(value)  # noqa: PLW2901
            elif isinstance(mine, np.ndarray):
                value = np.array(value, np.int64)  # noqa: PLW2901
                if value.shape != mine.shape:
                    raise ValueError(f"{name} has {value.size} figures, not {mine.size}")
            elif isinstance(mine, AttentionCost):
                value = AttentionCost(*value)  # noqa: PLW2901
            elif isinstance(mine, dict):
                if not all(isinstance(number, int) for number in value.values()):
                    raise TypeError(f"{name} is {value!r}")
            elif not isinstance(value, int):
                raise TypeError(f"{name} is {value!r}")
            setattr(counts, name, value)
        return counts

    @property
    def records(self) -> int:
        """All that were read, the bad ones too."""
        placed = self.documents + self.empty_documents + self.dropped_documents
        return self.rejected_records + placed

    def conserved(self) -> bool:
        """Whether every encoded token is accounted for."""
        return self.encoded_tokens == self.tokens + self.truncated_tokens + self.dropped_tokens
