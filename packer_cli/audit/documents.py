"""Rows as documents, and what a set does with its tokens.

Of the columns that tell boundaries the first in `TELLING` is believed, and the others are kept, to
be compared with it. Without one, EOS tells them where rows look packed; otherwise a row is a
document. Padding is what no document has: by the columns, or else by its place, the stretch of one
token at the end of a row.

EOS, BOS and padding are the tokenizer's, or else told by a look at rows that are evenly spread,
where they are plain: EOS is a token with which at least half of the documents end, and which is
rarely anywhere else; BOS likewise at the beginning. What is not plain stays untold, and the rules
that need it say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from packer_cli.audit.sets import Column, Raw, Set, even_spans
from packer_cli.errors import DataError
from packer_cli.options.shapes import MASKS
from packer_cli.records import IGNORED, Int64, offsets_of
from packer_cli.result.manifest import Manifest, TokenizerInfo

Bool = npt.NDArray[np.bool_]
# Columns by which boundaries are told, the most explicit first.
LISTED = {  # by lengths of documents, or what lengths are told by -> their room, with padding
    "cu_seqlens": "cu_seqlens_padded", "seq_start_id": "", "seq_lengths": "",
    "seq_lens": "seq_lens_padded",
}  # fmt: skip
TELLING = (*LISTED, "attention_mask", "position_ids")
_LOOK_TOKENS, _LOOK_ROWS, _SPANS = 1 << 21, 1 << 14, 8
_FEWEST = 4  # documents, of which something can be plain
_PLAIN = 0.5  # share of documents
_RARE = 0.2  # of its places that a token has at the ends of documents, if it marks them
NEARLY, _MOSTLY, _NEARLY_ALL = 0.9, 0.75, 0.95
_COMMON = 0.1  # of tokens; exact counts tell whether it is a quarter
_ROLES, _MOST_ROLES = 8, 0.95  # so many tokens are so many of those behind the mark of a turn
_MANY = 32  # documents of a kind
_ALIKE = 4  # tokens with which documents of a kind end, where one alone does not tell
LONGEST_HEADER = 24  # tokens of the header of a turn
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class Habits:
    """What a set does with its tokens, by its tokenizer, or where that is plain from a look at it.

    eos, bos, pad   ids; None: not told
    tail            tokens that follow EOS at the end of documents: a template's line end
    others          last tokens of documents of a kind that does not end with EOS
    ends, begins    shares of the documents that end with EOS, and that begin with BOS
    adds_bos        whether the tokenizer puts BOS before every text
    lacks_eos       whether the tokenizer puts EOS behind it, and documents that a column tells end
                    with nothing that they share
    vocabulary      how many ids there are; None: not told
    length          tokens of a full row; None: rows have no length of their own
    flows           documents flow on from row to row, and only EOS tells them apart
    header          the token that begins the header of a turn, and the one that ends it
    masks           share of documents of which a tenth or more is not trained on
    common          tokens that may be more than a quarter of all
    masked          whether attention_mask is 0 on padding, and not 1 everywhere
    told            what was told, and how, in words
    """

    eos: int | None = None
    bos: int | None = None
    pad: int | None = None
    tail: int = 0
    others: tuple[tuple[int, ...], ...] = ()
    ends: float = 0.0
    begins: float = 0.0
    adds_bos: bool = False
    lacks_eos: bool = False
    vocabulary: int | None = None
    length: int | None = None
    flows: bool = False
    header: tuple[int, int] | None = None
    masks: float = 0.0
    common: tuple[int, ...] = ()
    masked: bool = False
    told: dict[str, str] = field(default_factory=dict)


class Batch:
    """Rows as documents, all flat: T tokens, r rows, d documents or pieces of them.

    set_, habits    of which it is
    first, rows     number of the first row, and how many there are
    ids             int[T], and `offsets` int64[r + 1], where rows begin and end
    labels          int[T] as they are stored; the ids, without the column
    others          places of labels that are neither -100 nor the token
    trained         bool[T]: each token, whether a model is trained to predict it
    real            bool[T] by attention_mask; None where it does not tell padding
    inside          bool[T], whether a place is in a document, or padding
    told            where documents begin by each column that tells
    begins, stops   int64[d], of documents, in ascending order; `sizes`: tokens of each, 1 or more
    spare           tokens of each document that are targets alone and padding, 0 or 1
    ends            int64[d], `stops` without these
    row_of, lasts   int64[d], bool[d], the row of each, and whether it is the last there
    begun           bool[d]: False for a piece whose document began before
    ended, last     bool[d], whether it ends with EOS, and int64[d], its place; or the last token's
    bare            bool[d], whether it ends with neither EOS nor what others of its kind end with
    full            bool[d], whether it ends where its row is full
    labels_of       int64[d], trained tokens of each document; `labels_in`: int64[r], of each row
    masked          int64[d], tokens that are not trained, though the one before them could tell
    used            int64[r], where the last document ends; where the row begins, without one
    filled          int64[r], tokens up to there; `lengths`: without those that are targets alone
    """

    def __init__(self, raw: Raw, set_: Set, habits: Habits) -> None:
        """Raises DataError for boundaries that are not in their row."""
        ids, self.offsets = raw.columns["input_ids"]
        self.set_, self.habits, self.first, self.rows = set_, habits, raw.first, raw.rows
        self.ids = ids = _compact(ids)
        self.labels = raw.columns["labels"].values if "labels" in raw.columns else ids
        self.others = np.flatnonzero((self.labels != ids) & (self.labels != IGNORED))
        self.real = _real(raw)
        told = _told(raw, set_, self.real)
        self.told = {name: begins for name, (begins, _) in told.items()}
        begins, stops = _documents(ids, self.offsets, self.real, told, set_, habits)
        keep = stops > begins
        begins, stops = begins[keep], stops[keep]
        self.begins: Int64 = begins
        self.stops: Int64 = stops
        edges = np.diff(np.stack([begins, stops], axis=1).reshape(-1), prepend=0, append=len(ids))
        self.inside = np.repeat(np.arange(len(edges)) % 2 == 1, edges)
        self.sizes: Int64 = stops - begins
        self.row_of = self.rows_at(begins)
        self.lasts = np.append(self.row_of[1:] != self.row_of[:-1], True)[: len(begins)]
        self.used = self.offsets[:-1].copy()
        self.used[self.row_of[self.lasts]] = stops[self.lasts]
        self.filled: Int64 = self.used - self.offsets[:-1]
        alone = set_.meaning.spare * np.bincount(self.row_of, minlength=self.rows)
        self.lengths = self.filled - alone
        is_full = habits.flows | (self.lengths[self.row_of] == (habits.length or -1))
        self.full: Bool = self.lasts & is_full
        start = raw.columns.get("segments.start", Column(_NONE, _NONE)).values
        self.begun: Bool = start[keep] == 0 if len(start) == len(keep) else self.sizes > 0
        if habits.flows:
            self.begun &= ~np.isin(begins, self.offsets)
        self.spare = set_.meaning.spare if habits.pad is not None else 0
        self.ends: Int64 = np.maximum(stops - self.spare, begins + 1)
        before = np.maximum(self.ends - 1 - habits.tail, begins)
        is_tailed = (ids[self.ends - 1] != habits.eos) & (ids[before] == habits.eos)
        self.last: Int64 = np.where(is_tailed, before, self.ends - 1)
        self.ended: Bool = (ids[self.last] == habits.eos) & (habits.eos is not None)
        self.bare: Bool = ~self.ended
        for other in habits.others:
            tails = ids[np.maximum(self.ends[:, None] - np.arange(len(other), 0, -1), 0)]
            self.bare &= (tails != np.array(other)).any(axis=1)
        self.trained = _trained(raw, set_.meaning.shift)
        if set_.meaning.spare:  # nothing predicts it
            self.trained[begins] = False
        self.labels_of = count(self.trained, begins, stops)
        self.labels_in = self.by_row(self.trained)
        self.masked: Int64 = self.sizes - 1 - self.spare - self.labels_of + self.trained[begins]

    def by_row(self, flags: Bool) -> Int64:
        """int64[r], of flags bool[T], how many each row has."""
        return count(flags, self.offsets[:-1], self.offsets[1:])

    def rows_where(self, flags: Bool) -> Int64:
        """int64, the first places of the rows that bool[r] marks."""
        return self.offsets[:-1][flags]

    def rows_at(self, places: Int64) -> Int64:
        """int64, the rows, from 0, of places."""
        return np.searchsorted(self.offsets, places, side="right") - 1

    def document_at(self, places: Int64) -> Int64:
        """int64, the documents that begin last up to each place; -1 before the first."""
        return np.searchsorted(self.begins, places, side="right") - 1


def count(flags: Bool, begins: Int64, stops: Int64) -> Int64:
    """int64[n], how many of flags bool[T] are in each stretch; they are in ascending order."""
    edges = np.stack([begins, stops], axis=1).reshape(-1)
    if not len(edges):
        return _NONE
    ended = np.append(flags, False).view(np.int8)  # so that the last edge is a place, too
    sums = np.add.reduceat(ended, edges, dtype=np.int32)[::2]
    return np.where(stops > begins, sums, 0).astype(np.int64)


def _documents(
    ids: npt.NDArray[Any], offsets: Int64, real: Bool | None,
    told: dict[str, tuple[Int64, Int64]], set_: Set, habits: Habits,
) -> tuple[Int64, Int64]:  # fmt: skip
    """(begins, stops) of documents, some of them empty."""
    flags = np.ones(len(ids), bool) if real is None else real
    if told and not set_.documents:
        begins, stops = next(iter(told.values()))
    elif habits.flows:
        after = np.flatnonzero(ids == habits.eos) + 1 + habits.tail
        begins, stops = _stretches(flags, after, offsets)
    else:
        begins, stops = _reach(flags, offsets[:-1], offsets[1:])
    if habits.pad is None or real is not None:
        return begins, stops
    spare = set_.meaning.spare
    padded = (begins, stops) if spare else (offsets[:-1], offsets[1:])
    most = _reach(ids != habits.pad, *padded)[1]
    # the first of it is the end of a document, if it is EOS
    most = np.minimum(most + spare + (habits.pad == habits.eos), padded[1])
    if not spare:
        most = most[np.searchsorted(offsets, begins, side="right") - 1]
    return np.minimum(begins, most), np.minimum(stops, most)


def _compact(ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Ids as int32, so that equal rows have equal bytes; as int64 where one is beyond."""
    bounds = np.iinfo(np.int32)
    is_wide = ids.dtype.itemsize > 4 and len(ids)
    if is_wide and (int(ids.min()) < bounds.min or int(ids.max()) > bounds.max):
        return ids
    return ids.astype(np.int32, copy=False)


