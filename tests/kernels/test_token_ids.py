"""The kernels of token columns, against their twins and against the slow check of records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from packer_cli._kernels import filling, inputs, reference

from packer_cli.inputs.token_columns import check_tokens, clipped, faultless

SIGNED = [np.int8, np.int16, np.int32, np.int64]
INTEGERS = [*SIGNED, np.uint8, np.uint16, np.uint32, np.uint64]
IDS = [[], [0], [5, 6, 7, 100], [1, -1], [-100], [(1 << 31) - 1], [1 << 31], [1 << 40], [1 << 63]]


def fits(values: list[int], kind: Any) -> bool:
    return all(np.iinfo(kind).min <= value <= np.iinfo(kind).max for value in values)


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize("values", IDS)
def test_ids_are_copied_and_looked_at(kind: Any, values: list[int]) -> None:
    if not fits(values, kind):
        return
    out = np.empty(len(values), np.uint32)
    expected, good = reference.copy_ids(values)
    assert inputs.copy_ids(np.array(values, kind), out) == good
    if good:
        assert out.tolist() == expected


@pytest.mark.parametrize("kind", SIGNED)
@pytest.mark.parametrize("labels", [[-100, 6, -100], [5, 6, 7], [-100] * 3, [5, 7, 7], [-99, 6, 7]])
def test_labels_say_what_is_trained_on(kind: Any, labels: list[int]) -> None:
    ids, out = np.array([5, 6, 7], np.uint32), np.empty(3, np.uint8)
    expected, good = reference.copy_trained(labels, ids.tolist())
    assert inputs.copy_trained(np.array(labels, kind), ids, out) == good
    assert out.tolist() == expected


@pytest.mark.parametrize("mask", [[], [1, 1], [0, 1, 0], [2], [1, -1], [0, 127]])
def test_ones_of_a_mask_are_counted(mask: list[int]) -> None:
    assert inputs.count_real(np.array(mask, np.int8)) == reference.count_real(mask)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", INTEGERS)
def test_the_fast_way_is_the_careful_one(kind: Any, seed: int) -> None:
    """Documents of some tokens or none, with labels and padding, some of them bad."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 6, rng.integers(1, 8))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = rng.integers(0, 100, int(offsets[-1])).astype(kind)
    labels = np.where(rng.random(len(ids)) < 0.5, -100, ids.astype(np.int64))
    if seed % 4 == 1 and len(ids):
        labels[-1] = 101
    mask = (rng.random(len(ids)) < 0.7).astype(kind)
    if seed % 4 == 2 and len(ids):
        mask[0] = 3
    given = [(None, None), (labels, None), (None, mask), (labels, mask)][seed % 3 :]
    for some_labels, some_mask in given:
        fast = faultless(ids, offsets, some_labels, some_mask)
        slow, bad = check_tokens(
            clipped(ids), offsets, some_labels, None if some_mask is None else clipped(some_mask)
        )
        assert fast is not None or bad or some_mask is not None
        if fast is not None:
            assert not bad
            for one, other in zip(fast, slow, strict=True):
                assert (one is None) == (other is None)
                assert one is None or (one.dtype == other.dtype and one.tolist() == other.tolist())
            if some_mask is not None and some_labels is not None:
                twin = reference.keep_real(
                    mask.tolist(), offsets.tolist(), ids.tolist(), (labels != -100).tolist()
                )
                assert [one.tolist() for one in fast if one is not None] == [
                    twin[0], twin[2], twin[1]
                ]  # fmt: skip


def test_a_huge_unsigned_label_is_not_taken_for_the_ignored_one() -> None:
    label = np.array([(1 << 64) - 100], np.uint64)
    assert faultless(np.array([5]), np.array([0, 1]), label, None) is None


@pytest.mark.parametrize("seed", range(10))
def test_trained_tokens_of_spans(seed: int) -> None:
    rng = np.random.default_rng(seed)
    trained = (rng.random(200) < 0.3).astype(np.uint8)
    begin = rng.integers(0, 200, 30)
    end = np.minimum(begin + rng.integers(0, 40, 30), 200)
    out = np.empty(30, np.int64)
    filling.count_trained(trained, begin, end, out)
    assert out.tolist() == reference.count_trained(trained.tolist(), begin, end)
    with pytest.raises(ValueError, match="span 0 is 0 to 201 of 200 tokens"):
        filling.count_trained(trained, np.array([0]), np.array([201]), out[:1])
