"""The kernels of tokenized directories, against their slow twins."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packer_cli._kernels import documents as kernels
from packer_cli._kernels import reference

lengths = st.lists(st.integers(0, 40), max_size=12)


def offsets_of(sizes: list[int], first: int = 0) -> Any:
    return np.cumsum([first, *sizes]).astype(np.int64)


@given(lengths, st.integers(0, 3), st.integers(0, 1 << 32))
def test_hashes(sizes: list[int], before: int, seed: int) -> None:
    offsets = offsets_of(sizes, before)
    ids = np.random.default_rng(seed).integers(0, 1 << 32, offsets[-1], dtype=np.uint32)
    out = np.zeros((len(sizes), 2), np.uint64)
    kernels.hash_documents(ids, offsets, out)
    assert [tuple(one) for one in out.tolist()] == reference.hash_documents(ids, offsets)


@pytest.mark.parametrize(
    ("text", "expected"),
    [  # the package mmh3 gives these, too: see tests/extras/test_tokenized.py
        (b"", (0, 0)),
        (b"abcd", (0xB87BB7D64656CD4F, 0xF2003E886073E875)),
    ],
)
def test_hashes_that_are_known(text: bytes, expected: tuple[int, int]) -> None:
    out = np.ones((1, 2), np.uint64)
    ids = np.frombuffer(text, np.uint32)
    kernels.hash_documents(ids, offsets_of([len(ids)]), out)
    assert tuple(out[0].tolist()) == expected


@pytest.mark.parametrize("offsets", [[], [-1, 2], [0, 4], [0, 3, 2], [0, 3, -1]])
def test_offsets_that_are_none(offsets: list[int]) -> None:
    edges, count = np.array(offsets, np.int64), max(len(offsets) - 1, 0)
    flags, numbers = np.ones(3, np.uint8), np.zeros(count + 1, np.int32)
    with pytest.raises(ValueError, match=r"offsets|ends before"):
        kernels.hash_documents(np.zeros(3, np.uint32), edges, np.zeros((count, 2), np.uint64))
    with pytest.raises(ValueError, match=r"offsets|ends before"):
        kernels.count_trained(flags, edges, numbers[:count], numbers)
    with pytest.raises(ValueError, match=r"offsets|ends before"):
        kernels.stretches(flags, edges, np.zeros(9, np.int32))


def test_outputs_of_other_sizes() -> None:
    ids, offsets = np.zeros(3, np.uint32), offsets_of([1, 2])
    for shape in ((1, 2), (3, 2), (2, 1), (2, 3)):
        with pytest.raises(ValueError, match="2 documents"):
            kernels.hash_documents(ids, offsets, np.zeros(shape, np.uint64))
    numbers = np.zeros(3, np.int32)
    for tokens, edges in ((numbers, numbers), (numbers[:2], numbers[:2])):
        with pytest.raises(ValueError, match="2 documents"):
            kernels.count_trained(ids.astype(np.uint8), offsets, tokens, edges)
    with pytest.raises(ValueError, match="2 hashes"):
        kernels.order_keys(np.zeros((2, 2), np.uint64), 0, np.zeros(3, np.uint64))


@given(st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=9))
def test_what_is_trained_on(flags: list[list[int]]) -> None:
    offsets = offsets_of([len(one) for one in flags])
    trained = np.array([flag for one in flags for flag in one], np.uint8)
    tokens, edges = np.zeros(len(flags), np.int32), np.zeros(len(flags) + 1, np.int32)
    kernels.count_trained(trained, offsets, tokens, edges)
    assert (tokens.tolist(), edges.tolist()) == reference.count_trained_documents(trained, offsets)
    out = np.full(edges[-1] + 1, 77, np.int32)
    kernels.stretches(trained, offsets, out[:-1])
    assert out.tolist() == [*reference.stretches(trained, offsets), 77]
    if edges[-1]:
        with pytest.raises(ValueError, match="more than"):
            kernels.stretches(trained, offsets, out[: edges[-1] - 1])


def test_the_order_depends_on_hash_and_seed() -> None:
    hashes = np.random.default_rng(0).integers(0, 1 << 63, (1000, 2), dtype=np.uint64)
    out = np.zeros((3, 1000), np.uint64)
    for row, seed in enumerate((0, 1, (1 << 64) - 1)):
        kernels.order_keys(hashes, seed, out[row])
    assert len(np.unique(out)) == 3000
    again = np.zeros(10, np.uint64)
    kernels.order_keys(hashes[::-1][:10].copy(), 1, again)
    assert np.array_equal(again, out[1, ::-1][:10])
    # neither is the order of one seed that of another
    assert abs(np.corrcoef(out[0].argsort().argsort(), out[1].argsort().argsort())[0, 1]) < 0.15


Piece = tuple[int, int, int]


@st.composite
def pieces(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[Piece]]:
    """(documents, how many of them each span has, pieces of them)."""
    documents = draw(st.lists(st.lists(st.integers(0, 9), max_size=9), min_size=1, max_size=9))
    cuts = draw(st.sets(st.integers(1, len(documents))))
    edges = [0, *sorted(cuts - {len(documents)}), len(documents)]
    sizes = [b - a for a, b in pairwise(edges)]
    taken = []
    for number in draw(st.lists(st.integers(0, len(documents) - 1), max_size=12)):
        start = draw(st.integers(0, len(documents[number])))
        taken.append((number, start, draw(st.integers(0, len(documents[number]) - start))))
    return documents, sizes, taken


def columns(taken: list[Piece]) -> tuple[Any, Any, Any]:
    return tuple(
        np.array([one[i] for one in taken], (np.int64, np.int32, np.int32)[i]) for i in range(3)
    )


class Spans:
    """Lists in memory as record batches of Arrow hold them, with a gap before each."""

    def __init__(self, lists: list[list[int]], sizes: list[int], seed: int) -> None:
        gap = seed % 3
        self.kept, first = [], 0
        for size in sizes:
            own = lists[first : first + size]
            edges = np.cumsum([gap, *map(len, own)]).astype(np.int32)
            values = np.array([7] * gap + [value for one in own for value in one] + [7], np.int32)
            self.kept.append((edges, values))
            first += size
        self.firsts = offsets_of(sizes)
        self.offsets = np.array([edges.ctypes.data for edges, _ in self.kept], np.int64)
        self.values = np.array([values.ctypes.data for _, values in self.kept], np.int64)


@given(pieces(), st.integers(0, 9))
def test_tokens_are_gathered(
    problem: tuple[list[list[int]], list[int], list[Piece]], seed: int
) -> None:
    documents, sizes, taken = problem
    spans = Spans(documents, sizes, seed)
    total = sum(length for *_, length in taken)
    out = np.full(total + 1, 77, np.uint32)
    found = kernels.gather_documents(
        *columns(taken), spans.firsts, spans.offsets, spans.values, out[:-1]
    )
    expected, wrong = reference.gather_documents(documents, *columns(taken))
    assert (out.tolist(), found) == ([*expected, 77], wrong)
    assert wrong == -1


@pytest.mark.parametrize(
    "wrong",
    [(3, 0, 1), (-1, 0, 1), (0, 0, 5), (0, -1, 2), (0, 2, -1), (0, 2**31 - 1, 2**31 - 1),
     (1, 1, 1), (2**40, 0, 0)],
)  # fmt: skip
def test_pieces_that_are_none(wrong: Piece) -> None:
    documents = [[1, 2, 3, 4], [], [5]]
    spans, taken = Spans(documents, [2, 1], 1), [(0, 1, 2), wrong, (2, 0, 1)]
    out = np.full(16, 77, np.uint32)
    found = kernels.gather_documents(
        *columns(taken), spans.firsts, spans.offsets, spans.values, out
    )
    assert found == reference.gather_documents(documents, *columns(taken))[1] == 1
    assert out[2:].tolist() == [77] * 14
    found = kernels.gather_documents(
        *columns([(0, 0, 4)]), spans.firsts, spans.offsets, spans.values, out[:3]
    )
    assert found == 0  # there is no room for it


@given(pieces(), st.integers(0, 1 << 20))
def test_what_is_trained_on_is_gathered(
    problem: tuple[list[list[int]], list[int], list[Piece]], seed: int
) -> None:
    documents, sizes, taken = problem
    random = np.random.default_rng(seed)
    lists: list[list[int] | None] = []
    for one in documents:
        flags = random.integers(0, 2, len(one)).astype(np.uint8)
        lists.append(reference.stretches(flags, [0, len(one)]) if random.random() < 0.7 else None)
    spans = Spans([one or [] for one in lists], sizes, seed)
    bitmaps, first = [], 0
    for size in sizes:
        present = [one is not None for one in lists[first : first + size]]
        bitmaps.append(np.packbits(present, bitorder="little"))
        first += size
    valid = np.array([one.ctypes.data for one in bitmaps], np.int64)
    total = sum(length for *_, length in taken)
    out = np.full(total + 1, 77, np.uint8)
    found = kernels.gather_trained(
        *columns(taken), spans.firsts, spans.offsets, spans.values, valid, out[:-1]
    )
    assert found == -1
    assert out.tolist() == [*reference.gather_trained(lists, *columns(taken)), 77]
    nothing = np.zeros(len(sizes), np.int64)  # no such column: everything is trained on
    found = kernels.gather_trained(
        *columns(taken), spans.firsts, nothing, nothing, nothing, out[:-1]
    )
    assert (found, out.tolist()) == (-1, [1] * total + [77])


@pytest.mark.parametrize("wrong", [(3, 0, 1), (-1, 0, 1), (0, 0, 99), (0, -1, 1), (0, 0, -1)])
def test_pieces_of_what_is_trained_on_that_are_none(wrong: Piece) -> None:
    spans, out = Spans([[0, 1], [], [1, 3]], [2, 1], 0), np.full(8, 77, np.uint8)
    nothing = np.zeros(2, np.int64)
    found = kernels.gather_trained(
        *columns([(0, 0, 1), wrong]), spans.firsts, spans.offsets, spans.values, nothing, out
    )
    assert found == 1
    assert out[1:].tolist() == [77] * 7
