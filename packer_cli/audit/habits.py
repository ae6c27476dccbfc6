"""What a set does with its tokens, told from a look at rows that are evenly spread over it.

With a tokenizer, EOS, BOS and padding are its own. Without one they are told where they are plain:
EOS is a token with which at least half of the documents end, and which is rarely anywhere else; BOS
likewise at the beginning; padding is the token of the stretches at the end of rows. What is not
plain stays untold, and the rules that need it say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from packer_cli.audit.batches import TELLING, Batch, Bool, Habits, batch_of
from packer_cli.audit.formats import Set
from packer_cli.audit.tables import Column, Raw, even_spans
from packer_cli.records import Int64
from packer_cli.result.manifest import TokenizerInfo

_LOOK_TOKENS, _LOOK_ROWS = 1 << 21, 1 << 14
_FEWEST = 4  # documents, of which something can be plain
_PLAIN = 0.5  # share of documents
_RARE = 0.2  # of its places that a token has at the ends of documents, if it marks them
_NEARLY, _MOSTLY = 0.9, 0.75
_COMMON = 0.1  # of tokens; exact counts tell whether it is a quarter
_ROLES, _MOST_ROLES = 8, 0.95  # so many tokens are so many of those behind the mark of a turn
_LONGEST_HEADER = 24  # tokens of the header of a turn


def look(set_: Set, tokenizer: TokenizerInfo | None, max_length: int | None) -> Habits:
    """What a set does. `tokenizer`: its own, or the one that was named. Raises DataError as
    `Table.read`.
    """
    raws = _looked_at(set_)
    masks = [raw.columns["attention_mask"].values for raw in raws
             if "attention_mask" in raw.columns]  # fmt: skip
    habits = Habits(masked=any(not one.all() for one in masks), told={})
    lengths = np.concatenate([np.diff(raw.columns["input_ids"].offsets) for raw in raws])
    spare = int(set_.meaning.dropped)
    if spare and "seq_start_id" in raws[0].columns:
        lengths -= np.concatenate([np.diff(raw.columns["seq_start_id"].offsets) for raw in raws])
    habits = replace(
        habits, spare=spare, length=max_length or set_.max_length or _full_length(lengths)
    )
    if tokenizer is not None:
        habits = _of_tokenizer(habits, tokenizer, set_)
    habits = _padding(habits, raws, set_)
    real = np.concatenate([_real_lengths(raw) for raw in raws])
    if habits.eos is not None and _flows(set_, real, habits):
        habits = replace(habits, flows=True)
        habits.told["boundaries"] = "EOS, since rows are full and no column tells"
    batches = [batch_of(raw, set_, habits) for raw in raws]
    if not (max_length or set_.max_length):
        habits = replace(habits, length=_filled(habits, batches))
    if habits.eos is None:
        habits = _ending(habits, batches)
    if habits.bos is None and tokenizer is None:
        habits = _beginning(habits, batches)
    habits = _shares(_tail(habits, batches), batches)
    return replace(habits, header=_header(batches), common=_frequent(batches))


def _looked_at(set_: Set) -> list[Raw]:
    """The first row, to know how long rows are, and then so many that memory holds them."""
    first = next(iter(set_.table.read(np.array([[0, 1]]))))
    length = max(1, int(first.columns["input_ids"].offsets[-1]))
    wanted = min(max(_LOOK_TOKENS // length, 16), _LOOK_ROWS)
    raws, tokens = list[Raw](), 0
    for raw in set_.table.read(even_spans(set_.table.rows, wanted)):
        columns = {name: Column(of.values.copy(), of.offsets) for name, of in raw.columns.items()}
        raws.append(raw._replace(columns=columns))  # a copy, since views hold all that was read
        tokens += len(raw.columns["input_ids"].values)
        if tokens > 4 * _LOOK_TOKENS:  # the first row was a short one
            break
    return raws


def _real_lengths(raw: Raw) -> Int64:
    """int64[r], tokens of each row, without those of which attention_mask is 0."""
    offsets = raw.columns["input_ids"].offsets
    if "attention_mask" not in raw.columns:
        return np.diff(offsets)
    counts = np.append(0, np.cumsum(raw.columns["attention_mask"].values != 0))
    lengths: Int64 = np.diff(counts[offsets])
    return lengths


def _full_length(lengths: Int64) -> int | None:
    """The length that the longest rows have in common."""
    longest = int(lengths.max(initial=0))
    return longest if longest and int((lengths == longest).sum()) > 1 else None


def _filled(habits: Habits, batches: Sequence[Batch]) -> int | None:
    """The length of full rows, where padding is told: LLaMA-Factory's have some in each row."""
    used = np.concatenate([
        one.filled - habits.spare * np.diff(one.of_row) for one in batches
    ])  # fmt: skip
    return habits.length if (used == habits.length).any() else _full_length(used)


