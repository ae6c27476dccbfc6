"""Tokenizers that transformers 5 loads otherwise than their tokenizer.json says.

AutoTokenizer takes the vocabulary of some `tokenizer_class`es and builds the rest itself, so a
model trained on packer's rows may get other tokens in use. `packer tokenizer DIR --check`
compares the two; this module has what is known without transformers, which no run imports.
"""

from __future__ import annotations

from typing import Any

import msgspec

from packer_cli.result.layout import TOKENIZER_CONFIG
from packer_cli.tokenization.locate import TokenizerFiles

Json = dict[str, Any]


class _Parts(msgspec.Struct):
    """Parts of tokenizer.json; the vocabulary is skipped."""

    normalizer: Json | None = None
    pre_tokenizer: Json | None = None


class _Config(msgspec.Struct):
    tokenizer_class: str | None = None


def _is_llama(parts: _Parts) -> bool:
    pre_tokenizer = parts.pre_tokenizer or {}
    return not parts.normalizer and pre_tokenizer.get("prepend_scheme") == "first"


def _is_gpt2(parts: _Parts) -> bool:
    pre_tokenizer = parts.pre_tokenizer or {}
    return (
        not parts.normalizer
        and pre_tokenizer.get("type") == "ByteLevel"
        and pre_tokenizer.get("use_regex", True)
    )


# tokenizer_class, but for "Fast": whether a tokenizer.json has what transformers 5 builds for it
_BUILT = {"LlamaTokenizer": _is_llama, "GPT2Tokenizer": _is_gpt2}


def rebuilt_otherwise(files: TokenizerFiles) -> str:
    """Why AutoTokenizer gives other tokens for some texts; "" where nothing says so."""
    content = files.companions.get(TOKENIZER_CONFIG)
    try:
        config = msgspec.json.decode(content or b"{}", type=_Config)
        parts = msgspec.json.decode(files.json, type=_Parts)
    except msgspec.MsgspecError:
        return ""
    name = (config.tokenizer_class or "").removesuffix("Fast")
    if name not in _BUILT or _BUILT[name](parts):
        return ""
    return (
        f"transformers 5 builds a {name} otherwise than tokenizer.json says: AutoTokenizer gives "
        'other tokens for some texts, unless tokenizer_class is "PreTrainedTokenizerFast"'
    )