def _real(raw: Raw) -> Bool | None:
    """As `Batch.real`."""
    if "attention_mask" not in raw.columns:
        return None
    mask = raw.columns["attention_mask"].values
    real: Bool = mask != 0
    return None if real.all() and (mask == 1).all() else real


# --- boundaries: (begins, stops) of documents, int64 each, by each column that tells


def _told(raw: Raw, set_: Set, real: Bool | None) -> dict[str, tuple[Int64, Int64]]:
    offsets, told = raw.columns["input_ids"].offsets, dict[str, tuple[Int64, Int64]]()
    for name in [one for one in TELLING if one in raw.columns]:
        values = raw.columns[name].values
        if name in LISTED:
            told[name] = _by_lengths(raw, set_, name, LISTED[name])
        elif name == "position_ids":  # LLaMA-Factory's padding has position 0
            flags = real
            if flags is None:
                ends = _reach(values != 0, offsets[:-1], offsets[1:])[1] - offsets[:-1]
                flags = np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets)) < (
                    np.repeat(ends, np.diff(offsets))
                )
            told[name] = _stretches(flags, np.flatnonzero(values == 0), offsets)
        elif values.dtype != np.bool_ and len(values) and int(values.max()) > 1:
            changes = np.flatnonzero(values[1:] != values[:-1]) + 1
            told[name] = _stretches(values != 0, changes, offsets)  # they number documents
    return told


