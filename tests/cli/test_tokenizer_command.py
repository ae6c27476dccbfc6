"""packer tokenizer, and the warning at every run, as far as they need no transformers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_tokenizers as tiny
from support import assert_error, jsonl, packer, packer_process, succeeds

REBUILT = {"eos_token": tiny.EOS, "tokenizer_class": "LlamaTokenizerFast"}


def test_what_it_says(folder: Path) -> None:
    tiny.save(folder / "tok", tiny.sentencepiece(), tokenizer_config=REBUILT)
    result = succeeds("tokenizer", "tok", "--json")
    report = json.loads(result.stdout)
    assert (report["eos"], report["special_tokens"], report["compared"]) == (tiny.EOS, 3, [])
    assert "transformers 5 builds a LlamaTokenizer otherwise" in report["warning"]
    assert "eos: </s>" in packer("tokenizer", "tok").stdout


@pytest.mark.parametrize(
    ("document", "name", "warned"),
    [
        (tiny.sentencepiece(), "LlamaTokenizer", True),
        (tiny.metaspace(), "LlamaTokenizer", False),
        (tiny.byte_level(), "GPT2Tokenizer", False),
        (tiny.byte_level() | {"normalizer": {"type": "NFC"}}, "GPT2TokenizerFast", True),
        (tiny.sentencepiece(), "PreTrainedTokenizerFast", False),
        (tiny.sentencepiece(), None, False),
    ],
)
def test_every_run_warns_of_a_tokenizer_that_transformers_builds_otherwise(
    folder: Path, document: tiny.Json, name: str | None, warned: bool
) -> None:
    config = {"eos_token": tiny.EOS, "tokenizer_class": name}
    tiny.save(folder / "tok", document, tokenizer_config=config)
    Path("data.jsonl").write_bytes(jsonl("the one"))
    result = succeeds("pack", "data.jsonl", "-l", 16, "-t", "tok", "-o", "out")
    assert ("warning: transformers 5 builds" in result.stderr) == warned


def test_terminal_escapes_of_a_tokenizer_are_not_printed(folder: Path) -> None:
    special = "</s>\x1b]0;title\x07\n"
    tiny.save(folder / "tok", tiny.sentencepiece(), tokenizer_config={"eos_token": special})
    shown = packer("tokenizer", "tok")
    assert "\x1b" not in shown.stdout + shown.stderr
    assert "\x07" not in shown.stdout + shown.stderr


def test_an_error_in_rust_has_no_backtrace(folder: Path) -> None:
    """Whatever the environment asks of Rust."""
    Path("tok").mkdir()
    broken = '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["x y"]}}'
    Path("tok/tokenizer.json").write_text(broken)
    Path("a.jsonl").write_bytes(jsonl("a"))
    command = ("pack", "a.jsonl", "-t", "tok", "-l", 16)
    done = packer_process(*command, env=os.environ | {"RUST_BACKTRACE": "1"})
    assert done.returncode in (1, 2)
    said = done.stderr.decode()
    assert [line.split(":")[0] for line in said.splitlines()] == ["error", "tip"], said
    assert "backtrace" not in said


def test_an_error_that_says_nothing_is_told_by_its_kind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: object) -> None:
        raise KeyError

    auto = SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=fail))
    monkeypatch.setitem(sys.modules, "transformers", auto)
    tiny.save(folder / "tok", tiny.byte_level())
    assert_error(packer("tokenizer", "tok", "--check"), 2, "cannot load it: KeyError")
