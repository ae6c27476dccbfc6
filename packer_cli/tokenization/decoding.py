"""Tokens back to text, with the tokenizer that a packed directory keeps."""

from __future__ import annotations

import hashlib
from itertools import groupby
from pathlib import Path
from typing import Protocol

from packer_cli.errors import DataError, UsageError
from packer_cli.result.layout import TOKENIZER
from packer_cli.result.manifest import Tokenizer
from packer_cli.tokenization.engines import BytesEngine, ReferenceEngine

_TIP = "show token ids with --ids, or copy the tokenizer that packed the data there"


class Decoder(Protocol):
    """What every decoder offers."""

    def special(self, token: int) -> str | None:
        """The name of a token that stands for no text, or of none at all; else None."""

    def decode(self, ids: list[int], before: int | None = None) -> str:
        """The text of ids that are not special and follow the token `before`.

        A character of which some bytes are missing becomes U+FFFD.
        """


def load_decoder(directory: Path, tokenizer: Tokenizer | None) -> Decoder | str:
    """The decoder for the manifest's `tokenizer`, or why there is none.

    Raises DataError when tokenizer.json is not the one that packed the data.
    """
    if tokenizer is None:
        return "the data came as input_ids, without a tokenizer"
    if not tokenizer.sha256:
        return BytesDecoder()
    path = directory / TOKENIZER
    try:
        if path.exists() and not path.is_file():
            return f"{path}: is not a regular file"
        content = path.read_bytes()
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}"
    digest = hashlib.sha256(content).hexdigest()
    if digest != tokenizer.sha256:
        raise DataError(
            f"{path}: its sha256 is {digest}, the manifest says {tokenizer.sha256}", _TIP
        )
    try:
        engine = ReferenceEngine(content)
    except UsageError as error:
        raise DataError(
            f"{path}: {error.message.removeprefix('tokenizer.json ')}", error.tip
        ) from error
    return ReferenceDecoder(engine, {tokenizer.bos_token_id, tokenizer.eos_token_id})


_NAMES = {BytesEngine.EOS: "<eos>", BytesEngine.PAD: "<pad>"}


class BytesDecoder:
    """Decodes for the built-in bytes tokenizer."""

    def special(self, token: int) -> str | None:
        return None if 0 <= token < 256 else _NAMES.get(token, f"<id {token}>")

    def decode(self, ids: list[int], before: int | None = None) -> str:
        return bytes(ids).decode(errors="replace")


class ReferenceDecoder:
    """Decodes with Hugging Face tokenizers."""

    def __init__(self, engine: ReferenceEngine, special: set[int | None]) -> None:
        self._tokenizer = engine.tokenizer
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = special | {token for token, about in added.items() if about.special}
        self._bytes = self._fallback_bytes()

    def special(self, token: int) -> str | None:
        name: str | None = self._tokenizer.id_to_token(token) if token >= 0 else None
        if name is None:
            return f"<id {token}>"  # the library would skip it
        return name if token in self._special else None

    def decode(self, ids: list[int], before: int | None = None) -> str:
        text = ""
        for is_bytes, run in groupby(ids, key=self._bytes.__contains__):
            tokens = list(run)
            if is_bytes:  # the library loses all of them when one character is not whole
                text += bytes(map(self._bytes.__getitem__, tokens)).decode(errors="replace")
            else:
                text += self._decode_after(before, tokens)
            before = tokens[-1]
        return text

    def _decode_after(self, before: int | None, ids: list[int]) -> str:
        """Some decoders drop the space that begins a text; this is not where one begins."""
        if before is not None and self._tokenizer.id_to_token(before) is not None:
            context, text = self._decode([before]), self._decode([before, *ids])
            if text.startswith(context):
                return text[len(context) :]
        return self._decode(ids)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def _fallback_bytes(self) -> dict[int, int]:
        """Id -> byte of tokens like <0x41>, where those mean bytes."""
        byte_of = {self._tokenizer.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
        letter = self._tokenizer.token_to_id("<0x41>")
        if letter is None or self._decode([letter]) != "A":
            return {}
        return {token: byte for token, byte in byte_of.items() if token is not None}
