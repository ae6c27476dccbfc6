"""The engines: equal wherever both work, and the reference wherever they do not."""

from __future__ import annotations

import json
import shutil
import time
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import pytest
import tiny_tokenizers as tiny
from hypothesis import given
from hypothesis import strategies as st
from support import assert_error, check_directory, contents, jsonl, packer, succeeds
from tiny_tokenizers import EOS

from packer_cli.records import Int64, UInt32
from packer_cli.tokenization import engines
from packer_cli.tokenization import tokenizer as tokenization
from packer_cli.tokenization.engines import FastEngine, ReferenceEngine, _Growth
from packer_cli.tokenization.trust import (
    BATTERY,
    TrustedEngine,
    in_contexts,
    unsettled,
)

TRIGGER = "¤→¤"
MAKERS = (tiny.byte_level, tiny.sentencepiece)
PACK = ("pack", "data.jsonl", "-l", "64", "-t", "tok")


@pytest.fixture
def data(folder: Path) -> Path:
    """A tokenizer in tok, and data.jsonl with 40,000 characters without, then 300 with TRIGGER."""
    tiny.save(folder / "tok", tiny.byte_level(), tokenizer_config={"eos_token": EOS})
    texts = ["the quick brown fox " * 20] * 100 + [f"{TRIGGER} {i}" for i in range(300)]
    (folder / "data.jsonl").write_bytes(jsonl(*BATTERY, *texts))
    return folder


def as_json(document: tiny.Json) -> bytes:
    return json.dumps(document).encode()


def as_lists(encoded: tuple[UInt32, Int64]) -> list[list[int]]:
    ids, offsets = encoded
    assert (ids.dtype, offsets.dtype) == (np.uint32, np.int64)
    assert (offsets[0], offsets[-1]) == (0, len(ids))
    return [part.tolist() for part in np.split(ids, offsets[1:-1])] if len(offsets) > 1 else []


@cache
def both_engines(make: Callable[[], tiny.Json]) -> tuple[FastEngine, ReferenceEngine]:
    return FastEngine(as_json(make())), ReferenceEngine(as_json(make()))


def packed_by(backend: str, name: str) -> dict[str, bytes]:
    succeeds(*PACK, "-o", name, "--tokenizer-backend", backend)
    check_directory(name)
    return contents(name)


# text, with what tokenizers treat specially overrepresented
TEXTS = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"])),
        st.text(st.sampled_from("aeht '.12\n\t\r é日👍\u0301\u2028\u00a0▁Ġ")),
        st.lists(st.sampled_from([EOS, "<s>", "the", " ", "\n", "<0x41>"])).map("".join),
    ),
    max_size=8,
)


@pytest.mark.parametrize("make", MAKERS)
@given(texts=TEXTS)
def test_fast_and_reference_are_equal(make: Callable[[], tiny.Json], texts: list[str]) -> None:
    fast, reference = both_engines(make)
    assert as_lists(fast.encode(texts)) == as_lists(reference.encode(texts))


def test_renewal_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [[text, f"{i} {text}"] for i in range(20) for text in BATTERY]
    fast = FastEngine(as_json(tiny.byte_level()))
    expected = [as_lists(fast.encode(batch)) for batch in batches]
    loads = []
    load = FastEngine._load
    monkeypatch.setattr(engines, "resident", time.perf_counter_ns)  # ever more
    for name, value in {"SETTLED": 0, "MOST_BYTES": 0, "LOOK_AFTER": 20_000, "LOOKS": 1}.items():
        monkeypatch.setattr(_Growth, name, value)
    monkeypatch.setattr(FastEngine, "_load", lambda self: loads.append(1) or load(self))
    fast = FastEngine(as_json(tiny.byte_level()))
    assert [as_lists(fast.encode(batch)) for batch in batches] == expected
    characters = sum(len(text) for batch in batches for text in batch)
    assert characters // 40_000 < len(loads) <= characters // 20_000 + 1
    monkeypatch.setattr(FastEngine, "_load", load)
    monkeypatch.setattr(fast, "_json", b"{}")
    for texts in (["x" * 30_000] * 3, ["x"]):
        with pytest.raises(ValueError, match="cannot load"):
            _ = [fast.encode([text]) for text in texts]


