"""The quick look for special tokens in a record never misses one."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from packer_cli.tokenization.specials import Specials, SpecialToken

CONTENTS = ("<|im_end|>", "<|ü|>", '<"\\/\t>', "[INST]", "</s>")
_texts = st.lists(
    st.sampled_from((*CONTENTS, "<|", "im_end|>", "é\n", '"', "\\", "\ud800", "")), max_size=4
).map("".join)
_values = st.recursive(
    st.one_of(_texts, st.none(), st.integers(), st.floats(), st.binary(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(_texts, inner, max_size=3), st.tuples(inner)
    ),
)


@given(st.lists(st.sampled_from(CONTENTS), min_size=1, unique=True), _values)
def test_no_special_token_is_missed(contents: list[str], value: Any) -> None:
    specials = Specials(tuple(SpecialToken(text, i) for i, text in enumerate(contents)))
    if specials.in_record(value):
        assert specials.may_be_in(value)


def test_a_plain_record_is_known_soon() -> None:
    specials = Specials((SpecialToken("<|im_end|>", 0), SpecialToken("<|im_start|>", 1)))
    assert not specials.may_be_in([{"role": "user", "content": "a < b | c > d"}])
    assert not Specials().may_be_in("<|im_end|>")
