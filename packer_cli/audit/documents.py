"""Rows as documents, and the conventions of a set: its EOS, BOS, padding, headers and lengths.

`BOUNDARY_COLUMNS` lists columns with boundaries of documents. The first one that is there is used,
and compared with the others. Without one, documents end at EOS if rows look packed; otherwise a row
is a document. Padding is all that lies in no document: by the columns, or else by its place, the
run of one token at the end of a row.

EOS, BOS and padding are those of the tokenizer, or inferred from evenly spread rows if they are
obvious: EOS is a token that at least half of the documents end with and that is rare elsewhere, and
BOS likewise at the beginning. If not, they stay unknown, and the rules that need them report that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from packer_cli.audit.sets import AuditedSet, Column, FlatRows, even_spans
from packer_cli.errors import DataError
from packer_cli.options.shapes import MASKS
from packer_cli.records import IGNORED, Int64, offsets_of
from packer_cli.result.manifest import Manifest, TokenizerInfo

Bool = npt.NDArray[np.bool_]
# Columns with the lengths or limits of documents, the most explicit first -> the column of their
# lengths with padding
LENGTH_COLUMNS = {
    "cu_seqlens": "cu_seqlens_padded", "seq_start_id": "", "seq_lengths": "",
    "seq_lens": "seq_lens_padded",
}  # fmt: skip
BOUNDARY_COLUMNS = (*LENGTH_COLUMNS, "attention_mask", "position_ids")
_LOOK_TOKENS, _LOOK_ROWS, _SPANS = 1 << 21, 1 << 14, 8
_FEWEST = 4  # documents that a convention can be inferred from
_PLAIN = 0.5  # share of documents that makes a convention obvious
_RARE = 0.2  # share of a token's places that are ends of documents, if it is EOS
NEARLY, _MOSTLY, _NEARLY_ALL = 0.9, 0.75, 0.95
_COMMON = 0.1  # share of tokens in a sample; later they are counted exactly
_ROLES, _MOST_ROLES = 8, 0.95  # roles of turns, and their share of tokens behind a turn's mark
_MANY = 32  # documents of a kind
_ALIKE = 4  # last tokens of documents of a kind, if one token is not enough
LONGEST_HEADER = 24  # tokens of the header of a turn
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class TokenConventions:
    """Conventions of a set, by its tokenizer or inferred from its rows.

    eos, bos, pad   ids; None: unknown
    tail            tokens that follow EOS at the end of documents: a template's line end
    other_ends      last tokens of kinds of documents that do not end with EOS
    ends, begins    shares of the documents that end with EOS, and that begin with BOS
    adds_bos        the tokenizer puts BOS before every text
    lacks_eos       the tokenizer puts EOS behind every text, but documents with known boundaries
                    end with nothing in common
    vocabulary      number of ids; None: unknown
    length          tokens of a full row; None: rows have no fixed length
    is_stream       documents go on from row to row, and only EOS separates them
    header          the token that begins the header of a turn, and the one that ends it
    masks           share of documents with a tenth or more of their tokens untrained
    common          tokens that may be more than a quarter of all
    masked          attention_mask is 0 on padding
    evidence        name of a convention -> its value and the reason, for the report
    """

    eos: int | None = None
    bos: int | None = None
    pad: int | None = None
    tail: int = 0
    other_ends: tuple[tuple[int, ...], ...] = ()
    ends: float = 0.0
    begins: float = 0.0
    adds_bos: bool = False
    lacks_eos: bool = False
    vocabulary: int | None = None
    length: int | None = None
    is_stream: bool = False
    header: tuple[int, int] | None = None
    masks: float = 0.0
    common: tuple[int, ...] = ()
    masked: bool = False
    evidence: dict[str, str] = field(default_factory=dict)


class DocumentBatch:
    """Rows as documents, all flat: T tokens, r rows, d documents or pieces of documents.

    set_, conventions   of the rows
    first, rows     number of the first row, and count of rows
    ids             int[T]; `offsets` int64[r + 1] are the limits of rows
    labels          int[T] as they are stored; without the column, the ids
    odd_labels      places of labels that are neither -100 nor the token
    trained         bool[T], True if a model is trained to predict the token
    real            bool[T] by attention_mask; None if it does not mark padding
    inside          bool[T], True in a document, False in padding
    boundaries      column -> int64, the beginnings of documents by this column
    begins, stops   int64[d], limits of documents, in ascending order; `sizes`: their tokens, >= 1
    padded_targets  tokens of each document that are both a target only and padding, 0 or 1
    ends            int64[d], `stops` without these
    row_of, is_last int64[d], bool[d], the row of each document; True for the last in its row
    begun           bool[d], False for a piece that is not the beginning of its document
    ended, last     bool[d], True if it ends with EOS; int64[d], the place of EOS or its last token
    unended         bool[d], True if it ends with neither EOS nor one of `other_ends`
    full            bool[d], True if it ends at the end of a full row
    labels_of       int64[d], trained tokens of each document; `labels_in`: int64[r], of each row
    masked          int64[d], untrained tokens that could be trained: all but the first
    used            int64[r], end of the last document; the row's begin if there is none
    filled          int64[r], tokens up to there; `lengths`: without tokens that are targets only
    """

    def __init__(self, raw: FlatRows, set_: AuditedSet, conventions: TokenConventions) -> None:
        """Raises DataError for boundaries that are not in their row."""
        ids, self.offsets = raw.columns["input_ids"]
        self.set_, self.conventions, self.first, self.rows = set_, conventions, raw.first, raw.rows
        self.ids = ids = _compact(ids)
        self.labels = raw.columns["labels"].values if "labels" in raw.columns else ids
        self.odd_labels = np.flatnonzero((self.labels != ids) & (self.labels != IGNORED))
        self.real = _real(raw)
        boundaries = _boundaries(raw, set_, self.real)
        self.boundaries = {name: begins for name, (begins, _) in boundaries.items()}
        begins, stops = _documents(ids, self.offsets, self.real, boundaries, set_, conventions)
        keep = stops > begins
        begins, stops = begins[keep], stops[keep]
        self.begins: Int64 = begins
        self.stops: Int64 = stops
        edges = np.diff(np.stack([begins, stops], axis=1).reshape(-1), prepend=0, append=len(ids))
        self.inside = np.repeat(np.arange(len(edges)) % 2 == 1, edges)
        self.sizes: Int64 = stops - begins
        self.row_of = self.rows_at(begins)
        self.is_last = np.append(self.row_of[1:] != self.row_of[:-1], True)[: len(begins)]
        self.used = self.offsets[:-1].copy()
        self.used[self.row_of[self.is_last]] = stops[self.is_last]
        self.filled: Int64 = self.used - self.offsets[:-1]
        alone = set_.meaning.target_tokens * np.bincount(self.row_of, minlength=self.rows)
        self.lengths = self.filled - alone
        is_full = conventions.is_stream | (self.lengths[self.row_of] == (conventions.length or -1))
        self.full: Bool = self.is_last & is_full
        start = raw.columns.get("segments.start", Column(_NONE, _NONE)).values
        self.begun: Bool = start[keep] == 0 if len(start) == len(keep) else self.sizes > 0
        if conventions.is_stream:
            self.begun &= ~np.isin(begins, self.offsets)
        self.padded_targets = set_.meaning.target_tokens if conventions.pad is not None else 0
        self.ends: Int64 = np.maximum(stops - self.padded_targets, begins + 1)
        before = np.maximum(self.ends - 1 - conventions.tail, begins)
        is_tailed = (ids[self.ends - 1] != conventions.eos) & (ids[before] == conventions.eos)
        self.last: Int64 = np.where(is_tailed, before, self.ends - 1)
        self.ended: Bool = (ids[self.last] == conventions.eos) & (conventions.eos is not None)
        self.unended: Bool = ~self.ended
        for other in conventions.other_ends:
            tails = ids[np.maximum(self.ends[:, None] - np.arange(len(other), 0, -1), 0)]
            self.unended &= (tails != np.array(other)).any(axis=1)
        self.trained = _trained(raw, set_.meaning.shift)
        if set_.meaning.target_tokens:  # nothing predicts a document's first token
            self.trained[begins] = False
        self.labels_of = count(self.trained, begins, stops)
        self.labels_in = self.by_row(self.trained)
        self.masked: Int64 = (
            self.sizes - 1 - self.padded_targets - self.labels_of + self.trained[begins]
        )

    def by_row(self, flags: Bool) -> Int64:
        """Count the flags bool[T] in each row, int64[r]."""
        return count(flags, self.offsets[:-1], self.offsets[1:])

    def rows_where(self, flags: Bool) -> Int64:
        """Return the first places of the rows with a flag bool[r], int64."""
        return self.offsets[:-1][flags]

    def rows_at(self, places: Int64) -> Int64:
        """Return the rows, counted from 0, of places, int64."""
        return np.searchsorted(self.offsets, places, side="right") - 1

    def document_at(self, places: Int64) -> Int64:
        """Return the last document that begins at or before each place, int64; -1 if none does."""
        return np.searchsorted(self.begins, places, side="right") - 1


def count(flags: Bool, begins: Int64, stops: Int64) -> Int64:
    """Count flags bool[T] in each of the ranges begins..stops, which ascend: int64[n]."""
    edges = np.stack([begins, stops], axis=1).reshape(-1)
    if not len(edges):
        return _NONE
    ended = np.append(flags, False).view(np.int8)  # so that the last edge is a place, too
    sums = np.add.reduceat(ended, edges, dtype=np.int32)[::2]
    return np.where(stops > begins, sums, 0).astype(np.int64)


def _documents(
    ids: npt.NDArray[Any], offsets: Int64, real: Bool | None,
    boundaries: dict[str, tuple[Int64, Int64]], set_: AuditedSet, conventions: TokenConventions,
) -> tuple[Int64, Int64]:  # fmt: skip
    """Return (begins, stops) of documents, some of them empty."""
    flags = np.ones(len(ids), bool) if real is None else real
    if boundaries and not set_.documents:
        begins, stops = next(iter(boundaries.values()))
    elif conventions.is_stream:
        after = np.flatnonzero(ids == conventions.eos) + 1 + conventions.tail
        begins, stops = _stretches(flags, after, offsets)
    else:
        begins, stops = _reach(flags, offsets[:-1], offsets[1:])
    if conventions.pad is None or real is not None:
        return begins, stops
    targets = set_.meaning.target_tokens
    padded = (begins, stops) if targets else (offsets[:-1], offsets[1:])
    most = _reach(ids != conventions.pad, *padded)[1]
    # if padding is EOS, its first token is the end of a document
    most = np.minimum(most + targets + (conventions.pad == conventions.eos), padded[1])
    if not targets:
        most = most[np.searchsorted(offsets, begins, side="right") - 1]
    return np.minimum(begins, most), np.minimum(stops, most)


def _compact(ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return ids as int32, so that equal rows have equal bytes, or as int64 if one is larger."""
    bounds = np.iinfo(np.int32)
    is_wide = ids.dtype.itemsize > 4 and len(ids)
    if is_wide and (int(ids.min()) < bounds.min or int(ids.max()) > bounds.max):
        return ids
    return ids.astype(np.int32, copy=False)


