"""Texts with spans to tokens and trained flags, with the counts of what they hold.

Conversations that are too long lose their oldest turns here, if the user wants that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from packer_cli.chat.documents import byte_spans, message_columns, values_of_messages
from packer_cli.chat.messages import Conversation, RefusedError, UndecidableError
from packer_cli.chat.renderer import Document
from packer_cli.errors import DataError
from packer_cli.inputs.formats import reader_for
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.options import PackConfig
from packer_cli.packing.fitting import Loss
from packer_cli.records import MOST_TURNS, Documents, InputFile, Records, record_position
from packer_cli.result.counts import Counts
from packer_cli.tokenization.encoding import Encoded, documents_of, token_batch
from packer_cli.tokenization.tokenizer import Tokenizer

_Render = Callable[[Conversation], Document]  # raises RefusedError


class SupervisedEncoder:
    """Encoder of texts with spans, an `encoding.Encode`."""

    def __init__(
        self, render: _Render, config: DocumentConfig, tokenizer: Tokenizer, *, glued: bool = False
    ) -> None:
        """`render`: as in Composer, for conversations that are shortened. `glued`: whether answers
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
        """Count the tokens of texts, each encoded by itself."""
        offsets = self._tokenizer.encode_bare(list(texts))[1]
        return np.diff(offsets).tolist()  # type: ignore[no-any-return]


def placed(error: UndecidableError, file: InputFile) -> DataError:
    """Return the error with the place of its record."""
    place = reader_for(file.format).describe(file, error.position)
    return DataError(f"{file.path}, {place}: {error.message}", error.tip)


def _doubled(batch: Documents, bos: int | None) -> int:
    """Count documents that begin with BOS twice."""
    if bos is None:
        return 0
    ids = batch.token_ids
    begins = batch.offsets[:-1][np.diff(batch.offsets) > 1]
    return int(((ids[begins] == bos) & (ids[begins + 1] == bos)).sum())


def repeated_tokens(batch: Documents) -> int:
    """Count the tokens that successive documents of a record have in common at first."""
    record, ids = batch.position // MOST_TURNS, batch.token_ids
    repeated = 0
    for document in (np.flatnonzero(np.diff(record) == 0) + 1).tolist():
        before, begin, end = batch.offsets[document - 1 : document + 2].tolist()
        size = min(begin - before, end - begin)
        differs = ids[before : before + size] != ids[begin : begin + size]
        repeated += int(np.argmax(differs)) if differs.any() else size
    return repeated


# -- Conversations that are too long: the oldest turns are left out until the rest fits


def shorten(
    batch: Documents, conversations: list[Conversation | None], render: _Render,
    tokenizer: Tokenizer, config: PackConfig,
) -> tuple[Documents, Loss]:  # fmt: skip
    """Shorten conversations that are longer than a row, and count what they lose.

    A turn is a message of the user with all that follows up to the next one; system messages
    at the beginning stay. A conversation whose last turn alone is too long stays as it is.
    Raises UndecidableError, with its position, unless bad records are skipped.
    """
    overlong = np.flatnonzero(np.diff(batch.offsets) > config.max_length).tolist()
    fitted: dict[int, Documents] = {}
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
    return _replaced(batch, fitted) if fitted else (batch, Loss())


def _fitting(
    conversation: Conversation, render: _Render, tokenizer: Tokenizer, config: PackConfig
) -> Documents | None:
    """Return the tokens of a conversation without as few of its oldest turns as possible.

    Steps double, and are halved again: for one turn too many it is rendered once, for thousands a
    few dozen times, since each rendering has the length of what is left.
    """
    messages = conversation.messages
    begin = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    users = [i for i, m in enumerate(messages) if m["role"] == "user" and i > begin]
    low, high, step = 0, len(users), 1  # the number of turns to leave out is in low..high
    best: Documents | None = None
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
        if tokens is not None and tokens.offsets[-1] > config.max_length:
            low, step = number + 1, 2 * step
        else:
            best, high = tokens or best, first
    return best


def _tokens_of(document: Document, tokenizer: Tokenizer, config: DocumentConfig) -> Documents:
    values = values_of_messages(document, message_columns(config))
    return documents_of([document.text], byte_spans([document], values), tokenizer)


def _replaced(batch: Documents, fitted: dict[int, Documents]) -> tuple[Documents, Loss]:
    """Return the batch with other tokens of some documents, and what it lost by that."""
    numbers, order = np.array([*fitted]), np.arange(len(batch))
    order[numbers] = len(batch) + np.arange(len(fitted))
    shorter = Documents.concat([*fitted.values()]).beside({}, batch.take(numbers).of_documents)
    left = Documents.concat([batch, shorter]).take(order)
    (tokens, trained), (fewer, trained_of_these) = _sizes(batch), _sizes(left)
    return left, Loss(len(fitted), tokens - fewer, trained - trained_of_these)


def _sizes(batch: Documents) -> tuple[int, int]:
    """Count the tokens, and those that documents say to train on."""
    tokens = int(batch.offsets[-1])
    return tokens, tokens if batch.trained is None else int(batch.trained.sum())
