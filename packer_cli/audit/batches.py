"""Rows as documents: where each begins and ends, by every column that tells, and which of its
tokens are trained on. Everything is flat: the tokens of all rows end to end, and places in them.

Of the columns that tell boundaries the first in `TELLING` is believed, and the others are kept, to
be compared with it. Without one, EOS tells them where rows look packed; otherwise a row is a
document. Padding is what no document has: by the columns, or else by its place, the stretch of one
token at the end of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from packer_cli.audit.formats import Set
from packer_cli.audit.tables import MASKS, Column, Raw
from packer_cli.records import IGNORED, Int64

Bool = npt.NDArray[np.bool_]
# Columns by which boundaries are told, the most explicit first.
TELLING = (
    "cu_seqlens", "seq_start_id", "seq_lengths", "seq_lens", "attention_mask", "position_ids",
)  # fmt: skip
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class Habits:
    """What a set does with its tokens, by its tokenizer, or where that is plain from a look at it.

    eos, bos, pad   ids; None: not told
    tail            tokens that follow EOS at the end of documents: a template's line end
    ends, begins    shares of the documents that end with EOS, and that begin with BOS
    adds_bos        whether the tokenizer puts BOS before every text
    vocabulary      how many ids there are; None: not told
    length          tokens of a full row; None: rows have no length of their own
    flows           documents flow on from row to row, and only EOS tells them apart
    header          the token that begins the header of a turn, and the one that ends it
    masks           share of documents of which a tenth or more is not trained on
    common          tokens that may be more than a quarter of all
    spare           tokens of a document that are targets only, and do not count for a full row
    masked          whether attention_mask is 0 on padding, and not 1 everywhere
    told            what was told, and how, in words
    """

    eos: int | None = None
    bos: int | None = None
    pad: int | None = None
    tail: int = 0
    ends: float = 0.0
    begins: float = 0.0
    adds_bos: bool = False
    vocabulary: int | None = None
    length: int | None = None
    flows: bool = False
    header: tuple[int, int] | None = None
    masks: float = 0.0
    common: tuple[int, ...] = ()
    spare: int = 0
    masked: bool = False
    told: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """Rows that follow one another; T tokens, r rows, d documents or pieces of them.

    first          number of the first row
    ids            int[T], and `offsets` int64[r + 1], where rows begin and end
    begins, stops  int64[d], of documents, in ascending order; none is empty
    of_row         int64[r + 1]: row i has the documents of_row[i] .. of_row[i + 1]
    told           where documents begin by each column that tells, but for the first of a row
    real           bool[T] by attention_mask, if there is one
    labels         int[T] as they are stored, None without the column
    trained        bool[T]: each token, whether a model is trained to predict it; None: not told
    begun, ended   bool[d]: False for a piece whose document began before, or goes on after it
    keys           of packer's rows, uint64[d] each: which place of which document the piece begins
                   at, 0 if at its beginning, and which one follows it
    """

    first: int
    ids: npt.NDArray[Any]
    offsets: Int64
    begins: Int64
    stops: Int64
    of_row: Int64
    told: dict[str, Int64]
    real: Bool | None
    labels: npt.NDArray[Any] | None
    trained: Bool | None
    begun: Bool
    ended: Bool
    keys: tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]] | None = None

    @property
    def rows(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def used(self) -> Int64:
        """int64[r], where the last document of each row ends; where it begins, if it has none."""
        last = np.where(np.diff(self.of_row), self.of_row[1:] - 1, -1)
        ends = np.append(self.stops, 0)[last]
        return np.where(last < 0, self.offsets[:-1], ends)

    @cached_property
    def filled(self) -> Int64:
        """int64[r], places of each row up to the end of its last document."""
        return self.used - self.offsets[:-1]

    @cached_property
    def tokens(self) -> int:
        return int((self.stops - self.begins).sum())

    @cached_property
    def counted(self) -> Int64:
        """int64[T + 1], trained tokens before each place."""
        counts = np.zeros(len(self.ids) + 1, np.int64)
        if self.trained is not None:
            np.cumsum(self.trained, out=counts[1:])
        return counts

    @cached_property
    def other_labels(self) -> Int64:
        """int64, places of labels that are neither IGNORED nor the token."""
        assert self.labels is not None  # noqa: S101 as rules that need labels are for sets of them
        return np.flatnonzero((self.labels != self.ids) & (self.labels != IGNORED))

    @cached_property
    def row_of(self) -> Int64:
        """int64[d], which row each document is in."""
        return np.repeat(np.arange(self.rows), np.diff(self.of_row))

    @cached_property
    def lasts(self) -> Bool:
        """bool[d], whether it is the last document of its row."""
        found = np.zeros(len(self.begins), bool)
        found[self.of_row[1:][np.diff(self.of_row) > 0] - 1] = True
        return found

    def by_row(self, counts: Int64) -> Int64:
        """int64[r], of counts int64[T + 1] of something before each place, what rows have of it."""
        return counts[self.offsets[1:]] - counts[self.offsets[:-1]]

    def trained_behind_first(self) -> Int64:
        """int64[d], trained tokens of each document but for its first."""
        return self.counted[self.stops] - self.counted[np.minimum(self.begins + 1, self.stops)]

    def in_documents(self) -> Bool:
        """bool[T], whether a place is in a document, or padding."""
        edges = np.stack([self.begins, self.stops], axis=1).reshape(-1)
        gaps = np.diff(edges, prepend=0, append=len(self.ids))
        return np.repeat(np.arange(len(gaps)) % 2 == 1, gaps)

    def rows_at(self, places: Int64) -> Int64:
        """int64, the rows, from 0, of places."""
        return np.searchsorted(self.offsets, places, side="right") - 1

    def end_with(self, habits: Habits) -> tuple[Bool, Int64]:
        """(bool[d], whether a document ends with EOS; int64[d], where EOS is then)."""
        if habits.eos is None or not len(self.begins):
            return np.zeros(len(self.begins), bool), self.stops - 1
        last = self.stops - 1
        found = self.ids[last] == habits.eos
        if habits.tail:
            before = np.maximum(last - 1, self.begins)
            tailed = ~found & (self.ids[before] == habits.eos)
            return found | tailed, np.where(tailed, before, last)
        return found, last

    def full(self, habits: Habits) -> Bool:
        """bool[d], whether a document ends where its row is full."""
        if habits.length is None:
            return np.zeros(len(self.begins), bool)
        spare = habits.spare * np.diff(self.of_row)[self.row_of]
        ends = self.offsets[self.row_of] + habits.length + spare
        full: Bool = self.lasts & ((self.stops == ends) | habits.flows)
        return full


def batch_of(raw: Raw, set_: Set, habits: Habits) -> Batch:
    """Rows as documents. Raises ValueError for boundaries that are not in their row."""
    ids, offsets = raw.columns["input_ids"]
    ids, ends, starts = _compact(ids), offsets[1:], offsets[:-1]
    real = _real(raw, habits)
    told = dict[str, tuple[Int64, Int64]]()
    for name in TELLING:
        if name in raw.columns and (edges := _TELL[name](raw, real)) is not None:
            told[name] = edges
    if told and set_.rows_are != "documents":
        begins, stops = next(iter(told.values()))
    elif habits.flows and habits.eos is not None:
        begins, stops = _by_eos(ids, offsets, habits, real)
    else:
        begins, stops = _whole_rows(raw, real)
    if habits.pad is not None and not any(one in told for one in _EXACT) and real is None:
        begins, stops = _without_padding(ids, offsets, begins, stops, habits)
    keep = stops > begins
    begins, stops = begins[keep], stops[keep]
    labels = raw.columns["labels"].values if "labels" in raw.columns else None
    trained = _trained(raw, labels, set_.meaning.shift)
    if trained is not None and set_.meaning.dropped:
        trained[begins] = False
    of_row = np.append(0, np.searchsorted(begins, ends, side="left"))
    begun, ended = np.ones(len(begins), bool), np.ones(len(begins), bool)
    keys = _keys(raw, keep) if {"segments.start", "cu_seqlens"} <= raw.columns.keys() else None
    if raw.open is not None:
        begun[np.isin(begins, starts[raw.open[0]])] = False
        ended[np.isin(stops, ends[raw.open[1]])] = False
    if keys is not None:
        begun &= keys[0] == 0
    if habits.flows and not told:
        begun[np.isin(begins, starts)] = False
    batch = Batch(
        raw.first, ids, offsets, begins, stops, of_row, {}, real, labels, trained, begun, ended,
        keys,
    )  # fmt: skip
    for name, (own, _) in told.items():
        inner = np.setdiff1d(own, starts)
        batch.told[name] = inner[inner < batch.used[batch.rows_at(inner)]]
    return batch


def _real(raw: Raw, habits: Habits) -> Bool | None:
    """As `Batch.real`, also where the look at the set has seen no padding: it may be rare."""
    if "attention_mask" not in raw.columns:
        return None
    real: Bool = raw.columns["attention_mask"].values != 0
    return real if habits.masked or not real.all() else None


def _compact(ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Ids as int32, so that equal rows have equal bytes; as int64 where one is beyond."""
    bounds = np.iinfo(np.int32)
    is_wide = ids.dtype.itemsize > 4 and len(ids)
    if is_wide and (int(ids.min()) < bounds.min or int(ids.max()) > bounds.max):
        return ids
    return ids.astype(np.int32, copy=False)


