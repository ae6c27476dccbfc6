"""Every kernel against its slow twin in _kernels/reference.py: equal to the last element.

A case draws what a kernel is given, and gives what it found and what its twin says. Inputs are
read-only; outputs lie between margins that must stay as they were.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packer_cli._kernels import (
    best_fit,
    dealing,
    documents,
    filling,
    gathering,
    inputs,
    one_by_one,
    plans,
    reference,
    texts,
)
from support import heavy

MODULES = (best_fit, dealing, documents, filling, gathering, inputs, one_by_one, plans, texts)
# Around the words of the bitset: one, two and three levels deep.
CAPACITIES = [1, 2, 3, 5, 6, 7, 63, 64, 65, 4095, 4096, 4097, 131072, 262143, 262144, 262145]
KINDS = ["uniform", "equal", "full", "ones", "fractions", "ends", "log-normal"]
UNTOUCHED, MARGIN = 77, 3
LONG = (1 << 31) - 1
seeds = st.integers(0, 2**64 - 1)
limits = st.one_of(st.just(0), st.integers(1, 8), st.just(2**24))  # segments in a row

Case = tuple[tuple[st.SearchStrategy[Any], ...], Callable[..., tuple[Any, Any]]]
CASES: dict[str, Case] = {}
written: list[np.ndarray] = []  # the outputs of a case


def twin_of(*drawn: st.SearchStrategy[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A case: what a kernel gives and what its twin gives, of what is drawn."""

    def register(compare: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
        CASES[compare.__name__] = drawn, compare
        return compare

    return register


def output(size: int | tuple[int, int], kind: Any = np.int64) -> np.ndarray:
    """What a kernel is to write, in the middle of a larger array."""
    rows, *columns = size if isinstance(size, tuple) else (size,)
    whole = np.full((rows + 2 * MARGIN, *columns), UNTOUCHED, kind)
    written.append(whole)
    return whole[MARGIN : MARGIN + rows]


def fixed(values: object, kind: Any = np.int64) -> np.ndarray:
    """A read-only array: kernels must not need to write into what they are given."""
    array = np.array(values, kind)
    array.setflags(write=False)
    return array


def ends_of(sizes: Any, first: int = 0, kind: Any = np.int64) -> np.ndarray:
    return fixed(np.cumsum([first, *sizes]), kind)


def flat(lists: Any, kind: Any) -> np.ndarray:
    return fixed([value for one in lists for value in one], kind)


def assert_margins() -> None:
    for whole in written:
        assert (whole[:MARGIN] == UNTOUCHED).all()
        assert (whole[-MARGIN:] == UNTOUCHED).all()
    written.clear()


def test_the_kernels_are_those_of_the_build_that_is_tested() -> None:
    """make test-asan would pass without a check with the release build."""
    root = Path(__file__).parents[2]
    builds = [name for name in os.environ.get("PYTHONPATH", "").split(":") if name[:6] == "build/"]
    for kernels in MODULES:
        for build in builds:
            assert Path(kernels.__file__).is_relative_to(root / build)


# Lengths


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


# Plans


def plan(name: str, lengths: np.ndarray, capacity: int, most: int = 0) -> tuple[Any, ...]:
    order, offsets = output(len(lengths)), output(len(lengths) + 1)
    tokens, counts = output(len(lengths), np.int32), output(capacity + 1, np.int32)
    counts[:] = 0
    rows = getattr(best_fit, name)(lengths, capacity, order, offsets, tokens, counts, most)
    assert (offsets[rows + 1 :] == UNTOUCHED).all()
    assert (tokens[rows:] == UNTOUCHED).all()
    of_length = {int(length): int(counts[length]) for length in np.flatnonzero(counts)}
    return order.tolist(), offsets[: rows + 1].tolist(), tokens[:rows].tolist(), of_length


def decide(name: str, lengths: np.ndarray, *arguments: int) -> tuple[list[int], int]:
    *arguments, most = arguments
    row_of = output(len(lengths), np.int32)
    rows = getattr(one_by_one, name)(lengths, *arguments, row_of, most)
    return row_of.tolist(), rows


def plan_mffd(lengths: np.ndarray, capacity: int) -> tuple[list[int], list[int]]:
    """Steps 1 to 4 by the kernel, step 5 by first fit's twin."""
    longest = fixed(reference.longest_first(lengths))
    visit, row_of = output(len(lengths)), output(len(lengths), np.int32)
    placed, rows = one_by_one.mffd_large_rows(lengths, capacity, longest, visit, row_of)
    assert (row_of[placed:] == UNTOUCHED).all()
    more, more_rows = reference.first_fit(lengths[visit[placed:]], capacity)
    all_rows = [*row_of[:placed].tolist(), *(row + rows for row in more)]
    return reference.group_by_row(all_rows, visit.tolist(), rows + more_rows)


def strategies_of(lengths: np.ndarray, capacity: int, most: int = 0) -> tuple[Any, Any]:
    found, expected = {}, {}
    for name in ("best_fit_decreasing", "mixed_best_fit"):
        found[name] = plan(name, lengths, capacity, most)
        expected[name] = getattr(reference, name)(lengths, capacity, most)
    for name in ("best_fit", "worst_fit", "first_fit", "next_fit"):
        found[name] = decide(name, lengths, capacity, most)
        expected[name] = getattr(reference, name)(lengths, capacity, most)
    found["mffd"], expected["mffd"] = (
        plan_mffd(lengths, capacity),
        reference.mffd(lengths, capacity),
    )
    return found, expected


@twin_of(problems(), limits)
def best_fit_decreasing__mixed_best_fit__best_fit__worst_fit__first_fit__next_fit__mffd_large_rows(
    problem: Any, most: int
) -> tuple[Any, Any]:
    return strategies_of(*problem, most)


@twin_of(problems(), st.integers(1, 15), limits)
def harmonic(problem: Any, classes: int, most: int) -> tuple[Any, Any]:
    return decide("harmonic", *problem, classes, most), reference.harmonic(*problem, classes, most)


@twin_of(problems(), seeds, st.booleans())
def permutation__longest_first__group_by_row__shuffle_plan(
    problem: Any, seed: int, permuted: bool
) -> tuple[Any, Any]:
    n = len(problem[0])
    longest, visit = output(n), output(n)
    plans.longest_first(*problem, longest)
    plans.permutation(visit, seed)
    row_of, rows = reference.worst_fit(*problem)
    order, offsets, new_order, new_offsets = (output(size) for size in (n, rows + 1) * 2)
    visited = fixed(visit) if permuted else None
    plans.group_by_row(fixed(row_of, np.int32), visited, rows, order, offsets)
    plans.shuffle_plan(fixed(order), fixed(offsets), rows, seed, new_order, new_offsets)
    before = visit.tolist() if permuted else list(range(n))
    grouped = reference.group_by_row(row_of, before, rows)
    found = [one.tolist() for one in (longest, visit, order, offsets, new_order, new_offsets)]
    expected = reference.longest_first(problem[0]), reference.permutation(n, seed), *grouped
    return found, [*expected, *reference.shuffle_plan(*grouped, seed)]


@twin_of(problems())
def sum_rows(problem: Any) -> tuple[Any, Any]:
    order, offsets, tokens, _ = reference.best_fit_decreasing(*problem)
    sums = output(len(offsets) - 1, np.int32)
    plans.sum_rows(problem[0], fixed(order), fixed(offsets), sums)
    return sums.tolist(), tokens


@twin_of(problems(most=120), st.sampled_from([1, 2, 5, 64]), limits)
def balance_rows(problem: Any, multiple: int, most: int) -> tuple[Any, Any]:
    """Rows stay as full, and their squares become less."""
    units = min(problem[1], 3000)
    sizes = fixed(np.minimum(problem[0], units), np.int32)
    order, offsets, _, _ = plan("best_fit_decreasing", sizes, units, most)
    rng = np.random.default_rng(len(sizes))
    # at most as long as what was planned, in units, and planned row after row
    lengths = fixed(sizes[order] * multiple - rng.integers(0, multiple, len(sizes)), np.int32)
    new_order, new_offsets = output(len(sizes)), output(len(offsets))
    arguments = (lengths, fixed(offsets), units * multiple, multiple, most)
    exchanges = plans.balance_rows(*arguments, new_order, new_offsets)
    assert sorted(new_order) == list(range(len(sizes)))
    assert most == 0 or max(np.diff(new_offsets), default=0) <= most
    old = np.arange(len(sizes)), offsets
    new = new_order, new_offsets.tolist()
    for taken in (lengths, -(-lengths // multiple)):
        sums = [[taken[o[a:b]].sum() for a, b in pairwise(edges)] for o, edges in (old, new)]
        assert sums[0] == sums[1]
    costs = [
        [sum(int(s) ** 2 for s in lengths[o[a:b]]) for a, b in pairwise(edges)]
        for o, edges in (old, new)
    ]
    assert sum(costs[1]) == sum(costs[0])
    assert max(costs[1], default=0) <= max(costs[0], default=0)
    squares = [sum(cost**2 for cost in some) for some in costs]
    assert squares[1] < squares[0] if exchanges else new_order.tolist() == old[0].tolist()
    found = new_order.tolist(), new_offsets.tolist(), exchanges
    return found, reference.balance_rows(*arguments)


# Rows dealt to ranks


@st.composite
def costs_of_rows(draw: st.DrawFn) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Costs, many of them equal or all different, and ranks, rows and micro-batches."""
    size = draw(st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 4)))
    n, seed = draw(st.integers(0, 60)) * size[0], draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    most = draw(st.sampled_from([1, 5, 1_000_000]))
    costs = rng.integers(0, most, n, endpoint=True) + draw(st.sampled_from([0, 0.25]))
    return fixed(rng.lognormal(3, 2, n) if draw(st.booleans()) else costs, float), size


@twin_of(costs_of_rows(), st.integers(1, 100))
def costliest_first(problem: Any, size: int) -> tuple[Any, Any]:
    out = output(len(problem[0]))
    dealing.costliest_first(problem[0], size, out)
    return out.tolist(), reference.costliest_first(problem[0].tolist(), size)


@twin_of(costs_of_rows())
def deal(problem: Any) -> tuple[Any, Any]:
    """In any order plainly, and with exchanges the costliest first of each step."""
    costs, (ranks, rows, micro_batches) = problem
    step, size = ranks * rows * micro_batches, (ranks, rows, micro_batches)
    plain, before, even = (output(len(costs)) for _ in range(3))
    dealing.deal(costs, *size, False, plain)
    in_order = np.arange(len(costs)).reshape(-1, ranks)
    assert (np.sort(plain.reshape(-1, ranks)) == in_order).all()  # one of each so many rows
    sorted_costs = fixed(costs[reference.costliest_first(costs.tolist(), step)], float)
    dealing.deal(sorted_costs, *size, False, before)
    dealing.deal(sorted_costs, *size, True, even)
    for begin in range(0, len(costs), step):
        one, other = (out[begin : begin + step].reshape(-1, ranks) for out in (before, even))
        assert sorted(other.ravel()) == list(range(begin, min(begin + step, len(costs))))
        assert (np.diff(other, axis=0) > 0).all()  # the costliest first, for each rank
        sums = [sorted_costs[some].sum(axis=0).max() for some in (one, other)]
        assert sums[1] <= sums[0] * (1 + 1e-12)
    twins = [reference.deal(costs.tolist(), *size, False),
             reference.deal(sorted_costs.tolist(), *size, True)]  # fmt: skip
    return [plain.tolist(), even.tolist()], twins


# Documents to pieces, and pieces to rows


@st.composite
def overlong(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """Lengths and a max_length, most of which are near a multiple of it."""
    max_length = draw(st.one_of(st.integers(1, 20), st.just(1 << 24)))
    near = st.builds(
        lambda rows, more: max(0, rows * max_length + more), st.integers(0, 4), st.integers(-1, 1)
    )
    lengths = draw(st.lists(st.one_of(near, st.integers(0, 60)), max_size=80))
    return fixed(lengths, draw(st.sampled_from([np.int32, np.int64]))), max_length


@twin_of(overlong())
def copy_lengths(problem: Any) -> tuple[Any, Any]:
    copied, counted = output(len(problem[0]), np.int32), output(3)
    filling.copy_lengths(*problem, copied, counted)
    return (copied.tolist(), counted.tolist()), reference.copy_lengths(*problem)


def cut(problem: Any, most: int, at_end: bool = False, first: int = 0) -> tuple[Any, Any]:
    expected = reference.cut_lengths(*problem, most)
    length = output(len(expected), np.int32)
    assert filling.cut_lengths(*problem, most, length) == len(expected)
    columns = output(len(expected)), output(len(expected)), output(len(expected), np.int32)
    filling.locate_pieces(*problem, most, at_end, first, *columns)
    located = list(zip(*(column.tolist() for column in columns), strict=True))
    twins = expected, reference.locate_pieces(*problem, most, at_end, first)
    return (length.tolist(), located), twins


@twin_of(overlong(), st.one_of(st.integers(0, 3), st.just(LONG)), st.booleans(),
         st.integers(0, 1 << 40))  # fmt: skip
def cut_lengths__locate_pieces(
    problem: Any, most: int, at_end: bool, first: int
) -> tuple[Any, Any]:
    return cut(problem, most, at_end and most == 1, first)


@twin_of(problems(most=40), st.booleans(), seeds,
         st.lists(st.booleans(), min_size=5, max_size=5),
         st.sampled_from([1, 2, 3, 16]))  # fmt: skip
def fill_rows(
    problem: Any, untrained: bool, seed: int, wanted: list[bool], multiple: int
) -> tuple[Any, Any]:
    """From ids, and once more from their addresses."""
    units = min(problem[1], 400 // multiple)  # rows are planned in these
    capacity = units * multiple
    lengths = fixed(np.minimum(problem[0], capacity), np.int32)
    rng = np.random.default_rng(seed)
    ids = fixed(rng.integers(0, 2**31, int(lengths.sum()) + 3), np.uint32)
    trained = fixed(rng.choice([0, 1, 255], len(ids)), np.uint8) if untrained else None
    begin = fixed(np.cumsum(lengths) - lengths + 3)
    planned = plan("best_fit_decreasing", fixed(-(-lengths // multiple), np.int32), units)
    order, offsets = map(fixed, planned[:2])
    rows = len(offsets) - 1

    def filled(*given: Any, by_address: bool) -> list[Any]:
        kinds = [np.int32, np.int32, np.uint8, np.int32]
        out = [output((rows, capacity), kind) if want else None
               for kind, want in zip(kinds, wanted[:4], strict=True)]  # fmt: skip
        boundaries, edges = output(len(order) + rows, np.int32), output(rows + 1, np.int32)
        padded = output(len(order) + rows, np.int32) if wanted[4] else None
        count = filling.fill_rows(
            *given, lengths, order, offsets, capacity, 9, *out, boundaries, edges, multiple, padded,
            by_address,
        )  # fmt: skip
        made = [*out, boundaries, edges, padded]
        return [None if one is None else one.tolist() for one in made] + [count]

    # by address: what is trained on comes in the order of the pieces
    places = [at for i in order for at in range(begin[i], begin[i] + lengths[i])]
    in_order = None if trained is None else fixed(trained[places], np.uint8)
    found = filled(ids, trained, begin, by_address=False)
    again = filled(None, in_order, fixed(ids.ctypes.data + 4 * begin), by_address=True)
    given_lists = (None if one is None else one.tolist()
                   for one in (ids, trained, begin, lengths, order, offsets))  # fmt: skip
    *columns, own_edges, own_padded, count = reference.fill_rows(
        *given_lists, capacity, 9, multiple
    )
    expected = [
        *(column if want else None for column, want in zip(columns, wanted[:4], strict=True)),
        flat(own_edges, int).tolist(), ends_of(map(len, own_edges)).tolist(),
        flat(own_padded, int).tolist() if wanted[4] else None, count,
    ]  # fmt: skip
    return (found, again), (expected, expected)


@twin_of(problems(most=40), seeds, st.sampled_from([1, 3]), st.sampled_from([1, 2, 3]))
def place_pieces(problem: Any, seed: int, width: int, multiple: int) -> tuple[Any, Any]:
    capacity = min(problem[1], 400 // multiple) * multiple
    lengths = fixed(np.minimum(problem[0], capacity), np.int32)
    rng = np.random.default_rng(seed)
    values = fixed(rng.integers(0, 256, (int(lengths.sum()) + 3, width)), np.uint8)
    begin = fixed(np.cumsum(lengths) - lengths + 3)
    in_units = fixed(-(-lengths // multiple), np.int32)
    planned = plan("best_fit_decreasing", in_units, capacity // multiple)
    order, offsets = map(fixed, planned[:2])
    out = output((len(offsets) - 1, capacity * width), np.uint8)
    filling.place_pieces(values.reshape(-1), width, begin, lengths, order, offsets, multiple, out)
    given = (one.tolist() for one in (values, begin, lengths, order, offsets))
    rows = out.reshape(len(out), capacity, width).tolist()
    return rows, reference.place_pieces(*given, capacity, multiple, [0] * width)


affixes = st.lists(st.integers(0, 3), max_size=2)


@twin_of(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=20), affixes, affixes)
def frame_documents(some: list[list[int]], prefix: list[int], suffix: list[int]) -> tuple[Any, Any]:
    ids = flat(some, np.uint32)
    out = output(len(ids) + len(some) * (len(prefix) + len(suffix)), np.uint32)
    ends, affix = output(len(some) + 1), (fixed(prefix, np.uint32), fixed(suffix, np.uint32))
    used = filling.frame_documents(ids, ends_of(map(len, some)), *affix, out, ends)
    assert (out[used:] == UNTOUCHED).all()
    framed = reference.frame_documents(some, prefix, suffix)
    expected = flat(framed, np.uint32).tolist(), ends_of(map(len, framed)).tolist()
    return (out[:used].tolist(), ends.tolist()), expected


@twin_of(problems(), st.sampled_from([1, 3, 4]))
def gather_pieces(problem: Any, width: int) -> tuple[Any, Any]:
    lengths = fixed(np.minimum(problem[0], 50), np.int32)
    ids, begin = (
        fixed(np.arange(100 * width) % 251, np.uint8),
        fixed(np.arange(len(lengths)) * 7 % 50),
    )
    out = output(int(lengths.sum()) * width, np.uint8)
    filling.gather_pieces(ids, width, begin, lengths, out)
    values = ids.reshape(-1, width).tolist(), begin.tolist(), lengths.tolist()
    return out.reshape(-1, width).tolist(), reference.gather_pieces(*values)


@twin_of(seeds)
def filling__count_trained(seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    trained = fixed(rng.random(200) < 0.3, np.uint8)
    begin = fixed(rng.integers(0, 200, 30))
    end, out = fixed(np.minimum(begin + rng.integers(0, 40, 30), 200)), output(30)
    filling.count_trained(trained, begin, end, out)
    return out.tolist(), reference.count_trained(trained.tolist(), begin, end)


# Documents as they are stored


@twin_of(st.lists(st.integers(0, 40), max_size=12), st.integers(0, 3), seeds)
def hash_documents(sizes: list[int], before: int, seed: int) -> tuple[Any, Any]:
    offsets = ends_of(sizes, before)
    rng = np.random.default_rng(seed)
    ids = fixed(rng.integers(0, 1 << 32, offsets[-1], dtype=np.uint32), np.uint32)
    out = output((len(sizes), 2), np.uint64)
    documents.hash_documents(ids, offsets, out)
    return [tuple(one) for one in out.tolist()], reference.hash_documents(ids, offsets)


@twin_of(st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=9))
def documents__count_stretches__stretches(flags: list[list[int]]) -> tuple[Any, Any]:
    trained, offsets = flat(flags, np.uint8), ends_of(map(len, flags))
    edges = output(len(flags) + 1, np.int32)
    documents.count_stretches(trained, offsets, edges)
    out = output(edges[-1], np.int32)
    documents.stretches(trained, offsets, out)
    if edges[-1]:
        with pytest.raises(ValueError, match="more than"):
            documents.stretches(trained, offsets, output(edges[-1] - 1, np.int32))
    expected = reference.count_stretches(trained, offsets), reference.stretches(trained, offsets)
    return (edges.tolist(), out.tolist()), expected


Piece = tuple[int, int, int]


@st.composite
def pieces(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[Piece]]:
    """(documents, how many of them each span has, pieces of them)."""
    some = draw(st.lists(st.lists(st.integers(0, 9), max_size=9), min_size=1, max_size=9))
    cuts = draw(st.sets(st.integers(1, len(some))))
    edges = [0, *sorted(cuts - {len(some)}), len(some)]
    taken = []
    for number in draw(st.lists(st.integers(0, len(some) - 1), max_size=12)):
        start = draw(st.integers(0, len(some[number])))
        taken.append((number, start, draw(st.integers(0, len(some[number]) - start))))
    return some, [b - a for a, b in pairwise(edges)], taken


def columns_of(taken: list[Piece]) -> tuple[np.ndarray, ...]:
    kinds = (np.int64, np.int32, np.int32)
    return tuple(fixed([one[i] for one in taken], kind) for i, kind in enumerate(kinds))


class Spans:
    """Lists in memory as record batches of Arrow hold them, with a gap before each."""

    def __init__(self, lists: list[list[int]], sizes: list[int], gap: int) -> None:
        self.kept, first = [], 0
        for size in sizes:
            own = lists[first : first + size]
            values = fixed([7] * gap + [value for one in own for value in one] + [7], np.int32)
            self.kept.append((ends_of(map(len, own), gap, np.int32), values))
            first += size
        addresses = [[array.ctypes.data for array in pair] for pair in self.kept]
        self.firsts = ends_of(sizes)
        self.offsets, self.values = fixed(addresses).T.copy()


def gathered(problem: Any, gap: int, out: np.ndarray) -> tuple[Any, Any]:
    some, sizes, taken = problem
    spans = Spans(some, sizes, gap)
    found = documents.gather_documents(
        *columns_of(taken), spans.firsts, spans.offsets, spans.values, 4, out.view(np.uint8)
    )
    return (out.tolist(), found), reference.gather_documents(some, *columns_of(taken))


@twin_of(pieces(), st.integers(0, 2))
def gather_documents(problem: Any, gap: int) -> tuple[Any, Any]:
    return gathered(problem, gap, output(sum(length for *_, length in problem[2]), np.uint32))


@twin_of(pieces(), st.integers(0, 1 << 20))
def gather_trained(problem: Any, seed: int) -> tuple[Any, Any]:
    some, sizes, taken = problem
    random = np.random.default_rng(seed)
    lists: list[list[int] | None] = []
    for one in some:
        flags = random.integers(0, 2, len(one)).astype(np.uint8)
        lists.append(reference.stretches(flags, [0, len(one)]) if random.random() < 0.7 else None)
    spans, bitmaps, first = Spans([one or [] for one in lists], sizes, seed % 3), [], 0
    for size in sizes:
        present = [one is not None for one in lists[first : first + size]]
        bitmaps.append(np.packbits(present, bitorder="little"))
        first += size
    valid = fixed([one.ctypes.data for one in bitmaps])
    nothing = fixed([0] * len(sizes))  # no such column: everything is trained on
    out = [output(sum(length for *_, length in taken), np.uint8) for _ in range(2)]
    wrong = [
        documents.gather_trained(*columns_of(taken), spans.firsts, *given, one)
        for given, one in zip(
            [(spans.offsets, spans.values, valid), (nothing, nothing, nothing)], out, strict=True
        )
    ]
    expected = reference.gather_trained(lists, *columns_of(taken))
    found = [one.tolist() for one in out], wrong
    return found, ([expected, [1] * len(out[1])], [-1, -1])


# Rows that are mapped


@st.composite
def mapped(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """(first row, rows) of each span, with gaps between some, and rows that lie in them."""
    firsts, counts, end = [], [], 0
    for gap, count in draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), min_size=1)):
        firsts.append(end + gap)
        counts.append(count)
        end += gap + count
    inside = [f + i for f, n in zip(firsts, counts, strict=True) for i in range(n)]
    return firsts, counts, draw(st.lists(st.sampled_from(inside), max_size=20))


@twin_of(mapped(), st.integers(0, 60))
def first_absent(problem: Any, extra: int) -> tuple[Any, Any]:
    firsts, counts, rows = problem
    ends = fixed(firsts) + fixed(counts)
    inside = {f + i for f, n in zip(firsts, counts, strict=True) for i in range(n)}
    given_rows = ([*rows, extra], rows)
    found = [gathering.first_absent(fixed(one), fixed(firsts), ends) for one in given_rows]
    return found, [-1 if extra in inside else len(rows), -1]


@twin_of(mapped(), st.integers(1, 9))
def gather_rows(problem: Any, width: int) -> tuple[Any, Any]:
    firsts, counts, rows = problem
    random = np.random.default_rng(width)
    maps = [random.integers(0, 256, (n, width)).astype(np.uint8) for n in counts]
    by_row = {f + i: m[i] for f, m in zip(firsts, maps, strict=True) for i in range(len(m))}
    out, addresses = output(len(rows) * width, np.uint8), fixed([m.ctypes.data for m in maps])
    gathering.gather_rows(fixed(rows), fixed(firsts), addresses, width, out)
    with pytest.raises(ValueError, match=f"{len(rows)} rows of {width} bytes into"):
        gathering.gather_rows(
            fixed(rows), fixed(firsts), addresses, width, output(len(out) + 1, np.uint8)
        )
    return out.tolist(), [value for row in rows for value in by_row[row].tolist()]


@twin_of(mapped(), st.integers(0, 100), st.sampled_from([np.int64, np.int32, np.int8]))
def count_values__gather_values(problem: Any, seed: int, kind: Any) -> tuple[Any, Any]:
    firsts, counts, rows = problem
    random = np.random.default_rng(seed)
    edges = [ends_of(random.integers(0, 4, n), seed % 3, np.int32) for n in counts]
    values = [fixed(random.integers(0, 99, own[-1] + 1), kind) for own in edges]
    by_row = {
        first + i: own[its[i] : its[i + 1]].tolist()
        for first, own, its in zip(firsts, values, edges, strict=True)
        for i in range(len(its) - 1)
    }
    where = fixed([own.ctypes.data for own in edges])
    addresses, ends = fixed([own.ctypes.data for own in values]), output(len(rows) + 1)
    gathering.count_values(fixed(rows), fixed(firsts), where, ends)
    out = output(ends[-1], kind)
    size, to = out.itemsize, out.view(np.uint8)
    gathering.gather_values(fixed(rows), fixed(firsts), where, addresses, ends, size, to)
    with pytest.raises(ValueError, match=r"rows, \d+ ends"):
        gathering.count_values(fixed(rows), fixed(firsts), where, output(len(rows)))
    lists = [by_row[row] for row in rows]
    expected = ends_of(map(len, lists)).tolist(), flat(lists, kind).tolist()
    return (ends.tolist(), out.tolist()), expected


@st.composite
def boundaries(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    most = draw(st.integers(1, 9))
    edges = st.sets(st.integers(1, most), min_size=1).map(lambda some: [0, *sorted(some)])
    return most, draw(st.lists(edges, min_size=1, max_size=6))


def joined(rows: list[list[int]], most: int) -> tuple[tuple[int, int], list[int]]:
    values = flat(rows, np.int32)
    out = output(len(values) + 1, np.int32)
    found = gathering.join_boundaries(values, ends_of(map(len, rows)), most, out)
    return found, out[: found[0]].tolist()


@twin_of(boundaries())
def join_boundaries(problem: Any) -> tuple[Any, Any]:
    """Padding is a document."""
    most, rows = problem
    edges = {number * most + edge for number, row in enumerate(rows) for edge in row}
    expected = sorted({*edges, len(rows) * most})
    longest = max(b - a for a, b in pairwise(expected))
    return joined(rows, most), ((len(expected), longest), expected)


@twin_of(st.lists(st.integers(0, 5), min_size=1))
def count_positions(lengths: list[int]) -> tuple[Any, Any]:
    out = output(sum(lengths), np.int64)
    gathering.count_positions(ends_of(lengths, kind=np.int32), out)
    return out.tolist(), [place for n in lengths for place in range(n)]


# Rows of views: documents in three spans, and three directories, of which the middle one is gone
LENGTHS, DIRECTORIES = [[3, 9], [1], [7, 2, 5]], [(0, 3), (0, 0), (3, 3)]
references = st.tuples(st.integers(-1, 3), st.integers(-1, 3), st.integers(-1, 7))
sound = st.sampled_from([(0, 0, 0), (0, 1, 2), (2, 0, 1), (0, 2, 0), (2, 2, 0)])
some_edges = st.one_of(
    st.integers(0, 4).map(lambda count: list(range(count + 1))),
    st.lists(st.integers(0, 3), max_size=4).map(lambda steps: np.cumsum([0, *steps]).tolist()),
    st.lists(st.integers(-2, 9), max_size=4),
)


@st.composite
def rows_of_views(draw: st.DrawFn) -> list[tuple[list[int], list[Piece]]]:
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        edges, fits = draw(some_edges), draw(st.booleans())  # as many segments as edges say
        segments = draw(st.lists(st.one_of(sound, sound, references), max_size=4))
        count = max(0, len(edges) - 1) if fits else len(segments)
        rows.append((edges, [*segments, *[(0, 1, 0)] * 9][:count]))
    return rows


class Mapped:
    """Columns of rows in two spans, and documents in three. `kept`: what is mapped."""

    def __init__(self, rows: list[tuple[list[int], list[Piece]]]) -> None:
        half = len(rows) // 2
        self.firsts, self.kept, spans = fixed([0, half] if half else [0]), [], []
        for some in [rows[:half], rows[half:]] if half else [rows]:
            parts = [segment for _, segments in some for segment in segments]
            kinds = (np.int32, np.int64, np.int32)
            offsets = np.cumsum([0, *(len(segments) for _, segments in some)]).astype(np.int32)
            own = [offsets, *(np.array([part[i] for part in parts], kind)
                              for i, kind in enumerate(kinds))]  # fmt: skip
            self.kept += own
            spans.append([array.ctypes.data for array in own] + [len(parts)])
        self.lists = fixed(spans).T.copy()
        self.boundaries = flat([row for row, _ in rows], np.int32)
        self.ends = np.array(ends_of(len(row) for row, _ in rows))
        self.pieces = sum(len(segments) for _, segments in rows)
        self.tokens, described, first = [], [], 0
        for lengths in LENGTHS:
            offsets = np.cumsum([1, *lengths]).astype(np.int32)  # one token belongs to none
            values = np.arange(100 * first, 100 * first + offsets[-1], dtype=np.int32)
            self.kept += [offsets, values]
            self.tokens += np.split(values[: offsets[-1]], offsets[:-1])[1:]
            described.append([first, offsets.ctypes.data, values.ctypes.data, offsets[-1]])
            first += len(lengths)
        self.documents = fixed(described).T.copy()

    def find(self, capacity: int, multiple: int, count: int | None = None) -> Any:
        """What the kernel returns, and its outputs."""
        count, rows = self.pieces if count is None else count, len(self.ends) - 1
        kinds = (np.int64, np.int32, np.int32, np.int64)
        out = [output(rows + 1), *(output(count, kind) for kind in kinds)]
        wrong = gathering.find_pieces(
            fixed(range(rows)), self.firsts, self.lists, self.boundaries, self.ends,
            fixed(DIRECTORIES), self.documents, capacity, multiple, *out,
        )  # fmt: skip
        return wrong, out


@twin_of(rows_of_views(), st.integers(1, 12), st.sampled_from([1, 2, 3]))
def find_pieces(rows: Any, capacity: int, multiple: int) -> tuple[Any, Any]:
    held = Mapped(rows)
    (row, problem), (offsets, number, start, length, address) = held.find(capacity, multiple)
    lengths = [len(tokens) for tokens in held.tokens]
    edges, segments = map(list, zip(*rows, strict=True))
    expected = reference.find_pieces(edges, segments, DIRECTORIES, lengths, capacity, multiple)
    if problem:
        return (row, problem), expected
    found = list(zip(number.tolist(), start.tolist(), length.tolist(), strict=True))
    for (document, first, _), place in zip(found, address.tolist(), strict=True):
        assert place == held.tokens[document].ctypes.data + 4 * first
    return [found[a:b] for a, b in pairwise(offsets)], expected


# Inputs

SIGNED = [np.int8, np.int16, np.int32, np.int64]
INTEGERS = [*SIGNED, np.uint8, np.uint16, np.uint32, np.uint64]
ids_of_inputs = st.sampled_from(INTEGERS).flatmap(
    lambda kind: st.tuples(
        st.just(kind),
        st.lists(st.one_of(st.integers(0, 100), st.integers(np.iinfo(kind).min, np.iinfo(kind).max),
                           st.sampled_from([np.iinfo(kind).min, np.iinfo(kind).max]))),
    )
)  # fmt: skip


@twin_of(ids_of_inputs)
def copy_ids(problem: Any) -> tuple[Any, Any]:
    kind, values = problem
    out = output(len(values), np.uint32)
    expected, good = reference.copy_ids(values)
    return (inputs.copy_ids(fixed(values, kind), out), good and out.tolist()), (
        good,
        good and expected,
    )


@twin_of(st.sampled_from(SIGNED), st.lists(st.sampled_from([-100, 6, 7, -99]), max_size=6))
def copy_trained(kind: Any, labels: list[int]) -> tuple[Any, Any]:
    ids, out = fixed([6] * len(labels), np.uint32), output(len(labels), np.uint8)
    good = inputs.copy_trained(fixed(labels, kind), ids, out)
    return (out.tolist(), good), reference.copy_trained(labels, ids.tolist())


@twin_of(st.lists(st.sampled_from([0, 1, 1, 2, -1, 127]), max_size=6))
def count_real(mask: list[int]) -> tuple[Any, Any]:
    return inputs.count_real(fixed(mask, np.int8)), reference.count_real(mask)


JSON_PARTS = [b"[", b"]", b"{", b"}", b",", b'"', b"\\", b"\\\\", b" \n", b"a", b'"x"', b'{"a":1}',
              b"\0"]  # fmt: skip


@twin_of(st.lists(st.sampled_from(JSON_PARTS), max_size=40), st.integers(0, 3), st.integers(1, 9))
def find_elements(parts: list[bytes], at: int, room: int) -> tuple[Any, Any]:
    """Some of them, where there is no room for all."""
    data = b"".join(parts)
    at = min(at, len(data))
    places = output((room, 2))
    count = inputs.find_elements(np.frombuffer(data, np.uint8), at, places)
    return places[:count].tolist(), reference.find_elements(data, at)[:room]


# Texts


_strings = st.text(st.sampled_from('aé\u0100日👍"\\\n\u2028/ '), max_size=30)
_numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
_values = st.recursive(
    st.none() | st.booleans() | _numbers | _strings,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_strings, inner, max_size=3),
    max_leaves=5,
)
_names = st.sampled_from(["text", "te", "texts", "é", 'a"b', ""])
_records = st.dictionaries(_names, _values)
_odd = st.binary(min_size=1, max_size=2) | st.sampled_from(
    [b"\\ud83d", b"\\u0074", b"NaN", b"[" * 63]
)


@twin_of(
    st.lists(
        st.tuples(_records, _strings, st.booleans(), st.sampled_from([None, 1])), max_size=5
    ),
    st.lists(st.tuples(st.integers(0), st.integers(0), _odd, st.booleans()), max_size=2),
    st.sampled_from(["text", "é"]), st.lists(_names, max_size=2, unique=True),
)  # fmt: skip
def find_texts(
    drawn: list[tuple[dict[str, Any], str, bool, int | None]],
    spoiled: list[tuple[int, int, bytes, bool]],
    name: str,
    others: list[str],
) -> tuple[Any, Any]:
    """JSON of objects that have a text, some of them with other bytes in some place; the text, and
    the JSON of other fields.
    """
    others = [one for one in others if one != name and '"' not in one and "\\" not in one]
    records = [
        json.dumps({**fields, name: text}, ensure_ascii=is_ascii, indent=indent).encode()
        for fields, text, is_ascii, indent in drawn
    ]
    for which, place, odd, replaces in spoiled[: len(records)]:
        record = records[which % len(records)]
        at = place % len(record)
        records[which % len(records)] = record[:at] + odd + record[at + replaces * len(odd) :]
    data = fixed([*b"\n".join(records)], np.uint8)
    begins, ends = (
        ends_of(len(one) + 1 for one in records)[:-1],
        ends_of(len(one) + 1 for one in records)[1:] - 1,
    )
    out, offsets = output(len(data), np.uint8), np.zeros(len(records) + 1, np.int64)
    keys = [f'"{one}"'.encode() for one in (name, *others)]
    places = np.zeros((len(others), len(records), 2), np.int64)
    count = inputs.find_texts(
        data, begins, ends, fixed([*b"".join(keys)], np.uint8), ends_of(map(len, keys)), out,
        offsets, places,
    )  # fmt: skip
    found = [bytes(out[a : b - 1]) for a, b in pairwise(offsets[: count + 1].tolist())]
    assert all(out[b - 1] == 0xFF for b in offsets[1 : count + 1])
    values = [
        [None if a < 0 else json.loads(bytes(data[a:b])) for a, b in of_field[:count].tolist()]
        for of_field in places
    ]
    return (found, values), reference.find_texts(records, name, others)


@twin_of(
    st.lists(
        st.lists(
            st.integers(0, 1 << 31) | st.booleans()
            | st.sampled_from([None, -1, 1.5, 7, 1e20, 10**20, "[1]", [], [1]])
        ) | st.sampled_from([5, True, [[1]]]),
        max_size=5,
    ),
    st.sampled_from([None, 1]), st.booleans(),
)  # fmt: skip
def read_lists(lists: list[Any], indent: int | None, is_ids: bool) -> tuple[Any, Any]:
    """JSON of ids, of booleans, and of what is neither; and values that are no lists."""
    if is_ids:
        lists = [one for one in lists if isinstance(one, list)]
        lists = [[value for value in one if type(value) in (int, bool)] for one in lists]
    written = [json.dumps(one, indent=indent).encode() for one in lists]
    text = fixed([*b"".join(written)], np.uint8)
    numbers, sizes = output(len(text) // 2 + 1, np.uint32), np.zeros(len(lists), np.int64)
    count = inputs.read_lists(text, numbers, sizes)
    ends = ends_of(sizes)
    found = [numbers[a:b].tolist() for a, b in pairwise(ends.tolist())] if count >= 0 else None
    return found, reference.read_lists(written)


@twin_of(
    st.lists(st.text(st.sampled_from("aé\u0100Ж日👍\U0010ffff"), max_size=9), max_size=5),
    st.sets(st.sampled_from([0x100, 0x416, 0x65E5, 0x1F44D, 0x10FFFF])),
    st.sampled_from([0, 63, 64, 255, 256, 1000]), st.sampled_from("aжç"), st.integers(1, 255),
)  # fmt: skip
def find_in_texts(
    some: list[str], wanted: set[int], before: int, fill: str, mark: int
) -> tuple[Any, Any]:
    some = [fill * before + text for text in some]
    marked = np.zeros(0x110000, np.uint8)
    marked[sorted(wanted)] = mark
    found = output(len(some), np.uint8)
    encoded = [text.encode() + b"\xff" for text in some]
    data, offsets = fixed([*b"".join(encoded)], np.uint8), ends_of(map(len, encoded))
    texts.find_in_texts(data, offsets, fixed(marked, np.uint8), found)
    return found.tolist(), reference.find_in_texts(some, wanted)


PIECES = [b"", b"a", b" ", b"b", b"ab", *(one.encode() for one in ("▁", "▁▁", "▁a")), b"x",
          "▁▁".encode(), b"a", "▁".encode()[:1], b""]  # fmt: skip
PIECE_KINDS = [1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 0]  # the last has no piece


@st.composite
def texts_of_pieces(draw: st.DrawFn) -> tuple[list[list[int]], list[bytes], list[list[Any]]]:
    """Texts of the pieces themselves, with spaces for some of their marks, now and then more; and
    spans of their bytes, in order, some of which touch.
    """
    tokens = draw(st.lists(st.lists(st.integers(0, 13), max_size=12), max_size=6))
    made, spans = [], []
    for own in tokens:
        text = b"".join(PIECES[token] for token in own if token < 13).decode("utf-8", "ignore")
        marks = iter(draw(st.lists(st.sampled_from(["▁", " ", " ", ""]), min_size=text.count("▁"),
                                   max_size=text.count("▁"))))  # fmt: skip
        text = "".join(next(marks) if c == "▁" else c for c in text)
        made.append((text + draw(st.sampled_from(["", "", "a", " "]))).encode())
        edges = sorted(draw(st.lists(st.integers(0, len(made[-1])), max_size=8)))
        pairs = zip(edges[::2], edges[1::2], strict=False)
        spans.append([(a, b) for a, b in pairs if a < b])
    return tokens, made, spans


def marked(
    tokens: list[list[int]], some: list[bytes], spans: list[list[Any]], spaces: bool, spacing: int
) -> tuple[list[list[tuple[int, int | None]]], list[int]]:
    ids = flat(tokens, np.uint32)
    offsets, edges = ends_of(map(len, tokens)), [edge for own in spans for edge in own]
    trained, certain = output(len(ids), np.uint8), output(len(some), np.uint8)
    span_of, firsts = output(len(ids)), ends_of(map(len, spans))
    texts.mark_trained(
        ids, offsets, flat(PIECES, np.uint8), ends_of(map(len, PIECES)),
        fixed(PIECE_KINDS, np.uint8), spaces, spacing,
        fixed([*b"\xff".join([*some, b""]), 0], np.uint8), ends_of(len(one) + 1 for one in some),
        firsts, fixed([a for a, _ in edges]), fixed([b for _, b in edges]), trained, certain,
        span_of,
    )  # fmt: skip
    flags = [
        [(int(trained[t]), int(span_of[t] - firsts[i]) if trained[t] else None)
         for t in range(a, b)]
        for i, (a, b) in enumerate(pairwise(offsets))
    ]  # fmt: skip
    return flags, certain.tolist()


@twin_of(texts_of_pieces(), st.booleans(), st.integers(0, 3))
def mark_trained(problem: Any, spaces: bool, spacing: int) -> tuple[Any, Any]:
    flags, certain = marked(*problem, spaces, spacing)
    with_pieces = [
        (text, [(token, PIECES[token] if token < 13 else b"") for token in own])
        for own, text in zip(*problem[:2], strict=True)
    ]
    kinds = dict(enumerate(PIECE_KINDS))
    expected = reference.mark_trained(with_pieces, kinds, spaces, spacing, problem[2])
    found = [own if is_certain else None for own, is_certain in zip(flags, certain, strict=True)]
    return found, expected


# Messages

PARSED = frozenset(("function_call", "tool_calls", "reasoning_content", "weight"))
TEXTS = st.sampled_from(
    ["", "a", "é <", "<tool_response>", "a</think>b", " a", "\n", "\u3000", "\ud800", "你好"]
)
VALUES = st.one_of(TEXTS, st.none(), st.just(0), st.just(5), st.just(["a"]), st.just([]))
FUNCTIONS = st.one_of(VALUES, st.dictionaries(
    st.sampled_from(["name", "arguments"]), st.sampled_from(["", "{}", {}, {"a": 1}, None, 3]),
    max_size=2,
))  # fmt: skip
CALLS = st.one_of(
    TEXTS, st.dictionaries(st.sampled_from(["id", "name", "arguments", "function"]), FUNCTIONS)
)
MESSAGES = st.one_of(
    st.sampled_from([None, "text", 3, ["role"], {"role": "assistant", "content": "a</think>"},
                     {"content": "a", "role": "user"}, {"role": "user", "content": "a"}]),
    st.fixed_dictionaries({}, optional={
        "role": st.one_of(st.sampled_from(["user", "assistant", "tool"]), VALUES),
        "content": VALUES,
        "tool_calls": st.one_of(VALUES, st.lists(CALLS, max_size=3)),
        "reasoning_content": VALUES,
        "weight": st.sampled_from([0, 1, None]),
        "name": VALUES,
    }).flatmap(lambda message: st.permutations(list(message.items())).map(dict)),
)  # fmt: skip


@twin_of(st.lists(MESSAGES, max_size=5))
def is_plain__key_of__kinds_of(messages: list[Any]) -> tuple[Any, Any]:
    """The second time, the first one's kinds are known."""
    results = []
    for kernels in (texts, reference):
        known, made = dict[Any, str](), list[Any]()

        def make(message: Any, key: Any, into: list[Any] = made) -> str:
            into.append((message, key))
            return repr(key)

        looks = [(kernels.is_plain(one, PARSED), kernels.key_of(one)) for one in messages]
        kinds = [kernels.kinds_of(messages, known, make)]
        known |= {key: repr(key) for _, key in made if key is not None}
        results.append((looks, [*kinds, kernels.kinds_of(messages, known, make)], made))
    return results[0], results[1]


JSON = st.recursive(
    st.one_of(TEXTS, st.none(), st.integers(), st.booleans(), st.floats(), st.binary(max_size=1)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3), st.tuples(inner)
    ),
)


@twin_of(JSON, st.sampled_from(["", "<", "</think>", "好"]))
def may_hold(value: Any, part: str) -> tuple[Any, Any]:
    return texts.may_hold(value, part), reference.may_hold(value, part)


@twin_of(st.lists(TEXTS, max_size=9), st.lists(st.integers(0, 9), max_size=9))
def ends_at(some: list[str], counts: list[int]) -> tuple[Any, Any]:
    counts = sorted(min(count, len(some)) for count in counts)
    return texts.ends_at(some, counts), reference.ends_at(some, counts)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_kernel_equals_its_twin(name: str, data: st.DataObject) -> None:
    written.clear()
    drawn, compare = CASES[name]
    found, expected = compare(*data.draw(st.tuples(*drawn)))
    assert found == expected
    assert_margins()


def test_every_kernel_has_a_case() -> None:
    elsewhere = {"order_keys", "keep_real"}  # below; and in tests/inputs, by what calls it
    cases = {part for name in CASES for part in name.split("__")}
    for module in MODULES:
        own = {name for name, one in vars(module).items()
               if not name.startswith("_") and inspect.isbuiltin(one)}  # fmt: skip
        assert own <= cases | elsewhere, module.__name__


# More of what a case seldom draws


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("kind", ["uniform", "fractions", *map(heavy, KINDS[1:4] + KINDS[5:])])
def test_many_documents_equal_their_twins(kind: str, capacity: int) -> None:
    found, expected = strategies_of(lengths_of(kind, capacity, 400, seed=capacity), capacity)
    assert found == expected
    assert_margins()


@pytest.mark.parametrize("most", [0, 1, LONG])
def test_documents_of_more_tokens_than_31_bits_hold(most: int) -> None:
    lengths, max_length, counted = fixed([1 << 33, 7, LONG]), 1 << 24, output(3)
    filling.copy_lengths(lengths, max_length, output(3, np.int32), counted)
    assert counted.tolist() == [0, 2, (1 << 33) + LONG]
    expected = reference.cut_lengths(lengths, max_length, most)
    length = output(len(expected), np.int32)
    assert filling.cut_lengths(lengths, max_length, most, length) == len(expected)
    assert length.tolist() == expected
    assert_margins()


def test_the_generator_gives_the_published_numbers() -> None:
    state, numbers = 1234567, []
    for _ in range(3):
        number, state = reference.splitmix64(state)
        numbers.append(number)
    assert numbers == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize(
    ("text", "expected"),
    [  # the package mmh3 gives these, too: see tests/extras/test_tokenized.py
        (b"", (0, 0)),
        (b"abcd", (0xB87BB7D64656CD4F, 0xF2003E886073E875)),
    ],
)
def test_hashes_that_are_known(text: bytes, expected: tuple[int, int]) -> None:
    out, ids = np.ones((1, 2), np.uint64), np.frombuffer(text, np.uint32)
    documents.hash_documents(ids, ends_of([len(ids)]), out)
    assert tuple(out[0].tolist()) == expected


def test_the_order_of_hashes_depends_on_them_and_on_the_seed() -> None:
    hashes = np.random.default_rng(0).integers(0, 1 << 63, (1000, 2), dtype=np.uint64)
    out = np.zeros((3, 1000), np.uint64)
    for row, seed in enumerate((0, 1, (1 << 64) - 1)):
        documents.order_keys(hashes, seed, out[row])
    assert len(np.unique(out)) == 3000
    again = np.zeros(10, np.uint64)
    documents.order_keys(hashes[::-1][:10].copy(), 1, again)
    assert np.array_equal(again, out[1, ::-1][:10])
    # neither is the order of one seed that of another
    assert abs(np.corrcoef(out[0].argsort().argsort(), out[1].argsort().argsort())[0, 1]) < 0.15


def test_a_token_without_a_byte_goes_with_the_byte_that_follows() -> None:
    """SentencePiece's space alone, before "ab", where "a" is in the span and then "b" is."""
    for begin, expected in ((0, [1, 1, 0]), (1, [0, 0, 1])):
        found = marked([[5, 1, 3]], [b"ab"], [[(begin, begin + 1)]], True, 1)
        assert ([[flag for flag, _ in found[0][0]]], found[1]) == ([expected], [1])


# Arguments that cannot be, and files that change while they are mapped


@pytest.mark.parametrize(
    "wrong",
    [(3, 0, 1), (-1, 0, 1), (0, 0, 5), (0, -1, 2), (0, 2, -1), (0, LONG, LONG), (1, 1, 1),
     (2**40, 0, 0)],
)  # fmt: skip
def test_pieces_that_are_none(wrong: Piece) -> None:
    some, taken = [[1, 2, 3, 4], [], [5]], [(0, 1, 2), wrong, (2, 0, 1)]
    (out, found), (_, expected) = gathered((some, [2, 1], taken), 1, output(16, np.uint32))
    assert found == expected == 1
    assert out[2:] == [UNTOUCHED] * 14
    assert gathered((some, [2, 1], [(0, 0, 4)]), 1, output(3, np.uint32))[0][1] == 0  # no room
    assert_margins()


@pytest.mark.parametrize("wrong", [(3, 0, 1), (-1, 0, 1), (0, 0, 99), (0, -1, 1), (0, 0, -1)])
def test_pieces_of_what_is_trained_on_that_are_none(wrong: Piece) -> None:
    spans, out, nothing = Spans([[0, 1], [], [1, 3]], [2, 1], 0), output(8, np.uint8), fixed([0, 0])
    found = documents.gather_trained(
        *columns_of([(0, 0, 1), wrong]), spans.firsts, spans.offsets, spans.values, nothing, out
    )
    assert (found, out[1:].tolist()) == (1, [UNTOUCHED] * 7)


@pytest.mark.parametrize("wrong", [[], [1, 2], [0, 2, 2], [0, 3, 1], [0, 9], [0, -1], [0, LONG]])
def test_boundaries_that_are_none(wrong: list[int]) -> None:
    assert joined([[0, 8], wrong, [0, 1]], 8)[0] == (-1, 1)


def test_lists_that_change_while_they_are_mapped() -> None:
    """By who writes to the file: what was counted is copied."""
    values, edges = np.arange(9, dtype=np.int32), np.array([2, 4, 5], np.int32)
    rows, firsts, where = fixed([0, 1]), fixed([0]), fixed([edges.ctypes.data])
    ends, out = output(3), output(3, np.int32)
    gathering.count_values(rows, firsts, where, ends)
    edges[:] = [2, 4, 7]
    to = out.view(np.uint8)
    gathering.gather_values(rows, firsts, where, fixed([values.ctypes.data]), ends, 4, to)
    assert out.tolist() == [2, 3, 4]
    with pytest.raises(ValueError, match="values into"):
        gathering.gather_values(rows, firsts, where, where, ends, 4, output(16, np.uint8))
    edges[:] = [4, 2, 7]
    with pytest.raises(ValueError, match="the list of row 0 ends before it begins"):
        gathering.count_values(rows, firsts, where, ends)
    assert_margins()


ROWS = [([0, 2, 4], [(0, 0, 1), (2, 0, 3)]), ([0, 3], [(2, 2, 0)])]


@pytest.mark.parametrize(
    ("array", "edges", "problem"),  # of the first row's segments, and of the first documents
    [(0, [0, 3], 2), (0, [1, 3], 2), (0, [-1, 1], 2), (8, [1, 99], 4), (8, [-2, 1], 4),
     (8, [4, 2], 4)],
)  # fmt: skip
def test_views_that_change_while_they_are_mapped(
    array: int, edges: list[int], problem: int
) -> None:
    """What an offset says is compared with what was counted when the file was mapped."""
    held = Mapped(ROWS)
    assert held.find(8, 1)[0] == (-1, 0)
    held.kept[array][:2] = edges
    assert held.find(8, 1)[0] == (0, problem)
    assert_margins()


def test_rows_of_views_that_do_not_fit_together() -> None:
    held = Mapped(ROWS)
    assert held.find(8, 1, count=2)[0] == (1, 2)
    later = held.firsts + 1  # a row before the first span
    assert gathering.first_absent(fixed([0]), later, later + 1) == 0
    held.ends[-1] += 1
    with pytest.raises(ValueError, match=r"6 of 5 boundaries"):
        held.find(8, 1)
    held.lists = held.lists[:4]
    with pytest.raises(ValueError, match="rows"):
        held.find(8, 1)