def _by_lengths(raw: Raw, set_: Set, name: str, padded: str) -> tuple[Int64, Int64]:
    """By lengths of documents, or of the room that `padded` says they have."""
    offsets, lengths = raw.columns["input_ids"].offsets, _lengths_of(raw, set_, name)
    room = _lengths_of(raw, set_, padded) if padded in raw.columns else lengths
    if len(room.offsets) != len(lengths.offsets) or (room.offsets != lengths.offsets).any():
        _refuse(raw, set_, name, 0, f"expected as many values as {padded} has")
    sums, of = offsets_of(room.values), np.repeat(offsets[:-1], np.diff(room.offsets))
    begins = sums[:-1] - np.repeat(sums[room.offsets[:-1]], np.diff(room.offsets)) + of
    return begins, begins + np.minimum(lengths.values, room.values)


def _lengths_of(raw: Raw, set_: Set, name: str) -> Column:
    """The lengths that a column has, or between the boundaries that it has. Raises DataError for
    what is not in the row.
    """
    (values, edges), rows = raw.columns[name], np.diff(raw.columns["input_ids"].offsets)
    values = values.astype(np.int64)
    is_bounds = name.startswith(("cu_", "seq_start"))
    if is_bounds:
        empty = (np.diff(edges) == 0) & (rows == 0)  # as if they had a 0
        values, edges = np.insert(values, edges[:-1][empty], 0), edges + offsets_of(empty)
        wrong = np.flatnonzero(np.diff(edges) < 1)
        wrong = wrong if len(wrong) else np.flatnonzero(values[edges[:-1]])
        if len(wrong):
            _refuse(raw, set_, name, int(wrong[0]), "expected it to begin with 0")
        if name == "seq_start_id":  # whose last document ends with the row
            values, edges = np.insert(values, edges[1:], rows), edges + np.arange(len(edges))
        values, edges = np.delete(np.diff(values), edges[1:-1] - 1), edges - np.arange(len(edges))
    counts = np.diff(edges)
    outside = np.flatnonzero((values < 0) | (values > np.repeat(rows, counts)))
    row = int(np.searchsorted(edges, outside[0], side="right")) - 1 if len(outside) else -1
    if row < 0:
        sums = offsets_of(values)
        over = np.flatnonzero(sums[edges[1:]] - sums[edges[:-1]] > rows)
        row = int(over[0]) if len(over) else -1
    if row >= 0:
        what = "to ascend from 0 to at most" if is_bounds else "lengths that add up to at most"
        _refuse(raw, set_, name, row, f"expected {what} {rows[row]}, the row's tokens")
    return Column(values, edges)


