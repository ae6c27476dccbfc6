"""Records to tokens: texts through the tokenizer, token records as they are.

Records of messages and the like come from `chat/encoder.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from packer_cli.errors import DataError, InternalError
from packer_cli.inputs.formats import reader_for
from packer_cli.records import (
    BadRecord,
    InputFile,
    Records,
    Slice,
    TokenBatch,
    Values,
    record_position,
)
from packer_cli.result.counts import Counts
from packer_cli.tokenization.engines import UnencodableError
from packer_cli.tokenization.fill_in_middle import FillInMiddle
from packer_cli.tokenization.specials import NO_SPECIALS, SPELLED_OUT_TIP, Specials, spelled_out
from packer_cli.tokenization.tokenizer import Tokenizer

# The records of a slice, in batches.
Read = Callable[[InputFile, Slice], Iterator[Records]]


class Encoded(NamedTuple):
    """Records of a file as tokens.

    bad     the bad records, those of the reader included
    counts  what the records add to the run's counts, beyond their tokens
    """

    batch: TokenBatch
    bad: list[BadRecord]
    counts: Counts


Encode = Callable[[Records, InputFile], Encoded]


def plain_encoder(
    tokenizer: Tokenizer | None,
    highest_id: int | None = None,
    specials: Specials = NO_SPECIALS,
    fim: FillInMiddle | None = None,
) -> Encode:
    """The encoder of texts, and of token ids of a tokenizer whose `highest_id` is known."""

    def encode(records: Records, file: InputFile) -> Encoded:
        records, rearranged = _without_specials(records, specials), 0
        if fim is not None and records.texts:
            records, rearranged = fim.rearranged(records, specials)
        batch, special, _ = token_batch(records, file, tokenizer)
        if fim is not None and records.specials is None:
            special -= rearranged * fim.written(specials)
        if highest_id is not None:
            _refuse_ids_above(highest_id, batch, file)
        counts = Counts(special_tokens_in_text=special, fim_documents=rearranged)
        return Encoded(batch, records.bad, counts)

    return encode


def skipping(encode: Encode, tokenizer: Tokenizer, turns: str = "") -> Encode:
    """The encoder, for which a record is bad if the tokenizer cannot encode a text of it. `turns`:
    as the option says, if the texts are turns of records by then.
    """

    def encode_others(records: Records, file: InputFile) -> Encoded:
        try:
            return encode(records, file)
        except UnencodableError:
            texts, bad = [*(records.texts or ())], dict[int, BadRecord]()
            positions = record_position(records.positions, turns)
            for i, text in enumerate(texts):
                try:
                    tokenizer.encode_bare([text])
                except UnencodableError as error:
                    texts[i] = ""
                    at = int(positions[i])
                    bad.setdefault(at, BadRecord(at, error.message, error.tip))
            if not bad:  # what was encoded was another text
                raise
        others = encode(replace(records, texts=texts), file)
        wanted = ~np.isin(record_position(others.batch.position, turns), [*bad])
        every = sorted([*others.bad, *bad.values()], key=lambda record: record.position)
        return others._replace(batch=others.batch.take(wanted), bad=every)

    return encode_others


def _without_specials(records: Records, specials: Specials) -> Records:
    """Texts with special tokens are bad records if the policy says so."""
    if records.texts is None or specials.policy == "keep" or not specials.tokens:
        return records
    written = {i: name for i, text in enumerate(records.texts) if (name := specials.in_text(text))}
    if not written:
        return replace(records, specials=0)
    bad = [
        BadRecord(int(records.positions[i]), spelled_out(name), SPELLED_OUT_TIP)
        for i, name in written.items()
    ]
    kept = [i for i in range(len(records.texts)) if i not in written]
    return replace(
        records,
        positions=records.positions[kept],
        texts=[records.texts[i] for i in kept],
        bad=sorted([*records.bad, *bad], key=lambda record: record.position),
        specials=len(written),
    )


def _refuse_ids_above(highest: int, batch: TokenBatch, file: InputFile) -> None:
    if batch.ids.max(initial=0) > highest:
        above = np.flatnonzero(batch.ids > highest)
        document = int(np.searchsorted(batch.offsets, above[0], side="right")) - 1
        place = reader_for(file.format).describe(file, int(batch.position[document]))
        raise DataError(
            f"{file.path}, {place}: input_ids holds {batch.ids[above[0]]}, the tokenizer's highest "
            f"id is {highest}",
            "name the tokenizer that made the ids, or none",
        )


def add_of_spans(carried: Values, of_spans: Values) -> None:
    """Add what messages carry to what records do: where one has values the other has 0 bytes. INOUT
    carried.
    """
    carried.view(np.uint8)[:] |= of_spans.view(np.uint8)


def token_batch(
    records: Records, file: InputFile, tokenizer: Tokenizer | None
) -> tuple[TokenBatch, int, int]:
    """The documents of texts or ids, all of one file; how many special tokens texts spell out, and
    how many trained tokens begin before what is trained on.

    Texts are taken out of `records`: a very long one is gone before its tokens are copied.
    """
    special, crossing, carried, of_spans = records.specials or 0, 0, records.carried, None
    if records.tokens is not None:
        ids, offsets, trained = records.tokens
    elif tokenizer is not None and records.texts is not None:
        bare = tokenizer.encode_bare(records.texts, records.spans)
        if records.specials is None:
            special = tokenizer.count_special(bare[0], records.texts)
        records.texts.clear()
        if (flags := bare[2]) is not None:
            crossing = int(np.count_nonzero(flags > 1))
            np.minimum(flags, 1, out=flags)
        ids, offsets, trained, of_spans = tokenizer.surrounded(*bare)
    elif not len(records.positions):
        ids, offsets, trained = np.empty(0, np.uint32), np.zeros(1, np.int64), None
    else:
        raise InternalError("texts reached the encoder without a tokenizer")
    if len(offsets) != len(records.positions) + 1:
        raise InternalError(f"{len(records.positions)} records became {len(offsets) - 1} documents")
    files = np.full(len(records.positions), file.index, np.int32)
    if carried is not None and records.tokens is None:
        carried = np.repeat(carried, np.diff(offsets))
    if carried is not None and of_spans is not None:
        add_of_spans(carried, of_spans)
    batch = TokenBatch(
        ids, offsets, trained, files, records.positions, carried=carried, turns=records.turns
    )
    return batch, special, crossing
