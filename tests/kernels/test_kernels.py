"""Every kernel against its slow twin: equal to the last element, for every kind of capacity.

Inputs are read-only; outputs lie between margins that must stay as they were.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packer_cli._kernels import (
    balancing,
    best_fit,
    filling,
    mffd,
    one_by_one,
    reference,
    row_by_row,
    sorting,
)
from packer_cli._kernels import texts as text_kernels

# Around the words of the bitset: one, two and three levels deep.
CAPACITIES = [1, 2, 3, 5, 6, 7, 63, 64, 65, 4095, 4096, 4097, 131072, 262143, 262144, 262145]
KINDS = ["uniform", "equal", "full", "ones", "fractions", "ends", "log-normal"]
ONE_BY_ONE = ["best_fit", "worst_fit", "first_fit", "next_fit"]
UNTOUCHED, MARGIN = 77, 3
relaxed = settings(max_examples=150, deadline=None)
seeds = st.integers(0, 2**64 - 1)
limits = st.one_of(st.just(0), st.integers(1, 8), st.just(2**24))  # segments in a row


def test_the_kernels_are_those_of_the_build_that_is_tested() -> None:
    """make test-debug and test-asan would pass without a check with the release build."""
    root = Path(__file__).parents[2]
    builds = [name for name in os.environ.get("PYTHONPATH", "").split(":") if name[:6] == "build/"]
    for kernels in (best_fit, filling, mffd, one_by_one, row_by_row, sorting):
        for build in builds:
            assert Path(kernels.__file__).is_relative_to(root / build)


def output(size: int | tuple[int, int], kind: type = np.int64) -> np.ndarray:
    """What a kernel is to write, in the middle of a larger array."""
    rows, *columns = size if isinstance(size, tuple) else (size,)
    return np.full((rows + 2 * MARGIN, *columns), UNTOUCHED, kind)[MARGIN : MARGIN + rows]


def margins_kept(*outputs: np.ndarray) -> bool:
    edges = [np.concatenate([out.base[:MARGIN], out.base[-MARGIN:]]) for out in outputs]
    return all((edge == UNTOUCHED).all() for edge in edges)


def fixed(values: object, kind: type = np.int64) -> np.ndarray:
    """A read-only array: kernels must not need to write into what they are given."""
    array = np.array(values, kind)
    array.setflags(write=False)
    return array


def lengths_of(kind: str, capacity: int, n: int, seed: int) -> np.ndarray:
    """int32[n], each in 1..capacity."""
    rng = np.random.default_rng(seed)
    anywhere = rng.integers(1, capacity + 1, n)
    sizes = {
        "uniform": anywhere,
        "equal": np.full(n, rng.integers(1, capacity + 1)),
        "full": np.full(n, capacity),
        "ones": np.where(rng.random(n) < 0.8, 1, anywhere),
        "fractions": capacity // rng.choice([2, 3, 6], n) + rng.integers(-1, 3, n),
        "ends": np.where(rng.random(n) < 0.5, 1, capacity + 1) + rng.integers(-2, 2, n),
        "log-normal": rng.lognormal(np.log(max(capacity / 7, 1)), 1, n),
    }
    return fixed(np.clip(sizes[kind], 1, capacity), np.int32)


@st.composite
def problems(draw: st.DrawFn, most: int = 300) -> tuple[np.ndarray, int]:
    """Lengths and a capacity: few lengths that shrink well, or many of one kind."""
    capacity = draw(st.one_of(st.sampled_from(CAPACITIES), st.integers(1, 5000)))
    if draw(st.booleans()):
        return fixed(draw(st.lists(st.integers(1, capacity), max_size=8)), np.int32), capacity
    kind, n = draw(st.sampled_from(KINDS)), draw(st.integers(0, most))
    return lengths_of(kind, capacity, n, draw(seeds)), capacity


BEST_FITS = {
    "best_fit_decreasing": best_fit.best_fit_decreasing,
    "mixed_best_fit": row_by_row.mixed_best_fit,
}


def plan(
    lengths: np.ndarray, capacity: int, most: int = 0, name: str = "best_fit_decreasing"
) -> tuple[list[int], list[int], list[int], dict[int, int]]:
    order, offsets = output(len(lengths)), output(len(lengths) + 1)
    tokens, counts = output(len(lengths), np.int32), output(capacity + 1, np.int32)
    counts[:] = 0
    rows = BEST_FITS[name](lengths, capacity, order, offsets, tokens, counts, most)
    assert (offsets[rows + 1 :] == UNTOUCHED).all()
    assert (tokens[rows:] == UNTOUCHED).all()
    assert margins_kept(order, offsets, tokens, counts)
    of_length = {int(length): int(counts[length]) for length in np.flatnonzero(counts)}
    return order.tolist(), offsets[: rows + 1].tolist(), tokens[:rows].tolist(), of_length


def decide(name: str, lengths: np.ndarray, *arguments: int, most: int = 0) -> tuple[list[int], int]:
    row_of = output(len(lengths), np.int32)
    rows = getattr(one_by_one, name)(lengths, *arguments, row_of, most)
    assert margins_kept(row_of)
    return row_of.tolist(), rows


def plan_mffd(lengths: np.ndarray, capacity: int) -> tuple[list[int], list[int]]:
    """Steps 1 to 4 by the kernel, step 5 by first fit's twin."""
    longest = fixed(reference.longest_first(lengths))
    visit, row_of = output(len(lengths)), output(len(lengths), np.int32)
    placed, rows = mffd.mffd_large_rows(lengths, capacity, longest, visit, row_of)
    assert margins_kept(visit, row_of)
    assert (row_of[placed:] == UNTOUCHED).all()
    more, more_rows = reference.first_fit(lengths[visit[placed:]], capacity)
    all_rows = [*row_of[:placed].tolist(), *(row + rows for row in more)]
    return reference.group_by_row(all_rows, visit.tolist(), rows + more_rows)


