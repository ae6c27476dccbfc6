"""Records to tokens: texts through the tokenizer, token records as they are."""

from __future__ import annotations

import numpy as np

from packer_cli.errors import InternalError
from packer_cli.records import Records, TokenBatch
from packer_cli.tokenization import Tokenizer


def encode(records: Records, file: int, tokenizer: Tokenizer | None) -> TokenBatch:
    """The documents of `records`, all of input file number `file`."""
    if records.tokens is not None:
        ids, offsets, trained = records.tokens
    elif tokenizer is not None and records.texts is not None:
        (ids, offsets), trained = tokenizer.encode(records.texts), None
    else:
        raise InternalError("texts reached the encoder without a tokenizer")
    if len(offsets) != len(records.positions) + 1:
        raise InternalError(f"{len(records.positions)} records became {len(offsets) - 1} documents")
    files = np.full(len(records.positions), file, np.int32)
    return TokenBatch(ids, offsets, trained, files, records.positions)
