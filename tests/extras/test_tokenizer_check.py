"""packer tokenizer --check against the real AutoTokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_tokenizers as tiny
from chats import CHATML, assistant, chat, chat_tokenizer, user, write
from support import jsonl, packer, succeeds

SHARED = Path(__file__).resolve().parents[3] / "shared" / "tokenizers"
TIP = '"tokenizer_class": "PreTrainedTokenizerFast"'


@pytest.mark.parametrize("make", [tiny.byte_level, tiny.gemma, tiny.sentencepiece, tiny.metaspace])
def test_a_tokenizer_that_is_loaded_as_it_is(folder: Path, make: Callable[[], tiny.Json]) -> None:
    config = {"eos_token": tiny.EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    added = {"<|x|>": len(make()["model"]["vocab"])}  # of which tokenizer.json knows nothing
    tiny.save(folder / "tok", make(), tokenizer_config=config, added_tokens=added)
    Path("data.jsonl").write_bytes(jsonl("the one<|x|>", "a</s>b"))
    result = succeeds("tokenizer", "tok", "--check", "data.jsonl", "--json")
    report = json.loads(result.stdout)
    assert report["warning"] is None
    assert [one["different"] for one in report["compared"]] == [0, 0]
    assert report["compared"][-1]["texts"] == 2


def test_a_tokenizer_that_is_built_otherwise(folder: Path) -> None:
    config = {"eos_token": tiny.EOS, "tokenizer_class": "LlamaTokenizer"}
    tokenizer = chat_tokenizer(folder / "tok", CHATML, tiny.sentencepiece(), **config)
    write([chat(user("a <s>b"), assistant("the"))])
    result = packer("tokenizer", tokenizer, "--check", "data.jsonl")
    assert result.exit_code == 1
    assert "AutoTokenizer gives other tokens than its tokenizer.json\ntip: " in result.stderr
    assert TIP in result.stderr
    assert "data.jsonl: 1 of 1 texts differ from AutoTokenizer" in result.stdout
    packed = succeeds("pack", "data.jsonl", "-l", 256, "-t", tokenizer, "-o", "out")
    assert "transformers 5 builds a LlamaTokenizer otherwise" in packed.stderr


@pytest.mark.parametrize("name", ["gpt2", "llama3_1", "mistral_v3", "qwen3"])
def test_what_is_known_without_transformers_is_what_it_does(name: str) -> None:
    if not (SHARED / name).is_dir():
        pytest.skip(f"{SHARED / name} is not there")
    result = packer("tokenizer", SHARED / name, "--check", "--json")
    report = json.loads(result.stdout)
    assert bool(report["warning"]) == any(one["different"] for one in report["compared"])
    assert result.exit_code == (1 if report["warning"] else 0)
