"""Finding the elements of a JSON array, in any blocks, against its slow twin."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernels.test_kernels import margins_kept, output
from packer_cli._kernels import reference
from packer_cli._kernels.inputs import find_elements

PARTS = [
    b"[",
    b"]",
    b"{",
    b"}",
    b",",
    b'"',
    b"\\",
    b"\\\\",
    b" \n",
    b"a",
    b'"x"',
    b'{"a":1}',
    b"\0",
]


@settings(max_examples=500, deadline=None)
@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=40),
    opened=st.booleans(),
    blocks=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    room=st.integers(1, 4),
)
@example(parts=[b'"', b"\\", b'"', b",", b'"', b",", b"]"], opened=True, blocks=[2], room=1)
@example(parts=[b",", b",", b"]", b"]"], opened=True, blocks=[1], room=1)
@example(parts=[b'"', b"\\\\", b'"', b",", b"]"], opened=True, blocks=[3, 1], room=2)
def test_finding_equals_its_twin(
    parts: list[bytes], opened: bool, blocks: list[int], room: int
) -> None:
    data = b"[" * opened + b"".join(parts)
    state = np.array([0, 0, 0, 0, -1, 0], np.int64)
    found, at, closed = list[list[int]](), 0, None
    while at < len(data) and closed is None:
        size = blocks[0]
        blocks = [*blocks[1:], size]
        block = np.frombuffer(data[at : at + size], np.uint8)
        state[0] = 0
        while state[0] < len(block) and state[1] >= 0:
            places = output((room, 2))
            count = find_elements(block, at, state, places)
            assert margins_kept(places)
            found += places[:count].tolist()
        if state[1] < 0:
            closed = at + int(state[0]) - 1
        at += size
    assert (found, closed) == reference.find_elements(data)
