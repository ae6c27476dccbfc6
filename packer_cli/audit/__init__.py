"""`packer audit`: find what is wrong with a set of any tool, from its tokens and labels.

    audit(open_set(name))  ->  Audit: findings with counts and examples, and rules not applied

A sample of evenly spread rows shows the conventions of the set (`documents.py`). Then all rows are
read once, a few hundred thousand tokens at a time, and every rule checks them. `RULES` is the table
of rules. A rule is a function that returns places, int64, in ascending order: wrong tokens, or the
first token of a wrong document or row; the audit counts the rows with one. A rule may also have a
function that concludes from all rows together. Memory does not grow with the set, except 16 bytes
for each of the first eight million rows, to find duplicates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from packer_cli._kernels.documents import hash_documents
from packer_cli.audit.documents import (
    BOUNDARY_COLUMNS,
    LENGTH_COLUMNS,
    LONGEST_HEADER,
    NEARLY,
    DocumentBatch,
    TokenConventions,
    count,
    infer_conventions,
)
from packer_cli.audit.sets import FORMATS, AuditedSet, even_spans, open_set
from packer_cli.packing.plan import Planner
from packer_cli.records import IGNORED, Int64
from packer_cli.result.manifest import TokenizerInfo
from packer_cli.result.wording import plural

__all__ = [
    "FORMATS",
    "RULES",
    "Audit",
    "DocumentBatch",
    "Finding",
    "AuditedSet",
    "audit",
    "infer_conventions",
    "open_set",
]

Severity = Literal["error", "warning", "note"]
_EXAMPLES, _NAMED, _EMPTIEST = 10, 3, 5
_NONE = np.empty(0, np.int64)
_FEW = 0.1  # share of documents with EOS below which none is expected
_MUCH = 0.25  # of all tokens, for one
_MUCH_PADDING = 0.01  # of rows, more than best-fit leaves
_SHARED = 64  # tokens: as many are not equal by chance
_MOST_ROWS = 1 << 23  # digests in memory, 16 bytes each
_MOST_LENGTHS = 1 << 20


@dataclass
class Finding:
    """Rows that break a rule.

    rows      their number
    examples  (row, place in it) of the first ones
    earlier   for duplicates, the row that each example is equal to
    detail    words to append to the rule's explanation
    """

    rule: str
    severity: Severity
    rows: int = 0
    examples: list[tuple[int, int]] = field(default_factory=list)
    earlier: list[int] = field(default_factory=list)
    detail: str = ""

    def as_json(self) -> list[dict[str, int]]:
        """Return the examples."""
        examples = [{"row": row, "place": place} for row, place in self.examples]
        if not self.earlier:
            return examples
        pairs = zip(examples, self.earlier, strict=False)
        return [example | {"earlier": row} for example, row in pairs]

    def add(self, batch: DocumentBatch, places: Int64) -> None:
        """Count the rows of places int64, and keep the first examples."""
        if not len(places):
            return
        rows, first = np.unique(batch.rows_at(places), return_index=True)
        self.rows += len(rows)
        few = slice(0, _EXAMPLES - len(self.examples))
        inside = places[first[few]] - batch.offsets[rows[few]]
        self.examples += zip((rows[few] + batch.first).tolist(), inside.tolist(), strict=True)


@dataclass
class Audit:
    """Findings in a set, its figures, and the state of rules between batches of rows.

    set_         the set, with its `conventions`
    of           rows of the whole set; `rows`, `documents` and `tokens` count those that were read
    findings     errors first
    not_applied  rule -> the reason
    emptiest     (tokens, row) of the rows with the fewest tokens
    packed       True if a row has several documents
    digests      (digest, number) int64[2, rows] of the first rows
    last         the last row: its number, tokens, trained flags, and beginnings of documents
    common       token of `TokenConventions.common` -> its count
    lengths      of the first documents, which `underfilled` packs anew
    cuts, rests  numbers of documents that are cut, and that are the rest of another
    """

    set_: AuditedSet
    conventions: TokenConventions
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
    def is_clean(self) -> bool:
        """True without errors and warnings."""
        return all(finding.severity == "note" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Return the object of `--json`."""
        findings = [
            {
                "rule": finding.rule,
                "severity": finding.severity,
                "rows": finding.rows,
                "share": finding.rows / max(self.rows, 1),
                "examples": finding.as_json(),
            }
            for finding in self.findings
        ]
        figures = {"rows": self.rows, "documents": self.documents, "tokens": self.tokens}
        return {"format": self.set_.format, **figures, "findings": findings,
                "not_applied": self.not_applied, "left_out": [*self.set_.left_out]}  # fmt: skip

    def add(self, batch: DocumentBatch) -> None:
        """Count a batch that was read."""
        self.rows += batch.rows
        self.documents += int((batch.ended if self.conventions.is_stream else batch.begun).sum())
        self.tokens += int(batch.sizes.sum())
        self.packed |= len(batch.begins) > batch.rows
        least = np.argsort(batch.filled, kind="stable")[:_EMPTIEST]
        rows = zip(batch.filled[least].tolist(), (least + batch.first).tolist(), strict=True)
        self.emptiest = sorted([*self.emptiest, *rows])[:_EMPTIEST]