# --- boundaries: (begins, stops) of documents as each column tells them, None where it does not

_EXACT = {"cu_seqlens", "seq_lens", "attention_mask"}  # that leave padding out


def _ends_of(column: Column, offsets: Int64, what: str) -> tuple[Int64, Int64]:
    """(flat ends, counts by row) of lengths in each row. Raises ValueError where rows are shorter,
    or lengths are negative.
    """
    values, edges = column.values.astype(np.int64), column.offsets
    if len(values) and (int(values.min()) < 0 or int(values.max()) > 1 << 40):
        raise ValueError(f"{what} holds {int(values.min())} to {int(values.max())}")
    sums = np.append(0, np.cumsum(values))
    counts = np.diff(edges)
    ends = sums[1:] - np.repeat(sums[edges[:-1]], counts)
    over = np.flatnonzero(sums[edges[1:]] - sums[edges[:-1]] > np.diff(offsets))
    if len(over):
        at = int(over[0])
        total = int(sums[edges[at + 1]] - sums[edges[at]])
        row = int(np.diff(offsets)[at])
        raise ValueError(f"row {at}: {what} add up to {total}, input_ids has {row} tokens")
    return ends + np.repeat(offsets[:-1], counts), values


def _by_lengths(name: str, padded: str = "") -> Any:
    def tell(raw: Raw, real: Bool | None) -> tuple[Int64, Int64]:
        offsets, column = raw.columns["input_ids"].offsets, raw.columns[name]
        ends, lengths = _ends_of(column, offsets, name)
        if padded in raw.columns:
            if not np.array_equal(raw.columns[padded].offsets, column.offsets):
                raise ValueError(f"{padded} does not have as many values as {name}")
            ends, wide = _ends_of(raw.columns[padded], offsets, padded)
            return ends - wide, ends - wide + np.minimum(lengths, wide)
        return ends - lengths, ends

    return tell


