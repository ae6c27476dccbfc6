"""Trust in the fast engine: it is held to the reference, before a text of its kind is taken.

* At the start both encode a battery of nasty strings, every Latin-1 character and the tokenizer's
  own added tokens, then the first documents; where they differ, the reference is used alone.
* Before the first text with another character is trusted, both encode that character in the
  contexts that split words. Where they differ, its texts go to the reference for ever, as do those
  with characters that Unicode versions class differently. So tokens never depend on which worker
  met a character first, nor on whether a run was interrupted.
* Excerpts are compared throughout. A difference then stops the run, because rows already written
  may be wrong.

What it costs: a look at every character that is not Latin-1, a fraction of a nanosecond each; about
10 µs of the reference's time for each character that the texts have, once; and an excerpt of a
third of a millisecond for 8 million characters. The reference is loaded in this process: one of its
own would save up to a fifth of a second of the start with a tokenizer of 11 MB where a core is
idle, and cost more processor time than that, 200 MB, and the machinery to keep it alive.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from packer_cli._kernels import texts as kernels
from packer_cli.errors import InternalError, UsageError
from packer_cli.inputs.token_columns import offsets_of
from packer_cli.records import Int64, Notify, UInt8, UInt32
from packer_cli.tokenization.engines import Engine, engines_differ_on

_FIRST_CHARACTERS = 32 << 10  # of the first documents
_CONTEXTS = "x{0}'s {0}1{0} \n{0}{0}"
SLOWER, OTHER_BACKEND = (
    "using the slower tokenizers engine",
    "use --tokenizer-backend tokenizers or auto",
)
_LATIN_1 = "".join(map(chr, range(0x100)))

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


class TrustedEngine:
    """The fast engine where it was compared with the reference, which encodes all other texts.

    Safe to share between threads.
    """

    def __init__(
        self,
        fast: Engine,
        reference: Engine,
        added_tokens: Iterable[str],
        notify: Notify,
        *,
        is_needed: bool = False,
    ) -> None:
        """`notify` hears where the engines differ. `is_needed`: there it is an error. Raises
        ValueError where they differ on what is compared before the first documents.
        """
        self._fast, self._reference = fast, reference
        self._notify, self._is_needed = notify, is_needed
        texts = [*BATTERY, in_contexts(_LATIN_1)]
        texts += (f"a{token}b {token} {token}\n" for token in added_tokens)
        if difference := _first_difference(fast, reference, texts):
            raise ValueError(difference)
        self._characters = ComparedCharacters(fast, reference, notify)
        self._samples = Samples()
        self._difference: InternalError | None = None
        self._beginning, self._room = threading.Lock(), _FIRST_CHARACTERS

    def encode(self, texts: list[str]) -> tuple[UInt32, Int64]:
        """The tokens that the reference would give. Raises InternalError when a sample differs,
        UsageError when the first documents do and the fast engine is needed.
        """
        with self._beginning:  # others wait for it
            if self._room > 0:
                self._compare_first(texts)
        if self._fast is self._reference:
            return self._reference.encode(texts)
        untrusted = self._characters.untrusted(texts)
        others = set(untrusted)
        trusted = [text for i, text in enumerate(texts) if i not in others] if others else texts
        # one more text in the same call, rather than a call for so little
        sample = self._samples.of(trusted)
        ids, offsets = self._fast.encode([*texts, sample] if sample else texts)
        if sample:
            if not np.array_equal(ids[offsets[-2] :], self._reference.encode([sample])[0]):
                self._difference = engines_differ_on(sample)
            self.confirm()
            ids, offsets = ids[: offsets[-2]], offsets[:-1]
        if not untrusted:
            return ids, offsets
        exact, edges = self._reference.encode([texts[i] for i in untrusted])
        parts, lengths, done = list[UInt32](), np.diff(offsets), 0
        for document, (a, b) in zip(untrusted, pairwise(edges.tolist()), strict=True):
            parts += [ids[done : offsets[document]], exact[a:b]]
            lengths[document], done = b - a, offsets[document + 1]
        return np.concatenate([*parts, ids[done:]]), offsets_of(lengths)

    def _compare_first(self, documents: list[str]) -> None:
        """Compare the engines on the first documents; where they differ, the reference is used:
        all that was encoded before was compared.
        """
        texts = list[str]()
        for document in documents:
            if self._room <= 0:
                break
            texts.append(document[: self._room])
            self._room -= len(texts[-1])
        if difference := _first_difference(self._fast, self._reference, texts):
            if self._is_needed:
                raise UsageError(difference, OTHER_BACKEND)
            self._notify(f"{SLOWER}: {difference}")
            self._fast = self._reference

    def confirm(self) -> None:
        """Raises InternalError when a sample of any thread has differed: what others encoded may
        be wrong, too, and nothing may be committed.
        """
        if self._difference is not None:
            raise self._difference


def _first_difference(fast: Engine, reference: Engine, texts: list[str]) -> str:
    """The first text on which the engines differ, in words; "" when they agree."""
    doubtful = _found(texts, 1 - _settled())
    texts = [text for text, flag in zip(texts, doubtful, strict=True) if not flag]
    try:
        different = _different(texts, fast.encode(texts), reference.encode(texts))
    except Exception as error:  # after any error, the engine is not usable
        return f"gigatoken differs from tokenizers on {error}"
    return f"gigatoken differs from tokenizers on {different[0][:80]!r}" if different else ""


_Encoded = tuple[UInt32, Int64]


def _different(texts: list[str], encoded: _Encoded, expected: _Encoded) -> list[str]:
    """The texts whose ids differ: all when there are not as many documents."""
    ids, offsets = encoded
    expected_ids, edges = expected
    if len(offsets) != len(edges):
        return texts
    return [
        text
        for text, own, right in zip(texts, pairwise(offsets), pairwise(edges), strict=True)
        if not np.array_equal(ids[slice(*own)], expected_ids[slice(*right)])
    ]


def _found(texts: list[str], states: UInt8) -> UInt8:
    """uint8[n]: the highest of `states`, uint8[0x110000], of any character of each text."""
    flags = np.zeros(len(texts), np.uint8)
    kernels.find_in_texts(texts, states, flags)
    return flags


def in_contexts(characters: str) -> str:
    """A text that shows how an engine splits words at each of them."""
    return "".join(map(_CONTEXTS.format, characters))


# Tokenizers cut texts by the classes of characters, and every engine has those of one Unicode
# version built in. The file lists, in hexadecimal, what Unicode 14 (2021, the oldest one inside any
# version of the engines that packer works with) had not assigned yet, and what has another general
# category in Unicode 18: there engines may differ. `tests/extras/test_unsettled.py` computes it.
_UNSETTLED = Path(__file__).with_name("unsettled.txt")
_PRIVATE = slice(0xE010, 0xF900)  # but for the first few
_PLANES = 0xE0200  # above it are private ones only
_SURROGATES = slice(0xD800, 0xE000)  # alone, no engine takes them


def unsettled() -> list[range]:
    """The code points that Unicode versions class differently, ascending."""
    edges = [[int(edge, 16) for edge in part.split("-")] for part in _UNSETTLED.read_text().split()]
    return [range(part[0], part[-1] + 1) for part in edges]


@cache
def _settled() -> UInt8:
    """uint8[0x110000]: 1 for every code point that is not among them."""
    flags = np.ones(0x110000, np.uint8)
    for part in unsettled():
        flags[part.start : part.stop] = 0
    return flags


def assigned_characters() -> str:
    """All on which Unicode versions agree; of private ones, the first few."""
    wanted = _settled()[:_PLANES].copy()
    wanted[_SURROGATES] = wanted[_PRIVATE] = 0
    return np.flatnonzero(wanted).astype(np.uint32).tobytes().decode("utf-32-le")


_TRUSTED, _NEW, _NEVER = 0, 1, 2
_AT_A_TIME = 64  # characters in one text: most groups have none that differs
_SCANNED = 1 << 18  # characters of a text at a time: each takes 14 bytes, and a text may be long


class ComparedCharacters:
    """The characters of a pair of engines that agree on Latin-1. Safe to share between threads."""

    def __init__(self, fast: Engine, reference: Engine, notify: Notify) -> None:
        """`notify` gets a line about the first characters on which the engines differ."""
        self._fast, self._reference = fast, reference
        self._notify = notify
        self._told = False
        self._lock = threading.Lock()
        # uint8[0x110000]. Others read it while it changes: only to _TRUSTED, and for good.
        self._states = np.where(_settled(), _NEW, _NEVER).astype(np.uint8)
        self._states[: len(_LATIN_1)] = self._states[_SURROGATES] = _TRUSTED

    def untrusted(self, texts: list[str]) -> list[int]:
        """The numbers of texts that only the reference is to encode, ascending."""
        numbers = np.flatnonzero(_found(texts, self._states))
        if not len(numbers):
            return []
        doubtful = [texts[i] for i in numbers]
        self._compare("".join(doubtful))
        untrusted: list[int] = numbers[_found(doubtful, self._states) > 0].tolist()
        return untrusted

    def _compare(self, text: str) -> None:
        """Compare the engines on all characters of the text that are new."""
        present = np.zeros(len(self._states), bool)
        for begin in range(0, len(text), _SCANNED):
            part = text[begin : begin + _SCANNED].encode("utf-32-le", "surrogatepass")
            present[np.frombuffer(part, np.uint32)] = True
        with self._lock:
            new = np.flatnonzero(present & (self._states == _NEW)).astype(np.uint32)
            characters = new.tobytes().decode("utf-32-le")
            groups = [characters[i : i + _AT_A_TIME] for i in range(0, len(new), _AT_A_TIME)]
            differing = self._different(groups)
            alone = self._different([one for group in differing for one in group])
            # and of groups none of which differs alone, all
            different = [*alone, *"".join(one for one in differing if not set(one) & set(alone))]
            never = [ord(one) for one in different]
            self._states[np.setdiff1d(new, never)] = _TRUSTED
            self._states[never] = _NEVER
            if different and not self._told:
                self._told = True
                named = ", ".join(f"U+{ord(one):04X}" for one in different[:3])
                self._notify(
                    f"texts with {named}{', ...' * (len(different) > 3)} go to the slower "
                    "tokenizers engine: gigatoken differs from it there"
                )

    def _different(self, groups: list[str]) -> list[str]:
        """The groups in whose contexts the engines differ."""
        if not groups:
            return []
        group_of = {in_contexts(group): group for group in groups}
        texts = [*group_of]
        encoded, expected = self._fast.encode(texts), self._reference.encode(texts)
        return [group_of[text] for text in _different(texts, encoded, expected)]


_EXCERPT_CHARACTERS = 512
_ALWAYS = 4  # the first so many batches have an excerpt
_CHARACTERS_PER_EXCERPT = 8 << 20  # later: the reference is a hundred times slower
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / the golden ratio


class Samples:
    """Excerpts of batches for comparison: of each at first, later of as many as cost little.

    Safe to share between threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._room = _ALWAYS * _CHARACTERS_PER_EXCERPT

    def of(self, texts: list[str]) -> str:
        """An excerpt of this batch, or "" when it is not its turn. Every character is as likely as
        any other; which one depends on the batch alone, so that runs repeat.
        """
        total = sum(map(len, texts))
        with self._lock:
            self._room += total
            if self._room < _CHARACTERS_PER_EXCERPT:
                return ""
            self._room -= _CHARACTERS_PER_EXCERPT
        place = (total * _GOLDEN & (1 << 64) - 1) * total >> 64  # Fibonacci hashing, below total
        for text in texts:
            if place < len(text):
                start = max(0, min(place, len(text) - _EXCERPT_CHARACTERS))
                return text[start : start + _EXCERPT_CHARACTERS]
            place -= len(text)
        return ""