def _real(raw: FlatRows) -> Bool | None:
    """Return `DocumentBatch.real`."""
    if "attention_mask" not in raw.columns:
        return None
    mask = raw.columns["attention_mask"].values
    real: Bool = mask != 0
    return None if real.all() and (mask == 1).all() else real


# --- boundaries: column -> (begins, stops) of documents, int64 each


def _boundaries(
    raw: FlatRows, set_: AuditedSet, real: Bool | None
) -> dict[str, tuple[Int64, Int64]]:
    offsets, boundaries = raw.columns["input_ids"].offsets, dict[str, tuple[Int64, Int64]]()
    for name in [column for column in BOUNDARY_COLUMNS if column in raw.columns]:
        values = raw.columns[name].values
        if name in LENGTH_COLUMNS:
            boundaries[name] = _by_lengths(raw, set_, name, LENGTH_COLUMNS[name])
        elif name == "position_ids":  # LLaMA-Factory's padding has position 0
            flags = real
            if flags is None:
                ends = _reach(values != 0, offsets[:-1], offsets[1:])[1] - offsets[:-1]
                flags = np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets)) < (
                    np.repeat(ends, np.diff(offsets))
                )
            boundaries[name] = _stretches(flags, np.flatnonzero(values == 0), offsets)
        elif values.dtype != np.bool_ and len(values) and int(values.max()) > 1:
            changes = np.flatnonzero(values[1:] != values[:-1]) + 1
            boundaries[name] = _stretches(values != 0, changes, offsets)  # they number documents
    return boundaries


