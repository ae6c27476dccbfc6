"""The engines: equal wherever both work, and the reference wherever they do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tiny_tokenizers as tiny
from engine_pairs import TRIGGER, as_json, as_lists, both_engines, packed_by
from hypothesis import given
from hypothesis import strategies as st
from support import assert_error, contents, jsonl, packer, shard_of
from tiny_tokenizers import EOS

from packer_cli.errors import InternalError, UsageError
from packer_cli.records import Int64, UInt32
from packer_cli.tokenization import engines, renewed
from packer_cli.tokenization import tokenizer as tokenization
from packer_cli.tokenization.agreement import BATTERY, differs_at_start
from packer_cli.tokenization.engines import BytesEngine, FastEngine
from packer_cli.tokenization.locate import locate
from packer_cli.tokenization.tokenizer import load_tokenizer

BOTH = [pytest.param(make, id=make.__name__) for make in (tiny.byte_level, tiny.sentencepiece)]

# text, with what tokenizers treat specially overrepresented
TEXTS = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"])),
        st.text(st.sampled_from("aeht '.12\n\t\r é日👍\u0301\u2028\u00a0▁Ġ")),
        st.lists(st.sampled_from([EOS, "<s>", "the", " ", "\n", "<0x41>"])).map("".join),
    ),
    max_size=8,
)


@pytest.mark.parametrize("make", BOTH)
@given(texts=TEXTS)
def test_fast_and_reference_are_equal(make: Callable[[], tiny.Json], texts: list[str]) -> None:
    fast, reference = both_engines(make)
    assert as_lists(fast.encode(texts)) == as_lists(reference.encode(texts))


@pytest.mark.parametrize("make", BOTH)
def test_the_battery(make: Callable[[], tiny.Json]) -> None:
    fast, reference = both_engines(make)
    expected = [reference.tokenizer.encode(t, add_special_tokens=False).ids for t in BATTERY]
    assert as_lists(reference.encode(BATTERY)) == expected
    assert as_lists(fast.encode(BATTERY)) == expected
    assert differs_at_start(fast, reference, [EOS], ["any document"]) is None


@given(texts=TEXTS)
def test_bytes_are_utf8(texts: list[str]) -> None:
    assert as_lists(BytesEngine().encode(texts)) == [list(text.encode()) for text in texts]


@pytest.mark.parametrize("limit", [1, 3, 10])
def test_the_reference_cuts_batches_without_a_trace(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    reference = both_engines(tiny.byte_level)[1]
    texts = ["", "a", "", "the quick", "b", "c" * 50, ""]
    expected = as_lists(reference.encode(texts))
    monkeypatch.setattr(engines, "_REFERENCE_BATCH_CHARACTERS", limit)
    assert as_lists(reference.encode(texts)) == expected
    assert len(expected) == len(texts)


def test_renewal_of_the_fast_engine_changes_nothing_in_any_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = [[text, f"{i} {text}"] for i in range(20) for text in BATTERY]
    fast = FastEngine(as_json(tiny.byte_level()))
    expected = [as_lists(fast.encode(batch)) for batch in batches]
    loads = []
    load = FastEngine._load
    monkeypatch.setattr(renewed, "resident", lambda: None)
    monkeypatch.setattr(renewed, "_MOST_USED", 20_000)
    monkeypatch.setattr(renewed, "_LOOK_AFTER", 0)
    monkeypatch.setattr(FastEngine, "_load", lambda self: loads.append(1) or load(self))
    fast = FastEngine(as_json(tiny.byte_level()))
    with ThreadPoolExecutor(4) as pool:
        encoded = list(pool.map(lambda batch: as_lists(fast.encode(batch)), batches))
    assert encoded == expected
    characters = sum(len(text) for batch in batches for text in batch)
    assert characters // 40_000 < len(loads) <= characters // 20_000 + 1


class DiffersAtStart(FastEngine):
    def encode(self, texts: list[str]) -> tuple[UInt32, Int64]:
        ids, offsets = super().encode(texts)
        return ids ^ np.uint32(1), offsets


class FailsAtStart(FastEngine):
    def encode(self, texts: list[str]) -> tuple[UInt32, Int64]:
        raise RuntimeError("no luck")


class LosesDocuments(FastEngine):
    def encode(self, texts: list[str]) -> tuple[UInt32, Int64]:
        return super().encode(texts[:-1])


class DiffersOnTrigger(FastEngine):
    def encode(self, texts: list[str]) -> tuple[UInt32, Int64]:
        return super().encode([text.replace(TRIGGER, "x") for text in texts])


def test_output_bytes_do_not_depend_on_the_engine(data: Path) -> None:
    expected = packed_by("tokenizers", "a")
    assert packed_by("gigatoken", "b") == expected
    assert packed_by("auto", "c") == expected
    assert {"manifest.json", shard_of("a").name} < expected.keys()


@pytest.mark.parametrize("engine", [DiffersAtStart, FailsAtStart, LosesDocuments])
def test_an_engine_that_differs_at_the_start_is_not_used(
    data: Path, monkeypatch: pytest.MonkeyPatch, engine: type[FastEngine]
) -> None:
    expected = packed_by("tokenizers", "a")
    monkeypatch.setattr(tokenization, "FastEngine", engine)
    assert packed_by("auto", "b") == expected
    reasons: list[str] = []
    load_tokenizer(locate("tok"), notify=reasons.append).close()
    (reason,) = reasons
    assert reason.startswith("using the slower tokenizers engine: gigatoken differs")
    with pytest.raises(UsageError, match="gigatoken differs from tokenizers"):
        load_tokenizer(locate("tok"), backend="gigatoken")


def test_an_engine_that_differs_on_the_first_documents_is_not_used(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (data / "data.jsonl").write_bytes(jsonl("a", f"b {TRIGGER}"))
    expected = packed_by("tokenizers", "a")
    monkeypatch.setattr(tokenization, "FastEngine", DiffersOnTrigger)
    assert packed_by("auto", "b") == expected


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
    command = ["pack", "data.jsonl", "-l", "64", "-t", "tok", "-o", "b"]
    result = packer(*command)
    assert result.exit_code == 0
    assert "using the slower tokenizers engine: gigatoken cannot load" in result.stderr
    assert contents("b") == expected
    assert_error(
        packer(*command, "--overwrite", "--tokenizer-backend", "gigatoken"),
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


def test_a_difference_in_the_last_batch_is_found_at_the_end(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenization, "FastEngine", DiffersOnTrigger)
    tokenizer = load_tokenizer(locate("tok"))
    tokenizer.encode(["fine"])
    tokenizer.finish()
    tokenizer.encode([TRIGGER])  # answered while the check still runs
    with pytest.raises(InternalError, match=f"differ on the text .{TRIGGER}"):
        tokenizer.finish()
    tokenizer.close()


def test_a_renewal_that_fails_fails_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = FastEngine(json.dumps(tiny.byte_level()).encode())
    monkeypatch.setattr(renewed, "resident", lambda: None)
    monkeypatch.setattr(renewed, "_MOST_USED", 5)
    monkeypatch.setattr(fast, "_json", b"{}")
    for text in ("longer than five", "x"):
        with pytest.raises(ValueError, match="cannot load"):
            fast.encode([text])


def test_a_panic_of_the_fast_engine_is_an_error(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicException(BaseException):  # as pyo3's, which cannot be imported
        pass

    class Panics:
        def encode_batch(self, texts: list[str], parallel: bool) -> None:
            raise PanicException("index out of range")

    monkeypatch.setattr(FastEngine, "_load", lambda self: Panics())
    result = packer("pack", "data.jsonl", "-l", 16, "-t", "tok", "-o", "out")
    assert result.exit_code == 0
    assert "using the slower tokenizers engine" in result.stderr
    assert "PanicException: index out of range" in result.stderr


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
    for words, text in (
        (("a", "b"), "'a word that'"),
        (("other",), "tokenizer tok: the text 'a b'"),
    ):
        tiny.save(data / "tok", word_level(*words))
        result = packer("pack", "b.jsonl", "-l", 16, "-t", "tok", "-q", "-o", "out")
        assert_error(result, 2, text, "cannot be encoded: WordLevel error: Missing [UNK] token")
        assert not Path("out").exists()
