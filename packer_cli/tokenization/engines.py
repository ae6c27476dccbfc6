"""The engines behind one call: list of texts in, flat ids out, no special tokens added.

`ReferenceEngine` is Hugging Face tokenizers and defines what is right; `FastEngine` is
gigatoken, tens of times faster, trusted only while it agrees (see `agreement.py`);
`BytesEngine` needs nothing installed or downloaded. Little is imported here before an
engine is made, because `reference_process.py` starts from this file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import msgspec
import numpy as np

from packer_cli.errors import InternalError, UsageError
from packer_cli.records import Int64, UInt32
from packer_cli.tokenization.renewed import Renewed
from packer_cli.tokenization.specials import Span, Specials

# Cutting batches by bytes keeps the reference's per-document objects within bounds.
_REFERENCE_BATCH_CHARACTERS = 4 << 20
# 2 MiB of UTF-8 at most: what gigatoken 0.10 encodes as one chunk.
_FAST_BATCH_CHARACTERS = 1 << 19

# Texts that show what the post-processor adds: a small vocabulary may have no token for some.
_PROBES = ("a b", "".join(map(chr, range(0xD800))))


def is_of_library(error: BaseException) -> bool:
    """Whether a library in Rust failed: its panics are BaseExceptions, of a class of pyo3's."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class Engine(Protocol):
    """What every engine offers."""

    name: str

    def encode(self, texts: list[str]) -> tuple[UInt32, Int64]:
        """(ids uint32[T], offsets int64[n + 1]) of n texts, without special tokens added."""


@dataclass(frozen=True)
class Description:
    """What a tokenizer does besides encoding text.

    prefix, suffix  ids that its post-processor puts around a document; None when it does
                    something else than that
    token_ids       the ids of the tokens asked for, None for those it does not have
    vocab_size      added tokens included; ids can be higher
    """

    prefix: list[int] | None
    suffix: list[int]
    token_ids: dict[str, int | None]
    vocab_size: int


class BytesEngine:
    """UTF-8 bytes as ids 0..255, and two specials."""

    name = "bytes"
    EOS, PAD, VOCAB_SIZE = 256, 257, 258

    def encode(self, texts: list[str]) -> tuple[UInt32, Int64]:
        encoded = [text.encode() for text in texts]
        ids = np.frombuffer(b"".join(encoded), np.uint8).astype(np.uint32)
        return ids, _offsets(map(len, encoded), len(texts))


class ReferenceEngine:
    """Hugging Face tokenizers."""

    name = "tokenizers"

    def __init__(self, tokenizer_json: bytes) -> None:
        """Raises UsageError when the library cannot load the tokenizer."""
        from tokenizers import Tokenizer  # noqa: PLC0415
        from tokenizers.processors import ByteLevel  # noqa: PLC0415

        try:
            self.tokenizer = Tokenizer.from_buffer(tokenizer_json)
        except BaseException as error:  # the library raises bare Exception, and panics
            if not is_of_library(error):
                raise
            raise UsageError(
                f"tokenizer.json cannot be loaded: {error}",
                "it may need a newer tokenizers: pip install --upgrade tokenizers",
            ) from error
        # Truncation and padding saved inside tokenizer.json would lose or invent tokens.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        # BPE dropout would give other tokens on every run.
        if getattr(self.tokenizer.model, "dropout", None):
            self.tokenizer.model.dropout = None
        # What is added around a text is asked for once, by `describe`. Otherwise it would only
        # trim white space off the tokens' offsets, as many tokenizers do. This one does nothing.
        self._post_processor = self.tokenizer.post_processor
        self.tokenizer.post_processor = ByteLevel(trim_offsets=False)

    def encode(self, texts: list[str]) -> tuple[UInt32, Int64]:
        ids, offsets, _ = self._flat(texts, placed=False)
        return ids, offsets

    def places(self, texts: list[str]) -> tuple[UInt32, Int64, Int64]:
        """As `encode`, and int64[T, 2]: the characters first..end that each token stands for."""
        return self._flat(texts, placed=True)

    def offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """(ids, (first character, end) of each token), without special tokens."""
        (encoding,) = self._encodings([text], placed=True)
        return encoding.ids, encoding.offsets

    def _flat(self, texts: list[str], *, placed: bool) -> tuple[UInt32, Int64, Int64]:
        parts, places = [np.empty(0, np.uint32)], [np.empty((0, 2), np.int64)]
        lengths: list[int] = []
        for batch in _batches(texts, _REFERENCE_BATCH_CHARACTERS):
            encoded = self._encodings(batch, placed=placed)
            ids = [one.ids for one in encoded]
            lengths.extend(map(len, ids))
            count = sum(map(len, ids))
            parts.append(np.fromiter(chain.from_iterable(ids), np.uint32, count=count))
            if placed:
                edges = chain.from_iterable(chain.from_iterable(one.offsets for one in encoded))
                places.append(np.fromiter(edges, np.int64, count=2 * count).reshape(-1, 2))
        flat_ids = parts[-1] if len(parts) == 2 else np.concatenate(parts)
        return flat_ids, _offsets(lengths, len(lengths)), np.concatenate(places)

    def _encodings(self, texts: list[str], *, placed: bool = False) -> list[Any]:
        # the fast one leaves out the offsets
        encode = self.tokenizer.encode_batch if placed else self.tokenizer.encode_batch_fast
        try:
            encoded: list[Any] = encode(texts, add_special_tokens=False)
        except BaseException as error:
            if not is_of_library(error):
                raise
            if len(texts) > 1:  # find the one
                return [one for text in texts for one in self._encodings([text], placed=placed)]
            raise UsageError(
                f"the text {texts[0][:80]!r} cannot be encoded: {error}",
                "the tokenizer has no token for it: give it an unknown token, or use another",
            ) from error
        return encoded

    def describe(self, tokens: list[str]) -> Description:
        for text in _PROBES:
            (encoding,) = self._encodings([text])
            bare = full = encoding.ids
            if bare:
                break
        prefix: list[int] | None = None
        suffix: list[int] = []
        if self._post_processor is not None:
            full = self._post_processor.process(encoding).ids
            if self._post_processor.process(encoding, None, False).ids != bare:
                full = []  # it changes the text's own tokens
        for start in range(len(full) - len(bare) + 1):
            if prefix is None and full[start : start + len(bare)] == bare:
                prefix, suffix = full[:start], full[start + len(bare) :]
        ids = {token: self.tokenizer.token_to_id(token) for token in tokens}
        return Description(prefix, suffix, ids, self.tokenizer.get_vocab_size())