def _of_tokenizer(habits: Habits, info: TokenizerInfo, set_: Set) -> Habits:
    prefix = info.prefix if isinstance(info.prefix, list) else []
    adds = info.bos_token_id is not None and info.bos_token_id in prefix
    where = f"by the tokenizer {info.source or 'bytes'}"
    for name, token in (("EOS", info.eos_token_id), ("BOS", info.bos_token_id)):
        if token is not None:
            habits.told[name] = f"{token}, {where}"
    pad = info.pad_token_id if set_.format != "packer" else None  # whose columns leave it out
    return replace(habits, eos=info.eos_token_id, bos=info.bos_token_id, pad=pad, adds_bos=adds,
                   vocabulary=info.vocab_size)  # fmt: skip


def _padding(habits: Habits, raws: Sequence[Raw], set_: Set) -> Habits:
    """Padding by its place: at the ends of rows that are all as long, stretches of one token."""
    names = raws[0].columns.keys()
    explicit = names & ({*TELLING} - {"attention_mask", "position_ids"})
    if explicit or habits.masked or set_.rows_are == "documents":
        return replace(habits, pad=None)
    found = list[int]()
    for raw in raws:
        ids, offsets = raw.columns["input_ids"]
        ends = offsets[1:][np.diff(offsets) > 1] - 1
        found += ids[ends][ids[ends] == ids[ends - 1]].tolist()
    if habits.pad is not None:  # by the tokenizer: is it there?
        found = [one for one in found if one == habits.pad]
    rows = sum(raw.rows for raw in raws)
    tokens, counts = np.unique(found, return_counts=True)
    if not len(counts) or int(counts.max()) < max(2, _COMMON * rows):
        return replace(habits, pad=None)
    token = int(tokens[counts.argmax()])
    if all((raw.columns["input_ids"].values == token).all() for raw in raws):
        return replace(habits, pad=None)  # nothing else is there: it is what rows hold
    lengths = np.concatenate([np.diff(raw.columns["input_ids"].offsets) for raw in raws])
    if habits.pad is None and float((lengths == habits.length).mean()) < _NEARLY:
        return habits  # rows of several lengths are not padded
    habits.told["padding"] = f"{token}, which fills the ends of rows"
    return replace(habits, pad=token)


def _flows(set_: Set, lengths: Int64, habits: Habits) -> bool:
    """Whether rows are stretches of one stream: they are full, nothing fills them up, and no column
    tells where documents are.
    """
    told = {*TELLING} - {"attention_mask"}
    is_told = bool(told & {*set_.table.names}) or set_.rows_are == "documents"
    full = float((lengths == habits.length).mean()) if len(lengths) > 1 else 0.0
    return not is_told and habits.pad is None and full >= _NEARLY


def _mode(tokens: npt.NDArray[Any]) -> tuple[int, float]:
    """The most frequent token, and its share."""
    values, counts = np.unique(tokens, return_counts=True)
    best = int(counts.argmax())
    return int(values[best]), float(counts[best] / len(tokens))


def _everywhere(token: int, batches: Sequence[Batch]) -> int:
    return sum(int((batch.ids == token).sum()) for batch in batches)


class _Ends(NamedTuple):
    """The last tokens of documents that are not cut, and those before them; and of both whether
    they are trained, None where that is not told.
    """

    last: npt.NDArray[Any]
    before: npt.NDArray[Any]
    trained: tuple[Bool, Bool] | None

    @classmethod
    def of(cls, batches: Sequence[Batch], habits: Habits) -> _Ends:
        places, ids, flags = list[Int64](), list[Any](), list[Any]()
        for one in batches:
            keep = one.ended & ~one.full(habits) & (one.stops - one.begins > 1)
            places.append(one.stops[keep] - 1)
            ids.append(np.stack([one.ids[places[-1]], one.ids[places[-1] - 1]]))
            if one.trained is not None:
                flags.append(np.stack([one.trained[places[-1]], one.trained[places[-1] - 1]]))
        last, before = np.concatenate(ids, axis=1)
        trained = np.concatenate(flags, axis=1) if flags else None
        return cls(last, before, None if trained is None else (trained[0], trained[1]))


def _ending(habits: Habits, batches: Sequence[Batch]) -> Habits:
    """EOS by the ends of documents. Behind it may be a line end, which is everywhere, or what is
    never trained.
    """
    ends = _Ends.of(batches, habits)
    if len(ends.last) < _FEWEST:
        return habits
    found = list[tuple[bool, int, int, int]]()  # untrained, how often it is elsewhere, tail, token
    for tail, tokens in ((0, ends.last), (1, ends.before)):
        token, share = _mode(tokens)
        there = tokens == token
        at_ends, everywhere = int(there.sum()), _everywhere(token, batches)
        if share >= _PLAIN and at_ends >= _RARE * everywhere:
            is_untrained = ends.trained is not None and not ends.trained[tail][there].any()
            found.append((is_untrained, everywhere - at_ends, tail, token))
    if not found:
        return habits
    *_, tail, token = min(found)
    habits.told["EOS"] = f"{token}, with which documents end"
    return replace(habits, eos=token, tail=tail)


