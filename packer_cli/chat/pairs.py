"""Records of preference: each side of a pair as a prompt and its answer, and single answers with a
label.

    {"prompt": "..", "chosen": "..", "rejected": ".."}     text, or lists of messages
    {"chosen": [..], "rejected": [..]}                     two conversations that share a beginning
    {"prompt": .., "completion": .., "label": true}        an answer that is desirable, or is not
    {"messages": [..], "label": false}                     the same: what follows the last user

A side becomes a text of its own, and `joined_sides` puts the tokens of a pair together again: its
chosen side, and after that its rejected one. `TokenBatch.chosen` says where the second begins.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from itertools import compress
from typing import Any, NamedTuple, TypeVar

import numpy as np

from packer_cli.chat.messages import (
    ASSISTANT,
    REASONING,
    MalformedError,
    joined_content,
    kind_of,
    parse_messages,
    with_context,
)
from packer_cli.options.shapes import CONTEXT, Shape
from packer_cli.packing.fitting import trained_between
from packer_cli.records import BadRecord, Int64, Records, TokenBatch, UInt8

_Message = dict[str, Any]
_Document = TypeVar("_Document")
MEND = "mend the record, or use --on-error skip"
_CONTENT = ("content", "value")
_BOTH = "expected both as text, or both as messages"


class Side(NamedTuple):
    """One answer.

    prompt, answer  text, or messages as they are in the record; a prompt of None is the beginning
                    of the answer's messages
    prompt_column, column  that they are in
    is_good         chosen, or labelled true
    """

    prompt: Any
    answer: Any
    prompt_column: str
    column: str
    is_good: bool


def parted(records: Records, shape: Shape) -> Records:
    """Make each side a record of its own, one after the other, at the position of both.

    Its field `side` is a `Side`; those of the record are beside it. Raises nothing: records that
    have no two sides join `bad`.
    """
    fields: list[dict[str, Any]] = []
    positions: list[int] = []
    bad, good = list(records.bad), list[bool]()
    for own, position in zip(records.fields or [], records.positions.tolist(), strict=True):
        try:
            sides = sides_of(own, shape)
        except MalformedError as error:
            bad.append(BadRecord(position, str(error), MEND))
            continue
        fields += [{**own, "side": side} for side in sides]
        positions += [position] * len(sides)
        good += [side.is_good for side in sides]
    return replace(
        records, positions=np.array(positions, np.int64), fields=fields, bad=bad,
        sides=np.array(good, np.uint8),
    )  # fmt: skip


def without_bad(
    positions: Int64, documents: list[_Document], counts: Int64, bad: list[BadRecord]
) -> tuple[list[_Document], Int64]:
    """The documents of records of which no side is bad, and how many each side has become.

    positions  int64[n], of each side's record
    counts     int64[n], how many documents each side has become: 0 or 1
    """
    wrong = np.isin(positions, [one.position for one in bad])
    kept = ~np.repeat(wrong, counts)
    return list(compress(documents, kept)), np.where(wrong, 0, counts)


def once(bad: list[BadRecord]) -> list[BadRecord]:
    """The first of each record's, in the order of the records."""
    first = {one.position: one for one in reversed(bad)}
    return sorted(first.values(), key=lambda record: record.position)


def messages_of(side: Side, *, keep_parts: bool) -> list[_Message]:
    """The messages of a side, of which only the answer's are trained on. Raises MalformedError."""
    answer = parse_messages(side.answer, side.column, keep_parts=keep_parts)
    if side.prompt is None:
        prompt, answer = _after_last_user(answer)
    else:
        prompt = side.prompt and parse_messages(
            side.prompt, side.prompt_column, keep_parts=keep_parts
        )
    _check_answer(answer, side.column)
    return [*with_context(prompt), *answer]


