"""Characters on which the engines differ go to the reference, all others once they are compared."""

from __future__ import annotations

import json
import tracemalloc
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny_tokenizers as tiny
from engine_pairs import as_json, as_lists, both_engines, packed_by
from support import contents, jsonl, packer
from tiny_tokenizers import EOS

from packer_cli.records import Int64, UInt32
from packer_cli.tokenization import tokenizer as tokenization
from packer_cli.tokenization.agreement import Samples, assigned_characters, in_contexts
from packer_cli.tokenization.compared import ComparedCharacters
from packer_cli.tokenization.engines import BytesEngine, FastEngine, ReferenceEngine
from packer_cli.tokenization.unsettled import ranges, with_unsettled

# How tokenizers cut texts into words: by the classes of characters
PATTERNS: dict[str, str | tuple[str, ...]] = {
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt-4o": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "deepseek-v3": (  # one after the other; the line ends are characters, not escapes
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
        "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*"
        "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ),
}


def cut_by(*patterns: str) -> tiny.Json:
    """Byte level, with a merge of what each cut decides."""
    document = tiny.byte_level()
    splits = [
        {"type": "Split", "pattern": {"Regex": one}, "behavior": "Isolated", "invert": False}
        for one in patterns
    ]
    last = document["pre_tokenizer"] | {"use_regex": False}
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*splits, last]}
    vocabulary, merges = document["model"]["vocab"], document["model"]["merges"]
    leads = [piece for piece in vocabulary if len(piece) == 1 and "\u00e0" <= piece <= "\u00f4"]
    ends = [chr(0x122 + i) for i in range(33)] + [chr(i) for i in range(0xA1, 0xC0)]
    for a, b in [*((x, y) for x in "xĠ1'" for y in leads), *((x, y) for x in ends for y in "'x1")]:
        if a in vocabulary and a + b not in vocabulary:
            vocabulary[a + b] = len(vocabulary)
            merges.append([a, b])
    return document


@pytest.mark.parametrize("name", PATTERNS)
def test_characters_that_unicode_versions_differ_on_go_to_the_reference(
    data: Path, name: str
) -> None:
    """Late in the input, where neither the start nor a sample would show them."""
    patterns = PATTERNS[name]
    document = cut_by(*([patterns] if isinstance(patterns, str) else patterns))
    tiny.save(data / "tok", document, tokenizer_config={"eos_token": EOS})
    FastEngine(as_json(document))  # it has a tokenizer of this kind
    new = [chr(code) for part in ranges() for code in part[:500]]
    new += ["\u088f", "\u20c1", "\U0001fae9"]
    texts = [in_contexts(c) for c in new if unicodedata.category(c) not in ("Cs", "Co")]
    texts += [" \u20c1", "\u20c1", "x \u20c1\n"]
    ordinary = ["the quick brown fox " * 20] * 500
    (data / "data.jsonl").write_bytes(jsonl(*ordinary, *texts, "the end é日"))
    assert packed_by("auto", "a") == packed_by("tokenizers", "b")
    manifest = json.loads(Path("a/manifest.json").read_bytes())
    assert manifest["documents"] == len(ordinary) + len(texts) + 1


def test_which_texts_are_unsettled() -> None:
    texts = [
        "",
        "plain",
        "é",
        "Привет",
        "日本語",
        "a\u088f",
        "👍",
        "👍\u0378",
        "x" * 5000 + "\u20c1",
        "\U0001fae9x",
    ]
    assert with_unsettled(texts).tolist() == [0, 0, 0, 0, 0, 1, 0, 1, 1, 1]


def test_every_unassigned_character_is_unsettled() -> None:
    """Of this Python's Unicode version, which is none of the future."""
    own = {chr(code) for part in ranges() for code in part}
    unassigned = {c for c in map(chr, range(0x110000)) if unicodedata.category(c) == "Cn"}
    assert unassigned <= own
    assert not own & set(assigned_characters())


class DiffersOnPhi(FastEngine):
    """On one character that no battery has, so that only its own comparison can show it."""

    def encode(self, texts: list[str]) -> tuple[UInt32, Int64]:
        return super().encode([text.replace("\u03d5", "p") for text in texts])


