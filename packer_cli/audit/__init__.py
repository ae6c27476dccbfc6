"""`packer audit`: what is wrong with a set that anyone made, told from its tokens and labels.

    audit(open_set(name))  ->  Audit: findings with counts and examples, and what was not applied

A look at evenly spread rows tells what the set does (`documents.py`); then all rows are read once,
a few hundred thousand tokens at a time, and every rule looks at them. `RULES` is the table of what
can be wrong. A rule is a function that gives places, int64, in ascending order: of the tokens that
are wrong, or of the first token of what is; the audit counts rows that have one. Rules of all rows
together also settle what was found in the end, by what `Audit` holds: 16 bytes for each of the
first eight million rows, which find duplicates, and otherwise nothing that grows with the set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from packer_cli._kernels.documents import hash_documents
from packer_cli.audit.documents import (
    LISTED,
    LONGEST_HEADER,
    NEARLY,
    TELLING,
    Batch,
    Habits,
    count,
    look,
)
from packer_cli.audit.sets import FORMATS, Set, even_spans, open_set
from packer_cli.packing.plan import Planner
from packer_cli.records import IGNORED, Int64
from packer_cli.result.manifest import TokenizerInfo
from packer_cli.result.wording import plural

__all__ = ["FORMATS", "RULES", "Audit", "Batch", "Finding", "Set", "audit", "look", "open_set"]

Severity = Literal["error", "warning", "note"]
_EXAMPLES, _TOLD, _EMPTIEST = 10, 3, 5
_NONE = np.empty(0, np.int64)
_FEW = 0.1  # share of documents with EOS below which none is expected
_MUCH = 0.25  # of all tokens, for one
_MUCH_PADDING = 0.01  # of rows, beyond what best-fit leaves
_SHARED = 64  # tokens that windows do not share by chance
_MOST_ROWS = 1 << 23  # whose digests are held, 16 bytes each
_MOST_LENGTHS = 1 << 20


@dataclass
class Finding:
    """What a rule found. `rows`: how many have it; `examples`: (row, place in it), the first;
    `earlier`: rows that these are equal to; `more`: words that belong to it.
    """

    rule: str
    severity: Severity
    rows: int = 0
    examples: list[tuple[int, int]] = field(default_factory=list)
    earlier: list[int] = field(default_factory=list)
    more: str = ""

    def as_json(self) -> list[dict[str, int]]:
        """The examples."""
        told = [{"row": row, "place": place} for row, place in self.examples]
        pairs = zip(told, self.earlier, strict=False)
        return [own | {"earlier": row} for own, row in pairs] if self.earlier else told

    def add(self, batch: Batch, places: Int64) -> None:
        """Count the rows of places."""
        if not len(places):
            return
        rows, first = np.unique(batch.rows_at(places), return_index=True)
        self.rows += len(rows)
        few = slice(0, _EXAMPLES - len(self.examples))
        inside = places[first[few]] - batch.offsets[rows[few]]
        self.examples += zip((rows[few] + batch.first).tolist(), inside.tolist(), strict=True)


@dataclass
class Audit:
    """What was read, what is wrong with it, and what rules know of earlier rows.

    set_         that was read, and what its `habits` are
    of           rows of the whole set; `rows`, `documents`, `tokens`: that were read
    findings     errors first
    not_applied  rule -> why
    emptiest     (tokens, row) of the rows with the fewest
    packed       whether a row has several documents
    digests      (digest, number) int64[2, rows] of the first rows
    last         the number of the last row, its tokens, whether each is trained on, and where
                 documents begin
    common       how often each of `Habits.common` is there
    lengths      of the first documents, of which `underfilled` packs rows anew
    cuts, rests  how many documents are cut, and how many are the rest of one
    """

    set_: Set
    habits: Habits
    of: int
    rows: int = 0
    documents: int = 0
    tokens: int = 0
    findings: list[Finding] = field(default_factory=list)
    not_applied: dict[str, str] = field(default_factory=dict)
    emptiest: list[tuple[int, int]] = field(default_factory=list)
    packed: bool = False
    digests: list[Int64] = field(default_factory=list)
    last: tuple[int, bytes, Any, set[int]] = (-2, b"", _NONE, set())
    common: dict[int, int] = field(default_factory=dict)
    lengths: list[Int64] = field(default_factory=list)
    cuts: int = 0
    rests: int = 0

    @property
    def is_sound(self) -> bool:
        return all(one.severity == "note" for one in self.findings)

    def as_json(self) -> dict[str, Any]:
        findings = [
            {
                "rule": one.rule,
                "severity": one.severity,
                "rows": one.rows,
                "share": one.rows / max(self.rows, 1),
                "examples": one.as_json(),
            }
            for one in self.findings
        ]
        figures = {"rows": self.rows, "documents": self.documents, "tokens": self.tokens}
        return {"format": self.set_.format, **figures, "findings": findings,
                "not_applied": self.not_applied, "left_out": [*self.set_.left_out]}  # fmt: skip

    def add(self, batch: Batch) -> None:
        """Count what was read."""
        self.rows += batch.rows
        self.documents += int((batch.ended if self.habits.flows else batch.begun).sum())
        self.tokens += int(batch.sizes.sum())
        self.packed |= len(batch.begins) > batch.rows
        least = np.argsort(batch.filled, kind="stable")[:_EMPTIEST]
        rows = zip(batch.filled[least].tolist(), (least + batch.first).tolist(), strict=True)
        self.emptiest = sorted([*self.emptiest, *rows])[:_EMPTIEST]


def audit(
    set_: Set,
    tokenizer: TokenizerInfo | None = None,
    *,
    max_length: int | None = None,
    sample: int | None = None,
) -> Audit:
    """Read a set, or `sample` rows of it, evenly spread, and apply every rule.

    `tokenizer`: tells EOS, BOS, padding and the vocabulary, in place of what the set says.
    `max_length`: tokens of a full row. Raises DataError for what cannot be read.
    """
    habits = look(set_, tokenizer, max_length)
    result = Audit(set_, habits, set_.rows)
    result.not_applied = {
        name: why for name, rule in RULES.items() if (why := _lacks(rule, result))
    }
    found = {
        name: Finding(name, "warning" if name in set_.meaning.weaker else rule.severity,
                      more=set_.meaning.weaker.get(name, ""))
        for name, rule in RULES.items() if name not in result.not_applied
    }  # fmt: skip
    for raw in set_.read(even_spans(set_.rows, sample or set_.rows)):
        batch, shifted = Batch(raw, set_, habits), _NONE
        result.add(batch)
        for name, finding in found.items():
            places = RULES[name].find(batch, result)
            if name == "labels-shifted":
                shifted = batch.rows_at(places)
            elif len(shifted) and "labels" in RULES[name].needs:  # of such a row, all are wrong
                places = places[~np.isin(batch.rows_at(places), shifted)]
            finding.add(batch, places)
    for name in found:
        RULES[name].settle(found, result)
    order = ("error", "warning", "note")
    result.findings = sorted((one for one in found.values() if one.rows),
                             key=lambda one: order.index(one.severity))  # fmt: skip
    return result


# --- ends and beginnings of documents


def no_eos(b: Batch, result: Audit) -> Int64:
    places: Int64 = b.last[b.bare & ~b.full]
    return places


def is_rare(found: dict[str, Finding], result: Audit) -> None:
    if result.habits.ends < _FEW:
        own, share = found["no-eos"], f"{result.habits.ends:.0%} of the documents have it"
        own.severity, own.more = "warning", share


def eos_untrained(b: Batch, result: Audit) -> Int64:
    last = b.last[b.ended & (b.last > b.begins)]
    return last[b.trained[last - 1] & ~b.trained[last]]


def eos_inside(b: Batch, result: Audit) -> Int64:
    places = np.flatnonzero(b.ids == b.habits.eos)
    document = b.document_at(places)
    is_inside = (document >= 0) & (places < np.minimum(b.last, b.stops - 1)[document])
    return places[is_inside]


def bos_missing(b: Batch, result: Audit) -> Int64:
    places: Int64 = b.begins[b.begun & (b.ids[b.begins] != b.habits.bos)]
    result.rests += 0 if "segments" in b.set_.names else len(places)
    return places


def bos_doubled(b: Batch, result: Audit) -> Int64:
    begins = b.begins[b.sizes > 1]
    both = (b.ids[begins] == b.habits.bos) & (b.ids[begins + 1] == b.habits.bos)
    places: Int64 = begins[both] + 1
    return places


def cut(b: Batch, result: Audit) -> Int64:
    places = b.last[b.bare & b.full]
    result.cuts += len(places)
    result.rests += int((~b.begun).sum())
    return places


def goes_on(found: dict[str, Finding], result: Audit) -> None:
    """Documents that are cut go on where as many begin inside, which `segments` or BOS tells."""
    own, bos, cuts = found["cut"], found.get("bos-missing"), result.cuts
    own.more, of_packer = plural(cuts, "document"), "segments" in result.set_.names
    if result.rows < result.of or (bos is None and not of_packer):
        why = "a sample does not tell" if result.rows < result.of else "without BOS nothing tells"
        own.severity, own.more = "note", f"{own.more}; {why} whether they go on"
        if bos is not None and cuts and not of_packer:
            bos.severity, bos.more = "note", "some may be the rest of a document that is cut"
    elif cuts <= result.rests if of_packer else cuts == result.rests:
        own.rows = 0
        if bos is not None and not of_packer:
            bos.rows = 0


# --- what is trained on


def untrained_row(b: Batch, result: Audit) -> Int64:
    return b.rows_where((b.labels_in == 0) & (b.filled > 1))


def untrained_document(b: Batch, result: Audit) -> Int64:
    least = 2 + b.spare  # tokens, of which one can have a label
    wrong = (b.labels_of == 0) & (b.sizes >= least) & (b.labels_in[b.row_of] > 0)
    if "segments" in b.set_.names:  # the other pieces may have labels
        wrong &= b.begun & ~b.full
    places: Int64 = b.begins[wrong]
    return places


def all_trained(b: Batch, result: Audit) -> Int64:
    wrong = (b.masked <= 0) & (b.labels_of > 1) & b.begun
    if b.habits.header is not None:
        wrong &= count(b.ids == b.habits.header[0], b.begins, b.stops) > 1
    places: Int64 = b.begins[wrong]
    return places


def labels_shifted(b: Batch, result: Audit) -> Int64:
    is_own = b.set_.meaning.shift == "own"
    if is_own and not len(b.others):
        return _NONE
    labelled, own = b.labels != IGNORED, b.labels == b.ids
    labelled[b.offsets[1:][np.diff(b.offsets) > 0] - 1] = False  # what comes next is not there
    following = np.append(b.labels[:-1] == b.ids[1:], False)
    flags = (labelled, labelled & own, labelled & following)
    number, of_own, of_next = map(b.by_row, flags)
    right, wrong = (of_own, of_next) if is_own else (of_next, of_own)
    return b.rows_where((number > 0) & (wrong >= NEARLY * number) & (right < NEARLY * number))


def labels_differ(b: Batch, result: Audit) -> Int64:
    places = b.others
    is_last = np.isin(places + 1, b.offsets)
    following = b.ids[np.minimum(places + 1, len(b.ids) - 1)]
    allowed = np.where(is_last, b.set_.meaning.shift == "next", b.labels[places] == following)
    return places[~allowed]


def cross_document_target(b: Batch, result: Audit) -> Int64:
    behind = np.flatnonzero((b.begins[1:] == b.stops[:-1]) & ~b.lasts[:-1]) + 1
    places: Int64 = b.begins[behind]
    return places[b.trained[places]]


def padding_trained(b: Batch, result: Audit) -> Int64:
    return np.flatnonzero(b.trained & ~b.inside)


def _spans(b: Batch) -> tuple[Int64, Int64, Int64]:
    """(begins of trained spans of documents that are not all trained; the place of the last header
    before each, in its document, or -1; where that header ends).
    """
    assert b.habits.header is not None  # noqa: S101 `needs`
    before = np.append(False, b.trained[:-1])
    before[b.begins] = False
    spans = np.flatnonzero(b.trained & ~before)
    document = b.document_at(spans)
    partly = (document >= 0) & (b.masked[document] > 0)
    spans, document = spans[partly], document[partly]
    marks = np.append(-1, np.flatnonzero(b.ids == b.habits.header[0]))
    ends = np.append(np.flatnonzero(b.ids == b.habits.header[1]), len(b.ids))
    mark = marks[np.searchsorted(marks, spans, side="right") - 1]
    end = ends[np.searchsorted(ends, mark)] + 1
    mark[(mark < b.begins[document]) | (end > b.stops[document])] = -1
    return spans, mark, end


def header_trained(b: Batch, result: Audit) -> Int64:
    spans, mark, _ = _spans(b)
    places: Int64 = spans[spans == mark]
    return places


def header_partly_trained(b: Batch, result: Audit) -> Int64:
    spans, mark, end = _spans(b)
    partly = (spans > mark) & (spans < end) & (end - mark <= LONGEST_HEADER)
    places: Int64 = spans[(mark >= 0) & (partly | (spans == end + 1))]
    return places


# --- boundaries


def boundaries_disagree(b: Batch, result: Audit) -> Int64:
    told = b.told.values() if len(b.told) > 1 else ()
    inner = [np.setdiff1d(one, b.offsets) for one in told]
    inner = [one[one < b.used[b.rows_at(one)]] for one in inner]
    found = [_NONE, *(np.setxor1d(inner[0], other) for other in inner[1:])]
    if b.told and b.habits.eos is not None and b.habits.ends >= _FEW and not b.set_.documents:
        # documents without EOS, where EOS is inside another one of the row
        bare = np.flatnonzero(b.bare & ~b.lasts)
        rows = b.rows_at(eos_inside(b, result)) if len(bare) else _NONE
        found.append(b.begins[bare[np.isin(b.row_of[bare], rows)] + 1])
    if b.real is not None:
        found.append(np.flatnonzero(b.inside != b.real))
    elif {*b.told} & {*LISTED} and "attention_mask" in b.set_.names:  # of ones, without padding
        found.append(np.flatnonzero(~b.inside))
    return np.unique(np.concatenate(found))


# --- tokens and rows


def ids_out_of_range(b: Batch, result: Audit) -> Int64:
    most = b.habits.vocabulary or np.iinfo(np.int64).max
    if not len(b.ids) or (int(b.ids.min()) >= 0 and int(b.ids.max()) < most):
        return _NONE
    return np.flatnonzero((b.ids < 0) | (b.ids >= most))


def dominant_token(b: Batch, result: Audit) -> Int64:
    found = [_NONE]
    used = np.bincount(b.row_of, b.sizes, b.rows)
    for token in b.habits.common:
        counts = b.by_row((b.ids == token) & b.inside)
        result.common[token] = result.common.get(token, 0) + int(counts.sum())
        found.append(b.rows_where(counts > _MUCH * np.maximum(used, 1)))
    return np.unique(np.concatenate(found))


def is_much(found: dict[str, Finding], result: Audit) -> None:
    own, tokens = found["dominant-token"], max(result.tokens, 1)
    shares = {token: number / tokens for token, number in result.common.items()}
    much = [f"{share:.1%} are {token}" for token, share in shares.items() if share > _MUCH]
    own.more, own.rows = ", ".join(much), own.rows if much else 0


def duplicate_rows(b: Batch, result: Audit) -> Int64:
    """No place: all rows together tell."""
    if result.rows - b.rows < _MOST_ROWS:
        words = np.ascontiguousarray(b.ids).view(np.uint32)
        edges = np.stack([b.offsets[:-1], b.used], axis=1).reshape(-1)
        edges = np.append(edges, len(b.ids)) * (b.ids.itemsize // words.itemsize)
        digests = np.empty((len(edges) - 1, 2), np.uint64)  # of rows, and of what is behind them
        hash_documents(words, edges, digests)
        both = np.stack([digests[::2, 0].view(np.int64), b.first + np.arange(b.rows)])
        result.digests.append(both[:, b.filled > 0])
    return _NONE


def repeated(found: dict[str, Finding], result: Audit) -> None:
    own, (digests, numbers) = found["duplicate-rows"], np.concatenate(result.digests, axis=1)
    order = np.argsort(digests, kind="stable")
    _, begins, counts = np.unique(digests[order], return_index=True, return_counts=True)
    earlier = np.repeat(numbers[order[begins]], counts)  # the first row of as many as are equal
    again = numbers[order] > earlier
    own.rows = int(again.sum())
    rows = numbers[order][again]
    few = np.argsort(rows)[:_EXAMPLES]
    own.earlier = earlier[again][few].tolist()
    own.examples = [(row, 0) for row in rows[few].tolist()]
    pairs = zip(own.examples, own.earlier, strict=True)
    told = [f"row {row} is row {first}" for (row, _), first in pairs][:_TOLD]
    told += [f"among the first {_MOST_ROWS:,} rows"] * (result.rows > _MOST_ROWS)
    own.more = ", ".join(told)


def overlap(b: Batch, result: Audit) -> Int64:
    """Rows that begin with at least _SHARED tokens with which the row before them ends, whatever
    BOS is before and EOS behind that, if some of these are trained on twice.

    A document that is there again from its beginning is not a window, nor is a piece of a document
    whose place packer's `segments` tell.
    """
    width, found = b.ids.itemsize, list[int]()
    bos, eos = (
        b"" if one is None else np.array([one], b.ids.dtype).tobytes()
        for one in (b.habits.bos, b.habits.eos)
    )
    number, before, before_trained, before_begins = result.last
    if number != b.first - 1:
        before = b""
    data, is_piece = b.ids.tobytes(), "segments" in b.set_.names
    trained = b.trained if b.set_.says_what_is_trained else np.ones(len(b.ids), bool)
    documents = np.searchsorted(b.row_of, np.arange(b.rows + 1))
    edges = np.stack([b.offsets[:-1], b.used, documents[:-1], documents[1:]], axis=1)
    for row, (begin, stop, first, last) in enumerate(edges.tolist()):
        own = data[begin * width : stop * width].removeprefix(bos)
        flags = trained[stop - len(own) // width : stop]
        at = _shared_from(before, own, width)
        twice = before_trained[at:] & flags[: len(before) // width - at] if at else _NONE
        is_new = first == last or b.begun[first] or not is_piece
        if twice.any() and at not in before_begins and is_new:
            found.append(row)
        before = own[: len(own) - b.spare * width]
        if b.habits.tail and before[:-width].endswith(eos):
            before = before[:-width]
        while eos and before.endswith(eos):
            before = before[:-width]
        before_trained = flags[: len(before) // width]
        before_begins = b.begins[first:last] - (stop - len(flags))
        before_begins = {*before_begins.tolist(), *(before_begins + len(bos) // width).tolist()}
    result.last = b.first + b.rows - 1, before, before_trained, before_begins
    return b.offsets[found]


def _shared_from(before: bytes, row: bytes, width: int) -> int:
    """The place, behind its first token, from which on a row ends with what the next one begins
    with, at least _SHARED tokens; 0 if there is none, or several, as in text that repeats itself.
    """
    head, at, found = row[: _SHARED * width], 0, 0
    if len(head) < _SHARED * width:
        return 0
    for _ in range(_SHARED):  # so many places at most: a token may be everywhere
        at = before.find(head, at + 1)
        if at < 0:
            break
        if not at % width and row.startswith(before[at:]):
            if found:
                return 0
            found = at // width
    return found


def underfilled(b: Batch, result: Audit) -> Int64:
    if result.documents - len(b.sizes) < _MOST_LENGTHS:
        result.lengths.append(b.sizes)
    return b.rows_where(b.filled < (b.habits.length or 0))


def best_fit(found: dict[str, Finding], result: Audit) -> None:
    """How many rows best-fit needs for the documents, or for the first million of them."""
    own, length = found["underfilled"], int(result.habits.length or 0)
    lengths = np.concatenate(result.lengths)
    kept = lengths[lengths <= length].astype(np.int32)
    if not result.packed or not len(kept):
        own.rows = 0
        return
    planned = len(Planner(length, "best-fit").rows(kept, 0).row_offsets) - 1
    needed = planned * result.tokens / max(int(kept.sum(dtype=np.int64)), 1)
    saved = result.rows - needed
    own.more = f"best-fit needs {needed:,.0f} rows, {saved / result.rows:.1%} fewer"
    if saved <= max(1.0, _MUCH_PADDING * result.rows):
        own.rows = 0


# --- the table


class Rule(NamedTuple):
    """A rule. `needs`: what must be told, see `_lacks`; `settle`: what all rows together tell."""

    find: Callable[[Batch, Audit], Int64]
    severity: Severity
    needs: tuple[str, ...]
    means: str
    todo: str
    settle: Callable[[dict[str, Finding], Audit], None] = lambda found, result: None

    @property
    def name(self) -> str:
        return self.find.__name__.replace("_", "-")


RULES = {rule.name: rule for rule in (
    Rule(labels_shifted, "error", ("label values",),
         "labels are one place off for the trainers of this format: a model learns to repeat the "
         "token that it is given, or the one after the next",
         "write labels as the format has them, or name the right one with --format"),
    Rule(no_eos, "error", ("EOS", "EOS at ends, or expected"),
         "documents do not end with EOS, as others do, or as the tokenizer ends them: a model "
         "learns not to stop",
         "add EOS where records are tokenized, and cut records before that", is_rare),
    Rule(eos_untrained, "error", ("EOS", "labels"),
         "EOS after a trained answer is not trained: a model never learns to stop",
         "train on the EOS of answers, and do not mask padding by its id if that is EOS"),
    Rule(bos_missing, "error", ("BOS", "BOS at beginnings"),
         "documents begin without BOS, which the tokenizer adds, or most others have",
         "tokenize with special tokens, once"),
    Rule(bos_doubled, "error", ("BOS",),
         "documents begin with BOS twice, as no text does when the model is used",
         "tokenize texts of a chat template with add_special_tokens=False"),
    Rule(untrained_row, "error", ("labels",),
         "no token of the row has a label: its loss is 0 or not a number",
         "drop these rows, or cut prompts so that the answer stays"),
    Rule(untrained_document, "error", ("labels",),
         "no token of the document has a label: it takes room and teaches nothing",
         "drop these documents before they are packed"),
    Rule(cross_document_target, "error", ("labels", "boundaries"),
         "the last token of a document predicts the first one of another",
         "give the first token of each document the label -100"),
    Rule(boundaries_disagree, "error", ("boundaries",),
         "columns, or a column and the ends of documents, tell other boundaries: attention and "
         "positions do not fit the documents",
         "make all columns of one list of lengths"),
    Rule(padding_trained, "error", ("labels", "padding"),
         "padding has labels: a model learns to write it",
         "give padding the label -100, by its place and not by its id"),
    Rule(labels_differ, "error", ("label values",),
         "labels are neither -100 nor the token of this or the next place",
         "make labels of input_ids, after all that changes these"),
    Rule(ids_out_of_range, "error", (),
         "ids are negative or beyond the vocabulary: training stops, or reads other memory",
         "tokenize again, with the tokenizer of the model"),
    Rule(dominant_token, "error", (),
         "one token makes up more than a quarter of all",
         "look whether it is <unk> or padding: the tokenizer does not fit the text, or padding "
         "counts as text", is_much),
    Rule(header_trained, "error", ("labels", "headers"),
         "the header of a turn is trained, which is given when the model is used",
         "begin the labels behind the header"),
    Rule(header_partly_trained, "error", ("labels", "headers"),
         "a part of a turn's header is trained, or the first token of an answer is not",
         "find where answers begin by tokens, not by lengths of texts tokenized apart"),
    Rule(all_trained, "warning", ("labels", "conversations"),
         "conversations have nothing masked: a model learns to write prompts, too",
         "mask all but the answers, or leave it if this is meant"),
    Rule(cut, "warning", ("EOS", "EOS at ends", "length", "ends of rows"),
         "documents end without EOS exactly where the row ends, and go on nowhere",
         "drop or split what is longer than a row, or use longer rows", goes_on),
    Rule(duplicate_rows, "warning", (),
         "rows are equal to an earlier one", "remove duplicates before packing", repeated),
    Rule(overlap, "warning", (),
         "windows begin with the end of the one before: these tokens are trained twice",
         "cut long documents without a stride"),
    Rule(eos_inside, "warning", ("EOS", "EOS tells"),
         "EOS is inside documents, and the trainer takes it for their end",
         "use another token between turns, or leave it out there"),
    Rule(underfilled, "note", ("length", "packed"),
         "rows have more padding than best-fit packing leaves",
         "pack with best-fit, over more documents at a time", best_fit),
)}  # fmt: skip


def _lacks(rule: Rule, result: Audit) -> str:
    """Why a rule is not applied, by the first of its needs that is not there; or ""."""
    set_, habits = result.set_, result.habits
    names, is_named = {*set_.names}, habits.vocabulary is not None
    no_ends = habits.ends < _FEW and (
        f"{habits.ends:.0%} of the documents end with EOS, {habits.eos}"
    )
    absent: dict[str, str | Literal[False]] = {
        "EOS": habits.eos is None and ("the tokenizer has no EOS" if is_named
        else "EOS is not told by the set: give --tokenizer"),
        "BOS": habits.bos is None and ("the tokenizer has no BOS" if is_named
        else "BOS is not told by the set: give --tokenizer, if it has one"),
        "EOS at ends": no_ends,
        "EOS at ends, or expected": not habits.lacks_eos and no_ends,
        "BOS at beginnings": not habits.adds_bos and habits.begins < 0.5
        and f"{habits.begins:.0%} of the documents begin with BOS, {habits.bos}",
        "labels": not set_.says_what_is_trained and "no column says what is trained on",
        "label values": "labels" not in names and "there is no column labels",
        "boundaries": not names & {*TELLING} and "no column tells boundaries",
        "padding": habits.pad is None and not habits.masked
        and not names & {"cu_seqlens", "seq_lengths", "seq_lens", "position_ids"}
        and "no padding is told, by a column or its place",
        "headers": habits.header is None and "no token is told that begins every turn",
        "conversations": habits.header is None and habits.masks < NEARLY
        and "no conversations are told: no token begins every turn, and not nearly all documents "
        "have a part that is not trained on",
        "length": habits.length is None and "rows have no length of their own: give --max-length",
        "ends of rows": habits.flows and "documents flow on into the next row",
        "EOS tells": not set_.meaning.by_eos and "EOS does not tell boundaries in this format",
        "packed": set_.documents and "rows are documents, not packed yet",
    }  # fmt: skip
    return next((why for need in rule.needs if (why := absent[need])), "")