@pytest.mark.parametrize("name", BEST_FITS)
@relaxed
@given(problem=problems(), most=limits)
def test_best_fit_equals_its_twin(problem: tuple[np.ndarray, int], most: int, name: str) -> None:
    assert plan(*problem, most, name) == getattr(reference, name)(*problem, most)


@pytest.mark.parametrize("name", ONE_BY_ONE)
@relaxed
@given(problem=problems(), most=limits)
def test_one_by_one_equals_its_twin(problem: tuple[np.ndarray, int], most: int, name: str) -> None:
    assert decide(name, *problem, most=most) == getattr(reference, name)(*problem, most)


@relaxed
@given(problems(), st.integers(1, 15), limits)
def test_harmonic_equals_its_twin(problem: tuple[np.ndarray, int], classes: int, most: int) -> None:
    expected = reference.harmonic(*problem, classes, most)
    assert decide("harmonic", *problem, classes, most=most) == expected


@relaxed
@given(problems())
def test_mffd_equals_its_twin(problem: tuple[np.ndarray, int]) -> None:
    assert plan_mffd(*problem) == reference.mffd(*problem)


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("kind", KINDS)
def test_many_documents_equal_their_twins(kind: str, capacity: int) -> None:
    lengths = lengths_of(kind, capacity, 400, seed=capacity)
    for name in BEST_FITS:
        assert plan(lengths, capacity, name=name) == getattr(reference, name)(lengths, capacity)
    assert plan_mffd(lengths, capacity) == reference.mffd(lengths, capacity)
    for name in ONE_BY_ONE:
        assert decide(name, lengths, capacity) == getattr(reference, name)(lengths, capacity)


def test_thousands_of_documents_equal_their_twins() -> None:
    lengths, capacity = lengths_of("log-normal", 4096, 4000, seed=0), 4096
    assert plan(lengths, capacity) == reference.best_fit_decreasing(lengths, capacity)
    for name in ONE_BY_ONE:
        assert decide(name, lengths, capacity) == getattr(reference, name)(lengths, capacity)


