"""Decode tokens with the tokenizer that a packed directory keeps. Loading it takes up to 0.4 s."""

from __future__ import annotations

import hashlib
from itertools import groupby
from pathlib import Path

from packer_cli.errors import DataError, UsageError
from packer_cli.result.layout import TOKENIZER
from packer_cli.result.manifest import TokenizerInfo
from packer_cli.storage import read_bytes
from packer_cli.tokenization.engines import BytesEngine, ReferenceEngine

_TIP = "show token ids with --ids, or copy the tokenizer that packed the data there"


def load_decoder(directory: Path, tokenizer: TokenizerInfo | None) -> Decoder | str:
    """Return the decoder for the manifest's `tokenizer`, or why there is none.

    Raises DataError if tokenizer.json is not the one that packed the data.
    """
    if tokenizer is None:
        return "the data came as input_ids, without a tokenizer"
    if not tokenizer.sha256:
        return BytesDecoder()
    path = directory / TOKENIZER
    try:
        content = read_bytes(path)
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


class BytesDecoder:
    """Decoder of the built-in bytes tokenizer."""

    _names = {BytesEngine.EOS: "<eos>", BytesEngine.PAD: "<pad>"}  # noqa: RUF012 a constant

    def special(self, token: int) -> str | None:
        """Return the name of a token that stands for no text, or does not exist; else None."""
        return None if 0 <= token < 256 else self._names.get(token, f"<id {token}>")

    def decode(self, ids: list[int], before: int | None = None) -> str:
        """Return the text of ids that are not special and follow the token `before`.

        An incomplete character becomes U+FFFD.
        """
        return bytes(ids).decode(errors="replace")


class ReferenceDecoder:
    """Decoder of Hugging Face tokenizers."""

    def __init__(self, engine: ReferenceEngine, special: set[int | None]) -> None:
        self._tokenizer = engine.tokenizer
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = special | {token for token, about in added.items() if about.special}
        # id -> byte of tokens like <0x41>, where those mean bytes
        of_byte = {self._tokenizer.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
        letter = self._tokenizer.token_to_id("<0x41>")
        means_bytes = letter is not None and self._decode([letter]) == "A"
        self._bytes = {token: byte for token, byte in of_byte.items() if means_bytes}

    def special(self, token: int) -> str | None:
        """Return what `BytesDecoder.special` does."""
        name = self._name(token)
        if name is None:
            return f"<id {token}>"  # the library would skip it
        return name if token in self._special else None

    def decode(self, ids: list[int], before: int | None = None) -> str:
        """Return what `BytesDecoder.decode` does."""
        text = ""
        for is_bytes, run in groupby(ids, key=self._bytes.__contains__):
            tokens = list(run)
            if is_bytes:  # the library loses all of them when one character is not whole
                text += bytes(map(self._bytes.__getitem__, tokens)).decode(errors="replace")
            else:
                # some decoders drop the space that begins a text; this is not where one begins
                lead = [] if before is None or self._name(before) is None else [before]
                context, whole = self._decode(lead), self._decode([*lead, *tokens])
                is_after = whole.startswith(context)
                text += whole[len(context) :] if is_after else self._decode(tokens)
            before = tokens[-1]
        return text

    def _name(self, token: int) -> str | None:
        """Return the token of an id, if there is one; the library takes only uint32."""
        name: str | None = self._tokenizer.id_to_token(token) if 0 <= token < 1 << 32 else None
        return name

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


Decoder = BytesDecoder | ReferenceDecoder
