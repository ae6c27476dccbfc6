"""The bytes of a text that each token stands for: they map spans of a text to its tokens.

Tokens lie end to end in their text. So where the pieces of its tokens are the text, from its first
byte to its last, each token's place is proven, at the fast engine's speed. Wherever they are
not, the reference engine gives the offsets of that one document: a normalizer changed it, white
space was swallowed, an unknown token stands for any text. A tokenizer that could do so without a
trace in its tokens is not among those whose pieces are known here: it has the reference's offsets
for every document.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from packer_cli._kernels import texts as kernels
from packer_cli.errors import InternalError
from packer_cli.inputs.token_columns import offsets_of
from packer_cli.records import Int64, Spans, UInt8, UInt32
from packer_cli.tokenization.engines import ReferenceEngine, engines_differ_on
from packer_cli.tokenization.locate import TokenizerJson

_SPACE = "▁"  # SentencePiece's, U+2581
_UNKNOWN, _OF_MODEL, _ADDED = range(3)  # the kinds of `texts.mark_trained`, and its spacings:
_NEVER, _PREPENDED, _UNLESS_THERE, _AT_START = range(4)
_NORMAL_FORMS = {"NFC", "NFD", "NFKC", "NFKD"}  # what they leave as it is, they leave in its place
_KEEPERS = {"Digits", "Punctuation", "Split"}  # pre-tokenizers that only cut, unless they remove


@dataclass(frozen=True)
class TokenBytes:
    """The pieces of a tokenizer, as `texts.mark_trained` takes them; none where not known."""

    pieces: UInt8
    offsets: Int64
    kinds: UInt8
    spaces: bool = False
    spacing: int = _NEVER


# of the built-in bytes tokenizer
PLAIN_BYTES = TokenBytes(
    np.arange(256, dtype=np.uint8), np.arange(257), np.full(256, _OF_MODEL, np.uint8)
)
# of a tokenizer whose pieces are not known
_UNKNOWN_BYTES = TokenBytes(np.zeros(0, np.uint8), np.zeros(1, np.int64), np.zeros(0, np.uint8))


_BYTE = re.compile("<0x[0-9A-F]{2}>")  # a token that is written like a byte


def token_bytes(tokenizer_json: bytes) -> TokenBytes:
    """The pieces of byte-level and SentencePiece-style BPE."""
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
    pieces = _byte_level(vocabulary) if byte_level else _utf8(vocabulary, fallback=fallback)
    added = document.added_tokens or []
    others = dict[int, bytes | None]()
    for token in added:
        content: bytes | None = token.content.encode("utf-8", "surrogatepass")
        # the same id for two different texts; white space swallowed; a space put before it
        is_either = byte_level and pieces.get(token.id, content) != content
        is_byte = fallback and _BYTE.fullmatch(token.content)
        is_prepended = token.normalized and spacing == _PREPENDED
        if is_either or is_byte or is_prepended or token.lstrip or token.rstrip:
            content = None
        others[token.id] = content
    if model.unk_token in vocabulary:
        others[vocabulary[model.unk_token]] = None
    for number, piece in others.items():
        if piece is None:
            pieces.pop(number, None)
        else:
            pieces[number] = piece
    ids = sorted(pieces)
    own = [*map(pieces.__getitem__, ids)]
    kinds = np.zeros(max(ids, default=-1) + 1, np.uint8)
    sizes = np.zeros(len(kinds), np.int64)
    kinds[ids] = _OF_MODEL
    kinds[[token.id for token in added if token.id in pieces]] = _ADDED
    sizes[ids] = [*map(len, own)]
    flat = np.frombuffer(b"".join(own), np.uint8)
    return TokenBytes(flat, offsets_of(sizes), kinds, spaces, spacing)


def _byte_level(vocabulary: dict[str, int]) -> dict[int, bytes]:
    """The bytes that the characters of each token stand for, of those where they all do, by id."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's choice
    hidden = [byte for byte in range(256) if byte not in shown]
    none = 256
    table = np.full(256 + len(hidden) + 1, none, np.uint16)  # the last: all other characters
    table[shown], table[256 : 256 + len(hidden)] = shown, hidden
    # all at once: one by one they would take half a second of a large vocabulary
    codes = np.frombuffer("".join(vocabulary).encode("utf-32-le", "surrogatepass"), np.uint32)
    found = table[np.minimum(codes, len(table) - 1)]
    edges = offsets_of([*map(len, vocabulary)])
    wrong = set(np.searchsorted(edges, np.flatnonzero(found == none), side="right").tolist())
    flat = found.astype(np.uint8).tobytes()
    places = enumerate(zip(vocabulary.values(), pairwise(edges.tolist()), strict=True), 1)
    return {token: flat[begin:end] for i, (token, (begin, end)) in places if i not in wrong}


