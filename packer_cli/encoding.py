"""Records to tokens: texts through the tokenizer, token records as they are.

Records of messages and the like come from `supervised/encoder.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from packer_cli.counts import Counts
from packer_cli.errors import DataError, InternalError
from packer_cli.readers import reader_for
from packer_cli.records import BadRecord, InputFile, Records, Slice, TokenBatch
from packer_cli.tokenization import Tokenizer

# The records of a slice, in batches.
Read = Callable[[InputFile, Slice], Iterator[Records]]
# Records of a file to their tokens and the bad records, those of the reader included.
Encode = Callable[[Records, InputFile, Counts], tuple[TokenBatch, list[BadRecord]]]


def plain_encoder(tokenizer: Tokenizer | None, highest_id: int | None = None) -> Encode:
    """For texts, and for token ids of a tokenizer whose `highest_id` is known."""

    def encode(
        records: Records, file: InputFile, counts: Counts
    ) -> tuple[TokenBatch, list[BadRecord]]:
        batch = token_batch(records, file, tokenizer)
        if highest_id is not None:
            _refuse_ids_above(highest_id, batch, file)
        return batch, records.bad

    return encode


def _refuse_ids_above(highest: int, batch: TokenBatch, file: InputFile) -> None:
    above = np.flatnonzero(batch.ids > highest)
    if len(above):
        document = int(np.searchsorted(batch.offsets, above[0], side="right")) - 1
        place = reader_for(file.format).describe(file, int(batch.position[document]))
        raise DataError(
            f"{file.path}, {place}: input_ids holds {batch.ids[above[0]]}, the tokenizer's highest "
            f"id is {highest}",
            "name the tokenizer that made the ids, or none",
        )


def token_batch(records: Records, file: InputFile, tokenizer: Tokenizer | None) -> TokenBatch:
    """The documents of texts or ids, all of one file."""
    if records.tokens is not None:
        ids, offsets, trained = records.tokens
    elif tokenizer is not None and records.texts is not None:
        ids, offsets, trained = tokenizer.encode(records.texts, records.spans)
    elif not len(records.positions):
        ids, offsets, trained = np.empty(0, np.uint32), np.zeros(1, np.int64), None
    else:
        raise InternalError("texts reached the encoder without a tokenizer")
    if len(offsets) != len(records.positions) + 1:
        raise InternalError(f"{len(records.positions)} records became {len(offsets) - 1} documents")
    files = np.full(len(records.positions), file.index, np.int32)
    return TokenBatch(ids, offsets, trained, files, records.positions)
