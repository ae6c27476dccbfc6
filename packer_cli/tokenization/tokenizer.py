"""Encode texts with one `Tokenizer`, whose tokens do not depend on the engine inside.

    files = locate(name)  ->  load_tokenizer(files, ...)  ->  Tokenizer.encode(texts)

Engines encode without special tokens. The tokens that the post-processor adds (BOS for llama3_1,
EOS for t5) are found once, as a prefix and a suffix, and put around every document that does not
have them already. EOS is added to a suffix without it, or removed with --no-eos. So neither is ever
there twice. Loading a tokenizer of 9 MB takes 0.4 s, or 1.2 s if texts are new (see `trust.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from packer_cli._kernels import filling
from packer_cli._kernels import texts as kernels
from packer_cli.errors import InternalError, UsageError
from packer_cli.records import Int64, Notify, Texts, TrainedSpans, UInt8, UInt32, offsets_of
from packer_cli.result.manifest import TokenizerInfo
from packer_cli.tokenization.engines import (
    BytesEngine,
    Engine,
    FastEngine,
    ReferenceEngine,
    engines_differ_on,
)
from packer_cli.tokenization.locate import TokenizerFiles, TokenizerJson
from packer_cli.tokenization.trust import Agreements, TrustedEngine

Tokens = tuple[UInt32, Int64, UInt8 | None]
SpanTokens = tuple[UInt32, Int64, UInt8 | None, Int64 | None]  # ..., the span of each token or -1


@dataclass(frozen=True)
class Framing:
    """Tokens around every document; None: as the tokenizer's post-processor adds them."""

    bos: bool | None = None
    eos: bool = True
    eos_token: str | None = None


