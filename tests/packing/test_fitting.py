"""Cutting, truncating and dropping: no token appears, disappears uncounted, or moves."""

from __future__ import annotations

import numpy as np
import pytest
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
def test_truncating_on_the_left_keeps_the_end_of_every_document(
    lengths: list[int], max_length: int
) -> None:
    offsets = offsets_of(lengths)
    pieces = fit(offsets, max_length, "truncate", "left")
    kept = [(i, max(0, n - max_length), min(n, max_length)) for i, n in enumerate(lengths) if n]
    assert as_tuples(pieces) == kept
    assert (offsets[pieces.document] + pieces.start).tolist() == pieces.begin.tolist()
    assert loss_of(pieces, offsets) == loss_of(fit(offsets, max_length, "truncate"), offsets)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [("truncate", [(0, 0, 9), (1, 0, 10), (2, 0, 3)]), ("drop", [(0, 0, 9), (2, 0, 3)])],
)
def test_documents_of_more_tokens_than_31_bits_hold(
    policy: str, kept: list[tuple[int, int, int]]
) -> None:
    offsets = offsets_of([9, (1 << 32) + 5, 3])
    pieces = fit(offsets, 10, policy)
    assert as_tuples(pieces) == kept
    assert pieces.begin.tolist() == [offsets[document] for document, _, _ in kept]
    lost = (1 << 32) + 5 - (10 if policy == "truncate" else 0)
    loss = loss_of(pieces, offsets)
    assert loss.truncated_tokens + loss.dropped_tokens == lost


@relaxed
@given(documents, st.integers(1, 20), policies, st.data())
def test_trained_tokens_are_lost_with_the_others(
    lengths: list[int], max_length: int, policy: str, data: st.DataObject
) -> None:
    total = sum(lengths)
    trained = data.draw(st.lists(st.integers(0, 1), min_size=total, max_size=total))
    offsets = offsets_of(lengths)
    pieces = fit(offsets, max_length, policy)
    loss = loss_of(pieces, offsets, np.array(trained, np.uint8))
    lost = sum(trained) - sum(trained[at] for at in tokens(pieces))
    assert loss.truncated_trained_tokens + loss.dropped_trained_tokens == lost


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