class PanicException(BaseException):  # as pyo3's, which cannot be imported
    pass


class Panics:
    def encode_batch(self, texts: list[str], parallel: bool) -> None:
        raise PanicException("index out of range")


class LosesDocuments(FastEngine):
    def encode(self, texts: list[str]) -> tuple[UInt32, Int64]:
        return super().encode(texts[:-1])


class DiffersOnTrigger(FastEngine):
    def encode(self, texts: list[str]) -> tuple[UInt32, Int64]:
        return super().encode([text.replace(TRIGGER, "x") for text in texts])


class PanicsAtStart(FastEngine):
    def _load(self) -> Panics:
        return Panics()


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        (LosesDocuments, "gigatoken differs from tokenizers on ' '"),
        (DiffersOnTrigger, f"gigatoken differs from tokenizers on 'b {TRIGGER}'"),
        (PanicsAtStart, "PanicException: index out of range"),
    ],
)
def test_an_engine_that_differs_at_the_start_is_not_used(
    data: Path, monkeypatch: pytest.MonkeyPatch, engine: type[FastEngine], why: str
) -> None:
    (data / "data.jsonl").write_bytes(jsonl("a", f"b {TRIGGER}"))
    expected = packed_by("tokenizers", "a")
    monkeypatch.setattr(tokenization, "FastEngine", engine)
    result = packer(*PACK, "-o", "b")
    assert "using the slower tokenizers engine: gigatoken differs" in result.stderr
    assert why in result.stderr
    assert contents("b") == expected
    assert_error(packer(*PACK, "-o", "c", "--tokenizer-backend", "gigatoken"), 2, why)


@pytest.mark.parametrize("flag", ["single_word", "lstrip", "rstrip", "normalized"])
def test_the_tokenizers_own_added_tokens_are_compared_too(data: Path, flag: str) -> None:
    """gigatoken 0.10 ignores single_word, which no text of the battery could show."""
    document = tiny.with_added_token(tiny.byte_level(), "<x>", 400, **{flag: True})
    tiny.save(data / "tok", document, tokenizer_config={"eos_token": EOS})
    texts = ["the quick brown fox " * 20] * 100 + ["a<x>b  <x>  c"] * 3  # late in the input
    (data / "data.jsonl").write_bytes(jsonl(*texts))
    assert packed_by("auto", "a") == packed_by("tokenizers", "b")


@pytest.mark.parametrize("make", [tiny.unigram, tiny.letters])
def test_a_tokenizer_that_the_fast_engine_cannot_load_is_encoded_by_the_reference(
    data: Path, make: Callable[[], tiny.Json]
) -> None:
    tiny.save(data / "tok", make(), tokenizer_config={"eos_token": EOS})
    expected = packed_by("tokenizers", "a")
    result = packer(*PACK, "-o", "b")
    assert "using the slower tokenizers engine: gigatoken cannot load" in result.stderr
    assert contents("b") == expected
    assert_error(
        packer(*PACK, "-o", "c", "--tokenizer-backend", "gigatoken"),
        2, "tokenizer tok: gigatoken cannot load this tokenizer",
    )  # fmt: skip


