"""The fast engine, compared with the reference before its tokens are taken.

* At the start both encode difficult texts, every Latin-1 character, the tokenizer's own added
  tokens and the first documents. If they differ, only the reference is used.
* Both encode each other character in the contexts that split words, before the first text that has
  it. Texts with a character on which they differ, or that Unicode versions class differently,
  always go to the reference. So tokens never depend on which worker met a character first, nor on
  whether a run was interrupted.
* Both encode excerpts of all units. A difference stops the run, because rows that are written
  already may be wrong.

Agreement is remembered in the user's cache folder (`Agreements`): the same bytes of the same
tokenizer, encoded by the same builds of the same libraries, give the same tokens. A comparison is
left out only if this very text, or this character, was compared before, and agreed. Texts that are
new are compared as in a first run, so a remembered agreement makes no promise weaker; differences
are never remembered. Without the cache, the reference is loaded at once; with it, when a text is
new, has a character that is, or needs offsets.

The checks cost a look at every character that is not Latin-1, a fraction of a nanosecond each;
about 10 µs for each such character that the texts have, once; and an excerpt of a third of a
millisecond for 8 million characters. With a tokenizer of 9 MB, loading the reference takes a third
of a second and 200 MB, and the comparisons at the start half a second.
"""

from __future__ import annotations

import os
import platform
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from importlib.metadata import version
from importlib.util import find_spec
from itertools import compress, pairwise
from pathlib import Path
from random import Random

import msgspec
import numpy as np

from packer_cli import __version__
from packer_cli._kernels import texts as kernels
from packer_cli.errors import InternalError
from packer_cli.records import Int64, Notify, Texts, UInt8, UInt32, offsets_of
from packer_cli.tokenization.engines import Engine, ReferenceFacts, engines_differ_on

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
_BYTES_PER_EXCERPT = 8 << 20  # the reference is a hundred times slower
_AT_FIRST = 16 << 20  # and so many more for a unit, whose first four batches have one each

# A change of what is compared, or how, makes what is remembered void.
_CHECK = 1
_MOST_TEXTS = 1 << 12
_DIGEST_BYTES = 32


class Agreements(msgspec.Struct):
    """Texts and characters that both engines are known to encode alike, of this and earlier runs.

    identity    tokenizer, libraries and check that they hold for
    facts       what the reference says of itself
    characters  characters that agree in all contexts
    texts       digests of lists of texts that agree, the latest last

    They are kept in a file of the cache folder, which no run needs. A file that is missing or
    damaged counts as empty. It is replaced as a whole, or left as it is if it cannot be written.
    """

    identity: list[str]
    facts: ReferenceFacts = msgspec.field(default_factory=ReferenceFacts)
    characters: str = ""
    texts: list[bytes] = []

    @classmethod
    def of(cls, tokenizer_sha256: str) -> Agreements:
        """Load what is known of a tokenizer.json with this digest."""
        identity = [tokenizer_sha256, __version__, str(_CHECK), platform.machine(), *_libraries()]
        return cls(identity)._stored() or cls(identity)

    def covers(self, texts: Iterable[str]) -> bool:
        """Tell whether these texts, all together, were compared before and agreed."""
        digest = _digest(texts)
        if digest in self.texts:  # the last to be forgotten is what was used last
            self.texts.remove(digest)
            self.texts.append(digest)
        return self.texts[-1:] == [digest]

    def add(self, texts: Iterable[str]) -> None:
        """Remember that these texts, all together, agree."""
        self.texts.append(_digest(texts))

    def sizes(self) -> list[int]:
        """Return the numbers of facts, characters and lists of texts."""
        return [len(self.facts.ids), len(self.characters), len(self.texts)]

    def save(self) -> None:
        """Write the file, with what other runs have added to it by now."""
        stored = self._stored() or Agreements(self.identity)
        ids = stored.facts.ids | self.facts.ids
        merged = Agreements(
            self.identity,
            msgspec.structs.replace(self.facts, ids=ids),
            "".join(sorted({*stored.characters, *self.characters})),
            [*dict.fromkeys([*stored.texts, *self.texts])],
        )
        if len(merged.texts) > _MOST_TEXTS:
            merged.texts = self.texts[-_MOST_TEXTS // 2 :]
        content = msgspec.msgpack.encode(merged)
        path = self._path
        with suppress(OSError, RuntimeError):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=path.parent)
            try:
                with open(descriptor, "wb") as file:
                    file.write(_checksum(content) + content)
                os.replace(temporary, path)
            except OSError:
                os.unlink(temporary)

    @property
    def _path(self) -> Path:
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        name = _digest(self.identity).hex()
        return Path(home).expanduser() / "packer" / "agreements" / name

    def _stored(self) -> Agreements | None:
        """Return the file's content; None unless it is whole."""
        with suppress(OSError, RuntimeError, msgspec.MsgspecError):  # there may be no home
            content = self._path.read_bytes()
            checksum, content = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
            if checksum == _checksum(content):
                return msgspec.msgpack.decode(content, type=Agreements)
        return None


