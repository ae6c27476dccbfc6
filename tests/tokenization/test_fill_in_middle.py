"""--fim-rate: texts put into another order, of which nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers as tiny
from support import assert_error, check_directory, packer, recover_documents, succeeds
from tokenizers import Tokenizer

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
TEXTS = [
    f"def f{number}(x):\n    return {{'a': [{number}, 2]}}  # naïve café, Привет 👍🏽\n"
    * (number % 7)
    for number in range(300)
]
_Tokens = Callable[..., Path]


@pytest.fixture
def tokenizer(folder: Path) -> _Tokens:
    """Makes a byte-level tokenizer with three more tokens, and the input `texts.jsonl`."""
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (folder / "texts.jsonl").write_text("\n".join(lines) + "\n")

    def make(tokens: tuple[str, ...] = QWEN, **flags: bool) -> Path:
        document = tiny.byte_level()
        for number, content in enumerate(tokens):
            tiny.with_added_token(document, content, 1000 + number, **flags)
        return tiny.save(folder / "tok", document, tokenizer_config={"eos_token": tiny.EOS})

    return make


@cache
def loaded(path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(path / "tokenizer.json"))


def parts_of(ids: list[int], path: Path, tokens: tuple[str, ...] = QWEN) -> list[str] | None:
    """Beginning, middle and end of a document; None for one in its own order. `[middle, end]` of
    one whose suffix is first.
    """
    known = loaded(path)
    prefix, suffix, middle = (known.token_to_id(token) for token in tokens)
    if prefix not in ids:
        assert suffix not in ids
        assert middle not in ids
        return None
    assert [one for one in ids if one in (prefix, suffix, middle)] == [prefix, suffix, middle]
    first, second = ids.index(suffix), ids.index(middle)
    assert ids[0] == prefix
    cut = ids[1:first], ids[second + 1 :], ids[first + 1 : second]
    return [known.decode(part, skip_special_tokens=False) for part in cut]


def pack(*arguments: object, out: str = "out") -> dict[str, Any]:
    """Pack, check the result, give its manifest."""
    succeeds("pack", *arguments, "-q", "--overwrite", "-o", out)
    return check_directory(out)


def documents(directory: str = "out") -> dict[int, list[int]]:
    """Tokens by the number of their line, without EOS."""
    return {position: ids.tolist()[:-1] for (_, position), ids in
            recover_documents(directory).items()}  # fmt: skip


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("backend", ["auto", "tokenizers"])
def test_every_text_is_whole_and_some_are_rearranged(
    tokenizer: _Tokens, special: bool, backend: str
) -> None:
    path = tokenizer(special=special)
    options = ["-l", 4096, "-t", path, "--tokenizer-backend", backend, "--overlong", "drop"]
    manifest = pack("texts.jsonl", *options, "--fim-rate", "50%")
    known = loaded(path)
    lines = Path("texts.jsonl").read_bytes().splitlines(keepends=True)
    begins = [sum(map(len, lines[:number])) for number in range(len(lines))]
    rearranged = 0
    for position, ids in documents().items():
        text = TEXTS[begins.index(position)]
        parts = parts_of(ids, path)
        rearranged += parts is not None
        whole = known.decode(ids, skip_special_tokens=False) if parts is None else "".join(parts)
        assert whole == text
    filled = sum(map(bool, TEXTS))
    assert manifest["fim_documents"] == rearranged
    assert 0.4 * filled < rearranged < 0.6 * filled
    assert manifest["special_tokens_in_text"] == 0
    assert manifest["empty_documents"] == len(TEXTS) - filled
    succeeds("verify", "out", "--against-inputs", "--sample", "all")


def test_the_share_that_has_the_suffix_first(tokenizer: _Tokens) -> None:
    path = tokenizer()
    options = ["-l", 4096, "-t", path, "--fim-rate", 1, "--overlong", "drop"]
    for share in (0, 0.3, 1):
        pack("texts.jsonl", *options, "--fim-spm-rate", share)
        cut = [parts_of(ids, path) for ids in documents().values()]
        assert all(parts is not None for parts in cut)
        first = sum(1 for parts in cut if parts and parts[0]) / len(cut)
        # of a text that is cut at its very beginning nothing tells
        assert first == 0 if share == 1 else abs(first - 1 + share) < 0.1


def test_a_text_is_the_same_document_wherever_it_is(tokenizer: _Tokens) -> None:
    path = tokenizer()
    options = ["-l", 4096, "-t", path, "--fim-rate", 0.5, "--overlong", "drop"]
    pack("texts.jsonl", *options)
    lines = Path("texts.jsonl").read_text().splitlines()
    Path("turned.jsonl").write_text("\n".join(reversed(lines)))
    pack("turned.jsonl", *options, "--unit-bytes", "2k", "--workers", 1, out="turned")
    assert sorted(documents().values()) == sorted(documents("turned").values())


def test_tokenized_once_and_packed(tokenizer: _Tokens) -> None:
    options = ["-t", tokenizer(), "--fim-rate", 0.5]
    succeeds("tokenize", "texts.jsonl", *options, "-o", "tokens")
    manifest = json.loads(Path("tokens/manifest.json").read_text())
    raw = pack("texts.jsonl", "-l", 512, *options)
    assert manifest["fim_documents"] == raw["fim_documents"] > 0
    pack("tokens", "-l", 512, out="rows")
    assert sorted(documents("rows").values()) == sorted(documents().values())
    assert "put into another order" in packer("stats", "out").stdout


def test_special_tokens_that_a_text_spells_out(tokenizer: _Tokens) -> None:
    path = tokenizer()
    Path("texts.jsonl").write_text(json.dumps({"text": "a</s>b" * 20}) + "\n")
    manifest = pack("texts.jsonl", "-l", 4096, "-t", path, "--fim-rate", 1)
    (ids,) = documents().values()
    assert manifest["special_tokens_in_text"] == ids.count(tiny.EOS_ID) == 20
    parts = parts_of(ids, path)
    assert parts is not None
    assert "".join(parts) == "a</s>b" * 20


def test_refused(tokenizer: _Tokens) -> None:
    result = packer("pack", "texts.jsonl", "-l", 512, "-o", "out", "-t", "bytes", "--fim-rate", 1)
    assert_error(result, 2, "tokenizer bytes", "found none that packer knows")
    assert "add tokens such as <|fim_prefix|>, <|fim_suffix|>, <|fim_middle|>" in result.stderr
    assert not Path("out").exists()
    Path("texts.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    result = packer("pack", "texts.jsonl", "-l", 512, "-t", tokenizer(), "--fim-rate", 1)
    assert_error(result, 2, "--fim-rate", "prompt-completion")


@pytest.mark.parametrize("text", ["a<s>b{}", "{}<s>", "<s>{}", "<s><s>", "a <s> <s>{} b"])
def test_no_special_token_is_cut_in_two(tokenizer: _Tokens, text: str) -> None:
    path, numbers = tokenizer(), range(40 if "{}" in text else 1)
    texts = [text.format(number) for number in numbers]
    Path("texts.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    manifest = pack("texts.jsonl", "-l", 4096, "-t", path, "--fim-rate", 1)
    cut = [parts_of(ids, path) for _, ids in sorted(documents().items())]
    assert ["".join(parts or []) for parts in cut] == texts
    assert manifest["special_tokens_in_text"] == text.count(tiny.BOS) * len(texts)


@pytest.mark.parametrize(
    ("flag", "special"), [("lstrip", True), ("rstrip", False), ("single_word", True)]
)
def test_tokens_that_would_not_leave_texts_whole_are_refused(
    tokenizer: _Tokens, flag: str, special: bool
) -> None:
    """They take white space with them, or are not found in the middle of a word."""
    path = tokenizer(special=special, **{flag: True})
    result = packer("pack", "texts.jsonl", "-l", 512, "-o", "out", "-t", path, "--fim-rate", 1)
    assert_error(result, 2, "'<|fim_prefix|>' of tokenizer", "takes white space with it")
    assert not Path("out").exists()


@pytest.mark.parametrize("normalizer", [None, {"type": "Sequence", "normalizers": []}])
def test_tokens_in_normalized_text(folder: Path, normalizer: Any) -> None:
    """As DeepSeek has them, whose normalizer does nothing; one that does may hide tokens."""
    document = tiny.byte_level()
    for number, content in enumerate(QWEN):
        tiny.with_added_token(document, content, 1000 + number, normalized=True, special=False)
    Path("texts.jsonl").write_text(json.dumps({"text": TEXTS[3]}))
    options = ["-l", 4096, "-t", folder / "tok", "--fim-rate", 1]
    tiny.save(folder / "tok", document | {"normalizer": normalizer}, tokenizer_config={
        "eos_token": tiny.EOS})  # fmt: skip
    loaded.cache_clear()
    pack("texts.jsonl", *options)
    (ids,) = documents().values()
    assert "".join(parts_of(ids, folder / "tok") or []) == TEXTS[3]
    tiny.save(folder / "tok", document | {"normalizer": {"type": "Prepend", "prepend": "_"}})
    assert_error(packer("pack", "texts.jsonl", *options, "-o", "other"), 2, "in normalized text")


@pytest.mark.parametrize("special", [True, False])
def test_a_text_that_has_the_tokens_itself_stays_as_it_is(
    tokenizer: _Tokens, special: bool
) -> None:
    """As one does that was rearranged before."""
    texts = ["".join(f"{token}some text" for token in QWEN), "a" + QWEN[2] + "b", "untouched"]
    path = tokenizer(special=special)
    Path("texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    manifest = pack("texts.jsonl", "-l", 4096, "-t", path, "--fim-rate", 1)
    *own, other = (ids for _, ids in sorted(documents().items()))
    loaded.cache_clear()
    assert [loaded(path).decode(ids, skip_special_tokens=False) for ids in own] == texts[:2]
    assert "".join(parts_of(other, path) or []) == texts[2]
    assert manifest["fim_documents"] == 1
    assert manifest["special_tokens_in_text"] == (4 if special else 0)