class Tokenizer:
    """Encoder of documents, special tokens included.

    `finish` confirms all that was encoded.
    """

    def __init__(
        self,
        engine: Engine,
        framing: Framing,
        files: TokenizerFiles | None = None,
        reference: ReferenceEngine | None = None,
    ) -> None:
        """`files` and `reference`: of a tokenizer that is not built in. Raises UsageError if it
        does not have the tokens of `framing`.
        """
        self.engine = engine
        self._files, self._reference = files, reference
        specials = files.specials if files else ()
        self._special_ids = np.unique([token.id for token in specials if not token.unknown])
        self._unknown = [token for token in specials if token.unknown]
        self._frame(framing)

    def _frame(self, framing: Framing) -> None:
        if self._files and self._reference:
            self.info = _described(self._files, self._reference, framing)
        else:
            self.info = _of_bytes(framing)
        around = self.info.prefix or (), self.info.suffix or ()
        self._prefix, self._suffix = (np.array(ids, np.uint32) for ids in around)

    def framed(self, framing: Framing) -> Tokenizer:
        """Return this tokenizer with other tokens around documents; `finish` ends both. Raises
        UsageError if it does not have these tokens.
        """
        other = copy(self)
        with _named(self.info.source):
            other._frame(framing)
        return other

    @cached_property
    def _pieces(self) -> TokenBytes:
        return token_bytes(self._files.json) if self._files else _PLAIN_BYTES

    def encode(self, texts: Sequence[str], spans: TrainedSpans | None = None) -> Tokens:
        """Encode documents with the special tokens around them; all that is trained is 1."""
        return self.surrounded(*self.encode_bare(texts, spans))[:3]

    def count_special(self, ids: UInt32, texts: Iterable[str]) -> int:
        """Count the special tokens in texts whose token ids are `ids`."""
        if not len(ids):
            return 0
        lowest, highest = int(ids.min()), int(ids.max())  # most batches have none, and end here
        special = self._special_ids
        special = special[(special >= lowest) & (special <= highest)]
        number = int(np.isin(ids, special).sum()) if len(special) else 0
        return number + sum(
            text.count(token.content)
            for token in self._unknown
            if lowest <= token.id <= highest and (ids == token.id).any()
            for text in texts
        )

    def encode_bare(self, texts: Sequence[str], spans: TrainedSpans | None = None) -> SpanTokens:
        """Encode texts without special tokens around them: (ids uint32[T], offsets int64[n + 1],
        trained uint8[T] or None for all, int64[T] the span of each trained token and -1 elsewhere,
        or None if spans have no columns).

        A text without any token stays empty. A token is trained, 1, when it holds at least one
        byte of its text's `spans`, and 2 when it begins before that span. Raises InternalError when
        an earlier sample of the engine differed from the reference.
        """
        texts, trained = Texts.of(texts), None
        has_values = spans is not None and bool(spans.columns)
        span_of: Int64 | None = None
        if spans is not None and isinstance(self.engine, ReferenceEngine):
            ids, offsets, places = self.engine.places(texts)
            parts = [_by_places(places[offsets[i] : offsets[i + 1]], text, spans, i)
                     for i, text in enumerate(texts)]  # fmt: skip
            trained = np.concatenate([np.empty(0, np.uint8), *(flags for flags, _ in parts)])
            if has_values:
                span_of = np.concatenate([np.empty(0, np.int64), *(own for _, own in parts)])
        else:
            ids, offsets = self.engine.encode(texts)
            if spans is not None:
                if has_values:
                    span_of = np.zeros(len(ids), np.int64)
                trained = mark_trained(
                    self._pieces, texts, ids, offsets, spans, self._reference, span_of
                )
        if span_of is not None and trained is not None:
            span_of[trained == 0] = -1
        return ids, offsets, trained, span_of

    def surrounded(
        self, ids: UInt32, offsets: Int64, trained: UInt8 | None, span_of: Int64 | None = None
    ) -> SpanTokens:
        """Put prefix and suffix around every document of `encode_bare`; all that is trained is 1. A
        suffix that is trained on belongs to the span of the token before it.
        """
        if trained is not None:
            np.minimum(trained, 1, out=trained)
        framed = _framed((ids, offsets, trained), self._prefix, self._suffix)
        if span_of is None or len(framed[0]) == len(ids):
            return *framed, span_of
        around, first = np.full(len(framed[0]), -1), framed[1]
        for i, (begin, end) in enumerate(pairwise(offsets.tolist())):
            has_prefix = np.array_equal(ids[begin : begin + len(self._prefix)], self._prefix)
            at = first[i] + (0 if has_prefix else len(self._prefix))
            around[at : at + end - begin] = span_of[begin:end]
            after = slice(at + end - begin, first[i + 1])
            if end > begin and framed[2] is not None:
                around[after] = np.where(framed[2][after], span_of[end - 1], around[after])
        return *framed, around

    def finish(self) -> None:
        """End a unit. Raises InternalError if any sample differed from the reference."""
        if isinstance(self.engine, TrustedEngine):
            self.engine.finish()


def _framed(tokens: Tokens, prefix: UInt32, suffix: UInt32) -> Tokens:
    ids, offsets, trained = tokens
    count = len(offsets) - 1
    room = len(ids) + (len(prefix) + len(suffix)) * count
    if room == len(ids):
        return tokens
    out, out_offsets = np.empty(room, np.uint32), np.empty(count + 1, np.int64)
    out_trained = None if trained is None else np.empty(room, np.uint8)
    used = filling.frame_documents(
        ids, offsets, prefix, suffix, out, out_offsets, trained, out_trained
    )
    return out[:used], out_offsets, None if out_trained is None else out_trained[:used]


def bytes_tokenizer(framing: Framing) -> Tokenizer:
    """Return the built-in tokenizer: UTF-8 bytes, EOS 256, padding 257."""
    return Tokenizer(BytesEngine(), framing)


def _of_bytes(framing: Framing) -> TokenizerInfo:
    if framing.bos:
        raise UsageError("--bos: the bytes tokenizer has no BOS", "name a --tokenizer that has one")
    if framing.eos_token is not None:
        raise UsageError(
            f"--eos-token: {framing.eos_token!r} is not used: the bytes tokenizer has its own",
            "leave it out, or name a --tokenizer",
        )
    eos, pad = BytesEngine.EOS, BytesEngine.PAD
    suffix = [eos] if framing.eos else []
    return TokenizerInfo(
        "bytes", "", BytesEngine.VOCAB_SIZE, None, eos, pad, None, "<eos>", [], suffix
    )


