"""Cutting, truncating and dropping: no token appears, disappears uncounted, or moves."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from packer_cli.fitting import cut_stream, first_overlong, fit
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
    pieces, loss = fit(offsets_of(lengths), max_length, policy)
    kept = tokens(pieces)
    assert len(kept) == len(set(kept))
    assert len(kept) + loss.truncated_tokens + loss.dropped_tokens == sum(lengths)
    assert all(1 <= length <= max_length for length in pieces.length)
    assert kept == sorted(kept)
    overlong = sum(length > max_length for length in lengths)
    counted = loss.truncated_documents if policy == "truncate" else loss.dropped_documents
    assert counted == (0 if policy == "split" else overlong)


@relaxed
@given(documents, st.integers(1, 20))
def test_split_fills_all_pieces_of_a_document_but_the_last(
    lengths: list[int], max_length: int
) -> None:
    pieces, _ = fit(offsets_of(lengths), max_length, "split")
    expected = [
        (document, start, min(max_length, length - start))
        for document, length in enumerate(lengths)
        for start in range(0, length, max_length)
    ]
    found = zip(
        pieces.document.tolist(), pieces.start.tolist(), pieces.length.tolist(), strict=True
    )
    assert list(found) == expected


@relaxed
@given(documents, st.integers(1, 20), st.integers(0, 100))
def test_a_stream_is_cut_at_multiples_only(
    lengths: list[int], max_length: int, position: int
) -> None:
    pieces = cut_stream(offsets_of(lengths), max_length, position)
    assert tokens(pieces) == list(range(sum(lengths)))
    starts = (pieces.begin + position).tolist()
    for start, length in zip(starts, pieces.length.tolist(), strict=True):
        assert start // max_length == (start + length - 1) // max_length
    begins = offsets_of(lengths)[pieces.document] + pieces.start
    assert begins.tolist() == pieces.begin.tolist()


def test_first_overlong() -> None:
    assert first_overlong(offsets_of([3, 9, 8, 10]), 8) == 1
    assert first_overlong(offsets_of([3, 8]), 8) == -1
    assert first_overlong(offsets_of([]), 8) == -1
