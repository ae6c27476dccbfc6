"""Looking at messages, against slow twins."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from packer_cli._kernels import looking, reference

PARSED = frozenset(("function_call", "tool_calls", "reasoning_content", "weight"))
TEXTS = st.sampled_from(
    ["", "a", "é <", "<tool_response>", "a</think>b", " a", "\n", "\u3000", "\ud800", "你好"]
)
VALUES = st.one_of(TEXTS, st.none(), st.just(0), st.just(5), st.just(["a"]), st.just([]))
ARGUMENTS = st.sampled_from(["", "{}", {}, {"a": 1}, None, 3])
FUNCTIONS = st.one_of(
    VALUES, st.dictionaries(st.sampled_from(["name", "arguments"]), ARGUMENTS, max_size=2)
)
CALLS = st.one_of(
    TEXTS, st.dictionaries(st.sampled_from(["id", "name", "arguments", "function"]), FUNCTIONS)
)
MESSAGES = st.one_of(
    st.sampled_from([None, "text", 3, ["role"]]),
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.one_of(st.sampled_from(["user", "assistant", "tool"]), VALUES),
            "content": VALUES,
            "tool_calls": st.one_of(VALUES, st.lists(CALLS, max_size=3)),
            "reasoning_content": VALUES,
            "weight": st.sampled_from([0, 1, None]),
            "name": VALUES,
        },
    ).flatmap(lambda message: st.permutations(list(message.items())).map(dict)),
)


@settings(max_examples=800, deadline=None)
@given(messages=st.lists(MESSAGES, max_size=5))
@example(messages=[{"role": "assistant", "content": "a</think>"}])
@example(messages=[{"content": "a", "role": "user"}, {"role": "user", "content": "a"}])
def test_looking_equals_its_twins(messages: list[Any]) -> None:
    for message in messages:
        assert looking.is_plain(message, PARSED) == reference.is_plain(message, PARSED)
        assert looking.key_of(message) == reference.key_of(message)
    made: list[list[tuple[Any, Any]]] = [[], []]
    known = dict[Any, str]()

    def make(message: Any, key: Any, into: list[Any]) -> str:
        into.append((message, key))
        return repr(key)

    for turn in range(2):  # the second time, the first one's kinds are known
        kinds = [
            kernel.kinds_of(messages, known, lambda m, k, into=into: make(m, k, into))
            for kernel, into in zip((looking, reference), made, strict=True)
        ]
        assert kinds[0] == kinds[1], turn
        assert made[0] == made[1]
        known |= {key: repr(key) for _, key in made[0] if key is not None}


JSON = st.recursive(
    st.one_of(TEXTS, st.none(), st.integers(), st.booleans(), st.floats(), st.binary(max_size=1)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3), st.tuples(inner)
    ),
)


@settings(max_examples=500, deadline=None)
@given(value=JSON, part=st.sampled_from(["", "<", "</think>", "好"]))
def test_parts_of_values_equal_the_twin(value: Any, part: str) -> None:
    assert looking.may_hold(value, part) == reference.may_hold(value, part)


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(TEXTS, max_size=9), counts=st.lists(st.integers(0, 9), max_size=9))
def test_ends_of_pieces_equal_the_twin(pieces: list[str], counts: list[int]) -> None:
    counts = sorted(min(count, len(pieces)) for count in counts)
    assert looking.ends_at(pieces, counts) == reference.ends_at(pieces, counts)
