"""`--turns each`: a document for each answer, with all that comes before it as its prompt.

A conversation becomes several, each up to one of the assistant's messages, of which only that is
trained on. So every answer is rendered as the last one, after the same text as when it is asked
for, whatever a template leaves out of earlier turns.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from packer_cli.records import MOST_TURNS, Int64, turn_position
from packer_cli.supervised.flags import DETAIL, FLAGS
from packer_cli.supervised.messages import ASSISTANT, MalformedError, with_context
from packer_cli.supervised.renderer import Conversation, Document

_Message = dict[str, Any]
_OF_TRAINING = {*FLAGS, DETAIL}


def answers(messages: list[_Message], train_on: str | None) -> list[int]:
    """The numbers of the messages that --train-on chooses, in order."""
    speakers = [n for n, message in enumerate(messages) if message.get("role") == ASSISTANT]
    if train_on == "last-assistant":
        return speakers[-1:]
    if train_on == "final":
        return [number for number in speakers if _ends_exchange(messages, number)]
    return speakers


def only_trained_on(conversation: Conversation, chosen: Collection[int]) -> Conversation:
    """The conversation with these of the assistant's messages trained on, and no others."""
    return replace(conversation, messages=with_context(conversation.messages, chosen))


def up_to_each(conversation: Conversation, chosen: list[int]) -> list[Conversation]:
    """The conversations up to each of some messages of the assistant. Raises MalformedError."""
    messages = conversation.messages
    speakers = [n for n, message in enumerate(messages) if message.get("role") == ASSISTANT]
    if len(speakers) > MOST_TURNS:
        raise MalformedError(
            f"has {len(speakers):,} messages of the assistant; --turns each takes {MOST_TURNS:,}"
        )
    context = [_without_flags(message) for message in messages]
    return [
        replace(conversation, messages=[*context[:number], messages[number]], turn=turn)
        for turn, number in enumerate(speakers)
        if number in chosen
    ]


def joined(documents: list[Document]) -> list[Document]:
    """The documents of a record: what one leaves out and another shows is not left out, and the
    rest is told by the last.
    """
    own = [set(document.left_out) for document in documents]
    sizes = [len(d.conversation.messages) if d.conversation else 0 for d in documents]
    left_out = dict.fromkeys(
        piece
        for document in documents
        for piece in document.left_out
        if all(piece in some for some, size in zip(own, sizes, strict=True) if size > piece.message)
    )
    last = replace(documents[-1], left_out=tuple(sorted(left_out, key=lambda p: p.message)))
    return [*(replace(document, left_out=()) for document in documents[:-1]), last]


def positions_of(records: Int64, documents: list[Document]) -> Int64:
    """int64[n], of documents that come from these positions of records, int64[n]."""
    turns = [d.conversation.turn or 0 if d.conversation else 0 for d in documents]
    own = [turn_position(at, turn) for at, turn in zip(records.tolist(), turns, strict=True)]
    return np.array(own, np.int64)


def _ends_exchange(messages: list[_Message], number: int) -> bool:
    """Whether an answer is final: it calls no tool, and the assistant does not go on."""
    following = messages[number + 1 : number + 2]
    goes_on = any(message.get("role") in (ASSISTANT, "tool") for message in following)
    return not (messages[number].get("tool_calls") or goes_on)


def _without_flags(message: _Message) -> _Message:
    if _OF_TRAINING.isdisjoint(message):
        return message
    return {key: value for key, value in message.items() if key not in _OF_TRAINING}