def _by_lengths(raw: FlatRows, set_: AuditedSet, name: str, padded: str) -> tuple[Int64, Int64]:
    """Return (begins, stops) from lengths, or from the column `padded` of lengths with padding."""
    offsets, lengths = raw.columns["input_ids"].offsets, _lengths_of(raw, set_, name)
    room = _lengths_of(raw, set_, padded) if padded in raw.columns else lengths
    if len(room.offsets) != len(lengths.offsets) or (room.offsets != lengths.offsets).any():
        _refuse(raw, set_, name, 0, f"expected as many values as {padded} has")
    sums, of = offsets_of(room.values), np.repeat(offsets[:-1], np.diff(room.offsets))
    begins = sums[:-1] - np.repeat(sums[room.offsets[:-1]], np.diff(room.offsets)) + of
    return begins, begins + np.minimum(lengths.values, room.values)


def _lengths_of(raw: FlatRows, set_: AuditedSet, name: str) -> Column:
    """Return a column of lengths or limits as lengths. Raises DataError if they exceed a row."""
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
        rule = "to ascend from 0 to at most" if is_bounds else "lengths that add up to at most"
        _refuse(raw, set_, name, row, f"expected {rule} {rows[row]}, the row's tokens")
    return Column(values, edges)


def _refuse(raw: FlatRows, set_: AuditedSet, name: str, row: int, expected: str) -> None:
    values, edges = raw.columns[name]
    of_row = values[edges[row] : edges[row + 1]].tolist()
    shown = ", ".join(map(str, of_row[:8])) + ", ..." * (len(of_row) > 8)
    raise DataError(f"{set_.name}: row {raw.first + row}: {name} is [{shown}], {expected}",
                    "write this column again")  # fmt: skip