def _utf8(vocabulary: dict[str, int], *, fallback: bool) -> dict[int, bytes]:
    pieces = {token: piece.encode("utf-8", "surrogatepass") for piece, token in vocabulary.items()}
    if fallback:
        pieces |= {token: bytes([int(piece[3:5], 16)])
                   for piece, token in vocabulary.items() if _BYTE.fullmatch(piece)}  # fmt: skip
    return pieces


def _spaces(document: TokenizerJson, *, byte_level: bool) -> tuple[bool | None, int]:
    """`spaces` and `spacing`; None where a text changes in other ways, too."""
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
    """The pieces of a part of a tokenizer.json: of a sequence, all that is inside."""
    if not isinstance(part, dict):
        return []
    if part.get("type") != "Sequence":
        return [part]
    inner = part.get("pretokenizers") or part.get("normalizers") or []
    return [piece for item in inner for piece in _parts(item)]


def mark_trained(
    known: TokenBytes,
    texts: list[str],
    ids: UInt32,
    offsets: Int64,
    spans: Spans,
    exact: ReferenceEngine | None,
) -> UInt8:
    """uint8[T]: 1 for every token that holds a byte of a span, 2 where it begins before that."""
    trained, certain = np.zeros(len(ids), np.uint8), np.zeros(len(texts), np.uint8)
    if len(known.kinds):
        encoded = [text.encode() for text in texts]  # in UTF-8, end to end
        text = np.frombuffer(b"".join(encoded) or b"\0", np.uint8)
        text_offsets = offsets_of([*map(len, encoded)])
        kernels.mark_trained(
            ids, offsets, known.pieces, known.offsets, known.kinds, known.spaces, known.spacing,
            text, text_offsets, spans.offsets, spans.begin, spans.end, trained, certain,
        )  # fmt: skip
    for i in np.flatnonzero(certain == 0).tolist():
        if exact is None:
            raise InternalError("the bytes of a text's tokens are not the text")
        tokens = slice(offsets[i], offsets[i + 1])
        exact_ids, _, places = exact.places([texts[i]])
        if not np.array_equal(exact_ids, ids[tokens]):
            raise engines_differ_on(texts[i])
        trained[tokens] = by_places(places, texts[i], spans, i)
    return trained


def by_places(places: Int64, text: str, spans: Spans, number: int) -> UInt8:
    """Mark trained tokens of the text of this number, whose tokens have the characters
    places[:, 0]..places[:, 1], int64[T, 2].
    """
    own = slice(spans.offsets[number], spans.offsets[number + 1])
    begin, end, (starts, stops) = spans.begin[own], spans.end[own], places.T
    if not text.isascii():
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        widths = 1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000)
        byte_of = np.concatenate([[0], np.cumsum(widths)])
        starts, stops = byte_of[starts], byte_of[stops]
    first = np.searchsorted(end, starts, side="right")  # the span that ends after the token begins
    begins = np.append(begin, np.iinfo(np.int64).max)[first]
    flags: UInt8 = ((begins < stops) & (stops > starts)).astype(np.uint8)
    flags += flags * (starts < begins)
    return flags