def _refuse(raw: Raw, set_: Set, name: str, row: int, expected: str) -> None:
    values, edges = raw.columns[name]
    own = values[edges[row] : edges[row + 1]].tolist()
    shown = ", ".join(map(str, own[:8])) + ", ..." * (len(own) > 8)
    raise DataError(f"{set_.name}: row {raw.first + row}: {name} is [{shown}], {expected}",
                    "write this column again")  # fmt: skip


def _stretches(real: Bool, edges: Int64, offsets: Int64) -> tuple[Int64, Int64]:
    """Stretches of real tokens, cut at `edges` and where rows begin."""
    changes = np.flatnonzero(real[1:] != real[:-1]) + 1
    cuts = np.unique(np.concatenate([edges[edges < len(real)], changes, offsets]))
    keep = real[cuts[:-1]]
    return cuts[:-1][keep], cuts[1:][keep]


def _reach(flags: Bool, begins: Int64, stops: Int64) -> tuple[Int64, Int64]:
    """int64[n] each, from the first place with a flag of each stretch to behind the last one; its
    begin, where it has none.
    """
    places = np.flatnonzero(flags)
    first, end = np.searchsorted(places, begins), np.searchsorted(places, stops)
    has = end > first
    reached, left = begins.copy(), begins.copy()
    reached[has], left[has] = places[first[has]], places[end[has] - 1] + 1
    return reached, left