def _stretches(real: Bool, edges: Int64, offsets: Int64) -> tuple[Int64, Int64]:
    """Return (begins, stops) of runs of real tokens, cut at `edges` and where rows begin."""
    changes = np.flatnonzero(real[1:] != real[:-1]) + 1
    cuts = np.unique(np.concatenate([edges[edges < len(real)], changes, offsets]))
    keep = real[cuts[:-1]]
    return cuts[:-1][keep], cuts[1:][keep]


def _reach(flags: Bool, begins: Int64, stops: Int64) -> tuple[Int64, Int64]:
    """Shrink ranges to their flags: return the first place with a flag and the place behind the
    last one, int64[n] each; both are the range's begin if it has none.
    """
    places = np.flatnonzero(flags)
    first, end = np.searchsorted(places, begins), np.searchsorted(places, stops)
    has = end > first
    reached, left = begins.copy(), begins.copy()
    reached[has], left[has] = places[first[has]], places[end[has] - 1] + 1
    return reached, left


def _trained(raw: FlatRows, shift: str) -> Bool:
    """Return the tokens that labels and masks together train on, bool[T]."""
    flags = [raw.columns[mask].values != 0 for mask in MASKS if mask in raw.columns]
    flags += [raw.columns["labels"].values != IGNORED] if "labels" in raw.columns else []
    ids, offsets = raw.columns["input_ids"]
    if not flags:
        return np.zeros(len(ids), bool)
    trained: Bool = np.logical_and.reduce(flags) if len(flags) > 1 else flags[0]
    if shift == "next":
        trained = np.append(False, trained)[:-1]
        trained[offsets[:-1][offsets[:-1] < len(ids)]] = False  # of the row before
    return trained


