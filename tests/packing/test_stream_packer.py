"""StreamPacker: the rows of plan_packing, each as soon as nothing more can go into it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer_cli import StreamPacker, plan_packing
from packer_cli.errors import DataError, UsageError


@pytest.mark.parametrize("strategy", ["next-fit", "harmonic"])
@given(st.data(), st.one_of(st.sampled_from([1, 2, 3, 64, 4096]), st.integers(1, 300)))
def test_the_rows_are_those_of_the_plan(strategy: str, data: st.DataObject, most: int) -> None:
    lengths = data.draw(st.lists(st.integers(0, most), max_size=200))
    packer, rows = StreamPacker(most, strategy), []
    for length in lengths:
        closed = packer.add(length)
        assert len(closed) <= 2
        rows += closed
    rows += packer.finish()
    assert packer.documents == len(lengths)
    expected = plan_packing(lengths, most, strategy=strategy).rows()
    assert sorted(rows) == sorted(expected)
    if strategy == "next-fit":
        assert rows == expected


def test_rows_come_as_they_close() -> None:
    packer = StreamPacker(8, "nf")
    assert [packer.add(length) for length in (5, 4, 0, 4, 8)] == [[], [[0]], [], [[1, 3]], [[4]]]
    assert packer.finish() == []
    packer = StreamPacker(12, "hk")
    assert [packer.add(length) for length in (5, 7, 4, 6)] == [[], [[1]], [], [[0, 3]]]
    assert packer.finish() == [[2]]


def test_few_rows_are_open() -> None:
    packer = StreamPacker(4096, "harmonic")
    closed = [row for i in range(10_000) for row in packer.add(i * 7919 % 4096 + 1)]
    still_open = packer.finish()
    assert len(still_open) <= 12 < len(closed)


def test_what_cannot_be() -> None:
    with pytest.raises(UsageError, match="'best-fit' is not one of next-fit, harmonic"):
        StreamPacker(8, "best-fit")
    with pytest.raises(UsageError, match="max_length: 0 is not between"):
        StreamPacker(0)
    packer = StreamPacker(8)
    packer.add(3)
    for length in (9, -1):
        with pytest.raises(DataError, match=f"document 1 has {length} tokens, max_length is 8"):
            packer.add(length)
    assert packer.finish() == [[0]]
    with pytest.raises(UsageError, match=r"add\(\) after finish\(\)"):
        packer.add(1)
