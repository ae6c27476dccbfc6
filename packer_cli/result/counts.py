"""The counts of what a unit, and by addition a run, read, packed and lost.

A total is declared once, as a field of `DocumentTotals` or `Totals`, with its words in `packer
stats`: see `Total`. Records of units, manifests, their checks and all reports go by these fields.
A total that each input has its part of is also a field of `InputTotals`. Histograms have fixed
buckets, so that those of units add up and those of a recount compare.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, NamedTuple, get_type_hints

import numpy as np
from msgspec import Meta, Struct, convert, field
from msgspec.structs import asdict, astuple

from packer_cli.packing.figures import (
    ONE_INPUT,
    ONE_LENGTH,
    AttentionCost,
    deviations,
    from_one_input,
    length_spread,
    near_median,
)
from packer_cli.packing.fitting import Loss, Untrained
from packer_cli.records import Filtered, Int32, Int64, OmittedContent, offsets_of
from packer_cli.result.layout import Count

ROW_FILL_BUCKETS = 21  # bucket i: i/20 <= fill < (i+1)/20; the last one: exactly full
_MOST_UNREAD, _OTHERS = 50, "…"
_Squares = Annotated[int, Meta(ge=0)]  # beyond 64 bits for long rows
_POWER_BUCKETS = 32  # bucket i: 2**i <= value < 2**(i+1)


def powers_histogram(values: Int64 | Int32) -> Int64:
    """Return int64[32]: the number of values in each [2**i, 2**(i+1)); values >= 1."""
    exponents = np.frexp(values.astype(np.float64))[1] - 1
    return np.bincount(exponents, minlength=_POWER_BUCKETS).astype(np.int64)


def fill_histogram(row_tokens: Int64, max_length: int | Int64) -> Int64:
    """Return int64[21]: rows by fill in steps of five percent, full rows last."""
    bucket = row_tokens * (ROW_FILL_BUCKETS - 1) // max_length
    return np.bincount(bucket, minlength=ROW_FILL_BUCKETS).astype(np.int64)


def mixedness(totals: Mapping[str, Any], histograms: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return how mixed rows are, from the totals of a manifest.

    spread      standard deviation of lengths in a row over that in the data; None without any
    one_length  share of rows with most of their segments within 5% of one length
    one_input   share of rows with most of their segments from one input; None for both if no row
                has enough segments
    """
    names = ("length_squares", "length_squares_in_rows", "tokens", "segments", "rows")
    of_data = length_spread(*(totals[name] for name in names))
    mixed = {"spread": None if math.isnan(of_data) else of_data}
    for name, least in (("one_length", ONE_LENGTH), ("one_input", ONE_INPUT)):
        rows, first = sum(histograms[name]), round(least * (ROW_FILL_BUCKETS - 1))
        mixed[name] = sum(histograms[name][first:]) / rows if rows else None
    return mixed


def _packed(counts: Int64) -> str:
    """Pack counts as text: most are zeros; only the others are kept, in a byte or two each."""
    where = np.flatnonzero(counts)
    pairs = np.stack([np.diff(where, prepend=0), counts[where]]).astype("<i8")
    return base64.b64encode(zlib.compress(pairs.tobytes())).decode() if len(where) else ""


def _unpacked(text: str) -> Int64:
    steps, counts = np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i8").reshape(2, -1)
    out = np.zeros(int(steps.sum()) + 1, np.int64)
    out[np.cumsum(steps)] = counts
    return out


def _add_named(totals: dict[str, int], more: Mapping[str, int]) -> None:
    """Add counts of names; of many different ones, the rest is counted as one. INOUT totals."""
    for name, number in sorted(more.items()):
        key = name if name in totals or len(totals) < _MOST_UNREAD else _OTHERS
        totals[key] = totals.get(key, 0) + number


# First in a unit's record, whose digest is in the manifest and so names exports: the order stays.
_RECORDED_FIRST = (
    *(item.name for item in fields(Loss)),
    *("documents", "empty_documents", "rejected_records", "rejected_files", "segments"),
    *("unpacked_rows", "rows", "encoded_tokens", "tokens", "trained_tokens", "trained_turns"),
    *("turns_without_end", "double_bos_documents", "empty_turns"),
)


def _powers() -> Int64:
    return np.zeros(_POWER_BUCKETS, np.int64)