def _trained(raw: Raw, shift: str) -> Bool:
    """bool[T], whether each token is predicted, by labels and masks together."""
    flags = [raw.columns[one].values != 0 for one in MASKS if one in raw.columns]
    flags += [raw.columns["labels"].values != IGNORED] if "labels" in raw.columns else []
    ids, offsets = raw.columns["input_ids"]
    if not flags:
        return np.zeros(len(ids), bool)
    trained: Bool = np.logical_and.reduce(flags) if len(flags) > 1 else flags[0]
    if shift == "next":
        trained = np.append(False, trained)[:-1]
        trained[offsets[:-1][offsets[:-1] < len(ids)]] = False  # of the row before
    return trained


# --- habits, by a look


def look(set_: Set, tokenizer: TokenizerInfo | None, max_length: int | None) -> Habits:
    """What a set does. `tokenizer`: in place of its own. Raises DataError for what cannot be read,
    and boundaries that are not in their row.
    """
    tokenizer = tokenizer or (set_.facts.tokenizer if set_.facts else None)
    raw, length = _looked_at(set_), max_length
    if isinstance(set_.facts, Manifest):
        length = length or set_.facts.config.max_length
    real, offsets = _real(raw), raw.columns["input_ids"].offsets
    habits = Habits(
        length=length or _full_length(np.diff(offsets)),
        masked=real is not None and not real.all(),
    )
    habits = _padding(_of_tokenizer(habits, tokenizer, set_), raw, set_)
    lengths = np.diff(offsets) if real is None else count(real, offsets[:-1], offsets[1:])
    told = {*TELLING} & {*set_.names} - {"attention_mask"}
    is_full = len(lengths) > 1 and float((lengths == habits.length).mean()) >= NEARLY
    is_told = bool(told) or set_.documents or habits.pad is not None
    if habits.eos is not None and is_full and not is_told:
        habits = replace(habits, flows=True)  # rows are stretches of one stream
        habits.told["boundaries"] = "EOS, since rows are full and no column tells"
    batch = Batch(raw, set_, habits)
    if length is None and not (batch.lengths == habits.length).any():
        # LLaMA-Factory's rows each end with padding, and Megatron-Bridge's documents are longer
        habits = replace(habits, length=_full_length(batch.lengths))
        batch = Batch(raw, set_, habits)
    habits = _ending(batch)
    habits = replace(habits, others=_other_ends(Batch(raw, set_, habits)))
    if habits.length is None:
        batch = Batch(raw, set_, habits)
        longest = int(batch.lengths.max(initial=0))
        if batch.bare[batch.lasts & (batch.lengths[batch.row_of] == longest)].any():
            habits = replace(habits, length=longest)  # it is the only full one, and ends there
    if habits.bos is None and tokenizer is None:
        habits = _beginning(batch, habits)
    return _shares(Batch(raw, set_, habits))


