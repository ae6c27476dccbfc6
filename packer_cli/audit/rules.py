"""What can be wrong with a set: `RULES`, a table, and for each rule a function over a `Batch`.

A function gives places, int64, in ascending order: of the tokens that are wrong, or of the first
token of what is. The audit counts the rows that have one. Functions never see more than a batch;
what they must remember from one to the next is in `Memory`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from packer_cli.audit.batches import Batch, Bool, Habits
from packer_cli.audit.formats import Set
from packer_cli.records import IGNORED, Int64

Severity = Literal["error", "warning", "note"]
_NONE = np.empty(0, np.int64)
_NEARLY = 0.9
FEW = 0.1  # share of documents with EOS below which none is expected
MUCH = 0.25  # of all tokens, for one
SHARED = 64  # tokens that windows do not share by chance
MOST_ROWS = 1 << 23  # whose digests are held, 16 bytes each
_MOST_LENGTHS = 1 << 20


@dataclass
class Memory:
    """What rules know of earlier batches.

    digests   of rows that were read, and their `numbers`, for `repeated`
    before    the number of the last row, and its tokens
    common    how often each of `Habits.common` was there, in `tokens`
    lengths   of the first documents, of which `underfilled` packs rows anew
    cut, more  of packer's pieces, which place of a document follows a cut, and which are there
    cuts      (row, place in it) int64[2, n] of documents that are cut
    without_bos   how many documents begin without BOS
    """

    digests: list[Int64] = field(default_factory=list)
    numbers: list[Int64] = field(default_factory=list)
    before: tuple[int, npt.NDArray[Any]] = (-2, _NONE)
    common: dict[int, int] = field(default_factory=dict)
    tokens: int = 0
    lengths: list[Int64] = field(default_factory=list)
    cut: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    more: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    cuts: list[Int64] = field(default_factory=list)
    without_bos: int = 0


@dataclass(frozen=True)
class View:
    """What a rule looks at. `whole`: all rows of the set are read."""

    batch: Batch
    habits: Habits
    set_: Set
    memory: Memory
    whole: bool


def _rows_where(flags: Bool, batch: Batch) -> Int64:
    return batch.offsets[:-1][flags]


# --- ends and beginnings of documents


def no_eos(v: View) -> Int64:
    b = v.batch
    found, last = b.end_with(v.habits)
    return last[~found & b.ended & ~b.full(v.habits)]


def eos_untrained(v: View) -> Int64:
    b = v.batch
    assert b.trained is not None  # noqa: S101 `needs`
    found, last = b.end_with(v.habits)
    last = last[found & (last > b.begins)]
    return last[b.trained[last - 1] & ~b.trained[last]]


def eos_inside(v: View) -> Int64:
    b = v.batch
    places = np.flatnonzero(b.ids == v.habits.eos)
    document = np.searchsorted(b.begins, places, side="right") - 1
    inside = (document >= 0) & (places < b.end_with(v.habits)[1][document])
    return places[inside & (places < b.stops[document] - 1)]


def bos_missing(v: View) -> Int64:
    b = v.batch
    missing = b.begun & (b.ids[b.begins] != v.habits.bos)
    v.memory.without_bos += int(missing.sum())
    places: Int64 = b.begins[missing]
    return places


def bos_doubled(v: View) -> Int64:
    b = v.batch
    begins = b.begins[b.stops - b.begins > 1]
    both = (b.ids[begins] == v.habits.bos) & (b.ids[begins + 1] == v.habits.bos)
    places: Int64 = begins[both] + 1
    return places


def cut(v: View) -> Int64:
    b = v.batch
    found, last = b.end_with(v.habits)
    cuts = ~found & b.ended & b.full(v.habits)
    if b.keys is not None:
        v.memory.cut.append(b.keys[1][cuts])
        v.memory.more.append(b.keys[0][b.keys[0] != 0])
    row = b.rows_at(last[cuts])
    v.memory.cuts.append(np.stack([row + b.first, last[cuts] - b.offsets[row]]))
    return last[cuts]


# --- what is trained on


def _trained_in(b: Batch) -> Int64:
    return b.counted[b.stops] - b.counted[b.begins]


def _whole(v: View) -> Bool:
    """bool[d], whether all tokens of a document but the first are trained."""
    b = v.batch
    found: Bool = b.trained_behind_first() >= b.stops - b.begins - 1 - v.habits.spare
    return found


def untrained_row(v: View) -> Int64:
    b = v.batch
    return _rows_where((b.by_row(b.counted) == 0) & (b.filled > 1), b)


def untrained_document(v: View) -> Int64:
    b = v.batch
    row_trained = b.by_row(b.counted)[b.row_of]
    least = 2 + v.set_.meaning.dropped  # of which one can have a label
    wrong = (_trained_in(b) == 0) & (row_trained > 0) & (b.stops - b.begins >= least)
    if b.keys is not None:  # the other pieces may have labels
        wrong &= b.begun & ~b.full(v.habits)
    places: Int64 = b.begins[wrong]
    return places


def all_trained(v: View) -> Int64:
    b, habits = v.batch, v.habits
    wrong = _whole(v) & (_trained_in(b) > 1) & b.begun
    if habits.header is not None:
        turns = np.cumsum(np.append(0, b.ids == habits.header[0]))
        wrong &= turns[b.stops] - turns[b.begins] > 1
    places: Int64 = b.begins[wrong]
    return places


def labels_shifted(v: View) -> Int64:
    b = v.batch
    assert b.labels is not None  # noqa: S101 `needs`
    if v.set_.meaning.shift == "own" and not len(b.other_labels):
        return _NONE
    labelled, own = b.labels != IGNORED, b.labels == b.ids
    labelled[b.offsets[1:][np.diff(b.offsets) > 0] - 1] = False  # what comes next is not there
    following = np.append(b.labels[:-1] == b.ids[1:], False)
    counts = [np.append(0, np.cumsum(labelled & one)) for one in (labelled, own, following)]
    number, of_own, of_next = map(b.by_row, counts)
    right, wrong = (of_own, of_next) if v.set_.meaning.shift == "own" else (of_next, of_own)
    return _rows_where((number > 0) & (wrong >= _NEARLY * number) & (right < _NEARLY * number), b)


def labels_differ(v: View) -> Int64:
    b = v.batch
    assert b.labels is not None  # noqa: S101 `needs`
    places = b.other_labels
    if not len(places):
        return _NONE
    is_last = np.isin(places + 1, b.offsets)
    following = np.minimum(places + 1, len(b.ids) - 1)
    allowed = (b.labels[places] == b.ids[following]) & ~is_last
    if v.set_.meaning.shift == "next":
        allowed |= is_last
    wrong: Int64 = places[~allowed]
    return wrong


def cross_document_target(v: View) -> Int64:
    b = v.batch
    assert b.trained is not None  # noqa: S101 `needs`
    behind = np.flatnonzero(b.begins[1:] == b.stops[:-1]) + 1
    begins = b.begins[behind][b.row_of[behind] == b.row_of[behind - 1]]
    places: Int64 = begins[b.trained[begins]]
    return places


def padding_trained(v: View) -> Int64:
    b = v.batch
    assert b.trained is not None  # noqa: S101 `needs`
    if b.tokens == len(b.ids):
        return _NONE
    return np.flatnonzero(b.trained & ~b.in_documents())


def _spans(v: View) -> tuple[Int64, Int64, Int64]:
    """(begins of trained spans of documents that are not all trained; the place of the last header
    before each, in its document, or -1; where that header ends).
    """
    b = v.batch
    assert b.trained is not None  # noqa: S101 `needs`
    assert v.habits.header is not None  # noqa: S101 `needs`
    before = np.append(False, b.trained[:-1])
    before[b.begins] = False
    spans = np.flatnonzero(b.trained & ~before)
    document = np.searchsorted(b.begins, spans, side="right") - 1
    partly = (document >= 0) & ~_whole(v)[document]
    spans, document = spans[partly], document[partly]
    marks = np.append(-1, np.flatnonzero(b.ids == v.habits.header[0]))
    ends = np.append(np.flatnonzero(b.ids == v.habits.header[1]), len(b.ids))
    mark = marks[np.searchsorted(marks, spans, side="right") - 1]
    end = ends[np.searchsorted(ends, mark)] + 1
    mark[(mark < b.begins[document]) | (end > b.stops[document])] = -1
    return spans, mark, end


def header_trained(v: View) -> Int64:
    spans, mark, _ = _spans(v)
    places: Int64 = spans[spans == mark]
    return places


def header_partly_trained(v: View) -> Int64:
    spans, mark, end = _spans(v)
    partly = (spans > mark) & (spans < end) & (end - mark <= 24)
    places: Int64 = spans[(mark >= 0) & (partly | (spans == end + 1))]
    return places


# --- boundaries


def boundaries_disagree(v: View) -> Int64:
    b, found = v.batch, [_NONE]
    if b.told:
        first = next(iter(b.told.values()))
        found += [np.setxor1d(first, other) for other in [*b.told.values()][1:]]
        if v.habits.eos is not None and v.habits.ends >= FEW and v.set_.rows_are != "documents":
            found.append(_moved(v))
    if b.real is not None and not np.array_equal(here := b.in_documents(), b.real):
        found.append(np.flatnonzero(here != b.real))
    return np.unique(np.concatenate(found))


def _moved(v: View) -> Int64:
    """Beginnings of documents with no EOS before them, in rows where EOS is inside a document."""
    b = v.batch
    bare = np.flatnonzero(~b.end_with(v.habits)[0] & ~b.lasts) + 1
    if not len(bare):
        return _NONE
    found: Int64 = b.begins[bare][np.isin(b.row_of[bare], b.rows_at(eos_inside(v)))]
    return found


# --- tokens and rows


def ids_out_of_range(v: View) -> Int64:
    ids, most = v.batch.ids, v.habits.vocabulary
    if not len(ids) or (int(ids.min()) >= 0 and (most is None or int(ids.max()) < most)):
        return _NONE
    return np.flatnonzero((ids < 0) | (ids >= (most or np.iinfo(np.int64).max)))


def dominant_token(v: View) -> Int64:
    b, found = v.batch, [_NONE]
    v.memory.tokens += b.tokens
    if v.habits.common:
        here, used = b.in_documents(), _sum_by_row(b, b.stops - b.begins)
        for token in v.habits.common:
            counts = np.append(0, np.cumsum((b.ids == token) & here))
            v.memory.common[token] = v.memory.common.get(token, 0) + int(counts[-1])
            found.append(_rows_where(b.by_row(counts) > MUCH * np.maximum(used, 1), b))
    return np.unique(np.concatenate(found))


def _sum_by_row(b: Batch, values: Int64) -> Int64:
    sums = np.append(0, np.cumsum(values))
    places: Int64 = sums[b.of_row[1:]] - sums[b.of_row[:-1]]
    return places


def duplicate_rows(v: View) -> Int64:
    """No place: all rows together tell, see `repeated`."""
    b = v.batch
    if sum(map(len, v.memory.digests)) < MOST_ROWS:
        data, width = b.ids.tobytes(), b.ids.itemsize
        edges = zip((b.offsets[:-1] * width).tolist(), (b.used * width).tolist(), strict=True)
        digests = [hash(data[begin:end]) for begin, end in edges]  # of 64 bits
        empty = b.filled == 0
        v.memory.digests.append(np.array(digests, np.int64)[~empty])
        v.memory.numbers.append(np.arange(b.first, b.first + b.rows)[~empty])
    return _NONE


def repeated(memory: Memory) -> Int64:
    """int64, in ascending order, rows that are equal to an earlier one."""
    digests, numbers = np.concatenate(memory.digests), np.concatenate(memory.numbers)
    order = np.argsort(digests, kind="stable")
    again = order[1:][digests[order[1:]] == digests[order[:-1]]]
    return np.sort(numbers[again])


def overlap(v: View) -> Int64:
    """Rows that begin with what the row before them ends with, at least SHARED tokens, whatever
    BOS is before and EOS behind that.
    """
    b, found = v.batch, []
    if not len(b.ids):
        return _NONE
    number, before = v.memory.before
    filled = np.flatnonzero(b.filled >= SHARED)
    if number == b.first - 1 and b.rows and _shared(before, _row(b, 0), v.habits):
        found.append(0)
    firsts, pairs = b.offsets[:-1][filled], np.flatnonzero(np.diff(filled) == 1)
    begins = firsts + (b.ids[firsts] == v.habits.bos)  # of what the row before may end with
    heads = np.full(b.rows, -1, b.ids.dtype)
    heads[filled[pairs]] = b.ids[begins[pairs + 1]]
    places = np.flatnonzero(b.ids == np.repeat(heads, np.diff(b.offsets)))
    row = b.rows_at(places)
    inside = (places + SHARED <= b.used[row]) & np.isin(row, filled[pairs])
    places, row = places[inside], row[inside]
    following = (b.offsets[:-1] + (b.ids[np.minimum(b.offsets[:-1], len(b.ids) - 1)]
                                   == v.habits.bos))[np.minimum(row + 1, b.rows - 1)]  # fmt: skip
    for step in (1, 2, 3, 5, 8, 16, SHARED - 2):
        last = np.minimum(following + step, len(b.ids) - 1)
        same = b.ids[places + step] == b.ids[last]
        places, row, following = places[same], row[same], following[same]
    found += [one + 1 for one in np.unique(row).tolist()
              if _shared(_row(b, one), _row(b, one + 1), v.habits)]  # fmt: skip
    if b.rows:
        v.memory.before = b.first + b.rows - 1, _row(b, b.rows - 1).copy()
    return b.offsets[:-1][np.array(sorted(found), np.int64)]


def _row(b: Batch, row: int) -> npt.NDArray[Any]:
    return b.ids[b.offsets[row] : b.used[row]]


def _shared(before: npt.NDArray[Any], row: npt.NDArray[Any], habits: Habits) -> bool:
    """Whether a row ends with at least SHARED tokens that the next one begins with, and is not
    that one.
    """
    if len(row) and row[0] == habits.bos:
        row, before = row[1:], before[1:] if len(before) and before[0] == habits.bos else before
    if habits.tail and len(before) > 1 and before[-2] == habits.eos:
        before = before[:-1]
    while len(before) and before[-1] == habits.eos:
        before = before[:-1]
    least = max(1, len(before) - len(row))  # where it may begin
    if len(row) < SHARED or len(before) - least < SHARED:
        return False
    places = least + np.flatnonzero(before[least : len(before) - SHARED + 1] == row[0])
    for step in range(1, SHARED):
        places = places[before[places + step] == row[step]]
    lengths = len(before) - places
    pairs = zip(places[:64].tolist(), lengths.tolist(), strict=False)
    return any(np.array_equal(before[place:], row[:length]) for place, length in pairs)


def underfilled(v: View) -> Int64:
    b, length = v.batch, v.habits.length or 0
    if sum(map(len, v.memory.lengths)) < _MOST_LENGTHS:
        v.memory.lengths.append(b.stops - b.begins)
    return _rows_where(b.filled < length, b)


class Rule(NamedTuple):
    """A rule. `needs`: what must be told, see `why_not` in `audit/__init__.py`."""

    find: Callable[[View], Int64]
    severity: Severity
    needs: tuple[str, ...]
    means: str
    todo: str

    @property
    def name(self) -> str:
        return self.find.__name__.replace("_", "-")


RULES = {rule.name: rule for rule in (
    Rule(labels_shifted, "error", ("label values",),
         "labels are one place off for the trainers of this format: a model learns to repeat the "
         "token that it is given, or the one after the next",
         "write labels as the format has them, or name the right one with --format"),
    Rule(no_eos, "error", ("EOS", "EOS at ends"),
         "documents do not end with EOS, where others do: a model learns not to stop",
         "add EOS where records are tokenized, and cut records before that"),
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
         "counts as text"),
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
         "documents end without EOS exactly where the row ends, and go on nowhere: the rest was "
         "cut off, or is in a row that does not say so",
         "drop or split what is longer than a row, or use longer rows"),
    Rule(duplicate_rows, "warning", (),
         "rows are equal to an earlier one", "remove duplicates before packing"),
    Rule(overlap, "warning", (),
         "windows begin with the end of the one before: these tokens are trained twice",
         "cut long documents without a stride"),
    Rule(eos_inside, "warning", ("EOS", "EOS tells"),
         "EOS is inside documents, and the trainer takes it for their end",
         "use another token between turns, or leave it out there"),
    Rule(underfilled, "note", ("length", "packed"),
         "rows have more padding than best-fit packing leaves",
         "pack with best-fit, over more documents at a time"),
)}  # fmt: skip
