"""Holding the fast engine to the reference: at the start, and by samples throughout.

At the start both encode a battery of nasty strings, some characters of every script, the
tokenizer's own added tokens and the first documents; a difference means that the reference is used.
Later one excerpt of every batch is compared, and with it the next of all assigned characters, each
in the contexts that split words; a difference then stops the run, because rows already written may
be wrong. Texts with characters that Unicode versions class differently (`unsettled.py`) are not
asked about: the reference encodes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np

from packer_cli.tokenization.engines import Engine
from packer_cli.tokenization.unsettled import settled, with_unsettled

FIRST_DOCUMENTS_CHARACTERS = 32 << 10
_EXCERPT_CHARACTERS = 2048
_CONTEXTS = "x{0}'s {0}1{0} \n{0}{0}"
_AT_A_TIME = 32  # characters that a sample holds in their contexts
_AT_THE_START = 64  # one of so many
_SURROGATES, _PRIVATE = (0xD800, 0xE000), (0xE010, 0xF900)  # of private ones, the first few
_PLANES = 0xE0200  # above it are private ones only
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / the golden ratio

BATTERY = [
    " ", "  ", "   a", "a   ", "\n", "\n\n\n", "\r\n", "\t\t x", " \n \n ", "a\u00a0b", "\u2028\u2029\u0085",
    "Hello, world! It's 12345678 o'clock; don't   panic.", "I'LL WE'VE they'Re", "ſ'S 'ſ", "1234567 1,000.5e-3",
    "naïve café e\u0301 ﬁ Å Å", "ǅ ǆ İ ı ß ẞ", "ΑΒΓ αβγ ς", "Привет, мир", "你好，世界。", "日本語のテキスト",
    "한국어 텍스트", "ภาษาไทย", "नमस्ते दुनिया", "العربية مع ١٢٣", "עברית", "👩‍👩‍👧‍👦 🇩🇪 👍🏽 ☃️", "a\u200bb\u200d\ufeffc",
    "\u0000\u0001\u007f", "\u0378\ue000\U0010ffff", "𝒳𝔘 𐍈", "zalgo z̴̡͝a̵l̷g̶o̸", "½ ² Ⅷ ①", "_under_score__x", "CamelCaseHTTPServer",
    "def f(x):\n    return {'a': [1, 2]}  # ok\n\n\tpass\n", "<html><body class=\"x\">&amp;</body></html>", "$x^2 \\frac{1}{2}$",
    "<s></s><unk><pad>", "<|endoftext|>", "<|begin_of_text|>a<|eot_id|>", "<|im_start|>user\nhi<|im_end|>\n", "[INST] x [/INST]",
    " <|endoftext|> ", "▁ ▁▁a", "Ġ Ċ", "<0x0A>", "a" * 400, "ab" * 200, " " * 300, "\n" * 130, "0" * 100, "!?" * 90,
    "supercalifragilisticexpialidocious" * 8, "word " * 3000,
]  # fmt: skip


def differs_at_start(
    fast: Engine, reference: Engine, added_tokens: list[str], documents: Iterable[str]
) -> str | None:
    """The first text on which the engines differ (shortened), or None when they agree."""
    texts = [*BATTERY, in_contexts(assigned_characters()[::_AT_THE_START])]
    texts += (f"a{token}b {token} {token}\n" for token in added_tokens)
    room = FIRST_DOCUMENTS_CHARACTERS
    for document in documents:
        texts.append(document[:room])
        room -= len(texts[-1])
        if room <= 0:
            break
    texts = [text for text, found in zip(texts, with_unsettled(texts), strict=True) if not found]
    try:
        ids, offsets = fast.encode(texts)
    except Exception as error:  # whatever it raises, it is not usable
        return str(error)
    expected_ids, expected_offsets = reference.encode(texts)
    if len(offsets) != len(expected_offsets):
        return "the number of documents"
    for i, text in enumerate(texts):
        theirs = expected_ids[expected_offsets[i] : expected_offsets[i + 1]]
        if not np.array_equal(ids[offsets[i] : offsets[i + 1]], theirs):
            return repr(text[:80])
    return None


@cache
def assigned_characters() -> str:
    """All on which Unicode versions agree; of private ones, the first few."""
    wanted = settled()[:_PLANES].copy()
    for begin, end in (_SURROGATES, _PRIVATE):
        wanted[begin:end] = 0
    return np.flatnonzero(wanted).astype(np.uint32).tobytes().decode("utf-32-le")


def in_contexts(characters: str) -> str:
    """A text that shows how an engine splits words at each of them."""
    return "".join(map(_CONTEXTS.format, characters))


def characters_of(sample: int) -> str:
    """What the sample of that number shows: all characters in turn."""
    known = assigned_characters()
    begin = sample * _AT_A_TIME % len(known)
    return in_contexts(known[begin : begin + _AT_A_TIME])


def sample_of(texts: list[str]) -> str:
    """An excerpt of a batch for comparison: every character is as likely as any other.

    Which one depends on the batch alone, so that runs repeat.
    """
    total = sum(map(len, texts))
    place = (total * _GOLDEN & (1 << 64) - 1) * total >> 64  # Fibonacci hashing, below total
    for text in texts:
        if place < len(text):
            start = max(0, min(place, len(text) - _EXCERPT_CHARACTERS))
            return text[start : start + _EXCERPT_CHARACTERS]
        place -= len(text)
    return ""
