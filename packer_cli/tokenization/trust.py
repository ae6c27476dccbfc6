"""Trust in the fast engine: it is held to the reference, before a text of its kind is taken.

* At the start both encode a battery of nasty strings, every Latin-1 character, the tokenizer's own
  added tokens and the first documents; where they differ, the reference is used alone.
* Before the first text with another character is trusted, both encode that character in the
  contexts that split words. Where they differ, its texts go to the reference for ever, as do those
  with characters that Unicode versions class differently. So tokens never depend on which worker
  met a character first, nor on whether a run was interrupted.
* Excerpts are compared throughout. A difference then stops the run, because rows already written
  may be wrong.

What it costs: a look at every character that is not Latin-1, a fraction of a nanosecond each; about
10 µs for each such character that the texts have, once; and an excerpt of a third of a millisecond
for 8 million characters. The reference is loaded in this process: one of its own would save up to a
fifth of a second of the start with a tokenizer of 11 MB where a core is idle, and cost more
processor time than that, 200 MB, and the machinery to keep it alive.
"""

from __future__ import annotations

import threading
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import compress, pairwise
from pathlib import Path
from random import Random

import numpy as np

from packer_cli._kernels import texts as kernels
from packer_cli.errors import InternalError
from packer_cli.records import Int64, Notify, Texts, UInt8, UInt32, offsets_of
from packer_cli.tokenization.engines import Engine, engines_differ_on

FIRST_DOCUMENTS_CHARACTERS = 32 << 10
_CONTEXTS = "x{0}'s {0}1{0} \n{0}{0}"
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


_TRUSTED, _NEW, _NEVER = 0, 1, 2
_AT_A_TIME = 64  # new characters in one text: most groups have none that differs
_EXCERPT_BYTES = 512
_ALWAYS = 4  # the first so many batches have an excerpt
_BYTES_PER_EXCERPT = 8 << 20  # later: the reference is a hundred times slower


class TrustedEngine:
    """The fast engine where it was compared with the reference, which encodes all other texts.

    Safe to share between threads.
    """

    def __init__(
        self,
        fast: Engine,
        reference: Engine,
        added_tokens: Iterable[str],
        first_documents: Iterable[str],
        notify: Notify,
    ) -> None:
        """`notify` hears of the first characters on which the engines differ. Raises ValueError
        where they differ on what is compared at the start.
        """
        self._fast, self._reference, self._notify = fast, reference, notify
        if difference := _difference_at_start(fast, reference, added_tokens, first_documents):
            raise ValueError(f"gigatoken differs from tokenizers on {difference}")
        self._lock = threading.Lock()
        # uint8[0x110000]. Others read it while it changes: only to _TRUSTED, and for good.
        self._states = np.where(_settled(), _NEW, _NEVER).astype(np.uint8)
        self._states[: len(_LATIN_1)] = _TRUSTED
        self._told = False
        self._room = _ALWAYS * _BYTES_PER_EXCERPT
        self._difference: InternalError | None = None

    def encode(self, texts: Sequence[str]) -> tuple[UInt32, Int64]:
        """The tokens that the reference would give. Raises InternalError when a sample differs."""
        texts = Texts.of(texts)
        untrusted = self.untrusted(texts)
        sample = self.sample(texts, untrusted)
        if sample and differing(self._fast, self._reference, [sample]):
            self._difference = engines_differ_on(sample)
        self.confirm()
        ids, offsets = self._fast.encode(texts)
        if not untrusted:
            return ids, offsets
        exact, edges = self._reference.encode([texts[i] for i in untrusted])
        parts, lengths, done = list[UInt32](), np.diff(offsets), 0
        for document, (a, b) in zip(untrusted, pairwise(edges.tolist()), strict=True):
            parts += [ids[done : offsets[document]], exact[a:b]]
            lengths[document], done = b - a, offsets[document + 1]
        return np.concatenate([*parts, ids[done:]]), offsets_of(lengths)

    def confirm(self) -> None:
        """Raises InternalError when a sample of any thread has differed: what others encoded may
        be wrong, too, and nothing may be committed.
        """
        if self._difference is not None:
            raise self._difference

    def untrusted(self, texts: Sequence[str]) -> list[int]:
        """The numbers of texts that only the reference is to encode, ascending."""
        numbers = np.flatnonzero(_found(texts, self._states))
        if not len(numbers):
            return []
        doubtful = [texts[i] for i in numbers.tolist()]
        with self._lock:
            self._compare(set("".join(doubtful)))
        untrusted: list[int] = numbers[_found(doubtful, self._states) > 0].tolist()
        return untrusted

    def _compare(self, characters: set[str]) -> None:
        """Compare the engines on all of these characters that are new."""
        new = sorted(one for one in characters if self._states[ord(one)] == _NEW)
        if not new:
            return
        groups = ["".join(new[i : i + _AT_A_TIME]) for i in range(0, len(new), _AT_A_TIME)]
        differing = self._differing(*groups)
        alone = self._differing(*"".join(differing))
        # and of groups none of which differs alone, all
        never = [*alone, *"".join(one for one in differing if not {*one} & {*alone})]
        for one in new:
            self._states[ord(one)] = _NEVER if one in never else _TRUSTED
        if never and not self._told:
            self._told = True
            named = ", ".join(f"U+{ord(one):04X}" for one in never[:3])
            self._notify(
                f"texts with {named}{', ...' * (len(never) > 3)} go to the slower "
                "tokenizers engine: gigatoken differs from it there"
            )

    def _differing(self, *groups: str) -> list[str]:
        """The groups of characters in whose contexts the engines differ."""
        shown = {in_contexts(group): group for group in groups}
        return [shown[text] for text in differing(self._fast, self._reference, [*shown])]

    def sample(self, texts: Texts, but: Sequence[int]) -> str:
        """An excerpt of a text of a batch for comparison, none of those with the numbers `but`; ""
        when it is not its turn: each batch has one at first, later as many as cost little. Which
        one depends on the batch alone, so that runs repeat.
        """
        size = len(texts.data)
        with self._lock:
            self._room += size
            if self._room < _BYTES_PER_EXCERPT:
                return ""
            self._room -= _BYTES_PER_EXCERPT
        trusted = np.setdiff1d(np.arange(len(texts)), but)
        if not len(trusted):
            return ""
        begin = Random(size).randrange(size)  # noqa: S311
        number = int(np.searchsorted(texts.offsets, begin, "right")) - 1
        number = int(trusted[np.searchsorted(trusted[:-1], number)])
        first, last = texts.offsets[number], texts.offsets[number + 1] - 1
        begin = max(first, min(begin, last - _EXCERPT_BYTES))
        excerpt = texts.data[begin : min(begin + _EXCERPT_BYTES, last)].tobytes()
        return excerpt.decode(errors="ignore")  # a character may be cut at either end