# --- conventions, inferred from a sample


def infer_conventions(
    set_: AuditedSet, tokenizer: TokenizerInfo | None, max_length: int | None
) -> TokenConventions:
    """Infer the conventions of a set from a sample of its rows.

    tokenizer   in place of the set's
    max_length  tokens of a full row; None: inferred, too

    Raises DataError for files that cannot be read, and boundaries that are not in their row.
    """
    tokenizer = tokenizer or (set_.facts.tokenizer if set_.facts else None)
    raw, length = _sample_of(set_), max_length
    if isinstance(set_.facts, Manifest):
        length = length or set_.facts.config.max_length
    real, offsets = _real(raw), raw.columns["input_ids"].offsets
    conventions = TokenConventions(
        length=length or _full_length(np.diff(offsets)), masked=real is not None and not real.all()
    )
    conventions = _padding(_of_tokenizer(conventions, tokenizer, set_), raw, set_)
    lengths = np.diff(offsets) if real is None else count(real, offsets[:-1], offsets[1:])
    boundaries = {*BOUNDARY_COLUMNS} & {*set_.names} - {"attention_mask"}
    is_full = len(lengths) > 1 and float((lengths == conventions.length).mean()) >= NEARLY
    are_known = bool(boundaries) or set_.documents or conventions.pad is not None
    if conventions.eos is not None and is_full and not are_known:
        conventions = replace(conventions, is_stream=True)  # rows are cut from one stream
        conventions.evidence["boundaries"] = "EOS, since rows are full and no column has them"
    batch = DocumentBatch(raw, set_, conventions)
    if length is None and not (batch.lengths == conventions.length).any():
        # LLaMA-Factory's rows each end with padding, and Megatron-Bridge's documents are longer
        conventions = replace(conventions, length=_full_length(batch.lengths))
        batch = DocumentBatch(raw, set_, conventions)
    conventions = _ending(batch)
    conventions = replace(
        conventions, other_ends=_other_ends(DocumentBatch(raw, set_, conventions))
    )
    if conventions.length is None:
        batch = DocumentBatch(raw, set_, conventions)
        longest = int(batch.lengths.max(initial=0))
        if batch.unended[batch.is_last & (batch.lengths[batch.row_of] == longest)].any():
            conventions = replace(conventions, length=longest)  # the only full row, cut at its end
    if conventions.bos is None and tokenizer is None:
        conventions = _beginning(batch, conventions)
    return _shares(DocumentBatch(raw, set_, conventions))