def audit(
    set_: AuditedSet,
    tokenizer: TokenizerInfo | None = None,
    *,
    max_length: int | None = None,
    sample: int | None = None,
) -> Audit:
    """Read a set and apply every rule.

    tokenizer   EOS, BOS, padding and vocabulary, in place of the set's
    max_length  tokens of a full row; None: inferred
    sample      read so many evenly spread rows; None: all

    Raises DataError for files that cannot be read.
    """
    conventions = infer_conventions(set_, tokenizer, max_length)
    result = Audit(set_, conventions, set_.rows)
    findings = dict[str, Finding]()
    for name, rule in RULES.items():
        if reason := _missing_need(rule, result):
            result.not_applied[name] = reason
        else:
            detail = set_.meaning.weaker.get(name, "")
            severity: Severity = "warning" if detail else rule.severity
            findings[name] = Finding(name, severity, detail=detail)
    for raw in set_.read(even_spans(set_.rows, sample or set_.rows)):
        batch, shifted = DocumentBatch(raw, set_, conventions), _NONE
        result.add(batch)
        for name, finding in findings.items():
            places = RULES[name].find(batch, result)
            if name == "labels-shifted":
                shifted = batch.rows_at(places)
            elif len(shifted) and "labels" in RULES[name].needs:  # all labels of the row are wrong
                places = places[~np.isin(batch.rows_at(places), shifted)]
            finding.add(batch, places)
    for name in findings:
        RULES[name].conclude(findings, result)
    order: list[Severity] = ["error", "warning", "note"]
    broken = [finding for finding in findings.values() if finding.rows]
    result.findings = sorted(broken, key=lambda finding: order.index(finding.severity))
    return result


# --- ends and beginnings of documents


def no_eos(b: DocumentBatch, result: Audit) -> Int64:
    places: Int64 = b.last[b.unended & ~b.full]
    return places


def is_rare(findings: dict[str, Finding], result: Audit) -> None:
    if result.conventions.ends < _FEW:
        finding = findings["no-eos"]
        finding.severity = "warning"
        finding.detail = f"{result.conventions.ends:.0%} of the documents have it"


def eos_untrained(b: DocumentBatch, result: Audit) -> Int64:
    last = b.last[b.ended & (b.last > b.begins)]
    return last[b.trained[last - 1] & ~b.trained[last]]


def eos_inside(b: DocumentBatch, result: Audit) -> Int64:
    places = np.flatnonzero(b.ids == b.conventions.eos)
    document = b.document_at(places)
    is_inside = (document >= 0) & (places < np.minimum(b.last, b.stops - 1)[document])
    return places[is_inside]


def bos_missing(b: DocumentBatch, result: Audit) -> Int64:
    places: Int64 = b.begins[b.begun & (b.ids[b.begins] != b.conventions.bos)]
    result.rests += 0 if "segments" in b.set_.names else len(places)
    return places


