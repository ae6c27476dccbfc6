"""Which documents are equal, and orders by content, against Python's own sets and sorts."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from packer_cli.result.tokenized import among, repeated, spread_order

# few values, so that hashes are equal, and in one half only
HALF = st.sampled_from([0, 1, 2, 1 << 32, (1 << 64) - 1])
HASHES = st.lists(st.tuples(HALF, HALF), max_size=40)


def array(hashes: list[tuple[int, int]]) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    return np.array(hashes, np.uint64).reshape(-1, 2)


@given(hashes=HASHES)
def test_all_but_the_first_of_equals_are_repeated(hashes: list[tuple[int, int]]) -> None:
    expected = [one in hashes[:place] for place, one in enumerate(hashes)]
    assert repeated(array(hashes)).tolist() == expected


@given(hashes=HASHES, contents=HASHES)
def test_what_is_among_contents(
    hashes: list[tuple[int, int]], contents: list[tuple[int, int]]
) -> None:
    expected = [one in contents for one in hashes]
    assert among(array(hashes), array(contents)).tolist() == expected


@given(keys=st.lists(HALF, max_size=40))
def test_an_order_of_some_is_that_of_all(keys: list[int]) -> None:
    """The first of equals are where they would be alone."""
    found = spread_order(np.array(keys, np.uint64)).tolist()
    assert sorted(found) == list(range(len(keys)))
    firsts = [place for place, key in enumerate(keys) if key not in keys[:place]]
    assert [p for p in found if p in firsts] == sorted(firsts, key=lambda place: keys[place])
