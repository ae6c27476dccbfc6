"""Encode records: texts with the tokenizer, token ids as they are.

Conversations and prompts are encoded by `chat/encoder.py`. Copies of a batch aside, the cost is
that of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from packer_cli.errors import DataError, InternalError
from packer_cli.inputs.formats import reader_for
from packer_cli.records import (
    FILE,
    POSITION,
    TURNS,
    BadRecord,
    Documents,
    InputFile,
    Records,
    Slice,
    TrainedSpans,
    record_position,
)
from packer_cli.result.counts import Counts
from packer_cli.tokenization.engines import UnencodableError
from packer_cli.tokenization.fill_in_middle import FillInMiddle
from packer_cli.tokenization.locate import NO_SPECIALS, SPELLED_OUT_TIP, Specials, spelled_out
from packer_cli.tokenization.tokenizer import SpanTokens, Tokenizer

# Reads the records of a slice, in batches.
Read = Callable[[InputFile, Slice], Iterator[Records]]


class Encoded(NamedTuple):
    """Records of a file as tokens.

    bad     bad records, those of the reader included
    counts  totals of the records, but for their tokens
    """

    batch: Documents
    bad: list[BadRecord]
    counts: Counts


Encode = Callable[[Records, InputFile], Encoded]


def plain_encoder(
    tokenizer: Tokenizer | None,
    highest_id: int | None = None,
    specials: Specials = NO_SPECIALS,
    fim: FillInMiddle | None = None,
) -> Encode:
    """Return the encoder of texts, and of token ids up to `highest_id`, if that is known."""

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
    """Return the encoder with records bad whose texts, perhaps their `turns`, it cannot encode."""

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
        is_bad = np.isin(record_position(others.batch.position, turns), [*bad])
        every = sorted([*others.bad, *bad.values()], key=lambda record: record.position)
        return others._replace(batch=others.batch.take(np.flatnonzero(~is_bad)), bad=every)

    return encode_others


def _without_specials(records: Records, specials: Specials) -> Records:
    """Make records with special tokens bad if that is the policy."""
    if records.texts is None or specials.policy == "keep" or not specials.tokens:
        return records
    written = {i: name for i, text in enumerate(records.texts) if (name := specials.in_text(text))}
    if not written:
        return replace(records, specials=0)
    bad = [
        BadRecord(int(records.positions[i]), spelled_out(name), SPELLED_OUT_TIP)
        for i, name in written.items()
    ]
    kept = np.delete(np.arange(len(records.texts)), [*written])
    return replace(records.take(kept, bad), specials=len(written))


def _refuse_ids_above(highest: int, batch: Documents, file: InputFile) -> None:
    ids = batch.token_ids
    if ids.max(initial=0) > highest:
        above = np.flatnonzero(ids > highest)
        document = int(np.searchsorted(batch.offsets, above[0], side="right")) - 1
        place = reader_for(file.format).describe(file, int(batch.position[document]))
        raise DataError(
            f"{file.path}, {place}: input_ids holds {ids[above[0]]}, the tokenizer's highest "
            f"id is {highest}",
            "name the tokenizer that made the ids, or none",
        )


def token_batch(
    records: Records, file: InputFile, tokenizer: Tokenizer | None
) -> tuple[Documents, int, int]:
    """Return the documents of texts or ids of a file, the number of special tokens in texts, and
    the number of trained tokens that begin before their span.

    Texts are taken out of `records`: a very long one is gone before its tokens are copied.
    """
    special, crossing = records.specials or 0, 0
    if records.documents is not None:
        documents = records.documents
    elif tokenizer is not None and records.texts is not None:
        bare = tokenizer.encode_bare(records.texts, records.spans)
        if records.specials is None:
            special = tokenizer.count_special(bare[0], records.texts)
        records.texts.clear()
        if (flags := bare[2]) is not None:
            crossing = int(np.count_nonzero(flags > 1))
        documents = _with_values(tokenizer.surrounded(*bare), records.spans)
    elif not len(records.positions):
        documents = Documents(np.empty(0, np.uint32), np.zeros(1, np.int64))
    else:
        raise InternalError("texts reached the encoder without a tokenizer")
    if len(documents) != len(records.positions):
        raise InternalError(f"{len(records.positions)} records became {len(documents)} documents")
    files = np.full(len(documents), file.index, np.int32)
    columns = {
        name: column for name, column in records.columns.items() if name not in documents.of_tokens
    }
    if records.turns is not None:
        columns[TURNS] = records.turns
    documents = documents.beside({}, {FILE: files, POSITION: records.positions, **columns})
    return documents, special, crossing


def documents_of(texts: list[str], spans: TrainedSpans | None, tokenizer: Tokenizer) -> Documents:
    """Return texts as documents with the values of their spans, but no other columns."""
    return _with_values(tokenizer.surrounded(*tokenizer.encode_bare(texts, spans)), spans)


def _with_values(tokens: SpanTokens, spans: TrainedSpans | None) -> Documents:
    """Return tokens as documents. Tokens of no span have 0 in the columns of spans."""
    ids, offsets, trained, span_of = tokens
    documents = Documents.of(ids, offsets, trained)
    if spans is None or span_of is None:
        return documents
    inside = span_of >= 0
    of_tokens = dict[str, Any]()
    for name, values in spans.columns.items():
        of_tokens[name] = np.zeros((len(ids), *values.shape[1:]), values.dtype)
        of_tokens[name][inside] = values[span_of[inside]]
    return documents.beside(of_tokens, {})