def _difference_at_start(
    fast: Engine, reference: Engine, added_tokens: Iterable[str], documents: Iterable[str]
) -> str | None:
    """The first text on which the engines differ (shortened), or None when they agree."""
    texts = [*BATTERY, in_contexts(_LATIN_1)]
    texts += (f"a{token}b {token} {token}\n" for token in added_tokens)
    room = FIRST_DOCUMENTS_CHARACTERS
    for document in documents:
        texts.append(document[:room])
        room -= len(texts[-1])
        if room <= 0:
            break
    doubtful = _found(texts, 1 - _settled())
    try:
        different = differing(fast, reference, [*compress(texts, doubtful == 0)])
    except Exception as error:  # after any error, the engine is not usable
        return str(error)
    return repr(different[0][:80]) if different else None


def differing(fast: Engine, reference: Engine, texts: list[str]) -> list[str]:
    """The texts whose tokens differ: all where not as many documents come back."""
    ids, offsets = fast.encode(texts)
    expected_ids, edges = reference.encode(texts)
    if len(offsets) != len(edges):
        return texts
    return [
        text
        for text, own, right in zip(texts, pairwise(offsets), pairwise(edges), strict=True)
        if not np.array_equal(ids[slice(*own)], expected_ids[slice(*right)])
    ]


def _found(texts: Sequence[str], states: UInt8) -> UInt8:
    """uint8[n]: 1 where a text has a character above U+00FF whose state is above 0.

    states  uint8[0x110000], by character
    """
    texts, flags = Texts.of(texts), np.zeros(len(texts), np.uint8)
    kernels.find_in_texts(texts.data, texts.offsets, states, flags)
    return flags


def in_contexts(characters: str) -> str:
    """A text that shows how an engine splits words at each of them."""
    return "".join(map(_CONTEXTS.format, characters))


# Tokenizers cut texts by the classes of characters, and every engine has those of one Unicode
# version built in. The file lists, in hexadecimal, what Unicode 14 (2021, the oldest one inside any
# version of the engines that packer works with) had not assigned yet, and what has another general
# category in Unicode 18: there engines may differ. `tests/extras/test_unsettled.py` computes it.
_UNSETTLED = Path(__file__).with_name("unsettled.txt")


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


def built_in_texts(added_tokens: Iterable[str]) -> Iterator[str]:
    """Texts to compare tokenizers on: difficult ones, those with each added token, and those with
    every character on which Unicode versions agree, but for private ones.
    """
    yield from BATTERY
    yield from (f"a{token}b {token} {token}\n" for token in added_tokens)
    characters = map(chr, np.flatnonzero(_settled()).tolist())
    known = [one for one in characters if unicodedata.category(one) not in ("Cs", "Co")]
    yield from (in_contexts("".join(known[i : i + _AT_A_TIME]))
                for i in range(0, len(known), _AT_A_TIME))  # fmt: skip