def sides_of(fields: dict[str, Any], shape: Shape) -> list[Side]:
    """The chosen and the rejected side of a record, or its only one. Raises MalformedError."""
    if "label" in shape.columns:
        return [_labelled(fields, shape)]
    names = [shape.columns[own] for own in ("chosen", "rejected")]
    answers: list[Any] = [fields.get(own) for own in ("chosen", "rejected")]
    for name, answer in zip(names, answers, strict=True):
        if not isinstance(answer, str | list):
            raise MalformedError(
                f"field '{name}' is {kind_of(answer)}, expected an answer: text, or a list of "
                "messages"
            )
    if type(answers[0]) is not type(answers[1]):
        raise MalformedError(
            f"field '{names[0]}' is {kind_of(answers[0])}, '{names[1]}' is "
            f"{kind_of(answers[1])}; {_BOTH}"
        )
    _check_kind(answers[0], names[0], shape)
    if answers[0] == answers[1]:
        raise MalformedError(
            f"fields '{names[0]}' and '{names[1]}' are equal, expected two different answers"
        )
    prompt, prompt_name = _prompt(fields, shape, answers)
    if prompt is None:
        prompt_name = names[0]
        shared = _shared(*answers)
        if not shared:
            raise MalformedError(
                f"there is no prompt, and '{names[0]}' and '{names[1]}' share no beginning; "
                "expected a prompt, or two conversations with the same beginning"
            )
        prompt, answers = answers[0][:shared], [answer[shared:] for answer in answers]
    elif isinstance(prompt, list) and prompt and answers[0][: len(prompt)] == prompt:
        raise MalformedError(
            f"field '{names[0]}' begins with the messages of the prompt, expected those of the "
            "answer alone"
        )
    for name, answer in zip(names, answers, strict=True):
        if not answer or (isinstance(answer, str) and not answer.strip()):
            raise MalformedError(f"field '{name}' is an empty answer, expected one with text")
    both = zip(answers, names, (True, False), strict=True)
    return [Side(prompt, answer, prompt_name, name, good) for answer, name, good in both]


def _prompt(fields: dict[str, Any], shape: Shape, answers: list[Any]) -> tuple[Any, str]:
    """The prompt of a pair and its field; None where both sides begin with it."""
    prompt, name = fields.get("prompt"), shape.columns.get("prompt", "")
    more = fields.get("input")
    if prompt is None:  # an input alone is what is asked
        prompt, name, more = more or None, shape.columns.get("input", ""), None
    if prompt is None:
        if fields.get(CONTEXT) and isinstance(answers[0], str):
            raise MalformedError(
                f"there is a '{shape.columns[CONTEXT]}' and no prompt that it is put after; if it "
                f"is the prompt, give --field prompt={shape.columns[CONTEXT]}"
            )
        return None, name
    if isinstance(prompt, str) and isinstance(answers[0], str):
        more = more and text_of(fields, "input", shape)
        return with_more(with_more(prompt, more), optional_text(fields, CONTEXT, shape)), name
    if isinstance(prompt, list) and isinstance(answers[0], list):
        return prompt, name
    # many files repeat a question of both conversations, the first or the last one, as text
    if isinstance(prompt, str):
        shared = answers[0][: _shared(*answers)]
        texts = [one.get(key) for one in shared if isinstance(one, dict) for key in _CONTENT]
        if prompt in texts:
            return None, name
    raise MalformedError(
        f"field '{name}' is {kind_of(prompt)}, '{shape.columns['chosen']}' is "
        f"{kind_of(answers[0])}; {_BOTH}"
    )


def with_more(prompt: str, more: str | None) -> str:
    """A prompt with what it is about, on a line of its own."""
    return f"{prompt}\n{more}" if more else prompt


def text_of(fields: dict[str, Any], own: str, shape: Shape) -> str:
    """The text of a field. Raises MalformedError."""
    value = fields.get(own)
    if not isinstance(value, str):
        raise MalformedError(f"field '{shape.columns[own]}' is {kind_of(value)}, expected a string")
    return value


def optional_text(fields: dict[str, Any], own: str, shape: Shape) -> str:
    """The text of a field that a record may have; "" for none. Raises MalformedError."""
    return text_of(fields, own, shape) if fields.get(own) else ""


def _labelled(fields: dict[str, Any], shape: Shape) -> Side:
    label = fields.get("label")
    if not isinstance(label, bool):
        shown = "" if label is None else f" {label!r}"
        raise MalformedError(
            f"field '{shape.columns['label']}' is {kind_of(label)}{shown}, expected true or false"
        )
    if "messages" in shape.columns:
        name = shape.columns["messages"]
        return Side(None, fields.get("messages"), name, name, label)
    names = [shape.columns[own] for own in ("prompt", "completion")]
    prompt, answer = (fields.get(own) for own in ("prompt", "completion"))
    for name, value in zip(names, (prompt, answer), strict=True):
        if not isinstance(value, str | list):
            raise MalformedError(f"field '{name}' is {kind_of(value)}, expected text or messages")
    if type(prompt) is not type(answer):
        raise MalformedError(
            f"field '{names[0]}' is {kind_of(prompt)}, '{names[1]}' is {kind_of(answer)}; {_BOTH}"
        )
    _check_kind(answer, names[1], shape)
    if not answer or (isinstance(answer, str) and not answer.strip()):
        raise MalformedError(f"field '{names[1]}' is an empty answer, expected one with text")
    if isinstance(prompt, str):
        prompt = with_more(prompt, optional_text(fields, CONTEXT, shape))
    return Side(prompt, answer, names[0], names[1], label)