def _shares() -> Int64:
    return np.zeros(ROW_FILL_BUCKETS, np.int64)


class InputTotals(Struct):
    """Totals of one input file, in the order of units' records."""

    documents: Count = 0
    tokens: Count = 0
    empty_documents: Count = 0
    rejected_records: Count = 0
    trained_tokens: Count = 0
    truncated_documents: Count = 0
    truncated_tokens: Count = 0
    dropped_documents: Count = 0
    dropped_tokens: Count = 0
    untrained_documents: Count = 0
    untrained_tokens: Count = 0
    unshown_documents: Count = 0
    unshown_tokens: Count = 0
    rejected_files: Count = 0


class Total(NamedTuple):
    """Words of `packer stats` for a total.

    title    of its line; "": it has none
    meaning  follows the figure; {name} is another total, {name:document} one with its noun
    column   its title in tables of inputs and sources
    is_loss  counts what was lost on the way to rows: pages show it even if it is 0
    if_any   manifests leave it out if it is 0
    """

    title: str = ""
    meaning: str = ""
    column: str = ""
    is_loss: bool = False
    if_any: bool = False


class DocumentTotals(Struct):
    """Sums over documents. `documents` have at least one token in a row. `rejected_files` of the
    rejected records are whole files that cannot be decoded.

    edge_tokens     hold the end of a prompt and the beginning of its answer
    traces          that became `branches`, a document each; `filtered_traces` did not
    shared_tokens   of branches, which an earlier branch of their trace has, too
    filtered        left out by conditions: `documents`, or records that are none yet, with `tokens`
                    as far as they are known; some of them lack a field (`without_field`), some have
                    a value of another type in it (`of_other_type`)
    calls           of `sessions`, each of which is a trace
    """

    documents: Annotated[Count, Total(column="documents")] = 0
    tokens: Annotated[Count, Total(column="tokens")] = 0
    trained_tokens: Annotated[Count, Total(column="trained")] = 0
    rejected_records: Annotated[
        Count, Total("rejected", "bad records, see rejected.jsonl", column="rejected")
    ] = 0
    empty_documents: Annotated[
        Count, Total("empty", "documents without a token, not packed", column="empty")
    ] = 0
    trained_turns: Count = 0
    turns_without_end: Annotated[
        Count,
        Total(
            "no end",
            "of {trained_turns} trained turns end in no special token: the model may not learn to "
            "stop",
        ),
    ] = 0
    empty_turns: Annotated[
        Count,
        Total(
            "empty turns",
            "of the assistant, for which the chat template writes nothing: not trained on",
        ),
    ] = 0
    double_bos_documents: Annotated[
        Count, Total("double BOS", "documents begin with BOS twice")
    ] = 0
    unshown_documents: Annotated[
        Count, Total("not shown", "documents, of which the chat template leaves out {unshown}")
    ] = 0
    unshown_tokens: Count = 0
    unshown_reasoning: Count = 0
    unshown_reasoning_turns: Count = 0
    unshown_reasoning_tokens: Count = 0
    unshown_content: Count = 0
    unshown_content_turns: Count = 0
    unshown_content_tokens: Count = 0
    unshown_tool_calls: Count = 0
    unshown_tool_calls_turns: Count = 0
    unshown_tool_calls_tokens: Count = 0
    unshown_tool_results: Count = 0
    unshown_tool_results_turns: Count = 0
    unshown_tool_results_tokens: Count = 0
    unshown_tools: Count = 0
    unshown_tools_tokens: Count = 0
    unshown_system: Count = 0
    unshown_system_turns: Count = 0
    unshown_system_tokens: Count = 0
    special_tokens_in_text: Annotated[
        Count,
        Total(
            "special",
            "special tokens that the content of records spells out, see --special-tokens-in-text",
        ),
    ] = 0
    fim_documents: Annotated[
        Count, Total("rearranged", "texts put into another order, see --fim-rate")
    ] = 0
    masked_documents: Count = 0
    masked_tokens: Annotated[
        Count,
        Total(
            "masked",
            "tokens of the assistant in {masked_documents:document} not trained on, by options or "
            "flags",
        ),
    ] = 0
    repeated_tokens: Annotated[
        Count,
        Total(
            "repeated",
            "tokens that documents share with those of the turn before, see --turns each",
        ),
    ] = 0
    rejected_files: Annotated[
        Count, Total("damaged", "inputs that cannot be decoded, each of them one of the rejected")
    ] = 0
    edge_tokens: Annotated[Count, Total("edges", "tokens straddle a prompt and its answer")] = 0
    traces: Annotated[Count, Total(if_any=True)] = 0
    branches: Annotated[Count, Total(if_any=True)] = 0
    shared_tokens: Annotated[Count, Total(if_any=True)] = 0
    filtered_traces: Annotated[
        Count,
        Total("traces", "left out by --where, or as of an agent that is not trained", if_any=True),
    ] = 0
    compared_branches: Annotated[Count, Total(if_any=True)] = 0
    drifted_branches: Annotated[Count, Total(if_any=True)] = 0
    filtered_documents: Annotated[
        Count, Total("filtered", "documents left out by conditions", if_any=True)
    ] = 0
    filtered_tokens: Annotated[
        Count, Total("filtered tokens", "of these documents, where they are known", if_any=True)
    ] = 0
    filtered_without_field: Annotated[
        Count, Total("no field", "of the filtered lack the field of a condition", if_any=True)
    ] = 0
    filtered_of_other_type: Annotated[
        Count,
        Total("other type", "of the filtered have a value of another type in it", if_any=True),
    ] = 0
    sessions: Annotated[Count, Total(if_any=True)] = 0
    calls: Annotated[Count, Total(if_any=True)] = 0
    drifted_calls: Annotated[
        Count,
        Total("drifted", "calls whose prompt changes what was sampled{first_drifted}", if_any=True),
    ] = 0
    calls_without_ids: Annotated[
        Count, Total("no ids", "calls without token ids: not trained on", if_any=True)
    ] = 0