def load_tokenizer(
    files: TokenizerFiles,
    *,
    backend: str = "auto",
    framing: Framing = Framing(),
    first_documents: Iterable[str] = (),
    notify: Notify = lambda message: None,
) -> Tokenizer:
    """Load a tokenizer with the engine `backend`; "auto" is gigatoken if it agrees.

    first_documents  compared at the start
    notify           gets why the reference is used instead, or for which texts

    Raises UsageError if the files cannot be loaded, or if there is no EOS to append.
    """
    with _named(files.source):
        if backend == "tokenizers":
            reference = ReferenceEngine(files.json)
            return Tokenizer(reference, framing, files, reference)
        agreements = Agreements.of(files.sha256)
        reference = ReferenceEngine(files.json, agreements.facts)
        tokenizer = Tokenizer(reference, framing, files, reference)
        try:
            tokenizer.engine = TrustedEngine(
                FastEngine(files.json), reference, files.added_tokens, first_documents, notify,
                agreements,
            )  # fmt: skip
        except ValueError as error:
            problem = str(error).splitlines()[0]
            if backend == "gigatoken":
                raise UsageError(problem, "use --tokenizer-backend tokenizers or auto") from error
            notify(f"using the slower tokenizers engine: {problem}")
        return tokenizer


@contextmanager
def _named(source: str) -> Iterator[None]:
    """Name the tokenizer in UsageErrors."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"tokenizer {source}: {error.message}", error.tip) from error


def _described(
    files: TokenizerFiles, reference: ReferenceEngine, framing: Framing
) -> TokenizerInfo:
    """Describe the tokenizer, with the tokens around every document."""
    if (around := reference.around()) is None:
        raise UsageError("its post-processor rewrites the text's own tokens")
    prefix, suffix = around
    eos_name = files.eos if framing.eos_token is None else framing.eos_token
    # a configured token that the vocabulary lacks only matters where it is needed
    bos, eos, pad = (None if name is None else reference.id_of(name)
                     for name in (files.bos, eos_name, files.pad))  # fmt: skip
    if eos is None and (framing.eos or framing.eos_token is not None):
        problem = "no configuration names its EOS token"
        if eos_name is not None:
            problem = f"its EOS token {eos_name!r} is not in the vocabulary"
        tip = "name one that exists with --eos-token, or leave it out with --no-eos"
        raise UsageError(problem, tip)
    if framing.bos is False:
        prefix = []
    elif framing.bos and bos not in prefix:
        if bos is None:
            raise UsageError("--bos: the tokenizer's configuration names no BOS token that it has")
        prefix = [bos, *prefix]
    if suffix[-1:] == [eos]:
        suffix = suffix[:-1]  # with --no-eos, not even the post-processor's own
    if framing.eos and eos is not None:
        suffix = [*suffix, eos]
    if pad is None:
        pad = 0 if eos is None else eos  # masked by position, never by its id, so any id will do
    return TokenizerInfo(
        files.source, files.sha256, reference.vocabulary_size(), bos, eos, pad,
        None if bos is None else files.bos, None if eos is None else eos_name,
        prefix, suffix,
    )  # fmt: skip


# --- the bytes of a text that each token stands for: they map spans of a text to its tokens

# Tokens lie end to end in their text. If the pieces of its tokens are the text, from its first byte
# to its last, each token's place is proven, at the fast engine's speed. If they are not, because a
# normalizer changed the text, white space was swallowed or an unknown token stands for any text,
# the reference engine gives the offsets of that document. Tokenizers that can do so without a trace
# in their tokens have no known pieces here, and the reference's offsets for every document.

_SPACE = "▁"  # SentencePiece's, U+2581
_UNKNOWN, _OF_MODEL, _ADDED = range(3)  # the kinds of `texts.mark_trained`, and its spacings:
_NEVER, _PREPENDED, _UNLESS_THERE, _AT_START = range(4)
_NORMAL_FORMS = {"NFC", "NFD", "NFKC", "NFKD"}  # what they do not change, they do not move
_KEEPERS = {"Digits", "Punctuation", "Split"}  # pre-tokenizers that only cut, unless they remove


@dataclass(frozen=True)
class TokenBytes:
    """Pieces of a tokenizer, as `texts.mark_trained` takes them; none if they are not known."""

    pieces: UInt8
    offsets: Int64
    kinds: UInt8
    spaces: bool = False
    spacing: int = _NEVER


# of the built-in bytes tokenizer
_PLAIN_BYTES = TokenBytes(
    np.arange(256, dtype=np.uint8), np.arange(257), np.full(256, _OF_MODEL, np.uint8)
)
# of a tokenizer whose pieces are not known
_UNKNOWN_BYTES = TokenBytes(np.zeros(0, np.uint8), np.zeros(1, np.int64), np.zeros(0, np.uint8))

_NO_BYTE = 0xFFFF
_BYTE = re.compile("<0x[0-9A-F]{2}>")  # a token that is written like a byte


def token_bytes(tokenizer_json: bytes) -> TokenBytes:
    """Return the pieces of byte-level and SentencePiece-style BPE."""
    document = msgspec.json.decode(tokenizer_json, type=TokenizerJson)
    model, vocabulary = document.model, document.model.vocab
    is_bpe = model.type == "BPE" and len(memoryview(model.merges)) > 0
    affixes = model.continuing_subword_prefix or model.end_of_word_suffix
    if not isinstance(vocabulary, dict) or not is_bpe or affixes:
        return _UNKNOWN_BYTES
    byte_level = any(part.get("type") == "ByteLevel" for part in _parts(document.pre_tokenizer))
    spaces, spacing = _spaces(document, byte_level=byte_level)
    # whether every character leaves a token; bytes that can be one of two things do not count
    keeps = not model.ignore_merges if model.byte_fallback else model.unk_token is not None
    if spaces is None or not (byte_level or keeps):
        return _UNKNOWN_BYTES
    fallback = bool(model.byte_fallback)
    if byte_level:
        pieces = _byte_level(vocabulary)
    else:
        pieces = {number: piece.encode("utf-8", "surrogatepass")
                  for piece, number in vocabulary.items()}  # fmt: skip
    if fallback and not byte_level:
        pieces |= {number: bytes([int(piece[3:5], 16)])
                   for piece, number in vocabulary.items() if _BYTE.fullmatch(piece)}  # fmt: skip
    added = document.added_tokens or []
    for token in added:
        content = token.content.encode("utf-8", "surrogatepass")
        # the same id for two different texts; white space swallowed; a space put before it
        is_either = byte_level and pieces.get(token.id, content) != content
        is_byte = fallback and _BYTE.fullmatch(token.content)
        is_prepended = token.normalized and spacing == _PREPENDED
        if is_either or is_byte or is_prepended or token.lstrip or token.rstrip:
            pieces.pop(token.id, None)
        else:
            pieces[token.id] = content
    if model.unk_token in vocabulary:
        pieces.pop(vocabulary[model.unk_token], None)
    ids = sorted(pieces)
    contents = [*map(pieces.__getitem__, ids)]
    kinds = np.zeros(max(ids, default=-1) + 1, np.uint8)
    sizes = np.zeros(len(kinds), np.int64)
    kinds[ids] = _OF_MODEL
    kinds[[token.id for token in added if token.id in pieces]] = _ADDED
    sizes[ids] = [*map(len, contents)]
    flat = np.frombuffer(b"".join(contents), np.uint8)
    return TokenBytes(flat, offsets_of(sizes), kinds, spaces, spacing)


def _byte_level(vocabulary: dict[str, int]) -> dict[int, bytes]:
    """Return by id the bytes of each token all of whose characters stand for bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's choice
    hidden = [byte for byte in range(256) if byte not in shown]
    byte_of = dict.fromkeys(hidden, _NO_BYTE)
    byte_of |= {256 + place: byte for place, byte in enumerate(hidden)}
    pieces = dict[int, bytes]()
    for token, number in vocabulary.items():
        try:
            pieces[number] = token.translate(byte_of).encode("latin-1")
        except UnicodeEncodeError:  # it has another character
            continue
    return pieces