def _looked_at(set_: Set) -> Raw:
    """Evenly spread rows as if they followed one another: the first row, to know how long rows are,
    and then so many that memory holds them.
    """
    length = max(1, len(next(set_.read(np.array([[0, 1]]))).columns["input_ids"].values))
    wanted = min(max(_LOOK_TOKENS // length, 16), _LOOK_ROWS)
    raws, tokens = list[Raw](), 0
    for raw in set_.read(even_spans(set_.rows, wanted, -(-wanted // _SPANS))):
        columns = {name: Column(of.values.copy(), of.offsets) for name, of in raw.columns.items()}
        raws.append(raw._replace(columns=columns))  # a copy, since views hold all that was read
        tokens += len(raw.columns["input_ids"].values)
        if tokens > 2 * _LOOK_TOKENS:  # the first row was a short one
            break
    names = raws[0].columns
    return Raw(0, {name: _joined([one.columns[name] for one in raws]) for name in names})


def _joined(columns: Sequence[Column]) -> Column:
    if len(columns) == 1:  # perhaps a very long row
        return columns[0]
    lengths = np.concatenate([np.diff(one.offsets) for one in columns])
    return Column(np.concatenate([one.values for one in columns]), offsets_of(lengths))


def _full_length(lengths: Int64) -> int | None:
    """The length that the longest rows have in common."""
    longest = int(lengths.max(initial=0))
    return longest if longest and int((lengths == longest).sum()) > 1 else None


def _of_tokenizer(habits: Habits, info: TokenizerInfo | None, set_: Set) -> Habits:
    if info is None:
        return habits
    prefix = info.prefix if isinstance(info.prefix, list) else []
    suffix = info.suffix if isinstance(info.suffix, list) else []
    for name, token in (("EOS", info.eos_token_id), ("BOS", info.bos_token_id)):
        if token is not None:
            habits.told[name] = f"{token}, by the tokenizer {info.source or 'bytes'}"
    return replace(
        habits,
        eos=info.eos_token_id,
        bos=info.bos_token_id,
        pad=info.pad_token_id if set_.format != "packer" else None,  # whose columns leave it out
        adds_bos=info.bos_token_id is not None and info.bos_token_id in prefix,
        lacks_eos=info.eos_token_id is not None and info.eos_token_id in suffix,
        vocabulary=info.vocab_size,
    )


def _padding(habits: Habits, raw: Raw, set_: Set) -> Habits:
    """Padding by its place: at the ends of rows that are all as long, stretches of one token."""
    without, (ids, offsets) = replace(habits, pad=None), raw.columns["input_ids"]
    if set_.meaning.spare:
        return _spare(without, raw, set_)
    if {*LISTED} & {*set_.names} or habits.masked or set_.documents:
        return without
    lengths = np.diff(offsets)
    ends = offsets[1:][lengths > 1] - 1
    found = ids[ends][ids[ends] == ids[ends - 1]]
    if habits.pad is not None:  # by the tokenizer: is it there?
        found = found[found == habits.pad]
    token, share = _mode(found)
    if share * len(found) < max(2, _COMMON * raw.rows) or (ids == token).all():
        return without  # where nothing else is there, it is what rows hold
    if habits.pad is None and float((lengths == habits.length).mean()) < NEARLY:
        return habits  # rows of several lengths are not padded
    habits.told["padding"] = f"{token}, which fills the ends of rows"
    return _filled(replace(habits, pad=token), raw, set_, offsets[:-1], offsets[1:])


def _spare(habits: Habits, raw: Raw, set_: Set) -> Habits:
    """Padding of documents that each end with a target which is not trained, and perhaps more."""
    begins, stops = next(iter(_told(raw, set_, None).values()))
    begins, stops = begins[stops > begins], stops[stops > begins]
    token, share = _mode(raw.columns["input_ids"].values[stops - 1])
    if share < NEARLY or _trained(raw, set_.meaning.shift)[stops - 1].any():
        return habits
    habits.told["padding"] = f"{token}, with which documents are filled up"
    return _filled(replace(habits, pad=token), raw, set_, begins, stops)


def _filled(habits: Habits, raw: Raw, set_: Set, begins: Int64, stops: Int64) -> Habits:
    """Habits of a set whose stretches are filled up with padding: it is EOS if the first of it is
    trained.
    """
    first = _reach(raw.columns["input_ids"].values != habits.pad, begins, stops)[1]
    trained = _trained(raw, set_.meaning.shift)[first[first < stops - set_.meaning.spare]]
    if habits.eos is not None or _share(trained) < _PLAIN:
        return habits
    habits.told["EOS"] = f"{habits.pad}, with which documents end"
    return replace(habits, eos=habits.pad)


def _mode(tokens: npt.NDArray[Any]) -> tuple[int, float]:
    """The most frequent token, and its share; -1, 0 of none."""
    if not len(tokens):
        return -1, 0.0
    values, counts = np.unique(tokens, return_counts=True)
    best = int(counts.argmax())
    return int(values[best]), float(counts[best] / len(tokens))


def _ending(b: Batch) -> Habits:
    """EOS by the ends of documents that are not cut: the token with which most end, or the one
    before it, if that is a line end: it is often elsewhere, and nearly always behind the other.
    """
    stops = b.ends[~b.full & (b.ends - b.begins > 1)]
    if b.habits.eos is not None:  # by the tokenizer: do documents end with it, or one place before?
        return replace(b.habits, tail=_tail(b, stops, b.habits.eos))
    if len(stops) < _FEWEST:
        return b.habits
    real = b.inside.copy()
    real[b.stops[b.ends < b.stops] - 1] = False  # targets alone, which may be any token
    found = list[tuple[int, Bool, int]]()
    for tail in (0, 1):
        token, _ = _mode(b.ids[stops - 1 - tail])
        has = (b.ids[stops - 1] == token) | (b.ids[stops - 2] == token)
        found.append((token, has, int(((b.ids == token) & real).sum())))
    (_, has, everywhere), (_, has_before, _) = found
    is_line_end = everywhere >= 2 * len(stops) and _share(has_before[has]) >= _NEARLY_ALL
    token, has, everywhere = found[_share(has) < _PLAIN or is_line_end]
    # where padding is told by its place alone, it may be EOS
    least = _PLAIN if b.habits.pad is None else NEARLY
    if _share(has) < least or has.sum() < _RARE * everywhere:
        return b.habits
    b.habits.told["EOS"] = f"{token}, with which documents end"
    return replace(b.habits, eos=token, tail=_tail(b, stops, token))


def _tail(b: Batch, stops: Int64, eos: int) -> int:
    """How many tokens follow EOS at the ends of most documents, or of those of one kind, as the
    line end of a template; what documents begin with is of the next one.
    """
    at_end, before = (b.ids[stops - 1 - tail] == eos for tail in (0, 1))
    token, share = _mode(b.ids[stops[before & ~at_end] - 1])
    few = int((before & ~at_end).sum()) < _FEWEST
    is_usual = not few and share >= NEARLY and token != _mode(b.ids[b.begins])[0]
    return int(_share(before) > _PLAIN > _share(at_end) or is_usual)


def _other_ends(b: Batch) -> tuple[tuple[int, ...], ...]:
    """What documents of a kind end with, if not with EOS: a token that is in hardly any others, or
    else several tokens that are alike.
    """
    bare, found = b.bare & ~b.full & (b.ends - b.begins >= _ALIKE), list[tuple[int, ...]]()
    lasts, counts = np.unique(b.ids[b.ends[bare] - 1], return_counts=True)
    least = _FEWEST  # where boundaries are sure; else as many as are not alike by chance
    if b.set_.format != "packer":
        least = max(least, min(_MANY, len(b.begins) // 10))
    often = np.argsort(-counts, kind="stable")[: int((counts >= least).sum())][:_ROLES]
    for token in lasts[often].tolist():
        own = bare & (b.ids[b.ends - 1] == token)
        others = ~own & ~b.full
        has = np.unique(b.document_at(np.flatnonzero((b.ids == token) & b.inside)))
        if own.sum() >= NEARLY * (own.sum() + others[has].sum()):
            found.append((token,))
            continue
        tails = b.ids[b.ends[own][:, None] - np.arange(_ALIKE, 0, -1)]
        kinds, numbers = np.unique(tails, axis=0, return_counts=True)
        if int(numbers.max()) >= max(least, _PLAIN * len(tails)):
            found.append(tuple(kinds[int(numbers.argmax())].tolist()))
    return tuple(found)


def _beginning(b: Batch, habits: Habits) -> Habits:
    firsts = b.ids[b.begins[b.begun]]
    token, share = _mode(firsts)
    at_begin, everywhere = int((firsts == token).sum()), int((b.ids == token).sum())
    is_plain = len(firsts) >= _FEWEST and share >= _PLAIN and 2 * at_begin >= _RARE * everywhere
    if not is_plain or token == habits.eos or everywhere - at_begin > _PLAIN * len(firsts):
        return habits  # where there are many more, it begins every turn
    second, alike = _mode(b.ids[b.begins[b.sizes > 1] + 1])
    if alike >= NEARLY and not _has_roles(second, b):
        return habits  # the first of words with which every prompt begins
    habits.told["BOS"] = f"{token}, with which documents begin"
    return replace(habits, bos=token)


def _shares(b: Batch) -> Habits:
    some = slice(None, None, max(1, len(b.ids) >> 16))
    inside = b.ids[some][b.inside[some]]
    values, counts = np.unique(inside, return_counts=True)
    firsts = b.ids[b.begins[b.begun]]
    bare = b.told and not b.set_.documents and _share(b.bare[~b.full]) > 1 - NEARLY
    masked = (b.masked > (1 - NEARLY) * (b.sizes - 1)) & b.set_.says_what_is_trained
    return replace(
        b.habits,
        ends=_share(b.ended[~b.full]),
        begins=_share(firsts == b.habits.bos),
        lacks_eos=b.habits.lacks_eos and bool(bare),
        masks=_share(masked),
        header=_header(b),
        common=tuple(values[counts >= _COMMON * len(inside)].tolist()),
    )


def _share(flags: Any) -> float:
    return float(np.mean(flags)) if len(flags) else 0.0


def _header(b: Batch) -> tuple[int, int] | None:
    """The token that begins the header of every turn, and the one that ends it.

    The first is where documents begin, or after their BOS, and at least once more in most of them.
    Headers of one role are alike from it on; the shortest of these stretches ends with the second,
    whatever answers begin with.
    """
    for skipped in (0, 1) if b.set_.says_what_is_trained else ():
        firsts = b.ids[b.begins[b.sizes > 1] + skipped]
        token, share = _mode(firsts)
        places = np.flatnonzero(b.ids == token)
        often = len(places) >= 1.5 * len(firsts) and len(firsts) >= _FEWEST
        if share >= _MOSTLY and often and _has_roles(token, b):
            end = _header_end(b, places)
            return None if end is None else (token, end)
    return None


def _has_roles(token: int, b: Batch) -> bool:
    """Whether what follows a token is one of few, as the roles of a conversation are."""
    following = b.ids[1:][b.ids[:-1] == token]
    _, counts = np.unique(following, return_counts=True)
    return bool(np.sort(counts)[-_ROLES:].sum() >= _MOST_ROLES * len(following) > 0)


def _header_end(b: Batch, places: Int64) -> int | None:
    """What ends the headers that begin at `places`."""
    places = places[places + LONGEST_HEADER <= len(b.ids)]
    headers, found = b.ids[places[:, None] + np.arange(LONGEST_HEADER)], list[tuple[int, int]]()
    for role in np.unique(headers[:, 1]):
        own = headers[headers[:, 1] == role]
        if len(own) < max(_FEWEST, 0.05 * len(headers)):
            continue
        modes = [_mode(column) for column in own.T]
        length = next((at for at, (_, share) in enumerate(modes) if share < NEARLY), len(modes))
        if length > 2:  # the mark, a role and what ends it
            found.append((length, modes[length - 1][0]))
    return min(found)[1] if len(found) > 1 else None