@pytest.mark.parametrize("workers", ["1", "3"])
def test_texts_with_a_character_that_engines_differ_on_go_to_the_reference(
    data: Path, monkeypatch: pytest.MonkeyPatch, workers: str
) -> None:
    """Once, late, in a long text: no sample meets it, and what is around it stays the engine's."""
    ordinary = ["the quick brown fox " * 20] * 500
    texts = [*ordinary, "Привет 日本語 " * 99 + "\u03d5", "\u03d6\u03d5 again", *ordinary]
    for name in ("data.jsonl", "more.jsonl"):
        (data / name).write_bytes(jsonl(*texts))
    command = ["pack", "data.jsonl", "more.jsonl", "-l", "64", "-t", "tok", "--workers", workers]
    expected = packer(*command, "-o", "a", "--tokenizer-backend", "tokenizers")
    monkeypatch.setattr(tokenization, "FastEngine", DiffersOnPhi)
    result = packer(*command, "-o", "b")
    assert (expected.exit_code, result.exit_code) == (0, 0)
    assert contents("b") == contents("a")
    assert result.stderr.count("texts with U+03D5 go to the slower tokenizers engine") == 1


def test_every_character_is_compared_before_a_text_with_it_is_trusted() -> None:
    fast, reference = both_engines(tiny.byte_level)
    shown: list[str] = []

    class Seen:
        name = "seen"

        def encode(self, texts: list[str]) -> tuple[UInt32, Int64]:
            shown.extend(texts)
            return reference.encode(texts)

    known = ComparedCharacters(fast, Seen(), notify=pytest.fail)
    assert known.untrusted(["plain", "caf\u00e9"]) == []
    assert shown == []  # Latin-1 is the start's
    texts = ["\u0416x", "plain", "\u65e5\U0001f44d\u0416", "\u20c1 \u0394"]
    assert known.untrusted(texts) == [3]
    assert set("\u0416\u65e5\U0001f44d\u0394") <= set("".join(shown))
    for one in "\u0416\u65e5\U0001f44d\u0394":
        assert in_contexts(one) in "".join(shown)
    assert in_contexts("\u20c1") not in "".join(shown)
    shown.clear()
    assert known.untrusted(texts) == [3]
    assert shown == []  # once is enough


def test_a_long_text_of_new_characters_is_searched_in_little_memory() -> None:
    text = "".join(map(chr, range(0x4E00, 0x5E00))) * 1000
    known = ComparedCharacters(BytesEngine(), BytesEngine(), notify=pytest.fail)
    tracemalloc.start()
    try:
        assert known.untrusted([text]) == []
        assert tracemalloc.get_traced_memory()[1] < 2 * len(text)  # less than the text itself
    finally:
        tracemalloc.stop()


def test_only_the_characters_that_differ_are_never_trusted() -> None:
    content = as_json(tiny.byte_level())
    told: list[str] = []
    known = ComparedCharacters(DiffersOnPhi(content), ReferenceEngine(content), told.append)
    greek = [chr(code) for code in range(0x370, 0x400) if unicodedata.category(chr(code)) != "Cn"]
    assert [greek[i] for i in known.untrusted(greek)] == ["\u03d5"]
    assert known.untrusted(["\u03d5", "x"]) == [0]
    assert len(told) == 1


def test_threads_compare_a_character_before_they_trust_it() -> None:
    content = as_json(tiny.byte_level())
    known = ComparedCharacters(DiffersOnPhi(content), ReferenceEngine(content), lambda line: None)
    batches = [[f"{chr(code)}x", "y", f"z{chr(code)}\u03d5"] for code in range(0x400, 0x500)] * 2
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(known.untrusted, batches)) == [[2]] * len(batches)


def test_samples_are_few_and_of_every_small_run() -> None:
    samples = Samples()
    small = [samples.of(["some words"]) for _ in range(4)]
    assert small == ["some words"] * 4
    large = [samples.of(["some words " * 100_000]) for _ in range(100)]
    assert sum(map(len, large)) < 100 * 1_100_000 / 8192
    assert set(map(len, large)) == {0, 512}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama3_1", "mistral_v3", "qwen3"])
def test_engines_agree_on_every_assigned_character(name: str) -> None:
    folder = Path(__file__).resolve().parents[3] / "shared" / "tokenizers" / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    content = (folder / "tokenizer.json").read_bytes()
    known = assigned_characters()
    texts = [in_contexts(known[i : i + 50]) for i in range(0, len(known), 50)]
    fast, reference = FastEngine(content), ReferenceEngine(content)
    assert as_lists(fast.encode(texts)) == as_lists(reference.encode(texts))
