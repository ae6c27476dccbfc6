"""What is trained on, by the reference engine's own offsets: texts with spans to tokens.

Packing adds up the bytes of tokens, which is fast; here every text is encoded by the reference,
which says which characters each token stands for. So the one is held against the other.
"""

from __future__ import annotations

import numpy as np

from packer_cli.errors import InternalError
from packer_cli.records import Int64, Spans, UInt8, UInt32
from packer_cli.tokenization import Tokenizer, Tokens
from packer_cli.tokenization.engines import ReferenceEngine


class ReferenceTokenizer(Tokenizer):
    """A tokenizer that tells what is trained on without the lengths of tokens.

    `inner` has the reference engine, or the built-in one of bytes.
    """

    def __init__(self, inner: Tokenizer) -> None:
        self.info, self.engine, self._inner = inner.info, inner.engine, inner

    def encode(self, texts: list[str], spans: Spans | None = None) -> Tokens:
        """As `Tokenizer.encode`."""
        ids, offsets, everything = self._inner.encode(texts)
        if spans is None:
            return ids, offsets, everything
        trained = np.zeros(len(ids), np.uint8)
        for i, text in enumerate(texts):
            own = slice(spans.offsets[i], spans.offsets[i + 1])
            document = slice(offsets[i], offsets[i + 1])
            trained[document] = self._trained(text, ids[document], spans.begin[own], spans.end[own])
        # without spans all is trained on but separators
        return ids, offsets, trained if everything is None else trained & everything

    def finish(self) -> None:
        self._inner.finish()

    def close(self) -> None:
        self._inner.close()

    def _trained(self, text: str, framed: UInt32, begin: Int64, end: Int64) -> UInt8:
        """uint8[tokens] of a document, with what the tokenizer puts around it."""
        flags = np.zeros(len(framed), np.uint8)
        if not len(framed):
            return flags
        ids, starts, stops = self._places(text)
        first = _place_of(ids, framed, text)
        own = flags[first : first + len(ids)]
        characters = _characters(text, np.concatenate([begin, end])).reshape(2, -1)
        for a, b in characters.T.tolist():
            own |= ((starts < b) & (stops > a) & (stops > starts)).view(np.uint8)
        after = first + len(ids)
        flags[after:] = own[-1]  # EOS: as the token before it
        return flags

    def _places(self, text: str) -> tuple[UInt32, Int64, Int64]:
        """(ids, first character int64[t], end int64[t]) of a text's tokens."""
        if isinstance(self.engine, ReferenceEngine):
            numbers, places = self.engine.offsets(text)
            starts, stops = np.array(places, np.int64).reshape(-1, 2).T
            return np.array(numbers, np.uint32), starts, stops
        ids, _ = self.engine.encode([text])  # a token for a byte
        sizes = [len(character.encode()) for character in text]
        at = np.repeat(np.arange(len(text), dtype=np.int64), sizes)
        return ids, at, at + 1


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
