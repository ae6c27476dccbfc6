"""What is trained on, by the reference engine's own offsets: texts with spans to tokens.

Packing adds up the bytes of tokens, which is fast; here every text is encoded by the reference,
which says which characters each token stands for. So the one is held against the other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import chain

import numpy as np

from packer_cli.errors import InternalError
from packer_cli.records import Int64, Spans, UInt8, UInt32
from packer_cli.tokenization import Tokenizer, Tokens
from packer_cli.tokenization.engines import ReferenceEngine, is_of_library

# ids uint32[t]; the first character and the end of each token, int64[t]
_Places = tuple[UInt32, Int64, Int64]


class ReferenceTokenizer(Tokenizer):
    """A tokenizer that tells what is trained on without the lengths of tokens.

    `inner` has the reference engine, or the built-in one of bytes.
    """

    def __init__(self, inner: Tokenizer) -> None:
        if isinstance(inner.engine, ReferenceEngine):
            inner.engine = _PlacesEngine(inner.engine)
        self.info, self.engine, self._inner = inner.info, inner.engine, inner

    def encode(self, texts: list[str], spans: Spans | None = None) -> Tokens:
        """As `Tokenizer.encode`."""
        ids, offsets, everything = self._inner.encode(texts)
        if spans is None:
            return ids, offsets, everything
        trained = np.zeros(len(ids), np.uint8)
        for i, text, tokens in zip(range(len(texts)), texts, self._places(texts), strict=True):
            own = slice(spans.offsets[i], spans.offsets[i + 1])
            document = slice(offsets[i], offsets[i + 1])
            trained[document] = _trained(
                text, tokens, ids[document], spans.begin[own], spans.end[own]
            )
        # without spans all is trained on but separators
        return ids, offsets, trained if everything is None else trained & everything

    def finish(self) -> None:
        self._inner.finish()

    def close(self) -> None:
        self._inner.close()

    def _places(self, texts: list[str]) -> Iterator[_Places]:
        """Of the tokens of each text that was just encoded on this thread."""
        if isinstance(self.engine, _PlacesEngine):
            yield from self.engine.places()
            return
        for text in texts:  # the built-in engine has a token for a byte
            ids, _ = self.engine.encode([text])
            sizes = [len(character.encode()) for character in text]
            at = np.repeat(np.arange(len(text), dtype=np.int64), sizes)
            yield ids, at, at + 1


class _PlacesEngine:
    """The reference engine, which remembers where each token was in its text."""

    name = ReferenceEngine.name

    def __init__(self, engine: ReferenceEngine) -> None:
        self._engine = engine
        self._last = threading.local()

    def encode(self, texts: list[str]) -> tuple[UInt32, Int64]:
        """As the reference engine does."""
        try:
            found = self._engine.tokenizer.encode_batch(texts, add_special_tokens=False)
        except BaseException as error:
            if not is_of_library(error):
                raise
            self._engine.encode(texts)  # says which text it is
            raise
        self._last.found = [(one.ids, one.offsets) for one in found]
        lengths = [len(ids) for ids, _ in self._last.found]
        flat = chain.from_iterable(ids for ids, _ in self._last.found)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return np.fromiter(flat, np.uint32, count=int(offsets[-1])), offsets

    def places(self) -> Iterator[_Places]:
        """Of the texts that this thread encoded last."""
        for numbers, offsets in self._last.found:
            starts, stops = np.array(offsets, np.int64).reshape(-1, 2).T
            yield np.array(numbers, np.uint32), starts, stops


def _trained(text: str, tokens: _Places, framed: UInt32, begin: Int64, end: Int64) -> UInt8:
    """uint8[tokens] of a document, with what the tokenizer puts around it."""
    flags = np.zeros(len(framed), np.uint8)
    if not len(framed):
        return flags
    ids, starts, stops = tokens
    first = _place_of(ids, framed, text)
    own = flags[first : first + len(ids)]
    characters = _characters(text, np.concatenate([begin, end])).reshape(2, -1)
    for a, b in characters.T.tolist():
        own |= ((starts < b) & (stops > a) & (stops > starts)).view(np.uint8)
    flags[first + len(ids) :] = own[-1]  # EOS: as the token before it
    return flags


def _place_of(ids: UInt32, framed: UInt32, text: str) -> int:
    """Where in the document its text's own tokens begin: behind what was put before them."""
    for first in range(len(framed) - len(ids) + 1):
        if np.array_equal(framed[first : first + len(ids)], ids):
            return first
    raise InternalError(f"the reference engine encodes {text[:80]!r} in two ways")


def _characters(text: str, places: Int64) -> Int64:
    """Bytes of the UTF-8 text to characters."""
    if text.isascii():
        return places
    sizes = np.fromiter((len(one.encode()) for one in text), np.int64, count=len(text))
    ends = np.cumsum(sizes)
    return np.searchsorted(ends, places, side="right").astype(np.int64)
