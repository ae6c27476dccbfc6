"""Cutting, truncating and dropping: no token appears, disappears uncounted, or moves."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer_cli.options.options import PackConfig
from packer_cli.packing.fitting import cut_stream, fit, loss_of, pieces_of
from packer_cli.records import Pieces, TokenBatch

relaxed = settings(max_examples=100, deadline=None)
documents = st.lists(st.integers(0, 40), max_size=30)
policies = st.sampled_from(["split", "truncate", "drop"])


def offsets_of(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def tokens(pieces: Pieces) -> list[int]:
    """The positions, in the batch, of all tokens that the pieces hold."""
    spans = zip(pieces.begin.tolist(), pieces.length.tolist(), strict=True)
    return [i for begin, length in spans for i in range(begin, begin + length)]


def as_tuples(pieces: Pieces) -> list[tuple[int, int, int]]:
    """(document, start, length) of every piece."""
    columns = (pieces.document, pieces.start, pieces.length)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def expected_pieces(lengths: list[int], max_length: int, policy: str) -> list[tuple[int, int, int]]:
    """(document, start, length) of every piece, from the definition."""
    pieces = []
    for document, total in enumerate(lengths):
        starts = list(range(0, total, max_length))
        if policy != "split" and total > max_length:
            starts = starts[:1] if policy == "truncate" else []
        pieces += [(document, start, min(max_length, total - start)) for start in starts]
    return pieces


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
@given(documents, documents, st.integers(1, 20))
def test_a_stream_goes_on_in_the_next_batch(
    first: list[int], second: list[int], max_length: int
) -> None:
    whole = as_tuples(cut_stream(offsets_of(first + second), max_length, 0))
    batches = as_tuples(cut_stream(offsets_of(first), max_length, 0))
    rest = as_tuples(cut_stream(offsets_of(second), max_length, sum(first)))
    batches += [(document + len(first), start, length) for document, start, length in rest]
    assert batches == whole


@relaxed
@given(documents, st.integers(1, 20), st.sampled_from(["best-fit", "wrap"]), st.data())
def test_documents_that_nothing_is_trained_on_are_left_out(
    lengths: list[int], max_length: int, strategy: str, data: st.DataObject
) -> None:
    """The first token of a piece is never trained on; those of a stream are cut afterwards."""
    total, offsets = sum(lengths), offsets_of(lengths)
    flags = data.draw(st.lists(st.sampled_from([0, 0, 0, 1]), min_size=total, max_size=total))
    file, position = np.zeros(len(lengths), np.int32), np.arange(len(lengths))
    batch = TokenBatch(
        np.arange(total, dtype=np.uint32), offsets, np.array(flags, np.uint8), file, position
    )
    pieces, untrained = pieces_of(batch, PackConfig(max_length, strategy), 0)
    every = max(total, 1) if strategy == "wrap" else max_length
    trained = [
        sum(sum(flags[a:b][i + 1 : i + every]) for i in range(0, b - a, every))
        for a, b in pairwise(offsets.tolist())
    ]
    left_out = [i for i, n in enumerate(lengths) if n and not trained[i]]
    assert untrained.documents.tolist() == left_out
    assert untrained.tokens.tolist() == [lengths[i] for i in left_out]
    kept = [at for i, a in enumerate(offsets[:-1]) if trained[i] for at in range(a, a + lengths[i])]
    assert tokens(pieces) == kept
