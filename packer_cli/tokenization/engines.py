"""Engines: a list of texts in, flat token ids out, no special tokens added.

`ReferenceEngine` is Hugging Face tokenizers, and its ids are right by definition, at 2 to 5 MB/s.
`FastEngine` is gigatoken, tens of times faster, used only where both agree (see `trust.py`).
`BytesEngine` is built in.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from typing import Any, Protocol

import msgspec
import numpy as np

from packer_cli._kernels.texts import copied
from packer_cli.errors import InternalError, UsageError
from packer_cli.records import Int64, Texts, UInt8, UInt32, offsets_of

# Cutting batches by bytes keeps the reference's per-document objects within bounds.
_REFERENCE_BATCH_CHARACTERS = 4 << 20
_FAST_BATCH_BYTES = 1 << 20  # gigatoken 0.10 encodes up to 2 MiB as one chunk

# Texts that show what the post-processor adds; a small vocabulary may have no token for the first.
_PROBES = ("a b", "".join(map(chr, range(0xD800))))


def is_of_library(error: BaseException) -> bool:
    """Tell whether a library failed: panics in Rust are BaseExceptions, of a class of pyo3's."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class UnencodableError(UsageError):
    """The tokenizer cannot encode a text."""


@contextmanager
def without_panics() -> Iterator[None]:
    """Keep libraries in Rust from printing panics, which are reported as errors."""
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)


def engines_differ_on(text: str) -> InternalError:
    """Return the error of a run whose tokens may be wrong."""
    return InternalError(
        f"the engines gigatoken and tokenizers differ on the text {text[:80]!r}",
        "run again with --tokenizer-backend tokenizers, and please report the text",
    )


class Engine(Protocol):
    """An encoder of texts."""

    def encode(self, texts: Sequence[str]) -> tuple[UInt32, Int64]:
        """Return (ids uint32[T], offsets int64[n + 1]) of n texts, without special tokens added."""


class BytesEngine:
    """UTF-8 bytes as ids 0..255, and two specials."""

    EOS, PAD, VOCAB_SIZE = 256, 257, 258

    def encode(self, texts: Sequence[str]) -> tuple[UInt32, Int64]:
        texts = Texts.of(texts)
        ends = texts.offsets[1:] - 1
        return np.delete(texts.data, ends).astype(np.uint32), texts.offsets - np.arange(
            len(ends) + 1
        )


class ReferenceFacts(msgspec.Struct):
    """Answers of a reference engine that do not change: `around`, `vocabulary_size`, `id_of`."""

    around: tuple[list[int], list[int]] | None = None
    vocabulary_size: int | None = None
    ids: dict[str, int | None] = {}


