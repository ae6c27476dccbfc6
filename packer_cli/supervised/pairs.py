"""Records of preference: each side of a pair as a prompt and its answer, and single answers with a
label.

    {"prompt": "..", "chosen": "..", "rejected": ".."}     text, or lists of messages
    {"chosen": [..], "rejected": [..]}                     two conversations that share a beginning
    {"prompt": .., "completion": .., "label": true}        an answer that is desirable, or is not
    {"messages": [..], "label": false}                     the same: what follows the last user

A side becomes a text of its own, and `encoder.py` puts those of a record together again.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from itertools import compress
from typing import Any, NamedTuple, TypeVar

import numpy as np

from packer_cli.config.shapes import CONTEXT, Shape
from packer_cli.records import BadRecord, Int64, Records
from packer_cli.supervised.messages import (
    ASSISTANT,
    REASONING,
    MalformedError,
    joined_content,
    kind_of,
    parse_messages,
    with_context,
)
from packer_cli.supervised.sides import MEND

_Message = dict[str, Any]
_Document = TypeVar("_Document")
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
    """With each side as a record of its own, one after the other, at the position of both.

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
    prompt, name = fields.get("prompt"), shape.columns["prompt"]
    more = fields.get("input")
    if prompt is None:  # an input alone is what is asked
        prompt, name, more = more or None, shape.columns["input"], None
    if prompt is None:
        return None, name
    if isinstance(prompt, str) and isinstance(answers[0], str):
        return with_more(prompt, more), name
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


def with_more(prompt: str, more: Any) -> str:
    """A prompt with what it is about, on a line of its own."""
    return f"{prompt}\n{more}" if isinstance(more, str) and more else prompt


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
        prompt = with_more(prompt, fields.get(CONTEXT))
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