def _checksum(content: bytes) -> bytes:
    return blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _digest(texts: Iterable[str]) -> bytes:
    return blake2b(msgspec.msgpack.encode([*texts]), digest_size=16).digest()


@cache
def _libraries() -> list[str]:
    """Identify the builds of both libraries, by version and by their compiled files."""
    found = list[str]()
    for name in ("gigatoken", "tokenizers"):
        spec = find_spec(name)
        for folder in (spec and spec.submodule_search_locations) or ():
            for path in sorted(Path(folder).glob("*.so")):
                status = path.stat()
                found.append(
                    f"{name} {version(name)} {path.name} {status.st_size} {status.st_mtime_ns}"
                )
    return found


class TrustedEngine:
    """The fast engine where it was compared with the reference, which encodes all other texts."""

    def __init__(
        self,
        fast: Engine,
        reference: Engine,
        added_tokens: Iterable[str],
        first_documents: Iterable[str],
        notify: Notify,
        agreements: Agreements | None = None,
    ) -> None:
        """Compare the engines, but for what is among `agreements`. INOUT agreements.

        `notify` gets the first characters on which the engines differ. Raises ValueError if they
        differ on what is compared at the start.
        """
        self._fast, self._reference, self._notify = fast, reference, notify
        self._agreements = Agreements([]) if agreements is None else agreements
        self._saved = [agreements is None, *self._agreements.sizes()]
        if difference := self._difference_at_start(added_tokens, first_documents):
            raise ValueError(f"gigatoken differs from tokenizers on {difference}")
        # uint8[0x110000], by character
        self._states = np.where(_settled(), _NEW, _NEVER).astype(np.uint8)
        self._states[: len(_LATIN_1)] = _TRUSTED
        self._states[[*map(ord, self._agreements.characters)]] = _TRUSTED
        self._notified = False
        self._room = _AT_FIRST
        self._difference: InternalError | None = None
        self._save()

    def encode(self, texts: Sequence[str]) -> tuple[UInt32, Int64]:
        """Return the tokens of the reference. Raises InternalError if a sample differs."""
        texts = Texts.of(texts)
        untrusted = self.untrusted(texts)
        sample = self.sample(texts, untrusted)
        if sample and self._differing([sample]):
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
        """Raise InternalError if a sample has differed: nothing may be committed."""
        if self._difference is not None:
            raise self._difference

    def finish(self) -> None:
        """End a unit: `confirm`, and remember what agreed. The next unit is sampled from its first
        batch on, whoever packs it, so that a run that is repeated has the same samples.
        """
        self.confirm()
        self._room = _AT_FIRST
        self._save()

    def _save(self) -> None:
        """Save what agreed since the last time, if it is to be remembered."""
        sizes = [False, *self._agreements.sizes()]
        if sizes != self._saved and not self._saved[0]:
            self._agreements.save()
            self._saved = sizes

    def untrusted(self, texts: Sequence[str]) -> list[int]:
        """Return the numbers of texts that only the reference is to encode, ascending."""
        numbers = np.flatnonzero(_found(texts, self._states))
        if not len(numbers):
            return []
        doubtful = [texts[i] for i in numbers.tolist()]
        self._compare(set("".join(doubtful)))
        untrusted: list[int] = numbers[_found(doubtful, self._states) > 0].tolist()
        return untrusted

    def _compare(self, characters: set[str]) -> None:
        """Compare the engines on all of these characters that are new."""
        new = sorted(c for c in characters if self._states[ord(c)] == _NEW)
        if not new:
            return
        groups = ["".join(new[i : i + _AT_A_TIME]) for i in range(0, len(new), _AT_A_TIME)]
        differing = self._differing_groups(*groups)
        alone = self._differing_groups(*"".join(differing))
        # if none of a group differs alone, all of it may
        never = {*alone, *"".join(group for group in differing if not {*group} & {*alone})}
        for character in new:
            self._states[ord(character)] = _NEVER if character in never else _TRUSTED
        self._agreements.characters += "".join(c for c in new if c not in never)
        if never and not self._notified:
            self._notified = True
            named = ", ".join(f"U+{ord(c):04X}" for c in sorted(never)[:3])
            self._notify(
                f"texts with {named}{', ...' * (len(never) > 3)} go to the slower "
                "tokenizers engine: gigatoken differs from it there"
            )

    def _differing_groups(self, *groups: str) -> list[str]:
        """Return the groups of characters in whose contexts the engines differ."""
        group_of = {in_contexts(group): group for group in groups}
        texts = differing(self._fast, self._reference, [*group_of])
        return [group_of[text] for text in texts]

    def _differing(self, texts: list[str]) -> list[str]:
        """Return the texts on which the engines differ; none if they are known to agree."""
        if not texts or self._agreements.covers(texts):
            return []
        different = differing(self._fast, self._reference, texts)
        if not different:
            self._agreements.add(texts)
        return different

    def _difference_at_start(
        self, added_tokens: Iterable[str], documents: Iterable[str]
    ) -> str | None:
        """Return the first text on which the engines differ, shortened; None if they agree."""
        texts = [*BATTERY, in_contexts(_LATIN_1)]
        texts += (f"a{token}b {token} {token}\n" for token in added_tokens)
        first, room = list[str](), FIRST_DOCUMENTS_CHARACTERS
        for document in documents:
            first.append(document[:room])
            room -= len(first[-1])
            if room <= 0:
                break
        try:
            for compared in (texts, first):
                doubtful = _found(compared, 1 - _settled())
                if different := self._differing([*compress(compared, doubtful == 0)]):
                    return repr(different[0][:80])
        except Exception as error:  # after any error, the engine is not usable
            return str(error)
        return None

    def sample(self, texts: Texts, but: Sequence[int]) -> str:
        """Return an excerpt of a batch to compare, from texts other than those of the numbers
        `but`.

        The first batches of a unit have one each, later ones as many as cost little, others "". It
        depends on the batches of the unit alone, so that runs repeat.
        """
        size = len(texts.data)
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