def _check_kind(answer: Any, name: str, shape: Shape) -> None:
    """The file's first record has chosen how all of them become text."""
    if isinstance(answer, list) != shape.of_messages:
        first = "messages" if shape.of_messages else "text"
        raise MalformedError(
            f"field '{name}' is {kind_of(answer)}, and {first} in the file's first record; "
            "expected the same in all of its records"
        )


def _shared(chosen: Any, rejected: Any) -> int:
    """How many messages, or characters, both begin with; each keeps one of its own at least.

    Of text, a space before the answers is the answers'.
    """
    most = min(len(chosen), len(rejected)) - 1
    # beginnings are compared whole: a character at a time takes longer than tokenizing them
    shared = bisect_left(range(1, most + 1), True, key=lambda n: chosen[:n] != rejected[:n])
    if isinstance(chosen, str) and shared and chosen[shared - 1] == " ":
        shared -= 1
    return shared


def _after_last_user(messages: list[_Message]) -> tuple[list[_Message], list[_Message]]:
    """(the messages up to the last of the user, those after it)."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    at = users[-1] + 1 if users else 0
    return messages[:at], messages[at:]


def _check_answer(answer: list[_Message], column: str) -> None:
    """Raises MalformedError for messages without an answer of the assistant."""
    own = [message for message in answer if message["role"] == ASSISTANT]
    if not own:
        raise MalformedError(
            f"field '{column}' has no message of the assistant after the prompt, expected an answer"
        )
    if not any(_says_something(message) for message in own):
        raise MalformedError(f"field '{column}' is an empty answer, expected one with content")


def _says_something(message: _Message) -> bool:
    others = ("tool_calls", *REASONING)
    return bool(
        joined_content(message.get("content")).strip() or any(message.get(name) for name in others)
    )


def joined_sides(
    batch: TokenBatch, sides: UInt8, bad: list[BadRecord]
) -> tuple[TokenBatch, list[BadRecord]]:
    """One document for each record that is not among the `bad`, and all that are bad.

    batch  a document for each side, those of a record one after the other
    sides  uint8[n], 1 for a chosen or desirable answer
    """
    bad = [*bad, *_without_answer(batch, {one.position for one in bad})]
    bad.sort(key=lambda record: record.position)
    wrong = np.array([one.position for one in bad], np.int64)
    batch, kept = _without(batch, ~np.isin(batch.position, wrong))
    sides, lengths = sides[kept], np.diff(batch.offsets)
    first = np.flatnonzero(np.diff(batch.position, prepend=-1))
    chosen = np.where(sides[first] == 1, lengths[first], 0).astype(np.int32)
    return (
        replace(
            batch,
            offsets=np.append(batch.offsets[:-1][first], batch.offsets[-1]),
            file=batch.file[first],
            position=batch.position[first],
            chosen=chosen,
        ),
        bad,
    )


def _without_answer(batch: TokenBatch, known: set[int]) -> list[BadRecord]:
    """Records of which a side has no token to train on. OUT batch: nor is its first one any more,
    which nothing predicts.
    """
    if batch.trained is None:
        return []
    begins, ends = batch.offsets[:-1], batch.offsets[1:]
    batch.trained[begins[begins < ends]] = 0
    nothing = trained_between(batch.trained, begins, ends) == 0
    positions = dict.fromkeys(batch.position[nothing].tolist())
    reason = "one of its answers has no token that something comes before, expected a longer one"
    return [BadRecord(one, reason, MEND) for one in positions if one not in known]


def _without(batch: TokenBatch, kept: np.ndarray) -> tuple[TokenBatch, Int64]:
    """Some of the documents, and their indices."""
    indices = np.flatnonzero(kept)
    if kept.all():
        return batch, indices
    lengths = np.diff(batch.offsets)
    tokens = np.repeat(kept, lengths)
    offsets = np.zeros(len(indices) + 1, np.int64)
    np.cumsum(lengths[kept], out=offsets[1:])
    return (
        replace(
            batch, ids=batch.ids[tokens], offsets=offsets,
            trained=None if batch.trained is None else batch.trained[tokens],
            file=batch.file[kept], position=batch.position[kept],
        ),
        indices,
    )  # fmt: skip
