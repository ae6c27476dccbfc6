"""Comparing the fast engine with the reference: at the start, and by samples throughout.

At the start both encode a battery of nasty strings, every Latin-1 character, the tokenizer's own
added tokens and the first documents; a difference means that the reference is used. All other
characters are compared when texts first have them (`compared.py`), each in the contexts that split
words. Later excerpts are compared as well; a difference then stops the run, because rows already
written may be wrong. Texts with characters that Unicode versions class differently
(`unsettled.py`) are not compared: the reference encodes them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import cache

import numpy as np

from packer_cli.records import Int64, UInt32
from packer_cli.tokenization.engines import Engine
from packer_cli.tokenization.unsettled import settled, with_unsettled

FIRST_DOCUMENTS_CHARACTERS = 32 << 10
_EXCERPT_CHARACTERS = 512
_ALWAYS = 4  # the first so many batches have an excerpt
_CHARACTERS_PER_EXCERPT = 8 << 20  # later: the reference is a hundred times slower
_CONTEXTS = "x{0}'s {0}1{0} \n{0}{0}"
LATIN_1 = "".join(map(chr, range(0x100)))
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
    texts = [*BATTERY, in_contexts(LATIN_1)]
    texts += (f"a{token}b {token} {token}\n" for token in added_tokens)
    room = FIRST_DOCUMENTS_CHARACTERS
    for document in documents:
        texts.append(document[:room])
        room -= len(texts[-1])
        if room <= 0:
            break
    texts = [text for text, flag in zip(texts, with_unsettled(texts), strict=True) if not flag]
    try:
        encoded = fast.encode(texts)
    except Exception as error:  # after any error, the engine is not usable
        return str(error)
    numbers = differing(texts, encoded, reference.encode(texts))
    return repr(texts[numbers[0]][:80]) if numbers else None


def differing(
    texts: list[str], encoded: tuple[UInt32, Int64], expected: tuple[UInt32, Int64]
) -> list[int]:
    """The numbers of the texts whose ids differ: all when there are not as many documents."""
    ids, offsets = encoded
    expected_ids, edges = expected
    if len(offsets) != len(edges):
        return list(range(len(texts)))
    return [
        i
        for i in range(len(texts))
        if not np.array_equal(
            ids[offsets[i] : offsets[i + 1]], expected_ids[edges[i] : edges[i + 1]]
        )
    ]


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


class Samples:
    """Excerpts of batches for comparison: of each at first, later of as many as cost little.

    Safe to share between threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._room = _ALWAYS * _CHARACTERS_PER_EXCERPT

    def of(self, texts: list[str]) -> str:
        """An excerpt of this batch, or "" when it is not its turn."""
        with self._lock:
            self._room += sum(map(len, texts))
            if self._room < _CHARACTERS_PER_EXCERPT:
                return ""
            self._room -= _CHARACTERS_PER_EXCERPT
        return excerpt_of(texts)


def excerpt_of(texts: list[str]) -> str:
    """Part of a batch: every character is as likely as any other.

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