def differing(fast: Engine, reference: Engine, texts: list[str]) -> list[str]:
    """Return the texts whose tokens differ; all of them if the number of documents does."""
    ids, offsets = fast.encode(texts)
    expected_ids, edges = reference.encode(texts)
    if len(offsets) != len(edges):
        return texts
    return [
        text
        for text, part, expected in zip(texts, pairwise(offsets), pairwise(edges), strict=True)
        if not np.array_equal(ids[slice(*part)], expected_ids[slice(*expected)])
    ]


def _found(texts: Sequence[str], states: UInt8) -> UInt8:
    """Return uint8[n]: 1 if a text has a character above U+00FF with a state above 0."""
    texts, flags = Texts.of(texts), np.zeros(len(texts), np.uint8)
    kernels.find_in_texts(texts.data, texts.offsets, states, flags)
    return flags


def in_contexts(characters: str) -> str:
    """Return a text that shows how an engine splits words at each of these characters."""
    return "".join(map(_CONTEXTS.format, characters))


# Tokenizers split texts by classes of characters, and every engine has those of one Unicode version
# built in. The file lists, in hexadecimal, characters on which engines may differ: Unicode 14
# (2021, the oldest one inside any version of the engines that packer works with) had not assigned
# them, or Unicode 18 has another general category for them. `tests/extras/test_unsettled.py`
# computes it.
_UNSETTLED = Path(__file__).with_name("unsettled.txt")


def unsettled() -> list[range]:
    """Return the code points that Unicode versions class differently, ascending."""
    edges = [[int(edge, 16) for edge in part.split("-")] for part in _UNSETTLED.read_text().split()]
    return [range(part[0], part[-1] + 1) for part in edges]


@cache
def _settled() -> UInt8:
    """Return uint8[0x110000]: 1 for every other code point."""
    flags = np.ones(0x110000, np.uint8)
    for part in unsettled():
        flags[part.start : part.stop] = 0
    return flags


def built_in_texts(added_tokens: Iterable[str]) -> Iterator[str]:
    """Yield texts to compare tokenizers on: difficult ones, texts with each added token, and texts
    with every character on which Unicode versions agree, private ones aside.
    """
    yield from BATTERY
    yield from (f"a{token}b {token} {token}\n" for token in added_tokens)
    characters = map(chr, np.flatnonzero(_settled()).tolist())
    known = [c for c in characters if unicodedata.category(c) not in ("Cs", "Co")]
    yield from (in_contexts("".join(known[i : i + _AT_A_TIME]))
                for i in range(0, len(known), _AT_A_TIME))  # fmt: skip