class OrdinaryTextEngine:
    """The reference for texts in which only some special tokens are tokens, others just text."""

    def __init__(self, tokenizer_json: bytes, specials: Specials) -> None:
        self._specials = specials
        self._first = self._rest = _without_specials(tokenizer_json)
        if b'"first"' in tokenizer_json:  # as a pre-tokenizer may treat the beginning of a text
            document = msgspec.json.decode(tokenizer_json)
            if (document.get("pre_tokenizer") or {}).get("prepend_scheme") == "first":
                document["pre_tokenizer"]["prepend_scheme"] = "never"
                self._rest = _without_specials(msgspec.json.encode(document))

    def places(self, text: str, controls: list[Span]) -> tuple[UInt32, Int64]:
        """(ids uint32[T], places int64[T, 2]) where only `controls` are special tokens."""
        ids: list[int] = []
        places: list[Span] = []
        done = 0
        for begin, end in [*controls, (len(text), len(text))]:
            if done < begin:
                engine = self._rest if done else self._first
                own, edges = engine.offsets(text[done:begin])
                ids += own
                places += [(done + a, done + b) for a, b in edges]
            if begin < end:
                ids.append(self._specials.id_of(text[begin:end]))
                places.append((begin, end))
            done = end
        return np.array(ids, np.uint32), np.array(places, np.int64).reshape(-1, 2)


def _without_specials(tokenizer_json: bytes) -> ReferenceEngine:
    engine = ReferenceEngine(tokenizer_json)
    engine.tokenizer.encode_special_tokens = True  # as the text that they are
    return engine


class FastEngine:
    """gigatoken. Safe to share between threads, which encode at the same time.

    Raises ValueError when it cannot load the tokenizer.
    """

    name = "gigatoken"

    def __init__(self, tokenizer_json: bytes) -> None:
        self._json = tokenizer_json
        # gigatoken 0.10 caches words without bound (its issue 36); a new object drops the cache.
        self._backend = Renewed(self._load)

    def _load(self) -> Any:
        # The public gigatoken.Tokenizer adds 0.1 s of imports around this call.
        from gigatoken.gigatoken_rs import load_hf_json  # noqa: PLC0415

        try:
            return load_hf_json(self._json)
        except BaseException as error:  # the library raises bare RuntimeError, and panics
            if not is_of_library(error):
                raise
            raise ValueError(f"gigatoken cannot load this tokenizer: {error}") from error

    def encode(self, texts: list[str]) -> tuple[UInt32, Int64]:
        parts = [self._encode(batch) for batch in _batches(texts, _FAST_BATCH_CHARACTERS)]
        if len(parts) == 1:
            return parts[0]
        ids = np.concatenate([ids for ids, _ in parts]) if parts else np.empty(0, np.uint32)
        lengths = [np.diff(offsets) for _, offsets in parts]
        return ids, _offsets(np.concatenate(lengths) if parts else [], len(texts))

    def _encode(self, texts: list[str]) -> tuple[UInt32, Int64]:
        characters = sum(map(len, texts))
        # "parallel" for what is at most one of the library's chunks means: on this thread, with
        # whichever of its workers is free. Else all threads would queue for its one serial worker.
        parallel = characters <= _FAST_BATCH_CHARACTERS
        with self._backend.using(characters) as backend:
            try:
                result = backend.encode_batch(texts, parallel=parallel)
            except BaseException as error:
                if not is_of_library(error):
                    raise
                raise InternalError(
                    f"gigatoken failed: {type(error).__name__}: {error}",
                    "run again with --tokenizer-backend tokenizers, and please report it",
                ) from error
            finally:
                del backend  # before the next one is loaded, perhaps
        if isinstance(result, list):  # without awkward: views of one flat array
            flat = result[0].base
            if flat is None or flat.size != sum(map(len, result)):
                flat = np.concatenate(result)
            return flat, _offsets(map(len, result), len(result))
        layout = result.layout
        return layout.content.data, np.asarray(layout.offsets.data, np.int64)


def _offsets(lengths: Iterable[int], count: int) -> Int64:
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(np.fromiter(lengths, np.int64, count=count), out=offsets[1:])
    return offsets


def _batches(texts: list[str], characters: int) -> list[list[str]]:
    """Runs of at most so many characters; a longer text is a batch of its own."""
    batches: list[list[str]] = []
    room = 0
    for text in texts:
        if len(text) > room or not batches:
            batches.append([])
            room = characters
        batches[-1].append(text)
        room -= len(text)
    return batches