class Totals(DocumentTotals):
    """Sums over documents and rows: `tokens` are those placed in rows. Those of `Loss` are among
    them.
    """

    segments: Count = 0
    unpacked_rows: Count = 0
    truncated_documents: Annotated[
        Count,
        Total(
            "truncated",
            "documents, {truncated_tokens} tokens cut off{trained_of_truncated}",
            column="truncated",
            is_loss=True,
        ),
    ] = 0
    truncated_tokens: Annotated[Count, Total(column="tokens cut off", is_loss=True)] = 0
    truncated_trained_tokens: Count = 0
    dropped_documents: Annotated[
        Count,
        Total(
            "dropped",
            "documents, {dropped_tokens} tokens{trained_of_dropped}",
            column="dropped",
            is_loss=True,
        ),
    ] = 0
    dropped_tokens: Annotated[Count, Total(column="tokens dropped", is_loss=True)] = 0
    dropped_trained_tokens: Count = 0
    untrained_documents: Annotated[
        Count,
        Total(
            "untrained",
            "of the dropped documents, without a token to train on",
            column="untrained",
            is_loss=True,
        ),
    ] = 0
    untrained_tokens: Annotated[Count, Total(column="tokens untrained", is_loss=True)] = 0
    length_squares: _Squares = 0
    length_squares_in_rows: _Squares = 0


# Totals by name, losses first.
_declared = (
    (name, mark)
    for name, hint in get_type_hints(Totals, include_extras=True).items()
    for mark in getattr(hint, "__metadata__", ())
    if isinstance(mark, Total)
)
SHOWN_TOTALS = dict(sorted(_declared, key=lambda named: not named[1].is_loss))
OF_TRACES = tuple(name for name, total in SHOWN_TOTALS.items() if total.if_any)


