"""Conversations that are too long: whole oldest turns leave until the rest fits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from packer_cli.fitting import Loss
from packer_cli.records import Spans, TokenBatch, UInt8, UInt32
from packer_cli.supervised.chat_template import RefusedError
from packer_cli.supervised.documents import Composer, Conversation, Document, byte_spans
from packer_cli.tokenization import Tokenizer

_Tokens = tuple[UInt32, UInt8 | None]


def shorten(
    batch: TokenBatch, conversations: list[Conversation | None], composer: Composer,
    tokenizer: Tokenizer, max_length: int,
) -> tuple[TokenBatch, Loss]:  # fmt: skip
    """The batch with conversations of more than max_length tokens shortened, and what they lost.

    A turn is a message of the user with all that follows up to the next one; system messages
    at the beginning stay. A conversation whose last turn alone is too long stays as it is.
    """
    lengths = np.diff(batch.offsets)
    waiting = {int(i): conversations[i] for i in np.flatnonzero(lengths > max_length)}
    fitted: dict[int, _Tokens] = {}
    while waiting:
        shorter = {i: _rendered(conversation, composer) for i, conversation in waiting.items()}
        rendered = {i: document for i, document in shorter.items() if document is not None}
        waiting = {}
        for i, tokens in _encoded(rendered, tokenizer).items():
            if len(tokens[0]) <= max_length:
                fitted[i] = tokens
            else:
                waiting[i] = rendered[i].conversation
    return (_replaced(batch, fitted), _loss(batch, fitted)) if fitted else (batch, Loss())


def _rendered(conversation: Conversation | None, composer: Composer) -> Document | None:
    """Without the oldest turn, or more where the template insists; None when none is left."""
    while conversation is not None:
        conversation = _without_oldest_turn(conversation)
        if conversation is None:
            return None
        try:
            return composer.render(conversation)
        except RefusedError:
            continue
    return None


def _without_oldest_turn(conversation: Conversation) -> Conversation | None:
    messages = conversation.messages
    begin = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    users = [i for i, m in enumerate(messages) if m["role"] == "user" and i > begin]
    if not users:
        return None
    return replace(conversation, messages=messages[:begin] + messages[users[0] :])


def _encoded(documents: dict[int, Document], tokenizer: Tokenizer) -> dict[int, _Tokens]:
    if not documents:
        return {}
    texts = [document.text for document in documents.values()]
    spans: Spans | None = byte_spans(list(documents.values()))
    ids, offsets, trained = tokenizer.encode(texts, spans)
    parts = [slice(a, b) for a, b in pairwise(offsets)]
    return {
        i: (ids[part], None if trained is None else trained[part])
        for i, part in zip(documents, parts, strict=True)
    }


def _replaced(batch: TokenBatch, fitted: dict[int, _Tokens]) -> TokenBatch:
    ids, trained, lengths = [], [], np.diff(batch.offsets)
    begin = 0
    for i in sorted(fitted):
        kept = slice(begin, batch.offsets[i])
        ids += [batch.ids[kept], fitted[i][0]]
        trained += [None if batch.trained is None else batch.trained[kept], fitted[i][1]]
        lengths[i] = len(fitted[i][0])
        begin = batch.offsets[i + 1]
    ids.append(batch.ids[begin:])
    trained.append(None if batch.trained is None else batch.trained[begin:])
    flags = [
        np.ones(len(part), np.uint8) if flag is None else flag
        for part, flag in zip(ids, trained, strict=True)
    ]
    return replace(
        batch,
        ids=np.concatenate(ids),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        trained=None if batch.trained is None else np.concatenate(flags),
    )


def _loss(batch: TokenBatch, fitted: dict[int, _Tokens]) -> Loss:
    tokens = trained = 0
    for i, (ids, flags) in fitted.items():
        part = slice(batch.offsets[i], batch.offsets[i + 1])
        tokens += len(batch.ids[part]) - len(ids)
        before = len(batch.ids[part]) if batch.trained is None else int(batch.trained[part].sum())
        trained += before - (len(ids) if flags is None else int(flags.sum()))
    return Loss(len(fitted), tokens, trained)
