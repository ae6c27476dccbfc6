"""Find special tokens in the content of records, such as "<|im_end|>" in a user's question.

Tokenizers make real special tokens of them, wherever the characters came from. With
`--special-tokens-in-text keep` they are counted, with `error` the record is bad. Special tokens
that a chat template writes do not count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from os.path import commonprefix
from typing import Any

import msgspec

from packer_cli._kernels.texts import may_hold

SPELLED_OUT_TIP = "see --special-tokens-in-text, or use --on-error skip"


class SpecialToken(msgspec.Struct, frozen=True):
    """An added token of a tokenizer.json; most are special.

    lstrip, rstrip  it takes the white space before or after it with it
    plain           it is found wherever a text has its content
    unknown         it also stands for texts that are not in the vocabulary
    """

    content: str
    id: int = 0
    special: bool = False
    single_word: bool = False
    normalized: bool = False
    lstrip: bool = False
    rstrip: bool = False
    plain: bool = True
    unknown: bool = False


@dataclass(frozen=True)
class Specials:
    """Special tokens of a tokenizer, and the policy for those in records: "keep" or "error"."""

    tokens: tuple[SpecialToken, ...] = ()
    policy: str = "keep"

    def in_text(self, text: str) -> str | None:
        """Return the first special token in a text; None if it has none."""
        match = self._contents.search(text) if self.tokens else None
        return match and match.group()

    def may_be_in(self, value: Any) -> bool:
        """Tell quickly whether a record's fields may have special tokens; False is certain."""
        return bool(self.tokens) and may_hold(value, self._common)

    def beside(self, cut: int, text: str) -> int:
        """Return the place of a cut in a text, moved before a special token that it would split."""
        if not self.tokens:
            return cut
        longest = len(self._longest_first[0].content)
        begin = max(cut - longest, 0)
        for match in self._contents.finditer(text, begin, cut + longest):
            if match.start() < cut < match.end():
                return match.start()
        return cut

    def in_record(self, value: Any) -> list[str]:
        """Return all special tokens in the strings of a record's fields, names of fields aside."""
        if not self.tokens:
            return []
        if isinstance(value, str):
            return self._contents.findall(value)
        if isinstance(value, dict):
            value = value.values()
        elif not isinstance(value, list | tuple):
            return []
        return [token for item in value for token in self.in_record(item)]

    @cached_property
    def _longest_first(self) -> list[SpecialToken]:
        return sorted(self.tokens, key=lambda token: -len(token.content))

    @cached_property
    def _contents(self) -> re.Pattern[str]:
        return re.compile("|".join(re.escape(token.content) for token in self._longest_first))

    @cached_property
    def _common(self) -> str:
        """The beginning that all special tokens share."""
        return commonprefix([token.content for token in self.tokens])  # noqa: RUF071 of strings


NO_SPECIALS = Specials()


def spelled_out(token: str) -> str:
    """Return the reason why a record is bad."""
    return f"its content spells out the special token {token!r}"