def test_the_largest_capacity_uses_all_five_levels_of_the_bitset() -> None:
    capacity = 1 << 24
    lengths = fixed(
        [1, capacity, capacity - 1, capacity // 2, 1, capacity - (1 << 18), 2], np.int32
    )
    for name in BEST_FITS:
        assert plan(lengths, capacity, name=name) == getattr(reference, name)(lengths, capacity)
    assert plan_mffd(lengths, capacity) == reference.mffd(lengths, capacity)
    for name in ("best_fit", "worst_fit"):
        assert decide(name, lengths, capacity) == getattr(reference, name)(lengths, capacity)


@relaxed
@given(problems())
def test_longest_first_is_stable(problem: tuple[np.ndarray, int]) -> None:
    out = output(len(problem[0]))
    sorting.longest_first(*problem, out)
    assert margins_kept(out)
    assert out.tolist() == reference.longest_first(problem[0])


@relaxed
@given(problems(), seeds, st.booleans())
def test_group_by_row_and_shuffle_equal_their_twins(
    problem: tuple[np.ndarray, int], seed: int, permuted: bool
) -> None:
    n = len(problem[0])
    visit = output(n)
    sorting.permutation(visit, seed)
    assert visit.tolist() == reference.permutation(n, seed)
    row_of, rows = reference.worst_fit(*problem)
    order, offsets = output(n), output(rows + 1)
    sorting.group_by_row(
        fixed(row_of, np.int32), fixed(visit) if permuted else None, rows, order, offsets
    )
    visited = visit.tolist() if permuted else list(range(n))
    assert (order.tolist(), offsets.tolist()) == reference.group_by_row(row_of, visited, rows)
    new_order, new_offsets = output(n), output(rows + 1)
    sorting.shuffle_plan(fixed(order), fixed(offsets), rows, seed, new_order, new_offsets)
    expected = reference.shuffle_plan(order.tolist(), offsets.tolist(), seed)
    assert (new_order.tolist(), new_offsets.tolist()) == expected
    assert margins_kept(visit, order, offsets, new_order, new_offsets)


def test_the_generator_gives_the_published_numbers() -> None:
    state, numbers = 1234567, []
    for _ in range(3):
        number, state = reference.splitmix64(state)
        numbers.append(number)
    assert numbers == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@relaxed
@given(
    problems(most=40), st.booleans(), seeds,
    st.lists(st.booleans(), min_size=5, max_size=5), st.booleans(), st.sampled_from([1, 2, 3, 16]),
)  # fmt: skip
def test_fill_rows_equals_its_twin(
    problem: tuple[np.ndarray, int], some_untrained: bool, seed: int, wanted: list[bool],
    pre_shifted: bool, multiple: int,
) -> None:  # fmt: skip
    units = min(problem[1], 400 // multiple)  # rows are planned in these
    capacity = units * multiple
    lengths = fixed(np.minimum(problem[0], capacity), np.int32)
    rng = np.random.default_rng(seed)
    ids = fixed(rng.integers(0, 2**31, int(lengths.sum()) + 3), np.uint32)
    trained = fixed(rng.choice([0, 1, 255], len(ids)), np.uint8) if some_untrained else None
    begin = fixed(np.cumsum(lengths) - lengths + 3)
    order, offsets = map(fixed, plan(fixed(-(-lengths // multiple), np.int32), units)[:2])
    rows = len(offsets) - 1
    kinds = [np.int32, np.int32, np.uint8, np.int32]
    out = [output((rows, capacity), kind) if want else None
           for kind, want in zip(kinds, wanted[:4], strict=True)]  # fmt: skip
    boundaries, edges = output(len(order) + rows, np.int32), output(rows + 1, np.int32)
    padded = output(len(order) + rows, np.int32) if wanted[4] else None
    inputs = (ids, trained, begin, lengths, order, offsets)
    how = (pre_shifted, multiple)
    count = filling.fill_rows(*inputs, capacity, 9, *out, boundaries, edges, *how, padded)
    lists = (None if array is None else array.tolist() for array in inputs)
    expected = reference.fill_rows(*lists, capacity, 9, *how)
    for found, column in zip(out, expected[:4], strict=True):
        assert found is None or found.tolist() == column
    assert boundaries.tolist() == [value for row in expected[4] for value in row]
    assert edges.tolist() == np.cumsum([0, *map(len, expected[4])]).tolist()
    assert padded is None or padded.tolist() == [value for row in expected[5] for value in row]
    assert count == expected[6]
    written = (boundaries, edges, padded, *out)
    assert margins_kept(*(found for found in written if found is not None))
    # by address: what is trained on comes in the order of the pieces
    places = [at for i in order for at in range(begin[i], begin[i] + lengths[i])]
    in_order = None if trained is None else fixed(trained[places], np.uint8)
    addresses = fixed(ids.ctypes.data + 4 * begin)
    before = [None if found is None else found.tolist() for found in written]
    for found in out:
        if found is not None:
            found.fill(0)
    inputs = (None, in_order, addresses, lengths, order, offsets)
    again = filling.fill_rows(*inputs, capacity, 9, *out, boundaries, edges, *how, padded, True)
    assert [None if found is None else found.tolist() for found in written] == before
    assert again == count
    assert margins_kept(*(found for found in written if found is not None))


def test_fill_rows_takes_ids_or_addresses() -> None:
    begin, one = fixed([0]), fixed([1], np.int32)
    out = output((1, 5), np.int32), None, None, None, output(2, np.int32), output(2, np.int32)
    for ids, by_address in ((None, False), (fixed([1], np.uint32), True)):
        with pytest.raises(ValueError, match="ids, or addresses"):
            filling.fill_rows(ids, None, begin, one, begin, fixed([0, 1]), 5, 9, *out,
                              by_address=by_address)  # fmt: skip


def test_fill_rows_of_the_middle_of_a_plan() -> None:
    begin, length = fixed([0, 4, 7]), fixed([4, 3, 3], np.int32)
    order, offsets = fixed([2, 0, 1]), fixed([0, 1, 2, 3])
    out, boundaries, edges = output((2, 5), np.int32), output(4, np.int32), output(3, np.int32)
    filling.fill_rows(
        fixed(range(10), np.uint32), None, begin, length, order, offsets[1:], 5, 99,
        out, None, None, None, boundaries, edges,
    )  # fmt: skip
    assert out.tolist() == [[0, 1, 2, 3, 99], [4, 5, 6, 99, 99]]
    assert boundaries.tolist() == [0, 4, 0, 3]
    assert edges.tolist() == [0, 2, 4]


def costs(lengths: np.ndarray, order: list[int], offsets: list[int]) -> list[int]:
    return [sum(int(s) ** 2 for s in lengths[order[a:b]]) for a, b in pairwise(offsets)]


@relaxed
@given(problems(most=120), st.sampled_from([1, 2, 5, 64]), limits)
def test_balance_rows_equals_its_twin_and_keeps_rows_as_full(
    problem: tuple[np.ndarray, int], multiple: int, most: int
) -> None:
    units = min(problem[1], 3000)
    sizes = fixed(np.minimum(problem[0], units), np.int32)
    order, offsets, _, _ = plan(sizes, units, most)
    rng = np.random.default_rng(len(sizes))
    # at most as long as what was planned, in units, and planned row after row
    lengths = fixed(sizes[order] * multiple - rng.integers(0, multiple, len(sizes)), np.int32)
    new_order, new_offsets = output(len(sizes)), output(len(offsets))
    arguments = (lengths, fixed(offsets), units * multiple, multiple, most)
    exchanges = balancing.balance_rows(*arguments, new_order, new_offsets)
    assert margins_kept(new_order, new_offsets)
    new = new_order.tolist(), new_offsets.tolist()
    assert (*new, exchanges) == reference.balance_rows(*arguments)
    assert sorted(new[0]) == list(range(len(sizes)))
    for taken in (lengths, -(-lengths // multiple)):
        before = [taken[a:b].sum() for a, b in pairwise(offsets)]
        assert [taken[new[0][a:b]].sum() for a, b in pairwise(new[1])] == before
    assert most == 0 or max(np.diff(new[1]), default=0) <= most
    old_costs, new_costs = costs(lengths, list(range(len(sizes))), offsets), costs(lengths, *new)
    assert sum(new_costs) == sum(old_costs)
    assert max(new_costs, default=0) <= max(old_costs, default=0)
    squares = [sum(cost**2 for cost in found) for found in (old_costs, new_costs)]
    assert squares[1] < squares[0] if exchanges else new[0] == list(range(len(sizes)))


def test_balance_rows_exchanges_one_segment_for_two_of_its_length() -> None:
    lengths, offsets = fixed([6, 2, 3, 3, 1], np.int32), fixed([0, 2, 5])
    order, new_offsets = output(5), output(3)
    assert balancing.balance_rows(lengths, offsets, 10, 1, 0, order, new_offsets) == 1
    rows = [sorted(lengths[order[a:b]].tolist()) for a, b in pairwise(new_offsets.tolist())]
    assert rows == [[2, 3, 3], [1, 6]]  # 22 and 37 instead of 40 and 19


affixes = st.lists(st.integers(0, 3), max_size=2)


@relaxed
@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=20), affixes, affixes)
def test_frame_documents_equals_its_twin(
    documents: list[list[int]], prefix: list[int], suffix: list[int]
) -> None:
    ids = fixed([token for ids in documents for token in ids], np.uint32)
    offsets = fixed(np.cumsum([0, *map(len, documents)]))
    out = output(len(ids) + len(documents) * (len(prefix) + len(suffix)), np.uint32)
    ends, affix = output(len(documents) + 1), (fixed(prefix, np.uint32), fixed(suffix, np.uint32))
    used = filling.frame_documents(ids, offsets, *affix, out, ends)
    expected = reference.frame_documents(documents, prefix, suffix)
    assert ends.tolist() == np.cumsum([0, *map(len, expected)]).tolist()
    assert out[:used].tolist() == [token for ids in expected for token in ids]
    assert (out[used:] == UNTOUCHED).all()
    assert margins_kept(out, ends)


@relaxed
@given(problems(), st.sampled_from([np.uint32, np.uint8]))
def test_gather_pieces_equals_its_twin(problem: tuple[np.ndarray, int], kind: Any) -> None:
    lengths = fixed(np.minimum(problem[0], 50), np.int32)
    ids, begin = fixed(range(100), kind), fixed(np.arange(len(lengths)) * 7 % 50)
    out = output(int(lengths.sum()), kind)
    filling.gather_pieces(ids, begin, lengths, out)
    assert out.tolist() == reference.gather_pieces(ids.tolist(), begin.tolist(), lengths.tolist())
    assert margins_kept(out)


@st.composite
def spans_of_bytes(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """In order, not overlapping; some touch."""
    edges = sorted(draw(st.lists(st.integers(0, size), max_size=8)))
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=False) if a < b]


PIECES = [
    b"",
    b"a",
    b" ",
    b"b",
    b"ab",
    "▁".encode(),
    "▁▁".encode(),
    "▁a".encode(),
    b"x",
    "▁▁".encode(),
    b"a",
    "▁".encode()[:1],
]
PIECE_KINDS = [1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 0]  # the last has no piece


@relaxed
@given(
    st.lists(st.lists(st.integers(0, 13), max_size=12), max_size=6),
    st.booleans(), st.integers(0, 3), st.data(),
)  # fmt: skip
def test_mark_trained_equals_its_twin(
    tokens: list[list[int]], spaces: bool, spacing: int, data: st.DataObject
) -> None:
    pieces = [*PIECES, b""]
    texts = []
    for (
        own
    ) in tokens:  # of the pieces themselves, spaces for some of their marks, now and then more
        text = b"".join(pieces[token] for token in own if token < len(pieces)).decode(
            "utf-8", "ignore"
        )
        text = "".join(
            data.draw(st.sampled_from(["▁", " ", " ", ""])) if c == "▁" else c for c in text
        )
        texts.append((text + data.draw(st.sampled_from(["", "", "a", " "]))).encode())
    spans = [data.draw(spans_of_bytes(len(text))) for text in texts]
    flat = [edge for own in spans for edge in own]
    ids = fixed([token for own in tokens for token in own], np.uint32)
    offsets = fixed(np.cumsum([0, *map(len, tokens)]))
    trained, certain = output(len(ids), np.uint8), output(len(texts), np.uint8)
    text_kernels.mark_trained(
        ids, offsets, fixed(list(b"".join(pieces)), np.uint8),
        fixed(np.cumsum([0, *map(len, pieces)])), fixed(PIECE_KINDS, np.uint8), spaces, spacing,
        fixed([*b"".join(texts), 0], np.uint8), fixed(np.cumsum([0, *map(len, texts)])),
        fixed(np.cumsum([0, *map(len, spans)])), fixed([a for a, _ in flat]),
        fixed([b for _, b in flat]), trained, certain,
    )  # fmt: skip
    with_pieces = [
        (text, [(token, pieces[token] if token < len(pieces) else b"") for token in own])
        for text, own in zip(texts, tokens, strict=True)
    ]
    expected = reference.mark_trained(
        with_pieces, dict(enumerate(PIECE_KINDS)), spaces, spacing, spans
    )
    assert certain.tolist() == [flags is not None for flags in expected]
    for (a, b), flags in zip(pairwise(offsets.tolist()), expected, strict=True):
        assert flags is None or trained[a:b].tolist() == flags
    assert margins_kept(trained, certain)


@relaxed
@given(
    st.lists(st.text(st.sampled_from("aé\u0100Ж日👍\U0010ffff"), max_size=9), max_size=5),
    st.sets(st.sampled_from([0x100, 0x416, 0x65E5, 0x1F44D, 0x10FFFF])),
    st.sampled_from([0, 63, 64, 255, 256, 1000]),
    st.sampled_from("aжç"),
    st.integers(1, 255),
)
def test_find_in_texts_equals_its_twin(
    texts: list[str], wanted: set[int], before: int, fill: str, mark: int
) -> None:
    texts = [fill * before + text for text in texts]
    marked = np.zeros(0x110000, np.uint8)
    marked[sorted(wanted)] = mark
    found = output(len(texts), np.uint8)
    text_kernels.find_in_texts(texts, fixed(marked, np.uint8), found)
    assert found.tolist() == reference.find_in_texts(texts, wanted)
    assert margins_kept(found)


def test_a_token_without_a_byte_goes_with_the_byte_that_follows() -> None:
    """SentencePiece's space alone, before "ab", where "a" is in the span and then "b" is."""
    ids, offsets, pieces = fixed([0, 1, 2], np.uint32), fixed([0, 3]), list("▁ab".encode())
    for begin, expected in ((0, [1, 1, 0]), (1, [0, 0, 1])):
        trained, certain = output(3, np.uint8), output(1, np.uint8)
        text_kernels.mark_trained(
            ids, offsets, fixed(pieces, np.uint8), fixed([0, 3, 4, 5]), fixed([1, 1, 1], np.uint8),
            True, 1, fixed(list(b"ab"), np.uint8), fixed([0, 2]), fixed([0, 1]), fixed([begin]),
            fixed([begin + 1]), trained, certain,
        )  # fmt: skip
        assert (trained.tolist(), certain.tolist()) == (expected, [1])
        assert margins_kept(trained, certain)
