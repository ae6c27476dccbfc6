"""Cutting, truncating and dropping: no token appears, disappears uncounted, or moves."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from packer_cli.packing.fitting import Loss, cut_stream, first_overlong, fit, loss_of
from packer_cli.records import Pieces

relaxed = settings(max_examples=100, deadline=None)
documents = st.lists(st.integers(0, 40), max_size=30)
policies = st.sampled_from(["split", "truncate", "drop"])


def offsets_of(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def tokens(pieces: Pieces) -> list[int]:
    """The positions, in the batch, of all tokens that the pieces hold."""
    spans = zip(pieces.begin.tolist(), pieces.length.tolist(), strict=True)
    return [i for begin, length in spans for i in range(begin, begin + length)]


@relaxed
@given(documents, st.integers(1, 20), policies)
def test_every_token_is_kept_or_counted(lengths: list[int], max_length: int, policy: str) -> None:
    offsets = offsets_of(lengths)
    pieces = fit(offsets, max_length, policy)
    loss = loss_of(pieces, offsets)
    kept = tokens(pieces)
    assert len(kept) == len(set(kept))
    assert len(kept) + loss.truncated_tokens + loss.dropped_tokens == sum(lengths)
    assert all(1 <= length <= max_length for length in pieces.length)
    assert kept == sorted(kept)
    overlong = sum(length > max_length for length in lengths)
    counted = loss.truncated_documents if policy == "truncate" else loss.dropped_documents
    assert counted == (0 if policy == "split" else overlong)


def as_tuples(pieces: Pieces) -> list[tuple[int, int, int]]:
    """(document, start, length) of every piece."""
    columns = (pieces.document, pieces.start, pieces.length)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@relaxed
@given(documents, st.integers(1, 20))
def test_split_fills_all_pieces_of_a_document_but_the_last(
    lengths: list[int], max_length: int
) -> None:
    pieces = fit(offsets_of(lengths), max_length, "split")
    loss = loss_of(pieces, offsets_of(lengths))
    assert as_tuples(pieces) == [
        (document, start, min(max_length, length - start))
        for document, length in enumerate(lengths)
        for start in range(0, length, max_length)
    ]
    assert loss == Loss()


@relaxed
@given(documents, st.integers(1, 20))
def test_truncate_keeps_the_beginning_of_every_document(
    lengths: list[int], max_length: int
) -> None:
    pieces = fit(offsets_of(lengths), max_length, "truncate")
    loss = loss_of(pieces, offsets_of(lengths))
    kept = [(i, 0, min(length, max_length)) for i, length in enumerate(lengths) if length]
    assert as_tuples(pieces) == kept
    cut = [length - max_length for length in lengths if length > max_length]
    assert loss == Loss(
        truncated_documents=len(cut), truncated_tokens=sum(cut), truncated_trained_tokens=sum(cut)
    )


@relaxed
@given(documents, st.integers(1, 20))
def test_drop_leaves_out_whole_documents(lengths: list[int], max_length: int) -> None:
    pieces = fit(offsets_of(lengths), max_length, "drop")
    loss = loss_of(pieces, offsets_of(lengths))
    kept = [(i, 0, length) for i, length in enumerate(lengths) if 1 <= length <= max_length]
    assert as_tuples(pieces) == kept
    lost = [length for length in lengths if length > max_length]
    assert loss == Loss(
        dropped_documents=len(lost), dropped_tokens=sum(lost), dropped_trained_tokens=sum(lost)
    )


@relaxed
@given(documents, st.integers(1, 20), policies, st.integers(0, 50))
def test_pieces_count_tokens_where_the_offsets_do(
    lengths: list[int], max_length: int, policy: str, first: int
) -> None:
    offsets = offsets_of(lengths) + first
    for pieces in (fit(offsets, max_length, policy), cut_stream(offsets, max_length, 3)):
        assert (offsets[pieces.document] + pieces.start).tolist() == pieces.begin.tolist()
        dtypes = [column.dtype for column in (pieces.document, pieces.begin)]
        assert [*dtypes, pieces.length.dtype, pieces.start.dtype] == ["i8", "i8", "i4", "i4"]


@relaxed
@given(documents, st.integers(1, 20), st.integers(0, 100))
def test_a_stream_is_cut_at_multiples_and_nowhere_else(
    lengths: list[int], max_length: int, position: int
) -> None:
    pieces = cut_stream(offsets_of(lengths), max_length, position)
    assert tokens(pieces) == list(range(sum(lengths)))
    cuts = set(range(-position % max_length, sum(lengths), max_length))
    begins = {begin for begin, length in zip(offsets_of(lengths), lengths, strict=False) if length}
    assert set(pieces.begin.tolist()) == cuts | begins
    assert len(pieces) == len(cuts | begins)


@relaxed
@given(documents, documents, st.integers(1, 20))
def test_a_stream_goes_on_in_the_next_batch(
    first: list[int], second: list[int], max_length: int
) -> None:
    whole = as_tuples(cut_stream(offsets_of(first + second), max_length, 0))
    batches = as_tuples(cut_stream(offsets_of(first), max_length, 0))
    rest = as_tuples(cut_stream(offsets_of(second), max_length, sum(first)))
    batches += [(document + len(first), start, length) for document, start, length in rest]
    assert batches == whole


def test_first_overlong() -> None:
    assert first_overlong(offsets_of([3, 9, 8, 10]), 8) == 1
    assert first_overlong(offsets_of([3, 8]), 8) == -1
    assert first_overlong(offsets_of([]), 8) == -1
