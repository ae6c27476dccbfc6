"""What is trained on is right token by token, for every tokenizer: held to the reference's offsets.

Texts are made of what makes places hard to tell: the tokenizer's own tokens as text, "▁", white
space, characters of several bytes, combining ones and ones that no Unicode version has.
`make test-places` does it for a million texts.
"""

from __future__ import annotations

import functools
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_tokenizers as tiny

from packer_cli.records import Int64, Texts, TrainedSpans, UInt32
from packer_cli.tokenization.engines import ReferenceEngine
from packer_cli.tokenization.tokenizer import mark_trained, token_bytes

SHARED = Path(__file__).resolve().parents[3] / "shared"
TEXTS = int(os.environ.get("PACKER_PLACES", "7000"))
HARD = [
    " ", "  ", "   ", "\n", "\n\n", "\t", "▁", "▁▁", "▁▁▁▁", "a", "x", "the", " the", "1 3 1", "Ġ",
    "Ċ", "é", "e\u0301", "\u0301", "日本", "👍🏽", "\u00a0", "\u2028", "\u200d", "\u0378",
    "\u088f", "\U0001fae9", "\U000e0080", "<0x41>", "<0x0A>", "<unk>",
    "ﬁ", "Å", "\u1100\u1161", "ſ's", "\ufeff", "¤",
]  # fmt: skip


def metaspace(scheme: str) -> Callable[[], tiny.Json]:
    def make() -> tiny.Json:
        document = tiny.metaspace()
        document["pre_tokenizer"]["prepend_scheme"] = scheme
        return document

    return make


def with_flags(make: Callable[[], tiny.Json], **flags: bool) -> Callable[[], tiny.Json]:
    def changed() -> tiny.Json:
        document = make()
        highest = max([*document["model"]["vocab"].values(), *_ids(document)])
        for i, content in enumerate(("<x>", "a b", "▁<y>", "é<z>")):
            tiny.with_added_token(document, content, highest + 1 + i, **flags)
        return document

    return changed


def _ids(document: tiny.Json) -> list[int]:
    return [token["id"] for token in document["added_tokens"]]


def with_normalizer(make: Callable[[], tiny.Json], normalizer: Any) -> Callable[[], tiny.Json]:
    return lambda: make() | {"normalizer": normalizer}


def trimming() -> tiny.Json:
    """As llama3: its post-processor trims the white space off offsets."""
    post_processor = {
        "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True,
    }  # fmt: skip
    return tiny.byte_level() | {"post_processor": post_processor}


TINY = {
    "byte level": tiny.byte_level,
    "trimmed offsets": trimming,
    "byte level, NFC": with_normalizer(tiny.byte_level, {"type": "NFC"}),
    "byte level, lowercase": with_normalizer(tiny.byte_level, {"type": "Lowercase"}),
    "byte level, stripped": with_normalizer(
        tiny.byte_level, {"type": "Strip", "strip_left": True, "strip_right": True}
    ),
    "byte level, lstrip": with_flags(tiny.byte_level, lstrip=True),
    "byte level, normalized": with_flags(tiny.byte_level, normalized=True),
    "sentencepiece": tiny.sentencepiece,
    "sentencepiece, rstrip": with_flags(tiny.sentencepiece, rstrip=True),
    "sentencepiece, normalized": with_flags(tiny.sentencepiece, normalized=True),
    "sentencepiece, single word": with_flags(tiny.sentencepiece, single_word=True),
    "gemma": tiny.gemma,
    "gemma, lstrip": with_flags(tiny.gemma, lstrip=True, special=False),
    "gemma, normalized": with_flags(tiny.gemma, normalized=True, special=False),
    "metaspace first": metaspace("first"),
    "metaspace always": metaspace("always"),
    "metaspace never": metaspace("never"),
    "metaspace, both strips": with_flags(metaspace("always"), lstrip=True, rstrip=True),
    "unigram": tiny.unigram,
    "letters": tiny.letters,
}
# Those that lose nothing and add nothing: their places are proven but for rare texts.
PROVEN = {
    "byte level", "trimmed offsets", "sentencepiece", "gemma", "metaspace first",
    "metaspace always", "metaspace never", "gpt2", "llama3_1", "mistral_v3", "qwen3",
}  # fmt: skip
ORDINARY = [
    "It's 1234 o'clock;  don't   panic!\n\n", "naïve café, Привет, мир.", "日本語\n", " a", "▁ ▁▁a",
    "\t\tpass\n", "👍🏽 한국어",
]  # fmt: skip
REAL = ["gpt2", "llama3_1", "mistral_v3", "qwen3", "t5"]