def bos_doubled(b: DocumentBatch, result: Audit) -> Int64:
    begins = b.begins[b.sizes > 1]
    both = (b.ids[begins] == b.conventions.bos) & (b.ids[begins + 1] == b.conventions.bos)
    places: Int64 = begins[both] + 1
    return places


def cut(b: DocumentBatch, result: Audit) -> Int64:
    places = b.last[b.unended & b.full]
    result.cuts += len(places)
    result.rests += int((~b.begun).sum())
    return places


def goes_on(findings: dict[str, Finding], result: Audit) -> None:
    """Clear the finding if, by `segments` or BOS, as many documents go on as are cut."""
    finding, bos, cuts = findings["cut"], findings.get("bos-missing"), result.cuts
    finding.detail, of_packer = plural(cuts, "document"), "segments" in result.set_.names
    if result.rows < result.of or (bos is None and not of_packer):
        why = "in a sample" if result.rows < result.of else "without BOS"
        finding.severity = "note"
        finding.detail += f"; {why} it is unknown if they go on in another row"
        if bos is not None and cuts and not of_packer:
            bos.severity, bos.detail = "note", "some may be the rest of a document that is cut"
    elif cuts <= result.rests if of_packer else cuts == result.rests:
        finding.rows = 0
        if bos is not None and not of_packer:
            bos.rows = 0


# --- trained tokens


def untrained_row(b: DocumentBatch, result: Audit) -> Int64:
    return b.rows_where((b.labels_in == 0) & (b.filled > 1))


def untrained_document(b: DocumentBatch, result: Audit) -> Int64:
    least = 2 + b.padded_targets  # tokens of a document that can have a label
    wrong = (b.labels_of == 0) & (b.sizes >= least) & (b.labels_in[b.row_of] > 0)
    if "segments" in b.set_.names:  # the other pieces may have labels
        wrong &= b.begun & ~b.full
    places: Int64 = b.begins[wrong]
    return places


def all_trained(b: DocumentBatch, result: Audit) -> Int64:
    wrong = (b.masked <= 0) & (b.labels_of > 1) & b.begun
    if b.conventions.header is not None:
        wrong &= count(b.ids == b.conventions.header[0], b.begins, b.stops) > 1
    places: Int64 = b.begins[wrong]
    return places


def labels_shifted(b: DocumentBatch, result: Audit) -> Int64:
    is_own = b.set_.meaning.shift == "own"
    if is_own and not len(b.odd_labels):
        return _NONE
    labelled = b.labels != IGNORED
    labelled[b.offsets[1:][np.diff(b.offsets) > 0] - 1] = False  # the next token is in another row
    equal_next = np.append(b.labels[:-1] == b.ids[1:], False)
    flags = (labelled, labelled & (b.labels == b.ids), labelled & equal_next)
    number, of_own, of_next = map(b.by_row, flags)
    right, wrong = (of_own, of_next) if is_own else (of_next, of_own)
    return b.rows_where((number > 0) & (wrong >= NEARLY * number) & (right < NEARLY * number))


def labels_differ(b: DocumentBatch, result: Audit) -> Int64:
    places = b.odd_labels
    is_last = np.isin(places + 1, b.offsets)
    following = b.ids[np.minimum(places + 1, len(b.ids) - 1)]
    allowed = np.where(is_last, b.set_.meaning.shift == "next", b.labels[places] == following)
    return places[~allowed]


def cross_document_target(b: DocumentBatch, result: Audit) -> Int64:
    behind = np.flatnonzero((b.begins[1:] == b.stops[:-1]) & ~b.is_last[:-1]) + 1
    places: Int64 = b.begins[behind]
    return places[b.trained[places]]


def padding_trained(b: DocumentBatch, result: Audit) -> Int64:
    return np.flatnonzero(b.trained & ~b.inside)