def _spaces(document: TokenizerJson, *, byte_level: bool) -> tuple[bool | None, int]:
    """Return `spaces` and `spacing`; None for `spaces` if a text changes in other ways, too."""
    unknown = None, _NEVER
    spaces, spacing = False, _NEVER
    for part in _parts(document.normalizer):
        kind = part.get("type")
        if kind == "Prepend" and part.get("prepend") == _SPACE:
            spacing = _PREPENDED
        elif kind == "Replace" and part.get("pattern") == {"String": " "}:
            if part.get("content") != _SPACE:
                return unknown
            spaces = True
        elif kind not in _NORMAL_FORMS:
            return unknown
    parts = _parts(document.pre_tokenizer)
    for part in parts:
        kind = part.get("type")
        if kind == "Metaspace" and len(parts) == 1 and spacing == _NEVER:
            if part.get("replacement") != _SPACE:
                return unknown
            old = "always" if part.get("add_prefix_space", True) else "never"
            schemes = {"always": _UNLESS_THERE, "first": _AT_START}
            spaces, spacing = True, schemes.get(part.get("prepend_scheme", old), _NEVER)
        elif kind not in {*_KEEPERS, "ByteLevel"} or part.get("behavior") == "Removed":
            return unknown
    if (byte_level and spaces) or (spacing and not spaces):
        return unknown
    return spaces, spacing


