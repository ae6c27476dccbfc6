"""Texts with spans to tokens and trained flags, with the counts of what they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from packer_cli.chat.messages import UndecidableError
from packer_cli.chat.pairs import joined_sides
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.options import PackConfig
from packer_cli.records import MOST_TURNS, InputFile, Records, TokenBatch, record_position
from packer_cli.result.counts import Counts
from packer_cli.tokenization.encoding import Encoded, token_batch
from packer_cli.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from packer_cli.chat.renderer import Conversation, Document


class SupervisedEncoder:
    """An `encoding.Encode`. Safe to share between threads."""

    def __init__(
        self,
        render: Callable[[Conversation], Document],
        config: DocumentConfig,
        tokenizer: Tokenizer,
        *,
        glued: bool = False,
    ) -> None:
        """`render` as in Composer, for conversations that are to be shortened. `glued`: answers
        follow their prompts without a chat template.
        """
        self._glued = glued
        self._render = render
        self._config = config
        self._tokenizer = tokenizer

    def __call__(self, records: Records, file: InputFile) -> Encoded:
        batch, special, crossing = token_batch(records, file, self._tokenizer)
        turns, without_end = records.turns
        counts = Counts(
            special_tokens_in_text=special,
            trained_turns=turns,
            turns_without_end=without_end,
            empty_turns=records.empty_turns,
            unread=dict(records.unread),
            edge_tokens=crossing if self._glued else 0,
        )
        record = np.arange(len(records.positions))
        if records.sides is not None:  # both sides of a pair are one document
            record = np.cumsum(np.diff(records.positions, prepend=-1) != 0)
        if records.unshown:
            lengths = self._lengths([part.text for part in records.unshown])
            own = [part._replace(record=int(record[part.record])) for part in records.unshown]
            counts.add_unshown(file.index, own, lengths)
        if records.masked:
            numbers, texts = zip(*records.masked, strict=True)
            counts.masked_documents = len(np.unique(record[list(numbers)]))
            counts.masked_tokens = sum(self._lengths(texts))
        if records.conversations is not None and isinstance(self._config, PackConfig):
            # jinja2 is slow to import
            from packer_cli.chat.documents import placed  # noqa: PLC0415
            from packer_cli.chat.shorten import shorten  # noqa: PLC0415

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
        if records.sides is None:
            return Encoded(batch, records.bad, counts)
        batch, bad = joined_sides(batch, records.sides, records.bad)
        return Encoded(batch, bad, counts)

    def _lengths(self, texts: Sequence[str]) -> list[int]:
        """How many tokens they have, each encoded by itself."""
        offsets = self._tokenizer.encode_bare(list(texts), None, None)[1]
        return np.diff(offsets).tolist()  # type: ignore[no-any-return]


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