def _spans(b: DocumentBatch) -> tuple[Int64, Int64, Int64]:
    """Return (begins of trained spans in partly trained documents, places of the last header before
    each in its document or -1, ends of these headers).
    """
    assert b.conventions.header is not None  # noqa: S101 `needs`
    before = np.append(False, b.trained[:-1])
    before[b.begins] = False
    spans = np.flatnonzero(b.trained & ~before)
    document = b.document_at(spans)
    partly = (document >= 0) & (b.masked[document] > 0)
    spans, document = spans[partly], document[partly]
    marks = np.append(-1, np.flatnonzero(b.ids == b.conventions.header[0]))
    ends = np.append(np.flatnonzero(b.ids == b.conventions.header[1]), len(b.ids))
    mark = marks[np.searchsorted(marks, spans, side="right") - 1]
    end = ends[np.searchsorted(ends, mark)] + 1
    mark[(mark < b.begins[document]) | (end > b.stops[document])] = -1
    return spans, mark, end


def header_trained(b: DocumentBatch, result: Audit) -> Int64:
    spans, mark, _ = _spans(b)
    places: Int64 = spans[spans == mark]
    return places


def header_partly_trained(b: DocumentBatch, result: Audit) -> Int64:
    spans, mark, end = _spans(b)
    partly = (spans > mark) & (spans < end) & (end - mark <= LONGEST_HEADER)
    places: Int64 = spans[(mark >= 0) & (partly | (spans == end + 1))]
    return places


# --- boundaries


def boundaries_disagree(b: DocumentBatch, result: Audit) -> Int64:
    inner = [np.setdiff1d(begins, b.offsets) for begins in b.boundaries.values()]
    inner = [begins[begins < b.used[b.rows_at(begins)]] for begins in inner]
    places = [_NONE, *(np.setxor1d(inner[0], begins) for begins in inner[1:])]
    if (
        b.boundaries
        and b.conventions.eos is not None
        and b.conventions.ends >= _FEW
        and not b.set_.documents
    ):
        # documents without EOS, if EOS is inside another document of the row
        unended = np.flatnonzero(b.unended & ~b.is_last)
        rows = b.rows_at(eos_inside(b, result)) if len(unended) else _NONE
        places.append(b.begins[unended[np.isin(b.row_of[unended], rows)] + 1])
    if b.real is not None:
        places.append(np.flatnonzero(b.inside != b.real))
    elif {*b.boundaries} & {
        *LENGTH_COLUMNS
    } and "attention_mask" in b.set_.names:  # of ones, without padding
        places.append(np.flatnonzero(~b.inside))
    return np.unique(np.concatenate(places))


# --- tokens and rows


def ids_out_of_range(b: DocumentBatch, result: Audit) -> Int64:
    most = b.conventions.vocabulary or np.iinfo(np.int64).max
    if not len(b.ids) or (int(b.ids.min()) >= 0 and int(b.ids.max()) < most):
        return _NONE
    return np.flatnonzero((b.ids < 0) | (b.ids >= most))


def dominant_token(b: DocumentBatch, result: Audit) -> Int64:
    places = [_NONE]
    used = np.bincount(b.row_of, b.sizes, b.rows)
    for token in b.conventions.common:
        counts = b.by_row((b.ids == token) & b.inside)
        result.common[token] = result.common.get(token, 0) + int(counts.sum())
        places.append(b.rows_where(counts > _MUCH * np.maximum(used, 1)))
    return np.unique(np.concatenate(places))


def is_much(findings: dict[str, Finding], result: Audit) -> None:
    finding, tokens = findings["dominant-token"], max(result.tokens, 1)
    shares = {token: number / tokens for token, number in result.common.items()}
    dominant = [f"{share:.1%} are {token}" for token, share in shares.items() if share > _MUCH]
    finding.detail, finding.rows = ", ".join(dominant), finding.rows if dominant else 0


