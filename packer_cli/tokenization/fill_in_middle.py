"""Fill in the middle: texts put into another order, so that a model learns to write what belongs
between two parts.

    prefix first    PREFIX beginning SUFFIX end MIDDLE middle
    suffix first    PREFIX SUFFIX end MIDDLE beginning middle

As in Bavarian et al., "Efficient Training of Language Models to Fill in the Middle" (2022). A text
is cut at two characters before it becomes tokens. Its own content decides whether, how and where:
the same text is the same document in every run, unit and epoch.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from struct import unpack
from typing import NamedTuple

from packer_cli.errors import UsageError
from packer_cli.options.documents import DocumentConfig
from packer_cli.records import Records
from packer_cli.tokenization.locate import BYTES, TokenizerFiles
from packer_cli.tokenization.specials import Specials

# As written before the beginning, the end and the middle of a text, by which tokenizers.
_KNOWN = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    # DeepSeek, whose bars and blanks are no ASCII characters
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
)
_WHOLE = 1 << 64


class FillInMiddle(NamedTuple):
    """A way to rearrange texts.

    rate      the share of texts that are
    spm_rate  the share of these that have the suffix first
    tokens    what is written before the beginning, the end and the middle
    """

    rate: float
    spm_rate: float
    tokens: tuple[str, str, str]

    def parts(self, text: str, specials: Specials) -> list[tuple[str, str]] | None:
        """(token, what follows it) of a text in its new order; None where it stays as it is, as one
        does that has such tokens itself.
        """
        content = text.encode("utf-8", "surrogatepass")
        digest = blake2b(content, digest_size=32, person=b"packer fim").digest()
        whether, which, *cuts = unpack("<4Q", digest)
        if not text or whether >= self.rate * _WHOLE:
            return None
        if any(token in text for token in self.tokens):  # nobody could tell whose they are
            return None
        first, last = sorted(specials.beside(cut % (len(text) + 1), text) for cut in cuts)
        beginning, middle, end = text[:first], text[first:last], text[last:]
        if which < self.spm_rate * _WHOLE:
            beginning, middle = "", beginning + middle
        return list(zip(self.tokens, (beginning, end, middle), strict=True))

    def rearranged(self, records: Records, specials: Specials) -> tuple[Records, int]:
        """The records with some of their texts rearranged, and how many. The tokens written into
        them are no special tokens of their own content.
        """
        texts, number = [*(records.texts or ())], 0
        for i, text in enumerate(texts):
            if (parts := self.parts(text, specials)) is None:
                continue
            texts[i], number = "".join(token + after for token, after in parts), number + 1
        return replace(records, texts=texts), number

    def written(self, specials: Specials) -> int:
        """The number of special tokens that are written into each text that is rearranged."""
        return len({token.content for token in specials.tokens}.intersection(self.tokens))


def fill_in_middle(config: DocumentConfig, files: TokenizerFiles | None) -> FillInMiddle | None:
    """The rearrangement that the options ask for; None for none. Raises UsageError where the
    tokenizer has no tokens for it, or such as would take white space of the text with them.
    """
    if not config.fim_rate:
        return None
    prefix, suffix, middle = tokens = _tokens(files)
    for one in files.added if files else ():
        if one.content in tokens and (one.lstrip or one.rstrip or not one.plain):
            raise UsageError(
                f"--fim-rate: {one.content!r} of tokenizer {files.source if files else ''} takes "
                "white space with it, or is only found as a whole word or in normalized text: "
                "texts would not stay whole",
                "set lstrip, rstrip, single_word and normalized of the token to false in "
                "tokenizer.json",
            )
    return FillInMiddle(config.fim_rate, config.fim_spm_rate, (prefix, suffix, middle))


def _tokens(files: TokenizerFiles | None) -> tuple[str, ...]:
    """The tokens of the tokenizer. Raises UsageError if it has none, or several such sets."""
    added = set(files.added_tokens) if files else set()
    name = files.source if files else BYTES
    known = [tokens for tokens in _KNOWN if added.issuperset(tokens)]
    if len(known) != 1:
        found = " and ".join(", ".join(tokens) for tokens in known) or "none that packer knows"
        raise UsageError(
            f"--fim-rate: needs three tokens of tokenizer {name}, for the beginning, the end and "
            f"the middle of a text; found {found}",
            f"use a tokenizer for code, or add tokens such as {', '.join(_KNOWN[0])} to its "
            "tokenizer.json",
        )
    return known[0]
