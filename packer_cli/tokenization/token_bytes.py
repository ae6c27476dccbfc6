"""How many bytes of a text each token stands for: what maps spans of a text to its tokens.

Tokens lie end to end in their text, so their lengths give their places, at the fast engine's
speed. Where lengths do not add up to the text (a token swallowed white space) the reference engine
gives the offsets of that one document. So it does where they could add up by chance: a normalizer
that makes one character longer and another shorter, an unknown token that stands for any text, a
model that writes more than it read, as WordPiece does.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from packer_cli._kernels import marking
from packer_cli.errors import InternalError
from packer_cli.records import Int32, Int64, Spans, UInt8, UInt32

_SPACE = "▁"  # SentencePiece's, U+2581
_ANY_TEXT = -(1 << 30)  # of an unknown token: no text is that long
_SPACES_ONLY = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_Offsets = tuple[list[int], list[tuple[int, int]]]


class OffsetEngine(Protocol):
    """An engine that knows its tokens' offsets."""

    def offsets(self, text: str) -> _Offsets:
        """(ids, (first character, end) of each token) of a text, without special tokens."""


@dataclass(frozen=True)
class TokenBytes:
    """As `marking.mark_trained` takes them; `lengths` is empty where they are not known.

    `normal`: which texts the normalizer leaves as long as they are: all, those that are in
    normal form C already, or those of ASCII alone.
    """

    lengths: Int32
    spaced: bool = False
    normal: Literal["all", "NFC", "ASCII"] = "all"

    def size(self, text: str) -> int:
        """Bytes of a text; -1 where lengths of tokens say nothing of it."""
        if text.isascii():
            return len(text)
        if self.normal == "ASCII":
            return -1
        if self.normal == "NFC" and not unicodedata.is_normalized("NFC", text):
            return -1
        return len(text.encode())


def plain_bytes() -> TokenBytes:
    """Of the built-in bytes tokenizer."""
    return TokenBytes(np.ones(256, np.int32))


def token_bytes(tokenizer_json: bytes) -> TokenBytes:
    """The lengths for byte-level and SentencePiece-style BPE."""
    document: dict[str, Any] = msgspec.json.decode(tokenizer_json)
    model = document["model"]
    vocabulary = model.get("vocab")
    # old files do not name the type of BPE models, which alone have merges
    is_bpe = model.get("type", "BPE") == "BPE" and "merges" in model
    affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    if not isinstance(vocabulary, dict) or not is_bpe or affixes:
        return TokenBytes(np.zeros(0, np.int32))
    is_byte_level = "ByteLevel" in _kinds(document.get("pre_tokenizer"))
    added = document.get("added_tokens") or []
    highest = max([*vocabulary.values(), *(token["id"] for token in added)], default=-1)
    lengths = np.zeros(highest + 1, np.int32)
    ids = np.fromiter(vocabulary.values(), np.int64, count=len(vocabulary))
    measure = len if is_byte_level else _piece_bytes  # a character there stands for a byte
    lengths[ids] = np.fromiter(map(measure, vocabulary), np.int32, count=len(vocabulary))
    for token in added:
        lengths[token["id"]] = -len(token["content"].encode()) - 1
    if model.get("unk_token") in vocabulary:
        lengths[vocabulary[model["unk_token"]]] = _ANY_TEXT
    return TokenBytes(lengths, _prepends_space(document), _normal(document.get("normalizer")))


def _normal(normalizer: Any) -> Literal["all", "NFC", "ASCII"]:
    """As in TokenBytes."""
    parts = _parts(normalizer)
    kinds = {
        part.get("type") for part in parts if part.get("type") != "Prepend" and part != _SPACES_ONLY
    }
    if not kinds:
        return "all"
    return "NFC" if kinds == {"NFC"} else "ASCII"


def _piece_bytes(piece: str) -> int:
    if len(piece) == 6 and piece.startswith("<0x"):
        return 1
    return len(piece.replace(_SPACE, " ").encode("utf-8", "surrogatepass"))


def _parts(part: Any) -> list[dict[str, Any]]:
    """What a part of a tokenizer.json is made of: of a sequence, what is inside."""
    if not isinstance(part, dict):
        return []
    if part.get("type") != "Sequence":
        return [part]
    inner = part.get("pretokenizers") or part.get("normalizers") or []
    return [piece for item in inner for piece in _parts(item)]


def _kinds(part: Any) -> list[str]:
    return [piece.get("type", "") for piece in _parts(part)]


def _prepends_space(document: dict[str, Any]) -> bool:
    metaspace = document.get("pre_tokenizer")
    if isinstance(metaspace, dict) and metaspace.get("type") == "Metaspace":
        return bool(metaspace.get("prepend_scheme", "always") == "always")
    return "Prepend" in _kinds(document.get("normalizer"))


def mark_trained(
    known: TokenBytes,
    texts: list[str],
    ids: UInt32,
    offsets: Int64,
    spans: Spans,
    exact: OffsetEngine | None,
) -> UInt8:
    """uint8[T]: 1 for every token that holds at least one byte of a span."""
    trained = np.zeros(len(ids), np.uint8)
    certain = np.zeros(len(texts), np.uint8)
    sizes = np.fromiter(map(known.size, texts), np.int64, count=len(texts))
    marking.mark_trained(
        ids, offsets, known.lengths, known.spaced, sizes,
        spans.offsets, spans.begin, spans.end, trained, certain,
    )  # fmt: skip
    for i in np.flatnonzero(certain == 0):
        if exact is None:
            raise InternalError("the bytes of a text's tokens do not add up to the text")
        tokens = slice(offsets[i], offsets[i + 1])
        own = slice(spans.offsets[i], spans.offsets[i + 1])
        trained[tokens] = _by_offsets(
            exact.offsets(texts[i]), ids[tokens], texts[i], spans.begin[own], spans.end[own]
        )
    return trained


def _by_offsets(found: _Offsets, ids: UInt32, text: str, begin: Int64, end: Int64) -> Any:
    exact_ids, places = found
    if exact_ids != ids.tolist():
        raise InternalError(
            f"the engines gigatoken and tokenizers differ on the text {text[:80]!r}",
            "run again with --tokenizer-backend tokenizers, and please report the text",
        )
    data = text.encode()
    starts, stops = np.array(places, np.int64).reshape(-1, 2).T
    flags = np.zeros(len(ids), bool)
    for a, b in zip(begin, end, strict=True):
        first, last = len(data[:a].decode()), len(data[:b].decode())
        flags |= (starts < last) & (stops > first) & (stops > starts)
    return flags
