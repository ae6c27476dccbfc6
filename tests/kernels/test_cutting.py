"""Cutting documents, and what rows hold, against their slow twins."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.test_kernels import fixed, margins_kept, output, problems
from packer_cli._kernels import filling, reference, sorting

relaxed = settings(max_examples=150, deadline=None)
kinds = st.sampled_from([np.int32, np.int64])
max_lengths = st.one_of(st.integers(1, 20), st.sampled_from([1 << 24]))
most_pieces = st.one_of(st.integers(0, 3), st.just((1 << 31) - 1))


@st.composite
def documents(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """Lengths and a max_length, most of which are near a multiple of it."""
    max_length = draw(max_lengths)
    near = st.builds(
        lambda rows, more: max(0, rows * max_length + more), st.integers(0, 4), st.integers(-1, 1)
    )
    lengths = draw(st.lists(st.one_of(near, st.integers(0, 60)), max_size=80))
    return fixed(lengths, draw(kinds)), max_length


@relaxed
@given(documents())
def test_copying_equals_its_twin(problem: tuple[np.ndarray, int]) -> None:
    copied, counted = output(len(problem[0]), np.int32), output(3)
    filling.copy_lengths(*problem, copied, counted)
    assert (copied.tolist(), counted.tolist()) == reference.copy_lengths(*problem)
    assert margins_kept(copied, counted)


@relaxed
@given(documents(), most_pieces, st.integers(0, 1 << 40))
def test_cutting_equals_its_twin(problem: tuple[np.ndarray, int], most: int, first: int) -> None:
    for at_end in (False, True) if most == 1 else (False,):
        expected = reference.cut_lengths(*problem, most)
        length = output(len(expected), np.int32)
        assert filling.cut_lengths(*problem, most, length) == len(expected)
        assert length.tolist() == expected
        columns = output(len(expected)), output(len(expected)), output(len(expected), np.int32)
        filling.locate_pieces(*problem, most, at_end, first, *columns)
        assert margins_kept(length, *columns)
        located = list(zip(*(column.tolist() for column in columns), strict=True))
        assert located == reference.locate_pieces(*problem, most, at_end, first)


@pytest.mark.parametrize("most", [0, 1, (1 << 31) - 1])
def test_documents_of_more_tokens_than_31_bits_hold(most: int) -> None:
    lengths, max_length = fixed([1 << 33, 7, (1 << 31) - 1]), 1 << 24
    counted = output(3)
    filling.copy_lengths(lengths, max_length, output(3, np.int32), counted)
    assert counted.tolist() == [0, 2, (1 << 33) + (1 << 31) - 1]
    expected = reference.cut_lengths(lengths, max_length, most)
    length = output(len(expected), np.int32)
    assert filling.cut_lengths(lengths, max_length, most, length) == len(expected)
    assert length.tolist() == expected
    assert margins_kept(length)


@relaxed
@given(problems())
def test_sums_of_rows_equal_their_twin(problem: tuple[np.ndarray, int]) -> None:
    order, offsets, tokens, _ = reference.best_fit_decreasing(*problem)
    sums = output(len(offsets) - 1, np.int32)
    sorting.sum_rows(problem[0], fixed(order), fixed(offsets), sums)
    assert sums.tolist() == tokens
    assert margins_kept(sums)
