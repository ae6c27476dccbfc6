"""Fill in the middle: put texts into another order, so that a model learns to write what belongs
between two parts.

    prefix first    PREFIX beginning SUFFIX end MIDDLE middle
    suffix first    PREFIX SUFFIX end MIDDLE beginning middle

It follows Bavarian et al., "Efficient Training of Language Models to Fill in the Middle" (2022). A
text is cut at two characters before it becomes tokens. A digest of the text decides whether, how
and where, so a text is the same document in every run, unit and epoch.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from struct import unpack
from typing import NamedTuple

from packer_cli.errors import UsageError
from packer_cli.options.documents import DocumentConfig
from packer_cli.records import Records
from packer_cli.tokenization.locate import BYTES, Specials, TokenizerFiles

# Tokens before the beginning, the end and the middle of a text.
_KNOWN = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    # DeepSeek, whose bars and blanks are not ASCII
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
)
_WHOLE = 1 << 64


class FillInMiddle(NamedTuple):
    """Options of the rearrangement.

    rate      share of texts that are rearranged
    spm_rate  share of these that have the suffix first
    tokens    texts before the beginning, the end and the middle
    """

    rate: float
    spm_rate: float
    tokens: tuple[str, str, str]

    def parts(self, text: str, specials: Specials) -> list[tuple[str, str]] | None:
        """Return (token, the text after it) in the new order; None if the text stays as it is."""
        content = text.encode("utf-8", "surrogatepass")
        digest = blake2b(content, digest_size=32, person=b"packer fim").digest()
        whether, which, *cuts = unpack("<4Q", digest)
        if not text or whether >= self.rate * _WHOLE:
            return None
        if any(token in text for token in self.tokens):  # they could not be told apart
            return None
        first, last = sorted(specials.beside(cut % (len(text) + 1), text) for cut in cuts)
        beginning, middle, end = text[:first], text[first:last], text[last:]
        if which < self.spm_rate * _WHOLE:
            beginning, middle = "", beginning + middle
        return list(zip(self.tokens, (beginning, end, middle), strict=True))

    def rearranged(self, records: Records, specials: Specials) -> tuple[Records, int]:
        """Rearrange texts of records. Returns the records and the number of rearranged texts."""
        texts, number = [*(records.texts or ())], 0
        for i, text in enumerate(texts):
            if (parts := self.parts(text, specials)) is None:
                continue
            texts[i], number = "".join(token + after for token, after in parts), number + 1
        return replace(records, texts=texts), number

    def written(self, specials: Specials) -> int:
        """Return how many special tokens are written into each rearranged text."""
        return len({token.content for token in specials.tokens}.intersection(self.tokens))


def fill_in_middle(config: DocumentConfig, files: TokenizerFiles | None) -> FillInMiddle | None:
    """Return the rearrangement that options require, if any. Raises UsageError."""
    if not config.fim_rate:
        return None
    prefix, suffix, middle = tokens = _tokens(files)
    for token in files.added if files else ():
        if token.content in tokens and (token.lstrip or token.rstrip or not token.plain):
            raise UsageError(
                f"--fim-rate: {token.content!r} of tokenizer {files.source if files else ''} takes "
                "white space with it, or is only found as a whole word or in normalized text: "
                "texts would not stay whole",
                "set lstrip, rstrip, single_word and normalized of the token to false in "
                "tokenizer.json",
            )
    return FillInMiddle(config.fim_rate, config.fim_spm_rate, (prefix, suffix, middle))


def _tokens(files: TokenizerFiles | None) -> tuple[str, ...]:
    """Return the tokens of the tokenizer. Raises UsageError unless it has one such set."""
    added = set(files.added_tokens) if files else set()
    name = files.source if files else BYTES
    known = [tokens for tokens in _KNOWN if added.issuperset(tokens)]
    if len(known) != 1:
        sets = " and ".join(", ".join(tokens) for tokens in known) or "none that packer knows"
        raise UsageError(
            f"--fim-rate: needs three tokens of tokenizer {name}, for the beginning, the end and "
            f"the middle of a text; found {sets}",
            f"use a tokenizer for code, or add tokens such as {', '.join(_KNOWN[0])} to its "
            "tokenizer.json",
        )
    return known[0]
