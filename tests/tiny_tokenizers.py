"""Tiny tokenizers, trained here, so that tests need no download.

Each function gives the contents of a tokenizer.json as a dict, for tests to change; `save`
writes a tokenizer folder. Ids of the specials are in the constants.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

Json = dict[str, Any]

BOS, EOS, UNKNOWN = "<s>", "</s>", "<unk>"
BOS_ID, EOS_ID = 0, 1
_CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 1234 o'clock; don't   panic!\n",
    "def f(x):\n    return {'a': [1, 2]}  # ok\n\n\tpass\n",
    "naïve café, Привет, мир. 你好，世界。 日本語のテキスト 한국어 العربية 👍🏽\n",
] * 4


def _trained(make: Callable[[], Tokenizer]) -> Callable[[], Json]:
    """Train once; give every caller its own copy to change."""
    made = cache(lambda: json.loads(make().to_str()))

    @wraps(make)
    def fresh() -> Json:
        return copy.deepcopy(made())

    return fresh


@_trained
def byte_level() -> Tokenizer:
    """Byte-level BPE as in gpt2: both engines load it, any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[BOS, EOS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


@_trained
def sentencepiece() -> Tokenizer:
    """SentencePiece-style BPE with byte fallback, as in mistral_v3."""
    fallback = {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    letters = sorted(set("".join(_CORPUS).replace(" ", "▁")) - {"\n", "\t"})
    vocabulary = {BOS: BOS_ID, EOS: EOS_ID, UNKNOWN: 2, **fallback}
    vocabulary |= {letter: len(vocabulary) + i for i, letter in enumerate(letters)}
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("o", "n"), ("▁", "▁")]
    vocabulary |= {a + b: len(vocabulary) + i for i, (a, b) in enumerate(merges)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=UNKNOWN, byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.add_special_tokens([BOS, EOS, UNKNOWN])
    return tokenizer


@_trained
def gemma() -> Tokenizer:
    """As gemma3: no space before a text, and added tokens of several "▁", which merges make too."""
    document = sentencepiece()
    document["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    document["pre_tokenizer"] = {
        "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious",
        "invert": False,
    }  # fmt: skip
    document["model"]["merges"].append(["▁▁", "▁▁"])
    for content in ("▁▁", "▁▁▁▁", "\n\n", "<start_of_turn>", "<end_of_turn>"):
        token_id = document["model"]["vocab"].get(content, len(document["model"]["vocab"]))
        with_added_token(document, content, token_id, special="turn" in content)
    parts = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"},
    ]  # fmt: skip
    document["decoder"] = {"type": "Sequence", "decoders": parts}
    return Tokenizer.from_str(json.dumps(document))


@_trained
def metaspace() -> Tokenizer:
    """As new exports of llama: the space before a text, and only there, by the pre-tokenizer."""
    document = sentencepiece()
    document["normalizer"] = None
    document["pre_tokenizer"] = {
        "type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False,
    }  # fmt: skip
    return Tokenizer.from_str(json.dumps(document))


@_trained
def unigram() -> Tokenizer:
    """Unigram as in t5: only the reference engine loads it."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=[BOS, EOS, UNKNOWN], unk_token=UNKNOWN, show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


@_trained
def letters() -> Tokenizer:
    """Knows x, y and z only; whatever else is in a text is left out, perhaps all of it."""
    vocabulary = {BOS: BOS_ID, EOS: EOS_ID, "x": 2, "y": 3, "z": 4}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens([BOS, EOS])
    return tokenizer


def with_template(document: Json, *template: str) -> Json:
    """Make the post-processor put specials around a document: ("<s>", "A") or ("A", "</s>")."""

    def item(name: str) -> Json:
        kind = "Sequence" if name == "A" else "SpecialToken"
        return {kind: {"id": name, "type_id": 0}}

    specials = {name for name in template if name != "A"}
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [item(name) for name in template],
        "pair": [item("A"), {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            name: {"id": name, "ids": [id_of(document, name)], "tokens": [name]}
            for name in specials
        },
    }
    return document


def with_added_token(document: Json, content: str, token_id: int, **flags: bool) -> Json:
    """Add a token under any id; `flags`: single_word, lstrip, rstrip, normalized, special."""
    token = {
        "id": token_id, "content": content, "single_word": False, "lstrip": False,
        "rstrip": False, "normalized": False, "special": True,
    }  # fmt: skip
    document["model"]["vocab"][content] = token_id
    document["added_tokens"].append(token | flags)
    return document


def id_of(document: Json, content: str) -> int:
    """The id of an added token."""
    return next(t["id"] for t in document["added_tokens"] if t["content"] == content)


def save(folder: Path, document: Json, **companions: Json) -> Path:
    """Write tokenizer.json, and for each keyword `name={...}` a file name.json beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {"tokenizer": document, **companions}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
