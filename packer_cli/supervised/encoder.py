"""Supervised records to tokens and trained flags; what there is to know of them is counted."""

from __future__ import annotations

import numpy as np

from packer_cli.config import PackConfig
from packer_cli.counts import Counts
from packer_cli.encoding import token_batch
from packer_cli.errors import DataError
from packer_cli.readers import reader_for
from packer_cli.records import BadRecord, InputFile, Records, TokenBatch
from packer_cli.supervised.documents import Composer, turn_counts
from packer_cli.supervised.shorten import shorten
from packer_cli.supervised.turns import UndecidableError
from packer_cli.tokenization import Tokenizer


class SupervisedEncoder:
    """An `encoding.Encode`. Safe to share between threads."""

    def __init__(self, composer: Composer, tokenizer: Tokenizer, config: PackConfig) -> None:
        self._composer = composer
        self._tokenizer = tokenizer
        self._config = config

    def __call__(
        self, records: Records, file: InputFile, counts: Counts
    ) -> tuple[TokenBatch, list[BadRecord]]:
        """Raises DataError where it cannot be told what is to be trained on."""
        try:
            composed, documents = self._composer.compose(records)
        except UndecidableError as error:
            place = reader_for(file.format).describe(file, error.position)
            raise DataError(f"{file.path}, {place}: {error.message}", error.tip) from error
        batch = token_batch(composed, file, self._tokenizer)
        counts.add_turns(turn_counts(documents, self._composer.end_tokens))
        if self._config.overlong == "truncate-turns":
            limit = self._config.max_length
            batch, loss = shorten(batch, documents, self._composer, self._tokenizer, limit)
            counts.add_loss(loss)
            counts.encoded_tokens += loss.truncated_tokens
        counts.double_bos_documents += _doubled(batch, self._tokenizer.info.bos_token_id)
        return batch, composed.bad


def _doubled(batch: TokenBatch, bos: int | None) -> int:
    """How many documents begin with BOS twice."""
    if bos is None:
        return 0
    begins = batch.offsets[:-1][np.diff(batch.offsets) > 1]
    return int(((batch.ids[begins] == bos) & (batch.ids[begins + 1] == bos)).sum())