def _sample_of(set_: AuditedSet) -> FlatRows:
    """Read evenly spread rows that fit into memory, as if they were consecutive."""
    length = max(1, len(next(set_.read(np.array([[0, 1]]))).columns["input_ids"].values))
    wanted = min(max(_LOOK_TOKENS // length, 16), _LOOK_ROWS)
    raws, tokens = list[FlatRows](), 0
    for raw in set_.read(even_spans(set_.rows, wanted, -(-wanted // _SPANS))):
        columns = {name: Column(of.values.copy(), of.offsets) for name, of in raw.columns.items()}
        raws.append(raw._replace(columns=columns))  # a copy: views would keep all that was read
        tokens += len(raw.columns["input_ids"].values)
        if tokens > 2 * _LOOK_TOKENS:  # the first row was a short one
            break
    names = raws[0].columns
    return FlatRows(0, {name: _joined([raw.columns[name] for raw in raws]) for name in names})


def _joined(columns: Sequence[Column]) -> Column:
    if len(columns) == 1:  # perhaps a very long row
        return columns[0]
    lengths = np.concatenate([np.diff(column.offsets) for column in columns])
    return Column(np.concatenate([column.values for column in columns]), offsets_of(lengths))


def _full_length(lengths: Int64) -> int | None:
    """Return the longest length if several rows have it."""
    longest = int(lengths.max(initial=0))
    return longest if longest and int((lengths == longest).sum()) > 1 else None


def _of_tokenizer(
    conventions: TokenConventions, info: TokenizerInfo | None, set_: AuditedSet
) -> TokenConventions:
    if info is None:
        return conventions
    prefix = info.prefix if isinstance(info.prefix, list) else []
    suffix = info.suffix if isinstance(info.suffix, list) else []
    for name, token in (("EOS", info.eos_token_id), ("BOS", info.bos_token_id)):
        if token is not None:
            conventions.evidence[name] = f"{token}, by the tokenizer {info.source or 'bytes'}"
    return replace(
        conventions,
        eos=info.eos_token_id,
        bos=info.bos_token_id,
        pad=info.pad_token_id if set_.format != "packer" else None,  # whose columns leave it out
        adds_bos=info.bos_token_id is not None and info.bos_token_id in prefix,
        lacks_eos=info.eos_token_id is not None and info.eos_token_id in suffix,
        vocabulary=info.vocab_size,
    )


def _padding(conventions: TokenConventions, raw: FlatRows, set_: AuditedSet) -> TokenConventions:
    """Infer padding by its place: runs of one token at the ends of rows of equal length."""
    without, (ids, offsets) = replace(conventions, pad=None), raw.columns["input_ids"]
    if set_.meaning.target_tokens:
        return _spare(without, raw, set_)
    if {*LENGTH_COLUMNS} & {*set_.names} or conventions.masked or set_.documents:
        return without
    lengths = np.diff(offsets)
    ends = offsets[1:][lengths > 1] - 1
    last = ids[ends][ids[ends] == ids[ends - 1]]
    if conventions.pad is not None:  # of the tokenizer, if rows have it
        last = last[last == conventions.pad]
    token, share = _mode(last)
    if share * len(last) < max(2, _COMMON * raw.rows) or (ids == token).all():
        return without  # if there is nothing else, it is the content of rows
    if conventions.pad is None and float((lengths == conventions.length).mean()) < NEARLY:
        return conventions  # rows of different lengths are not padded
    conventions.evidence["padding"] = f"{token}, which fills the ends of rows"
    return _filled(replace(conventions, pad=token), raw, set_, offsets[:-1], offsets[1:])


def _spare(conventions: TokenConventions, raw: FlatRows, set_: AuditedSet) -> TokenConventions:
    """Infer the padding of documents that each end with an untrained target, or with several."""
    begins, stops = next(iter(_boundaries(raw, set_, None).values()))
    begins, stops = begins[stops > begins], stops[stops > begins]
    token, share = _mode(raw.columns["input_ids"].values[stops - 1])
    if share < NEARLY or _trained(raw, set_.meaning.shift)[stops - 1].any():
        return conventions
    conventions.evidence["padding"] = f"{token}, with which documents are filled up"
    return _filled(replace(conventions, pad=token), raw, set_, begins, stops)


def _filled(
    conventions: TokenConventions, raw: FlatRows, set_: AuditedSet, begins: Int64, stops: Int64
) -> TokenConventions:
    """Infer that padding is EOS, too, if the first token of padding is trained."""
    first = _reach(raw.columns["input_ids"].values != conventions.pad, begins, stops)[1]
    trained = _trained(raw, set_.meaning.shift)[first[first < stops - set_.meaning.target_tokens]]
    if conventions.eos is not None or _share(trained) < _PLAIN:
        return conventions
    conventions.evidence["EOS"] = f"{conventions.pad}, with which documents end"
    return replace(conventions, eos=conventions.pad)


def _mode(tokens: npt.NDArray[Any]) -> tuple[int, float]:
    """Return the most frequent token and its share; (-1, 0) without tokens."""
    if not len(tokens):
        return -1, 0.0
    values, counts = np.unique(tokens, return_counts=True)
    best = int(counts.argmax())
    return int(values[best]), float(counts[best] / len(tokens))


def _ending(b: DocumentBatch) -> TokenConventions:
    """Infer EOS: the last token of most documents that are not cut.

    If that is a line end, EOS is the token before it. A line end is frequent elsewhere, and at the
    end of documents it nearly always follows EOS.
    """
    stops = b.ends[~b.full & (b.ends - b.begins > 1)]
    if b.conventions.eos is not None:  # of the tokenizer
        return replace(b.conventions, tail=_tail(b, stops, b.conventions.eos))
    if len(stops) < _FEWEST:
        return b.conventions
    real = b.inside.copy()
    real[b.stops[b.ends < b.stops] - 1] = False  # targets alone, which may be any token
    candidates = list[tuple[int, Bool, int]]()
    for tail in (0, 1):
        token, _ = _mode(b.ids[stops - 1 - tail])
        has = (b.ids[stops - 1] == token) | (b.ids[stops - 2] == token)
        candidates.append((token, has, int(((b.ids == token) & real).sum())))
    (_, has, everywhere), (_, has_before, _) = candidates
    is_line_end = everywhere >= 2 * len(stops) and _share(has_before[has]) >= _NEARLY_ALL
    token, has, everywhere = candidates[_share(has) < _PLAIN or is_line_end]
    # padding that is inferred from its place may be EOS
    least = _PLAIN if b.conventions.pad is None else NEARLY
    if _share(has) < least or has.sum() < _RARE * everywhere:
        return b.conventions
    b.conventions.evidence["EOS"] = f"{token}, with which documents end"
    return replace(b.conventions, eos=token, tail=_tail(b, stops, token))


def _tail(b: DocumentBatch, stops: Int64, eos: int) -> int:
    """Count the tokens that follow EOS at the ends of most documents, of all kinds or of one.

    Such a token is the line end of a template. A token that documents begin with belongs to the
    next document instead.
    """
    at_end, before = (b.ids[stops - 1 - tail] == eos for tail in (0, 1))
    token, share = _mode(b.ids[stops[before & ~at_end] - 1])
    few = int((before & ~at_end).sum()) < _FEWEST
    is_usual = not few and share >= NEARLY and token != _mode(b.ids[b.begins])[0]
    return int(_share(before) > _PLAIN > _share(at_end) or is_usual)


def _other_ends(b: DocumentBatch) -> tuple[tuple[int, ...], ...]:
    """Infer the ends of kinds of documents that do not end with EOS: a token that is rare in other
    documents, or else several equal tokens.
    """
    unended = b.unended & ~b.full & (b.ends - b.begins >= _ALIKE)
    other_ends = list[tuple[int, ...]]()
    last_tokens, counts = np.unique(b.ids[b.ends[unended] - 1], return_counts=True)
    least = _FEWEST  # if boundaries are certain; else more, which are not equal by chance
    if b.set_.format != "packer":
        least = max(least, min(_MANY, len(b.begins) // 10))
    often = np.argsort(-counts, kind="stable")[: int((counts >= least).sum())][:_ROLES]
    for token in last_tokens[often].tolist():
        with_token = unended & (b.ids[b.ends - 1] == token)
        without = ~with_token & ~b.full
        has = np.unique(b.document_at(np.flatnonzero((b.ids == token) & b.inside)))
        if with_token.sum() >= NEARLY * (with_token.sum() + without[has].sum()):
            other_ends.append((token,))
            continue
        tails = b.ids[b.ends[with_token][:, None] - np.arange(_ALIKE, 0, -1)]
        kinds, numbers = np.unique(tails, axis=0, return_counts=True)
        if int(numbers.max()) >= max(least, _PLAIN * len(tails)):
            other_ends.append(tuple(kinds[int(numbers.argmax())].tolist()))
    return tuple(other_ends)


def _beginning(b: DocumentBatch, conventions: TokenConventions) -> TokenConventions:
    firsts = b.ids[b.begins[b.begun]]
    token, share = _mode(firsts)
    at_begin, everywhere = int((firsts == token).sum()), int((b.ids == token).sum())
    is_plain = len(firsts) >= _FEWEST and share >= _PLAIN and 2 * at_begin >= _RARE * everywhere
    if not is_plain or token == conventions.eos or everywhere - at_begin > _PLAIN * len(firsts):
        return conventions  # with many more elsewhere, it begins every turn
    second, alike = _mode(b.ids[b.begins[b.sizes > 1] + 1])
    if alike >= NEARLY and not _has_roles(second, b):
        return conventions  # it is the first word that every prompt begins with
    conventions.evidence["BOS"] = f"{token}, with which documents begin"
    return replace(conventions, bos=token)


def _shares(b: DocumentBatch) -> TokenConventions:
    step = slice(None, None, max(1, len(b.ids) >> 16))
    inside = b.ids[step][b.inside[step]]
    values, counts = np.unique(inside, return_counts=True)
    firsts = b.ids[b.begins[b.begun]]
    are_unended = b.boundaries and not b.set_.documents and _share(b.unended[~b.full]) > 1 - NEARLY
    masked = (b.masked > (1 - NEARLY) * (b.sizes - 1)) & b.set_.has_labels
    return replace(
        b.conventions,
        ends=_share(b.ended[~b.full]),
        begins=_share(firsts == b.conventions.bos),
        lacks_eos=b.conventions.lacks_eos and bool(are_unended),
        masks=_share(masked),
        header=_header(b),
        common=tuple(values[counts >= _COMMON * len(inside)].tolist()),
    )


def _share(flags: Any) -> float:
    return float(np.mean(flags)) if len(flags) else 0.0


def _header(b: DocumentBatch) -> tuple[int, int] | None:
    """Infer the token that begins the header of every turn, and the token that ends it.

    The first one is where documents begin, or after their BOS, and at least once more in most of
    them. Headers of one role have the same tokens from there on; the shortest of these common
    beginnings ends with the second one.
    """
    for skipped in (0, 1) if b.set_.has_labels else ():
        firsts = b.ids[b.begins[b.sizes > 1] + skipped]
        token, share = _mode(firsts)
        places = np.flatnonzero(b.ids == token)
        often = len(places) >= 1.5 * len(firsts) and len(firsts) >= _FEWEST
        if share >= _MOSTLY and often and _has_roles(token, b):
            end = _header_end(b, places)
            return None if end is None else (token, end)
    return None


def _has_roles(token: int, b: DocumentBatch) -> bool:
    """Return True if few different tokens follow a token, like the roles of a conversation."""
    following = b.ids[1:][b.ids[:-1] == token]
    _, counts = np.unique(following, return_counts=True)
    return bool(np.sort(counts)[-_ROLES:].sum() >= _MOST_ROLES * len(following) > 0)


def _header_end(b: DocumentBatch, places: Int64) -> int | None:
    """Infer the token that ends the headers that begin at `places`."""
    places = places[places + LONGEST_HEADER <= len(b.ids)]
    headers, ends = b.ids[places[:, None] + np.arange(LONGEST_HEADER)], list[tuple[int, int]]()
    for role in np.unique(headers[:, 1]):
        of_role = headers[headers[:, 1] == role]
        if len(of_role) < max(_FEWEST, 0.05 * len(headers)):
            continue
        modes = [_mode(column) for column in of_role.T]
        length = next((at for at, (_, share) in enumerate(modes) if share < NEARLY), len(modes))
        if length > 2:  # the mark, a role and the end
            ends.append((length, modes[length - 1][0]))
    return min(ends)[1] if len(ends) > 1 else None