def _by_cu_seqlens(raw: Raw, real: Bool | None) -> tuple[Int64, Int64]:
    values, edges = raw.columns["cu_seqlens"]
    if (np.diff(edges) < 1).any() or values[edges[:-1]].any():
        raise ValueError("cu_seqlens does not begin with 0")
    own = {"seq": _between(raw.columns["cu_seqlens"]), "input_ids": raw.columns["input_ids"]}
    if "cu_seqlens_padded" in raw.columns:
        if not np.array_equal(raw.columns["cu_seqlens_padded"].offsets, edges):
            raise ValueError("cu_seqlens_padded does not have as many values as cu_seqlens")
        own["wide"] = _between(raw.columns["cu_seqlens_padded"])
    told: tuple[Int64, Int64] = _by_lengths("seq", "wide")(raw._replace(columns=own), real)
    return told


def _between(boundaries: Column) -> Column:
    """The lengths between boundaries, of which each row has one more."""
    values, edges = boundaries
    lengths = np.delete(np.diff(values.astype(np.int64)), edges[1:-1] - 1)
    return Column(lengths, edges - np.arange(len(edges)))


def _by_starts(raw: Raw, real: Bool | None) -> tuple[Int64, Int64]:
    (values, edges), offsets = raw.columns["seq_start_id"], raw.columns["input_ids"].offsets
    counts, lengths = np.diff(edges), np.diff(offsets)
    begins = values.astype(np.int64)
    inside = (begins >= 0) & (begins <= np.repeat(lengths, counts))
    flat = begins + np.repeat(offsets[:-1], counts)
    if not inside.all() or (np.diff(flat) < 0).any():
        raise ValueError("seq_start_id does not ascend from 0 to the row's length")
    if (counts < 1).any() or begins[edges[:-1]].any():
        raise ValueError("seq_start_id does not begin with 0")
    stops = np.append(flat[1:], offsets[-1])
    stops[edges[1:] - 1] = offsets[1:]
    return flat, stops


def _by_numbers(raw: Raw, real: Bool | None) -> tuple[Int64, Int64] | None:
    """By an attention_mask that numbers documents; one of 0 and 1 tells padding alone."""
    mask, offsets = raw.columns["attention_mask"]
    if mask.dtype == np.bool_ or not len(mask) or int(mask.max()) <= 1:
        return None
    return _stretches(mask != 0, np.flatnonzero(mask[1:] != mask[:-1]) + 1, offsets)


def _by_positions(raw: Raw, real: Bool | None) -> tuple[Int64, Int64] | None:
    positions, offsets = raw.columns["position_ids"]
    restarts = np.flatnonzero(positions == 0)
    if real is not None:
        return _stretches(real, restarts, offsets)
    restarts = np.union1d(restarts, offsets[:-1])
    restarts = restarts[restarts < offsets[-1]]
    stops = np.append(restarts[1:], offsets[-1])
    filled = last_but(positions, offsets, 0)  # LLaMA-Factory's padding has position 0
    row = np.searchsorted(offsets, restarts, side="right") - 1
    return restarts, np.where(restarts >= filled[row], restarts, stops)