class Counts(Totals):
    """Totals, histograms, and the totals of each input. Truncated and dropped tokens and those in
    rows are together `encoded_tokens`. Attention costs are counted before and after balancing, if
    rows are balanced.

    unread          fields that nothing reads
    dropped_length  tokens of documents that are dropped since they are longer than a row: of those
                    with 2**i <= length < 2**(i+1) in dropped_length[i]
    first_drifted   of calls: number of the file, position of the record, number of the call in it
    """

    rows: int = 0
    encoded_tokens: int = 0
    document_length: Int64 = field(default_factory=_powers)
    row_fill: Int64 = field(default_factory=_shares)
    segments_per_row: Int64 = field(default_factory=_powers)
    one_length: Int64 = field(default_factory=_shares)
    one_input: Int64 = field(default_factory=_shares)
    piece_length: Int64 = field(default_factory=lambda: np.zeros(1, np.int64))
    attention_before: AttentionCost = AttentionCost()
    attention_after: AttentionCost = AttentionCost()
    files: dict[int, InputTotals] = {}
    unread: dict[str, int] = {}
    dropped_length: Int64 = field(default_factory=_powers)
    first_drifted: list[int] = []

    def file(self, index: int) -> InputTotals:
        return self.files.setdefault(index, InputTotals())

    def add_documents(self, file: Int32, lengths: Int64, placed: Int64) -> None:
        """Count n documents of inputs: `file` int32[n], `lengths` int64[n] in tokens, and how many
        of these were `placed`. The others were dropped, with their whole document, or truncated.
        """
        self.documents += int((placed > 0).sum())
        self.empty_documents += int((lengths == 0).sum())
        self.encoded_tokens += int(lengths.sum())
        self.document_length += powers_histogram(placed[placed > 0])
        self._of_files("documents", file[placed > 0])
        self._of_files("empty_documents", file[lengths == 0])
        self._of_files("tokens", file, placed)
        lost = lengths - placed
        if not lost.any():  # nearly always
            return
        for loss, which in (
            ("truncated", (lost > 0) & (placed > 0)),
            ("dropped", (lost > 0) & (placed == 0)),
        ):
            self._of_files(f"{loss}_documents", file[which])
            self._of_files(f"{loss}_tokens", file[which], lost[which])

    def add_filtered(self, filtered: Filtered) -> None:
        """Count what conditions leave out."""
        self.filtered_documents += filtered.documents
        self.filtered_tokens += filtered.tokens
        self.filtered_without_field += filtered.lacks
        self.filtered_of_other_type += filtered.differs

    def add_turns(self, turns: Int32 | None) -> None:
        """Count trained turns of n documents: int32[n, 2] as in `Records`."""
        if turns is not None:
            self.trained_turns += int(turns[:, 0].sum())
            self.turns_without_end += int(turns[:, 1].sum())

    @classmethod
    def of_rows(
        cls, lengths: Int32 | Int64, file: Int32 | Int64, row_offsets: Int64, max_length: int
    ) -> Counts:
        """Count rows by their segments, row after row: lengths and inputs."""
        ends = offsets_of(lengths)
        counts = cls(
            segments=len(lengths),
            rows=len(row_offsets) - 1,
            tokens=int(ends[-1]),
            row_fill=fill_histogram(np.diff(ends[row_offsets]), max_length),
            segments_per_row=powers_histogram(np.diff(row_offsets)),
            piece_length=np.bincount(lengths, minlength=max_length + 1),
        )
        if len(lengths):  # or it is a window that holds all back
            squares = deviations(lengths, row_offsets)
            counts.length_squares, counts.length_squares_in_rows = squares
            counts.one_length = fill_histogram(*near_median(lengths, row_offsets))
            counts.one_input = fill_histogram(*from_one_input(file, row_offsets))
        return counts

    def add_trained(self, file: Int32, trained: Int64) -> None:
        """Count tokens in rows that are trained on, of n pieces of inputs: `file` int32[n]."""
        self._of_files("trained_tokens", file, trained)

    def add_untrained(self, file: Int32, untrained: Untrained) -> None:
        """Count documents without anything to train on; `file` int32[n] as in their batch."""
        files = file[untrained.documents]
        self.untrained_documents += len(files)
        self.untrained_tokens += int(untrained.tokens.sum())
        self._of_files("untrained_documents", files)
        self._of_files("untrained_tokens", files, untrained.tokens)

    def _of_files(self, name: str, file: Int32, each: Int64 | None = None) -> None:
        """Add to a figure of each of the inputs `file`: `each`, or one."""
        if not len(file):
            return
        first = int(file.min())  # of 100,000 inputs a batch has few that follow one another
        sums = np.bincount(file - first, weights=each)
        for place in np.flatnonzero(sums).tolist():
            _add(self.file(first + place), {name: int(sums[place])})

    def add_truncated(self, file: int, loss: Loss) -> None:
        """Count documents of one input that were cut before they got here."""
        self.add_loss(loss)
        self.encoded_tokens += loss.truncated_tokens
        names = ("truncated_documents", "truncated_tokens")
        _add(self.file(file), {name: getattr(loss, name) for name in names})

    def add_unshown(
        self, file: int, parts: Sequence[OmittedContent], tokens: Sequence[int]
    ) -> None:
        """Count what a chat template left out of records of one input; `tokens` of each part."""
        for part, length in zip(parts, tokens, strict=True):
            name = f"unshown_{part.what}"
            counted = {name: 1, f"{name}_tokens": length, "unshown_tokens": length}
            if part.what != "tools":
                counted[f"{name}_turns"] = part.turns
            _add(self, counted)
        documents = len({part.record for part in parts})
        self.unshown_documents += documents
        self.file(file).unshown_documents += documents
        self.file(file).unshown_tokens += sum(tokens)

    def add_dropped(self, lengths: Int64) -> None:
        """Count documents that are dropped since they are longer than a row."""
        if len(lengths):
            exponents = np.frexp(lengths.astype(np.float64))[1] - 1
            sums = np.bincount(exponents, weights=lengths, minlength=_POWER_BUCKETS)
            self.dropped_length += sums.astype(np.int64)

    def add_loss(self, loss: Loss) -> None:
        _add(self, vars(loss))

    def add(self, other: Counts) -> None:
        """Add the counts of another unit, or of a part of this one."""
        for name in other.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(theirs, int) and theirs == 0:  # most are
                continue
            if name == "files":
                for index, totals in theirs.items():
                    _add(self.file(index), asdict(totals))
            elif isinstance(theirs, dict):
                _add_named(mine, theirs)
            elif isinstance(theirs, list):
                setattr(self, name, min(mine or theirs, theirs or mine))
            elif isinstance(theirs, np.ndarray):
                if len(mine) < len(theirs):
                    mine = np.concatenate([mine, np.zeros(len(theirs) - len(mine), np.int64)])
                    setattr(self, name, mine)
                mine[: len(theirs)] += theirs  # in place: piece_length is as long as a row
            else:
                setattr(self, name, mine + theirs)

    def as_json(self) -> dict[str, Any]:
        """Return the counts as in a unit's record, without zeros."""
        names = dict.fromkeys((*_RECORDED_FIRST, *self.__struct_fields__))
        figures = {name: _as_json(name, getattr(self, name)) for name in names}
        return {name: value for name, value in figures.items() if value}

    @classmethod
    def from_json(cls, recorded: dict[str, Any]) -> Counts:
        """Return the counts that `as_json` gave. Raises ValueError or TypeError for others."""
        counts = cls()
        for name, value in recorded.items():
            if name not in cls.__struct_fields__:
                raise ValueError(f"{name} is no count")
            setattr(counts, name, _from_json(name, value, getattr(counts, name)))
        return counts

    @property
    def records(self) -> int:
        return records_read(self)

    def conserved(self) -> bool:
        """Tell if every encoded token is accounted for."""
        return self.encoded_tokens == self.tokens + self.truncated_tokens + self.dropped_tokens


