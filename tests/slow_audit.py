"""A slow twin of the audit's rules: one row, document and token after another; and random sets."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

from audited import (
    BOS,
    EOS,
    FIRST,
    IDS,
    IGNORED,
    LENGTH,
    LINE,
    MARK,
    Document,
    Sets,
    conversations,
)


def spoiled(seed: int) -> Sets:
    """Conversations, some of which are changed in any way that leaves them in their rows."""
    random_, sets = random.Random(seed), conversations(seed)
    for row, one in sets.documents():
        room = LENGTH - sum(sets.lengths(row))
        change = random_.randrange(24)
        place = random_.randrange(1, len(one.ids))
        if change == 0:
            one.ids[-1] = FIRST
        elif change == 1:
            one.trained[-1] = False
        elif change == 2:
            del one.ids[0], one.trained[0]
        elif change == 3 and room:
            one.ids.insert(0, BOS)
            one.trained.insert(0, False)
        elif change == 4:
            one.trained[:] = [False] * len(one.ids)
        elif change == 5:
            one.trained[0] = True
        elif change == 6:
            one.labels[place] = random_.randrange(FIRST, IDS)
            one.trained[place] = True
        elif change == 7:
            one.ids[place] = -random_.randrange(1, 9)
        elif change == 8:
            one.trained[place:] = [True] * (len(one.ids) - place)
        elif change == 9:
            one.trained[1:] = [True] * (len(one.ids) - 1)
        elif change == 10 and one is sets.rows[row][-1] and room:
            one.ids[-1:] = [random_.randrange(FIRST, IDS) for _ in range(room + 1)]
            one.trained += [True] * room
    for _ in range(random_.randrange(3)):
        sets.rows.append(random_.choice(sets.rows))
        sets.pad.append([])
    return sets


def _is_full(sets: Sets, row: int, one: Document) -> bool:
    return sum(sets.lengths(row)) == LENGTH and one is sets.rows[row][-1]


def _all_trained(one: Document) -> bool:
    return all(one.trained[1:])


def spans_of(one: Document, labels: list[int]) -> Iterator[tuple[int, int, int]]:
    """(begin of a trained span, place of the header before it or -1, where that ends)."""
    for place, label in enumerate(labels):
        if label == IGNORED or (place and labels[place - 1] != IGNORED):
            continue
        marks = [at for at, token in enumerate(one.ids[: place + 1]) if token == MARK]
        mark = marks[-1] if marks else -1
        ends = [at + 1 for at, token in enumerate(one.ids) if token == LINE and at >= mark]
        yield place, mark if ends else -1, ends[0] if ends else 0


def slow(sets: Sets) -> dict[str, set[int]]:
    """Rule -> rows, of the rules that look at one document or row."""
    rows: dict[str, set[int]] = {}
    counts = Counter[str]()

    def has(rule: str, row: int, it: bool) -> None:
        if it:
            counts[rule] += 1
            rows.setdefault(rule, set()).add(row)

    seen = set[tuple[int, ...]]()
    for row in range(len(sets.rows)):
        ids, any_trained = tuple(sets.ids(row)), any(one != IGNORED for one in sets.labels(row))
        has("duplicate-rows", row, ids in seen)
        seen.add(ids)
        has("untrained-row", row, not any_trained)
        has("ids-out-of-range", row, min(ids) < 0)
        for number, one in enumerate(sets.rows[row]):
            labels = Sets([[one]]).labels(0)
            ended, full = one.ids[-1] == EOS, _is_full(sets, row, one)
            has("no-eos", row, not ended and not full)
            has("cut", row, not ended and full)
            answered = len(one.ids) > 1 and labels[-2] != IGNORED and labels[-1] == IGNORED
            has("eos-untrained", row, ended and answered)
            has("bos-missing", row, one.ids[0] != BOS)
            has("bos-doubled", row, one.ids[:2] == [BOS, BOS])
            is_untrained = all(label == IGNORED for label in labels)
            has("untrained-document", row, is_untrained and any_trained)
            has("cross-document-target", row, bool(number) and labels[0] != IGNORED)
            begin = sum(sets.lengths(row)[:number])
            following = [*ids[begin + 1 :], None]
            pairs = zip(labels, one.ids, following, strict=False)
            differs = any(label not in (IGNORED, token, after) for label, token, after in pairs)
            has("labels-differ", row, differs)
            everything = all(label != IGNORED for label in labels[1:])
            turns = one.ids.count(MARK) > 1
            has("all-trained", row, everything and turns)
            if everything:
                continue
            for begin, mark, end in spans_of(one, labels):
                has("header-trained", row, begin == mark)
                partly = mark >= 0 and end - mark <= 24
                partly = partly and mark < begin < end
                has("header-partly-trained", row, mark >= 0 and (partly or begin == end + 1))
    if counts["cut"] == counts["bos-missing"]:  # they may be pieces, which go on
        rows = {rule: own for rule, own in rows.items() if rule not in ("cut", "bos-missing")}
    return rows