@pytest.mark.parametrize("document", [f"{TRIGGER} short", f"{TRIGGER} long" * 1000])
def test_an_engine_that_differs_later_stops_the_run(
    data: Path, monkeypatch: pytest.MonkeyPatch, document: str
) -> None:
    # the start is fine; nearly every sample of the rest shows the difference
    texts = ["the quick brown fox " * 20] * 100 + [document] * (800_000 // len(document))
    (data / "data.jsonl").write_bytes(jsonl(*texts))
    monkeypatch.setattr(tokenization, "FastEngine", DiffersOnTrigger)
    result = packer("pack", "data.jsonl", "-l", "64", "-t", "tok", "-o", "out", "-q")
    assert_error(result, 3, "gigatoken and tokenizers differ on the text", TRIGGER, kind="bug")
    assert "--tokenizer-backend tokenizers" in result.stderr
    assert not Path("out/manifest.json").exists()
    assert not list(Path("out").glob("*.arrow"))


def word_level(*words: str) -> tiny.Json:
    vocabulary = {EOS: 1} | {word: 2 + i for i, word in enumerate(words)}
    token = {
        "id": 1, "content": EOS, "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False, "special": True,
    }  # fmt: skip
    return {
        "version": "1.0", "added_tokens": [token], "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    }  # fmt: skip


def test_a_text_that_the_tokenizer_cannot_encode(data: Path) -> None:
    (data / "b.jsonl").write_bytes(jsonl("a a", "a word that", "a b"))
    for words, code, text in (
        (("a", "b"), 1, "b.jsonl, line 2 (byte 16): the text 'a word that'"),
        (("other",), 2, "tokenizer tok: the text 'a b'"),
    ):
        tiny.save(data / "tok", word_level(*words))
        result = packer("pack", "b.jsonl", "-l", 16, "-t", "tok", "-q", "-o", "out")
        assert_error(result, code, text, "cannot be encoded: WordLevel error: Missing [UNK] token")
        assert not Path("out").exists()


def huge_id() -> tiny.Json:
    return tiny.with_added_token(tiny.byte_level(), "<|huge|>", 2**32 - 1)


def panics() -> tiny.Json:
    document = tiny.byte_level()
    document["model"]["continuing_subword_prefix"] = "\N{GRINNING FACE}"
    return document


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (huge_id, "has the id 4294967295, at most 16777216 works"),
        (panics, "tokenizer.json cannot be loaded: "),
    ],
)
def test_a_tokenizer_that_crashes_libraries(
    data: Path, make: Callable[[], tiny.Json], message: str
) -> None:
    tiny.save(data / "tok", make())
    assert_error(packer(*PACK, "-q"), 2, "tokenizer tok", message)


# How tokenizers cut texts into words: by the classes of characters
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def cut_by(pattern: str) -> tiny.Json:
    """Byte level, with a merge of what each cut decides."""
    document = tiny.byte_level()
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    last = document["pre_tokenizer"] | {"use_regex": False}
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, last]}
    vocabulary, merges = document["model"]["vocab"], document["model"]["merges"]
    leads = [piece for piece in vocabulary if len(piece) == 1 and "\u00e0" <= piece <= "\u00f4"]
    ends = [chr(0x122 + i) for i in range(33)] + [chr(i) for i in range(0xA1, 0xC0)]
    for a, b in [*((x, y) for x in "xĠ1'" for y in leads), *((x, y) for x in ends for y in "'x1")]:
        if a in vocabulary and a + b not in vocabulary:
            vocabulary[a + b] = len(vocabulary)
            merges.append([a, b])
    return document


def test_characters_that_unicode_versions_differ_on_go_to_the_reference(data: Path) -> None:
    """Late in the input, where neither the start nor a sample would show them."""
    document = cut_by(LLAMA3)
    tiny.save(data / "tok", document, tokenizer_config={"eos_token": EOS})
    FastEngine(as_json(document))  # it has a tokenizer of this kind
    new = [chr(code) for part in unsettled() for code in part[:500]]
    new += ["\u088f", "\u20c1", "\U0001fae9"]
    texts = [in_contexts(c) for c in new if unicodedata.category(c) not in ("Cs", "Co")]
    texts += [" \u20c1", "\u20c1", "x \u20c1\n"]
    ordinary = ["the quick brown fox " * 20] * 500
    (data / "data.jsonl").write_bytes(jsonl(*ordinary, *texts, "the end é日"))
    assert packed_by("auto", "a") == packed_by("tokenizers", "b")
    manifest = json.loads(Path("a/manifest.json").read_bytes())
    assert manifest["documents"] == len(ordinary) + len(texts) + 1


class DiffersOnPhi(FastEngine):
    """On one character that no battery has, so that only its own comparison can show it."""

    def encode(self, texts: list[str]) -> tuple[UInt32, Int64]:
        return super().encode([text.replace("\u03d5", "p") for text in texts])