def records_read(totals: Any) -> int:
    """Count all records that were read, the bad ones too, from `Counts` or a manifest."""
    placed = totals.documents + totals.empty_documents + getattr(totals, "dropped_documents", 0)
    return int(totals.rejected_records + placed + totals.filtered_documents)


def _add(totals: Struct, more: Mapping[str, int]) -> None:
    for name, figure in more.items():
        setattr(totals, name, getattr(totals, name) + figure)


def _as_json(name: str, value: Any) -> Any:
    if name == "files":
        return [[n, *np.trim_zeros(list(astuple(of)), "b")] for n, of in sorted(value.items())]
    if name == "piece_length":
        return _packed(value)
    if isinstance(value, np.ndarray):
        return value.tolist() if value.any() else []
    if isinstance(value, AttentionCost):
        return list(astuple(value)) if value.rows else []
    return value


def _from_json(name: str, value: Any, default: Any) -> Any:
    if name == "files":
        of_inputs = convert(value, list[list[int]])
        return {index: InputTotals(*figures) for index, *figures in of_inputs}
    if name == "piece_length":
        return _unpacked(value)
    if isinstance(default, np.ndarray):
        return np.array(convert(value, list[int]), np.int64)
    if isinstance(default, AttentionCost):
        return AttentionCost(*convert(value, list[int]))
    kind: Any = list[int] if isinstance(default, list) else int
    return convert(value, dict[str, int] if isinstance(default, dict) else kind)