class ReferenceEngine:
    """Hugging Face tokenizers."""

    def __init__(self, tokenizer_json: bytes, facts: ReferenceFacts | None = None) -> None:
        """With `facts` of this tokenizer, it is loaded only for a text, or for another fact, which
        joins them. INOUT facts. Raises UsageError if the library cannot load it.
        """
        self._json, self._facts = tokenizer_json, facts or ReferenceFacts()
        self._post_processor: Any = None
        if self._facts.around is None:
            _ = self.tokenizer

    @cached_property
    def tokenizer(self) -> Any:
        """The library's object, loaded when it is needed first."""
        from tokenizers import Tokenizer  # noqa: PLC0415
        from tokenizers.processors import ByteLevel  # noqa: PLC0415

        try:
            with without_panics():
                tokenizer = Tokenizer.from_buffer(self._json)
        except BaseException as error:  # the library raises bare Exception, and panics
            if not is_of_library(error):
                raise
            raise UsageError(
                f"tokenizer.json cannot be loaded: {error}",
                "it may need a newer tokenizers: pip install --upgrade tokenizers",
            ) from error
        # Truncation and padding saved inside tokenizer.json would lose or invent tokens.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # BPE dropout would give other tokens on every run.
        if getattr(tokenizer.model, "dropout", None):
            tokenizer.model.dropout = None
        # What is added around a text is found once, by `around`. Otherwise it would only
        # trim white space off the tokens' offsets, as many tokenizers do. This one does nothing.
        self._post_processor = tokenizer.post_processor
        tokenizer.post_processor = ByteLevel(trim_offsets=False)
        return tokenizer

    def encode(self, texts: Sequence[str]) -> tuple[UInt32, Int64]:
        return self.places(texts, placed=False)[:2]

    def places(self, texts: Sequence[str], *, placed: bool = True) -> tuple[UInt32, Int64, Int64]:
        """Encode, and return the characters of each token, int64[T, 2]; none if not `placed`."""
        parts, places = [np.empty(0, np.uint32)], [np.empty((0, 2), np.int64)]
        lengths: list[int] = []
        for batch in _batches(texts, _REFERENCE_BATCH_CHARACTERS):
            encoded = self._encodings(batch, placed=placed)
            ids = [encoding.ids for encoding in encoded]
            lengths.extend(map(len, ids))
            count = sum(map(len, ids))
            parts.append(np.fromiter(chain.from_iterable(ids), np.uint32, count=count))
            if placed:
                edges = chain.from_iterable(chain.from_iterable(text.offsets for text in encoded))
                places.append(np.fromiter(edges, np.int64, count=2 * count).reshape(-1, 2))
        flat_ids = parts[-1] if len(parts) == 2 else np.concatenate(parts)
        return flat_ids, offsets_of(lengths), np.concatenate(places)

    def _encodings(self, texts: list[str], *, placed: bool = False) -> list[Any]:
        # the fast one leaves out the offsets
        encode = self.tokenizer.encode_batch if placed else self.tokenizer.encode_batch_fast
        try:
            with without_panics():
                encoded: list[Any] = encode(texts, add_special_tokens=False)
        except BaseException as error:
            if not is_of_library(error):
                raise
            if len(texts) > 1:  # find the text
                return [self._encodings([text], placed=placed)[0] for text in texts]
            raise UnencodableError(
                f"the text {texts[0][:80]!r} cannot be encoded: {error}",
                "use another tokenizer, or leave the record out, with --on-error skip",
            ) from error
        return encoded

    def vocabulary_size(self) -> int:
        """Return the number of tokens, added ones included."""
        if self._facts.vocabulary_size is None:
            self._facts.vocabulary_size = self.tokenizer.get_vocab_size()
        return self._facts.vocabulary_size

    def id_of(self, token: str) -> int | None:
        """Return the id of a token; None if it is unknown."""
        if token not in self._facts.ids:
            self._facts.ids[token] = self.tokenizer.token_to_id(token)
        return self._facts.ids[token]

    def around(self) -> tuple[list[int], list[int]] | None:
        """Return the ids that the post-processor puts around a document; None if it does more."""
        if self._facts.around is None:
            self._facts.around = self._around()
        return self._facts.around

    def _around(self) -> tuple[list[int], list[int]] | None:
        for text in _PROBES:
            (encoding,) = self._encodings([text])
            bare = full = encoding.ids
            if bare:
                break
        if self._post_processor is not None:
            full = self._post_processor.process(encoding).ids
            if self._post_processor.process(encoding, None, False).ids != bare:
                return None  # it changes the text's own tokens
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
        return None