_TELL = {
    "cu_seqlens": _by_cu_seqlens,
    "seq_start_id": _by_starts,
    "seq_lengths": _by_lengths("seq_lengths"),
    "seq_lens": _by_lengths("seq_lens", "seq_lens_padded"),
    "attention_mask": _by_numbers,
    "position_ids": _by_positions,
}


def _stretches(real: Bool, edges: Int64, offsets: Int64) -> tuple[Int64, Int64]:
    """Stretches of real tokens, cut at `edges` and where rows begin."""
    changes = np.flatnonzero(real[1:] != real[:-1]) + 1
    cuts = np.unique(np.concatenate([edges, changes, offsets]))
    begins, stops = cuts[:-1], cuts[1:]
    keep = real[begins] if len(begins) else np.empty(0, bool)
    return begins[keep], stops[keep]


def _whole_rows(raw: Raw, real: Bool | None) -> tuple[Int64, Int64]:
    offsets = raw.columns["input_ids"].offsets
    if real is None or real.all():
        return offsets[:-1].copy(), offsets[1:].copy()
    places = np.flatnonzero(real)
    first = np.searchsorted(places, offsets)
    has = np.diff(first) > 0
    begins, stops = offsets[:-1].copy(), offsets[:-1].copy()
    begins[has], stops[has] = places[first[:-1][has]], places[first[1:][has] - 1] + 1
    return begins, stops


def _by_eos(
    ids: npt.NDArray[Any], offsets: Int64, habits: Habits, real: Bool | None
) -> tuple[Int64, Int64]:
    after = np.flatnonzero(ids == habits.eos) + 1 + habits.tail
    after = after[after < len(ids)]
    if real is not None:
        return _stretches(real, after, offsets)
    cuts = np.unique(np.concatenate([after, offsets]))
    return cuts[:-1], cuts[1:]


def _without_padding(
    ids: npt.NDArray[Any], offsets: Int64, begins: Int64, stops: Int64, habits: Habits
) -> tuple[Int64, Int64]:
    """Documents, without the stretch of padding at the end of each row. Where padding is EOS, the
    first of the stretch is the end of a document.
    """
    ends = last_but(ids, offsets, habits.pad)
    if habits.pad == habits.eos:
        ends = np.minimum(ends + 1, offsets[1:])
    row = np.searchsorted(offsets, begins, side="right") - 1
    return np.minimum(begins, ends[row]), np.minimum(stops, ends[row])


def last_but(ids: npt.NDArray[Any], offsets: Int64, token: int | None) -> Int64:
    """int64[r], where the stretch of this token at the end of each row begins."""
    others = np.flatnonzero(ids != token)
    first = np.searchsorted(others, offsets)
    has = np.diff(first) > 0
    ends: Int64 = offsets[:-1].copy()
    ends[has] = others[first[1:][has] - 1] + 1
    return ends


# --- what is trained on


def _trained(raw: Raw, labels: npt.NDArray[Any] | None, shift: str) -> Bool | None:
    """bool[T], whether each token is predicted, by labels and masks together; None without any."""
    flags = [raw.columns[one].values != 0 for one in MASKS if one in raw.columns]
    flags += [] if labels is None else [labels != IGNORED]
    if not flags:
        return None
    trained: Bool = flags[0]
    for other in flags[1:]:
        trained = trained & other
    if shift == "own":
        return trained
    starts = raw.columns["input_ids"].offsets[:-1]
    own = np.zeros_like(trained)
    own[1:] = trained[:-1]
    own[starts[starts < len(own)]] = False  # of the row before
    return own


def _keys(raw: Raw, keep: Bool) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]] | None:
    """As `Batch.keys`, by the column `segments`."""
    file, position, start = (
        raw.columns[f"segments.{part}"].values.astype(np.uint64) for part in
        ("file", "position", "start")
    )  # fmt: skip
    if len(file) != len(keep):
        return None
    lengths = _between(raw.columns["cu_seqlens"]).values[keep]
    of = file * np.uint64(0x9E3779B97F4A7C15) ^ position * np.uint64(0xC2B2AE3D27D4EB4F)
    factor = np.uint64(0x165667B19E3779F9)
    start, of = start[keep], of[keep]
    mine = np.where(start == 0, np.uint64(0), (of ^ start * factor) | np.uint64(1))
    return mine, (of ^ (start + lengths.astype(np.uint64)) * factor) | np.uint64(1)