def contents(name: str) -> bytes:
    if name in TINY:
        return json.dumps(TINY[name]()).encode()
    path = SHARED / "tokenizers" / name / "tokenizer.json"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    return path.read_bytes()


@functools.cache
def reference_of(name: str) -> ReferenceEngine:
    """Loading one takes up to a second."""
    return ReferenceEngine(contents(name))


def hard_texts(document: tiny.Json, count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    vocabulary = document["model"]["vocab"]
    pieces = [piece if isinstance(piece, str) else piece[0] for piece in vocabulary]
    added = [token["content"] for token in document["added_tokens"]]
    choices = [HARD, HARD, added, pieces]
    return [
        "".join(rng.choice(rng.choice(choices)) for _ in range(rng.randint(1, 12)))
        for _ in range(count)
    ]


def random_spans(texts: list[str], seed: int) -> tuple[list[list[tuple[int, int]]], TrainedSpans]:
    """Some of every text: in characters, and as Spans."""
    rng = random.Random(seed)
    in_characters, begin, end, counts = [], [], [], [0]
    for text in texts:
        edges = sorted(rng.sample(range(len(text) + 1), min(len(text) + 1, rng.choice([2, 4]))))
        own = list(zip(edges[::2], edges[1::2], strict=False))
        begin += [len(text[:a].encode()) for a, _ in own]
        end += [len(text[:b].encode()) for _, b in own]
        counts.append(len(begin))
        in_characters.append(own)
    return in_characters, TrainedSpans(*(np.array(part, np.int64) for part in (counts, begin, end)))


def expected_flags(places: Int64, spans: list[tuple[int, int]]) -> list[int]:
    held = [[a for a, b in spans if a < stop and start < b] for start, stop in places.tolist()]
    return [
        0 if not own else 2 if min(own) > start else 1
        for own, (start, _) in zip(held, places.tolist(), strict=True)
    ]


class Places:
    """The reference's offsets, and how often they were asked for."""

    def __init__(self, texts: list[str], ids: UInt32, offsets: Int64, places: Int64) -> None:
        self.asked = 0
        self._by_text = {
            text: (ids[a:b], offsets[:2], places[a:b])
            for text, a, b in zip(texts, offsets, offsets[1:], strict=False)
        }

    def places(self, texts: list[str]) -> tuple[UInt32, Int64, Int64]:
        self.asked += 1
        return self._by_text[texts[0]]


@pytest.mark.parametrize("name", [*TINY, *REAL])
def test_trained_tokens_are_those_that_the_reference_places_in_the_spans(name: str) -> None:
    content = contents(name)
    reference, known = reference_of(name), token_bytes(content)
    document = json.loads(content)
    share = TEXTS // len([*TINY, *REAL]) + 1
    for seed in range(0, share, 5000):
        texts = hard_texts(document, min(5000, share - seed), seed)
        ids, offsets, places = reference.places(texts)
        in_characters, spans = random_spans(texts, seed)
        exact = Places(texts, ids, offsets, places)
        trained = mark_trained(known, Texts.of(texts), ids, offsets, spans, exact)
        for i, text in enumerate(texts):
            own = slice(offsets[i], offsets[i + 1])
            expected = expected_flags(places[own], in_characters[i])
            assert trained[own].tolist() == expected, (text, in_characters[i])


@pytest.mark.parametrize("name", sorted(PROVEN))
def test_ordinary_texts_need_no_reference(name: str) -> None:
    content = contents(name)
    places = reference_of(name).places(ORDINARY)
    exact = Places(ORDINARY, *places)
    _, spans = random_spans(ORDINARY, 0)
    mark_trained(token_bytes(content), Texts.of(ORDINARY), *places[:2], spans, exact)
    assert exact.asked == 0