def _parts(part: Any) -> list[dict[str, Any]]:
    """Return the steps of a part of a tokenizer.json, those inside sequences included."""
    if not isinstance(part, dict):
        return []
    if part.get("type") != "Sequence":
        return [part]
    inner = part.get("pretokenizers") or part.get("normalizers") or []
    return [piece for item in inner for piece in _parts(item)]


def mark_trained(
    known: TokenBytes,
    texts: Texts,
    ids: UInt32,
    offsets: Int64,
    spans: TrainedSpans,
    exact: ReferenceEngine | None,
    span_of: Int64 | None = None,
) -> UInt8:
    """uint8[T]: 1 for every token that holds a byte of a span, 2 where it begins before that. OUT
    span_of: int64[T], which span, there; may be None.
    """
    trained, certain = np.zeros(len(ids), np.uint8), np.zeros(len(texts), np.uint8)
    if len(known.kinds):
        kernels.mark_trained(
            ids, offsets, known.pieces, known.offsets, known.kinds, known.spaces, known.spacing,
            texts.data, texts.offsets, spans.offsets, spans.begin, spans.end, trained, certain,
            span_of,
        )  # fmt: skip
    for i in np.flatnonzero(certain == 0).tolist():
        if exact is None:
            raise InternalError("the bytes of a text's tokens are not the text")
        tokens = slice(offsets[i], offsets[i + 1])
        exact_ids, _, places = exact.places([texts[i]])
        if not np.array_equal(exact_ids, ids[tokens]):
            raise engines_differ_on(texts[i])
        trained[tokens], its = _by_places(places, texts[i], spans, i)
        if span_of is not None:
            span_of[tokens] = its
    return trained


def _by_places(places: Int64, text: str, spans: TrainedSpans, number: int) -> tuple[UInt8, Int64]:
    """Mark the tokens of one text by their characters, places[:, 0]..places[:, 1]."""
    own = slice(spans.offsets[number], spans.offsets[number + 1])
    begin, end, (starts, stops) = spans.begin[own], spans.end[own], places.T
    if not text.isascii():
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        widths = 1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000)
        byte_of = offsets_of(widths)
        starts, stops = byte_of[starts], byte_of[stops]
    first = np.searchsorted(end, starts, side="right")  # the span that ends after the token begins
    begins = np.append(begin, np.iinfo(np.int64).max)[first]
    flags: UInt8 = ((begins < stops) & (stops > starts)).astype(np.uint8)
    flags += flags * (starts < begins)
    return flags, spans.offsets[number] + first
