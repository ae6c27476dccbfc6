"""Texts with spans to tokens and trained flags, with the counts of what they hold.

Conversations that are too long lose their oldest turns here, if the user wants that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from packer_cli.chat.messages import Conversation, RefusedError, UndecidableError
from packer_cli.errors import DataError
from packer_cli.inputs.formats import reader_for
from packer_cli.options.carried import MESSAGE
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.options import PackConfig
from packer_cli.packing.fitting import Loss
from packer_cli.records import (
    MOST_TURNS,
    InputFile,
    Records,
    TokenBatch,
    UInt8,
    UInt32,
    Values,
    offsets_of,
    record_position,
)
from packer_cli.result.carried import fields_of
from packer_cli.result.counts import Counts
from packer_cli.tokenization.encoding import Encoded, add_of_spans, token_batch
from packer_cli.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from packer_cli.chat.renderer import Document

_Tokens = tuple[UInt32, UInt8 | None, Values | None]
_Render = Callable[[Conversation], "Document"]  # raises RefusedError


class SupervisedEncoder:
    """An `encoding.Encode`. Safe to share between threads."""

    def __init__(
        self, render: _Render, config: DocumentConfig, tokenizer: Tokenizer, *, glued: bool = False
    ) -> None:
        """`render` as in Composer, for conversations that are to be shortened. `glued`: answers
        follow their prompts without a chat template.
        """
        self._render, self._config, self._tokenizer = render, config, tokenizer
        self._glued = glued

    def __call__(self, records: Records, file: InputFile) -> Encoded:
        batch, special, crossing = token_batch(records, file, self._tokenizer)
        counts = Counts(
            special_tokens_in_text=special,
            empty_turns=records.empty_turns,
            unread=dict(records.unread),
            edge_tokens=crossing if self._glued else 0,
        )
        if records.unshown:
            lengths = self._lengths([part.text for part in records.unshown])
            counts.add_unshown(file.index, records.unshown, lengths)
        if records.masked:
            documents, texts = zip(*records.masked, strict=True)
            counts.masked_documents = len({*documents})
            counts.masked_tokens = sum(self._lengths(texts))
        if records.conversations is not None and isinstance(self._config, PackConfig):
            talks = records.conversations
            try:
                batch, loss = shorten(batch, talks, self._render, self._tokenizer, self._config)
            except UndecidableError as error:
                error.position = record_position(error.position, self._config.turns)
                raise placed(error, file) from error
            counts.add_truncated(file.index, loss)
        if self._config.turns == "each":
            counts.repeated_tokens = repeated_tokens(batch)
        counts.double_bos_documents += _doubled(batch, self._tokenizer.info.bos_token_id)
        return Encoded(batch, records.bad, counts)

    def _lengths(self, texts: Sequence[str]) -> list[int]:
        """How many tokens they have, each encoded by itself."""
        offsets = self._tokenizer.encode_bare(list(texts))[1]
        return np.diff(offsets).tolist()  # type: ignore[no-any-return]


def placed(error: UndecidableError, file: InputFile) -> DataError:
    """An error that names the place of its record."""
    place = reader_for(file.format).describe(file, error.position)
    return DataError(f"{file.path}, {place}: {error.message}", error.tip)


def _doubled(batch: TokenBatch, bos: int | None) -> int:
    """How many documents begin with BOS twice."""
    if bos is None:
        return 0
    begins = batch.offsets[:-1][np.diff(batch.offsets) > 1]
    return int(((batch.ids[begins] == bos) & (batch.ids[begins + 1] == bos)).sum())


def repeated_tokens(batch: TokenBatch) -> int:
    """How many tokens of documents of one record, one after another, are the beginning of the
    document before: what would be saved if a shared beginning were stored once.
    """
    record = batch.position // MOST_TURNS
    repeated = 0
    for document in (np.flatnonzero(np.diff(record) == 0) + 1).tolist():
        before, begin, end = batch.offsets[document - 1 : document + 2].tolist()
        size = min(begin - before, end - begin)
        differs = batch.ids[before : before + size] != batch.ids[begin : begin + size]
        repeated += int(np.argmax(differs)) if differs.any() else size
    return repeated


# -- Conversations that are too long: the oldest turns are left out until the rest fits


def shorten(
    batch: TokenBatch, conversations: list[Conversation | None], render: _Render,
    tokenizer: Tokenizer, config: PackConfig,
) -> tuple[TokenBatch, Loss]:  # fmt: skip
    """The batch with conversations of more than a row's tokens shortened, and what they lost.

    A turn is a message of the user with all that follows up to the next one; system messages
    at the beginning stay. A conversation whose last turn alone is too long stays as it is.
    Raises UndecidableError, with its position, unless bad records are skipped.
    """
    overlong = np.flatnonzero(np.diff(batch.offsets) > config.max_length).tolist()
    fitted: dict[int, _Tokens] = {}
    for i in overlong:
        if (conversation := conversations[i]) is None:
            continue
        try:
            tokens = _fitting(conversation, render, tokenizer, config)
        except UndecidableError as error:
            if config.on_error == "fail":
                error.position = int(batch.position[i])
                raise
            continue  # it stays too long, and is counted as such
        if tokens is not None:
            fitted[i] = tokens
    return _replaced(batch, fitted, config) if fitted else (batch, Loss())


def _fitting(
    conversation: Conversation, render: _Render, tokenizer: Tokenizer, config: PackConfig
) -> _Tokens | None:
    """The tokens of a conversation without the fewest oldest turns that have to go.

    Steps double, and are halved again: for one turn too many it is rendered once, for thousands a
    few dozen times, since each rendering has the length of what is left.
    """
    messages = conversation.messages
    begin = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    users = [i for i, m in enumerate(messages) if m["role"] == "user" and i > begin]
    low, high, step = 0, len(users), 1  # what is looked for is in low..high
    best: _Tokens | None = None
    while low < high:
        first = number = min(low + step - 1, (low + high) // 2)
        tokens = None
        while tokens is None and number < high:
            kept = messages[:begin] + messages[users[number] :]
            try:
                shorter = render(replace(conversation, messages=kept))
                tokens = _tokens_of(shorter, tokenizer, config)
            except RefusedError:  # the template may insist on leaving out more
                number += 1
            except UndecidableError:
                if best is None or config.on_error == "fail":
                    raise
                return best
        if tokens is not None and len(tokens[0]) > config.max_length:
            low, step = number + 1, 2 * step
        else:
            best, high = tokens or best, first
    return best


def _tokens_of(document: Document, tokenizer: Tokenizer, config: DocumentConfig) -> _Tokens:
    from packer_cli.chat.documents import byte_spans, carried_by  # noqa: PLC0415 jinja2 is slow

    own = [document]
    spans = byte_spans(own, carried_by(own, config))
    ids, _, trained, carried = tokenizer.encode_carrying([document.text], spans)
    return ids, trained, carried


def _replaced(
    batch: TokenBatch, fitted: dict[int, _Tokens], config: DocumentConfig
) -> tuple[TokenBatch, Loss]:
    """The batch with other tokens of some documents, and what it lost by that."""
    ids, trained, carried = list[UInt32](), list[UInt8](), list[Values]()
    for i, (begin, end) in enumerate(pairwise(batch.offsets.tolist())):
        own = batch.ids[begin:end]
        flags = None if batch.trained is None else batch.trained[begin:end]
        own, flags, of_spans = fitted.get(i, (own, flags, None))
        ids.append(own)
        trained.append(np.ones(len(own), np.uint8) if flags is None else flags)
        if batch.carried is not None:
            carried.append(batch.carried[begin:end])
            if i in fitted:  # what follows the record is at each token
                carried[-1] = np.repeat(batch.carried[begin : begin + 1], len(own))
                columns = config.carried.values()
                for one in columns:
                    if one.of == MESSAGE:
                        fields_of(carried[-1], columns)[one.name] = 0
                if of_spans is not None:
                    add_of_spans(carried[-1], of_spans)
    lengths = [len(own) for own in ids]
    flat = np.concatenate(trained)
    left = replace(
        batch,
        ids=np.concatenate(ids),
        offsets=offsets_of(lengths),
        trained=None if batch.trained is None else flat,
        carried=np.concatenate(carried) if carried else None,
    )
    before = len(batch.ids) if batch.trained is None else int(batch.trained.sum())
    return left, Loss(len(fitted), len(batch.ids) - len(left.ids), before - int(flat.sum()))
