"""Conversations that are too long: the oldest turns are left out until the rest fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np

from packer_cli.chat.documents import byte_spans, controls_of
from packer_cli.chat.messages import (
    RefusedError,
    UndecidableError,
)
from packer_cli.chat.renderer import Conversation, Document
from packer_cli.options.options import PackConfig
from packer_cli.packing.fitting import Loss
from packer_cli.records import Spans, TokenBatch, UInt8, UInt32
from packer_cli.tokenization.tokenizer import Tokenizer

_Tokens = tuple[UInt32, UInt8 | None]
_Render = Callable[[Conversation], Document]  # raises RefusedError


def shorten(
    batch: TokenBatch, conversations: list[Conversation | None], render: _Render,
    tokenizer: Tokenizer, config: PackConfig,
) -> tuple[TokenBatch, Loss]:  # fmt: skip
    """The batch with conversations of more than a row's tokens shortened, and what they lost.

    A turn is a message of the user with all that follows up to the next one; system messages
    at the beginning stay. A conversation whose last turn alone is too long stays as it is.
    Raises UndecidableError, with its position, unless bad records are skipped.
    """
    max_length = config.max_length
    overlong = np.flatnonzero(np.diff(batch.offsets) > max_length).tolist()
    searches = {i: _Search(talk) for i in overlong if (talk := conversations[i]) is not None}
    fitted: dict[int, _Tokens] = {}
    while searches:
        tried: dict[int, Document] = {}
        for i, search in searches.items():
            try:
                document = search.next(render)
            except UndecidableError as error:
                if config.on_error == "fail":
                    error.position = int(batch.position[i])
                    raise
                document = None  # it stays too long, and is counted as such
            if document is not None:
                tried[i] = document
        searches = {i: searches[i] for i in tried}
        for i, tokens in _encoded(tried, tokenizer).items():
            fits = len(tokens[0]) <= max_length
            if fits:
                fitted[i] = tokens
            searches[i].tell(fits)
    return (_replaced(batch, fitted), _loss(batch, fitted)) if fitted else (batch, Loss())


class _Search:
    """For the fewest oldest turns to leave out of a conversation, in few renderings.

    The steps double, and are halved again: one turn too many is one rendering, and thousands
    are a few dozen, since each has the length of what is left.
    """

    def __init__(self, conversation: Conversation) -> None:
        messages = conversation.messages
        begin = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
        users = [i for i, m in enumerate(messages) if m["role"] == "user" and i > begin]
        self._conversation, self._begin, self._users = conversation, begin, users
        self._low, self._high, self._step = 0, len(users), 1  # the answer is in low..high
        self._asked = self._tried = 0

    def next(self, render: _Render) -> Document | None:
        """The next document to try; None when the search is over."""
        while self._low < self._high:
            middle = (self._low + self._high) // 2
            self._asked = min(self._low + self._step - 1, middle)
            for number in range(self._asked, self._high):
                self._tried = number
                try:
                    return render(self._without(self._users[number]))
                except RefusedError:  # the template may insist on leaving out more
                    continue
            self._high = self._asked
        return None

    def tell(self, fits: bool) -> None:
        """Say whether the last document was short enough."""
        if fits:
            self._high = self._asked
        else:
            self._low = self._tried + 1
            self._step *= 2

    def _without(self, user: int) -> Conversation:
        messages = self._conversation.messages
        return replace(self._conversation, messages=messages[: self._begin] + messages[user:])


def _encoded(documents: dict[int, Document], tokenizer: Tokenizer) -> dict[int, _Tokens]:
    if not documents:
        return {}
    texts = [document.text for document in documents.values()]
    spans: Spans | None = byte_spans(list(documents.values()))
    controls = controls_of(list(documents.values()))
    ids, offsets, trained = tokenizer.encode(texts, spans, controls)
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