def _beginning(habits: Habits, batches: Sequence[Batch]) -> Habits:
    firsts = np.concatenate([one.ids[one.begins[one.begun]] for one in batches])
    if len(firsts) < _FEWEST:
        return habits
    token, share = _mode(firsts)
    at_begin, everywhere = int((firsts == token).sum()), _everywhere(token, batches)
    if share < _PLAIN or 2 * at_begin < _RARE * everywhere:
        return habits
    if token == habits.eos or everywhere - at_begin > _PLAIN * len(firsts):
        return habits  # it begins every turn
    seconds = np.concatenate([one.ids[one.begins[one.stops - one.begins > 1] + 1]
                              for one in batches])  # fmt: skip
    second, alike = _mode(seconds) if len(seconds) else (token, 0.0)
    if alike >= _NEARLY and not _has_roles(second, batches):
        return habits  # the first of words with which every prompt begins
    habits.told["BOS"] = f"{token}, with which documents begin"
    return replace(habits, bos=token)


def _tail(habits: Habits, batches: Sequence[Batch]) -> Habits:
    """With a tokenizer's EOS: whether documents end with it, or with it and one token more."""
    ends = _Ends.of(batches, habits)
    if habits.eos is None or habits.tail or not len(ends.last):
        return habits
    at_end, before = (float((one == habits.eos).mean()) for one in (ends.last, ends.before))
    return replace(habits, tail=1) if before > _PLAIN > at_end else habits


def _shares(habits: Habits, batches: Sequence[Batch]) -> Habits:
    ended, begun, masked, documents = list[Any](), list[Any](), 0, 0
    for one in batches:
        whole = one.ended & ~one.full(habits)
        ended.append(one.end_with(habits)[0][whole])
        begun.append(one.ids[one.begins[one.begun]] == habits.bos)
        if one.trained is not None:
            inner = one.stops - one.begins - 1
            masked += int((one.trained_behind_first() < _NEARLY * inner).sum())
            documents += len(inner)
    ends, begins = (float(np.concatenate(one).mean()) if sum(map(len, one)) else 0.0
                    for one in (ended, begun))  # fmt: skip
    return replace(habits, ends=ends, begins=begins, masks=masked / max(documents, 1))


def _frequent(batches: Sequence[Batch]) -> tuple[int, ...]:
    """Tokens that may be more than a quarter, of a thousand tokens of each batch."""
    looks = list[Any]()
    for one in batches:
        step = max(1, len(one.ids) // 4096)
        looks.append(one.ids[::step][one.in_documents()[::step]])
    tokens = np.concatenate(looks)
    if not len(tokens):
        return ()
    values, counts = np.unique(tokens, return_counts=True)
    return tuple(values[counts >= _COMMON * len(tokens)].tolist())


def _header(batches: Sequence[Batch]) -> tuple[int, int] | None:
    """The token that begins the header of every turn, and the one that ends it.

    The first is where documents begin, or after their BOS, and at least once more in most of them.
    Headers of one role are alike from it on; the shortest of these stretches ends with the second,
    whatever answers begin with.
    """
    parts = [one for one in batches if one.trained is not None and len(one.begins)]
    lengths = [one.stops - one.begins for one in parts]
    for skipped in (0, 1):
        firsts = [one.ids[one.begins[of > 1] + skipped]
                  for one, of in zip(parts, lengths, strict=True)]  # fmt: skip
        tokens = np.concatenate(firsts) if firsts else np.empty(0, np.int64)
        if len(tokens) < _FEWEST:
            return None
        token, share = _mode(tokens)
        places = [np.flatnonzero(one.ids == token) for one in parts]
        often = sum(map(len, places)) >= 1.5 * len(tokens)
        if share >= _MOSTLY and often and _has_roles(token, parts):
            end = _header_end(parts, places)
            return None if end is None else (token, end)
    return None


def _has_roles(token: int, batches: Sequence[Batch]) -> bool:
    """Whether what follows a token is one of few, as the roles of a conversation are."""
    following = np.concatenate([one.ids[1:][one.ids[:-1] == token] for one in batches])
    _, counts = np.unique(following, return_counts=True)
    return bool(np.sort(counts)[-_ROLES:].sum() >= _MOST_ROLES * len(following) > 0)


def _header_end(parts: Sequence[Batch], places: Sequence[Int64]) -> int | None:
    """What ends the headers that begin at `places`, of each batch."""
    rows = [
        one.ids[at[at + _LONGEST_HEADER <= len(one.ids)][:, None] + np.arange(_LONGEST_HEADER)]
        for one, at in zip(parts, places, strict=True)
    ]
    headers = np.concatenate(rows)
    found = list[tuple[int, int]]()
    for role in np.unique(headers[:, 1]) if len(headers) else ():
        own = headers[headers[:, 1] == role]
        if len(own) < max(_FEWEST, 0.05 * len(headers)):
            continue
        length, last = 0, -1
        for column in own.T:
            token, share = _mode(column)
            if share < _NEARLY:
                break
            length, last = length + 1, token
        if length > 2:  # the mark, a role and what ends it
            found.append((length, last))
    return min(found)[1] if len(found) > 1 else None