class FastEngine:
    """The library gigatoken.

    gigatoken 0.10 remembers words without bound (its issue 36); a new object forgets them.
    """

    def __init__(self, tokenizer_json: bytes) -> None:
        """Raises ValueError if the library cannot load the tokenizer."""
        self._json = tokenizer_json
        self._backend: Any = self._load()
        self._growth = _Growth()

    def _load(self) -> Any:
        # The public gigatoken.Tokenizer adds 0.1 s of imports around this call.
        from gigatoken.gigatoken_rs import load_hf_json  # noqa: PLC0415

        try:
            with without_panics():
                return load_hf_json(self._json)
        except BaseException as error:  # the library raises bare RuntimeError, and panics
            if not is_of_library(error):
                raise
            raise ValueError(f"gigatoken cannot load this tokenizer: {error}") from error

    def encode(self, texts: Sequence[str]) -> tuple[UInt32, Int64]:
        texts = Texts.of(texts)
        lengths = np.zeros(len(texts), np.int64)
        parts, first, offsets = [np.empty(0, np.uint32)], 0, texts.offsets
        while first < len(texts):
            end = int(np.searchsorted(offsets, offsets[first] + _FAST_BATCH_BYTES, "right")) - 1
            end = max(end, first + 1)
            ids, counts = self._encode(texts.data[offsets[first] : offsets[end]])
            # it passes over texts without a byte
            lengths[first:end][np.diff(offsets[first : end + 1]) > 1] = counts
            parts.append(ids)
            first = end
        return parts[1] if len(parts) == 2 else np.concatenate(parts), offsets_of(lengths)

    def _encode(self, data: UInt8) -> tuple[UInt32, Int64]:
        """Return (ids uint32[T], the number of ids of each text that is not empty)."""
        if self._backend is None or self._growth.is_too_much(len(data)):
            self._backend = None  # gone before the next is there
            self._backend, self._growth = self._load(), _Growth()
        backend = self._backend
        try:
            result = backend.encode_batch(_as_source(backend, data), parallel=False)
        except BaseException as error:
            if not is_of_library(error):
                raise
            raise InternalError(
                f"gigatoken failed: {type(error).__name__}: {error}",
                "run again with --tokenizer-backend tokenizers, and please report it",
            ) from error
        if isinstance(result, list):  # without awkward: views of one flat array
            flat = result[0].base if result else None
            if flat is None or flat.size != sum(map(len, result)):
                flat = np.concatenate([np.empty(0, np.uint32), *result])
            return flat, np.array([*map(len, result)], np.int64)
        layout = result.layout
        return layout.content.data, np.diff(layout.offsets.data)


class _Growth:
    """Growth of this process's memory since an engine was loaded."""

    # Bytes of text after which windows and buffers have the size that they keep
    SETTLED = 1 << 26
    MOST_BYTES = 128 << 20
    LOOK_AFTER = 1 << 22
    LOOKS = 8  # windows come and go: the least of so many looks is what stays

    def __init__(self) -> None:
        self._used = self._next_look = 0
        self._looks = deque[int](maxlen=self.LOOKS)
        self._settled: int | None = None

    def is_too_much(self, size: int) -> bool:
        """Tell whether it is too much, now that so many more bytes of text are encoded."""
        self._used += size
        if self._used < self._next_look:
            return False
        self._next_look = self._used + self.LOOK_AFTER
        self._looks.append(resident())
        if self._used >= self.SETTLED and self._settled is None:
            self._settled = max(self._looks)
        if self._settled is None:
            return False
        return min(self._looks) > self._settled + self.MOST_BYTES


def _as_source(backend: Any, data: UInt8) -> Any:
    """Convert texts, each followed by 0xFF, to the form that gigatoken's object reads fastest."""
    from gigatoken.gigatoken_rs import BytesSource, SentencePieceTokenizer  # noqa: PLC0415

    copy = copied(data)
    if isinstance(backend, SentencePieceTokenizer):  # its separators are UTF-8
        return [text for text in copy.split(b"\xff") if text]
    return BytesSource(copy, b"\xff")


def resident() -> int:
    """Return the bytes of memory that this process has."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _batches(texts: Sequence[str], characters: int) -> list[list[str]]:
    """Split texts into batches of at most so many characters; a longer text has its own."""
    batches: list[list[str]] = []
    room = 0
    for text in texts:
        if len(text) > room or not batches:
            batches.append([])
            room = characters
        batches[-1].append(text)
        room -= len(text)
    return batches