def duplicate_rows(b: DocumentBatch, result: Audit) -> Int64:
    """Return no place: only all rows together show duplicates."""
    if result.rows - b.rows < _MOST_ROWS:
        words = np.ascontiguousarray(b.ids).view(np.uint32)
        edges = np.stack([b.offsets[:-1], b.used], axis=1).reshape(-1)
        edges = np.append(edges, len(b.ids)) * (b.ids.itemsize // words.itemsize)
        digests = np.empty((len(edges) - 1, 2), np.uint64)  # of rows, and of the padding of each
        hash_documents(words, edges, digests)
        both = np.stack([digests[::2, 0].view(np.int64), b.first + np.arange(b.rows)])
        result.digests.append(both[:, b.filled > 0])
    return _NONE


def repeated(findings: dict[str, Finding], result: Audit) -> None:
    finding = findings["duplicate-rows"]
    digests, numbers = np.concatenate(result.digests, axis=1)
    order = np.argsort(digests, kind="stable")
    _, begins, counts = np.unique(digests[order], return_index=True, return_counts=True)
    earlier = np.repeat(numbers[order[begins]], counts)  # the first of the equal rows
    again = numbers[order] > earlier
    finding.rows = int(again.sum())
    rows = numbers[order][again]
    few = np.argsort(rows)[:_EXAMPLES]
    finding.earlier = earlier[again][few].tolist()
    finding.examples = [(row, 0) for row in rows[few].tolist()]
    pairs = zip(finding.examples, finding.earlier, strict=True)
    details = [f"row {row} is row {first}" for (row, _), first in pairs][:_NAMED]
    details += [f"among the first {_MOST_ROWS:,} rows"] * (result.rows > _MOST_ROWS)
    finding.detail = ", ".join(details)


def overlap(b: DocumentBatch, result: Audit) -> Int64:
    """Return rows that begin with the last tokens of the row before, at least _SHARED of them, if
    some of these are trained on twice.

    BOS before and EOS behind these tokens are ignored. A row that repeats a document from its
    beginning is not a window, and neither is a piece of a document with a place in `segments`.
    """
    width, windows = b.ids.itemsize, list[int]()
    bos, eos = (
        b"" if token is None else np.array([token], b.ids.dtype).tobytes()
        for token in (b.conventions.bos, b.conventions.eos)
    )
    number, before, before_trained, before_begins = result.last
    if number != b.first - 1:
        before = b""
    data, is_piece = b.ids.tobytes(), "segments" in b.set_.names
    trained = b.trained if b.set_.has_labels else np.ones(len(b.ids), bool)
    documents = np.searchsorted(b.row_of, np.arange(b.rows + 1))
    edges = np.stack([b.offsets[:-1], b.used, documents[:-1], documents[1:]], axis=1)
    for row, (begin, stop, first, last) in enumerate(edges.tolist()):
        tokens = data[begin * width : stop * width].removeprefix(bos)
        flags = trained[stop - len(tokens) // width : stop]
        at = _shared_from(before, tokens, width)
        twice = before_trained[at:] & flags[: len(before) // width - at] if at else _NONE
        is_new = first == last or b.begun[first] or not is_piece
        if twice.any() and at not in before_begins and is_new:
            windows.append(row)
        before = tokens[: len(tokens) - b.padded_targets * width]
        if b.conventions.tail and before[:-width].endswith(eos):
            before = before[:-width]
        while eos and before.endswith(eos):
            before = before[:-width]
        before_trained = flags[: len(before) // width]
        before_begins = b.begins[first:last] - (stop - len(flags))
        before_begins = {*before_begins.tolist(), *(before_begins + len(bos) // width).tolist()}
    result.last = b.first + b.rows - 1, before, before_trained, before_begins
    return b.offsets[windows]


def _shared_from(before: bytes, row: bytes, width: int) -> int:
    """Find where the last tokens of a row become the first tokens of the next one.

    Returns the place in `before`; 0 if fewer than _SHARED tokens are equal, or if there are several
    such places, as in text that repeats itself.
    """
    head, at, place = row[: _SHARED * width], 0, 0
    if len(head) < _SHARED * width:
        return 0
    for _ in range(_SHARED):  # so many places at most: a token may be everywhere
        at = before.find(head, at + 1)
        if at < 0:
            break
        if not at % width and row.startswith(before[at:]):
            if place:
                return 0
            place = at // width
    return place


def underfilled(b: DocumentBatch, result: Audit) -> Int64:
    if result.documents - len(b.sizes) < _MOST_LENGTHS:
        result.lengths.append(b.sizes)
    return b.rows_where(b.filled < (b.conventions.length or 0))


def best_fit(findings: dict[str, Finding], result: Audit) -> None:
    """Compare the rows with those that best-fit needs for the first million documents."""
    finding, length = findings["underfilled"], int(result.conventions.length or 0)
    lengths = np.concatenate(result.lengths)
    kept = lengths[lengths <= length].astype(np.int32)
    if not result.packed or not len(kept):
        finding.rows = 0
        return
    planned = len(Planner(length, "best-fit").rows(kept, 0).row_offsets) - 1
    needed = planned * result.tokens / max(int(kept.sum(dtype=np.int64)), 1)
    saved = result.rows - needed
    finding.detail = f"best-fit needs {needed:,.0f} rows, {saved / result.rows:.1%} fewer"
    if saved <= max(1.0, _MUCH_PADDING * result.rows):
        finding.rows = 0


# --- the table


class AuditRule(NamedTuple):
    """A rule of the audit.

    find      returns places that break it
    needs     names of `_missing_need`: what must be known of the set
    means     consequence for training
    todo      advice
    conclude  changes findings after all rows were read
    """

    find: Callable[[DocumentBatch, Audit], Int64]
    severity: Severity
    needs: tuple[str, ...]
    means: str
    todo: str
    conclude: Callable[[dict[str, Finding], Audit], None] = lambda findings, result: None

    @property
    def name(self) -> str:
        """Name in reports."""
        return self.find.__name__.replace("_", "-")


RULES = {rule.name: rule for rule in (
    AuditRule(labels_shifted, "error", ("label values",),
         "labels are one place off for the trainers of this format: a model learns to repeat the "
         "token that it is given, or the one after the next",
         "write labels as the format has them, or name the right one with --format"),
    AuditRule(no_eos, "error", ("EOS", "EOS at ends, or expected"),
         "documents do not end with EOS, as others do, or as the tokenizer ends them: a model "
         "learns not to stop",
         "add EOS where records are tokenized, and cut records before that", is_rare),
    AuditRule(eos_untrained, "error", ("EOS", "labels"),
         "EOS after a trained answer is not trained: a model never learns to stop",
         "train on the EOS of answers, and do not mask padding by its id if that is EOS"),
    AuditRule(bos_missing, "error", ("BOS", "BOS at beginnings"),
         "documents begin without BOS, which the tokenizer adds, or most others have",
         "tokenize with special tokens, once"),
    AuditRule(bos_doubled, "error", ("BOS",),
         "documents begin with BOS twice, as no text does when the model is used",
         "tokenize texts of a chat template with add_special_tokens=False"),
    AuditRule(untrained_row, "error", ("labels",),
         "no token of the row has a label: its loss is 0 or not a number",
         "drop these rows, or cut prompts so that the answer stays"),
    AuditRule(untrained_document, "error", ("labels",),
         "no token of the document has a label: it takes room and teaches nothing",
         "drop these documents before they are packed"),
    AuditRule(cross_document_target, "error", ("labels", "boundaries"),
         "the last token of a document predicts the first one of another",
         "give the first token of each document the label -100"),
    AuditRule(boundaries_disagree, "error", ("boundaries",),
         "columns, or a column and the ends of documents, have different boundaries: attention "
         "and positions do not fit the documents",
         "make all columns from one list of lengths"),
    AuditRule(padding_trained, "error", ("labels", "padding"),
         "padding has labels: a model learns to write it",
         "give padding the label -100, by its place and not by its id"),
    AuditRule(labels_differ, "error", ("label values",),
         "labels are neither -100 nor the token of this or the next place",
         "make labels of input_ids, after all that changes these"),
    AuditRule(ids_out_of_range, "error", (),
         "ids are negative or beyond the vocabulary: training stops, or reads other memory",
         "tokenize again, with the tokenizer of the model"),
    AuditRule(dominant_token, "error", (),
         "one token makes up more than a quarter of all",
         "look whether it is <unk> or padding: the tokenizer does not fit the text, or padding "
         "counts as text", is_much),
    AuditRule(header_trained, "error", ("labels", "headers"),
         "the header of a turn is trained, which is given when the model is used",
         "begin the labels behind the header"),
    AuditRule(header_partly_trained, "error", ("labels", "headers"),
         "a part of a turn's header is trained, or the first token of an answer is not",
         "find where answers begin by tokens, not by lengths of texts tokenized apart"),
    AuditRule(all_trained, "warning", ("labels", "conversations"),
         "conversations have nothing masked: a model learns to write prompts, too",
         "mask all but the answers, or leave it if this is meant"),
    AuditRule(cut, "warning", ("EOS", "EOS at ends", "length", "ends of rows"),
         "documents end without EOS exactly where the row ends, and go on nowhere",
         "drop or split what is longer than a row, or use longer rows", goes_on),
    AuditRule(duplicate_rows, "warning", (),
         "rows are equal to an earlier one", "remove duplicates before packing", repeated),
    AuditRule(overlap, "warning", (),
         "windows begin with the end of the one before: these tokens are trained twice",
         "cut long documents without a stride"),
    AuditRule(eos_inside, "warning", ("EOS", "EOS separates"),
         "EOS is inside documents, and the trainer takes it for their end",
         "use another token between turns, or leave it out there"),
    AuditRule(underfilled, "note", ("length", "packed"),
         "rows have more padding than best-fit packing leaves",
         "pack with best-fit, over more documents at a time", best_fit),
)}  # fmt: skip


def _missing_need(rule: AuditRule, result: Audit) -> str:
    """Return why a rule is not applied, by the first of its needs that is missing; or ""."""
    set_, conventions = result.set_, result.conventions
    names, is_named = {*set_.names}, conventions.vocabulary is not None
    no_ends = conventions.ends < _FEW and (
        f"{conventions.ends:.0%} of the documents end with EOS, {conventions.eos}"
    )
    absent: dict[str, str | Literal[False]] = {
        "EOS": conventions.eos is None and ("the tokenizer has no EOS" if is_named
        else "EOS is unknown: give --tokenizer"),
        "BOS": conventions.bos is None and ("the tokenizer has no BOS" if is_named
        else "BOS is unknown: give --tokenizer, if it has one"),
        "EOS at ends": no_ends,
        "EOS at ends, or expected": not conventions.lacks_eos and no_ends,
        "BOS at beginnings": not conventions.adds_bos and conventions.begins < 0.5
        and f"{conventions.begins:.0%} of the documents begin with BOS, {conventions.bos}",
        "labels": not set_.has_labels and "no column marks what is trained on",
        "label values": "labels" not in names and "there is no column labels",
        "boundaries": not names & {*BOUNDARY_COLUMNS} and "no column has boundaries",
        "padding": conventions.pad is None and not conventions.masked
        and not names & {"cu_seqlens", "seq_lengths", "seq_lens", "position_ids"}
        and "no padding was found, by a column or its place",
        "headers": conventions.header is None and "no token begins every turn",
        "conversations": conventions.header is None and conventions.masks < NEARLY
        and "no conversations were found: no token begins every turn, and not nearly all documents "
        "have a part that is not trained on",
        "length": conventions.length is None and "rows have no fixed length: give --max-length",
        "ends of rows": conventions.is_stream and "documents go on in the next row",
        "EOS separates": not set_.meaning.by_eos
        and "EOS does not separate documents in this format",
        "packed": set_.documents and "rows are documents, not packed yet",
    }  # fmt: skip
    return next((why for need in rule.needs if (why := absent[need])), "")