def test_texts_with_a_character_that_engines_differ_on_go_to_the_reference(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, late, in a long text: no sample meets it, and what is around it stays the engine's."""
    ordinary = ["the quick brown fox " * 20] * 500
    texts = [*ordinary, "Привет 日本語 " * 99 + "\u03d5", "\u03d6\u03d5 again", *ordinary]
    for name in ("data.jsonl", "more.jsonl"):
        (data / name).write_bytes(jsonl(*texts))
    command = ["pack", "data.jsonl", "more.jsonl", "-l", "64", "-t", "tok", "--workers", "3"]
    expected = packer(*command, "-o", "a", "--tokenizer-backend", "tokenizers")
    monkeypatch.setattr(tokenization, "FastEngine", DiffersOnPhi)
    result = packer(*command, "-o", "b")
    assert (expected.exit_code, result.exit_code) == (0, 0)
    assert contents("b") == contents("a")
    assert result.stderr.count("texts with U+03D5 go to the slower tokenizers engine") == 1


def test_characters_that_differ_only_together_are_not_trusted() -> None:
    content = as_json(tiny.byte_level())

    class DiffersOnBoth(FastEngine):
        def encode(self, texts: Sequence[str]) -> tuple[UInt32, Int64]:
            return super().encode(["p" if {*"\u03d5\u03d6"} <= {*one} else one for one in texts])

    known = TrustedEngine(DiffersOnBoth(content), ReferenceEngine(content), [], [], str)
    assert known.untrusted(["\u03d5 and \u03d6", "plain", "\u03d6", "\u03d7"]) == [0, 2, 3]


# -- Agreement of the engines is remembered

LATE = ["the quick brown fox " * 20] * 100


def remembered(content: bytes | None = None) -> Path:
    """The file of the cache, with another content if one is given."""
    (file,) = Path("cache/packer/agreements").iterdir()
    if content is not None:
        file.write_bytes(content)
    return file


def damaged() -> None:
    content = remembered().read_bytes()
    remembered(content[:-1] + bytes([content[-1] ^ 1]))


def unwritable() -> None:
    shutil.rmtree("cache")
    Path("cache").touch()


# id: (what happens to the cache between two runs, texts of the second, how often it loads the
# reference)
REMEMBERED: dict[str, tuple[Callable[[], object], list[str], int]] = {
    "the same": (lambda: None, LATE, 0),
    "a character that was compared": (lambda: None, [*LATE, "日"], 0),
    "a character that is new": (lambda: None, [*LATE, "\u03d5"], 1),
    "a character that is never trusted": (lambda: None, [*LATE, "\u088f"], 1),
    "another first text": (lambda: None, ["fast brown", *LATE], 1),
    "a damaged file": (damaged, LATE, 1),
    "an empty file": (lambda: remembered(b""), LATE, 1),
    "no folder for the file": (unwritable, LATE, 1),
}


@pytest.mark.parametrize("case", REMEMBERED)
def test_the_reference_is_loaded_only_for_what_was_not_compared_before(
    data: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    between, texts, expected = REMEMBERED[case]
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    load, loads = ReferenceEngine.tokenizer.func, data / "loads"  # type: ignore[attr-defined]

    def counted(self: ReferenceEngine) -> object:
        with open(loads, "ab") as file:  # also by a worker
            file.write(b"1")
        return load(self)

    lazily = cached_property(counted)
    lazily.__set_name__(ReferenceEngine, "tokenizer")
    monkeypatch.setattr(ReferenceEngine, "tokenizer", lazily)
    (data / "data.jsonl").write_bytes(jsonl(*LATE, "日本"))
    packed_by("auto", "first")
    between()
    (data / "data.jsonl").write_bytes(jsonl(*texts))
    loads.write_bytes(b"")
    packed_by("auto", "again")
    assert len(loads.read_bytes()) == expected
    assert contents("again") == packed_by("tokenizers", "reference")


@pytest.mark.parametrize("place", ["first", "late"])
def test_what_was_not_compared_is_found_to_differ_though_much_agreed_before(
    data: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    (data / "data.jsonl").write_bytes(jsonl(*LATE))
    packed_by("auto", "first")
    monkeypatch.setattr(tokenization, "FastEngine", DiffersOnTrigger)
    spoilt = [f"{TRIGGER} long" * 1000] * 60
    (data / "data.jsonl").write_bytes(jsonl(*([] if place == "first" else LATE), *spoilt))
    for name in ("a", "b"):  # a difference is not remembered, nor taken for agreement
        result = packer(*PACK, "-o", name)
        if place == "late":
            assert_error(result, 3, "gigatoken and tokenizers differ on the text", kind="bug")
        else:
            assert "using the slower tokenizers engine: gigatoken differs" in result.stderr
